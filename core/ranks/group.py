"""The ranks that save and restore together: which of them this process is, and where they agree."""

from __future__ import annotations

import itertools
import socket
from typing import TYPE_CHECKING

from penstock.core.ranks.round import RankPlace

if TYPE_CHECKING:
    from penstock.core.abc import Coordination


class RankGroup:
    """The ranks of one checkpointer. Thread-safe.

    Every save and every restore takes a number, so all ranks have to call them in the same order.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        coordination: Coordination,
        *,
        timeout_s: float = 60.0,
        host: str = "",
    ) -> None:
        """Join the ranks; nothing is sent.

        Args:
            rank: The number of this rank, from 0.
            world_size: How many there are.
            coordination: Where they agree.
            timeout_s: A rank that makes no progress for this long counts as dead.
            host: The name of this machine, for messages; default: what it says itself.
        """
        self.place = RankPlace(rank, world_size, host or socket.gethostname())
        self.coordination = coordination
        self.timeout_s = timeout_s
        self._numbers = itertools.count()

    def next_number(self) -> int:
        """Return the number of the next save or restore."""
        return next(self._numbers)

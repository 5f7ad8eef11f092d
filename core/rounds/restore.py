"""The round of a restore on one rank, sans-IO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.core.rounds.round import Round
from penstock.core.rounds.table import RESTORE_OTHERS, RESTORE_RANK_0

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.core.rounds.posts import Kind
    from penstock.core.rounds.round import RankPlace


class RestoreRound(Round):
    """The round of a restore: all ranks have restored one checkpoint, or all raise.

    A rank that returns knows that every rank has restored what rank 0 chose. A rank that cannot
    learn the decision raises, though the others may have returned: that cannot be avoided by any
    protocol. It is told apart (`Phase.UNKNOWN`).
    """

    kind: Kind = "restore"

    def __init__(
        self,
        place: RankPlace,
        number: int,
        *,
        timeout_s: float,
        expects: Callable[[Mapping[str, Any]], str] = lambda _: "",
        called_s: float | None = None,
    ) -> None:
        """Prepare the round, as `Round` says."""
        table = RESTORE_RANK_0 if place.rank == 0 else RESTORE_OTHERS
        super().__init__(
            place, number, table=table, timeout_s=timeout_s, expects=expects, called_s=called_s
        )

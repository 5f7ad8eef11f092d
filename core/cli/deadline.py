"""The time limit of a command (`--timeout`), which holds also where a store hangs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from penstock.core.concurrency.watchdog import Deadline, call_with_deadline
from penstock.core.errors import StorageTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.concurrency.timing import Timing

T = TypeVar("T")


class CommandDeadline(Deadline):
    """Limits the time of a command, counted from its construction."""

    def __init__(self, timing: Timing, timeout_s: float | None) -> None:
        """Begin to count `timeout_s` seconds; None sets no limit."""
        super().__init__(timeout_s, timing.clock)
        self._timing = timing

    def ask(self, what: str, call: Callable[[], T], *, ending: bool = False) -> T:
        """Return what `call` returns, if it returns before the deadline.

        Args:
            what: Names the call in the message of an error.
            call: The call, made in a thread of its own where there is a limit.
            ending: Allow `Timing.command_end_s` more: cleaning up begins when the time is over.

        Raises:
            StorageTimeoutError: The deadline passed first; the thread of `call` is left behind.
        """
        if self.limit_s == math.inf:
            return call()

        def late() -> StorageTimeoutError:
            msg = f"{what} did not end within the {self.limit_s:g} s of --timeout"
            return StorageTimeoutError(msg)

        timing = self._timing
        extra_s = timing.command_end_s if ending else 0.0
        left = Deadline(max(0.0, self.limit_s + extra_s - self.taken_s()), timing.clock)
        return call_with_deadline("ask", call, left, late, timing=timing, patience_s=0.0)

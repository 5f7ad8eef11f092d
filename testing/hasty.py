"""Short waits and shifted clocks, so that tests neither sleep nor patch constants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.concurrency.timing import Clock, Timing, current_timing, timing_in_force

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FAST", "ShiftedClock", "current_timing", "timing_in_force"]

FAST = Timing(
    poll_s=0.02,
    preemption_poll_s=0.02,
    request_retry_first_s=0.01,
    request_retry_most_s=0.05,
    tier_full_poll_s=0.01,
    tier_reopen_s=0.0,
    drain_retry_first_s=0.01,
    drain_retry_most_s=0.05,
    deletion_s=0.05,
)
"""Polls often and retries soon. Deadlines keep their defaults, so that no test fails on a slow
machine."""


class ShiftedClock(Clock):
    """This machine's clocks, all ahead by the same amount.

    Args:
        ahead_s: The shift in seconds, or a function that returns the shift at each call.
    """

    def __init__(self, ahead_s: float | Callable[[], float] = 0.0) -> None:
        self.ahead_s = ahead_s

    def _now_ahead_s(self) -> float:
        return self.ahead_s() if callable(self.ahead_s) else self.ahead_s

    def monotonic_s(self) -> float:
        """Return the machine's monotonic time, shifted."""
        return super().monotonic_s() + self._now_ahead_s()

    def boot_s(self) -> float:
        """Return the machine's time since boot, shifted."""
        return super().boot_s() + self._now_ahead_s()

    def wall_s(self) -> float:
        """Return the machine's wall-clock time, shifted."""
        return super().wall_s() + self._now_ahead_s()

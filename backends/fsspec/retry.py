"""Retries with exponential backoff and full jitter, bounded in number and in time."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from penstock.core.abc import Deadline, Timing, current_timing

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retry:
    """Runs an operation until it succeeds, fails for good, or has used up its attempts or time.

    Full jitter (a random time below the exponential bound) keeps the ranks of a large job from
    coming back all at once; after Brooker, "Exponential Backoff And Jitter", AWS 2015.

    Attributes:
        attempts: The most attempts.
        total_s: The time after the first attempt at which the last one may begin.
        random: Draws the pauses, from the system: forked ranks must not draw the same ones.
        timing: The bounds of the pauses between attempts.
    """

    attempts: int
    total_s: float
    random: random.Random = field(default_factory=random.SystemRandom)
    timing: Timing = field(default_factory=current_timing)

    def run(
        self,
        operation: Callable[[], T],
        *,
        transient: Callable[[Exception], bool],
        stop: threading.Event | None = None,
    ) -> T:
        """Return the result of the first attempt that succeeds.

        Args:
            operation: What to run; must be safe to repeat after an attempt with unknown outcome.
            transient: Returns whether an error is worth another attempt.
            stop: If another thread sets it, no further attempt begins.

        Raises:
            Exception: The error of the last attempt.
        """
        stop = stop or threading.Event()
        timing = self.timing
        deadline = Deadline(self.total_s, timing.clock)
        for attempt in range(1, self.attempts + 1):
            try:
                return operation()
            except Exception as error:
                if attempt == self.attempts or not transient(error):
                    raise
                most_s = timing.request_retry_first_s * 2 ** (attempt - 1)
                delay_s = self.random.uniform(0, min(most_s, timing.request_retry_most_s))
                # A wait that `stop` ends: an abort must not last as long as the pauses.
                if deadline.left_s() < delay_s or stop.wait(delay_s):
                    raise
        msg = "a Retry needs at least one attempt"
        raise AssertionError(msg)

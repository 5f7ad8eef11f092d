"""Tries again what is safe to try again: exponential back-off, full jitter, bounded twice."""

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
    """How often, and for how long, an operation is tried.

    Full jitter (a random time below the exponential bound) keeps the ranks of a large job from
    coming back all at once; after Brooker, "Exponential Backoff And Jitter", AWS 2015.

    Attributes:
        attempts: At most.
        total_s: Nothing is begun again later than this after the first attempt.
        timing: How long the pauses between attempts are.
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
        """The result of the first attempt that has one.

        Args:
            operation: Must be safe to repeat whatever became of the attempt before.
            transient: Whether an error is worth another attempt.
            stop: Set by another thread: no further attempt.

        Raises:
            Exception: What the last attempt raised.
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
                if deadline.left_s() < delay_s or stop.wait(delay_s):
                    raise
        msg = "a Retry needs at least one attempt"
        raise AssertionError(msg)

"""Calls tiers that may hang, on behalf of callers that must not hang."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, TypeVar

from penstock.core.catalog.catalog import Catalog
from penstock.core.concurrency.watchdog import Deadline, call_with_deadline
from penstock.core.errors import StorageError, StorageTimeoutError
from penstock.core.format.records import parse_commit_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc import Tier
    from penstock.core.concurrency.workers import Workers

log = logging.getLogger("penstock")

T = TypeVar("T")


class NotAskedError(StorageTimeoutError):
    """Signals a call that was not made because the tier recently did not answer."""


class Outages:
    """Calls tiers with a deadline, and pauses calls to a tier that hung or was slow to fail.

    The training thread makes such calls. Without the pause, a hanging tier would delay each save by
    the deadline.
    """

    def __init__(self, tiers: Sequence[Tier], workers: Workers, limit_s: float) -> None:
        """Limit each call to `limit_s` seconds."""
        self._tiers = tiers
        self._workers = workers
        self._limit_s = limit_s
        # No lock: only single operations change these two, and the interpreter makes them atomic.
        self._pauses: dict[int, tuple[float, float]] = {}  # the end of each pause, and its length
        self._warned_s: dict[int, dict[str, float]] = {}  # the time of each warning, by its reason

    def ask(self, number: int, call: Callable[[], T], *, despite_pause: bool = False) -> T:
        """Return the result of `call`; start a pause if the call hangs or is slow to fail.

        Args:
            number: The number of the tier that `call` contacts.
            call: A call of the tier's backend. It runs on its own thread, which is abandoned if it
                hangs.
            despite_pause: Make the call even during a pause.

        Raises:
            NotAskedError: Calls to this tier are paused.
            StorageError: The tier does not answer.
        """
        timing = self._workers.timing
        if not despite_pause and self._is_paused(number):
            msg = "it did not answer a while ago, so calls to it are paused"
            raise NotAskedError(msg)

        def late() -> StorageTimeoutError:
            return StorageTimeoutError(f"no answer for {self._limit_s:g} s")

        deadline = Deadline(self._limit_s, timing.clock)
        try:
            return call_with_deadline("ask", call, deadline, late, timing=timing, patience_s=0.0)
        except StorageError:
            # A quick error costs the caller no time, so the next save may ask again.
            if deadline.taken_s() > min(timing.tier_quick_error_s, self._limit_s):
                self._begin_pause(number)
            raise

    def is_any_paused(self) -> bool:
        """Return whether calls to any tier are paused now."""
        return any(map(self._is_paused, list(self._pauses)))

    def warn(self, number: int, error: StorageError) -> None:
        """Log that a tier does not answer: each reason once, and again after `repeat_log_s`."""
        if isinstance(error, NotAskedError):  # the reason was logged when the pause began
            return
        warned_s = self._warned_s.setdefault(number, {})
        timing = self._workers.timing
        now_s = timing.clock.monotonic_s()
        if now_s - warned_s.get(str(error), -math.inf) >= timing.repeat_log_s:
            warned_s[str(error)] = now_s
            name = self._tiers[number].name
            log.warning("tier %s does not answer, so it is not used now: %s", name, str(error))

    def end(self, number: int) -> None:
        """End the outage of a tier: resume its calls, and log its next error."""
        self._warned_s.pop(number, None)
        self._pauses.pop(number, None)

    def entries(self, *, strict: bool) -> dict[int, list[str]]:
        """Return `Catalog.entries` of all tiers that answer; warn about the others.

        Raises:
            StorageError: No tier answers; with `strict`, at least one does not answer.
        """
        names: dict[int, set[str]] = {}
        failure: StorageError | None = None
        answers = 0
        for number, tier in enumerate(self._tiers):
            try:
                entries = self.ask(number, Catalog(tier.backend).entries, despite_pause=strict)
            except StorageError as error:
                failure = error
                self.warn(number, error)
                continue
            self.end(number)
            answers += 1
            for step, records in entries.items():
                names.setdefault(step, set()).update(records)
        if failure is not None and (strict or not answers):
            raise failure
        return {step: sorted(names[step], key=_generation) for step in sorted(names)}

    def _is_paused(self, number: int) -> bool:
        until_s, _ = self._pauses.get(number, (-math.inf, 0.0))
        return self._workers.timing.clock.monotonic_s() < until_s

    def _begin_pause(self, number: int) -> None:
        timing = self._workers.timing
        _, before_s = self._pauses.get(number, (0.0, 0.0))
        pause_s = min(2 * before_s, timing.tier_rest_most_s) or timing.tier_rest_first_s
        self._pauses[number] = timing.clock.monotonic_s() + pause_s, pause_s


def _generation(name: str) -> int:
    parsed = parse_commit_name(name)
    return -1 if parsed is None else parsed[1]

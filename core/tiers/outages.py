"""Asks tiers that may hang, for who must not."""

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
    """A tier did not answer a while ago, and is not asked again yet."""


class Answers:
    """Asks tiers from the thread that trains, which must not hang where one of them does."""

    def __init__(self, workers: Workers, limit_s: float) -> None:
        self._workers = workers
        self._limit_s = limit_s
        self._silent: dict[int, tuple[float, float]] = {}  # until when, and for how long
        self._said_s: dict[int, dict[str, float]] = {}

    def ask(self, number: int, call: Callable[[], T], *, silent_too: bool = False) -> T:
        """What `call` gives; one that hangs, or took long to fail, is left alone for a while.

        Args:
            number: Of the tier.
            call: What it is asked for.
            silent_too: Ask it though it is left alone.

        Raises:
            NotAskedError: Tier `number` is left alone.
            StorageError: It does not answer.
        """
        timing = self._workers.timing
        if not silent_too and timing.clock.monotonic_s() < self._silent.get(number, (0.0, 0.0))[0]:
            msg = "it did not answer a while ago, and is not asked again yet"
            raise NotAskedError(msg)

        def late() -> StorageTimeoutError:
            return StorageTimeoutError(f"no answer for {self._limit_s:g} s")

        deadline = Deadline(self._limit_s, timing.clock)
        try:
            return call_with_deadline("ask", call, deadline, late, timing=timing, patience_s=0.0)
        except StorageError:
            if deadline.taken_s() > min(timing.tier_quick_error_s, self._limit_s):
                self._leave_alone(number)
            raise

    def is_any_silent(self) -> bool:
        """Whether a tier is left alone at the moment, since it did not answer."""
        now_s = self._workers.timing.clock.monotonic_s()
        return any(now_s < until_s for until_s, _ in self._silent.values())

    def _leave_alone(self, number: int) -> None:
        timing = self._workers.timing
        _, before_s = self._silent.get(number, (0.0, 0.0))
        rest_s = min(2 * before_s, timing.tier_rest_most_s) or timing.tier_rest_first_s
        self._silent[number] = timing.clock.monotonic_s() + rest_s, rest_s

    def missed(self, number: int, name: str, error: StorageError) -> None:
        """Warn that tier `number` does not answer: of each reason once, then every ten minutes."""
        if isinstance(error, NotAskedError):  # no news
            return
        said_s = self._said_s.setdefault(number, {})
        timing = self._workers.timing
        now_s = timing.clock.monotonic_s()
        if now_s - said_s.get(str(error), -math.inf) >= timing.repeat_log_s:
            said_s[str(error)] = now_s
            log.warning("tier %s does not answer, going on without it: %s", name, str(error))

    def answered(self, number: int) -> None:
        """The next outage of tier `number` is news, and it is asked as ever."""
        self._said_s.pop(number, None)
        self._silent.pop(number, None)


def known_entries(tiers: Sequence[Tier], answers: Answers, *, strict: bool) -> dict[int, list[str]]:
    """As `Catalog.entries`, of all tiers that answer; warns of those that do not.

    For who is about to save: an outage of one tier must not stop it.

    Raises:
        StorageError: No tier answers, or (`strict`) one does not.
    """
    names: dict[int, set[str]] = {}
    failure: StorageError | None = None
    count = 0
    for number, tier in enumerate(tiers):
        try:
            found = answers.ask(number, Catalog(tier.backend).entries, silent_too=strict)
        except StorageError as error:
            failure = error
            answers.missed(number, tier.name, error)
            continue
        answers.answered(number)
        count += 1
        for step, some in found.items():
            names.setdefault(step, set()).update(some)
    if failure is not None and (strict or not count):
        raise failure
    return {step: sorted(names[step], key=_generation) for step in sorted(names)}


def _generation(name: str) -> int:
    parsed = parse_commit_name(name)
    return -1 if parsed is None else parsed[1]

"""Conducts a round on a thread of its own: carries out what it asks of the store of the job."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.core.concurrency.timing import SYSTEM_CLOCK
from penstock.core.concurrency.watchdog import spawn
from penstock.core.errors import CoordinationError
from penstock.core.rounds.operations import Answer, Decide, Post, Read, Rest, WaitFor

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from penstock.core.abc import Coordination
    from penstock.core.concurrency.timing import Clock
    from penstock.core.rounds.operations import Operation
    from penstock.core.rounds.round import Round
    from penstock.core.rounds.table import Step

T = TypeVar("T")
log = logging.getLogger("penstock")


class Conductor:
    """A round under way on this rank. Any thread may call its methods, which talk to no other rank.

    Training never waits for others here: hooks and fences only call `tell`, which takes a lock for
    microseconds.
    """

    def __init__(
        self, round_: Round, coordination: Coordination, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Prepare; `start` begins.

        Args:
            round_: The round; from now on only `tell` may touch it.
            coordination: Where the ranks agree. Its calls should end within a quarter of the
                round's time-out, so that a store that hangs is noticed in time.
            clock: The clock of the time-outs.
        """
        self._round = round_
        self._coordination = coordination
        self._clock = clock
        self._changed = threading.Condition()  # guards `_round` and all below
        self._told = False
        self._over = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start the thread, which ends with the round."""
        self._thread = spawn("ranks", self._run)

    def tell(self, what: Callable[[Round], T]) -> T:
        """Call `what` with the round, while nobody else uses it; the others soon learn of it."""
        with self._changed:
            result = what(self._round)
            self._told = True
            self._changed.notify_all()
            return result

    def moved(self, done: int, total: int) -> None:
        """Note progress; the next beat tells the others."""
        with self._changed:
            self._round.moved(done, total)

    def wait_all_here(self, timeout_s: float) -> bool:
        """Wait until rank 0 has heard of all ranks, or has something to do; return whether.

        Raises:
            BaseException: As with `next_step`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._round.all_here or self._has_news(), timeout_s)
            if self._error is not None:
                raise self._error
            return self._round.all_here

    def next_step(self, timeout_s: float | None = None) -> Step | None:
        """Wait for what this rank has to do next.

        Returns:
            The step; None after `timeout_s`.

        Raises:
            BaseException: A bug ended the thread. Nothing may be published or deleted then.
        """
        with self._changed:
            self._changed.wait_for(self._has_news, timeout_s)
            if self._round.steps:
                return self._round.steps.popleft()
            if self._error is not None:
                raise self._error
            return None

    @property
    def has_news(self) -> bool:
        """Whether this rank has something to do, or the round is over."""
        with self._changed:
            return self._has_news()

    def wait_over(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the thread, which posts all that others may need; return whether."""
        assert self._thread is not None
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _has_news(self) -> bool:
        return bool(self._round.steps) or self._over

    def _run(self) -> None:
        try:
            operations = self._round.operations(self._clock.monotonic_s())
            answer: Answer | None = None
            while True:
                operation = self._advance(operations, answer)
                if operation is None:
                    break
                answer = self._carry_out(operation)
        except BaseException as error:  # `next_step` raises it
            log.exception("the round %d of the ranks ended", self._round.number)
            self._error = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _advance(
        self, operations: Generator[Operation, Answer, None], answer: Answer | None
    ) -> Operation | None:
        with self._changed:
            try:
                return next(operations) if answer is None else operations.send(answer)
            except StopIteration:
                return None
            finally:
                self._changed.notify_all()

    def _carry_out(self, operation: Operation) -> Answer:
        value: Any = None
        error: CoordinationError | None = None
        try:
            match operation:
                case Post(key, data):
                    self._coordination.post(key, data)
                case Read(keys):
                    value = self._coordination.read(keys)
                case Decide(key, data):
                    value = self._coordination.decide(key, data)
                case WaitFor(key, timeout_s):
                    value = self._coordination.wait(key, timeout_s)
                case Rest(timeout_s):
                    self._rest(timeout_s)
        except CoordinationError as failure:
            log.debug("the ranks' %s: %s", type(operation).__name__, str(failure))
            error = failure
        return Answer(self._clock.monotonic_s(), value, error)

    def _rest(self, timeout_s: float) -> None:
        """Wait for the time, or until the engine tells something."""
        with self._changed:
            self._changed.wait_for(lambda: self._told, timeout_s)
            self._told = False

"""Runs one rank's part in a round: a thread carries out the operations on the job's store."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.core.concurrency.watchdog import spawn
from penstock.core.errors import CoordinationError
from penstock.core.rounds.round import Answer, Decide, Post, Read, Rest, WaitFor

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from penstock.core.errors import RankError
    from penstock.core.ranks.group import RankGroup
    from penstock.core.rounds.round import Operation, Round
    from penstock.core.rounds.table import Step

T = TypeVar("T")
log = logging.getLogger("penstock")


R = TypeVar("R", bound="Round")


class RankSession(Generic[R]):
    """A round in progress on this rank. Any thread may call its methods.

    Training never waits for other ranks here: hooks and fences only call `tell`, which holds a lock
    for microseconds.
    """

    def __init__(self, group: RankGroup, round_: R) -> None:
        """Prepare; `start` begins.

        Args:
            group: The ranks. A call to their store should end within a quarter of the round's
                timeout, so that a hanging store is noticed in time.
            round_: The round; from now on only `tell` may change it. A finished round no longer
                changes and may be read without the lock.
        """
        self.group = group
        self.round = round_
        self._changed = threading.Condition()  # guards `round` and all below
        self._told = False
        self._over = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start the thread, which ends with the round."""
        self._thread = spawn("ranks", self._run)

    def tell(self, what: Callable[[R], T]) -> T:
        """Call `what` with the round under the lock, and wake the thread that posts changes."""
        with self._changed:
            result = what(self.round)
            self._told = True
            self._changed.notify_all()
            return result

    def moved(self, done: int, total: int) -> None:
        """Count progress; the next heartbeat reports it to the others."""
        with self._changed:
            self.round.moved(done, total)

    def wait_all_here(self, timeout_s: float) -> bool:
        """Wait until rank 0 has heard from all ranks, or has a step to do.

        Returns:
            Whether it has heard from all ranks.

        Raises:
            BaseException: As in `next_step`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.round.others.all_here or self._has_news(), timeout_s
            )
            if self._error is not None:
                raise self._error
            return self.round.others.all_here

    def next_step(self, timeout_s: float | None = None) -> Step | None:
        """Wait for the next step of this rank.

        Returns:
            The step; None after `timeout_s`.

        Raises:
            BaseException: A bug ended the thread. Nothing may be published or deleted then.
        """
        with self._changed:
            self._changed.wait_for(self._has_news, timeout_s)
            if self.round.steps:
                return self.round.steps.popleft()
            if self._error is not None:
                raise self._error
            return None

    @property
    def has_news(self) -> bool:
        """Whether this rank has a step to do, or the round is over."""
        with self._changed:
            return self._has_news()

    @property
    def has_begun(self) -> bool:
        """Whether the other ranks can learn that this rank has begun."""
        return self._thread is not None

    def finish(self) -> bool:
        """Wait until the others can read all they need from this rank; return whether they can.

        Waits at most `timeout_s` for the thread to end. After that, this rank no longer needs the
        job's store for this round.
        """
        if self._thread is None:
            return True
        self._thread.join(self.group.timeout_s)
        self.group.ended(self.round.number)
        return not self._thread.is_alive()

    def abort_error(self, what: str, stays: str = "", *, own: bool = False) -> RankError | None:
        """Return the error of an abort, as `Round.error`; later waits skip the ranks at fault."""
        error = self.round.error(what, stays, own=own)
        if error is not None and error.rank != self.group.place.rank:
            self.group.lost |= {error.rank, *self.round.others.still}
        return error

    def _has_news(self) -> bool:
        return bool(self.round.steps) or self._over

    def _run(self) -> None:
        try:
            operations = self.round.operations(self.group.timing.clock.monotonic_s())
            answer: Answer | None = None
            while True:
                operation = self._advance(operations, answer)
                if operation is None:
                    break
                answer = self._carry_out(operation)
        except BaseException as error:  # `next_step` raises it
            log.exception("round %d of the ranks ended with an error", self.round.number)
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
        store = self.group.coordination
        value: Any = None
        error: CoordinationError | None = None
        try:
            match operation:
                case Post(key, data):
                    store.post(key, data)
                case Read(keys):
                    value = store.read(keys)
                case Decide(key, data):
                    value = store.decide(key, data)
                case WaitFor(key, timeout_s):
                    value = store.wait(key, timeout_s)
                case Rest(timeout_s):
                    self._rest(timeout_s)
        except CoordinationError as failure:
            log.debug("the ranks' %s: %s", type(operation).__name__, str(failure))
            error = failure
        return Answer(self.group.timing.clock.monotonic_s(), value, error)

    def _rest(self, timeout_s: float) -> None:
        """Wait `timeout_s`, or until `tell` is called."""
        with self._changed:
            self._changed.wait_for(lambda: self._told, timeout_s)
            self._told = False

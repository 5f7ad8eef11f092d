"""Runs the threads of one save, resolves its handle, and ends it. `finish` has the steps."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.concurrency.latch import Latch
from penstock.core.errors import (
    BusyError,
    FenceTimeoutError,
    PenstockError,
    RankError,
    SaveAbortedError,
    SaveError,
    SaveSkippedError,
    StorageFullError,
)
from penstock.core.foreign import said
from penstock.core.ranks.group import is_logged
from penstock.core.reporting.handle import Ending
from penstock.core.reporting.reports import Progress, SaveHandle
from penstock.core.save.capture import CaptureRun
from penstock.core.save.finish import Finish, SaveClock
from penstock.core.save.request import SaveTurn
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.core.concurrency.workers import Workers
    from penstock.core.pipeline.staging import Staging
    from penstock.core.reporting.reports import SaveReport
    from penstock.core.save.bases import SaveBases
    from penstock.core.save.manifest import ManifestWriter
    from penstock.core.save.request import (
        Destination,
        SaveRequest,
        SaveSurroundings,
    )

log = logging.getLogger("penstock")


class SaveJob:
    """Runs one save. The caller's thread calls `begin_capture`, then `capture_now`.

    Three threads work for it: one captures, one writes and commits, one watches the store.
    """

    def __init__(  # noqa: PLR0913 - parts of one save, each by name
        self,
        request: SaveRequest,
        *,
        manifest: ManifestWriter,
        destination: Destination,
        staging: Staging,
        workers: Workers,
        surroundings: SaveSurroundings,
        called: float | None = None,
        bases: SaveBases | None = None,
        log_failure: bool = True,
        turn: SaveTurn | None = None,
    ) -> None:
        """Prepare the save; nothing has begun.

        Args:
            request: The state, the plan and the options of the save.
            manifest: Encodes the manifest of the save.
            destination: The backend, and the slower tiers that make the checkpoint durable.
            staging: The memory for captured chunks.
            workers: The threads.
            surroundings: Makes room before the save and cleans up after it.
            called: When `save` was called, on the monotonic clock; default: now.
            bases: Frames that the save may refer to; None: every chunk is stored whole.
            log_failure: Whether to log why the save failed. Off if the caller waits for the save
                and raises its error, since the log would only repeat it.
            turn: This save in its group of ranks; None: this process saves alone.

        Raises:
            CoordinationError: The store of the job cannot be reached.
        """
        self.handle = SaveHandle(request.step)
        self.handle.captured.on_result = self._captured_was_awaited
        self.handle.progress_source = self.progress
        self.ending = Ending(self.handle)
        self.released = Latch()  # opens when nothing of this save is in memory or in flight
        self._caller = threading.get_ident()
        self._onward = destination.onward
        # Copies to slower tiers do not hold up the next save.
        self._over = self.handle.durable if self._onward is None else self.handle.committed
        self._surroundings: SaveSurroundings | None = surroundings
        self._log_failure = log_failure
        self._workers = workers
        self._timing = workers.timing
        turn = turn or SaveTurn()
        self._rank_turn = turn
        # Acquired once, by the first thread of each kind: an error raised by a signal handler may
        # end `begin_capture` right after the start of a thread, and the next call starts another.
        self._may_run, self._may_watch = threading.Lock(), threading.Lock()
        self._started = False
        self._has_error = False  # whether the save thread failed; it reports its own error
        # Acquired once: by the capture thread when it starts, or by `interrupt` before that.
        self._may_capture = threading.Lock()
        self._capture_over = Latch()  # opens when no thread captures for this save
        self._may_return = Latch()  # opens when memory that is not deferred may change
        self._clock = SaveClock(time.monotonic() if called is None else called)
        self._capture = CaptureRun(
            request.plan,
            staging,
            need_writer=self.start,
            straight_first=request.mode == "blocking",
            workers=workers,
            turn=turn,
        )
        self._finish = Finish(
            request,
            manifest,
            destination=destination,
            capture=self._capture,
            ending=self.ending,
            clock=self._clock,
            workers=workers,
            bases=bases,
            turn=turn,
        )

    @property
    def request(self) -> SaveRequest:
        """The request of the save, without the state once the save is over."""
        return self._finish.request

    @property
    def uid(self) -> str:
        """The uid of this attempt."""
        return self._finish.uid

    def start(self) -> None:
        """Begin to write in the background, if not begun yet.

        A save that blocks only for its capture writes after the capture, or when the capture needs
        room. Earlier writes take memory bandwidth from the copies that training waits for.
        """
        self._finish.may_write.open()
        self._start_threads()

    def _start_threads(self) -> None:
        if not self._started:
            self._finish.watchdog.moved()
            self._workers.spawn("save", self._run)
            self._workers.spawn("watch", self._watch)
            self._started = True

    def begin_capture(self) -> None:
        """Start to capture; failures go to the handle. A second call continues the first.

        The capture has its own thread even when the caller waits for it. Only the main thread gets
        Ctrl-C, so Ctrl-C cannot interrupt the capture while it holds one of the engine's locks.

        Raises:
            KeyboardInterrupt: Call `interrupt` then.
        """
        self._rank_turn.begun = True
        if self._rank_turn.place is not None:
            # The other ranks learn at once that this rank is here, and it learns rank 0's verdict.
            self._start_threads()
        if self.request.mode == "blocking":
            self.start()
        self._workers.spawn("capture", self._take_all)

    def capture_now(self) -> None:
        """Wait until everything that is not deferred is captured.

        Raises:
            KeyboardInterrupt: Call `interrupt` then.
        """
        self._may_return.wait()

    def interrupt(self, error: BaseException) -> None:
        """Give up the save because `error` was raised in the caller of `save`."""
        if self._may_capture.acquire(blocking=False):
            self._capture_over.open()  # the capture has not begun, and now cannot
        interrupted = SaveAbortedError(f"step {self.request.step}: interrupted")
        interrupted.__cause__ = error
        self.handle.error_seen = True
        self.fail(interrupted)
        self.start()  # the save thread cleans up

    @property
    def deferred_bytes(self) -> int:
        """Raw bytes that the fence protects."""
        return self._capture.deferred_bytes

    def wait_durable(self) -> None:
        """Wait until the checkpoint is durable, or the save has failed.

        Raises:
            NotDrainedError: The save is committed, but copying it to a durable tier keeps failing.
        """
        poll_s = None if self._onward is None else self._timing.capture_poll_s
        while not self.handle.durable.wait(poll_s):
            if self._onward is not None and self.handle.committed.done():
                self._onward.check()

    def finished(self, timeout_s: float | None) -> bool:
        """Wait until the save has ended or failed; return False if it has not after `timeout_s`.

        Then waits until its memory is free again, with a limit, since a stuck store may keep it
        forever. A callback of the save does not wait for the memory, which is freed only after the
        callback returns.
        """
        if not self._over.wait(timeout_s):
            return False
        if not self.ending.in_callback:
            self.released.wait(self._timing.release_s)
        return True

    def is_changed_by(self, storages: Callable[[], Iterable[int]]) -> bool:
        """Return whether a step on parameters at `storages` may change deferred memory.

        A user who passed `defer` has promised that any step on the thread that saved is the fence.
        Address 0 means a parameter without its own memory, so the step may change any memory.
        """
        if self.request.promised and threading.get_ident() == self._caller:
            return True
        return self._capture.owns(storages) or 0 in storages()

    def fence(self, timeout_s: float | None, *, give_up: bool = True, passes: bool = True) -> bool:
        """Wait until deferred memory may change; return False after `timeout_s`.

        An error of the save goes to its handle.

        Args:
            timeout_s: How long to wait for the capture.
            give_up: Whether to abort a save whose capture takes too long.
            passes: Whether the memory is about to change; if not, later checks still compare it.

        Raises:
            BusyError: A signal handler interrupted this and was refused; the save continues.
        """
        if self._over.done():
            return True
        began = time.monotonic()
        complete = True
        try:
            complete = self._capture.fence(
                timeout_s, passes=passes, while_comparing=self.ending.calling_back()
            )
            if not complete and give_up:
                msg = (
                    f"step {self.request.step}: its capture was not complete {timeout_s:g} s after "
                    "the fence, so this save is given up. Is the storage slow or stuck? Raise "
                    "staging_bytes or fence_timeout_s."
                )
                self.fail(FenceTimeoutError(msg))
        except BusyError:
            raise  # an error of the signal handler, not of this save
        except Exception as error:  # noqa: BLE001 - recorded in the handle
            self.fail(error)
        if complete and not self._capture.has_device_copies:
            # Everything is captured, and the capture thread is about to resolve the future. A
            # caller that looks at `captured` right after its fence finds it resolved.
            self.handle.captured.wait(timeout_s)
        self._clock.blocked += time.monotonic() - began
        return complete

    def _captured_was_awaited(self) -> None:
        """Treat a wait for `captured` on the thread that called `save` as a fence."""
        if threading.get_ident() == self._caller:
            self.fence(None)
            if self.ending.error is not None:
                raise self.ending.error

    def fail(self, error: BaseException) -> None:
        """Give up the save: `captured` resolves first, then the other futures."""
        self._fail_because(lambda: error)

    def _fail_because(self, why: Callable[[], BaseException]) -> None:
        def first() -> None:
            error = self.ending.error
            assert error is not None
            if self._surroundings is not None:
                self._surroundings.when_failed(error)
            self._capture.cancel(error)
            # Logs only text: a log record that someone keeps would keep the error, its stack
            # frames, and all that these hold.
            loud = self._log_failure and not isinstance(error, SaveSkippedError)
            level = logging.ERROR if loud else logging.DEBUG
            log.log(level, "save of step %d failed: %s", self.request.step, self._log_text(error))

        self.ending.fail(why, first=first)

    def _log_text(self, error: BaseException) -> str:
        """Return the log text of an error; short if rank 0 logs another rank's error."""
        if isinstance(error, RankError) and self.request.rank and is_logged(error):
            return f"rank {error.rank} is the cause; see the log of rank 0"
        return str(error)

    def progress(self) -> Progress:
        """Return the phase of the save, and the bytes written so far."""
        total, phase = self.request.plan.raw_bytes, self._phase()
        # The count of the last batch may arrive after the commit.
        done = total if phase in {"drain", "durable"} else self._finish.bytes_done
        return Progress(min(done, total), total, phase)

    def _phase(self) -> str:
        if self.ending.error is not None:
            return "failed"
        durable = self.handle.durable
        if self.handle.committed.done():
            whole = self._onward is None or (durable.done() and durable.peek_error() is None)
            return "durable" if whole else "drain"
        if self._clock.commit_began is not None:
            return "commit"
        return "capture" if self._clock.captured is None else "write"

    def _take_all(self) -> None:
        """Run the capture, as the body of the capture thread."""
        if not self._may_capture.acquire(blocking=False):
            return
        try:
            self._capture.take_now()
            if self.deferred_bytes:
                self._count_blocked()
                self._may_return.open()  # `save` returns; the rest is captured during training
                self._capture.take_deferred()
            with self.ending.lock:
                if self.ending.error is None:
                    self._clock.captured = time.monotonic()
            self.ending.capture()
        except BaseException as error:  # noqa: BLE001 - the handle must end after any error
            self.fail(_of_our_tree(error, self.request.step))
        finally:
            self._capture_over.open()
            if not self._may_return.is_open:
                self._count_blocked()  # before the save thread can report it
            self.start()  # also after a failure: the save thread cleans up
            self._may_return.open()

    def _count_blocked(self) -> None:
        self._clock.blocked += time.monotonic() - self._clock.called

    def _run(self) -> None:
        """Write and commit, as the body of the save thread."""
        if not self._may_run.acquire(blocking=False):
            return
        watchdog, surroundings = self._finish.watchdog, self._surroundings
        assert surroundings is not None
        try:
            self._finish.arrive()
            # Each call inside has its own time limit, and many calls together may take long.
            with watchdog.paused(), self.ending.calling_back():
                surroundings.before_write(self.request, self._finish.url)
            report = self._finish.run(surroundings.before_commit)
        except BaseException as error:  # noqa: BLE001 - the handle must end after any error
            self._has_error = True
            with watchdog.paused():  # since this may wait for other ranks
                error = self._finish.give_up(error)
            if isinstance(error, StorageFullError):  # the other ranks know of it by now
                with watchdog.paused(), self.ending.calling_back():
                    error = surroundings.when_full(self.request, self.uid, error)
            if isinstance(error, SaveSkippedError):
                self._skip(error)
            self.fail(_of_our_tree(error, self.request.step))
            self._finish.clean_up(self._capture_over)
        else:
            report = surroundings.reported(report)
            self._succeeded(report)
            log.info(
                "saved step %d: %s in %.2f s (blocked %.3f s)",
                report.step,
                size_text(report.bytes_raw),
                report.seconds["total"],
                report.seconds["blocked"],
            )
            self._after_commit(report)
            surroundings.replicate(self.request, report, self.ending.replicate)
        finally:
            try:
                self._finish.leave()
            finally:
                self._finish.forget()  # the user may keep the handle, and the handle keeps this
                self.released.open()
                if self._onward is None or self.handle.durable.done():
                    self._surroundings = None  # it holds the checkpointer, which holds this job

    def _skip(self, error: SaveSkippedError) -> None:
        """Mark the save as skipped by rank 0. Users need not see this as a failure."""
        self.handle.skipped = True
        self.handle.error_seen = True
        log.debug("%s", str(error))

    def _after_commit(self, report: SaveReport) -> None:
        surroundings = self._surroundings
        if surroundings is not None:
            with self.ending.calling_back():
                surroundings.after_commit(self.request, report)

    def _succeeded(self, report: SaveReport) -> None:
        onward = self._onward
        if onward is None:
            self.ending.succeed(report)
            return

        def when_drained(error: BaseException | None) -> None:
            if error is not None:
                self.ending.leave(error)
                return
            try:
                tiers = onward.tiers()
            except BaseException as raised:
                self.ending.leave(raised)  # or a thread that waits for the save would wait forever
                raise
            self.ending.succeed(replace(report, tiers=tiers))
            if has_started:
                # Retention keeps older checkpoints until a durable tier has this one.
                self._after_commit(report)
                self._surroundings = None

        has_started = False
        onward.begin()
        self.ending.commit(report)
        onward.go(when_drained)
        has_started = True

    def _watch(self) -> None:
        """Give up the save when the store stalls for `io_timeout_s`, or another rank fails."""
        if not self._may_watch.acquire(blocking=False):
            return
        watchdog = self._finish.watchdog
        poll_s = min(self._timing.poll_s, watchdog.limit_s / 4)
        while not self.released.wait(poll_s):
            if self.ending.error is not None:
                # The save thread may hang in the store forever, and other threads may wait for
                # this memory.
                self._capture.release_unwritten()
            if watchdog.is_paused:
                # Calls such as those that make room have their own limits. The other ranks wait.
                self._finish.moved()
            if self.ending.error is None and not self._has_error:
                try:  # the save thread may hang in the store, where it cannot check
                    self._finish.check_ranks()
                except PenstockError as error:
                    if isinstance(error, SaveSkippedError):
                        self._skip(error)  # the save thread learns only that it was given up
                    self.fail(error)
            stuck_s = watchdog.taken_s()
            if watchdog.is_over() and not self._over.done():
                self._fail_because(partial(self._finish.stuck_error, stuck_s))


def _of_our_tree(error: BaseException, step: int) -> Exception:
    if isinstance(error, PenstockError):
        return error
    wrapped = SaveError(f"step {step}: {said(error)}")
    wrapped.__cause__ = error
    return wrapped

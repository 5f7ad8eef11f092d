"""The life of one save: its threads, its handle, and how it ends. `finish` has the steps."""

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
    SaveAbortedError,
    SaveError,
    StorageFullError,
)
from penstock.core.foreign import said
from penstock.core.reporting.handle import Ending
from penstock.core.reporting.reports import Progress, SaveHandle
from penstock.core.save.capture import CaptureRun
from penstock.core.save.finish import Finish, SaveClock
from penstock.core.save.request import Room
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.core.concurrency.workers import Workers
    from penstock.core.pipeline.staging import Staging
    from penstock.core.reporting.reports import SaveReport
    from penstock.core.save.manifest import ManifestWriter
    from penstock.core.save.request import Destination, SaveRequest

log = logging.getLogger("penstock")


class SaveJob:
    """A save under way. On the caller's thread: `begin_capture`, then `capture_now`."""

    def __init__(
        self,
        request: SaveRequest,
        *,
        manifest: ManifestWriter,
        destination: Destination,
        staging: Staging,
        workers: Workers,
        after_commit: Callable[[SaveReport], None],
        called: float | None = None,
        room: Room | None = None,
    ) -> None:
        """Prepare it; nothing has begun.

        Args:
            request: What is to be done.
            manifest: Encodes its manifest.
            destination: Where it is stored, and what makes it durable there, if not the commit.
            staging: Memory for what is captured.
            workers: Threads.
            after_commit: Called on a thread of the save, when it is committed.
            called: When the caller called, by the monotonic clock; default: now.
            room: Makes room for it, where that can be done.
        """
        onward = destination.onward
        self.request = request
        self.handle = SaveHandle(request.step)
        self.handle.captured.on_result = self._captured_was_awaited
        self.handle.progress_source = self.progress
        self.ending = Ending(self.handle)
        self.released = Latch()  # nothing of this save is in memory or in flight
        self._caller = threading.get_ident()
        self._onward = onward
        # What else has to happen until it is durable keeps no other save waiting.
        self._over = self.handle.durable if onward is None else self.handle.committed
        self._after_commit: Callable[[SaveReport], None] | None = after_commit
        self._room = room or Room()
        self._staging = staging
        self._workers = workers
        self._timing = workers.timing
        self._lock = threading.Lock()  # guards `_started`
        self._started = False
        # Acquired once: by the capture thread when it starts, or by `interrupt` before that.
        self._may_capture = threading.Lock()
        self._capture_over = Latch()  # no thread captures for this save any more
        self._taken = Latch()  # what is not deferred may change
        self._clock = SaveClock(time.monotonic() if called is None else called)
        self._capture = CaptureRun(
            request.plan,
            staging,
            need_writer=self.start,
            straight_first=request.mode == "blocking",
            timing=self._timing,
        )
        self._finish = Finish(
            request,
            manifest,
            destination=destination,
            capture=self._capture,
            ending=self.ending,
            clock=self._clock,
            workers=workers,
        )

    @property
    def uid(self) -> str:
        """The name of this attempt to save."""
        return self._finish.uid

    # -- the caller's thread --------------------------------------------------------------------

    def start(self) -> None:
        """Begin to write in the background, unless that has begun.

        A save that blocks only for its capture starts when that is complete, or needs room:
        writing at the same time takes memory bandwidth from the copies that training waits for.
        """
        with self._lock:
            started, self._started = self._started, True
        if not started:
            self._finish.watchdog.moved()
            self._workers.spawn("save", self._run)
            self._workers.spawn("watch", self._watch)

    def begin_capture(self, *, on_captured: Callable[[], None]) -> None:
        """Start to capture, on a thread of its own; failures go to the handle.

        So Ctrl-C cannot come between taking one of the engine's locks and giving it back.

        Args:
            on_captured: Called once, when the capture ended, well or badly; on any thread.

        Raises:
            KeyboardInterrupt: Call `interrupt` then.
        """
        if self.request.mode == "blocking":
            self.start()
        self._workers.spawn("capture", lambda: self._take_all(on_captured))

    def capture_now(self) -> None:
        """Wait until all but what is deferred is captured.

        Raises:
            KeyboardInterrupt: Call `interrupt` then.
        """
        self._taken.wait()

    def interrupt(self, error: BaseException) -> None:
        """Give the save up since `error` came while the caller of `save` waited or prepared."""
        if self._may_capture.acquire(blocking=False):
            self._capture_over.open()  # it has not begun, and will not
        interrupted = SaveAbortedError(f"step {self.request.step}: interrupted")
        interrupted.__cause__ = error
        self.handle.error_seen = True
        self.fail(interrupted)
        self.start()  # it cleans up

    @property
    def deferred_bytes(self) -> int:
        """Raw bytes behind the fence."""
        return self._capture.deferred_bytes

    @property
    def staging_budget_bytes(self) -> int:
        """What its staging memory may take."""
        return self._staging.budget_bytes

    @property
    def straight_bytes(self) -> int:
        """Bytes written straight from live memory."""
        return self._capture.straight_bytes

    def wait_durable(self) -> None:
        """Wait until the save ended, well or badly.

        Raises:
            NotDrainedError: It is committed, and what would make it durable keeps failing.
        """
        look_s = None if self._onward is None else self._timing.capture_poll_s
        while not self.handle.durable.wait(look_s):
            if self._onward is not None and self.handle.committed.done():
                self._onward.check()

    def finished(self, timeout_s: float | None) -> bool:
        """Wait until the save ended, well or badly, and its memory is free again.

        A stuck store may keep its memory for ever; that is not waited for. Nor is it in a callback
        of the save, which has to return first.
        """
        if not self._over.wait(timeout_s):
            return False
        if not self.ending.in_callback:
            self.released.wait(self._timing.release_s)
        return True

    def is_changed_by(self, storages: Callable[[], Iterable[int]]) -> bool:
        """Whether a step on parameters in `storages` (their addresses) may change what is deferred.

        A user who passed `defer` has said that a step does, whatever it is a step of. An address
        of 0 says nothing.
        """
        if self.request.promised and threading.get_ident() == self._caller:
            return True
        return self._capture.owns(storages) or 0 in storages()

    def fence(self, timeout_s: float | None, *, give_up: bool = True, passes: bool = True) -> bool:
        """Wait until deferred memory may change; False: it took too long.

        What went wrong is in the handle. With `give_up`, a save whose capture takes too long is
        aborted. Without `passes` the memory may not change, as yet.

        Raises:
            BusyError: A signal handler that interrupted this was refused; the save goes on.
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
            raise  # it says nothing of this save
        except Exception as error:  # noqa: BLE001 - recorded in the handle
            self.fail(error)
        if complete and not self._capture.has_device_copies:
            self.handle.captured.wait(timeout_s)  # all is: only its thread has yet to say so
        self._clock.blocked += time.monotonic() - began
        return complete

    def _captured_was_awaited(self) -> None:
        """A wait for `captured` by the thread that called `save` counts as a fence."""
        if threading.get_ident() == self._caller:
            self.fence(None)
            if self.ending.error is not None:
                raise self.ending.error

    def fail(self, error: BaseException) -> None:
        """Give the save up: `captured` resolves first, then the others."""
        self._fail_because(lambda: error)

    def _fail_because(self, why: Callable[[], BaseException]) -> None:
        def first() -> None:
            error = self.ending.error
            assert error is not None
            self._capture.cancel(error)
            # Text: a kept log record would keep the error, its frames, and all that they hold.
            log.error("save of step %d failed: %s", self.request.step, str(error))

        self.ending.fail(why, first=first)

    def progress(self) -> Progress:
        """How far it is."""
        total, phase = self.request.plan.raw_bytes, self._phase()
        # The last count may come late.
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

    # -- background -----------------------------------------------------------------------------

    def _take_all(self, on_captured: Callable[[], None]) -> None:
        """The capture thread."""
        if not self._may_capture.acquire(blocking=False):
            return
        try:
            self._capture.take_now()
            if self.deferred_bytes:
                self._let_caller_go()
                self._capture.take_deferred()
            self._captured()
        except BaseException as error:  # noqa: BLE001 - whatever it was, the handle must end
            self.fail(_of_our_tree(error, self.request.step))
        finally:
            self._capture_over.open()
            if not self._taken.is_open:
                self._count_blocked()  # before anything reports it
            self.start()  # after a failure: it cleans up
            on_captured()
            self._taken.open()

    def _let_caller_go(self) -> None:
        self._count_blocked()
        self._taken.open()

    def _count_blocked(self) -> None:
        self._clock.blocked += time.monotonic() - self._clock.called

    def _captured(self) -> None:
        with self.ending.lock:
            if self.ending.error is None:
                self._clock.captured = time.monotonic()
        self.ending.capture()

    def _run(self) -> None:
        """The save thread."""
        watchdog = self._finish.watchdog
        try:
            with watchdog.paused():  # each call has a limit of its own, and many may take long
                self._room.before_write()
            report = self._finish.run()
        except BaseException as error:  # noqa: BLE001 - whatever it was, the handle must end
            if isinstance(error, StorageFullError):
                with watchdog.paused():
                    error = self._room.when_full(error)  # the same, with advice
            self.fail(_of_our_tree(error, self.request.step))
            self._finish.clean_up(self._capture_over)
        else:
            self._succeeded(report)
            log.info(
                "saved step %d: %s in %.2f s (blocked %.3f s)",
                report.step,
                size_text(report.bytes_raw),
                report.seconds["total"],
                report.seconds["blocked"],
            )
            self._commit_is_over(report)
        finally:
            self._finish.forget()
            self.request = self.request.without_state()  # its handle may live on, and so may this
            self._room = Room()  # it holds the checkpointer, as `_after_commit` does
            self.released.open()
            if self._onward is None or self.handle.durable.done():
                self._after_commit = None  # it holds the checkpointer, which holds this

    def _commit_is_over(self, report: SaveReport) -> None:
        after_commit = self._after_commit
        if after_commit is not None:
            after_commit(report)

    def _succeeded(self, report: SaveReport) -> None:
        onward = self._onward
        if onward is None:
            self.ending.succeed(report)
            return

        def told(error: BaseException | None) -> None:
            if error is not None:
                self.ending.leave(error)
                return
            self.ending.succeed(replace(report, tiers=onward.tiers()))
            if gone_on:  # what only its coming there makes superfluous
                self._commit_is_over(report)
                self._after_commit = None

        gone_on = False
        self.ending.commit(report)
        onward.go(told)
        gone_on = True

    def _watch(self) -> None:
        """Give the save up when the store makes no progress for `io_timeout_s`."""
        watchdog = self._finish.watchdog
        look_s = min(self._timing.poll_s, watchdog.limit_s / 4)
        while not self.released.wait(look_s):
            if self.ending.error is not None:
                # Its own thread may hang in the store for ever, and others wait for this memory.
                self._capture.release_unwritten()
            stuck_s = watchdog.taken_s()
            if watchdog.is_over() and not self._over.done():
                self._fail_because(partial(self._finish.stuck_error, stuck_s))


def _of_our_tree(error: BaseException, step: int) -> Exception:
    if isinstance(error, PenstockError):
        return error
    wrapped = SaveError(f"step {step}: {said(error)}")
    wrapped.__cause__ = error
    return wrapped

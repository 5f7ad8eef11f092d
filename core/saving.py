"""One save, from described state to the commit record (design: what is stored, steps 1 to 5)."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.blame import said
from penstock.core.capture import Captured, CaptureRun
from penstock.core.commit import Commit, Event, State
from penstock.core.ending import Ending
from penstock.core.errors import (
    CommitUnknownError,
    FenceTimeoutError,
    PenstockError,
    SaveAbortedError,
    SaveError,
    StorageTimeoutError,
)
from penstock.core.latch import Latch
from penstock.core.pipeline import BATCH_BYTES, FrameWriter
from penstock.core.publishing import Publisher
from penstock.core.reports import Progress, SaveHandle, SaveReport
from penstock.core.sizes import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc import Backend
    from penstock.core.save_request import Onward, SaveRequest
    from penstock.core.staging import Staging
    from penstock.core.workers import Workers

log = logging.getLogger("penstock")

_RELEASE_S = 5.0
_POLL_S = 0.2  # only bounds how late a failure is noticed while nothing is captured


@dataclass(slots=True)
class _Clockwork:
    """When things happened, on the monotonic clock."""

    started: float = field(default_factory=time.monotonic)
    blocked: float = 0.0
    captured: float | None = None
    commit_began: float | None = None


class SaveJob:
    """A save under way. `start` once; then `capture_now` on the caller's thread."""

    def __init__(
        self,
        request: SaveRequest,
        *,
        backend: Backend,
        staging: Staging,
        workers: Workers,
        after_commit: Callable[[SaveReport], None],
        onward: Onward | None = None,
    ) -> None:
        subjects = request.subjects
        # Only the capture holds the state, and lets go of it when the save is over.
        request = self.request = replace(request, subjects=())
        self._after_commit = after_commit
        self._onward = onward
        self.handle = SaveHandle(request.step)
        self.handle.captured.on_result = self._captured_was_awaited
        self._caller = threading.get_ident()
        self.handle.progress_source = self.progress
        # What else has to happen until it is durable keeps no other save waiting.
        self._over = self.handle.durable if onward is None else self.handle.committed
        self.uid = secrets.token_hex(16)
        self.released = Latch()  # nothing of this save is in memory or in flight
        self._backend = backend
        self._staging = staging
        self._workers = workers
        self._queue: queue.SimpleQueue[Captured] = queue.SimpleQueue()
        self.ending = Ending(self.handle)
        self._lock = threading.Lock()  # guards `_started`
        self._started = False
        self._may_capture = threading.Lock()  # taken for ever by whoever is first
        self._capture_over = Latch()  # no thread captures for this save any more
        self._phase = "capture"
        self._done_bytes = 0
        self._moved = time.monotonic()
        self._clock = _Clockwork()
        self._commit = Commit()
        self._publisher = Publisher(
            backend, self._commit, uid=self.uid, step=request.step, grace_s=request.grace_s
        )
        self._capture = CaptureRun(
            request.plan,
            subjects,
            staging,
            deliver=self._queue.put,
            need_writer=self.start,
            straight_first=request.mode == "blocking",
        )
        self._writer = FrameWriter(
            backend,
            request,
            workers=workers,
            blob_prefix=f"data/{self.uid}/blobs/00000-0",
            release=self._release,
            tick=self._tick,
        )

    # -- the caller's thread --------------------------------------------------------------------

    def start(self) -> None:
        """Begin to write in the background, unless that has begun.

        A save that blocks only for its capture starts when that is complete, or needs room:
        writing at the same time takes memory bandwidth from the copies that training waits for.
        """
        with self._lock:
            started, self._started = self._started, True
        if not started:
            self._moved = time.monotonic()
            self._workers.spawn("save", self._run)
            self._workers.spawn("watch", self._watch)

    def capture_now(self, *, on_captured: Callable[[], None]) -> None:
        """Capture all but what is deferred, and start the rest; failures go to the handle.

        The work is on a thread of its own, so that Ctrl-C cannot come between taking one of the
        engine's locks and giving it back.

        Args:
            on_captured: Called once, when the capture ended, well or badly; on any thread.

        Raises:
            KeyboardInterrupt: Call `interrupt` then.
        """
        free = Latch()
        if self.request.mode == "blocking":
            self.start()
        self._workers.spawn("capture", lambda: self._take_all(free.open, on_captured))
        free.wait()

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
    def straight_bytes(self) -> int:
        """Bytes written straight from live memory."""
        return self._capture.straight_bytes

    def wait_durable(self) -> None:
        """Wait until the save ended, well or badly.

        Raises:
            NotDrainedError: It is committed, and what would make it durable keeps failing.
        """
        while not self.handle.durable.wait(None if self._onward is None else _POLL_S):
            if self._onward is not None and self.handle.committed.done():
                self._onward.check()

    def add_blocked(self, seconds: float) -> None:
        """Count time for which training stood still."""
        self._clock.blocked += seconds

    def finished(self, timeout_s: float | None) -> bool:
        """Wait until the save ended, well or badly, and its memory is free again.

        A stuck store may keep its memory for ever; that is not waited for. Nor is it in a callback
        of the save, which has to return first.
        """
        if not self._over.wait(timeout_s):
            return False
        if not self.ending.in_callback:
            self.released.wait(_RELEASE_S)
        return True

    def fence(self, timeout_s: float | None, *, give_up: bool = True) -> bool:
        """Wait until deferred memory may change; False: it took too long.

        Never raises: what went wrong is in the handle. With `give_up`, a save whose capture
        takes too long is aborted.
        """
        if self._over.done():
            return True
        began = time.monotonic()
        complete = True
        try:
            complete = self._capture.fence(timeout_s)
            if not complete and give_up:
                msg = (
                    f"step {self.request.step}: its capture was not complete {timeout_s:g} s after "
                    "the fence, so this save is given up. Is the storage slow or stuck? Raise "
                    "staging_bytes or fence_timeout_s."
                )
                self.fail(FenceTimeoutError(msg))
        except Exception as error:  # noqa: BLE001 - recorded in the handle
            self.fail(error)
        self._clock.blocked += time.monotonic() - began
        return complete

    def _captured_was_awaited(self) -> None:
        """Who trains has waited for the capture: as good as a fence."""
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
            self._phase = "failed"
            self._capture.cancel(error)
            # Text, since who keeps log records would keep the error, its frames, and all they hold.
            log.error("save of step %d failed: %s", self.request.step, str(error))

        self.ending.fail(why, first=first)

    def progress(self) -> Progress:
        """How far it is."""
        total, phase = self.request.plan.raw_bytes, self._phase
        # The last count may come late.
        done = total if phase in {"drain", "durable"} else self._done_bytes
        return Progress(min(done, total), total, phase)

    # -- background -----------------------------------------------------------------------------

    def _take_all(self, let_go: Callable[[], None], on_captured: Callable[[], None]) -> None:
        """The capture thread: `let_go` once the caller may change what is not deferred."""
        if not self._may_capture.acquire(blocking=False):
            return
        try:
            self._capture.take_now()
            if self.deferred_bytes:
                let_go()
                self._capture.take_deferred()
            self._captured()
        except BaseException as error:  # noqa: BLE001 - whatever it was, the handle must end
            self.fail(_of_our_tree(error, self.request.step))
        finally:
            self._capture_over.open()
            self.start()  # after a failure: it cleans up
            on_captured()
            let_go()

    def _captured(self) -> None:
        with self.ending.lock:
            if self.ending.error is None:
                self._clock.captured = time.monotonic()
                self._phase = "write"
        self.ending.capture()

    def _run(self) -> None:
        try:
            report = self._save()
        except BaseException as error:  # noqa: BLE001 - whatever it was, the handle must end
            self.fail(_of_our_tree(error, self.request.step))
            self._clean_up()
        else:
            self._succeeded(report)
            log.info(
                "saved step %d: %s in %.2f s (blocked %.3f s)",
                report.step,
                size_text(report.bytes_raw),
                report.seconds["total"],
                report.seconds["blocked"],
            )
            self._after_commit(report)
        finally:
            self._capture.forget()
            self.released.open()

    def _succeeded(self, report: SaveReport) -> None:
        onward = self._onward
        if onward is None:
            self._phase = "durable"
            self.ending.succeed(report)
            return

        def told(error: BaseException | None) -> None:
            if error is not None:
                self.ending.leave(error)
                return
            self._phase = "durable"
            self.ending.succeed(replace(report, tiers=onward.tiers()))
            if gone_on:  # what only its coming there makes superfluous
                self._after_commit(report)

        gone_on = False
        self._phase = "drain"
        self.ending.commit(report)
        onward.go(told)
        gone_on = True

    def _save(self) -> SaveReport:
        self._publisher.publish_intent()
        self._tick(0)
        self._write_chunks()
        self._wait_captured()
        blobs = self._writer.finish()
        results = [r for r in self._writer.results if r is not None]
        if len(results) != len(self.request.plan.chunks):
            msg = f"step {self.request.step}: not every chunk was written; this is a bug"
            raise SaveError(msg)
        self._clock.commit_began = time.monotonic()
        self._phase = "commit"
        manifest = self.request.manifest(self.uid, results, blobs, engine=self._backend.name)
        self._commit.feed(Event.SEALED)
        self._publish(manifest.part_name, manifest.part)
        self._publish(manifest.index_name, manifest.index)
        if self._onward is not None:
            self._onward.prepare(manifest.record)
        self._publisher.publish_commit(manifest.record, begin=self._begin_to_publish)
        self._tick(0)
        return self._report(blobs)

    def _publish(self, name: str, data: bytes) -> None:
        self._raise_if_failed()
        began = time.monotonic()
        self._backend.publish(name, data)
        self._tick(0)
        log.debug("published %s: %d bytes in %.3f s", name, len(data), time.monotonic() - began)

    def _begin_to_publish(self) -> None:
        """The last moment at which the save can be given up."""
        self._capture.check()
        with self.ending.lock:
            self._raise_if_failed()
            self._commit.feed(Event.PUBLISH_STARTED)

    def _write_chunks(self) -> None:
        left = len(self.request.plan.chunks)
        while left:
            self._raise_if_failed()
            self._publisher.refresh_intent()
            batch = self._next_batch()
            if batch:
                left -= len(batch)
                self._writer.put(batch)
            else:
                self._writer.settle_oldest()

    def _next_batch(self) -> list[Captured]:
        """What is captured by now, up to a batch; waits a moment only when nothing is in flight."""
        batch: list[Captured] = []
        try:
            if self._writer.idle:
                batch.append(self._queue.get(timeout=_POLL_S))
            while sum(c.view.nbytes for c in batch) < BATCH_BYTES:
                batch.append(self._queue.get(block=False))
        except queue.Empty:
            pass
        if not batch and self._writer.idle:
            self._moved = time.monotonic()  # waiting for training, not for the store
        return batch

    def _wait_captured(self) -> None:
        """The commit waits for the capture's last word: a tensor may have changed."""
        while not self._writer.idle:
            self._writer.settle_oldest()
        while not self.handle.captured.done():
            self._moved = time.monotonic()
            self.handle.captured.wait(_POLL_S)
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        if self.ending.error is not None:
            msg = f"step {self.request.step}: given up"
            raise SaveAbortedError(msg) from self.ending.error

    def _release(self, captured: Captured) -> None:
        if captured.block is not None:
            self._staging.release(captured.block)
        else:
            self._capture.straight_done(captured)

    def _tick(self, size_bytes: int) -> None:
        self._moved = time.monotonic()
        self._done_bytes += size_bytes

    def _clean_up(self) -> None:
        """After a failure: nothing stays in flight, and data that nobody can need goes."""
        self._writer.abort()
        self._capture_over.wait()
        self._capture.close()
        while True:
            try:
                self._release(self._queue.get(block=False))
            except queue.Empty:
                break
        self._commit.feed(Event.FAILED)
        if self._commit.may_delete_own_data:
            try:
                names = [b.name for b in self._backend.list(f"data/{self.uid}/")]
                # Those that were aborted, too: a store of files then removes the empty folder.
                self._backend.delete(list(dict.fromkeys([*names, *self._writer.blob_names])))
            except BaseException as error:  # noqa: BLE001 - only rubbish is left behind
                log.warning("data/%s stays until prune: %s", self.uid, repr(error))
            else:
                log.debug("step %d: cleaned up, data/%s is gone", self.request.step, self.uid)
        else:
            log.debug("step %d: data/%s stays for prune", self.request.step, self.uid)

    def _watch(self) -> None:
        """Give the save up when the store makes no progress for `io_timeout_s`."""
        limit = self.request.io_timeout_s
        while not self.released.wait(min(1.0, limit / 4)):
            stuck_s = time.monotonic() - self._moved
            if stuck_s <= limit or self._over.done():
                continue
            self._fail_because(partial(self._stuck, stuck_s))

    def _stuck(self, stuck_s: float) -> BaseException:
        """What it means that nothing moves; under the lock, so that no publish begins meanwhile."""
        tried = self._commit.state in {State.PUBLISHING, State.UNKNOWN}
        what = (
            "the commit record was being published, so the checkpoint may or may not exist"
            if tried
            else "nothing was committed"
        )
        msg = (
            f"step {self.request.step}: {self._backend.url} made no progress for {stuck_s:.0f} s "
            f"(io_timeout_s={self.request.io_timeout_s:g}); {what}"
        )
        return CommitUnknownError(msg) if tried else StorageTimeoutError(msg)

    def _report(self, blobs: Sequence[tuple[str, int]]) -> SaveReport:
        now = time.monotonic()
        clock = self._clock
        blocking = self.request.mode == "blocking"
        capabilities = self._backend.capabilities
        return SaveReport(
            step=self.request.step,
            uid=self.uid,
            generation=self.request.generation,
            bytes_raw=self.request.plan.raw_bytes,
            bytes_stored=sum(length for _, length in blobs),
            blobs=len(blobs),
            objects=self.request.objects,
            engine=self._backend.name,
            direct_io=capabilities.direct_io,
            exclusive=capabilities.exclusive_publish,
            deferred_bytes=self.deferred_bytes,
            straight_bytes=self.straight_bytes,
            seconds={
                "blocked": now - clock.started if blocking else clock.blocked,
                "capture": (clock.captured or now) - clock.started,
                "encode": self._writer.encode_clock.seconds,
                "write": self._writer.write_clock.seconds,
                "commit": now - (clock.commit_began or now),
                "total": now - clock.started,
            },
        )


def _of_our_tree(error: BaseException, step: int) -> Exception:
    if isinstance(error, PenstockError):
        return error
    wrapped = SaveError(f"step {step}: {said(error)}")
    wrapped.__cause__ = error
    return wrapped

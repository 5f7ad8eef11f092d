"""The second half of a save, from its intent to its commit record: one step after the other.

A save thread runs it; `job` has the threads, and says how a save ends. Here nothing is caught but
what is resolved.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.core.catalog.commit_table import Commit, Event, State
from penstock.core.catalog.publisher import Publisher
from penstock.core.concurrency.garbage import collections_held
from penstock.core.concurrency.processes import identity_of
from penstock.core.concurrency.watchdog import Watchdog
from penstock.core.errors import (
    CommitUnknownError,
    FormatError,
    SaveAbortedError,
    SaveError,
    StorageTimeoutError,
)
from penstock.core.pipeline.writer import BATCH_BYTES, FrameWriter
from penstock.core.reporting.reports import SaveReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.concurrency.latch import Latch
    from penstock.core.concurrency.workers import Workers
    from penstock.core.pipeline.writer import Captured, ChunkResult
    from penstock.core.reporting.handle import Ending
    from penstock.core.save.capture import CaptureRun
    from penstock.core.save.manifest import EncodedManifest, ManifestWriter
    from penstock.core.save.request import Destination, SaveRequest

log = logging.getLogger("penstock")


@dataclass(slots=True)
class SaveClock:
    """When things happened in a save, on the monotonic clock.

    Attributes:
        called: `save` was called.
        started: What to do was known.
        blocked: Seconds in which the caller could not go on.
        captured: Everything was captured.
        commit_began: Everything was durable but the records.
    """

    called: float
    started: float = field(default_factory=time.monotonic)
    blocked: float = 0.0
    captured: float | None = None
    commit_began: float | None = None


class Finish:
    """Writes what a capture hands on, seals it, and publishes the manifest.

    `run` and `clean_up` are called by one thread; the rest by any.
    """

    def __init__(
        self,
        request: SaveRequest,
        manifest: ManifestWriter,
        *,
        destination: Destination,
        capture: CaptureRun,
        ending: Ending,
        clock: SaveClock,
        workers: Workers,
    ) -> None:
        """Prepare it; nothing has begun.

        Args:
            request: What is saved.
            manifest: Encodes its manifest.
            destination: Where it is stored, and what makes it durable there, if not the commit.
            capture: Hands chunks on.
            ending: Says whether the save was given up.
            clock: Takes when what happened.
            workers: Threads that hash and encode.
        """
        self.uid = secrets.token_hex(16)
        self.bytes_done = 0
        self.commit = Commit()
        self.watchdog = Watchdog(request.io_timeout_s, workers.timing.clock)
        self._request = request
        self._manifest = manifest
        self._backend = destination.backend
        self._onward = destination.onward
        self._capture = capture
        self._ending = ending
        self._clock = clock
        self._timing = workers.timing
        self._publisher = Publisher(
            self._backend,
            self.commit,
            uid=self.uid,
            step=request.step,
            grace_s=request.grace_s,
            process=identity_of(os.getpid()),
            clock=self._timing.clock,
        )
        self._writer = FrameWriter(
            self._backend,
            request.plan,
            chains=request.chains,
            block_bytes=request.block_bytes,
            workers=workers,
            blob_prefix=f"data/{self.uid}/blobs/00000-0",
            release=capture.release,
            tick=self._tick,
        )

    def run(self) -> SaveReport:
        """Take the save from its intent to its commit record.

        Raises:
            SaveAbortedError: It was given up meanwhile.
            PenstockError: What went wrong; call `clean_up`.
        """
        self._raise_if_failed()
        self._publisher.publish_intent()
        self._tick(0)
        self._write_chunks()
        self._wait_captured()
        blobs = self._writer.finish()
        results = [r for r in self._writer.results if r is not None]
        if len(results) != len(self._request.plan.chunks):
            msg = f"step {self._request.step}: not every chunk was written; this is a bug"
            raise SaveError(msg)
        self._clock.commit_began = time.monotonic()
        manifest = self._encoded_manifest(results, blobs)
        self.commit.feed(Event.SEALED)
        self._publish(manifest.part_name, manifest.part)
        self._publish(manifest.index_name, manifest.index)
        if self._onward is not None:
            self._onward.prepare(manifest.record)
        self._publisher.publish_commit(manifest.record, begin=self._begin_to_publish)
        self._tick(0)
        return self._report(blobs)

    def clean_up(self, capture_over: Latch) -> None:
        """After a failure: nothing stays in flight, and data that nobody can need goes.

        Args:
            capture_over: Opens when no thread captures for this save any more.
        """
        try:
            self._writer.abort()
        finally:
            capture_over.wait()
            self._capture.close()
            self._capture.release_unwritten()
        self.commit.feed(Event.FAILED)
        if not self.commit.may_delete_own_data:
            log.debug("step %d: data/%s stays for prune", self._request.step, self.uid)
            return
        try:
            names = [b.name for b in self._backend.list(f"data/{self.uid}/")]
            # Those that were aborted, too: a store of files then removes the empty folder.
            self._backend.delete(list(dict.fromkeys([*names, *self._writer.blob_names])))
        except BaseException as error:  # noqa: BLE001 - only rubbish is left behind
            log.warning("data/%s stays until prune: %s", self.uid, repr(error))
        else:
            log.debug("step %d: cleaned up, data/%s is gone", self._request.step, self.uid)

    def forget(self) -> None:
        """The save is over: let go of the state, which may live no longer than this."""
        self._capture.forget()
        del self._manifest, self._writer
        self._request = self._request.without_state()

    def stuck_error(self, stuck_s: float) -> BaseException:
        """What it means that nothing moves; called under the lock of `ending`.

        So that no publish begins meanwhile.
        """
        tried = self.commit.state in {State.PUBLISHING, State.UNKNOWN}
        what = (
            "the commit record was being published, so the checkpoint may or may not exist"
            if tried
            else "nothing was committed"
        )
        msg = (
            f"step {self._request.step}: {self._backend.url} made no progress for {stuck_s:.0f} s "
            f"(io_timeout_s={self._request.io_timeout_s:g}); {what}"
        )
        return CommitUnknownError(msg) if tried else StorageTimeoutError(msg)

    # ------------------------------------------------------------------------------------------

    def _tick(self, size_bytes: int) -> None:
        """The store made progress."""
        self.watchdog.moved()
        self.bytes_done += size_bytes

    def _raise_if_failed(self) -> None:
        if self._ending.error is not None:
            msg = f"step {self._request.step}: given up"
            raise SaveAbortedError(msg) from self._ending.error

    def _write_chunks(self) -> None:
        left = len(self._request.plan.chunks)
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
        handed_on = self._capture.handed_on
        try:
            if self._writer.idle:
                batch.append(handed_on.get(timeout=self._timing.capture_poll_s))
            while sum(c.view.nbytes for c in batch) < BATCH_BYTES:
                batch.append(handed_on.get(block=False))
        except queue.Empty:
            pass
        if not batch and self._writer.idle:
            self.watchdog.moved()  # waiting for training, not for the store
        return batch

    def _wait_captured(self) -> None:
        """The commit waits for the capture's last word: a tensor may have changed."""
        while not self._writer.idle:
            self._writer.settle_oldest()
        while not self._ending.handle.captured.done():
            self.watchdog.moved()
            self._ending.handle.captured.wait(self._timing.capture_poll_s)
        self._raise_if_failed()

    def _encoded_manifest(
        self, results: Sequence[ChunkResult], blobs: Sequence[tuple[str, int]]
    ) -> EncodedManifest:
        try:
            with collections_held:
                return self._manifest.encode(
                    self.uid,
                    results,
                    blobs,
                    engine=self._backend.name,
                    created=self._timing.clock.now_iso(),
                )
        except FormatError as error:  # of what a reader would find; nothing stored is damaged
            msg = (
                f"step {self._request.step}: nobody could read its manifest, so nothing was "
                f"committed: {error}. Split the state into fewer or smaller parts"
            )
            raise SaveError(msg) from error

    def _publish(self, name: str, data: bytes) -> None:
        self._raise_if_failed()
        began = time.monotonic()
        self._backend.publish(name, data)
        self._tick(0)
        log.debug("published %s: %d bytes in %.3f s", name, len(data), time.monotonic() - began)

    def _begin_to_publish(self) -> None:
        """The last moment at which the save can be given up."""
        self._capture.check()
        with self._ending.lock:
            self._raise_if_failed()
            self.commit.feed(Event.PUBLISH_STARTED)

    def _report(self, blobs: Sequence[tuple[str, int]]) -> SaveReport:
        now = time.monotonic()
        clock, request = self._clock, self._request
        capabilities = self._backend.capabilities
        return SaveReport(
            step=request.step,
            uid=self.uid,
            generation=request.generation,
            bytes_raw=request.plan.raw_bytes,
            bytes_stored=sum(length for _, length in blobs),
            blobs=len(blobs),
            objects=request.objects,
            engine=self._backend.name,
            direct_io=capabilities.direct_io,
            exclusive=capabilities.exclusive_publish,
            deferred_bytes=self._capture.deferred_bytes,
            straight_bytes=self._capture.straight_bytes,
            seconds={
                "blocked": now - clock.called if request.mode == "blocking" else clock.blocked,
                "plan": clock.started - clock.called,
                "capture": (clock.captured or now) - clock.started,
                "encode": self._writer.encode_clock.seconds,
                "write": self._writer.write_clock.seconds,
                "commit": now - (clock.commit_began or now),
                "total": now - clock.called,
            },
        )

"""Writes a save from its intent to its commit record, one step after the other.

The save thread runs it. `job` has the threads and ends a save; here an error is caught only where
it is resolved.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from penstock.core.pipeline.choices import ChainChoices
from penstock.core.pipeline.writer import BATCH_BYTES, FrameWriter
from penstock.core.reporting.reports import SaveReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.core.concurrency.latch import Latch
    from penstock.core.concurrency.workers import Workers
    from penstock.core.pipeline.chunks import Captured, ChunkResult
    from penstock.core.reporting.handle import Ending
    from penstock.core.save.bases import SaveBases
    from penstock.core.save.capture import CaptureRun
    from penstock.core.save.manifest import (
        EncodedManifest,
        ManifestWriter,
        PartSummary,
        RankManifest,
    )
    from penstock.core.save.request import Destination, SaveRequest

log = logging.getLogger("penstock")


@dataclass(slots=True)
class SaveClock:
    """The times of a save, on the monotonic clock.

    Attributes:
        called: When `save` was called.
        started: When the save was planned.
        blocked: Seconds in which the caller could not go on.
        captured: When everything was captured.
        commit_began: When all blobs were durable, and only the records were missing.
    """

    called: float
    started: float = field(default_factory=time.monotonic)
    blocked: float = 0.0
    captured: float | None = None
    commit_began: float | None = None


class Finish:
    """Writes the captured chunks, seals the blobs, and publishes the manifest.

    One thread calls `run` and `clean_up`; any thread may call the other methods.
    """

    def __init__(  # noqa: PLR0913 - parts of one save, each by name
        self,
        request: SaveRequest,
        manifest: ManifestWriter,
        *,
        destination: Destination,
        capture: CaptureRun,
        ending: Ending,
        clock: SaveClock,
        workers: Workers,
        bases: SaveBases | None,
        before_commit: Callable[[SaveRequest], None],
    ) -> None:
        """Prepare to write; nothing has begun.

        Args:
            request: The plan and the options of the save.
            manifest: Encodes the manifest of the save.
            destination: The backend, and the slower tiers that make the checkpoint durable.
            capture: Hands captured chunks on.
            ending: Says whether the save was given up.
            clock: Gets the time at which the commit begins.
            workers: The threads that hash and encode.
            bases: What the save may refer to; None: every chunk is stored whole.
            before_commit: Called right before the commit; raises if the save must not commit.
        """
        self.uid = secrets.token_hex(16)
        self.bytes_done = 0
        self.commit = Commit()
        self.watchdog = Watchdog(request.io_timeout_s, workers.timing.clock)
        self.request = request
        self._manifest = manifest
        self._backend = destination.backend
        self._onward = destination.onward
        self._bases = bases
        self._before_commit = before_commit
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
        self._choices = ChainChoices(
            request.plan,
            request.chains,
            auto=request.auto,
            store=self._backend.url,
            workers=workers,
            blocking=request.mode == "blocking",
        )
        self._writer = FrameWriter(
            self._backend,
            request.plan,
            choices=self._choices,
            block_bytes=request.block_bytes,
            workers=workers,
            blob_prefix=f"data/{self.uid}/blobs/00000-0",
            release=capture.release,
            tick=self._tick,
            share=request.share,
            bases=bases,
        )

    @property
    def url(self) -> str:
        """The URL of the place that the save writes to."""
        return self._backend.url

    def run(self) -> SaveReport:
        """Take the save from its intent to its commit record.

        Raises:
            SaveAbortedError: The save was given up meanwhile; call `clean_up`.
            PenstockError: A step failed; call `clean_up`.
        """
        self._raise_if_failed()
        self._publish_intent()
        self._tick(0)
        self._write_chunks()
        self._wait_captured()
        blobs = self._writer.finish()
        results = {n: r for n, r in enumerate(self._writer.results) if r is not None}
        if len(results) != len(self.request.plan.chunks):
            msg = f"step {self.request.step}: not every chunk was written; this is a bug"
            raise SaveError(msg)
        self._clock.commit_began = time.monotonic()
        part = self._encoded_part(results, blobs)
        manifest = self._encoded_manifest(results, [part.summary])
        self.commit.feed(Event.SEALED)
        self._publish(part.summary.entry.name, part.data)
        self._publish(manifest.index_name, manifest.index)
        if self._onward is not None:
            self._onward.prepare(manifest.record)
        self._publisher.publish_commit(manifest.record, begin=self._begin_to_publish)
        self._tick(0)
        if self._bases is not None:
            self._bases.committed(self.uid, part.stored_frames(self.request.block_bytes))
        return self._report(blobs)

    def clean_up(self, capture_over: Latch) -> None:
        """Release the memory of a failed save, and delete its data if no reader can need it.

        On return nothing is in flight. The data stays if the commit record may exist.

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
            log.debug("step %d: data/%s stays for prune", self.request.step, self.uid)
            return
        try:
            names = [b.name for b in self._backend.list(f"data/{self.uid}/")]
            # Names of aborted blobs too: a store of files then removes the empty folder.
            self._backend.delete(list(dict.fromkeys([*names, *self._writer.blob_names])))
        except BaseException as error:  # noqa: BLE001 - the data is left to `prune`
            log.warning("data/%s stays until prune: %s", self.uid, repr(error))
        else:
            log.debug("step %d: cleaned up, data/%s is gone", self.request.step, self.uid)

    def forget(self) -> None:
        """Drop all references to the state once the save is over: the user may free it now."""
        self._capture.forget()
        del self._manifest, self._writer, self._choices, self._before_commit
        self._bases = None
        plan = replace(self.request.plan, objects=(), chunks=())
        self.request = replace(self.request, entries=(), plan=plan)

    def stuck_error(self, stuck_s: float) -> BaseException:
        """Return the error for a store that made no progress for `stuck_s` seconds.

        Called under the lock of `ending`, so that no publish can begin between the look at the
        state of the commit and the failure of the save.
        """
        tried = self.commit.state in {State.PUBLISHING, State.UNKNOWN}
        outcome = (
            "the commit record was being published, so the checkpoint may or may not exist"
            if tried
            else "nothing was committed"
        )
        msg = (
            f"step {self.request.step}: {self._backend.url} made no progress for {stuck_s:.0f} s "
            f"(io_timeout_s={self.request.io_timeout_s:g}); {outcome}"
        )
        return CommitUnknownError(msg) if tried else StorageTimeoutError(msg)

    def _tick(self, size_bytes: int) -> None:
        """Note that the store made progress."""
        self.watchdog.moved()
        self.bytes_done += size_bytes

    def _raise_if_failed(self) -> None:
        if self._ending.error is not None:
            msg = f"step {self.request.step}: given up"
            raise SaveAbortedError(msg) from self._ending.error

    def _publish_intent(self) -> None:
        if self._bases is None:
            self._publisher.publish_intent()
            return
        references = self._bases.choose(self._backend)
        self._tick(0)
        self._publisher.publish_intent(references=references)
        # Only now: a deletion that looked at the intents before has deleted the record by now.
        self._bases.confirm()

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
        """Return captured chunks, at most a batch; wait a little if nothing is in flight."""
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
            self.watchdog.moved()  # the wait is for training, so the store is not stuck
        return batch

    def _wait_captured(self) -> None:
        """Wait for the end of the capture, which may still find that a tensor has changed."""
        while not self._writer.idle:
            self._writer.settle_oldest()
        while not self._ending.handle.captured.done():
            self.watchdog.moved()
            self._ending.handle.captured.wait(self._timing.capture_poll_s)
        self._raise_if_failed()

    def _encoded_part(
        self, results: Mapping[int, ChunkResult], blobs: Sequence[tuple[str, int]]
    ) -> RankManifest:
        with self._refusing_manifest(), collections_held:
            return self._manifest.encode_part(
                self.uid,
                results,
                blobs,
                derived=self._capture.derived,
                choices=self._choices.report(results),
            )

    def _encoded_manifest(
        self, results: Mapping[int, ChunkResult], parts: Sequence[PartSummary]
    ) -> EncodedManifest:
        base = None if self._bases is None else self._bases.entry(results.values())
        with self._refusing_manifest(), collections_held:
            return self._manifest.encode(
                self.uid,
                parts,
                engine=self._backend.name,
                created=self._timing.clock.now_iso(),
                base=base,
            )

    @contextmanager
    def _refusing_manifest(self) -> Iterator[None]:
        try:
            yield
        except FormatError as error:  # a limit of readers; nothing stored is damaged
            msg = (
                f"step {self.request.step}: no reader would take its manifest, so nothing was "
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
        """Begin the commit, unless the save was given up; later it cannot be given up any more."""
        self._capture.check()
        self._before_commit(self.request)
        with self._ending.lock:
            self._raise_if_failed()
            self.commit.feed(Event.PUBLISH_STARTED)

    def _report(self, blobs: Sequence[tuple[str, int]]) -> SaveReport:
        now = time.monotonic()
        clock, request = self._clock, self.request
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
            codecs=self._choices.report(
                {n: r for n, r in enumerate(self._writer.results) if r is not None}
            ),
        )

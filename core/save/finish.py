"""Runs the steps of a save, from its intent to its commit or clean-up.

The save thread runs this module. `job` owns the threads and ends the save. This module catches an
error only where it handles it.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.core.catalog.commit_table import Commit, Event, State
from penstock.core.catalog.publisher import Publisher
from penstock.core.concurrency.latch import Latch
from penstock.core.concurrency.processes import identity_of
from penstock.core.concurrency.watchdog import Watchdog
from penstock.core.errors import (
    CommitUnknownError,
    ConfigError,
    SaveAbortedError,
    SaveError,
    SaveSkippedError,
    StorageTimeoutError,
)
from penstock.core.format.records import (
    index_name,
    intent_name,
    mark_name,
    part_name,
    staying_name,
)
from penstock.core.pipeline.auto import ChainChoices
from penstock.core.pipeline.links import load_link
from penstock.core.pipeline.writer import BATCH_BYTES, FrameWriter
from penstock.core.plan.writers import chunks_of_rank, derivable, spans_of_rank
from penstock.core.reporting.reports import SaveReport, SaveTotals
from penstock.core.save.bases import ChosenBase
from penstock.core.save.committer import Committer
from penstock.core.save.manifest import RankShare
from penstock.core.tree.paths import shown_place
from penstock.core.types import Replica

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.concurrency.workers import Workers
    from penstock.core.pipeline.chunks import Captured
    from penstock.core.plan.writers import RankPlaces
    from penstock.core.reporting.handle import Ending
    from penstock.core.save.bases import SaveBases
    from penstock.core.save.capture import CaptureRun
    from penstock.core.save.manifest import (
        ManifestWriter,
    )
    from penstock.core.save.request import Destination, SaveRequest, SaveTurn
    from penstock.core.tiers.save_drain import TierOfRanks

log = logging.getLogger("penstock")


@dataclass(slots=True)
class SaveClock:
    """The times of a save, on the monotonic clock.

    Attributes:
        called: When `save` was called.
        started: When the save was planned.
        blocked: Seconds for which the caller was blocked.
        captured: When everything was captured.
        commit_began: When all blobs were durable, and only the records were missing.
    """

    called: float
    started: float = field(default_factory=time.monotonic)
    blocked: float = 0.0
    captured: float | None = None
    commit_began: float | None = None


class Finish:
    """Writes the captured chunks, seals the blobs, and commits the manifest or cleans up.

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
        turn: SaveTurn,
    ) -> None:
        """Prepare to write; nothing has begun.

        Args:
            request: The plan and the options of the save.
            manifest: Encodes the manifest of the save.
            destination: The backend, and the slower tiers that make the checkpoint durable.
            capture: Hands captured chunks on.
            ending: Has the error if the save was given up.
            clock: Gets the time at which the commit begins.
            workers: The threads that hash and encode.
            bases: Frames that the save may refer to; None: every chunk is stored whole.
            turn: This save in its group of ranks.

        Raises:
            CoordinationError: The store of the job cannot be reached.
        """
        self.bytes_done = 0
        self.commit = Commit()
        self.may_write = Latch()
        """Opens when the capture no longer needs all of the memory bandwidth."""
        self._agreement = turn.agreement(
            self.commit,
            step=request.step,
            called_s=clock.called,
            alive=self._stay,
            look=self._look,
        )
        self._turn = turn
        self.uid = self._agreement.uid
        self._share = RankShare(masters=request.plan.masters)
        self._has_intent = False
        self.watchdog = Watchdog(request.io_timeout_s, workers.timing.clock)
        self.request = request
        self._manifest = manifest
        self._destination = destination
        self._bases = bases
        self._capture = capture
        self._ending = ending
        self._clock = clock
        self._workers = workers
        self._write_to(destination.backend)

    def _write_to(self, backend: Backend) -> None:
        """Write to `backend`. The save has not written anything yet."""
        request = self.request
        self._backend = backend
        self._publisher = Publisher(
            backend,
            self.commit,
            uid=self.uid,
            step=request.step,
            grace_s=request.grace_s,
            process=identity_of(os.getpid()),
            clock=self._workers.timing.clock,
        )
        choices = ChainChoices(
            request.plan,
            request.chains,
            auto=request.auto,
            store=backend.url,
            workers=self._workers,
            blocking=request.mode == "blocking",
        )
        self._writer = FrameWriter(
            backend,
            request.plan,
            choices=choices,
            block_bytes=request.block_bytes,
            workers=self._workers,
            blob_prefix=f"data/{self.uid}/blobs/{self._turn.rank:05d}-0",
            release=self._capture.release,
            tick=self._tick,
            # More hashers would take cores from training; one is faster than most stores.
            hashers=self._workers.count if request.mode == "blocking" else 1,
            share=request.share,
            bases=self._bases,
        )

    @property
    def url(self) -> str:
        """The URL of the backend that the save writes to."""
        return self._backend.url

    def run(self, before_commit: Callable[[SaveRequest, str], None]) -> SaveReport:
        """Run the steps from the intent to the commit record.

        Args:
            before_commit: Called right before the commit; raises if the save must not commit.

        Raises:
            SaveAbortedError: The save was given up; call `clean_up`.
            PenstockError: A step failed; call `clean_up`.
        """
        self._raise_if_failed()
        self._begin()
        self._tick()
        self._load_codecs()
        self._write_chunks()
        self._wait_captured()
        blobs = self._writer.finish()
        results, derived = self._writer.results, self._share.derived(self._capture.derived)
        written = [
            number
            for number, chunk in enumerate(self.request.plan.chunks)
            if self._share.writes(number) and chunk.pieces[0].item not in derived
        ]
        if len(results) != len(written):
            msg = f"step {self.request.step}: not every chunk was written; this is a bug"
            raise SaveError(msg)
        self._clock.commit_began = time.monotonic()
        bases, committer = self._bases, self._committer(before_commit)
        try:
            part = committer.encode_part(
                results,
                blobs,
                share=self._share,
                derived=derived,
                choices=self._writer.choices.report(results),
            )
            refers = bases is not None and bases.refer(results.values())
            self._capture.check()
            committer.commit(part, share=self._share, derived=derived, refers=refers)
        finally:
            committer.forget()
        if bases is not None:  # the next save may refer to it
            bases.committed(self.uid, part.stored_frames(self.request.block_bytes))
        return self._report(blobs)

    def _committer(self, before_commit: Callable[[SaveRequest, str], None]) -> Committer:
        def begin() -> None:
            """Begin the commit, unless the save was given up. Later it cannot be given up."""
            self._capture.check()
            before_commit(self.request, self.uid)
            with self._ending.lock:
                self._raise_if_failed()
                self.commit.feed(Event.PUBLISH_STARTED)

        return Committer(
            request=self.request,
            manifest=self._manifest,
            backend=self._backend,
            publisher=self._publisher,
            agreement=self._agreement,
            bases=self._bases,
            known=self._turn.known,
            onward=self._destination.onward,
            state=self.commit,
            clock=self._workers.timing.clock,
            check=self._raise_if_failed,
            begin=begin,
            tick=self._tick,
        )

    def _load_codecs(self) -> None:
        with self.watchdog.paused(), self._ending.calling_back():
            for chain in self.request.chains:
                for codec in chain.codecs if chain else ():
                    load_link(codec)

    def clean_up(self, capture_over: Latch) -> None:
        """Release the memory of a failed save, and delete its data if no reader can need it.

        On return nothing is in flight. The data stays if the commit record may exist.

        Args:
            capture_over: Opens when no thread captures for this save.
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
            self._backend.delete(self._own_names())
        except BaseException as error:  # noqa: BLE001 - the data is left to `prune`
            log.warning(
                "data/%s, of a save that failed, could not be deleted and stays for prune: %s",
                self.uid,
                repr(error),
            )
        else:
            log.debug("step %d: cleaned up, data/%s is gone", self.request.step, self.uid)

    def arrive(self) -> None:
        """Report to the other ranks that this rank takes part.

        Waits until the state's devices are idle, since ranks compare samples of device memory.

        Raises:
            SaveAbortedError: The save was given up; nothing is reported.
        """
        self._raise_if_given_up()
        more = {} if self._destination.choice is None else self._destination.choice.arrival()
        self._agreement.arrive(self._turn.brought, more)

    def give_up(self, error: BaseException) -> BaseException:
        """Report to the other ranks that this rank has failed; return the error.

        On return, `commit` knows what may be deleted. The error names the rank that caused it.
        """
        if not self._turn.begun:
            return error  # the save may be prepared again under its number; the caller reports it
        if self._destination.choice is not None:
            self._destination.choice.failed(error)
        cause = self._ending.error if isinstance(error, SaveAbortedError) else None
        verdict = self._agreement.give_up(cause or error)
        return error if verdict is cause else verdict

    def leave(self) -> None:
        """Wait until the other ranks can learn how the save ended."""
        self._agreement.finish()

    def moved(self) -> None:
        """Report progress to the other ranks."""
        self._agreement.moved(self.bytes_done, self.request.plan.raw_bytes)

    def check_ranks(self) -> None:
        """Raise if another rank has failed; any thread may call this.

        Raises:
            PenstockError: The save is given up.
        """
        self._agreement.check()

    def _own_names(self) -> list[str]:
        """Return the names of everything that this process has stored for the save."""
        blobs = self._writer.blob_names
        if self._agreement.alone:
            names = [b.name for b in self._backend.list(f"data/{self.uid}/")]
            # Names of aborted blobs too: a store of files then removes the empty folder.
            return list(dict.fromkeys([*names, *blobs]))
        # The other ranks delete their own data, or have to keep it.
        names = [part_name(self.uid, self._agreement.rank), *blobs]
        if self._agreement.leads:
            names += [index_name(self.uid), intent_name(self.uid)]
            if self._destination.onward is not None:  # it has marked what to copy
                names += [mark_name(self.uid), staying_name(self.uid)]
        return names

    def forget(self) -> None:
        """Drop all references to the state after the save, so that the user can free it."""
        self._capture.forget()
        self._turn.brought = self._turn.brought.without_state()
        del self._manifest, self._writer
        self._bases = None
        plan = replace(self.request.plan, objects=(), chunks=())
        self.request = replace(self.request, entries=(), plan=plan)

    def stuck_error(self, stuck_s: float) -> BaseException:
        """Return the error for a store that made no progress for `stuck_s` seconds.

        Called under the lock of `ending`, so that no publish can begin between this check of the
        commit's state and the failure of the save.
        """
        may_exist = self.commit.state in {State.PUBLISHING, State.UNKNOWN}
        outcome = (
            "the commit record was being published, so the checkpoint may or may not exist"
            if may_exist
            else "nothing was committed"
        )
        msg = (
            f"step {self.request.step}: {self._backend.url} made no progress for {stuck_s:.0f} s "
            f"(io_timeout_s={self.request.io_timeout_s:g}); {outcome}"
        )
        return CommitUnknownError(msg) if may_exist else StorageTimeoutError(msg)

    def _tick(self, size_bytes: int = 0) -> None:
        """Note that the store made progress, or has nothing to do."""
        self.bytes_done += size_bytes
        self.watchdog.moved()
        self.moved()

    def _stay(self) -> None:
        """Keep the watchdog and the intent alive during a wait for ranks; raise if given up."""
        self.watchdog.moved()
        self._raise_if_given_up()
        if self._has_intent:
            self._publisher.refresh_intent()

    def _look(self, generation: int) -> Event:
        return self._publisher.look(generation)

    def _raise_if_given_up(self) -> None:
        if self._ending.error is not None:
            msg = f"step {self.request.step}: given up"
            raise SaveAbortedError(msg) from self._ending.error

    def _raise_if_failed(self) -> None:
        self._raise_if_given_up()
        self.check_ranks()

    def _begin(self) -> None:
        """Wait until rank 0 and the capture allow writing."""
        agreement = self._agreement
        if agreement.leads:
            arrivals = agreement.gather()
            terms: dict[str, Any] = {
                "generation": self.request.generation,
                "providers": dict(self.request.providers),
                "latest": self._turn.latest,
            }
            if self._destination.choice is not None:
                terms["tier"] = self._choose_tier(self._destination.choice, arrivals)
            self._publish_intent()
            self._has_intent = True
            terms["base"] = None if self._bases is None else self._bases.chosen
            agreement.go(arrivals, terms)
        places = agreement.wait_for_go()
        if not agreement.leads:
            self._follow()
            self.request = replace(self.request, generation=int(agreement.terms["generation"]))
        if places is not None:
            self._divide(places)
        if self._bases is not None:
            base = agreement.terms["base"]
            if base is not None and not agreement.leads:
                self._bases.adopt(self._backend, ChosenBase(*base))
            self._bases.find(self._share.chunks)
            self._tick()
        # Writing earlier would take memory bandwidth from the copies that training waits for.
        while not self.may_write.wait(self._workers.timing.capture_poll_s):
            self._tick()
            self._raise_if_failed()

    def _divide(self, places: RankPlaces) -> None:
        """Choose this rank's share of the chunks that several ranks hold."""
        agreement, plan = self._agreement, self.request.plan
        chunks = chunks_of_rank(plan, places, writer_bytes=agreement.writer_bytes)
        plan.spans.update(spans_of_rank(plan, chunks))
        self._share = RankShare(
            agreement.rank,
            agreement.world_size,
            chunks,
            lists_all=places.plain.index == 0,
            own_paths=tuple(
                path
                for path in self.request.own_paths
                if places.shared.get(shown_place(path), Replica()).index == 0
            ),
            masters=derivable(plan, chunks, places.plain, agreement.world_size),
        )

    def _choose_tier(self, choice: TierOfRanks, arrivals: Mapping[int, Mapping[str, Any]]) -> str:
        """Choose the tier that all ranks write to; return its name."""

        def wait() -> None:
            self._stay()
            self._tick()  # the save only waits for room
            self.check_ranks()

        chosen = choice.choose(arrivals, wait)
        if chosen is None:
            reason = "no tier has room for it; see the log of rank 0"
            self._agreement.skip(reason)
            msg = f"step {self.request.step} was skipped: {reason}"
            raise SaveSkippedError(msg)
        name, backend = chosen
        self._write_to(backend)
        return name

    def _follow(self) -> None:
        """Write to the backend that rank 0 chose, if this rank sees the same one.

        Raises:
            ConfigError: The backends of the ranks differ.
            SaveError: This rank does not see what rank 0 has published there.
        """
        name, choice = self._agreement.terms.get("tier"), self._destination.choice
        if (name is None) is not (choice is None):
            here, there = ("one place", "tiers") if choice is None else ("tiers", "one place")
            msg = (
                f"step {self.request.step}: the backend of this rank has {here}, but that of rank "
                f"0 has {there}: give all ranks the same configuration"
            )
            raise ConfigError(msg)
        if choice is not None:
            self._write_to(choice.follow(str(name)))
        self._agreement.check_shared(self._backend, intent_name(self.uid), tier=name)

    def _publish_intent(self) -> None:
        if self._bases is None:
            self._publisher.publish_intent()
            return
        references = self._bases.choose(self._backend)
        self._tick()
        self._publisher.publish_intent(references=references)
        # Only now: a deletion deletes the record before it reads the intents. So if it has missed
        # this intent, the record is gone by now.
        self._bases.confirm()

    def _write_chunks(self) -> None:
        chunks_left = self._capture.chunk_count
        while chunks_left:
            self._raise_if_failed()
            if self._agreement.leads:
                self._publisher.refresh_intent()
            batch = self._next_batch()
            if batch:
                chunks_left -= len(batch)
                self._writer.put(self._stored_here(batch))
            else:
                self._writer.settle_oldest()

    def _stored_here(self, batch: list[Captured]) -> list[Captured]:
        """Return the chunks to write; release those of other ranks and of derived objects."""
        if self._share.chunks is None and not self._capture.derived:
            return batch
        stored, derived = [], self._share.derived(self._capture.derived)
        for captured in batch:
            chunk = self.request.plan.chunks[captured.index]
            if not self._share.writes(captured.index):
                self._capture.release(captured)
            elif chunk.pieces[0].item in derived:
                self._capture.release(captured)
                self._tick(chunk.length)
            else:
                stored.append(captured)
        return stored

    def _next_batch(self) -> list[Captured]:
        """Return captured chunks, at most a batch; wait a little if nothing is in flight."""
        batch: list[Captured] = []
        handed_on = self._capture.handed_on
        size = 0
        try:
            if self._writer.idle:
                batch.append(handed_on.get(timeout=self._workers.timing.capture_poll_s))
                size = batch[0].view.nbytes
            while size < BATCH_BYTES:
                batch.append(handed_on.get(block=False))
                size += batch[-1].view.nbytes
        except queue.Empty:
            pass
        if batch:
            self._capture.wake()
        elif self._writer.idle:
            self._tick()  # the wait is for training, so the store is not stuck
        return batch

    def _wait_captured(self) -> None:
        """Wait for the end of the capture, which may still find a changed tensor."""
        while not self._writer.idle:
            self._writer.settle_oldest()
        while not self._ending.handle.captured.done():
            self._tick()
            self._ending.handle.captured.wait(self._workers.timing.capture_poll_s)
        self._raise_if_failed()

    def _report(self, blobs: Sequence[tuple[str, int]]) -> SaveReport:
        now = time.monotonic()
        clock, request = self._clock, self.request
        capabilities = self._backend.capabilities
        written = SaveTotals(
            request.plan.bytes_of_chunks(self._share.chunks),
            sum(length for _, length in blobs),
            len(blobs),
        )
        totals = self._agreement.totals
        return SaveReport(
            step=request.step,
            uid=self.uid,
            generation=request.generation,
            bytes_raw=written.bytes_raw,
            bytes_stored=written.bytes_stored,
            blobs=written.blobs,
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
            ranks=request.world_size,
            total=SaveTotals(*totals) if totals else written,
            codecs=self._writer.choices.report(self._writer.results),
        )

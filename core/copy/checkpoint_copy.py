"""Copies one committed checkpoint from one store to another, byte for byte.

The copy writes in the order of a save: the intent, the blobs, the parts and index, and last the
commit record. So wherever the copy ends, the target never lists or reads half a checkpoint, and the
next copy need not copy sealed blobs again. `prune` deletes nothing of a copy in flight.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from penstock.core.abc import host_roots
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.commit_table import Commit, Event
from penstock.core.catalog.notes import carry_notes
from penstock.core.catalog.publisher import Publisher
from penstock.core.catalog.survey import places_of, sizes_of
from penstock.core.concurrency.watchdog import call_with_deadline
from penstock.core.copy.blob_sites import BlobSites
from penstock.core.copy.confirmation import (
    check_same_manifest,
    confirmed,
    verify_blobs,
)
from penstock.core.copy.copy_source import CopySource
from penstock.core.copy.mover import BlobMover, BlobTransfer, Callbacks
from penstock.core.copy.target_files import TargetFiles
from penstock.core.errors import (
    BlobExistsError,
    BusyError,
    CheckpointNotFoundError,
    FormatError,
    SaveAbortedError,
    StepExistsError,
    StorageError,
)
from penstock.core.format.records import (
    blob_uid,
)
from penstock.core.suggest import listed
from penstock.core.types import PAGE_BYTES
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from penstock.core.abc import Backend
    from penstock.core.concurrency.workers import Workers
    from penstock.core.copy.mover import CheckedBlob
    from penstock.core.format.records import CommitRecord
    from penstock.core.types import ByteRange

log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The result of a copy: the checkpoint is whole and durable at the target.

    Attributes:
        step: The step of the checkpoint.
        uid: The uid of the attempt, the same at both places.
        generation: The generation at the target.
        seconds: The duration of the copy.
        bytes_copied: The bytes of the blobs that were copied.
        bytes_kept: The bytes of the blobs that were already there.
        blobs: The number of blobs.
        already_there: Whether the checkpoint was already committed there; then its files were
            compared by name and size, and its blobs were not read.
    """

    step: int
    uid: str
    generation: int
    seconds: float
    bytes_copied: int = 0
    bytes_kept: int = 0
    blobs: int = 0
    already_there: bool = False


@dataclass(frozen=True, slots=True)
class HelperCalls:
    """The callbacks of a `BlobHelper`.

    Attributes:
        sealed: Called with the name of each blob that is durable.
        discard: Called with the names of blobs that another process may have left unfinished,
            before others copy them.
        moved: Called with the number of additional bytes that were copied.
        pause: Waits between two looks at the other processes; raises to end the copy.
    """

    sealed: Callable[[str], None]
    discard: Callable[[Collection[str]], None]
    moved: Callable[[int], None]
    pause: Callable[[float], None]


BlobHelper: TypeAlias = (
    "Callable[[CommitRecord, Sequence[CheckedBlob], str, HelperCalls], set[str]]"
)
"""Copies blobs in other processes, under the lease with a token.

Returns the names of the blobs that are durable at the target; on return, no copy runs.
"""


class CheckpointCopy:
    """Copies one checkpoint. Call `run` once, and `cancel` from any thread.

    Compares every checksum as the bytes pass, and changes nothing at the source. If the copy fails,
    crashes or is cancelled before it publishes the commit record, another copy can continue from
    there, or `prune` at the target deletes the orphans.
    """

    def __init__(  # noqa: PLR0913 - options, each by name
        self,
        source: Backend,
        target: Backend,
        record: CommitRecord,
        *,
        workers: Workers,
        buffer_bytes: int = 64 << 20,
        grace_s: float,
        bytes_per_s: float | None = None,
        trust_sealed: bool = False,
        replace: bool | Collection[str] = True,
        repair: bool = False,
        check_cover: bool = False,
        helper: BlobHelper | None = None,
    ) -> None:
        """Prepare a copy, without I/O.

        Args:
            source: The place to copy from.
            target: The place to copy to; with tiers, the last of them.
            record: The commit record, as `Catalog(source).record(step)` returns it. With a higher
                generation the checkpoint replaces the target's at that step.
            workers: The threads that compare checksums, seal and wait.
            buffer_bytes: The memory for blobs in flight; the copy also holds one record at a time.
            grace_s: The grace time of the target's `prune`, in seconds.
            bytes_per_s: Maximum bytes to copy per second; None sets no limit.
            trust_sealed: Whether to keep, without reading them, blobs that an earlier copy sealed.
            replace: Whether to replace another checkpoint of a lower generation at that step; or
                the uids of the checkpoints to replace.
            repair: Whether the target's copy is damaged, and its record was deleted for this copy.
                Then the remaining data is replaced even without a lease.
            check_cover: Whether to refuse a checkpoint whose parts lack elements of an object. The
                check needs memory for all its records. A drain does not check: an incomplete
                checkpoint is better in two places than in one.
            helper: Copies the blobs that it can; this copy moves the others.
        """
        self._source = source
        self._run_target = target
        # Called once: a backend may wrap its tiers again at each call, and `TargetFiles` compares
        # them.
        places = places_of(target)
        self._target = target = places[-1]
        self._record = record
        self._workers = workers
        self._trust_sealed = trust_sealed
        self._replace = replace
        self._repair = repair
        self._check_cover = check_cover
        self._helper = helper
        self._contents = CopySource(source, record)
        self._sites = BlobSites(target, record, workers.timing, grace_s=grace_s)
        self._commit = Commit()
        self._publisher = Publisher(
            target,
            self._commit,
            uid=record.uid,
            step=record.step,
            grace_s=grace_s,
            clock=workers.timing.clock,
        )
        self._files = TargetFiles(
            places,
            record,
            lease=self._sites.own,
            publisher=self._publisher,
            timing=workers.timing,
            repair=repair,
        )
        self._waited = False  # for deletions under way
        self._read: set[str] = set()  # blobs that were read at the target
        self._spoiled: set[str] = set()  # blobs of an earlier copy that are damaged or missing
        self._on_progress: Callable[[int], None] | None = None
        both = source.capabilities, target.capabilities
        self._mover = BlobMover(
            workers=workers,
            buffer_bytes=buffer_bytes,
            unit_bytes=max(
                PAGE_BYTES, *(max(c.offset_alignment, c.memory_alignment) for c in both)
            ),
            bytes_per_s=bytes_per_s,
            calls=Callbacks(
                moved=self._moved,
                sealed=self._sites.seal,
                damaged=self._damaged,
                missing=self._missing,
                alive=self._alive,
                owned=self._owned,
            ),
        )

    def run(self, *, on_progress: Callable[[int], None] | None = None) -> CopyReport:
        """Copy the checkpoint; on return it is committed and durable at the target.

        Args:
            on_progress: Called on the copy's own thread with the bytes of blobs that were copied or
                kept: `record.bytes_needed` in total, less own blobs that `trust_sealed` kept
                unread. An error that it raises ends the copy.

        Raises:
            DamagedError: The source is damaged; names the objects.
            CheckpointGoneError: The checkpoint was deleted at the source meanwhile.
            StepExistsError: The target has another checkpoint at that step or with this uid.
            BusyError: Another process has taken over, or copies this checkpoint or one that needs
                the same blobs. Or the target has data of this checkpoint, or of saves that it
                borrows from, that no copy wrote. Or the target has damaged blobs that other
                checkpoints need.
            SaveAbortedError: The copy was cancelled; or it stalled so long that prune may delete
                its data; or a file that it had written is gone.
            LostRaceError: Another saver published that step first.
            CommitUnknownError: The checkpoint may or may not exist at the target.
            StorageError: A store failed.
        """
        self._on_progress = on_progress
        return call_with_deadline(
            "copy", self._run, timing=self._workers.timing, cancel=self.cancel
        )

    def cancel(self) -> None:
        """Make `run` end soon with a SaveAbortedError, unless it has begun to publish the record.

        Thread-safe.
        """
        self._mover.cancel()

    # ------------------------------------------------------------------------------------------

    def _run(self) -> CopyReport:
        began_s = time.monotonic()
        record = self._record
        self._mover.check()
        there = self._at_target()
        if there is not None:
            carry_notes(self._source, self._target, record)
            seconds = time.monotonic() - began_s
            return CopyReport(record.step, record.uid, there, seconds, already_there=True)
        self._files.check()
        blobs = self._contents.read()
        if self._check_cover:
            self._contents.check_cover()
        self._sites.own.take()
        try:
            kept = self._copy(blobs)
        except BaseException:
            self._commit.feed(Event.FAILED)
            if self._files.wrote:
                self._sites.release()
            else:
                self._sites.own.remove()  # else data of another save there would count as a copy's
            raise
        self._sites.remove()
        self._remove_replaced()
        copied = sum(blob.length for blob in blobs if blob.name not in kept)
        kept_bytes = sum(blob.length for blob in blobs if blob.name in kept)
        seconds = time.monotonic() - began_s
        log.debug(  # at debug level: the caller logs the copy in its own words
            "copied step %d from %s to %s: %s in %.2f s, %s were kept",
            record.step,
            self._source.url,
            self._target.url,
            size_text(copied),
            seconds,
            size_text(kept_bytes),
        )
        return CopyReport(
            record.step, record.uid, record.generation, seconds, copied, kept_bytes, len(blobs)
        )

    def _copy(self, blobs: Sequence[CheckedBlob]) -> Collection[str]:
        """Copy everything, from intent to commit record; return the names of kept blobs."""
        if self._files.begin():
            self._await_deletions()
        kept = self._sites.settle(
            blobs,
            repair=self._repair,
            read=self._damaged_at_target,
            check_source=lambda: self._check_source(on_look=self._look),
            await_deletions=self._await_deletions,
            trust_sealed=self._trust_sealed,
        )
        if unread := self._unread_bytes(blobs, kept):
            self._moved(unread)
        left = [blob for blob in blobs if blob.name not in kept]
        if self._helper is not None and left:
            calls = HelperCalls(self._sites.seal, self._discard, self._moved, self._mover.pause)
            done = self._helper(self._record, left, self._sites.own.token, calls)
            left = [blob for blob in left if blob.name not in done]
        try:
            self._mover.run(BlobTransfer(blob, self._source, self._target) for blob in left)
        except BlobExistsError:
            self._sites.check()  # raises BusyError if another copy has taken over
            raise
        self._mover.check()
        self._commit.feed(Event.SEALED)
        for name, data in self._contents.records():
            self._mover.check()
            self._sites.refresh()
            self._files.publish(name, data)
        self._sites.check()
        self._check_whole(blobs)
        if not isinstance(self._replace, bool):
            self._at_target()  # another node may have overwritten the step there meanwhile
        self._carry_notes()
        self._publisher.publish_commit(self._record, begin=self._begin_to_publish)
        carry_notes(self._source, self._target, self._record)  # notes that were added meanwhile
        return kept

    def _discard(self, names: Collection[str]) -> None:
        self._sites.check()  # else they may be the blobs of another copy
        self._target.delete(sorted(names))

    def _at_target(self) -> int | None:
        """Return the generation of the checkpoint at the target; None if it is not there.

        Raises:
            StepExistsError: Another checkpoint is at that step, and must not be replaced.
        """
        record, url = self._record, self._run_target.url
        try:
            newest = Catalog(self._run_target).record(record.step)
        except CheckpointNotFoundError:
            return None
        if newest.uid == record.uid:
            check_same_manifest(self._run_target, newest, record)
            there = confirmed(self._target, newest, first=self._check_source)
            return newest.generation if there else None
        if newest.generation < record.generation and self._makes_way(newest):
            return None  # the copy has a higher generation, so it will replace the other checkpoint
        msg = (
            f"{url} has another checkpoint at step {record.step} ({newest.uid}, generation "
            f"{newest.generation}). Delete it there, or replace it with `penstock copy "
            "--overwrite`."
        )
        raise StepExistsError(msg)

    def _makes_way(self, there: CommitRecord) -> bool:
        if isinstance(self._replace, bool):
            return self._replace
        # A compaction has the objects of its original checkpoint, so it is replaced with it.
        return there.uid in self._replace or there.compacts in self._replace

    def _check_source(self, *, on_look: Callable[[], None] = lambda: None) -> None:
        verify_blobs(self._source, self._record, workers=self._workers, on_look=on_look)

    def _await_deletions(self) -> None:
        """Wait, once, for deletions that may not have seen the intent of this copy."""
        if self._waited:
            return
        try:
            self._mover.pause(self._workers.timing.deletion_s)
        except BaseException:
            self._files.take_back_intent()
            raise
        self._waited = True

    # -- what an earlier copy left ----------------------------------------------------------------

    def _damaged_at_target(self, blobs: Sequence[CheckedBlob]) -> set[str]:
        """Read blobs that the target has; return the names of those that are damaged or missing."""
        self._read.update(blob.name for blob in blobs)
        if blobs:
            self._mover.run(BlobTransfer(blob, self._target, None) for blob in blobs)
        return self._spoiled & {blob.name for blob in blobs}

    def _unread_bytes(self, blobs: Sequence[CheckedBlob], kept: Collection[str]) -> int:
        """Return the size of blobs kept unread because a checkpoint there needs them."""
        lent = [blob for blob in blobs if blob.name in kept and blob.name not in self._read]
        return sum(blob.length for blob in lent if blob_uid(blob.name) != self._record.uid)

    # -- calls of the mover -----------------------------------------------------------------------

    def _moved(self, size_bytes: int) -> None:
        if self._on_progress is not None:
            self._on_progress(size_bytes)

    def _look(self) -> None:
        self._mover.check()
        self._alive()

    def _alive(self) -> None:
        self._publisher.refresh_intent()
        self._sites.refresh()

    def _owned(self) -> bool:
        try:
            self._sites.check()
        except BusyError:
            return False
        except StorageError:
            pass  # a store that does not answer will not execute an abort either
        return True

    def _damaged(self, transfer: BlobTransfer, ranges: list[ByteRange]) -> None:
        name = transfer.blob.name
        if transfer.target is None:  # a blob of an earlier copy
            if name not in self._spoiled:
                log.warning("%s on %s is damaged, so it is copied again", name, transfer.source.url)
            self._spoiled.add(name)
            return
        raise self._contents.damage(name, ranges)

    def _missing(self, transfer: BlobTransfer, error: StorageError) -> None:
        if transfer.target is None:
            self._spoiled.add(transfer.blob.name)
            return
        raise self._contents.missing(FormatError(str(error), [transfer.blob.name])) from error

    # -- publishing -------------------------------------------------------------------------------

    def _carry_notes(self) -> None:
        try:
            carry_notes(self._source, self._target, self._record)
        except StorageError:
            if not (places := host_roots(self._source)):
                raise
            # A lost host must not keep the checkpoint from the target. The other hosts have its
            # notes, unless one of them could not publish them. So the call after the commit raises,
            # and the checkpoint stays marked until a copy has seen the notes of all hosts.
            for root in (root for place in places.values() for root in place.roots):
                with suppress(StorageError):
                    carry_notes(root.backend, self._target, self._record)

    def _check_whole(self, blobs: Sequence[CheckedBlob]) -> None:
        """List the target's files again, since one may have been deleted during the copy.

        Raises:
            SaveAbortedError: A file is missing.
        """
        sizes = sizes_of(self._target, self._record)
        parts = {entry.name: entry.length for entry in self._contents.parts}
        index = self._record.index
        wanted = {b.name: b.length for b in blobs} | parts | {index.name: index.length}
        wrong = sorted(name for name, length in wanted.items() if sizes.get(name) != length)
        if wrong:
            msg = (
                f"step {self._record.step} was not committed on {self._target.url}: "
                f"{listed(wrong)} vanished while the rest was copied. Copy again."
            )
            raise SaveAbortedError(msg)

    def _begin_to_publish(self) -> None:
        """Check for `cancel` one last time: from here on the record may exist."""
        self._mover.check()
        self._sites.check_age()
        self._commit.feed(Event.PUBLISH_STARTED)

    def _remove_replaced(self) -> None:
        """Delete older generations, as an overwriting save does; if this fails, `prune` does it."""
        if not self._record.generation:
            return
        try:
            Catalog(self._run_target).delete_older_generations(
                self._record.step, self._record.generation
            )
        except Exception as error:  # noqa: BLE001 - logged: the checkpoint is committed already
            log.warning(
                "step %d: the replaced generations could not be deleted, and stay until prune: %s",
                self._record.step,
                str(error),
            )

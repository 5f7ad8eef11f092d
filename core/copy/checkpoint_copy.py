"""Copies one committed checkpoint from one store to another, byte for byte.

The target sees what it would see of a save: the intent, the blobs, part and index, and last the
commit record. So nobody can list, prune or read half of a checkpoint there, whatever happens to
the copy; and what was sealed before it ended needs not be copied again.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.commit_table import Commit, Event
from penstock.core.catalog.publisher import Publisher
from penstock.core.catalog.survey import last_place, read_commit
from penstock.core.concurrency.watchdog import call_with_deadline
from penstock.core.copy.copy_source import CopySource
from penstock.core.copy.lease import Claim, claim_name
from penstock.core.copy.mover import BlobMover, BlobTransfer, Calls
from penstock.core.copy.verify import (
    check_same_manifest,
    check_uid_is_free,
    confirmed,
    verify_blobs,
)
from penstock.core.errors import (
    BlobExistsError,
    BusyError,
    FormatError,
    SaveAbortedError,
    SaveError,
    StepExistsError,
    StorageError,
)
from penstock.core.format.records import data_prefix, intent_name, mark_name, staying_name
from penstock.core.suggest import listed
from penstock.core.types import PAGE_BYTES
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.concurrency.workers import Workers
    from penstock.core.copy.checks import CheckedBlob
    from penstock.core.format.records import CommitRecord
    from penstock.core.types import BlobInfo, ByteRange

log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class CopyReport:
    """One checkpoint that is whole and durable at the target.

    Attributes:
        step: Its step.
        uid: The name of the attempt, the same at both places.
        generation: Its generation at the target.
        seconds: How long it took.
        bytes_copied: Bytes of the blobs that were copied.
        bytes_kept: Bytes of the blobs that an earlier copy had brought there.
        blobs: Number of blobs.
        already_there: Whether it was committed there before; then only the sizes of what is there
            were looked at.
    """

    step: int
    uid: str
    generation: int
    seconds: float
    bytes_copied: int = 0
    bytes_kept: int = 0
    blobs: int = 0
    already_there: bool = False


class CheckpointCopy:
    """The copy of one checkpoint. `run` once; `cancel` from any thread.

    Every checksum is compared as the bytes pass. Nothing of the source is changed. After a
    failure, a crash or `cancel` the target has no commit record of it; another copy goes on from
    there, or `prune` at the target takes what is left.
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
    ) -> None:
        """Prepare to copy; nothing is touched.

        Args:
            source: Where it is.
            target: Where it shall be, too; with tiers, in the last of them.
            record: Its commit record, as `Catalog(source).record(step)` gives it; with a higher
                generation it replaces what the target has at that step.
            workers: Threads for checksums and for what waits.
            buffer_bytes: Memory for blobs on their way; records are held one at a time beside it.
            grace_s: As the target's `prune` has it.
            bytes_per_s: Most that is copied per second; None: as fast as it goes.
            trust_sealed: Do not read again what an earlier copy has noted as durable.
            replace: Whether another checkpoint of a lower generation at that step makes way; or
                the uids of those that do.
            repair: Whether the target's copy is known to be damaged, and its record was deleted for
                this one: then what is left of it makes way, though no claim is there.
        """
        self._source = source
        self._whole = target
        self._target = target = last_place(target)
        self._record = record
        self._workers = workers
        self._grace_s = grace_s
        self._trust_sealed = trust_sealed
        self._replace = replace
        self._repair = repair
        self._contents = CopySource(source, record)
        self._claim = Claim(target, record.uid, workers.timing)
        self._commit = Commit()
        self._publisher = Publisher(
            target,
            self._commit,
            uid=record.uid,
            step=record.step,
            grace_s=grace_s,
            clock=workers.timing.clock,
        )
        self._wrote = False  # whether anything at the target may be of this or an earlier copy
        self._spoilt: dict[str, None] = {}
        self._on_progress: Callable[[int], None] | None = None
        both = source.capabilities, target.capabilities
        self._mover = BlobMover(
            workers=workers,
            buffer_bytes=buffer_bytes,
            unit_bytes=max(
                PAGE_BYTES, *(max(c.offset_alignment, c.memory_alignment) for c in both)
            ),
            bytes_per_s=bytes_per_s,
            calls=Calls(
                moved=self._moved,
                sealed=self._claim.seal,
                damaged=self._damaged,
                missing=self._missing,
                alive=self._alive,
                owned=self._owned,
            ),
        )

    def run(self, *, on_progress: Callable[[int], None] | None = None) -> CopyReport:
        """Copy it; on return it is committed and durable at the target.

        Args:
            on_progress: Called with bytes of blobs that were copied, or found there and verified,
                on a thread of the copy's own; `record.bytes_stored` in all. What it raises ends
                the copy.

        Raises:
            DamagedError: The source is not what was written; names the objects.
            CheckpointGoneError: It was deleted at the source meanwhile.
            StepExistsError: The target has another checkpoint at that step, or uses the uid of
                this one for something else.
            BusyError: Another process copies the same checkpoint there, or has taken over; or
                there is data of it that no copy has brought.
            SaveAbortedError: It was cancelled, or slept so long that its data may be pruned.
            LostRaceError: Another saver published that step first.
            CommitUnknownError: It may or may not exist at the target.
            StorageError: A store failed.
        """
        self._on_progress = on_progress
        return call_with_deadline(
            "copy", self._run, timing=self._workers.timing, cancel=self.cancel
        )

    def cancel(self) -> None:
        """Make `run` end soon with a SaveAbortedError, unless it has begun to publish the record.

        From any thread.
        """
        self._mover.cancel()

    # ------------------------------------------------------------------------------------------

    def _run(self) -> CopyReport:
        began_s = time.monotonic()
        record = self._record
        if record.references:
            msg = (
                f"step {record.step} on {self._source.url} uses data of {len(record.references)} "
                "other save(s), which a copy byte for byte does not take along"
            )
            raise SaveError(msg)
        self._mover.check()
        there = self._at_target()
        if there is not None:
            seconds = time.monotonic() - began_s
            return CopyReport(record.step, record.uid, there, seconds, already_there=True)
        self._check_data(claimed=self._repair or self._has_claim())
        blobs = self._contents.read()
        self._claim.take()
        try:
            kept = self._copy(blobs)
        except BaseException:
            self._commit.feed(Event.FAILED)
            if self._wrote:
                self._claim.release()
            else:
                self._claim.withdraw()  # else what lies beside it would look like a copy's
            raise
        self._claim.remove()
        self._remove_replaced()
        copied = sum(blob.length for blob in blobs if blob.name not in kept)
        kept_bytes = sum(blob.length for blob in blobs if blob.name in kept)
        seconds = time.monotonic() - began_s
        log.debug(  # who asked for it says so
            "copied step %d from %s to %s: %s in %.2f s, %s were there",
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
        """Everything from the intent to the commit record; returns what was there already."""
        self._wrote = self._builds_on
        self._check_data(claimed=self._builds_on)
        left = self._target.list(f"{data_prefix(self._record.uid)}blobs/")
        self._publish_intent()
        kept = self._still_good(blobs, left)
        self._claim.keep(kept)
        if doomed := sorted({info.name for info in left} - kept):
            self._claim.check()  # behind the request before, which may have been held up for long
            self._target.delete(doomed)
        try:
            self._mover.run(
                BlobTransfer(blob, self._source, self._target)
                for blob in blobs
                if blob.name not in kept
            )
        except BlobExistsError:
            self._claim.check()  # the likeliest reason is that another copy has taken over
            raise
        self._mover.check()
        self._commit.feed(Event.SEALED)
        for name, data in self._contents.records():
            self._mover.check()
            self._claim.refresh()
            self._publish(name, data)
        self._claim.check()
        self._check_whole(blobs)
        if not isinstance(self._replace, bool):
            self._at_target()  # somebody may have overwritten the step there meanwhile
        self._publisher.publish_commit(self._record, begin=self._begin_to_publish)
        return kept

    def _at_target(self) -> int | None:
        """The generation under which it is committed there already, if it is.

        Raises:
            StepExistsError: Another checkpoint is at that step, which this does not replace.
        """
        record, url = self._record, self._whole.url
        names = Catalog(self._whole).entries().get(record.step, [])
        if not names:
            return None
        newest = read_commit(self._whole, names[-1])
        if newest.uid == record.uid:
            check_same_manifest(self._whole, newest, record)
            there = confirmed(self._target, newest, first=self._check_source)
            return newest.generation if there else None
        if newest.generation < record.generation and self._makes_way(newest.uid):
            return None  # which this one has replaced, as its generation says
        msg = (
            f"{url} has another checkpoint at step {record.step} ({newest.uid}, generation "
            f"{newest.generation}). Delete it there, or copy with --overwrite to replace it."
        )
        raise StepExistsError(msg)

    def _makes_way(self, uid: str) -> bool:
        return self._replace if isinstance(self._replace, bool) else uid in self._replace

    def _check_source(self) -> None:
        verify_blobs(self._source, self._record, workers=self._workers)

    # -- data of this uid at the target -----------------------------------------------------------

    @property
    def _builds_on(self) -> bool:
        """Whether data at the target is an earlier copy's, or a damaged one's: it may be replaced.

        Known once the claim is taken.
        """
        return self._repair or self._claim.found

    def _has_claim(self) -> bool:
        name = claim_name(self._record.uid)
        return any(info.name == name for info in self._target.list(name))

    def _check_data(self, *, claimed: bool) -> None:
        """Make sure that this copy replaces and deletes nothing but what an earlier one left.

        Else who writes the source could give a checkpoint of his own the uid of another one that
        the target has, or of a save that is under way there, and have a copy destroy its data.

        Args:
            claimed: Whether there was a claim of an earlier copy.

        Raises:
            StepExistsError: Another checkpoint uses the data of this uid.
            BusyError: There is some that no copy has brought.
        """
        uid = self._record.uid
        own = {claim_name(uid), mark_name(uid), staying_name(uid)}
        for place in [tier.backend for tier in self._whole.tiers] or [self._target]:
            names = {info.name for info in place.list(data_prefix(uid))} - own
            if names:
                check_uid_is_free(place, self._record)
            if names and place is self._target and not claimed:
                raise self._not_of_a_copy(min(names))

    def _not_of_a_copy(self, name: str) -> BusyError:
        msg = (
            f"step {self._record.step} is not copied to {self._target.url}, since there is {name} "
            "already, and no copy has brought it: it may be of a save or a deletion that is under "
            "way, or was left by one. Nothing of it was changed. Copy again later; `penstock "
            "prune` there takes what was left."
        )
        return BusyError(msg)

    def _publish_intent(self) -> None:
        self._wrote = True
        try:
            self._publisher.publish_intent(exclusive=not self._builds_on)
        except BlobExistsError as error:
            self._wrote = False
            raise self._not_of_a_copy(intent_name(self._record.uid)) from error

    def _publish(self, name: str, data: bytes) -> None:
        """Publish a part or the index: over one of an earlier copy, never over anything else."""
        try:
            self._target.publish(name, data, exclusive=not self._builds_on)
        except BlobExistsError as error:
            raise self._not_of_a_copy(name) from error

    # -- what an earlier copy left ----------------------------------------------------------------

    def _still_good(self, blobs: Sequence[CheckedBlob], left: Sequence[BlobInfo]) -> set[str]:
        """Names of the blobs that an earlier copy brought there whole."""
        if not left or self._claim_is_old(left):
            return set()
        sizes = {info.name: info.size_bytes for info in left}
        found = [b for b in blobs if b.name in self._claim.sealed and sizes.get(b.name) == b.length]
        if not self._trust_sealed:
            self._mover.run(BlobTransfer(blob, self._target, None) for blob in found)
        return {blob.name for blob in found} - self._spoilt.keys()

    def _claim_is_old(self, left: Sequence[BlobInfo]) -> bool:
        """Whether what is left may be pruned at any moment: then it is not built on."""
        newest_s = max(info.modified_s for info in left)
        return self._target.store_time_s() - newest_s > self._grace_s / 2

    # -- calls of the mover -----------------------------------------------------------------------

    def _moved(self, size_bytes: int) -> None:
        if self._on_progress is not None:
            self._on_progress(size_bytes)

    def _alive(self) -> None:
        self._publisher.refresh_intent()
        self._claim.refresh()

    def _owned(self) -> bool:
        try:
            self._claim.check()
        except BusyError:
            return False
        except StorageError:
            pass  # nor can the store remove anything then
        return True

    def _damaged(self, transfer: BlobTransfer, ranges: list[ByteRange]) -> None:
        name = transfer.blob.name
        if transfer.target is None:
            if name not in self._spoilt:
                log.warning("%s on %s is damaged: copied once more", name, transfer.source.url)
            self._spoilt[name] = None
            return
        raise self._contents.damage(name, ranges)

    def _missing(self, transfer: BlobTransfer, error: StorageError) -> None:
        if transfer.target is None:
            self._spoilt[transfer.blob.name] = None
            return
        raise self._contents.missing(FormatError(str(error), [transfer.blob.name])) from error

    # -- publishing -------------------------------------------------------------------------------

    def _check_whole(self, blobs: Sequence[CheckedBlob]) -> None:
        """The last look before the record: somebody may have deleted by name meanwhile.

        Raises:
            SaveAbortedError: Something is missing.
        """
        sizes: Mapping[str, int] = {
            info.name: info.size_bytes for info in self._target.list(data_prefix(self._record.uid))
        }
        parts = {entry.name: entry.length for entry in self._record.parts}
        index = self._record.index
        wanted = {b.name: b.length for b in blobs} | parts | {index.name: index.length}
        wrong = sorted(name for name, length in wanted.items() if sizes.get(name) != length)
        if wrong:
            msg = (
                f"step {self._record.step}: not committed on {self._target.url}, since "
                f"{listed(wrong)} vanished while the rest was copied. Copy again."
            )
            raise SaveAbortedError(msg)

    def _begin_to_publish(self) -> None:
        """The last moment at which the copy can be given up."""
        self._mover.check()
        self._claim.check_age()
        self._commit.feed(Event.PUBLISH_STARTED)

    def _remove_replaced(self) -> None:
        """Delete the generations below, as a save does that overwrites; `prune` does it later."""
        if not self._record.generation:
            return
        try:
            Catalog(self._whole).delete_older_generations(self._record.step)
        except Exception as error:  # noqa: BLE001 - the copy itself is done
            log.warning(
                "step %d: what it replaced stays until prune: %s", self._record.step, str(error)
            )

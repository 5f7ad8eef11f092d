"""What the target of a copy has already of the blobs that a checkpoint needs, uid by uid.

A checkpoint needs its own blobs, and blobs that it borrows of other saves. The target may have some
of either: an earlier copy has brought them, or a checkpoint there needs them as well. Which of them
may be kept is decided after the intent of the copy names all these uids: from then on no deletion
takes what a record there needs, and what no record needs is trusted only as far as a lease says
that it is durable. What the target lacks is brought under a lease of the uid that it belongs to.

Blobs that no record needs, and beside which no copy has left a lease, are orphans of a deletion: it
was killed, or has left them because another tier needs them, or is under way. Deletions that begin
once the intent is published spare them, and the copy waits for the others to end
(`Timing.deletion_s`). Then orphans beside an index are known to be durable, and are kept if they
are what the checkpoint needs; the others are brought anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from penstock.core.catalog.survey import Survey, borrowed_blobs, survey_run
from penstock.core.copy.lease import Lease
from penstock.core.errors import BusyError
from penstock.core.format.records import (
    blob_uid,
    data_prefix,
    index_name,
    intent_name,
    lease_name,
)
from penstock.core.suggest import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.concurrency.timing import Timing
    from penstock.core.copy.mover import CheckedBlob
    from penstock.core.format.records import CommitRecord
    from penstock.core.types import BlobInfo

Read: TypeAlias = "Callable[[Sequence[CheckedBlob]], set[str]]"
"""Reads blobs at the target; returns the names of those that are damaged or missing."""


def in_flight(
    target: Backend, uids: Iterable[str], timing: Timing, *, held: Collection[str] = ()
) -> list[str]:
    """Return those of some uids with an intent whose save or copy may still be committed as it is.

    All but those of copies that have ended before they published the index: a copy that resumes one
    of them takes its lease first, and then looks anew at all that it needs.

    Call it under the leases of the data that is to be changed if no uid is returned.

    Args:
        target: The place of the copies.
        uids: The uids.
        timing: As for `Lease`.
        held: Those of which the caller has taken over a lease, so that their copies have ended.
    """
    return [uid for uid in uids if not _has_ended(target, uid, timing, is_held=uid in held)]


def _has_ended(target: Backend, uid: str, timing: Timing, *, is_held: bool) -> bool:
    if not (is_held or Lease(target, uid, timing).is_abandoned()):
        return False
    # Listed afterwards: the copy may have published its index before it ended, and then its commit
    # record, which may still be on its way.
    names = {info.name for info in target.list(data_prefix(uid))}
    return lease_name(uid) in names and index_name(uid) not in names


class BlobSites:
    """The blobs that a checkpoint needs at one place, and the leases under which they are brought.

    The lease of the checkpoint's own uid is the copy's right to write at all: `take` acquires it
    before anything else, and the other ones are acquired by `settle` as far as they are needed.
    """

    def __init__(
        self, target: Backend, record: CommitRecord, timing: Timing, *, grace_s: float
    ) -> None:
        """Prepare; the place is not asked yet.

        Args:
            target: The place to copy to.
            record: The commit record of the checkpoint.
            timing: Tells how often a lease is refreshed.
            grace_s: The grace time of the place's `prune`, in seconds.
        """
        self._target = target
        self._record = record
        self._timing = timing
        self._grace_s = grace_s
        self.own = Lease(target, record.uid, timing)
        self._untouched: set[str] = set()  # uids of which this copy has changed no blob
        self._unsure: set[str] = set()  # uids of which other blobs than the leases list may be torn
        self._leases = {record.uid: self.own}

    def settle(
        self,
        blobs: Sequence[CheckedBlob],
        *,
        read: Read,
        check_source: Callable[[], None],
        await_deletions: Callable[[], None],
        trust_sealed: bool,
        repair: bool,
    ) -> set[str]:
        """Return the names of the blobs to keep, and delete those that have to be brought anew.

        Call it once the intent of the copy is published, with all uids that the checkpoint needs.

        Args:
            blobs: All blobs of the checkpoint.
            read: Reads blobs at the place, and returns the names of the damaged ones.
            check_source: Called before orphans are deleted, which may be all that exists; raises
                unless the source is good.
            await_deletions: Waits for the end of all deletions that began before the intent.
            trust_sealed: Whether blobs with the right length are kept without being read.
            repair: Whether damaged blobs are replaced although others need them.

        Raises:
            BusyError: The place has blobs that belong to a save under way, that another copy is
                bringing, or that others need and that are not what is to be copied.
        """
        wanted: dict[str, list[CheckedBlob]] = {
            uid: [] for uid in (self._record.uid, *self._record.references)
        }
        for blob in blobs:
            wanted[blob_uid(blob.name) or ""].append(blob)
        sites = self._look(wanted)
        orphaned = [site for site in sites if site.is_orphaned and not (repair and site.is_own)]
        for site in orphaned:
            self._refuse_foreign(site)
        if orphaned:
            await_deletions()
            sites = self._look(wanted)
        kept: set[str] = set()
        for found in sites:
            site = found
            good = self._good(site, read, trust_sealed=trust_sealed, repair=repair)
            if not site.is_used or len(good) < len(site.wanted):
                site = self._under_lease(site)
                if site is not found:
                    good = self._good(site, read, trust_sealed=trust_sealed, repair=repair)
                good |= self._sealed(site, good, read, trust_sealed=trust_sealed)
                self._delete_stale(site, good, check_source, repair=repair)
            kept |= good
        return kept

    def _look(self, wanted: Mapping[str, Sequence[CheckedBlob]]) -> list[_Site]:
        there = {uid: self._target.list(data_prefix(uid)) for uid in wanted}
        # Reading all records takes long at a large target; most checkpoints borrow nothing.
        is_blank = not self._record.references and not any(map(_sizes, there.values()))
        survey = Survey() if is_blank else survey_run(self._target)
        return [self._site(uid, there[uid], survey, wanted[uid]) for uid in sorted(wanted)]

    def _site(
        self, uid: str, there: Sequence[BlobInfo], survey: Survey, wanted: Sequence[CheckedBlob]
    ) -> _Site:
        lease, own_uid = self._leases.get(uid), self._record.uid
        of_copy = None if lease is None else lease.found
        return _Site(
            uid, wanted, there, survey, own_uid=own_uid, of_copy=of_copy, place=self._target
        )

    def _good(self, site: _Site, read: Read, *, trust_sealed: bool, repair: bool) -> set[str]:
        """Return the names of wanted blobs that the place has because a record there needs them."""
        found = site.right_length(site.trusted)
        good = {blob.name for blob in found}
        # What others need is not read again if it is borrowed: each save of a long chain would have
        # all of it read. Own blobs are: a forged record may have the uid of another.
        if repair or site.is_orphaned or (site.is_own and not trust_sealed):
            good -= read(found)
        return good

    def _under_lease(self, site: _Site) -> _Site:
        """Hold the lease of a uid; return what the place has of that uid by then."""
        if not site.is_own:
            self._refuse_foreign(site)
            lease = Lease(self._target, site.uid, self._timing)
            # In the first record of the lease: what it does not list counts as torn. Deletions that
            # leave a save in flight alone as the last one to need these blobs may come at any time.
            lease.take(durable=site.trusted)
            self._leases[site.uid] = lease
            # Looked at once more: the copy that held the lease before may have committed since.
            there = self._target.list(data_prefix(site.uid))
            site = self._site(site.uid, there, survey_run(self._target), site.wanted)
            self._refuse_foreign(site)
        return site

    def _refuse_foreign(self, site: _Site) -> None:
        """Refuse blobs that no record needs and no copy has left, unless nothing needs them."""
        held = {uid for uid, lease in self._leases.items() if lease.found}
        if site.is_foreign or in_flight(self._target, site.awaited_by, self._timing, held=held):
            self._untouched.add(site.uid)
            there = site.sizes or [intent_name(site.uid)]
            raise self._busy(there, "which a save that is under way may need")

    def _sealed(self, site: _Site, good: set[str], read: Read, *, trust_sealed: bool) -> set[str]:
        """Return the names of wanted blobs that an earlier copy has sealed."""
        if not site.is_used and self._is_old(site):
            return set()
        sealed = site.right_length(self._leases[site.uid].sealed - good)
        spoiled = set() if trust_sealed and not site.is_orphaned else read(sealed)
        return {blob.name for blob in sealed} - spoiled

    def _delete_stale(
        self, site: _Site, good: set[str], check_source: Callable[[], None], *, repair: bool
    ) -> None:
        """Delete the blobs to bring anew, which must be nobody else's."""
        lease, present = self._leases[site.uid], set(site.sizes)
        stale = present & {blob.name for blob in site.wanted} - good
        if site.is_used and stale & site.trusted and not repair:
            why = "which other checkpoints there need, and which is damaged there"
            raise self._busy(stale & site.trusted, why)
        if site.is_own and not site.is_used:
            stale = present - good
        if site.is_orphaned:
            if stale and site.has_intent and not site.is_own:
                raise self._busy(stale, "which a save that is under way may need")
            if stale and not repair:
                check_source()
            if not site.has_index:
                self._unsure.add(site.uid)
        lease.keep(good | ((present & (site.trusted | lease.sealed)) - stale))
        if stale:
            lease.check()  # behind the request before, which may have been held up for long
            self._target.delete(sorted(stale))

    def _busy(self, names: Collection[str], why: str) -> BusyError:
        msg = (
            f"step {self._record.step} is not copied to {self._target.url}, which has "
            f"{listed(sorted(names))} already, {why}. Copy again later; `penstock prune` there "
            "deletes orphans, `penstock verify` finds damage."
        )
        return BusyError(msg)

    def _is_old(self, site: _Site) -> bool:
        """Return whether the data that is left may be pruned at any moment, and so be lost."""
        if not site.blobs:
            return False
        newest_s = max(info.modified_s for info in site.blobs)
        return self._target.store_time_s() - newest_s > self._grace_s / 2

    # -- the leases --------------------------------------------------------------------------------

    def seal(self, name: str) -> None:
        """Record that a blob is durable."""
        self._leases[blob_uid(name) or ""].seal(name)

    def refresh(self) -> None:
        """Refresh all leases that are held; raise a BusyError if one is lost."""
        for lease in self._leases.values():
            lease.refresh()

    def check(self) -> None:
        """Read all leases that are held; raise a BusyError if one is lost."""
        for lease in self._leases.values():
            lease.check()

    def check_age(self) -> None:
        """Raise a BusyError if a lease was not refreshed for too long, without asking the store."""
        for lease in self._leases.values():
            lease.check_age()

    def remove(self) -> None:
        """Delete all leases, the own one last; a lease that was found is only freed.

        Such a lease is that of a copy that was to bring the checkpoint of that uid itself, or to
        borrow of it: it may have left more than blobs, and no copy touches that without a lease.
        Likewise the lease over orphans: without it all of them would count as durable.
        """
        for uid, lease in reversed(self._leases.items()):
            if uid != self._record.uid and (lease.found or uid in self._unsure):
                lease.release()
            else:
                lease.remove()

    def release(self) -> None:
        """Free all leases for a copy that continues from here; raises nothing.

        Deletes those beside orphans that this copy has left alone: a lease would make them its own.
        """
        for uid, lease in reversed(self._leases.items()):
            if uid in self._untouched and not lease.found:
                lease.remove()
            else:
                lease.release()


class _Site:
    """What the place has of one uid.

    Attributes:
        uid: The uid.
        wanted: The blobs of it that the checkpoint needs.
        blobs: The blobs of it that the place lists.
        sizes: Their sizes by name.
        is_own: Whether it is the uid of the checkpoint itself.
        is_used: Whether a record of the place needs data of the uid.
        has_intent: Whether its intent is there.
        has_index: Whether its index is there.
        is_orphaned: Whether there are blobs that no record needs, and that no copy has left.
        is_foreign: Whether these may be those of a save under way. Of the own uid the copy makes
            sure of that before it publishes its intent.
        awaited_by: The uids of other saves and copies without a record whose intents name these;
            likewise.
        trusted: The names of the blobs that are durable because a record needs them, or, of
            orphans, because the index was published after them.
    """

    def __init__(
        self,
        uid: str,
        wanted: Sequence[CheckedBlob],
        there: Sequence[BlobInfo],
        survey: Survey,
        *,
        own_uid: str,
        of_copy: bool | None,
        place: Backend,
    ) -> None:
        """Sort out what is there.

        Args:
            uid: The uid.
            wanted: The blobs of it that the checkpoint needs.
            there: What the place lists of it.
            survey: The records of the place.
            own_uid: The uid of the checkpoint.
            of_copy: Whether a copy had left a lease before this one took it; None before that.
            place: The place.

        Raises:
            DamagedError: What tells which of the blobs a checkpoint there borrows is damaged: any
                of them may be needed, and any may be torn.
        """
        self.uid = uid
        self.wanted = wanted
        self.blobs = [info for info in there if blob_uid(info.name) == uid]
        self.sizes = _sizes(there)
        self.is_own = uid == own_uid
        self.is_used = uid in survey.used
        names = {info.name for info in there}
        has_lease = lease_name(uid) in names
        if of_copy is None:
            of_copy = has_lease
        self.has_intent = intent_name(uid) in names
        self.has_index = index_name(uid) in names
        self.is_orphaned = bool(self.sizes) and not (self.is_used or of_copy)
        # Also before it has a blob: a lease beside its intent would make it look like a copy.
        is_unknown = not (self.is_own or self.has_index or self.is_used or of_copy)
        self.is_foreign = is_unknown and self.has_intent
        others = survey.borrowers(uid) - {own_uid}
        self.awaited_by = sorted(others) if is_unknown and self.is_orphaned else []
        self.trusted: frozenset[str] = frozenset()
        if self.is_used:
            self.trusted = frozenset(self.sizes)
            # Beside a lease there may be a part of a blob, which a killed copy has left. Without
            # one all blobs came with a checkpoint that was committed there.
            if has_lease and uid not in survey.named:
                borrowers = [r for r in survey.records.values() if uid in r.references]
                self.trusted &= {b.name for r in borrowers for b in borrowed_blobs(place, r)}
        elif self.is_orphaned and self.has_index:
            self.trusted = frozenset(self.sizes)

    def right_length(self, names: Collection[str]) -> list[CheckedBlob]:
        """Return the wanted blobs among `names` that the place has with their lengths."""
        return [b for b in self.wanted if b.name in names and self.sizes.get(b.name) == b.length]


def _sizes(there: Iterable[BlobInfo]) -> Mapping[str, int]:
    return {info.name: info.size_bytes for info in there if blob_uid(info.name) is not None}

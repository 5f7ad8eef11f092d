"""What the target of a copy has already of the blobs that a checkpoint needs, uid by uid.

A checkpoint needs its own blobs, and blobs that it borrows of other saves. The target may have some
of either: an earlier copy has brought them, or a checkpoint there needs them as well. Which of them
may be kept is decided after the intent of the copy names all these uids: from then on no deletion
takes what a record there needs, and what no record needs is trusted only as far as a lease says
that it is durable. What the target lacks is brought under a lease of the uid that it belongs to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from penstock.core.catalog.survey import Survey, survey_run
from penstock.core.copy.lease import Lease
from penstock.core.errors import BusyError
from penstock.core.format.records import blob_uid, data_prefix, lease_name
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
        self._leases = {record.uid: self.own}

    def settle(
        self, blobs: Sequence[CheckedBlob], *, read: Read, trust_sealed: bool, repair: bool
    ) -> set[str]:
        """Return the names of the blobs to keep, and delete those that have to be brought anew.

        Call it once the intent of the copy is published, with all uids that the checkpoint needs.

        Args:
            blobs: All blobs of the checkpoint.
            read: Reads blobs at the place, and returns the names of the damaged ones.
            trust_sealed: Whether blobs with the right length are kept without being read.
            repair: Whether damaged blobs are replaced although others need them.

        Raises:
            BusyError: The place has blobs that may be about to be deleted, that another copy is
                bringing, or that others need and that are not what is to be copied.
        """
        wanted: dict[str, list[CheckedBlob]] = {
            uid: [] for uid in (self._record.uid, *self._record.references)
        }
        for blob in blobs:
            wanted[blob_uid(blob.name) or ""].append(blob)
        there = {uid: self._target.list(data_prefix(uid)) for uid in wanted}
        # Reading all records takes long at a large target; most checkpoints borrow nothing.
        is_blank = not self._record.references and not any(map(_sizes, there.values()))
        survey = Survey() if is_blank else survey_run(self._target)
        kept: set[str] = set()
        for uid, some in sorted(wanted.items()):
            site = _Site(uid, some, there[uid], survey, own_uid=self._record.uid)
            good = self._good(site, read, trust_sealed=trust_sealed, repair=repair)
            if not site.is_used or len(good) < len(some):
                before, site = site, self._under_lease(site, repair=repair)
                if site is not before:
                    good = self._good(site, read, trust_sealed=trust_sealed, repair=repair)
                good |= self._sealed(site, good, read, trust_sealed=trust_sealed)
                self._delete_stale(site, good, repair=repair)
            kept |= good
        return kept

    def _good(self, site: _Site, read: Read, *, trust_sealed: bool, repair: bool) -> set[str]:
        """Return the names of wanted blobs that the place has because a record there needs them."""
        found = site.right_length(site.trusted)
        good = {blob.name for blob in found}
        # What others need is not read again if it is borrowed: each save of a long chain would have
        # all of it read. Own blobs are: a forged record may have the uid of another.
        if repair or (site.is_own and not trust_sealed):
            good -= read(found)
        return good

    def _under_lease(self, site: _Site, *, repair: bool) -> _Site:
        """Hold the lease of a uid; return what the place has of that uid by then."""
        if not site.is_own:
            self._refuse_orphans(site, has_lease=site.has_lease)
            lease = Lease(self._target, site.uid, self._timing)
            # In the first record of the lease: what it does not list counts as torn. Deletions that
            # leave a save in flight alone as the last one to need these blobs may come at any time.
            lease.take(durable=site.trusted)
            self._leases[site.uid] = lease
            # Looked at once more: the copy that held the lease before may have committed since.
            there = self._target.list(data_prefix(site.uid))
            survey = survey_run(self._target)
            site = _Site(site.uid, site.wanted, there, survey, own_uid=self._record.uid)
        if not (repair and site.is_own):
            self._refuse_orphans(site, has_lease=self._leases[site.uid].found)
        return site

    def _refuse_orphans(self, site: _Site, *, has_lease: bool) -> None:
        """Refuse blobs that no record needs and no copy has left: they may be about to go."""
        if site.sizes and not (site.is_used or has_lease):
            self._untouched.add(site.uid)
            raise self._busy(site.sizes, "which no copy has brought, and no checkpoint there needs")

    def _sealed(self, site: _Site, good: set[str], read: Read, *, trust_sealed: bool) -> set[str]:
        """Return the names of wanted blobs that an earlier copy has sealed."""
        if not site.is_used and self._is_old(site):
            return set()
        sealed = site.right_length(self._leases[site.uid].sealed - good)
        spoiled = set() if trust_sealed else read(sealed)
        return {blob.name for blob in sealed} - spoiled

    def _delete_stale(self, site: _Site, good: set[str], *, repair: bool) -> None:
        """Delete the blobs to bring anew, which must be nobody else's."""
        lease, present = self._leases[site.uid], set(site.sizes)
        stale = present & {blob.name for blob in site.wanted} - good
        if stale & site.trusted and not repair:
            why = "which other checkpoints there need, and which is damaged there"
            raise self._busy(stale & site.trusted, why)
        if site.is_own and not site.is_used:
            stale = present - good
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
        """
        for uid, lease in reversed(self._leases.items()):
            if lease.found and uid != self._record.uid:
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
        has_lease: Whether a copy has left a lease, or holds one.
        trusted: The names of the blobs that are durable because a record needs them.
    """

    def __init__(
        self,
        uid: str,
        wanted: Sequence[CheckedBlob],
        there: Sequence[BlobInfo],
        survey: Survey,
        *,
        own_uid: str,
    ) -> None:
        self.uid = uid
        self.wanted = wanted
        self.blobs = [info for info in there if blob_uid(info.name) == uid]
        self.sizes = _sizes(there)
        self.is_own = uid == own_uid
        self.is_used = uid in survey.used
        self.has_lease = any(info.name == lease_name(uid) for info in there)
        self.trusted: frozenset[str] = frozenset()
        if self.is_used:
            self.trusted = frozenset(self.sizes)
            # Beside a lease there may be a part of a blob, which a killed copy has left. Without
            # one all blobs came with a checkpoint that was committed there.
            if self.has_lease and uid not in survey.named:
                records = survey.records.values()
                self.trusted &= {blob.name for record in records for blob in record.borrowed}

    def right_length(self, names: Collection[str]) -> list[CheckedBlob]:
        """Return the wanted blobs among `names` that the place has with their lengths."""
        return [b for b in self.wanted if b.name in names and self.sizes.get(b.name) == b.length]


def _sizes(there: Iterable[BlobInfo]) -> Mapping[str, int]:
    return {info.name: info.size_bytes for info in there if blob_uid(info.name) is not None}

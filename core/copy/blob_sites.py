"""The blobs of a checkpoint that the target of a copy already has, uid by uid.

A checkpoint needs its own blobs, and blobs that it borrows from other saves. The target may have
some of them, from an earlier copy or for another checkpoint there. The copy publishes an intent
that names all these uids, and then decides for each uid which blobs to trust:

- Blobs that a record at the target needs are trusted, and no deletion takes them from now on.
- If no record needs them, but a copy's lease is beside them, only blobs that the lease lists as
  durable are trusted.
- If there is neither a record nor a lease, the blobs are orphans of a deletion. That deletion was
  killed, left them because another tier needs them, or is still running. Deletions that begin after
  the intent is published spare them, and the copy waits for earlier ones to end
  (`Timing.deletion_s`). Then the orphans are trusted if the uid has an index, since the index was
  published after them.

The copy keeps trusted blobs that it does not find damaged. It writes all other blobs that the
checkpoint needs under a lease of their uid.
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
    """Return the uids whose save or copy may still commit without checking its data again.

    Leaves out copies that ended before they published the index: a copy that resumes one of them
    takes its lease first, and then checks all its data again.

    If the result is empty, the caller may change data that `uids` need, provided that it holds the
    leases of that data.

    Args:
        target: The place of the copies.
        uids: Uids with an intent.
        timing: As for `Lease`.
        held: Uids whose lease the caller has taken over from an ended copy.
    """
    return [uid for uid in uids if not _has_ended(target, uid, timing, is_held=uid in held)]


def _has_ended(target: Backend, uid: str, timing: Timing, *, is_held: bool) -> bool:
    if not (is_held or Lease(target, uid, timing).is_abandoned()):
        return False
    # Listed afterwards: the copy may have published its index before it ended, and then its commit
    # record, which may still be in flight.
    names = {info.name for info in target.list(data_prefix(uid))}
    return lease_name(uid) in names and index_name(uid) not in names


_LATER = "Copy again later; `penstock prune` there deletes orphans, `penstock verify` finds damage."


class BlobSites:
    """The blobs that a checkpoint needs at one place, and the leases under which they are copied.

    The copy must not write without the lease of the checkpoint's own uid, so it takes that lease
    first. `settle` acquires the other leases as needed.
    """

    def __init__(
        self, target: Backend, record: CommitRecord, timing: Timing, *, grace_s: float
    ) -> None:
        """Prepare, without I/O.

        Args:
            target: The place to copy to.
            record: The commit record of the checkpoint.
            timing: Sets how often a lease is refreshed.
            grace_s: The grace time of the place's `prune`, in seconds.
        """
        self._target = target
        self._record = record
        self._timing = timing
        self._grace_s = grace_s
        self.own = Lease(target, record.uid, timing)
        self._untouched: set[str] = set()  # uids whose blobs this copy has not changed
        self._unsure: set[str] = set()  # uids with blobs that their lease omits, maybe torn
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
        """Delete the blobs to copy again, and return the names of the blobs to keep.

        Call it after publishing the copy's intent, which names all uids that the checkpoint needs.

        Args:
            blobs: All blobs of the checkpoint.
            read: Reads blobs at the place, and returns the names of damaged ones.
            check_source: Called before orphans, possibly the only copy, are deleted; raises unless
                the source is good.
            await_deletions: Waits until all deletions that began before the intent have ended.
            trust_sealed: Whether to keep, without reading them, the checkpoint's own trusted blobs
                and blobs that an earlier copy sealed, if their length is right. Orphans are always
                read.
            repair: Whether to replace damaged blobs even if others need them.

        Raises:
            BusyError: The place has blobs of a save in flight, blobs that another copy is writing,
                or damaged blobs that others need.
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
        """Return the names of wanted blobs that are trusted and not found damaged."""
        present = site.right_length(site.trusted)
        good = {blob.name for blob in present}
        # Borrowed blobs that others need are not read again: in a long chain, the copy of each
        # checkpoint would read them all. Own blobs are read: a forged record may have another
        # checkpoint's uid.
        if repair or site.is_orphaned or (site.is_own and not trust_sealed):
            good -= read(present)
        return good

    def _under_lease(self, site: _Site) -> _Site:
        """Take the lease of a uid; return its site as listed afterwards."""
        if not site.is_own:
            self._refuse_foreign(site)
            lease = Lease(self._target, site.uid, self._timing)
            # Blobs that a lease does not list count as torn, so the first record of this lease
            # lists the trusted ones. A later record would be too late: a deletion may at any moment
            # delete the records that need these blobs, and then only the lease vouches for them.
            lease.take(durable=site.trusted)
            self._leases[site.uid] = lease
            # Checked again: the copy that held the lease before may have committed since.
            there = self._target.list(data_prefix(site.uid))
            site = self._site(site.uid, there, survey_run(self._target), site.wanted)
            self._refuse_foreign(site)
        return site

    def _refuse_foreign(self, site: _Site) -> None:
        """Raise if a save or copy in flight may need the blobs of this uid."""
        held = {uid for uid, lease in self._leases.items() if lease.found}
        if site.is_foreign or in_flight(self._target, site.awaited_by, self._timing, held=held):
            self._untouched.add(site.uid)
            there = site.sizes or [intent_name(site.uid)]
            raise self._busy(there, "which a save under way may need")

    def _sealed(self, site: _Site, good: set[str], read: Read, *, trust_sealed: bool) -> set[str]:
        """Return the names of wanted blobs that an earlier copy sealed and that are still good."""
        if not site.is_used and self._is_old(site):
            return set()
        sealed = site.right_length(self._leases[site.uid].sealed - good)
        spoiled = set() if trust_sealed and not site.is_orphaned else read(sealed)
        return {blob.name for blob in sealed} - spoiled

    def _delete_stale(
        self, site: _Site, good: set[str], check_source: Callable[[], None], *, repair: bool
    ) -> None:
        """Delete the blobs to copy again; raise if another checkpoint or save may need them."""
        lease, present = self._leases[site.uid], set(site.sizes)
        stale = present & {blob.name for blob in site.wanted} - good
        if site.is_used and stale & site.trusted and not repair:
            why = "needed by other checkpoints there, but damaged"
            remedy = "Delete every step there that `penstock verify --all` names, then copy again."
            raise self._busy(stale & site.trusted, why, remedy)
        if site.is_own and not site.is_used:
            stale = present - good
        if site.is_orphaned:
            if stale and site.has_intent and not site.is_own:
                raise self._busy(stale, "which a save under way may need")
            if stale and not repair:
                check_source()
            if not site.has_index:
                self._unsure.add(site.uid)
        lease.keep(good | ((present & (site.trusted | lease.sealed)) - stale))
        if stale:
            lease.check()  # again, since the last request may have taken long
            self._target.delete(sorted(stale))

    def _busy(self, names: Collection[str], why: str, remedy: str = _LATER) -> BusyError:
        msg = (
            f"step {self._record.step} is not copied to {self._target.url}, which already has "
            f"{listed(sorted(names))}, {why}. {remedy}"
        )
        return BusyError(msg)

    def _is_old(self, site: _Site) -> bool:
        """Return whether the leftover data is so old that `prune` may soon delete it."""
        if not site.blobs:
            return False
        newest_s = max(info.modified_s for info in site.blobs)
        return self._target.store_time_s() - newest_s > self._grace_s / 2

    # -- the leases --------------------------------------------------------------------------------

    def seal(self, name: str) -> None:
        """Record that a blob is durable."""
        self._leases[blob_uid(name) or ""].seal(name)

    def refresh(self) -> None:
        """Refresh all held leases; raise a BusyError if one is lost."""
        for lease in self._leases.values():
            lease.refresh()

    def check(self) -> None:
        """Read all held leases; raise a BusyError if one is lost."""
        for lease in self._leases.values():
            lease.check()

    def check_age(self) -> None:
        """Raise a BusyError if a lease was not refreshed for too long; do no I/O."""
        for lease in self._leases.values():
            lease.check_age()

    def remove(self) -> None:
        """Delete all leases, the checkpoint's own last; release those that must stay.

        The lease that an earlier copy left for a borrowed uid must stay: that copy may have left
        other files, which no copy touches without a lease. The lease of orphans without an index
        must stay too, since some of them may be torn: now that this checkpoint borrows from their
        uid, a later copy would trust all of them if there were no lease.
        """
        for uid, lease in reversed(self._leases.items()):
            if uid != self._record.uid and (lease.found or uid in self._unsure):
                lease.release()
            else:
                lease.remove()

    def release(self) -> None:
        """Free all leases, so that a later copy can continue; raise nothing.

        Deletes the leases of orphans that this copy has not touched: a lease would mark the orphans
        as data of a copy.
        """
        for uid, lease in reversed(self._leases.items()):
            if uid in self._untouched and not lease.found:
                lease.remove()
            else:
                lease.release()


class _Site:
    """The files of one uid at the place.

    Attributes:
        uid: The uid.
        wanted: The uid's blobs that the checkpoint needs.
        blobs: The uid's blobs that the place lists.
        sizes: Their sizes by name.
        is_own: Whether it is the uid of the checkpoint itself.
        is_used: Whether a record of the place needs data of the uid.
        has_intent: Whether its intent is there.
        has_index: Whether its index is there.
        is_orphaned: Whether there are blobs, but no record that needs them and no copy's lease.
        is_foreign: Whether a save in flight may own these blobs. False for the checkpoint's own
            uid, which the copy checks before it publishes its intent.
        awaited_by: For borrowed orphans without an index, the uids of other saves and copies that
            no record names yet and whose intents name this uid; otherwise empty.
        trusted: The names of blobs that are durable: a record needs them, or, for orphans, the
            index was published after them.
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
        """Classify the uid's files.

        Args:
            uid: The uid.
            wanted: The uid's blobs that the checkpoint needs.
            there: The uid's files that the place lists.
            survey: The records of the place.
            own_uid: The uid of the checkpoint.
            of_copy: Whether this copy took over a lease; None if it has not taken the lease yet.
            place: The place.

        Raises:
            DamagedError: A table of borrowed blobs there is damaged, so any blob may be needed, and
                any may be torn.
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
        # Even if the save has no blob yet: a lease beside its intent would make it look like a
        # copy.
        is_unknown = not (self.is_own or self.has_index or self.is_used or of_copy)
        self.is_foreign = is_unknown and self.has_intent
        others = survey.borrowers(uid) - {own_uid}
        self.awaited_by = sorted(others) if is_unknown and self.is_orphaned else []
        self.trusted: frozenset[str] = frozenset()
        if self.is_used:
            self.trusted = frozenset(self.sizes)
            # With a lease, a killed copy may have left part of a blob. Without one, all blobs came
            # with a checkpoint that was committed there.
            if has_lease and uid not in survey.named:
                borrowers = [r for r in survey.records.values() if uid in r.references]
                self.trusted &= {b.name for r in borrowers for b in borrowed_blobs(place, r)}
        elif self.is_orphaned and self.has_index:
            self.trusted = frozenset(self.sizes)

    def right_length(self, names: Collection[str]) -> list[CheckedBlob]:
        """Return the wanted blobs among `names` that have the right length at the place."""
        return [b for b in self.wanted if b.name in names and self.sizes.get(b.name) == b.length]


def _sizes(there: Iterable[BlobInfo]) -> Mapping[str, int]:
    return {info.name: info.size_bytes for info in there if blob_uid(info.name) is not None}

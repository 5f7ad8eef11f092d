"""Publishes the files of a copy at its target, and checks which existing files it may replace.

A uid is not secret: a user who can write the source could give a checkpoint the uid of another
checkpoint of the target, or of a save in flight there. Without the checks, a copy would then
destroy the data of that checkpoint or save.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.core.catalog.survey import survey_run
from penstock.core.copy.blob_sites import in_flight
from penstock.core.copy.confirmation import check_uid_is_free
from penstock.core.copy.copy_source import CopySource
from penstock.core.errors import (
    BlobExistsError,
    BusyError,
    CheckpointGoneError,
    DamagedError,
    StorageError,
)
from penstock.core.format.records import (
    blob_uid,
    data_prefix,
    intent_name,
    lease_name,
    mark_name,
    staying_name,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.abc import Backend
    from penstock.core.catalog.publisher import Publisher
    from penstock.core.concurrency.timing import Timing
    from penstock.core.copy.lease import Lease
    from penstock.core.format.records import CommitRecord


class TargetFiles:
    """Publishes intent, parts and index of a copy; replaces nothing that another save may need."""

    def __init__(
        self,
        places: Sequence[Backend],
        record: CommitRecord,
        *,
        lease: Lease,
        publisher: Publisher,
        timing: Timing,
        repair: bool,
    ) -> None:
        """Prepare, without I/O.

        Args:
            places: The places of the run to copy to; the last one is the target.
            record: The commit record of the checkpoint.
            lease: The lease of its uid at the target.
            publisher: Publishes the intent.
            timing: Sets how often a lease is refreshed.
            repair: Whether the target's copy is known to be damaged, so that data is replaced
                even without a lease.
        """
        self._places = places
        self._target = places[-1]
        self._record = record
        self._lease = lease
        self._publisher = publisher
        self._timing = timing
        self._repair = repair
        self._left: set[str] = set()  # names that a deletion of this checkpoint left at the target
        self.wrote = False
        """Whether the target may have data of this copy or an earlier one."""

    def check(self) -> None:
        """Raise if the target has data of the uid that no earlier copy and no deletion left.

        Raises:
            StepExistsError: Another checkpoint uses the data of this uid.
            BusyError: The target has data of this uid that no copy wrote.
        """
        name = lease_name(self._record.uid)
        has_lease = any(info.name == name for info in self._target.list(name))
        self._check(has_lease=self._repair or has_lease)

    def begin(self) -> bool:
        """Check again, under the lease, and publish the intent.

        Returns:
            Whether a deletion left data here, which it may still be deleting.

        Raises:
            StepExistsError: As for `check`.
            BusyError: As for `check`.
        """
        self.wrote = self._builds_on
        self._left = self._check(has_lease=self._builds_on)
        self._publish_intent()
        return bool(self._left)

    def publish(self, name: str, data: bytes) -> None:
        """Publish a part or the index; replace only a file that a copy or a deletion left."""
        try:
            self._target.publish(name, data, exclusive=self._is_new(name))
        except BlobExistsError as error:
            raise self._not_of_a_copy(name) from error

    def take_back_intent(self) -> None:
        """Delete the intent unless an earlier copy left data. Call it before writing other data."""
        if self._builds_on:
            return
        # With an intent, the next copy would attribute the data there to an earlier copy.
        with suppress(StorageError, BusyError):
            self._lease.check()
            self._target.delete([intent_name(self._record.uid)])
            self.wrote = False

    # ------------------------------------------------------------------------------------------

    @property
    def _builds_on(self) -> bool:
        """Whether data at the target may be replaced: an earlier copy left it, or it is damaged.

        Valid only after the lease is taken.
        """
        return self._repair or self._lease.found

    def _check(self, *, has_lease: bool) -> set[str]:
        """Raise if the target has data of the uid that no earlier copy and no deletion left.

        The copy replaces data that a deletion of this checkpoint left, except blobs that others
        borrow (see `BlobSites`).

        Args:
            has_lease: Whether an earlier copy left a lease.

        Returns:
            The names that a deletion left at the target; none if there is a lease.

        Raises:
            StepExistsError: Another checkpoint uses the data of this uid.
            BusyError: The target has data of this uid that no copy wrote.
        """
        uid = self._record.uid
        own = {lease_name(uid), mark_name(uid), staying_name(uid)}
        left: set[str] = set()
        for place in self._places:
            names = {info.name for info in place.list(data_prefix(uid))} - own
            if names:
                check_uid_is_free(place, self._record)
            if names and place is self._target and not has_lease:
                left = self._left_of(names)
        return left

    def _left_of(self, names: set[str]) -> set[str]:
        """Return the names that a deletion has left, or may be deleting, at the target.

        Data with an intent may belong to a save in flight, which has no index until its end. A
        deletion deletes the intent first; if it was killed before that, the target still has the
        index and parts, and they equal the ones to be copied.

        Raises:
            BusyError: The data may belong to a save in flight, or such a save may need it.
        """
        record, target = self._record, self._target
        uid, has_index = record.uid, record.index.name in names
        if intent_name(uid) in names:
            if has_index and _has_manifest(target, record):
                return names
        else:
            survey = survey_run(target)
            if uid in survey.used:
                return names if any(blob_uid(name) is None for name in names) else set()
            if has_index or not in_flight(target, survey.borrowers(uid), self._timing):
                return names
        raise self._not_of_a_copy(min(names))

    def _not_of_a_copy(self, name: str) -> BusyError:
        msg = (
            f"step {self._record.step} is not copied to {self._target.url}, which already has "
            f"{name}, and no copy wrote it: it may belong to a save or a deletion under way, or be "
            "an orphan of one. Nothing was changed. Copy again later; `penstock prune` there "
            "deletes orphans."
        )
        return BusyError(msg)

    def _publish_intent(self) -> None:
        self.wrote = True
        name = intent_name(self._record.uid)
        try:
            self._publisher.publish_intent(
                references=self._record.references, exclusive=self._is_new(name)
            )
        except BlobExistsError as error:
            self.wrote = False
            raise self._not_of_a_copy(name) from error

    def _is_new(self, name: str) -> bool:
        return not self._builds_on and name not in self._left


def _has_manifest(place: Backend, record: CommitRecord) -> bool:
    """Return whether a place has parts and index of a checkpoint, as its record lists them."""
    try:
        for _ in CopySource(place, record).records():
            pass
    except (DamagedError, CheckpointGoneError):
        return False
    return True

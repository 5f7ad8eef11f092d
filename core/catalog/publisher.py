"""Publishes a save's intent and commit record; stops a save that lost its right to commit."""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING

from penstock.core.catalog.commit_table import Action, Event
from penstock.core.catalog.survey import missing_borrowed
from penstock.core.concurrency.timing import SYSTEM_CLOCK
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    CommitUnknownError,
    FormatError,
    LostRaceError,
    SaveAbortedError,
    SaveError,
    UnsyncedError,
)
from penstock.core.foreign import said
from penstock.core.format.commit_record import decode_commit, encode_commit, encode_intent
from penstock.core.format.records import IntentRecord, commit_name, intent_name
from penstock.core.limits import RECORD_LIMIT_BYTES
from penstock.core.suggest import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from penstock.core.abc import Backend
    from penstock.core.catalog.commit_table import Commit
    from penstock.core.concurrency.timing import Clock
    from penstock.core.format.records import CommitRecord

log = logging.getLogger("penstock")

# An eighth, so that several tries fit into half the grace time, after which the save is given up.
_REFRESHES_PER_GRACE = 8


class Publisher:
    """Publishes the intent and the commit record of one save. Not thread-safe."""

    def __init__(
        self,
        backend: Backend,
        commit: Commit,
        *,
        uid: str,
        step: int,
        grace_s: float,
        process: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Create the publisher of a save, or of a copy, of `uid`.

        Args:
            backend: The backend that the records are published to.
            commit: The state of the save, which allows or refuses a publish.
            uid: The uid of the save.
            step: The step of the commit record.
            grace_s: The seconds for which an intent that is not refreshed protects its data.
            process: As in `IntentRecord`. Empty for a copy, whose data must outlive its process:
                another process may continue the copy.
            clock: Measures the age of the intent.
        """
        self._backend = backend
        self._commit = commit
        self._uid = uid
        self._step = step
        self._grace_s = grace_s
        self._process = process
        self._references: tuple[str, ...] = ()
        self._clock = clock
        self._started = clock.now_iso()
        self._refreshed_s = clock.boot_s()

    def publish_intent(
        self, *, references: Collection[str] | None = None, exclusive: bool = False
    ) -> None:
        """Publish the intent, which protects the data that this save writes and borrows.

        The data of `references` is safe from deletions only if a commit record that names or
        borrows from them still exists *afterwards*. Check that before writing the first byte.

        Args:
            references: The other uids whose blobs the save will use; None keeps the previous ones.
            exclusive: Whether to fail if the uid has an intent.

        Raises:
            BlobExistsError: `exclusive` is set, and the uid already has an intent.
        """
        if references is not None:
            self._references = tuple(sorted(references))
        record = IntentRecord(
            uid=self._uid,
            step=self._step,
            references=self._references,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=self._started,
            refreshed=self._clock.now_iso(),
            process=self._process,
            place=self._backend.url if self._process else "",
        )
        began_s = self._clock.boot_s()
        data = encode_intent(record)
        self._backend.publish(intent_name(self._uid), data, exclusive=exclusive)
        # The clock was read before the call, since the store may have set the record's time at any
        # moment during the call.
        self._refreshed_s = began_s
        log.debug("step %d: published %s", self._step, intent_name(self._uid))

    def refresh_intent(self) -> None:
        """Publish the intent again if it is older than an eighth of the grace time.

        Raises:
            SaveAbortedError: A refresh was due, but the intent is gone, or older than half the
                grace time.
        """
        if self._clock.boot_s() - self._refreshed_s > self._grace_s / _REFRESHES_PER_GRACE:
            # A pruned intent must not come back: the data that it protected is gone too.
            self._check_intent()
            self.publish_intent()

    def publish_commit(self, record: CommitRecord, *, begin: Callable[[], None]) -> None:
        """Publish the commit record, which makes the checkpoint exist.

        If the store does not confirm the publish, reads the record back and compares the uid.

        Args:
            record: The commit record.
            begin: Feeds `PUBLISH_STARTED`; raises if the save was given up.

        Raises:
            LostRaceError: Another saver owns this step and generation.
            CommitUnknownError: It is unknown whether the record was published, or is durable. Or
                the record was published, but the checkpoint's data, or a blob that it borrows, is
                missing.
            SaveAbortedError: The intent was not refreshed for too long, or is gone.
            SaveError: No reader would accept the record; nothing was published.
        """
        name = commit_name(record.step, record.generation)
        data = self._encoded(record)
        self._check_intent()
        begin()
        event = Event.PUBLISH_ANSWER_LOST
        lost: BaseException | None = None
        try:
            event = self._try(name, data)
            action = self._commit.feed(event)
        except UnsyncedError as error:
            # Reading the record back proves nothing here: a power cut may still remove it.
            self._commit.feed(Event.PUBLISH_ANSWER_LOST)
            msg = f"step {record.step} is published, but perhaps not durably: {error}"
            raise CommitUnknownError(msg) from error
        except BaseException as error:  # noqa: BLE001 - resolved below: after any error the record may exist
            log.warning("publishing %s: %s; checking whether it exists", name, repr(error))
            lost = error
            action = self._commit.feed(Event.PUBLISH_ANSWER_LOST)
        if action is Action.RESOLVE:
            found = self._read_back(name)
            if event is Event.PUBLISH_LOST:  # the store's "taken" is definite
                if found is Event.RECORD_IS_OTHER:
                    found = Event.RECORD_IS_OTHER_FOR_GOOD
                elif found is Event.RECORD_ABSENT:  # deleted since, or unreadable: perhaps ours
                    found = Event.RECORD_IS_OTHER
            action = self._commit.feed(found)
        if action is Action.DONE:
            log.debug("step %d: published %s", record.step, name)
            self._check_data(name, record)
            return  # the intent stays with the data: prune may be reading both right now
        if action in {Action.FAIL_LOST_RACE, Action.FAIL_LOST_MAY_DELETE}:
            msg = (
                f"another saver published step {record.step} (generation {record.generation}) on "
                f"{self._backend.url} first. Its checkpoint exists unless it was deleted since; "
                "this save is given up. Save at another step, or with overwrite=True "
                "(`penstock copy`: --overwrite)."
            )
            raise LostRaceError(msg)
        msg = (
            f"step {record.step}: it is unknown whether {name} was published on "
            f"{self._backend.url}. Check `penstock ls` or steps() when the store answers again; "
            "the data of this save is kept."
        )
        if lost is not None:
            msg += f" The store answered: {lost}"
        raise CommitUnknownError(msg) from lost

    def look(self, generation: int) -> Event:
        """Read the commit record of this generation of the step; return the event to feed."""
        return self._read_back(commit_name(self._step, generation))

    def _encoded(self, record: CommitRecord) -> bytes:
        # Called before `begin`: any failure after it means that the record may exist (UNKNOWN).
        try:
            return encode_commit(record)
        except (FormatError, RecursionError) as error:
            msg = (
                f"step {record.step}: no reader would accept its commit record, so nothing was "
                f"committed: {said(error)}"
            )
            raise SaveError(msg) from error

    def _try(self, name: str, data: bytes) -> Event:
        if self._backend.capabilities.exclusive_publish:
            try:
                self._backend.publish(name, data, exclusive=True)
            except BlobExistsError:
                return Event.PUBLISH_LOST
            return Event.PUBLISH_OK
        # A store without conditional put: check, put, and compare the uid that is read back. Two
        # savers may both pass the check, so even a successful put counts as a lost answer.
        if not self._exists(name):
            self._backend.publish(name, data)
        return Event.PUBLISH_ANSWER_LOST

    def _read_back(self, name: str) -> Event:
        try:
            data = self._backend.read_record(name, limit_bytes=RECORD_LIMIT_BYTES)
            ours = decode_commit(data, name).uid == self._uid
        except BaseException as error:  # noqa: BLE001 - a plugin's error, or no memory: proves nothing
            log.debug("reading %s back: %s", name, said(error))
            return Event.RECORD_ABSENT  # an unreadable record may be ours or another saver's
        return Event.RECORD_IS_OURS if ours else Event.RECORD_IS_OTHER

    def _check_intent(self) -> None:
        """Refuse to publish after a long sleep or a prune: the data may be gone already."""
        # Uses a clock that counts while the machine sleeps, as the store's clock does.
        slept_s = self._clock.boot_s() - self._refreshed_s
        if slept_s > self._grace_s / 2:
            self._commit.feed(Event.GRACE_HALF_PASSED)
            why = f"its intent was not refreshed for {slept_s:.0f} s"
        elif not self._exists(intent_name(self._uid)):
            self._commit.feed(Event.INTENT_GONE)
            why = "its intent is gone"
        else:
            return
        msg = (
            f"step {self._step}: not published, since {why} and its data may have been pruned; "
            "save again"
        )
        raise SaveAbortedError(msg)

    def _check_data(self, name: str, record: CommitRecord) -> None:
        """Check that the published checkpoint still has its data.

        If the root was removed during the save, the publish has created its folder again with only
        the record, and a checkpoint without data would be reported as durable. A user may also have
        removed borrowed blobs by hand, or with an older release that does not know of them.

        Raises:
            CommitUnknownError: The intent is gone, and presumably the data beside it. Or a borrowed
                blob is missing, or has another length.
        """
        try:
            lost = "" if self._exists(intent_name(self._uid)) else "its data"
            missing = missing_borrowed(self._backend, record)
            if missing and not lost:
                names = [blob.name for blob in missing]
                lost = f"data borrowed from other saves ({listed(names)})"
            if not lost:
                return
        except BaseException as error:  # noqa: BLE001 - committed: a failed check undoes nothing
            log.warning("%s is published; checking its data failed: %s", name, said(error))
            return
        msg = (
            f"step {self._step}: {name} was published, but {lost} is no longer on "
            f"{self._backend.url}. Was the folder removed or replaced, or the step deleted, during "
            "the save? Check `penstock ls` or steps(), and save again."
        )
        try:
            if self._read_back(name) is Event.RECORD_IS_OURS:
                self._backend.delete([name])
        except BaseException as error:  # noqa: BLE001 - readers report the step as damaged
            log.warning("%s could not be deleted: %s", name, said(error))
        raise CommitUnknownError(msg)

    def _exists(self, name: str) -> bool:
        try:
            self._backend.stat(name)
        except BlobNotFoundError:
            return False
        return True

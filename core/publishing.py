"""Intent and commit record of one save: what makes it exist, and what it may no longer do."""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from penstock.core.commit import Action, Event
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    CommitUnknownError,
    FormatError,
    LostRaceError,
    SaveAbortedError,
    StorageError,
    UnsyncedError,
)
from penstock.core.manifest import IntentRecord, commit_name, intent_name
from penstock.core.record import RECORD_LIMIT_BYTES, decode_commit, encode_commit, encode_intent

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import Backend
    from penstock.core.commit import Commit
    from penstock.core.manifest import CommitRecord

log = logging.getLogger("penstock")

_REFRESHES_PER_GRACE = 8


class Publisher:
    """Publishes one save's intent and commit record; used by one thread."""

    def __init__(
        self, backend: Backend, commit: Commit, *, uid: str, step: int, grace_s: float
    ) -> None:
        self._backend = backend
        self._commit = commit
        self._uid = uid
        self._step = step
        self._grace_s = grace_s
        self._started = now_iso()
        self._refreshed = _boot_s()

    def publish_intent(self) -> None:
        """Say that this save is under way, so that nobody prunes its data."""
        record = IntentRecord(
            uid=self._uid,
            step=self._step,
            references=(),
            host=socket.gethostname(),
            pid=os.getpid(),
            started=self._started,
            refreshed=now_iso(),
        )
        began = _boot_s()
        self._backend.publish(intent_name(self._uid), encode_intent(record))
        self._refreshed = began
        log.debug("step %d: published %s", self._step, intent_name(self._uid))

    def refresh_intent(self) -> None:
        """Publish the intent again when it is getting old.

        Raises:
            SaveAbortedError: It is gone, or too old already.
        """
        if _boot_s() - self._refreshed > self._grace_s / _REFRESHES_PER_GRACE:
            self._check_intent()  # one that was pruned, with what it kept alive, must not come back
            self.publish_intent()

    def publish_commit(self, record: CommitRecord, *, begin: Callable[[], None]) -> None:
        """Make the checkpoint exist; resolves a lost answer by reading the record.

        Args:
            record: What to publish.
            begin: Feeds `PUBLISH_STARTED`; raises if the save was given up.

        Raises:
            LostRaceError: Another saver owns this step and generation.
            CommitUnknownError: It may or may not exist, or its data has vanished.
            SaveAbortedError: The save slept too long, or its intent is gone.
        """
        name = commit_name(record.step, record.generation)
        self._check_intent()
        begin()
        event = Event.PUBLISH_ANSWER_LOST
        lost: BaseException | None = None
        try:
            event = self._try(name, encode_commit(record))
            action = self._commit.feed(event)
        except UnsyncedError as error:
            # Reading it would prove nothing: it may be gone after a power cut.
            self._commit.feed(Event.PUBLISH_ANSWER_LOST)
            msg = f"step {record.step} is published, but perhaps not durably: {error}"
            raise CommitUnknownError(msg) from error
        except BaseException as error:  # noqa: BLE001 - whatever it was, the record may be there
            log.warning("publishing %s: %s; looking whether it is there", name, repr(error))
            lost = error
            action = self._commit.feed(Event.PUBLISH_ANSWER_LOST)
        if action is Action.RESOLVE:
            whose = self._whose(name)
            if whose is Event.RECORD_ABSENT and event is Event.PUBLISH_LOST:
                whose = Event.RECORD_IS_OTHER  # the store's "taken" is definite; deleted since
            action = self._commit.feed(whose)
        if action is Action.DONE:
            log.debug("step %d: published %s", record.step, name)
            self._check_data(name)
            return  # the intent stays with the data: prune may be reading both at this moment
        if action is Action.FAIL_LOST_RACE:
            msg = (
                f"step {record.step} (generation {record.generation}) on {self._backend.url} was "
                "published by another saver first; its checkpoint stands unless it was deleted "
                "since, this one is given up. Save at another step, or with overwrite=True."
            )
            raise LostRaceError(msg)
        msg = (
            f"step {record.step}: whether {name} was published on {self._backend.url} is unknown. "
            "Look at steps() when the store answers again; nothing of it is deleted."
        )
        if lost is not None:
            msg += f" What came back: {lost}"
        raise CommitUnknownError(msg) from lost

    def _try(self, name: str, data: bytes) -> Event:
        if self._backend.capabilities.exclusive_publish:
            try:
                self._backend.publish(name, data, exclusive=True)
            except BlobExistsError:
                return Event.PUBLISH_LOST
            return Event.PUBLISH_OK
        # No conditional put: look, put, and read back whose it is.
        if not self._exists(name):
            self._backend.publish(name, data)
        return Event.PUBLISH_ANSWER_LOST

    def _whose(self, name: str) -> Event:
        try:
            data = self._backend.read_record(name, limit_bytes=RECORD_LIMIT_BYTES)
            ours = decode_commit(data, name).uid == self._uid
        except (FormatError, StorageError):
            return Event.RECORD_ABSENT  # unreadable proves nothing either
        return Event.RECORD_IS_OURS if ours else Event.RECORD_IS_OTHER

    def _check_intent(self) -> None:
        """A saver that slept, or whose intent was pruned, must not publish."""
        slept_s = _boot_s() - self._refreshed
        if slept_s > self._grace_s / 2:
            self._commit.feed(Event.GRACE_HALF_PASSED)
            why = f"its intent was not refreshed for {slept_s:.0f} s"
        elif not self._exists(intent_name(self._uid)):
            self._commit.feed(Event.INTENT_GONE)
            why = "its intent is gone"
        else:
            return
        msg = f"step {self._step}: not published, since {why} and its data may have been pruned"
        raise SaveAbortedError(msg)

    def _check_data(self, name: str) -> None:
        """A root that was removed before the publish has the record alone, in a folder made anew.

        Raises:
            CommitUnknownError: The intent, and so the data beside it, is gone.
        """
        try:
            if self._exists(intent_name(self._uid)):
                return
        except StorageError as error:
            log.warning("%s is published; whether its data is there: %s", name, str(error))
            return
        msg = (
            f"step {self._step}: {name} was published, but its data is not on {self._backend.url} "
            "any more. Was the folder removed or replaced, or the step deleted, while it was "
            "saved? Look at steps(), and save again."
        )
        with suppress(StorageError):  # who finds it there is told that it is damaged
            if self._whose(name) is Event.RECORD_IS_OURS:
                self._backend.delete([name])
        raise CommitUnknownError(msg)

    def _exists(self, name: str) -> bool:
        try:
            self._backend.stat(name)
        except BlobNotFoundError:
            return False
        return True


def now_iso() -> str:
    """Now, as it stands in records."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _boot_s() -> float:
    """Seconds that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)

"""Who copies a checkpoint to a place, and which of its blobs are whole there.

A save has a uid of its own, so nobody else ever writes under its names. Copies of one checkpoint
share them: two at a time would delete each other's unfinished blobs. So whoever copies holds a
claim, a record beside the data, and loses it only once he is dead or silent for long. It also
says which blobs are durable: of one that is merely there nobody knows that, after a crash.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.core.concurrency.processes import identity_of, is_over
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BusyError,
    FormatError,
    StorageError,
)
from penstock.core.format.records import data_prefix
from penstock.core.format.strict_json import Fields, check_texts, load_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.abc import Backend
    from penstock.core.concurrency.timing import Timing

log = logging.getLogger("penstock")

SILENT_S = 15 * 60.0
"""How long the claim of another machine's process holds without being refreshed."""

_LIMIT_BYTES = 64 << 20
_held: set[str] = set()  # tokens of what this process copies at the moment
_KEYS = ("token", "host", "pid", "process", "sealed")


@dataclass(frozen=True, slots=True)
class _Record:
    """What a claim says.

    Attributes:
        token: Of the copy that holds it; empty: nobody does.
        host: Where that runs, for people.
        pid: Its process there, for people.
        process: What tells this process from all others of this machine.
        sealed: Names of the blobs that are whole and durable.
    """

    token: str = ""
    host: str = ""
    pid: int = 0
    process: str = ""
    sealed: tuple[str, ...] = ()


def claim_name(uid: str) -> str:
    """Name of the record."""
    return f"{data_prefix(uid)}copy.json"


class Claim:
    """The right to write the data of one uid at one place; used by one thread."""

    def __init__(self, backend: Backend, uid: str, timing: Timing) -> None:
        self._timing = timing
        self._backend = backend
        self._name = claim_name(uid)
        self._record = _Record(
            secrets.token_hex(16), socket.gethostname(), os.getpid(), identity_of(os.getpid())
        )
        self._refreshed_s = self._timing.clock.boot_s()
        self._found = False

    @property
    def found(self) -> bool:
        """Whether an earlier copy had left a claim: then the data beside it may be that copy's."""
        return self._found

    @property
    def sealed(self) -> frozenset[str]:
        """Names of the blobs that are whole and durable."""
        return frozenset(self._record.sealed)

    def take(self) -> None:
        """Make the right ours, and learn what an earlier copy left.

        Raises:
            BusyError: Another copy is under way.
        """
        _held.add(self._record.token)
        try:
            self._take()
        except BaseException:
            _held.discard(self._record.token)
            raise

    def _take(self) -> None:
        found = self._read()
        if found is not None:
            self._found = True
            self._refuse_living(found)
            self._record = replace(self._record, sealed=found.sealed)
        # One that is there is replaced, not deleted and made again: a crash between the two would
        # leave data of which nobody knows that it is a copy's. Of two that replace it the last one
        # has it, and the other one finds that out before it deletes anything.
        first = found is None and self._backend.capabilities.exclusive_publish
        try:
            self._publish(exclusive=first)
        except BlobExistsError as error:
            raise self._busy(self._read()) from error
        self.check()  # where the store does not decide which one is first

    def seal(self, name: str) -> None:
        """Note that this blob is durable."""
        self._note({*self._record.sealed, name})

    def keep(self, names: Iterable[str]) -> None:
        """Note, before others are deleted, that these alone are durable."""
        self._note(set(names))

    def refresh(self) -> None:
        """Say once a minute that this copy is alive.

        Raises:
            BusyError: Another one has taken over.
        """
        if self._timing.clock.boot_s() - self._refreshed_s > self._timing.lease_refresh_s:
            self.check()
            self._publish()

    def check(self) -> None:
        """Make sure that the right is still ours.

        Raises:
            BusyError: It is not.
        """
        self.check_age()
        found = self._read()
        if found is None or found.token != self._record.token:
            msg = (
                f"{self._name} on {self._backend.url} is another copy's by now, or gone: this one "
                "is given up. Look at steps() there, and copy again if the step stays missing."
            )
            raise BusyError(msg)

    def check_age(self) -> None:
        """Make sure, without asking the store, that nobody can have taken the right yet.

        The store may still show our record though it is lost: a request to publish it that was held
        up in the network can land on top of the record of the copy that took over.

        Raises:
            BusyError: It was not refreshed for too long.
        """
        silent_s = self._timing.clock.boot_s() - self._refreshed_s
        if silent_s > SILENT_S / 2:
            msg = (
                f"{self._name} on {self._backend.url} was not refreshed for {silent_s:.0f} s, so "
                "another copy may be at work: this one is given up. Copy again."
            )
            raise BusyError(msg)

    def withdraw(self) -> None:
        """Take back a claim that is of no use: after a failure, so it raises nothing."""
        self._end()

    def release(self) -> None:
        """Let another copy go on from here; after a failure, so it raises nothing."""
        _held.discard(self._record.token)
        try:
            self.check()
            self._record = replace(self._record, token="", process="")
            self._publish()
        except (StorageError, BusyError) as error:
            log.warning("%s is not released: %s", self._name, str(error))

    def remove(self) -> None:
        """The checkpoint is committed, and nobody needs this any more; it may stay all the same."""
        self._end()

    # ------------------------------------------------------------------------------------------

    def _end(self) -> None:
        _held.discard(self._record.token)
        try:
            self.check()  # else it is the claim of another copy
            self._backend.delete([self._name])
        except (StorageError, BusyError) as error:
            log.warning("%s stays: %s", self._name, str(error))

    def _note(self, sealed: set[str]) -> None:
        self.check()
        if sealed == self.sealed:
            return
        self._record = replace(self._record, sealed=tuple(sorted(sealed)))
        self._publish()

    def _publish(self, *, exclusive: bool = False) -> None:
        record = self._record
        body = {key: getattr(record, key) for key in _KEYS}
        # Before the store is asked: others count from when the record lands, which is later.
        began_s = self._timing.clock.boot_s()
        self._backend.publish(self._name, json.dumps(body).encode(), exclusive=exclusive)
        self._refreshed_s = began_s

    def _read(self) -> _Record | None:
        try:
            data = self._backend.read_record(self._name, limit_bytes=_LIMIT_BYTES)
        except BlobNotFoundError:
            return None
        try:
            fields = Fields(load_json(data, self._name), self._name, _KEYS)
            return _Record(
                fields.text("token"),
                fields.text("host"),
                fields.integer("pid"),
                fields.text("process"),
                tuple(check_texts(fields.value("sealed"), self._name)),
            )
        except FormatError:
            return _Record()  # nobody can hold it, and it proves nothing of any blob

    def _refuse_living(self, found: _Record) -> None:
        if not found.token or _is_dead(found):
            return
        try:
            changed_s = self._backend.stat(self._name).modified_s
        except BlobNotFoundError:
            return
        # One of the future, left by a clock that was put right or made by hand, ends, too.
        if abs(self._backend.store_time_s() - changed_s) < SILENT_S:
            raise self._busy(found)

    def _busy(self, found: _Record | None) -> BusyError:
        who = f"process {found.pid} on {found.host}" if found and found.token else "another process"
        msg = (
            f"{who} copies this checkpoint to {self._backend.url} already: wait for it. If it is "
            f"dead, its claim ({self._name}) ends by itself {SILENT_S / 60:.0f} minutes after its "
            "last sign of life."
        )
        return BusyError(msg)


def _is_dead(record: _Record) -> bool:
    """Whether it is known that this copy is over: only on the machine where it ran.

    One of this very process that failed may not have been able to say so, if its store was away.
    """
    if record.process and record.process == identity_of(os.getpid()):
        return record.token not in _held
    return is_over(record.process)

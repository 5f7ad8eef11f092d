"""The lease of a copy: the right to write the data of one uid at one place.

Each save has its own uid, so no two saves write the same names. Two copies of one checkpoint do,
and would delete each other's unfinished blobs. So a copy holds a lease, a record beside the data.
It loses the lease only if its process has ended or has not refreshed the lease for a long time. The
record also lists the durable blobs, because an existing blob may be torn after a crash.
"""

from __future__ import annotations

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
from penstock.core.format.commit_record import seal, unseal
from penstock.core.format.records import lease_name
from penstock.core.format.strict_json import Fields, check_texts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.abc import Backend
    from penstock.core.concurrency.timing import Timing

log = logging.getLogger("penstock")

SILENT_S = 15 * 60.0
"""The seconds after which a lease ends if it is not refreshed.

A lease that a process of this machine holds ends with that process.
"""

_LIMIT_BYTES = 64 << 20
_held: set[str] = set()  # the tokens of this process's copies in flight
_KEYS = ("token", "host", "pid", "process", "sealed")


@dataclass(frozen=True, slots=True)
class _Record:
    """The stored form of a lease.

    Attributes:
        token: The token of the copy that holds the lease; empty if the lease is free.
        host: The host of that copy, for messages.
        pid: The process of that copy, for messages.
        process: The identity of that process, unique even among later processes with its pid.
        sealed: The names of the blobs that are whole and durable.
    """

    token: str = ""
    host: str = ""
    pid: int = 0
    process: str = ""
    sealed: tuple[str, ...] = ()


class Lease:
    """The right to write the data of one uid at one place. Not thread-safe."""

    def __init__(self, backend: Backend, uid: str, timing: Timing) -> None:
        self._timing = timing
        self._backend = backend
        self._name = lease_name(uid)
        self._record = _Record(
            secrets.token_hex(16), socket.gethostname(), os.getpid(), identity_of(os.getpid())
        )
        self._refreshed_s = self._timing.clock.boot_s()
        self._found = False

    @property
    def found(self) -> bool:
        """Whether an earlier copy left a lease, so that the data beside it may be that copy's."""
        return self._found

    @property
    def sealed(self) -> frozenset[str]:
        """The names of the blobs that are whole and durable."""
        return frozenset(self._record.sealed)

    @property
    def token(self) -> str:
        """The random name of the copy."""
        return self._record.token

    def is_of(self, token: str) -> bool:
        """Return whether the copy with this token holds the stored lease."""
        found = self._read()
        return found is not None and found.token == token

    def is_abandoned(self) -> bool:
        """Return whether there is a lease of this uid that no copy in flight holds."""
        found = self._read()
        return found is not None and not self._is_living(found)

    def take(self, *, durable: Iterable[str] = ()) -> None:
        """Acquire the lease, and read which blobs an earlier copy sealed.

        Args:
            durable: More blobs to list as durable.

        Raises:
            BusyError: Another copy is in flight.
        """
        _held.add(self._record.token)
        try:
            self._take(durable)
        except BaseException:
            _held.discard(self._record.token)
            raise

    def _take(self, durable: Iterable[str]) -> None:
        found = self._read()
        if found is not None:
            self._found = True
            if self._is_living(found):
                raise self._busy(found)
            durable = {*durable, *found.sealed}
        self._record = replace(self._record, sealed=tuple(sorted(durable)))
        # Replaces an existing record instead of deleting and creating it: a crash in between would
        # leave data that no lease marks as a copy's, and that no later copy may touch. If two
        # copies replace the record, the last one holds the lease, and the `check` of the other one
        # fails before it deletes anything.
        first = found is None and self._backend.capabilities.exclusive_publish
        try:
            self._publish(exclusive=first)
        except BlobExistsError as error:
            raise self._busy(self._read()) from error
        self.check()  # a store without exclusive publish does not decide between two copies

    def seal(self, name: str) -> None:
        """Record that this blob is durable."""
        self._note({*self._record.sealed, name})

    def keep(self, names: Iterable[str]) -> None:
        """Record that only these blobs are durable. Call it before deleting the others."""
        self._note(set(names))

    def refresh(self) -> None:
        """Publish the lease again if the last refresh is more than `lease_refresh_s` ago.

        Raises:
            BusyError: Another copy has taken over the lease.
        """
        if self._timing.clock.boot_s() - self._refreshed_s > self._timing.lease_refresh_s:
            self.check()
            self._publish()

    def check(self) -> None:
        """Read the lease, and raise unless this copy still holds it.

        Raises:
            BusyError: This copy has lost the lease.
        """
        self.check_age()
        found = self._read()
        if found is None or found.token != self._record.token:
            msg = (
                f"{self._name} on {self._backend.url} belongs to another copy now, or is gone, so "
                "this copy was given up. Check `penstock ls` there, and copy again if the step is "
                "missing."
            )
            raise BusyError(msg)

    def check_age(self) -> None:
        """Raise if another copy may have taken over the lease; do no I/O.

        Reading the record is not enough: a late publish by this copy can overwrite the record of
        the copy that took over, so that the store names this copy although it has lost the lease.

        Raises:
            BusyError: The lease was not refreshed for too long.
        """
        silent_s = self._timing.clock.boot_s() - self._refreshed_s
        if silent_s > SILENT_S / 2:
            msg = (
                f"{self._name} on {self._backend.url} was not refreshed for {silent_s:.0f} s, so "
                "another copy may have taken over, and this copy was given up. Copy again."
            )
            raise BusyError(msg)

    def release(self) -> None:
        """Free the lease, so that a later copy can continue; raise nothing."""
        _held.discard(self._record.token)
        try:
            self.check()
            self._record = replace(self._record, token="", process="")
            self._publish()
        except (StorageError, BusyError) as error:
            log.warning("%s could not be released: %s", self._name, str(error))

    def remove(self) -> None:
        """Delete the lease, which no later copy needs.

        Only logs a failure, since the lease expires anyway.
        """
        _held.discard(self._record.token)
        try:
            self.check()  # the record may be another copy's lease
            self._backend.delete([self._name])
        except (StorageError, BusyError) as error:
            log.warning("%s could not be deleted: %s", self._name, str(error))

    # ------------------------------------------------------------------------------------------

    def _note(self, sealed: set[str]) -> None:
        self.check()
        if sealed == self.sealed:
            return
        self._record = replace(self._record, sealed=tuple(sorted(sealed)))
        self._publish()

    def _publish(self, *, exclusive: bool = False) -> None:
        record = self._record
        body = {key: getattr(record, key) for key in _KEYS}
        # The clock is read before the call: other processes count from the record's arrival, which
        # is later.
        began_s = self._timing.clock.boot_s()
        self._backend.publish(self._name, seal(body), exclusive=exclusive)
        self._refreshed_s = began_s

    def _read(self) -> _Record | None:
        try:
            data = self._backend.read_record(self._name, limit_bytes=_LIMIT_BYTES)
        except BlobNotFoundError:
            return None
        try:
            fields = Fields(unseal(data, self._name), self._name, _KEYS)
            return _Record(
                fields.text("token"),
                fields.text("host"),
                fields.integer("pid"),
                fields.text("process"),
                tuple(check_texts(fields.value("sealed"), self._name)),
            )
        except FormatError:
            return _Record()  # a lease that no copy holds, and that proves no blob durable

    def _is_living(self, found: _Record) -> bool:
        if not found.token or _is_dead(found):
            return False
        try:
            changed_s = self._backend.stat(self._name).modified_s
        except BlobNotFoundError:
            return False
        # `abs`: if a clock was set back, a time in the future must not keep the lease forever.
        return abs(self._backend.store_time_s() - changed_s) < SILENT_S

    def _busy(self, found: _Record | None) -> BusyError:
        holder = "another process"
        if found and found.token:
            holder = f"process {found.pid} on {found.host}"
        msg = (
            f"{holder} is already copying this checkpoint, or one that needs the same blobs, to "
            f"{self._backend.url}: wait until it is done. If that process was killed, its lease "
            f"({self._name}) ends {SILENT_S / 60:.0f} minutes after its last refresh."
        )
        return BusyError(msg)


def _is_dead(record: _Record) -> bool:
    """Return whether the copy is known to have ended; only its own machine can know that."""
    # A failed copy of this process could not release its lease if the store did not answer.
    if record.process and record.process == identity_of(os.getpid()):
        return record.token not in _held
    return is_over(record.process)

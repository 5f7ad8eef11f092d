"""Moves files of a checkpoint on this host, as rank 0 orders.

A pull copies files of other hosts to this host's root.

Tested in `tests/integration/ranks/test_host_copies.py`.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.abc import DelegatingBackend, host_roots
from penstock.core.catalog.survey import read_commit, sizes_below
from penstock.core.copy.copy_source import CopySource
from penstock.core.copy.mover import BlobMover, BlobTransfer, Callbacks
from penstock.core.errors import FormatError, StorageError
from penstock.core.foreign import said
from penstock.core.types import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.core.abc import Backend, BlobWriter, HostRoots
    from penstock.core.concurrency.workers import Workers
    from penstock.core.types import ByteRange

_LANDING = "/pulled/"
"""The folder of blobs that are being copied, instead of `/blobs/`."""

_BUFFER_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Order:
    """Files of one checkpoint to copy.

    Attributes:
        record: The name of the commit record.
        files: The size of each file in bytes, by name.
    """

    record: str
    files: Mapping[str, int]

    def encoded(self) -> bytes:
        """Return the order as bytes, which `HostOrders.execute` decodes."""
        return json.dumps({"record": self.record, "files": {**self.files}}).encode()


class HostOrders:
    """Executes the orders of rank 0 for the root of this host, in each tier on hosts."""

    def __init__(self, store: Backend, workers: Workers) -> None:
        """Prepare, without I/O."""
        self._pullers = {n: Puller(place, workers) for n, place in host_roots(store).items()}

    def execute(self, number: int, kind: str, body: bytes) -> bytes:
        """Begin to execute an order in tier `number`, as `Puller.pull` does.

        Raises:
            StorageError: The order is invalid, or the last one of its kind has failed.
        """
        if kind != "pull" or number not in self._pullers:
            msg = f"this host has no {kind!r} in tier {number}: give all ranks one configuration"
            raise StorageError(msg)
        self._pullers[number].pull(_decoded(body))
        return b""

    def close(self) -> None:
        """Cancel all copies, and wait for their ends."""
        for puller in self._pullers.values():
            puller.close()


class Puller:
    """Copies files of other hosts to this host's root, one checkpoint at a time."""

    def __init__(self, place: HostRoots, workers: Workers) -> None:
        self._place = place
        self._workers = workers
        self._lock = threading.Lock()  # guards everything below
        self._order: Order | None = None
        self._mover: BlobMover | None = None
        self._thread: threading.Thread | None = None
        self._error = ""
        self._closed = False

    def pull(self, order: Order) -> None:
        """Begin to copy the files of `order`; do nothing if a copy is under way.

        A copy of another checkpoint is cancelled, and the next call begins.

        Raises:
            StorageError: The last copy has failed; the next call tries again.
        """
        with self._lock:
            error, self._error = self._error, ""
            if error:
                raise StorageError(error)
            if self._closed:
                return
            if self._order is None:
                self._order = order
                self._thread = self._workers.spawn("pull", self._run)
            elif self._order.record != order.record and self._mover is not None:
                self._mover.cancel()

    def close(self) -> None:
        """Cancel the copy, and wait for its end."""
        with self._lock:
            self._closed = True
            if self._mover is not None:
                self._mover.cancel()
        if self._thread is not None:
            self._thread.join(self._workers.timing.interrupt_s)

    def _run(self) -> None:
        order = self._order
        assert order is not None
        error = ""
        try:
            self._copy(order)
        except Exception as failure:  # noqa: BLE001 - a task's boundary: the next call reports it
            error = said(failure)
        with self._lock:
            self._order = self._mover = None
            self._error = "" if self._closed else error

    def _copy(self, order: Order) -> None:
        place, own = self._place, self._place.own
        record = read_commit(place, order.record)
        source = CopySource(place, record)

        def damaged(transfer: BlobTransfer, ranges: list[ByteRange]) -> None:
            raise source.damage(transfer.blob.name, ranges)

        def missing(transfer: BlobTransfer, error: StorageError) -> None:
            raise source.missing(FormatError(str(error), [transfer.blob.name])) from error

        sizes = sizes_below(own, (record.uid, *record.references))
        own.delete([name for name in sizes if _LANDING in name])  # left by a process that died
        blobs = [
            blob
            for blob in source.read()
            if blob.name in order.files and sizes.get(blob.name) != blob.length
        ]
        capabilities = own.capabilities
        mover = BlobMover(
            workers=self._workers,
            buffer_bytes=_BUFFER_BYTES,
            unit_bytes=max(
                PAGE_BYTES, capabilities.offset_alignment, capabilities.memory_alignment
            ),
            bytes_per_s=place.copy_bytes_per_s,
            calls=Callbacks(
                moved=lambda _: None,
                sealed=lambda name: own.rename(_landing(name), name),
                damaged=damaged,
                missing=missing,
                alive=lambda: None,
            ),
        )
        with self._lock:
            if self._closed:
                return
            self._mover = mover
        landing = _Landing(own)
        mover.run(BlobTransfer(blob, place, landing) for blob in blobs)
        own.delete([_landing(blob.name) for blob in blobs])  # removes the empty folder
        for name, data in source.records():
            if name in order.files:
                own.publish(name, data)


class _Landing(DelegatingBackend):
    """Creates blobs under names that no reader looks for, until they are whole."""

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        return super().create(_landing(name), size_hint=size_hint)


def _landing(name: str) -> str:
    folder, leaf = name.rsplit("/", 1)
    return f"{folder.rsplit('/', 1)[0]}{_LANDING}{leaf}"


def _decoded(body: bytes) -> Order:
    try:
        found: Any = json.loads(body)
        files = {str(name): int(size) for name, size in found["files"].items()}
        return Order(str(found["record"]), files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        msg = f"the request to copy files cannot be read: {error}"
        raise StorageError(msg) from error

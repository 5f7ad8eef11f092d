"""Makes sources of stored objects, which the capture reads chunk by chunk.

Tested in `tests/integration/lifecycle/test_copy.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.abc import ByteSource
from penstock.core.plan.reads import ObjectRequest
from penstock.core.restore.fill import BytesSink, fill, read_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.abc import PendingCopy
    from penstock.core.format.records import ObjectRecord
    from penstock.core.plan.save import SavePlan
    from penstock.core.restore.fill import Opened
    from penstock.core.types import ObjectPath


class StoredSource(ByteSource):
    """A source that reads the bytes of a stored object."""

    __slots__ = ("_reader", "address", "device", "memory", "nbytes", "record")

    def __init__(self, reader: StoredReader, record: ObjectRecord) -> None:
        self._reader = reader
        self.record = record
        self.nbytes = record.spec.nbytes
        self.device = "cpu"
        self.address = None
        self.memory = None

    def view(self) -> memoryview | None:
        """Return None: the bytes are in the store."""
        return None

    def is_rounded(self, other: ByteSource, /) -> bool:
        """Return whether the stored object is derived from the other."""
        return isinstance(other, StoredSource) and other.record.path == (self.record.derived)

    def copy_out(self, start: int, out: memoryview, /) -> PendingCopy | None:
        """Read bytes from `start` on into `out`, and compare their checksums."""
        self._reader.read(self.record, start, out)
        return None


class StoredReader:
    """Reads pieces of stored objects, and all objects of a slab at once. Used by one thread."""

    def __init__(self, checkpoint: Opened) -> None:
        self._checkpoint = checkpoint
        self._slabs: dict[ObjectPath, Sequence[ObjectRecord]] = {}
        self._slab: Sequence[ObjectRecord] = ()
        self._held: dict[ObjectPath, BytesSink] = {}

    def read_together(self, plan: SavePlan) -> None:
        """Note the objects that share a slab, so that one request to the store reads them all."""
        for chunk in plan.chunks:
            if chunk.slab:
                sources = (plan.objects[piece.item].entry.source for piece in chunk.pieces)
                slab = [source.record for source in sources if isinstance(source, StoredSource)]
                self._slabs |= dict.fromkeys((record.path for record in slab), slab)

    def read(self, record: ObjectRecord, start: int, out: memoryview) -> None:
        """Fill `out` with the object's bytes from `start` on.

        Raises:
            DamagedError: The stored bytes differ from those written.
        """
        path = record.path
        slab = self._slabs.get(path)
        if slab is None:
            read_range(self._checkpoint, record, start, out)
            return
        if slab is not self._slab:
            self._slab = slab
            self._held = {o.path: BytesSink(o.spec.nbytes) for o in slab}
            requests = [ObjectRequest(o, self._held[o.path]) for o in slab]
            fill(self._checkpoint, requests)
        out[:] = self._held[path].data[start : start + out.nbytes]

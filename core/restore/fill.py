"""Reading objects of an open checkpoint: values at once, tensors into whatever takes them."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.core.abc import ByteSink, Node, StoredObject
from penstock.core.catalog.catalog import Catalog
from penstock.core.concurrency.copy_bytes import copy_bytes
from penstock.core.errors import (
    CheckpointGoneError,
    CheckpointNotFoundError,
    DamagedError,
    PenstockError,
    RestoreError,
)
from penstock.core.plan.restore import ObjectRequest
from penstock.core.reporting.progress import Meter
from penstock.core.suggest import LISTED
from penstock.core.tree.stored_tree import StoredTree
from penstock.core.types import Kind

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.pipeline.chain import CodecChain
    from penstock.core.pipeline.reader import Loader
    from penstock.core.plan.restore import FrameJob, Located
    from penstock.core.plugins.registry import Registry
    from penstock.core.restore.contents import Contents
    from penstock.core.tree.select import Rename, Selection
    from penstock.core.types import ObjectPath

log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint that is open for reading, and what reading it takes.

    Attributes:
        backend: Where it is.
        contents: Its manifest.
        loader: Reads its frames.
        registry: Knows providers and codecs.
        allow_pickle: Whether stored pickles may be loaded.
        meter: Told of the bytes that are read.
    """

    backend: Backend
    contents: Contents
    loader: Loader
    registry: Registry
    allow_pickle: bool = False
    meter: Meter = field(default_factory=Meter)

    @property
    def step(self) -> int:
        """Its step."""
        return self.contents.record.step

    def still_there(self) -> bool:
        """Whether the commit record still names this very checkpoint."""
        try:
            return Catalog(self.backend).record(self.step).uid == self.contents.record.uid
        except CheckpointNotFoundError:
            return False
        except DamagedError:
            return True


def room(nbytes: int) -> bytearray:
    """Memory for so many bytes, which a checkpoint says it needs.

    Raises:
        RestoreError: There is not so much.
    """
    try:
        return bytearray(nbytes)
    except (MemoryError, OverflowError) as error:
        msg = f"the checkpoint asks for {nbytes} bytes at once, which this process cannot get"
        raise RestoreError(msg) from error


class BytesSink(ByteSink):
    """Collects an object's bytes in memory of its own."""

    __slots__ = ("address", "data", "device", "memory", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.device = "cpu"
        self.address = None
        self.memory = None
        self.data = room(nbytes)

    def view(self) -> memoryview | None:
        """The memory itself."""
        return memoryview(self.data)

    def copy_in(self, start: int, data: memoryview, /) -> None:
        """Copy into the memory."""
        self.data[start : start + data.nbytes] = data


class SliceSink(ByteSink):
    """Takes those bytes of an object that lie in `out`, its bytes from `origin` on."""

    __slots__ = ("_origin", "_out", "address", "device", "memory", "nbytes")

    def __init__(self, out: memoryview, origin: int) -> None:
        self._out = out
        self._origin = origin
        self.nbytes = out.nbytes
        self.device = "cpu"
        self.address = None
        self.memory = None

    def view(self) -> memoryview | None:
        """None: offsets differ from the object's."""
        return None

    def copy_in(self, start: int, data: memoryview, /) -> None:
        """Copy without the GIL."""
        copy_bytes(self._out[start - self._origin :], data)


@dataclass(slots=True)
class Tally:
    """Bytes of blobs that a restore needed, and that it read."""

    needed: int = 0
    read: int = 0

    def add(self, needed: int, read: int) -> None:
        """Count one more load."""
        self.needed += needed
        self.read += read


@dataclass(frozen=True, slots=True)
class StoredSelection:
    """The selected part of a checkpoint under the template's names, values read."""

    tree: StoredTree
    located: Mapping[ObjectPath, Located]
    every_path: Collection[ObjectPath]
    tally: Tally


def read_stored(
    checkpoint: Opened,
    selection: Selection,
    rename: Rename,
    *,
    narrow: bool,
) -> StoredSelection:
    """Find the selected objects, under the template's names, and read the values among them.

    Args:
        checkpoint: Where to look.
        selection: What to find; compared with the template's names.
        rename: From stored names to the template's.
        narrow: Leave out of the result what the selection does not touch, which takes time by what
            is selected. Stored names have to be the template's then.
    """
    contents = checkpoint.contents
    found, nodes = contents.touched(selection) if narrow else (contents.objects(), contents.nodes())
    by_path = {o.record.path: o for o in found}
    moved = rename.apply(by_path)
    located: dict[ObjectPath, Located] = {}
    aliases: dict[ObjectPath, ObjectPath] = {}
    for item in found:
        path, tied = moved[item.record.path], item.record.same_as
        if not selection.selects(path):
            continue
        if tied is None:
            located[path] = item
        else:
            located[path] = by_path.get(tied) or contents.owner(item)
            aliases[path] = moved.get(tied, tied)
    tally = Tally()
    requests, sinks = [], {}
    for path, item in located.items():
        if item.record.kind is Kind.VALUE:
            sink = sinks[path] = BytesSink(item.record.spec.nbytes)
            requests.append(ObjectRequest(item, sink))
    fill(checkpoint, requests, tally)
    tree = StoredTree(
        objects=[
            StoredObject(moved[r.path], r.kind, r.spec, r.role, r.form)
            for r in (o.record for o in found)
        ],
        nodes=[Node(rename(n.path), n.form, n.meta) for n in nodes],
        values={path: bytes(sink.data) for path, sink in sinks.items()},
        aliases=aliases,
        providers=contents.record.providers,
        plugins=contents.record.plugins,
    )
    return StoredSelection(tree, located, moved.values(), tally)


def fill(checkpoint: Opened, requests: Sequence[ObjectRequest], tally: Tally | None = None) -> None:
    """Read what is wished for; `tally` counts the bytes.

    Raises:
        DamagedError: Names every damaged object.
        CheckpointGoneError: The checkpoint was deleted meanwhile.
        RestoreError: The store failed.
    """
    jobs, needed = checkpoint.contents.jobs(requests)
    if not jobs:
        return
    began = time.monotonic()
    checkpoint.meter.expect(bytes_of(jobs))
    try:
        stats = checkpoint.loader.run(jobs, progress=checkpoint.meter.advance)
    except PenstockError as error:
        url = checkpoint.backend.url
        msg = f"step {checkpoint.step} could not be read from {url}: {error}"
        raise RestoreError(msg) from error
    if tally is not None:
        tally.add(needed, stats.bytes_read)
    if log.isEnabledFor(logging.DEBUG):  # counting takes a moment where there are many
        log.debug(
            "step %d: %d frames, %d encoded, in %d ranges; %d bytes needed, %d read in %.3f s",
            checkpoint.step,
            len(jobs),
            sum(job.chain is not None for job in jobs),
            sum(len(job.ranges) for job in jobs),
            needed,
            stats.bytes_read,
            time.monotonic() - began,
        )
    if stats.damaged:
        raise_damaged(checkpoint, stats.damaged, missing_blob=stats.missing_blob)


def bytes_of(jobs: Sequence[FrameJob[CodecChain]]) -> int:
    """How much `jobs` will read."""
    return sum(span.length for job in jobs for span in job.ranges)


def raise_damaged(
    checkpoint: Opened, damaged: Sequence[tuple[str, str]], *, missing_blob: bool
) -> None:
    """Raise what `damaged` means: gone, if the record is gone by now, else damage."""
    if missing_blob and not checkpoint.still_there():
        msg = f"step {checkpoint.step} on {checkpoint.backend.url} was deleted while it was read"
        raise CheckpointGoneError(msg)
    names = list(dict.fromkeys(name for name, _ in damaged))
    details = "; ".join(f"{name}: {detail}" for name, detail in damaged[:LISTED])
    msg = (
        f"step {checkpoint.step} on {checkpoint.backend.url} is damaged in {len(names)} "
        f"object(s): {details}. Restore an older step, or pass on_damage='fallback'."
    )
    raise DamagedError(msg, names)

"""Reading objects of an open checkpoint: values at once, tensors into whatever takes them."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.core.abc import ByteSink, Node, StoredObject
from penstock.core.contents import Wish
from penstock.core.errors import CheckpointGoneError, DamagedError, PenstockError, RestoreError
from penstock.core.progress import Meter
from penstock.core.stored_tree import StoredTree
from penstock.core.types import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.contents import Contents, Located
    from penstock.core.frames import FrameJob
    from penstock.core.loading import Loader
    from penstock.core.select import Rename
    from penstock.core.types import ObjectPath

log = logging.getLogger("penstock")

LISTED = 8


class Opened(Protocol):
    """A checkpoint that is open for reading; `core.checkpoint` has the class."""

    backend: Backend
    loader: Loader
    contents: Contents

    @property
    def step(self) -> int:
        """Its step."""
        raise NotImplementedError

    def still_there(self) -> bool:
        """Whether the commit record still names it."""
        raise NotImplementedError


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
        """Copy without the GIL; a memoryview's slice assignment would hold it."""
        at = start - self._origin
        np.frombuffer(self._out[at : at + data.nbytes], np.uint8)[:] = np.frombuffer(data, np.uint8)


@dataclass(slots=True)
class Tally:
    """Bytes of blobs that a restore needed, and that it read; who is told of them meanwhile."""

    needed: int = 0
    read: int = 0
    meter: Meter = field(default_factory=Meter)

    def add(self, needed: int, read: int) -> None:
        """Count one more load."""
        self.needed += needed
        self.read += read


@dataclass(frozen=True, slots=True)
class Stored:
    """The selected part of a checkpoint under the template's names, values read."""

    tree: StoredTree
    located: Mapping[ObjectPath, Located]
    every_path: Collection[ObjectPath]
    tally: Tally


def read_stored(
    checkpoint: Opened,
    selected: Callable[[ObjectPath], bool],
    rename: Rename,
    meter: Meter,
) -> Stored:
    """Find the selected objects, under the template's names, and read the values among them."""
    contents = checkpoint.contents
    everything = contents.objects()
    by_path = {o.record.path: o for o in everything}
    moved = rename.apply(by_path)
    located: dict[ObjectPath, Located] = {}
    aliases: dict[ObjectPath, ObjectPath] = {}
    for item in everything:
        path = moved[item.record.path]
        if not selected(path):
            continue
        if item.record.same_as is None:
            located[path] = item
        else:
            located[path] = by_path[item.record.same_as]
            aliases[path] = moved[item.record.same_as]
    tally = Tally(meter=meter)
    wishes, sinks = [], {}
    for path, item in located.items():
        if item.record.kind is Kind.VALUE:
            sink = sinks[path] = BytesSink(item.record.spec.nbytes)
            wishes.append(Wish(item, sink))
    fill(checkpoint, wishes, tally)
    tree = StoredTree(
        objects=[
            StoredObject(moved[r.path], r.kind, r.spec, r.role, r.form)
            for r in (o.record for o in everything)
        ],
        nodes=[Node(rename(n.path), n.form, n.meta) for n in contents.nodes()],
        values={path: bytes(sink.data) for path, sink in sinks.items()},
        aliases=aliases,
    )
    return Stored(tree, located, moved.values(), tally)


def fill(checkpoint: Opened, wishes: Sequence[Wish], tally: Tally) -> None:
    """Read what is wished for.

    Raises:
        DamagedError: Names every damaged object.
        CheckpointGoneError: The checkpoint was deleted meanwhile.
        RestoreError: The store failed.
    """
    jobs, needed = checkpoint.contents.jobs(wishes)
    if not jobs:
        return
    began = time.monotonic()
    tally.meter.expect(bytes_of(jobs))
    try:
        stats = checkpoint.loader.run(jobs, progress=tally.meter.advance)
    except PenstockError as error:
        url = checkpoint.backend.url
        msg = f"step {checkpoint.step} could not be read from {url}: {error}"
        raise RestoreError(msg) from error
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


def bytes_of(jobs: Sequence[FrameJob]) -> int:
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


def listed(names: Sequence[str]) -> str:
    """The first of `names`, and how many more there are."""
    more = len(names) - LISTED
    shown = ", ".join(names[:LISTED])
    return f"{shown} and {more} more" if more > 0 else shown

"""Reads objects of an open checkpoint, or regions of them, into memory or into sinks.

Tested in `tests/core/restore/test_read_into.py`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from penstock.core.abc import ByteSink, Node, StoredObject
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.lender_report import broken_chain
from penstock.core.concurrency.copy_bytes import copy_bytes
from penstock.core.errors import (
    CheckpointGoneError,
    CheckpointNotFoundError,
    DamagedError,
    PenstockError,
    RestoreError,
    StorageError,
)
from penstock.core.format.records import blob_uid
from penstock.core.plan.reads import ObjectRequest
from penstock.core.ranks.templates import RoundOverError
from penstock.core.reporting.progress import Meter
from penstock.core.restore.contents import Contents
from penstock.core.restore.fallback import RESTORE_OLDER
from penstock.core.suggest import LISTED
from penstock.core.tree.select import Selection
from penstock.core.tree.stored_tree import StoredTree
from penstock.core.types import Kind, Region, regions_of_range
from penstock.core.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.format.records import CommitRecord, ObjectRecord
    from penstock.core.hosts.reading import JobReading, SharedReading
    from penstock.core.pipeline.codec_chain import CodecChain
    from penstock.core.pipeline.loader import Loader
    from penstock.core.plan.reads import FrameJob
    from penstock.core.plugins.registry import Registry
    from penstock.core.tree.select import Rename
    from penstock.core.types import ObjectPath

log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint that is open for reading, with the engine that reads it.

    Attributes:
        backend: The backend that holds the checkpoint.
        contents: The manifest.
        loader: Reads the frames.
        registry: Finds providers and codecs.
        allow_pickle: Whether stored pickles may be loaded.
        meter: Counts the bytes that are read.
        rank: The number of this rank among those that restore together.
        world_size: The number of these ranks.
        others: Reads the targets together with other ranks; None: this rank reads alone.
        ended: Returns whether the ranks have given up this restore. Then reading stops at once.
    """

    backend: Backend
    contents: Contents
    loader: Loader
    registry: Registry
    allow_pickle: bool = False
    meter: Meter = field(default_factory=Meter)
    rank: int = 0
    world_size: int = 1
    others: JobReading | None = None
    ended: Callable[[], bool] = lambda: False

    @classmethod
    def open(
        cls,
        backend: Backend,
        record: CommitRecord,
        loader: Loader,
        registry: Registry,
        *,
        allow_pickle: bool,
    ) -> Self:
        """Open the checkpoint of a commit record, without further reads."""
        log.debug(
            "step %d: opened %s-%d, %d objects in %d part(s), %d bytes stored, written by %s",
            record.step,
            record.uid,
            record.generation,
            record.objects,
            record.part_count,
            record.bytes_stored,
            record.engine,
        )
        return cls(backend, Contents(backend, record, registry), loader, registry, allow_pickle)

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self.contents.record.step

    def check_there(self) -> None:
        """Check that the commit record still names this checkpoint.

        A reader that misses a blob calls this to distinguish a deleted checkpoint from a damaged
        one.

        Raises:
            CheckpointGoneError: The checkpoint was deleted while it was read.
        """
        try:
            if Catalog(self.backend).record(self.step).uid == self.contents.record.uid:
                return
        except DamagedError:  # the record exists but cannot be read: the checkpoint is damaged
            return
        except CheckpointNotFoundError:
            pass
        msg = f"step {self.step} on {self.backend.url} was deleted while it was read"
        raise CheckpointGoneError(msg)


def room(nbytes: int) -> bytearray:
    """Allocate memory for an object, of the size that the checkpoint declares.

    Raises:
        RestoreError: The process cannot get that much memory. The declared size may be damaged.
    """
    try:
        return bytearray(nbytes)
    except (MemoryError, OverflowError) as error:
        msg = (
            f"the checkpoint needs {nbytes} bytes at once, which this process cannot get: free "
            "memory; if no object is that large, `penstock verify` finds the damage"
        )
        raise RestoreError(msg) from error


class BytesSink(ByteSink):
    """A sink that collects an object's bytes in its own memory, or in given memory."""

    __slots__ = ("address", "data", "device", "memory", "nbytes")

    def __init__(self, memory: int | memoryview) -> None:
        """Make a sink: `memory` is a number of bytes, or flat, writable memory."""
        self.data = memory if isinstance(memory, memoryview) else memoryview(room(memory))
        self.nbytes = self.data.nbytes
        self.device = "cpu"
        self.address = None
        self.memory = None

    def view(self) -> memoryview | None:
        """Return the memory itself."""
        return self.data

    def copy_in(self, start: int, data: memoryview, /) -> None:
        """Copy into the memory, without the GIL."""
        copy_bytes(self.data[start:], data)


@dataclass(slots=True)
class Tally:
    """Counts the blob bytes that a restore needed, read, and got from other ranks.

    Attributes:
        needed: The bytes that it needed.
        read: The bytes that it read.
        shared: The bytes that other ranks of this host read and lent.
        received: The bytes that ranks of other hosts read and sent.
    """

    needed: int = 0
    read: int = 0
    shared: int = 0
    received: int = 0

    def add(self, needed: int, read: int, shared: SharedReading | None) -> None:
        """Count another load. `shared` has the bytes that other ranks read for this rank."""
        self.needed += needed
        self.read += read
        if shared is not None:
            self.shared += shared.bytes_taken
            self.received += shared.bytes_received


@dataclass(frozen=True, slots=True)
class StoredSelection:
    """The selected part of a checkpoint under the template's names, with its values.

    Attributes:
        tree: The objects, nodes and values.
        records: The stored object of each selected path, ties resolved.
        every_path: The template's path of each examined object, selected or not.
        tally: Counts the bytes read for the objects.
    """

    tree: StoredTree
    records: Mapping[ObjectPath, ObjectRecord]
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
        checkpoint: The checkpoint.
        selection: Selects objects by the template's names.
        rename: Maps stored names to the template's.
        narrow: Whether to omit everything that the selection does not touch, so that the time grows
            only with the selected objects. `rename` must then change no name.
    """
    contents = checkpoint.contents
    objects, nodes = (
        contents.touched(selection) if narrow else (contents.objects(), contents.nodes())
    )
    by_path = {o.path: o for o in objects}
    moved = rename.apply(by_path)
    records: dict[ObjectPath, ObjectRecord] = {}
    aliases: dict[ObjectPath, ObjectPath] = {}
    everything = selection.everything
    for item in objects:
        path, tied = moved[item.path], item.same_as
        if not (everything or selection.selects(path)):
            continue
        if tied is None:
            records[path] = item
        else:
            # The owner may be outside of the selection, and so not be in `by_path`.
            records[path] = by_path.get(tied) or contents.owner(item)
            aliases[path] = moved.get(tied, tied)
    tally = Tally()
    requests, sinks = [], {}
    for path, item in records.items():
        if item.kind is Kind.VALUE:
            sink = sinks[path] = BytesSink(item.spec.nbytes)
            requests.append(ObjectRequest(item, sink))
    fill(checkpoint, requests, tally)

    def whole(path: ObjectPath) -> StoredTree:
        subtree = Selection.subtree(path)
        return read_stored(checkpoint, subtree, rename, narrow=rename.identity).tree

    tree = StoredTree(
        objects=[StoredObject(moved[r.path], r.kind, r.spec, r.role, r.form) for r in objects],
        nodes=[Node(rename(n.path), n.form, n.meta) for n in nodes],
        values={path: bytes(sink.data) for path, sink in sinks.items()},
        aliases=aliases,
        providers=contents.record.providers,
        plugins=contents.record.plugins,
        whole=None if everything else whole,
    )
    return StoredSelection(tree, records, moved.values(), tally)


def fill(
    checkpoint: Opened,
    requests: Sequence[ObjectRequest],
    tally: Tally | None = None,
    others: JobReading | None = None,
) -> None:
    """Read all requested objects into their sinks.

    Args:
        checkpoint: The checkpoint.
        requests: The objects, with sinks.
        tally: Counts the bytes.
        others: Shares the reads with other ranks; may be used once per restore.

    Raises:
        DamagedError: Names every damaged object.
        CheckpointGoneError: The checkpoint was deleted meanwhile.
        RestoreError: The store failed.
        RoundOverError: Another rank has failed.
    """
    jobs, needed = checkpoint.contents.jobs(requests)
    shared = None if others is None else others.share(jobs)
    if not jobs and shared is None:
        return
    began = time.monotonic()
    meter = checkpoint.meter
    meter.expect(bytes_of(jobs) if shared is None else shared.bytes_expected)

    def advance(size_bytes: int) -> None:
        # The other ranks wait for this one: all begin with an older checkpoint, or raise, together.
        if checkpoint.ended():
            msg = "another rank has failed"
            raise RoundOverError(msg)
        meter.advance(size_bytes)

    try:
        if shared is None:
            stats = checkpoint.loader.run(jobs, progress=advance)
        else:
            stats = shared.run(checkpoint.loader, advance)
    except RoundOverError:
        raise
    except PenstockError as error:
        url = checkpoint.backend.url
        msg = f"step {checkpoint.step} could not be read from {url}: {error}"
        raise RestoreError(msg) from error
    if tally is not None:
        tally.add(needed, stats.bytes_read, shared)
    if log.isEnabledFor(logging.DEBUG):  # counting many jobs takes a moment
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


def read_region(checkpoint: Opened, record: ObjectRecord, region: Region) -> memoryview:
    """Read the bytes of `region` of a tensor, row-major.

    Fetches only the blocks of raw frames, and the encoded frames, that hold them.

    Raises:
        DamagedError: Stored bytes differ from those written.
    """
    sink = BytesSink(region.numel * record.spec.itemsize)
    fill(checkpoint, [ObjectRequest(record, sink, region)])
    return sink.data


def read_range(checkpoint: Opened, record: ObjectRecord, start: int, out: memoryview) -> None:
    """Read the bytes of a tensor from `start` on into `out`; both are whole elements.

    Raises:
        DamagedError: Stored bytes differ from those written.
    """
    spec, sink, at = record.spec, BytesSink(out), 0
    requests = []
    first, count = start // spec.itemsize, out.nbytes // spec.itemsize
    for region in regions_of_range(spec.shape, first, first + count):
        requests.append(ObjectRequest(record, sink, region, at))
        at += region.numel * spec.itemsize
    fill(checkpoint, requests)


def bytes_of(jobs: Sequence[FrameJob[CodecChain]]) -> int:
    """Return the bytes of blobs that `jobs` read."""
    return sum(span.length for job in jobs for link in job.links for span in link.ranges)


def raise_damaged(
    checkpoint: Opened, damaged: Sequence[tuple[str, str, str]], *, missing_blob: bool
) -> None:
    """Raise the error for damage, a list of `(object, detail, blob)`.

    Raises:
        CheckpointGoneError: A blob is missing because the checkpoint was deleted meanwhile.
        DamagedError: Names every damaged object, and the damaged links of the chain.
    """
    if missing_blob:
        checkpoint.check_there()
    names = list(dict.fromkeys(name for name, _, _ in damaged))
    details = "; ".join(
        f"{name}: {detail}" for name, detail, _ in [*dict.fromkeys(damaged)][:LISTED]
    )
    msg = (
        f"step {checkpoint.step} on {checkpoint.backend.url} is damaged in "
        f"{counted(len(names), 'object')}: {details}. "
        f"{_way_out(checkpoint, {blob for _, _, blob in damaged})}"
    )
    raise DamagedError(msg, names)


def _way_out(checkpoint: Opened, blobs: Collection[str]) -> str:
    """Return advice on what to restore instead. Reads records only if a link is damaged."""
    record = checkpoint.contents.record
    lent = {*record.references}
    uids = {uid for blob in blobs if (uid := blob_uid(blob)) in lent}
    try:
        if uids:
            return broken_chain(Catalog(checkpoint.backend), record, uids)
    except StorageError as error:
        log.warning("the chain of step %d cannot be read: %s", record.step, str(error))
    return RESTORE_OLDER

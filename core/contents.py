"""What one committed checkpoint holds: its manifest, read lazily and verified piece by piece."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from penstock.core.abc import CodecContext
from penstock.core.catalog import Catalog
from penstock.core.chain import CodecChain
from penstock.core.errors import BlobNotFoundError, BlobTruncatedError, FormatError
from penstock.core.frames import FrameJob, Use
from penstock.core.index import IndexReader
from penstock.core.part import decode_hashes, decode_head, decode_section
from penstock.core.paths import path_hash, show_path
from penstock.core.restore_plan import Wanted, plan_restore
from penstock.core.second_copy import from_any_tier
from penstock.core.types import ByteRange, ReadRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.core.abc import Backend, ByteSink
    from penstock.core.errors import PenstockError
    from penstock.core.manifest import (
        CommitRecord,
        Frame,
        NodeRecord,
        ObjectRecord,
        PartHead,
        Section,
    )
    from penstock.core.registry import Registry
    from penstock.core.types import ObjectPath

T = TypeVar("T")

# Read without asking for the size first, which takes a store as long as reading them.
_UNASKED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Located:
    """An object and where its record stands."""

    record: ObjectRecord
    part: int
    section: int


@dataclass(frozen=True, slots=True)
class Wish:
    """An object to read: all of it, or byte ranges of its (one) shard, into `sink`."""

    located: Located
    sink: ByteSink | None
    ranges: Sequence[ByteRange] | None = None


class Contents:
    """The manifest of one checkpoint. Not thread-safe."""

    def __init__(self, backend: Backend, record: CommitRecord, registry: Registry) -> None:
        self.rescued: list[tuple[str, str]] = []
        """Damaged records, each with the tier whose copy was good."""
        self.record = record
        self.bytes_read = 0
        self._backend = backend
        self._registry = registry
        self._heads: dict[int, PartHead] = {}
        self._sections: dict[tuple[int, int], Section] = {}
        self._chains: dict[tuple[int, int], CodecChain] = {}
        self._everything: tuple[list[Located], list[NodeRecord]] | None = None

    def head(self, part: int) -> PartHead:
        """Head of a part, bound by the commit record's digest."""
        if part not in self._heads:
            entry = self.record.parts[part]
            self._heads[part] = self._decoded(
                entry.name,
                (0, entry.head_length),
                lambda data: decode_head(data, entry, self.record),
            )
        return self._heads[part]

    def section(self, part: int, number: int) -> Section:
        """A section of a part, bound by its head's digest."""
        key = (part, number)
        if key not in self._sections:
            head = self.head(part)
            info = head.sections[number]
            self._sections[key] = self._decoded(
                self.record.parts[part].name,
                (info.offset, info.length),
                lambda data: decode_section(data, info, head),
            )
        return self._sections[key]

    def objects(self) -> list[Located]:
        """Every object, in the order in which the tree was described."""
        return self._all()[0]

    def nodes(self) -> list[NodeRecord]:
        """Every container and composite that is recorded, in the same order."""
        return self._all()[1]

    def lengths(self) -> dict[str, int]:
        """Bytes of the index, the parts, and the blobs of those parts that were looked at."""
        found = {entry.name: entry.length for entry in self.record.parts}
        found[self.record.index.name] = self.record.index.length
        for head in self._heads.values():
            found |= {blob.name: blob.length for blob in head.blobs}
        return found

    def find(self, path: ObjectPath) -> Located | None:
        """One object by its path, by way of the index: the rest is not read."""
        return from_any_tier(self._backend, lambda backend: self._find(path, backend), self.rescued)

    def _find(self, path: ObjectPath, backend: Backend) -> Located | None:
        index, reader = self.record.index, self._index(backend)
        for part, number in reader.find(path_hash(path)):
            if part >= len(self.record.parts) or number >= len(self.head(part).sections):
                msg = f"{index.name}: an entry points to section {number} of part {part}"
                raise FormatError(msg, [index.name])
            for record in self.section(part, number).objects:
                if record.path == path:
                    return Located(record, part, number)
        reader.verify()
        return None

    def jobs(self, wishes: Sequence[Wish]) -> tuple[list[FrameJob], int]:
        """Frames to read for `wishes`, and the bytes that are needed of them.

        Raises:
            PluginError: A codec is not installed; nothing was read.
        """
        wanted, owners, typed = [], [], {}
        for wish in wishes:
            located, record = wish.located, wish.located.record
            section = self.section(located.part, located.section)
            for shard in record.shards:
                wanted.append(Wanted(located.part, section.frames, shard.chunks, wish.ranges))
                owners.append(wish)
                for ref in shard.chunks:
                    frame = section.frames[ref.frame]
                    if frame.chain:
                        self._check_encoded(located.part, frame)
                    if frame.chain and ref.at == 0 and ref.stop - ref.start == frame.raw_length:
                        typed[located.part, frame.blob, frame.offset] = CodecContext(
                            record.spec.dtype,
                            record.spec.itemsize,
                            shard.region.sizes,
                            ref.start,
                            frame.raw_length,
                        )
        blocks = {part: self.head(part).block_bytes for part in {w.part for w in wanted}}
        plan = plan_restore(wanted, block_bytes=blocks)
        jobs = []
        for read in plan.reads:
            head, frame = self.head(read.part), read.frame
            context = typed.get((read.part, frame.blob, frame.offset)) or CodecContext(
                "uint8", 1, (frame.raw_length,), 0, frame.raw_length
            )
            uses = tuple(Use(owners[u.wanted].sink, u.at, u.start, u.length) for u in read.uses)
            paths = dict.fromkeys(owners[u.wanted].located.record.path for u in read.uses)
            jobs.append(
                FrameJob(
                    frame,
                    head.blobs[frame.blob].name,
                    head.block_bytes,
                    read.blocks,
                    uses,
                    self._chain(read.part, frame.chain) if frame.chain else None,
                    context,
                    tuple(map(show_path, paths)),
                )
            )
        return jobs, plan.bytes_needed

    def sweep(self, damage: Callable[[str, str], None]) -> tuple[list[PartHead], list[Located]]:
        """Read every record of the manifest; report damage of each instead of stopping.

        Args:
            damage: Called with the record's name and what is wrong with it.

        Returns:
            Heads and objects that can be read, those objects left out that are tied to another.
        """
        heads: list[PartHead] = []
        objects: list[Located] = []
        index = self.record.index
        with _reported(index.name, damage):
            self._check_size(index.name, index.length)
            self._index(self._backend).verify()
        for part, entry in enumerate(self.record.parts):
            with _reported(entry.name, damage):
                self._check_size(entry.name, entry.length)
            with _reported(entry.name, damage):
                heads.append(self.head(part))
            if part not in self._heads:
                continue
            head = self.head(part)
            with _reported(entry.name, damage):
                place = head.hashes.offset, head.hashes.length
                decode_hashes(self._fetch(entry.name, *place, self._backend), head)
            for number in range(len(head.sections)):
                with _reported(f"{entry.name} section {number}", damage):
                    found = self.section(part, number).objects
                    objects += [Located(o, part, number) for o in found]
        try:
            check_ties([o.record for o in objects])
        except FormatError as error:
            for name in error.damaged:
                damage(name, str(error))
        return heads, [o for o in objects if o.record.same_as is None]

    # ------------------------------------------------------------------------------------------

    def _all(self) -> tuple[list[Located], list[NodeRecord]]:
        if self._everything is None:
            objects: list[Located] = []
            nodes: list[NodeRecord] = []
            for part in range(len(self.record.parts)):
                for number in range(len(self.head(part).sections)):
                    section = self.section(part, number)
                    objects += [Located(o, part, number) for o in section.objects]
                    nodes += section.nodes
            check_ties([o.record for o in objects])
            objects.sort(key=lambda o: (o.part, o.record.ordinal))
            nodes.sort(key=lambda n: n.ordinal)
            self._everything = objects, nodes
        return self._everything

    def _chain(self, part: int, number: int) -> CodecChain:
        key = (part, number)
        if key not in self._chains:
            records = self.head(part).chains[number]
            self._chains[key] = CodecChain(
                [self._registry.codec_from_record(r.name, r.version, r.config) for r in records]
            )
        return self._chains[key]

    def _check_encoded(self, part: int, frame: Frame) -> None:
        """Memory is taken for a stored frame before it is read: no more than it can need."""
        bound = self._chain(part, frame.chain).max_encoded_size(frame.raw_length)
        if frame.length > bound:
            name = self.head(part).blobs[frame.blob].name
            msg = (
                f"the frame at {name}:{frame.offset} is said to have {frame.length} bytes, its "
                f"codecs make at most {bound} of {frame.raw_length}"
            )
            raise FormatError(msg, [name])

    def _index(self, backend: Backend) -> IndexReader:
        index = self.record.index
        return IndexReader(
            lambda offset, length: self._fetch(index.name, offset, length, backend),
            size=index.length,
            sha256=index.sha256,
            name=index.name,
        )

    def _decoded(self, name: str, place: tuple[int, int], decode: Callable[[bytes], T]) -> T:
        """What `decode` makes of the bytes at `place`, `(offset, length)`."""
        return from_any_tier(
            self._backend, lambda backend: decode(self._fetch(name, *place, backend)), self.rescued
        )

    def _fetch(self, name: str, offset: int, length: int, backend: Backend) -> bytes:
        # Before memory is taken for what a damaged record says; small reads say it themselves.
        if length > _UNASKED_BYTES and offset + length > (size := self._size(name, backend)):
            msg = (
                f"{name} on {backend.url} has {size} bytes, but {offset + length} are "
                "recorded: it was cut off"
            )
            raise FormatError(msg, [name])
        data = bytearray(length)
        try:
            backend.read([ReadRequest(name, offset, memoryview(data))])
        except BlobNotFoundError as error:
            raise self._missing(name) from error
        except BlobTruncatedError as error:
            raise FormatError(str(error), [name]) from error
        self.bytes_read += length
        return bytes(data)

    def _check_size(self, name: str, length: int) -> None:
        size = self._size(name, self._backend)
        if size != length:
            msg = f"{name} on {self._backend.url} has {size} bytes, {length} were written"
            raise FormatError(msg, [name])

    def _size(self, name: str, backend: Backend) -> int:
        try:
            return backend.stat(name).size_bytes
        except BlobNotFoundError as error:
            raise self._missing(name) from error

    def _missing(self, name: str) -> PenstockError:
        """What it means that a record is not there: the checkpoint is gone by now, or damaged."""
        error = FormatError(f"{name} on {self._backend.url} is missing", [name])
        catalog = Catalog(self._backend)
        return catalog.gone_or_damaged(self.record.step, self.record.uid, error)


def check_ties(records: Sequence[ObjectRecord]) -> None:
    """Make sure that whatever is tied leads to bytes that are its own, in one step.

    Raises:
        FormatError: Names those that do not.
    """
    by_path = {record.path: record for record in records}
    loose = []
    for record in records:
        if record.same_as is None:
            continue
        target = by_path.get(record.same_as)
        if (
            target is None
            or target.same_as is not None
            or (target.kind, target.spec, target.form) != (record.kind, record.spec, record.form)
        ):
            loose.append(show_path(record.path))
    if loose:
        msg = (
            f"{len(loose)} object(s) are tied to what is not there, is tied itself or is of "
            f"another kind: {', '.join(loose[:8])}"
        )
        raise FormatError(msg, loose)


@contextmanager
def _reported(name: str, damage: Callable[[str, str], None]) -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        damage(name, str(error))

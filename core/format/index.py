"""Encodes the places of all shards: the table of a part, and the index over all parts. Sans-IO."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.core.format.compressed import check_digest, compress, decompress, digest
from penstock.core.format.features import FORMAT_VERSION
from penstock.core.format.records import IndexEntry, PartEntry, index_name, part_name
from penstock.core.format.strict_json import dump_json, refuse
from penstock.core.limits import MAX_DIMENSIONS, MAX_INT, MAX_STORED_FRAME_BYTES
from penstock.core.tree.paths import path_hashes
from penstock.core.types import Kind, Region

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.core.format.records import BorrowedTable, ShardRecord
    from penstock.core.types import ObjectPath, Role, TensorSpec

WHOLE = 0xFF
"""Stored instead of the number of dimensions if the shard is the whole object."""

NO_BYTES = 0xFE
"""Stored instead of the number of dimensions if the part describes the object, but has no bytes of
it."""

WHOLE_BYTES = 4 << 20
"""An index up to this size is read at once; of a larger index, only the needed blocks are read."""

_MAGIC = b"PSIX"
_HEADER = struct.Struct(">4sIQII")  # magic, version, numbers of shards, blocks and parts
_BLOCK = np.dtype([("hash", ">u8"), ("shards", ">u4"), ("length", ">u4"), ("sha256", "u1", 32)])
_PART = np.dtype([("rank", ">u4"), ("length", ">u8"), ("head_length", ">u4"), ("sha256", "u1", 32)])
_BLOCK_SHARDS = 4096

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class ShardTable:
    """The shards of objects, in ascending order of path hash.

    Each column except `bounds` has one entry per shard.

    Attributes:
        hashes: Hash of the object's path, uint64.
        parts: Number of the part that has the shard, uint32.
        sections: Number of the section in that part's head, uint32.
        dims: Number of dimensions of the region, or instead `WHOLE` or `NO_BYTES`, uint8.
        bounds: Offset and size, int64: one row for each dimension of each region, in the order of
            the shards.
        traits: A checksum of the object's description in the part, uint32; 0 if one process saved,
            and in tables from an index.
    """

    hashes: NDArray[np.uint64]
    parts: NDArray[np.uint32]
    sections: NDArray[np.uint32]
    dims: NDArray[np.uint8]
    bounds: NDArray[np.int64]
    traits: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.hashes)

    def places(self) -> list[tuple[int, int]]:
        """Return `(part, section)` of each shard."""
        return list(zip(self.parts.tolist(), self.sections.tolist(), strict=True))

    def regions(self) -> list[Region | None]:
        """Return each shard's region; None if it is the whole object, or has no bytes of it."""
        bounds = iter(self.bounds.tolist())
        result: list[Region | None] = []
        for dims in self.dims.tolist():
            pairs = [] if dims > MAX_DIMENSIONS else [next(bounds) for _ in range(dims)]
            region = Region(tuple(o for o, _ in pairs), tuple(n for _, n in pairs))
            result.append(None if dims > MAX_DIMENSIONS else region)
        return result

    def take(self, rows: NDArray[np.intp]) -> ShardTable:
        """Return the shards of these rows, in their order."""
        return self._rows(rows, self._bounds_of(rows))

    def _rows(self, rows: NDArray[np.intp] | slice, bounds: NDArray[np.int64]) -> ShardTable:
        return ShardTable(
            self.hashes[rows],
            self.parts[rows],
            self.sections[rows],
            self.dims[rows],
            bounds,
            self.traits[rows],
        )

    def without(self, hashes: Iterable[int]) -> ShardTable:
        """Return the shards of all paths except those with one of these hashes."""
        unwanted = np.sort(np.fromiter(hashes, np.uint64))
        if not len(unwanted):
            return self
        nearest = np.minimum(np.searchsorted(unwanted, self.hashes), len(unwanted) - 1)
        return self.take(np.flatnonzero(unwanted[nearest] != self.hashes))

    def _bounds_of(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        counts = _row_bounds(self.dims)
        if len(counts) and (counts == counts[0]).all():
            return self.bounds.reshape(len(counts), counts[0], 2)[rows].reshape(-1, 2)
        starts = np.cumsum(counts) - counts
        wanted = counts[rows]
        # For each bound of each row: where the row begins, and the bound's number in it.
        return self.bounds[np.repeat(starts[rows], wanted) + _within(wanted)]

    def cut(self, shards: int) -> Iterator[ShardTable]:
        """Yield tables of at most `shards` shards, without copying."""
        ends = np.cumsum(_row_bounds(self.dims))
        for start in range(0, len(self), shards):
            rows = slice(start, start + shards)
            bounds = slice(int(ends[start - 1]) if start else 0, int(ends[rows][-1]))
            yield self._rows(rows, self.bounds[bounds])


EMPTY = ShardTable(
    np.empty(0, np.uint64),
    np.empty(0, np.uint32),
    np.empty(0, np.uint32),
    np.empty(0, np.uint8),
    np.empty((0, 2), np.int64),
    np.empty(0, np.uint32),
)
"""No shards."""


@dataclass(frozen=True, slots=True)
class SectionShards:
    """The shards of one section, in order of its objects.

    Attributes:
        hashes: Hash of the object's path, for each shard.
        regions: The region of each shard; True if it is the whole object, False if the part has no
            bytes of the object.
        traits: A checksum of the object's description, for each shard; may be empty.
    """

    hashes: Sequence[int]
    regions: Sequence[Region | bool]
    traits: Sequence[int] = ()


def shards_of(
    paths: Sequence[ObjectPath],
    regions: Sequence[Sequence[Region | bool]],
    traits: Sequence[int] = (),
) -> SectionShards:
    """Return the shards of the objects of a section, as the table of its part lists them.

    Args:
        paths: The path of each object.
        regions: Its stored regions, from `regions_of`.
        traits: Its traits, from `traits_of`; may be empty.
    """
    counts = [*map(len, regions)]
    hashes = map(repeat, path_hashes(paths), counts)
    return SectionShards(
        [*chain.from_iterable(hashes)],
        [*chain.from_iterable(regions)],
        [*chain.from_iterable(map(repeat, traits, counts))],
    )


def regions_of(shards: Iterable[ShardRecord], whole: Region) -> Sequence[Region | bool]:
    """Return the stored regions of an object, one for each shard, as in `SectionShards`."""
    regions = (shard.region for shard in shards)
    return [region is whole or region == whole or region for region in regions] or [False]


@lru_cache(maxsize=4096)  # thousands of objects have few types and shapes
def traits_of(
    kind: Kind,
    spec: TensorSpec,
    role: Role,
    form: str,
    origins: tuple[ObjectPath | None, ObjectPath | None],
) -> int:
    """Return a checksum of an object's description: equal for parts that describe it alike.

    `origins` are the path that the object is tied to and the path that it is derived from. The
    length of a value does not count: ranks compare whole values anyway, and the table thus stays
    the same if a value gets longer.
    """
    shape = () if kind is Kind.VALUE else spec.shape
    traits = (kind, spec.dtype, spec.itemsize, role, form, shape)
    return zlib.crc32(dump_json([*traits, *origins]))


def shard_table(sections: Iterable[SectionShards]) -> ShardTable:
    """Merge the shards of the sections of one part into an ascending table, as part 0."""
    tables = []
    for number, section in enumerate(sections):
        count = len(section.hashes)
        dims, bounds = _columns(section.regions)
        tables.append(
            ShardTable(
                np.array(section.hashes, np.uint64),
                np.zeros(count, np.uint32),
                np.full(count, number, np.uint32),
                dims,
                bounds,
                np.array(section.traits or np.zeros(count), np.uint32),
            )
        )
    return _ascending(_joined(tables))


def merged(tables: Sequence[ShardTable]) -> ShardTable:
    """Merge the tables of all parts, which are numbered in this order."""
    numbered = [
        replace(table, parts=np.full(len(table), part, np.uint32))
        for part, table in enumerate(tables)
    ]
    return _ascending(_joined(numbered))


@dataclass(frozen=True, slots=True)
class IndexBlocks:
    """The blocks of an index: compressed tables of at most 4096 shards each.

    Their bytes depend on the shards alone.

    Attributes:
        shards: Number of shards.
        objects: Number of their objects.
        rows: For each block, its first hash, its number of shards, its length and its sha256.
        data: The blocks, one after the other.
    """

    shards: int
    objects: int
    rows: NDArray[np.void]
    data: bytes


@dataclass(frozen=True, slots=True)
class EncodedIndex:
    """The bytes of an index, its entry for the commit record, and its number of objects."""

    data: bytes
    entry: IndexEntry
    objects: int


def encode_index(
    uid: str, tables: Sequence[ShardTable], parts: Sequence[PartEntry] = ()
) -> EncodedIndex:
    """Encode the index over the tables of all parts, in order of parts.

    Args:
        uid: The uid of the save.
        tables: The table of each part.
        parts: The parts, if the commit record has no room for them.
    """
    return index_of(uid, encode_blocks(merged(tables)), parts)


def encode_blocks(table: ShardTable) -> IndexBlocks:
    """Encode the blocks of an index over a merged table."""
    rows = np.zeros(-(-len(table) // _BLOCK_SHARDS), _BLOCK)
    blocks = []
    for row, piece in zip(rows, table.cut(_BLOCK_SHARDS), strict=True):
        block = compress(dump_table(piece))
        row["hash"], row["shards"], row["length"] = piece.hashes[0], len(piece), len(block)
        row["sha256"] = np.frombuffer(bytes.fromhex(digest(block)), np.uint8)
        blocks.append(block)
    objects = int(np.count_nonzero(np.diff(table.hashes))) + bool(len(table))
    return IndexBlocks(len(table), objects, rows, b"".join(blocks))


def index_of(
    uid: str, blocks: IndexBlocks, parts: Sequence[PartEntry] = (), borrowed: bytes = b""
) -> EncodedIndex:
    """Encode the index of a save from its blocks.

    Args:
        uid: The uid of the save.
        blocks: The blocks.
        parts: As for `encode_index`.
        borrowed: The table of borrowed blobs, if the commit record has no room for them.
    """
    rows = blocks.rows
    counts = blocks.shards, len(rows), len(parts)
    head = _HEADER.pack(_MAGIC, FORMAT_VERSION, *counts) + rows.tobytes() + _part_rows(parts)
    data = head + blocks.data + borrowed
    entry = IndexEntry(index_name(uid), len(data), len(head), digest(head))
    return EncodedIndex(data, entry, blocks.objects)


def _part_rows(parts: Sequence[PartEntry]) -> bytes:
    rows = np.zeros(len(parts), _PART)
    for row, part in zip(rows, parts, strict=True):
        row["rank"], row["length"], row["head_length"] = part.rank, part.length, part.head_length
        row["sha256"] = np.frombuffer(bytes.fromhex(part.head_sha256), np.uint8)
    return rows.tobytes()


class IndexReader:
    """Searches an index in few, small range reads.

    All results are verified.

    Args:
        read: `read(offset, length)` returns exactly those bytes of the index.
        entry: The index, as the commit record names it.
        whole_bytes: An index up to this size is read at once.
        borrowed: The commit record's entry for the table of borrowed blobs at the end of the index;
            None if it has none. The reader does not read the table.
    """

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        entry: IndexEntry,
        *,
        whole_bytes: int = WHOLE_BYTES,
        borrowed: BorrowedTable | None = None,
    ) -> None:
        self._read = read
        self._entry = entry
        self._tail = (borrowed.length, borrowed.sha256) if borrowed else None
        self._data: bytes | None = None
        if entry.length <= whole_bytes:
            self._data = self._fetch(0, entry.length)
        head = self._bytes(0, entry.head_length)
        check_digest(head, entry.name, length=entry.head_length, expected=entry.head_sha256)
        self._rows, self._parts = self._read_head(head, entry)
        self._starts = entry.head_length + np.cumsum(self._rows["length"], dtype=np.int64)
        self._starts -= self._rows["length"]
        self._firsts = self._rows["hash"].astype(np.uint64)
        self._blocks: dict[int, ShardTable] = {}

    def parts(self, uid: str) -> tuple[PartEntry, ...]:
        """Return the parts of the save `uid`, in order of ranks, if the index lists them."""
        columns = (self._parts[key].tolist() for key in ("rank", "length", "head_length"))
        return tuple(
            PartEntry(part_name(uid, rank), length, head_length, digest.tobytes().hex())
            for rank, length, head_length, digest in zip(
                *columns, self._parts["sha256"], strict=True
            )
        )

    def bound(self) -> list[tuple[int, int, str]]:
        """Return offset, length and sha256 of each piece of the index."""
        head = (0, self._entry.head_length, self._entry.head_sha256)
        digests = [row.tobytes().hex() for row in self._rows["sha256"]]
        lengths = self._rows["length"].tolist()
        bound = [head, *zip(self._starts.tolist(), lengths, digests, strict=True)]
        if self._tail is not None:
            bound.append((self._entry.length - self._tail[0], *self._tail))
        return bound

    def find_all(self, wanted: NDArray[np.uint64]) -> ShardTable:
        """Return every shard of the paths with any of these hashes, ascending.

        Raises:
            FormatError: The index is damaged.
        """
        wanted = np.sort(wanted)  # `np.unique` and `np.isin` import half of numpy first
        # A hash is in the last block that begins below it, and in all that begin with it.
        first = np.maximum(np.searchsorted(self._firsts, wanted, "left") - 1, 0)
        stop = np.searchsorted(self._firsts, wanted, "right")
        pairs = zip(first.tolist(), stop.tolist(), strict=True)
        tables = []
        for number in sorted({number for a, b in pairs for number in range(a, b)}):
            block = self.block(number)
            nearest = np.minimum(np.searchsorted(wanted, block.hashes), len(wanted) - 1)
            tables.append(block.take(np.flatnonzero(wanted[nearest] == block.hashes)))
        return _joined(tables)

    def first_places(self) -> set[tuple[int, int]]:
        """Return the `(part, section)` of the first shard of each path hash.

        Raises:
            FormatError: The index is damaged.
        """
        places: set[tuple[int, int]] = set()
        last = EMPTY.hashes
        for block in self.blocks():
            hashes = np.concatenate((last, block.hashes))
            is_first = np.diff(hashes, prepend=hashes[0]) != 0
            is_first[0] = not len(last)
            rows = np.flatnonzero(is_first[len(last) :])
            places |= set(
                zip(block.parts[rows].tolist(), block.sections[rows].tolist(), strict=True)
            )
            last = block.hashes[-1:]
        return places

    def blocks(self) -> Iterator[ShardTable]:
        """Yield all shards, block by block, without keeping newly read blocks.

        Raises:
            FormatError: The index is damaged.
        """
        for number in range(len(self._rows)):
            block = self._blocks.get(number)
            yield self._load(number) if block is None else block

    def block(self, number: int) -> ShardTable:
        """Return one block.

        Raises:
            FormatError: The index is damaged.
        """
        if number not in self._blocks:
            self._blocks[number] = self._load(number)
        return self._blocks[number]

    def _load(self, number: int) -> ShardTable:
        row, name = self._rows[number], self._entry.name
        length = int(row["length"])
        data = self._bytes(int(self._starts[number]), length)
        check_digest(data, name, length=length, expected=row["sha256"].tobytes().hex())
        table = load_table(decompress(data, name), name, count=int(row["shards"]))
        later = self._firsts[number + 1 :]
        if table.hashes[0] != self._firsts[number] or (len(later) and table.hashes[-1] > later[0]):
            refuse(name, "a block does not hold the hashes of its row")
        return table

    def _read_head(
        self, head: bytes, entry: IndexEntry
    ) -> tuple[NDArray[np.void], NDArray[np.void]]:
        if len(head) < _HEADER.size:
            refuse(entry.name, f"{entry.head_length} bytes are not the head of an index")
        magic, version, shards, blocks, parts = _HEADER.unpack_from(head)
        if (magic, version) != (_MAGIC, FORMAT_VERSION):
            refuse(entry.name, f"is not an index of version {FORMAT_VERSION}")
        end = _HEADER.size + blocks * _BLOCK.itemsize
        if len(head) != end + parts * _PART.itemsize:
            refuse(entry.name, f"its head does not fit {blocks} blocks and {parts} parts")
        rows = np.frombuffer(head, _BLOCK, blocks, _HEADER.size)
        listed = np.frombuffer(head, _PART, parts, end)
        if (listed["rank"][1:] <= listed["rank"][:-1]).any():
            refuse(entry.name, "its parts are not in order of ranks")
        if (listed["head_length"] > np.minimum(listed["length"], MAX_STORED_FRAME_BYTES)).any():
            refuse(entry.name, "a part has a head that is too long")
        if (rows["hash"][1:] < rows["hash"][:-1]).any():
            refuse(entry.name, "is not ascending")
        counts = rows["shards"]
        if (counts < 1).any() or (counts > _BLOCK_SHARDS).any() or counts.sum() != shards:
            refuse(entry.name, f"its blocks do not hold {shards} shards")
        stop = entry.length - (self._tail[0] if self._tail else 0)
        if entry.head_length + int(rows["length"].sum(dtype=np.int64)) != stop:
            refuse(entry.name, f"its blocks do not end at byte {stop}")
        return rows, listed

    def _bytes(self, offset: int, length: int) -> bytes:
        if self._data is not None:
            return self._data[offset : offset + length]
        return self._fetch(offset, length)

    def _fetch(self, offset: int, length: int) -> bytes:
        data = self._read(offset, length)
        if len(data) != length:
            refuse(self._entry.name, f"a read at byte {offset} got {len(data)} of {length} bytes")
        return data


def dump_table(table: ShardTable) -> bytes:
    """Return the columns one after the other, each as byte planes.

    The first plane has the highest byte of every value, the next plane the second byte, and so on.
    Most high bytes are alike, so such a plane compresses well.
    """
    columns: tuple[NDArray[Any], ...] = (
        table.hashes,
        table.parts,
        table.sections,
        table.dims,
        table.bounds.reshape(-1),
    )
    return b"".join(map(_planes, columns))


def load_table(data: bytes, name: str, *, count: int) -> ShardTable:
    """Read and validate the `count` shards that `dump_table` wrote.

    Raises:
        FormatError: `data` does not hold `count` shards in ascending order.
    """
    fixed = count * (8 + 4 + 4 + 1)
    if len(data) < fixed:
        refuse(name, f"does not hold {count} shards")
    hashes = _column(data, 0, count, np.uint64)
    parts = _column(data, 8 * count, count, np.uint32)
    sections = _column(data, 12 * count, count, np.uint32)
    dims = _column(data, 16 * count, count, np.uint8)
    if ((dims > MAX_DIMENSIONS) & (dims < NO_BYTES)).any():
        refuse(name, f"has a region of more than {MAX_DIMENSIONS} dimensions")
    total = int(_row_bounds(dims).sum())
    if len(data) != fixed + 16 * total:
        refuse(name, f"does not hold {count} shards with {total} bounds")
    bounds = _column(data, fixed, 2 * total, np.int64).reshape(-1, 2)
    if (bounds < 0).any() or (bounds > MAX_INT).any():
        refuse(name, "has a region out of bounds")
    if (hashes[1:] < hashes[:-1]).any():
        refuse(name, "is not ascending")
    return ShardTable(hashes, parts, sections, dims, bounds, np.zeros(count, np.uint32))


def dump_traits(table: ShardTable) -> bytes:
    """Return the traits as byte planes, like the columns of `dump_table`."""
    return _planes(table.traits)


def load_traits(data: bytes, name: str, *, count: int) -> NDArray[np.uint32]:
    """Read the traits of `count` shards, as `dump_traits` wrote them.

    Raises:
        FormatError: `data` does not hold `count` traits.
    """
    if len(data) != 4 * count:
        refuse(name, f"does not hold the traits of {count} shards")
    return _column(data, 0, count, np.uint32)


def _planes(column: NDArray[Any]) -> bytes:
    big = column.astype(column.dtype.newbyteorder(">"))
    return big.view(np.uint8).reshape(len(column), column.itemsize).T.tobytes()


def _column(data: bytes, start: int, count: int, dtype: type[T]) -> NDArray[T]:
    size = np.dtype(dtype).itemsize
    planes = np.frombuffer(data, np.uint8, count * size, start).reshape(size, count)
    big = np.ascontiguousarray(planes.T).view(np.dtype(dtype).newbyteorder(">"))
    return big.reshape(-1).astype(dtype)


def _columns(regions: Sequence[Region | bool]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if set(map(type, regions)) <= {bool}:  # always so if one process saved
        kinds = np.where(np.array(regions, np.bool_), WHOLE, NO_BYTES)
        return kinds.astype(np.uint8), EMPTY.bounds
    dims: list[int] = []
    bounds: list[tuple[int, int]] = []
    for region in regions:
        if isinstance(region, Region):
            dims.append(len(region.sizes))
            bounds.extend(zip(region.offsets, region.sizes, strict=True))
        else:
            dims.append(WHOLE if region else NO_BYTES)
    return np.array(dims, np.uint8), np.array(bounds, np.int64).reshape(-1, 2)


def _joined(tables: Sequence[ShardTable]) -> ShardTable:
    if not tables:
        return EMPTY
    columns = (column.name for column in fields(ShardTable))
    return ShardTable(*(np.concatenate([getattr(t, name) for t in tables]) for name in columns))


def _ascending(table: ShardTable) -> ShardTable:
    # Stable: shards of one section stay in the order of their regions.
    return table.take(np.lexsort((table.sections, table.parts, table.hashes)))


def _row_bounds(dims: NDArray[np.uint8]) -> NDArray[np.intp]:
    """Return the number of bounds of each shard."""
    return np.where(dims > MAX_DIMENSIONS, 0, dims).astype(np.intp)


def _within(counts: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return 0, 1, ... `count - 1` for each count, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts, counts)

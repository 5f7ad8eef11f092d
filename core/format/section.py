"""Reads one section of a part, stored as JSON columns, with full checks. Sans-IO.

Columns instead of one JSON object per record: half the bytes, and types and bounds of a column are
checked at C speed.

Tested in `tests/core/format/test_records.py`.
"""

from __future__ import annotations

import math
import struct
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from penstock.core.format.blocks import block_count
from penstock.core.format.records import (
    ChunkRef,
    Frame,
    NodeRecord,
    ObjectRecord,
    Section,
    ShardRecord,
)
from penstock.core.format.strict_json import (
    Fields,
    check_ints,
    check_list,
    check_texts,
    is_hex,
    load_json,
    refuse,
)
from penstock.core.limits import (
    MAX_CHUNK_BYTES,
    MAX_DIMENSIONS,
    MAX_GROUPS,
    MAX_INT,
    MAX_ITEMSIZE,
    MAX_LINKS,
    MAX_SEGMENTS,
    max_chunks,
)
from penstock.core.types import Kind, Region, Role, TensorSpec, WorstErrors

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from penstock.core.format.records import PartHead, SectionInfo
    from penstock.core.tree.select import Selection
    from penstock.core.types import ObjectPath

_FRAME_KEYS = (
    "blob", "offset", "length", "raw_length", "chain", "checksums", "raw_checksum", "lengths",
)  # fmt: skip
_OPTIONAL_FRAME_KEYS = ("elements", "base", "content")  # left out where no frame has any

OBJECT_KEYS = ("ordinal", "path", "type", "shape", "shards", "same_as")
# Optional columns of objects, left out where no object is derived, or has errors.
DERIVED_KEY, _ERRORS_KEY = OPTIONAL_OBJECT_KEYS = ("derived", "errors")
_TYPE_COLUMNS = 5
_NODE_COLUMNS = 4
_ERROR_COLUMNS = 3
_CHECKSUM_DIGITS = 16
_CONTENT_DIGITS = 32
_ONE_CHUNK = 3  # frame, offset, length

_KEYS = ("frames", "types", "objects", "nodes")

_Type: TypeAlias = tuple[Kind, str, int, Role, str]


def top_level_keys(
    paths: Sequence[ObjectPath], nodes: Sequence[ObjectPath]
) -> tuple[str, ...] | None:
    """Return the top-level keys of objects and nodes, ascending; None if too many to list."""
    groups = {path[0] for path in paths if path} | {path[0] for path in nodes if path}
    return tuple(sorted(groups)) if len(groups) <= MAX_GROUPS else None


def read_section(
    raw: bytes, head: PartHead, info: SectionInfo, name: str, wanted: Selection | None = None
) -> Section:
    """Read and validate the JSON of a section.

    With `wanted`, only these objects get records: making a record takes far longer than looking at
    a path. Where the section has none of them, frames and nodes may be left out, too.

    Raises:
        FormatError: The section is malformed, or does not fit the head.
    """
    if wanted is not None and not info.nodes and not wanted.occurs_in(raw):
        return Section((), ())
    fields = Fields(load_json(raw, name), name, _KEYS)
    frames = tuple(_read_frames(fields.value("frames"), head, name))
    types = [_read_type(row, name) for row in fields.items("types")]
    where = f"{name}: objects"
    columns = Fields(fields.value("objects"), where, OBJECT_KEYS, optional=OPTIONAL_OBJECT_KEYS)
    paths = _read_paths(columns.items("path"), name)
    reader = _ObjectReader(columns, types, frames, head, name)
    picked: Sequence[int] = range(len(paths))
    if wanted is not None:
        picked = [n for n, path in enumerate(paths) if wanted.touches(path)]
    objects = [reader.read(number, paths[number]) for number in picked]
    nodes = [_read_node(row, name) for row in fields.items("nodes")]
    _check_whole(paths, columns.items("ordinal"), nodes, info, name)
    return Section(frames, tuple(objects), tuple(nodes))


def _check_whole(
    paths: Sequence[ObjectPath],
    ordinals: Sequence[int],
    nodes: Sequence[NodeRecord],
    info: SectionInfo,
    name: str,
) -> None:
    if (len(paths), len(nodes)) != (info.objects, info.nodes):
        refuse(name, f"has {len(paths)} objects and {len(nodes)} nodes, unlike its head says")
    if len(set(paths)) != len(paths):
        refuse(name, "lists a path twice")
    if len({*ordinals, *(node.ordinal for node in nodes)}) != len(paths) + len(nodes):
        refuse(name, "lists an ordinal twice")
    if top_level_keys(paths, [n.path for n in nodes]) != info.groups:
        refuse(name, "has other top-level keys than its head says")


def _all_lists_of(rows: Sequence[Any], kind: type, *, limit: int) -> bool:
    """Return whether all rows are lists of strings, or of integers within bounds, at C speed."""
    if not set(map(type, rows)) <= {list} or max(map(len, rows), default=0) > limit:
        return False
    flat = list(chain.from_iterable(rows))
    if not set(map(type, flat)) <= {kind}:
        return False
    return kind is not int or not flat or (min(flat) >= 0 and max(flat) <= MAX_INT)


def _read_frames(value: object, head: PartHead, name: str) -> list[Frame]:
    fields = Fields(value, f"{name}: frames", _FRAME_KEYS, optional=_OPTIONAL_FRAME_KEYS)
    count = len(fields.items("blob"))

    def column(key: str, **bounds: int) -> list[int]:
        return check_ints(fields.value(key), f"{name}: frames, {key}", count=count, **bounds)

    rows = zip(
        column("blob", high=len(head.blobs) - 1),
        column("offset"),
        column("length", low=1),
        column("raw_length", low=1, high=MAX_CHUNK_BYTES),
        column("chain", high=len(head.chains) - 1),
        check_texts(fields.value("checksums"), f"{name}: checksums", count=count),
        fields.items("raw_checksum", count=count),
        fields.items("lengths", count=count),
        *(
            fields.items(key, count=count) if key in fields else [None] * count
            for key in _OPTIONAL_FRAME_KEYS
        ),
        strict=True,
    )
    frames: list[Frame] = []
    for number, row in enumerate(rows):
        frames.append(_read_frame(row, head, frames, f"{name}, frame {number}"))
    return frames


def _read_frame(row: tuple[Any, ...], head: PartHead, before: Sequence[Frame], name: str) -> Frame:
    (
        blob,
        offset,
        length,
        raw_length,
        chain,
        checksums,
        raw_checksum,
        lengths,
        elements,
        base,
        content,
    ) = row
    if offset + length > head.blobs[blob].length:
        refuse(name, f"ends beyond blob {head.blobs[blob].name}")
    if chain:
        blocks, links = 1, len(head.chains[chain])
        if not is_hex(raw_checksum, _CHECKSUM_DIGITS):
            refuse(name, "has no checksum of its content")
    else:
        blocks, links = block_count(offset, length, head.block_bytes), 1
        if raw_checksum is not None or raw_length != length:
            refuse(name, "is raw, but says more than a raw frame does")
    if not is_hex(checksums, blocks * _CHECKSUM_DIGITS):
        refuse(name, f"has not one checksum for each of its {blocks} blocks")
    return Frame(
        blob=blob,
        offset=offset,
        length=length,
        raw_length=raw_length,
        chain=chain,
        checksums=struct.unpack(f">{blocks}Q", bytes.fromhex(checksums)),
        raw_checksum=None if raw_checksum is None else int(raw_checksum, 16),
        lengths=tuple(
            check_ints(lengths, f"{name}: lengths", count=links - 1, high=2 * MAX_CHUNK_BYTES)
        ),
        elements=None if elements is None else _read_elements(elements, chain, raw_length, name),
        base=None if base is None else _read_base(base, chain, raw_length, before, name),
        content=None if content is None else _read_content(content, name),
    )


def _read_base(
    value: object, chain: int, raw_length: int, before: Sequence[Frame], name: str
) -> Frame:
    """Return the base of a frame, which stands before it: so no chain is a circle."""
    check_ints([value], f"{name}: base", high=len(before) - 1)
    base = before[cast("int", value)]
    if not chain or base.raw_length != raw_length:
        refuse(name, "is raw, or has a base of another length")
    if sum(1 for _ in base.links()) >= MAX_LINKS:
        refuse(name, f"decodes with more than {MAX_LINKS} frames")
    return base


def _read_content(value: object, name: str) -> int:
    if not is_hex(value, _CONTENT_DIGITS):
        refuse(name, "its content is no hash")
    return int(cast("str", value), 16)


def _read_elements(value: object, chain: int, raw_length: int, name: str) -> tuple[str, int]:
    where = f"{name}: elements"
    dtype, itemsize = check_list(value, where, count=2)
    check_texts([dtype], where)
    check_ints([itemsize], where, low=1, high=MAX_ITEMSIZE)
    if not chain or raw_length % itemsize:
        refuse(where, "they are of a raw frame, or do not fill the chunk")
    return dtype, itemsize


def _read_type(row: object, name: str) -> _Type:
    kind, dtype, itemsize, role, form = check_list(row, f"{name}: types", count=_TYPE_COLUMNS)
    check_texts([kind, dtype, role, form], f"{name}: types")
    check_ints([itemsize], f"{name}: types", low=1, high=MAX_ITEMSIZE)
    try:
        result = (Kind(kind), dtype, itemsize, Role(role), form)
    except ValueError as error:
        refuse(name, str(error))
    if result[0] is Kind.VALUE and (dtype, itemsize) != ("uint8", 1):
        refuse(name, f"has a value of dtype {dtype}")
    return result


def _read_paths(rows: Sequence[Any], name: str) -> list[ObjectPath]:
    if _all_lists_of(rows, str, limit=MAX_SEGMENTS):
        return list(map(tuple, rows))
    return [_path(row, f"{name}, object {number}") for number, row in enumerate(rows)]


class _Extent(NamedTuple):
    """What an object is made of, and what follows from it: its bytes, and the region of all."""

    spec: TensorSpec
    nbytes: int
    whole: Region


class _ObjectReader:
    """Makes records of objects out of the columns of a section."""

    def __init__(
        self,
        fields: Fields,
        types: Sequence[_Type],
        frames: Sequence[Frame],
        head: PartHead,
        name: str,
    ) -> None:
        count = len(fields.items("path"))
        self._elsewhere = _read_elsewhere(fields, count, name)
        self._errors = _read_errors(fields, count, self._elsewhere, name)
        self._numbers = check_ints(
            fields.value("type"), f"{name}: type", count=count, high=len(types) - 1
        )
        self._ordinals = check_ints(fields.value("ordinal"), f"{name}: ordinal", count=count)
        self._shapes = fields.items("shape", count=count)
        self._are_ints = _all_lists_of(self._shapes, int, limit=MAX_DIMENSIONS)
        self._extents: dict[tuple[int, tuple[int, ...]], _Extent] = {}
        self._rows = fields.items("shards", count=count)
        self._types = types
        self._frames = frames
        self._head = head
        self._raw_lengths = [frame.raw_length for frame in frames]
        self._alone = head.world_size == 1
        self._name = name

    def read(self, position: int, path: ObjectPath) -> ObjectRecord:
        """Return the record of the object at one position of the columns."""
        number, rows, shape = self._numbers[position], self._rows[position], self._shapes[position]
        kind, _, _, role, form = self._types[number]
        # Equal lists of plain integers are one shape: `[True]` and `[1.0]` equal `[1]` as well.
        extent = self._extents.get((number, tuple(shape))) if self._are_ints else None
        if extent is None:
            extent = self._extent(number, shape, self._where(position))
        how, there = self._elsewhere.get(position, (None, None))
        shards: tuple[ShardRecord, ...] = ()
        if there is None:
            shards = self._plain(rows, extent) or self._shards(
                rows, extent.spec, self._where(position)
            )
        elif rows or there == path:
            refuse(self._where(position), "is tied or derived, but has shards, or is so of itself")
        same_as, derived = (None, there) if how == DERIVED_KEY else (there, None)
        return ObjectRecord(
            self._ordinals[position], path, kind, extent.spec, role, form, self._frames, self._head,
            shards, same_as, derived, self._errors.get(position),
        )  # fmt: skip

    def _where(self, position: int) -> str:
        return f"{self._name}, object {position}"

    def _extent(self, number: int, shape: Any, where: str) -> _Extent:
        """Check the dtype and shape of an object; thousands of objects have few of them."""
        kind, dtype, itemsize, _, _ = self._types[number]
        if len(check_ints(shape, where)) > MAX_DIMENSIONS or (kind == "value" and len(shape) != 1):
            refuse(where, f"has {len(shape)} dimensions")
        spec = TensorSpec(dtype, itemsize, tuple(shape))
        extent = _Extent(spec, spec.nbytes, Region.whole(spec.shape))
        if self._are_ints:
            self._extents[number, spec.shape] = extent
        return extent

    def _plain(self, rows: Any, extent: _Extent) -> tuple[ShardRecord, ...] | None:
        """Return the shards if the rows are one whole shard in one chunk, as nearly all are."""
        try:
            (((frame, offset, length),),) = rows
        except (TypeError, ValueError):
            return None
        if not type(frame) is type(offset) is type(length) is int:
            return None
        if not 0 <= frame < len(self._raw_lengths) or not length == extent.nbytes > 0:
            return None
        if not 0 <= offset <= self._raw_lengths[frame] - length:
            return None
        return (ShardRecord(extent.whole, (ChunkRef(frame, offset, 0, length),)),)

    def _shards(self, rows: Any, spec: TensorSpec, name: str) -> tuple[ShardRecord, ...]:
        rows = check_list(rows, name)
        if self._alone and len(rows) != 1:
            refuse(name, f"has {len(rows)} shards")
        return tuple([self._shard(row, spec, name) for row in rows])

    def _shard(self, row: object, spec: TensorSpec, name: str) -> ShardRecord:
        refs, *bounds = check_list(row, name) or [None]
        region = self._region(bounds, spec, name) if bounds else Region.whole(spec.shape)
        if self._alone and bounds:
            refuse(name, "is not stored whole")
        numbers = check_ints(refs, name)
        if len(numbers) % _ONE_CHUNK:
            refuse(name, "has an odd list of chunks")
        count, nbytes = len(numbers) // _ONE_CHUNK, spec.itemsize * math.prod(region.sizes)
        if count > max_chunks(nbytes):
            refuse(name, f"has {count} chunks for {nbytes} bytes")
        chunks: list[ChunkRef] = []
        start = 0
        for at in range(0, len(numbers), 3):
            frame, offset, length = numbers[at : at + 3]
            if frame >= len(self._raw_lengths) or offset + length > self._raw_lengths[frame]:
                refuse(name, f"uses bytes beyond frame {frame}")
            if not length:
                refuse(name, "has an empty chunk")
            chunks.append(ChunkRef(frame, offset, start, start + length))
            start += length
        if start != nbytes:
            refuse(name, f"has {start} bytes, other than its shape {region.sizes} needs")
        return ShardRecord(region, tuple(chunks))

    @staticmethod
    def _region(bounds: Sequence[object], spec: TensorSpec, name: str) -> Region:
        offsets, sizes = check_list(bounds, name, count=2)
        dimensions = len(spec.shape)
        check_ints(offsets, name, count=dimensions)
        check_ints(sizes, name, count=dimensions)
        if any(o + n > m for o, n, m in zip(offsets, sizes, spec.shape, strict=True)):
            refuse(name, "has a shard that reaches beyond it")
        return Region(tuple(offsets), tuple(sizes))


def _read_elsewhere(columns: Fields, count: int, name: str) -> dict[int, tuple[str, ObjectPath]]:
    """Return how tied and derived objects get their bytes, and from which path, by position."""
    found: dict[int, tuple[str, ObjectPath]] = {}
    for key in ("same_as", DERIVED_KEY):
        if key not in columns:
            continue
        where = f"{name}: {key}"
        pairs = [check_list(row, where, count=2) for row in columns.items(key)]
        numbers = check_ints([pair[0] for pair in pairs], where, high=count - 1)
        if len({*found, *numbers}) != len(found) + len(numbers):
            refuse(where, "lists an object twice")
        for number, pair in zip(numbers, pairs, strict=True):
            found[number] = key, _path(pair[1], where)
    return found


def _read_errors(
    columns: Fields, count: int, elsewhere: Collection[int], name: str
) -> dict[int, WorstErrors]:
    """Return the errors that lossy codecs caused, by the position of the object."""
    if _ERRORS_KEY not in columns:
        return {}
    where = f"{name}: {_ERRORS_KEY}"
    rows = [check_list(row, where, count=_ERROR_COLUMNS) for row in columns.items(_ERRORS_KEY)]
    numbers = check_ints([row[0] for row in rows], where, high=count - 1)
    if len(set(numbers)) != len(numbers) or not set(numbers).isdisjoint(elsewhere):
        refuse(where, "lists an object twice, or one that has no bytes of its own")
    return {
        n: WorstErrors(*(_read_error(one, where) for one in row[1:]))
        for n, row in zip(numbers, rows, strict=True)
    }


def _read_error(value: object, name: str) -> float:
    """Return an error; null stands for infinity, which JSON has not."""
    if value is None:
        return math.inf
    if type(value) not in (int, float) or not 0 <= (number := cast("float", value)) < math.inf:
        refuse(name, "an error is no number, negative or not finite")
    return float(number)


def _read_node(row: object, name: str) -> NodeRecord:
    where = f"{name}: nodes"
    ordinal, path, form, meta = check_list(row, where, count=_NODE_COLUMNS)
    check_ints([ordinal], where)
    check_texts([form], where)
    if type(meta) is not dict:
        refuse(where, "meta is not a JSON object")
    return NodeRecord(ordinal, _path(path, where), form, meta)


def _path(value: object, name: str) -> ObjectPath:
    segments = check_texts(value, name)
    if len(segments) > MAX_SEGMENTS:
        refuse(name, f"has a path of {len(segments)} segments")
    return tuple(segments)

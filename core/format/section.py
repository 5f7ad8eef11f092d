"""Reads one section of a part, stored as JSON columns, with full checks. Sans-IO.

Columns take half the bytes of one JSON object per record, and the types and bounds of a column are
checked at C speed.

Tested in `tests/core/format/test_records.py`.
"""

from __future__ import annotations

import math
import struct
from functools import partial
from itertools import chain
from operator import add, le
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast

from penstock.core.errors import FormatError
from penstock.core.format.blocks import block_count
from penstock.core.format.index import regions_of, shards_of, traits_of
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
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from penstock.core.format.index import SectionShards
    from penstock.core.format.records import PartHead, SectionInfo
    from penstock.core.tree.select import Selection
    from penstock.core.types import ObjectPath

_FRAME_KEYS = (
    "blob", "offset", "length", "raw_length", "chain", "checksums", "raw_checksum", "lengths",
)  # fmt: skip
_OPTIONAL_FRAME_KEYS = ("elements", "base", "content")  # left out if no frame has any

OBJECT_KEYS = ("ordinal", "path", "type", "shape", "shards", "same_as")
# Optional columns of objects, left out if no object is derived, or has errors.
DERIVED_KEY, _ERRORS_KEY = OPTIONAL_OBJECT_KEYS = ("derived", "errors")
_TYPE_COLUMNS = 5
_NODE_COLUMNS = 4
_ERROR_COLUMNS = 3
_CHECKSUM_DIGITS = 16
_CONTENT_DIGITS = 32
_ONE_CHUNK = 3  # frame, offset, length

_KEYS = ("frames", "types", "objects", "nodes")

_Type: TypeAlias = tuple[Kind, str, int, Role, str]
_Chunks: TypeAlias = "tuple[Sequence[int], Sequence[int], Sequence[int]]"
RecordT = TypeVar("RecordT", bound="tuple[Any, ...]")


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

    With `wanted`, reads only these objects, since reading one takes longer than checking its path.
    If the section has none of them, the result may be empty, without frames; then the JSON may not
    have been validated.

    Raises:
        FormatError: The section is malformed, or does not fit the head.
    """
    if wanted is not None and not info.nodes and not wanted.occurs_in(raw):
        return Section((), ())
    objects, nodes = check_section(raw, head, info, name, wanted)
    return Section(objects.frames, objects.records(), nodes)


def check_section(
    raw: bytes, head: PartHead, info: SectionInfo, name: str, wanted: Selection | None = None
) -> tuple[ObjectColumns, tuple[NodeRecord, ...]]:
    """Validate the JSON of a section as `read_section` does, without making records of objects.

    Raises:
        FormatError: The section is malformed, or does not fit the head.
    """
    fields = Fields(load_json(raw, name), name, _KEYS)
    frames = tuple(_read_frames(fields.value("frames"), head, name))
    types = [_read_type(row, name) for row in fields.items("types")]
    where = f"{name}: objects"
    columns = Fields(fields.value("objects"), where, OBJECT_KEYS, optional=OPTIONAL_OBJECT_KEYS)
    paths = _read_paths(columns.items("path"), name)
    picked: Sequence[int] = range(len(paths))
    if wanted is not None:
        picked = [n for n, path in enumerate(paths) if wanted.touches(path)]
    objects = ObjectColumns(
        columns, paths, picked=picked, types=types, frames=frames, head=head, name=name
    )
    nodes = tuple([_read_node(row, name) for row in fields.items("nodes")])
    _check_whole(paths, columns.items("ordinal"), nodes, info, name)
    return objects, nodes


def _check_whole(
    paths: Sequence[ObjectPath],
    ordinals: Sequence[int],
    nodes: Sequence[NodeRecord],
    info: SectionInfo,
    name: str,
) -> None:
    if (len(paths), len(nodes)) != (info.objects, info.nodes):
        refuse(
            name,
            f"has {len(paths)} objects and {len(nodes)} nodes, but the head of its part counts "
            f"{info.objects} and {info.nodes}",
        )
    if len(set(paths)) != len(paths):
        refuse(name, "lists a path twice")
    if len({*ordinals, *(node.ordinal for node in nodes)}) != len(paths) + len(nodes):
        refuse(name, "lists an ordinal twice")
    if top_level_keys(paths, [n.path for n in nodes]) != info.groups:
        refuse(name, "its top-level keys differ from those in the head of its part")


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
            refuse(name, "is raw, but has fields of an encoded frame")
    if not is_hex(checksums, blocks * _CHECKSUM_DIGITS):
        refuse(name, f"needs one checksum for each of its {blocks} blocks")
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
    """Return the base of a frame. The base must be an earlier frame, so chains have no cycles."""
    check_ints([value], f"{name}: base", high=len(before) - 1)
    base = before[cast("int", value)]
    if not chain or base.raw_length != raw_length:
        refuse(name, "has a base, but is raw, or its length differs from the base's")
    if sum(1 for _ in base.links()) >= MAX_LINKS:
        refuse(name, f"decodes with more than {MAX_LINKS} frames")
    return base


def _read_content(value: object, name: str) -> int:
    if not is_hex(value, _CONTENT_DIGITS):
        refuse(name, f"its content hash is not {_CONTENT_DIGITS} hex digits")
    return int(cast("str", value), 16)


def _read_elements(value: object, chain: int, raw_length: int, name: str) -> tuple[str, int]:
    where = f"{name}: elements"
    dtype, itemsize = check_list(value, where, count=2)
    check_texts([dtype], where)
    check_ints([itemsize], where, low=1, high=MAX_ITEMSIZE)
    if not chain or raw_length % itemsize:
        refuse(where, "belong to a raw frame, or do not fill the chunk")
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
        refuse(
            name,
            f"has a value of dtype {dtype} with {itemsize} bytes per element, not uint8 with 1",
        )
    return result


def _read_paths(rows: Sequence[Any], name: str) -> list[ObjectPath]:
    if _all_lists_of(rows, str, limit=MAX_SEGMENTS):
        return list(map(tuple, rows))
    return [_path(row, f"{name}, object {number}") for number, row in enumerate(rows)]


class _Extent(NamedTuple):
    """The dtype and shape of an object, with its bytes and its whole region."""

    spec: TensorSpec
    nbytes: int
    whole: Region


class ObjectColumns:
    """The checked columns of a section's objects, or of the wanted ones.

    Nearly every object is one whole shard in one chunk. Such objects are checked together, by a few
    comparisons of whole columns, and all other objects one by one. If a comparison fails, every
    object is checked alone, so that the error names the first refused object.

    Attributes:
        frames: The frames of the section.
    """

    def __init__(
        self,
        fields: Fields,
        paths: Sequence[ObjectPath],
        *,
        picked: Sequence[int],
        types: Sequence[_Type],
        frames: tuple[Frame, ...],
        head: PartHead,
        name: str,
    ) -> None:
        count = len(paths)
        elsewhere = _read_elsewhere(fields, count, name)
        errors = _read_errors(fields, count, elsewhere, name)
        numbers = check_ints(
            fields.value("type"), f"{name}: type", count=count, high=len(types) - 1
        )
        ordinals = check_ints(fields.value("ordinal"), f"{name}: ordinal", count=count)
        shapes = fields.items("shape", count=count)
        rows = fields.items("shards", count=count)
        if len(picked) < count:
            paths, shapes = [paths[n] for n in picked], [shapes[n] for n in picked]
            numbers, ordinals = [numbers[n] for n in picked], [ordinals[n] for n in picked]
            rows = [rows[n] for n in picked]
            elsewhere = {row: elsewhere[n] for row, n in enumerate(picked) if n in elsewhere}
            errors = {row: errors[n] for row, n in enumerate(picked) if n in errors}
        self.frames = frames
        self._paths = paths
        self._ordinals = ordinals
        self._types = [types[number] for number in numbers]
        self._same_as: list[ObjectPath | None] = [None] * len(paths)
        self._derived = self._same_as.copy()
        for row, (how, path) in elsewhere.items():
            (self._derived if how == DERIVED_KEY else self._same_as)[row] = path
        self._errors = errors
        self._raw_lengths = [frame.raw_length for frame in frames]
        self._head = head
        self._alone = head.world_size == 1
        refs = [*map(_only_ref, rows)]
        for row in elsewhere:
            refs[row] = None
        extents = _all_extents(numbers, shapes, types, name)
        chunks = None if extents is None else self._only_chunks(refs, extents)
        if extents is None or chunks is None:  # the loop below finds the first refused one
            extents, chunks, refs = [], ((), (), ()), [None] * len(rows)
        self._extents = extents
        self._chunks = chunks
        """Frame, offset and length of the objects that are one whole shard in one chunk."""
        self._shards: list[tuple[ShardRecord, ...] | None] = [None] * len(rows)
        """The shards of all other objects."""
        for row, ref in enumerate(refs):
            if ref is None:
                where = f"{name}, object {picked[row]}"
                if row == len(extents):
                    extents.append(_extent(self._types[row], shapes[row], where))
                self._shards[row] = self._read_shards(row, rows[row], where)

    def section_shards(self, *, with_traits: bool) -> SectionShards:
        """Return the shards of the objects, as the table of the part lists them.

        Args:
            with_traits: Whether to checksum each object's description too, for several ranks.
        """
        whole: Sequence[Region | bool] = [True]
        regions = [
            whole if shards is None else regions_of(shards, extent.whole)
            for shards, extent in zip(self._shards, self._extents, strict=True)
        ]
        traits: Sequence[int] = ()
        if with_traits:
            rows = zip(self._types, self._extents, self._same_as, self._derived, strict=True)
            traits = [
                traits_of(kind, extent.spec, role, form, (same_as, derived))
                for (kind, _, _, role, form), extent, same_as, derived in rows
            ]
        return shards_of(self._paths, regions, traits)

    def records(self) -> tuple[ObjectRecord, ...]:
        """Return the records of the objects."""
        frames, offsets, lengths = self._chunks
        refs = _made(ChunkRef, zip(frames, offsets, [0] * len(frames), lengths, strict=True))
        pairs = zip(self._extents, self._shards, strict=True)
        wholes = [extent.whole for extent, shards in pairs if shards is None]
        only = zip(_made(ShardRecord, zip(wholes, zip(refs), strict=True)))
        count = len(self._paths)
        columns = (
            self._ordinals,
            self._paths,
            [kind for kind, _, _, _, _ in self._types],
            [extent.spec for extent in self._extents],
            [role for _, _, _, role, _ in self._types],
            [form for _, _, _, _, form in self._types],
            [self.frames] * count,
            [self._head] * count,
            [next(only) if shards is None else shards for shards in self._shards],
            self._same_as,
            self._derived,
            [self._errors.get(row) for row in range(count)],
        )
        return tuple(_made(ObjectRecord, zip(*columns, strict=True)))

    def _only_chunks(
        self, refs: Sequence[list[Any] | None], extents: Sequence[_Extent]
    ) -> _Chunks | None:
        """Return frames, offsets and lengths of the chunks `refs`; None if one is refused."""
        plain = [ref for ref in refs if ref is not None]
        numbers = [*chain.from_iterable(plain)]
        frames, offsets, lengths = numbers[::3], numbers[1::3], numbers[2::3]
        if not numbers:
            return frames, offsets, lengths
        sizes = [e.nbytes for e, ref in zip(extents, refs, strict=True) if ref is not None]
        raw_lengths = self._raw_lengths
        if (
            set(map(type, numbers)) != {int}
            or min(numbers) < 0
            or max(frames) >= len(raw_lengths)
            or min(lengths) < 1
            or lengths != sizes
        ):
            return None
        ends, limits = map(add, offsets, lengths), map(raw_lengths.__getitem__, frames)
        return (frames, offsets, lengths) if all(map(le, ends, limits)) else None

    def _read_shards(self, row: int, rows: Any, where: str) -> tuple[ShardRecord, ...]:
        same_as, spec = self._same_as[row], self._extents[row].spec
        origin = self._derived[row] if same_as is None else same_as
        if origin is not None:
            if rows or origin == self._paths[row]:
                refuse(where, "is tied or derived, but has shards, or refers to itself")
            return ()
        rows = check_list(rows, where)
        if self._alone and len(rows) != 1:
            refuse(where, f"has {len(rows)} shards, not 1, although one process saved")
        return tuple([self._shard(shard, spec, where) for shard in rows])

    def _shard(self, row: object, spec: TensorSpec, name: str) -> ShardRecord:
        refs, *bounds = check_list(row, name) or [None]
        region = self._region(bounds, spec, name) if bounds else Region.whole(spec.shape)
        if self._alone and bounds:
            refuse(name, "is not stored whole")
        numbers = check_ints(refs, name)
        if len(numbers) % _ONE_CHUNK:
            refuse(name, f"its list of chunks has {len(numbers)} numbers, not 3 for each chunk")
        count, nbytes = len(numbers) // _ONE_CHUNK, spec.itemsize * math.prod(region.sizes)
        if count > max_chunks(nbytes):
            refuse(name, f"has {count} chunks for {nbytes} bytes, which is too many")
        chunks: list[ChunkRef] = []
        start = 0
        for at in range(0, len(numbers), 3):
            frame, offset, length = numbers[at : at + 3]
            if frame >= len(self._raw_lengths) or offset + length > self._raw_lengths[frame]:
                refuse(name, f"uses bytes that frame {frame} does not have")
            if not length:
                refuse(name, "has an empty chunk")
            chunks.append(ChunkRef(frame, offset, start, start + length))
            start += length
        if start != nbytes:
            refuse(name, f"has {start} bytes, unlike its shape {region.sizes} of {nbytes} bytes")
        return ShardRecord(region, tuple(chunks))

    @staticmethod
    def _region(bounds: Sequence[object], spec: TensorSpec, name: str) -> Region:
        offsets, sizes = check_list(bounds, name, count=2)
        dimensions = len(spec.shape)
        check_ints(offsets, name, count=dimensions)
        check_ints(sizes, name, count=dimensions)
        if any(o + n > m for o, n, m in zip(offsets, sizes, spec.shape, strict=True)):
            refuse(name, "has a shard that reaches beyond the object")
        return Region(tuple(offsets), tuple(sizes))


def _only_ref(rows: Any) -> list[Any] | None:
    """Return the reference of an object that is one whole shard in one chunk, else None."""
    try:
        ((ref,),) = rows
    except (TypeError, ValueError):
        return None
    return ref if type(ref) is list and len(ref) == _ONE_CHUNK else None


def _all_extents(
    numbers: Sequence[int], shapes: Sequence[Any], types: Sequence[_Type], name: str
) -> list[_Extent] | None:
    """Return the extent of each object; None if one is refused. Checks each shape once."""
    # Equal lists of plain integers are one shape: `[True]` and `[1.0]` equal `[1]` as well.
    if not _all_lists_of(shapes, int, limit=MAX_DIMENSIONS):
        return None
    keys = [*zip(numbers, map(tuple, shapes), strict=True)]
    try:
        known = {key: _extent(types[key[0]], [*key[1]], name) for key in set(keys)}
    except FormatError:
        return None
    return [*map(known.__getitem__, keys)]


def _extent(kind: _Type, shape: Any, where: str) -> _Extent:
    """Return the extent of an object, after checking its shape."""
    if len(check_ints(shape, where)) > MAX_DIMENSIONS or (
        kind[0] is Kind.VALUE and len(shape) != 1
    ):
        refuse(
            where,
            f"has {len(shape)} dimensions: a value has 1, a tensor at most {MAX_DIMENSIONS}",
        )
    spec = TensorSpec(kind[1], kind[2], tuple(shape))
    return _Extent(spec, spec.nbytes, Region.whole(spec.shape))


def _made(kind: type[RecordT], rows: Iterable[tuple[Any, ...]]) -> Iterator[RecordT]:
    """Make records of a kind of named tuple, in half the time of its own `_make`."""
    return map(partial(tuple.__new__, kind), rows)


def _read_elsewhere(columns: Fields, count: int, name: str) -> dict[int, tuple[str, ObjectPath]]:
    """Return the references of tied and derived objects, by the position of the object.

    A reference is the key of its column, and the path of the other object.
    """
    origins: dict[int, tuple[str, ObjectPath]] = {}
    for key in ("same_as", DERIVED_KEY):
        if key not in columns:
            continue
        where = f"{name}: {key}"
        pairs = [check_list(row, where, count=2) for row in columns.items(key)]
        numbers = check_ints([pair[0] for pair in pairs], where, high=count - 1)
        if len({*origins, *numbers}) != len(origins) + len(numbers):
            refuse(where, "lists an object twice")
        for number, pair in zip(numbers, pairs, strict=True):
            origins[number] = key, _path(pair[1], where)
    return origins


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
        refuse(where, "lists an object twice, or one without its own bytes")
    return {
        n: WorstErrors(*(_read_error(error, where) for error in row[1:]))
        for n, row in zip(numbers, rows, strict=True)
    }


def _read_error(value: object, name: str) -> float:
    """Return an error; null means infinity, which JSON lacks."""
    if value is None:
        return math.inf
    if type(value) not in (int, float) or not 0 <= (number := cast("float", value)) < math.inf:
        refuse(name, "the error of a lossy codec is neither null nor a finite number of at least 0")
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
        refuse(name, f"has a path of {len(segments)} segments, more than {MAX_SEGMENTS}")
    return tuple(segments)

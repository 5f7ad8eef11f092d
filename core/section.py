"""Reading one section of a part, with full checks. Sans-IO; `section_draft` is the way in."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.core.blocks import block_count
from penstock.core.fields import (
    Fields,
    check_ints,
    check_list,
    check_texts,
    is_hex,
    load_json,
    refuse,
)
from penstock.core.manifest import (
    MAX_CHUNK_BYTES,
    ChunkRef,
    Frame,
    NodeRecord,
    ObjectRecord,
    Section,
    ShardRecord,
)
from penstock.core.section_draft import FRAME_KEYS, MAX_SEGMENTS, OBJECT_KEYS, top_level_keys
from penstock.core.types import Kind, Region, Role, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.manifest import PartHead, SectionInfo
    from penstock.core.types import ObjectPath

_TYPE_COLUMNS = 5
_NODE_COLUMNS = 4
_CHECKSUM_DIGITS = 16
_MAX_ITEMSIZE = 1 << 20
_MAX_DIMENSIONS = 64

_Type: TypeAlias = tuple[Kind, str, int, Role, str]


def read_section(raw: bytes, head: PartHead, info: SectionInfo, name: str) -> Section:
    """Read and validate the JSON of a section.

    Raises:
        FormatError: It is malformed, or does not fit the head.
    """
    fields = Fields(load_json(raw, name), name, ("frames", "types", "objects", "nodes"))
    frames = _read_frames(fields.value("frames"), head, name)
    types = [_read_type(row, name) for row in fields.items("types")]
    objects = _read_objects(fields.value("objects"), types, frames, head, name)
    nodes = [_read_node(row, name) for row in fields.items("nodes")]
    if (len(objects), len(nodes)) != (info.objects, info.nodes):
        refuse(name, f"has {len(objects)} objects and {len(nodes)} nodes, unlike its head says")
    if len({record.path for record in objects}) != len(objects):
        refuse(name, "lists a path twice")
    ordinals = {record.ordinal for record in objects} | {node.ordinal for node in nodes}
    if len(ordinals) != len(objects) + len(nodes):
        refuse(name, "lists an ordinal twice")
    if top_level_keys([o.path for o in objects], [n.path for n in nodes]) != info.groups:
        refuse(name, "has other top-level keys than its head says")
    return Section(tuple(frames), tuple(objects), tuple(nodes))


def _read_frames(value: object, head: PartHead, name: str) -> list[Frame]:
    fields = Fields(value, f"{name}: frames", FRAME_KEYS)
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
        strict=True,
    )
    return [_read_frame(row, head, f"{name}, frame {n}") for n, row in enumerate(rows)]


def _read_frame(row: tuple[Any, ...], head: PartHead, name: str) -> Frame:
    blob, offset, length, raw_length, chain, checksums, raw_checksum, lengths = row
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
    )


def _read_type(row: object, name: str) -> _Type:
    kind, dtype, itemsize, role, form = check_list(row, f"{name}: types", count=_TYPE_COLUMNS)
    check_texts([kind, dtype, role, form], f"{name}: types")
    check_ints([itemsize], f"{name}: types", low=1, high=_MAX_ITEMSIZE)
    try:
        result = (Kind(kind), dtype, itemsize, Role(role), form)
    except ValueError as error:
        refuse(name, str(error))
    if result[0] is Kind.VALUE and (dtype, itemsize) != ("uint8", 1):
        refuse(name, f"has a value of dtype {dtype}")
    return result


def _read_objects(
    value: object, types: Sequence[_Type], frames: Sequence[Frame], head: PartHead, name: str
) -> list[ObjectRecord]:
    fields = Fields(value, f"{name}: objects", OBJECT_KEYS)
    count = len(fields.items("path"))
    ties = _read_ties(fields.items("same_as"), count, name)
    reader = _ShardReader(frames, head.world_size)
    numbers = check_ints(fields.value("type"), f"{name}: type", count=count, high=len(types) - 1)
    ordinals = check_ints(fields.value("ordinal"), f"{name}: ordinal", count=count)
    rows = zip(
        ordinals, fields.items("path"), numbers, fields.items("shape", count=count),
        fields.items("shards", count=count), strict=True,
    )  # fmt: skip
    objects: list[ObjectRecord] = []
    for position, (ordinal, segments, number, shape, shards) in enumerate(rows):
        kind, dtype, itemsize, role, form = types[number]
        where = f"{name}, object {position}"
        path = _path(segments, where)
        if len(check_ints(shape, where)) > _MAX_DIMENSIONS or (kind == "value" and len(shape) != 1):
            refuse(where, f"has {len(shape)} dimensions")
        spec = TensorSpec(dtype, itemsize, tuple(shape))
        same_as = ties.get(position)
        records: tuple[ShardRecord, ...] = ()
        if same_as is None:
            records = reader.read(shards, spec, where)
        elif shards or same_as == path:
            refuse(where, "is tied, but has shards, or is tied to itself")
        objects.append(ObjectRecord(ordinal, path, kind, spec, role, form, records, same_as))
    return objects


def _read_ties(rows: Sequence[object], count: int, name: str) -> dict[int, ObjectPath]:
    where = f"{name}: same_as"
    pairs = [check_list(row, where, count=2) for row in rows]
    numbers = check_ints([pair[0] for pair in pairs], where, high=count - 1)
    if len(set(numbers)) != len(numbers):
        refuse(where, "lists an object twice")
    return {number: _path(pair[1], where) for number, pair in zip(numbers, pairs, strict=True)}


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


class _ShardReader:
    def __init__(self, frames: Sequence[Frame], world_size: int) -> None:
        self._raw_lengths = [frame.raw_length for frame in frames]
        self._alone = world_size == 1

    def read(self, rows: object, spec: TensorSpec, name: str) -> tuple[ShardRecord, ...]:
        rows = check_list(rows, name)
        if not rows or (self._alone and len(rows) != 1):
            refuse(name, f"has {len(rows)} shards")
        return tuple([self._shard(row, spec, name) for row in rows])

    def _shard(self, row: object, spec: TensorSpec, name: str) -> ShardRecord:
        refs, *bounds = check_list(row, name) or [None]
        region = self._region(bounds, spec, name) if bounds else Region.whole(spec.shape)
        if self._alone and bounds:
            refuse(name, "is not stored whole")
        numbers = check_ints(refs, name)
        if len(numbers) % 3:
            refuse(name, "has an odd list of chunks")
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
        if start != spec.itemsize * math.prod(region.sizes):
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

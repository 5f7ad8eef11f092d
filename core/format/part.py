"""Encodes and decodes a part: zstd frames of a head, a shard table, and sections. Sans-IO.

Tested in `tests/core/format/test_records.py`.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.core.format.commit_record import read_blobs
from penstock.core.format.compressed import check_digest, compress, decompress, digest
from penstock.core.format.features import FORMAT_VERSION, without_features
from penstock.core.format.index import (
    ShardTable,
    dump_table,
    dump_traits,
    load_table,
    load_traits,
    shard_table,
)
from penstock.core.format.records import (
    BlobRecord,
    Chain,
    ChoiceRecord,
    CodecRecord,
    PartEntry,
    PartHead,
    SectionInfo,
    blob_uid,
    borrowed_from,
    is_uid,
    part_name,
)
from penstock.core.format.section import check_section, read_section
from penstock.core.format.strict_json import (
    Fields,
    check_list,
    check_texts,
    dump_json,
    load_json,
    refuse,
)
from penstock.core.limits import (
    MAX_BLOCK_BYTES,
    MAX_CODEC_NAME_CHARS,
    MAX_CODECS,
    MAX_FRAME_BYTES,
    MAX_GROUPS,
    MAX_STORED_FRAME_BYTES,
    max_decompressed,
)
from penstock.core.types import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from penstock.core.format.index import SectionShards
    from penstock.core.format.records import CommitRecord, Section
    from penstock.core.format.section_writer import SectionWriter
    from penstock.core.tree.select import Selection

_HEAD_KEYS = (
    "penstock", "uid", "rank", "world_size", "step", "block_bytes", "blobs", "chains", "shards",
    "sections",
)  # fmt: skip
_CHOICES_KEY = "choices"  # left out if no rule chose codecs by measurement
_NO_TABLE = SectionInfo(0, 0, 0, "", 0, 0, None)  # in the head of a part that is being encoded
_SECTION_COLUMNS = ("offset", "length", "raw_length", "sha256", "objects", "nodes", "groups")


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """The bytes of a part, its entry for the commit record, and its shards for the index.

    Its first `listing_bytes` bytes are the head and the shard table.
    """

    data: bytes
    entry: PartEntry
    shards: ShardTable
    listing_bytes: int


def encode_part(  # noqa: PLR0913 - tables of one part, each by name
    sections: Iterable[SectionWriter],
    *,
    uid: str,
    rank: int,
    step: int,
    block_bytes: int,
    blobs: Sequence[BlobRecord],
    chains: Sequence[Chain],
    choices: Sequence[ChoiceRecord] = (),
    world_size: int = 1,
) -> EncodedPart:
    """Encode a part, and check that every reader accepts it.

    Args:
        sections: The sections, in order.
        uid: The uid of the save.
        rank: The rank that writes the part.
        step: The step of the save.
        block_bytes: Distance between checksum cuts in raw frames, a multiple of 4096.
        blobs: Table that `Frame.blob` indexes; lengths as sealed.
        chains: Table that `Frame.chain` indexes; the first is the empty chain.
        choices: The codec choices, by class of objects.
        world_size: Number of ranks.

    Raises:
        FormatError: A reader would refuse the tables, or the content of a section.
    """
    tables = PartHead(
        uid, rank, world_size, step, block_bytes, tuple(blobs), tuple(chains), _NO_TABLE, ()
    )
    shards: list[SectionShards] = []
    infos: list[SectionInfo] = []
    frames: list[bytes] = []
    at = 0
    for section in sections:
        frame, info = _squeeze(section.dump(), at)
        info = replace(info, objects=section.objects, nodes=section.nodes, groups=section.groups)
        # Read as a reader would: a section that readers refuse must not be committed.
        name = _section_name(info, tables)
        objects, _ = check_section(_unsqueeze(frame, info, name), tables, info, name)
        shards.append(objects.section_shards(with_traits=world_size > 1))
        infos.append(info)
        frames.append(frame)
        at += len(frame)
    table = shard_table(shards)
    table_frame, table_info = _squeeze(_dump_shards(table, world_size), 0)
    body = {
        "penstock": FORMAT_VERSION,
        "uid": uid,
        "rank": rank,
        "world_size": world_size,
        "step": step,
        "block_bytes": block_bytes,
        "blobs": [[blob.name, blob.length] for blob in blobs],
        "chains": [[[link.name, link.version, link.config] for link in c] for c in chains],
        "shards": _row(replace(table_info, objects=len(table))),
        "sections": [_row(replace(i, offset=i.offset + len(table_frame))) for i in infos],
    }
    if choices:
        body[_CHOICES_KEY] = [astuple(choice) for choice in choices]
    head = compress(dump_json(body) + b"\n")
    data = b"".join((head, table_frame, *frames))
    entry = PartEntry(part_name(uid, rank), len(data), len(head), digest(head))
    borrowed = borrowed_from(blobs, uid)
    known = read_head(head, entry, uid=uid, rank=rank, world_size=world_size, borrowed=borrowed)
    decode_shards(table_frame, known)
    return EncodedPart(data, entry, table, len(head) + len(table_frame))


def decode_head(data: bytes, entry: PartEntry, record: CommitRecord) -> PartHead:
    """Read and validate the head of a part of a committed checkpoint.

    Args:
        data: The first `entry.head_length` bytes of the part.
        entry: One of `record.parts`.
        record: The commit record.

    Raises:
        FormatError: The head is damaged, or belongs to another part.
    """
    head = read_head(
        data,
        entry,
        uid=record.uid,
        rank=entry.rank,
        world_size=record.world_size,
        borrowed=record.borrowed if record.many_borrowed is None else None,
    )
    if record.many_borrowed is not None:
        # A part may use only these saves: deletions spare all blobs of the saves that the record
        # names, so the table that lists the blobs is not needed here.
        lent = {record.uid, *record.references}
        for blob in head.blobs:
            if blob_uid(blob.name) not in lent:
                refuse(
                    entry.name, f"the commit record borrows nothing from the save of {blob.name}"
                )
    if head.step != record.step:
        refuse(entry.name, f"is of step {head.step} instead of {record.step}")
    return head


def read_head(
    data: bytes,
    entry: PartEntry,
    *,
    uid: str,
    rank: int,
    world_size: int,
    borrowed: Collection[BlobRecord] | None = (),
) -> PartHead:
    """Read and validate the head of a part.

    Args:
        data: The first `entry.head_length` bytes of the part.
        entry: The part, as the commit record names it.
        uid: The uid of the commit record.
        rank: Number of the part in the commit record.
        world_size: The world size of the commit record.
        borrowed: The blobs of other saves that the part may use, as in the commit record. None
            accepts any: there is no commit record yet, or it does not list them itself.

    Raises:
        FormatError: The head is damaged, or belongs to another part.
    """
    name = entry.name
    check_digest(data, name, length=entry.head_length, expected=entry.head_sha256)
    body = load_json(decompress(data, name), name)
    if type(body) is not dict or body.get("penstock") != FORMAT_VERSION:
        refuse(name, f"is not a part of format version {FORMAT_VERSION}")
    fields = Fields(without_features(body, name), name, _HEAD_KEYS, optional=(_CHOICES_KEY,))
    if fields.value("uid") != uid or not is_uid(uid):
        refuse(name, f"is of save {fields.value('uid')!r} instead of {uid}")
    if (fields.integer("rank"), fields.integer("world_size")) != (rank, world_size):
        refuse(name, "is of another rank or world size")
    block_bytes = fields.integer("block_bytes", low=PAGE_BYTES, high=MAX_BLOCK_BYTES)
    if block_bytes % PAGE_BYTES:
        refuse(name, f"block_bytes is {block_bytes}, not a multiple of {PAGE_BYTES}")
    rows = [fields.value("shards"), *fields.items("sections")]
    infos = _infos(rows, name, entry)
    shards, sections = infos[0], tuple(infos[1:])
    if shards.objects < sum(info.objects for info in sections):
        refuse(name, "lists fewer shards than its sections have objects")
    return PartHead(
        uid=uid,
        rank=rank,
        world_size=world_size,
        step=fields.integer("step"),
        block_bytes=block_bytes,
        blobs=tuple(_blobs(fields.items("blobs"), name, uid, borrowed)),
        chains=tuple(_chains(fields.items("chains"), name)),
        shards=shards,
        sections=sections,
        choices=_choices(fields, name),
    )


def decode_section(
    data: bytes, info: SectionInfo, head: PartHead, wanted: Selection | None = None
) -> Section:
    """Read and validate one section.

    Args:
        data: Bytes `[info.offset, info.offset + info.length)` of the part.
        info: One of `head.sections`.
        head: The part's head.
        wanted: Selects the objects to read; None reads all. See `read_section`.

    Raises:
        FormatError: The section is damaged, or does not fit the head.
    """
    name = _section_name(info, head)
    return read_section(_unsqueeze(data, info, name), head, info, name, wanted)


def _section_name(info: SectionInfo, head: PartHead) -> str:
    return f"{part_name(head.uid, head.rank)}, section at {info.offset}"


def decode_shards(data: bytes, head: PartHead) -> ShardTable:
    """Read and validate the table of a part's shards, which `head.shards` locates.

    Raises:
        FormatError: The table is damaged, or does not fit the head.
    """
    name = f"{part_name(head.uid, head.rank)}, shards"
    keys = ("shards",) if head.world_size == 1 else ("shards", "traits")
    fields = Fields(load_json(_unsqueeze(data, head.shards, name), name), name, keys)
    count = head.shards.objects
    table = load_table(_binary(fields, "shards", name), name, count=count)
    if (table.sections >= len(head.sections)).any() or table.parts.any():
        refuse(name, "names sections that do not exist")
    if head.world_size == 1:
        return table
    return replace(table, traits=load_traits(_binary(fields, "traits", name), name, count=count))


def _dump_shards(table: ShardTable, world_size: int) -> bytes:
    columns = {"shards": dump_table(table)}
    if world_size > 1:
        columns["traits"] = dump_traits(table)
    return dump_json({key: base64.b64encode(data).decode() for key, data in columns.items()})


def _binary(fields: Fields, key: str, name: str) -> bytes:
    try:
        return base64.b64decode(fields.text(key, limit=1 << 30), validate=True)
    except (binascii.Error, ValueError) as error:
        refuse(name, f"not base64: {error}")


def _squeeze(raw: bytes, offset: int) -> tuple[bytes, SectionInfo]:
    raw += b"\n"  # so that `zstd -dc` of the whole part is one JSON document per line
    frame = compress(raw)
    return frame, SectionInfo(offset, len(frame), len(raw), digest(frame), 0, 0, None)


def _unsqueeze(data: bytes, info: SectionInfo, name: str) -> bytes:
    check_digest(data, name, length=info.length, expected=info.sha256)
    return decompress(data, name, raw_length=info.raw_length)


def _row(info: SectionInfo) -> list[Any]:
    return [getattr(info, column) for column in _SECTION_COLUMNS]


def _infos(rows: Sequence[object], name: str, entry: PartEntry) -> list[SectionInfo]:
    infos: list[SectionInfo] = []
    end = 0
    for number, row in enumerate(rows):
        where = f"{name}: entry {number} of its sections"
        fields = Fields.of_row(row, where, _SECTION_COLUMNS)
        groups = fields.value("groups")
        if groups is not None:
            groups = tuple(check_texts(groups, where))
            if len(groups) > MAX_GROUPS:
                refuse(where, "lists too many top-level keys")
        if fields.integer("offset") != end:
            refuse(where, "does not begin where the previous one ends")
        info = SectionInfo(
            offset=entry.head_length + end,
            length=fields.integer("length", low=1, high=MAX_STORED_FRAME_BYTES),
            raw_length=fields.integer("raw_length", high=MAX_FRAME_BYTES),
            sha256=fields.hexadecimal("sha256", 64),
            objects=fields.integer("objects"),
            nodes=fields.integer("nodes"),
            groups=groups,
        )
        end += info.length
        infos.append(info)
    if entry.head_length + end != entry.length:
        refuse(name, f"its sections end at {entry.head_length + end}, not at {entry.length}")
    content = sum(info.raw_length for info in infos)
    if content > max_decompressed(entry.length):
        refuse(
            name, f"declares {content} bytes of content, too many for {entry.length} stored bytes"
        )
    return infos


def _blobs(
    rows: Sequence[Any], name: str, uid: str, borrowed: Collection[BlobRecord] | None
) -> Iterable[BlobRecord]:
    known = None if borrowed is None else frozenset(borrowed)
    for blob in read_blobs(rows, f"{name}: blobs"):
        # Name and length must agree: deletions and copies know only the blobs in the record.
        if blob_uid(blob.name) != uid and known is not None and blob not in known:
            refuse(
                name, f"a blob is neither of this save nor borrowed by the commit record: {blob}"
            )
        yield blob


def _chains(rows: Sequence[Any], name: str) -> Iterable[Chain]:
    if not rows or rows[0] != []:
        refuse(name, "its first chain is not empty")
    keys = ("name", "version", "config")
    for number, row in enumerate(rows):
        where = f"{name}: chain {number}"
        links = check_list(row, where)
        if len(links) > MAX_CODECS or (number and not links):
            refuse(where, f"has {len(links)} codecs, not 1 to {MAX_CODECS}")
        chain: list[CodecRecord] = []
        for link in links:
            fields = Fields.of_row(link, where, keys)
            chain.append(
                CodecRecord(
                    fields.text("name", limit=MAX_CODEC_NAME_CHARS),
                    fields.integer("version"),
                    fields.mapping("config"),
                )
            )
        yield tuple(chain)


def _choices(fields: Fields, name: str) -> tuple[ChoiceRecord, ...]:
    if _CHOICES_KEY not in fields:
        return ()
    where, keys = f"{name}: {_CHOICES_KEY}", ("objects", "codec", "why")
    choices: dict[str, ChoiceRecord] = {}
    for row in fields.items(_CHOICES_KEY):
        entry = Fields.of_row(row, where, keys)
        raw = entry.value("codec") is None
        codec = None if raw else entry.text("codec", limit=MAX_CODEC_NAME_CHARS)
        choice = ChoiceRecord(entry.text("objects"), codec, entry.text("why"))
        if choices.setdefault(choice.objects, choice) is not choice:
            refuse(where, f"lists a class twice: {choice.objects!r}")
    return tuple(choices.values())

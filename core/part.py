"""Bytes of a part: a head, path hashes and sections, each a zstd frame of its own. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.core.compressed import check_digest, compress, decompress, digest
from penstock.core.fields import (
    Fields,
    check_list,
    check_texts,
    dump_json,
    load_json,
    refuse,
)
from penstock.core.index import PathHashes, dump_hashes, load_hashes, sort_hashes
from penstock.core.manifest import (
    FORMAT_VERSION,
    BlobRecord,
    Chain,
    CodecRecord,
    PartEntry,
    PartHead,
    SectionInfo,
    blob_uid,
    is_uid,
    part_name,
)
from penstock.core.section import read_section
from penstock.core.section_draft import MAX_GROUPS
from penstock.core.types import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from penstock.core.manifest import CommitRecord, Section
    from penstock.core.section_draft import SectionDraft

_HEAD_KEYS = (
    "penstock", "uid", "rank", "world_size", "step", "block_bytes", "blobs", "chains", "hashes",
    "sections",
)  # fmt: skip
_SECTION_COLUMNS = 7
_MAX_CHAIN = 16
_MAX_BLOCK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """A part ready to be published, and what the index and the commit record need of it."""

    data: bytes
    entry: PartEntry
    hashes: PathHashes
    objects: int


def encode_part(
    sections: Iterable[SectionDraft],
    *,
    uid: str,
    rank: int,
    step: int,
    block_bytes: int,
    blobs: Sequence[BlobRecord],
    chains: Sequence[Chain],
    world_size: int = 1,
) -> EncodedPart:
    """The bytes of a part.

    Args:
        sections: From `sections.build_sections`, or `section_draft.draft_section`.
        uid: Of the save.
        rank: Who writes it.
        step: Of the save.
        block_bytes: Distance of checksum cuts in raw frames, a multiple of 4096.
        blobs: Table that `Frame.blob` counts in; lengths as sealed.
        chains: Table that `Frame.chain` counts in; the first is the empty one.
        world_size: Number of ranks.

    Raises:
        FormatError: The tables are not what `read_head` would take.
    """
    hashes: list[list[int]] = []
    infos: list[SectionInfo] = []
    frames: list[bytes] = []
    at = 0
    for draft in sections:
        frame, info = _squeeze(draft.dump(), at)
        hashes.append(draft.hashes())
        infos.append(replace(info, objects=draft.objects, nodes=draft.nodes, groups=draft.groups))
        frames.append(frame)
        at += len(frame)
    table = sort_hashes(hashes)
    hash_frame, hash_info = _squeeze(dump_hashes(table), 0)
    objects = len(table.hashes)
    body = {
        "penstock": FORMAT_VERSION,
        "uid": uid,
        "rank": rank,
        "world_size": world_size,
        "step": step,
        "block_bytes": block_bytes,
        "blobs": [[blob.name, blob.length] for blob in blobs],
        "chains": [[[link.name, link.version, link.config] for link in c] for c in chains],
        "hashes": _row(replace(hash_info, objects=objects)),
        "sections": [_row(replace(i, offset=i.offset + len(hash_frame))) for i in infos],
    }
    head = compress(dump_json(body) + b"\n")
    data = b"".join((head, hash_frame, *frames))
    entry = PartEntry(part_name(uid, rank), len(data), len(head), digest(head))
    references = {other for b in blobs if (other := blob_uid(b.name)) is not None}
    read_head(head, entry, uid=uid, rank=rank, world_size=world_size, references=references)
    return EncodedPart(data, entry, table, objects)


def decode_head(data: bytes, entry: PartEntry, record: CommitRecord) -> PartHead:
    """Read and validate the head of a part of a committed checkpoint.

    Args:
        data: The first `entry.head_length` bytes of the part.
        entry: One of `record.parts`.
        record: The commit record.

    Raises:
        FormatError: It is damaged, or not that part's.
    """
    head = read_head(
        data,
        entry,
        uid=record.uid,
        rank=record.parts.index(entry),
        world_size=record.world_size,
        references=record.references,
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
    references: Collection[str] = (),
) -> PartHead:
    """Read and validate the head of a part.

    Args:
        data: The first `entry.head_length` bytes of the part.
        entry: The part, as the commit record names it.
        uid: As in the commit record.
        rank: Number of the part in the commit record.
        world_size: As in the commit record.
        references: As in the commit record: other uids whose blobs the part may use.

    Raises:
        FormatError: It is damaged, or not that part's.
    """
    name = entry.name
    check_digest(data, name, length=entry.head_length, expected=entry.head_sha256)
    body = load_json(decompress(data, name), name)
    if type(body) is not dict or body.get("penstock") != FORMAT_VERSION:
        refuse(name, f"is not a part of format version {FORMAT_VERSION}")
    fields = Fields(body, name, _HEAD_KEYS)
    if fields.value("uid") != uid or not is_uid(uid):
        refuse(name, f"is of save {fields.value('uid')!r} instead of {uid}")
    if (fields.integer("rank"), fields.integer("world_size")) != (rank, world_size):
        refuse(name, "is of another rank or world size")
    block_bytes = fields.integer("block_bytes", low=PAGE_BYTES, high=_MAX_BLOCK_BYTES)
    if block_bytes % PAGE_BYTES:
        refuse(name, f"block_bytes is {block_bytes}, not a multiple of {PAGE_BYTES}")
    rows = [fields.value("hashes"), *fields.items("sections")]
    infos = _infos(rows, name, entry)
    hashes, sections = infos[0], tuple(infos[1:])
    if hashes.objects != sum(info.objects for info in sections):
        refuse(name, "does not hash as many paths as its sections have objects")
    return PartHead(
        uid=uid,
        rank=rank,
        world_size=world_size,
        step=fields.integer("step"),
        block_bytes=block_bytes,
        blobs=tuple(_blobs(fields.items("blobs"), name, {uid, *references})),
        chains=tuple(_chains(fields.items("chains"), name)),
        hashes=hashes,
        sections=sections,
    )


def decode_section(data: bytes, info: SectionInfo, head: PartHead) -> Section:
    """Read and validate one section.

    Args:
        data: Bytes `[info.offset, info.offset + info.length)` of the part.
        info: One of `head.sections`.
        head: The part's head.

    Raises:
        FormatError: It is damaged, or does not fit the head.
    """
    name = f"{part_name(head.uid, head.rank)}, section at {info.offset}"
    return read_section(_unsqueeze(data, info, name), head, info, name)


def decode_hashes(data: bytes, head: PartHead) -> PathHashes:
    """Read and validate the path hashes of a part: where `head.hashes` says.

    Raises:
        FormatError: They are damaged, or do not fit the head.
    """
    name = f"{part_name(head.uid, head.rank)}, path hashes"
    raw = _unsqueeze(data, head.hashes, name)
    return load_hashes(raw, name, count=head.hashes.objects, sections=len(head.sections))


def _squeeze(raw: bytes, offset: int) -> tuple[bytes, SectionInfo]:
    raw += b"\n"  # so that `zstd -dc` of the whole part is one JSON document per line
    frame = compress(raw)
    return frame, SectionInfo(offset, len(frame), len(raw), digest(frame), 0, 0, None)


def _unsqueeze(data: bytes, info: SectionInfo, name: str) -> bytes:
    check_digest(data, name, length=info.length, expected=info.sha256)
    return decompress(data, name, raw_length=info.raw_length)


def _row(info: SectionInfo) -> list[Any]:
    return [
        info.offset, info.length, info.raw_length, info.sha256, info.objects, info.nodes,
        info.groups,
    ]  # fmt: skip


def _infos(rows: Sequence[object], name: str, entry: PartEntry) -> list[SectionInfo]:
    infos: list[SectionInfo] = []
    end = 0
    for number, row in enumerate(rows):
        where = f"{name}: entry {number} of its sections"
        columns = check_list(row, where, count=_SECTION_COLUMNS)
        keys = ("offset", "length", "raw_length", "sha256", "objects", "nodes", "groups")
        fields = Fields(dict(zip(keys, columns, strict=True)), where, keys)
        groups = fields.value("groups")
        if groups is not None:
            groups = tuple(check_texts(groups, where))
            if len(groups) > MAX_GROUPS:
                refuse(where, "lists too many top-level keys")
        if fields.integer("offset") != end:
            refuse(where, "does not begin where the one before ends")
        info = SectionInfo(
            offset=entry.head_length + end,
            length=fields.integer("length", low=1),
            raw_length=fields.integer("raw_length"),
            sha256=fields.hexadecimal("sha256", 64),
            objects=fields.integer("objects"),
            nodes=fields.integer("nodes"),
            groups=groups,
        )
        end += info.length
        infos.append(info)
    if entry.head_length + end != entry.length:
        refuse(name, f"its sections end at {entry.head_length + end}, not at {entry.length}")
    return infos


def _blobs(rows: Sequence[Any], name: str, uids: Collection[str]) -> Iterable[BlobRecord]:
    seen: set[str] = set()
    for row in rows:
        fields = Fields(
            dict(zip(("name", "length"), check_list(row, name, count=2), strict=True)),
            f"{name}: blobs",
            ("name", "length"),
        )
        blob = fields.text("name")
        if blob_uid(blob) not in uids:
            refuse(name, f"blob {blob!r} is not one of this save or of one it references")
        if blob in seen:
            refuse(name, f"blob {blob!r} is listed twice")
        seen.add(blob)
        yield BlobRecord(blob, fields.integer("length"))


def _chains(rows: Sequence[Any], name: str) -> Iterable[Chain]:
    if not rows or rows[0] != []:
        refuse(name, "its first chain is not the empty one")
    keys = ("name", "version", "config")
    for number, row in enumerate(rows):
        where = f"{name}: chain {number}"
        links = check_list(row, where)
        if len(links) > _MAX_CHAIN or (number and not links):
            refuse(where, f"{len(links)} codecs")
        chain: list[CodecRecord] = []
        for link in links:
            columns = check_list(link, where, count=len(keys))
            fields = Fields(dict(zip(keys, columns, strict=True)), where, keys)
            chain.append(
                CodecRecord(
                    fields.text("name", limit=64),
                    fields.integer("version"),
                    fields.mapping("config"),
                )
            )
        yield tuple(chain)

"""Encodes and decodes commit records, intents and notes: a digest line, then JSON. Sans-IO."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.core.format.compressed import check_digest, compress, decompress, digest
from penstock.core.format.features import FORMAT_VERSION, without_features
from penstock.core.format.records import (
    BaseEntry,
    BlobRecord,
    BorrowedTable,
    CommitRecord,
    IndexEntry,
    IntentRecord,
    ManyParts,
    NoteRecord,
    PartEntry,
    blob_uid,
    commit_name,
    index_name,
    intent_name,
    part_name,
)
from penstock.core.format.strict_json import (
    Fields,
    check_list,
    dump_json,
    is_hex,
    load_json,
    refuse,
)
from penstock.core.limits import (
    MAX_INDEX_HEAD_BYTES,
    MAX_LISTED_BORROWED,
    MAX_LISTED_PARTS,
    MAX_OBJECTS,
    MAX_STORED_FRAME_BYTES,
    NOTE_LIMIT_BYTES,
    RECORD_LIMIT_BYTES,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")

_HEADER_LIMIT_BYTES = 256
# Larger records are not indented: indentation makes deep metadata a hundred times larger.
_INDENTED_CHARS = 256 << 10
_PART = re.compile(r"data/[0-9a-f]{32}/parts/([0-9]{5,8})\.json\.zst")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")
_COMMIT_KEYS = (
    "uid", "step", "generation", "created", "world_size", "objects", "bytes_raw", "bytes_stored",
    "index", "parts", "codecs", "providers", "borrowed", "base", "compacts", "metadata", "penstock",
    "engine", "plugins",
)  # fmt: skip
_OPTIONAL_KEYS = ("plugins", "base", "compacts")  # left out if there is none
_INTENT_KEYS = (
    "uid", "step", "references", "host", "pid", "started", "refreshed", "process", "place",
)  # fmt: skip
_NOTE_KEYS = ("uid", "number", "id", "metadata", "tags")
_BLOB_KEYS = ("name", "length")
_TAG = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAX_WORLD_SIZE = 1 << 24

MAX_NOTE_NUMBER = 99_999_999
"""The highest number of a note: names have eight digits, so that they sort."""


def encode_commit(record: CommitRecord) -> bytes:
    """Encode a commit record.

    Raises:
        FormatError: `decode_commit` would refuse the record.
    """
    body = {key: getattr(record, key) for key in _COMMIT_KEYS}
    body["index"] = asdict(record.index)
    many = record.many_parts
    body["parts"] = [asdict(p) for p in record.parts] if many is None else asdict(many)
    table = record.many_borrowed
    body["borrowed"] = _rows(record.borrowed) if table is None else asdict(table)
    body["base"] = None if record.base is None else asdict(record.base)
    for key in _OPTIONAL_KEYS:
        if not body[key]:
            del body[key]
    data = seal(body)
    if len(data) > RECORD_LIMIT_BYTES:
        name = commit_name(record.step, record.generation)
        refuse(name, f"has {len(data)} bytes; a reader accepts at most {RECORD_LIMIT_BYTES}")
    decode_commit(data, commit_name(record.step, record.generation))
    return data


def decode_commit(data: bytes, name: str) -> CommitRecord:
    """Read and validate a commit record.

    Args:
        data: The whole record.
        name: Its name, which must agree with its step and generation.

    Raises:
        FormatError: The record is damaged, of an unknown version, or has another name.
    """
    body = unseal(data, name)
    if type(body) is dict:
        body.setdefault("plugins", {})
        body.setdefault("base", None)
        body.setdefault("compacts", "")
    fields = Fields(body, name, _COMMIT_KEYS)
    uid = fields.hexadecimal("uid", 32)
    step = fields.integer("step")
    generation = fields.integer("generation")
    if commit_name(step, generation) != name:
        refuse(name, f"the name is wrong: it is the record of step {step}, generation {generation}")
    world_size = fields.integer("world_size", low=1, high=_MAX_WORLD_SIZE)
    objects = fields.integer("objects", high=MAX_OBJECTS * world_size)
    many = type(fields.value("parts")) is dict
    lists_all = type(fields.value("borrowed")) is not dict
    index = _index_entry(fields.value("index"), uid, name)
    return CommitRecord(
        uid=uid,
        step=step,
        generation=generation,
        created=_time(fields, "created", name),
        world_size=world_size,
        index=index,
        parts=() if many else _part_entries(fields, uid, name),
        objects=objects,
        bytes_raw=fields.integer("bytes_raw"),
        bytes_stored=fields.integer("bytes_stored"),
        codecs=_mapping_to(int, "versions", fields, "codecs", name),
        providers=_mapping_to(int, "versions", fields, "providers", name),
        borrowed=_borrowed(fields.items("borrowed"), uid, name) if lists_all else (),
        base=_base(fields.value("base"), uid, name),
        compacts=_compacts(fields, uid, name),
        metadata=fields.mapping("metadata"),
        penstock=fields.text("penstock"),
        engine=fields.text("engine"),
        plugins=_mapping_to(str, "texts", fields, "plugins", name),
        many_parts=_many_parts(fields, name) if many else None,
        many_borrowed=None if lists_all else _many_borrowed(fields, index, uid, name),
    )


def encode_borrowed(blobs: Sequence[BlobRecord]) -> tuple[bytes, BorrowedTable]:
    """Encode the table of borrowed blobs that ends an index; `blobs` must ascend by name."""
    data = compress(dump_json(_rows(blobs)))
    saves: dict[str, int] = {}
    for blob in blobs:
        uid = blob_uid(blob.name) or ""
        saves[uid] = saves.get(uid, 0) + blob.length
    return data, BorrowedTable(len(blobs), len(data), digest(data), saves)


def decode_borrowed(data: bytes, record: CommitRecord) -> tuple[BlobRecord, ...]:
    """Read and validate the table of borrowed blobs of a checkpoint whose record lists none.

    Raises:
        FormatError: The table is damaged, or differs from the commit record.
    """
    name, table = f"{record.index.name}: borrowed", record.many_borrowed
    if table is None:
        refuse(name, "the commit record lists the blobs itself")
    check_digest(data, record.index.name, length=table.length, expected=table.sha256)
    rows = check_list(load_json(decompress(data, name), name), name)
    blobs = _borrowed(rows, record.uid, name)
    if encode_borrowed(blobs)[1].saves != table.saves or len(blobs) != table.count:
        refuse(name, "does not list the blobs that the commit record counts")
    return blobs


def encode_intent(record: IntentRecord) -> bytes:
    """Encode an intent.

    Raises:
        FormatError: `decode_intent` would refuse the record.
    """
    data = seal(asdict(record))
    decode_intent(data, intent_name(record.uid))
    return data


def decode_intent(data: bytes, name: str) -> IntentRecord:
    """Read and validate an intent.

    Raises:
        FormatError: The record is damaged, has an unknown version, requires an unknown feature, or
            is stored under a name that does not match its uid.
    """
    body = unseal(data, name)
    fields = Fields(body, name, _INTENT_KEYS)
    uid = fields.hexadecimal("uid", 32)
    if intent_name(uid) != name:
        refuse(name, f"the name is wrong: it is the intent of {uid}")
    return IntentRecord(
        uid=uid,
        step=fields.integer("step"),
        references=_references(fields, uid, name),
        host=fields.text("host"),
        pid=fields.integer("pid"),
        started=_time(fields, "started", name),
        refreshed=_time(fields, "refreshed", name),
        process=fields.text("process"),
        place=fields.text("place"),
    )


def is_tag(text: object) -> bool:
    """Return whether `text` may be a tag: 1 to 64 of `A-Z a-z 0-9 . _ -`."""
    return isinstance(text, str) and _TAG.fullmatch(text) is not None


def encode_note(note: NoteRecord) -> bytes:
    """Encode a note; equal notes have equal bytes.

    Raises:
        FormatError: `decode_note` would refuse the note.
    """
    data = seal(asdict(note))
    decode_note(data, note.name)
    return data


def decode_note(data: bytes, name: str) -> NoteRecord:
    """Read and validate a note.

    Raises:
        FormatError: The note is damaged, too long, of an unknown version, or has another name.
    """
    if len(data) > NOTE_LIMIT_BYTES:
        refuse(name, f"has {len(data)} bytes; a reader accepts at most {NOTE_LIMIT_BYTES}")
    fields = Fields(unseal(data, name), name, _NOTE_KEYS)
    tags = fields.mapping("tags")
    if not all(is_tag(tag) and type(has) is bool for tag, has in tags.items()):
        refuse(name, "`tags` does not map each tag to true or false")
    note = NoteRecord(
        uid=fields.hexadecimal("uid", 32),
        number=fields.integer("number", high=MAX_NOTE_NUMBER),
        id=fields.hexadecimal("id", 16),
        metadata=fields.mapping("metadata"),
        tags=tags,
    )
    if note.name != name:
        refuse(name, f"the name is wrong: it is the note {note.name}")
    return note


def seal(body: dict[str, Any]) -> bytes:
    """Return the bytes of a record: a line with length and digest, then `body` as JSON."""
    text = json.dumps(body, ensure_ascii=False)
    if len(text) <= _INDENTED_CHARS:
        text = json.dumps(body, indent=1, ensure_ascii=False)
    text += "\n"
    content = text.encode("utf-8", "surrogatepass")
    header = {"penstock": FORMAT_VERSION, "length": len(content), "sha256": digest(content)}
    return json.dumps(header).encode("ascii") + b"\n" + content


def unseal(data: bytes, name: str) -> Any:
    """Return the body of a record of that name.

    Raises:
        FormatError: The record is damaged, of an unknown version, or requires a feature that
            this release does not know.
    """
    end = data.find(b"\n", 0, _HEADER_LIMIT_BYTES)
    if end < 0:
        refuse(name, "has no first line")
    header = load_json(data[:end], name)
    version = header.get("penstock") if type(header) is dict else None
    if type(version) is not int:
        refuse(name, "is not a record of Penstock")
    if version != FORMAT_VERSION:
        refuse(
            name,
            f"is of format version {version}; this Penstock reads version {FORMAT_VERSION}:"
            " read it with the release that wrote it, or a later one",
        )
    fields = Fields(header, name, ("penstock", "length", "sha256"))
    content = data[end + 1 :]
    length = fields.integer("length")
    if len(content) != length:
        refuse(name, f"has {len(content)} bytes after its first line instead of {length}")
    if digest(content) != fields.hexadecimal("sha256", 64):
        refuse(name, "its sha256 is not the one in its first line: it is damaged")
    return without_features(load_json(content, name), name)


def _index_entry(value: object, uid: str, name: str) -> IndexEntry:
    where = f"{name}: index"
    fields = Fields(value, where, ("name", "length", "head_length", "head_sha256"))
    if fields.value("name") != index_name(uid):
        refuse(where, f"its name is not {index_name(uid)}")
    length = fields.integer("length")
    head_length = fields.integer("head_length", high=min(length, MAX_INDEX_HEAD_BYTES))
    return IndexEntry(index_name(uid), length, head_length, fields.hexadecimal("head_sha256", 64))


def _part_entries(fields: Fields, uid: str, name: str) -> tuple[PartEntry, ...]:
    world_size = fields.integer("world_size")
    rows = fields.items("parts")
    if not 0 < len(rows) <= min(world_size, MAX_LISTED_PARTS):
        refuse(
            name,
            f"lists {len(rows)} parts of {world_size} ranks, not 1 to "
            f"{min(world_size, MAX_LISTED_PARTS)}",
        )
    entries = tuple(_part_entry(row, f"{name}: part {n}") for n, row in enumerate(rows))
    ranks = [_rank_of(entry.name, uid, name) for entry in entries]
    if ranks != sorted(set(ranks)) or ranks[-1] >= world_size:
        refuse(
            name,
            "its parts must be in ascending order of rank, one per rank, with ranks below the "
            f"world size {world_size}",
        )
    return entries


def _rank_of(part: str, uid: str, name: str) -> int:
    match = _PART.fullmatch(part)
    rank = int(match[1]) if match else 0
    if part_name(uid, rank) != part:
        refuse(name, f"a part has the wrong name {part!r}")
    return rank


def _many_parts(fields: Fields, name: str) -> ManyParts:
    where = f"{name}: parts"
    many = Fields(fields.value("parts"), where, ("count", "length"))
    high = fields.integer("world_size")
    return ManyParts(
        many.integer("count", low=MAX_LISTED_PARTS + 1, high=high), many.integer("length")
    )


def _part_entry(value: object, where: str) -> PartEntry:
    fields = Fields(value, where, ("name", "length", "head_length", "head_sha256"))
    length = fields.integer("length")
    head_length = fields.integer("head_length", high=min(length, MAX_STORED_FRAME_BYTES))
    return PartEntry(
        fields.text("name"), length, head_length, fields.hexadecimal("head_sha256", 64)
    )


def _base(value: object, uid: str, name: str) -> BaseEntry | None:
    if value is None:
        return None
    where = f"{name}: base"
    fields = Fields(value, where, ("uid", "step", "age"))
    base = fields.hexadecimal("uid", 32)
    if base == uid:
        refuse(where, "is the checkpoint itself")
    return BaseEntry(base, fields.integer("step"), fields.integer("age", low=1))


def _compacts(fields: Fields, uid: str, name: str) -> str:
    compacted = fields.text("compacts")
    if compacted and (compacted == uid or not is_hex(compacted, 32)):
        refuse(name, "`compacts` is not the uid of another save")
    return compacted


def _mapping_to(kind: type[T], what: str, fields: Fields, key: str, name: str) -> dict[str, T]:
    mapping = fields.mapping(key)
    if any(type(value) is not kind for value in mapping.values()):
        refuse(name, f"{key} does not map names to {what}")
    return mapping


def read_blobs(rows: Sequence[Any], where: str) -> Iterator[BlobRecord]:
    """Read and validate a list of blobs, each `[name, length]`.

    Raises:
        FormatError: An entry is not a blob, or a blob is listed twice.
    """
    seen: set[str] = set()
    for row in rows:
        fields = Fields.of_row(row, where, _BLOB_KEYS)
        blob = fields.text("name")
        if blob_uid(blob) is None:
            refuse(where, f"not the name of a blob: {blob!r}")
        if blob in seen:
            refuse(where, f"a blob is listed twice: {blob!r}")
        seen.add(blob)
        yield BlobRecord(blob, fields.integer("length"))


def _rows(blobs: Sequence[BlobRecord]) -> list[list[Any]]:
    return [[blob.name, blob.length] for blob in blobs]


def _many_borrowed(fields: Fields, index: IndexEntry, uid: str, name: str) -> BorrowedTable:
    where = f"{name}: borrowed"
    table = Fields(fields.value("borrowed"), where, ("count", "length", "sha256", "saves"))
    saves = table.mapping("saves")
    if not saves or not all(is_hex(save, 32) for save in saves) or uid in saves:
        refuse(where, "`saves` has a key that is not the uid of another save")
    if list(saves) != sorted(saves):
        refuse(where, "saves are not ascending")
    sizes = Fields(saves, where, tuple(saves))
    return BorrowedTable(
        table.integer("count", low=MAX_LISTED_BORROWED + 1),
        table.integer("length", high=min(index.length - index.head_length, RECORD_LIMIT_BYTES)),
        table.hexadecimal("sha256", 64),
        {save: sizes.integer(save) for save in saves},
    )


def _borrowed(rows: Sequence[Any], uid: str, name: str) -> tuple[BlobRecord, ...]:
    blobs = tuple(read_blobs(rows, f"{name}: borrowed"))
    if any(blob_uid(blob.name) == uid for blob in blobs):
        refuse(name, "`borrowed` has a blob of the save itself")
    if list(blobs) != sorted(blobs, key=lambda blob: blob.name):
        refuse(name, "borrowed is not ascending")
    return blobs


def _references(fields: Fields, uid: str, name: str) -> tuple[str, ...]:
    references = check_list(fields.value("references"), f"{name}: references")
    if not all(is_hex(r, 32) for r in references) or uid in references:
        refuse(name, "references are not uids of other saves")
    if references != sorted(set(references)):
        refuse(name, "references are not ascending")
    return tuple(references)


def _time(fields: Fields, key: str, name: str) -> str:
    text = fields.text(key)
    if _TIME.fullmatch(text) is None or not _is_in_calendar(text):
        refuse(name, f"{key} is not a time such as 2026-01-31T23:59:59Z")
    return text


def _is_in_calendar(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True

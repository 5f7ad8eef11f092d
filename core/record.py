"""Bytes of commit record and intent: one line that binds, then readable JSON. Sans-IO."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from penstock.core.compressed import digest
from penstock.core.errors import ConfigError
from penstock.core.fields import Fields, check_list, is_hex, load_json, refuse
from penstock.core.manifest import (
    FORMAT_VERSION,
    CommitRecord,
    IndexEntry,
    IntentRecord,
    PartEntry,
    commit_name,
    index_name,
    intent_name,
    part_name,
)

RECORD_LIMIT_BYTES = 64 << 20
"""Larger commit records and intents are refused unread."""

METADATA_LIMIT_BYTES = 16 << 20

_HEADER_LIMIT_BYTES = 256
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")
_COMMIT_KEYS = (
    "uid", "step", "generation", "created", "world_size", "objects", "bytes_raw", "bytes_stored",
    "index", "parts", "codecs", "providers", "references", "metadata", "penstock", "engine",
)  # fmt: skip
_INTENT_KEYS = ("uid", "step", "references", "host", "pid", "started", "refreshed")
_MAX_WORLD_SIZE = 1 << 24


def check_metadata(metadata: object) -> dict[str, Any]:
    """The user's metadata as it will be read back (tuples become lists, keys strings).

    Raises:
        ConfigError: It is not JSON, or larger than 16 MiB.
    """
    if not isinstance(metadata, Mapping):
        msg = f"metadata is a {type(metadata).__name__}: pass a dict"
        raise ConfigError(msg)
    try:
        text = json.dumps(dict(metadata))
        result = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        found = _foreign(dict(metadata), "metadata") if isinstance(error, TypeError) else None
        if found is not None:
            raise ConfigError(found) from error
        msg = f"metadata cannot be stored as JSON: {error}; pass plain dicts, lists, text, numbers"
        raise ConfigError(msg) from error
    if len(text) > METADATA_LIMIT_BYTES or type(result) is not dict:
        msg = f"metadata is {len(text)} bytes of JSON; at most {METADATA_LIMIT_BYTES} are stored"
        raise ConfigError(msg)
    return result


def _foreign(value: object, place: str) -> str | None:
    """Where the first value stands that JSON does not know, and what to pass instead."""
    if value is None or isinstance(value, str | int | float):
        return None
    if isinstance(value, dict):
        items = [(f"{place}[{key!r}]", child) for key, child in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{place}[{number}]", child) for number, child in enumerate(value)]
    else:
        kind = type(value)
        what = f"{place} is a {kind.__module__}.{kind.__qualname__}".replace(" builtins.", " ")
        if callable(getattr(value, "item", None)):  # tensors and numpy scalars
            return f"{what}: pass .item(), or .tolist() if it has several elements"
        return f"{what}: metadata is stored as JSON; pass plain dicts, lists, text, numbers"
    return next(filter(None, (_foreign(child, where) for where, child in items)), None)


def encode_commit(record: CommitRecord) -> bytes:
    """The bytes of a commit record.

    Raises:
        FormatError: The record is not one that `decode_commit` would take.
    """
    body = asdict(record)
    data = _seal({key: body[key] for key in _COMMIT_KEYS})
    decode_commit(data, commit_name(record.step, record.generation))
    return data


def decode_commit(data: bytes, name: str) -> CommitRecord:
    """Read and validate a commit record.

    Args:
        data: The whole record.
        name: Its name, which has to agree with its step and generation.

    Raises:
        FormatError: Damaged, of an unknown version, or not the record of that name.
    """
    fields = Fields(_open(data, name), name, _COMMIT_KEYS)
    uid = fields.hexadecimal("uid", 32)
    step = fields.integer("step")
    generation = fields.integer("generation")
    if commit_name(step, generation) != name:
        refuse(name, f"is the record of step {step}, generation {generation}")
    world_size = fields.integer("world_size", low=1, high=_MAX_WORLD_SIZE)
    return CommitRecord(
        uid=uid,
        step=step,
        generation=generation,
        created=_time(fields, "created", name),
        world_size=world_size,
        index=_index_entry(fields.value("index"), uid, name),
        parts=tuple(
            _part_entry(entry, part_name(uid, rank), name)
            for rank, entry in enumerate(fields.items("parts", count=world_size))
        ),
        objects=fields.integer("objects"),
        bytes_raw=fields.integer("bytes_raw"),
        bytes_stored=fields.integer("bytes_stored"),
        codecs=_versions(fields, "codecs", name),
        providers=_versions(fields, "providers", name),
        references=_references(fields, uid, name),
        metadata=fields.mapping("metadata"),
        penstock=fields.text("penstock"),
        engine=fields.text("engine"),
    )


def encode_intent(record: IntentRecord) -> bytes:
    """The bytes of an intent.

    Raises:
        FormatError: The record is not one that `decode_intent` would take.
    """
    data = _seal(asdict(record))
    decode_intent(data, intent_name(record.uid))
    return data


def decode_intent(data: bytes, name: str) -> IntentRecord:
    """Read and validate an intent.

    Raises:
        FormatError: Damaged, of an unknown version, or not the record of that name.
    """
    fields = Fields(_open(data, name), name, _INTENT_KEYS)
    uid = fields.hexadecimal("uid", 32)
    if intent_name(uid) != name:
        refuse(name, f"is the intent of {uid}")
    return IntentRecord(
        uid=uid,
        step=fields.integer("step"),
        references=_references(fields, uid, name),
        host=fields.text("host"),
        pid=fields.integer("pid"),
        started=_time(fields, "started", name),
        refreshed=_time(fields, "refreshed", name),
    )


def _seal(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, indent=1, ensure_ascii=False) + "\n"
    content = text.encode("utf-8", "surrogatepass")
    header = {"penstock": FORMAT_VERSION, "length": len(content), "sha256": digest(content)}
    return json.dumps(header).encode("ascii") + b"\n" + content


def _open(data: bytes, name: str) -> Any:
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
        refuse(name, f"has {len(content)} bytes behind its first line instead of {length}")
    if digest(content) != fields.hexadecimal("sha256", 64):
        refuse(name, "its sha256 is not the one in its first line: it is damaged")
    return load_json(content, name)


def _index_entry(value: object, uid: str, name: str) -> IndexEntry:
    where = f"{name}: index"
    fields = Fields(value, where, ("name", "length", "sha256"))
    if fields.value("name") != index_name(uid):
        refuse(where, f"is not {index_name(uid)}")
    return IndexEntry(index_name(uid), fields.integer("length"), fields.hexadecimal("sha256", 64))


def _part_entry(value: object, expected: str, name: str) -> PartEntry:
    where = f"{name}: part {expected}"
    fields = Fields(value, where, ("name", "length", "head_length", "head_sha256"))
    if fields.value("name") != expected:
        refuse(where, "is named otherwise")
    length = fields.integer("length")
    head_length = fields.integer("head_length", high=length)
    return PartEntry(expected, length, head_length, fields.hexadecimal("head_sha256", 64))


def _versions(fields: Fields, key: str, name: str) -> dict[str, int]:
    versions = fields.mapping(key)
    if any(type(version) is not int for version in versions.values()):
        refuse(name, f"{key} does not map names to versions")
    return versions


def _references(fields: Fields, uid: str, name: str) -> tuple[str, ...]:
    references = check_list(fields.value("references"), f"{name}: references")
    if not all(is_hex(r, 32) for r in references) or uid in references:
        refuse(name, "references are not uids of others")
    if references != sorted(set(references)):
        refuse(name, "references are not ascending")
    return tuple(references)


def _time(fields: Fields, key: str, name: str) -> str:
    text = fields.text(key)
    if _TIME.fullmatch(text) is None:
        refuse(name, f"{key} is not a time such as 2026-01-31T23:59:59Z")
    return text

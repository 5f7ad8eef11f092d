"""Bytes of a note: framed like a commit record. Sans-IO."""

from __future__ import annotations

import re
from dataclasses import asdict

from penstock.core.format.commit_record import seal, unseal
from penstock.core.format.records import NoteRecord
from penstock.core.format.strict_json import Fields, refuse
from penstock.core.limits import NOTE_LIMIT_BYTES

MAX_NUMBER = 99_999_999
"""The highest number of a note: names have eight digits, so that they sort."""

_KEYS = ("uid", "number", "id", "metadata", "tags")
_TAG = re.compile(r"[A-Za-z0-9._-]{1,64}")


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
        refuse(name, f"has {len(data)} bytes, of {NOTE_LIMIT_BYTES} that a reader takes")
    fields = Fields(unseal(data, name), name, _KEYS)
    tags = fields.mapping("tags")
    if not all(is_tag(tag) and type(has) is bool for tag, has in tags.items()):
        refuse(name, "tags does not map tags to true or false")
    note = NoteRecord(
        uid=fields.hexadecimal("uid", 32),
        number=fields.integer("number", high=MAX_NUMBER),
        id=fields.hexadecimal("id", 16),
        metadata=fields.mapping("metadata"),
        tags=tags,
    )
    if note.name != name:
        refuse(name, f"is the note {note.name}")
    return note

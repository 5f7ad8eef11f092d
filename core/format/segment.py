"""Encodes and decodes a log segment: a sequence of entries, each a checkpoint. Sans-IO.

Tested in `tests/core/format/test_segment.py`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import xxhash

from penstock.core.format.records import data_uid, is_uid
from penstock.core.format.strict_json import check_list, dump_json, load_json, refuse
from penstock.core.limits import MAX_INT
from penstock.core.types import PAGE_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.core.types import Buffer

HEADER_BYTES = 128
MAX_DIRECTORY_BYTES = 1 << 20
"""Maximum bytes of the directory, which lists the files of an entry."""

_MAGIC = b"penstlog"
_VERSION = 1
# Magic, version, rank, world size, bytes of the directory; step, bytes of the payload; base uid,
# session, digest of the payload, digest of the previous header.
_FIELDS = struct.Struct("<8s4I2Q16s8s16s16s")
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """The header of an entry.

    Attributes:
        base: The uid of the checkpoint that the log continues.
        rank: The rank that logged.
        world_size: Number of ranks.
        step: The step after which the entry was made.
        session: 16 hex digits that the entries of all ranks between two restores have in common.
        directory_bytes: The bytes of the directory, at the beginning of the payload.
        payload_bytes: All bytes of the payload.
        payload_digest: xxh3-128 of the payload.
        previous: The digest of the previous header; zeros in the first entry after the base.
        digest: xxh3-128 of this header.
    """

    base: str
    rank: int
    world_size: int
    step: int
    session: str
    directory_bytes: int
    payload_bytes: int
    payload_digest: bytes
    previous: bytes
    digest: bytes

    @property
    def stored_bytes(self) -> int:
        """The bytes from this header to the next. Headers begin on pages."""
        return align_up(HEADER_BYTES + self.payload_bytes, PAGE_BYTES)


FIRST = bytes(_DIGEST_BYTES)
"""`previous` of the first entry after a base."""


NO_SESSION = bytes(8).hex()


def encode_entry(
    files: Mapping[str, Sequence[Buffer]],
    *,
    base: str,
    rank: int,
    world_size: int,
    step: int,
    session: str = NO_SESSION,
    previous: bytes,
) -> tuple[EntryHeader, list[Buffer]]:
    """Return the header of an entry, and the buffers to store, one after the other.

    Args:
        files: The buffers of each file of the entry's checkpoint, by name.
        base: See `EntryHeader`.
        rank: See `EntryHeader`.
        world_size: See `EntryHeader`.
        step: See `EntryHeader`.
        session: See `EntryHeader`.
        previous: See `EntryHeader`.
    """
    directory = dump_json([[name, sum(map(len, parts))] for name, parts in files.items()])
    payload = [directory, *(part for parts in files.values() for part in parts)]
    digest = xxhash.xxh3_128()
    for part in payload:
        digest.update(part)
    header, start = _sealed(EntryHeader(
        base, rank, world_size, step, session,
        len(directory), sum(map(len, payload)), digest.digest(), previous, b"",
    ))  # fmt: skip
    return header, [start, *payload]


def moved_header(header: EntryHeader, base: str, previous: bytes) -> tuple[EntryHeader, bytes]:
    """Return a header for the same payload in the log of another checkpoint, and its encoded form.

    Args:
        header: The header.
        base: The uid of the other checkpoint, which has the same state.
        previous: The digest of the previous header in that log.
    """
    return _sealed(replace(header, base=base, previous=previous))


def _sealed(header: EntryHeader) -> tuple[EntryHeader, bytes]:
    fields = _FIELDS.pack(
        _MAGIC, _VERSION, header.rank, header.world_size, header.directory_bytes, header.step,
        header.payload_bytes, bytes.fromhex(header.base), bytes.fromhex(header.session),
        header.payload_digest, header.previous,
    )  # fmt: skip
    own = xxhash.xxh3_128_digest(fields)
    return replace(header, digest=own), (fields + own).ljust(HEADER_BYTES, b"\0")


def decode_header(data: bytes, name: str) -> EntryHeader | None:
    """Decode a header; None if the log ends here, cleanly or by a torn write.

    Args:
        data: `HEADER_BYTES` of a segment, or fewer at its end.
        name: Name of the segment, for messages.

    Raises:
        FormatError: The header is whole, but of an unknown version, or beyond the limits of a log.
    """
    end = _FIELDS.size + _DIGEST_BYTES
    if len(data) < HEADER_BYTES or xxhash.xxh3_128_digest(data[: _FIELDS.size]) != bytes(
        data[_FIELDS.size : end]
    ):
        return None
    magic, version, rank, world_size, *fields = _FIELDS.unpack_from(data)
    directory, step, size, base, session, digest, previous = fields
    if magic != _MAGIC:
        return None
    if version != _VERSION:
        refuse(
            name,
            f"has log version {version}, which this release of Penstock cannot read: use a newer "
            "release",
        )
    if max(step, size) > MAX_INT or directory > min(size, MAX_DIRECTORY_BYTES):
        refuse(name, "has an entry beyond the limits of a log")
    own = bytes(data[_FIELDS.size : end])
    return EntryHeader(
        base.hex(), rank, world_size, step, session.hex(), directory, size, digest, previous, own
    )


def decode_directory(data: bytes, header: EntryHeader, name: str) -> dict[str, tuple[int, int]]:
    """Return the offset of each file of an entry in the payload, and the file's length, by name.

    Raises:
        FormatError: The directory does not describe the payload.
    """
    files: dict[str, tuple[int, int]] = {}
    at = header.directory_bytes
    for row in check_list(load_json(data, name), name):
        if type(row) is not list or len(row) != 2 or type(row[0]) is not str:  # noqa: PLR2004 - name and length
            refuse(name, "its directory is not a list of names and lengths")
        file, length = row
        if type(length) is not int or length < 0 or file in files:
            refuse(name, f"its directory has a wrong length, or lists {file!r} twice")
        files[file] = at, length
        at += length
    if at != header.payload_bytes:
        refuse(
            name,
            f"its directory and files have {at} bytes, but its payload has {header.payload_bytes}",
        )
    return files


def is_whole(pieces: Iterable[bytes | memoryview], header: EntryHeader) -> bool:
    """Return whether `pieces`, one after the other, are the payload of an entry."""
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.digest() == header.payload_digest


def segment_name(base: str, rank: int, number: int) -> str:
    """Return the name of a segment. It is below the base's data, and is deleted with that data."""
    assert is_uid(base)
    return f"{log_prefix(base, rank)}{number:08}.log"


def segment_number(name: str) -> int:
    """Return the number in the name of a segment; -1 for other names."""
    number = name.removesuffix(".log").rpartition("-")[2]
    return int(number) if number.isascii() and number.isdigit() else -1


def uid_of_segment(name: str) -> str | None:
    """Return the uid of the checkpoint that a segment continues; None for other names."""
    uid = data_uid(name)
    return uid if uid is not None and name.startswith(log_prefix(uid)) else None


def log_prefix(base: str, rank: int | None = None) -> str:
    """Return the name prefix of the segments of a rank, or of all ranks."""
    return f"data/{base}/log/" + ("" if rank is None else f"{rank:05}-")

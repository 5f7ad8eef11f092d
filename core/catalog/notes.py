"""Notes: metadata and tags that are added to a checkpoint after its commit.

Notes never change, and each has its own name, so writers and copies need no coordination: a reader
merges the notes that it finds in all places of the checkpoint. Notes are not part of a checkpoint.
Without the checkpoint's commit record they mean nothing, and a damaged note damages nothing else.
"""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.core.catalog.survey import is_listed, is_whole, places_of, unreadable
from penstock.core.errors import BlobNotFoundError, CheckpointGoneError, ConfigError, DamagedError
from penstock.core.format.commit_record import (
    MAX_NOTE_NUMBER,
    decode_note,
    encode_note,
    is_tag,
)
from penstock.core.format.records import (
    NOTES_PREFIX,
    NoteRecord,
    note_number,
    notes_origin,
    notes_prefix,
)
from penstock.core.limits import MAX_NOTES, NOTE_LIMIT_BYTES
from penstock.core.types import show_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.format.records import CommitRecord
    from penstock.core.types import BlobInfo

log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class Notes:
    """The merged content of a checkpoint's commit record and its readable notes.

    Attributes:
        metadata: The user's metadata, with the latest value of each key.
        tags: The tags, ascending.
        damaged: By name, the reason why a note is unreadable.
    """

    metadata: dict[str, Any]
    tags: tuple[str, ...] = ()
    damaged: dict[str, DamagedError] = field(default_factory=dict)


class NotesOfRun:
    """The notes in some places, from one listing of each place."""

    def __init__(self, places: Iterable[Backend], prefix: str = NOTES_PREFIX) -> None:
        """List the notes whose names begin with `prefix`, without reading them.

        Raises:
            StorageError: A place does not answer.
        """
        self._found: defaultdict[str, dict[str, list[Backend]]] = defaultdict(dict)
        for place in places:
            for info in place.list(prefix):
                if origin := notes_origin(info.name):
                    self._found[origin].setdefault(info.name, []).append(place)

    @classmethod
    def of(cls, backend: Backend, record: CommitRecord) -> NotesOfRun:
        """List the notes on one checkpoint, in all places of a run."""
        return cls(places_of(backend), notes_prefix(record.origin))

    def names(self, record: CommitRecord) -> dict[str, list[Backend]]:
        """Return, in order, the names of a checkpoint's notes, with the places that list them.

        Some names may belong to files that are not notes.
        """
        return dict(sorted(self._found.get(record.origin, {}).items()))

    def read(self, record: CommitRecord, *, warn: bool = True) -> Notes:
        """Read all notes on a checkpoint, each from the first place that has it undamaged.

        Args:
            record: The commit record of the checkpoint.
            warn: Whether to log unreadable notes.

        Raises:
            StorageError: A place does not answer.
        """
        metadata, tags, damaged = dict(record.metadata), dict[str, bool](), {}
        for name, places in self.names(record).items():
            try:
                note = _read(name, places)
            except DamagedError as error:
                damaged[name] = error
                if warn:
                    log.warning("step %d: a note is ignored: %s", record.step, str(error))
                continue
            if note is not None:
                metadata |= note.metadata
                tags |= note.tags
        return Notes(metadata, tuple(sorted(tag for tag, has in tags.items() if has)), damaged)


def check_tag(tag: object) -> str:
    """Return `tag` if it is valid.

    Raises:
        ConfigError: It is not a valid tag.
    """
    if not is_tag(tag):
        msg = f"{show_value(tag)} is not a tag: use 1 to 64 of A-Z a-z 0-9 . _ -"
        raise ConfigError(msg)
    return str(tag)


def write_note(
    backend: Backend,
    record: CommitRecord,
    metadata: Mapping[str, Any],
    tags: Mapping[str, bool],
) -> str:
    """Publish a note on a checkpoint in each place that has it, the fastest first.

    A copy to a slower place carries notes over after its commit. Because of this order, it then
    finds this note in the faster place.

    Returns:
        The name of the note.

    Raises:
        ConfigError: The note would be too long, or there are too many notes on the checkpoint.
        CheckpointGoneError: No place has the checkpoint any more.
        StorageError: A place failed; it may or may not have the note.
    """
    names = NotesOfRun.of(backend, record).names(record)
    if len(names) >= MAX_NOTES:
        msg = f"step {record.step} already has {len(names)} notes: no more can be added"
        raise ConfigError(msg)
    number = min(max(map(note_number, names), default=0) + 1, MAX_NOTE_NUMBER)
    note = NoteRecord(record.origin, number, secrets.token_hex(8), dict(metadata), dict(tags))
    try:
        data = encode_note(note)
    except DamagedError as error:
        msg = f"step {record.step}: no reader would accept this note: {error}"
        raise ConfigError(msg) from error
    places = places_of(backend)
    having: list[Backend] = []
    # Repeated until no place is new: a copy may have carried the notes over before this note was
    # published, and may have committed since.
    while new := [p for p in places if p not in having and is_whole(p, record)]:
        for place in new:
            place.publish(note.name, data)
        having += new
    if not having:
        raise gone(record, backend)
    return note.name


def gone(record: CommitRecord, backend: Backend) -> CheckpointGoneError:
    """Return the error for a checkpoint that is deleted while a note is added to it."""
    msg = (
        f"nothing was added to the checkpoint of step {record.step} on {backend.url}: it was "
        "deleted or overwritten meanwhile, or is about to be deleted"
    )
    return CheckpointGoneError(msg)


def carry_notes(
    source: Backend, target: Backend, record: CommitRecord, *, origin: str | None = None
) -> None:
    """Copy the notes on a checkpoint to a place that lacks them.

    Copies damaged notes unchanged, unless they are too long, so that readers of that place see the
    damage too.

    Args:
        source: The place, or the run, that has the notes.
        target: The place to copy them to.
        record: The commit record of the checkpoint.
        origin: The origin of the copy; default: that of `record`.

    Raises:
        StorageError: A place failed.
    """
    own, to = notes_prefix(record.origin), notes_prefix(origin or record.origin)
    there = {info.name for info in target.list(to)}
    for name, places in NotesOfRun.of(source, record).names(record).items():
        copied = to + name.removeprefix(own)
        if copied in there:
            continue
        try:
            note = _read(name, places)
            if note is not None:
                target.publish(copied, encode_note(replace(note, uid=origin or record.origin)))
        except DamagedError as error:
            log.warning("a damaged note is copied to %s unchanged: %s", target.url, str(error))
            with suppress(DamagedError, BlobNotFoundError):  # too long, or not a file
                data = places[0].read_record(name, limit_bytes=NOTE_LIMIT_BYTES)
                target.publish(copied, data)


def delete_notes(backend: Backend, origins: Iterable[str]) -> None:
    """Delete all notes on checkpoints with these origins, durably."""
    for origin in origins:
        if names := [info.name for info in backend.list(notes_prefix(origin))]:
            backend.delete(names)


def notes_by_origin(backend: Backend) -> dict[str, list[BlobInfo]]:
    """List all notes in one place, by origin."""
    found: dict[str, list[BlobInfo]] = defaultdict(list)
    for info in backend.list(NOTES_PREFIX):
        if origin := notes_origin(info.name):
            found[origin].append(info)
    return dict(found)


def _read(name: str, places: Sequence[Backend]) -> NoteRecord | None:
    """Read a note from the first place that has it undamaged; None if it was deleted meanwhile.

    Raises:
        DamagedError: The note is damaged in every place that has it.
    """
    damage: DamagedError | None = None
    for place in places:
        try:
            return decode_note(place.read_record(name, limit_bytes=NOTE_LIMIT_BYTES), name)
        except BlobNotFoundError:
            if is_listed(place, name):
                damage = damage or unreadable(place, name)
        except DamagedError as error:
            damage = damage or error
    if damage is not None:
        raise damage
    return None

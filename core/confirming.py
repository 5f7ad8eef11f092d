"""What a place has of a checkpoint that was copied there: whole or not, durable, damaged."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.core.copy_claim import claim_name
from penstock.core.copy_source import CopySource
from penstock.core.copy_stream import BlobMover, Calls, Transfer
from penstock.core.errors import CheckpointGoneError, DamagedError, FormatError
from penstock.core.manifest import commit_name, data_prefix, intent_name
from penstock.core.record import encode_commit
from penstock.core.survey import delete_records, is_listed, is_whole
from penstock.core.types import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.core.abc import Backend
    from penstock.core.errors import StorageError
    from penstock.core.manifest import CommitRecord, IndexEntry, PartEntry
    from penstock.core.types import ByteRange
    from penstock.core.workers import Workers

log = logging.getLogger("penstock")


def confirmed(
    target: Backend, record: CommitRecord, *, first: Callable[[], None] = lambda: None
) -> bool:
    """Whether a checkpoint is whole and durable at the target, of which it was not known.

    Of a record that is there whose publisher never had his answer nobody knows that: its folder
    may not have been synced, or its data may have been in a root that was replaced. So it is
    published once more, if the claim of its copy says so: one that came back as an answer to
    nobody could replace what was saved at that step since. One without data is deleted, once
    `first` has not raised: what is left of it may be all that there is.

    Raises:
        StorageError: The target does not answer.
    """
    if not is_whole(target, record):
        return False
    name = commit_name(record.step, record.generation)
    sizes = {info.name: info.size_bytes for info in target.list(data_prefix(record.uid))}
    if _has_data(target, record, sizes):
        if claim_name(record.uid) in sizes:
            target.publish(name, encode_commit(record))
            target.delete([claim_name(record.uid)])  # it is known now
        retract(target, record)  # if it was deleted at this moment
        return is_whole(target, record)
    first()
    log.warning("%s on %s has lost its data, and is deleted there", name, target.url)
    delete_records(target, [name], uids={name: record.uid})
    return False


def _has_data(target: Backend, record: CommitRecord, sizes: Mapping[str, int]) -> bool:
    blobs = f"{data_prefix(record.uid)}blobs/"
    named: list[PartEntry | IndexEntry] = [*record.parts, record.index]
    if intent_name(record.uid) not in sizes:
        return False
    if any(sizes.get(entry.name) != entry.length for entry in named):
        return False
    stored = sum(size for one, size in sizes.items() if one.startswith(blobs))
    if stored == record.bytes_stored:
        return True
    try:  # something may lie beside the blobs that is none: the manifest knows them by name
        CopySource(target, record).read()
    except (DamagedError, CheckpointGoneError):
        return False
    return True


def retract(target: Backend, record: CommitRecord) -> None:
    """Delete at the target the record of a checkpoint that was deleted while it was copied.

    Whoever deletes takes the intent there before the data, and does not look for ever: a record
    without intent came behind him.

    Raises:
        StorageError: The target does not answer.
    """
    intent = intent_name(record.uid)
    if is_whole(target, record) and not is_listed(target, intent):
        name = commit_name(record.step, record.generation)
        delete_records(target, [name], uids={name: record.uid})


def verify_blobs(
    source: Backend,
    record: CommitRecord,
    *,
    workers: Workers,
    on_progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Read all of a checkpoint, and compare every checksum; `on_progress` is called with bytes.

    Raises:
        DamagedError: It is not what was written.
        CheckpointGoneError: It was deleted meanwhile.
        StorageError: The store failed.
    """
    contents = CopySource(source, record)

    def damaged(transfer: Transfer, ranges: list[ByteRange]) -> None:
        raise contents.damage(transfer.blob.name, ranges)

    def missing(transfer: Transfer, error: StorageError) -> None:
        raise contents.missing(FormatError(str(error), [transfer.blob.name])) from error

    mover = BlobMover(
        workers=workers,
        buffer_bytes=64 << 20,
        unit_bytes=max(
            PAGE_BYTES, source.capabilities.offset_alignment, source.capabilities.memory_alignment
        ),
        bytes_per_s=None,
        calls=Calls(
            moved=on_progress,
            sealed=lambda _: None,
            damaged=damaged,
            missing=missing,
            alive=lambda: None,
        ),
    )
    mover.run(Transfer(blob, source, None) for blob in contents.read())

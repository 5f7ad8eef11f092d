"""Verifies a checkpoint at one place: its records, its data, and their durability."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.core.catalog.deletion import delete_records
from penstock.core.catalog.survey import (
    has_files,
    is_listed,
    is_whole,
    read_commit,
    sizes_of,
    survey_records,
)
from penstock.core.copy.copy_source import CopySource
from penstock.core.copy.mover import BlobMover, BlobTransfer, Callbacks
from penstock.core.errors import (
    BlobNotFoundError,
    CheckpointGoneError,
    DamagedError,
    FormatError,
    StepExistsError,
)
from penstock.core.format.commit_record import encode_commit
from penstock.core.format.records import commit_name, intent_name, lease_name
from penstock.core.types import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.core.abc import Backend
    from penstock.core.concurrency.workers import Workers
    from penstock.core.errors import StorageError
    from penstock.core.format.records import CommitRecord
    from penstock.core.types import ByteRange

log = logging.getLogger("penstock")


def confirmed(
    target: Backend, record: CommitRecord, *, first: Callable[[], None] = lambda: None
) -> bool:
    """Make a checkpoint's record durable at the target; return whether the checkpoint is whole.

    A record whose publish got no reply may not be durable: its folder may not have been synced. So
    the record is published again, but only if a lease is left beside its data. Without a lease, the
    request to publish it could arrive late, and replace the record of a later save of that step. If
    the data is missing, for example because the root was replaced, the record is deleted.

    Args:
        target: The place to check.
        record: The commit record of the checkpoint.
        first: Called before a record without data is deleted. It raises to keep the record, since
            the rest of its data may be the only copy.

    Raises:
        StepExistsError: The target's record has the uid of `record`, but names other data.
        StorageError: The target does not answer.
    """
    if not is_whole(target, record):
        return False
    name = commit_name(record.step, record.generation)
    with suppress(BlobNotFoundError):  # deleted at this moment
        check_same_manifest(target, read_commit(target, name), record)
    sizes = sizes_of(target, record)
    if _has_all_data(target, record, sizes):
        if lease_name(record.uid) in sizes:
            target.publish(name, encode_commit(record))
            target.delete([lease_name(record.uid)])  # the record is durable now
        retract(target, record)  # if it was deleted at this moment
        return is_whole(target, record)
    first()
    if not is_whole(target, record):
        return False  # its data was not lost: a deletion under way took it
    log.warning("%s on %s has lost its data, and is deleted there", name, target.url)
    delete_records(target, [name], uids={name: record.uid})
    return False


def has_all_data(target: Backend, record: CommitRecord) -> bool:
    """Return whether the target has the intent and all files of a checkpoint, in full length.

    Reads the manifest if the listing does not suffice, unlike `survey.has_data`.

    Raises:
        StorageError: The target does not answer.
    """
    return _has_all_data(target, record, sizes_of(target, record))


def _has_all_data(target: Backend, record: CommitRecord, sizes: Mapping[str, int]) -> bool:
    if intent_name(record.uid) not in sizes:
        return False
    if has_files(target, record, sizes):
        return True
    try:  # a foreign file may lie beside the blobs: the manifest has their names
        CopySource(target, record).read()
    except (DamagedError, CheckpointGoneError):
        return False
    return True


def check_same_manifest(target: Backend, there: CommitRecord, record: CommitRecord) -> None:
    """Refuse a commit record of the target that has the uid of `record`, but names other data.

    A uid is not secret. A user who can write the source could give a checkpoint the uid of one that
    the target has, and have the target's data replaced as if it were a damaged copy.

    Raises:
        StepExistsError: The records differ; nothing was changed.
    """
    if (there.parts, there.many_parts, there.many_borrowed, there.index) == (
        record.parts,
        record.many_parts,
        record.many_borrowed,
        record.index,
    ):
        return
    msg = (
        f"{target.url} has another checkpoint at step {record.step} with the uid of the one to be "
        f"copied ({record.uid}). No two saves share a uid, so one of the two was tampered with. "
        "Nothing was changed. Check both with `penstock verify`, and delete the wrong one."
    )
    raise StepExistsError(msg)


def check_uid_is_free(place: Backend, record: CommitRecord) -> None:
    """Refuse to write the data of a uid that another checkpoint at that place names.

    Raises:
        StepExistsError: A record of another step names the uid.
        StorageError: The place does not answer.
    """
    records = survey_records(place).records
    named = [n for n, r in records.items() if r.uid == record.uid and r.step != record.step]
    if not named:
        return
    msg = (
        f"{place.url} already has data of uid {record.uid}, and {named[0]} uses it: a copy of step "
        f"{record.step} would replace it. Nothing was changed. No two saves share a uid: were "
        "records of the source changed by hand? `penstock copy` with --codec, --rules or --raw "
        "stores a step under a new uid."
    )
    raise StepExistsError(msg)


def retract(target: Backend, record: CommitRecord) -> None:
    """Delete the target's record of a checkpoint that was deleted while it was copied.

    A committed checkpoint keeps its intent. A deletion deletes the intent before the data, and
    checks for late copies only for a while. So a commit record without an intent was published
    after the deletion.

    Raises:
        StorageError: The target does not answer.
    """
    intent = intent_name(record.uid)
    # In this order: a deletion that begins in between deletes the record first.
    if not is_listed(target, intent) and is_whole(target, record):
        name = commit_name(record.step, record.generation)
        delete_records(target, [name], uids={name: record.uid})


# There are two verifiers, which both compare checksums by `mismatches`. `Checkpoint.verify` decodes
# frames and reports the damage of every object, so it reads frame by frame with a `Loader`. This
# function is a copy without a target: the `BlobMover` verifies bytes as they pass anyway, but its
# pieces cut through frames, so it cannot decode them. A `Loader` would need the records of all
# objects (twice the time and eight times the memory with 100,000 small objects, beside training).
# It also has no rate limit, and does not call `on_look` while the store hangs.
def verify_blobs(
    source: Backend,
    record: CommitRecord,
    *,
    workers: Workers,
    on_progress: Callable[[int], None] = lambda _: None,
    on_look: Callable[[], None] = lambda: None,
    bytes_per_s: float | None = None,
) -> None:
    """Read all bytes of a checkpoint, and compare every checksum of its stored bytes.

    Args:
        source: The place of the checkpoint.
        record: Its commit record.
        workers: The threads that compare checksums.
        on_progress: Called with the number of bytes read; may raise to end the read.
        on_look: Called at least every few seconds, even while the store hangs; may raise too.
        bytes_per_s: Maximum bytes to read per second; None sets no limit.

    Raises:
        DamagedError: The checkpoint is damaged; names the first damaged objects.
        CheckpointGoneError: The checkpoint was deleted meanwhile.
        StorageError: The store failed.
    """
    contents = CopySource(source, record)

    def damaged(transfer: BlobTransfer, ranges: list[ByteRange]) -> None:
        raise contents.damage(transfer.blob.name, ranges)

    def missing(transfer: BlobTransfer, error: StorageError) -> None:
        raise contents.missing(FormatError(str(error), [transfer.blob.name])) from error

    mover = BlobMover(
        workers=workers,
        buffer_bytes=64 << 20,
        unit_bytes=max(
            PAGE_BYTES, source.capabilities.offset_alignment, source.capabilities.memory_alignment
        ),
        bytes_per_s=bytes_per_s,
        calls=Callbacks(
            moved=on_progress,
            sealed=lambda _: None,
            damaged=damaged,
            missing=missing,
            alive=on_look,
        ),
    )
    mover.run(BlobTransfer(blob, source, None) for blob in contents.read())

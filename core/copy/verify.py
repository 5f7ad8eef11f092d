"""What a place has of a checkpoint that was copied there: whole or not, durable, damaged."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.core.catalog.deletion import delete_records
from penstock.core.catalog.survey import is_listed, is_whole, read_commit, survey_run
from penstock.core.copy.copy_source import CopySource
from penstock.core.copy.lease import claim_name
from penstock.core.copy.mover import BlobMover, BlobTransfer, Calls
from penstock.core.errors import (
    BlobNotFoundError,
    CheckpointGoneError,
    DamagedError,
    FormatError,
    StepExistsError,
)
from penstock.core.format.commit_record import encode_commit
from penstock.core.format.records import commit_name, data_prefix, intent_name
from penstock.core.types import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.core.abc import Backend
    from penstock.core.concurrency.workers import Workers
    from penstock.core.errors import StorageError
    from penstock.core.format.records import CommitRecord, IndexEntry, PartEntry
    from penstock.core.types import ByteRange

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
        StepExistsError: The target's record has the uid of `record`, and says something else.
        StorageError: The target does not answer.
    """
    if not is_whole(target, record):
        return False
    name = commit_name(record.step, record.generation)
    with suppress(BlobNotFoundError):  # deleted at this moment
        check_same_manifest(target, read_commit(target, name), record)
    sizes = _sizes(target, record)
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


def has_data(target: Backend, record: CommitRecord) -> bool:
    """Whether everything that a checkpoint is made of is there, with the right lengths.

    Raises:
        StorageError: The target does not answer.
    """
    return _has_data(target, record, _sizes(target, record))


def _sizes(target: Backend, record: CommitRecord) -> dict[str, int]:
    return {info.name: info.size_bytes for info in target.list(data_prefix(record.uid))}


def check_same_manifest(target: Backend, there: CommitRecord, record: CommitRecord) -> None:
    """Refuse a commit record of the target that has our uid, and stands for other data.

    A uid is no secret. Who can write the source could give a checkpoint of his own the uid of one
    that the target has, and have that one taken for a damaged copy of his.

    Raises:
        StepExistsError: They differ; nothing was changed.
    """
    if (there.parts, there.index) == (record.parts, record.index):
        return
    msg = (
        f"{target.url} has another checkpoint at step {record.step}, with the uid of the one to be "
        f"copied ({record.uid}): no two saves have one, so one of the two was tampered with. "
        "Nothing was changed. Look at both with `penstock verify`, and delete the wrong one."
    )
    raise StepExistsError(msg)


def check_uid_is_free(place: Backend, record: CommitRecord) -> None:
    """Refuse to write the data of a uid that something else at that place needs.

    Raises:
        StepExistsError: A record of another step names it, or one or an intent refers to it.
        StorageError: The place does not answer.
    """
    survey = survey_run(place)
    named = [n for n, r in survey.records.items() if r.uid == record.uid and r.step != record.step]
    if not named and record.uid not in survey.references:
        return
    user = named[0] if named else "another checkpoint, or a save under way,"
    msg = (
        f"{place.url} has data of uid {record.uid} already, and {user} uses it: a copy of step "
        f"{record.step} would replace that. Nothing was changed. No two saves have one uid: were "
        "records of the source changed by hand? `penstock copy` with --codec, --rules or --raw "
        "stores a step under a new one."
    )
    raise StepExistsError(msg)


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
    on_look: Callable[[], None] = lambda: None,
    bytes_per_s: float | None = None,
) -> None:
    """Read all of a checkpoint, and compare every checksum.

    Args:
        source: Where it is.
        record: Its commit record.
        workers: Compare checksums.
        on_progress: Called with bytes that were read; what it raises ends this.
        on_look: Called every few seconds at least, also while the store is silent; likewise.
        bytes_per_s: Most that is read per second; None: as fast as it goes.

    Raises:
        DamagedError: It is not what was written.
        CheckpointGoneError: It was deleted meanwhile.
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
        calls=Calls(
            moved=on_progress,
            sealed=lambda _: None,
            damaged=damaged,
            missing=missing,
            alive=on_look,
        ),
    )
    mover.run(BlobTransfer(blob, source, None) for blob in contents.read())

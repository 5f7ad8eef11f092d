"""A survey of a run's records at one moment, and of the data that they need.

A deletion decides whether data is still needed *after* the record that named it is gone. It reads
the records first and the intents second. A saver that borrows blobs publishes its intent first,
with the uids of its base and of all that the base borrows from, and then checks that the record of
the base is still there. So either this survey sees its intent, or the saver sees that the record
is gone. An intent stays until the record of its own uid is deleted, so the survey does not miss a
saver that commits between the two listings.

Tested in `tests/core/catalog/test_catalog.py`.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from penstock.core.errors import (
    BlobNotFoundError,
    BlobTruncatedError,
    DamagedError,
    FormatError,
    StorageError,
)
from penstock.core.foreign import memory_permitting
from penstock.core.format.commit_record import decode_borrowed, decode_commit, decode_intent
from penstock.core.format.records import (
    COMMIT_PREFIX,
    DATA_PREFIX,
    commit_name,
    data_prefix,
    data_uid,
    index_name,
    intent_name,
    parse_commit_name,
    part_name,
)
from penstock.core.format.segment import HEADER_BYTES, decode_header
from penstock.core.limits import RECORD_LIMIT_BYTES
from penstock.core.storage.failover import from_any_tier
from penstock.core.types import ReadRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from penstock.core.abc import Backend
    from penstock.core.format.records import (
        BlobRecord,
        CommitRecord,
        IndexEntry,
        IntentRecord,
        PartEntry,
    )
    from penstock.core.types import BlobInfo

_LOOKS = 5
"""How many times to read a record that is listed but not found."""

Look: TypeAlias = "Callable[[Backend, CommitRecord], bool]"
"""A function that returns whether one place has all data of a checkpoint; see `has_data`."""


@dataclass(slots=True)
class Survey:
    """The records of a run, and the data that they need.

    Attributes:
        records: The commit records by name.
        data: The blobs and records by uid, as listed before the intents were read.
        intents: The intents, by uid, of saves that no commit record names.
        unreadable: The error of each unreadable record, by name; such a record may need any data.
        times: The publish time of each commit record by the store's clock, by name.
    """

    records: dict[str, CommitRecord] = field(default_factory=dict)
    data: dict[str, list[BlobInfo]] = field(default_factory=dict)
    intents: dict[str, IntentRecord] = field(default_factory=dict)
    unreadable: dict[str, DamagedError] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)

    @property
    def named(self) -> set[str]:
        """The uids that a record names."""
        return {record.uid for record in self.records.values()}

    @property
    def used(self) -> set[str]:
        """The uids that a record names, or whose blobs it borrows."""
        return self.named.union(*(record.references for record in self.records.values()))

    @property
    def needed(self) -> set[str]:
        """The uids that a commit record names, or that a record or an intent references."""
        return self.needed_without(())

    def needed_without(self, gone: Collection[str]) -> set[str]:
        """Return `needed` as it will be after the intents of the uids `gone` are deleted."""
        left = [intent for uid, intent in self.intents.items() if uid not in gone]
        return self.used.union(*(intent.references for intent in left))

    def borrowers(self, uid: str) -> set[str]:
        """Return the uids that no record names and whose intents reference `uid`."""
        return {other for other, intent in self.intents.items() if uid in intent.references}

    @property
    def latest(self) -> int | None:
        """The highest step of a readable record; None if there is none."""
        return max((record.step for record in self.records.values()), default=None)


def places_of(backend: Backend) -> list[Backend]:
    """Return the tiers of a backend, the fastest first; the backend itself if it has none."""
    return [tier.backend for tier in backend.tiers] or [backend]


def last_place(backend: Backend) -> Backend:
    """Return the final place of checkpoints: the last tier, or the backend itself."""
    tiers = backend.tiers
    return tiers[-1].backend if tiers else backend


def read_commit(backend: Backend, name: str) -> CommitRecord:
    """Read one commit record, from a tier that has it undamaged.

    Raises:
        BlobNotFoundError: The record does not exist.
        FormatError: The record is unreadable, or of an unknown version.
    """
    return from_any_tier(
        backend,
        name,
        lambda tier: decode_commit(tier.read_record(name, limit_bytes=RECORD_LIMIT_BYTES), name),
    )


def is_whole(backend: Backend, record: CommitRecord) -> bool:
    """Return whether `backend`, usually a single tier, has a readable record of this checkpoint.

    A record of the same step and generation, but with another uid, does not count. Does not look at
    the data: see `has_data`.

    Raises:
        StorageError: `backend` does not answer.
    """
    try:
        return read_commit(backend, commit_name(record.step, record.generation)).uid == record.uid
    except (BlobNotFoundError, DamagedError):
        return False


def has_data(backend: Backend, record: CommitRecord) -> bool:
    """Return whether `backend` lists all files of a checkpoint with the sizes in its record.

    The record has the size of the index, of each part and of each borrowed blob, but only the total
    size of the checkpoint's own blobs. Also returns False if there is a foreign file among the
    blobs, or the table of borrowed blobs is damaged.

    Raises:
        StorageError: `backend` does not answer.
    """
    return has_files(backend, record, sizes_of(backend, record))


def sizes_of(backend: Backend, record: CommitRecord) -> dict[str, int]:
    """Return, by name, the file sizes of a checkpoint and of the saves that it borrows from."""
    return sizes_below(backend, (record.uid, *record.references))


def sizes_below(backend: Backend, uids: Iterable[str]) -> dict[str, int]:
    """Return, by name, the file sizes of some saves in bytes."""
    return {i.name: i.size_bytes for uid in uids for i in backend.list(data_prefix(uid))}


def has_files(backend: Backend, record: CommitRecord, sizes: Mapping[str, int]) -> bool:
    """Return the same as `has_data`, from the result of `sizes_of`."""
    named: list[IndexEntry | PartEntry | BlobRecord] = [record.index, *record.parts]
    blobs = f"{data_prefix(record.uid)}blobs/"
    stored = sum(size for name, size in sizes.items() if name.startswith(blobs))
    if (many := record.many_parts) is not None:
        parts = f"{data_prefix(record.uid)}parts/"
        lengths = [size for name, size in sizes.items() if name.startswith(parts)]
        if (len(lengths), sum(lengths)) != (many.count, many.length):
            return False
    if stored != record.bytes_stored or any(sizes.get(e.name) != e.length for e in named):
        return False
    try:
        borrowed = read_borrowed(backend, record)
    except DamagedError:
        return False
    return all(sizes.get(blob.name) == blob.length for blob in borrowed)


def borrowed_blobs(backend: Backend, record: CommitRecord) -> tuple[BlobRecord, ...]:
    """Return the blobs that a checkpoint borrows, ascending by name, from a tier that lists them.

    Raises:
        DamagedError: The table of these blobs is damaged or missing; names the index.
        StorageError: The store does not answer.
    """
    return from_any_tier(backend, record.index.name, lambda tier: read_borrowed(tier, record))


def read_borrowed(backend: Backend, record: CommitRecord) -> tuple[BlobRecord, ...]:
    """Return the same as `borrowed_blobs`, from one place; reads nothing else of the index."""
    table, index = record.many_borrowed, record.index
    if table is None:
        return record.borrowed
    with memory_permitting(index.name):
        data = bytearray(table.length)
        start = index.length - table.length
        try:
            backend.read([ReadRequest(index.name, start, memoryview(data))])
        except (BlobNotFoundError, BlobTruncatedError) as error:
            msg = f"{index.name} on {backend.url} is missing or truncated"
            raise FormatError(msg, [index.name]) from error
        return decode_borrowed(bytes(data), record)


def missing_borrowed(
    backend: Backend, record: CommitRecord, *, listed_by: Backend | None = None
) -> list[BlobRecord]:
    """Return the borrowed blobs that are missing in one place, or have another length there.

    Args:
        backend: The place.
        record: The checkpoint.
        listed_by: The place whose table lists these blobs; default: `backend`.

    Raises:
        DamagedError: The table of these blobs is damaged or missing.
        StorageError: The place does not answer.
    """
    blobs = borrowed_blobs(listed_by or backend, record)
    sizes = sizes_below(backend, record.references)
    return [blob for blob in blobs if sizes.get(blob.name) != blob.length]


def has(backend: Backend, record: CommitRecord) -> bool:
    """Return the same as `is_whole`, but raise if the record is unreadable.

    Raises:
        DamagedError: The commit record exists but is unreadable.
        StorageError: The tier does not answer.
    """
    found = read_listed(backend, commit_name(record.step, record.generation))
    return found is not None and found.uid == record.uid


def read_listed(backend: Backend, name: str) -> CommitRecord | None:
    """Read a commit record; None if it does not exist.

    Tries again while the record is listed but not found, since the step may have been deleted and
    saved again under the same name.

    Raises:
        DamagedError: The record exists but is unreadable.
        StorageError: The tier does not answer.
    """
    for _ in range(_LOOKS):
        with suppress(BlobNotFoundError):
            return read_commit(backend, name)
        if not is_listed(backend, name):
            return None
    raise unreadable(backend, name)


def records_named(backend: Backend, names: Iterable[str]) -> dict[str, CommitRecord | None]:
    """Return the records with these names, None for damaged records; leave out missing records."""
    records: dict[str, CommitRecord | None] = {}
    for name in names:
        try:
            record = read_listed(backend, name)
        except DamagedError:
            records[name] = None  # its data is left to `prune`, because no record names it
        else:
            if record is not None:
                records[name] = record
    return records


def uids_named(backend: Backend, names: Iterable[str]) -> dict[str, str | None]:
    """Return the uid in each record, None for damaged records; leave out missing records."""
    found = records_named(backend, names)
    return {name: None if record is None else record.uid for name, record in found.items()}


def is_listed(backend: Backend, name: str) -> bool:
    """Return whether the store lists `name`, or a name inside it.

    A record that was not found, but is listed, was replaced by a link, a pipe or a folder. That is
    damage, not a missing checkpoint.
    """
    inside = f"{name}/"
    return any(f"{info.name}/".startswith(inside) for info in backend.list(name))


def unreadable(backend: Backend, name: str) -> FormatError:
    """Return the error for a record that the store lists but does not find."""
    msg = f"{name} on {backend.url} is listed, but is no readable file: is it a link or a folder?"
    return FormatError(msg, [name])


def survey_records(backend: Backend) -> Survey:
    """Read all commit records, and collect the errors of unreadable ones."""
    survey = Survey()
    for info in backend.list(COMMIT_PREFIX):
        try:
            if parse_commit_name(info.name) is None:
                msg = f"{info.name} on {backend.url} is not a commit record's name; move that file"
                raise FormatError(msg, [info.name])
            record = read_listed(backend, info.name)
        except DamagedError as error:
            survey.unreadable[info.name] = error
        else:
            if record is not None:  # else it was deleted after the listing
                survey.records[info.name] = record
                survey.times[info.name] = info.modified_s
    return survey


def survey_run(backend: Backend) -> Survey:
    """Read all commit records, then the intents of all saves that no record names.

    In this order, a save that commits in between is still seen by its intent.
    """
    survey = survey_records(backend)
    survey.data = data_by_uid(backend)
    for uid in sorted(survey.data.keys() - survey.named):
        try:
            intent = read_intent(backend, uid)
        except BlobNotFoundError:
            continue
        except DamagedError as error:
            survey.unreadable[intent_name(uid)] = error
        else:
            survey.intents[uid] = intent
    return survey


def data_by_uid(backend: Backend) -> dict[str, list[BlobInfo]]:
    """List the blobs and records below `data/`, by uid."""
    data: dict[str, list[BlobInfo]] = defaultdict(list)
    for info in backend.list(DATA_PREFIX):
        uid = data_uid(info.name)
        if uid is not None:
            data[uid].append(info)
    return dict(data)


def is_complete(uid: str, blobs: Iterable[BlobInfo]) -> bool:
    """Return whether a save lacks at most its commit record.

    Checks neither the blobs nor the parts of other ranks, since the index is published after them.
    """
    names = {blob.name for blob in blobs}
    return {index_name(uid), part_name(uid, 0), intent_name(uid)} <= names


def unrecorded(
    data: Mapping[str, Iterable[BlobInfo]], intents: Mapping[str, IntentRecord], latest: int | None
) -> dict[str, int]:
    """Return the steps, by uid, of saves after `latest` that lack only their commit record.

    Either the saver of such a save died right before its commit, or the run is a copy in flight
    that gets its records after its data. Other saves are left out: a checkpoint at their step or a
    later step rules out such a copy.

    Args:
        data: The blobs and records by uid.
        intents: The intents, by uid, of saves that no record names.
        latest: The highest step of any record; None if there is no record.
    """
    return {
        uid: intent.step
        for uid, intent in intents.items()
        if (latest is None or intent.step > latest) and is_complete(uid, data.get(uid, ()))
    }


def find_unrecorded(
    backend: Backend,
    records: Iterable[CommitRecord],
    steps: Iterable[int],
    data: Mapping[str, Iterable[BlobInfo]] | None = None,
) -> dict[str, int]:
    """Return the same as `unrecorded` for a caller that has already read the records.

    Reads only the intents of complete saves, which are few.

    Args:
        backend: The place to check.
        records: All readable commit records.
        steps: All listed steps, including those of damaged records.
        data: The result of `data_by_uid`, if the caller has it.
    """
    named = {record.uid for record in records}
    data = data_by_uid(backend) if data is None else data
    data = {uid: blobs for uid, blobs in data.items() if uid not in named}
    intents = {}
    for uid, blobs in data.items():
        if is_complete(uid, blobs):
            with suppress(BlobNotFoundError, DamagedError):
                intents[uid] = read_intent(backend, uid)
    return unrecorded(data, intents, max(steps, default=None))


def read_intent(backend: Backend, uid: str) -> IntentRecord:
    """Read the intent of a save.

    Raises:
        BlobNotFoundError: The intent does not exist.
        FormatError: The intent is unreadable, or of an unknown version.
    """
    name = intent_name(uid)
    return decode_intent(backend.read_record(name, limit_bytes=RECORD_LIMIT_BYTES), name)


def first_logged(backend: Backend, segment: BlobInfo) -> int | None:
    """Return the first step in a segment of a log; None if it has no readable entry."""
    if segment.size_bytes < HEADER_BYTES:
        return None
    data = bytearray(HEADER_BYTES)
    with suppress(FormatError, StorageError):
        backend.read([ReadRequest(segment.name, 0, memoryview(data))])
        header = decode_header(bytes(data), segment.name)
        return None if header is None else header.step
    return None

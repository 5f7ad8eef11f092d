"""What the records of a run say at one moment, and which data they need.

Whether data is still needed is decided *after* the record that named it is gone, and from the
records first and the intents second. A saver that refers to a uid publishes its intent first and
then looks whether a record still names the uid; so either it is seen here, or it sees that the
record is gone. An intent stays as long as the data of its own uid, so no saver can slip through
by committing in between.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.core.errors import BlobNotFoundError, ConfigError, DamagedError, FormatError
from penstock.core.manifest import (
    COMMIT_PREFIX,
    DATA_PREFIX,
    commit_name,
    data_prefix,
    data_uid,
    intent_name,
    parse_commit_name,
)
from penstock.core.record import RECORD_LIMIT_BYTES, decode_commit, decode_intent
from penstock.core.second_copy import from_any_tier

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.manifest import CommitRecord
    from penstock.core.types import BlobInfo

_LANDINGS = 3  # how often deletion looks for copies that came behind it


@dataclass(slots=True)
class Survey:
    """Everything that the records of a run say.

    Attributes:
        records: Commit records by name.
        needed: Uids that a commit record names, or that one or an intent references.
        references: Those of them that one references.
        data: Blobs and records by the uid they belong to, as listed before the intents were read.
        unreadable: Why a record cannot be read, by its name; such a one may need anything.
    """

    records: dict[str, CommitRecord] = field(default_factory=dict)
    needed: set[str] = field(default_factory=set)
    references: set[str] = field(default_factory=set)
    data: dict[str, list[BlobInfo]] = field(default_factory=dict)
    unreadable: dict[str, DamagedError] = field(default_factory=dict)


def last_place(backend: Backend) -> Backend:
    """Where what is in `backend` shall come to rest: itself, or the last of its tiers."""
    tiers = backend.tiers
    return tiers[-1].backend if tiers else backend


def read_commit(
    backend: Backend, name: str, rescued: list[tuple[str, str]] | None = None
) -> CommitRecord:
    """Read one commit record; `rescued` is as for `from_any_tier`.

    Raises:
        BlobNotFoundError: It is not there.
        FormatError: It cannot be read, or is of an unknown version.
    """
    return from_any_tier(
        backend,
        lambda one: decode_commit(one.read_record(name, limit_bytes=RECORD_LIMIT_BYTES), name),
        rescued,
    )


def is_whole(backend: Backend, record: CommitRecord) -> bool:
    """Whether one tier has this very checkpoint.

    Raises:
        StorageError: The tier does not answer.
    """
    try:
        return read_commit(backend, commit_name(record.step, record.generation)).uid == record.uid
    except (BlobNotFoundError, DamagedError):
        return False


def has(backend: Backend, record: CommitRecord) -> bool:
    """As `is_whole`, but of what cannot be read that is said.

    Raises:
        DamagedError: Its commit record is there, and cannot be read.
        StorageError: The tier does not answer.
    """
    name = commit_name(record.step, record.generation)
    try:
        return read_commit(backend, name).uid == record.uid
    except BlobNotFoundError:
        if is_listed(backend, name):
            raise unreadable(backend, name) from None
        return False


def uids_named(backend: Backend, names: Iterable[str]) -> dict[str, str | None]:
    """Whose data each commit record names; None: it is damaged. One that is gone is left out."""
    uids: dict[str, str | None] = {}
    for name in names:
        try:
            uids[name] = read_commit(backend, name).uid
        except BlobNotFoundError:
            if is_listed(backend, name):
                uids[name] = None
        except DamagedError:
            uids[name] = None  # `prune` finds what it named
    return uids


def is_listed(backend: Backend, name: str) -> bool:
    """Whether the store lists `name`, or something inside it, though it could not be read."""
    inside = f"{name}/"
    return any(f"{info.name}/".startswith(inside) for info in backend.list(name))


def unreadable(backend: Backend, name: str) -> FormatError:
    """The error for a record that the store lists, but says is not there."""
    msg = f"{name} on {backend.url} is listed, but is no file that can be read: a link?"
    return FormatError(msg, [name])


def check_same(tiers: Sequence[Tier], steps: Iterable[int]) -> None:
    """Refuse steps at which two tiers have two checkpoints: which one is meant?

    Raises:
        ConfigError: Of a step that is so; says what to do.
    """
    listed = [(tier, [info.name for info in tier.backend.list(COMMIT_PREFIX)]) for tier in tiers]
    for step in steps:
        owners: dict[str, dict[str, str]] = {}
        for tier, names in listed:
            here = [name for name in names if (parse_commit_name(name) or (-1,))[0] == step]
            for name, uid in uids_named(tier.backend, here).items():
                if uid is not None:
                    owners.setdefault(name, {}).setdefault(uid, tier.name)
        for one in owners.values():
            if len(one) > 1:
                msg = (
                    f"step {step} is not the same checkpoint in tiers {' and '.join(one.values())};"
                    " nothing was deleted. Say in which of them to delete it: `penstock delete URL "
                    f"{step} --tier NAME`"
                )
                raise ConfigError(msg)


def survey_records(backend: Backend) -> Survey:
    """Read all commit records."""
    survey = Survey()
    for info in backend.list(COMMIT_PREFIX):
        try:
            if parse_commit_name(info.name) is None:
                msg = f"{info.name} on {backend.url} is no name of a commit record; move it away"
                raise FormatError(msg, [info.name])
            record = survey.records[info.name] = read_commit(backend, info.name)
        except BlobNotFoundError:
            # Deleted since; unless the store goes on listing what it cannot read.
            if is_listed(backend, info.name):
                survey.unreadable[info.name] = unreadable(backend, info.name)
        except DamagedError as error:
            survey.unreadable[info.name] = error
        else:
            survey.needed |= {record.uid, *record.references}
            survey.references.update(record.references)
    return survey


def survey_run(backend: Backend) -> Survey:
    """Read all commit records, then all intents of attempts that no record names."""
    survey = survey_records(backend)
    committed = {record.uid for record in survey.records.values()}
    data: dict[str, list[BlobInfo]] = defaultdict(list)
    for info in backend.list(DATA_PREFIX):
        uid = data_uid(info.name)
        if uid is not None:
            data[uid].append(info)
    survey.data = dict(data)
    for uid in sorted(data.keys() - committed):
        name = intent_name(uid)
        try:
            intent = decode_intent(backend.read_record(name, limit_bytes=RECORD_LIMIT_BYTES), name)
        except BlobNotFoundError:
            continue
        except DamagedError as error:
            survey.unreadable[name] = error
        else:
            survey.needed |= set(intent.references)
            survey.references.update(intent.references)
    return survey


def delete_data(backend: Backend, uid: str, blobs: Iterable[BlobInfo]) -> None:
    """Delete data of an attempt: its intent first, so that its saver sees it must not publish."""
    intent = intent_name(uid)
    backend.delete([intent])
    backend.delete([blob.name for blob in blobs if blob.name != intent])


def delete_records(
    backend: Backend,
    names: Iterable[str],
    *,
    uids: Mapping[str, str | None] | None = None,
    before: Callable[[Collection[str]], None] = lambda _: None,
    failed: Callable[[Collection[str]], None] = lambda _: None,
) -> list[str]:
    """Delete commit records durably, in the given order, then the data that only they needed.

    A record that is another save's by the time its turn comes stays: a step that was deleted can
    be saved again under the same name, and each tier may have another. No store deletes on a
    condition, so between that look and the deletion a moment is left. While any other record of
    the run is unreadable all data stays, for `prune`.

    Args:
        backend: Where.
        names: Of the records.
        uids: Whose they were when the caller chose them; default: all whose they are in any tier
            when this is called.
        before: Called with these uids before anything is deleted: what else of this process works
            on them has to stop.
        failed: Called with them if something is raised, and some may stay: that may go on.

    Returns:
        Names of the records that this has deleted.
    """
    names = list(names)
    chosen = (
        _all_named(backend, names)
        if uids is None
        else {name: frozenset([uids.get(name)]) for name in names}
    )
    doomed = {uid for found in chosen.values() for uid in found if uid is not None}
    before(doomed)
    try:
        return _delete_chosen(backend, names, chosen, doomed)
    except BaseException:
        failed(doomed)
        raise


def _places(backend: Backend) -> list[Backend]:
    """Its tiers, the most durable first, so that nothing is copied once more; or itself."""
    return [tier.backend for tier in reversed(backend.tiers)] or [backend]


def _all_named(backend: Backend, names: Collection[str]) -> dict[str, frozenset[str | None]]:
    found = [uids_named(place, names) for place in _places(backend)]
    return {name: frozenset(one[name] for one in found if name in one) for name in names}


def _delete_chosen(
    backend: Backend,
    names: Iterable[str],
    chosen: Mapping[str, frozenset[str | None]],
    doomed: set[str],
) -> list[str]:
    # Durably one by one: of several under way, a power cut may spare any.
    deleted = [name for name in names if _delete_if(backend, name, chosen[name])]
    _delete_unneeded(backend, doomed)
    for _ in range(_LANDINGS if backend.tiers else 0):
        # A copy to another tier that was under way may have landed behind the deletion. Now that
        # intent and data are gone none can begin to publish any more.
        landed = [_delete_if(backend, name, chosen[name] - {None}) for name in deleted]
        if not any(landed):
            break
        _delete_unneeded(backend, doomed)
    return deleted


def _delete_if(backend: Backend, name: str, uids: Collection[str | None]) -> bool:
    """Delete a record wherever it names one of `uids`; whether it did anywhere.

    Copies of it in other tiers that cannot be read go, too: they would stay listed at that step.
    """
    found = [(place, uids_named(place, [name])) for place in _places(backend)]
    if not any(named.get(name, "gone") in uids for _, named in found):
        return False
    for place, named in found:
        # Also where it is not listed yet: a copy may land, and who refuses has to do so in time.
        if named.get(name) in {None, *uids}:
            place.delete([name])
    return True


def _delete_unneeded(backend: Backend, doomed: set[str]) -> None:
    """Delete the data of those that nothing needs; while a record is unreadable, none.

    In one tier alone it is no reason: what another has under its name can bring it anew.
    """
    if not doomed:
        return
    # Each tier by itself: under one name two of them may have two checkpoints.
    surveys = [survey_run(place) for place in _places(backend)]
    readable = {name for survey in surveys for name in survey.records}
    if not {name for survey in surveys for name in survey.unreadable} - readable:
        needed = {uid for survey in surveys for uid in survey.needed}
        for uid in sorted(doomed - needed):
            delete_data(backend, uid, backend.list(data_prefix(uid)))

"""The saves from which checkpoints borrow blobs (chains of deltas), for messages and `penstock ls`.

After the checkpoint of such a save is deleted, its step is known only from a checkpoint that has it
as base. The blobs stay as long as they are borrowed: see `Survey.needed_without`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from penstock.core.catalog.survey import borrowed_blobs
from penstock.core.errors import DamagedError, StorageError
from penstock.core.format.records import blob_uid
from penstock.core.reporting.reports import LendingSave
from penstock.core.suggest import listed

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Iterator

    from penstock.core.abc import Backend
    from penstock.core.catalog.catalog import Catalog
    from penstock.core.format.records import BlobRecord, CommitRecord


def records_newest_first(catalog: Catalog, step: int) -> Iterator[CommitRecord]:
    """Yield the readable commit records of `step` and older steps, the newest first."""
    older = sorted((s for s in catalog.steps() if s <= step), reverse=True)
    for _, found in catalog.records(older):
        if not isinstance(found, DamagedError):
            yield found


def find_lenders(records: Iterable[CommitRecord], uids: Collection[str]) -> dict[str, LendingSave]:
    """Return the saves `uids`, by uid, as `records` show them; stop reading once all are found.

    A save without a record is marked as deleted, or as replaced if its step has another record.
    """
    found: dict[str, LendingSave] = {}
    steps: dict[str, int] = {}
    seen: set[int] = set()
    for record in records:
        seen.add(record.step)
        if record.base is not None:
            steps.setdefault(record.base.uid, record.base.step)
        if record.uid in uids:
            found[record.uid] = LendingSave(record.uid, record.step)
        if len(found) == len(uids):
            break
    for uid in uids:
        if uid not in found:
            step = steps.get(uid)
            found[uid] = LendingSave(uid, step, "replaced" if step in seen else "deleted")
    return found


def broken_chain(catalog: Catalog, record: CommitRecord, damaged: Collection[str]) -> str:
    """Describe a chain with damaged links, and name the newest older step that needs none of them.

    Args:
        catalog: The catalog of the run; reads records until everything is known.
        record: The checkpoint that borrows from the damaged saves.
        damaged: The uids of these saves.
    """
    read: list[CommitRecord] = []
    missing = {*record.references}
    sound: int | None = None
    for one in records_newest_first(catalog, record.step):
        read.append(one)
        missing.discard(one.uid)
        needed = {one.uid, *one.references}
        if sound is None and one.step < record.step and needed.isdisjoint(damaged):
            sound = one.step
        if sound is not None and not missing:
            break
    lenders = find_lenders(read, record.references).values()
    chain = sorted(lenders, key=lambda one: -1 if one.step is None else one.step, reverse=True)
    bad = [str(one) for one in chain if one.uid in damaged]
    them = "them" if bad[1:] else "it"
    way = (
        f"Every older step needs {them} too."
        if sound is None
        else f"Restore step {sound}, the newest older one that does not need {them}, as "
        "`restore(on_damage='fallback')` does."
    )
    # Without a base, the checkpoint only shares equal chunks: see `share`.
    tie = (
        "shares chunks with: it needs"
        if record.base is None
        else "is encoded against: its chain is"
    )
    return (
        f"The damage lies in the blobs of {listed(bad)}, which step {record.step} {tie} "
        f"{listed([f'step {record.step}', *map(str, chain)])}. {way}"
    )


def borrowers_of_deleted_saves(records: Collection[CommitRecord]) -> dict[str, list[CommitRecord]]:
    """Return, by uid, the records that borrow from each save that no record names."""
    named = {record.uid for record in records}
    borrowers: dict[str, list[CommitRecord]] = defaultdict(list)
    for record in records:
        for uid in record.references:
            if uid not in named:
                borrowers[uid].append(record)
    return dict(borrowers)


def borrowed_bytes(
    backend: Backend, records: Iterable[CommitRecord], uids: Container[str]
) -> dict[str, int]:
    """Return the bytes of all blobs that `records` borrow from the saves `uids`, by uid.

    Reads the table of borrowed blobs of each checkpoint that borrows from these saves. If a table
    is unreadable, adds the sizes in the commit record instead: blobs that another checkpoint also
    borrows are then counted twice.
    """
    sizes: dict[str, int] = defaultdict(int)
    blobs: set[BlobRecord] = set()
    for record in records:
        if not any(uid in uids for uid in record.references):
            continue
        try:
            blobs.update(borrowed_blobs(backend, record))
        except (DamagedError, StorageError):
            for uid, size in record.many_borrowed.saves.items() if record.many_borrowed else ():
                sizes[uid] += size
    for blob in blobs:
        sizes[blob_uid(blob.name) or ""] += blob.length
    return {uid: size for uid, size in sizes.items() if uid in uids}

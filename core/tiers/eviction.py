"""Evicts checkpoints from a tier after verifying that a later tier has their data.

A commit record proves that a checkpoint was whole at its publish. Its blobs may have been lost,
truncated or damaged since then. So before a copy is deleted, eviction compares the names and
lengths of the later copy with its manifest. It also reads all of the later copy, unless this
process wrote it.

Eviction does not delete the checkpoint's log. The log of the newest checkpoint is only in this
tier, and training may begin it at any moment. A log is deleted once a later step is saved.

Tested in `tests/core/tiers/test_drains.py`.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from penstock.core.abc import DelegatingBackend, host_roots
from penstock.core.catalog.deletion import delete_records
from penstock.core.catalog.notes import carry_notes
from penstock.core.catalog.survey import first_logged, is_whole
from penstock.core.copy.confirmation import has_all_data
from penstock.core.errors import CheckpointGoneError, DamagedError, FormatError, StorageError
from penstock.core.format.records import (
    COMMIT_PREFIX,
    DATA_PREFIX,
    commit_name,
    parse_commit_name,
)
from penstock.core.format.segment import uid_of_segment
from penstock.core.tiers.whereabouts import by_age, is_marked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.format.records import CommitRecord
    from penstock.core.types import BlobInfo

log = logging.getLogger("penstock")

MARGIN_BYTES = 8 << 20
"""Room to leave besides a save: part, index, records, and the overhead of a file system."""

Verify: TypeAlias = "Callable[[Backend, CommitRecord], bool]"
"""Reads all of a copy and compares every checksum, or returns False if it did not.

It raises DamagedError, CheckpointGoneError or StorageError, as `verify_blobs` does.
"""


class Eviction:
    """Makes room in tiers by evicting checkpoints that have a verified copy in a later tier."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        on_damage: Callable[[CommitRecord, int, int], None] = lambda _record, _good, _bad: None,
    ) -> None:
        """Prepare; contacts no tier.

        Args:
            tiers: The tiers, the fastest first.
            on_damage: Called once per process and damaged copy, with the checkpoint, the number of
                the tier that keeps its copy, and the number of the later tier with the damaged
                copy.
        """
        self._tiers = tiers
        self._on_damage = on_damage
        # No lock: only single operations change these, and the interpreter makes them atomic.
        self._verified: set[tuple[int, str]] = set()  # copies that this process wrote, or has read
        self._damaged: set[tuple[int, str]] = set()  # copies that were reported

    def note_verified(self, number: int, record: CommitRecord) -> None:
        """Record that this process wrote the copy in tier `number` and compared checksums."""
        self._verified.add((number, record.uid))
        self._damaged.discard((number, record.uid))

    def make_room(self, number: int, need_bytes: int, *, verify: Verify) -> bool:
        """Evict from a tier, oldest first, until `need_bytes` fit; return whether they do.

        Raises:
            StorageError: The tier itself does not answer.
        """
        backend = self._tiers[number].backend

        def fits() -> bool:
            free = backend.free_bytes()
            return free is None or free >= need_bytes + MARGIN_BYTES

        if fits():
            return True
        candidates = self._evictable(number, by_age(backend), verify)
        while True:
            self._delete_old_logs(number)
            if fits():
                return True
            try:
                record = next(candidates, None)
            except StorageError as error:
                log.warning("nothing is evicted from %s: %s", backend.url, str(error))
                return False
            if record is None:
                return False
            self.evict(number, record)

    def trim(self, number: int, *, verify: Verify) -> None:
        """Evict checkpoints that a later tier has, except the `keep_last` newest in this tier.

        Also deletes logs that evicted checkpoints left here, if a later step is saved.

        Raises:
            StorageError: A tier does not answer.
        """
        keep = self._tiers[number].keep_last
        if keep is None:
            return
        here = by_age(self._tiers[number].backend)
        for record in self._evictable(number, here[: max(len(here) - keep, 0)], verify):
            self.evict(number, record)
        self._delete_old_logs(number)

    def evict(self, number: int, record: CommitRecord, *, unreadable: bool = False) -> None:
        """Delete one tier's copy, but not its log.

        Deletes the commit record first, durably, then the data. Deletes nothing if the tier's
        record of that name has another uid or, with `unreadable`, is readable: then another save
        has published it in the meantime.
        """
        tier = self._tiers[number]
        name = commit_name(record.step, record.generation)
        self._carry_notes(number, record)
        uids = {name: None if unreadable else record.uid}
        delete_records(_WithoutLogs(tier.backend), [name], uids=uids)
        self._verified.discard((number, record.uid))
        log.debug("evicted step %d from tier %s", record.step, tier.name)

    def _carry_notes(self, number: int, record: CommitRecord) -> None:
        """Copy notes to tiers that keep a copy, in case a failed annotation left them only here."""
        for keeper, tier in enumerate(self._tiers):
            with suppress(StorageError):  # a tier that is away must not block eviction
                if keeper != number and is_whole(tier.backend, record):
                    carry_notes(self._tiers[number].backend, tier.backend, record)

    def _evictable(
        self, number: int, here: Sequence[CommitRecord], verify: Verify
    ) -> Iterator[CommitRecord]:
        """Yield the unmarked checkpoints of `here` that are whole in a later tier.

        Asks later tiers only about these checkpoints, because they may hold many more.
        """
        backend = self._tiers[number].backend
        for record in here:
            # The mark is checked after the verification of the later copy, which may take long: a
            # repair of another tier may set the mark in the meantime, to keep this copy.
            if self._is_elsewhere(number, record, verify) and not is_marked(backend, record.uid):
                yield record

    def _delete_old_logs(self, number: int) -> None:
        """Delete each log whose checkpoint this tier lacks, if a later step is saved."""
        backend = self._tiers[number].backend
        logs: dict[str, list[BlobInfo]] = {}
        for info in backend.list(DATA_PREFIX):
            if (base := uid_of_segment(info.name)) is not None:
                logs.setdefault(base, []).append(info)
        here = {record.uid for record in by_age(backend)} if logs else set()
        for segments in (logs[base] for base in logs.keys() - here):
            first = first_logged(backend, segments[0])
            if first is not None and self._is_saved_since(number, first - 1):
                backend.delete([info.name for info in segments])

    def _is_saved_since(self, number: int, step: int) -> bool:
        """Return whether a tier lists a later step. Asks tier `number` first."""
        for tier in (self._tiers[number], *self._tiers):
            with suppress(StorageError):
                parsed = [parse_commit_name(info.name) for info in tier.backend.list(COMMIT_PREFIX)]
                if any(found and found[0] > step for found in parsed):
                    return True
        return False

    def _is_elsewhere(self, number: int, record: CommitRecord, verify: Verify) -> bool:
        """Return whether a tier after `number` has a verified copy.

        A tier on hosts does not count: hosts make copies only in the fastest tier, so that tier
        loses the checkpoint with any host.
        """
        for later in range(number + 1, len(self._tiers)):
            backend = self._tiers[later].backend
            if host_roots(backend) or not is_whole(backend, record):
                continue
            try:
                _check_data(backend, record)
                if (later, record.uid) not in self._verified:
                    if not verify(backend, record):
                        continue
                    self._verified.add((later, record.uid))
            except CheckpointGoneError:
                continue
            except DamagedError as error:
                self._report_damage(number, later, record, error)
                return False
            return True
        return False

    def _report_damage(
        self, number: int, later: int, record: CommitRecord, error: DamagedError
    ) -> None:
        """Warn once that tier `number` keeps its copy, and have the damaged copy replaced."""
        self._verified.discard((later, record.uid))
        if (later, record.uid) in self._damaged:
            return
        self._damaged.add((later, record.uid))
        log.warning(
            "step %d stays in tier %s: the copy that tier %s lists is damaged, and is replaced: %s",
            record.step,
            self._tiers[number].name,
            self._tiers[later].name,
            str(error),
        )
        self._on_damage(record, number, later)


class _WithoutLogs(DelegatingBackend):
    """Hides the segments of logs from a deletion."""

    name: ClassVar[str] = "without logs"

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        return [info for info in super().list(prefix) if uid_of_segment(info.name) is None]


def _check_data(backend: Backend, record: CommitRecord) -> None:
    """Compare the names and lengths of a copy with its manifest.

    Raises:
        FormatError: Data is missing or truncated.
        CheckpointGoneError: The copy was deleted in the meantime.
    """
    if has_all_data(backend, record):
        return
    name = commit_name(record.step, record.generation)
    if not is_whole(backend, record):
        msg = f"{name} on {backend.url} was deleted meanwhile"
        raise CheckpointGoneError(msg)
    msg = f"{backend.url} has {name}, but has lost some of its data"
    raise FormatError(msg, [name])

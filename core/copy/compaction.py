"""Compacts checkpoints: rewrites those of a chain so that they borrow nothing.

A compaction saves the next generation of a step, and reads the state from the checkpoint that the
step has now. So a crash at any moment leaves the older generation or both, and a reader takes the
newest. Blobs of the older generation stay while others borrow them.

A checkpoint that is deleted or saved again during its compaction must not come back. So the
compaction reads the checkpoint's record right before the commit, and all records of the step right
after it. If the step was deleted and saved again, it has a new record, and the compacted generation
is deleted. An overwrite has a higher generation (see `generation_above`), so it wins whenever it
commits, in any tier.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.catalog.deletion import delete_records
from penstock.core.catalog.lender_report import borrowed_bytes, borrowers_of_deleted_saves
from penstock.core.catalog.retention import Housekeeper
from penstock.core.catalog.survey import last_place, uids_named
from penstock.core.copy.reencode import Reencoding, save_stored
from penstock.core.errors import CheckpointGoneError, CheckpointNotFoundError, DamagedError
from penstock.core.format.records import commit_name, compacted_generation
from penstock.core.format.segment import log_prefix
from penstock.core.reporting.events import EventStream
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.restore.contents import Contents
from penstock.core.restore.fill import Opened
from penstock.core.save.request import SaveSurroundings
from penstock.core.storage.time_limited import TimeLimitedBackend
from penstock.core.tree.select import Selection

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from penstock.core.abc import Backend
    from penstock.core.catalog.catalog import Catalog
    from penstock.core.concurrency.workers import Workers
    from penstock.core.config.model import CheckpointerConfig
    from penstock.core.errors import StorageFullError
    from penstock.core.format.records import CommitRecord
    from penstock.core.pipeline.loader import Loader
    from penstock.core.plugins.registry import Registry
    from penstock.core.reporting.reports import Progress, SaveReport
    from penstock.core.save.request import SaveRequest


log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class CompactedStep:
    """A checkpoint that was compacted.

    Attributes:
        step: The step.
        uid: The uid of the new generation; in a dry run, of the current one.
        generation: The generation of that uid.
        bytes_before: The size of the checkpoint's own blobs before.
        bytes_after: The size of its blobs now; in a dry run, an estimate.
        seconds: The duration; 0 for a dry run.
    """

    step: int
    uid: str
    generation: int
    bytes_before: int
    bytes_after: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CompactReport:
    """The result of a compaction, or of its dry run.

    Attributes:
        steps: The checkpoints that were (or would be) compacted, ascending.
        bytes_before: The size of all blobs that checkpoints of the run needed before.
        bytes_after: Their size now; in a dry run, an estimate.
        dry_run: Whether this was a dry run, which changes nothing.
    """

    steps: tuple[CompactedStep, ...]
    bytes_before: int
    bytes_after: int
    dry_run: bool = False


class Compactor:
    """Compacts checkpoints of one run, one at a time."""

    def __init__(
        self,
        backend: Backend,
        catalog: Catalog,
        *,
        config: CheckpointerConfig,
        registry: Registry,
        workers: Workers,
        loader: Loader,
    ) -> None:
        """Prepare to compact checkpoints of a run.

        Args:
            backend: The run. With tiers, compacted checkpoints are written to the last of them.
            catalog: The catalog of the run.
            config: Sizes of chunks and blocks, staging budget and grace time.
            registry: Finds codecs.
            workers: The threads that encode and hash.
            loader: Reads the checkpoints.
        """
        self._backend = backend
        self._catalog = catalog
        self._config = config
        self._registry = registry
        self._workers = workers
        self._loader = loader
        self._housekeeper = Housekeeper(
            TimeLimitedBackend(backend, workers, config.io_timeout_s),
            catalog,
            retention=None,
            grace_s=config.grace_s,
            events=EventStream(None),
        )

    def choose(
        self, steps: Iterable[int] | None = None, *, everything: bool = False
    ) -> list[CommitRecord]:
        """Return the checkpoints to compact, ascending; each of them borrows blobs.

        Leaves out the newest checkpoint while steps are logged after it, since compacting it would
        delete its log.

        Args:
            steps: The steps. None chooses the steps that borrow blobs of deleted checkpoints, and
                the steps that borrow from those steps: otherwise they would keep the blobs of the
                replaced generations alive.
            everything: Without `steps`, choose all checkpoints that borrow.

        Raises:
            CheckpointNotFoundError: One of the steps does not exist.
            DamagedError: The record of one of the steps cannot be read.
        """
        if steps is not None:
            found = [self._catalog.record(step) for step in sorted(set(steps))]
            return [r for r in found if r.references and not self._is_logged(r)]
        records = self._records()
        borrowing = {r.uid: r for r in records if r.references and not self._is_logged(r)}
        if everything:
            return list(borrowing.values())
        going = set(borrowers_of_deleted_saves(records))
        chosen: dict[str, CommitRecord] = {}
        while more := {
            uid: record
            for uid, record in borrowing.items()
            if uid not in chosen and not going.isdisjoint(record.references)
        }:
            chosen |= more
            going |= more.keys()
        return sorted(chosen.values(), key=lambda record: record.step)

    def _is_logged(self, record: CommitRecord) -> bool:
        if record.step != self._catalog.latest() or not self._backend.list(log_prefix(record.uid)):
            return False
        log.warning(
            "step %d is not compacted: steps are logged after it; save a later step first",
            record.step,
        )
        return True

    def plan(self, chosen: Collection[CommitRecord]) -> CompactReport:
        """Report the bytes that compacting these checkpoints would free or take; change nothing.

        Raises:
            DamagedError: A manifest cannot be read.
        """
        sizes = {record.uid: self._size_alone(record) for record in chosen}
        records = self._records()
        left = [record for record in records if record.uid not in sizes]
        steps = tuple(
            CompactedStep(r.step, r.uid, r.generation, r.bytes_stored, sizes[r.uid], 0.0)
            for r in chosen
        )
        after = self._needed_bytes(left, {r.uid: r.bytes_stored for r in chosen})
        return CompactReport(
            steps, self._needed_bytes(records), after + sum(sizes.values()), dry_run=True
        )

    def needed_bytes(self) -> int:
        """Return the size of all blobs that checkpoints of the run need."""
        return self._needed_bytes(self._records())

    def compact(
        self, record: CommitRecord, on_progress: Callable[[Progress], None] | None = None
    ) -> CompactedStep:
        """Replace a checkpoint with one that borrows nothing: same objects, metadata and codecs.

        Raises:
            CheckpointGoneError: The step was deleted or saved again; the compaction is undone.
            DamagedError: Stored bytes differ from the written bytes; nothing was changed.
            LostRaceError: Another process has compacted the step; nothing was changed.
            PenstockError: As for `Checkpointer.save`; the checkpoint is unchanged, or compacted.
        """
        opened = Opened.open(
            self._backend, record, self._loader, self._registry, allow_pickle=False
        )
        before = self._uids(self._catalog.entries().get(record.step, ()))
        report = save_stored(
            Checkpoint(opened),
            last_place(self._backend),
            Reencoding(
                config=self._config,
                selection=Selection(None, None),
                keep_codecs=True,
                compacts=True,
            ),
            # Never a higher generation: it would hide an overwrite made during the compaction.
            generation=compacted_generation(record.generation),
            surroundings=_Compaction(self._catalog, record, self._housekeeper),
            registry=self._registry,
            workers=self._workers,
            on_progress=on_progress,
        )
        self._settle(record, report, before)
        return CompactedStep(
            record.step,
            report.uid,
            report.generation,
            record.bytes_stored,
            report.bytes_stored,
            report.seconds["total"],
        )

    # ------------------------------------------------------------------------------------------

    def _settle(self, record: CommitRecord, report: SaveReport, before: Collection[str]) -> None:
        """Delete the older generations, or the new one if it hides a step that was saved again."""
        self._catalog.note_own(report.uid)
        name = commit_name(record.step, report.generation)
        names = self._catalog.entries().get(record.step, [])
        wins = names[-1:] == [name]
        if wins and self._uids(names) - {*before, report.uid}:
            delete_records(self._backend, [name], uids={name: report.uid})
            raise _gone(record)
        if names:
            newest = self._catalog.record(record.step)
            self._catalog.delete_older_generations(record.step, newest.generation)
        if not wins:
            raise _gone(record)

    def _uids(self, names: Collection[str]) -> set[str]:
        return {uid for uid in uids_named(self._backend, names).values() if uid is not None}

    def _records(self) -> list[CommitRecord]:
        found = (one for _, one in self._catalog.records())
        return [record for record in found if not isinstance(record, DamagedError)]

    def _needed_bytes(
        self, records: Collection[CommitRecord], own: dict[str, int] | None = None
    ) -> int:
        """Return the size of all blobs that the checkpoints of `records` own or borrow.

        Args:
            records: The commit records.
            own: By uid, the total size of the blobs of saves that no record names, if known. All
                of these blobs stay if any is borrowed.
        """
        named = {record.uid: record.bytes_stored for record in records}
        uids = {uid for record in records for uid in record.references} - named.keys()
        lent = borrowed_bytes(self._backend, records, uids)
        return sum(named.values()) + sum((own or {}).get(uid, size) for uid, size in lent.items())

    def _size_alone(self, record: CommitRecord) -> int:
        """Estimate the size of a checkpoint that borrows nothing.

        Counts, for each chunk, the frame at the end of its chain of deltas, which has no base.
        """
        contents = Contents(self._backend, record, self._registry)
        lengths: dict[tuple[int, int, int], int] = {}
        described = (one for o in contents.objects() for one in contents.descriptions(o))
        for found in described:
            for ref in (ref for shard in found.shards for ref in shard.chunks):
                frame = found.frames[ref.frame]
                *_, lowest = frame.links()
                lengths[found.head.rank, frame.blob, frame.offset] = lowest.length
        return sum(lengths.values())


class _Compaction(SaveSurroundings):
    """Deletes leftovers of killed compactions; commits only if the step has not changed."""

    def __init__(self, catalog: Catalog, record: CommitRecord, housekeeper: Housekeeper) -> None:
        self._catalog = catalog
        self._record = record
        self._housekeeper = housekeeper

    def before_write(self, request: SaveRequest, url: str) -> None:
        """Delete leftovers of this machine's killed saves and compactions, but no checkpoint."""
        self._housekeeper.before_save(url, request.plan.raw_bytes, protect=())

    def when_full(
        self, request: SaveRequest, uid: str, error: StorageFullError
    ) -> StorageFullError:
        """Delete the same leftovers; return the error with advice on how to make room."""
        del request
        return self._housekeeper.when_full(error, uid, protect=())

    def before_commit(self, request: SaveRequest, uid: str) -> None:
        """Check that the newest generation of the step is the one being compacted."""
        del request, uid
        record = self._record
        try:
            if self._catalog.record(record.step).uid == record.uid:
                return
        except (CheckpointNotFoundError, DamagedError) as error:
            raise _gone(record) from error
        raise _gone(record)


def _gone(record: CommitRecord) -> CheckpointGoneError:
    msg = (
        f"step {record.step} was deleted or saved again during its compaction, so the compaction "
        "was given up"
    )
    return CheckpointGoneError(msg)

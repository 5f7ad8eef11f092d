"""The catalog of a run: its steps, the latest one, and the deletion of checkpoints.

A checkpoint exists if and only if its commit record's name does. Commit records are deleted before
data, the lowest generation of a step first. So a crash in between leaves only orphans for `prune`:
never a record without data, and never an overwritten generation that comes back.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.core.abc import absence, absent_hosts, host_roots, is_reduced
from penstock.core.catalog.deletion import check_same, delete_records
from penstock.core.catalog.notes import NotesOfRun, gone, write_note
from penstock.core.catalog.prune import GRACE_S, PruneReport, prune
from penstock.core.catalog.retention import worst_first, younger_than
from penstock.core.catalog.survey import (
    has_data,
    is_listed,
    is_whole,
    places_of,
    read_commit,
    survey_records,
    unreadable,
)
from penstock.core.errors import (
    BlobNotFoundError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    DamagedError,
    FormatError,
)
from penstock.core.format.records import (
    COMMIT_PREFIX,
    data_prefix,
    generation_above,
    mark_name,
    parse_commit_name,
)
from penstock.core.suggest import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.catalog.survey import Look
    from penstock.core.config.model import Retention
    from penstock.core.errors import PenstockError
    from penstock.core.format.records import CommitRecord

log = logging.getLogger("penstock")

_SHOWN_STEPS = 20
_TRIES = 5  # a step that is overwritten repeatedly may change after each listing


class Catalog:
    """All checkpoints under one root.

    Caches nothing, because another process may save, delete or prune at any time.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        before_delete: Callable[[Collection[str]], None] = lambda _: None,
        delete_failed: Callable[[Collection[str]], None] = lambda _: None,
        look: Look = has_data,
        note_own: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Create the catalog of a run.

        Args:
            backend: The backend of the run.
            before_delete: Called with the uids of checkpoints that are about to be deleted.
            delete_failed: Called with these uids if the deletion fails; some may remain.
            look: Returns whether a place has all data of a checkpoint. The catalog deletes older
                checkpoints only in favor of one that passes.
            note_own: Called with the uid of a checkpoint that this process wrote, so that `look`
                need not read its manifest.
        """
        self._backend = backend
        self._before = before_delete
        self._failed = delete_failed
        self._look = look
        self.note_own = note_own
        self._doomed: set[int] = set()  # steps that retention is about to delete
        self.choosing = threading.RLock()
        """Held while retention, or the user, deletes steps: each relies on steps that stay."""

    # -- looking --------------------------------------------------------------------------------

    def entries(self) -> dict[int, list[str]]:
        """Return the names of commit records by step, with steps and generations ascending.

        The last name of a step is its current generation.
        """
        return _by_step(info.name for info in self._backend.list(COMMIT_PREFIX))

    def steps(self) -> list[int]:
        """Return the committed steps, ascending, including those with a damaged record.

        Leaves out incomplete checkpoints.
        """
        entries = self.entries()
        incomplete = self.incomplete_from(min(entries, default=0), entries)
        return [step for step in entries if step not in incomplete]

    def incompleteness(self, record: CommitRecord) -> str:
        """Return why a checkpoint is incomplete; empty if it is not.

        Only a run with a root on each host has incomplete checkpoints: those with files on hosts
        that are absent now.

        Raises:
            StorageError: A host or a tier does not answer.
        """
        if not host_roots(self._backend):
            return ""
        # Each tier, too: the list of all tiers has the size of a truncated file in a faster tier.
        tiers = (tier.backend for tier in self._backend.tiers)
        if any(has_data(place, record) for place in (self._backend, *tiers)):
            return ""
        try:
            absent = absent_hosts(self._backend)
        except FormatError:
            absent = ""
        names = f" (absent: {absent})" if absent else ""
        return (
            f"step {record.step} on {self._backend.url} is incomplete: not all of its files are on "
            f"the hosts of this job{names}"
        )

    def incomplete_from(
        self, step: int, entries: Mapping[int, list[str]] | None = None
    ) -> dict[int, str]:
        """Return the incomplete checkpoints at `step` or later, each with the reason."""
        if not host_roots(self._backend):
            return {}
        entries = self.entries() if entries is None else entries
        later = [number for number in entries if number >= step]
        return {
            number: why
            for number, record in self.records(later, entries=entries)
            if not isinstance(record, DamagedError) and (why := self.incompleteness(record))
        }

    def delete_incomplete_after(self, step: int) -> None:
        """Delete the incomplete checkpoints after `step`, which a new save at `step` has replaced.

        Otherwise they would become the newest when their hosts come back. A generation that is
        whole stays.
        """
        if not host_roots(self._backend):
            return
        for number, names in reversed(self.entries().items()):
            for name in names if number > step else ():
                with suppress(BlobNotFoundError, DamagedError):
                    if self.incompleteness(self._commit(name)):
                        log.warning("deleting incomplete step %d: step %d was saved", number, step)
                        self._delete([name])

    def latest(self) -> int | None:
        """Return the newest committed step; None if there is no checkpoint.

        Raises:
            DamagedError: The commit record of that step is unreadable.
        """
        newest = self.newest()
        return None if newest is None else newest.step

    def newest(self, *, up_to: int | None = None) -> CommitRecord | None:
        """Return the commit record of the newest step that is complete; None if there is none.

        Args:
            up_to: The highest step to consider; default: no limit.

        Raises:
            DamagedError: The commit record is unreadable.
        """
        while True:
            entries = self.entries()
            steps = [step for step in entries if up_to is None or step <= up_to]
            if not steps:
                return None
            try:
                record = self.record(steps[-1], entries=entries)
            except CheckpointNotFoundError:
                continue  # deleted after the listing: the next listing lacks it
            why = self.incompleteness(record)
            if not why:
                return record
            log.warning("%s; it is skipped", why)
            up_to = record.step - 1

    def require_newest(self) -> CommitRecord:
        """Return the commit record of the newest step.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            DamagedError: The commit record is unreadable, or all checkpoints are incomplete.
        """
        record = self.newest()
        if record is None:
            if incomplete := self.incomplete_from(0):
                # Not CheckpointNotFoundError: the job would start from scratch, and its first save
                # would delete the steps of hosts that are only late.
                steps = listed([str(step) for step in sorted(incomplete)])
                msg = (
                    f"all checkpoints are incomplete: {incomplete[max(incomplete)]}. If these "
                    "hosts can come back, start again with them"
                )
                if not is_reduced(self._backend):
                    msg += (
                        ". To start from scratch without these checkpoints, first delete "
                        f"{steps} on rank 0"
                    )
                raise DamagedError(msg)
            msg = f"no checkpoint under {self._backend.url}"
            raise CheckpointNotFoundError(msg)
        return record

    def check_not_reduced(self, step: int) -> None:
        """Raise if later steps are incomplete because many hosts of the last job are missing.

        Such a job may be a mistake, and its first save after `step` would delete these steps.

        Raises:
            DamagedError: They are.
            StorageError: A host does not answer.
        """
        if is_reduced(self._backend) and (later := self.incomplete_from(step + 1)):
            msg = (
                f"{later[max(later)]}. This job has fewer hosts than the last one: start it again "
                f"with them. To go on without the steps after {step}, restore {step} by its "
                "number; the first save then deletes them"
            )
            raise DamagedError(msg)

    def require_latest(self) -> int:
        """Return the newest committed step.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            DamagedError: The commit record of that step is unreadable.
        """
        return self.require_newest().step

    def record(self, step: int, *, entries: Mapping[int, list[str]] | None = None) -> CommitRecord:
        """Return the commit record of a step's highest generation that is not incomplete.

        If all generations are incomplete, returns the record of the highest one.

        Args:
            step: The step.
            entries: A recent result of `entries()`, which saves one listing.

        Raises:
            CheckpointNotFoundError: The step does not exist; the message lists existing steps.
            FormatError: The record is unreadable, or of an unknown version.
        """
        try:
            return self._read(step, entries)
        except FormatError as error:
            raise FormatError(self._damaged(step, error), error.damaged) from error

    def records(
        self,
        steps: Iterable[int] | None = None,
        *,
        entries: Mapping[int, list[str]] | None = None,
    ) -> Iterator[tuple[int, CommitRecord | DamagedError]]:
        """Read the commit records of several steps; skip steps that are deleted meanwhile.

        Args:
            steps: The steps, in the order to read them; default: all, ascending.
            entries: A recent result of `entries()`, which saves one listing.

        Yields:
            A step with its commit record, or with the error from reading it.
        """
        entries = self.entries() if entries is None else entries
        for step in entries if steps is None else steps:
            found: CommitRecord | DamagedError
            try:
                found = self._read(step, entries)
            except CheckpointNotFoundError:
                continue
            except DamagedError as error:
                found = error
            yield step, found

    def has_whole(self, steps: Iterable[int]) -> bool:
        """Return whether at least one of these steps is whole according to `look`."""
        newest_first = self.records(sorted(steps, reverse=True))
        return any(
            not isinstance(found, DamagedError) and self._is_whole(found)
            for _, found in newest_first
        )

    def next_generation(self, step: int) -> int:
        """Return the generation that overwrites all existing generations of `step`."""
        return generation_above(self.entries().get(step, ()))

    def gone_or_damaged(self, step: int, uid: str, error: PenstockError) -> PenstockError:
        """Return the error to raise `from error` after a reader found a checkpoint's file missing.

        Args:
            step: The step being read.
            uid: The uid of its record when reading began.
            error: The reader's error.

        Returns:
            A `CheckpointGoneError` if the record is gone or now names another uid; else `error`
            itself if it is a `DamagedError`, or a `DamagedError` with its message.
        """
        try:
            gone = self.record(step).uid != uid
        except CheckpointNotFoundError:
            gone = True
        except DamagedError:
            gone = False
        if gone:
            msg = (
                f"the checkpoint of step {step} on {self._backend.url} was deleted or overwritten"
                " while it was being read; read it again, or another step"
            )
            return CheckpointGoneError(msg)
        if isinstance(error, DamagedError):
            return error
        return DamagedError(self._damaged(step, error), [data_prefix(uid)])

    # -- notes ----------------------------------------------------------------------------------

    def annotate(self, step: int, metadata: Mapping[str, Any], tags: Mapping[str, bool]) -> None:
        """Add a note to a committed checkpoint, durably in every place that has the checkpoint.

        A crash at any moment leaves the whole note or none.

        Args:
            step: The step.
            metadata: The user's JSON metadata, which overrides earlier values of the same keys.
            tags: By tag, whether the checkpoint has it from now on.

        Raises:
            CheckpointNotFoundError: The step does not exist; the message lists existing steps.
            CheckpointGoneError: The step was deleted or overwritten meanwhile; nothing was added.
            ConfigError: The note would be too long, or there are too many notes.
            DamagedError: The commit record of the step is unreadable.
            StorageError: A place failed; it may or may not have the note. Add the note again.
        """
        record = self.record(step)
        name = write_note(self._backend, record, metadata, tags)
        with suppress(CheckpointNotFoundError):
            # A deletion deletes the record first: either it sees the note, or this read sees that
            # the record is gone.
            if step not in self._doomed and self.record(step).origin == record.origin:
                return
        self._backend.delete([name])
        raise gone(record, self._backend)

    # -- deleting -------------------------------------------------------------------------------

    def delete(self, step: int, named: Mapping[str, str | None] | None = None) -> None:
        """Delete all generations of a checkpoint: first the records, durably, then the data.

        Keeps data that another checkpoint or a save in flight uses, and all data while any record
        of the run is unreadable; `prune` deletes it later.

        Args:
            step: The step.
            named: By record name, the uid that the record named when the caller chose it. A record
                that names another uid now is kept. None deletes all records.

        Raises:
            CheckpointNotFoundError: The step does not exist; the message lists existing steps.
            ConfigError: Without `named`, two tiers have different checkpoints at this step; nothing
                was deleted.
        """
        with self.choosing:
            entries = self.entries()
            if step not in entries:
                raise self._not_found(step, list(entries))
            if named is None:
                check_same(self._backend.tiers, [step])
            self._delete(entries[step], named)

    def delete_older_generations(self, step: int, generation: int) -> None:
        """Delete the generations of `step` that an overwrite by `generation` replaced.

        Keeps all of them while the newest generation lacks data: its saver may have stalled, been
        pruned, and published late. Then only the older generation is whole.

        Raises:
            FormatError: The newest generation is unreadable; nothing was deleted.
            CheckpointNotFoundError: There is no checkpoint at that step.
        """
        keep = self.record(step)
        places = places_of(self._backend)
        having = [is_whole(one, keep) and self._look(one, keep) for one in places]
        for number, one in enumerate(places):
            # A tier keeps its older generation until it, or a slower tier, has the newer one: a
            # faster tier may be lost with its machine.
            if any(having[number:]):
                other = Catalog(one, before_delete=self._before, delete_failed=self._failed)
                key, names = (step, generation), other.entries().get(step, [])
                other._delete([name for name in names if (parse_commit_name(name) or key) < key])

    def rewind(self, step: int) -> list[int]:
        """Delete every step after `step`, newest first, to continue from `step`.

        Returns:
            The deleted steps, ascending.

        Raises:
            CheckpointNotFoundError: There is no checkpoint at `step`.
            DamagedError: The checkpoint at `step` is incomplete; nothing was deleted.
        """
        with self.choosing:
            entries = self.entries()
            if step not in entries:
                raise self._not_found(step, list(entries))
            if host_roots(self._backend) and (why := self.incompleteness(self.record(step))):
                msg = f"{why}, so the later steps were not deleted; rewind to another step"
                raise DamagedError(msg, [])
            later = [s for s in entries if s > step]
            for number in reversed(later):
                self._delete(entries[number])
            return later

    def apply_retention(self, rules: Retention, *, protect: Collection[int] = ()) -> list[int]:
        """Delete the checkpoints that no retention rule keeps.

        A checkpoint with a readable record counts only if it is whole according to `look`. The
        newest and the best ones are checked until enough are whole; those that no rule keeps are
        deleted unchecked. Checkpoints with an unreadable record are neither counted nor deleted.
        Checkpoints with a tag or an unreadable note are kept: the unreadable note may hold a tag or
        the best metric.

        Args:
            rules: The rules.
            protect: The steps that are always kept.

        Returns:
            The deleted steps, ascending. The newest whole step is never among them. Blobs that a
            kept checkpoint borrows from a deleted one stay.
        """
        survey = survey_records(self._backend)
        entries = _by_step([*survey.records, *survey.unreadable])
        named = {step: names[-1] for step, names in entries.items()}
        readable = {s: survey.records[n] for s, n in named.items() if n in survey.records}
        steps = sorted(readable)
        count = max(rules.keep_last or 1, 1)
        kept = {*protect}
        if rules.keep_every is not None:
            kept |= {step for step in steps if step % rules.keep_every == 0}
        if rules.keep_within is not None:
            kept |= younger_than(rules.keep_within, {s: survey.times[named[s]] for s in steps})
        if kept.issuperset(steps[:-count]):
            return []  # nothing would be deleted, so no manifest and no note has to be read
        kept |= self._newest(readable, steps, count, self._is_whole)
        kept |= self._kept_for_tiers(readable, count)
        listed = NotesOfRun(places_of(self._backend))
        # With `keep_best`, any step may be the best, so all notes are read. Without it, each save
        # skips the notes on steps that stay anyway.
        in_doubt = readable.keys() if rules.keep_best is not None else readable.keys() - kept
        notes = {step: listed.read(readable[step]) for step in sorted(in_doubt)}
        kept |= {step for step, found in notes.items() if found.tags or found.damaged}
        if rules.keep_best is not None and rules.best_metric and rules.best_mode:
            metadata = {step: found.metadata for step, found in notes.items()}
            ranked = worst_first(metadata, rules.best_metric, rules.best_mode)
            kept |= self._newest(readable, ranked, rules.keep_best, self._is_whole)
        doomed = [step for step in steps if step not in kept]
        log.debug("retention: deletes %d of %d readable checkpoints", len(doomed), len(steps))
        gone = []
        for step in doomed:
            names = self.entries().get(step, [])
            # Deletes only the uids of the survey: another saver may have replaced the step since.
            seen = {name: survey.records[name].uid for name in names if name in survey.records}
            doomed_names = [name for name in names if name in seen]
            with self._deciding(step):
                # A note that was added since may protect it: the next retention decides.
                now = NotesOfRun.of(self._backend, readable[step]).names(readable[step])
                added = now.keys() - listed.names(readable[step]).keys()
                if not added and self._delete(doomed_names, seen):
                    gone.append(step)
        return gone

    @contextmanager
    def _deciding(self, step: int) -> Iterator[None]:
        """Refuse new notes on a step within the block.

        Retention reads the notes within the block. `annotate` publishes its note first, and fails
        if it then finds the step in such a block. So no note is reported as added and then deleted
        unread.
        """
        self._doomed.add(step)
        try:
            yield
        finally:
            self._doomed.discard(step)

    def _newest(
        self,
        readable: Mapping[int, CommitRecord],
        steps: Sequence[int],
        count: int,
        is_whole: Callable[[CommitRecord], bool],
    ) -> set[int]:
        """Return the shortest tail of `steps` with `count` whole checkpoints.

        Returns all steps if fewer are whole: then a damaged checkpoint may be the best available.
        """
        found = 0
        for number in range(len(steps) - 1, -1, -1):
            found += is_whole(readable[steps[number]])
            if found == count:
                return {*steps[number:]}
        return {*steps}

    def _is_whole(self, record: CommitRecord) -> bool:
        """Return whether any place has the whole checkpoint."""
        places = places_of(self._backend)
        if len(places) == 1:
            return self._look(places[0], record)
        return any(is_whole(one, record) and self._look(one, record) for one in places)

    def _kept_for_tiers(self, whole: Mapping[int, CommitRecord], keep_last: int) -> set[int]:
        """Return the steps to keep because a slower tier has no newer checkpoint yet.

        These are the newest steps of each tier, and the oldest step that is still to be copied.
        Otherwise retention would delete the only durable checkpoint, and each new checkpoint before
        it became durable.
        """
        kept: set[int] = set()
        tiers = [tier.backend for tier in self._backend.tiers]
        for one in tiers:
            records = survey_records(one).records.values()
            # Of each step the generation of this tier, which an overwrite may not have reached yet.
            mine = {r.step: r for r in sorted(records, key=lambda r: (r.step, r.generation))}
            kept |= self._newest(mine, [*mine], keep_last, partial(self._look, one))
            if one is not tiers[-1]:
                uids = {record.uid for record in records}
                left = [s for s, r in sorted(whole.items()) if r.uid in uids]
                kept |= {*[s for s in left if is_listed(one, mark_name(whole[s].uid))][:1]}
        return kept

    def prune(
        self,
        *,
        grace_s: float = GRACE_S,
        own_uids: Collection[str] = (),
        dry_run: bool = False,
        everything: bool = False,
    ) -> PruneReport:
        """Delete data that no checkpoint and no save in flight can need; see `prune.prune`.

        Deletes nothing while hosts of the last job are absent, since their commit records may need
        any data.
        """
        if why := absence(self._backend):
            return PruneReport(refused=(why,), dry_run=dry_run)
        return prune(
            self._backend,
            grace_s=grace_s,
            own_uids=own_uids,
            dry_run=dry_run,
            everything=everything,
            look=self._look,
        )

    # ------------------------------------------------------------------------------------------

    def _read(self, step: int, entries: Mapping[int, list[str]] | None) -> CommitRecord:
        name = ""
        for _ in range(_TRIES):
            if entries is None:
                entries = self.entries()
            if step not in entries:
                raise self._not_found(step, list(entries))
            name = entries[step][-1]
            try:
                return self._current(entries[step])
            except BlobNotFoundError:
                entries = None  # deleted or overwritten after the listing: list again
        raise unreadable(self._backend, name)

    def _commit(self, name: str) -> CommitRecord:
        """Read a commit record: the first one whose files are all there, if tiers have several."""
        first = read_commit(self._backend, name)
        places = places_of(self._backend)[1:]
        if places and host_roots(self._backend) and self.incompleteness(first):
            for place in places:
                with suppress(BlobNotFoundError, DamagedError):
                    other = read_commit(place, name)
                    if other.uid != first.uid and has_data(place, other):
                        return other
        return first

    def _current(self, names: Sequence[str]) -> CommitRecord:
        newest = self._commit(names[-1])
        if len(names) > 1 and (why := self.incompleteness(newest)):
            for name in reversed(names[:-1]):
                older = self._commit(name)
                if not self.incompleteness(older):
                    log.warning("%s; an older generation is used", why)
                    return older
        return newest

    def _delete(
        self, names: Iterable[str], uids: Mapping[str, str | None] | None = None
    ) -> list[str]:
        return delete_records(
            self._backend, names, uids=uids, before=self._before, failed=self._failed
        )

    def _damaged(self, step: int, error: PenstockError) -> str:
        return (
            f"the checkpoint of step {step} on {self._backend.url} is damaged: {error}; restore "
            "another step: `penstock verify --all` shows which are whole, and "
            "`restore(on_damage='fallback')` restores the newest of them"
        )

    def _not_found(self, step: int, steps: list[int]) -> CheckpointNotFoundError:
        there = ", ".join(map(str, steps[-_SHOWN_STEPS:])) or "none"
        more = f" (the last {_SHOWN_STEPS} of {len(steps)})" if len(steps) > _SHOWN_STEPS else ""
        msg = f"no checkpoint of step {step} under {self._backend.url}; steps there: {there}{more}"
        return CheckpointNotFoundError(msg)


def _by_step(names: Iterable[str]) -> dict[int, list[str]]:
    found: dict[int, set[tuple[int, str]]] = defaultdict(set)
    for listed_name in names:
        # Cut to the record's name: if it is a folder, only the files inside are listed, and the
        # step is damaged, not missing.
        name = "/".join(listed_name.split("/", 2)[:2])
        parsed = parse_commit_name(name)
        if parsed is not None:
            found[parsed[0]].add((parsed[1], name))
    return {step: [name for _, name in sorted(found[step])] for step in sorted(found)}

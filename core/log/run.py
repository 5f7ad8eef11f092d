"""The log of a run: saves and restores begin it, and restores replay it.

Tested in `tests/integration/log/test_replay.py`.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.core.catalog.survey import places_of
from penstock.core.errors import (
    CheckpointGoneError,
    CheckpointNotFoundError,
    ConfigError,
    DamagedError,
    PenstockError,
    RestoreError,
    RestoreMismatchError,
    SelectionError,
)
from penstock.core.format.segment import FIRST, log_prefix
from penstock.core.log.grads import NotLoggedError
from penstock.core.log.inventory import base_of, noting
from penstock.core.log.recorder import Recorder
from penstock.core.log.replay import LogReplay
from penstock.core.log.segments import StoredLog, common_sessions, last_step, logs_of, sessions_of
from penstock.core.log.together import replay_together
from penstock.core.log.verification import with_log
from penstock.core.types import valid_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.catalog.catalog import Catalog
    from penstock.core.concurrency.workers import Workers
    from penstock.core.config.model import CheckpointerConfig
    from penstock.core.log.host_logs import HostLogs
    from penstock.core.log.segments import StoredEntry
    from penstock.core.plugins.registry import Registry
    from penstock.core.ranks.group import RanksOfJob
    from penstock.core.reader import Reader
    from penstock.core.reporting.reports import RestoreReport, VerifyReport
    from penstock.core.restore.checkpoint import Checkpoint
    from penstock.core.save.job import SaveJob
    from penstock.core.tiers.room import TierRoom
    from penstock.core.tree.select import Selection
    from penstock.core.types import ObjectPath

log = logging.getLogger("penstock")

# Errors of a restore that has not changed the state.
_UNCHANGED = CheckpointNotFoundError, ConfigError, RestoreMismatchError, SelectionError


class RunLog:
    """Begins, continues and replays the log of a run. Only the training thread may use it."""

    def __init__(
        self,
        backend: Backend,
        reader: Reader,
        *,
        config: CheckpointerConfig,
        registry: Registry,
        workers: Workers,
        ranks: RanksOfJob,
        copies: HostLogs,
        room: TierRoom | None = None,
    ) -> None:
        """Prepare; reads nothing, and watches no steps yet.

        Args:
            backend: The store.
            reader: Reads the checkpoints of the store.
            config: Whether pickles may be stored and loaded, and how long a store may be stuck.
            registry: Finds providers, codecs and replayers.
            workers: The threads.
            ranks: The ranks that train together.
            copies: Copies entries to other hosts.
            room: Makes room in the fastest tier; None without tiers.
        """
        self._backend = backend
        self._reader = reader
        self._ranks = ranks
        self._copies = copies
        self._replay = LogReplay(backend, config, registry, workers)
        self._continues = True  # whether this rank may append to the last replayed log
        self.recorder = Recorder(backend, config, registry, workers, copies=copies, room=room)

    @property
    def _catalog(self) -> Catalog:
        return self._reader.catalog

    def may_log(self) -> bool:
        """Return whether this process knows its rank, without which no step can be logged."""
        try:
            self._ranks.place()
        except ConfigError:  # several ranks that cannot find each other
            return False
        return True

    def begin_after_save(self, job: SaveJob, state: Mapping[str, Any]) -> None:
        """Log the steps that follow a save."""
        if self.may_log():
            self.recorder.place = self._place()
            handle = job.handle
            # Until other hosts have the checkpoint, the loss of one host may make an older one the
            # newest.
            done = handle.replicated if self._copies.are_made else handle.committed
            self.recorder.begin_after_save(
                job.uid, handle.step, state, done, rounded=job.request.rounded
            )

    def log(self, state: Mapping[str, Any], step: int) -> bool:
        """See `Checkpointer.log`."""
        return self.recorder.log(state, step)

    def latest(self) -> int | None:
        """Return the newest step that is saved or logged; None if there is none."""
        try:
            newest = self._catalog.require_latest()
        except CheckpointNotFoundError:
            return None
        self._catalog.check_not_reduced(newest)  # else a script would continue from there
        if not self.may_log():
            return newest
        logged = last_step(self._logs_after(newest))
        return newest if logged is None else logged

    def forget(self, step: int) -> None:
        """Delete the log of the checkpoint of `step` after a rewind to that checkpoint."""
        if self.may_log():
            # If the record is damaged, no restore can replay its log.
            with contextlib.suppress(DamagedError):
                self.recorder.forget(self._catalog.record(step).uid)

    def verified(self, checkpoint: Checkpoint, report: VerifyReport) -> VerifyReport:
        """Return the report of a checkpoint with the verification of its log added."""
        self.recorder.flush()  # else the end of the log would look torn
        return with_log(checkpoint, report)

    def restore(
        self,
        state: Mapping[str, Any],
        step: int | str,
        restore: Callable[[int | str], RestoreReport],
        *,
        selection: Callable[[], Selection] | None,
    ) -> RestoreReport:
        """Restore a checkpoint, and replay the log that leads from it to `step`.

        Args:
            state: The template.
            step: A step, or `"latest"`.
            restore: Restores the checkpoint of a step.
            selection: Returns the selection of the restore, called after the checkpoint is
                restored. None: the restore renames objects, so the log cannot be replayed.
        """
        if not self.may_log():
            return restore(step)
        self.recorder.flush()
        try:
            return self._restore(state, step, restore, selection)
        except _UNCHANGED:
            raise
        except BaseException:  # Ctrl-C, too
            self.recorder.pause("a restore failed: restore again")
            raise

    def _restore(
        self,
        state: Mapping[str, Any],
        step: int | str,
        restore: Callable[[int | str], RestoreReport],
        selection: Callable[[], Selection] | None,
    ) -> RestoreReport:
        self._continues = True
        report, until = self._restore_base(step, restore)
        base = report.step
        selected = None if selection is None else selection()
        try:
            report, last = self._replay_onto(report, state, until, selected)
        except NotLoggedError as error:
            report, last = restore(report.step), None
            if isinstance(step, int):
                msg = f"step {step} cannot be replayed; the state has step {report.step}: {error}"
                raise RestoreError(msg) from error
            lost = max((log.steps[-1] for log in self._logs_after(report.step)), default=step)
            log.warning(
                "the log cannot be replayed to step %s, so step %d is restored: %s",
                lost, report.step, str(error),
            )  # fmt: skip
        self.recorder.place = self._place()
        left_out = report.missing or report.unexpected or report.cast or report.mismatched
        session = self._reader.session if self._ranks.place() else secrets.token_hex(8)
        if selected is None or not selected.everything or left_out:
            self.recorder.pause("only a part of the checkpoint was restored: save first")
        elif last is not None and not has_log(places_of(self._backend)[0], report.uid):
            # Each tier numbers its own segments, so a new segment in the fastest tier could get
            # the name of one in the slower tier, and hide it.
            self.recorder.pause("the log is not in the fastest tier: save first")
        elif not self._continues:
            self.recorder.pause("other ranks have logged the replayed steps: save first")
        else:
            self.recorder.begin_after_restore(
                report.uid,
                report.step,
                state,
                session=session,
                previous=FIRST if last is None else last.header.digest,
                obstacle=partial(self._obstacle, base),
            )
        return report

    def _obstacle(self, base: int) -> str:
        """Return why no log may follow the restored checkpoint of `base`; empty if one may."""
        later = max((saved for saved in self._catalog.entries() if saved > base), default=None)
        if later is None:
            return ""
        # A restore would find that checkpoint, and not this log.
        return f"the store has later checkpoints, such as step {later}: call rewind({base}) first"

    @contextlib.contextmanager
    def noting(self, step: int | str) -> Iterator[None]:
        """If a checkpoint is not found, note on the error that its step is logged but not saved."""
        with noting(self._backend, self._catalog, step if self.may_log() else None):
            try:
                yield
            except CheckpointNotFoundError:
                self.recorder.flush()
                raise

    def _restore_base(
        self, step: int | str, restore: Callable[[int | str], RestoreReport]
    ) -> tuple[RestoreReport, int | None]:
        """Restore the checkpoint at or before `step`.

        Returns:
            The report, and the last step to replay: 0 for none, None for all.
        """
        try:
            report = restore(step)
        except CheckpointGoneError:
            raise
        except CheckpointNotFoundError:
            base = self._base_of(step)
            if base is None:
                raise
            return restore(base), valid_step(step)
        return report, 0 if step != "latest" or report.fell_back_from else None

    def _replay_onto(
        self,
        report: RestoreReport,
        state: Mapping[str, Any],
        until: int | None,
        selection: Selection | None,
    ) -> tuple[RestoreReport, StoredEntry | None]:
        """Replay the log of a restored checkpoint.

        Returns:
            The report with the replay added, and the last replayed entry; None if there is none.

        Raises:
            NotLoggedError: The log cannot be replayed; some steps may have been taken.
        """
        group = self._ranks.of_restore()
        logged = has_log(self._backend, report.uid) if group is None else self._reader.logged
        if until == 0 or not logged:
            return report, None
        if selection is None:
            msg = "objects are renamed"
            raise NotLoggedError(msg)
        logs, rest_of = self._needed_logs(report.uid, state, until, together=group is not None)
        stored: Sequence[ObjectPath] = ()
        if not selection.everything:
            base = self._reader.open(report.step).opened
            stored = [record.path for record in base.contents.objects()]
        seconds = 0.0

        def replay(last: int, moved: Callable[[], None]) -> Sequence[StoredEntry]:
            nonlocal seconds
            if isinstance(logs, PenstockError):
                raise logs
            chosen = {
                rank: _up_to(entries, last, base=report.step, asked=until)
                for rank, entries in logs.items()
            }
            if not chosen[rest_of]:
                return ()
            seconds, count = self._replay.replay(
                state, chosen, rest_of=rest_of, selection=selection, stored=stored, moved=moved,
                ends_at_damage=group is None and until is None,
            )  # fmt: skip
            return chosen[rest_of][:count]

        sessions = []
        if not isinstance(logs, PenstockError):
            sessions = common_sessions([sessions_of(entries) for entries in logs.values()])
        if group is None:
            chosen = replay(max((s.last for s in sessions), default=report.step), lambda: None)
        else:
            chosen = replay_together(group, report.step, sessions, replay)
        if not chosen:
            return report, None
        times = {**report.seconds, "replay": seconds}
        step = chosen[-1].header.step
        report = replace(report, step=step, replayed_steps=len(chosen), seconds=times)
        return report, chosen[-1]

    def _needed_logs(
        self, uid: str, state: Mapping[str, Any], until: int | None, *, together: bool
    ) -> tuple[Mapping[int, Sequence[StoredEntry]] | PenstockError, int]:
        """Find the entries that this rank replays.

        If every rank holds whole parameters, a rank replays its own entries, or rank 0's if fewer
        ranks have logged. If parameters are divided among ranks, a rank replays its own entries if
        it holds the same parts as when they were logged, and otherwise those of all ranks. If ranks
        restore together, each entry's bytes are compared with its checksum here.

        Returns:
            The entries by the rank that logged them, or an error: the caller raises it only in the
            common round, so that the other ranks learn of it. Also the rank from whose entries this
            rank restores buffers, random state and other values.
        """
        rank, world_size = self._place()
        try:
            own = StoredLog(self._backend, uid, rank)
            head = own if own.entries else StoredLog(self._backend, uid, 0)
            if not head.entries:
                return {rank: ()}, rank
            first = head.entries[0]
            logged = first.header.world_size
            near = rank if rank < logged else 0
            alone = logged == world_size == 1
            same = None if alone else self._replay.is_cut_as(state, first)
            needed = [near] if same is None or (same and logged == world_size) else range(logged)
            known = {rank: own, 0: head} if own is not head else {rank: own}
            logs = [known.get(n) or StoredLog(self._backend, uid, n) for n in needed]
            # Ranks agree on the last step before they replay, so they verify entries here. A single
            # process verifies them during the replay.
            found = [log.whole(up_to=until) if together else log.up_to(until) for log in logs]
        except DamagedError as error:
            return NotLoggedError(str(error)), rank
        except PenstockError as error:
            return error, rank
        self._continues = logged == world_size and [*needed] == [rank]
        return dict(zip(needed, found, strict=True)), near

    def _base_of(self, step: int | str) -> int | None:
        """Return the saved step whose log contains `step`; None if no log does."""
        if not isinstance(step, int) or not self.may_log():
            return None
        self.recorder.flush()
        return base_of(self._backend, self._catalog, step)

    def _logs_after(self, step: int) -> Sequence[StoredLog]:
        self.recorder.flush()
        return logs_of(self._backend, self._catalog.record(step).uid)

    def _place(self) -> tuple[int, int]:
        place = self._ranks.place()
        return (0, 1) if place is None else (place.rank, place.world_size)


def has_log(backend: Backend, uid: str) -> bool:
    """Return whether the checkpoint with this uid has a log."""
    return bool(backend.list(log_prefix(uid)))


def _up_to(
    entries: Sequence[StoredEntry], last: int, *, base: int, asked: int | None
) -> list[StoredEntry]:
    """Return the entries up to `last`, the newest step that all ranks have.

    Raises:
        NotLoggedError: The user asked for a later step than `last`, or this rank lacks `last`.
    """
    if asked is not None and last < asked:
        msg = f"not every rank has step {asked} whole in its log, but all have step {last}"
        raise NotLoggedError(msg)
    chosen = [entry for entry in entries if entry.header.step <= last]
    if last != (chosen[-1].header.step if chosen else base):
        msg = f"the log of this rank has no entry of step {last}"
        raise NotLoggedError(msg)
    return chosen

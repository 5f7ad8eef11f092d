"""Runs the saves of a checkpointer: prepares each, starts it, waits for it, and cleans up.

Tested in `tests/integration/lifecycle/test_lifecycle.py`.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.core.abc import StateObject
from penstock.core.catalog.retention import Housekeeper, clean_up_after
from penstock.core.concurrency.garbage import collections_held
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.errors import ConfigError, LostRaceError, StepExistsError, UnsupportedStateError
from penstock.core.plan.save import Capture
from penstock.core.plan.writers import among
from penstock.core.ranks.group import cause_of
from penstock.core.reporting.events import SaveEvent
from penstock.core.reporting.progress import follow
from penstock.core.reporting.reports import CheckReport, skipped_save
from penstock.core.save import fence as fence_hook
from penstock.core.save.bases import KeptChunks, SaveBases
from penstock.core.save.job import SaveJob
from penstock.core.save.manifest import ManifestWriter
from penstock.core.save.merge import KnownParts
from penstock.core.save.metadata import check_metadata
from penstock.core.save.pending import Pending
from penstock.core.save.prepare import (
    KeptStaging,
    claim_generation,
    most_staging,
    plan_state,
    state_left_out,
)
from penstock.core.save.request import Destination, RankTurn, SaveSurroundings, SaveTurn
from penstock.core.save.rules import ChainTable
from penstock.core.tree.describe import describe_tree, warn_of_forms
from penstock.core.tree.known import Known
from penstock.core.types import valid_step
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from threading import Thread

    from penstock.core.abc import Node
    from penstock.core.catalog.catalog import Catalog
    from penstock.core.concurrency.workers import Workers
    from penstock.core.config.model import CheckpointerConfig
    from penstock.core.errors import StorageFullError
    from penstock.core.pipeline.staging import Staging
    from penstock.core.plugins.registry import Registry
    from penstock.core.ranks.group import RanksOfJob
    from penstock.core.reporting.events import EventStream
    from penstock.core.reporting.reports import Progress, SaveHandle, SaveReport
    from penstock.core.restore.earlier import EarlierReader
    from penstock.core.rounds.round import RankPlace
    from penstock.core.save.request import SaveRequest
    from penstock.core.storage.time_limited import TimeLimitedBackend
    from penstock.core.tiers.drains import Drains
    from penstock.core.tiers.host_copies import HostCopies
    from penstock.core.types import ObjectPath

log = logging.getLogger("penstock")

_EXIT_LOSES_SAVES = sys.version_info[:3] in {(3, 12, 0), (3, 12, 1)}
"""Whether this Python cannot start a thread at exit, which a save in flight may need."""

_MODES = ("blocking", "async", "lazy")
_BUSY = "another save was under way"
_IN_HANDLER = "skipped it: the signal handler that called save interrupted another save"


@dataclass(frozen=True, slots=True)
class _SaveCall:
    """The checked arguments of one call of `save`, and its time on the monotonic clock."""

    state: Mapping[str, Any]
    step: int
    mode: str
    metadata: Mapping[str, Any]
    overwrite: bool
    called: float
    turn: SaveTurn


class Saver(SaveSurroundings):
    """Saves to one run, one save at a time.

    The training thread uses it. A save thread calls the methods of `SaveSurroundings`.
    """

    def __init__(  # noqa: PLR0913 - parts, each by name
        self,
        backend: TimeLimitedBackend,
        catalog: Catalog,
        *,
        config: CheckpointerConfig,
        registry: Registry,
        workers: Workers,
        events: EventStream,
        tiers: Drains | None,
        copies: HostCopies,
        earlier: EarlierReader,
        ranks: RanksOfJob,
        on_report: Callable[[SaveReport], SaveReport] = lambda report: report,
    ) -> None:
        """Make the saver of a run.

        Args:
            backend: The backend of the run. Saves write to its inner backend, since `SaveJob`
                watches their progress; all other calls have a time limit each.
            catalog: The catalog of the run.
            config: Rules, budgets, retention and times.
            registry: Finds providers and codecs.
            workers: The threads.
            events: Receives the saves, and the deletions by retention.
            tiers: The tiers of the backend, if any.
            copies: The copies between hosts.
            earlier: Reads the checkpoints that saves refer to.
            ranks: Finds the ranks that save together.
            on_report: Adds facts about the run to the report of a committed save.
        """
        self.pending = Pending(tiers)
        self.memory = KeptStaging(config, workers, self.pending)
        """The staging memory."""
        self.restored_from: int | None = None
        """The step restored last; retention keeps it."""
        self._backend = backend
        self._catalog = catalog
        self._config = config
        self._registry = registry
        self._workers = workers
        self._events = events
        self._tiers = tiers
        self._copies = copies
        self._earlier = earlier
        self._ranks = ranks
        self._on_report = on_report
        self._kept = KeptChunks()
        self._table = ChainTable(config, registry)
        self._known = Known()  # replaced, not changed: a signal handler may use it meanwhile
        self._parts = KnownParts()
        self._scanned: set[ObjectPath] = set()  # objects already checked for state left out
        self._warned: set[str] = set()
        self._committed: int | None = None
        self._housekeeper = Housekeeper(
            backend,
            catalog,
            retention=config.retention,
            grace_s=config.grace_s,
            events=events,
        )

    @property
    def job(self) -> SaveJob | None:
        """The newest save, which may have ended."""
        return self.pending.job

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        mode: str | None,
        metadata: Mapping[str, Any] | None,
        overwrite: bool,
        on_progress: Callable[[Progress], None] | None,
        called: float,
    ) -> SaveHandle:
        """See `Checkpointer.save`; `called` is its time on the monotonic clock."""
        turn, group = SaveTurn(), self._ranks.of_save()
        if group is not None:
            turn = RankTurn(group=group, number=group.next_number(), known=self._parts)
        try:
            if not self.pending.may_prepare(self._config.on_busy):
                if turn.rank:  # the other ranks may not be busy, and then they wait for this one
                    turn.give_up(_IN_HANDLER)
                return self._skipped(valid_step(step), on_progress, _BUSY, turn)
            return self.pending.prepare(
                lambda: self._save(
                    _SaveCall(
                        state,
                        valid_step(step),
                        mode=self._valid_mode(mode),
                        metadata=check_metadata({} if metadata is None else metadata),
                        overwrite=overwrite,
                        called=called,
                        turn=turn,
                    ),
                    on_progress,
                )
            )
        except BaseException as error:
            if isinstance(error, StepExistsError):
                self.when_failed(error)
            if not turn.begun:
                turn.give_up(cause_of(error))
            raise

    def check(
        self,
        state: Mapping[str, Any],
        step: int | None,
        *,
        mode: str | None,
        metadata: Mapping[str, Any] | None,
        overwrite: bool,
    ) -> CheckReport:
        """See `Checkpointer.check`."""
        mode = self._valid_mode(mode)
        number = 0 if step is None else valid_step(step)
        check_metadata({} if metadata is None else metadata)
        self._backend.check_writable()
        if step is not None:
            self._claim_generation(number, overwrite=overwrite)
        request = self.prepare(state, mode=mode, step=number)
        return CheckReport(
            objects=request.objects,
            bytes_raw=request.plan.raw_bytes,
            deferred_bytes=request.plan.bytes_of(Capture.DEFERRED),
            staging_bytes=most_staging(request.staging_bytes, self._config),
        )

    def prepare(self, state: Mapping[str, Any], *, mode: str | None, step: int = 0) -> SaveRequest:
        """Plan a save, and touch the memory that it will copy to. See `Checkpointer.prepare`."""
        mode = self._valid_mode(mode)
        request = self._planned(state, step, 0, mode=mode, place=self._ranks.place())
        if mode != "blocking":
            self.memory.touch(request.staging_bytes, copied_from=request.copied_from)
        return request

    def expect(self, nbytes: int) -> None:
        """Touch the memory for saves of a state of `nbytes`, unless saves need none."""
        if self._config.mode != "blocking":
            self.memory.touch(nbytes)

    def distrust(self) -> None:
        """Make the next save read all frames that it refers to, and store damaged chunks again."""
        self._kept = KeptChunks()

    def close(self) -> None:
        """Give the staging memory back, unless a stuck store may still use it."""
        self.memory.close()

    def _valid_mode(self, mode: str | None) -> str:
        mode = mode or self._config.mode
        if mode not in _MODES:
            msg = f"mode={mode!r} is not one of {', '.join(_MODES)}"
            raise ConfigError(msg)
        return mode

    def _claim_generation(self, step: int, *, overwrite: bool) -> tuple[int, int | None]:
        """Return the generation that a save of `step` publishes, and the latest step.

        Raises:
            StepExistsError: This step or a later one is committed, and `overwrite` is off.
            StorageError: A tier does not answer, and `overwrite` is on.
        """
        # A missing tier may have a higher generation, and the overwrite would count as older.
        entries = (
            self._catalog.entries()
            if self._tiers is None
            else self._tiers.entries(strict=overwrite)
        )
        # The run continued from an older step, so incomplete steps must not make the save fail.
        incomplete = self._catalog.incomplete_from(step, entries)
        whole = {number: names for number, names in entries.items() if number not in incomplete}
        overwrite |= step in incomplete and max(whole, default=-1) < step
        generation = claim_generation(
            step,
            entries if overwrite else whole,
            url=self._backend.url,
            overwrite=overwrite,
            may_be_deleted=self._backend.may_be_deleted,
        )
        return generation, max(whole, default=None)

    def _save(self, call: _SaveCall, on_progress: Callable[[Progress], None] | None) -> SaveHandle:
        if not self._take_turn(call.turn):
            self.pending.prepared()
            return self._skipped(call.step, on_progress, _BUSY, call.turn)
        if _EXIT_LOSES_SAVES and call.mode != "blocking" and "exit" not in self._warned:
            self._warned.add("exit")
            log.warning(
                "Python %s loses a save that is in flight when the program ends: call close(), or "
                "use 3.12.2 or later",
                sys.version.split()[0],
            )
        with collections_held:
            job = self._prepared(call)
            if job is None:
                self.pending.prepared()
                reason = "no tier has room for it; see the log"
                return self._skipped(call.step, on_progress, reason, call.turn)
            watching = self._begin(job, on_progress)
            if call.mode != "blocking":
                self._wait(job, job.capture_now)
                self.pending.raise_earlier(job)
                return job.handle
        self._wait(job, job.capture_now)
        job.wait_durable()
        if watching is not None:
            watching.join(self._workers.timing.last_progress_s)
        self.pending.raise_earlier(job)
        job.handle.result()
        return job.handle

    def _take_turn(self, turn: SaveTurn) -> bool:
        """Wait for the save under way; return False to skip this save.

        With several ranks, only rank 0 decides.
        """
        on_busy = self._config.on_busy
        if not (isinstance(turn, RankTurn) and turn.rank):
            return self.pending.take_turn(on_busy)
        if on_busy == "skip":
            # If rank 0 is no longer busy, it posts no verdict before this rank arrives.
            timing = self._workers.timing
            deadline, pause_s = Deadline(turn.group.timeout_s), timing.busy_poll_first_s
            while not (self.pending.take_turn("skip") or deadline.is_over()):
                verdict = turn.group.word(turn.number)
                if verdict is not None:
                    if verdict.stop:
                        return False
                    break
                self.pending.rest(pause_s)
                pause_s = min(2 * pause_s, timing.busy_poll_most_s)
        return self.pending.take_turn("wait")

    def _prepared(self, call: _SaveCall) -> SaveJob | None:
        """Return the planned save; None if no tier has room for it."""
        turn = call.turn
        generation = 0
        if not turn.rank:  # rank 0 sends them to the others
            generation, turn.latest = self._claim_generation(call.step, overwrite=call.overwrite)
        request = self._planned(call.state, call.step, generation, mode=call.mode, place=turn.place)
        turn.bring(request)
        destination = self._destination(request, turn)
        if destination is None:
            return None
        staging = self.memory.get(request, skip=turn.skip)
        job = SaveJob(
            request,
            manifest=ManifestWriter(request, call.metadata, shipper=self._registry.shipper),
            destination=destination,
            staging=staging,
            workers=self._workers,
            surroundings=self,
            called=call.called,
            bases=self._bases(request),
            turn=turn,
        )
        _log_plan(job, staging)
        return job

    def _destination(self, request: SaveRequest, turn: SaveTurn) -> Destination | None:
        """Return where the save writes to; None if no tier has room for it."""
        if self._tiers is None:
            return Destination(self._backend.inner)
        if isinstance(turn, RankTurn):
            return self._tiers.destination_of_ranks(request, turn)
        return self._tiers.destination(request)

    def _bases(self, request: SaveRequest) -> SaveBases | None:
        encodes = any(chain is not None and chain.needs_base for chain in request.chains)
        if not encodes and not self._config.share:
            return None
        if not self.pending.released:
            self._kept = KeptChunks()  # a thread of the last save may still write to the old one
        return SaveBases(
            request.plan,
            request.chains,
            step=request.step,
            kept=self._kept,
            earlier=self._earlier,
            deltas=self._config.deltas,
            share=request.share,
            block_bytes=request.block_bytes,
        )

    def _begin(self, job: SaveJob, on_progress: Callable[[Progress], None] | None) -> Thread | None:
        """Make `job` the save under way, and start its capture."""
        try:
            self.pending.begin(job)
            with job.ending.calling_back():
                self._events.announce(job.handle)
            watching = self._watch(job.handle, on_progress)
            if job.deferred_bytes:
                fence_hook.arm(job, self._config.fence_timeout_s)
                job.handle.committed.add_done_callback(lambda _: fence_hook.disarm(job))
            else:
                self._warn_if_not_lazy(job.request)

            def begin() -> None:
                job.begin_capture()
                self.pending.prepared()

            # The other ranks learn of the save now. If the save were prepared again after that,
            # they would already have given it up.
            self.pending.outlast(begin)
        except BaseException as error:
            job.interrupt(error)
            fence_hook.disarm(job)
            raise
        return watching

    def _wait(self, job: SaveJob, wait: Callable[[], None]) -> None:
        """Wait for `job`; give up the save if the wait is interrupted, for example by Ctrl-C."""
        try:
            self.pending.outlast(wait)
        except BaseException as error:
            job.interrupt(error)
            fence_hook.disarm(job)
            raise

    def _planned(
        self,
        state: Mapping[str, Any],
        step: int,
        generation: int,
        *,
        mode: str,
        place: RankPlace | None,
    ) -> SaveRequest:
        known = Known(self._known)
        description = describe_tree(
            state,
            providers=self._registry.providers,
            allow_pickle=self._config.allow_pickle,
            rank=0 if place is None else place.rank,
            world_size=1 if place is None else place.world_size,
            known=known,
        )
        if not description.entries and place is None:
            msg = "the state is empty: there is nothing to save"
            raise UnsupportedStateError(msg)
        if place is not None and place.members:
            members = frozenset(place.members)
            entries = tuple(_among(entry, members) for entry in description.entries)
            description = replace(description, entries=entries)
        warn_of_forms(description, self._registry.providers)
        level = logging.INFO if place is not None and place.rank else logging.WARNING
        for sentence in state_left_out(description, self._scanned):
            log.log(level, "%s (logged once)", sentence)
        self._scanned.update(seen.path for seen in description.seen)
        request = plan_state(
            description,
            config=self._config,
            table=self._table,
            step=step,
            generation=generation,
            mode=mode,
            share=self._config.share,
            derive=self._config.share,
            place=place,
            known=known,
        )
        self._known = known
        if self._config.rules:
            paths = [e.path for e in description.entries if isinstance(e, StateObject)]
            self._table.warn_of_unused(paths, step)
        return request

    def _skipped(
        self,
        step: int,
        on_progress: Callable[[Progress], None] | None,
        reason: str,
        turn: SaveTurn,
    ) -> SaveHandle:
        turn.begun = True
        turn.skip_save(reason)
        self._events.emit(SaveEvent("skipped", step))
        handle = skipped_save(step, reason)
        self._watch(handle, on_progress)
        return handle

    def _watch(
        self, handle: SaveHandle, on_progress: Callable[[Progress], None] | None
    ) -> Thread | None:
        if on_progress is None:
            return None
        return self._workers.spawn(
            "progress", partial(follow, handle, on_progress, self._workers.timing)
        )

    def _warn_if_not_lazy(self, request: SaveRequest) -> None:
        captures = {chunk.capture for chunk in request.plan.chunks}
        # With several ranks, one rank may write nothing that an optimizer claims.
        tensors = Capture.NOW in captures and Capture.DEFERRED not in captures
        if request.mode == "lazy" and tensors:
            self._warn_once(
                "step %d: the lazy save defers nothing, so it blocks as long as an async one: no "
                "optimizer in the state claims tensors. Put the torch.optim.Optimizer itself into "
                "the state (the inner one, if yours is a wrapper that Penstock does not know); "
                "capturable optimizers and shared memory are not claimed. You can name tensors "
                'that change only after the fence: defer="ema/**" (logged once)',
                request.step,
            )

    def before_write(self, request: SaveRequest, url: str) -> None:
        """See `SaveSurroundings`."""
        if not request.rank and not self._is_tier_silent():
            protect = self._protected_from(request.step)
            self._housekeeper.before_save(url, request.plan.raw_bytes, protect=protect)

    def when_full(
        self, request: SaveRequest, uid: str, error: StorageFullError
    ) -> StorageFullError:
        """See `SaveSurroundings`."""
        if request.rank or self._is_tier_silent():
            return error
        protect = self._protected_from(request.step)
        return self._housekeeper.when_full(error, uid, protect=protect)

    def when_failed(self, error: BaseException) -> None:
        """See `SaveSurroundings`."""
        others = isinstance(error, (LostRaceError, StepExistsError))
        if others and (note := self._ranks.alone_among_several()):
            error.add_note(note)

    def reported(self, report: SaveReport) -> SaveReport:
        """See `SaveSurroundings`."""
        return self._on_report(report)

    def after_commit(self, request: SaveRequest, report: SaveReport) -> None:
        """See `SaveSurroundings`."""
        self._committed = report.step
        staging = self.memory.staging
        if request.mode != "blocking" and staging is not None and staging.was_short:
            missing = request.staging_bytes - staging.budget_bytes
            if missing > 0:  # else only its gaps did not fit
                self._warn_once(
                    "staging is too small for the state: in step %d, training was blocked until "
                    "the store had written the %s that did not fit; raise staging_bytes (logged "
                    "once)",
                    report.step,
                    size_text(missing),
                )
        if self._is_tier_silent():
            # The next save would wait for the clean-up as long as the tier hangs. The first save
            # after the tier is back cleans up.
            log.debug("step %d: no clean-up while a tier is away", report.step)
            return
        self._catalog.note_own(report.uid)
        if not request.rank:
            # The replaced generation may be the newest checkpoint that other hosts have.
            self._clean_up(report, overwrite=report.generation > 0 and not self._copies.leads)

    def replicate(
        self, request: SaveRequest, report: SaveReport, on_end: Callable[[bool], None]
    ) -> None:
        """See `SaveSurroundings`. Afterwards, older checkpoints may be deleted."""

        def ended(done: bool) -> None:  # noqa: FBT001 - the result of a future
            on_end(done)
            if done and not request.rank:
                self._clean_up(report, overwrite=report.generation > 0)

        self._copies.replicate(report, ended)

    def _clean_up(self, report: SaveReport, *, overwrite: bool) -> None:
        # Once the checkpoint is replicated, this runs beside the user's calls.
        with self._catalog.choosing:
            clean_up_after(
                report,
                self._catalog,
                overwrite=overwrite,
                retention=self._config.retention,
                protect=self._protected(),
                events=self._events,
            )

    def _is_tier_silent(self) -> bool:
        return self._tiers is not None and self._tiers.is_silent()

    def _warn_once(self, message: str, *values: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *values)

    def _protected(self) -> set[int]:
        """Return the steps that retention keeps: the last restored and the last committed.

        Also those that must be kept until a newer one is replicated.
        """
        newest = {s for s in (self.restored_from, self._committed) if s is not None}
        return newest | self._copies.kept()

    def _protected_from(self, step: int) -> set[int]:
        """Return the steps that retention keeps even if a save of `step` has no room left.

        An overwritten step stays until the save has replaced it. A process that resumed from a
        checkpoint no longer needs it after its own first commit. Otherwise a disk with room for few
        checkpoints would never have room for another.
        """
        if self._committed is None:
            return {step, *self._protected()}
        return {step, self._committed, *self._copies.kept()}


def _among(entry: StateObject | Node, members: frozenset[int]) -> StateObject | Node:
    if not isinstance(entry, StateObject) or entry.replica is None:
        return entry
    return entry._replace(replica=among(entry.replica, members))


def _log_plan(job: SaveJob, staging: Staging) -> None:
    if not log.isEnabledFor(logging.DEBUG):
        return
    request = job.request
    chunks = request.plan.chunks
    log.debug(
        "step %d: %s save %s-%d of %d objects, %d bytes (%d deferred), in %d chunks (%d slabs, %d "
        "encoded); needs %d bytes of staging, may use %d",
        request.step,
        request.mode,
        job.uid,
        request.generation,
        request.objects,
        request.plan.raw_bytes,
        job.deferred_bytes,
        len(chunks),
        sum(chunk.slab for chunk in chunks),
        sum(chunk.chain != 0 for chunk in chunks),
        request.staging_bytes,
        staging.budget_bytes,
    )

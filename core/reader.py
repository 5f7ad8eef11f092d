"""Restores, loads, opens and verifies the checkpoints of a run.

Tested in `tests/core/restore/test_together.py`.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from penstock.core.catalog.catalog import Catalog
from penstock.core.errors import (
    CheckpointNotFoundError,
    ConfigError,
    DamagedError,
    RestoreError,
)
from penstock.core.foreign import memory_permitting
from penstock.core.format.records import data_prefix
from penstock.core.hosts.reading import Sharing
from penstock.core.pipeline.loader import Loader
from penstock.core.ranks.group import SEVERAL_CHECKPOINTERS, cause_of
from penstock.core.ranks.templates import TemplatesOfRanks
from penstock.core.reporting.events import EventStream, RestoreEvent, VerifyEvent
from penstock.core.reporting.progress import metered
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.restore.fallback import Candidates, Overwritten
from penstock.core.restore.fill import Opened
from penstock.core.restore.inspector import Inspector
from penstock.core.restore.restore import build_new, restore_into, warn_of_unexpected
from penstock.core.restore.together import RestoreTogether
from penstock.core.save import fence as fence_hook
from penstock.core.storage.failover import ObservedBackend
from penstock.core.tiers.losses import lost_by_tiers
from penstock.core.tiers.repairs import verify_and_repair
from penstock.core.tree.select import Rename, Selection
from penstock.core.types import valid_step

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from penstock.core.concurrency.workers import Workers
    from penstock.core.config.model import CheckpointerConfig
    from penstock.core.format.records import CommitRecord
    from penstock.core.plugins.registry import Registry
    from penstock.core.ranks.group import RankGroup
    from penstock.core.reporting.reports import (
        Progress,
        RestoreReport,
        VerifyReport,
    )
    from penstock.core.storage.time_limited import TimeLimitedBackend
    from penstock.core.tiers.drains import Drains
    from penstock.core.tree.select import RenameSpec

T = TypeVar("T")

_Rescued: TypeAlias = tuple[tuple[str, str], ...]

# Maximum blobs that a rank reports to rank 0. A few suffice: rank 0 repairs whole checkpoints.
_MOST_REPORTED = 16


@dataclass(frozen=True, slots=True)
class _RestoreTurn:
    """A restore round that this rank takes part in.

    Attributes:
        group: The ranks.
        number: The number of the round.
        called: Time of this rank's call, on the monotonic clock; None if unknown.
    """

    group: RankGroup
    number: int
    called: float | None


class Reader:
    """Reads the checkpoints of one run, and starts repairs of the damaged copies that it finds."""

    def __init__(  # noqa: PLR0913 - options, each by name
        self,
        backend: TimeLimitedBackend,
        *,
        config: CheckpointerConfig,
        registry: Registry,
        workers: Workers,
        events: EventStream,
        drains: Drains | None,
        ranks: Callable[[], RankGroup | None] = lambda: None,
        has_log: Callable[[str], bool] = lambda _: False,
        repair: Callable[[CommitRecord, Collection[str]], None] = lambda *_: None,
    ) -> None:
        """Read the run of `backend`.

        Args:
            backend: The backend of the run. Frames are read from the backend that it wraps: the
                loader has its own watchdog.
            config: The configuration of the run.
            registry: Finds providers and codecs.
            workers: The threads that verify and place data.
            events: Receives an event for each restore, load and verification.
            drains: Copies between the backend's tiers; None without tiers.
            ranks: Returns the ranks that restore and load together, or None for a single process.
            has_log: Returns whether the checkpoint with a uid has a log.
            repair: Called with a commit record and files that a read found damaged somewhere; on
                hosts, replaces those that are damaged on this host.
        """
        self._repair = repair
        self._config = config
        self._registry = registry
        self._workers = workers
        self._events = events
        self._ranks = ranks
        self._has_log = has_log
        self.logged = False
        """Whether rank 0 found a log of the checkpoint that the ranks restored last."""
        self.session = ""
        """Random digits of the ranks' last restore, the same on all ranks."""
        self._repairs = None if drains is None else drains.repairs
        # Blobs and records that were damaged or missing in one tier, each with the tier that had a
        # good copy. The next report lists them, and the good copies repair them.
        self._rescued: list[tuple[str, str]] = []
        note = partial(_note, self._rescued)
        self._watched = ObservedBackend(backend, note)
        inspector = Inspector(registry)
        self.catalog = Catalog(
            self._watched,
            before_delete=_nothing if drains is None else drains.withdraw,
            delete_failed=_nothing if drains is None else drains.reinstate,
            look=inspector.is_whole,
            note_own=inspector.note_own,
        )
        """The checkpoints of the run."""
        self.loader = Loader(
            backend.inner, workers, io_timeout_s=config.io_timeout_s, on_failover=note
        )

    def restore(  # noqa: PLR0913 - options, each by name
        self,
        state: Mapping[str, Any],
        step: int | str = "latest",
        *,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        strict: bool = True,
        cast: bool = False,
        rename: RenameSpec = None,
        on_damage: str = "raise",
        on_progress: Callable[[Progress], None] | None = None,
        called: float | None = None,
    ) -> RestoreReport:
        """See `Checkpointer.restore`; `called` is the monotonic time of the call, default now."""
        round_ = self._begin_round(called)
        with _giving_up(round_):
            # Live objects are about to change, and another run's save may be capturing them.
            fence_hook.fence_all()
            selection, renaming = Selection(include, exclude), Rename(rename)
            overwritten = Overwritten(
                state, self._registry.providers, allow_pickle=self._config.allow_pickle
            )

        templates = None if round_ is None else TemplatesOfRanks(selection.shown)

        def attempt(checkpoint: Opened) -> RestoreReport:
            return restore_into(
                checkpoint,
                state,
                selection=selection,
                rename=renaming,
                strict=strict,
                cast=cast,
                overwritten=overwritten,
                templates=templates,
            )

        (report, rescued), skipped = self._read(
            "restore", step, on_damage, attempt, on_progress, round_, templates
        )
        if templates is not None:
            unexpected = tuple(report.unexpected[number] for number in templates.lacked)
            report = replace(report, unexpected=unexpected)
            warn_of_unexpected(report.step, unexpected)
        report = replace(report, fell_back_from=skipped, rescued=rescued)
        return self._report_read("restore", report)

    def load(
        self,
        step: int | str = "latest",
        *,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        device: str | None = None,
        named_optimizers: bool = False,
        on_damage: str = "raise",
        on_progress: Callable[[Progress], None] | None = None,
        called: float | None = None,
    ) -> Any:
        """See `Checkpointer.load`; `called` is the monotonic time of the call, default now."""
        round_ = self._begin_round(called)
        with _giving_up(round_):
            selection = Selection(include, exclude)

        def attempt(checkpoint: Opened) -> tuple[Any, RestoreReport]:
            return build_new(
                checkpoint, selection=selection, device=device, named_optimizers=named_optimizers
            )

        ((tree, report), rescued), skipped = self._read(
            "load", step, on_damage, attempt, on_progress, round_
        )
        self._report_read("load", replace(report, fell_back_from=skipped, rescued=rescued))
        return tree

    def open(self, step: int | str = "latest") -> Checkpoint:
        """See `Checkpointer.open`."""
        return Checkpoint(self._open(step))

    def verify(
        self,
        step: int | str = "latest",
        *,
        deep: bool = True,
        repair: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
        more: Callable[[Checkpoint, VerifyReport], VerifyReport] = lambda _, report: report,
    ) -> VerifyReport:
        """See `Checkpointer.verify`; `more` adds to the report."""
        checkpoint = self.open(step)
        if repair:
            report = verify_and_repair(
                checkpoint, self._repairs, deep=deep, on_progress=on_progress
            )
        else:
            report = checkpoint.verify(deep=deep, on_progress=on_progress)
        report = more(checkpoint, report)
        self._events.emit(VerifyEvent("verified", report.step, report))
        return report

    def _open(self, step: int | str) -> Opened:
        if step == "latest":
            return self._open_record(self.catalog.require_newest())
        return self._open_record(self.catalog.record(valid_step(step)))

    def _open_record(self, record: CommitRecord) -> Opened:
        if why := self.catalog.incompleteness(record):
            msg = f"{why}; restore another step"
            raise DamagedError(msg, [data_prefix(record.uid)])
        allow_pickle = self._config.allow_pickle
        return Opened.open(
            self._watched, record, self.loader, self._registry, allow_pickle=allow_pickle
        )

    def _begin_round(self, called: float | None) -> _RestoreTurn | None:
        """Return the next restore round of all ranks; None for a single process.

        Called before anything can fail, so that all ranks count the same rounds.
        """
        group = self._ranks()
        return None if group is None else _RestoreTurn(group, group.next_number(), called)

    def _read(  # noqa: PLR0917 - the arguments of both callers
        self,
        verb: str,
        step: int | str,
        on_damage: str,
        attempt: Callable[[Opened], T],
        on_progress: Callable[[Progress], None] | None,
        round_: _RestoreTurn | None,
        templates: TemplatesOfRanks | None = None,
    ) -> tuple[tuple[T, _Rescued], tuple[int, ...]]:
        """Read a step, or with fallback the newest whole step, and emit events for each attempt.

        Args:
            verb: `restore` or `load`.
            step: As for the caller.
            on_damage: As for the caller.
            attempt: Reads an open checkpoint.
            on_progress: As for the caller.
            round_: The round of all ranks; None for a single process.
            templates: The templates of the ranks, for a restore of several ranks.

        Returns:
            The result of `attempt`, with the blobs and records that came from another tier, and
            the damaged steps that were skipped.
        """
        # Views that `open` returned may have noted earlier damage in any step.
        earlier = len(self._rescued)
        trying: int | None = None

        def try_step(number: int, open_step: Callable[[], Opened]) -> tuple[T, _Rescued]:
            nonlocal trying, earlier
            trying = number
            self._events.emit(RestoreEvent(f"{verb}_started", number))
            meter.begin("plan")
            try:
                checkpoint = replace(open_step(), meter=meter)
                if round_ is not None:
                    place = round_.group.place
                    checkpoint = replace(checkpoint, rank=place.rank, world_size=place.world_size)
                with memory_permitting(f"step {number}"):
                    result = attempt(checkpoint)
            except BaseException:
                earlier = len(self._rescued)  # the report is only about the step that can be read
                raise
            if checkpoint.backend.tiers:
                contents, known = checkpoint.contents, [name for name, _ in self._rescued]
                self._rescued += lost_by_tiers(
                    checkpoint.backend, contents.record, contents.manifest.lengths(), known=known
                )
            rescued = dict.fromkeys(self._rescued[earlier:])
            if rescued:
                self._repair(checkpoint.contents.record, {name for name, _ in rescued})
            return result, tuple(rescued)

        if round_ is None:
            candidates = Candidates(self._candidates(step, on_damage))
            trying = candidates.first
            read = partial(_read_alone, candidates, try_step)
        else:
            with _giving_up(round_):
                together = self._together(
                    round_.group, verb, step, on_damage, try_step, templates=templates
                )
            on_progress = together.listen(on_progress)
            read = partial(self._read_together, together, round_)

        try:
            with metered(on_progress, f"the {verb}", self._workers.timing) as meter:
                return read()
        except BaseException as error:
            if trying is not None:
                self._events.emit(RestoreEvent(f"{verb}_failed", trying, error=error))
            raise

    def _together(
        self,
        group: RankGroup,
        verb: str,
        step: int | str,
        on_damage: str,
        try_step: Callable[[int, Callable[[], Opened]], tuple[T, _Rescued]],
        *,
        templates: TemplatesOfRanks | None,
    ) -> RestoreTogether[tuple[T, _Rescued]]:
        """Return this rank's side of a restore or load of all ranks."""
        return RestoreTogether(
            group,
            verb=verb,
            step=step if step == "latest" else valid_step(step),
            fallback=on_damage == "fallback",
            candidates=lambda: Candidates(self._candidates(step, on_damage)),
            follow=self._follow,
            attempt=lambda opened: try_step(opened.step, lambda: opened),
            templates=templates,
            tell=lambda result: {"rescued": result[1][:_MOST_REPORTED]},
            has_log=self._has_log,
            sharing=Sharing(self._config.read_once_per_host, self._config.read_once_per_job),
            network=self._config.rank_network,
        )

    def _read_together(
        self, together: RestoreTogether[tuple[T, _Rescued]], turn: _RestoreTurn
    ) -> tuple[tuple[T, _Rescued], tuple[int, ...]]:
        result = together.run(turn.number, turn.called)
        self.logged, self.session = together.logged, together.session
        for report in together.told.values():  # rank 0 repairs the damage that any rank reports
            self._rescued += [(name, tier) for name, tier in report["rescued"]]
        return result

    def _follow(self, step: int, uid: str) -> Opened:
        """Open the checkpoint that rank 0 has chosen.

        Raises:
            RestoreError: This rank sees another checkpoint at that step, or none.
        """
        try:
            record = self.catalog.record(step)
        except CheckpointNotFoundError as error:
            msg = (
                f"step {step}, which rank 0 has chosen, is not under {self._watched.url} as this "
                f"rank sees it: is the folder shared by all hosts? {SEVERAL_CHECKPOINTERS}"
            )
            raise RestoreError(msg) from error
        if record.uid != uid:
            msg = (
                f"step {step} under {self._watched.url} is not the checkpoint that rank 0 sees: is "
                "the folder shared by all hosts, or does another job save there? "
                f"{SEVERAL_CHECKPOINTERS}"
            )
            raise RestoreError(msg)
        return self._open_record(record)

    def _report_read(self, verb: str, report: RestoreReport) -> RestoreReport:
        rescued = dict.fromkeys(self._rescued)
        self._rescued.clear()
        if rescued and self._repairs is not None:
            self._repairs.begin(tuple(rescued))
        self._events.emit(RestoreEvent(f"{verb}_done", report.step, report=report))
        return report

    def _candidates(self, step: int | str, on_damage: str) -> Mapping[int, Callable[[], Opened]]:
        """Return the steps to try, in order, each with a function that opens it.

        With fallback these include all older steps. The steps are listed once, and each commit
        record is read at most once.
        """
        if on_damage not in {"raise", "fallback"}:
            msg = f"on_damage={on_damage!r} is neither 'raise' nor 'fallback'"
            raise ConfigError(msg)
        if on_damage == "raise":
            if step != "latest":
                return {(number := valid_step(step)): lambda: self._open(number)}
            checkpoint = self._open(step)
            self.catalog.check_not_reduced(checkpoint.step)
            return {checkpoint.step: lambda: checkpoint}
        entries = self.catalog.entries()
        newest_first = list(entries)[::-1]
        if step != "latest":
            number = valid_step(step)
            newest_first = [number, *(s for s in newest_first if s < number)]
        elif not newest_first:
            self.catalog.require_newest()  # raises, since there is no checkpoint

        def open_listed(number: int) -> Opened:
            return self._open_record(self.catalog.record(number, entries=entries))

        return {s: partial(open_listed, s) for s in newest_first}


@contextmanager
def _giving_up(round_: _RestoreTurn | None) -> Iterator[None]:
    """Report an error in the block to the other ranks, which wait for this rank to join."""
    try:
        yield
    except BaseException as error:
        if round_ is not None:
            round_.group.give_up(round_.number, cause_of(error))
        raise


def _read_alone(
    candidates: Candidates, try_step: Callable[[int, Callable[[], Opened]], T]
) -> tuple[T, tuple[int, ...]]:
    return candidates.use(try_step), tuple(candidates.skipped)


def _note(rescued: list[tuple[str, str]], name: str, good: str) -> None:
    rescued.append((name, good))


def _nothing(_uids: Collection[str]) -> None:
    """Do nothing, since without tiers a deletion has no copies to withdraw."""

"""The reading half of a run: restores, loads, opens and verifies its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from penstock.core.catalog.catalog import Catalog
from penstock.core.errors import ConfigError
from penstock.core.foreign import memory_permitting
from penstock.core.pipeline.reader import Loader
from penstock.core.reporting.events import EventStream, RestoreEvent, VerifyEvent
from penstock.core.reporting.progress import metered
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.restore.contents import Contents
from penstock.core.restore.fallback import Overwritten, with_fallback
from penstock.core.restore.fill import Opened
from penstock.core.restore.inspector import Inspector
from penstock.core.restore.restore import build_new, restore_into, with_history
from penstock.core.save import fence as fence_hook
from penstock.core.storage.failover import ObservedBackend
from penstock.core.tiers.losses import lost_by_tiers
from penstock.core.tiers.verify_repair import Mending, verify_and_repair
from penstock.core.tree.select import Rename, Selection
from penstock.core.types import valid_step

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from penstock.core.concurrency.workers import Workers
    from penstock.core.config.model import CheckpointerConfig
    from penstock.core.format.records import CommitRecord
    from penstock.core.plugins.registry import Registry
    from penstock.core.reporting.progress import Meter
    from penstock.core.reporting.reports import (
        Progress,
        RestoreReport,
        VerifyReport,
    )
    from penstock.core.storage.time_limited import PatientBackend
    from penstock.core.tiers.drains import Drains
    from penstock.core.tree.select import RenameSpec

T = TypeVar("T")

_Rescued: TypeAlias = tuple[tuple[str, str], ...]


class Reader:
    """Reads the checkpoints of one run, and has copies that turn out to be damaged repaired."""

    def __init__(
        self,
        backend: PatientBackend,
        *,
        config: CheckpointerConfig,
        registry: Registry,
        workers: Workers,
        events: EventStream,
        drains: Drains | None,
    ) -> None:
        """Read the run of `backend`.

        Args:
            backend: Where; frames are read from the backend inside, and are watched there.
            config: Whether pickles may be read, and how long a store may be stuck.
            registry: Where providers and codecs are looked up.
            workers: Threads.
            events: Are told of what is read.
            drains: What copies between the tiers of the backend, if it has any.
        """
        self._config = config
        self._registry = registry
        self._workers = workers
        self._events = events
        self._repairs = None if drains is None else drains.repairs
        # Damaged or missing in one tier, and the tier that had it.
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
        """All checkpoints of the run."""
        self._loader = Loader(
            backend.inner, workers, io_timeout_s=config.io_timeout_s, on_failover=note
        )

    def restore(
        self,
        state: Mapping[str, Any],
        step: int | str = "latest",
        *,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        strict: bool = True,
        rename: RenameSpec = None,
        on_damage: str = "raise",
        on_progress: Callable[[Progress], None] | None = None,
    ) -> RestoreReport:
        """See `Checkpointer.restore`."""
        # Live objects are about to change, perhaps those of another run's pending save.
        fence_hook.fence_all()
        selection, renaming = Selection(include, exclude), Rename(rename)
        overwritten = Overwritten(
            state, self._registry.providers, allow_pickle=self._config.allow_pickle
        )

        def attempt(checkpoint: Checkpoint, meter: Meter) -> RestoreReport:
            return restore_into(
                replace(checkpoint.opened, meter=meter),
                state,
                selection=selection,
                rename=renaming,
                strict=strict,
                overwritten=overwritten,
            )

        (report, rescued), skipped = self._read("restore", step, on_damage, attempt, on_progress)
        return self._tell_read("restore", with_history(report, skipped, rescued))

    def load(
        self,
        step: int | str = "latest",
        *,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        device: str | None = None,
        on_damage: str = "raise",
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Any:
        """See `Checkpointer.load`."""
        selection = Selection(include, exclude)

        def attempt(checkpoint: Checkpoint, meter: Meter) -> tuple[Any, RestoreReport]:
            opened = replace(checkpoint.opened, meter=meter)
            return build_new(opened, selection=selection, device=device)

        ((tree, report), rescued), skipped = self._read(
            "load", step, on_damage, attempt, on_progress
        )
        self._tell_read("load", with_history(report, skipped, rescued))
        return tree

    def open(self, step: int | str = "latest") -> Checkpoint:
        """See `Checkpointer.open`."""
        if step == "latest":
            return self._open(self.catalog.require_newest())
        number = valid_step(step)
        return self._open(self.catalog.record(number))

    def verify(
        self,
        step: int | str = "latest",
        *,
        deep: bool = True,
        repair: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> VerifyReport:
        """See `Checkpointer.verify`."""
        checkpoint = self.open(step)
        if repair:
            mending = None
            if self._repairs is not None:
                bring = self._repairs.bring
                mending = Mending(bring, self._workers, self._config.io_timeout_s)
            report = verify_and_repair(checkpoint, mending, deep=deep, on_progress=on_progress)
        else:
            report = checkpoint.verify(deep=deep, on_progress=on_progress)
        self._events.emit(VerifyEvent("verified", report.step, report))
        return report

    # ------------------------------------------------------------------------------------------

    def _open(self, record: CommitRecord) -> Checkpoint:
        contents = Contents(self._watched, record, self._registry)
        allow_pickle = self._config.allow_pickle
        opened = Opened(self._watched, contents, self._loader, self._registry, allow_pickle)
        return Checkpoint(opened)

    def _read(
        self,
        verb: str,
        step: int | str,
        on_damage: str,
        attempt: Callable[[Checkpoint, Meter], T],
        on_progress: Callable[[Progress], None] | None,
    ) -> tuple[tuple[T, _Rescued], tuple[int, ...]]:
        """Try to read a step, or with fallback the newest whole one, and emit events about it.

        Returns:
            What `attempt` gave, what of it came from another tier, and the damaged candidates.
        """
        earlier = len(self._rescued)  # by views, of whatever step
        candidates = self._candidates(step, on_damage)
        trying = next(iter(candidates))

        def one(number: int) -> tuple[T, _Rescued]:
            nonlocal trying, earlier
            trying = number
            self._events.emit(RestoreEvent(f"{verb}_started", number))
            meter.begin("plan")
            try:
                checkpoint = candidates[number]()
                with memory_permitting(f"step {number}"):
                    found = attempt(checkpoint, meter)
            except BaseException:
                earlier = len(self._rescued)  # the report is of the step that could be read
                raise
            contents, known = checkpoint.contents, [name for name, _ in self._rescued]
            self._rescued += lost_by_tiers(
                checkpoint.backend, contents.record, contents.lengths(), known=known
            )
            return found, tuple(dict.fromkeys(self._rescued[earlier:]))

        try:
            with metered(on_progress, f"the {verb}", self._workers.timing) as meter:
                return with_fallback(list(candidates), one)
        except BaseException as error:
            self._events.emit(RestoreEvent(f"{verb}_failed", trying, error=error))
            raise

    def _tell_read(self, verb: str, report: RestoreReport) -> RestoreReport:
        rescued = dict.fromkeys(self._rescued)
        self._rescued.clear()
        if rescued and self._repairs is not None:
            self._repairs.begin(tuple(rescued))
        self._events.emit(RestoreEvent(f"{verb}_done", report.step, report=report))
        return report

    def _candidates(
        self, step: int | str, on_damage: str
    ) -> Mapping[int, Callable[[], Checkpoint]]:
        """Steps to try, in order, and what opens each: one, or with fallback older ones as well.

        The store is asked once which steps there are, and once for each commit record.
        """
        if on_damage not in {"raise", "fallback"}:
            msg = f"on_damage={on_damage!r} is neither 'raise' nor 'fallback'"
            raise ConfigError(msg)
        if on_damage == "raise":
            if step != "latest":
                return {(number := valid_step(step)): lambda: self.open(number)}
            checkpoint = self.open()
            return {checkpoint.step: lambda: checkpoint}
        entries = self.catalog.entries()
        newest_first = list(entries)[::-1]
        if step != "latest":
            number = valid_step(step)
            newest_first = [number, *(s for s in newest_first if s < number)]
        elif not newest_first:
            self.catalog.require_newest()  # which raises

        def open_listed(number: int) -> Checkpoint:
            return self._open(self.catalog.record(number, entries=entries))

        return {s: partial(open_listed, s) for s in newest_first}


def _note(rescued: list[tuple[str, str]], name: str, good: str) -> None:
    rescued.append((name, good))


def _nothing(_uids: Collection[str]) -> None:
    """Where there are no tiers, nobody else has to know of a deletion."""

"""The reading half of the facade: restores from the checkpoints of a run, lists, deletes."""

from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, TypeVar

from penstock.core import fence as fence_hook
from penstock.core.catalog import Catalog
from penstock.core.checkpoint import Checkpoint
from penstock.core.errors import ConfigError, SaverClosedError
from penstock.core.events import DeleteEvent, EventStream, RestoreEvent, VerifyEvent
from penstock.core.fallback import Overwritten, with_fallback
from penstock.core.lacking import lacking
from penstock.core.loading import Loader
from penstock.core.patience import PatientBackend
from penstock.core.progress import metered
from penstock.core.repairing import Mending, verify_and_repair
from penstock.core.restoring import build_new, restore_into, with_history
from penstock.core.select import Rename, Selection

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.config import CheckpointerConfig
    from penstock.core.events import Event
    from penstock.core.progress import Meter
    from penstock.core.registry import Registry
    from penstock.core.repairing import Bring
    from penstock.core.reports import CheckpointInfo, Progress, RestoreReport, VerifyReport
    from penstock.core.select import RenameSpec
    from penstock.core.workers import Workers

T = TypeVar("T")

_Rescued: TypeAlias = tuple[tuple[str, str], ...]


class Run:
    """All checkpoints under one storage root, without saving."""

    def __init__(
        self,
        backend: Backend,
        *,
        config: CheckpointerConfig,
        registry: Registry,
        workers: Workers,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._backend = backend
        self._config = config
        self._registry = registry
        self._workers = workers
        self._asked = PatientBackend(backend, workers, config.io_timeout_s)  # by the caller
        self._catalog = Catalog(
            self._asked, before_delete=self._before_delete, delete_failed=self._delete_failed
        )
        self._loader = Loader(backend, workers, io_timeout_s=config.io_timeout_s)
        self._events = EventStream(on_event)
        self._rescued: list[tuple[str, str]] = []  # damaged in one tier, and that which had it
        self._bring: Bring | None = None  # where there are tiers
        self._restored_from: int | None = None
        self._closed = False
        self._pid = os.getpid()

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
        """Restore a checkpoint into the live objects of `state`, in place.

        Args:
            state: The template: what is to be restored, a dict.
            step: A step, or `"latest"`.
            include: Globs of paths to restore; default: all. Only what is selected is read.
            exclude: Globs of paths to leave alone.
            strict: Whether a path that the checkpoint lacks is an error.
            rename: Stored prefix -> template prefix, or a function of shown paths.
            on_damage: `"raise"`, or `"fallback"`: take the newest whole checkpoint instead.
            on_progress: Called with a `Progress` some ten times per second, never twice at once:
                by the caller's thread when a phase begins, by one of the engine's while bytes are
                read. Reading waits for it. What it raises is logged and goes no further.

        Raises:
            CheckpointNotFoundError: No such step.
            RestoreMismatchError: Template and checkpoint differ; lists every difference.
            DamagedError: Stored bytes are not what was written; names the paths.
            SelectionError: A pattern matches nothing.
        """
        self._check_open()
        self._before_restore()
        selection, renaming = Selection(include, exclude), Rename(rename)
        overwritten = Overwritten(
            state, self._registry.providers, allow_pickle=self._config.allow_pickle
        )

        def attempt(checkpoint: Checkpoint, meter: Meter) -> RestoreReport:
            report = restore_into(
                checkpoint,
                state,
                selection=selection,
                rename=renaming,
                strict=strict,
                registry=self._registry,
                allow_pickle=self._config.allow_pickle,
                overwritten=overwritten,
                meter=meter,
            )
            self._restored_from = report.step
            return report

        (report, rescued), skipped = self._read(
            "restore", self._candidates(step, on_damage), attempt, on_progress
        )
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
        """Load a checkpoint, or a part of it, without a template.

        Args:
            step: A step, or `"latest"`.
            include: Globs of paths to load; default: all. Only what is selected is read.
            exclude: Globs of paths to leave out.
            device: Where tensors go; default: CPU.
            on_damage: As for `restore`.
            on_progress: As for `restore`.

        Returns:
            The tree: dicts, lists, tensors (on `device`, default CPU) and values. A module comes
            as its state dict.

        Raises:
            CheckpointNotFoundError: No such step.
            DamagedError: Stored bytes are not what was written; names the paths.
            SelectionError: A pattern matches nothing.
        """
        self._check_open()
        selection = Selection(include, exclude)

        def attempt(checkpoint: Checkpoint, meter: Meter) -> tuple[Any, RestoreReport]:
            return build_new(
                checkpoint,
                selection=selection,
                device=device,
                registry=self._registry,
                allow_pickle=self._config.allow_pickle,
                meter=meter,
            )

        ((tree, report), rescued), skipped = self._read(
            "load", self._candidates(step, on_damage), attempt, on_progress
        )
        self._tell_read("load", with_history(report, skipped, rescued))
        return tree

    def steps(self) -> list[int]:
        """Committed steps, ascending; damaged ones included."""
        self._check_open()
        return self._catalog.steps()

    def latest(self) -> int | None:
        """The newest committed step.

        Raises:
            DamagedError: Its commit record cannot be read.
        """
        self._check_open()
        return self._catalog.latest()

    def info(self, step: int | str = "latest") -> CheckpointInfo:
        """What the commit record of `step` says."""
        return self.open(step).info

    def open(self, step: int | str = "latest") -> Checkpoint:
        """A read-only view of one checkpoint; reads lazily."""
        self._check_open()
        return Checkpoint.open(
            self._asked,
            self._resolve(step),
            registry=self._registry,
            loader=self._loader,
            allow_pickle=self._config.allow_pickle,
        )

    def verify(
        self,
        step: int | str = "latest",
        *,
        deep: bool = True,
        repair: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> VerifyReport:
        """Read a checkpoint and compare all checksums; reports all damage, not only the first.

        Args:
            step: A step, or `"latest"`.
            deep: Read and decode every frame; else only the manifest and the blobs' sizes.
            repair: With tiers, bring damaged copies anew from a good one, which is read and
                compared first. `report.ok` then says whether all is whole in the end.
            on_progress: As for `restore`.

        Raises:
            CheckpointNotFoundError: No such step.
            DamagedError: Its commit record cannot be read in any tier.
            ConfigError: `repair`, and the run is in one place.
        """
        checkpoint = self.open(step)
        if repair:
            mending = None
            if self._bring is not None:
                mending = Mending(self._bring, self._workers, self._config.io_timeout_s)
            report = verify_and_repair(checkpoint, mending, deep=deep, on_progress=on_progress)
        else:
            report = checkpoint.verify(deep=deep, on_progress=on_progress)
        self._events.emit(VerifyEvent("verified", report.step, report))
        return report

    def delete(self, step: int) -> None:
        """Delete one checkpoint: its record first, durably, then its data."""
        self._check_open()
        number = valid_step(step)
        self._catalog.delete(number)
        self._events.emit(DeleteEvent("deleted", (number,), "delete"))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._backend.url} ({self._backend.name})>"

    # ------------------------------------------------------------------------------------------

    def _read(
        self,
        verb: str,
        candidates: Sequence[int],
        attempt: Callable[[Checkpoint, Meter], T],
        on_progress: Callable[[Progress], None] | None,
    ) -> tuple[tuple[T, _Rescued], tuple[int, ...]]:
        """Try to read one of `candidates`, and say so.

        Returns:
            What `attempt` gave, what of it came from another tier, and the damaged candidates.
        """
        trying = candidates[0]

        def one(number: int) -> tuple[T, _Rescued]:
            nonlocal trying
            trying = number
            self._events.emit(RestoreEvent(f"{verb}_started", number))
            meter.begin("plan")
            checkpoint = self.open(number)
            self._rescued += self._loader.take_rescued()  # by views, of whatever step
            earlier = len(self._rescued)
            try:
                found = attempt(checkpoint, meter)
            finally:
                self._rescued += [*checkpoint.contents.rescued, *self._loader.take_rescued()]
            contents, known = checkpoint.contents, [name for name, _ in self._rescued]
            self._rescued += lacking(
                checkpoint.backend, contents.record, contents.lengths(), known=known
            )
            return found, tuple(dict.fromkeys(self._rescued[earlier:]))

        try:
            with metered(on_progress, f"the {verb}") as meter:
                return with_fallback(candidates, one)
        except BaseException as error:
            self._events.emit(RestoreEvent(f"{verb}_failed", trying, error=error))
            raise

    def _tell_read(self, verb: str, report: RestoreReport) -> RestoreReport:
        rescued = dict.fromkeys(self._rescued)
        self._rescued.clear()
        self._repair(tuple(rescued))
        self._events.emit(RestoreEvent(f"{verb}_done", report.step, report=report))
        return report

    def _before_delete(self, uids: Collection[str]) -> None:
        """These checkpoints are about to be deleted."""

    def _delete_failed(self, uids: Collection[str]) -> None:
        """They were not, or not all of them."""

    def _repair(self, rescued: _Rescued) -> None:
        """This turned out to be damaged in one tier; each with the tier that had it whole."""

    def _before_restore(self) -> None:
        """Live objects are about to change, perhaps those of another run's pending save."""
        fence_hook.fence_all()

    def _check_open(self) -> None:
        if self._closed:
            msg = f"the checkpointer of {self._backend.url} is closed; make a new one"
            raise SaverClosedError(msg)
        self._check_process()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            msg = (
                "a Checkpointer cannot be used in a forked child (its threads stayed behind); "
                "open another one there, or start processes by spawn"
            )
            raise SaverClosedError(msg)

    def _resolve(self, step: int | str) -> int:
        if step == "latest":
            return self._catalog.require_latest()
        return valid_step(step)

    def _candidates(self, step: int | str, on_damage: str) -> Sequence[int]:
        """Steps to try, in order: one, or with fallback every older one as well."""
        if on_damage not in {"raise", "fallback"}:
            msg = f"on_damage={on_damage!r} is neither 'raise' nor 'fallback'"
            raise ConfigError(msg)
        if on_damage == "raise":
            return [self._resolve(step)]
        newest_first = self._catalog.steps()[::-1]
        if step != "latest":
            number = valid_step(step)
            newest_first = [number, *(s for s in newest_first if s < number)]
        return newest_first or [self._resolve(step)]


def valid_step(step: object) -> int:
    """`step` as an integer of at least 0.

    Raises:
        ConfigError: It is none.
    """
    number = -1
    if isinstance(step, SupportsIndex) and not isinstance(step, bool):
        number = operator.index(step)
    if number < 0:
        msg = f"step must be an integer of at least 0, not {step!r}"
        raise ConfigError(msg)
    return number

"""The facade, which saves, restores and deletes the checkpoints of one run.

Tested in `tests/integration/lifecycle/test_lifecycle.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from penstock.core.abc import Backend, host_roots
from penstock.core.catalog.notes import check_tag
from penstock.core.concurrency.workers import Workers, default_workers
from penstock.core.config.model import CheckpointerConfig, load_config
from penstock.core.copy.compaction import Compactor, CompactReport
from penstock.core.errors import (
    CheckpointGoneError,
    CheckpointNotFoundError,
    ConfigError,
    PenstockError,
    SaverClosedError,
    StorageError,
)
from penstock.core.hosts.joining import RootsOfJob
from penstock.core.log.host_logs import HostLogs
from penstock.core.log.run import RunLog, has_log
from penstock.core.plugins.registry import default_registry
from penstock.core.ranks.group import RanksOfJob
from penstock.core.reader import Reader
from penstock.core.reporting.events import DeleteEvent, EventStream, PruneEvent
from penstock.core.restore.earlier import EarlierReader
from penstock.core.save.metadata import check_metadata
from penstock.core.save.saver import Saver
from penstock.core.schedule.scheduler import Scheduler
from penstock.core.storage.open import open_backend, portable
from penstock.core.storage.time_limited import TimeLimitedBackend
from penstock.core.tiers.drains import Drains
from penstock.core.tiers.host_copies import HostCopies
from penstock.core.tiers.host_orders import HostOrders
from penstock.core.tree.select import Selection
from penstock.core.types import show_value, valid_step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import TracebackType

    from penstock.core.catalog.prune import PruneReport
    from penstock.core.config.model import CheckpointerOptions
    from penstock.core.config.plugin_choice import BackendConfig
    from penstock.core.plugins.registry import Registry
    from penstock.core.reporting.events import Event
    from penstock.core.reporting.reports import (
        CheckpointInfo,
        CheckReport,
        Progress,
        RestoreReport,
        SaveHandle,
        VerifyReport,
    )
    from penstock.core.restore.checkpoint import Checkpoint
    from penstock.core.save.job import SaveJob
    from penstock.core.tree.select import RenameSpec

log = logging.getLogger("penstock")


class Checkpointer:
    """Saves and restores the state of one run under one storage root.

    It is a context manager. Use it only from the thread of the training loop; any thread may use a
    save handle.
    """

    def __init__(
        self,
        backend: str | Path | Mapping[str, Any] | BackendConfig | Backend,
        *,
        registry: Registry | None = None,
        on_event: Callable[[Event], None] | None = None,
        group: Any = None,
        name: str | None = None,
        **options: Unpack[CheckpointerOptions],
    ) -> None:
        """Open the run at `backend` (path, URL, mapping, `BackendConfig` or `Backend`).

        Args:
            backend: The storage of the checkpoints. The caller closes a `Backend` instance.
            registry: Finds plugins; default: the installed plugins. Call `Registry.register` to add
                others.
            on_event: Called with every `SaveEvent`, `RestoreEvent`, `VerifyEvent`, `DeleteEvent`
                and `PruneEvent`. Background threads report most save events. Its exceptions are
                logged, not raised.
            group: The process group of torch.distributed whose ranks save together, or a list of
                their global ranks; default: the default group, if it is initialized.
            name: The name under which the ranks of the job meet, the same on every rank. Unnamed
                checkpointers are matched by order of first use: if one rank skips a checkpointer,
                or fails before its first use, all later checkpointers of that rank are matched
                wrongly. Two open checkpointers of a process cannot have the same name.
            options: Any field of `CheckpointerConfig` except `backend`.

        Raises:
            ConfigError: An option is unknown or wrong. The message suggests the nearest valid name.
            StorageError: The root cannot be used.
        """
        config = load_config({**options, "backend": backend})
        registry = (registry or default_registry()).preferring(config.prefer.choices)
        if "torch" in sys.modules:
            # Otherwise the first save stalls for longer, and a signal handler that saves might
            # interrupt the imports.
            registry.preload()
        count = config.workers or default_workers()
        store = open_backend(config.backend, registry=registry)
        self._config = config
        self._registry = registry
        self._workers = Workers(count)
        self._backend = TimeLimitedBackend(store, self._workers, config.io_timeout_s)
        self._owns_backend = not isinstance(backend, Backend)
        self._closing = self._closed = False
        self._pid = os.getpid()
        if log.isEnabledFor(logging.DEBUG):  # asking for capabilities may probe the store
            log.debug(
                "%s: engine %s, direct_io=%s, exclusive_publish=%s, %d workers",
                store.url,
                store.name,
                store.capabilities.direct_io,
                store.capabilities.exclusive_publish,
                count,
            )
        # Reader and saver hold this separate object, not the checkpointer itself: such a cycle
        # would keep a dropped checkpointer until the next garbage collection.
        self._ranks = RanksOfJob(group, config=self._config, url=self._backend.url, name=name)
        self._events = EventStream(on_event)
        self._orders = HostOrders(store, self._workers)
        self._drains: Drains | None = None
        if store.tiers:
            self._drains = Drains(
                store.tiers,
                workers=self._workers,
                grace_s=config.grace_s,
                stuck_s=config.io_timeout_s,
                backend=_for_another_process(config, registry, store),
                leads=self._ranks.leads,
                orders=self._orders,
            )
        self._reader = Reader(
            self._backend,
            config=config,
            registry=registry,
            workers=self._workers,
            events=self._events,
            drains=self._drains,
            ranks=self._ranks.of_restore,
            has_log=partial(has_log, self._backend),
            repair=self._orders.repair,
        )
        self._catalog = self._reader.catalog
        self._copies = HostCopies(store, self._catalog, self._orders, self._ranks, self._workers)
        self._log_copies = HostLogs(store, self._workers)
        order = partial(_execute, self._orders, self._log_copies)
        self._roots = RootsOfJob(store, self._ranks, network=config.rank_network, order=order)
        self._scheduler = Scheduler(config.schedule, self._workers.timing.clock)
        self._saver = Saver(
            self._backend,
            self._catalog,
            config=config,
            registry=registry,
            workers=self._workers,
            events=self._events,
            tiers=self._drains,
            copies=self._copies,
            earlier=EarlierReader(registry),
            ranks=self._ranks,
            on_report=self._scheduler.reported,
        )
        self._log = RunLog(
            TimeLimitedBackend(store, self._workers, config.io_timeout_s, limit_writes=True),
            self._reader,
            config=config, registry=registry, workers=self._workers, ranks=self._ranks,
            copies=self._log_copies,
            room=None if self._drains is None else self._drains.room,
        )  # fmt: skip
        # A store that hangs must not delay the opening for all of `io_timeout_s`.
        limit_s = min(config.io_timeout_s, self._workers.timing.opening_s)
        _warn_of_read_only(TimeLimitedBackend(store, self._workers, limit_s))

    @classmethod
    def from_config(
        cls,
        source: str | Path | Mapping[str, Any] | CheckpointerConfig,
        /,
        *,
        registry: Registry | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> Checkpointer:
        """Open a run from a `.toml`, `.yaml` or `.json` file, or a mapping.

        Args:
            source: The file or mapping. In a file, environment variables replace `${NAME}`.
            registry: As for the constructor.
            on_event: As for the constructor.

        Raises:
            ConfigError: The configuration is wrong.
        """
        config = load_config(source)
        options = {n: getattr(config, n) for n in config.model_fields_set if n != "backend"}
        try:
            return cls(
                config.backend,
                registry=registry,
                on_event=on_event,
                **cast("CheckpointerOptions", options),
            )
        except ConfigError as error:
            # An error of the file itself already names the file.
            if not isinstance(source, (str, os.PathLike)) or str(error).startswith("configuration"):
                raise
            msg = f"configuration {os.fspath(source)}: {error}"
            raise ConfigError(msg) from error

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        mode: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> SaveHandle:
        """Save `state` as the checkpoint of `step`.

        With `"async"`, the whole state is captured when the call returns, and may then change. With
        `"lazy"`, tensors that only an optimizer changes are captured in the background, and the
        next `Optimizer.step()` waits for them. With `"blocking"`, the checkpoint is durable when
        the call returns.

        Args:
            state: The state tree, a dict.
            step: The step. It must be above every saved step unless `overwrite` is set.
            mode: `"blocking"`, `"async"` or `"lazy"`; default: the checkpointer's mode.
            metadata: A JSON-like mapping with string keys, stored in the commit record. numpy and
                torch scalars become plain numbers.
            overwrite: Whether to accept a step that is not above every saved step. A checkpoint of
                the same step is replaced by a new generation.
            on_progress: Called with a `Progress` about ten times per second until the save ends, on
                a separate thread that the save does not wait for. Its exceptions are logged, not
                raised.

        Returns:
            The handle of the save. Its attribute `skipped` is True if the save was skipped: another
            save was in flight and `on_busy="skip"`, or no tier had room and `on_full="skip"`.

        Raises:
            StepExistsError: The step, or a later step, is committed.
            UnsupportedStateError: An object in the tree cannot be stored; names its path.
            BusyError: Another save is in flight and `on_busy="raise"`. Or the caller is a signal
                handler that interrupted a save before its capture began.
            PenstockError: A blocking save failed. Or an earlier background save failed and its
                error was not seen yet; this save has started anyway.
        """
        called = time.monotonic()
        self._check_may_save()
        with self._scheduler.measuring():
            handle = self._saver.save(
                state,
                step,
                mode=mode,
                metadata=metadata,
                overwrite=overwrite,
                on_progress=on_progress,
                called=called,
            )
            job = self._saver.job
            if job is not None and job.handle is handle:
                self._log.begin_after_save(job, state)
            elif handle.skipped:
                self._log.recorder.skipped(state, handle.step)
        return handle

    def due(self, step: int) -> bool:
        """Return whether to save now: `if ckpt.due(step): ckpt.save(state, step)`.

        Call it once per step, on all ranks. The option `schedule` sets the interval. If its `every`
        is `"auto"`, the first call returns True; after that, rank 0 decides from the measured times
        of steps and of the newest save. All ranks save at the same steps, without collectives. A
        rank that is ahead of rank 0 may wait for rank 0's decision.

        Args:
            step: The step, ascending.

        Raises:
            RankError: Rank 0 did not reach this step within `rank_timeout_s`.
            CoordinationError: The store of the job cannot be reached.
            ConfigError: There are several ranks, and this one cannot find the others.
        """
        self._check_may_save()
        return self._scheduler.is_due(
            valid_step(step), self._ranks.of_save, self._saver.pending.is_over
        )

    def log(self, state: Mapping[str, Any], step: int) -> bool:
        """Log the optimizer steps on `state` since the last call of `save` or `log`.

        A restore loads the last checkpoint and replays its log, bit for bit, so a crash loses at
        most `log_sync` steps (default: one on a local disk). An entry has the gradients, and all
        state that no optimizer changes: buffers, random state, schedulers, loaders. Call `log`
        after each step of the optimizers and before `zero_grad`. Background threads encode and
        write the entries.

        If a step cannot be replayed exactly, the log ends with a warning. Training continues, and
        the next save begins a new log.

        Args:
            state: As for `save`.
            step: The step. It must be above the last saved or logged step.

        Returns:
            Whether the step will be logged. False if no log has begun, since nothing was saved or
            restored yet, or if the log has ended.

        Raises:
            ConfigError: The step is not above the last one.
            UnsupportedStateError: Something in the tree cannot be stored; names its path.
        """
        self._check_may_save()
        with self._scheduler.measuring(log=True):
            return self._log.log(state, step)

    def check(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        mode: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> CheckReport:
        """Describe and plan a save of `state` without writing anything.

        Call it once before training. It raises every error of the first save that can be found
        without writing, and allocates memory as `prepare` does. Any rank may call it alone.

        Args:
            state: As for `save`.
            step: As for `save`; None skips the comparison with committed steps.
            mode: As for `save`.
            metadata: As for `save`.
            overwrite: As for `save`.

        Raises:
            UnsupportedStateError: An object in the tree cannot be stored; names its path.
            StepExistsError: The step, or a later step, is committed.
            ConfigError: `mode`, `step` or `metadata` is wrong.
            StorageError: The root cannot be written.
        """
        self._check_may_save()
        return self._saver.check(state, step, mode=mode, metadata=metadata, overwrite=overwrite)

    def prepare(self, state: Mapping[str, Any], *, mode: str | None = None) -> None:
        """Allocate the memory for copies of `state` in the background, before the first save.

        A copy into memory that the process has never written runs at a tenth of the usual speed,
        so without preparation the first background save would block training for longer. `check`,
        and a `restore` of an optimizer, also allocate this memory. Blocking saves copy little, so
        `prepare` does nothing for them.

        Args:
            state: As for `save`.
            mode: As for `save`.

        Raises:
            UnsupportedStateError: An object in the tree cannot be stored; names its path.
            ConfigError: `mode` is wrong.
        """
        self._check_may_save()
        self._saver.prepare(state, mode=mode)

    def fence(self, timeout: float | None = None) -> None:
        """Wait until every pending capture is complete, so that deferred tensors may change.

        Raises:
            FenceTimeoutError: A capture is still pending after `timeout` seconds; the save
                continues.
            SaverClosedError: The checkpointer is closed.
            PenstockError: A background save failed, and its error was not seen yet.
        """
        self._check_open()
        with self._scheduler.measuring():
            self._saver.pending.fence(timeout)
        self._saver.pending.raise_unseen()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save is in flight.

        Raises:
            TimeoutError: A save is still in flight after `timeout` seconds.
            SaverClosedError: The checkpointer is closed.
            PenstockError: A background save failed, and its error was not seen yet.
        """
        self._check_open()
        with self._scheduler.measuring():
            self._saver.pending.wait(timeout)
        self._saver.pending.raise_unseen()

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
    ) -> RestoreReport:
        """Restore a checkpoint into the live objects of `state`, in place.

        All ranks of a job must make the same call. Each restores the objects of its template from
        the checkpoint that rank 0 chooses. Either all ranks return or all raise.

        Args:
            state: The template, a dict of the objects to restore.
            step: A step, or `"latest"`.
            include: Globs of paths to restore; default: all. Only selected objects are read.
            exclude: Globs of paths to skip.
            strict: Whether missing paths, different shapes and different optimizer groups are
                errors. If False, such objects keep their values. The optimizer also keeps its state
                of parameters with a different shape, and its options of groups that differ. The
                report lists all of these (`missing`, `mismatched`). A different kind, or a dtype
                that `cast` does not accept, is always an error.
            cast: Whether to convert stored floats to the template's float dtype, rounded to nearest
                even. The report lists converted tensors (`cast`). If False, a different dtype is
                an error, except that optimizer state takes the stored dtype.
            rename: A mapping from stored prefixes to prefixes of the template, or a function of
                shown paths; see `Rename`.
            on_damage: `"raise"`, or `"fallback"` to restore the newest older checkpoint that is
                whole.
            on_progress: Called with a `Progress` about ten times per second, one call at a time.
                The caller's thread calls it when a phase begins, and an engine thread while bytes
                are read. Reading waits until it returns. Its exceptions are logged, not raised.

        Raises:
            CheckpointNotFoundError: There is no such step.
            RankError: Another rank failed, died or made no progress; names the rank.
            RestoreMismatchError: Template and checkpoint differ; lists every difference.
            DamagedError: Stored bytes differ from the written bytes; names the paths. Or, with
                `"latest"`, hosts are missing, as in `latest()`.
            SelectionError: A pattern matches nothing.
        """
        called = time.monotonic()
        include, exclude = _listed(include), _listed(exclude)
        self._check_open()
        self._saver.distrust()  # the restore may find damage, or may be called because of it
        self._end_save_of_ranks()

        def restore(saved: int | str) -> RestoreReport:
            report = self._reader.restore(
                state,
                saved,
                include=include,
                exclude=exclude,
                strict=strict,
                cast=cast,
                rename=rename,
                on_damage=on_damage,
                on_progress=on_progress,
                called=called,
            )
            self._saver.restored_from = report.step
            return report

        selection = partial(Selection, include, exclude) if rename is None else None
        report = self._log.restore(state, step, restore, selection=selection)
        if include is None and exclude is None and rename is None:
            self._scheduler.restored(report)
        if (
            report.matched_by is not None
        ):  # there is an optimizer, so training will continue, and save
            self._saver.expect(report.bytes_needed)
        return report

    def resume(self, state: Mapping[str, Any]) -> int:
        """Restore the newest checkpoint into `state` if there is one; return the next step.

        Use it as `for step in range(ckpt.resume(state), steps)`, in a loop that saves under `step`.
        All ranks of a job must make the same call. All restore the same checkpoint, or none does.

        Args:
            state: The template, as for `restore`. Without a checkpoint it stays as it is.

        Returns:
            The step after the restored one; 0 if there is no checkpoint.

        Raises:
            PenstockError: As for `restore`. A checkpoint that cannot be restored is not skipped.
        """
        try:
            return self.restore(state).step + 1
        except CheckpointGoneError:
            raise  # there was one
        except CheckpointNotFoundError:
            log.info("no checkpoint under %s: training starts from scratch", self._backend.url)
            return 0

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
    ) -> Any:
        """Load a checkpoint, or a part of it, without a template.

        All ranks of a job must make the same call, and get the same checkpoint. To read on one rank
        alone, use `open`.

        Args:
            step: A step, or `"latest"`.
            include: Globs of paths to load; default: all. Only selected objects are read.
            exclude: Globs of paths to skip.
            device: The device of the tensors; default: the CPU.
            named_optimizers: Whether to key optimizer state by parameter name, for
                `set_optimizer_state_dict` of `torch.distributed.checkpoint`; default: by number,
                for the optimizer's own `load_state_dict`.
            on_damage: As for `restore`.
            on_progress: As for `restore`.

        Returns:
            The tree: dicts, lists, tensors and values. A module comes back as its state dict.

        Raises:
            CheckpointNotFoundError: There is no such step.
            DamagedError: Stored bytes differ from the written bytes; names the paths.
            SelectionError: A pattern matches nothing.
        """
        called = time.monotonic()
        self._check_open()
        self._end_save_of_ranks()
        with self._log.noting(step):
            return self._reader.load(
                step,
                include=include,
                exclude=exclude,
                device=device,
                named_optimizers=named_optimizers,
                on_damage=on_damage,
                on_progress=on_progress,
                called=called,
            )

    def steps(self) -> list[int]:
        """Return the committed steps, ascending, including damaged ones."""
        self._check_open()
        return self._catalog.steps()

    def latest(self) -> int | None:
        """Return the newest saved or logged step; None if there is none.

        Raises:
            DamagedError: The commit record of the newest saved step cannot be read. Or hosts are
                missing, and a save after the newest whole step would delete what only they have.
        """
        self._check_open()
        return self._log.latest()

    def info(self, step: int | str = "latest") -> CheckpointInfo:
        """Return the facts in the commit record of `step`, its later annotations and its tags."""
        return self.open(step).info

    def open(self, step: int | str = "latest") -> Checkpoint:
        """Return a lazy, read-only view of one checkpoint."""
        self._check_open()
        with self._log.noting(step):
            return self._reader.open(step)

    def verify(
        self,
        step: int | str = "latest",
        *,
        deep: bool = True,
        repair: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> VerifyReport:
        """Read a checkpoint and its log, compare all checksums and report all damage.

        `open(step).verify()` leaves out the log.

        Args:
            step: A step, or `"latest"`.
            deep: Whether to read and decode every frame. If False, only the manifest and the sizes
                of the blobs are checked.
            repair: With tiers, whether to replace each damaged copy from a good copy, which is
                verified first. Then `report.ok` means that every copy, and the log, is whole at the
                end. A log has no copy, so it cannot be repaired.
            on_progress: As for `restore`.

        Raises:
            CheckpointNotFoundError: There is no such step.
            DamagedError: No tier has a readable commit record of the step.
            ConfigError: `repair` is set, but the run has no tiers, or this is not rank 0.
        """
        self._check_open()
        if repair and not self._ranks.leads():
            msg = "only one rank may repair: call verify(repair=True) on rank 0 alone"
            raise ConfigError(msg)
        with self._log.noting(step):
            report = self._reader.verify(
                step, deep=deep, repair=repair, on_progress=on_progress, more=self._log.verified
            )
        if not report.ok:
            self._saver.distrust()
        return report

    def annotate(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Add metadata to a committed checkpoint, such as a metric that is known only later.

        New values replace those of existing keys; `info(step).metadata` has all keys. If the save
        of this step is in flight, the call waits for its commit. Only a call on rank 0 writes; a
        call on another rank only checks its arguments. Ranks need not call it together.

        Args:
            step: The step.
            metadata: As for `save`; at most 64 KiB in one call.

        Raises:
            CheckpointNotFoundError: There is no such step, or it was deleted meanwhile.
            ConfigError: `metadata` cannot be stored, or there are too many annotations.
            DamagedError: The commit record of the step cannot be read.
            StorageError: A store failed and may lack the metadata. Call `annotate` again.
        """
        self._note(step, check_metadata(metadata), {})

    def pin(self, step: int, tag: str) -> None:
        """Tag a checkpoint, so that retention does not delete it.

        `delete`, `rewind` and an overwrite still delete it. As with `annotate`, only a call on
        rank 0 has an effect.

        Args:
            step: The step.
            tag: 1 to 64 characters of `A-Z a-z 0-9 . _ -`. A checkpoint may have several tags.

        Raises:
            CheckpointNotFoundError: There is no such step, or it is being deleted.
            ConfigError: `tag` is not a valid tag.
            PenstockError: As for `annotate`.
        """
        self._note(step, {}, {check_tag(tag): True})

    def unpin(self, step: int, tag: str) -> None:
        """Remove a tag from a checkpoint, or do nothing if the checkpoint lacks it.

        Args:
            step: The step.
            tag: The tag.

        Raises:
            PenstockError: As for `pin`.
        """
        self._note(step, {}, {check_tag(tag): False})

    def delete(self, step: int) -> None:
        """Delete one checkpoint: first its commit record, durably, then data that it alone needs.

        Raises:
            CheckpointNotFoundError: There is no such step.
        """
        self._check_open()
        number = valid_step(step)
        self._catalog.delete(number)
        self._log.recorder.replaced(number)
        self._events.emit(DeleteEvent("deleted", (number,), "delete"))

    def rewind(self, step: int) -> list[int]:
        """Delete every step after `step`, so that training can continue from there.

        Returns:
            The deleted steps, ascending.

        Raises:
            CheckpointNotFoundError: There is no checkpoint at `step`.
        """
        self._check_open()
        self.wait()  # a save in flight would commit a step that is about to be deleted
        gone = self._catalog.rewind(valid_step(step))
        self._log.forget(valid_step(step))
        if gone:
            self._events.emit(DeleteEvent("deleted", tuple(gone), "rewind"))
        return gone

    def prune(self, *, dry_run: bool = False, everything: bool = False) -> PruneReport:
        """Delete data, older than the option `grace_s`, that no checkpoint and no save can need.

        Args:
            dry_run: Report the data that would be deleted, and delete nothing.
            everything: Also delete the data of a run without a single commit record, and attempts
                that lack only their commit record. By default both stay, because the run may be a
                copy in flight that writes its data first.
        """
        self._check_open()
        own = [self._saver.job.uid] if self._saver.job is not None else []
        report = self._catalog.prune(
            grace_s=self._config.grace_s, own_uids=own, dry_run=dry_run, everything=everything
        )
        self._events.emit(PruneEvent("pruned", report))
        return report

    def compact(
        self,
        steps: Iterable[int] | None = None,
        *,
        everything: bool = False,
        dry_run: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> CompactReport:
        """Rewrite checkpoints that borrow blobs of other saves, so that they borrow none.

        Each becomes a new generation of its step, with the same objects, metadata and codecs, and
        restores to the same bits. Blobs that no checkpoint borrows any more are deleted. A crash at
        any moment leaves every step whole. With tiers, the compacted checkpoints are in the last
        tier.

        Args:
            steps: The steps to compact; steps that borrow nothing are skipped. Default: the steps
                that keep blobs of deleted checkpoints in use, and the steps that borrow from those
                steps.
            everything: Without `steps`, compact every checkpoint that borrows.
            dry_run: Report the bytes that would be freed or used, and change nothing.
            on_progress: As for `save`; reports one checkpoint at a time.

        Raises:
            ConfigError: `steps` are not steps, or are given together with `everything`.
            CheckpointNotFoundError: One of the steps does not exist; nothing was changed.
            CheckpointGoneError: A step was deleted or overwritten while it was compacted.
            DamagedError: Stored bytes differ from the written bytes; that step is unchanged.
            PenstockError: As for `save`. All steps before the failed step are compacted.
        """
        self._check_may_save()
        chosen_steps = None if steps is None else _valid_steps(steps)
        if chosen_steps is not None and everything:
            msg = "compact takes either steps or everything=True, not both"
            raise ConfigError(msg)
        if any(roots.copies for roots in host_roots(self._backend).values()):
            msg = "compact is not supported with copies on other hosts: compact the durable tier"
            raise ConfigError(msg)
        self.wait()  # compacting while a save is in flight would take twice the memory
        compactor = Compactor(
            self._backend.inner,
            self._catalog,
            config=self._config,
            registry=self._registry,
            workers=self._workers,
            loader=self._reader.loader,
        )
        chosen = compactor.choose(chosen_steps, everything=everything)
        if dry_run:
            return compactor.plan(chosen)
        before = compactor.needed_bytes()
        for record in chosen:
            self._log.recorder.replaced(record.step)
        reports = tuple(compactor.compact(record, on_progress) for record in chosen)
        return CompactReport(reports, before, compactor.needed_bytes())

    def close(self) -> None:
        """Wait for the pending save, then release all resources. Idempotent.

        With tiers, `close` also waits until every checkpoint is copied, or the remaining copies
        keep failing. With several ranks, every rank waits for the copies of rank 0.

        Raises:
            SaveError: The call is in a callback that the pending save waits for.
            PenstockError: A background save failed, and its error was not seen yet. It is not
                raised while another exception propagates.
        """
        if self._closed or self._closing:
            return
        if self._pid != os.getpid():
            self._closed = True
            return  # a forked child: the threads and their resources belong to the parent
        self._saver.pending.check_may_wait()
        self._closing = True  # no further save can start, but the pending one can end
        try:
            self._log.recorder.close()
            self._saver.pending.end()
            if self._drains is not None:
                self._drains.settle()
                self._drains.close()
            if sys.exc_info()[0] is None:
                self._copies.settle()
                self._orders.settle()
            self._copies.close()
            self._log_copies.settle()
            self._ranks.settle()
            self._roots.close(sys.exc_info()[1])  # waits for rank 0, which may still give orders
            self._orders.close()
            self._log_copies.close()
        except BaseException:
            self._closing = False  # Ctrl-C: the next `close` must do all of it
            raise
        self._ranks.close(sys.exc_info()[1])
        self._closed = True  # not before: callbacks of the pending save may still read the run
        self._workers.close()
        if self._owns_backend:
            stuck = self._drains is not None and self._drains.is_stuck()
            if self._saver.pending.released and not stuck:
                self._backend.close_inner()
            else:
                # A stuck store, or a callback of the pending save called `close`: waiting here
                # would block the caller forever.
                late = partial(_close_late, self._backend.inner, self._saver.job)
                self._workers.spawn("close", late)
        self._saver.close()
        if sys.exc_info()[0] is None:
            self._saver.pending.raise_unseen()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(PenstockError):  # it would hide the exception of the block
            self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._backend.url} ({self._backend.name})>"

    def _note(self, step: int, metadata: Mapping[str, Any], tags: Mapping[str, bool]) -> None:
        self._check_open()
        number = valid_step(step)
        if not self._ranks.leads():
            return
        job = self._saver.job
        if job is not None and job.request.step == number and not job.handle.committed.done():
            self._saver.pending.check_may_wait()
            job.handle.committed.exception()
        self._catalog.annotate(number, metadata, tags)

    def _check_open(self) -> None:
        if self._closed:
            msg = f"the checkpointer of {self._backend.url} is closed; make a new one"
            raise SaverClosedError(msg)
        if self._pid != os.getpid():
            msg = (
                "a Checkpointer cannot be used in a forked child (its threads were not copied); "
                "open another one there, or start processes with the method `spawn`"
            )
            raise SaverClosedError(msg)
        if self._roots.join():
            self._copies.begin()

    def _check_may_save(self) -> None:
        self._check_open()
        if self._closing:
            msg = f"the checkpointer of {self._backend.url} is being closed"
            raise SaverClosedError(msg)

    def _end_save_of_ranks(self) -> None:
        """Wait for the pending save of several ranks; a later call raises its errors.

        A rank can be in only one round at a time, because other ranks look for it in only one.
        """
        if self._ranks.of_restore() is not None:
            self._saver.pending.wait(None)
        elif obstacle := self._ranks.obstacle():  # a save would be refused because of it
            # If the launcher numbers its processes, only the first warns.
            first = os.environ.get("RANK", "0") == "0"
            log.log(logging.WARNING if first else logging.INFO, "%s", obstacle)


def _listed(patterns: str | Iterable[str] | None) -> str | list[str] | None:
    """Return patterns that can be read twice."""
    return patterns if patterns is None or isinstance(patterns, str) else [*patterns]


def _warn_of_read_only(backend: TimeLimitedBackend) -> None:
    """Log a warning if the backend cannot be written, since every save will fail."""
    try:
        backend.check_writable()
    except StorageError as error:
        log.warning("%s can only be read, so every save will fail: %s", backend.url, error)


def _close_late(store: Backend, job: SaveJob | None) -> None:
    if job is not None:
        job.released.wait()
    store.close()


def _valid_steps(steps: object) -> list[int]:
    """Return `steps` as integers.

    Raises:
        ConfigError: `steps` is not a collection of steps.
    """
    if isinstance(steps, str) or not isinstance(steps, Iterable):
        msg = f"steps must be a list such as [100, 200], not {show_value(steps)}"
        raise ConfigError(msg)
    return [valid_step(step) for step in cast("Iterable[object]", steps)]


def _execute(orders: HostOrders, logs: HostLogs, number: int, kind: str, body: bytes, /) -> bytes:
    """Execute an order of another host; see `RootsOfJob`."""
    return logs.execute(body) if kind == "log" else orders.execute(number, kind, body)


def _for_another_process(
    config: CheckpointerConfig, registry: Registry, backend: Backend
) -> str | dict[str, Any] | None:
    """Return a configuration that lets another process open the tiers; None if there is none."""
    # Another process does not have plugins that were registered in this process only.
    everywhere = registry is default_registry() and not registry.has_own
    # Nor does it reach the other hosts' roots.
    spec = portable(config.backend) if everywhere and not host_roots(backend) else None
    if spec is None and any(tier.drain_in == "process" for tier in backend.tiers):
        log.warning(
            "%s: threads of this process copy between the tiers, although drain_in is "
            '"process": another process could not open the tiers, since they were given as a '
            "Backend instance, with options that JSON cannot hold, or with plugins registered "
            "only here. To copy in a process, give a path, a URL or a table",
            backend.url,
        )
    return spec

"""The facade: saves, restores and keeps the checkpoints of one run."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from penstock.core import fence as fence_hook
from penstock.core.abc import Backend, StateObject
from penstock.core.config import CheckpointerConfig, load_config
from penstock.core.describe import describe_tree
from penstock.core.draining import Drains
from penstock.core.errors import ConfigError, PenstockError, SaverClosedError, StorageTimeoutError
from penstock.core.events import DeleteEvent, PruneEvent, SaveEvent
from penstock.core.opening import open_backend, portable
from penstock.core.pending import Pending
from penstock.core.progress import follow
from penstock.core.record import check_metadata
from penstock.core.registry import default_registry
from penstock.core.reports import skipped_save
from penstock.core.retaining import clean_up_after
from penstock.core.run import Run, valid_step
from penstock.core.saving import SaveJob
from penstock.core.sizes import size_text
from penstock.core.starting import choose_destination, claim_generation, log_plan, staging_for
from penstock.core.states import ChainTable, plan_state
from penstock.core.unused_rules import UnusedRules
from penstock.core.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path
    from threading import Thread
    from types import TracebackType

    from penstock.core.config import BackendConfig, CheckpointerOptions
    from penstock.core.events import Event
    from penstock.core.prune import PruneReport
    from penstock.core.registry import Registry
    from penstock.core.reports import Progress, SaveHandle, SaveReport
    from penstock.core.save_request import SaveRequest
    from penstock.core.staging import Staging

log = logging.getLogger("penstock")

_MODES = ("blocking", "async", "lazy")
_LAST_CALL_S = 5.0  # how long a blocking save waits for its last `on_progress` to return


class Checkpointer(Run):
    """Saves and restores the state of one run under one storage root. A context manager.

    Use it from one thread (the training loop's); handles may be used from any.
    """

    def __init__(
        self,
        backend: str | Path | Mapping[str, Any] | BackendConfig | Backend,
        *,
        registry: Registry | None = None,
        on_event: Callable[[Event], None] | None = None,
        **options: Unpack[CheckpointerOptions],
    ) -> None:
        """Open the run at `backend` (path, URL, mapping, `BackendConfig` or `Backend`).

        Args:
            backend: Where checkpoints live. A `Backend` instance stays the caller's to close.
            registry: Where providers, codecs and backends are looked up; default: entry points.
            on_event: Called with every `SaveEvent`, `RestoreEvent`, `VerifyEvent`, `DeleteEvent`
                and `PruneEvent`, those of saves mostly on background threads; what it raises is
                logged and goes no further.
            options: Any field of `CheckpointerConfig` but `backend`: `rules`, `retention`,
                `mode`, `on_busy`, `staging_bytes`, `allow_pickle`, `defer`, `fence_timeout_s`,
                `io_timeout_s`, `chunk_bytes`, `block_bytes`, `workers`, `grace_s`.

        Raises:
            ConfigError: An option is unknown or wrong; the nearest valid name is given.
            StorageError: The root cannot be used.
        """
        registry = registry or default_registry()
        config = load_config({**options, "backend": backend})
        count = config.workers or min(4, os.cpu_count() or 1)
        super().__init__(
            open_backend(config.backend, registry=registry),
            config=config,
            registry=registry,
            workers=Workers(count),
            on_event=on_event,
        )
        if log.isEnabledFor(logging.DEBUG):  # capabilities may need a probe
            log.debug(
                "%s: engine %s, direct_io=%s, exclusive_publish=%s, %d workers",
                self._backend.url,
                self._backend.name,
                self._backend.capabilities.direct_io,
                self._backend.capabilities.exclusive_publish,
                count,
            )
        self._owns_backend = not isinstance(backend, Backend)
        self._table = ChainTable(config, registry)
        self._unused_rules = UnusedRules(config.rules)
        self._staging: Staging | None = None
        self._drains: Drains | None = None
        if self._backend.tiers:
            self._drains = Drains(
                self._backend.tiers,
                workers=self._workers,
                grace_s=self._config.grace_s,
                stuck_s=self._config.io_timeout_s,
                backend=_for_another_process(config, registry, self._backend),
            )
            self._bring = self._drains.repairs.bring
        self._pending = Pending(self._drains)
        self._warned_straight = False
        self._closing = False

    @classmethod
    def from_config(
        cls, source: str | Path | Mapping[str, Any] | CheckpointerConfig, /
    ) -> Checkpointer:
        """Open a run from a `.toml`, `.yaml` or `.json` file, or a mapping.

        Raises:
            ConfigError: The configuration is wrong.
        """
        config = load_config(source)
        options = {n: getattr(config, n) for n in config.model_fields_set if n != "backend"}
        try:
            return cls(config.backend, **cast("CheckpointerOptions", options))
        except ConfigError as error:
            if not isinstance(source, (str, os.PathLike)) or str(error).startswith("configuration"):
                raise
            msg = f"configuration {os.fspath(source)}: {error}"
            raise ConfigError(msg) from error

    # -- saving ---------------------------------------------------------------------------------

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

        With `"async"` everything is captured when this returns, and may change; with `"lazy"`
        what an optimizer in the tree owns is captured in the background until the next
        `Optimizer.step()`; with `"blocking"` the checkpoint is durable when this returns.

        Args:
            state: The state tree, a dict.
            step: Above `latest()`, unless `overwrite`.
            mode: `"blocking"`, `"async"` or `"lazy"`; default: the checkpointer's.
            metadata: JSON-like; goes into the commit record.
            overwrite: Replace the checkpoint of this step by a next generation.
            on_progress: Called with a `Progress` some ten times per second until the save ended, on
                a thread of its own, which the save does not wait for. What it raises is logged and
                goes no further.

        Returns:
            The handle of this save. With `on_busy="skip"` it may be `skipped`.

        Raises:
            StepExistsError: The step, or a later one, is committed.
            UnsupportedStateError: Something in the tree cannot be stored; names its path.
            BusyError: Another save is under way and `on_busy="raise"`.
            PenstockError: The save itself failed (blocking), or an earlier one did in the
                background and nobody has seen it; then this one has started all the same.
        """
        began = time.monotonic()
        self._check_may_save()
        mode = mode or self._config.mode
        if mode not in _MODES:
            msg = f"mode={mode!r} is none of {', '.join(_MODES)}"
            raise ConfigError(msg)
        step = valid_step(step)
        metadata = check_metadata({} if metadata is None else metadata)
        if not self._pending.take_turn(self._config.on_busy):
            return self._skipped(step, on_progress, "another save was under way")
        generation = claim_generation(
            self._asked,
            step,
            overwrite=overwrite,
            drains=self._drains,
            may_go=self._asked.may_go,  # a deletion that was given up, and may still happen
        )
        request = self._planned(state, step, generation, mode=mode, metadata=metadata)
        destination = choose_destination(self._backend, self._drains, request)
        if destination is None:
            return self._skipped(step, on_progress, "no tier has room for it, as the log says")
        # Memory that may still belong to a stuck disk is left to it.
        reusable = self._staging if self._pending.released else None
        staging = self._staging = staging_for(request, reusable, self._config)
        job = SaveJob(
            request,
            backend=destination.backend,
            onward=destination.onward,
            staging=staging,
            workers=self._workers,
            after_commit=lambda report: self._after_commit(job, report, overwrite=overwrite),
        )
        earlier = self._pending.unseen_error()
        watching: Thread | None = None
        try:
            self._pending.begin(job)
            log_plan(job, staging)
            with job.ending.calling_back():
                self._events.announce(job.handle)
            watching = self._watch(job.handle, on_progress)
            if job.deferred_bytes:
                fence_hook.arm(job, self._config.fence_timeout_s)
                job.handle.committed.add_done_callback(lambda _: fence_hook.disarm(job))
            job.capture_now(on_captured=lambda: self._on_captured(job))
        except BaseException as error:
            job.interrupt(error)
            fence_hook.disarm(job)
            raise
        job.add_blocked(time.monotonic() - began)
        if mode == "blocking":
            job.wait_durable()
            if watching is not None:
                watching.join(_LAST_CALL_S)
        if earlier is not None:
            how = "has failed too" if job.handle.failed else "has started"
            earlier.add_note(f"This earlier save failed; the save of step {step} {how}.")
            raise earlier
        if mode == "blocking":
            job.handle.result()
        return job.handle

    def fence(self, timeout: float | None = None) -> None:
        """Wait until every pending capture is complete: then deferred tensors may change.

        Raises:
            FenceTimeoutError: Not within `timeout` seconds; the save goes on.
            SaverClosedError: After `close`.
            PenstockError: A background save failed and nobody has seen it yet.
        """
        self._check_open()
        self._pending.fence(timeout)
        self._pending.raise_unseen()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save is under way.

        Raises:
            TimeoutError: One still is, after `timeout` seconds.
            SaverClosedError: After `close`.
            PenstockError: A background save failed and nobody has seen it yet.
        """
        self._check_open()
        self._pending.wait(timeout)
        self._pending.raise_unseen()

    def rewind(self, step: int) -> list[int]:
        """Forget every step after `step`, to go on from there.

        Returns:
            The forgotten steps, ascending.

        Raises:
            CheckpointNotFoundError: There is no checkpoint at `step`.
        """
        self._check_open()
        self.wait()
        gone = self._catalog.rewind(valid_step(step))
        if gone:
            self._events.emit(DeleteEvent("deleted", tuple(gone), "rewind"))
        return gone

    def prune(self, *, dry_run: bool = False) -> PruneReport:
        """Delete data that no checkpoint and no save under way can need any more."""
        self._check_open()
        own = [self._job.uid] if self._job is not None else []
        report = self._catalog.prune(grace_s=self._config.grace_s, own_uids=own, dry_run=dry_run)
        self._events.emit(PruneEvent("pruned", report))
        return report

    def close(self) -> None:
        """Wait for the pending save, then release everything. Idempotent.

        With tiers also until nothing is left to be copied, or what is left keeps failing.

        Raises:
            SaveError: Called in a callback that the pending save waits for.
            PenstockError: A background save failed and nobody has seen it, unless another
                exception is on its way.
        """
        if self._closed or self._closing:
            return
        if self._pid != os.getpid():
            self._closed = True
            return  # a forked child: the threads, and all that they hold, are the parent's
        self._pending.check_may_end()
        self._closing = True
        self._pending.end()
        if self._drains is not None:
            self._drains.settle()
            self._drains.close()
        self._closed = True  # until here callbacks of the pending save may look at the run
        self._workers.close()
        if self._owns_backend:
            stuck = self._drains is not None and self._drains.is_stuck()
            if self._pending.released and not stuck:
                self._close_backend()
            else:  # a stuck store, or a callback of the save itself, which has yet to end
                self._workers.spawn("close", self._close_late)
        if sys.exc_info()[0] is None:
            self._pending.raise_unseen()

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
        with contextlib.suppress(PenstockError):
            self.close()

    # ------------------------------------------------------------------------------------------

    @property
    def _job(self) -> SaveJob | None:
        return self._pending.job

    def _check_may_save(self) -> None:
        self._check_open()
        if self._closing:
            msg = f"the checkpointer of {self._backend.url} is being closed"
            raise SaverClosedError(msg)

    def _planned(
        self,
        state: Mapping[str, Any],
        step: int,
        generation: int,
        *,
        mode: str,
        metadata: Mapping[str, Any],
    ) -> SaveRequest:
        description = describe_tree(
            state, providers=self._registry.providers, allow_pickle=self._config.allow_pickle
        )
        request = plan_state(
            description,
            config=self._config,
            table=self._table,
            step=step,
            generation=generation,
            mode=mode,
            metadata=metadata,
        )
        objects = (e.path for e in description.entries if isinstance(e, StateObject))
        self._unused_rules.look(objects, step)
        return request

    def _skipped(
        self, step: int, on_progress: Callable[[Progress], None] | None, why: str
    ) -> SaveHandle:
        self._events.emit(SaveEvent("skipped", step))
        handle = skipped_save(step, why)
        self._watch(handle, on_progress)
        return handle

    def _before_delete(self, uids: Collection[str]) -> None:
        """No copy may come to be committed of what is being deleted."""
        if self._drains is not None:
            self._drains.withdraw(uids)

    def _delete_failed(self, uids: Collection[str]) -> None:
        """What stays is copied after all."""
        if self._drains is not None:
            self._drains.reinstate(uids)

    def _repair(self, rescued: Sequence[tuple[str, str]]) -> None:
        """Bring copies that turned out to be damaged from the tier that has good ones."""
        if self._drains is not None and rescued:
            self._drains.repairs.begin(rescued)

    def _watch(
        self, handle: SaveHandle, on_progress: Callable[[Progress], None] | None
    ) -> Thread | None:
        if on_progress is None:
            return None
        return self._workers.spawn("progress", partial(follow, handle, on_progress))

    def _close_backend(self) -> None:
        """Wait for it, but not for ever: a call that was given up may still hang in it."""
        try:
            self._asked.close_inner()
        except StorageTimeoutError as error:
            log.warning("%s is left behind: %s", self._backend.url, str(error))

    def _close_late(self) -> None:
        if self._job is not None:
            self._job.released.wait()
        self._backend.close()

    def _on_captured(self, job: SaveJob) -> None:
        if job.straight_bytes and job.request.mode != "blocking" and not self._warned_straight:
            self._warned_straight = True
            log.warning(
                "staging is too small for the state: %s of step %d were written straight "
                "from live tensors while training stood still; raise staging_bytes (said once)",
                size_text(job.straight_bytes),
                job.request.step,
            )

    def _after_commit(self, job: SaveJob, report: SaveReport, *, overwrite: bool) -> None:
        if self._drains is not None and self._drains.is_silent():
            log.debug("step %d: nothing is cleaned up while a tier is away", report.step)
            return  # a save when it is back does it
        with job.ending.calling_back():  # `on_event` may be called
            clean_up_after(
                report,
                self._catalog,
                overwrite=overwrite,
                retention=self._config.retention,
                protect=() if self._restored_from is None else (self._restored_from,),
                events=self._events,
            )


def _for_another_process(
    config: CheckpointerConfig, registry: Registry, backend: Backend
) -> str | dict[str, Any] | None:
    """What another process can open the same tiers from, if it can."""
    # Plugins that were only given to this registry another process does not have.
    spec = portable(config.backend) if registry is default_registry() else None
    if spec is None and any(tier.drain_in == "process" for tier in backend.tiers):
        log.warning(
            "threads of the trainer copy from tier to tier: there is no configuration from which "
            "another process could open %s",
            backend.url,
        )
    return spec

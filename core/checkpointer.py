"""The facade: saves, restores and keeps the checkpoints of one run."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from penstock.core import fence as fence_hook
from penstock.core.abc import Backend
from penstock.core.config import CheckpointerConfig, load_config
from penstock.core.describe import describe_tree
from penstock.core.errors import (
    BusyError,
    ConfigError,
    FenceTimeoutError,
    PenstockError,
    StepExistsError,
)
from penstock.core.events import announce
from penstock.core.opening import open_backend
from penstock.core.record import check_metadata
from penstock.core.registry import default_registry
from penstock.core.reports import SaveHandle, skipped_save
from penstock.core.run import Run, valid_step
from penstock.core.saving import SaveJob
from penstock.core.staging import Staging, default_budget
from penstock.core.states import ChainTable, plan_state
from penstock.core.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import TracebackType

    from penstock.core.config import BackendConfig, CheckpointerOptions
    from penstock.core.prune import PruneReport
    from penstock.core.registry import Registry
    from penstock.core.reports import SaveEvent, SaveReport

log = logging.getLogger("penstock")

_MODES = ("blocking", "async", "lazy")


class Checkpointer(Run):
    """Saves and restores the state of one run under one storage root. A context manager.

    Use it from one thread (the training loop's); handles may be used from any.
    """

    def __init__(
        self,
        backend: str | Path | Mapping[str, Any] | BackendConfig | Backend,
        *,
        registry: Registry | None = None,
        on_event: Callable[[SaveEvent], None] | None = None,
        **options: Unpack[CheckpointerOptions],
    ) -> None:
        """Open the run at `backend` (path, URL, mapping, `BackendConfig` or `Backend`).

        Args:
            backend: Where checkpoints live. A `Backend` instance stays the caller's to close.
            registry: Where providers, codecs and backends are looked up; default: entry points.
            on_event: Called with every `SaveEvent`, mostly on background threads; what it raises
                is logged and goes no further.
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
        )
        self._owns_backend = not isinstance(backend, Backend)
        self._table = ChainTable(config, registry)
        self._staging: Staging | None = None
        self._job: SaveJob | None = None
        self._unseen: SaveHandle | None = None
        self._on_event = on_event
        self._warned_straight = False
        _open_checkpointers.add(self)

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
        return cls(config.backend, **cast("CheckpointerOptions", options))

    # -- saving ---------------------------------------------------------------------------------

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        mode: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
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
        self._check_open()
        mode = mode or self._config.mode
        if mode not in _MODES:
            msg = f"mode={mode!r} is none of {', '.join(_MODES)}"
            raise ConfigError(msg)
        step = valid_step(step)
        metadata = check_metadata({} if metadata is None else metadata)
        if not self._take_turn():
            return skipped_save(step)
        generation = self._claim(step, overwrite=overwrite)
        request = plan_state(
            describe_tree(
                state,
                providers=self._registry.providers,
                allow_pickle=self._config.allow_pickle,
            ),
            config=self._config,
            table=self._table,
            step=step,
            generation=generation,
            mode=mode,
            metadata=metadata,
            engine=self._backend.name,
        )
        job = SaveJob(
            request,
            backend=self._backend,
            staging=self._staging_for(request.staging_bytes, pin=request.pin),
            workers=self._workers,
            after_commit=lambda report: self._after_commit(report, overwrite=overwrite),
        )
        earlier = self._unseen_error()
        try:
            self._job, self._unseen = job, job.handle
            if self._on_event is not None:
                with job.ending.calling_back():
                    announce(job.handle, self._on_event)
            if job.deferred_bytes:
                fence_hook.arm(job, self._config.fence_timeout_s)
                job.handle.durable.add_done_callback(lambda _: fence_hook.disarm(job))
            job.capture_now(on_captured=lambda: self._on_captured(job))
        except BaseException as error:
            job.interrupt(error)
            fence_hook.disarm(job)
            raise
        job.add_blocked(time.monotonic() - began)
        if mode == "blocking":
            job.wait_durable()
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
            PenstockError: A background save failed and nobody has seen it yet.
        """
        self._check_process()
        job = self._job
        if job is not None:
            job.ending.check_may_wait()
            if not job.fence(timeout, give_up=False):
                msg = f"the capture of step {job.request.step} is not complete after {timeout:g} s"
                raise FenceTimeoutError(msg)
        self._raise_unseen()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save is under way.

        Raises:
            TimeoutError: One still is, after `timeout` seconds.
            PenstockError: A background save failed and nobody has seen it yet.
        """
        self._check_process()
        if self._job is not None:
            self._job.ending.check_may_wait()
            self._job.fence(timeout, give_up=False)  # this thread waits, so it changes nothing
            if not self._job.finished(timeout):
                msg = f"the save of step {self._job.request.step} is still under way"
                raise TimeoutError(msg)
        self._raise_unseen()

    def rewind(self, step: int) -> list[int]:
        """Forget every step after `step`, to go on from there.

        Returns:
            The forgotten steps, ascending.

        Raises:
            CheckpointNotFoundError: There is no checkpoint at `step`.
        """
        self._check_open()
        self.wait()
        return self._catalog.rewind(valid_step(step))

    def prune(self, *, dry_run: bool = False) -> PruneReport:
        """Delete data that no checkpoint and no save under way can need any more."""
        self._check_open()
        own = [self._job.uid] if self._job is not None else []
        return self._catalog.prune(grace_s=self._config.grace_s, own_uids=own, dry_run=dry_run)

    def close(self) -> None:
        """Wait for the pending save, then release everything. Idempotent.

        Raises:
            SaveError: Called in a callback that the pending save waits for.
            PenstockError: A background save failed and nobody has seen it, unless another
                exception is on its way.
        """
        if self._closed:
            return
        if self._pid != os.getpid():
            self._closed = True
            return  # a forked child: the threads, and all that they hold, are the parent's
        job = self._job
        if job is not None:
            job.ending.check_may_wait()
        self._closed = True
        if job is not None:
            job.fence(None)
            job.finished(None)
        self._workers.close()
        if self._owns_backend:
            if job is None or job.released.is_open:
                self._backend.close()
            else:  # a stuck store, or a callback of the save itself, which has yet to end
                self._workers.spawn("close", lambda: self._close_after(job))
        if sys.exc_info()[0] is None:
            self._raise_unseen()

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

    def _take_turn(self) -> bool:
        """One save at a time; False when this one shall be skipped."""
        job = self._job
        if job is None or job.finished(0):
            return True
        if self._config.on_busy == "skip":
            return False
        if self._config.on_busy == "raise":
            msg = (
                f"the save of step {job.request.step} is still under way "
                f"({job.progress().phase}); wait(), or use on_busy='wait' or 'skip'"
            )
            raise BusyError(msg)
        job.ending.check_may_wait()
        job.fence(None)
        job.finished(None)
        return True

    def _claim(self, step: int, *, overwrite: bool) -> int:
        steps = self._catalog.steps()
        if overwrite:
            return self._catalog.next_generation(step)
        if steps and step <= steps[-1]:
            what = "exists" if step in steps else f"is before the latest step {steps[-1]}"
            older = [s for s in steps if s < step]
            way = f"call rewind({older[-1]})" if older else f"delete steps {steps[0]} and later"
            msg = (
                f"step {step} on {self._backend.url} {what}. Pass overwrite=True to save it all "
                f"the same, or {way} first to go on from there."
            )
            raise StepExistsError(msg)
        return 0

    def _close_after(self, job: SaveJob) -> None:
        job.released.wait()
        self._backend.close()

    def _staging_for(self, need_bytes: int, *, pin: bool) -> Staging:
        job = self._job
        if job is not None and not job.released.is_open:
            self._staging = None  # its memory may still belong to a stuck disk
        budget = self._config.staging_bytes
        if budget is None:
            local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            budget = default_budget(need_bytes, local_ranks)
        budget = max(budget, 2 * self._config.chunk_bytes)
        if self._staging is None:
            self._staging = Staging(budget)
        self._staging.budget_bytes = max(self._staging.budget_bytes, budget)
        largest = min(need_bytes, self._config.chunk_bytes)
        self._staging.expect(need_bytes, largest_bytes=largest, pin=pin)
        return self._staging

    def _on_captured(self, job: SaveJob) -> None:
        if job.straight_bytes and job.request.mode != "blocking" and not self._warned_straight:
            self._warned_straight = True
            log.warning(
                "staging is too small for the state: %.1f MB of step %d were written straight "
                "from live tensors while training stood still; raise staging_bytes (said once)",
                job.straight_bytes / 1e6,
                job.request.step,
            )

    def _after_commit(self, report: SaveReport, *, overwrite: bool) -> None:
        """Clean-up on rank 0, outside of `durable`: its failure is logged, never the save's."""
        protect = {report.step}
        if self._restored_from is not None:
            protect.add(self._restored_from)
        keep = self._config.retention
        try:
            if overwrite:
                self._catalog.delete_older_generations(report.step)
            if keep is not None:
                self._catalog.apply_retention(
                    keep_last=keep.keep_last, keep_every=keep.keep_every, protect=protect
                )
        except Exception as error:  # noqa: BLE001 - a task's boundary: recorded in the log
            log.warning("cleaning up after step %d failed: %s", report.step, error)

    def _unseen_error(self) -> BaseException | None:
        handle, self._unseen = self._unseen, None
        if handle is None or handle.error_seen or not handle.durable.done():
            self._unseen = handle if handle is not None and not handle.done() else None
            return None
        return handle.durable.exception()

    def _raise_unseen(self) -> None:
        error = self._unseen_error()
        if error is not None:
            raise error


_open_checkpointers: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _finish_at_exit() -> None:
    """Let pending saves end before the interpreter stops its thread pools."""
    for checkpointer in list(_open_checkpointers):
        if checkpointer._job is not None and checkpointer._pid == os.getpid():  # noqa: SLF001
            checkpointer._job.finished(None)  # noqa: SLF001


# `atexit` comes after the pools are gone; this is what concurrent.futures itself uses.
threading._register_atexit(_finish_at_exit)  # type: ignore[attr-defined] # noqa: SLF001

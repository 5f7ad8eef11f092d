"""The `CheckpointIO`, which saves each path of `ModelCheckpoint` as a run of Penstock."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from penstock.integrations.lightning.hosts import WRAPPERS, TorchCheckpointIO, filesystem_of

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("penstock")


class PenstockIO(TorchCheckpointIO):  # type: ignore[misc]  # the host is chosen at run time
    """Stores the saves of `ModelCheckpoint` and `Trainer.save_checkpoint` as Penstock checkpoints.

    Each path becomes a folder that is a separate run. A save captures the state before it returns,
    and writes in the background; a removal waits for all earlier saves. Lightning passes only state
    dicts, and only on rank 0, so optimizer state is stored by number and no save is lazy. Use
    `PenstockCallback` instead if you can.
    """

    def __init__(self, **options: Any) -> None:
        """Make the plugin.

        Args:
            options: As for `Checkpointer`. `allow_pickle=True` stores hyperparameters and states of
                callbacks that are not plain data.
        """
        self._options = {"ranks": "alone", **options}
        self._worker: ThreadPoolExecutor | None = None
        self._tasks: list[Future[None]] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint of Lightning; the tensors may change when the call returns.

        Args:
            checkpoint: The result of `Trainer.dump_checkpoint`.
            path: The root of the run. A Lightning file or a link there is replaced.
            storage_options: Must be None; the plugin has the options.

        Raises:
            ConfigError: `AsyncCheckpointIO` wraps this plugin, or there are `storage_options`.
            PenstockError: The save failed, or an earlier save failed in the background.
        """
        frame = inspect.currentframe()
        caller = None if frame is None or frame.f_back is None else frame.f_back.f_locals
        if caller is not None and isinstance(caller.get("self"), WRAPPERS):
            msg = (
                "AsyncCheckpointIO does not queue removals after saves, so it leaves checkpoints "
                "that ModelCheckpoint has removed; PenstockIO saves in the background without it: "
                "pass plugins=[PenstockIO()]"
            )
            raise penstock.ConfigError(msg)
        if storage_options is not None:
            msg = "PenstockIO takes no storage_options: pass options to PenstockIO(...)"
            raise penstock.ConfigError(msg)
        self._raise_first(done=True)
        # `save_last="link"` leaves a link to another run, which would be overwritten.
        if filesystem_of(path).isfile(path) or Path(path).is_symlink():
            super().remove_checkpoint(path)
        filesystem_of(path).makedirs(path, exist_ok=True)  # ModelCheckpoint looks for taken names
        ckpt = penstock.Checkpointer(os.fspath(path), **self._options)
        step = int(checkpoint.get("global_step", 0))
        try:
            replaced = [each for each in ckpt.steps() if each != step]
            handle = ckpt.save(checkpoint, step, overwrite=True)
        except BaseException:
            ckpt.close()
            raise
        self._queue(lambda: _finish(ckpt, handle, replaced))

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,  # noqa: FBT001 - as Lightning declares it
    ) -> dict[str, Any]:
        """Load a Penstock checkpoint or a Lightning file.

        Args:
            path: The root of a run, or a file.
            map_location: A device for the tensors; default: the CPU. For a file, as for
                `torch.load`.
            weights_only: As for `torch.load`, but only for a file. Penstock runs no code unless the
                plugin has `allow_pickle=True`.

        Returns:
            The checkpoint that was passed to `save_checkpoint`.

        Raises:
            FileNotFoundError: There is nothing at `path`.
            PenstockError: The checkpoint cannot be read, or an earlier save failed.
        """
        self._wait()
        files = filesystem_of(path)
        if files.isfile(path) or not files.exists(path):
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            return loaded
        device = None if map_location is None or callable(map_location) else str(map_location)
        with penstock.Checkpointer(os.fspath(path), **self._options) as ckpt:
            # A killed process may have left checkpoints that its last save replaced.
            steps = ckpt.steps()
            newest = max(steps, key=lambda step: (ckpt.info(step).created, step), default="latest")
            tree: dict[str, Any] = ckpt.load(newest, device=device)
        return tree

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint after all earlier saves have ended.

        Args:
            path: The root of a run, or a file.
        """
        self._queue(lambda: super(PenstockIO, self).remove_checkpoint(path))

    def teardown(self) -> None:
        """Wait for all saves and removals.

        Raises:
            PenstockError: One of them failed.
        """
        try:
            self._wait()
        finally:
            if self._worker is not None:
                self._worker.shutdown()
            self._worker = None

    def _queue(self, task: Callable[[], None]) -> None:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="penstock-lightning")
        self._tasks.append(self._worker.submit(task))

    def _wait(self) -> None:
        self._raise_first(done=False)

    def _raise_first(self, *, done: bool) -> None:
        """Raise the first error of all tasks, or of the finished tasks only, if `done`."""
        chosen = [task for task in self._tasks if task.done() or not done]
        self._tasks = [task for task in self._tasks if task not in chosen]
        errors = [error for task in chosen if (error := task.exception()) is not None]
        if errors:
            raise errors[0]


def _finish(ckpt: penstock.Checkpointer, handle: penstock.SaveHandle, replaced: list[int]) -> None:
    """Wait for a save, and delete the checkpoints that it replaces at its path."""
    with ckpt:
        handle.result()
        for step in replaced:
            with contextlib.suppress(penstock.CheckpointNotFoundError):  # the previous save did it
                ckpt.delete(step)

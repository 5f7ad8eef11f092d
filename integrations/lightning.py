"""Lightning trainers that save with Penstock: a callback, and a `CheckpointIO` for convenience.

Both work with `lightning` and with `pytorch_lightning`, whichever the program has imported.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

log = logging.getLogger("penstock")

_RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_HOSTS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_loaded = [name for name in _HOSTS if name in sys.modules] or ["lightning.pytorch"]


def _base(modules: list[str], name: str) -> Any:
    """Return a class below that of each host: a trainer takes only instances of its own classes."""
    return type(name, tuple(getattr(import_module(module), name) for module in modules), {})


_Checkpoint: Any = _base([f"{name}.callbacks" for name in _loaded], "Checkpoint")
_TorchCheckpointIO: Any = _base(
    [f"{_HOSTS[name]}.plugins" for name in _loaded], "TorchCheckpointIO"
)
_WRAPPERS = tuple(import_module(f"{name}.plugins.io").AsyncCheckpointIO for name in _loaded)


class PenstockCallback(_Checkpoint):  # type: ignore[misc]  # the host is chosen at run time
    """Saves the live objects of a trainer every N steps, and resumes from the newest checkpoint.

    `fit` without `ckpt_path` restores the newest checkpoint of the run at `url`, if there is one:
    the model, the optimizers and schedulers by name, the loops with `global_step`, the precision
    plugin, the callbacks, the datamodule, the position of the training data and the random state. A
    save is made between two batches, after everything that Lightning does for the first of them,
    validation included. The end of training is saved as well.

    The first save logs a warning for each thing in the configuration that will not resume exactly.
    """

    def __init__(self, url: str | Path, *, every_n_steps: int, **options: Any) -> None:
        """Make the callback; the run is opened when `fit` begins.

        Args:
            url: The place of the checkpoints, as `Checkpointer` takes it.
            every_n_steps: After how many optimizer steps (`trainer.global_step`) to save.
            options: As for `Checkpointer`; `mode` is `"lazy"` by default. The metadata of a save
                has the numbers of `trainer.callback_metrics`, those of validation only where it
                has validated what is saved, so `retention={"keep_best": 3, "best_metric":
                "val_loss", "best_mode": "min"}` keeps the best.

        Raises:
            ConfigError: `every_n_steps` is less than 1.
        """
        if every_n_steps < 1:
            msg = f"every_n_steps must be at least 1, not {every_n_steps!r}"
            raise penstock.ConfigError(msg)
        self._url = url
        self._every = every_n_steps
        self._options = {"mode": "lazy", **options}
        self._ckpt: penstock.Checkpointer | None = None
        self._forget()

    def _forget(self) -> None:
        self._resumed: Mapping[str, Any] | None = None  # what was restored, until it is used up
        self._step: int | None = None  # of the checkpoint that was restored
        self._seen = 0  # the last global step
        self._saved: int | None = None  # the step of the last save
        self._is_due = False
        self._order: dict[str, Any] | None = None  # what the order of this epoch was drawn from
        self._ahead: list[Any] | None = None  # states of the loaders before the last fetch
        self._validated = -1  # the step of the last validation
        self._before_validation: dict[str, Any] = {}
        self._of_validation: set[str] = set()  # the metrics that it computed

    # -- resuming -----------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore callbacks and the datamodule, before the strategy sets up model and optimizers.

        Raises:
            ConfigError: The strategy holds the state itself.
            PenstockError: As for `Checkpointer.restore`.
        """
        del pl_module
        if stage != "fit":
            return
        name = type(trainer.strategy).__name__
        if "DeepSpeed" in name or "XLA" in name:
            msg = (
                f"PenstockCallback cannot save under {name}, whose engine holds the state: use "
                "another strategy, such as DDPStrategy or FSDPStrategy"
            )
            raise penstock.ConfigError(msg)
        self._forget()
        self._ckpt = penstock.Checkpointer(self._url, **self._options)
        if trainer.ckpt_path is not None:
            log.info("ckpt_path is given, so nothing is restored from %s", self._url)
            return
        held = _TrainerState({})
        tree = {"trainer": penstock.PerRank(held, on_change=_first)}
        try:
            report = self._ckpt.restore(tree, include="trainer")
        except penstock.CheckpointNotFoundError:
            return
        self._step = self._saved = report.step
        state = self._resumed = held.state or _of_other_ranks(tree["trainer"].value, trainer)
        for callback in trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
        if trainer.datamodule is not None and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore model, optimizers, schedulers and the loops."""
        if self._resumed is None:
            return
        state = self._resumed
        assert self._ckpt is not None
        assert self._step is not None
        self._ckpt.restore(_objects(trainer), self._step, exclude=["trainer", "rng/**"])
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])
        if state["hooks"]:
            checkpoint = {**_plain_checkpoint(trainer, state), **state["hooks"]}
            for callback in trainer.callbacks:
                callback.on_load_checkpoint(trainer, pl_module, checkpoint)
            pl_module.on_load_checkpoint(checkpoint)
        trainer._logger_connector._callback_metrics.update(state["metrics"])
        self._of_validation = set(state["of_validation"])
        trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
        trainer.should_stop = state["has_ended"] and state["should_stop"]
        loop = trainer.fit_loop
        loop.load_state_dict(state["loops"])
        self._seen = trainer.global_step
        if state["has_ended"] and not state["in_epoch"]:
            # What was trained is complete: if there are to be more epochs, the next one begins.
            loop._restarting = loop.epoch_loop._restarting = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch for the moments between two batches."""
        del pl_module
        epoch_loop = trainer.fit_loop.epoch_loop
        fetch_hook = epoch_loop._on_before_fetch

        def before_fetch() -> None:
            self._between_batches(trainer)
            fetch_hook()

        vars(epoch_loop)["_on_before_fetch"] = before_fetch
        if self._resumed is not None and self._resumed["in_epoch"]:
            # The validation after the last batch, if any, is over.
            def is_not_due(*_: object) -> bool:
                del vars(epoch_loop)["_should_check_val_fx"]  # for this first time only
                return False

            vars(epoch_loop)["_should_check_val_fx"] = is_not_due
            self._begin_again(trainer.fit_loop, self._resumed)
        elif self._resumed is None and _drawing_samplers(trainer.fit_loop):
            # Lightning has begun to iterate, so the order is drawn again from a known state.
            self._order = _order_state(trainer.fit_loop)
            iter(trainer.fit_loop._data_fetcher)

    def _begin_again(self, loop: Any, state: Mapping[str, Any]) -> None:
        """Iterate over samples in the order of the saved epoch.

        Lightning begins before it sets the epoch of samplers, and does not store from which random
        numbers the samplers that it wraps draw their order.
        """
        samplers = _samplers(loop)
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(loop.epoch_progress.current.processed)
        self._order = state["order"]
        if self._order is not None:
            torch.set_rng_state(self._order["random"])
            _set_generators(loop, self._order["generators"])
        elif not any(hasattr(each, "set_epoch") for each in samplers):
            return
        # A loader that continues asks its sampler for the order several times.
        wrapped = [pair for pair in _drawing_samplers(loop) if pair[0] is not None]
        for holder, sampler in wrapped:
            holder._sampler = list(sampler)
        loop._combined_loader._load_state_dicts(state["loaders"])
        iter(loop._data_fetcher)
        for holder, sampler in wrapped:
            holder._sampler = sampler

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the epoch after those that were saved, as if they had been trained just now."""
        del pl_module
        loop = trainer.fit_loop
        if self._resumed is None:
            if trainer.current_epoch > 0:  # Lightning is about to iterate
                self._order = _order_state(loop)
        elif not self._resumed["in_epoch"]:
            loop._combined_loader._load_state_dicts(self._resumed["loaders"])
            iter(loop._data_fetcher)  # at the end of the last epoch
            _set_generators(loop, self._resumed["generators"])
            self._restore_random_state()
            self._order = _order_state(loop)
            iter(loop._data_fetcher)

    def _restore_random_state(self) -> None:
        assert self._ckpt is not None
        assert self._step is not None
        self._ckpt.restore({"rng": penstock.Rng()}, self._step, include="rng/**")
        self._resumed = None

    # -- saving -------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note that a save is due; Lightning has yet to finish this batch."""
        del pl_module, outputs, batch, batch_idx
        step = trainer.global_step
        self._is_due |= step // self._every > self._seen // self._every
        self._seen = step
        if self._is_due and _fetches_itself(trainer):
            self._save(trainer, in_epoch=True)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Note which metrics there are, and let captures end: callbacks may swap weights."""
        del pl_module
        self._before_validation = dict(trainer.callback_metrics)
        if self._ckpt is not None and not trainer.sanity_checking:
            self._ckpt.fence()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note which metrics are those of validation."""
        del pl_module
        before = self._before_validation
        self._of_validation |= {
            name for name, v in trainer.callback_metrics.items() if v is not before.get(name)
        }
        self._validated = trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the end of training."""
        del pl_module
        if self._saved != trainer.global_step:
            in_epoch = not trainer.fit_loop.epoch_loop._num_ready_batches_reached()
            self._save(trainer, in_epoch=in_epoch, has_ended=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let the save in flight end."""
        del pl_module
        self._stop_watching(trainer)
        if self._ckpt is not None:
            self._ckpt.__exit__(type(exception), exception, exception.__traceback__)
            self._ckpt = None

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wait for the last save, and close the run.

        Raises:
            PenstockError: The last save failed.
        """
        del pl_module
        if stage == "fit" and self._ckpt is not None:
            self._stop_watching(trainer)
            self._ckpt.close()
            self._ckpt = None

    def _stop_watching(self, trainer: Any) -> None:
        for name in ("_on_before_fetch", "_should_check_val_fx"):
            vars(trainer.fit_loop.epoch_loop).pop(name, None)

    def _between_batches(self, trainer: Any) -> None:
        """Save, if a save is due, right before the next batch is fetched."""
        if self._resumed is not None:
            self._restore_random_state()
        if _fetches_itself(trainer):
            return
        fetcher = trainer.fit_loop._data_fetcher
        if self._is_due:
            is_ahead = fetcher.length is None and fetcher.fetched
            self._save(trainer, loaders=self._ahead if is_ahead else None, in_epoch=True)
        if fetcher.length is None:  # Lightning fetches one batch ahead to find the end
            self._ahead = _loader_states(trainer)

    def _save(
        self,
        trainer: Any,
        *,
        in_epoch: bool,
        loaders: list[Any] | None = None,
        has_ended: bool = False,
    ) -> None:
        assert self._ckpt is not None
        if self._saved == self._step:  # the first save of this process
            for remark in _remarks(trainer) if trainer.is_global_zero else ():
                log.warning("lightning: %s", remark)
        step = trainer.global_step
        state = _trainer_state(trainer, in_epoch=in_epoch, has_ended=has_ended)
        state["of_validation"] = sorted(self._of_validation)
        state["order"] = self._order
        state["generators"] = _generators(trainer.fit_loop)
        state["loaders"] = _loader_states(trainer) if loaders is None else loaders
        state["loops"]["state_dict"]["combined_loader"] = state["loaders"]
        tree = {
            **_objects(trainer),
            "trainer": penstock.PerRank(_TrainerState(state)),
            "rng": penstock.Rng(),
        }
        metadata = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name not in self._of_validation or self._validated == step
        }
        self._is_due = False
        self._saved = step
        handle = self._ckpt.save(tree, step, metadata=metadata)
        if not has_ended:  # the log has its error; training continues, and the end is saved too
            handle.durable.add_done_callback(lambda done: done.exception())


class PenstockIO(_TorchCheckpointIO):  # type: ignore[misc]  # the host is chosen at run time
    """Stores what `ModelCheckpoint` and `Trainer.save_checkpoint` save as Penstock checkpoints.

    Each path becomes a folder that is a separate run. A save is captured at once and written in
    the background; a removal waits for the saves before it. Lightning hands over state dicts on
    rank 0 alone, so optimizer state is stored by number and nothing is deferred:
    `PenstockCallback` is better wherever it can be used.
    """

    def __init__(self, **options: Any) -> None:
        """Make the plugin.

        Args:
            options: As for `Checkpointer`. `allow_pickle=True` stores hyperparameters and states of
                callbacks that are no plain data.
        """
        self._options = {"ranks": "alone", **options}
        self._worker: ThreadPoolExecutor | None = None
        self._tasks: list[Future[None]] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint of Lightning; the tensors may change when the call returns.

        Args:
            checkpoint: What `Trainer.dump_checkpoint` has made.
            path: The root of the run. A file of Lightning there is replaced.
            storage_options: None; the options of Penstock are those of the plugin.

        Raises:
            ConfigError: `AsyncCheckpointIO` wraps this plugin, or there are `storage_options`.
            PenstockError: The save failed, or an earlier one did in the background.
        """
        frame = inspect.currentframe()
        caller = None if frame is None or frame.f_back is None else frame.f_back.f_locals
        if caller is not None and isinstance(caller.get("self"), _WRAPPERS):
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
        if self._files(path).isfile(path):
            super().remove_checkpoint(path)
        self._files(path).makedirs(path, exist_ok=True)  # ModelCheckpoint looks for taken names
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
        """Load a checkpoint of Penstock, or a file that Lightning has left.

        Args:
            path: The root of a run, or a file.
            map_location: A device for the tensors; default: the CPU. For a file, as for
                `torch.load`.
            weights_only: As for `torch.load`, for a file alone: Penstock runs no code in any case
                unless the plugin was made with `allow_pickle=True`.

        Returns:
            The checkpoint as it was handed to `save_checkpoint`.

        Raises:
            FileNotFoundError: There is nothing at `path`.
            PenstockError: The checkpoint cannot be read, or an earlier save failed.
        """
        self._wait()
        files = self._files(path)
        if files.isfile(path) or not files.exists(path):
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            return loaded
        device = None if map_location is None or callable(map_location) else str(map_location)
        with penstock.Checkpointer(os.fspath(path), **self._options) as ckpt:
            tree: dict[str, Any] = ckpt.load(device=device)
        return tree

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint once all saves before it have ended.

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
        """Raise the first error of the tasks that are over, or of all of them."""
        chosen = [task for task in self._tasks if task.done() or not done]
        self._tasks = [task for task in self._tasks if task not in chosen]
        errors = [error for task in chosen if (error := task.exception()) is not None]
        if errors:
            raise errors[0]

    @staticmethod
    def _files(path: str | os.PathLike[str]) -> Any:
        module = import_module(f"{_HOSTS[_loaded[0]]}.utilities.cloud_io")
        return module.get_filesystem(path)


def _finish(ckpt: penstock.Checkpointer, handle: penstock.SaveHandle, replaced: list[int]) -> None:
    """Wait for a save, and delete the checkpoints that were at its path before."""
    with ckpt:
        handle.result()
        for step in replaced:
            with contextlib.suppress(penstock.CheckpointNotFoundError):  # the save before did it
                ckpt.delete(step)


class _TrainerState:
    """A state that is stored as it is, and comes back without a template."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> Mapping[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = state


def _objects(trainer: Any) -> dict[str, Any]:
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return {
        "model": trainer.strategy.model,
        **_named("optimizer", trainer.optimizers),
        **_named("scheduler", schedulers),
    }


def _named(name: str, values: list[Any]) -> dict[str, Any]:
    if len(values) == 1:
        return {name: values[0]}
    return {f"{name}_{number}": value for number, value in enumerate(values)}


def _first(states: list[Any]) -> Any:
    return states[0]


def _of_other_ranks(state: dict[str, Any], trainer: Any) -> dict[str, Any]:
    """Return what rank 0 of another number of ranks stored, without its place in the data."""
    if state["in_epoch"] and state["loaders"] and trainer.is_global_zero:
        log.warning(
            "lightning: saved in the middle of an epoch by another number of ranks: the rest of "
            "the epoch reads its data from the start"
        )
    state["loops"]["state_dict"]["combined_loader"] = state["loaders"] = state["generators"] = []
    state["order"] = None
    return state


def _loader_states(trainer: Any) -> list[Any]:
    states: list[Any] = trainer.fit_loop._combined_loader._state_dicts()
    return states


def _samplers(loop: Any) -> list[Any]:
    loaders = loop._combined_loader.flattened
    sources = [*loaders, *(getattr(each, "batch_sampler", None) for each in loaders)]
    found = [getattr(each, "sampler", None) for each in sources]
    return list({id(each): each for each in found if each is not None}.values())


def _drawing_samplers(loop: Any) -> list[tuple[Any, Any]]:
    """Return the samplers whose order comes from random numbers that no loader stores.

    They are those of torch, and those that Lightning wraps for several ranks. Each comes with what
    holds it in the wrapper, or None.
    """
    found = []
    for sampler in _samplers(loop):
        holder: Any = getattr(sampler, "dataset", None)
        if hasattr(holder, "_sampler"):
            found.append((holder, holder._sampler))
        elif isinstance(sampler, _RANDOM_SAMPLERS):
            found.append((None, sampler))
    return found


def _order_state(loop: Any) -> dict[str, Any] | None:
    """Return what the order of samples will be drawn from, if it is not in a loader's state."""
    if not _drawing_samplers(loop):
        return None
    return {"random": torch.get_rng_state(), "generators": _generators(loop)}


def _generators(loop: Any) -> list[Any]:
    own = [getattr(sampler, "generator", None) for _, sampler in _drawing_samplers(loop)]
    return [None if each is None else each.get_state() for each in own]


def _set_generators(loop: Any, states: list[Any]) -> None:
    for (_, sampler), state in zip(_drawing_samplers(loop), states, strict=False):
        if state is not None:
            sampler.generator.set_state(state)


def _fetches_itself(trainer: Any) -> bool:
    """Whether `training_step` takes the iterator, and fetches batches when it likes."""
    return type(trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher"


def _trainer_state(trainer: Any, *, in_epoch: bool, has_ended: bool) -> dict[str, Any]:
    loops = trainer.fit_loop.state_dict()
    if (
        in_epoch and has_ended
    ):  # `max_steps` ended it: Lightning has counted an epoch that is not over
        for count in (loops["epoch_progress"]["total"], loops["epoch_progress"]["current"]):
            count["processed"] -= 1
            count["completed"] -= 1
    datamodule = trainer.datamodule
    states = {each.state_key: each.state_dict() for each in trainer.callbacks}
    state = {
        "loops": loops,
        "callbacks": {key: each for key, each in states.items() if each},
        "precision": trainer.precision_plugin.state_dict(),
        "datamodule": None if datamodule is None else datamodule.state_dict(),
        "metrics": dict(trainer.callback_metrics),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "should_stop": bool(trainer.should_stop),
        "in_epoch": in_epoch,
        "has_ended": has_ended,
    }
    state["hooks"] = _hook_state(trainer, state)
    return state


def _plain_checkpoint(trainer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what hooks that save and load may look at in a checkpoint of Lightning."""
    strategy = type(trainer.strategy).__name__
    is_sharded = "FSDP" in strategy or "ModelParallel" in strategy  # whole, it may be too large
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "state_dict": {} if is_sharded else trainer.lightning_module.state_dict(),
        "loops": {"fit_loop": state["loops"]},
        "callbacks": state["callbacks"],
    }


def _hook_state(trainer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `on_save_checkpoint` of the module or a callback adds to a checkpoint."""
    module = trainer.lightning_module
    if not any(_overrides(each, "on_save_checkpoint") for each in (module, *trainer.callbacks)):
        return {}
    plain = _plain_checkpoint(trainer, state)
    checkpoint = dict(plain)
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, module, checkpoint)
    module.on_save_checkpoint(checkpoint)
    return {name: value for name, value in checkpoint.items() if value is not plain.get(name)}


def _overrides(value: object, name: str) -> bool:
    home = getattr(type(value), name).__qualname__
    return home not in {f"Callback.{name}", f"CheckpointHooks.{name}"}  # which do nothing


def _remarks(trainer: Any) -> Iterator[str]:
    """Yield what of the configuration will not resume exactly, and what to do."""
    loader = trainer.fit_loop._combined_loader
    if len(_loader_states(trainer)) < len(loader.flattened):
        yield (
            "the training data loader cannot say where it is, so a resume in the middle of an "
            "epoch gets other samples: use torchdata.stateful_dataloader.StatefulDataLoader"
        )
    if len(loader.flattened) > 1 and "cycle" in loader._mode:
        yield "several loaders of different lengths: which of them began again is not restored"
    if _fetches_itself(trainer):
        yield (
            "training_step takes dataloader_iter: batches that it has fetched ahead are lost in a "
            "resume"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        yield "reload_dataloaders_every_n_epochs counts from the epoch of the resume"
    if any(metric.meta.on_epoch for metric in trainer.fit_loop.epoch_loop._results.values()):
        yield (
            "Lightning stores no sums of self.log(on_epoch=True): an epoch that is resumed in the "
            "middle logs the mean of the batches after it"
        )

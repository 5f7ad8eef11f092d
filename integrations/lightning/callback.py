"""The callback that saves the live objects of a trainer, and resumes from them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import penstock
from penstock.integrations.lightning.hosts import Checkpoint
from penstock.integrations.lightning.state import (
    TrainerState,
    fetches_itself,
    gradients_of,
    is_accumulating,
    loader_states,
    objects_of,
    of_other_ranks,
    plain_checkpoint,
    remarks,
    trainer_state,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

log = logging.getLogger("penstock")
_RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class PenstockCallback(Checkpoint):  # type: ignore[misc]  # the host is chosen at run time
    """Saves the live objects of a trainer every N steps, and resumes from the newest checkpoint.

    `fit` without `ckpt_path` restores the newest checkpoint of the run at `url`, if there is one:
    the model, the optimizers and schedulers by name, the loops with `global_step`, the precision
    plugin, the callbacks, the datamodule, the position of the training data and the random state. A
    save comes between two batches, after everything that Lightning does for the earlier batch,
    including validation. The end of training is saved too.

    The first save logs a warning for each setting that prevents an exact resume.
    """

    def __init__(self, url: str | Path, *, every_n_steps: int, **options: Any) -> None:
        """Make the callback; the run is opened when `fit` begins.

        Args:
            url: The location of the run, as for `Checkpointer`.
            every_n_steps: The number of optimizer steps (`trainer.global_step`) between saves.
            options: As for `Checkpointer`; `mode` is `"lazy"` by default. The metadata of a save
                has the numbers of `trainer.callback_metrics`, and validation metrics only if they
                belong to the saved step. So `retention={"keep_best": 3, "best_metric": "val_loss",
                "best_mode": "min"}` keeps the best.

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
        self._resumed: Mapping[str, Any] | None = None  # the restored state, until it is used
        self._step: int | None = None  # of the checkpoint that was restored
        self._seen = 0  # the latest global step
        self._saved: int | None = None  # the step of the last save
        self._is_due = False
        self._order: dict[str, Any] | None = None  # the random state that ordered this epoch
        self._ahead: list[Any] | None = None  # states of the loaders before the last fetch
        self._validated = -1  # the step of the last validation
        self._before_validation: dict[str, Any] = {}
        self._of_validation: set[str] = set()  # its metrics

    # -- resuming -----------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore callbacks and the datamodule, before the strategy sets up model and optimizers.

        Raises:
            ConfigError: The strategy holds the state itself.
            PenstockError: As for `Checkpointer.restore`.
        """
        del pl_module
        self._forget()
        if stage != "fit" or trainer.fast_dev_run:  # which suppresses checkpoints
            return
        name = type(trainer.strategy).__name__
        if "DeepSpeed" in name or "XLA" in name:
            msg = (
                f"PenstockCallback cannot save under {name}, whose engine holds the state: use "
                "another strategy, such as DDPStrategy or FSDPStrategy"
            )
            raise penstock.ConfigError(msg)
        self._ckpt = penstock.Checkpointer(self._url, **self._options)
        if trainer.ckpt_path is not None:
            log.info("ckpt_path is given, so nothing is restored from %s", self._url)
            return
        held = TrainerState({})

        def adapt(states: list[Any]) -> Any:
            return of_other_ranks(states[0], trainer)

        tree = {"trainer": penstock.PerRank(held, on_change=adapt)}
        try:
            report = self._ckpt.restore(tree, include="trainer")
        except penstock.CheckpointNotFoundError:
            return
        self._step = self._saved = report.step
        state = self._resumed = held.state
        for callback in trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
        if trainer.datamodule is not None and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the model, optimizers, schedulers and loops."""
        if self._resumed is None:
            return
        state = self._resumed
        assert self._ckpt is not None
        assert self._step is not None
        later = ["trainer", "rng/**", *(["grads"] if state["accumulates"] else [])]
        self._ckpt.restore(objects_of(trainer), self._step, exclude=later)
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])
        if state["hooks"]:
            checkpoint = {**plain_checkpoint(trainer, state), **state["hooks"]}
            for callback in trainer.callbacks:
                callback.on_load_checkpoint(trainer, pl_module, checkpoint)
            pl_module.on_load_checkpoint(checkpoint)
        trainer._logger_connector._callback_metrics.update(state["metrics"])
        self._of_validation = set(state["of_validation"])
        trainer.should_stop |= state["has_ended"] and state["should_stop"]
        loop = trainer.fit_loop
        loop.load_state_dict(state["loops"])
        self._seen = trainer.global_step
        if state["has_ended"] and not state["in_epoch"]:
            # The saved epoch is complete: if more epochs follow, the next one begins.
            loop._restarting = loop.epoch_loop._restarting = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Hook into the moments between two batches, and prepare a mid-epoch resume."""
        del pl_module
        epoch_loop = trainer.fit_loop.epoch_loop
        fetch_hook = epoch_loop._on_before_fetch

        def before_fetch() -> None:
            self._between_batches(trainer)
            fetch_hook()

        vars(epoch_loop)["_on_before_fetch"] = before_fetch
        if self._resumed is not None and self._resumed["in_epoch"]:
            # Else Lightning skips the schedulers that monitor a metric at the end of this epoch.
            trainer.fit_loop._restarting = False
            # `GradientAccumulationScheduler` sets it only when an epoch begins.
            for callback in trainer.callbacks:
                if hasattr(callback, "get_accumulate_grad_batches"):
                    count = callback.get_accumulate_grad_batches(trainer.current_epoch)
                    trainer.accumulate_grad_batches = count
            if self._resumed["accumulates"]:  # Lightning zeroed them after `on_fit_start`
                assert self._ckpt is not None
                assert self._step is not None
                self._ckpt.restore(gradients_of(trainer), self._step, include="grads")

            # The validation after the last batch, if any, is over.
            def is_not_due(*_: object) -> bool:
                del vars(epoch_loop)["_should_check_val_fx"]  # for this first time only
                return False

            vars(epoch_loop)["_should_check_val_fx"] = is_not_due
            self._begin_again(trainer.fit_loop, self._resumed)
        elif self._resumed is None and drawing_samplers(trainer.fit_loop):
            # Lightning is already iterating, so the order is drawn again from a known state.
            self._order = order_state(trainer.fit_loop)
            iter(trainer.fit_loop._data_fetcher)

    def _begin_again(self, loop: Any, state: Mapping[str, Any]) -> None:
        """Restart the iteration in the sample order of the saved epoch.

        Lightning starts to iterate before it sets the epoch of samplers. It does not store the
        random state from which wrapped samplers draw their order.
        """
        samplers = samplers_of(loop)
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(loop.epoch_progress.current.processed)
        self._order = state["order"]
        if self._order is not None:
            torch.set_rng_state(self._order["random"])
            set_generators(loop, self._order["generators"])
        elif not any(hasattr(each, "set_epoch") for each in samplers):
            return
        # A resumed loader asks its sampler for the order several times.
        wrapped = [pair for pair in drawing_samplers(loop) if pair[0] is not None]
        for holder, sampler in wrapped:
            holder._sampler = list(sampler)
        loop._combined_loader._load_state_dicts(state["loaders"])
        iter(loop._data_fetcher)
        for holder, sampler in wrapped:
            holder._sampler = sampler

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the state that orders the samples.

        If a complete epoch was restored, first repeat what training did at the end of that epoch.
        """
        del pl_module
        loop = trainer.fit_loop
        if self._resumed is None:
            if trainer.current_epoch > 0:  # Lightning is about to iterate
                self._order = order_state(loop)
        elif not self._resumed["in_epoch"]:
            loop._combined_loader._load_state_dicts(self._resumed["loaders"])
            iter(loop._data_fetcher)  # at the end of the last epoch
            set_generators(loop, self._resumed["generators"])
            self._restore_random_state()
            self._order = order_state(loop)
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
        """Record whether a save is due; it comes right before the next batch is fetched.

        If `training_step` fetches the batches itself, save now.
        """
        del pl_module, outputs, batch, batch_idx
        step = trainer.global_step
        self._is_due |= step // self._every > self._seen // self._every
        self._seen = step
        if self._is_due and fetches_itself(trainer):
            self._save(trainer, in_epoch=True)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the current metrics, and wait for captures, since callbacks may swap weights."""
        del pl_module
        self._before_validation = dict(trainer.callback_metrics)
        if self._ckpt is not None and not trainer.sanity_checking:
            self._ckpt.fence()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record which metrics come from validation."""
        del pl_module
        before = self._before_validation
        self._of_validation |= {
            name for name, v in trainer.callback_metrics.items() if v is not before.get(name)
        }
        self._validated = trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save at the end of training."""
        del pl_module
        if self._saved != trainer.global_step:
            in_epoch = not trainer.fit_loop.epoch_loop._num_ready_batches_reached()
            self._save(trainer, in_epoch=in_epoch, has_ended=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Wait for the save in flight."""
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
        """Save right before the next batch is fetched, if a save is due."""
        if self._resumed is not None:
            self._restore_random_state()
        if fetches_itself(trainer):
            return
        fetcher = trainer.fit_loop._data_fetcher
        if self._is_due:
            is_ahead = fetcher.length is None and fetcher.fetched
            self._save(trainer, loaders=self._ahead if is_ahead else None, in_epoch=True)
        if fetcher.length is None:  # Lightning fetches one batch ahead to find the end
            self._ahead = loader_states(trainer)

    def _save(
        self,
        trainer: Any,
        *,
        in_epoch: bool,
        loaders: list[Any] | None = None,
        has_ended: bool = False,
    ) -> None:
        if self._ckpt is None:  # `fast_dev_run`
            return
        if self._saved == self._step:  # the first save of this process
            for remark in remarks(trainer) if trainer.is_global_zero else ():
                log.warning("lightning: %s", remark)
        step = trainer.global_step
        state = trainer_state(trainer, in_epoch=in_epoch, has_ended=has_ended)
        state["accumulates"] = is_accumulating(trainer)
        state["of_validation"] = sorted(self._of_validation)
        state["order"] = self._order
        state["generators"] = generator_states(trainer.fit_loop)
        state["loaders"] = loader_states(trainer) if loaders is None else loaders
        state["loops"]["state_dict"]["combined_loader"] = state["loaders"]
        tree = {
            **objects_of(trainer),
            **(gradients_of(trainer) if state["accumulates"] else {}),
            "trainer": penstock.PerRank(TrainerState(state)),
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


def samplers_of(loop: Any) -> list[Any]:
    """Return the samplers of all loaders and batch samplers, each once."""
    loaders = loop._combined_loader.flattened
    sources = [*loaders, *(getattr(each, "batch_sampler", None) for each in loaders)]
    samplers = [getattr(each, "sampler", None) for each in sources]
    return list({id(each): each for each in samplers if each is not None}.values())


def drawing_samplers(loop: Any) -> list[tuple[Any, Any]]:
    """Return `(holder, sampler)` for each sampler whose random order no loader stores.

    For torch's own samplers the holder is None. For samplers that Lightning wraps for several
    ranks, it is the object that holds the sampler.
    """
    pairs = []
    for sampler in samplers_of(loop):
        holder: Any = getattr(sampler, "dataset", None)
        if hasattr(holder, "_sampler"):
            pairs.append((holder, holder._sampler))
        elif isinstance(sampler, _RANDOM_SAMPLERS):
            pairs.append((None, sampler))
    return pairs


def order_state(loop: Any) -> dict[str, Any] | None:
    """Return the random state that orders the samples; None if the loaders' states have it."""
    if not drawing_samplers(loop):
        return None
    return {"random": torch.get_rng_state(), "generators": generator_states(loop)}


def generator_states(loop: Any) -> list[Any]:
    """Return the states of the samplers' own generators; None for a sampler without one."""
    own = [getattr(sampler, "generator", None) for _, sampler in drawing_samplers(loop)]
    return [None if each is None else each.get_state() for each in own]


def set_generators(loop: Any, states: list[Any]) -> None:
    """Restore the states that `generator_states` returned."""
    for (_, sampler), state in zip(drawing_samplers(loop), states, strict=False):
        if state is not None:
            sampler.generator.set_state(state)

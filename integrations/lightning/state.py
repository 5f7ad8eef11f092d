"""A trainer's state without model and optimizers, and the settings that prevent an exact resume."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import penstock
from penstock.integrations.states import named

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

log = logging.getLogger("penstock")


class TrainerState:
    """Holds a state that is stored unchanged and restored without a template."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the state with the stored one."""
        self.state = state


def objects_of(trainer: Any) -> dict[str, Any]:
    """Return the live model, optimizers and schedulers."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return {
        "model": trainer.strategy.model,
        **named("optimizer", trainer.optimizers),
        **named("scheduler", schedulers),
    }


def is_accumulating(trainer: Any) -> bool:
    """Return whether there are accumulated gradients to save, between two optimizer steps."""
    return bool(trainer.fit_loop.epoch_loop._should_accumulate()) and not _is_sharded(trainer)


def gradients_of(trainer: Any) -> dict[str, Any]:
    """Return the live gradients of each rank."""
    return {"grads": penstock.PerRank(penstock.Grads(trainer.strategy.model), on_change="keep")}


def of_other_ranks(state: dict[str, Any], trainer: Any) -> dict[str, Any]:
    """Adapt rank 0's state to another number of ranks: drop its position in the data."""
    if state["in_epoch"] and state["loaders"] and trainer.is_global_zero:
        log.warning(
            "lightning: the checkpoint was saved in the middle of an epoch by a different number "
            "of ranks: the rest of the epoch reads its data from the start"
        )
    state["loops"]["state_dict"]["combined_loader"] = state["loaders"] = state["generators"] = []
    state["order"] = None
    return state


def loader_states(trainer: Any) -> list[Any]:
    """Return the states of the stateful training loaders."""
    states: list[Any] = trainer.fit_loop._combined_loader._state_dicts()
    return states


def fetches_itself(trainer: Any) -> bool:
    """Return whether `training_step` takes the iterator and fetches batches itself."""
    return type(trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher"


def trainer_state(trainer: Any, *, in_epoch: bool, has_ended: bool) -> dict[str, Any]:
    """Return loops, callbacks and all other state that is not in `objects_of`.

    Args:
        trainer: The trainer.
        in_epoch: Whether the save is made before the end of an epoch.
        has_ended: Whether training has ended.
    """
    loops = trainer.fit_loop.state_dict()
    if in_epoch and has_ended:
        # `max_steps` ended training: Lightning has counted an unfinished epoch.
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
        "should_stop": _has_stopped_early(trainer),
        "in_epoch": in_epoch,
        "has_ended": has_ended,
    }
    state["hooks"] = _hook_state(trainer, state)
    return state


def _has_stopped_early(trainer: Any) -> bool:
    """Return whether `EarlyStopping` ended training; a program may also end it, to resume later."""
    callbacks = trainer.early_stopping_callbacks
    return bool(trainer.should_stop) and any(
        each.stopped_epoch or each.wait_count >= each.patience for each in callbacks
    )


def plain_checkpoint(trainer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a Lightning checkpoint that save and load hooks may read."""
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        # A sharded model's state dict would be gathered, and may be too large.
        "state_dict": {} if _is_sharded(trainer) else trainer.lightning_module.state_dict(),
        "loops": {"fit_loop": state["loops"]},
        "callbacks": state["callbacks"],
    }


def _is_sharded(trainer: Any) -> bool:
    strategy = type(trainer.strategy).__name__
    return "FSDP" in strategy or "ModelParallel" in strategy


def _hook_state(trainer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that `on_save_checkpoint` of the module or a callback adds."""
    module = trainer.lightning_module
    if not any(_overrides(each, "on_save_checkpoint") for each in (module, *trainer.callbacks)):
        return {}
    plain = plain_checkpoint(trainer, state)
    checkpoint = dict(plain)
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, module, checkpoint)
    module.on_save_checkpoint(checkpoint)
    return {name: value for name, value in checkpoint.items() if value is not plain.get(name)}


def _overrides(value: object, name: str) -> bool:
    home = getattr(type(value), name).__qualname__
    return home not in {f"Callback.{name}", f"CheckpointHooks.{name}"}  # which do nothing


def remarks(trainer: Any) -> Iterator[str]:
    """Yield a remark for each thing in the trainer that prevents an exact resume.

    A remark has a remedy where there is one.
    """
    loader = trainer.fit_loop._combined_loader
    if len(loader_states(trainer)) < len(loader.flattened):
        yield (
            "the training data loader does not report its position, so a resume in the middle of "
            "an epoch gets different samples: use torchdata.stateful_dataloader.StatefulDataLoader"
        )
    if len(loader.flattened) > 1 and "cycle" in loader._mode:
        yield "with loaders of different lengths, a resume forgets which of them had begun again"
    if trainer.fit_loop._data_fetcher.length is None:
        yield (
            "a data loader without a length is read one batch ahead: random numbers that its data "
            "set draws for that batch differ after a resume"
        )
    if fetches_itself(trainer):
        yield (
            "training_step takes dataloader_iter: batches that it has fetched ahead are lost in a "
            "resume"
        )
    if any(type(each).__name__ == "StochasticWeightAveraging" for each in trainer.callbacks):
        yield (
            "StochasticWeightAveraging makes its scheduler when an epoch begins: the rest of an "
            "epoch that is resumed is trained without it"
        )
    if not trainer.lightning_module.automatic_optimization:
        yield (
            "gradients that manual optimization accumulates over several batches are not saved: "
            "choose every_n_steps so that a save comes after the step of each optimizer"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        yield "reload_dataloaders_every_n_epochs counts from the epoch of the resume"
    if any(metric.meta.on_epoch for metric in trainer.fit_loop.epoch_loop._results.values()):
        yield (
            "Lightning stores no sums of self.log(on_epoch=True): an epoch that is resumed in the "
            "middle logs the mean of only the batches after the resume"
        )

"""The state of an `Accelerator` of Hugging Face accelerate, saved and restored as one tree."""

from __future__ import annotations

import logging
import random
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import penstock
from penstock.integrations import missing_extra
from penstock.integrations.states import named

try:
    from accelerate import PartialState
    from accelerate.data_loader import DataLoaderDispatcher
except ModuleNotFoundError as error:
    raise missing_extra(error, "accelerate") from None

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from accelerate import Accelerator

log = logging.getLogger("penstock")

_RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_OWN_ENGINES = ("DEEPSPEED", "MEGATRON_LM", "XLA")

_warned: weakref.WeakSet[Accelerator] = weakref.WeakSet()
"""The accelerators whose first save has logged what will not resume exactly."""


def state_of(accelerator: Accelerator) -> dict[str, Any]:
    """Return the state tree of everything that `accelerator` has prepared or registered.

    It holds the models, optimizers and schedulers, the positions of the data loaders, the gradient
    scaler, the objects of `register_for_checkpointing`, the position in gradient accumulation with
    this rank's gradients, and `penstock.Rng()`. Keys are `model`, `optimizer`, `scheduler`,
    `loader` and `custom`, with `_0`, `_1`, ... appended if there are several.

    Args:
        accelerator: An accelerator that has prepared its objects.

    Raises:
        ConfigError: The accelerator runs DeepSpeed, Megatron-LM or XLA, which hold the state
            themselves.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in _OWN_ENGINES:
        msg = (
            f"penstock.integrations.accelerate cannot save an Accelerator that runs {kind}: the "
            "engine holds the state, so save the engine's own objects"
        )
        raise penstock.ConfigError(msg)
    positions = [_Position.of(loader) for loader in accelerator._dataloaders]
    tree = {
        **named("model", accelerator._models),
        **named("optimizer", accelerator._optimizers),
        **named("scheduler", accelerator._schedulers),
        **named("custom", accelerator._custom_objects),
        **named("loader", [_of_each_rank(position) for position in positions]),
        "accumulated": penstock.PerRank(_Accumulated(accelerator), on_change=lambda _: {}),
        "step": accelerator.step,
        "rng": penstock.Rng(),
    }
    if accelerator.scaler is not None:
        tree["scaler"] = accelerator.scaler
    return tree


def save_state(
    accelerator: Accelerator, ckpt: penstock.Checkpointer, step: int, **options: Any
) -> penstock.SaveHandle:
    """Save the state of `accelerator`, instead of `accelerator.save_state`. Call it on all ranks.

    The first save logs a warning for each setting that prevents an exact resume.

    Args:
        accelerator: As for `state_of`.
        ckpt: The checkpointer.
        step: The step of the checkpoint, which must ascend.
        options: As for `Checkpointer.save`, such as `mode="lazy"` and `metadata={"loss": 2.1}`.

    Returns:
        The handle of the save.

    Raises:
        ConfigError: As for `state_of`.
        PenstockError: As for `Checkpointer.save`.
    """
    tree = state_of(accelerator)
    if accelerator not in _warned:
        _warned.add(accelerator)
        for remark in _remarks(accelerator) if accelerator.is_main_process else ():
            log.warning("accelerate: %s", remark)
    return ckpt.save(tree, step, **options)


def load_state(
    accelerator: Accelerator,
    ckpt: penstock.Checkpointer,
    step: int | str = "latest",
    **options: Any,
) -> int | None:
    """Restore a state into `accelerator`, instead of `accelerator.load_state`.

    Call it on all ranks after `prepare` and `register_for_checkpointing`, and before the training
    loop, even if there is nothing to restore yet. A loader that was saved in the middle of an epoch
    continues with the next batch, and `loader.iteration` is that epoch. The random state is set
    again after that loader draws its first random numbers.

    Args:
        accelerator: As for `state_of`.
        ckpt: The checkpointer. It may be closed afterwards.
        step: A step, or `"latest"`.
        options: As for `Checkpointer.restore`, such as `on_damage="fallback"`.

    Returns:
        The step that was restored; None if `step` is `"latest"` and there is no checkpoint yet.

    Raises:
        ConfigError: As for `state_of`.
        PenstockError: As for `Checkpointer.restore`.
    """
    tree = state_of(accelerator)
    try:
        report = ckpt.restore(tree, step, **options)
    except penstock.CheckpointNotFoundError:
        if step != "latest":
            raise
        return None
    accelerator.step = tree["step"]
    random_state = _random_state()
    for loader in accelerator._dataloaders:
        _Position.of(loader).resume(random_state)
    return report.step


class _Position:
    """The position of a prepared loader; it observes each batch that accelerate fetches.

    A loader that accelerate prepared draws random numbers when its first batch is fetched, and it
    fetches one batch ahead. So a resume sets two random states. Before the batch that was already
    fetched at the save, it sets the state from before that fetch, because the dataset may draw.
    After that batch, it sets the saved state.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._base = loader.base_dataloader
        self._is_stateful = hasattr(self._base, "state_dict")
        dispatches = type(loader) is DataLoaderDispatcher
        # The number of batches that accelerate fetches for one batch of the user.
        self._group = loader.state.num_processes if dispatches and not loader.split_batches else 1
        self._is_fed = dispatches and loader.state.process_index > 0  # by rank 0
        self._batches: weakref.ref[Any] | None = None
        self._before: deque[tuple[Any, ...]] = deque(maxlen=self._group)
        self._due: list[tuple[Any, ...] | None] = []
        self._loaded: Mapping[str, Any] | None = None
        self.began_early = self._runs()
        if self._is_stateful and self._base.num_workers and not self.began_early:
            # `prepare` started the workers before it set the seedable sampler.
            self._base.load_state_dict({})
        self._iter = self._base.__iter__
        vars(self._base)["__iter__"] = self._iterate  # accelerate calls it by this name
        vars(loader)["penstock_position"] = self

    @staticmethod
    def of(loader: Any) -> _Position:
        """Return a loader's position, which the first call makes."""
        return vars(loader).get("penstock_position") or _Position(loader)

    def state_dict(self) -> Mapping[str, Any]:
        if self._loaded is not None:
            return self._loaded
        loader, runs = self._loader, self._runs()
        ends = runs and loader.end_of_dataloader
        continues = runs and not ends and self._is_stateful
        return {
            "epoch": loader.iteration + ends,
            "begun": runs or self._batches is not None,
            "seed": getattr(_sampler_of(loader), "initial_seed", None),
            "batch_size": self._batch_size(),
            "batches": loader.state_dict() if continues else None,
            "random": self._before[0] if continues and self._before else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        size, saved_size = self._batch_size(), state.get("batch_size")
        if state["batches"] is not None and saved_size is not None and saved_size != size:
            # The position counts batches: larger batches would skip unseen samples.
            state = {**state, "batches": None, "random": None}
            if PartialState().is_main_process:
                log.warning(
                    "accelerate: a data loader was saved in the middle of epoch %d with batches of "
                    "%s and now has batches of %s: it starts that epoch again",
                    state["epoch"],
                    saved_size,
                    size,
                )
        self._loaded = state
        self._loader.set_epoch(state["epoch"])
        if state["seed"] is not None and hasattr(_sampler_of(self._loader), "initial_seed"):
            _sampler_of(self._loader).initial_seed = state["seed"]
        if self._is_stateful and state["begun"]:  # else the iterator that `prepare` made is next
            self._base.load_state_dict(state["batches"] or {})

    def _batch_size(self) -> int | None:
        return getattr(self._base.batch_sampler, "batch_size", None)

    def resume(self, random_state: tuple[Any, ...]) -> None:
        """Schedule the random states to set around the next batch that is fetched."""
        if self._loaded is not None and self._loaded["batches"] is not None:
            before = [self._loaded["random"], *[None] * (self._group - 1)]
            self._due = [*([] if self._is_fed else before), random_state]

    def _runs(self) -> bool:
        if self._batches is not None:
            return self._batches() is not None  # else it has ended, also by `break`
        references = self._loader.gradient_state.dataloader_references
        return any(each is self._loader for each in references)

    def _iterate(self) -> Iterator[Any]:
        # In the saved process, this loader's workers outlived its iterators and drew nothing.
        neutral = self._loaded is not None and self._base.persistent_workers
        state = _random_state() if neutral else None
        batches = self._fetch(self._iter())
        if self._is_fed and self._due:
            state = self._due.pop()
        if state is not None:
            _set_random_state(state)
        self._loaded = None
        self._batches = weakref.ref(batches)
        return batches

    def _fetch(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            state = self._due.pop(0) if self._due else None
            if state is not None:
                _set_random_state(state)
            if self._base.num_workers == 0:
                self._before.append(_random_state())
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch


class _Accumulated:
    """This rank's gradients between two optimizer steps; empty right after a step."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        if self._accelerator.sync_gradients:
            return {}
        return {
            name: parameter.grad
            for name, parameter in self._parameters()
            if parameter.grad is not None
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, parameter in self._parameters():
            grad = state.get(name)
            parameter.grad = None if grad is None else grad.to(parameter.device)
        if state:  # for a save before the next batch
            self._accelerator.gradient_state._set_sync_gradients(sync_gradients=False)

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for number, model in enumerate(self._accelerator._models):
            for name, parameter in model.named_parameters():
                yield f"{number}.{name}", parameter


def _of_each_rank(position: _Position) -> penstock.PerRank:
    """Return a `PerRank` that restarts the saved epoch if the number of ranks changes."""

    def begin_epoch(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        state = states[0]
        if state["batches"] is not None and PartialState().is_main_process:
            log.warning(
                "accelerate: a data loader was saved in the middle of epoch %d by a "
                "different number of ranks: it starts that epoch again",
                state["epoch"],
            )
        return {**state, "batches": None, "random": None}

    return penstock.PerRank(position, on_change=begin_epoch)


def _sampler_of(loader: Any) -> Any:
    batch_sampler = loader.base_dataloader.batch_sampler
    batch_sampler = getattr(batch_sampler, "batch_sampler", batch_sampler)  # a shard of it
    return getattr(batch_sampler, "sampler", None)


def _remarks(accelerator: Accelerator) -> Iterator[str]:
    """Yield a remark for each thing that prevents an exact resume, with the remedy if any."""
    for number, loader in enumerate(accelerator._dataloaders):
        sampler = _sampler_of(loader)
        if not hasattr(loader.base_dataloader, "state_dict"):
            yield (
                f"data loader {number} does not report its position, so a resume starts its epoch "
                "again: make the Accelerator with dataloader_config=DataLoaderConfiguration("
                "use_stateful_dataloader=True, use_seedable_sampler=True)"
            )
        elif (
            isinstance(sampler, _RANDOM_SAMPLERS)
            and not hasattr(sampler, "initial_seed")
            and not hasattr(sampler, "state_dict")
        ):
            yield (
                f"data loader {number} shuffles with a {type(sampler).__name__} that has no seed "
                "for each epoch, so a resume in the middle of an epoch gets different samples: "
                "pass DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)"
            )
        elif _Position.of(loader).began_early:
            yield (
                f"the loop over data loader {number} began before load_state was called, so its "
                "first epoch will not resume exactly: call load_state at every start"
            )
    if accelerator._save_model_state_pre_hook:
        yield "hooks of register_save_state_pre_hook are not called: all of each model is saved"
    if accelerator.gradient_accumulation_steps > 1 and "FSDP" in str(accelerator.distributed_type):
        yield "gradients that FSDP is accumulating are not saved: save right after a step"


def _random_state() -> tuple[Any, ...]:
    """Return the random state of Python, numpy, torch and the current CUDA device."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's types
    cuda = torch.cuda.get_rng_state() if in_use else None
    numpy = np.random.get_state()  # noqa: NPY002 - the global state is meant
    return random.getstate(), numpy, torch.get_rng_state(), cuda


def _set_random_state(state: tuple[Any, ...]) -> None:
    python, numpy, cpu, cuda = state
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002 - see above
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)

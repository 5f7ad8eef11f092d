"""The checkpoint manager of torchtitan, with Penstock in place of torch.distributed.checkpoint.

```python
checkpoint=PenstockManager.Config(enable=True, interval=500)  # in a config function
```
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from penstock import Checkpointer, PerRank, Rng
from penstock.integrations import missing_extra
from penstock.integrations.dcp import run_and_step

try:
    from torchtitan.components.checkpointer.base import (
        DATALOADER,
        LR_SCHEDULER,
        MODEL,
        OPTIMIZER,
        BaseCheckpointManager,
        ModelWrapper,
    )
    from torchtitan.components.checkpointer.utils import canonical_fqn
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.tools import filesystem
except ModuleNotFoundError as error:
    raise missing_extra(error, "torchtitan") from None

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

__all__ = ["PenstockManager"]


class PenstockManager(BaseCheckpointManager):  # type: ignore[misc]  # torchtitan may be missing
    """Saves and restores the state of torchtitan's trainer, as torchtitan's configuration says.

    A save is lazy: training continues until the next optimizer step while weights and moments are
    copied. The checkpoint folder is a run of Penstock. Where another format is needed, torchtitan's
    own manager does the work: it reads the checkpoints that it saved in that folder before, reads
    other files (`initial_load_path`), and writes files of Hugging Face (`last_save_in_hf`).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]  # see above
        """The fields of torchtitan's own `Config`, all of which are honored, and two more.

        `initial_load_path` may also be a run of Penstock, or a step of one: `/runs/gpt/step-100`.
        """

        mode: Literal["lazy", "async", "blocking"] = "lazy"
        """How a save captures the state; the last save of a training run is blocking."""

        options: dict[str, Any] = field(default_factory=dict)
        """Options of `penstock.Checkpointer`, such as `rules`."""

    def __init__(self, config: Config, **parts: Any) -> None:
        """Open the run.

        Args:
            config: The configuration.
            parts: The arguments that torchtitan passes to managers: `dataloader`, `model_parts`,
                `optimizers`, `lr_schedulers`, `states`, `sd_adapter`, `base_folder`.

        Raises:
            ValueError: `exclude_from_loading` names something that is not in the state.
            PenstockError: The folder cannot be used.
        """
        self.enable = config.enable
        self.save_future: Future[Any] | None = None
        self._config, self._parts = config, parts
        if not self.enable:
            return
        optimizers = list(parts["optimizers"])
        self._state: dict[str, Any] = {
            **parts["states"],
            MODEL: _whole(parts["model_parts"]),
            # The optimizers, not their container: its state dict has no memory to defer.
            OPTIMIZER: {str(n): one for n, one in enumerate(optimizers)},
            LR_SCHEDULER: parts["lr_schedulers"],
            "rng": Rng(),
        }
        if len(optimizers) == 1:
            self._state[OPTIMIZER] = optimizers[0]
        if parts["dataloader"] is not None:
            self._state[DATALOADER] = PerRank(parts["dataloader"])
        unknown = {*config.exclude_from_loading} - {DATALOADER, *self._state}
        if unknown:
            msg = (
                f"exclude_from_loading names {sorted(unknown)}, but the state has {[*self._state]}"
            )
            raise ValueError(msg)
        kept = {"keep_last": config.keep_latest_k} if config.keep_latest_k else {}
        options: dict[str, Any] = {"mode": config.mode, "retention": kept, **config.options}
        folder = filesystem.join(parts.get("base_folder", ""), config.folder)
        self._ckpt = Checkpointer(folder, **options)
        self._newest = -1  # of the checkpoints that existed at `load`

    def _save(self, step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002 - torchtitan's
        config = self._config
        is_first = step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (last_step or is_first or step % config.interval == 0):
            return False
        if last_step and config.last_save_in_hf:
            return bool(self._of_torchtitan().save(step, last_step=True))
        state = self._exported() if last_step and config.last_save_model_only else self._state
        handle = self._ckpt.save(
            state,
            step,
            mode="blocking" if last_step else None,
            overwrite=step <= self._newest,  # training resumed from an older step
        )
        self.save_future = handle.durable
        return True

    def _load(self, step: int = -1) -> bool:
        config = self._config
        newest = self._ckpt.latest()
        self._newest = -1 if newest is None else newest
        if newest is not None and (step == -1 or step in self._ckpt.steps()):
            chosen_step = newest if step == -1 else step
            self._restore(self._ckpt, chosen_step, model_only=chosen_step == 0)  # step 0 is a seed
            return True
        place = config.initial_load_path
        is_file = place and filesystem.isfile(filesystem.join(place, ".metadata"))
        if place is None or is_file or config.initial_load_in_hf or step != -1:
            return bool(self._of_torchtitan().load(step))
        root, found_step = run_and_step(place)
        with Checkpointer(root, **config.options) as other:
            chosen = other.open("latest" if found_step is None else found_step).step
            self._restore(other, chosen, model_only=config.initial_load_model_only)
        return True

    def _restore(self, ckpt: Checkpointer, step: int, *, model_only: bool) -> None:
        excluded = self._config.exclude_from_loading
        names = [MODEL] if model_only else [name for name in self._state if name not in excluded]
        ckpt.restore({name: self._state[name] for name in names}, step, include=names)

    def _exported(self) -> dict[str, Any]:
        """Return the model alone, in the dtype of the final checkpoint."""
        dtype = TORCH_DTYPE_MAP[self._config.export_dtype]
        state: dict[str, Any] = ModelWrapper(self._parts["model_parts"]).state_dict()
        for name, item in state.items():
            if isinstance(item, torch.Tensor) and item.is_floating_point():
                state[name] = item.to(dtype)
        return {MODEL: state}

    def _of_torchtitan(self) -> BaseCheckpointManager:
        """Return torchtitan's own manager, for files of other formats."""
        from torchtitan.components.checkpointer.dcp import CheckpointManager  # noqa: PLC0415 - rare

        names = [each.name for each in fields(BaseCheckpointManager.Config)]
        config = {name: getattr(self._config, name) for name in names} | {"keep_latest_k": 0}
        parts = self._parts | {"states": dict(self._parts["states"])}  # it adds to the states
        return CheckpointManager(CheckpointManager.Config(**config), **parts)

    def _maybe_wait_for_staging(self) -> None:
        self._ckpt.fence()

    def _wait_for_saving(self) -> None:
        future, self.save_future = self.save_future, None
        if future is not None:
            future.result()

    def _close(self) -> None:
        self._ckpt.close()


def _whole(parts: Sequence[nn.Module]) -> nn.Module:
    """Return one module with the tensors of all parts, under the same names.

    A pipeline rank may have several parts, each with some layers of the model.
    """
    if len(parts) == 1:
        return parts[0]
    whole = nn.Module()
    for part in parts:
        for prefix, module in part.named_modules():
            inner = whole
            for key in filter(None, canonical_fqn(prefix).split(".")):
                if key not in inner._modules:  # noqa: SLF001 - as torch's modules do
                    inner.add_module(key, nn.Module())
                inner = inner.get_submodule(key)
            for name, parameter in module.named_parameters(recurse=False):
                inner.register_parameter(name, parameter)
            kept = module.state_dict(keep_vars=True).keys()
            for name, buffer in module.named_buffers(recurse=False):
                if name in kept:
                    inner.register_buffer(name, buffer)
    return whole

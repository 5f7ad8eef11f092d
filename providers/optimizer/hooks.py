"""The load hooks of an optimizer: code of its own that runs when a state dict is loaded."""

from __future__ import annotations

from typing import Any

import torch

from penstock.providers.overrides import is_override

_BASE = torch.optim.Optimizer


def run_load_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Run the code that `load_state_dict` runs beside setting state, for state that is set already.

    If that code may change the state, the optimizer loads its own state dict. Tensors that come out
    unchanged, or only cast to the dtype of their parameter as torch does, are put back: they keep
    their dtype, and the memory that they were restored into.
    """
    before: dict[int, Any] = optimizer._optimizer_load_state_dict_pre_hooks  # type: ignore[attr-defined, unused-ignore]  # noqa: SLF001 - no other way
    if not before and not is_override(optimizer.load_state_dict, _BASE.load_state_dict):
        for hook in list(optimizer._optimizer_load_state_dict_post_hooks.values()):  # noqa: SLF001 - likewise
            hook(optimizer)
        return
    restored = {key: dict(state) for key, state in optimizer.state.items() if type(state) is dict}
    optimizer.load_state_dict(optimizer.state_dict())
    for parameter, old in restored.items():
        state = optimizer.state.get(parameter)
        if state is not None:
            state.update(_uncast(old, dict(state)))


def _uncast(old: Any, new: Any) -> Any:
    """Return `new` with the tensors of `old` that are the same, perhaps in another dtype."""
    if isinstance(new, torch.Tensor):
        return old if isinstance(old, torch.Tensor) and _is_cast(old, new) else new
    kinds: set[type] = {type(old), type(new)}
    if kinds == {dict}:
        return {key: _uncast(old.get(key), item) for key, item in new.items()}
    if kinds in ({list}, {tuple}) and len(old) == len(new):
        return type(new)(_uncast(*pair) for pair in zip(old, new, strict=True))
    return new


def _is_cast(old: torch.Tensor, new: torch.Tensor) -> bool:
    if old is new or old.shape != new.shape:
        return old is new
    return torch.equal(_bits(old.to(device=new.device, dtype=new.dtype)), _bits(new))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor: unlike its values they are equal for equal NaNs, too."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

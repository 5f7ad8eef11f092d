"""What this rank holds of an optimizer: all of a plain one, its own parameters of ZeRO's."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.errors import UnsupportedStateError
from penstock.core.types import show_path
from penstock.providers.tensor.flat import flat_of, refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from penstock.core.types import ObjectPath


@dataclass(frozen=True, slots=True)
class Held:
    """An optimizer as it is stored: as if one rank had all of it.

    Attributes:
        value: The optimizer in the state tree, or a state dict of one.
        local: The optimizer that has the state on this rank: `value` itself, or the one that it
            runs on its own parameters. Of a state dict, something with `state` and `defaults`.
        groups: The param groups, with the parameters of all ranks.
        owned: The ids of the parameters whose state is on this rank alone; None: of all of them,
            here and on every other rank that has them.
    """

    value: Any
    local: Any
    groups: list[dict[str, Any]]
    owned: frozenset[int] | None = None

    @property
    def kind(self) -> str:
        """The class of the optimizer that has the state, for messages."""
        kind = type(self.local)
        return f"{kind.__module__}.{kind.__qualname__}"

    def owns(self, parameter: torch.Tensor) -> bool:
        """Return whether the state of `parameter` is on this rank."""
        return self.owned is None or id(parameter) in self.owned

    def publish_groups(self) -> None:
        """Give the options in `groups` to the optimizer of this rank."""
        if self.local is self.value:
            return
        for group, local in zip(self.groups, self.local.param_groups, strict=True):
            local.update({key: option for key, option in group.items() if key != "params"})

    def hooks(self) -> list[Callable[..., Any]]:
        """Return the load hooks of the optimizer around the local one, each called with it."""
        if self.local is self.value:
            return []
        return list(self.value._optimizer_load_state_dict_post_hooks.values())  # noqa: SLF001 - no other way


def is_zero(kind: type) -> bool:
    """Return whether `kind` is torch's ZeroRedundancyOptimizer, with torch's own state dict."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    zero: Any = getattr(module, "ZeroRedundancyOptimizer", None)
    return zero is not None and issubclass(kind, zero) and kind.state_dict is zero.state_dict  # type: ignore[attr-defined]  # it is


def held_of(value: torch.optim.Optimizer, path: ObjectPath) -> Held:
    """Return what this rank holds of an optimizer.

    Of a `ZeroRedundancyOptimizer` each rank holds the state of the parameters in its partition, in
    an optimizer of its own. Nothing is consolidated: that would gather all of it on one rank.

    Raises:
        UnsupportedStateError: A `ZeroRedundancyOptimizer` runs within the backward of DDP.
    """
    refuse_unknown((p for group in value.param_groups for p in group["params"]), path)
    if not is_zero(type(value)):
        return Held(value, value, value.param_groups, _with_elements(value))
    zero: Any = value
    if zero._overlap_with_ddp:  # noqa: SLF001 - torch has no other name for it
        msg = (
            f"{show_path(path)} is a ZeroRedundancyOptimizer with overlap_with_ddp=True, which "
            "keeps its state in functional optimizers: make it without, or use fully_shard"
        )
        raise UnsupportedStateError(msg)
    owned = frozenset(id(p) for group in zero.optim.param_groups for p in group["params"])
    return Held(value, zero.optim, value.param_groups, owned)


def _with_elements(optimizer: torch.optim.Optimizer) -> frozenset[int] | None:
    """Return the ids of the parameters that have elements here; None if none is cut by ranges."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    flats = [flat_of(p) for p in parameters]
    if not any(flats):
        return None
    pairs = zip(parameters, flats, strict=True)
    return frozenset(id(p) for p, flat in pairs if flat is None or flat.start < flat.stop)

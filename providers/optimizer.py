"""`torch.optim.Optimizer`: state by parameter *name*, param groups by index.

`state/<parameter name>/<key>` and `param_groups/<i>/<key>`; a node per parameter carries its
shape and place, so that optimizers without names can be matched by order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.core.abc import Node, StateObject, StateProvider
from penstock.core.errors import UnsupportedStateError
from penstock.core.types import Role, show_path
from penstock.providers.memory import memory_key
from penstock.providers.optimizer_match import FORM, PARAMETER_FORM
from penstock.providers.optimizer_names import members
from penstock.providers.optimizer_place import Placer
from penstock.providers.optimizer_rebuild import Rebuilder
from penstock.providers.rebuild import rebuild_dict
from penstock.providers.tensor import is_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.core.abc import (
        DescribeContext,
        MemoryKey,
        PlaceContext,
        Placement,
        StoredObject,
    )
    from penstock.core.types import ObjectPath
    from penstock.providers.optimizer_names import Member

PRIORITY = 40


class OptimizerProvider(StateProvider):
    """Optimizers that keep torch's own `state_dict`; others come whole, through theirs."""

    name = "optimizer"
    forms = (FORM, PARAMETER_FORM)

    def claims(self, kind: type, /) -> int | None:
        base = torch.optim.Optimizer
        if not issubclass(kind, base) or kind.state_dict is not base.state_dict:
            return None
        return PRIORITY

    def describe(
        self, value: torch.optim.Optimizer, path: ObjectPath, /, *, context: DescribeContext
    ) -> Iterator[StateObject | Node]:
        kind = type(value)
        groups = [len(group["params"]) for group in value.param_groups]
        meta = {"class": f"{kind.__module__}.{kind.__qualname__}", "groups": groups}
        yield Node(path, FORM, meta)
        found = members(value, context.parameter_names)
        for member in found:
            yield from _describe_member(value, member, path, context)
        for index, group in enumerate(value.param_groups):
            names = [m.name for m in found if m.group == index]
            for key, item in group.items():
                here = (*path, "param_groups", str(index), _text(key, path))
                what = names if key == "params" else item
                yield from context.describe(what, here, role=Role.OPTIMIZER)
        state: dict[Any, Any] = value.state  # some optimizers keep more than parameters in it
        for key, item in state.items():
            if not isinstance(key, torch.Tensor):
                here = (*path, "shared", _text(key, path))
                yield from context.describe(item, here, role=Role.OPTIMIZER)

    def place(
        self, value: torch.optim.Optimizer, path: ObjectPath, /, *, context: PlaceContext
    ) -> Placement:
        return Placer(value, path, context).place()

    def rebuild(
        self, stored: StoredObject | Node, /, *, device: str | None, context: PlaceContext
    ) -> Placement:
        """The dict that torch's `load_state_dict` takes, parameters numbered in their order."""
        assert isinstance(stored, Node)
        if stored.form == PARAMETER_FORM:
            return rebuild_dict(stored.path, device=device, context=context)
        return Rebuilder(stored, device=device, context=context).rebuild()

    def claimed_memory(self, value: torch.optim.Optimizer, /) -> Iterable[MemoryKey]:
        claimed: set[MemoryKey] = set()
        settings: set[MemoryKey] = set()
        for group in value.param_groups:
            settings.update(
                memory_key(t) for k, v in group.items() if k != "params" for t in _tensors(v)
            )
            # The step of a captured graph runs without Python, so no hook could fence it.
            if group.get("capturable") or group.get("differentiable"):
                continue
            for parameter in group["params"]:
                if parameter.is_leaf:
                    claimed.update(memory_key(t) for t in _tensors(parameter))
                claimed.update(memory_key(t) for t in _tensors(value.state.get(parameter)))
        return claimed - settings


def _describe_member(
    optimizer: torch.optim.Optimizer, member: Member, path: ObjectPath, context: DescribeContext
) -> Iterator[StateObject | Node]:
    parameter = member.parameter
    here = (*path, "state", member.name)
    state: Any = optimizer.state.get(parameter, {})
    entries = [
        entry
        for key, item in state.items()
        for entry in context.describe(item, (*here, _text(key, here)), role=Role.OPTIMIZER)
    ]
    meta: dict[str, Any] = {
        "shape": list(parameter.shape),
        "group": member.group,
        "position": member.position,
        "named": member.named,
        "objects": sum(isinstance(entry, StateObject) for entry in entries),
    }
    if parameter.device.type != "cpu":
        meta["host"] = [
            key
            for key, item in state.items()
            if isinstance(item, torch.Tensor) and item.device.type == "cpu"
        ]
    yield Node(here, PARAMETER_FORM, meta)
    yield from entries


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if is_plain(value) and value.numel():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _text(key: object, path: ObjectPath) -> str:
    if isinstance(key, str):
        return key
    msg = f"{show_path(path)} has the state key {key!r}: only strings can be stored there"
    raise UnsupportedStateError(msg)

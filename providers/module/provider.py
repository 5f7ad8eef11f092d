"""The provider of `torch.nn.Module`: its parameters, buffers and extra state, by bare names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.core.abc import Node, Placement, StateProvider
from penstock.core.types import Role, show_path
from penstock.providers.module.flat import (
    flat_parameters,
    flat_state,
    is_flattened,
    place_flat,
)
from penstock.providers.module.load_hooks import live_state
from penstock.providers.module.place import ModulePlacer
from penstock.providers.rebuild import rebuild_dict
from penstock.providers.tensor.flat import is_stored_as_tensor, refuse_unknown
from penstock.providers.tensor.memory import device_name
from penstock.providers.tensor.provider import plain_tensors
from penstock.providers.tensor.sharding import note_fully_shard, sharded_parameters
from penstock.providers.wrappers import bare_class, bare_names, unwrap

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.core.abc import DescribeContext, PlaceContext, StateObject, StoredObject
    from penstock.core.types import ObjectPath

PRIORITY = 50


class ModuleProvider(StateProvider):
    """Stores what `module.state_dict(keep_vars=True)` shows, without the names of wrappers."""

    name = "module"
    forms = ("module",)

    def claims(self, kind: type, /) -> int | None:
        return PRIORITY if issubclass(kind, torch.nn.Module) else None

    def describe(
        self, value: torch.nn.Module, path: ObjectPath, /, *, context: DescribeContext
    ) -> Iterator[StateObject | Node]:
        module = unwrap(value)
        note_fully_shard(module)
        kind = bare_class(module)
        yield Node(path, "module", {"class": f"{kind.__module__}.{kind.__qualname__}"})
        if is_flattened(value):
            for name, item, is_parameter in flat_state(value, path):
                is_tensor = is_stored_as_tensor(item)
                role = Role.PARAMETER if is_parameter else Role.BUFFER if is_tensor else None
                yield from context.describe(item, (*path, name), role=role)
            return
        refuse_unknown(module.parameters(), path, known=lambda _: False)
        bare = bare_names(module)
        for shown, item in live_state(module).items():
            name = bare(shown)
            if isinstance(item, torch.Tensor):
                role = Role.PARAMETER if isinstance(item, torch.nn.Parameter) else Role.BUFFER
                yield from context.describe(item, (*path, name), role=role)
            else:
                yield from context.describe(item, (*path, name))

    def place(
        self, value: torch.nn.Module, path: ObjectPath, /, *, context: PlaceContext
    ) -> Placement:
        module = unwrap(value)
        if context.stored(path) is not None:
            return Placement(
                problems=[
                    f"{show_path(path)} is stored as one object, but is a module in the template"
                ],
                finish=lambda: value,
            )
        note_fully_shard(module)
        if is_flattened(value):
            return place_flat(value, path, context)
        refuse_unknown(module.parameters(), path, known=lambda _: False)
        return ModulePlacer(value, path, context).place()

    def rebuild(
        self, stored: StoredObject | Node, /, *, device: str | None, context: PlaceContext
    ) -> Placement:
        """Plan a dict that `load_state_dict` takes."""
        return rebuild_dict(stored.path, device=device, context=context)

    def parameters(self, value: torch.nn.Module, /) -> Iterable[tuple[str, object]]:
        return named_parameters(value)

    def unsteady_memory(self, value: torch.nn.Module, /) -> Iterable[tuple[str, int]]:
        # These modules write to their weight in `forward`, where no hook of an optimizer fences.
        for module in value.modules():
            if (
                isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
                and module.max_norm is not None
            ):
                for weight in plain_tensors(module.weight):
                    yield device_name(weight.device), weight.untyped_storage().data_ptr()

    def left_out(self, value: torch.nn.Module, /) -> Iterable[tuple[str, object]]:
        """Return optimizers, schedulers and the like that an engine keeps beside its module."""
        module, plain = unwrap(value), torch.nn.Module
        kind = type(module)
        if (kind.state_dict, kind.get_extra_state) != (plain.state_dict, plain.get_extra_state):
            return ()  # these may have it
        held: dict[int, tuple[str, object]] = {}
        for name, item in vars(module).items():
            if _is_stateful(item):
                held.setdefault(id(item), (name, item))
        return held.values()


def _is_stateful(item: object) -> bool:
    kind = type(item)
    return (
        not isinstance(item, torch.nn.Module)  # some modules refer to others that are not theirs
        and callable(getattr(kind, "state_dict", None))
        and callable(getattr(kind, "load_state_dict", None))
    )


def named_parameters(value: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every name of every parameter, without wrappers; a tied one comes once per name."""
    if is_flattened(value):
        yield from flat_parameters(value)
        return
    module = unwrap(value)
    bare = bare_names(module)
    note_fully_shard(module)
    sharded = sharded_parameters(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield bare(name), sharded.get(id(parameter), parameter)

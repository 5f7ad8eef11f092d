"""`torch.nn.Module`: parameters, persistent buffers and extra state, by bare names, in place."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from penstock.core.abc import Node, Placement, StateProvider
from penstock.core.errors import UnsupportedStateError
from penstock.core.types import Role, show_path
from penstock.providers.memory import device_name
from penstock.providers.rebuild import rebuild_dict
from penstock.providers.wrappers import bare_names, unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.core.abc import DescribeContext, PlaceContext, StateObject, StoredObject
    from penstock.core.types import ObjectPath

PRIORITY = 50
_EXTRA = "_extra_state"


class ModuleProvider(StateProvider):
    """What `module.state_dict(keep_vars=True)` shows, wrappers taken off by type."""

    name = "module"
    forms = ("module",)

    def claims(self, kind: type, /) -> int | None:
        return PRIORITY if issubclass(kind, torch.nn.Module) else None

    def describe(
        self, value: torch.nn.Module, path: ObjectPath, /, *, context: DescribeContext
    ) -> Iterator[StateObject | Node]:
        module = unwrap(value)
        _refuse_sharded(module, path)
        kind = type(module)
        yield Node(path, "module", {"class": f"{kind.__module__}.{kind.__qualname__}"})
        for name, item in live_state(module).items():
            if isinstance(item, torch.Tensor):
                role = Role.PARAMETER if isinstance(item, torch.nn.Parameter) else Role.BUFFER
                yield from context.describe(item, (*path, name), role=role)
            else:
                yield from context.describe(item, (*path, name))

    def place(
        self, value: torch.nn.Module, path: ObjectPath, /, *, context: PlaceContext
    ) -> Placement:
        module = unwrap(value)
        _refuse_sharded(module, path)
        result = Placement()
        if context.stored(path) is not None:
            result.problems.append(
                f"{show_path(path)} is stored as one object, but is a module in the template"
            )
            result.finish = lambda: value
            return result
        state = live_state(module)
        again: dict[str, Any] | None = None
        own = {id(t) for t in module.parameters()} | {id(t) for t in module.buffers()}
        finishes: list[Callable[[], object]] = []
        extras = _extra_owners(module)
        for name, item in state.items():
            child = (*path, name)
            if name in extras:
                _place_extra(extras[name], child, context, result, finishes)
                continue
            if id(item) not in own:
                again = live_state(module) if again is None else again
                if again.get(name) is not item:
                    if context.selected(child):
                        result.problems.append(
                            f"{show_path(child)} is made by a state-dict hook and is no part of "
                            "the module that could be restored in place: exclude it"
                        )
                    continue
            result.absorb(context.place(item, child))

        def finish() -> object:
            for call in finishes:
                call()
            return value

        result.finish = finish
        return result

    def rebuild(
        self, stored: StoredObject | Node, /, *, device: str | None, context: PlaceContext
    ) -> Placement:
        """A dict that `load_state_dict` takes."""
        return rebuild_dict(stored.path, device=device, context=context)

    def parameters(self, value: torch.nn.Module, /) -> Iterable[tuple[str, object]]:
        return named_parameters(value)

    def unsteady_memory(self, value: torch.nn.Module, /) -> Iterable[tuple[str, int]]:
        for module in value.modules():
            if (
                isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
                and module.max_norm is not None
            ):
                weight = module.weight
                yield device_name(weight.device), weight.untyped_storage().data_ptr()


def named_parameters(value: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every name of every parameter, without wrappers; tied ones come once per name."""
    module = unwrap(value)
    bare = bare_names(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield bare(name), parameter


def live_state(module: torch.nn.Module) -> dict[str, Any]:
    """The state dict by bare names, with the live parameters and buffers in it."""
    bare = bare_names(module)
    return {bare(name): item for name, item in module.state_dict(keep_vars=True).items()}


def _extra_owners(root: torch.nn.Module) -> dict[str, torch.nn.Module]:
    base = torch.nn.Module.get_extra_state
    bare = bare_names(root)
    return {
        bare(f"{name}.{_EXTRA}" if name else _EXTRA): module
        for name, module in root.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not base
    }


def _place_extra(
    module: torch.nn.Module,
    path: ObjectPath,
    context: PlaceContext,
    result: Placement,
    finishes: list[Callable[[], object]],
) -> None:
    if context.stored(path) is None and not context.children(path):
        if context.selected(path):
            result.missing.append(path)
        return
    placed = context.rebuild(path)
    result.absorb(placed)
    if placed.finish is not None:
        make = placed.finish
        finishes.append(lambda: module.set_extra_state(make()))


def _refuse_sharded(module: torch.nn.Module, path: ObjectPath) -> None:
    kind = getattr(
        sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel"),
        "FullyShardedDataParallel",
        None,
    )
    if kind is not None and any(isinstance(m, kind) for m in module.modules()):
        msg = (
            f"{show_path(path)} is sharded by FSDP, which is not supported yet: save its full "
            "state dict from one rank"
        )
        raise UnsupportedStateError(msg)

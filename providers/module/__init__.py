"""The provider of `torch.nn.Module`: parameters, buffers and extra state, without wrapper names.

The provider restores tensors in place and runs the module's load hooks.
`penstock.providers.tensor` handles tensor bytes, and `penstock.providers.wrappers` finds wrappers.
"""

from __future__ import annotations

import copy
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from penstock.core.abc import Node, Placement, StateProvider
from penstock.core.errors import PenstockError, RestoreError
from penstock.core.types import Kind, Role, show_path
from penstock.providers.children import rebuild_dict
from penstock.providers.module.fsdp1 import (
    flat_parameters,
    flat_state,
    is_flattened,
    place_flat,
)
from penstock.providers.module.load_hooks import LoadHooks, live_state, run_post_hooks
from penstock.providers.tensor import is_plain, is_sharded, new_like, plain_tensors
from penstock.providers.tensor.flat_ranges import is_stored_as_tensor, refuse_unknown
from penstock.providers.tensor.sharding import note_fully_shard, sharded_parameters
from penstock.providers.tensor.sources import device_name, memory_key
from penstock.providers.wrappers import bare_class, bare_names, layers, unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.core.abc import (
        DescribeContext,
        MemoryKey,
        PlaceContext,
        StateObject,
        StoredObject,
    )
    from penstock.core.types import ObjectPath

PRIORITY = 50
_EXTRA = "_extra_state"


class ModuleProvider(StateProvider):
    """Stores the entries of `module.state_dict(keep_vars=True)`, without wrappers in the names."""

    name = "module"
    forms = ("module",)

    def claims(self, kind: type, /) -> int | None:
        return PRIORITY if issubclass(kind, torch.nn.Module) else None

    def describe(
        self, value: torch.nn.Module, path: ObjectPath, /, *, context: DescribeContext
    ) -> Iterable[StateObject | Node]:
        module = unwrap(value)
        note_fully_shard(module)
        kind = bare_class(module)
        node = Node(path, "module", {"class": f"{kind.__module__}.{kind.__qualname__}"})
        if is_flattened(value):
            entries: list[StateObject | Node] = [node]
            for name, item, is_parameter in flat_state(value, path):
                is_tensor = is_stored_as_tensor(item)
                role = Role.PARAMETER if is_parameter else Role.BUFFER if is_tensor else None
                entries += context.describe(item, (*path, name), role=role)
            return entries
        refuse_unknown(module.parameters(), path, known=lambda _: False)
        state = live_state(module)
        names = [*map(bare_names(module), state)]
        paths = context.recall(("module", path), names, lambda: [(*path, name) for name in names])
        roles = [*map(_role_of, state.values())]
        described = context.describe_each([*state.values()], paths, roles)
        return [node, *chain.from_iterable(described)]

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
        # These modules write to their weight in `forward`, where no optimizer hook fences.
        for module in value.modules():
            if (
                isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
                and module.max_norm is not None
            ):
                for weight in plain_tensors(module.weight):
                    yield device_name(weight.device), weight.untyped_storage().data_ptr()

    def left_out(self, value: torch.nn.Module, /) -> Iterable[tuple[str, object]]:
        """Return optimizers, schedulers and similar objects that a module holds as attributes.

        Returns none if the module overrides `state_dict` or `get_extra_state`, which may save them.
        """
        module, plain = unwrap(value), torch.nn.Module
        kind = type(module)
        if (kind.state_dict, kind.get_extra_state) != (plain.state_dict, plain.get_extra_state):
            return ()
        held: dict[int, tuple[str, object]] = {}
        for name, item in vars(module).items():
            if _is_stateful(item):
                held.setdefault(id(item), (name, item))
        return held.values()


def _role_of(item: object) -> Role | None:
    if type(item) is torch.nn.Parameter:
        return Role.PARAMETER
    if not isinstance(item, torch.Tensor):
        return None
    return Role.PARAMETER if isinstance(item, torch.nn.Parameter) else Role.BUFFER


def _is_stateful(item: object) -> bool:
    kind = type(item)
    return (
        not isinstance(item, torch.nn.Module)  # some modules refer to others that are not theirs
        and callable(getattr(kind, "state_dict", None))
        and callable(getattr(kind, "load_state_dict", None))
    )


def named_parameters(value: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter under each of its names, tied names included, without wrappers."""
    if is_flattened(value):
        yield from flat_parameters(value)
        return
    module = unwrap(value)
    bare = bare_names(module)
    note_fully_shard(module)
    sharded = sharded_parameters(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield bare(name), sharded.get(id(parameter), parameter)


class ModulePlacer:
    """Plans the restore of one module.

    Tensors are filled in place. If the module has its own loading code, `finish` then passes a full
    state dict to its `load_state_dict`: the selected objects come from the checkpoint, the others
    from the live module.
    """

    def __init__(self, value: torch.nn.Module, path: ObjectPath, context: PlaceContext) -> None:
        self._value = value
        *self._wrappers, self._module = layers(value)
        self._path = path
        self._context = context
        self._hooks = LoadHooks(self._module)
        self._owners = _extra_owners(self._module)
        self._result = Placement(finish=self._finish)
        self._finishes: list[Callable[[], object]] = []
        self._makers: dict[str, Callable[[], object]] = {}  # by names of the state dict
        self._touched = False  # whether the checkpoint has any object of this module

    def place(self) -> Placement:
        """Return the plan."""
        bare = bare_names(self._module)
        for name, item in self._state.items():
            path = (*self._path, bare(name))
            if self._is_there(path):
                self._touched = True
            if name in self._owners:
                self._build(name, path, None, None)
            elif self._is_own(name, item):
                self._in_place(self._context.place(item, path))
            elif self._hooks.may_take(name):
                self._build(name, path, self._device(item), item)
            else:
                self._place_unloaded(item, path, live=self._is_live(name))
        return self._result

    def _is_own(self, name: str, item: object) -> bool:
        """Return whether `item` is a tensor of the module, or shares memory with one.

        Without `keep_vars`, `state_dict` returns detached tensors, which share memory.
        """
        if not isinstance(item, torch.Tensor):
            return False
        if id(item) in self._ids or self._is_live(name):
            return True
        return is_plain(item) and item.numel() > 0 and memory_key(item) in self._memory

    @cached_property
    def _ids(self) -> set[int]:
        return {id(tensor) for tensor in _members(self._module)}

    @cached_property
    def _memory(self) -> set[MemoryKey]:
        return {memory_key(tensor) for tensor in _members(self._module) if is_plain(tensor)}

    @cached_property
    def _state(self) -> dict[str, Any]:
        return live_state(self._module)

    @cached_property
    def _again(self) -> dict[str, Any]:
        return live_state(self._module)

    def _is_live(self, name: str) -> bool:
        """Return whether the module holds this object, so that two state dicts return the same one.

        A state-dict hook makes a new object at each call, and a restore into it would be lost.
        """
        return self._again.get(name) is self._state[name]

    def _is_there(self, path: ObjectPath) -> bool:
        return self._context.stored(path) is not None or bool(self._context.children(path))

    def _build(self, name: str, path: ObjectPath, device: str | None, item: object) -> None:
        """Plan to build a new object for the module to load; a DTensor is sharded like `item`."""
        if not self._is_there(path):
            if self._context.selected(path):
                self._result.missing.append(path)
            return
        stored = self._context.stored(path)
        made = None
        if stored is not None and stored.kind is Kind.TENSOR and is_sharded(item):
            made = new_like(item, stored)
        if made is None:
            placed = self._context.rebuild(path, device=device)
        else:
            placed = self._context.place(made, path)
        self._result.absorb(placed)
        if placed.finish is not None:
            self._makers[name] = placed.finish

    def _place_unloaded(self, item: object, path: ObjectPath, *, live: bool) -> None:
        """Plan the in-place restore of an object that no module loads, or report a problem."""
        what = "made by a state-dict hook and not a part of the module"
        if live:
            placed = self._context.place(item, path)
            if path not in placed.values and not placed.replaces:
                self._in_place(placed)
                return
            what = f"a plain {type(item).__name__} in the module's state dict"
        if self._context.selected(path):
            self._result.problems.append(
                f"{show_path(path)} is {what}, so it cannot be restored in place: exclude it, or "
                "give the module a `_load_from_state_dict` or a load hook that takes it"
            )

    def _in_place(self, placed: Placement) -> None:
        self._result.absorb(placed)
        if placed.finish is not None:
            self._finishes.append(placed.finish)

    def _device(self, item: object) -> str:
        """Return the device of the first tensor in `item`, or else in the module."""
        tensors = [*_tensors(item), *_members(self._module)]
        return device_name(tensors[0].device) if tensors else "cpu"

    # After all objects are read -----------------------------------------------------------------

    def _finish(self) -> object:
        for call in self._finishes:
            call()
        if self._hooks.present or self._makers.keys() - self._owners.keys():
            if self._touched:
                self._load()
        else:
            for name, make in self._makers.items():
                self._owners[name].set_extra_state(make())
        if self._touched:
            run_post_hooks(self._wrappers)
        return self._value

    def _load(self) -> None:
        shown = show_path(self._path)
        made = {name: make() for name, make in self._makers.items()}
        try:
            unloaded = self._hooks.run(self._to_load(made))
        except PenstockError:
            raise
        except Exception as error:
            msg = (
                f"{shown}: its tensors are restored, but the module's own code failed to load "
                f"them: {type(error).__name__}: {error}. The state of the module is undefined now."
            )
            raise RestoreError(msg) from error
        unloaded = [name for name in unloaded if name in made]
        if unloaded:
            msg = (
                f"{shown}: its tensors are restored, but the module's own code left "
                f"{', '.join(unloaded)} in the state dict, and may not have loaded it. Let that "
                "code remove each entry that it loads (`state_dict.pop`); exclude what it does "
                "not load."
            )
            raise RestoreError(msg)

    def _to_load(self, made: dict[str, object]) -> dict[str, Any]:
        """Return the current state dict of the module, with the newly built objects."""
        state = copy.copy(live_state(self._module))  # an override may return a dict that it keeps
        for name, item in list(state.items()):
            if name in made:
                continue
            if name in self._owners:
                # The argument may be the module's own object, which it may empty before reading it.
                del state[name]
            elif isinstance(item, torch.Tensor):
                state[name] = self._hooks.lend(name, item)
            else:
                state[name] = copy.deepcopy(item)  # the module may change its own object
        state.update(made)
        return state


def _extra_owners(root: torch.nn.Module) -> dict[str, torch.nn.Module]:
    base = torch.nn.Module.get_extra_state
    return {
        f"{name}.{_EXTRA}" if name else _EXTRA: module
        for name, module in root.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not base
    }


def _members(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _tensors(item: object) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, dict | list | tuple):
        for child in item.values() if isinstance(item, dict) else item:
            yield from _tensors(child)

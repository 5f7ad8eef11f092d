"""FSDP1 modules with `use_orig_params=True`, where each rank holds ranges of flattened parameters.

FSDP1's own `state_dict` gathers whole parameters by collectives. This module does not communicate:
it reads a rank's elements from FSDP1's local shard, even while parameters are gathered.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from penstock.core.abc import Placement
from penstock.core.errors import UnsupportedStateError
from penstock.core.types import show_path
from penstock.providers.module.load_hooks import LoadHooks
from penstock.providers.tensor.flat_ranges import (
    Flat,
    is_stored_as_tensor,
    note_flat,
    note_piece,
    refuse_unknown,
)
from penstock.providers.tensor.sources import device_name
from penstock.providers.wrappers import bare_names, unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.abc import PlaceContext
    from penstock.core.types import ObjectPath


@dataclass(frozen=True, slots=True)
class _Held:
    """A parameter that FSDP1 has flattened.

    Attributes:
        parameter: The original parameter, which optimizers hold.
        local: This rank's elements, one-dimensional; None if each rank has the whole parameter.
        flat: Which elements `local` holds; None if `local` is None.
    """

    parameter: torch.Tensor
    local: torch.Tensor | None
    flat: Flat | None

    @property
    def item(self) -> object:
        """The object to describe or to restore into."""
        if self.local is None or self.flat is None:
            return self.parameter
        return self.flat.shard(self.local)


def is_flattened(module: torch.nn.Module) -> bool:
    """Return whether FSDP1 has flattened parameters of `module` or of a submodule."""
    kind = _kind()
    return kind is not None and any(isinstance(m, kind) for m in module.modules())


def flat_state(value: torch.nn.Module, path: ObjectPath) -> Iterator[tuple[str, object, bool]]:
    """Yield `(bare name, item, is_parameter)` for each entry that `state_dict` would return.

    Raises:
        UnsupportedStateError: FSDP1 has `use_orig_params=False`, or shards DTensors.
    """
    held = _held(value, path)
    module = unwrap(value)
    ids = {id(each.parameter) for each in held.values()}
    refuse_unknown(module.parameters(), path, known=lambda parameter: id(parameter) in ids)
    bare = bare_names(module)
    shown: dict[str, Any] = {}
    _show(module, shown, "", held)
    for name, item in shown.items():
        content = item.item if isinstance(item, _Held) else item
        yield bare(name), content, isinstance(item, _Held | torch.nn.Parameter)


def flat_parameters(value: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every original parameter under each of its names, gathered or not."""
    held = _held(value, ())
    module = unwrap(value)
    bare = bare_names(module)
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, parameter in part._parameters.items():  # noqa: SLF001 - gathered ones hide there
            if parameter is not None:
                known = held.get((id(part), name))
                full = f"{prefix}.{name}" if prefix else name
                yield bare(full), parameter if known is None else known.parameter


def place_flat(value: torch.nn.Module, path: ObjectPath, context: PlaceContext) -> Placement:
    """Plan the restore of the ranges that this rank holds, in place.

    Raises:
        UnsupportedStateError: The module has its own loading code, which needs whole parameters
            that FSDP1 would gather by collectives.
    """
    module = unwrap(value)
    if LoadHooks(module).present:
        msg = (
            f"{show_path(path)} is sharded by FSDP1, and its modules have their own code that "
            "loads state: use fully_shard"
        )
        raise UnsupportedStateError(msg)
    result = Placement()
    bare = bare_names(module)
    owners = {
        bare(f"{name}._extra_state" if name else "_extra_state"): part
        for name, part in module.named_modules(remove_duplicate=False)
    }
    finishes: list[Callable[[], object]] = []
    for name, item, _ in flat_state(value, path):
        here = (*path, name)
        if is_stored_as_tensor(item):
            placed = context.place(item, here)
        elif name in owners:
            placed = _place_extra(owners[name], here, _device(module), context)
        else:
            placed = Placement()
            if context.selected(here):
                placed.problems.append(
                    f"{show_path(here)} is a plain {type(item).__name__} in the state dict of a "
                    "module that FSDP1 has sharded: exclude it, or use fully_shard"
                )
        result.absorb(placed)
        if placed.finish is not None:
            finishes.append(placed.finish)

    def finish() -> object:
        for call in finishes:
            call()
        _drop_gathered(value)
        return value

    result.finish = finish
    return result


def _place_extra(
    part: torch.nn.Module, path: ObjectPath, device: str, context: PlaceContext
) -> Placement:
    if context.stored(path) is None and not context.children(path):
        return Placement(missing=[path] if context.selected(path) else [])
    placed = context.rebuild(path, device=device)
    make = placed.finish
    if make is not None:
        placed.finish = lambda: part.set_extra_state(make())
    return placed


def _kind() -> type | None:
    module = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return getattr(module, "FullyShardedDataParallel", None)


def _handles(value: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    kind = _kind()
    assert kind is not None
    for part in value.modules():
        if isinstance(part, kind):
            state: Any = part
            if state._handle is not None:  # noqa: SLF001 - torch has no other name for it
                yield state, state._handle  # noqa: SLF001 - see above


def _held(value: torch.nn.Module, path: ObjectPath) -> dict[tuple[int, str], _Held]:
    """Return the flattened parameters by the id of their module and their name in it."""
    parameters: dict[tuple[int, str], _Held] = {}
    for state, handle in _handles(value):
        flat_param = handle.flat_param
        if not state._use_orig_params:  # noqa: SLF001 - see above
            msg = (
                f"{show_path(path)} is sharded by FSDP1 with use_orig_params=False, so its "
                "optimizer has no named parameters: pass use_orig_params=True, or use fully_shard"
            )
            raise UnsupportedStateError(msg)
        if any(extension is not None for extension in flat_param._param_extensions):  # noqa: SLF001 - see above
            msg = (
                f"{show_path(path)} is sharded by FSDP1 over DTensors, and FSDP1 keeps only their "
                "local tensors: use fully_shard with tensor parallelism"
            )
            raise UnsupportedStateError(msg)
        replica = _replica(state)
        # Before the first forward, only the flat parameter has memory.
        own = getattr(flat_param, "_local_shard", flat_param).detach()
        for info, parameter, shape, place in zip(
            flat_param._param_infos,  # noqa: SLF001 - see above
            flat_param._params,  # noqa: SLF001 - see above
            flat_param._shapes,  # noqa: SLF001 - see above
            flat_param._shard_param_infos  # noqa: SLF001 - see above
            if handle.uses_sharded_strategy
            else [None] * len(flat_param._params),  # noqa: SLF001 - see above
            strict=True,
        ):
            key = (id(info.module), info.param_name)
            if place is None:
                note_flat(parameter, None)
                parameters[key] = _Held(parameter, None, None)
                continue
            start = place.intra_param_start_idx if place.in_shard else 0
            stop = start + place.numel_in_shard if place.in_shard else 0
            offset = place.offset_in_shard if place.in_shard else 0
            flat = Flat(tuple(shape), start, stop, replica)
            local = own[offset : offset + stop - start]
            # The parameter, unlike `local`, counts the changes that an optimizer makes.
            same = parameter.data_ptr() == local.data_ptr() and parameter.shape == local.shape
            held = parameter if same else local
            note_piece(held)
            parameters[key] = _Held(parameter, held, flat)
            note_flat(parameter, flat)
        for shared in flat_param._shared_param_infos:  # noqa: SLF001 - see above
            first = parameters[id(shared.prim_module), shared.prim_param_name]
            parameters[id(shared.module), shared.param_name] = first
    return parameters


def _replica(state: Any) -> tuple[int, int]:
    """Return `(i, n)`: this rank is the `i`-th of `n` ranks that hold the same ranges."""
    group = getattr(state, "_inter_node_pg", None)  # of hybrid sharding
    if group is None:
        return 0, 1
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def _show(
    module: torch.nn.Module, shown: dict[str, Any], prefix: str, held: dict[tuple[int, str], _Held]
) -> None:
    """Fill `shown` as `state_dict` would, but without FSDP1's hooks, which gather parameters."""
    kind = _kind()
    assert kind is not None
    ours = isinstance(module, kind)
    if not ours:
        for hook in module._state_dict_pre_hooks.values():  # noqa: SLF001 - no other way
            hook(module, prefix, True)  # noqa: FBT003 - as torch calls it
        module._save_to_state_dict(shown, prefix, keep_vars=True)  # noqa: SLF001 - see above
        for name in module._parameters:  # noqa: SLF001 - see above
            if (id(module), name) in held:
                shown[prefix + name] = held[id(module), name]
    for name, child in module.named_children():
        _show(child, shown, f"{prefix}{name}.", held)
    if not ours:
        for after in module._state_dict_hooks.values():  # noqa: SLF001 - see above
            after(module, shown, prefix, {})


def _drop_gathered(value: torch.nn.Module) -> None:
    """Free gathered parameters, so that the next forward does not use their old values."""
    for _, handle in _handles(value):
        is_gathered = hasattr(handle.flat_param, "_full_param_padded")
        if is_gathered and handle.uses_sharded_strategy and not handle.needs_unshard():
            handle.reshard(True)  # noqa: FBT003 - as torch calls it
            handle.post_reshard()


def _device(module: torch.nn.Module) -> str:
    first = next(module.parameters(), None)
    return "cpu" if first is None else device_name(first.device)

"""Wrappers of modules, optimizers and data loaders, and checks for overridden methods.

A wrapped value is stored as if it were not wrapped, under names without wrappers.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from penstock.core.abc import PlaceContext, Placement
    from penstock.core.types import ObjectPath


# The module and the name of a wrapper's class, and its attribute that holds the wrapped value.
# Looked up in loaded modules only: importing them is slow (torch._dynamo), and there is no instance
# of a class whose module is not loaded.
_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
    ),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
    ("lightning_fabric.wrappers", "_FabricModule", "_original_module"),
    ("lightning.fabric.wrappers", "_FabricModule", "_original_module"),
)
OPTIMIZERS = (
    ("accelerate.optimizer", "AcceleratedOptimizer", "optimizer"),
    ("lightning_fabric.wrappers", "_FabricOptimizer", "_optimizer"),
    ("lightning.fabric.wrappers", "_FabricOptimizer", "_optimizer"),
)
LOADERS = (
    ("lightning_fabric.wrappers", "_FabricDataLoader", "_dataloader"),
    ("lightning.fabric.wrappers", "_FabricDataLoader", "_dataloader"),
)


def _loaded(table: tuple[tuple[str, str, str], ...]) -> list[tuple[type, str]]:
    kinds = []
    for module, name, attribute in table:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None:
            kinds.append((kind, attribute))
    return kinds


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the bare module inside any number of wrappers."""
    return layers(module)[-1]


def layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a module's wrappers, outermost first, then the bare module."""
    wrappers = _loaded(_WRAPPERS)
    chain = [module]
    while (attribute := _inner(chain[-1], wrappers)) is not None:
        # Not `getattr`: a wrapper may define its own and pass the name on to the wrapped module.
        inner = chain[-1]._modules[attribute]  # noqa: SLF001 - see above
        if inner is None:
            break
        chain.append(inner)
    return chain


def bare_class(module: torch.nn.Module) -> type:
    """Return the class that a module had before `fully_shard` replaced it."""
    kind = type(module)
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if sharded is None or not issubclass(kind, sharded):
        return kind
    # torch's class has two bases: its own, and the module's class, which may have any bases.
    return next((base for base in kind.__bases__ if not issubclass(base, sharded)), kind)


def bare_names(root: torch.nn.Module) -> Callable[[str], str]:
    """Return a function that removes the wrappers inside `root` from state-dict names."""
    wrappers = _loaded(_WRAPPERS)
    if not any(_inner(module, wrappers) for module in root.modules()):
        return lambda name: name
    return lambda name: _strip(root, name, wrappers)


def is_wrapper(kind: type, table: tuple[tuple[str, str, str], ...]) -> bool:
    """Return whether values of this type are wrappers that `table` lists."""
    return any(issubclass(kind, wrapper) for wrapper, _ in _loaded(table))


def wrapped(value: object, table: tuple[tuple[str, str, str], ...]) -> object:
    """Return the value that `value` wraps, which may be a wrapper too."""
    names = [name for wrapper, name in _loaded(table) if issubclass(type(value), wrapper)]
    return vars(value)[names[0]]  # not getattr, which may be the wrapper's own


def place_wrapped(
    value: object,
    path: ObjectPath,
    table: tuple[tuple[str, str, str], ...],
    *,
    context: PlaceContext,
) -> Placement:
    """Plan the restore of the value that `value` wraps; the wrapper stays in its place."""
    placed = context.place(wrapped(value, table), path)
    finish = placed.finish
    if finish is not None:
        placed.finish = lambda: (finish(), value)[1]
    return placed


def _inner(module: torch.nn.Module | None, wrappers: list[tuple[type, str]]) -> str | None:
    for kind, attribute in wrappers:
        if isinstance(module, kind):
            return attribute
    return None


def _strip(root: torch.nn.Module, name: str, wrappers: list[tuple[type, str]]) -> str:
    kept: list[str] = []
    parts = name.split(".")
    module: torch.nn.Module | None = root
    at = 0
    while at < len(parts) and module is not None:
        inner = _inner(module, wrappers)
        if inner is not None:
            module = module._modules[inner]  # noqa: SLF001 - see above
            # Only where the name is there: some wrappers strip it in a state-dict hook.
            at += parts[at] == inner
            continue
        kept.append(parts[at])
        module = module._modules.get(parts[at])  # noqa: SLF001 - see above
        at += 1
    return ".".join(kept + parts[at:])


def is_override(
    method: Callable[..., Any], base: Callable[..., Any], *, but: str = "torch."
) -> bool:
    """Return whether `method` is neither `base` nor from a module whose name starts with `but`."""
    function = getattr(method, "__func__", method)
    return function is not base and not module_of(function).startswith(but)


def module_of(function: Callable[..., Any]) -> str:
    """Return the name of the Python module that defines `function`; empty if it has none."""
    return getattr(function, "__module__", None) or ""

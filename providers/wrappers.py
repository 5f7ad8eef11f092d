"""Modules that only wrap another one: found by type, so that stored names are the bare module's."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

# Where a wrapper's class lives, its name there, and the attribute that holds the wrapped module.
# Looked up in loaded modules only: importing them is slow (torch._dynamo), and while one is not
# loaded there is no instance of its class.
_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)


def _loaded() -> list[tuple[type, str]]:
    found = []
    for module, name, attribute in _WRAPPERS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None:
            found.append((kind, attribute))
    return found


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The bare module inside any number of wrappers."""
    wrappers = _loaded()
    while (attribute := _inner(module, wrappers)) is not None:
        inner = module._modules[attribute]  # noqa: SLF001 - getattr may be the wrapper's own
        if inner is None:
            break
        module = inner
    return module


def bare_names(root: torch.nn.Module) -> Callable[[str], str]:
    """What turns a name in `root.state_dict()` into the one without the wrappers inside `root`."""
    wrappers = _loaded()
    if not any(_inner(module, wrappers) for module in root.modules()):
        return lambda name: name
    return lambda name: _strip(root, name, wrappers)


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
            module = module._modules[inner]  # noqa: SLF001 - as above
            # Some wrappers strip their own name in a state-dict hook.
            at += parts[at] == inner
            continue
        kept.append(parts[at])
        module = module._modules.get(parts[at])  # noqa: SLF001 - as above
        at += 1
    return ".".join(kept + parts[at:])

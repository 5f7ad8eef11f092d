"""The load hooks of a module: its own code that runs when a state dict is loaded.

A restore writes into tensor memory, and such code would not notice. Values derived from the tensors
would stay stale, and state that only this code sets would be lost. So the restore of a module with
such code ends with its own `load_state_dict`.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import _IncompatibleKeys

from penstock.providers.tensor.sources import overlaps_itself
from penstock.providers.wrappers import is_override, module_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_BASE = torch.nn.Module


class LoadHooks:
    """Finds and runs the loading code of a module and its submodules.

    Names are those of the module's own `state_dict`, inner wrappers included.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self._overrides = is_override(root.load_state_dict, _BASE.load_state_dict)
        self._owners: dict[str, torch.nn.Module] = {}
        self._takers: list[str] = []  # prefixes of modules whose code may take any entry below
        self._readers = [""] if self._overrides else []  # prefixes of modules with foreign code
        after = False
        base = _BASE._load_from_state_dict  # noqa: SLF001 - torch documents it for overriding
        for name, module in root.named_modules(remove_duplicate=False):
            prefix = f"{name}." if name else ""
            self._owners[prefix] = module
            loads = module._load_from_state_dict  # noqa: SLF001 - see above
            before = list(module._load_state_dict_pre_hooks.values())  # noqa: SLF001 - no other way
            if before or is_override(loads, base, but="torch.nn.modules."):
                self._takers.append(prefix)
            if any(map(_is_foreign, before)) or is_override(loads, base):
                self._readers.append(prefix)
            hooks = module._load_state_dict_post_hooks.values()  # noqa: SLF001 - no other way
            after = after or not all(map(_is_of_fully_shard, hooks))
        self.present = bool(self._readers) or after
        """Whether there is loading code that is not torch's own."""

    def may_take(self, name: str) -> bool:
        """Return whether the loading code may read the entry `name`, whatever its type."""
        if self._overrides or any(map(name.startswith, self._takers)):
            return True
        prefix, _, last = name.rpartition(".")
        owner = self._owners.get(f"{prefix}." if prefix else "")
        return owner is not None and _has_tensor(owner, last)

    def lend(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor to pass to the loading code for a live tensor.

        Torch's own code gets the live tensor itself, which makes its copy a no-op. Foreign code
        gets a copy, since it may reset the live tensor before it reads the argument. A tensor that
        overlaps itself is never copied, because torch refuses to copy another tensor into it.
        """
        seen = any(map(name.startswith, self._readers)) and not overlaps_itself(tensor)
        return tensor.detach().clone() if seen else tensor

    def run(self, state: Mapping[str, Any]) -> Sequence[str]:
        """Load `state` and return the names that torch reports as unexpected."""
        load: Callable[..., Any] = self._root.load_state_dict
        options = {"strict": False} if _accepts(load, "strict") else {}
        tensors = [item for item in state.values() if isinstance(item, torch.Tensor)]
        with ExitStack() as stack:
            if any(tensor.is_inference() for tensor in tensors):
                stack.enter_context(torch.inference_mode())  # else torch refuses to write
            loaded = load(state, **options)
        return tuple(getattr(loaded, "unexpected_keys", ()))


def live_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return the module's `state_dict`, with live tensors if the method takes `keep_vars`."""
    show: Callable[..., Any] = module.state_dict
    state: dict[str, Any] = show(**({"keep_vars": True} if _accepts(show, "keep_vars") else {}))
    return state


def run_post_hooks(wrappers: Sequence[torch.nn.Module]) -> None:
    """Run the load hooks of the wrappers around a module, the innermost first."""
    for wrapper in reversed(wrappers):
        for hook in list(wrapper._load_state_dict_post_hooks.values()):  # noqa: SLF001 - no other way
            hook(wrapper, _IncompatibleKeys([], []))


def _is_of_fully_shard(hook: Callable[..., Any]) -> bool:
    """Return whether the hook is FSDP's own, which only loads that replace parameters need."""
    return module_of(hook).startswith("torch.distributed.fsdp.")


def _is_foreign(hook: Callable[..., Any]) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps hooks that take the module
    return not module_of(getattr(function, "__func__", function)).startswith("torch.")


def _has_tensor(module: torch.nn.Module, name: str) -> bool:
    if name in module._non_persistent_buffers_set:  # noqa: SLF001 - no other way
        return False
    return any(
        name == own
        for named in (module.named_parameters, module.named_buffers)
        for own, _ in named(recurse=False, remove_duplicate=False)
    )


def _accepts(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

"""The steps of `torch.optim`: noted by hooks as they happen, and taken again in a replay.

The global *post*-step hook sees the gradients that the step has used. A pre-step hook would miss
what the optimizer's own hooks, a closure, or a fused step change.

Tested in `tests/core/log/test_steps.py`.
"""

from __future__ import annotations

import importlib
import math
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet, ref

import xxhash

from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch.optim import Optimizer

_lock = threading.Lock()  # guards `_installed`
_installed = False
_watches: WeakSet[StepWatch] = WeakSet()

# All others evaluate a closure once, before they read the gradients.
_NOT_REPLAYED = frozenset({"LBFGS"})


class NotLoggedError(PenstockError):
    """A step cannot be replayed exactly, so the log ends; the message says why."""


@dataclass(slots=True)
class LoggedStep:
    """One step of an optimizer.

    Attributes:
        key: The id of the optimizer.
        optimizer: The optimizer.
        grads: The gradient of each parameter of each group; None: it had none.
        versions: The version of each gradient at the step.
        options: The options of each group, without its parameters.
        skipped: Whether a fused step under a gradient scaler found infinities, and did nothing.
        digest: The digest of the optimizer's parameters and state after the step; empty: not taken.
    """

    key: int
    optimizer: Any
    grads: Sequence[Sequence[Any]]
    versions: Sequence[int]
    options: Sequence[Mapping[str, Any]]
    skipped: bool
    digest: str = ""

    def keep(self) -> None:
        """Hold the optimizer and the gradients, if they were not held since the step.

        Raises:
            NotLoggedError: One is gone.
        """
        if isinstance(self.optimizer, ref):
            self.optimizer = self.optimizer()
        self.grads = [[g() if isinstance(g, ref) else g for g in group] for group in self.grads]
        if self.optimizer is None or len([*self.tensors()]) != len(self.versions):
            msg = (
                "this is the first call of log, and the gradients are gone: the first call must "
                "come before zero_grad"
            )
            raise NotLoggedError(msg)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the gradients."""
        return (grad for group in self.grads for grad in group if grad is not None)


@dataclass(eq=False)
class StepWatch:
    """Notes the steps since the last entry, and changes of parameters between steps.

    Attributes:
        steps: The steps, in order.
        trouble: Why these steps cannot be logged.
        keeps: Whether to keep optimizers and gradients alive. Not before the first call of `log`:
            without it the memory would be held for nothing.
    """

    steps: list[LoggedStep] = field(default_factory=list)
    trouble: str = ""
    keeps: bool = False
    _after: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # by optimizer

    def start(self, optimizers: Iterable[Optimizer]) -> None:
        """Watch the steps of this process from now on, and changes of these optimizers."""
        self.clear()
        self._after = {id(optimizer): _marks(optimizer) for optimizer in optimizers}
        _install()
        _watches.add(self)

    def stop(self) -> None:
        """Note no more steps."""
        _watches.discard(self)
        self.clear()

    def check(self) -> None:
        """Compare the optimizers that stepped with what they were right after it.

        Raises:
            NotLoggedError: The steps cannot be logged.
        """
        for step in self.steps:
            step.keep()
            self.before(step.optimizer)
        if self.trouble:
            raise NotLoggedError(self.trouble)

    def clear(self) -> None:
        """Forget the steps that were logged."""
        self.steps, self.trouble = [], ""

    def before(self, optimizer: Optimizer) -> None:
        """Compare parameters and state of an optimizer with those after its last step."""
        after = self._after.get(id(optimizer))
        if after is not None and after != _marks(optimizer):
            self.trouble = self.trouble or (
                f"a parameter or the state of {type(optimizer).__name__} was changed outside a step"
            )

    def after(self, optimizer: Optimizer) -> None:
        """Note a step."""
        if not self.trouble and any(step.key == id(optimizer) for step in self.steps):
            self.trouble = f"{type(optimizer).__name__} stepped twice without a call of log"
        self.trouble = self.trouble or _obstacle(optimizer)
        if self.trouble:
            self.steps = []
            return
        grads: list[list[Any]] = [
            [p.grad for p in group["params"]] for group in optimizer.param_groups
        ]
        options = options_of(optimizer)
        found_inf = getattr(optimizer, "found_inf", None)
        skipped = found_inf is not None and bool(found_inf)
        step = LoggedStep(id(optimizer), optimizer, grads, (), options, skipped)
        if any(grad.is_sparse for grad in step.tensors()):
            self.trouble = "a gradient is sparse"
            return
        step.versions = [*map(_version, step.tensors())]
        if not self.keeps:
            step.optimizer = ref(optimizer)
            step.grads = [[g if g is None else ref(g) for g in group] for group in grads]
        self.steps.append(step)
        self._after[id(optimizer)] = _marks(optimizer)


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group, without its parameters."""
    return [
        {key: value for key, value in group.items() if key not in {"params", "param_names"}}
        for group in optimizer.param_groups
    ]


def set_options(optimizer: Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    """Set the options of each group; tensors in place, since schedulers may hold them."""
    import torch  # noqa: PLC0415 - as below

    for group, stored in zip(optimizer.param_groups, options, strict=True):
        for key, value in stored.items():
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of all groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def storages_of(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the addresses of the memory that these optimizers change."""
    tensors = (tensor for optimizer in optimizers for tensor in _tensors(optimizer))
    return {_local(tensor).untyped_storage().data_ptr() for tensor in tensors}


def has_only(value: object, parameters: Collection[int]) -> bool:
    """Return whether a value is a module whose state is parameters with these ids, and no more."""
    import torch  # noqa: PLC0415 - as below

    if not isinstance(value, torch.nn.Module):
        return False
    plain = torch.nn.Module
    return (
        all(id(p) in parameters for p in value.parameters())
        and next(value.buffers(), None) is None
        and all(
            type(module).get_extra_state is plain.get_extra_state
            and type(module).state_dict is plain.state_dict
            and not module._state_dict_hooks  # noqa: SLF001 - they may add anything
            and not module._state_dict_pre_hooks  # noqa: SLF001
            for module in value.modules()
        )
    )


def _obstacle(optimizer: Optimizer) -> str:
    """Return why a step cannot be replayed; empty if it can."""
    kind = type(optimizer)
    if kind.__module__.split(".")[:2] != ["torch", "optim"] or kind.__name__ in _NOT_REPLAYED:
        return f"steps of {kind.__name__} cannot be replayed"
    if any(group.get("capturable") for group in optimizer.param_groups):
        return f"{kind.__name__} is capturable: no hook runs when a CUDA graph replays its step"
    return ""


def _version(tensor: Any) -> int:
    return int(tensor._version)  # noqa: SLF001 - torch has no public name for it


def _marks(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Return what changes with any change of the parameters and the state that torch sees."""
    return [(id(tensor), _version(tensor)) for tensor in _tensors(optimizer)]


def _tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield each parameter, and after it the tensors of its state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            for _, item in sorted(optimizer.state.get(parameter, {}).items()):
                if hasattr(item, "untyped_storage"):
                    yield item


def _install() -> None:
    global _installed  # noqa: PLW0603 - torch's registry is global too
    with _lock:
        if _installed:
            return
        from torch._compile import _disable_dynamo  # noqa: PLC0415 - torch is loaded only to log
        from torch.optim.optimizer import (  # noqa: PLC0415 - as above
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        before: Any = _disable_dynamo(_before_step)
        after: Any = _disable_dynamo(_after_step)
        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)
        _installed = True


def _before_step(optimizer: Optimizer, *_: object) -> None:
    for watch in list(_watches):
        watch.before(optimizer)


def _after_step(optimizer: Optimizer, *_: object) -> None:
    for watch in list(_watches):
        watch.after(optimizer)


# -- entries ---------------------------------------------------------------------------------------


def stored_step(step: LoggedStep, path: str) -> dict[str, Any]:
    """Return a step as a tree to save: the gradients of one dtype are one flat tensor.

    Raises:
        NotLoggedError: A gradient was changed after the step.
    """
    import torch  # noqa: PLC0415 - as above

    flat: dict[str, list[torch.Tensor]] = {}
    layout: list[list[Any]] = []
    with torch.no_grad():
        for group in step.grads:
            rows: list[Any] = []
            for grad in group:
                if grad is None:
                    rows.append(None)
                    continue
                local = _local(grad)
                dtype = str(local.dtype).removeprefix("torch.")
                flat.setdefault(dtype, []).append(local.reshape(-1))
                rows.append([dtype, list(local.shape)])
            layout.append(rows)
        grads = {
            name: torch.cat(tensors).to("cpu") if len(tensors) > 1 else tensors[0].to("cpu").clone()
            for name, tensors in flat.items()
        }
    if [*map(_version, step.tensors())] != list(step.versions):
        msg = "a gradient was changed between the step and its copy (zero_grad(set_to_none=False)?)"
        raise NotLoggedError(msg)
    return {
        "optimizer": path,
        "engine": engine_of(step.optimizer),
        "skipped": step.skipped,
        "digest": step.digest,
        "options": list(step.options),
        "layout": layout,
        "grads": grads,
    }


def engine_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return what decides the bits of a step, besides its inputs."""
    import torch  # noqa: PLC0415 - as above

    devices = {str(p.device.type) for g in optimizer.param_groups for p in g["params"]}
    return {
        "class": type(optimizer).__qualname__,
        "torch": str(torch.__version__),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "devices": sorted(devices),
    }


def take_again(optimizer: Optimizer, stored: Mapping[str, Any]) -> None:
    """Take a logged step again, without the hooks of the optimizer: the entry has their effect.

    Raises:
        NotLoggedError: The optimizer cannot take this step, or has other bits after it.
    """
    engine = engine_of(optimizer)
    if engine != stored["engine"]:
        msg = f"{stored['optimizer']} stepped as {stored['engine']}, and would step as {engine}"
        raise NotLoggedError(msg)
    layout, groups = stored["layout"], optimizer.param_groups
    if [len(rows) for rows in layout] != [len(group["params"]) for group in groups]:
        msg = f"{stored['optimizer']} has other groups of parameters than the log"
        raise NotLoggedError(msg)
    if stored["skipped"]:
        return
    left = dict(stored["grads"])
    kept = [[p.grad for p in group["params"]] for group in groups]
    before = [dict(group) for group in groups]
    try:
        for group, rows, options in zip(groups, layout, stored["options"], strict=True):
            group.update(options)
            for parameter, row in zip(group["params"], rows, strict=True):
                parameter.grad = None if row is None else _grad(parameter, row, left)
        with _without_hooks(optimizer):
            optimizer.step()
    finally:
        for group, grads, old in zip(groups, kept, before, strict=True):
            group.update(old)
            for parameter, grad in zip(group["params"], grads, strict=True):
                parameter.grad = grad
    if stored["digest"] and stored["digest"] != digest_of(optimizer):
        msg = f"{stored['optimizer']} has other bits after a logged step than it had in training"
        raise NotLoggedError(msg)


def digest_of(optimizer: Optimizer) -> str:
    """Return the xxh3-128 of all parameters of an optimizer and their state."""
    import torch  # noqa: PLC0415 - as above

    digest = xxhash.xxh3_128()
    with torch.no_grad():
        for tensor in _tensors(optimizer):
            flat = _local(tensor).detach().to("cpu").contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _local(tensor: Any) -> torch.Tensor:
    """Return the tensor, or of a DTensor the part on this rank."""
    local: torch.Tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor  # noqa: SLF001 - without the copy of `to_local`
    return local


def _grad(parameter: Any, row: Sequence[Any], left: dict[str, Any]) -> torch.Tensor:
    dtype, shape = row
    count = math.prod(shape)
    local, left[dtype] = left[dtype][:count], left[dtype][count:]
    local = local.reshape(shape).to(parameter.device)
    if hasattr(parameter, "_local_tensor"):
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 - only where it is used

        mesh, placements = parameter.device_mesh, parameter.placements
        size, stride = parameter.size(), parameter.stride()
        made: Any = DTensor.from_local(local, mesh, placements, shape=size, stride=stride)
        return cast("torch.Tensor", made)
    if tuple(shape) != tuple(parameter.shape):
        msg = (
            f"a gradient of the log has shape {list(shape)}, its parameter {list(parameter.shape)}"
        )
        raise NotLoggedError(msg)
    return cast("torch.Tensor", local)


@contextmanager
def _without_hooks(optimizer: Any) -> Iterator[None]:
    """Run no hook of this optimizer, and no global one."""
    module = importlib.import_module("torch.optim.optimizer")

    own, every = vars(optimizer), vars(module)
    dicts = [
        own["_optimizer_step_pre_hooks"],
        own["_optimizer_step_post_hooks"],
        every["_global_optimizer_pre_hooks"],
        every["_global_optimizer_post_hooks"],
    ]
    kept = [dict(hooks) for hooks in dicts]
    for hooks in dicts:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, old in zip(dicts, kept, strict=True):
            hooks.update(old)

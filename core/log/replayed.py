"""Converts logged steps to trees that entries store, and takes stored steps again.

Tested in `tests/integration/log/test_replay.py`.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import xxhash

from penstock.core.foreign import said
from penstock.core.log.grads import NotLoggedError, local_of
from penstock.core.log.steps import (
    copied_options,
    parameters_of,
    tensors_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import torch
    from torch.optim import Optimizer

    from penstock.core.abc import Replayer
    from penstock.core.log.grads import GradCopies
    from penstock.core.log.steps import LoggedStep


CUT = "cut"
"""The key in an engine whose value is the digest of the parts of parameters that a rank holds."""


def stored_step(step: LoggedStep, path: str) -> dict[str, Any]:
    """Return a step, whose optimizer is at `path`, as a tree to save."""
    grads = cast("GradCopies", step.grads)
    return {
        "optimizer": path,
        "engine": engine_of(step.optimizer, step.replayer),
        "captured": dict(step.captured),
        "digest": step.digest,
        "options": list(step.options),
        "layout": grads.layout,
        "grads": grads.on_host(),
    }


def engine_of(optimizer: Optimizer, replayer: Replayer) -> dict[str, Any]:
    """Return the engine of an optimizer: all that decides the bits of a step besides its inputs."""
    import torch  # noqa: PLC0415 - as above

    parameters = [*parameters_of(optimizer)]
    engine = {
        "class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "replayer": f"{replayer.name} {replayer.version}",
        "torch": str(torch.__version__),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "devices": sorted({_device_name(device) for device in {p.device for p in parameters}}),
        **replayer.engine(optimizer),
    }
    cut = cut_digest(parameters)
    return {**engine, CUT: cut} if cut else engine


def cut_digest(parameters: Sequence[Any]) -> str:
    """Return a digest of this rank's parts of DTensors; empty if no parameter is a DTensor."""
    cuts = [_cut(p) for p in parameters if hasattr(p, "_local_tensor")]
    return xxhash.xxh3_128_hexdigest(repr(cuts).encode()) if cuts else ""


def _device_name(device: torch.device) -> str:
    import torch  # noqa: PLC0415 - as above

    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{'hip' if torch.version.hip else 'cuda'} {major}.{minor}"


def _cut(parameter: Any) -> object:
    """Return the shape of a DTensor and this rank's place in its mesh."""
    mesh = parameter.device_mesh
    return tuple(parameter.shape), str(parameter.placements), mesh.shape, mesh.get_coordinate()


def take_again(
    optimizer: Optimizer,
    replayer: Replayer,
    stored: Mapping[str, Any],
    chosen: Collection[int] | None = None,
) -> None:
    """Take a logged step again, without running hooks: the entry already has their effects.

    Args:
        optimizer: The optimizer, in its state before the step.
        replayer: The replayer of the optimizer.
        stored: The step, as `stored_step` returned it.
        chosen: The ids of the parameters that take the step; the others keep their values. None:
            all parameters take it.

    Raises:
        NotLoggedError: The optimizer cannot take this step, or its bits after the step differ from
            those in training.
    """
    name, engine = stored["optimizer"], engine_of(optimizer, replayer)
    differing = [key for key in {**engine, **stored["engine"]}
                 if engine.get(key) != stored["engine"].get(key)]  # fmt: skip
    if differing:
        facts = [f"{key} {stored['engine'].get(key)}, now {engine.get(key)}" for key in differing]
        msg = f"{name} does not step here as it did in training: {'; '.join(facts)}"
        raise NotLoggedError(msg)
    layout, groups = stored["layout"], optimizer.param_groups
    if [len(rows) for rows in layout] != [len(group["params"]) for group in groups]:
        msg = f"the parameter groups of {name} differ from those in the log"
        raise NotLoggedError(msg)
    if chosen is not None and not any(id(p) in chosen for p in parameters_of(optimizer)):
        return
    placed = [
        [
            (p if chosen is None or id(p) in chosen else None, row)
            for p, row in zip(*pair, strict=True)
        ]
        for pair in zip((group["params"] for group in groups), layout, strict=True)
    ]
    step_again(optimizer, replayer, stored, placed)
    if chosen is None and stored["digest"] and stored["digest"] != digest_of(optimizer):
        msg = f"{name} has other bits after a logged step than it had in training"
        raise NotLoggedError(msg)


def step_again(
    optimizer: Optimizer,
    replayer: Replayer,
    stored: Mapping[str, Any],
    placed: Sequence[Sequence[tuple[Any, Sequence[Any] | None]]],
) -> None:
    """Take a logged step with its stored gradients and options, then restore the previous ones.

    Args:
        optimizer: The optimizer, in its state before the step.
        replayer: The replayer of the optimizer.
        stored: The step, as `stored_step` returned it.
        placed: Each row of the layout, with the parameter that gets the gradient; None: the
            gradient is not used.

    Raises:
        NotLoggedError: The step failed, or a gradient does not fit its parameter.
    """
    left = dict(stored["grads"])
    groups = optimizer.param_groups
    kept = [(p, p.grad) for p in parameters_of(optimizer)]
    before = [dict(group) for group in groups]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        for group, rows, options in zip(groups, placed, stored["options"], strict=True):
            group.update(copied_options(options))
            for parameter, row in rows:
                grad = None if row is None else _grad(parameter, row, left)
                if parameter is not None:
                    _set_grad(parameter, grad)
        with _without_hooks(optimizer):
            try:
                replayer.step(optimizer, stored["captured"])
            except Exception as error:
                msg = f"the step of {stored['optimizer']} failed: {said(error)}"
                raise NotLoggedError(msg) from error
    finally:
        for group, old in zip(groups, before, strict=True):
            group.update(old)
        for parameter, grad in kept:
            parameter.grad = grad


def _set_grad(parameter: Any, grad: torch.Tensor | None) -> None:
    try:
        parameter.grad = grad
    except (RuntimeError, TypeError) as error:  # the template has another dtype, with `cast`
        msg = f"a parameter does not take its logged gradient: {said(error)}"
        raise NotLoggedError(msg) from error


def digest_of(optimizer: Optimizer) -> str:
    """Return the xxh3-128 digest of an optimizer's parameters and state."""
    import torch  # noqa: PLC0415 - as above

    digest = xxhash.xxh3_128()
    values: list[Any] = []
    with torch.no_grad():
        for tensor in tensors_of(optimizer, values=values):
            flat = local_of(tensor).detach().to("cpu").contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    if plain := [value for value in values if isinstance(value, (int, float, str))]:
        digest.update(repr(plain).encode())
    return digest.hexdigest()


def _grad(parameter: Any, row: Sequence[Any], left: dict[str, Any]) -> torch.Tensor | None:
    """Cut the next gradient off the flat tensors in `left`, and give it its shape and strides.

    Returns None if there is no parameter; the gradient is skipped.
    """
    import torch  # noqa: PLC0415 - as above

    dtype, shape, stride, *_ = row
    count = math.prod(shape)
    local, left[dtype] = left[dtype][:count], left[dtype][count:]
    if parameter is None:
        return None
    here = list(local_of(parameter).shape)
    if shape != here:
        msg = f"a gradient of the log has shape {shape}, its parameter {here}"
        raise NotLoggedError(msg)
    local = local.reshape(shape).to(parameter.device)
    if stride and 0 not in stride:
        contiguous = local
        local = torch.empty_strided(shape, stride, dtype=local.dtype, device=local.device)
        local.copy_(contiguous)
    if hasattr(parameter, "_local_tensor"):
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 - only where it is used

        mesh, placements = parameter.device_mesh, parameter.placements
        size, stride = parameter.size(), parameter.stride()
        made: Any = DTensor.from_local(local, mesh, placements, shape=size, stride=stride)
        return cast("torch.Tensor", made)
    return cast("torch.Tensor", local)


@contextmanager
def _without_hooks(optimizer: Any) -> Iterator[None]:
    """Keep `optimizer.step` from running hooks, both the optimizer's own and the global ones."""
    plain, own = type(optimizer).step, vars(optimizer)
    if getattr(plain, "hooked", False):  # torch wraps the method of the class
        plain = plain.__wrapped__
    kept = own.get("step")  # learning rate schedulers set this attribute
    optimizer.step = MethodType(plain, optimizer)
    try:
        yield
    finally:
        del own["step"]
        if kept is not None:
            own["step"] = kept

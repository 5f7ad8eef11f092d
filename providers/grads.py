"""The provider of `penstock.Grads(model)`: gradients, for a save in the middle of accumulation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from penstock.core.abc import Difference, Node, Placement, StateProvider
from penstock.core.errors import UnsupportedStateError
from penstock.core.markers import Grads
from penstock.core.types import Kind, Role, TensorSpec, show_path
from penstock.providers.children import rebuild_dict
from penstock.providers.module import named_parameters
from penstock.providers.module.fsdp1 import is_flattened
from penstock.providers.tensor import (
    empty_tensor,
    is_sharded,
    new_like,
    same_kind,
    tensor_target,
)
from penstock.providers.tensor.parts import fits
from penstock.providers.tensor.sharding import cut_like
from penstock.providers.tensor.sources import device_name, dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from penstock.core.abc import DescribeContext, PlaceContext, StateObject, StoredObject
    from penstock.core.types import ObjectPath

PRIORITY = 50
FORM = "grads"


class GradsProvider(StateProvider):
    """Stores and restores gradients by parameter name.

    A parameter that had no gradient at the save has none after the restore.
    """

    name = "grads"
    forms = (FORM,)

    def claims(self, kind: type, /) -> int | None:
        return PRIORITY if issubclass(kind, Grads) else None

    def describe(
        self, value: Grads, path: ObjectPath, /, *, context: DescribeContext
    ) -> Iterator[StateObject | Node]:
        _refuse_flattened(value, path)
        yield Node(path, FORM)
        for name, parameter in _parameters(value).items():
            grad = parameter.grad
            if is_sharded(grad) and is_sharded(parameter):
                with cut_like(parameter, [grad]):
                    entries = list(context.describe(grad, (*path, name), role=Role.OTHER))
                yield from entries
            elif grad is not None:
                yield from context.describe(grad, (*path, name), role=Role.OTHER)

    def place(self, value: Grads, path: ObjectPath, /, *, context: PlaceContext) -> Placement:
        _refuse_flattened(value, path)
        result = Placement()
        assigns: list[Callable[[], object]] = []
        parameters = _parameters(value)
        if context.node(path) is None and not context.children(path):
            # A list, so that `any` does not stop early: `selected` notes which patterns matched,
            # and one that names a gradient must not be reported as matching nothing.
            chosen = [context.selected((*path, name)) for name in parameters]
            if context.selected(path) or any(chosen):
                result.missing.append(path)
            parameters = {}
        for name, parameter in parameters.items():
            here = (*path, name)
            if context.stored(here) is not None:
                _place_grad(parameter, here, context, result, assigns)
            elif context.children(here):
                _place_parts(parameter, here, context, result, assigns)
            elif context.selected(here):
                assigns.append(partial(setattr, parameter, "grad", None))

        def finish() -> object:
            for assign in assigns:
                assign()
            return value

        result.finish = finish
        return result

    def rebuild(
        self, stored: StoredObject | Node, /, *, device: str | None, context: PlaceContext
    ) -> Placement:
        """Plan a dict of gradients by parameter name."""
        return rebuild_dict(stored.path, device=device, context=context)


def _refuse_flattened(value: Grads, path: ObjectPath) -> None:
    """Refuse gradients that FSDP1 has flattened, or keeps whole on each rank to accumulate them.

    Raises:
        UnsupportedStateError: The model is one of FSDP1.
    """
    if is_flattened(value.model):
        msg = (
            f"{show_path(path)} is penstock.Grads of a model of FSDP1, whose gradients cannot be "
            "stored: save behind the step of the optimizer, or use fully_shard"
        )
        raise UnsupportedStateError(msg)


def _parameters(value: Grads) -> dict[str, torch.Tensor]:
    """Return the parameters by their first name: a tied parameter has one gradient."""
    seen: set[int] = set()
    result = {}
    for name, parameter in named_parameters(value.model):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            result[name] = parameter
    return result


def _place_grad(
    parameter: torch.Tensor,
    path: ObjectPath,
    context: PlaceContext,
    result: Placement,
    assigns: list[Callable[[], object]],
) -> None:
    stored = context.stored(path)
    assert stored is not None
    grad = parameter.grad
    if grad is not None and same_kind(grad, stored, parameter.device, context):
        result.targets.append(tensor_target(grad, path, like=parameter))
        return
    shape = tuple(parameter.shape)
    grad_dtype = parameter.dtype if grad is None else grad.dtype
    if stored.kind is not Kind.TENSOR or stored.spec.shape != shape:
        there, here = list(stored.spec.shape), list(shape)
        sentence = f"{show_path(path)} is a gradient of shape {there}, the parameter has {here}"
        is_tensor = stored.kind is Kind.TENSOR
        result.differ(
            Difference(path, f"shape {there}", f"shape {here}", (sentence,), skippable=is_tensor)
        )
        return
    spec = TensorSpec(*dtype_name(grad_dtype), shape)
    if stored.spec != spec:
        _assign_new(parameter, path, stored._replace(spec=spec), result, assigns)
        return
    if is_sharded(parameter):
        _assign_new(parameter, path, stored, result, assigns)
        return
    placed = context.rebuild(path, device=device_name(parameter.device))
    result.absorb(placed)
    make = placed.finish
    assert make is not None
    assigns.append(lambda: setattr(parameter, "grad", make()))


def _assign_new(
    parameter: torch.Tensor,
    path: ObjectPath,
    stored: StoredObject,
    result: Placement,
    assigns: list[Callable[[], object]],
) -> None:
    """Plan a new gradient with the shape of the parameter, placed as it is."""
    made = new_like(parameter, stored)
    if made is None:
        made = empty_tensor(stored, device_name(parameter.device))
    result.targets.append(tensor_target(made, path, like=parameter))
    assigns.append(lambda: setattr(parameter, "grad", made))


def _place_parts(
    parameter: torch.Tensor,
    path: ObjectPath,
    context: PlaceContext,
    result: Placement,
    assigns: list[Callable[[], object]],
) -> None:
    """Plan the restore of a gradient that is a tensor of parts."""
    grad, device = parameter.grad, parameter.device
    if grad is not None and fits(grad, context.node(path), path, device):
        result.absorb(context.place(grad, path))
        return
    placed = context.rebuild(path, device=device_name(device))
    result.absorb(placed)
    if placed.finish is not None:
        make = placed.finish
        assigns.append(lambda: setattr(parameter, "grad", make()))

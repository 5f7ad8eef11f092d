"""`penstock.Grads(model)`: gradients, for saving in the middle of accumulation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from penstock.core.abc import Node, Placement, StateProvider
from penstock.core.markers import Grads
from penstock.core.types import Kind, Role, show_path
from penstock.providers.memory import device_name, dtype_name
from penstock.providers.module import named_parameters
from penstock.providers.rebuild import rebuild_dict
from penstock.providers.tensor import same_kind, tensor_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from penstock.core.abc import DescribeContext, PlaceContext, StateObject, StoredObject
    from penstock.core.types import ObjectPath

PRIORITY = 50
FORM = "grads"


class GradsProvider(StateProvider):
    """Parameters without a gradient are absent from the checkpoint, and have none afterwards."""

    name = "grads"
    forms = (FORM,)

    def claims(self, kind: type, /) -> int | None:
        return PRIORITY if issubclass(kind, Grads) else None

    def describe(
        self, value: Grads, path: ObjectPath, /, *, context: DescribeContext
    ) -> Iterator[StateObject | Node]:
        yield Node(path, FORM)
        for name, parameter in _parameters(value).items():
            if parameter.grad is not None:
                yield from context.describe(parameter.grad, (*path, name), role=Role.OTHER)

    def place(self, value: Grads, path: ObjectPath, /, *, context: PlaceContext) -> Placement:
        result = Placement()
        assigns: list[Callable[[], object]] = []
        parameters = _parameters(value)
        if context.node(path) is None and not context.children(path):
            if context.selected(path) or any(context.selected((*path, n)) for n in parameters):
                result.missing.append(path)
            parameters = {}
        for name, parameter in parameters.items():
            here = (*path, name)
            if context.stored(here) is not None:
                _place_grad(parameter, here, context, result, assigns)
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
        """Gradients by parameter name."""
        return rebuild_dict(stored.path, device=device, context=context)


def _parameters(value: Grads) -> dict[str, torch.nn.Parameter]:
    """By their first name; a tied parameter has one gradient."""
    seen: set[int] = set()
    result = {}
    for name, parameter in named_parameters(value.model):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            result[name] = parameter
    return result


def _place_grad(
    parameter: torch.nn.Parameter,
    path: ObjectPath,
    context: PlaceContext,
    result: Placement,
    assigns: list[Callable[[], object]],
) -> None:
    stored = context.stored(path)
    assert stored is not None
    grad = parameter.grad
    if grad is not None and same_kind(grad, stored, parameter.device):
        result.targets.append(tensor_target(grad, path))
        return
    shape = tuple(parameter.shape)
    grad_dtype = parameter.dtype if grad is None else grad.dtype
    if stored.kind is not Kind.TENSOR or stored.spec.shape != shape:
        result.problems.append(
            f"{show_path(path)} is a gradient of shape {list(stored.spec.shape)}, the parameter "
            f"has {list(shape)}"
        )
        return
    if stored.spec.dtype != dtype_name(grad_dtype)[0]:
        result.problems.append(
            f"{show_path(path)} is a gradient of dtype {stored.spec.dtype}, the template has "
            f"{dtype_name(grad_dtype)[0]}"
        )
        return
    placed = context.rebuild(path, device=device_name(parameter.device))
    result.absorb(placed)
    make = placed.finish
    assert make is not None
    assigns.append(lambda: setattr(parameter, "grad", make()))

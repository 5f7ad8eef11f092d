"""The provider of `penstock.Grads(model)`, which saves gradients that are being accumulated."""

from __future__ import annotations

from functools import partial
from itertools import chain
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
        with_grad = {n: (p.grad, p) for n, p in _parameters(value).items() if p.grad is not None}
        grads = [grad for grad, _ in with_grad.values()]
        paths = [(*path, name) for name in with_grad]
        with cut_like((g, p) for g, p in with_grad.values() if is_sharded(g) and is_sharded(p)):
            described = context.describe_each(grads, paths, [Role.OTHER] * len(grads))
        yield from chain.from_iterable(described)

    def place(self, value: Grads, path: ObjectPath, /, *, context: PlaceContext) -> Placement:
        _refuse_flattened(value, path)
        result = Placement()
        assigns: list[Callable[[], object]] = []
        parameters = _parameters(value)
        if context.node(path) is None and not context.children(path):
            # A list, so that `any` does not stop early: `selected` notes which patterns matched,
            # and a pattern that names a gradient must not be reported as matching nothing.
            chosen = [context.selected((*path, name)) for name in parameters]
            if context.selected(path) or any(chosen):
                result.missing.append(path)
            parameters = {}
        for name, parameter in parameters.items():
            here = (*path, name)
            if context.stored(here) is not None or context.children(here):
                placed = _place_grad(parameter, here, context)
                result.absorb(placed)
                if placed.finish is not None:
                    assigns.append(partial(_assign, parameter, placed.finish))
            elif context.selected(here):
                assigns.append(partial(_assign, parameter, lambda: None))

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
    """Refuse an FSDP1 model, whose gradients are flattened or accumulate unsharded on each rank.

    Raises:
        UnsupportedStateError: FSDP1 shards the model.
    """
    if is_flattened(value.model):
        msg = (
            f"{show_path(path)} is penstock.Grads of an FSDP1 model, whose gradients cannot be "
            "stored: save after an optimizer step, or use fully_shard"
        )
        raise UnsupportedStateError(msg)


def _parameters(value: Grads) -> dict[str, torch.Tensor]:
    """Return each parameter once, by its first name, since a tied parameter has one gradient."""
    seen: set[int] = set()
    result = {}
    for name, parameter in named_parameters(value.model):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            result[name] = parameter
    return result


def _place_grad(parameter: torch.Tensor, path: ObjectPath, context: PlaceContext) -> Placement:
    """Plan the restore of a gradient, in place if the live one fits; `finish` returns it."""
    grad, stored, device = parameter.grad, context.stored(path), parameter.device
    if stored is None:  # a tensor of parts
        if fits(grad, context.node(path), path, device):
            return context.place(grad, path)
        return context.rebuild(path, device=device_name(device))
    if grad is not None and same_kind(grad, stored, device, context):
        return Placement([tensor_target(grad, path, like=parameter)], finish=lambda: grad)
    shape = tuple(parameter.shape)
    if stored.kind is not Kind.TENSOR or stored.spec.shape != shape:
        there, here = list(stored.spec.shape), list(shape)
        sentence = (
            f"{show_path(path)} is a gradient of shape {there}, but the parameter has shape {here}"
        )
        is_tensor = stored.kind is Kind.TENSOR
        differs = Placement()
        differs.differ(
            Difference(path, f"shape {there}", f"shape {here}", (sentence,), skippable=is_tensor)
        )
        return differs
    dtype = parameter.dtype if grad is None else grad.dtype
    wanted = stored._replace(spec=TensorSpec(*dtype_name(dtype), shape))
    made = new_like(parameter, wanted)
    if made is None:
        made = empty_tensor(wanted, device_name(device))
    return Placement([tensor_target(made, path, like=parameter)], finish=lambda: made)


def _assign(parameter: torch.Tensor, make: Callable[[], object]) -> None:
    parameter.grad = make()  # type: ignore[assignment]  # a tensor, or None

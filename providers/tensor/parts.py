"""Tensors made of other tensors: classes with `__tensor_flatten__`, a protocol of torch.compile.

Quantized weights and optimizer state are examples. The parts are stored as tensors below the path
and restored in place. The node holds the class, and the context that the class needs to put the
parts together. A restore compares the stored context with the template's. A checkpoint must not run
code, so a rebuild uses only plain values, and classes and functions that are already loaded and
that torch lists as safe.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import torch

from penstock.core.abc import Difference, Node, Placement, StateObject
from penstock.core.errors import FormatError, UnsupportedStateError
from penstock.core.types import collide, show_path, show_text
from penstock.providers.children import leaves
from penstock.providers.tensor.sources import dtype_name
from penstock.providers.values.decode import decode_value
from penstock.providers.values.encode import encode_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.core.abc import DescribeContext, PlaceContext
    from penstock.core.types import ObjectPath, Role

FORM = "tensor.parts"
_REFUSED = ("torch.distributed", "torch.nested")


def has_parts(kind: type) -> bool:
    """Return whether tensors of this class consist of parts that can be stored instead."""
    if not callable(getattr(kind, "__tensor_flatten__", None)):
        return False
    if not callable(getattr(kind, "__tensor_unflatten__", None)):
        return False
    # These have both methods for torch.compile, but more state than their parts.
    return not any(base.__module__.startswith(_REFUSED) for base in kind.__mro__)


def parts_of(tensor: Any, path: ObjectPath) -> tuple[dict[str, torch.Tensor], object]:
    """Return the parts by name, and the context.

    Raises:
        UnsupportedStateError: A part is not a tensor, or each access returns a new one, so that a
            restore could not write into it.
    """
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    for name, part in parts.items():
        if not isinstance(part, torch.Tensor) or getattr(tensor, name) is not part:
            msg = (
                f"{show_path(path)} is a {global_name(type(tensor))} whose part {name!r} is not a "
                "tensor, or is a new one at each access: install a state provider for the class"
            )
            raise UnsupportedStateError(msg)
    return parts, context


def describe_parts(
    tensor: torch.Tensor, path: ObjectPath, *, role: Role, context: DescribeContext
) -> Iterator[StateObject | Node]:
    """Yield the node of `tensor`, then its parts."""
    parts, _ = parts_of(tensor, path)
    entries = [
        entry
        for name, part in parts.items()
        for entry in context.describe(part, (*path, name), role=role)
    ]
    objects = sum(isinstance(entry, StateObject) for entry in entries)
    yield Node(path, FORM, {**_kind(tensor, path), "objects": objects})
    yield from entries


def place_parts(tensor: torch.Tensor, path: ObjectPath, *, context: PlaceContext) -> Placement:
    """Plan the restore of every part in place."""
    result = Placement(finish=lambda: tensor)
    parts, _ = parts_of(tensor, path)
    # A list, so that `any` does not stop early: `selected` notes which patterns matched.
    wanted = any([context.selected(here) for here in (path, *((*path, n) for n in parts))])  # noqa: C419
    node, count = context.node(path), leaves(context, path)
    if node is None or node.form != FORM:
        if count:
            form = "a tensor" if context.stored(path) is not None else "a container"
            result.differ(_difference(path, form, f"a {global_name(type(tensor))}"))
        elif wanted:
            result.missing.append(path)
        return result
    if not count and not wanted:
        return result
    if count != node.meta.get("objects"):
        result.problems.append(
            f"{show_path(path)} is restored whole or not at all, but only {count} of its "
            f"{node.meta.get('objects')} parts are selected and stored: select or exclude all of "
            "them"
        )
        return result
    there, here = _shown(node.meta), _shown(_kind(tensor, path))
    if there != here:
        unequal = [key for key in here if there.get(key) != here[key]]
        result.differ(
            _difference(
                path,
                ", ".join(f"{key} {there.get(key)}" for key in unequal),
                ", ".join(f"{key} {here[key]}" for key in unequal),
                skippable=unequal == ["shape"],
            )
        )
        return result
    return _place_each(tensor, parts, path, context)


def _place_each(
    tensor: torch.Tensor,
    parts: Mapping[str, torch.Tensor],
    path: ObjectPath,
    context: PlaceContext,
) -> Placement:
    """Plan the restore of all parts or none, since a mix of old and new parts is no valid state."""
    result = Placement(finish=lambda: tensor)
    placed = {name: context.place(part, (*path, name)) for name, part in parts.items()}
    misfit = _misfit(parts, placed, path, context)
    if misfit is not None:
        result.differ(misfit)
        return result
    for each in placed.values():
        result.absorb(each)

    def finish() -> torch.Tensor:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        return tensor

    result.finish = finish
    return result


def fits(tensor: object, node: Node | None, path: ObjectPath, device: torch.device) -> bool:
    """Return whether `tensor` is on `device` and can be filled from the stored parts."""
    return (
        isinstance(tensor, torch.Tensor)
        and node is not None
        and node.form == FORM
        and has_parts(type(tensor))
        and tensor.device == device
        and _shown(_kind(tensor, path)) == _shown(node.meta)
    )


def rebuild_parts(node: Node, *, device: str | None, context: PlaceContext) -> Placement:
    """Plan to build a new tensor from new parts.

    Raises:
        UnsupportedStateError: The class is not loaded, or torch does not list it as safe.
        FormatError: The node does not describe a tensor of parts.
    """
    path, meta = node.path, node.meta
    match meta:
        case {"class": str(name), "parts": list(names), "shape": list(shape), "strides": list()}:
            kind = safe_global(name, path)
        case _:
            names, shape, kind = [], [], None
    if not isinstance(kind, type) or not issubclass(kind, torch.Tensor) or not has_parts(kind):
        shown = show_path(path)
        msg = f"{shown} is not a valid stored tensor"
        raise FormatError(msg, [shown])
    made = decode_context(meta.get("context"), path)
    result = Placement()
    makers: dict[str, Callable[[], object]] = {}
    for part in names:
        # With a device, parts are always in memory, never streamed: the class is made of tensors.
        placed = context.rebuild((*path, part), device=device or "cpu")
        result.absorb(placed)
        if placed.finish is not None:
            makers[part] = placed.finish
    unflatten: Any = kind.__tensor_unflatten__  # type: ignore[attr-defined]  # `has_parts` says so
    strides = tuple(meta["strides"])
    result.finish = lambda: unflatten(
        {part: make() for part, make in makers.items()}, made, torch.Size(shape), strides
    )
    return result


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the innermost parts of `tensor`, or `tensor` itself if it has no parts."""
    if not has_parts(type(tensor)):
        yield tensor
        return
    for part in parts_of(tensor, ())[0].values():
        yield from plain_parts(part)


def _misfit(
    parts: Mapping[str, torch.Tensor],
    placed: Mapping[str, Placement],
    path: ObjectPath,
    context: PlaceContext,
) -> Difference | None:
    """Return the first difference in a part, reported for the whole tensor; None if all parts fit.

    If it were reported for the part alone, `strict=False` would skip that part and fill the others.
    """
    for name, part in parts.items():
        for each in placed[name].differences:
            return _part_differs(path, name, each.stored, each.here, skippable=each.skippable)
        stored = context.stored((*path, name))
        if stored is None or has_parts(type(part)):
            continue
        there = (list(stored.spec.shape), stored.spec.dtype)
        here = (list(part.shape), dtype_name(part.dtype)[0])
        if there != here:
            shown = [f"shape {shape} and dtype {dtype}" for shape, dtype in (there, here)]
            return _part_differs(path, name, *shown, skippable=there[1] == here[1])
    return None


def _part_differs(
    path: ObjectPath, part: str, stored: str, here: str, *, skippable: bool
) -> Difference:
    there, here = f"a tensor whose part {part} has {stored}", f"one where it has {here}"
    return _difference(path, there, here, skippable=skippable)


def _kind(tensor: torch.Tensor, path: ObjectPath) -> dict[str, Any]:
    parts, context = parts_of(tensor, path)
    return {
        "class": global_name(type(tensor)),
        "dtype": dtype_name(tensor.dtype)[0],
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "parts": list(parts),
        "context": encode_context(context, path),
    }


def _shown(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that must be equal for the parts to fit."""
    return {key: meta.get(key) for key in ("class", "dtype", "shape", "parts", "context")}


def _difference(path: ObjectPath, stored: str, here: str, *, skippable: bool = False) -> Difference:
    sentence = f"{show_path(path)} is stored as {stored}, but is {here} in the template"
    return Difference(path, stored, here, (sentence,), skippable=skippable)


def encode_context(value: object, path: ObjectPath) -> Any:
    """Encode a context as JSON that is equal for equal contexts.

    Raises:
        UnsupportedStateError: A part of the context is neither a plain value nor a named object.
    """
    kind = type(value)
    if kind in (list, tuple):
        items: Any = value
        return {"form": kind.__name__, "items": [encode_context(item, path) for item in items]}
    if kind is dict:
        pairs: Any = value
        return {
            "form": "dict",
            "items": [
                [encode_context(key, path), encode_context(item, path)]
                for key, item in pairs.items()
            ],
        }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: encode_context(getattr(value, name), path) for name in names}
        return {"form": "dataclass", "name": global_name(kind), "fields": fields}
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str) and "<" not in name:
        return {"form": "global", "name": global_name(value)}
    try:
        return {"form": "value", "value": json.loads(encode_value(value, path))}
    except UnsupportedStateError as error:
        msg = f"{error}. The value is in the context that the tensor's __tensor_flatten__ returns."
        raise UnsupportedStateError(msg) from None


def decode_context(data: Any, path: ObjectPath) -> Any:
    """Decode a context that `encode_context` encoded.

    Raises:
        UnsupportedStateError: The context needs a class or function that torch does not list as
            safe.
        FormatError: `data` is not in the format of `encode_context`.
    """
    match data:
        case {"form": "list", "items": list(items)}:
            return [decode_context(item, path) for item in items]
        case {"form": "tuple", "items": list(items)}:
            return tuple(decode_context(item, path) for item in items)
        case {"form": "dict", "items": list(items)}:
            pairs = [(decode_context(k, path), decode_context(v, path)) for k, v in items]
            if collide([key for key, _ in pairs]):
                msg = f"{show_path(path)} has a context with keys whose hashes collide too often"
                raise FormatError(msg, [show_path(path)])
            return dict(pairs)
        case {"form": "dataclass", "name": str(name), "fields": dict(fields)}:
            made = {key: decode_context(item, path) for key, item in fields.items()}
            return safe_global(name, path)(**made)
        case {"form": "global", "name": str(name)}:
            return safe_global(name, path)
        case {"form": "value", "value": value}:
            return decode_value(json.dumps(value).encode(), path)
    shown = show_path(path)
    msg = f"{shown} is not a valid stored tensor"
    raise FormatError(msg, [shown])


def global_name(value: object) -> str:
    """Return `module.qualified.name` of a class or function."""
    return f"{value.__module__}.{value.__qualname__}"  # type: ignore[attr-defined]  # both have it


def safe_global(name: str, path: ObjectPath) -> Any:
    """Return the class or function of that name, if it is registered with torch as safe to call.

    A name in a checkpoint never causes an import.

    Raises:
        UnsupportedStateError: No safe class or function has that name.
    """
    for known in torch.serialization.get_safe_globals():
        candidate, known_as = known if isinstance(known, tuple) else (known, "")
        if name == known_as or name == global_name(candidate):
            return candidate
    msg = (
        f"{show_path(path)} is stored as the parts of a {show_text(name)}, which cannot be put "
        "together here: nothing loaded and registered with torch as safe has that name. Import "
        "its package (and call torch.serialization.add_safe_globals with the class, if the package "
        "does not); or restore into such a tensor; or exclude it, or read its parts one by one "
        "through open()"
    )
    raise UnsupportedStateError(msg)

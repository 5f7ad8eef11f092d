"""Names for the state of optimizers, since `Optimizer.state_dict` numbers the parameters.

The numbers follow the parameter groups, and within a group nearly always the order of the model. So
with one group, the model's tensor names in order show which parameter has which number, and shapes
verify that. With several groups, only the user knows the order.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import ConfigError, FormatError, Streamed
from penstock.integrations.files.runs import open_run

if TYPE_CHECKING:
    from collections.abc import Sequence

_FLOATS = ("float", "bfloat", "complex")
_STATISTICS = ("running_mean", "running_var")
"""Buffers of torch's normalizations, which have the shape of the parameters beside them."""


def named(tree: dict[str, Any], source: str, *, is_ordered: bool) -> dict[str, Any]:
    """Return the tree with names instead of numbers in all optimizers.

    Args:
        tree: The tree.
        source: The source of the names: a path in the tree, a file of `torch.save` or a run with
            the model, or a JSON file with a list of names in the order of the numbers.
        is_ordered: Whether the tree's tensors are in the order of the model.

    Raises:
        ConfigError: There are no names, the tree has no optimizer with numbers, or an optimizer has
            several groups and `source` is not a list.
        FormatError: The parameters do not fit the names.
    """
    names = _names_of(tree if is_ordered else {}, source)
    count = 0

    def renamed(value: Any) -> Any:
        nonlocal count
        if _is_numbered(value):
            count += 1
            return _with_names(value, names, source)
        if isinstance(value, dict):
            return {key: renamed(inner) for key, inner in value.items()}
        return list(map(renamed, value)) if type(value) is list else value

    result = {key: renamed(value) for key, value in tree.items()}
    if not count:
        msg = (
            f"names_from={source!r} (--names-from) has no effect: no optimizer in the files "
            "numbers its parameters"
        )
        raise ConfigError(msg)
    return result


def _is_numbered(value: Any) -> bool:
    match value:
        case {"state": dict(), "param_groups": [*groups]}:
            return all(
                isinstance(group, dict)
                and isinstance(group.get("params"), list)
                and all(type(number) is int for number in group["params"])
                for group in groups
            )
    return False


_Names = list[str] | list[tuple[str, tuple[int, ...]]]


def _names_of(tree: dict[str, Any], source: str) -> _Names:
    """Return the names in a list, or the names and shapes of a model's float tensors."""
    inner: Any = tree
    for key in source.split("/"):
        inner = inner.get(key) if isinstance(inner, dict) else None
    path = Path(source)
    if inner is None and path.suffix == ".json" and path.is_file():
        return _read_list(path)
    tensors = _model_in(path) if inner is None else inner
    names: dict[object, tuple[str, tuple[int, ...]]] = {}  # tied tensors once, as an optimizer does
    for name, tensor in tensors.items() if isinstance(tensors, dict) else ():
        dtype = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
        if dtype.startswith(_FLOATS) and not name.endswith(_STATISTICS):
            names.setdefault(_identity(name, tensor), (name, tuple(tensor.shape)))
    if not names:
        msg = (
            f"names_from={source!r} (--names-from) is not the path of a model in the files, a file "
            "of torch.save or run with one, or a JSON file with a list of names. Safetensors, DCP "
            "and DeepSpeed do not keep the order of a model"
        )
        raise ConfigError(msg)
    return list(names.values())


def _read_list(path: Path) -> list[str]:
    try:
        names = json.loads(path.read_bytes())
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        msg = f"{path} is not a JSON list of names"
        raise FormatError(msg, [str(path)])
    return names


def _model_in(path: Path) -> dict[str, Any]:
    """Return the tensors of a model, or their specs, in order."""
    if path.is_dir() and (path / "commits").is_dir():
        with open_run(path) as ckpt:
            specs = ckpt.open().specs().values()
            return {
                ".".join(spec.path[1:]): spec
                for spec in specs
                if spec.path[0] == "model" and spec.same_as is None
            }
    if not path.is_file():
        return {}
    from penstock.integrations.files.torch_import import read_file  # noqa: PLC0415 - needs torch

    content = read_file(path)
    return content.get("model") or content


def _identity(name: str, tensor: Any) -> object:
    return id(tensor) if isinstance(tensor, Streamed) else name


def _with_names(optimizer: dict[str, Any], names: _Names, source: str) -> dict[str, Any]:
    groups: list[dict[str, Any]] = optimizer["param_groups"]
    state: dict[Any, Any] = optimizer["state"]
    numbers = [number for group in groups for number in group["params"]]
    own = [name for group in groups for name in group.get("param_names") or ()]
    if len(own) == len(numbers):  # an optimizer made from `named_parameters`
        by_number = dict(zip(numbers, own, strict=True))
    elif all(isinstance(name, str) for name in names):
        if len(names) != len(numbers):
            msg = (
                f"{source} has {len(names)} names, but the optimizer has {len(numbers)} parameters"
            )
            raise FormatError(msg, [source])
        by_number = dict(zip(numbers, map(str, names), strict=True))
    elif sum(bool(group["params"]) for group in groups) > 1:
        msg = (
            f"names_from={source!r} (--names-from): the optimizer has {len(groups)} groups, whose "
            "order the model does not show: give a JSON file with the list of names, in the order "
            "of the groups"
        )
        raise ConfigError(msg)
    else:
        by_number = dict(zip(numbers, _aligned(numbers, state, names, source), strict=True))
    return {
        **optimizer,
        "state": {by_number.get(number, number): value for number, value in state.items()},
        "param_groups": [
            {**group, "params": [by_number[number] for number in group["params"]]}
            for group in groups
        ],
    }


def _aligned(
    numbers: Sequence[int], state: dict[Any, Any], names: _Names, source: str
) -> list[str]:
    """Match the numbers to names in order: return the only choice whose shapes fit the state.

    Names of buffers and of untrained parameters are skipped, because these have no number.

    Raises:
        FormatError: No choice fits, or several do.
    """
    shapes = [_shapes_in(state.get(number)) for number in numbers]
    first = _fit(shapes, names)
    last = _fit(shapes[::-1], names[::-1])
    if first is None or last is None or first != last[::-1]:
        how = "do not fit" if first is None else "fit in several ways"
        msg = (
            f"the {len(numbers)} parameters of the optimizer and the {len(names)} tensors of "
            f"{source} {how}: give a JSON file with a list of their names, in order (--names-from)"
        )
        raise FormatError(msg, [source])
    return first


def _shapes_in(state: Any) -> set[tuple[int, ...]]:
    """Return the shapes in the state of one parameter; empty if its shape is unknown."""
    values = state.values() if isinstance(state, dict) else ()
    return {tuple(v.shape) for v in values if hasattr(v, "shape") and math.prod(v.shape) > 1}


def _fit(shapes: Sequence[set[tuple[int, ...]]], names: Any) -> list[str] | None:
    chosen, at = [], iter(names)
    for wanted in shapes:
        name = next((n for n, shape in at if not wanted or shape in wanted), None)
        if name is None:
            return None
        chosen.append(name)
    return chosen

"""The provider of random state, of the process (`penstock.Rng`) and of single generators."""

from __future__ import annotations

import random
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from penstock.core.abc import Node, Placement, StateProvider
from penstock.core.errors import UnsupportedStateError
from penstock.core.markers import Rng
from penstock.core.types import show_path
from penstock.providers.children import rebuild_dict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.abc import DescribeContext, PlaceContext, StateObject, StoredObject
    from penstock.core.types import ObjectPath

    _Access = tuple[Callable[[], Any], Callable[[Any], object]]

PRIORITY = 50
FORM = "rng"
_KINDS = (Rng, torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_CUDA = "cuda."


class RngProvider(StateProvider):
    """Stores random state; a save reads it last, and a restore sets it last.

    Other values may draw random numbers while they are described or restored.
    """

    name = "rng"
    forms = (FORM,)
    describes_last = True  # the `state_dict` of a data loader may draw from the global generator

    def claims(self, kind: type, /) -> int | None:
        return PRIORITY if issubclass(kind, _KINDS) else None

    def on_other_ranks(self, kind: type, /) -> Literal["keep"]:
        """Return "keep": with a shared state, several ranks would draw the same random numbers."""
        del kind
        return "keep"

    def describe(
        self, value: Any, path: ObjectPath, /, *, context: DescribeContext
    ) -> Iterator[StateObject | Node]:
        yield Node(path, FORM, {"class": _class(value)})
        for name, state in _states(value, path).items():
            yield from context.describe(state, (*path, name))

    def place(self, value: Any, path: ObjectPath, /, *, context: PlaceContext) -> Placement:
        result = Placement(finish=lambda: value)
        node = context.node(path)
        chosen = context.children(path)
        if node is None or node.form != FORM:
            if chosen or context.stored(path) is not None:
                result.problems.append(
                    f"{show_path(path)} is a random generator in the template, but is not "
                    "stored as one"
                )
            elif _wanted(value, path, context):
                result.missing.append(path)
            return result
        if node.meta.get("class") != _class(value):
            if chosen:
                result.problems.append(
                    f"{show_path(path)} is stored as a {node.meta.get('class')}, but is a "
                    f"{_class(value)} in the template"
                )
            return result
        setters = _setters(value)
        for name in chosen:
            setter = setters.get(name)
            if setter is None:
                continue  # a device that this machine lacks; reported as unexpected
            placed = context.rebuild((*path, name))
            result.absorb(placed)
            if placed.finish is not None:
                result.settle.append(_then(placed.finish, setter))
        # Without CUDA states: the checkpoint may be from a machine with fewer devices, or none.
        missing = [(*path, name) for name in setters.keys() - set(chosen) if _CUDA not in name]
        result.missing += sorted(filter(context.selected, missing))
        return result

    def rebuild(
        self, stored: StoredObject | Node, /, *, device: str | None, context: PlaceContext
    ) -> Placement:
        """Plan a dict that maps names to states, on the CPU, as generators require."""
        del device
        return rebuild_dict(stored.path, device=None, context=context)


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Restore the global random state after the block."""
    rng = Rng()
    states = _states(rng, ())
    setters = _setters(rng)
    try:
        yield
    finally:
        for name, state in states.items():
            setters[name](state)


def _class(value: Any) -> str:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, np.random.Generator):
        return f"{name}/{type(value.bit_generator).__name__}"
    if isinstance(value, torch.Generator):
        return f"{name}/{value.device.type}"
    return name


def _generators(value: Any, has_cuda: Callable[[], bool]) -> dict[str, _Access]:
    """Return functions that read and set each state of `value`, by name."""
    if isinstance(value, Rng):
        accesses: dict[str, _Access] = {
            "python": (random.getstate, random.setstate),
            "numpy": (
                lambda: _plain(np.random.get_state(legacy=False)),  # noqa: NPY002 - people use it
                lambda state: np.random.set_state(_arrays(state)),  # noqa: NPY002 - see above
            ),
            "torch": (torch.get_rng_state, torch.set_rng_state),
        }
        for index in range(torch.cuda.device_count() if has_cuda() else 0):
            accesses[f"{_CUDA}{index}"] = (
                partial(torch.cuda.get_rng_state, index),
                partial(torch.cuda.set_rng_state, device=index),
            )
        return accesses
    if isinstance(value, torch.Generator):
        return {"state": (value.get_state, value.set_state)}
    if isinstance(value, random.Random):
        return {"state": (value.getstate, value.setstate)}
    if isinstance(value, np.random.RandomState):
        return {
            "state": (
                lambda: _plain(value.get_state(legacy=False)),
                lambda state: value.set_state(_arrays(state)),
            )
        }
    bits = value.bit_generator
    return {
        "state": (
            lambda: _plain(bits.state),
            lambda state: setattr(bits, "state", _arrays(state)),
        )
    }


def _states(value: Any, path: ObjectPath) -> dict[str, Any]:
    if isinstance(value, random.SystemRandom):
        msg = f"{show_path(path)} is a SystemRandom, which has no state to store: leave it out"
        raise UnsupportedStateError(msg)
    # Reading the state of unused CUDA would initialize it, which takes seconds and memory.
    generators = _generators(value, torch.cuda.is_initialized)
    return {name: get() for name, (get, _) in generators.items()}


def _setters(value: Any) -> dict[str, Callable[[Any], object]]:
    return {name: put for name, (_, put) in _generators(value, torch.cuda.is_available).items()}


def _wanted(value: Any, path: ObjectPath, context: PlaceContext) -> bool:
    return context.selected(path) or any(
        context.selected((*path, name)) for name in _setters(value)
    )


def _plain(state: Any) -> Any:
    """Return numpy's state as plain data, so that it is one value, not a container of arrays."""
    if isinstance(state, dict):
        return {key: _plain(item) for key, item in state.items()}
    if isinstance(state, np.ndarray):
        return {"array": state.tolist(), "dtype": state.dtype.name}
    return state.item() if isinstance(state, np.generic) else state


def _arrays(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    if state.keys() == {"array", "dtype"}:
        return np.array(state["array"], state["dtype"])
    return {key: _arrays(item) for key, item in state.items()}


def _then(make: Callable[[], object], setter: Callable[[Any], object]) -> Callable[[], object]:
    return lambda: setter(make())

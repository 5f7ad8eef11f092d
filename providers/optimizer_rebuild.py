"""Stored optimizer state as the dict that torch's `load_state_dict` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.core.abc import Placement
from penstock.providers.optimizer_match import index_of, malformed

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import Node, PlaceContext
    from penstock.core.types import ObjectPath


def rebuild_parameter(stored: Node, *, device: str | None, context: PlaceContext) -> Placement:
    """The state of one parameter as a dict."""
    result = Placement()
    makers: dict[str, Callable[[], object]] = {}
    for key in context.children(stored.path):
        placed = context.rebuild((*stored.path, key), device=device)
        result.absorb(placed)
        if placed.finish is not None:
            makers[key] = placed.finish
    result.finish = lambda: {key: make() for key, make in makers.items()}
    return result


def rebuild_optimizer(stored: Node, *, device: str | None, context: PlaceContext) -> Placement:
    """A state dict as torch makes it, parameters numbered in the order of their groups."""
    result = Placement()
    path = stored.path
    counts = stored.meta.get("groups")
    if not isinstance(counts, list) or not all(isinstance(n, int) and n >= 0 for n in counts):
        raise malformed(path)
    starts = [sum(counts[:index]) for index in range(len(counts))]
    state: list[tuple[int | str, Callable[[], object]]] = []
    for name in context.children((*path, "state")):
        here = (*path, "state", name)
        number = _number(context.node(here), starts, here)
        placed = context.rebuild(here, device=device)
        result.absorb(placed)
        if placed.finish is not None and context.children(here):
            state.append((number, placed.finish))
    for key in context.children((*path, "shared")):
        placed = context.rebuild((*path, "shared", key), device=device)
        result.absorb(placed)
        if placed.finish is not None:
            state.append((key, placed.finish))
    groups: list[dict[str, Callable[[], object]]] = []
    for index in context.children((*path, "param_groups")):
        at = index_of(index, path)
        if at >= len(counts):
            raise malformed(path)
        makers: dict[str, Callable[[], object]] = {}
        for key in context.children((*path, "param_groups", index)):
            placed = context.rebuild((*path, "param_groups", index, key), device=device)
            result.absorb(placed)
            if placed.finish is not None:
                makers[key] = placed.finish
        numbers = list(range(starts[at], starts[at] + counts[at]))
        groups.append(makers | {"params": lambda numbers=numbers: numbers})

    def finish() -> object:
        made: dict[str, Any] = {"state": {number: make() for number, make in state}}
        if groups:
            made["param_groups"] = [{k: make() for k, make in g.items()} for g in groups]
        return made

    result.finish = finish
    return result


def _number(node: Node | None, starts: list[int], path: ObjectPath) -> int:
    meta = {} if node is None else node.meta
    group, position = meta.get("group"), meta.get("position")
    if not isinstance(group, int) or not isinstance(position, int):
        raise malformed(path)
    if not 0 <= group < len(starts):
        raise malformed(path)
    return starts[group] + position

"""Functions that count the stored objects below a path and rebuild them as a dict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.abc import Placement

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import PlaceContext
    from penstock.core.types import ObjectPath


def rebuild_dict(path: ObjectPath, *, device: str | None, context: PlaceContext) -> Placement:
    """Plan a new dict of the selected children of `path`, in stored order."""
    result = Placement()
    makers: dict[str, Callable[[], object]] = {}
    for name in context.children(path):
        placed = context.rebuild((*path, name), device=device)
        result.absorb(placed)
        if placed.finish is not None:
            makers[name] = placed.finish
    result.finish = lambda: {name: make() for name, make in makers.items()}
    return result


def leaves(context: PlaceContext, path: ObjectPath) -> int:
    """Return the number of selected stored objects at and below `path`."""
    here = int(context.stored(path) is not None)
    return here + sum(leaves(context, (*path, name)) for name in context.children(path))

"""Checks of providers: a single object of a composite is restored or loaded alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.core.testing.expectations import finding
from penstock.core.testing.stored import PIECE_BYTES, store
from penstock.core.tree.place import Placing
from penstock.core.types import show_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.testing.stored import Stored
    from penstock.core.tree.select import Selection
    from penstock.core.types import ObjectPath

_MOST = 8  # of the objects of one value, spread over all of them


def each_object_is_restored_alone(stored: Stored, make: Callable[[], object]) -> None:
    """Check that a selected object is restored alone, or that a problem says why it cannot be.

    Args:
        stored: The checkpoint of a value.
        make: Returns another value, of another state.
    """
    for path in _some(stored):
        _restored_alone(stored, {"part": make()}, path)
        _loaded_alone(stored, path)


def each_object_that_is_not_there_is_missing(
    stored: Stored, make: Callable[[], object], optional: Selection
) -> None:
    """Check that an object that is not stored is reported as missing, or that a problem says why.

    Also right is a restored value without the object, as an optimizer drops state that the
    checkpoint lacks.

    Args:
        stored: The checkpoint of a value.
        make: Returns another value of the same structure.
        optional: The objects that a checkpoint may lack without an error.
    """
    for path in _some(stored) or list(stored.data):
        if optional.selects(path):
            continue
        shown, state, shortened = show_path(path), {"part": make()}, _without(stored, path)
        with finding(f"planning a restore from a checkpoint without {shown}"):
            placement = shortened.plan(state)
        if placement.problems or path in placement.missing:
            continue
        with finding(f"a restore from a checkpoint without {shown}, which is not said to miss it"):
            shortened.complete(placement, piece_bytes=PIECE_BYTES)
            after = store(state, providers=stored.providers).data
        assert path not in after, (
            f"a checkpoint without {shown} is not noticed: what `place` looks for and does not "
            "find stands in `missing`, and so does what `context.place` says is"
        )


def _without(stored: Stored, path: ObjectPath) -> Stored:
    """Return the same checkpoint without one object, and without those tied to it."""
    tree = stored.tree
    gone = {path, *(tied for tied, target in tree.aliases.items() if target == path)}
    return replace(
        stored,
        tree=replace(
            tree,
            objects=[o for o in tree.objects if o.path not in gone],
            values={p: v for p, v in tree.values.items() if p not in gone},
            aliases={p: q for p, q in tree.aliases.items() if p not in gone},
        ),
        data={p: d for p, d in stored.data.items() if p not in gone},
    )


def _some(stored: Stored) -> list[ObjectPath]:
    paths = list(stored.data)
    return paths[:: -(-len(paths) // _MOST)] if len(paths) > 1 else []


def _restored_alone(stored: Stored, target: dict[str, Any], path: ObjectPath) -> None:
    shown = show_path(path)
    providers = stored.providers
    before = store(target, providers=providers).data
    with finding(f"planning to restore {shown} alone"):
        placing = Placing(providers, stored.tree, lambda p: p == path, allow_pickle=False)
        placement = placing.place_tree(target)
    if placement.problems:
        return  # the provider says that the value is restored whole or not at all
    _only(placement.missing, path, "says that {other} is missing")
    assert not placement.missing, f"{shown} is stored and selected, but is said to be missing"
    _only([t.path for t in placement.targets], path, "has a target for {other}")
    _only(placement.values, path, "uses {other}")
    with finding(f"restoring {shown} alone (a child that is not selected may have no `finish`)"):
        stored.complete(placement, piece_bytes=PIECE_BYTES)
        after = store(target, providers=providers).data
    assert after.get(path) == stored.data[path], f"{shown} alone was selected, but not restored"
    for other, data in before.items():
        assert other == path or after.get(other) == data, (
            f"only {shown} was selected, but {show_path(other)} changed: nothing else is touched"
        )


def _only(paths: list[ObjectPath], path: ObjectPath, what: str) -> None:
    for other in paths:
        said = what.format(other=show_path(other))
        assert other == path, (
            f"only {show_path(path)} was selected, but place {said}: ask `context.selected`, or "
            "leave the child to `context.place`"
        )


def _loaded_alone(stored: Stored, path: ObjectPath) -> None:
    with finding(f"loading {show_path(path)} alone"):
        placing = Placing(stored.providers, stored.tree, lambda p: p == path, allow_pickle=False)
        placement = placing.rebuild_tree(device=None)
        if not placement.missing and not placement.problems:
            stored.complete(placement)

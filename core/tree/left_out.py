"""Finds state that belongs to objects of a state tree, and that nothing in the tree holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.core.abc import StateObject
from penstock.core.tree.checks import naming
from penstock.core.tree.paths import show_path

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from penstock.core.tree.describe import Description
    from penstock.core.types import ObjectPath


def left_out(description: Description, known: Collection[ObjectPath]) -> Iterator[str]:
    """Yield a sentence for each object of the tree that is not stored completely.

    Args:
        description: The tree.
        known: The paths of objects that are not looked at.
    """
    found = [one for one in description.seen if one.path not in known]
    if not found or description.scan is None:
        return
    objects = (entry for entry in description.entries if type(entry) is StateObject)
    memories = [piece.memory for entry in objects for piece in entry.source.pieces()]
    # The address 0 is that of freed memory, as of a module that is offloaded.
    stored = {0, *(memory.storage for memory in memories if memory is not None)}
    in_tree = {id(one.value) for one in description.seen}
    for one in description.scan.found:
        in_tree.add(id(one.value))
        # FSDP1 stores its parameters from where it keeps them, which may be other memory.
        with naming(one, "naming its parameters"):
            stored.update(_storage(tensor) or 0 for _, tensor in one.provider.parameters(one.value))
    for one in found:
        with naming(one, "naming what is not stored with it"):
            items = list(one.provider.left_out(one.value))
        tensors = [storage for _, item in items if (storage := _storage(item)) is not None]
        count = sum(storage not in stored for storage in tensors)
        shown = show_path(one.path)
        if count:
            yield (
                f"{shown}: {count} of the tensors that it changes are not stored, since nothing in "
                "the state has their memory (float32 masters of a model in half precision?): put "
                "the module or the tensors themselves into the state, unless copies of them are "
                "in it or in another checkpoint"
            )
        others = [
            f"{shown}.{name} ({type(item).__name__})"
            for name, item in items
            if id(item) not in in_tree and _storage(item) is None
        ]
        if others:
            yield (
                f"{shown} is stored without {', '.join(others)}: put what a resume needs into the "
                "state under a key of its own"
            )


def _storage(item: Any) -> int | None:
    """Return the address of a tensor's memory, 0 for one that wraps others; None: no tensor."""
    try:
        return int(item.untyped_storage().data_ptr())
    except AttributeError:
        return None
    except (RuntimeError, NotImplementedError):
        return 0

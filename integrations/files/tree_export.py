"""Loads what an export of a whole tree needs, renamed and cast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock import Rename, Selection, UnsupportedStateError
from penstock.integrations.files.options import is_cast
from penstock.integrations.files.trees import moved

if TYPE_CHECKING:
    from penstock import Checkpoint
    from penstock.integrations.files.options import ExportOptions


def load_tree(view: Checkpoint, options: ExportOptions) -> dict[str, Any]:
    """Return the tree to export, in memory."""
    tree = view.load(include=options.include, exclude=options.exclude, on_progress=options.progress)
    tree = moved(tree, Selection(), Rename(options.rename))
    return tree if options.cast is None else _cast(tree, getattr(torch, options.cast), {})


def tensors_of(tree: object, known: dict[int, torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Return the tensors of a tree, tied ones once."""
    known = {} if known is None else known
    if isinstance(tree, torch.Tensor):
        known[id(tree)] = tree
    elif isinstance(tree, dict):
        tensors_of(list(tree.values()), known)
    elif isinstance(tree, list | tuple):
        for value in tree:
            tensors_of(value, known)
    return list(known.values())


def checked_cast(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Convert floats; refuse where a finite value would become infinite.

    Raises:
        UnsupportedStateError: One would.
    """
    converted = values.to(dtype)
    if not torch.equal(values.isinf(), converted.isinf()):
        msg = f"{name} has values that are too large for {dtype}: cast to another dtype"
        raise UnsupportedStateError(msg)
    return converted


def _cast(tree: Any, dtype: torch.dtype, known: dict[int, torch.Tensor], path: str = "") -> Any:
    """Return a tree with its floats converted; tied tensors stay tied."""
    if isinstance(tree, torch.Tensor):
        if not is_cast(str(tree.dtype).removeprefix("torch."), tree.shape):
            return tree
        if id(tree) not in known:
            known[id(tree)] = checked_cast(tree, dtype, path)
        return known[id(tree)]
    if isinstance(tree, dict):
        for key, value in tree.items():
            tree[key] = _cast(value, dtype, known, f"{path}/{key}")
    elif type(tree) in {list, tuple}:
        return type(tree)(_cast(v, dtype, known, f"{path}/{n}") for n, v in enumerate(tree))
    return tree

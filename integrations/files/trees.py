"""Trees of plain dicts, as files of other tools hold them: their leaves, moved and exported."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from penstock import Progress, Rename, Selection, SelectionError, Streamed, UnsupportedStateError
from penstock.integrations.files.options import is_cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock import Checkpoint
    from penstock.integrations.files.options import ExportOptions


@dataclass(frozen=True, slots=True)
class Unread:
    """A value that is still in a file, so that what is not selected is never read."""

    load: Callable[[], object]


def moved(tree: dict[str, Any], selection: Selection, rename: Rename) -> dict[str, Any]:
    """Return the selected leaves of a tree under their new paths.

    A leaf is all that is not a dict with text keys; so the inside of a list cannot be selected.

    Raises:
        SelectionError: A pattern matches nothing, nothing is selected, two leaves would get one
            path, or one would be below another.
    """
    if selection.everything and rename.identity:
        return tree
    leaves = dict(_leaves(tree, ()))
    selection.check_used(leaves)
    kept = [path for path in leaves if selection.selects(path)]
    if not kept:
        msg = "nothing is selected"
        raise SelectionError(msg)
    places = {new: old for old, new in rename.apply(kept).items()}
    result: dict[str, Any] = {}
    for new, old in places.items():
        if not new or any(new[:end] in places for end in range(1, len(new))):
            msg = (
                f"rename puts {'/'.join(old)!r} at {'/'.join(new)!r}, which is no place for it: it "
                "is the root, or below another object"
            )
            raise SelectionError(msg)
        inner = result
        for key in new[:-1]:
            inner = inner.setdefault(key, {})
        inner[new[-1]] = leaves[old]
    return result


def loaded(tree: Any) -> Any:
    """Return a tree with each value that is still in a file read."""
    if isinstance(tree, Unread):
        return tree.load()
    if type(tree) is dict:
        return {key: loaded(value) for key, value in tree.items()}
    if type(tree) is list:
        return [loaded(value) for value in tree]
    return tree


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    is_inner = type(tree) in {dict, OrderedDict} and tree and all(type(k) is str for k in tree)
    if not is_inner:
        yield path, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, (*path, key))


def stream_tree(view: Checkpoint, options: ExportOptions) -> dict[str, Any]:
    """Return the tree to export, its tensors not read yet; tied tensors are one `Streamed`."""
    tree = view.load(include=options.include, exclude=options.exclude, streamed=True)
    tree = moved(tree, Selection(), Rename(options.rename))
    return tree if options.cast is None else _cast(tree, options.cast, {}, "")


def streams_of(tree: object, known: dict[int, Streamed] | None = None) -> list[Streamed]:
    """Return the streamed tensors of a tree, tied ones once."""
    known = {} if known is None else known
    if isinstance(tree, Streamed):
        known[id(tree)] = tree
    elif isinstance(tree, dict):
        streams_of(list(tree.values()), known)
    elif isinstance(tree, list | tuple):
        for value in tree:
            streams_of(value, known)
    return list(known.values())


def dtype_of(tensor: Streamed) -> torch.dtype:
    """Return the dtype of a streamed tensor."""
    dtype: torch.dtype = vars(torch)[tensor.dtype]
    return dtype


def empty_like(tensor: Streamed) -> torch.Tensor:
    """Return a tensor of that dtype and shape which has no memory."""
    return torch.empty(tuple(tensor.shape), dtype=dtype_of(tensor), device="meta")


class Written:
    """Reports the bytes that an export has written."""

    def __init__(self, tensors: Iterable[Streamed], report: Callable[[Progress], None]) -> None:
        self.total = sum(empty_like(tensor).nbytes for tensor in tensors)
        """The bytes of all tensors that it writes."""
        self._done = 0
        self._report = report

    def add(self, size_bytes: int) -> None:
        """Count bytes that were written, and report them."""
        self._done += size_bytes
        self._report(Progress(self._done, self.total, "write"))

    def end(self) -> None:
        """Report that the export is whole."""
        self._report(Progress(self.total, self.total, "done"))


def checked_cast(piece: memoryview, stored: str, wanted: str, name: str) -> torch.Tensor:
    """Convert the bytes of floats; refuse where a finite value would become infinite.

    Raises:
        UnsupportedStateError: One would.
    """
    values = torch.frombuffer(piece, dtype=vars(torch)[stored])
    converted = values.to(vars(torch)[wanted])
    if not torch.equal(values.isinf(), converted.isinf()):
        msg = f"{name} has values that are too large for {wanted}: cast to another dtype"
        raise UnsupportedStateError(msg)
    return converted


def _cast(tree: Any, dtype: str, known: dict[int, Streamed], path: str) -> Any:
    """Return a tree with its floats converted when they are read; tied tensors stay tied."""
    if isinstance(tree, Streamed):
        if not is_cast(tree.dtype, tree.shape):
            return tree
        read = partial(_read_cast, tree, dtype, path)
        return known.setdefault(id(tree), Streamed(dtype, tree.shape, read))
    if isinstance(tree, dict):
        for key, value in tree.items():
            tree[key] = _cast(value, dtype, known, f"{path}/{key}" if path else str(key))
    elif type(tree) in {list, tuple}:
        return type(tree)(_cast(v, dtype, known, f"{path}/{n}") for n, v in enumerate(tree))
    return tree


def _read_cast(tensor: Streamed, dtype: str, name: str, start: int, out: memoryview) -> None:
    stored, wanted = dtype_of(tensor).itemsize, vars(torch)[dtype].itemsize
    piece = memoryview(bytearray(out.nbytes // wanted * stored))
    tensor.read(start // wanted * stored, piece)
    out[:] = checked_cast(piece, tensor.dtype, dtype, name).view(torch.uint8).numpy().data

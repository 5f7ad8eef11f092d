"""The tree that an export to torch or DCP writes: streamed tensors, renamed and cast."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from penstock import Progress, Rename, Selection, Streamed, UnsupportedStateError
from penstock.integrations.files.options import is_cast
from penstock.integrations.files.trees import moved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock import Checkpoint
    from penstock.integrations.files.options import ExportOptions


def stream_tree(view: Checkpoint, options: ExportOptions) -> dict[str, Any]:
    """Return the tree to export, with unread tensors; tied tensors share one `Streamed`."""
    tree = view.load(include=options.include, exclude=options.exclude, streamed=True)
    tree = moved(tree, Selection(), Rename(options.rename))
    return tree if options.cast is None else _cast(tree, options.cast, {}, "")


def streams_of(tree: object, known: dict[int, Streamed] | None = None) -> list[Streamed]:
    """Return the streamed tensors of a tree, each tied tensor once."""
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
    """Return a meta tensor with the dtype and shape of a streamed tensor."""
    return torch.empty(tuple(tensor.shape), dtype=dtype_of(tensor), device="meta")


class Written:
    """Reports the bytes that an export has written."""

    def __init__(self, tensors: Iterable[Streamed], report: Callable[[Progress], None]) -> None:
        self.total = sum(empty_like(tensor).nbytes for tensor in tensors)
        """The bytes of all tensors that the export writes."""
        self._done = 0
        self._report = report

    def add(self, size_bytes: int) -> None:
        """Count bytes that were written, and report them."""
        self._done += size_bytes
        self._report(Progress(self._done, self.total, "write"))

    def end(self) -> None:
        """Report that the export is complete."""
        self._report(Progress(self.total, self.total, "done"))


def checked_cast(piece: memoryview, stored: str, wanted: str, name: str) -> torch.Tensor:
    """Convert the bytes of floats; refuse to turn a finite value into infinity.

    Raises:
        UnsupportedStateError: A finite value would become infinite.
    """
    values = torch.frombuffer(piece, dtype=vars(torch)[stored])
    converted = values.to(vars(torch)[wanted])
    if not torch.equal(values.isinf(), converted.isinf()):
        msg = f"{name} has values that are too large for {wanted}: cast to another dtype"
        raise UnsupportedStateError(msg)
    return converted


def _cast(tree: Any, dtype: str, known: dict[int, Streamed], path: str) -> Any:
    """Return a tree whose floats are converted when they are read; tied tensors stay tied."""
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

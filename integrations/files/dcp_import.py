"""Reads folders of `torch.distributed.checkpoint`, chunk by chunk, without running their code."""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import torch

from penstock import FormatError, Streamed
from penstock.integrations.files.dcp_metadata import StoredBlob, StoredTensor, read_metadata
from penstock.integrations.files.source import read_soon
from penstock.integrations.files.torch_import import load_safely
from penstock.integrations.files.trees import Unread

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.integrations.files.dcp_metadata import StoredChunk


def read_folder(folder: Path) -> dict[str, Any]:
    """Return the contents of a folder; tensors and values are read during the save.

    Raises:
        FormatError: The metadata is damaged, or does not cover a tensor.
        UnsupportedStateError: The metadata names classes that are not DCP's, or the files were
            transformed.
    """
    tree: dict[str | int, Any] = {}
    for name, path, entry in read_metadata(folder):
        inner = tree
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
            if type(inner) is not dict:
                break
        if type(inner) is not dict or path[-1] in inner:
            msg = f"{folder}: the path of {name!r} conflicts with that of another object"
            raise FormatError(msg, [name])
        if isinstance(entry, StoredTensor):
            inner[path[-1]] = Streamed(entry.dtype, entry.shape, ChunkReader(entry).read)
        else:
            inner[path[-1]] = Unread(partial(_load, entry, name))
    return {str(key): _with_lists(value) for key, value in tree.items()}


def _with_lists(tree: Any) -> Any:
    """Return the tree with each dict of the keys 0, 1, 2, ... as a list."""
    if type(tree) is not dict:
        return tree
    made = {key: _with_lists(value) for key, value in tree.items()}
    if all(type(key) is int for key in made):
        if sorted(made) == list(range(len(made))):
            return [made[n] for n in range(len(made))]
        msg = f"a list of {len(made)} elements has gaps: its indices are {sorted(made)[:5]}..."
        raise FormatError(msg)
    return {str(key): value for key, value in made.items()}


class ChunkReader:
    """Reads the bytes of a tensor; keeps the chunks that later bytes need."""

    def __init__(self, tensor: StoredTensor) -> None:
        self._tensor = tensor
        self._shape = tensor.shape or (1,)
        self.held: dict[StoredChunk, NDArray[np.uint8]] = {}
        """The chunks whose later bytes are needed."""

    def read(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of the tensor from byte `start` on."""
        itemsize = _dtype(self._tensor).itemsize
        row_bytes = itemsize * int(np.prod(self._shape[1:], dtype=np.int64))
        first, last = start // row_bytes, -(-(start + out.nbytes) // row_bytes)
        skip = start - first * row_bytes
        # A range of complete rows is filled in place; any other goes through a buffer.
        is_whole = out.nbytes == (last - first) * row_bytes
        flat = np.frombuffer(out if is_whole else bytearray((last - first) * row_bytes), np.uint8)
        rows = flat.reshape(last - first, *self._shape[1:], itemsize)
        for chunk in self._tensor.chunks:
            offsets, sizes = chunk.offsets or (0,), chunk.sizes or (1,)
            low, high = max(first, offsets[0]), min(last, offsets[0] + sizes[0])
            if low >= high or 0 in sizes:
                continue
            values = self.held.get(chunk)
            if values is None:
                values = self.held[chunk] = self._load(chunk, sizes)
            inner = tuple(slice(o, o + n) for o, n in zip(offsets[1:], sizes[1:], strict=True))
            rows[(slice(low - first, high - first), *inner)] = values[
                low - offsets[0] : high - offsets[0]
            ]
            if start + out.nbytes >= (offsets[0] + sizes[0]) * row_bytes:
                del self.held[chunk]
        if not is_whole:
            out[:] = flat[skip : skip + out.nbytes].data

    def _load(self, chunk: StoredChunk, sizes: tuple[int, ...]) -> NDArray[np.uint8]:
        name = self._tensor.name
        tensor = _load(chunk.blob, name)
        dtype = _dtype(self._tensor)
        if (
            not isinstance(tensor, torch.Tensor)
            or (tensor.dtype, tuple(tensor.shape)) != (dtype, chunk.sizes)
            or tensor.layout is not torch.strided
        ):
            msg = f"{chunk.blob.source.path} does not hold {name!r} as the metadata describes it"
            raise FormatError(msg, [name])
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return data.reshape(*sizes, dtype.itemsize)


def _dtype(tensor: StoredTensor) -> torch.dtype:
    return cast("torch.dtype", vars(torch)[tensor.dtype])


def _load(blob: StoredBlob, name: str) -> object:
    with blob.source.path.open("rb") as file:
        window = io.BufferedReader(_Window(file, blob.offset, blob.length), 1 << 20)
        content = load_safely(cast("BinaryIO", window), f"{name!r} in {blob.source.path}")
        read_soon(file.fileno(), blob.offset + blob.length, blob.length)
    blob.source.check(name)
    return content


class _Window(io.RawIOBase):
    """A range of bytes of a file, read like a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, begin + offset)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)  # type: ignore[attr-defined]  # a file of `open`
        self._at += count
        return int(count)

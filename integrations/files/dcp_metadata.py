"""Reads the `.metadata` pickle of a `torch.distributed.checkpoint` folder without running code.

The pickle names a dozen classes. An inert class, which keeps its state and does nothing, replaces
each of them. Every other name is refused, so a crafted file cannot import or call anything. This
works for torch 2.6 to 2.15, and for Megatron, which has two classes of its own.
"""

from __future__ import annotations

import pickle
import reprlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar

import numpy as np
import torch

from penstock import FormatError, UnsupportedStateError
from penstock.integrations.files.source import SourceFile

if TYPE_CHECKING:
    from typing import BinaryIO

T = TypeVar("T")

_MAX_CELLS = 1 << 24


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """Bytes of a file that `torch.save` has written."""

    source: SourceFile
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A rectangle of a tensor, and the blob with its elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    blob: StoredBlob

    def bounds(self, dimension: int) -> tuple[int, int]:
        """Return the chunk's start and end in one dimension."""
        start = self.offsets[dimension]
        return start, start + self.sizes[dimension]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor, whose chunks cover each element once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


Entry = StoredTensor | StoredBlob


def read_metadata(folder: Path) -> list[tuple[str, tuple[str | int, ...], Entry]]:
    """Return the name, path and entry of each object; a number in a path is a list index.

    Raises:
        FormatError: The metadata is damaged, or does not cover a tensor.
        UnsupportedStateError: The metadata names classes that are not DCP's, or transformed files;
            the error names them. Or each rank has its own metadata.
    """
    path = folder / ".metadata"
    if not any(folder.glob("*.metadata")):
        msg = f"{folder} has no .metadata: it is not a folder of DCP, or its save was cut short"
        raise FormatError(msg, [str(folder)])
    if not path.is_file():
        msg = (
            f"{folder} has no .metadata, but one for each rank, as a save writes with "
            "use_collectives=False: load it with torch.distributed.checkpoint, and save it again"
        )
        raise UnsupportedStateError(msg)
    with path.open("rb") as file:
        reader = _MetadataReader(path, file)
        return reader.entries(folder)


class _Inert:
    """Replaces an instance of a DCP class: keeps its state, and does nothing."""

    __slots__ = ("state",)
    state: object

    def __new__(cls, *arguments: object) -> Self:
        del arguments
        made = super().__new__(cls)
        made.state = {}
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state


class _InertTensor(_Inert):
    __slots__ = ()


class _InertBytes(_Inert):
    __slots__ = ()


class _Size(tuple[object, ...]):
    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        # Without it a pickle could set attributes of this class.
        raise pickle.UnpicklingError


class _DtypeName(str):
    __slots__ = ()


_DCP = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_ALLOWED: dict[tuple[str, str], type] = {
    **{
        (f"{_DCP}.metadata", name): _Inert
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (f"{_DCP}.metadata", "TensorStorageMetadata"): _InertTensor,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): _InertBytes,
    (f"{_DCP}.filesystem", "_StorageInfo"): _Inert,
    (_MEGATRON, "MCoreMetadata"): _Inert,
    (_MEGATRON, "MCoreSavePlan"): _Inert,
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): _Inert,
    ("pathlib", "PosixPath"): _Inert,
    ("pathlib._local", "PosixPath"): _Inert,  # as Python 3.13 has it
}


class _Dict(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        # The hash of deeply nested tuples ends the process, or never ends.
        if not isinstance(key, str | int | _Inert):
            raise pickle.UnpicklingError
        super().__setitem__(key, value)


# These fill sets and dicts without `_Dict`. DCP pickles no sets, and dicts with `EMPTY_DICT`.
_HASHING = {pickle.DICT, pickle.ADDITEMS, pickle.FROZENSET}


# Not `pickle.Unpickler`: with a crafted memo number it takes memory for 2^32 entries.
class _Unpickler(pickle._Unpickler):  # noqa: SLF001 - in Python, with a dict for the memo
    dispatch: ClassVar[dict[int, Any]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()  # noqa: SLF001 - see above
        if code not in {opcode[0] for opcode in _HASHING}
    }

    def load_empty_dictionary(self) -> None:
        self.append(_Dict())  # type: ignore[attr-defined]  # a method that `load` sets

    dispatch[pickle.EMPTY_DICT[0]] = load_empty_dictionary

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return _DtypeName(name)
        kind = _ALLOWED.get((module, name))
        if kind is None:
            # Not UnpicklingError, which means damage.
            msg = f"names {module}.{name}, which is not of torch.distributed.checkpoint"
            raise _RefusedError(msg)
        return kind


class _RefusedError(Exception):
    pass


def _lies_within(chunk: StoredChunk, shape: tuple[int, ...]) -> bool:
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        return False
    return all(chunk.bounds(d)[1] <= whole for d, whole in enumerate(shape))


class _MetadataReader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        try:
            self._metadata = self._state(_Unpickler(file).load())
        except _RefusedError as error:
            msg = f"{path} {error}, so it was refused, and none of it was run"
            raise UnsupportedStateError(msg) from None
        except FormatError:
            raise
        except Exception as error:  # noqa: BLE001 - a damaged pickle raises nearly anything
            self._refuse(f"is not the metadata of a checkpoint: {error}")

    def entries(self, folder: Path) -> list[tuple[str, tuple[str | int, ...], Entry]]:
        blobs = self._blobs(folder)
        paths = self._metadata.get("planner_data")
        names = self._typed(self._metadata.get("state_dict_metadata"), dict)
        entries: list[tuple[str, tuple[str | int, ...], Entry]] = []
        for name, record in names.items():
            self._typed(name, str)
            path: Any = (name,)
            if isinstance(paths, dict):
                path = self._typed(paths.get(name), tuple)
            if not path or not all(type(part) in {str, int} for part in path):
                self._refuse(f"has no path for {name!r}")
            if isinstance(record, _InertTensor):
                entries.append((name, path, self._tensor(name, record, blobs)))
            elif isinstance(record, _InertBytes) and (name, None) in blobs:
                entries.append((name, path, blobs[name, None]))
            else:
                self._refuse(f"does not say where {name!r} is")
        return entries

    def _blobs(self, folder: Path) -> dict[tuple[str, tuple[int, ...] | None], StoredBlob]:
        """Return the blob of each chunk, by the object's name and the chunk's offsets."""
        blobs: dict[tuple[str, tuple[int, ...] | None], StoredBlob] = {}
        source_at = cache(SourceFile.of)
        for key, value in self._typed(self._metadata.get("storage_data"), dict).items():
            index, info = self._state(key), self._state(value)
            name = self._typed(index.get("fqn"), str)
            offsets = index.get("offset")
            transforms = info.get("transform_descriptors")
            if transforms:
                msg = (
                    f"{self._path}: {name!r} was saved with the transforms "
                    f"{reprlib.repr(transforms)}, which Penstock does not undo: load it with "
                    "torch.distributed.checkpoint, and save it again without transforms"
                )
                raise UnsupportedStateError(msg)
            file = PurePosixPath(self._typed(info.get("relative_path"), str))
            if file.is_absolute() or ".." in file.parts or not file.name or "\0" in str(file):
                self._refuse(f"has {name!r} in {str(file)!r}, which is not in the folder")
            offset, length = self._numbers((info.get("offset"), info.get("length")))
            at = None if offsets is None else self._numbers(offsets)
            blobs[name, at] = StoredBlob(source_at(folder / file), offset, length)
        return blobs

    def _tensor(
        self,
        name: str,
        record: _Inert,
        blobs: dict[tuple[str, tuple[int, ...] | None], StoredBlob],
    ) -> StoredTensor:
        state = self._state(record)
        properties = self._typed(state.get("properties"), _Inert)
        # Torch 2.15 has a sixth field; the dtype is the first one in each version.
        fields = self._typed(properties.state, tuple)
        dtype = self._typed(fields[0] if len(fields) in {5, 6} else None, _DtypeName)
        shape = self._numbers(state.get("size"))
        chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], StoredChunk] = {}
        for chunk_record in self._typed(state.get("chunks"), list):
            chunk = self._state(chunk_record)
            offsets, sizes = self._numbers(chunk.get("offsets")), self._numbers(chunk.get("sizes"))
            blob = blobs.get((name, offsets))
            if blob is None:
                self._refuse(f"does not say where {name!r} at {offsets} is")
            chunks[offsets, sizes] = StoredChunk(offsets, sizes, blob)
        tensor = StoredTensor(name, str(dtype), shape, tuple(chunks.values()))
        self._check_cover(tensor)
        return tensor

    def _check_cover(self, tensor: StoredTensor) -> None:
        """Check that exactly one chunk contains each element, on the grid of all chunk bounds."""
        if 0 in tensor.shape:
            return
        chunks, shape = tensor.chunks, tensor.shape
        if not all(_lies_within(chunk, shape) for chunk in chunks):
            self._refuse(f"has a chunk of {tensor.name!r} that extends beyond the tensor")
        bounds = [
            sorted({0, whole, *(edge for chunk in chunks for edge in chunk.bounds(d))})
            for d, whole in enumerate(shape)
        ]
        cells = [len(edges) - 1 for edges in bounds]
        if np.prod(cells, dtype=float) > _MAX_CELLS:
            self._refuse(f"cuts {tensor.name!r} into too many pieces")
        places = [{edge: n for n, edge in enumerate(edges)} for edges in bounds]
        count = np.zeros(cells, np.int32)
        for chunk in chunks:
            edges = [chunk.bounds(d) for d in range(len(shape))]
            count[tuple(slice(at[a], at[b]) for at, (a, b) in zip(places, edges, strict=True))] += 1
        if not (count == 1).all():
            wrong = "no chunk for a part" if (count == 0).any() else "overlapping chunks"
            self._refuse(f"has {wrong} of {tensor.name!r}")

    def _state(self, record: object) -> dict[str, Any]:
        return self._typed(self._typed(record, _Inert).state, dict)

    def _numbers(self, value: object) -> tuple[int, ...]:
        numbers = self._typed(value, tuple)
        if not all(type(n) is int and n >= 0 for n in numbers):
            self._refuse("has something else where non-negative integers belong")
        return tuple(numbers)

    def _typed(self, value: object, kind: type[T]) -> T:
        if not isinstance(value, kind):
            name = "dict" if isinstance(value, dict) else type(value).__name__
            self._refuse(f"has a {name} where a {kind.__name__} belongs")
        return value

    def _refuse(self, reason: str) -> NoReturn:
        msg = f"{self._path} {reason}"
        raise FormatError(msg, [str(self._path)])

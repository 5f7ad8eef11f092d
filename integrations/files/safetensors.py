"""The safetensors format: headers, and the folders of Hugging Face with shards and an index.

A file is 8 bytes with the length of the header, little-endian; the header, JSON with the dtype,
shape and bytes of each tensor; and then the bytes of all tensors, without gaps. Needs no torch.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import FormatError, Streamed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # as safetensors itself

DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
"""Name in a file -> name of the torch dtype, and its bytes."""
NAMES = {dtype: name for name, (dtype, _) in DTYPES.items()}
"""Name of the torch dtype -> name in a file."""


def encode_header(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """Return the beginning of a file, up to the bytes of its first tensor.

    Args:
        tensors: Name, torch dtype, shape and bytes of each tensor, in the order of their bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers insists on it
    at = 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned in a mapped file
    return len(text).to_bytes(8, "little") + text


def read_tensors(source: Path) -> dict[str, Streamed]:
    """Return the tensors of a file, or of a folder with shards, by their names; reads no data.

    Raises:
        FormatError: A header or the index is wrong, shards have a name twice, or are not what the
            index says.
    """
    if not source.is_dir():
        return {t.name: t.streamed(source) for t in _read_header(source)}
    index = source / INDEX
    if index.is_file():
        return _read_shards(source, _weight_map(index))
    single = source / SINGLE
    files = [single] if single.is_file() else sorted(source.glob("*.safetensors"))
    if len(files) == 1:
        return read_tensors(files[0])
    found = f"{len(files)} files, and no {INDEX}" if files else "no *.safetensors"
    raise _wrong(source, f"has {found}: give one file, or a folder with that index")


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file
    nbytes: int
    identity: tuple[int, ...]  # of the file when its header was read

    def streamed(self, path: Path) -> Streamed:
        return Streamed(self.dtype, self.shape, partial(_read_bytes, path, self))


def _read_bytes(path: Path, tensor: _StoredTensor, start: int, out: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        file.seek(tensor.start + start)
        at = 0
        while at < out.nbytes and (count := file.readinto(out[at:])):
            at += count
        if at < out.nbytes or _identity(os.fstat(file.fileno())) != tensor.identity:
            raise _wrong(path, f"changed while {tensor.name!r} was read: import it again")


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _read_shards(folder: Path, weight_map: Mapping[str, str]) -> dict[str, Streamed]:
    found: dict[str, Streamed] = {}
    place: dict[str, str] = {}
    for file in dict.fromkeys(weight_map.values()):
        path = folder / file
        if not path.is_file():
            raise _wrong(
                folder / INDEX, f"names {file}, which is not there: is the download whole?"
            )
        for tensor in _read_header(path):
            other = place.setdefault(tensor.name, file)
            if other != file:
                raise _wrong(folder, f"has {tensor.name!r} twice, in {other} and in {file}")
            found[tensor.name] = tensor.streamed(path)
    for name in sorted(weight_map.keys() | place.keys()):
        if weight_map.get(name) != place.get(name):
            where = f"in {place[name]}" if name in place else "in no file"
            said = f"in {weight_map[name]}" if name in weight_map else "nowhere"
            raise _wrong(folder, f"has {name!r} {where}, but the index says {said}")
    return {name: found[name] for name in weight_map}


def _weight_map(index: Path) -> dict[str, str]:
    with index.open("rb") as file:
        text = file.read(_MAX_HEADER_BYTES + 1)
    weight_map = _parse(index, text).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _wrong(index, "has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in {"", ".."}:
            raise _wrong(
                index, f"puts {name!r} into {file!r}, which is no name of a file beside it"
            )
    return weight_map


def _read_header(path: Path) -> list[_StoredTensor]:
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        length = int.from_bytes(file.read(8), "little")
        if stat.st_size < 8 or not 2 <= length <= min(stat.st_size - 8, _MAX_HEADER_BYTES):  # noqa: PLR2004 - the length, and `{}`
            raise _wrong(path, "is no safetensors file, or is cut short: its header is not there")
        header = _parse(path, file.read(length))
    header.pop("__metadata__", None)
    begin = 8 + length
    tensors = [
        _checked(path, name, fields, begin, _identity(stat)) for name, fields in header.items()
    ]
    at = begin
    for tensor in sorted(tensors, key=lambda t: (t.start, t.nbytes)):
        if tensor.start != at:
            wrong = "overlaps the tensor before it" if tensor.start < at else "follows a gap"
            raise _wrong(path, f"has a wrong header: {tensor.name!r} {wrong}")
        at += tensor.nbytes
    if at != stat.st_size:
        raise _wrong(path, f"has {stat.st_size} bytes, but its header says {at}: is it cut short?")
    return tensors


def _checked(
    path: Path, name: str, fields: object, begin: int, identity: tuple[int, ...]
) -> _StoredTensor:
    match fields:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, stop]}:
            if dtype not in DTYPES:
                raise _wrong(path, f"has {name!r} of dtype {dtype!r}, which Penstock does not know")
            torch_dtype, itemsize = DTYPES[dtype]
            numbers = [*shape, start, stop]
            if all(type(n) is int and n >= 0 for n in numbers):
                nbytes = math.prod(shape) * itemsize
                if stop - start == nbytes:
                    return _StoredTensor(
                        name, torch_dtype, tuple(shape), begin + start, nbytes, identity
                    )
        case _:
            pass
    raise _wrong(path, f"has a wrong header: {name!r} is {str(fields)[:200]}")


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise _wrong(path, f"has {twice!r} twice")
        return found

    try:
        found = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        msg = f"{path} has a header that is no JSON: {error}"
        raise FormatError(msg, [str(path)]) from error
    if not isinstance(found, dict):
        raise _wrong(path, "has a header that is no JSON object")
    return found


def _wrong(path: Path, reason: str) -> FormatError:
    return FormatError(f"{path} {reason}", [str(path)])

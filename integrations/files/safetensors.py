"""The safetensors format.

A file begins with the length of the header: 8 bytes, little-endian. The header is JSON with the
dtype, shape and byte range of each tensor. The bytes of all tensors follow without gaps. This
module needs no torch.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock import FormatError, Streamed
from penstock.integrations.files.source import SourceFile, read_soon, wrong

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_MAX_HEADER_BYTES = 100_000_000  # as safetensors itself

DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
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
        tensors: Name, torch dtype, shape and number of bytes of each tensor, in the order of their
            bytes.
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


def read_tensors(path: Path) -> dict[str, Streamed]:
    """Return the tensors of a file by name; reads no tensor data.

    Raises:
        FormatError: The header is wrong.
    """
    return {tensor.name: tensor.streamed() for tensor in _read_header(path)}


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file
    nbytes: int
    source: SourceFile

    def streamed(self) -> Streamed:
        return Streamed(self.dtype, self.shape, partial(_read_bytes, self))


def _read_bytes(tensor: _StoredTensor, start: int, out: memoryview) -> None:
    with tensor.source.path.open("rb", buffering=0) as file:
        file.seek(tensor.start + start)
        at = 0
        while at < out.nbytes and (count := file.readinto(out[at:])):
            at += count
        read_soon(file.fileno(), tensor.start + start + at, at)
    tensor.source.check(tensor.name)
    if at < out.nbytes:
        raise wrong(tensor.source.path, f"ended in the middle of {tensor.name!r}")


def _read_header(path: Path) -> list[_StoredTensor]:
    source = SourceFile.of(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):  # noqa: PLR2004 - the length, and `{}`
            raise wrong(path, "is not a safetensors file, or is cut short in its header")
        header = parse_object(path, file.read(length))
    header.pop("__metadata__", None)
    if not header:
        raise wrong(path, "has no tensors")
    begin = 8 + length
    tensors = [_checked(source, name, fields, begin) for name, fields in header.items()]
    at = begin
    for tensor in sorted(tensors, key=lambda t: (t.start, t.nbytes)):
        if tensor.start != at:
            fault = "overlaps the tensor before it" if tensor.start < at else "follows a gap"
            raise wrong(path, f"has a wrong header: {tensor.name!r} {fault}")
        at += tensor.nbytes
    if at != size:
        raise wrong(
            path,
            f"has {size} bytes, but its header says {at}: is it cut short, or does it have bytes "
            "after its last tensor?",
        )
    return tensors


def _checked(source: SourceFile, name: str, fields: object, begin: int) -> _StoredTensor:
    path = source.path
    match fields:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, stop]}:
            if dtype not in DTYPES:
                raise wrong(path, f"has {name!r} of dtype {dtype!r}, which Penstock does not know")
            torch_dtype, itemsize = DTYPES[dtype]
            numbers = [*shape, start, stop]
            if all(type(n) is int and n >= 0 for n in numbers):
                nbytes = math.prod(shape) * itemsize
                if stop - start == nbytes:
                    return _StoredTensor(
                        name, torch_dtype, tuple(shape), begin + start, nbytes, source
                    )
        case _:
            pass
    raise wrong(path, f"has a wrong header: {name!r} is {str(fields)[:200]}")


def parse_object(path: Path, text: bytes) -> dict[str, Any]:
    """Parse `text` of the file `path` as a JSON object without duplicate names.

    Raises:
        FormatError: The text is not a JSON object, or has duplicate names.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            twice = next(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)
            raise wrong(path, f"has {twice!r} twice")
        return record

    try:
        content = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        msg = f"{path} holds text that is not JSON: {error}"
        raise FormatError(msg, [str(path)]) from error
    if not isinstance(content, dict):
        raise wrong(path, "holds JSON that is not an object")
    return content

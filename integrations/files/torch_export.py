"""Writes a checkpoint, piece by piece, as a file that `torch.load(weights_only=True)` reads.

The file is a zip archive. Its `data.pkl` has the tree, in which each tensor names the record with
its bytes. `torch.save` itself needs all tensors in memory.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock import Streamed, UnsupportedStateError
from penstock.integrations.files.options import ExportReport
from penstock.integrations.files.output import PIECE_BYTES, begin_write_back, published, read_ahead
from penstock.integrations.files.tree_export import (
    Written,
    dtype_of,
    empty_like,
    stream_tree,
    streams_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from penstock import Checkpoint
    from penstock.integrations.files.options import ExportOptions

_ALIGNMENT = 64  # of a tensor's bytes, as in torch, so that files can be mapped
_HEADER_BYTES = 30  # of a record in a zip archive, before its name
_ZIP64_BYTES = 20  # of the extra field that `zipfile` adds to a record of any size


def export(view: Checkpoint, options: ExportOptions) -> ExportReport:
    """Write the selected tree; see `export_checkpoint`.

    If the tree's only entry is a dict, the file holds that dict itself.
    """
    tree = stream_tree(view, options)
    inner = next(iter(tree.values())) if len(tree) == 1 else None
    tensors = streams_of(tree)
    written = Written(tensors, options.progress)
    with published(options.out, is_folder=False, overwrite=options.overwrite) as partial_path:
        pickled, records = _pickled(inner if isinstance(inner, dict) else tree)
        _refuse_unsafe(pickled, view.step)
        _write(partial_path, pickled, records, written)
    written.end()
    return ExportReport(
        view.step, str(options.out), (options.out.name,), len(tensors), written.total, {}
    )


@dataclass(frozen=True, slots=True)
class _StorageRecord:
    """The record of a tensor's bytes, for the pickle."""

    kind: type
    key: str
    numel: int


class _TensorRecord(NamedTuple):
    tensor: Streamed
    nbytes: int


class _Pickler(pickle.Pickler):
    """Pickles as `torch.save` does, with a record for each streamed tensor."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.records: list[_TensorRecord] = []

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _StorageRecord):
            return "storage", value.kind, value.key, "cpu", value.numel
        return None

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor:  # a part of a tensor subclass, which is in memory
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            read = partial(_copy, data.data)
            value = Streamed(str(value.dtype).removeprefix("torch."), value.shape, read)
        if not isinstance(value, Streamed):
            return NotImplemented
        # As torch reduces an empty tensor of the dtype, but with this record and shape.
        dtype, meta = dtype_of(value), empty_like(value)
        rebuild, arguments = torch.empty(0, dtype=dtype).__reduce_ex__(2)  # type: ignore[no-untyped-call]  # torch has no type for it
        storage, _, _, _, *rest = arguments
        if isinstance(storage, torch.UntypedStorage):
            kind, numel = torch.UntypedStorage, meta.nbytes
        else:
            kind, numel = vars(torch)[storage._pickle_storage_type()], meta.numel()  # noqa: SLF001 - the name of the class in the file
        self.records.append(_TensorRecord(value, meta.nbytes))
        record = _StorageRecord(kind, str(len(self.records) - 1), numel)
        return rebuild, (record, 0, tuple(meta.shape), meta.stride(), *rest)


def _copy(data: memoryview, start: int, out: memoryview) -> None:
    out[:] = data[start : start + out.nbytes]


def _pickled(tree: object) -> tuple[bytes, list[_TensorRecord]]:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(tree)
    return buffer.getvalue(), pickler.records


def _refuse_unsafe(pickled: bytes, step: int) -> None:
    """Refuse a tree that `weights_only` would not load, before its tensors are written.

    Raises:
        UnsupportedStateError: The tree has values of other classes; the error names them.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        _write_frame(archive, pickled)
    buffer.seek(0)
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if refused:
        msg = (
            f"step {step} has values of {', '.join(sorted(refused))}, which "
            "`torch.load(weights_only=True)` would refuse: leave them out with exclude (--exclude)"
        )
        raise UnsupportedStateError(msg)


def _write(path: Path, pickled: bytes, records: list[_TensorRecord], written: Written) -> None:
    reads = ((tensor.read, nbytes) for tensor, nbytes in records)
    with (
        path.open("xb") as file,
        zipfile.ZipFile(file, "w") as archive,
        closing(read_ahead(reads)) as pieces,
    ):
        _write_frame(archive, pickled)
        for key, (_, nbytes) in enumerate(records):
            info = zipfile.ZipInfo(f"archive/data/{key}")
            begin = file.tell() + _HEADER_BYTES + len(info.filename) + 4 + _ZIP64_BYTES
            padding = -begin % _ALIGNMENT
            info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            with archive.open(info, "w", force_zip64=True) as record:
                for _ in range(0, nbytes, PIECE_BYTES):
                    piece = next(pieces)
                    start = file.tell()
                    record.write(piece)
                    begin_write_back(file.fileno(), start, file.tell())
                    written.add(piece.nbytes)


def _write_frame(archive: zipfile.ZipFile, pickled: bytes) -> None:
    """Write everything except the bytes of tensors, as `torch.save` does."""
    for name, data in {
        "data.pkl": pickled,
        ".format_version": b"1",
        ".storage_alignment": str(_ALIGNMENT).encode(),
        "byteorder": sys.byteorder.encode(),
        "version": b"3\n",
    }.items():
        archive.writestr(zipfile.ZipInfo(f"archive/{name}"), data)

"""Writes a checkpoint as a folder of `torch.distributed.checkpoint`, piece by piece."""

from __future__ import annotations

import itertools
import math
import mmap
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future
from torch.utils._pytree import tree_map_only

from penstock import PenstockError, StorageError, Streamed
from penstock.integrations.files.options import ExportReport
from penstock.integrations.files.output import PIECE_BYTES, begin_write_back, published
from penstock.integrations.files.tree_export import Written, dtype_of, empty_like, stream_tree

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator, Sequence

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult

    from penstock import Checkpoint
    from penstock.integrations.files.options import ExportOptions

_FILE_BYTES = 32 << 20


def export(view: Checkpoint, options: ExportOptions) -> ExportReport:
    """Write the selected tree; see `export_checkpoint`."""
    tree = stream_tree(view, options)
    planner = _StreamPlanner()
    stand_ins = planner.stand_ins(tree)
    planner.written = written = Written(planner.tensors, options.progress)
    with (
        published(options.out, is_folder=True, overwrite=options.overwrite) as partial,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", UserWarning)  # DCP warns about a single process
        # Without the copies ahead that DCP makes with CUDA. `published` syncs all files at the end.
        writer = _BatchWriter(partial, per_thread_copy_ahead=0, sync_files=False)
        try:
            save(stand_ins, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:
            raise _cause(error) from error
        files = tuple(sorted(path.name for path in partial.iterdir()))
    written.end()
    count = len(planner.tensors)
    return ExportReport(view.step, str(options.out), files, count, written.total, {})


def _cause(error: CheckpointException) -> BaseException:
    """Return the error of the failed chunk, which DCP hides in its own error.

    DCP fails again when it closes its file after a failed write.
    """
    failed, _ = error.failures[0]
    cause: BaseException | None = failed
    while cause is not None:
        if isinstance(cause, OSError | PenstockError) or not isinstance(cause, Exception):
            return cause
        cause = cause.__context__
    return StorageError(f"torch.distributed.checkpoint failed to write the files: {failed}")


class _StreamPlanner(DefaultSavePlanner):
    """Plans large tensors as several chunks, and reads each chunk when it is written."""

    written: Written

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[int, tuple[torch.Tensor, Streamed]] = {}  # by the stand-in, kept alive
        self._memory = memoryview(b"")

    @property
    def tensors(self) -> list[Streamed]:
        """The written tensors, once for each name, since DCP has no ties."""
        return [tensor for _, tensor in self._streams.values()]

    def stand_ins(self, tree: Any) -> Any:
        """Return the tree with meta tensors, which are enough for DCP's plan."""
        if isinstance(tree, Streamed):
            meta = empty_like(tree)
            self._streams[id(meta)] = meta, tree
            return meta
        if isinstance(tree, dict):
            return {key: self.stand_ins(value) for key, value in tree.items()}
        if type(tree) is list:
            return list(map(self.stand_ins, tree))
        if isinstance(tree, tuple):  # DCP pickles it as a whole
            return tree_map_only(Streamed, _in_memory, tree)
        return tree

    def begin_file(self, size_bytes: int) -> None:
        """Map memory for the chunks of a file.

        The C library would keep the memory after its use: in some exports its heap grew to 80 % of
        the model.
        """
        self._memory = memoryview(mmap.mmap(-1, size_bytes + 1))  # a map of no bytes is an error

    def create_local_plan(self) -> SavePlan:
        """Return DCP's plan, with the tensors cut into chunks."""
        plan = super().create_local_plan()
        items = [piece for item in plan.items for piece in self._pieces(item)]
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        tensor = self._stream(write_item)
        if tensor is None or write_item.tensor_data is None:
            return super().resolve_data(write_item)
        chunk = write_item.tensor_data.chunk
        strides = empty_like(tensor).stride()
        first = sum(o * s for o, s in zip(chunk.offsets, strides, strict=True))
        data = self._allocate(chunk.sizes, dtype_of(tensor))
        _read(tensor, first, data)
        self.written.add(data.nbytes)
        return data

    def _allocate(self, sizes: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(sizes) * dtype.itemsize
        if not size:
            return torch.empty(sizes, dtype=dtype)
        memory, self._memory = self._memory[:size], self._memory[_aligned(size) :]
        return torch.frombuffer(memory, dtype=dtype).reshape(sizes)

    def _stream(self, item: WriteItem) -> Streamed | None:
        stream = self._streams.get(id(self.state_dict[item.index.fqn]))
        return None if stream is None else stream[1]

    def _pieces(self, item: WriteItem) -> Iterator[WriteItem]:
        tensor, data = self._stream(item), item.tensor_data
        if tensor is None or data is None:
            yield item
            return
        for offsets, sizes in _rectangles(tuple(tensor.shape), dtype_of(tensor).itemsize):
            offset, size = torch.Size(offsets), torch.Size(sizes)
            part = TensorWriteData(ChunkStorageMetadata(offset, size), data.properties, data.size)
            index = MetadataIndex(item.index.fqn, offset)
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=part)


class _BatchWriter(FileSystemWriter):
    """Writes many files, because DCP keeps a file's tensors in memory until it is written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the chunks of a plan in batches, one file for each."""
        assert isinstance(planner, _StreamPlanner)
        results: list[WriteResult] = []
        for number, (items, size_bytes) in enumerate(_batches(plan.items)):
            planner.begin_file(size_bytes)
            prefix = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            part = replace(plan, items=items, storage_data=prefix)
            written = super().write_data(part, planner).wait()
            for name in {result.storage_data.relative_path for result in written}:
                with Path(self.path, name).open("rb") as file:
                    begin_write_back(file.fileno())
            results += written
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _in_memory(tensor: Streamed) -> torch.Tensor:
    data = torch.empty(tensor.shape, dtype=dtype_of(tensor))
    _read(tensor, 0, data)
    return data


def _read(tensor: Streamed, first: int, data: torch.Tensor) -> None:
    if data.numel():
        out = data.reshape(-1).view(torch.uint8).numpy().data
        tensor.read(first * data.itemsize, out)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // 64) * 64


def _batches(items: Sequence[WriteItem]) -> Iterator[tuple[list[WriteItem], int]]:
    """Yield the chunks of each file, and the bytes of memory that they need together."""
    batch: list[WriteItem] = []
    filled = 0
    for item in items:
        size = 0
        if item.tensor_data is not None:
            chunk, properties = item.tensor_data.chunk, item.tensor_data.properties
            size = _aligned(math.prod(chunk.sizes) * properties.dtype.itemsize)
        if batch and filled + size > _FILE_BYTES:
            yield batch, filled
            batch, filled = [], 0
        batch.append(item)
        filled += size
    if batch:
        yield batch, filled


def _rectangles(
    shape: tuple[int, ...], itemsize: int
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yield offsets and sizes of parts of at most `PIECE_BYTES`, each contiguous in the tensor."""
    if math.prod(shape) * itemsize <= PIECE_BYTES:
        yield (0,) * len(shape), shape
        return
    cut = 0  # the dimension that is cut; earlier dimensions are split into single indices
    while itemsize * math.prod(shape[cut + 1 :]) > PIECE_BYTES:
        cut += 1
    rest = shape[cut + 1 :]
    rows = PIECE_BYTES // (itemsize * math.prod(rest))
    for index in itertools.product(*map(range, shape[:cut])):
        for row in range(0, shape[cut], rows):
            sizes = (*(1 for _ in index), min(rows, shape[cut] - row), *rest)
            yield (*index, row, *(0 for _ in rest)), sizes

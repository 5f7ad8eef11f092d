"""Writes safetensors from a checkpoint, piece by piece, in Hugging Face's layout."""

from __future__ import annotations

import json
import math
import re
import shutil
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from penstock import Progress, Rename, Selection, SelectionError, UnsupportedStateError
from penstock.integrations.files.hugging_face import ADAPTER, CONFIG, SUFFIX, index_of
from penstock.integrations.files.options import ExportReport, is_cast
from penstock.integrations.files.output import (
    COPIED,
    PIECE_BYTES,
    begin_write_back,
    published,
    read_ahead,
)
from penstock.integrations.files.safetensors import DTYPES, NAMES, encode_header, parse_object

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock import Checkpoint
    from penstock.integrations.files.options import ExportOptions


@dataclass(frozen=True, slots=True)
class _ExportedTensor:
    name: str
    path: str  # shown, in the checkpoint
    stored: str  # dtype in the checkpoint
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return DTYPES[NAMES[self.dtype]][1]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def stored_nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[NAMES[self.stored]][1]


def export(view: Checkpoint, options: ExportOptions) -> ExportReport:
    """Write the selected tensors of a checkpoint; see `export_checkpoint`."""
    tensors, tied = _chosen(view, options)
    total = sum(tensor.nbytes for tensor in tensors)
    writer = _TensorFiles(view, options.progress, total)
    with published(
        options.out, is_folder=not options.is_file, overwrite=options.overwrite
    ) as partial:
        if options.is_file:
            writer.write(partial, tensors)
            files = [options.out.name]
        else:
            # PEFT looks for one file.
            shards = _shards(tensors, total if options.is_adapter else options.shard_bytes)
            stem = ADAPTER if options.is_adapter else "model"
            files = _write_folder(partial, stem, shards, writer)
            files += _copy_companions(options.config_from, partial)
            if options.cast and CONFIG in files:
                _set_dtype(partial / CONFIG, options.cast)
    options.progress(Progress(total, total, "done"))
    return ExportReport(view.step, str(options.out), tuple(files), len(tensors), total, tied)


def _write_folder(
    folder: Path, stem: str, shards: Sequence[Sequence[_ExportedTensor]], writer: _TensorFiles
) -> list[str]:
    count, single = len(shards), f"{stem}{SUFFIX}"
    if count == 1:
        writer.write(folder / single, shards[0])
        return [single]
    names = [f"{stem}-{n + 1:05d}-of-{count:05d}{SUFFIX}" for n in range(count)]
    weight_map: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        writer.write(folder / name, shard)
        weight_map |= dict.fromkeys((tensor.name for tensor in shard), name)
    index = {"metadata": {"total_size": writer.total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2) + "\n"
    (folder / index_of(single)).write_text(text, encoding="utf-8")
    return [*names, index_of(single)]


def _copy_companions(source: Path | None, folder: Path) -> list[str]:
    copied = []
    for path in [] if source is None else sorted(source.iterdir()):
        is_index = path.name.endswith(".index.json")
        if path.name.endswith(COPIED) and not is_index and path.is_file():
            shutil.copyfile(path, folder / path.name)
            copied.append(path.name)
    return copied


def _set_dtype(config: Path, dtype: str) -> None:
    """Replace the dtype in a `config.json`, since `from_pretrained` would convert back to it."""
    content = parse_object(config, config.read_bytes())
    named = {key: dtype for key in ("dtype", "torch_dtype") if key in content}
    text = json.dumps(content | named, indent=2) + "\n"
    config.write_text(text, encoding="utf-8")


def _chosen(
    view: Checkpoint, options: ExportOptions
) -> tuple[list[_ExportedTensor], dict[str, str]]:
    """Return the tensors to write, and each tied name that is left out with its owner."""
    specs = dict(view.specs())
    paths = [spec.path for spec in specs.values()]
    include = options.include
    if include is None and any(path[0] == "model" for path in paths):
        include = "model/**"
    selection = Selection(include, options.exclude)
    selection.check_used(paths)
    chosen = {shown: spec for shown, spec in specs.items() if selection.selects(spec.path)}
    if not chosen:
        msg = f"nothing of step {view.step} is selected"
        raise SelectionError(msg)
    values = [shown for shown, spec in chosen.items() if spec.kind == "value"]
    if values:
        msg = (
            f"safetensors hold tensors only, but {', '.join(values[:5])} "
            f"({len(values)} in all) are plain values: leave them out with exclude (--exclude)"
        )
        raise UnsupportedStateError(msg)
    moved = Rename(options.rename).apply(spec.path for spec in chosen.values())
    names = _names(moved, is_adapter=options.is_adapter)
    first: dict[str, str] = {}  # shown path of the stored bytes -> their first name
    tied: dict[str, str] = {}
    tensors = []
    for shown, spec in chosen.items():
        name = names[spec.path]
        owner = first.setdefault(spec.same_as or shown, name)
        if owner != name and not options.keep_tied:
            tied[name] = owner
            continue
        dtype = options.cast if options.cast and is_cast(spec.dtype, spec.shape) else spec.dtype
        if not {dtype, spec.dtype} <= NAMES.keys():
            msg = f"{shown} is of dtype {spec.dtype}, which safetensors cannot hold: leave it out"
            raise UnsupportedStateError(msg)
        tensors.append(_ExportedTensor(name, shown, spec.dtype, dtype, spec.shape))
    return tensors, tied


def _names(
    moved: dict[tuple[str, ...], tuple[str, ...]], *, is_adapter: bool
) -> dict[tuple[str, ...], str]:
    """Return the name of each tensor: its path joined by dots, without a common first key."""
    tops = {path[:1] for path in moved.values()}
    skip = 1 if len(tops) == 1 and all(len(path) > 1 for path in moved.values()) else 0
    names: dict[tuple[str, ...], str] = {}
    path_of: dict[str, tuple[str, ...]] = {"__metadata__": ()}  # the format reserves it
    for old, new in moved.items():
        name = ".".join(new[skip:])
        if is_adapter:
            name = _name_in_adapter(name)
        names[old] = name
        first = path_of.setdefault(name, old)
        if first != old:
            both = f"{'/'.join(first)!r} and {'/'.join(old)!r}" if first else repr("/".join(old))
            msg = f"{both} would be {name!r} in the file: choose another name with rename"
            raise SelectionError(msg)
    return names


def _name_in_adapter(name: str) -> str:
    """Return the name that PEFT's files use for a tensor of the live adapter `default`."""
    name, is_module = re.subn(r"\.modules_to_save\.default(?=\.)", "", name)
    if not is_module:  # else a module may have that name
        name = re.sub(r"\.default(\.[^.]+)?$", r"\1", name)
    return re.sub(r"(\.lora_magnitude_vector)\.weight$", r"\1", name)


def _shards(tensors: Sequence[_ExportedTensor], most_bytes: int) -> list[list[_ExportedTensor]]:
    shards: list[list[_ExportedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > most_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    return shards


class _TensorFiles:
    """Writes files in order, and reports their bytes."""

    def __init__(self, view: Checkpoint, progress: Callable[[Progress], None], total: int) -> None:
        self._view = view
        self._progress = progress
        self.total = total
        self._done = 0

    def write(self, path: Path, tensors: Sequence[_ExportedTensor]) -> None:
        # The widest elements first: then each tensor is aligned, as mapped files need.
        ordered = sorted(tensors, key=lambda tensor: -tensor.itemsize)
        header = encode_header((t.name, t.dtype, t.shape, t.nbytes) for t in ordered)
        reads = ((partial(self._read, t.path), t.stored_nbytes) for t in ordered)
        with path.open("xb") as file, closing(read_ahead(reads)) as pieces:
            file.write(header)
            for tensor in ordered:
                for _ in range(0, tensor.stored_nbytes, PIECE_BYTES):
                    piece = next(pieces)
                    data = piece if tensor.dtype == tensor.stored else _cast(piece, tensor)
                    start = file.tell()
                    self._done += file.write(data)
                    begin_write_back(file.fileno(), start, file.tell())
                    self._progress(Progress(self._done, self.total, "write"))

    def _read(self, path: str, start: int, out: memoryview) -> None:
        self._view.read_into(path, out, start=start)


def _cast(piece: memoryview, tensor: _ExportedTensor) -> memoryview:
    # Only a cast needs torch.
    import torch  # noqa: PLC0415

    from penstock.integrations.files.tree_export import checked_cast  # noqa: PLC0415

    converted = checked_cast(piece, tensor.stored, tensor.dtype, tensor.path)
    return converted.view(torch.uint8).numpy().data

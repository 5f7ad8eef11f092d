"""Exports a checkpoint to files of other tools."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import Checkpoint, Checkpointer, ConfigError
from penstock.integrations.files.hugging_face import ADAPTER_CONFIG, CONFIG
from penstock.integrations.files.options import FLOATS, ExportOptions, ExportReport, guarded
from penstock.integrations.files.runs import open_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from penstock import Progress

FORMATS = ("safetensors", "torch", "dcp")
SHARD_BYTES = 5 * 10**9
"""The most bytes of tensors in one file, Hugging Face's default."""


def export_checkpoint(  # noqa: PLR0913 - options, each by name
    source: str | os.PathLike[str] | Checkpointer | Checkpoint,
    out: str | os.PathLike[str],
    *,
    to: str,
    step: int | str = "latest",
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    cast: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    keep_tied: bool = False,
    config_from: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> ExportReport:
    """Write a checkpoint, or a part of it, as files of another tool.

    `out` appears only when it is complete and durable. Every checksum is verified. Tensors are
    written piece by piece, so memory does not grow with the model.

    Args:
        source: The run, or a checkpoint from `Checkpointer.open`, for which `step` is ignored.
        out: The file or folder to write, on this machine.
        to: `"safetensors"`: a folder in Hugging Face's layout, or one file if `out` ends in
            `.safetensors`. `"torch"`: one file of `torch.save`. `"dcp"`: a folder of
            `torch.distributed.checkpoint`.
        step: A step, or `"latest"`.
        include: Globs of paths to export; default: everything; for safetensors only `model`, if the
            checkpoint has it.
        exclude: Globs of paths to leave out.
        rename: Stored prefix -> prefix in the export, or a function of shown paths, as for
            `Checkpointer.restore`.
        cast: The dtype to convert floats to: `"bfloat16"`, `"float16"`, `"float32"` or `"float64"`.
            Tensors without dimensions, 8-bit floats and complex numbers are not converted.
        shard_bytes: The most tensor bytes in one file of a safetensors folder; a larger tensor gets
            its own file.
        keep_tied: Whether safetensors have a tied tensor under all of its names, not only the
            first.
        config_from: A folder with `config.json`. Its files that end in `.json`, `.txt`, `.model`,
            `.jinja` or `.tiktoken` are copied into the safetensors folder. With `cast`, the copied
            `config.json` gets that dtype, if it names one. With `adapter_config.json` instead, the
            export is a PEFT adapter: one file, `adapter_model.safetensors`, with `.default` removed
            from names.
        overwrite: Whether to replace a file, or a folder with an earlier export, at `out`.
        on_progress: As for `Checkpointer.restore`.

    Raises:
        ConfigError: An option is wrong, or `out` exists; nothing was written.
        CheckpointNotFoundError: There is no such step.
        SelectionError: A pattern matches nothing, or two objects would get one name.
        UnsupportedStateError: The format cannot hold a selected object; the error names it.
        DamagedError: Stored bytes are damaged.
        StorageError: `out` cannot be written.
    """
    options = ExportOptions(
        out=_local(out),
        include=include,
        exclude=exclude,
        rename=rename,
        cast=cast,
        shard_bytes=shard_bytes,
        keep_tied=keep_tied,
        config_from=None if config_from is None else Path(config_from),
        overwrite=overwrite,
        progress=guarded(on_progress),
    )
    _check(options, to)
    with _opened(source, step) as view:
        # Imported here, for one format only: safetensors need no torch.
        if to == "safetensors":
            from penstock.integrations.files.safetensors_export import export  # noqa: PLC0415
        elif to == "torch":
            from penstock.integrations.files.torch_export import export  # noqa: PLC0415
        else:
            from penstock.integrations.files.dcp_export import export  # noqa: PLC0415
        return export(view, options)


def _check(options: ExportOptions, to: str) -> None:
    if to not in FORMATS:
        msg = f"to={to!r} is not an export format: give one of {', '.join(FORMATS)}"
        raise ConfigError(msg)
    if options.cast not in (None, *FLOATS):
        msg = f"cast={options.cast!r} is not a dtype to convert to: give one of {', '.join(FLOATS)}"
        raise ConfigError(msg)
    if options.shard_bytes < 1:
        msg = f"shard_bytes is {options.shard_bytes}: give at least 1"
        raise ConfigError(msg)
    source = options.config_from
    if source is None:
        return
    if to != "safetensors" or options.is_file:
        msg = "config_from (--config-from) works only for a folder of safetensors"
        raise ConfigError(msg)
    if not any((source / name).is_file() for name in (CONFIG, ADAPTER_CONFIG)):
        msg = (
            f"{source} has no {CONFIG}, and no {ADAPTER_CONFIG}: give config_from "
            "(--config-from) the folder of the model or adapter"
        )
        raise ConfigError(msg)


def _local(out: str | os.PathLike[str]) -> Path:
    text = os.fspath(out)
    if "://" in text:
        msg = f"{text} is a URL: export to a path on this machine, and copy the files from there"
        raise ConfigError(msg)
    return Path(os.path.abspath(text))  # noqa: PTH100 - `resolve` would follow a link at `out`


@contextmanager
def _opened(
    source: str | os.PathLike[str] | Checkpointer | Checkpoint, step: int | str
) -> Iterator[Checkpoint]:
    if isinstance(source, Checkpoint):
        yield source
        return
    with open_run(source) as ckpt:
        yield ckpt.open(step)

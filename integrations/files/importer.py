"""Imports files of other tools as a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import ConfigError, Rename, Selection, StorageError, UnsupportedStateError
from penstock.integrations.files import hugging_face, safetensors
from penstock.integrations.files.optimizer_names import named
from penstock.integrations.files.runs import open_run
from penstock.integrations.files.trees import loaded, moved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock import Checkpointer, Progress, SaveReport

FORMATS = ("safetensors", "torch", "dcp", "deepspeed")


def import_checkpoint(  # noqa: PLR0913 - options, each by name
    source: str | os.PathLike[str],
    run: str | os.PathLike[str] | Checkpointer,
    *,
    step: int = 0,
    format: str = "auto",  # noqa: A002 - the word of the command line
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    names_from: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> SaveReport:
    """Save the contents of another tool's files as a checkpoint of a run, in one ordinary save.

    No code in a file runs. A failed import leaves the run unchanged.

    Args:
        source: The file or folder, on this machine. It may be a safetensors file; a folder in
            Hugging Face's layout, with safetensors or old `.bin` files; a PEFT adapter; a file of
            `torch.save`; a folder of `torch.distributed.checkpoint`; or a folder of DeepSpeed with
            ZeRO-1, 2 or 3.
        run: The run to save to, which is created if needed.
        step: The step to save as.
        format: `"safetensors"`, `"torch"`, `"dcp"`, `"deepspeed"`; `"auto"` detects it.
        include: Globs of paths to import; default: everything.
        exclude: Globs of paths to leave out.
        rename: Prefix of a path in the files -> prefix in the run, or a function of shown paths, as
            for `Checkpointer.restore`. Tensors of safetensors, and of a file with only tensors, are
            below `model`.
        names_from: The source of names for an optimizer's parameters, which `Optimizer.state_dict`
            numbers: the path of the model in a file of `torch.save` (`"state_dict"`), another such
            file with the model, a run with the model below `model`, or a JSON file with the names
            in the order of the numbers. An optimizer with several groups needs the JSON file.
        overwrite: Whether to replace the run's checkpoint of that step.
        on_progress: As for `Checkpointer.save`.

    Raises:
        ConfigError: An option is wrong, or `source` is in no known format.
        FormatError: A file is damaged, or does not fit the others; the error names it.
        UnsupportedStateError: A file holds something that cannot be imported without running code.
        SelectionError: A pattern matches nothing, or two objects would get one path.
        StepExistsError: The run has that step, or a later one.
        StorageError: A file cannot be read, or the run cannot be written.
    """
    path = Path(source)
    kind = _format_of(path) if format == "auto" else format
    if kind not in FORMATS:
        msg = f"format={format!r} is not an import format: give one of {', '.join(FORMATS)}"
        raise ConfigError(msg)
    try:
        tree = _read(path, kind)
        if names_from is not None:
            tree = named(tree, os.fspath(names_from), is_ordered=kind == "torch")
        tree = moved(tree, Selection(include, exclude), Rename(rename))
        with open_run(run) as ckpt:
            metadata = {"imported_from": path.name, "imported_format": kind}
            handle = ckpt.save(
                loaded(tree),
                step,
                mode="blocking",
                metadata=metadata,
                overwrite=overwrite,
                on_progress=on_progress,
            )
            return handle.result()
    except RecursionError as error:
        msg = f"{path} holds a tree that contains itself, or is nested too deeply to be imported"
        raise UnsupportedStateError(msg) from error
    except OSError as error:
        msg = f"{error.filename or path} cannot be read: {error.strerror or error}"
        raise StorageError(msg) from error


def _format_of(path: Path) -> str:
    if path.is_dir():
        if any(path.glob("*.metadata")):
            return "dcp"
        suffix = hugging_face.suffix_of(path)
        if suffix is not None:
            return "safetensors" if suffix == hugging_face.SUFFIX else "torch"
        if (path / "latest").is_file() or any(path.glob("*_model_states.pt")):
            return "deepspeed"
    elif path.is_file():
        with path.open("rb") as file:
            begin = file.read(9)
        # First: the length of a header may look like the magic number of a pickle or a zip archive.
        if path.suffix == ".safetensors" or begin[8:] == b"{":
            return "safetensors"
        if begin[:2] == b"PK" or begin[:1] == b"\x80" or path.suffix == ".pt":
            return "torch"
    else:
        msg = f"{path} does not exist, so nothing can be imported from it"
        raise ConfigError(msg)
    msg = f"the format of {path} is not recognized: give format= (--format {'|'.join(FORMATS)})"
    raise ConfigError(msg)


def _read(path: Path, kind: str) -> dict[str, Any]:
    # Imported here, for one format only.
    if kind == "safetensors":
        if path.is_dir():
            return hugging_face.read_folder(path, hugging_face.SUFFIX)
        return {"model": safetensors.read_tensors(path)}
    if kind == "torch":
        if path.is_dir():
            return hugging_face.read_folder(path, hugging_face.OLD_SUFFIX)
        from penstock.integrations.files.torch_import import read_file  # noqa: PLC0415

        return read_file(path)
    if kind == "dcp":
        from penstock.integrations.files.dcp_import import read_folder  # noqa: PLC0415
    else:
        from penstock.integrations.files.deepspeed_import import read_folder  # noqa: PLC0415
    return read_folder(path)

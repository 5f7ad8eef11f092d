"""Hugging Face folders: weights in one file or in shards with an index, and PEFT adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from penstock.integrations.files.safetensors import parse_object, read_tensors
from penstock.integrations.files.source import wrong

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

T = TypeVar("T")

SUFFIX = ".safetensors"
OLD_SUFFIX = ".bin"
"""Ending of the files of `torch.save` that Hugging Face wrote before safetensors."""
CONFIG = "config.json"
ADAPTER = "adapter_model"
ADAPTER_CONFIG = "adapter_config.json"
_MAX_JSON_BYTES = 100_000_000
_STEMS = {SUFFIX: "model", OLD_SUFFIX: "pytorch_model"}


def index_of(name: str) -> str:
    """Return the index's name for sharded weights that would otherwise be in the file `name`."""
    return f"{name}.index.json"


def suffix_of(folder: Path) -> str | None:
    """Return the file ending of the weights in a folder; None without weights."""
    for suffix in (SUFFIX, OLD_SUFFIX):
        if _single(folder, suffix) is not None or _index(folder, suffix).is_file():
            return suffix
    return SUFFIX if _files(folder, SUFFIX) else None


def read_folder(folder: Path, suffix: str) -> dict[str, Any]:
    """Return the weights of a folder under `model`, and the configuration if it is an adapter.

    Raises:
        FormatError: A file or the index is damaged, two shards have the same tensor, or the shards
            do not match the index.
        UnsupportedStateError: A file of `torch.save` has more than tensors.
    """
    read = read_tensors if suffix == SUFFIX else _read_old_tensors
    index = _index(folder, suffix)
    if index.is_file():
        return {"model": _read_shards(index, read)}
    single = _single(folder, suffix)
    files = [single] if single is not None else _files(folder, suffix)
    if len(files) != 1:
        content = f"{len(files)} files, and no {index.name}" if files else f"no *{suffix}"
        raise wrong(folder, f"has {content}: give one file, or a folder with {index.name}")
    tree: dict[str, Any] = {"model": read(files[0])}
    if files[0].stem == ADAPTER:
        config = folder / ADAPTER_CONFIG
        if not config.is_file():
            raise wrong(
                folder, f"has an adapter, but no {ADAPTER_CONFIG}: is the download complete?"
            )
        tree["adapter_config"] = _read_json(config)
    return tree


def _files(folder: Path, suffix: str) -> list[Path]:
    # Opening a pipe would block.
    return sorted(path for path in folder.glob(f"*{suffix}") if path.is_file())


def _index(folder: Path, suffix: str) -> Path:
    return folder / index_of(_STEMS[suffix] + suffix)


def _single(folder: Path, suffix: str) -> Path | None:
    paths = (folder / f"{stem}{suffix}" for stem in (_STEMS[suffix], ADAPTER))
    return next((path for path in paths if path.is_file()), None)


def _read_old_tensors(path: Path) -> Mapping[str, Any]:
    # Imported here: safetensors need no torch.
    from penstock.integrations.files.torch_import import read_tensors as read  # noqa: PLC0415

    return read(path)


def _read_json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return parse_object(path, file.read(_MAX_JSON_BYTES))


def _read_shards(index: Path, read: Callable[[Path], Mapping[str, T]]) -> dict[str, T]:
    weight_map = _weight_map(index)
    tensors: dict[str, T] = {}
    place: dict[str, str] = {}
    for file in dict.fromkeys(weight_map.values()):
        path = index.with_name(file)
        if not path.is_file():
            raise wrong(index, f"names {file}, which is not there: is the download complete?")
        for name, tensor in read(path).items():
            first_file = place.setdefault(name, file)
            if first_file != file:
                raise wrong(index.parent, f"has {name!r} twice, in {first_file} and in {file}")
            tensors[name] = tensor
    for name in sorted(weight_map.keys() | place.keys()):
        if weight_map.get(name) != place.get(name):
            where = f"in {place[name]}" if name in place else "in no file"
            indexed = f"in {weight_map[name]}" if name in weight_map else "nowhere"
            raise wrong(index.parent, f"has {name!r} {where}, but the index says {indexed}")
    return {name: tensors[name] for name in weight_map}


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise wrong(index, "has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in {"", ".", ".."} or {"/", "\0"} & set(file):
            raise wrong(index, f"puts {name!r} into {file!r}, which does not name a file beside it")
    return weight_map

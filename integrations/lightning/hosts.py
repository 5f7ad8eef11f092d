"""Lightning's classes, from whichever of its two packages the program has imported."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from penstock.integrations import missing_extra

_HOSTS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_loaded = [name for name in _HOSTS if name in sys.modules] or ["lightning.pytorch"]


def _base(modules: list[str], name: str) -> Any:
    """Return a subclass of each module's class `name`, which the trainers of all packages take."""
    return type(name, tuple(getattr(import_module(module), name) for module in modules), {})


try:
    Checkpoint: Any = _base([f"{name}.callbacks" for name in _loaded], "Checkpoint")
except ModuleNotFoundError as error:
    raise missing_extra(error, "lightning") from None
TorchCheckpointIO: Any = _base([f"{_HOSTS[name]}.plugins" for name in _loaded], "TorchCheckpointIO")
WRAPPERS = tuple(import_module(f"{name}.plugins.io").AsyncCheckpointIO for name in _loaded)


def filesystem_of(path: Any) -> Any:
    """Return the fsspec file system that Lightning itself uses for a path."""
    module = import_module(f"{_HOSTS[_loaded[0]]}.utilities.cloud_io")
    return module.get_filesystem(path)

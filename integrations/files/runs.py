"""The opening of the run that an export or import names."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Iterator

_STAGING = "64 MiB"
_CONFIGURATIONS = (".toml", ".yaml", ".yml", ".json")


@contextmanager
def open_run(run: str | os.PathLike[str] | Checkpointer) -> Iterator[Checkpointer]:
    """Yield the checkpointer of a run: a path, URL or configuration file, or an open checkpointer.

    Raises:
        ConfigError: The configuration is wrong.
        StorageError: The root cannot be used.
    """
    if isinstance(run, Checkpointer):
        yield run
        return
    text = os.fspath(run)
    if text.endswith(_CONFIGURATIONS) and "://" not in text and not Path(text).is_dir():
        with Checkpointer.from_config(text) as ckpt:
            yield ckpt
        return
    with Checkpointer(text, staging_bytes=_STAGING) as ckpt:
        yield ckpt

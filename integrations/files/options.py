"""The options and the report of an export, and code that all formats share."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.integrations.files.hugging_face import CONFIG, SUFFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from penstock import Progress

log = logging.getLogger("penstock")

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The dtypes that a cast converts, and converts to."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export.

    Attributes:
        step: The step that was exported.
        out: The file or folder.
        files: The names of its files, including copied files.
        tensors: The number of tensors that were written.
        bytes_written: The bytes of these tensors.
        tied: The name of each tied tensor that was left out, and the name that has its values.
    """

    step: int
    out: str
    files: tuple[str, ...]
    tensors: int
    bytes_written: int
    tied: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The options of an export; see `export_checkpoint`."""

    out: Path
    include: str | Iterable[str] | None
    exclude: str | Iterable[str] | None
    rename: Mapping[str, str] | Callable[[str], str] | None
    cast: str | None
    shard_bytes: int
    keep_tied: bool
    config_from: Path | None
    overwrite: bool
    progress: Callable[[Progress], None]

    @property
    def is_file(self) -> bool:
        """Whether safetensors go to one file."""
        return self.out.suffix == SUFFIX

    @property
    def is_adapter(self) -> bool:
        """Whether the export is an adapter of PEFT, whose configuration is copied."""
        return self.config_from is not None and not (self.config_from / CONFIG).is_file()


def is_cast(dtype: str, shape: Sequence[int]) -> bool:
    """Return whether a cast converts such tensors: floats with at least one dimension.

    A cast would round an optimizer's step count, which has no dimension.
    """
    return dtype in FLOATS and len(shape) > 0


def guarded(on_progress: Callable[[Progress], None] | None) -> Callable[[Progress], None]:
    """Return a function that calls `on_progress`, and logs its errors."""

    def report(progress: Progress) -> None:
        if on_progress is None:
            return
        try:
            on_progress(progress)
        except Exception:
            log.exception("on_progress failed")

    return report

"""The `penstock export` and `penstock import` commands."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from penstock import export_checkpoint, import_checkpoint
from penstock.core.catalog.catalog import Catalog
from penstock.core.cli.output.render import print_json, print_line, visible
from penstock.core.reporting.progress_bar import ProgressBar
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.storage.open import open_backend
from penstock.core.units import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence


def pairs(texts: Sequence[str] | None) -> dict[str, str] | None:
    """Parse `OLD=NEW` texts.

    Raises:
        typer.BadParameter: One has no `=`, or two have the same OLD.
    """
    found: dict[str, str] = {}
    for text in texts or ():
        old, equals, new = text.partition("=")
        if not equals or old in found:
            msg = f"--rename: {text!r} is not OLD=NEW, or renames the same again"
            raise typer.BadParameter(msg)
        found[old] = new
    return found or None


def run_export(url: str, out: str, step: int | None, *, as_json: bool, **options: Any) -> None:
    """Export a checkpoint, and print the result.

    Raises:
        PenstockError: The export failed; nothing is at `out`.
    """
    with (
        closing(open_backend(url, must_exist=True)) as backend,
        closing(ProgressBar("export", every_s=None, transient=True)) as bar,
    ):
        number = Catalog(backend).require_latest() if step is None else step
        checkpoint = Checkpoint.open(backend, number)
        report = export_checkpoint(checkpoint, out, **options, on_progress=bar)
    if as_json:
        print_json(asdict(report))
        return
    name = f"step {report.step}" + (", the latest," if step is None else "")
    print_line(
        f"{name} is exported to {visible(report.out)}: {counted(report.tensors, 'tensor')}, "
        f"{size_text(report.bytes_written)} in {counted(len(report.files), 'file')}",
        style="green",
    )
    for left_out, owner in report.tied.items():
        print_line(f"{visible(left_out)} is tied to {visible(owner)}, and left out (--keep-tied)")


def run_import(source: str, run: str, *, as_json: bool, **options: Any) -> None:
    """Import files as a checkpoint, and print the result.

    Raises:
        PenstockError: The import failed; the run is as it was.
    """
    with closing(ProgressBar("import", every_s=None, transient=True)) as bar:
        report = import_checkpoint(source, run, **options, on_progress=bar)
    if as_json:
        print_json({"source": source, **asdict(report)})
        return
    print_line(
        f"{visible(source)} is step {report.step} of {visible(run)}: "
        f"{counted(report.objects, 'object')}, {size_text(report.bytes_stored)} "
        f"in {report.seconds['total']:.1f} s",
        style="green",
    )

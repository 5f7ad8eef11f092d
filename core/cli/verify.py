"""`penstock verify`."""

from __future__ import annotations

import sys
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from penstock.core.catalog import Catalog
from penstock.core.checkpoint import Checkpoint
from penstock.core.cli.render import Column, print_json, print_line, print_table, size_text, visible
from penstock.core.opening import open_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.core.reports import Damage, VerifyReport

_LISTED = 5  # of the things with one cause
_COLUMNS = (Column("DAMAGED", flexible=True), Column("HOW", flexible=True, keep=1))


def run(url: str, *, step: int | None, deep: bool, as_json: bool) -> bool:
    """Verify one checkpoint and print what was found.

    Returns:
        Whether it is whole.

    Raises:
        PenstockError: There is no such checkpoint, or it cannot be looked at.
    """
    with closing(open_backend(url, must_exist=True, light=not deep)) as backend:
        if step is None:
            step = Catalog(backend).require_latest()
        with _progress(step) as progress:
            report = Checkpoint.open(backend, step).verify(deep=deep, progress=progress)
    if as_json:
        print_json(asdict(report))
    else:
        _print(report)
    return report.ok


@contextmanager
def _progress(step: int) -> Iterator[Callable[[int, int], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # noqa: PLC0415 - only where somebody watches
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn  # noqa: PLC0415

    columns = (BarColumn(None), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"step {step}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print(report: VerifyReport) -> None:
    looked = f"{report.objects} objects, {size_text(report.bytes_read)} read"
    if report.deep:
        looked = f"{report.frames} frames of {looked}"
    if report.ok:
        how = "whole" if report.deep else "whole as far as its manifest and sizes say"
        print_line(
            f"step {report.step} is {how}: {looked} in {report.seconds:.1f} s", style="green"
        )
        return
    print_table(_COLUMNS, list(_rows(report.damaged)))
    print_line(
        f"\nstep {report.step} is damaged: {len(report.damaged)} found; {looked}", style="bold red"
    )


def _rows(damaged: Sequence[Damage]) -> Iterator[list[str]]:
    """Things with the same cause together; of many, the first few and how many more."""
    by_cause: dict[str, list[str]] = {}
    for one in damaged:
        by_cause.setdefault(one.detail, []).append(one.what)
    for cause, names in by_cause.items():
        for name in names[:_LISTED]:
            yield [visible(name), visible(cause)]
        if len(names) > _LISTED:
            yield [f"... and {len(names) - _LISTED} more", visible(cause)]

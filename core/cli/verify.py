"""`penstock verify`."""

from __future__ import annotations

import os
import sys
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from penstock.core.catalog import Catalog
from penstock.core.checkpoint import Checkpoint
from penstock.core.cli.render import print_json, print_line, print_wrapped, size_text, visible
from penstock.core.errors import CheckpointNotFoundError, DamagedError
from penstock.core.loading import Loader
from penstock.core.opening import open_backend
from penstock.core.reports import Damage, VerifyReport
from penstock.core.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.core.abc import Backend


def run(url: str, *, step: int | None, every: bool, deep: bool, as_json: bool) -> bool:
    """Verify one checkpoint, or every one, and print what was found.

    Returns:
        Whether all of it is whole.

    Raises:
        PenstockError: There is no such checkpoint, or it cannot be looked at.
    """
    reports = []
    with closing(open_backend(url, must_exist=True, light=not deep)) as backend:
        with closing(Workers(min(4, os.cpu_count() or 1))) as workers:
            loader = Loader(backend, workers)
            for number in _steps(backend, step, every=every):
                try:
                    with _progress(number) as progress:
                        report = _verified(backend, number, loader, deep=deep, progress=progress)
                except CheckpointNotFoundError:
                    if not every:
                        raise
                    continue  # deleted since it was listed
                reports.append(report)
                if not as_json:
                    _print(report)
        ok = all(report.ok for report in reports)
        if as_json:
            found = [asdict(report) for report in reports]
            print_json({"url": backend.url, "ok": ok, "reports": found})
        elif every:
            bad = sum(not report.ok for report in reports)
            print_line(f"{len(reports)} checkpoints verified, {bad} damaged")
    return ok


def _steps(backend: Backend, step: int | None, *, every: bool) -> Sequence[int]:
    if step is not None:
        return [step]
    steps = Catalog(backend).steps()
    if every:
        return steps
    if not steps:
        msg = f"no checkpoint under {backend.url}"
        raise CheckpointNotFoundError(msg)
    return steps[-1:]


def _verified(
    backend: Backend,
    step: int,
    loader: Loader,
    *,
    deep: bool,
    progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    try:
        checkpoint = Checkpoint.open(backend, step, loader=loader)
    except DamagedError as error:
        damaged = tuple(Damage(name, str(error)) for name in error.damaged or (f"step {step}",))
        return VerifyReport(step, False, damaged, 0, 0, 0, deep, 0.0)
    return checkpoint.verify(deep=deep, progress=progress)


@contextmanager
def _progress(step: int) -> Iterator[Callable[[int, int], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # noqa: PLC0415 - only where somebody watches
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
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
    # One cause may hit thousands of objects: it is said once, above all of them.
    by_cause: dict[str, list[str]] = {}
    for one in report.damaged:
        by_cause.setdefault(one.detail, []).append(one.what)
    for cause, names in by_cause.items():
        print_wrapped(visible(cause))
        for name in names:
            print_wrapped(visible(name), indent=4, style="red")
    print_line(
        f"step {report.step} is damaged: {len(report.damaged)} found; {looked}", style="bold red"
    )

"""`penstock verify`."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

from penstock.core.bars import ProgressBar
from penstock.core.catalog import Catalog
from penstock.core.checkpoint import Checkpoint
from penstock.core.cli.render import print_json, print_line, print_wrapped, visible
from penstock.core.errors import CheckpointNotFoundError, DamagedError
from penstock.core.loading import Loader
from penstock.core.opening import open_backend
from penstock.core.reports import Damage, VerifyReport
from penstock.core.sizes import size_text
from penstock.core.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc import Backend
    from penstock.core.reports import Progress


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
                bar = ProgressBar(f"step {number}", every_s=None, transient=True)
                try:
                    report = _verified(backend, number, loader, deep=deep, on_progress=bar)
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
    on_progress: Callable[[Progress], None],
) -> VerifyReport:
    try:
        checkpoint = Checkpoint.open(backend, step, loader=loader)
    except DamagedError as error:
        damaged = tuple(Damage(name, str(error)) for name in error.damaged or (f"step {step}",))
        return VerifyReport(step, False, damaged, 0, 0, 0, deep, 0.0)
    return checkpoint.verify(deep=deep, on_progress=on_progress)


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

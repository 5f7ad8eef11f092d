"""The `penstock report` command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.cli.output.render import print_json, print_line, visible
from penstock.core.cli.report.gather import gather
from penstock.core.cli.report.page import page_of, plotly_html
from penstock.core.errors import ConfigError, StorageError
from penstock.core.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(
    url: str,
    out: str,
    *,
    step: int | None,
    events: Sequence[str],
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write a page on a run.

    Raises:
        PenstockError: The run cannot be read, or has no checkpoint; plotly is not installed; or
            the page cannot be written. Then `out` is as it was.
    """
    place = Path(out)
    if place.exists() and not overwrite:
        msg = f"{out} is there already; --overwrite replaces it"
        raise ConfigError(msg)
    plotly_html()  # it is missing more often than anything else, and reading a run takes time
    facts = gather(url, step, events)
    _replace(place, page_of(facts))
    if as_json:
        steps = [one.step for one in facts.listed]
        print_json({"url": facts.url, "out": out, "step": facts.step, "steps": steps})
        return
    print_line(
        f"{visible(out)}: {counted(len(facts.listed), 'checkpoint')}, and the objects of step "
        f"{facts.step}",
        style="green",
    )


def _replace(out: Path, text: str) -> None:
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        msg = f"the page cannot be written to {out}: {error.strerror or error}"
        raise StorageError(msg) from error

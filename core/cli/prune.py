"""`penstock prune`."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

from penstock.core.catalog import Catalog
from penstock.core.cli.asking import ask
from penstock.core.cli.delete import data_bytes
from penstock.core.cli.render import print_json, print_line, visible
from penstock.core.opening import open_backend
from penstock.core.prune import GRACE_S
from penstock.core.sizes import size_text
from penstock.core.survey import survey_run, uids_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.prune import PruneReport

_SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def grace_seconds(text: str) -> float:
    """Seconds of `90s`, `30min`, `24h` or `2d`.

    Raises:
        ValueError: It is none of these.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None or match[2] not in _SECONDS:
        msg = f"--grace: {text!r} is not a time such as 90s, 30min, 24h or 2d"
        raise ValueError(msg)
    return float(match[1]) * _SECONDS[match[2]]


def run(url: str, *, grace_s: float, dry_run: bool, yes: bool, as_json: bool) -> bool:
    """Delete what nobody needs.

    Returns:
        Whether it could be told what that is.

    Raises:
        PenstockError: The run cannot be looked at.
    """
    with closing(open_backend(url, must_exist=True, light=True)) as backend:
        catalog = Catalog(backend)
        report = catalog.prune(grace_s=grace_s, dry_run=True)
        replaced = {uid for uid in uids_named(backend, report.superseded).values() if uid}
        before = data_bytes(backend, replaced)
        superseded_bytes = before
        if not dry_run and not report.refused:
            if report.uids and grace_s < GRACE_S:
                question = (
                    f"A save under way that has not written for {_time_text(grace_s)} would lose "
                    f"its data and fail. Prune {visible(backend.url)}"
                )
                ask(question, yes=yes)
            report = catalog.prune(grace_s=grace_s)
            superseded_bytes = before - data_bytes(backend, replaced)
        survey = survey_run(backend)
        young = sorted(survey.data.keys() - survey.needed - set(report.uids))
        found = {
            "url": backend.url,
            "grace_s": grace_s,
            **asdict(report),
            "superseded_bytes": superseded_bytes,
            "younger": young,
            "younger_bytes": data_bytes(backend, young),
        }
    if as_json:
        print_json(found)
    else:
        _print(report, superseded_bytes, grace_s)
        if young and not report.refused:
            size = size_text(found["younger_bytes"])
            print_line(
                f"left alone, since a save may be under way: {_counted(young, 'attempt')} younger "
                f"than {_time_text(grace_s)} ({size})"
            )
    return not report.refused


def _print(report: PruneReport, superseded_bytes: int, grace_s: float) -> None:
    if report.refused:
        print_line("nothing is deleted while a record cannot be read:", style="bold red")
        for problem in report.refused:
            print_line(f"  {visible(problem)}")
        print_line("delete that checkpoint, or bring its record back, and prune again")
        return
    if not report.uids and not report.superseded:
        print_line(f"nothing to prune: no leftovers older than {_time_text(grace_s)}")
        return
    for uid in report.uids:
        print_line(f"  data/{uid}")
    for name in report.superseded:
        print_line(f"  {name} (overwritten)")
    verb = "would be freed" if report.dry_run else "freed"
    size = size_text(report.size_bytes + superseded_bytes)
    what = []
    if report.uids:
        files = "1 file" if report.names == 1 else f"{report.names} files"
        what.append(f"{_counted(report.uids, 'attempt')} with {files}")
    if report.superseded:
        what.append(_counted(report.superseded, "overwritten generation"))
    print_line(f"{size} {verb}: {', '.join(what)}")


def _counted(things: Sequence[str], word: str) -> str:
    return f"{len(things)} {word}{'' if len(things) == 1 else 's'}"


def _time_text(seconds: float) -> str:
    for unit in ("d", "h", "min"):
        # 24 h is what everybody calls the default
        if seconds >= _SECONDS[unit] * (2 if unit == "d" else 1) and not seconds % _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:g} {unit}"
    return f"{seconds:g} s"

"""The run of all checks: in order, tier by tier, without a trace, and their output."""

from __future__ import annotations

import logging
import signal
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.catalog.prune import CLOCK_PREFIX
from penstock.core.cli.app import Json, Url, command, size_of
from penstock.core.cli.doctor.host import Check, check_folder, check_process, check_uring
from penstock.core.cli.doctor.store_checks import check_store
from penstock.core.cli.output.render import print_json, print_line
from penstock.core.cli.output.runs_on_disk import local_root, named_root, quiet, tiers_quiet
from penstock.core.config.plugin_choice import shown_url
from penstock.core.errors import ConfigError, PenstockError, StorageError, WrongPlaceError
from penstock.core.foreign import said
from penstock.core.storage.open import open_backend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import FrameType

    from penstock.core.abc import Backend

_STYLES = {"ok": "green", "info": "", "warn": "yellow", "fail": "bold red"}
_INDENT = 6


@command(
    "doctor",
    epilog="""\b
Examples:
  penstock doctor runs/gpt
  penstock doctor /nvme/new-run --no-probe
  penstock doctor runs/gpt --json |
    jq '.checks[] | select(.status != "ok")'
""",
)
def doctor(
    url: Url,
    *,
    probe: Annotated[
        bool,
        typer.Option("--probe/--no-probe", help="Measure how fast the store writes and reads."),
    ] = True,
    probe_size: Annotated[
        int,
        typer.Option(
            "--probe-size",
            metavar="SIZE",
            parser=size_of,
            help="The most to write for it.",
            show_default="256MiB",
        ),
    ] = 256 << 20,
    as_json: Json = False,
) -> bool:
    """Look at what this machine and this store can do for a run, and say what to change.

    The run need not exist yet, and nothing stays behind. Exits with 1 if a save would fail.
    """
    probe_bytes = probe_size if probe else 0
    checks = [check_uring()]
    shown = _shown_url(url)
    try:
        with _quiet_opening(), tiers_quiet(), closing(open_backend(url)) as backend:
            shown = backend.url
            checks += _check_backend(backend, probe_bytes)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - a backend may fail in any way: a finding
        found = str(error) if isinstance(error, PenstockError) else said(error)
        if len(checks) == 1:
            checks += check_process()
            checks.append(Check("open", "fail", found, "it cannot be used: mend this first"))
        else:
            checks.append(Check("close", "fail", found, "mend the backend"))
    ok = all(check.status != "fail" for check in checks)
    if as_json:
        print_json({"url": shown, "ok": ok, "checks": [asdict(check) for check in checks]})
    else:
        _print(shown, checks)
    return ok


def _shown_url(url: object) -> str:
    return shown_url(url) if isinstance(url, str) else "the backend of the configuration"


def _check_backend(backend: Backend, probe_bytes: int) -> list[Check]:
    if not backend.tiers:
        return [*_check_place(backend, probe_bytes), *check_process()]
    silent = {tier.name: _check_answer(tier.backend) for tier in backend.tiers}
    checks: list[Check] = []
    for number, tier in enumerate(backend.tiers):
        why = silent[tier.name]
        found = _check_place(tier.backend, probe_bytes) if why is None else [why]
        # A failed check of one tier is a warning where saves go on without that tier: any tier that
        # does not answer is passed over while another one answers; a tier that answers but fails
        # is not, unless it is a slower one.
        others = number > 0 if why is None else not all(silent.values())
        checks += [_as_of_tier(tier.name, check, number, others=others) for check in found]
    return [*checks, *check_process()]


def _check_answer(backend: Backend) -> Check | None:
    """Return the finding that a tier does not answer; None if it does, or if it is a folder.

    The checks of folders find a better reason.
    """
    advice = "see that it can be reached"
    try:
        backend.list(CLOCK_PREFIX)
    except WrongPlaceError as error:
        why, advice = str(error), "mount its file system"
    except StorageError as error:
        if named_root(backend) is not None:
            return None
        why = str(error)
    except Exception as error:  # noqa: BLE001 - a backend may fail in any way: a finding
        why = said(error)
    else:
        return None
    return Check("answer", "fail", why, advice)


def _as_of_tier(name: str, check: Check, number: int, *, others: bool) -> Check:
    status, advice = check.status, check.advice
    if others and status == "fail":
        meanwhile = "stay in faster tiers" if number else "go to the next tier"
        status, advice = "warn", f"{advice or 'mend it'}; until then saves {meanwhile}"
    return replace(check, name=f"{name}: {check.name}", status=status, advice=advice)


def _check_place(backend: Backend, probe_bytes: int) -> list[Check]:
    checks: list[Check] = []
    try:
        root = local_root(backend)
    except PenstockError:  # `check_store` meets the same error, and reports it
        root = None
    if root is not None:
        checks += check_folder(root, backend)
    with _without_traces(root):
        checks += check_store(backend, root, probe_bytes=probe_bytes)
    return checks


@contextmanager
def _without_traces(root: Path | None) -> Iterator[None]:
    """Remove the folders that the checks create, also after SIGTERM or SIGHUP.

    Python ends at these signals without running `finally`, so both raise SystemExit meanwhile.
    """
    missing = []
    if root is not None:
        missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    before = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for folder in missing:
            with suppress(OSError):  # it was never created, or another process put a file there
                folder.rmdir()
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _quiet_opening() -> AbstractContextManager[None]:
    """Silence the warning that io_uring is not used: a check reports it, with advice."""
    return quiet("penstock.core.storage.open", logging.ERROR)


def _print(url: str, checks: list[Check]) -> None:
    print_line(url)
    width = max(len(check.name) for check in checks)
    for check in checks:
        text = f"{check.status:<{_INDENT}}{check.name:<{width}}  {check.found}"
        print_line(text, hanging=_INDENT, style=_STYLES[check.status])
    advice = [check for check in checks if check.advice]
    if advice:
        print_line("")
        print_line("What to change:")
    for check in advice:
        print_line(f"- {check.name}: {check.advice}")
    bad = [check.name for check in checks if check.status == "fail"]
    if bad:
        print_line("")
        print_line(f"A save would fail: see {', '.join(bad)}.", style="bold red")

"""`penstock doctor`: runs the checks, cleans up behind them, prints what they found."""

from __future__ import annotations

import logging
import signal
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from penstock.core.blame import said
from penstock.core.cli.checks import Check, check_store
from penstock.core.cli.host_checks import check_folder, check_process, check_uring
from penstock.core.cli.places import local_root, named_root
from penstock.core.cli.render import print_json, print_line, print_wrapped, visible
from penstock.core.errors import ConfigError, PenstockError, StorageError
from penstock.core.opening import open_backend, shown_url
from penstock.core.prune import CLOCK_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import FrameType

    from penstock.core.abc import Backend

_STYLES = {"ok": "green", "info": "", "warn": "yellow", "fail": "bold red"}
_INDENT = 6


def run(url: str, *, probe_bytes: int, as_json: bool) -> bool:
    """Look at what can be done at `url`.

    Args:
        url: Of a run that may not exist yet.
        probe_bytes: How much to write to see how fast the store is; 0: nothing.
        as_json: For programs.

    Returns:
        Whether a save can be expected to work.

    Raises:
        ConfigError: The URL, or an option of the backend, is wrong.
    """
    checks = [check_uring()]
    shown = _asked(url)
    try:
        with _quiet_opening(), closing(open_backend(url)) as backend:
            shown = backend.url
            checks += _looked_at(backend, probe_bytes)
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


def _asked(url: object) -> str:
    return shown_url(url) if isinstance(url, str) else "the backend of the configuration"


def _looked_at(backend: Backend, probe_bytes: int) -> list[Check]:
    if not backend.tiers:
        return [*_looked_at_place(backend, probe_bytes), *check_process()]
    silent = {tier.name: _silence(tier.backend) for tier in backend.tiers}
    checks: list[Check] = []
    for number, tier in enumerate(backend.tiers):
        why = silent[tier.name]
        found = _looked_at_place(tier.backend, probe_bytes) if why is None else [_silent(why)]
        # A save passes over a tier that does not answer; one that fails otherwise only later ones.
        others = number > 0 if why is None else not all(silent.values())
        checks += [_of_tier(tier.name, check, number, others=others) for check in found]
    return [*checks, *check_process()]


def _silence(backend: Backend) -> str | None:
    """Why a tier does not answer; None: it does, or its folder has more to say."""
    try:
        backend.list(CLOCK_PREFIX)
    except StorageError as error:
        return None if named_root(backend) is not None else str(error)
    except Exception as error:  # noqa: BLE001 - a backend may fail in any way: a finding
        return said(error)
    return None


def _silent(why: str) -> Check:
    return Check("answer", "fail", why, "see that it can be reached")


def _of_tier(name: str, check: Check, number: int, *, others: bool) -> Check:
    status, advice = check.status, check.advice
    if others and status == "fail":
        meanwhile = "stay in faster tiers" if number else "go to the next tier"
        status, advice = "warn", f"{advice or 'mend it'}; until then saves {meanwhile}"
    return replace(check, name=f"{name}: {check.name}", status=status, advice=advice)


def _looked_at_place(backend: Backend, probe_bytes: int) -> list[Check]:
    checks: list[Check] = []
    try:
        root = local_root(backend)
    except PenstockError:  # the same is found again, and said, below
        root = None
    if root is not None:
        checks += check_folder(root)
    with _as_it_was(root):
        checks += check_store(backend, root, probe_bytes=probe_bytes)
    return checks


@contextmanager
def _as_it_was(root: Path | None) -> Iterator[None]:
    """Remove the folders that come into being meanwhile, also when we are told to end."""
    missing = []
    if root is not None:
        missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    before = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for folder in missing:
            with suppress(OSError):  # not made, or somebody has put something there
                folder.rmdir()
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _quiet_opening() -> Iterator[None]:
    """That io_uring is not used is one of the findings, and said there with what to do."""
    logger = logging.getLogger("penstock.core.opening")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _print(url: str, checks: list[Check]) -> None:
    print_wrapped(visible(url))
    width = max(len(check.name) for check in checks)
    for check in checks:
        text = f"{check.status:<{_INDENT}}{check.name:<{width}}  {visible(check.found)}"
        print_wrapped(text, hanging=_INDENT, style=_STYLES[check.status])
    advice = [check for check in checks if check.advice]
    if advice:
        print_line("\nWhat to change:")
    for check in advice:
        print_wrapped(visible(f"- {check.name}: {check.advice}"))
    bad = [check.name for check in checks if check.status == "fail"]
    if bad:
        print_wrapped(f"\nA save would fail: see {', '.join(bad)}.", style="bold red")

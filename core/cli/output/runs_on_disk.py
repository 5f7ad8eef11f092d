"""Finds the folders of runs on this machine, and silences loggers."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from penstock.core.format.records import COMMIT_PREFIX, DATA_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from penstock.core.abc import Backend

_DEPTH = 3
_PARTS = {COMMIT_PREFIX.rstrip("/"), DATA_PREFIX.rstrip("/")}
_FOLDERS = 2000  # the search serves a hint in a message, and must not take long

OPENING = "penstock.core.storage.open"
"""The logger that warns when a plain path is opened without io_uring."""


@contextmanager
def quiet(name: str, level: int) -> Iterator[None]:
    """Silence a logger below `level`, because its warnings do not help the command's user."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def tiers_quiet() -> AbstractContextManager[None]:
    """Silence the opening of tiers, for commands that print which tiers are unavailable and why."""
    return quiet("penstock.backends.tiered.backend", logging.CRITICAL)


def local_root(backend: Backend) -> Path | None:
    """Return the folder of a backend that keeps files on this machine; None for others."""
    root = named_root(backend)
    return root if root is not None and backend.capabilities.local else None


def named_root(backend: Backend) -> Path | None:
    """Return the folder that the backend's URL names, if any; no store is called.

    The folder may be on another machine.
    """
    scheme, _, path = backend.url.partition("://")
    ours = scheme in {backend.name, "file"}
    return Path(unquote(path)) if ours and path.startswith("/") else None


def same_place(one: Backend, other: Backend) -> bool:
    """Return whether two backends have the same run, judged by their URLs."""
    if one.url == other.url:
        return True
    roots = [named_root(backend) for backend in (one, other)]
    if roots[0] is None or roots[1] is None or roots[0].resolve() != roots[1].resolve():
        return False
    # Last, since a backend may write to the store to find its capabilities.
    return one.capabilities.local and other.capabilities.local


def runs_below(folder: Path) -> list[Path]:
    """Return the roots of runs at most three levels below `folder`, sorted.

    Does not search inside a run, and visits at most 2,000 folders. `folder` itself is not returned.
    """
    found: list[Path] = []
    for parent, names, _ in islice(os.walk(folder), _FOLDERS):
        place = Path(parent)
        if place != folder and (place / COMMIT_PREFIX).is_dir():
            found.append(place)
            names.clear()
        elif len(place.relative_to(folder).parts) == _DEPTH:
            names.clear()
    return sorted(found)


def run_around(folder: Path) -> Path | None:
    """Return the root of the run that contains `folder` (such as `commits`); None if none does."""
    return next(
        (
            parent
            for parent in folder.parents
            if folder.relative_to(parent).parts[0] in _PARTS and (parent / COMMIT_PREFIX).is_dir()
        ),
        None,
    )

"""Where runs are on this machine: their folders, and runs that lie below one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from penstock.core.manifest import COMMIT_PREFIX, DATA_PREFIX

if TYPE_CHECKING:
    from penstock.core.abc import Backend

_DEPTH = 3
_PARTS = {COMMIT_PREFIX.rstrip("/"), DATA_PREFIX.rstrip("/")}
_FOLDERS = 2000  # looked into at most: it is a hint, and must not take long


def local_root(backend: Backend) -> Path | None:
    """The folder of a backend that keeps files on this machine."""
    root = named_root(backend)
    return root if root is not None and backend.capabilities.local else None


def named_root(backend: Backend) -> Path | None:
    """The folder that a URL names, perhaps of another machine; asks nothing of the store."""
    scheme, _, path = backend.url.partition("://")
    return Path(unquote(path)) if scheme == backend.name and path.startswith("/") else None


def same_place(one: Backend, other: Backend) -> bool:
    """Whether both are the same run, as far as their URLs tell."""
    if one.url == other.url:
        return True
    roots = [named_root(backend) for backend in (one, other)]
    if roots[0] is None or roots[1] is None or roots[0].resolve() != roots[1].resolve():
        return False
    # Last, since it may be found out by writing.
    return one.capabilities.local and other.capabilities.local


def runs_below(folder: Path) -> list[Path]:
    """Roots of runs at most three levels below `folder`, which is none itself, sorted."""
    found: list[Path] = []
    level, looked = [folder], 0
    for _ in range(_DEPTH):
        deeper: list[Path] = []
        for parent in level:
            for child in _folders_in(parent):
                looked += 1
                if looked > _FOLDERS:
                    return sorted(found)
                (found if (child / COMMIT_PREFIX).is_dir() else deeper).append(child)
        level = deeper
    return sorted(found)


def run_around(folder: Path) -> Path | None:
    """Root of the run that `folder` lies in, if it is one of those that hold its parts."""
    return next(
        (
            parent
            for parent in folder.parents
            if folder.relative_to(parent).parts[0] in _PARTS and (parent / COMMIT_PREFIX).is_dir()
        ),
        None,
    )


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(e.path) for e in entries if e.is_dir(follow_symlinks=False))
    except OSError:  # not ours to read
        return []

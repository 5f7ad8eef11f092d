"""Lists the entry points of installed distributions, except those of the working directory.

Python looks for modules in the working directory where it runs `-c`, `-m` or a session, also once a
session has changed it. A run that was downloaded could contain a distribution, whose code would be
loaded as a plugin of every process that works in the run's folder.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import site
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_SEPARATORS = re.compile(r"[-_.]+")  # which are the same in names of distributions


def installed(group: str) -> list[EntryPoint]:
    """Return the entry points of a group; of a distribution that is found twice, the first."""
    found: dict[str, list[EntryPoint]] = {}
    for one in importlib.metadata.distributions(path=_search_path()):
        entries = [entry for entry in one.entry_points if entry.group == group]
        if entries:  # of most distributions nobody needs to know the name, which is slow to read
            found.setdefault(_SEPARATORS.sub("-", one.name or "").lower(), entries)
    return [entry for entries in found.values() for entry in entries]


def _search_path() -> list[str]:
    """Return `sys.path` without the working directory, unless it was put there on purpose."""
    here = {folder for folder in (_began_in, _working_directory()) if folder is not None}
    doubtful = {p for p in sys.path if not p or os.path.realpath(p) in here}
    if not doubtful:
        return sys.path
    meant = _folders_on_purpose()
    return [p for p in sys.path if p and (p not in doubtful or os.path.realpath(p) in meant)]


def _folders_on_purpose() -> set[str]:
    """Return the folders of PYTHONPATH, site-packages, their .pth files, and the running script."""
    named = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    known = {*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("purelib")}
    sites = [folder for folder in sys.path if folder in known]
    for folder in sites:
        for file in sorted(Path(folder).glob("*.pth")):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            named += [str(Path(folder, line.strip())) for line in lines if line.strip()]
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    if script is not None and getattr(main, "__spec__", None) is None:  # else it is `-m`
        named.append(str(Path(script).parent))
    return {os.path.realpath(folder) for folder in (*named, *sites)}


def _working_directory() -> str | None:
    try:
        return os.path.realpath(os.curdir, strict=True)
    except OSError:  # it was deleted
        return None


_began_in = _working_directory()

"""Finds installed entry points and modules, except those of the working directory.

With `-c`, `-m` or an interactive session, Python looks for modules in the working directory, even
after the session changes it. If that directory is a downloaded run, it could contain a
distribution, or a module with the name of one of Penstock's dependencies, and reading the run would
execute its code.

`penstock` imports this module at once, so it imports almost nothing that Python has not loaded yet.
"""

from __future__ import annotations

import os
import site
import sys
import threading
from contextlib import contextmanager
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from importlib.metadata import EntryPoint
    from types import ModuleType


def installed(group: str) -> list[EntryPoint]:
    """Return the entry points of a group, from the first copy of each distribution."""
    with installed_only():
        import importlib.metadata  # noqa: PLC0415 - 20 ms
        import re  # noqa: PLC0415 - importlib.metadata imports it too
    by_name: dict[str, list[EntryPoint]] = {}
    for distribution in importlib.metadata.distributions(path=_search_path()):
        entries = [entry for entry in distribution.entry_points if entry.group == group]
        if entries:  # names are slow to read, and most are not needed
            name = re.sub("[-_.]+", "-", distribution.name or "").lower()
            by_name.setdefault(name, entries)
    return [entry for entries in by_name.values() for entry in entries]


@contextmanager
def installed_only() -> Iterator[None]:
    """Let imports of this thread find modules only where distributions are installed.

    Penstock and its plugins import this way while they read a checkpoint. It does not affect
    imports of other threads, or modules that are already loaded.
    """
    outer = _thread.search_path
    _thread.search_path = _search_path()
    try:
        yield
    finally:
        _thread.search_path = outer


class _Thread(threading.local):
    search_path: Sequence[str] | None = None


_thread = _Thread()


_find_spec = vars(PathFinder)["find_spec"].__func__


def _find_installed(
    cls: type[PathFinder],
    fullname: str,
    path: Sequence[str] | None = None,
    target: ModuleType | None = None,
) -> ModuleSpec | None:
    """Find a module as Python's finder does; within `installed_only`, search only its folders.

    Changing `sys.path` instead would hide the user's modules from imports of other threads. A
    separate finder before Python's could not keep Python's finder from searching the working
    directory. Replacing Python's finder would hide it from packages that look for it in
    `sys.meta_path`, to insert a finder before it (typeguard, jaxtyping) or to replace it
    (importlib_metadata).
    """
    spec: ModuleSpec | None
    spec = _find_spec(cls, fullname, _thread.search_path if path is None else path, target)
    return spec


PathFinder.find_spec = classmethod(_find_installed)  # type: ignore[method-assign,assignment]  # mypy takes it for an instance's method


def _search_path() -> list[str]:
    """Return `sys.path` without the working directory, unless the user put it there on purpose."""
    here = {folder for folder in (_began_in, _working_directory()) if folder is not None}
    every: Sequence[object] = sys.path  # programs put paths of other types there
    path = [p for p in every if isinstance(p, str)]  # Python ignores others
    # Relative entries follow each change of the working directory.
    doubtful = {p for p in path if p[:1] != os.sep or os.path.realpath(p) in here}
    if not doubtful:
        return path
    meant = _folders_on_purpose()
    return [p for p in path if p and (p not in doubtful or os.path.realpath(p) in meant)]


def _folders_on_purpose() -> set[str]:
    """Return the folders that belong on the path even if the session was started in one of them.

    These are the folders of PYTHONPATH, site-packages, .pth files, Penstock and the script.
    """
    named = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    known = {*site.getsitepackages(), site.getusersitepackages()}
    sites = [folder for folder in sys.path if folder in known and os.path.isdir(folder)]  # noqa: PTH112
    for folder in sites:
        for file in sorted(name for name in os.listdir(folder) if name.endswith(".pth")):  # noqa: PTH208
            with open(os.path.join(folder, file), encoding="utf-8", errors="replace") as lines:  # noqa: PTH118, PTH123
                named += [os.path.join(folder, line.strip()) for line in lines if line.strip()]  # noqa: PTH118
    # All packages may be unpacked into one folder, with the program started there.
    named.append(__file__.rpartition(f"{os.sep}penstock{os.sep}")[0])
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    if script is not None and getattr(main, "__spec__", None) is None:  # else it is `-m`
        named.append(os.path.dirname(script))  # noqa: PTH120
    return {os.path.realpath(folder) for folder in (*named, *sites)}


def _working_directory() -> str | None:
    try:
        return os.path.realpath(os.curdir, strict=True)
    except OSError:  # it was deleted
        return None


_began_in = _working_directory()

"""What encoding and decoding of values share.

JSON's own types stand for themselves; everything else is `{"$": tag, ...}`. Reading never
imports a module because a checkpoint names it: classes (Enum, named tuple) must be loaded.
"""

from __future__ import annotations

import pathlib
import sys
from collections import Counter

TAG = "$"

FACTORIES: dict[str, type] = {
    t.__name__: t
    for t in (list, dict, set, frozenset, tuple, int, float, str, bool, bytes, complex, Counter)
}
PATHS: dict[str, type[pathlib.PurePath]] = {
    t.__name__: t
    for t in (
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
        pathlib.PosixPath,
        pathlib.WindowsPath,
    )
}
NUMPY_KINDS = frozenset("biufcmMSU")


def class_name(kind: type) -> str | None:
    """`module:qualified.name` of a class that can be found by it; None for any other."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    return name if loaded_class(name) is kind else None


def loaded_class(name: str) -> type | None:
    """Look a class up without importing anything, nor running a module's `__getattr__`."""
    module_name, _, qualname = name.partition(":")
    module = sys.modules.get(module_name)
    found: object = None if module is None else vars(module)
    for part in qualname.split("."):
        members = found if isinstance(found, dict) else getattr(found, "__dict__", {})
        found = members.get(part)
    return found if isinstance(found, type) else None

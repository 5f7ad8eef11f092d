"""The tags of encoded values, shared by encoding and decoding.

JSON's own types stand for themselves; everything else is `{"$": tag, ...}`. Decoding never imports
a module because a checkpoint names it: classes (Enum, named tuple) must be loaded already.
"""

from __future__ import annotations

import pathlib
from collections import Counter

from penstock.core.types import FACTORIES as CONTAINER_FACTORIES
from penstock.core.types import loaded_class

TAG = "$"

FACTORIES: dict[str, type] = {
    **CONTAINER_FACTORIES,
    "frozenset": frozenset,
    "Counter": Counter,
}
"""The factories of a defaultdict that is one value; one that is a container may have fewer."""
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
    """Return `module:qualified.name` of a class that can be found by it; None for other classes."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    return name if loaded_class(name) is kind else None

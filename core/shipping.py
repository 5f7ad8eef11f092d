"""Who ships the class of a plugin, for the messages of its errors."""

from __future__ import annotations

import importlib.metadata

_GROUPS = ("penstock.providers", "penstock.codecs", "penstock.backends")


def shipped_by(kind: type) -> str:
    """`module.Class`, and the distribution and version that it was installed with, if any.

    Looks through what is installed, which takes some ms: only for errors.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    target = f"{kind.__module__}:{kind.__qualname__}"
    for group in _GROUPS:
        for entry in importlib.metadata.entry_points(group=group):
            if entry.value == target and entry.dist is not None:
                return f"{name} of {entry.dist.name} {entry.dist.version}"
    return name

"""The tags of encoded values, shared by encoding and decoding.

JSON's own types stand for themselves; everything else is `{"$": tag, ...}`. Decoding never imports
a module because a checkpoint names it: classes (Enum, named tuple, dataclass) must be loaded
already.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import pathlib
from collections import Counter
from types import MemberDescriptorType, SimpleNamespace

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
NAMESPACES: dict[str, type[argparse.Namespace | SimpleNamespace]] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": SimpleNamespace,
}
NUMPY_KINDS = frozenset("biufcmMSU")


def class_name(kind: type) -> str | None:
    """Return `module:qualified.name` of a class that can be found by it; None for other classes."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    return name if loaded_class(name) is kind else None


def field_names(kind: type) -> tuple[str, ...] | None:
    """Return the fields of a dataclass that has no other content; None for any other class.

    No code of the class runs, since a checkpoint may name any class.
    """
    fields = inspect.getattr_static(kind, "__dataclass_fields__", None)
    # A class with a `__new__` of its own has more content, as a subclass of dict does.
    made = inspect.getattr_static(kind, "__new__", None)
    if type(fields) is not dict or made is not object.__dict__["__new__"]:
        return None
    names = tuple(field.name for field in dataclasses.fields(kind))
    slots = {
        name
        for base in kind.__mro__
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    }
    return names if slots <= {*names} else None

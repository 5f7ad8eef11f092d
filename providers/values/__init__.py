"""The provider of plain Python values, which are frozen to bytes when they are described.

`encode` and `decode` convert them to JSON and back exactly. Any other value is pickled if that is
allowed. Containers that hold objects are left to core.
"""

from __future__ import annotations

import datetime as dt
import enum
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.abc import (
    ByteSource,
    Node,
    Placement,
    StateObject,
    StateProvider,
    copy_bytes,
    ranks_of,
)
from penstock.core.errors import FormatError, UnsupportedStateError
from penstock.core.types import Kind, Region, Role, TensorSpec, show_path, with_article
from penstock.providers.children import leaves
from penstock.providers.values.decode import decode_value
from penstock.providers.values.encode import encode_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.abc import (
        DescribeContext,
        MemoryKey,
        PendingCopy,
        PlaceContext,
        StoredObject,
    )
    from penstock.core.types import ObjectPath

EXACT = 50
BASE = 30

_EXACT = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, bytearray,
        list, tuple, dict, set, frozenset, OrderedDict, Counter, defaultdict, deque,
        dt.date, dt.datetime, dt.time, dt.timedelta,
    }
)  # fmt: skip
_BASES = (enum.Enum, np.generic, pathlib.PurePath)
_TORCH = frozenset({"Size", "dtype", "device"})


class BytesSource(ByteSource):
    """The source of bytes that were frozen when their value was described."""

    __slots__ = ("_data", "_view", "device", "memory", "nbytes")
    memory: MemoryKey | None

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.nbytes = len(data)
        self.device = "cpu"
        self.memory = None

    @property
    def address(self) -> int | None:  # type: ignore[override]  # computed only when asked for
        """The address of the bytes; None if there are none."""
        if not self._data:
            return None
        return int(np.frombuffer(self._data, np.uint8).__array_interface__["data"][0])

    def view(self) -> memoryview | None:
        return memoryview(self._data) if self._data else None

    def copy_out(self, start: int, out: memoryview, /) -> PendingCopy | None:
        copy_bytes(out, memoryview(self._data)[start : start + out.nbytes])
        return None


class ValueProvider(StateProvider):
    """Stores plain data as one value, encoded before `save` returns: training may change it."""

    name = "value"
    forms = ("json", "pickle")

    def claims(self, kind: type, /) -> int | None:
        if kind in _EXACT or (kind.__module__ == "torch" and kind.__name__ in _TORCH):
            return EXACT
        named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
        return BASE if named_tuple or issubclass(kind, _BASES) else None

    def describe(
        self, value: object, path: ObjectPath, /, *, context: DescribeContext
    ) -> Iterator[StateObject | Node]:
        form = "json"
        try:
            data = encode_value(value, path)
        except UnsupportedStateError:
            if not context.allow_pickle:
                raise
            form, data = "pickle", _pickle(value, path)
        shape = (len(data),)
        yield StateObject(
            path, Kind.VALUE, TensorSpec("uint8", 1, shape), (Region((0,), shape),),
            Role.OTHER, form, BytesSource(data),
        )  # fmt: skip

    def place(self, value: object, path: ObjectPath, /, *, context: PlaceContext) -> Placement:
        stored = context.stored(path)
        if stored is not None and stored.kind is Kind.VALUE:
            new = context.value(path)
            return Placement(values=[path], finish=lambda: new)
        shown, here = show_path(path), type(value).__name__
        if stored is not None:
            problem = f"{shown} is stored as a tensor, but is {with_article(here)} in the template"
            return Placement(problems=[problem])
        if context.children(path):
            node = context.node(path)
            form = "dict" if node is None else node.form
            # Each rank may have stored some of its leaves separately.
            is_alike = form == here and ranks_of(node) is None
            built = context.rebuild(path) if is_alike else Placement()
            if len(built.values) == leaves(context.whole(path), path):
                return built
            problem = (
                f"{shown} is stored as {with_article(form)} of objects, but is a plain {here} in "
                "the template"
            )
            return Placement(problems=[problem])
        return Placement(missing=[path] if context.selected(path) else [])

    def rebuild(
        self, stored: StoredObject | Node, /, *, device: str | None, context: PlaceContext
    ) -> Placement:
        del device
        data = context.value_bytes(stored.path)
        if stored.form == "pickle":
            value = _unpickle(data, stored.path, allowed=context.allow_pickle)
        else:
            value = decode_value(data, stored.path)
        return Placement(values=[stored.path], finish=lambda: value)


def _pickle(value: object, path: ObjectPath) -> bytes:
    import pickle  # noqa: PLC0415 - no other path may lead to it

    try:
        return pickle.dumps(value, protocol=4)
    except Exception as error:  # pickling runs the objects' own code
        msg = (
            f"{show_path(path)} is not plain data, and cannot be pickled either: {error!r}. Save "
            "plain data of it, or leave it out"
        )
        raise UnsupportedStateError(msg) from error


def _unpickle(data: bytes, path: ObjectPath, *, allowed: bool) -> Any:
    if not allowed:
        msg = (
            f"{show_path(path)} was saved as a pickle, which can run any code: pass "
            "allow_pickle=True if you trust this checkpoint, or exclude it"
        )
        raise UnsupportedStateError(msg)
    import pickle  # noqa: PLC0415 - no other path may lead to it

    try:
        return pickle.loads(data)  # noqa: S301 - allowed by the caller
    except Exception as error:  # unpickling runs the objects' own code
        shown = show_path(path)
        msg = f"{shown} cannot be unpickled: {error!r}"
        raise FormatError(msg, [shown]) from error

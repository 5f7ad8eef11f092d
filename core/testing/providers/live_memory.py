"""A search of a value for live memory, independent of what its provider describes."""

from __future__ import annotations

import sys
from array import array
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MOST = 100_000  # objects: a value may refer to half the process
_OPAQUE = (type, ModuleType, FunctionType, str, bytes, int, float)
_BUFFERS = (bytearray, array, memoryview)


def torch_tensors(value: object, /) -> list[Any]:
    """Return the tensors in the attributes and items of `value`, with their gradients."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    return [o for o in _objects(value) if isinstance(o, torch.Tensor)]


def has_buffers(value: object, /) -> bool:
    """Return whether `value` holds any tensor, array or buffer."""
    numpy = sys.modules.get("numpy")
    arrays = (*_BUFFERS, numpy.ndarray) if numpy is not None else _BUFFERS
    return bool(torch_tensors(value)) or any(isinstance(o, arrays) for o in _objects(value))


def _objects(root: object) -> Iterator[object]:
    seen: dict[int, object] = {}  # keeps the objects, since the id of a freed one is used again
    waiting = [root]
    while waiting and len(seen) < _MOST:
        value = waiting.pop()
        if id(value) in seen or value is None or isinstance(value, _OPAQUE):
            continue
        seen[id(value)] = value
        yield value
        waiting += reversed(list(_parts(value)))


def _parts(value: Any) -> Iterable[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield getattr(value, name)
    torch: Any = sys.modules.get("torch")
    tensor: Any = value  # the type checker takes `value` for one of the containers above
    if torch is not None and isinstance(value, torch.Tensor) and tensor.is_leaf:
        yield tensor.grad

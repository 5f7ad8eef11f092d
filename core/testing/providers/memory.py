"""Checks of providers: live memory is described without a copy, and in any dtype."""

from __future__ import annotations

import sys
from array import array
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from penstock.core.abc import StateObject
from penstock.core.errors import UnsupportedStateError
from penstock.core.testing.expectations import finding
from penstock.core.testing.stored import PIECE_BYTES, store
from penstock.core.tree.describe import describe_tree
from penstock.core.types import Kind, show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.core.testing.stored import Stored
    from penstock.core.tree.containers import Providers

DTYPES_THAT_NUMPY_LACKS = ("bfloat16", "float8_e4m3fn")
_MOST = 100_000  # objects: a value may refer to half the process
_OPAQUE = (type, ModuleType, FunctionType, str, bytes, int, float)
_BUFFERS = (bytearray, array, memoryview)


def describing_copies_no_tensor(value: object, providers: Providers) -> None:
    """Check that two descriptions name the same memory, and leave the value's tensors alone."""
    if not has_buffers(value):
        return  # such a value hands out copies of its state, as random generators do
    state = {"part": value}
    before = [(id(t), t.data_ptr()) for t in _plain(value)]
    # Both are kept: a second copy may lie where the first, freed one lay.
    first = describe_tree(state, providers=providers, allow_pickle=False)
    second = describe_tree(state, providers=providers, allow_pickle=False)
    after = [(id(t), t.data_ptr()) for t in _plain(value)]
    assert after == before, "describe replaces tensors of the value: it must change nothing"
    for one, other in zip(first.entries, second.entries, strict=True):
        if not isinstance(one, StateObject) or not isinstance(other, StateObject):
            continue
        if one.kind is not Kind.TENSOR or not one.spec.nbytes:
            continue
        same = (one.source.memory, one.source.address) == (
            other.source.memory,
            other.source.address,
        )
        assert same, (
            f"{show_path(one.path)}: two descriptions name two memories, so describe copies the "
            "tensor: describe the live one (core copies it, when it is captured). If it is the "
            "value itself that gives out copies, pass `copies=True`"
        )


def describing_after_a_change_sees_it(
    make: Callable[[], object],
    change: Callable[[Any], object],
    equal: Callable[[Any, Any], bool],
    providers: Providers,
) -> None:
    """Check that a description after a change shows the change, and no memory of an earlier one."""
    value: Any = make()
    # Held until the later one is made: otherwise the later one may lie at the same address, and a
    # provider that caches by address would pass.
    earlier = store({"part": value}, providers=providers)
    changed = change(value)
    value = value if changed is None else changed
    stored = store({"part": value}, providers=providers)
    del earlier
    again = {"part": make()}
    placement = stored.plan(again)
    if placement.missing or placement.problems:
        return  # the change is one that does not fit a fresh value, such as another shape
    stored.complete(placement, piece_bytes=PIECE_BYTES)
    assert equal(again["part"], value), (
        "after a change of a value that was described before, its description still is that of "
        "earlier: describe the live memory, and remember nothing between calls"
    )


def dtypes_that_numpy_lacks_come_back(make: Callable[[], object], providers: Providers) -> None:
    """Check that floating tensors of such a dtype are stored and restored, or are refused."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for name in DTYPES_THAT_NUMPY_LACKS:
        dtype, value, target = getattr(torch, name, None), make(), make()
        if dtype is None or not _retype(value, dtype, 1) or not _retype(target, dtype, 101):
            continue
        what = f"a value with tensors of {name}, which numpy does not know"
        with finding(f"describing {what}", UnsupportedStateError):
            try:
                stored = store({"part": value}, providers=providers)
            except UnsupportedStateError:
                continue  # refused, with a message that says what to do instead
        _comes_back(stored, value, target, what)


def _comes_back(stored: Stored, value: object, target: object, what: str) -> None:
    state = {"part": target}
    with finding(f"restoring {what}"):
        placement = stored.plan(state)
        wrong = [*placement.missing, *placement.problems]
        assert not wrong, f"{what} does not fit into another one of the same dtype: {wrong}"
        stored.complete(placement, piece_bytes=PIECE_BYTES)
        again = store(state, providers=stored.providers)
    for path, data in stored.data.items():
        assert again.data.get(path) == data, (
            f"{show_path(path)} of {what} comes back changed, as its stored bytes show (not "
            "`equal`, which may not know such tensors): what one value is stored as must not vary, "
            "as that of a pickle does; describe its parts one by one"
        )
    described = {
        entry.source.memory.storage
        for entry in stored.description.entries
        if isinstance(entry, StateObject) and entry.source.memory is not None
    }
    for one, other in zip(_plain(value), _plain(state["part"]), strict=True):
        stands = one.untyped_storage().data_ptr() in described
        assert not stands or _raw(one) == _raw(other), (
            f"{what}: a {one.dtype} tensor of shape {list(one.shape)} comes back changed"
        )
    with finding(f"loading {what}"):
        stored.load()


def _plain(value: object) -> list[Any]:
    torch: Any = sys.modules.get("torch")
    return [
        t
        for t in torch_tensors(value)
        if type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout is torch.strided
    ]


def _retype(value: object, dtype: Any, seed: int) -> bool:
    """Give every floating tensor in `value` that dtype, and bytes that depend on the seed."""
    torch: Any = sys.modules["torch"]
    found = [t for t in _plain(value) if t.is_floating_point() and t.device.type == "cpu"]
    for number, tensor in enumerate(found):
        size = tensor.numel() * dtype.itemsize
        data = (torch.arange(size) + seed + 7 * number).remainder(251).to(torch.uint8)
        tensor.data = data.view(dtype).reshape(tensor.shape)
    return bool(found)


def _raw(tensor: Any) -> bytes:
    torch: Any = sys.modules["torch"]
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.tolist())


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

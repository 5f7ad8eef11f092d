"""Checks of providers: live memory is described as it stands, of whatever dtype it is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from penstock.core.abc import StateObject
from penstock.core.describe import describe_tree
from penstock.core.errors import UnsupportedStateError
from penstock.core.testing.expectations import finding
from penstock.core.testing.live_memory import has_buffers, torch_tensors
from penstock.core.testing.stored import PIECE_BYTES, store
from penstock.core.types import Kind, show_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.testing.stored import Stored
    from penstock.core.tree import Providers

DTYPES_THAT_NUMPY_LACKS = ("bfloat16", "float8_e4m3fn")


def describing_copies_no_tensor(value: object, providers: Providers) -> None:
    """Two descriptions name the same memory, and the tensors of the value are still its own."""
    if not has_buffers(value):
        return  # what gives out copies of its state, as random generators do
    state = {"part": value}
    before = [(id(t), t.data_ptr()) for t in _plain(value)]
    # Both are kept: the memory of a copy that is gone may be that of the next.
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
    """What a provider remembers of an earlier description is not what it gives for a later one."""
    value: Any = make()
    # Held until the later one is made: its memory must not be taken for that of the later one.
    earlier = store({"part": value}, providers=providers)
    changed = change(value)
    value = value if changed is None else changed
    stored = store({"part": value}, providers=providers)
    del earlier
    again = {"part": make()}
    placement = stored.plan(again)
    if placement.missing or placement.problems:
        return  # the change was of a kind that does not fit a fresh value
    stored.complete(placement, piece_bytes=PIECE_BYTES)
    assert equal(again["part"], value), (
        "after a change of a value that was described before, its description still is that of "
        "earlier: describe the live memory, and remember nothing between calls"
    )


def dtypes_that_numpy_lacks_come_back(make: Callable[[], object], providers: Providers) -> None:
    """A value whose floating tensors are of such a dtype is stored and restored, or refused."""
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
                continue  # it says so, and what to do instead
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
        assert again.data.get(path) == data, f"{show_path(path)} of {what} comes back changed"
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
    """Give every floating tensor in `value` that dtype, and bytes that no two values share."""
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

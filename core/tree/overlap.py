"""Finds targets that share memory; they are filled only if the stored bytes agree about it.

Two views of one tensor, such as `w` and `w[5]`, were stored as two objects. If both were read
straight into place, the later one would silently win, or intact bytes would look damaged.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from penstock.core.tree.paths import show_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.core.abc import MemoryKey, Target
    from penstock.core.types import ObjectPath

_Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]
_Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_CARRIERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}
_NAMED = 50


def overlapping(targets: Iterable[Target]) -> list[list[Target]]:
    """Group the targets whose memory may overlap; a target that overlaps none is in no group.

    Compares only first and last addresses, so the columns of one matrix are a group, too.
    """
    spans: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    targets = list(targets)
    for number, target in enumerate(targets):
        memory = target.sink.memory
        if memory is not None:
            spans[memory.device].append((*_span(memory, target.spec.itemsize), number))
    groups: list[list[Target]] = []
    for found in spans.values():
        found.sort()
        if all(stop <= start for (_, stop, _), (start, _, _) in pairwise(found)):
            continue  # as in nearly every state
        group: list[Target] = []
        reach = -1
        for start, stop, number in found:
            if start >= reach:
                groups.append(group)
                group = []
            group.append(targets[number])
            reach = max(reach, stop)
        groups.append(group)
    return [group for group in groups if len(group) > 1]


def disagreements(group: Sequence[Target], stored: Mapping[ObjectPath, memoryview]) -> list[str]:
    """Return why `group` cannot be filled with the bytes in `stored`, as sentences.

    Writes all of them into a scratch copy of the memory that they span: a target that does not find
    its bytes there afterwards was overwritten by another. Takes time and memory linear in the
    group.
    """
    contents = {t.path: _as_memory(t, stored[t.path]) for t in group}
    losers = _overwritten(group, contents)
    problems = []
    for one in losers:
        other = next((t for t in group if t is not one and _overwritten([one, t], contents)), None)
        if other is None:
            problems.append(
                f"{show_path(one.path)} overlaps itself in the template, but different values are "
                "stored for one place of its memory: restore into a contiguous one"
            )
        else:
            problems.append(
                f"{show_path(one.path)} and {show_path(other.path)} share memory in the template, "
                "but different values are stored for it: select one of them, or separate them"
            )
        if len(problems) == _NAMED:
            break
    return problems


def _overwritten(group: Sequence[Target], contents: Mapping[ObjectPath, _Bytes]) -> list[Target]:
    spans = [_span(t.sink.memory, t.spec.itemsize) for t in group if t.sink.memory is not None]
    low, high = min(start for start, _ in spans), max(stop for _, stop in spans)
    scratch = np.empty(high - low, np.uint8)
    views = [_view(scratch, t, low) for t in group]
    for target, view in zip(group, views, strict=True):
        view[...] = contents[target.path].view(view.dtype).reshape(view.shape)
    return [
        target
        for target, view in zip(group, views, strict=True)
        if not _same(view, contents[target.path].view(view.dtype).reshape(view.shape))
    ]


def _same(one: _Array, other: _Array) -> bool:
    if one.dtype.kind == "V":
        return one.tobytes() == other.tobytes()
    return bool(np.array_equal(one, other))


def _view(scratch: _Bytes, target: Target, low: int) -> _Array:
    memory, size = target.sink.memory, target.spec.itemsize
    assert memory is not None
    dtype = np.dtype(_CARRIERS.get(size, f"V{size}"))
    return np.ndarray(memory.shape, dtype, scratch, _start(memory) - low, memory.strides)


def _as_memory(target: Target, data: memoryview) -> _Bytes:
    """Return the bytes as they lie in memory: some views of torch flip signs on the way."""
    memory, size = target.sink.memory, target.spec.itemsize
    assert memory is not None
    raw = np.frombuffer(data, np.uint8)
    flags = memory.dtype.removeprefix("numpy ").split()[1:]
    if not flags:
        return raw
    parts = 2 if memory.dtype.startswith("complex") else 1
    raw = raw.reshape(-1, parts, size // parts).copy()
    if "neg" in flags:
        raw[:, :, -1] ^= 0x80
    if "conj" in flags:
        raw[:, 1, -1] ^= 0x80
    return raw.reshape(-1)


def _start(memory: MemoryKey) -> int:
    return memory.storage + memory.offset


def _span(memory: MemoryKey, itemsize: int) -> tuple[int, int]:
    """Return the first address of the memory, and the address behind its last byte."""
    low = high = _start(memory)
    for size, stride in zip(memory.shape, memory.strides, strict=True):
        if stride < 0:
            low += stride * (size - 1)
        else:
            high += stride * (size - 1)
    return low, high + itemsize

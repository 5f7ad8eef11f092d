"""Targets that share some of their memory: filled only if what is stored agrees about it.

Two views of one tensor, such as `w` and `w[5]`, were stored as two objects. If both were read
straight into place, the later one would silently win, or intact bytes would look damaged.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.paths import show_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.core.abc import MemoryKey, Target
    from penstock.core.types import ObjectPath

_Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


def overlapping(targets: Iterable[Target]) -> list[list[Target]]:
    """Groups of targets whose memory may overlap; others are in none.

    Looks only at where each begins and ends: columns of one matrix are a group, too.
    """
    spans: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    targets = list(targets)
    for number, target in enumerate(targets):
        memory = target.sink.memory
        if memory is not None:
            spans[memory.device].append((*_span(memory, target.spec.itemsize), number))
    groups: list[list[Target]] = []
    for found in spans.values():
        group: list[Target] = []
        reach = -1
        for start, stop, number in sorted(found):
            if start >= reach:
                groups.append(group)
                group = []
            group.append(targets[number])
            reach = max(reach, stop)
        groups.append(group)
    return [group for group in groups if len(group) > 1]


def disagreements(group: Sequence[Target], stored: Mapping[ObjectPath, memoryview]) -> list[str]:
    """What is wrong about filling all of `group` with the bytes in `stored`, as sentences."""
    problems = []
    for one, other in combinations(group, 2):
        if not _agree(one, stored[one.path], other, stored[other.path]):
            problems.append(
                f"{show_path(one.path)} and {show_path(other.path)} share memory in the template, "
                "but different values are stored for it: select one of them, or separate them"
            )
    return problems


def _agree(one: Target, first: memoryview, other: Target, second: memoryview) -> bool:
    here, there = one.sink.memory, other.sink.memory
    assert here is not None
    assert there is not None
    if " " in here.dtype.removeprefix("numpy ") or " " in there.dtype.removeprefix("numpy "):
        return True  # conjugated or negated views: what is stored differs by design
    low, high = _common(here, one.spec.itemsize, there, other.spec.itemsize)
    if low >= high:
        return True
    if _dense(here, one.spec.itemsize) and _dense(there, other.spec.itemsize):
        at, to = low - _start(here), low - _start(there)
        return first[at : at + high - low] == second[to : to + high - low]
    unit = math.gcd(
        one.spec.itemsize,
        other.spec.itemsize,
        _start(here) - _start(there),
        *here.strides,
        *there.strides,
    )
    mine, theirs = _places(here, one.spec.itemsize, unit), _places(there, other.spec.itemsize, unit)
    _, at_mine, at_theirs = np.intersect1d(mine, theirs, return_indices=True)
    units = np.dtype(f"V{unit}")
    return bool(
        np.array_equal(
            np.frombuffer(first, units)[at_mine].view(np.uint8),
            np.frombuffer(second, units)[at_theirs].view(np.uint8),
        )
    )


def _start(memory: MemoryKey) -> int:
    return memory.storage + memory.offset


def _span(memory: MemoryKey, itemsize: int) -> tuple[int, int]:
    """First address and the one behind the last."""
    reaches = [st * (n - 1) for st, n in zip(memory.strides, memory.shape, strict=True)]
    start = _start(memory)
    low = start + sum(r for r in reaches if r < 0)
    return low, start + sum(r for r in reaches if r > 0) + itemsize


def _common(here: MemoryKey, size: int, there: MemoryKey, other_size: int) -> tuple[int, int]:
    (low, high), (other_low, other_high) = _span(here, size), _span(there, other_size)
    return max(low, other_low), min(high, other_high)


def _dense(memory: MemoryKey, itemsize: int) -> bool:
    """Whether its bytes lie row-major and without gaps."""
    expected = itemsize
    for stride, size in zip(reversed(memory.strides), reversed(memory.shape), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _places(memory: MemoryKey, itemsize: int, unit: int) -> _Numbers:
    """Address of each unit of its bytes, row-major."""
    places = np.array(_start(memory), np.int64)
    for stride, size in zip(memory.strides, memory.shape, strict=True):
        places = places[..., None] + np.arange(size, dtype=np.int64) * stride
    places = places[..., None] + np.arange(0, itemsize, unit, dtype=np.int64)
    return places.reshape(-1)

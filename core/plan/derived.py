"""Finds the objects that may be rounded copies of others, by their names and shapes. Sans-IO.

A job in mixed precision has each weight twice: in bfloat16 or float16 for the model, and in float32
for the optimizer. The capture checks whether the rounded master equals the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.plan.save import Capture
from penstock.core.types import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc import StateObject
    from penstock.core.plan.save import PlannedObject
    from penstock.core.types import ObjectPath, Region

    Regions = tuple[Region, ...]

ROUNDED_DTYPES = frozenset({"bfloat16", "float16"})
MASTER_DTYPE = "float32"

DERIVED_BYTES = 64 << 10
"""Smaller objects are never derived. An object that may be derived is in no slab, and a frame of
its own would cost a small one more than its place in a slab."""

_MOST_CANDIDATES = 8


def find_masters(
    objects: Sequence[PlannedObject],
    *,
    is_exact: Callable[[int], bool],
    counts: Callable[[StateObject], bool] = lambda _: True,
) -> dict[int, tuple[int, ...]]:
    """Return the numbers of objects that may be derived, each with its possible masters.

    A master has the shape and region of the object, and the same path below the top-level key
    (`model/wte.weight`, `master/wte.weight`), or the object's last segment somewhere in its path
    (`optimizer/state/wte.weight/master_param`). A name that more than a few masters share matches
    none of them, which keeps the time linear in the number of objects.

    Args:
        objects: The objects of a save.
        is_exact: Returns whether the chain with this number is lossless. A master that a lossy
            codec has changed would round to other values.
        counts: Returns whether to consider an object. Ranks must find the same objects, so an
            object that differs between ranks must not count.
    """
    rounded = [n for n, o in enumerate(objects) if _may_be_derived(o) and counts(o.entry)]
    names = {objects[number].entry.path[-1] for number in rounded}
    below: dict[tuple[ObjectPath, Regions], list[int]] = {}
    named: dict[tuple[str, Regions], list[int]] = {}
    for number, planned in enumerate(objects if rounded else ()):
        entry = planned.entry
        if entry.kind is not Kind.TENSOR or entry.spec.dtype != MASTER_DTYPE:
            continue
        if not (is_exact(planned.chain) and counts(entry)):
            continue
        below.setdefault((entry.path[1:], entry.regions), []).append(number)
        for name in names.intersection(entry.path):
            named.setdefault((name, entry.regions), []).append(number)
    masters_of = {}
    for number in rounded:
        entry = objects[number].entry
        candidates = [
            *_few(below.get((entry.path[1:], entry.regions), ())),
            *_few(named.get((entry.path[-1], entry.regions), ())),
        ]
        masters = tuple(m for m in dict.fromkeys(candidates) if _fits(objects[number], objects[m]))
        if masters:
            masters_of[number] = masters
    return masters_of


def _may_be_derived(planned: PlannedObject) -> bool:
    entry = planned.entry
    return (
        entry.spec.dtype in ROUNDED_DTYPES
        and entry.kind is Kind.TENSOR
        and entry.source.nbytes >= DERIVED_BYTES
    )


def _few(numbers: Sequence[int]) -> Sequence[int]:
    return numbers if len(numbers) <= _MOST_CANDIDATES else ()


def _fits(planned: PlannedObject, master: PlannedObject) -> bool:
    """Return whether object and master can be compared while neither may change.

    They are compared when the object is captured. If the master could change before its own
    capture, the stored values would differ from those compared.
    """
    return (
        master.entry.spec.shape == planned.entry.spec.shape
        and master.entry.source.device == planned.entry.source.device
        and (planned.capture is Capture.NOW or planned.capture is master.capture)
    )

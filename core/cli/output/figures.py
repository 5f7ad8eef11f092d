"""Figures of objects: sums over groups, a tree by path, statistics of values.

Tested in `tests/core/cli/test_show.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.core.cli.output.render import Column, print_table, ratio_text
from penstock.core.types import Kind
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.core.format.records import ObjectRecord
    from penstock.core.restore.checkpoint import Checkpoint

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum over one group.

    Attributes:
        group: The name of the group.
        objects: The number of objects, including tied ones.
        bytes_raw: Their raw bytes; a tied object adds 0, since its bytes count at another path.
        bytes_stored: Their bytes in the checkpoint's own blobs.
        bytes_borrowed: The bytes that they need from blobs of other saves.
    """

    group: str
    objects: int
    bytes_raw: int
    bytes_stored: int
    bytes_borrowed: int


def total(group: str, parts: Sequence[Sum]) -> Sum:
    """Return the total of `parts` as a group."""
    return Sum(
        group,
        sum(one.objects for one in parts),
        sum(one.bytes_raw for one in parts),
        sum(one.bytes_stored for one in parts),
        sum(one.bytes_borrowed for one in parts),
    )


def totals(sums: Iterable[Sum]) -> list[Sum]:
    """Return the total of each group, the largest group first."""
    groups: dict[str, list[Sum]] = {}
    for one in sums:
        groups.setdefault(one.group, []).append(one)
    found = [total(group, parts) for group, parts in groups.items()]
    return sorted(found, key=lambda one: -one.bytes_raw)


def print_sums(title: str, sums: Sequence[Sum]) -> None:
    """Print a line for each sum, under a title for the groups."""
    columns: list[Column[Sum]] = [
        Column(title, lambda one: one.group, flexible=True),
        Column("OBJECTS", lambda one: str(one.objects), right=True),
        Column("BYTES", lambda one: size_text(one.bytes_raw), right=True),
        Column("STORED", lambda one: size_text(one.bytes_stored), right=True),
        Column("RATIO", lambda one: ratio_text(one.bytes_raw, one.bytes_stored), right=True),
    ]
    if any(one.bytes_borrowed for one in sums):
        columns.append(
            Column("BORROWED", lambda one: size_text(one.bytes_borrowed), right=True, keep=1)
        )
    print_table(columns, sums)


@dataclass(slots=True)
class Branch(Generic[T]):
    """A node of the tree: the item at a path, if any, and the branches below."""

    segment: str
    item: T | None = None
    below: dict[str, Branch[T]] = field(default_factory=dict)

    def leaves(self) -> Iterator[T]:
        """Yield the items here and below, in order."""
        if self.item is not None:
            yield self.item
        for branch in self.below.values():
            yield from branch.leaves()


def grown(items: Iterable[tuple[tuple[str, ...], T]]) -> Branch[T]:
    """Build the tree of items by path, with branches in the order of their first items."""
    root: Branch[T] = Branch("")
    for path, item in items:
        branch = root
        for segment in path:
            if segment not in branch.below:
                branch.below[segment] = Branch(segment)
            branch = branch.below[segment]
        branch.item = item
    return root


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of one tensor; all but the counts are None if it has no finite value.

    `mean` and `std` are also None if they overflow.

    Attributes:
        min: The least finite value.
        max: The greatest finite value.
        mean: The mean of the finite values, in double precision.
        std: The population standard deviation of the finite values.
        nan: The number of NaN values.
        inf: The number of infinite values, of either sign.
    """

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    nan: int
    inf: int


def tensor_stats(
    checkpoint: Checkpoint, record: ObjectRecord, *, piece_bytes: int = 16 << 20
) -> Stats | None:
    """Read a tensor and return statistics of its values.

    Args:
        checkpoint: The checkpoint that holds the tensor.
        record: The tensor's record.
        piece_bytes: How much of the tensor to hold in memory at a time.

    Returns:
        The statistics; None for an object that is not a tensor or is tied to another, and for
        values that are not real numbers (complex, dates, bytes).

    Raises:
        DamagedError: Stored bytes differ from the written bytes.
    """
    if record.kind is not Kind.TENSOR or record.same_as is not None:
        return None
    # Slow to import.
    from penstock.core.diff.checkpoints import numbers_of  # noqa: PLC0415
    from penstock.core.restore.fill import read_range  # noqa: PLC0415

    total, spec = _Running(), record.spec
    step = max(spec.itemsize, piece_bytes - piece_bytes % spec.itemsize)
    for start in range(0, spec.nbytes, step):
        data = memoryview(bytearray(min(step, spec.nbytes - start)))
        read_range(checkpoint.opened, record, start, data)
        values = numbers_of(data, spec.dtype)
        if values is None or values.dtype.kind == "c":
            return None
        total.add(values)
    return total.stats()


class _Running:
    """Running mean and sum of squared deviations, merged by piece (Chan, Golub, LeVeque 1979).

    Plain sums of squares would lose all precision if the mean is large compared to the deviation.
    """

    def __init__(self) -> None:
        self._least: float | None = None
        self._greatest: float | None = None
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0
        self._nan = 0
        self._inf = 0

    def add(self, values: Any) -> None:
        """Add a numpy array of integers or floats."""
        import numpy as np  # noqa: PLC0415 - only where values are read

        if values.dtype.kind == "f":
            finite = np.isfinite(values)
            self._nan += int(np.isnan(values).sum())
            self._inf += values.size - int(finite.sum()) - int(np.isnan(values).sum())
            values = values[finite]
        if not values.size:
            return
        least, greatest = values.min().item(), values.max().item()
        self._least = least if self._least is None else min(self._least, least)
        self._greatest = greatest if self._greatest is None else max(self._greatest, greatest)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(values.mean(dtype=np.float64))
            squares = float(np.square(values - np.float64(mean)).sum())
        count = self._count + values.size
        shift = mean - self._mean
        self._squares += squares + shift * shift * self._count * values.size / count
        self._mean += shift * values.size / count
        self._count = count

    def stats(self) -> Stats:
        """Return the statistics of all pieces so far."""
        if not self._count:
            return Stats(None, None, None, None, self._nan, self._inf)
        std = math.sqrt(self._squares / self._count)
        # Squares of the largest doubles overflow; JSON has no `Infinity` to print instead.
        return Stats(
            self._least,
            self._greatest,
            self._mean if math.isfinite(self._mean) else None,
            std if math.isfinite(std) else None,
            self._nan,
            self._inf,
        )

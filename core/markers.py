"""Markers that users put into a state tree; providers describe the marked state."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.core.errors import UnsupportedStateError
from penstock.core.types import Region, Replica, regions_of_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


class Rng:
    """The random state of this process: Python, numpy, torch, and every CUDA device in use.

    `save` captures it. `restore` sets it last, after all other state.
    """

    __slots__ = ("__weakref__",)

    def __repr__(self) -> str:
        return "penstock.Rng()"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PerRank:
    """A value that differs between ranks: each rank stores its own.

    On restore each rank gets its own value back if the number of ranks is the same.

    Attributes:
        value: Anything that may be in a state tree.
        index: The index of this value; default: the rank. Ranks with the same index, such as those
            that read the same data, must have the same value.
        count: The number of values; default: the number of ranks.
        on_change: What a restore does if the stored number of values differs: raise (`"error"`),
            keep the live value (`"keep"`), or call a function with the list of all stored values,
            which returns the value for this rank. If `value` has `load_state_dict`, the stored
            values are its states, and it loads the state that the function returns.

    Raises:
        UnsupportedStateError: `index` is not in `range(count)`, only one of the two is given, or
            `on_change` is invalid.
    """

    value: Any
    index: int | None = None
    count: int | None = None
    on_change: str | Callable[[list[Any]], Any] = "error"

    def __post_init__(self) -> None:
        """Check `index`, `count` and `on_change`."""
        has_both = self.index is not None and self.count is not None
        if has_both and not 0 <= operator.index(self.index) < operator.index(self.count):  # type: ignore[arg-type]
            msg = (
                f"penstock.PerRank has index={self.index} of count={self.count}: the index must be "
                "at least 0 and below the count"
            )
            raise UnsupportedStateError(msg)
        if not has_both and (self.index is not None or self.count is not None):
            msg = "penstock.PerRank takes index= and count= together, or neither"
            raise UnsupportedStateError(msg)
        if self.on_change not in {"error", "keep"} and not callable(self.on_change):
            msg = (
                f"penstock.PerRank has on_change={self.on_change!r}: use 'error', 'keep' or a "
                "function"
            )
            raise UnsupportedStateError(msg)

    def place(self, rank: int, world_size: int) -> tuple[int, int]:
        """Return the index of this value on a rank, and the number of values."""
        if self.index is None or self.count is None:
            return rank, world_size
        return self.index, self.count


class Grads:
    """The `.grad` of every parameter of `model`, for a save during gradient accumulation.

    On restore, `.grad` becomes None for a parameter that was saved without a gradient.
    """

    __slots__ = ("__weakref__", "model")

    def __init__(self, model: Any) -> None:
        self.model = model

    def __repr__(self) -> str:
        return f"penstock.Grads({type(self.model).__name__})"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Shard:
    """A piece of a manually sharded tensor, which this rank holds as a separate tensor.

    All ranks put a piece under the same path. Together, the pieces hold every element of the whole
    tensor. For several pieces on one rank, use `Shards`. The piece is a rectangle that starts at
    `offsets`, or a range of the flattened tensor.

    Attributes:
        tensor: The elements of the piece, row-major; a tensor or array.
        global_shape: Shape of the whole tensor.
        offsets: The start of the rectangle in each dimension, in elements.
        replica: `(i, n)`: this rank is the `i`-th, from 0, of `n` ranks that hold this piece.
        flat_range: `(start, stop)`, instead of `offsets`: the piece is elements `[start, stop)` of
            the whole tensor in row-major order.

    Raises:
        UnsupportedStateError: The piece is not within the whole tensor, `tensor` has the wrong
            number of elements or is a DTensor, or `replica` is invalid.
    """

    tensor: Any
    global_shape: Sequence[int]
    offsets: Sequence[int] | None = None
    replica: tuple[int, int] = (0, 1)
    flat_range: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Convert sequences to tuples of integers, and check that all fields agree."""
        shape = _integers("global_shape", self.global_shape)
        replica = _integers("replica", self.replica)
        if hasattr(self.tensor, "placements"):
            _refuse("is given a DTensor: put the DTensor itself into the state")
        sizes = getattr(self.tensor, "shape", None)
        if sizes is None:
            _refuse(f"is given a {type(self.tensor).__name__}: it takes a tensor or array")
        if (self.offsets is None) == (self.flat_range is None):
            _refuse(
                f"has offsets={self.offsets!r} and flat_range={self.flat_range!r}: it takes one of "
                "them, the start of a rectangle or a range of the flattened tensor"
            )
        if self.offsets is not None:
            offsets = _integers("offsets", self.offsets)
            _check_rectangle(shape, offsets, tuple(sizes))
            object.__setattr__(self, "offsets", offsets)
        if self.flat_range is not None:
            bounds = _integers("flat_range", self.flat_range)
            _check_range(shape, bounds, tuple(sizes))
            object.__setattr__(self, "flat_range", bounds)
        if len(replica) != 2 or not 0 <= replica[0] < replica[1]:  # noqa: PLR2004 - place, count
            _refuse(
                f"has replica={self.replica!r}: give (i, n) on the i-th, from 0, of n ranks that "
                "hold the same piece"
            )
        object.__setattr__(self, "global_shape", shape)
        object.__setattr__(self, "replica", replica)

    @property
    def regions(self) -> tuple[Region, ...]:
        """The rectangles of the piece: one for `offsets`, none for an empty piece."""
        if not math.prod(self.global_shape):
            return (Region.whole(self.global_shape),)  # no elements, so every piece is the whole
        if self.flat_range is not None:
            return tuple(regions_of_range(self.global_shape, *self.flat_range))
        assert self.offsets is not None
        region = Region(tuple(self.offsets), tuple(self.tensor.shape))
        return (region,) if region.numel else ()

    @property
    def place(self) -> Replica:
        """The place of this rank among the ranks with this piece; their numbers are unknown."""
        return Replica(*self.replica)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Shards:
    """Several pieces of one tensor that this rank holds, each as a separate tensor.

    Other ranks may put `Shards` or a `Shard` under the same path. All pieces of all ranks together
    hold every element of the whole tensor.

    Attributes:
        pieces: The pieces, at least one, in any order. All must have the same dtype, device, global
            shape and `replica`.

    Raises:
        UnsupportedStateError: There is no piece, the pieces do not belong to one tensor, or two of
            them hold the same element.
    """

    pieces: Sequence[Shard]

    def __post_init__(self) -> None:
        """Check that the pieces belong to one tensor and do not overlap."""
        pieces = tuple(self.pieces)
        if not pieces or not all(isinstance(piece, Shard) for piece in pieces):
            names = sorted({type(piece).__name__ for piece in pieces}) or "nothing"
            msg = (
                f"penstock.Shards holds {names}: give it a list of penstock.Shard. A rank without "
                "elements gives a Shard of an empty tensor, or leaves the path out"
            )
            raise UnsupportedStateError(msg)
        for name, of in _TRAITS.items():
            traits = list(dict.fromkeys(map(of, pieces)))
            if len(traits) > 1:
                first, second = traits[:2]
                msg = (
                    f"penstock.Shards has pieces of {name} {first} and {second}: all pieces must "
                    f"have the same {name}"
                )
                raise UnsupportedStateError(msg)
        pair = _overlap(region for piece in pieces for region in piece.regions)
        if pair is not None:
            low, high = pair
            msg = (
                f"penstock.Shards has two pieces with the same elements, from {list(low.offsets)} "
                f"of shape {list(low.sizes)} and from {list(high.offsets)} of shape "
                f"{list(high.sizes)}: give each element once"
            )
            raise UnsupportedStateError(msg)
        object.__setattr__(self, "pieces", pieces)


_TRAITS: Mapping[str, Callable[[Shard], object]] = {
    "global shape": lambda piece: tuple(piece.global_shape),
    "replica": lambda piece: piece.replica,
    "dtype": lambda piece: str(piece.tensor.dtype),
    "device": lambda piece: str(getattr(piece.tensor, "device", "cpu")),
}


def _overlap(regions: Iterable[Region]) -> tuple[Region, Region] | None:
    """Return two rectangles that overlap; None if no two do."""
    ordered = sorted(regions, key=lambda region: region.offsets)
    for number, low in enumerate(ordered):
        for high in islice(ordered, number + 1, None):
            bounds = list(zip(low.offsets, low.sizes, high.offsets, high.sizes, strict=True))
            if all(max(a, b) < min(a + m, b + n) for a, m, b, n in bounds):
                return low, high
            if bounds and bounds[0][0] + bounds[0][1] <= bounds[0][2]:
                break  # `high` and all later rectangles begin after `low`
    return None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Leaves:
    """Some leaves of a subtree, each a separate object; other ranks may have the rest.

    Without `Leaves`, a dict or list of plain values is one value, which ranks cannot split. The
    checkpoint stores the dicts and lists that hold the leaves. `Leaves` can only be saved: a
    template needs those dicts and lists in its place.

    Attributes:
        items: The leaves of this rank by path. A path is a tuple of dict keys (strings) and list
            indices (integers).
        lengths: The lengths of the lists, by path, the same on all ranks.

    Raises:
        UnsupportedStateError: A path is not such a tuple, or an index is not below the list's
            length in `lengths`.
    """

    items: Mapping[tuple[str | int, ...], Any]
    lengths: Mapping[tuple[str | int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check each path against `lengths`."""
        for path in self.items:
            if type(path) is not tuple or not {str, int}.issuperset(map(type, path)):
                msg = (
                    f"penstock.Leaves has the path {path!r}: a path is a tuple of dict keys "
                    "(strings) and list indices (integers)"
                )
                raise UnsupportedStateError(msg)
            for depth, key in enumerate(path):
                if type(key) is int and not 0 <= key < self.lengths.get(path[:depth], 0):
                    msg = (
                        f"penstock.Leaves has the path {path!r}, but lengths= of the list "
                        f"{path[:depth]!r} is {self.lengths.get(path[:depth])}: give the list's "
                        "full length, with the leaves of all ranks"
                    )
                    raise UnsupportedStateError(msg)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Streamed:
    """A tensor whose bytes a save reads from a function, piece by piece, instead of from memory.

    Use it for state in a file: the save needs staging memory, but no memory for the whole tensor.
    The checkpoint stores an ordinary tensor. `Streamed` can only be saved: a template needs a
    tensor in its place.

    Attributes:
        dtype: The name of a torch dtype, such as `"bfloat16"`.
        shape: The shape of the tensor.
        read: Called as `read(start, out)` to fill all of `out`, a writable memoryview of bytes,
            with the tensor's row-major bytes from byte `start` on. `start` and the length of `out`
            are multiples of the element size. Any thread may call it. An exception fails the save.

    Raises:
        UnsupportedStateError: `shape` is not a sequence of non-negative integers.
    """

    dtype: str
    shape: Sequence[int]
    read: Callable[[int, memoryview], object]

    def __post_init__(self) -> None:
        """Convert `shape` to a tuple, and check that its integers are not negative."""
        try:
            shape = tuple(map(operator.index, self.shape))
        except TypeError:
            shape = (-1,)
        if min(shape, default=0) < 0:
            msg = (
                f"penstock.Streamed has shape={self.shape!r}: each dimension must be an integer, "
                "at least 0"
            )
            raise UnsupportedStateError(msg)
        object.__setattr__(self, "shape", shape)


def _check_rectangle(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    if not len(sizes) == len(offsets) == len(shape):
        _refuse(
            f"has a tensor of {len(sizes)} dimensions, {len(offsets)} offsets and a global "
            f"shape of {len(shape)} dimensions: the numbers must be equal"
        )
    for d, (offset, size, whole) in enumerate(zip(offsets, sizes, shape, strict=True)):
        if not 0 <= offset <= offset + size <= whole:
            _refuse(
                f"has elements {offset}:{offset + size} of dimension {d}, whose size is {whole}: "
                "offsets count elements of the whole tensor, from 0"
            )


def _check_range(shape: tuple[int, ...], bounds: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    whole = math.prod(shape)
    if min(shape, default=0) < 0 or len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1] <= whole:  # noqa: PLR2004 - start, stop
        _refuse(
            f"has flat_range={bounds} of a global shape {list(shape)}: give (start, stop), counted "
            f"in elements of the whole tensor, which has {whole}"
        )
    if math.prod(sizes) != bounds[1] - bounds[0]:
        _refuse(
            f"has a tensor of shape {list(sizes)} for the {bounds[1] - bounds[0]} elements of "
            f"flat_range={bounds}: give exactly these elements, without padding"
        )


def _integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, values))
    except TypeError as error:
        msg = f"penstock.Shard has {name}={values!r}: it must be a sequence of integers"
        raise UnsupportedStateError(msg) from error


def _refuse(reason: str) -> NoReturn:
    msg = f"penstock.Shard {reason}"
    raise UnsupportedStateError(msg)

"""Frozen records and aliases that every layer shares.

Imports only the standard library, `errors` and `limits`; `collide` also imports numpy when needed.
"""

from __future__ import annotations

import math
import operator
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, cast

from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.limits import FEW_KEYS, MAX_INT, MAX_STEPS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy as np
    from numpy.typing import NDArray

Buffer: TypeAlias = "bytes | bytearray | memoryview"
"""The bytes that cross a contract: any flat, contiguous buffer; cast once with `flat_view`."""

ObjectPath: TypeAlias = tuple[str, ...]
"""The place of an object in the state tree, one string for each level."""

PAGE_BYTES = 4096
"""Bytes of a page of memory.

A raw frame begins at the same offset in a page of its blob as its bytes in a page of memory. That
offset is the frame's phase.
"""


class Role(StrEnum):
    """The purpose of an object: `parameter`, `buffer`, `optimizer` or `other`."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER = "optimizer"
    OTHER = "other"


class Kind(StrEnum):
    """The kind of an object: `tensor` or `value`."""

    TENSOR = "tensor"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a tensor: its start and size in each dimension, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Convert both fields to tuples of integers."""
        object.__setattr__(self, "offsets", tuple(map(operator.index, self.offsets)))
        object.__setattr__(self, "sizes", tuple(map(operator.index, self.sizes)))

    @staticmethod
    @lru_cache(maxsize=4096)  # a state has few shapes, and asks several times for each tensor
    def whole(shape: tuple[int, ...]) -> Region:
        """Return the region that covers a tensor of `shape`."""
        return Region((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements (1 for a 0-dim tensor)."""
        return math.prod(self.sizes)


def regions_of_range(shape: Sequence[int], start: int, stop: int) -> list[Region]:
    """Return the rectangles that make up elements `[start, stop)` of a tensor of `shape`.

    There are at most `2 len(shape) - 1` rectangles, in the order of their elements.
    """
    if start >= stop:
        return []
    if not shape:
        return [Region((), ())]
    if len(shape) == 1:
        return [Region((start,), (stop - start,))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        inner = regions_of_range(shape[1:], start - last * row, stop - last * row)
        return [_below(last, region) for region in inner]
    regions = []
    if start < first * row:
        inner = regions_of_range(shape[1:], start - (first - 1) * row, row)
        regions += [_below(first - 1, region) for region in inner]
    if first < last:
        regions.append(Region((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    if last * row < stop:
        inner = regions_of_range(shape[1:], 0, stop - last * row)
        regions += [_below(last, region) for region in inner]
    return regions


def _below(row: int, region: Region) -> Region:
    return Region((row, *region.offsets), (1, *region.sizes))


@dataclass(frozen=True, slots=True)
class Replica:
    """The place of this rank among the ranks that hold equal bytes of a tensor.

    Attributes:
        index: The place of this rank among these ranks, from 0.
        count: Number of these ranks; 1 if this rank alone holds the bytes.
        ranks: Their global ranks, in the order of `index`; empty if unknown.
        place: The shown path of the `PerRank` whose index these ranks share; empty if there is
            none. Until all ranks have posted their indices, `count` is 1.
        submesh: Whether only some ranks of the job share the tensor. Other ranks may have an equal
            copy under the same name, such as a tied weight.
    """

    index: int = 0
    count: int = 1
    ranks: tuple[int, ...] = ()
    place: str = ""
    submesh: bool = False


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype and *global* shape of a tensor object.

    `dtype` is the name without any library prefix (`"bfloat16"`); `itemsize` is in bytes.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return self.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Half-open range `[start, stop)` of bytes."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Length of the range in bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class WorstErrors:
    """The worst errors that lossy codecs caused in an object's elements; may be infinite.

    `relative` is the error of an element relative to its value before the save.
    """

    absolute: float
    relative: float


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """Name, size and time of a blob or record; `modified_s` is Unix time by the store's clock."""

    name: str
    size_bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """A request to write `buffers` back to back, from byte `offset` of the blob on."""

    offset: int
    buffers: tuple[memoryview, ...]

    @property
    def length(self) -> int:
        """Number of bytes that this request writes."""
        return sum(b.nbytes for b in self.buffers)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request to fill all of `target` (flat, writable) from byte `offset` of blob `name`."""

    name: str
    offset: int
    target: memoryview


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a backend instance, which core checks before it transfers data.

    Attributes:
        direct_io: Whether the page cache is bypassed (proved by a probe, not just requested).
        memory_alignment: Bytes; buffers at `address % memory_alignment == 0` need no copy.
        offset_alignment: Bytes of a unit of a blob; core never lets two writes touch the same unit.
        preferred_io_bytes: The store's best request size.
        preferred_parallel: The store's best number of requests in flight.
        exclusive_publish: Whether the store decides `publish(exclusive=True)` atomically.
        ordered: Whether the store can only append. Then core writes a blob one request at a time,
            each at or after the end of the previous one, and the backend fills gaps with zeros.
        appends: Whether an unsealed blob can be made durable and readable (`BlobWriter.sync`).
        local: Whether blobs are in memory or files of this machine.
        outlives_process: Whether other processes can read the stored data, even after this process
            exits or crashes. False for data in memory of this process.
        prefers_huge_pages: With `direct_io`, whether core should read into huge pages and copy,
            because transfers to small pages are slow.
        notes: Reasons why the backend lacks a capability, for `penstock doctor`.
    """

    direct_io: bool = False
    memory_alignment: int = 1
    offset_alignment: int = 1
    preferred_io_bytes: int = 16 << 20
    preferred_parallel: int = 4
    exclusive_publish: bool = True
    ordered: bool = False
    appends: bool = False
    local: bool = False
    outlives_process: bool = True
    prefers_huge_pages: bool = False
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """Check that alignments and preferences are valid.

        Raises:
            CapabilityError: An alignment is not a power of two, or a preference is below 1.
        """
        for name in ("memory_alignment", "offset_alignment"):
            value = getattr(self, name)
            if type(value) is not int or value < 1 or value & (value - 1):
                msg = (
                    f"Capabilities with {name}={value!r}: it must be a power of two, in bytes; use "
                    "1 if any alignment works"
                )
                raise CapabilityError(msg)
        for name in ("preferred_io_bytes", "preferred_parallel"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                msg = f"Capabilities with {name}={value!r}: it must be a whole number, at least 1"
                raise CapabilityError(msg)


def flat_view(buffer: Buffer) -> memoryview:
    """Return a flat byte view of `buffer`, without copying.

    Raises:
        TypeError: The buffer is not C-contiguous.
    """
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def align_down(value: int, unit: int) -> int:
    """Return the largest multiple of `unit` at or below `value`."""
    return value - value % unit


def align_up(value: int, unit: int) -> int:
    """Return the smallest multiple of `unit` at or above `value`."""
    return -(-value // unit) * unit


def collide(keys: Collection[object]) -> bool:
    """Return whether building a set or dict of `keys`, in this order, takes too many probe steps.

    A key's hash gives a sequence of slots, and Python uses the first free one. An attacker can
    choose numbers, with equal or different hashes, so that each key probes most of the table:
    667 KB of them held the GIL for 72 s, and ten times that would hold it for hours. So this
    function simulates the steps, up to a limit, at each size of the growing table. A million
    benign keys took at most 50 steps each, on average: numbers `2**32` apart, and numbers from
    `torch.rand`. Strings alone are safe, because their hashes are secret.
    """
    if len(keys) <= FEW_KEYS or set(map(type, keys)) <= {str, bytes}:
        return False
    import numpy as np  # noqa: PLC0415 - 80 ms, and few states need it

    hashes = np.fromiter(map(hash, keys), np.int64, len(keys)).view(np.uint64)
    return any(_crowd(hashes, slots) for slots in _SLOTS_PER_STEP)


def _crowd(hashes: NDArray[np.uint64], slots: int) -> bool:
    """Return whether filling a table takes too many steps, each over `slots` adjacent slots."""
    size = 2 * FEW_KEYS
    while size <= 4 * len(hashes):
        early = hashes[: size * 2 // 3]  # with more keys, the table would be larger
        if _walk(early, size, slots) > MAX_STEPS * len(early):
            return True
        size *= 2
    return False


def _walk(hashes: NDArray[np.uint64], size: int, slots: int) -> int:
    """Return the number of steps to insert keys into a table, or a number above the limit.

    Takes the first step of many keys at once, then the second, and so on. This is five times as
    fast. Python inserts keys one after the other, so here a slot may go to another key, but only to
    one that is close in the order.
    """
    import numpy as np  # noqa: PLC0415 - as in `collide`

    occupied = bytearray(size) + bytes([1]) * (slots - 1)
    is_occupied = np.frombuffer(occupied, np.uint8)
    first = np.empty(len(occupied), np.intp)  # the first of the keys that try each slot
    steps = 0
    length = max(1024, len(hashes) // 16)
    for start in range(0, len(hashes), length):
        rest = hashes[start : start + length]
        at = rest & np.uint64(size - 1)
        while len(rest) >= _FEW_AT_ONCE and steps <= MAX_STEPS * len(hashes):
            waiting = np.arange(len(rest))
            for offset in range(slots):
                here = at[waiting].astype(np.intp) + offset
                first[here[::-1]] = waiting[::-1]
                gets = (is_occupied[here] == 0) & (first[here] == waiting)
                is_occupied[here[gets]] = 1
                waiting = waiting[~gets]
                if not len(waiting):
                    break
            steps += len(waiting)
            rest = rest[waiting] >> np.uint64(5)
            at = (at[waiting] * np.uint64(5) + rest + np.uint64(1)) & np.uint64(size - 1)
        for left, place in zip(rest.tolist(), at.tolist(), strict=True):
            while (free := occupied.find(0, place, place + slots)) < 0:
                steps += 1
                if steps > MAX_STEPS * len(hashes):
                    return steps
                left >>= 5  # noqa: PLW2901 - one key walks on
                place = (5 * place + left + 1) & (size - 1)  # noqa: PLW2901 - as above
            occupied[free] = 1
    return steps


_FEW_AT_ONCE = 64  # fewer keys are faster one by one
_SLOTS_PER_STEP = (1, 10)  # of a dict, and of a set


_class_members = type.__dict__["__dict__"].__get__


FACTORIES: dict[str, type] = {
    t.__name__: t for t in (list, dict, set, tuple, int, float, str, bool, bytes, complex)
}
"""The factories of a `defaultdict` that can be stored, by stored name."""


def loaded_class(name: str) -> type | None:
    """Return the class named `module:qualified.name`; None if it is not loaded.

    Imports nothing and runs no code: it calls no module's `__getattr__`, loads no lazily imported
    module, and resolves no proxy of a module or class.
    """
    module_name, _, qualname = name.partition(":")
    member: object = sys.modules.get(module_name)
    if type(member) is not ModuleType:
        return None
    members: Any = object.__getattribute__(member, "__dict__")
    for part in qualname.split("."):
        member = members.get(part)
        if not issubclass(type(member), type):  # `isinstance` would ask the object itself
            return None
        members = _class_members(member)
    return cast("type", member)


def show_segment(segment: str) -> str:
    """Return a path segment with `%` as `%25` and `/` as `%2F`; an empty segment as `%00`."""
    if not segment:
        return "%00"
    if "%" in segment or "/" in segment:
        return segment.replace("%", "%25").replace("/", "%2F")
    return segment


def show_key(key: object) -> str:
    """Return the text of a dict key of any type for a message."""
    return key if isinstance(key, str) else show_value(key)


def show_value(value: object) -> str:
    """Return the `repr` of a value for a message, or its type if the `repr` fails or is long."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - code of the value's class; long integers have no `repr`
        return f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN_CHARS else f"<{type(value).__name__}>"


def with_article(noun: str) -> str:
    """Return `noun` with its article: "a module", "an optimizer"."""
    return f"{'an' if noun[:1] in set('aeiouAEIO') else 'a'} {noun}"


def show_text(text: str) -> str:
    """Return foreign text for a message: at most 300 characters, control characters escaped."""
    if len(text) > _SHOWN_CHARS:
        text = f"{text[:_SHOWN_CHARS]}..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


_SHOWN_CHARS = 300


def show_path(path: ObjectPath) -> str:
    """Return `path` as text, with segments joined by `/`; the root is the empty string."""
    return "/".join(map(show_segment, path))


def valid_step(step: object) -> int:
    """Return `step` as an integer from 0 to 2^62 - 1, the range that records hold.

    Raises:
        ConfigError: `step` is not such an integer.
    """
    number = -1
    if type(step) is int:  # in a training loop, the check of `SupportsIndex` takes 30 us
        number = step
    elif isinstance(step, SupportsIndex) and not isinstance(step, bool):
        number = operator.index(step)
    if not 0 <= number <= MAX_INT:
        msg = f"step must be an integer from 0 to 2^62 - 1, not {show_value(step)}"
        raise ConfigError(msg)
    return number

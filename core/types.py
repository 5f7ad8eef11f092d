"""Frozen records and aliases that every layer shares. Standard library and `errors` only."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from penstock.core.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Sequence

Buffer: TypeAlias = "bytes | bytearray | memoryview"
"""What crosses a contract: anything flat and contiguous; cast once with `flat_view`."""

ObjectPath: TypeAlias = tuple[str, ...]
"""Where an object stands in the state tree; `core.paths` shows and parses it."""

PAGE_BYTES = 4096
"""Alignment of raw frames in a blob, and the modulus of their phase."""


class Role(StrEnum):
    """What an object is for; decides slabs and lets users select by purpose."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER = "optimizer"
    OTHER = "other"


class Kind(StrEnum):
    """The two kinds of object (design, words: object)."""

    TENSOR = "tensor"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a tensor: per dimension, where it starts and how many elements it has."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Take any sequences of integers, and refuse anything else."""
        object.__setattr__(self, "offsets", tuple(map(operator.index, self.offsets)))
        object.__setattr__(self, "sizes", tuple(map(operator.index, self.sizes)))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """The region that covers a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements (1 for a 0-dim tensor)."""
        return math.prod(self.sizes)


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
        """Bytes of the whole tensor."""
        return self.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Half-open range `[start, stop)` of bytes."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Bytes in the range."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Extent:
    """Where bytes are stored: blob name relative to the root, offset and length in bytes."""

    blob: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """What a store says of one blob or record; `modified_s` is the *store's* clock (Unix time)."""

    name: str
    size_bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """`buffers`, one behind the other, go to `offset` of the blob."""

    offset: int
    buffers: tuple[memoryview, ...]

    @property
    def length(self) -> int:
        """Bytes that this request writes."""
        return sum(b.nbytes for b in self.buffers)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Fill all of `target` (flat, writable) from `offset` of blob `name`."""

    name: str
    offset: int
    target: memoryview


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend instance can do, as data; core checks it before the first byte moves.

    Attributes:
        direct_io: Whether the page cache is bypassed (as proved by a probe, not as wished for).
        memory_alignment: Bytes; buffers at `address % memory_alignment == 0` need no copy.
        offset_alignment: Bytes; core never lets two writes touch one such unit of a blob.
        preferred_io_bytes: Size of request that the store likes best.
        preferred_parallel: Requests in flight that the store likes best.
        exclusive_publish: `publish(exclusive=True)` is decided atomically by the store.
        ordered: The store can only append: the writes of one blob come one at a time, each
            begins where the one before ended or behind it, and the backend fills gaps with zeros.
        local: Blobs live in memory or files of this machine.
    """

    direct_io: bool = False
    memory_alignment: int = 1
    offset_alignment: int = 1
    preferred_io_bytes: int = 16 << 20
    preferred_parallel: int = 4
    exclusive_publish: bool = True
    ordered: bool = False
    local: bool = False
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """Refuse what core could not divide or count by.

        Raises:
            CapabilityError: An alignment is no power of two, or a preference is below 1.
        """
        for name in ("memory_alignment", "offset_alignment"):
            value = getattr(self, name)
            if type(value) is not int or value < 1 or value & (value - 1):
                msg = (
                    f"Capabilities with {name}={value!r}: it is a power of two, in bytes; say 1 "
                    "where any will do"
                )
                raise CapabilityError(msg)
        for name in ("preferred_io_bytes", "preferred_parallel"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                msg = f"Capabilities with {name}={value!r}: it is a whole number, at least 1"
                raise CapabilityError(msg)


def flat_view(buffer: Buffer) -> memoryview:
    """A flat byte view of `buffer`, without copying.

    Raises:
        TypeError: The buffer is not C-contiguous.
    """
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def align_down(value: int, unit: int) -> int:
    """The largest multiple of `unit` that is not above `value`."""
    return value - value % unit


def align_up(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit


def show_segment(segment: str) -> str:
    """The shown form of one path segment: `%` as `%25`, `/` as `%2F`, an empty one as `%00`."""
    if not segment:
        return "%00"
    if "%" in segment or "/" in segment:
        return segment.replace("%", "%25").replace("/", "%2F")
    return segment


def show_path(path: ObjectPath) -> str:
    """The shown form of `path`, segments joined by `/`; the root is the empty string."""
    return "/".join(map(show_segment, path))

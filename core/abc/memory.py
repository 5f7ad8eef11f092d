"""Bytes of objects in live memory: where they come from, where they go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple


class MemoryKey(NamedTuple):
    """Identity of memory: equal keys are the same elements in the same order.

    Attributes:
        device: `"cpu"`, `"cuda:0"`, ...
        storage: Address of the storage.
        offset: Bytes from there to the first element.
        shape: Elements along each dimension.
        strides: Bytes from one element to the next along each dimension.
        dtype: Whatever tells apart two readings of the same bytes.
    """

    device: str
    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class PendingCopy(ABC):
    """A device copy under way into host memory."""

    @abstractmethod
    def wait(self) -> None:
        """Block the host until the bytes are there."""

    @abstractmethod
    def order(self) -> None:
        """Make device work that the calling thread issues from now on run after the copy.

        Where the device cannot do that, the same as `wait`.
        """


class ByteSource(ABC):
    """An object's raw bytes on this rank, row-major over its region. Keeps the owner alive.

    Attributes:
        nbytes: Raw bytes.
        device: `"cpu"`, `"cuda:0"`, ...
        address: Host address when the bytes lie contiguously in host memory, else None. Read
            later and from other threads, too: it stays true as long as this object lives.
        memory: Identity of the memory, None for values and empty tensors.
    """

    __slots__ = ()
    nbytes: int
    device: str
    address: int | None
    memory: MemoryKey | None

    @abstractmethod
    def view(self) -> memoryview | None:
        """A flat read-only-by-convention view without copying; None when there is no `address`."""

    @abstractmethod
    def copy_out(self, start: int, out: memoryview, /) -> PendingCopy | None:
        """Copy bytes `[start, start + len(out))` to `out`.

        `start` and `len(out)` are multiples of the itemsize. None: complete on return. A pending
        copy is ordered behind all device work that the thread which *described* the object had
        issued by then; `out` and the source stay in use until it is waited for. Releases the GIL.
        """

    def version(self) -> int | None:
        """A counter that rises with every tracked in-place change; None where there is none."""
        return None

    def steady(self) -> bool:
        """Whether its bytes may be hashed and written, one after the other, where they stand.

        That takes a `version` that would tell of a change in between, and no other process
        that could make one.
        """
        return self.version() is not None


class ByteSink(ABC):
    """Memory that takes an object's raw bytes, row-major over its region.

    Attributes as those of `ByteSource`. Targets of tied objects share one sink: fill it once.
    """

    __slots__ = ()
    nbytes: int
    device: str
    address: int | None
    memory: MemoryKey | None

    @abstractmethod
    def view(self) -> memoryview | None:
        """A flat writable view without copying; None when there is no `address`."""

    @abstractmethod
    def copy_in(self, start: int, data: memoryview, /) -> None:
        """Copy `data` to bytes `[start, start + len(data))`; `data` is free again on return.

        `start` and the length are multiples of the itemsize.
        """

    def opened(self) -> None:  # noqa: B027 - most sinks have nothing to do
        """Called once, before the first byte may change: bump versions, for who captures them."""

    def written(self) -> None:  # noqa: B027 - most sinks have nothing to do
        """Called once, after all bytes are in place and verified (bump versions, free scratch)."""

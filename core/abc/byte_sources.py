"""The bytes of objects in live memory: sources for a save, sinks for a restore.

Tested in `tests/core/save/test_capture.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

T = TypeVar("T")


class MemoryKey(NamedTuple):
    """Identifies memory: equal keys mean the same elements in the same order.

    Attributes:
        device: `"cpu"`, `"cuda:0"`, ...
        storage: Address of the storage.
        offset: Bytes from `storage` to the first element.
        shape: Elements along each dimension.
        strides: Bytes from one element to the next along each dimension.
        dtype: The dtype, which distinguishes two views of the same bytes.
    """

    device: str
    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class Lines(NamedTuple):
    """A sample of an object's bytes: evenly spaced byte ranges, called lines.

    Core compares the lines instead of all bytes. The first line starts at the object's first byte.
    The last line ends at its last byte, so it may start farther from the line before it.

    Attributes:
        width: Bytes of each line; a multiple of the itemsize.
        step: Bytes from the start of one line to the start of the next, except for the last line;
            a multiple of the itemsize.
        steps: The number of lines before the last one.
    """

    width: int
    step: int
    steps: int

    def starts(self, nbytes: int) -> list[int]:
        """Return the byte offsets of the lines of an object of `nbytes` bytes."""
        return [*range(0, self.steps * self.step, self.step or 1), nbytes - self.width]


class PendingCopy(ABC):
    """A device copy in flight into host memory."""

    @abstractmethod
    def wait(self) -> None:
        """Block the host until the bytes have arrived."""

    @abstractmethod
    def order(self) -> None:
        """Order this copy before all device work that the calling thread issues from now on.

        On a device that cannot order work, this blocks like `wait`.
        """


class ByteSource(ABC):
    """An object's raw bytes on this rank, row-major over its region. Keeps the owner alive.

    Attributes:
        nbytes: Number of raw bytes.
        device: `"cpu"`, `"cuda:0"`, ...
        address: Host address if the bytes are contiguous in host memory, else None. Valid on any
            thread while the memory is held (see `hold`).
        memory: Identity of the memory; None for values and empty tensors.
    """

    __slots__ = ()
    nbytes: int
    device: str
    address: int | None
    memory: MemoryKey | None

    @abstractmethod
    def view(self) -> memoryview | None:
        """Return a flat view without a copy; None if `address` is None. Callers never write it."""

    @abstractmethod
    def copy_out(self, start: int, out: memoryview, /) -> PendingCopy | None:
        """Copy bytes `[start, start + len(out))` to `out`; return None if the copy is complete.

        `start` and `len(out)` are multiples of the itemsize. A pending copy runs after all device
        work that the describing thread had issued when it described the object. The copy uses `out`
        and the source until `wait` returns. Releases the GIL.
        """

    @classmethod
    def sample(
        cls, sources: Sequence[ByteSource], lines: Sequence[Lines], /
    ) -> Callable[[], Sequence[bytes]]:
        """Start copying the given lines of each source; the sources have this class and no view.

        The thread that described the sources calls this. Copies from a device run after all device
        work that this thread has issued, and before its later work, so the later work may change
        the memory. The call should not wait for a device, since `save` waits for the call.

        Returns:
            A function that waits for the copies, on any thread, and returns the concatenated lines
            of each source.
        """
        samples = []
        pending = []
        for source, chosen in zip(sources, lines, strict=True):
            starts = chosen.starts(source.nbytes)
            data = bytearray(len(starts) * chosen.width)
            view = memoryview(data)
            for number, start in enumerate(starts):
                at = number * chosen.width
                pending.append(source.copy_out(start, view[at : at + chosen.width]))
            samples.append(data)

        def read() -> list[bytes]:
            for copy in pending:
                if copy is not None:
                    copy.wait()
            return [bytes(data) for data in samples]

        return read

    def pieces(self) -> Sequence[ByteSource]:
        """Return the sources that this source concatenates; a simple source returns itself.

        A source that concatenates others has neither `address` nor `memory`.
        """
        return (self,)

    def version(self) -> int | None:
        """Return a counter that rises with every tracked change; None without such a counter."""
        return None

    def steady(self) -> bool:
        """Return whether core may hash the bytes in live memory and then write them from there.

        This requires a `version` that shows any change between the hash and the write, and memory
        that no other process can change.
        """
        return self.version() is not None

    def is_rounded(self, other: ByteSource, /) -> bool:
        """Return whether every element equals the element of `other`, rounded to nearest even.

        The two have equal regions, `other` is float32, and core holds the memory of both (see
        `hold`). Compares bits with the result of `convert_floats`, including NaN. Returns False if
        the source cannot decide. Uses little memory and stops at the first difference. On a device
        the comparison is ordered like `copy_out`, and complete on return. Releases the GIL.
        """
        del other
        return False

    def locate(self) -> int | None:
        """Return element 0's address; 0 if freed or shrunk, None if the memory never moves."""
        return None

    @classmethod
    def version_each(cls, sources: Sequence[ByteSource], /) -> Sequence[int | None]:
        """Return the `version` of each source; all are of this class."""
        return [source.version() for source in sources]

    @classmethod
    def locate_each(cls, sources: Sequence[ByteSource], /) -> Sequence[int | None]:
        """Return the result of `locate` of each source; all are of this class."""
        return [source.locate() for source in sources]

    def keep(self) -> None:  # noqa: B027 - most memory is never freed by hand
        """Make later attempts to free the memory raise an error.

        Core calls this before `hold` for large objects that it captures while training continues.
        """

    @staticmethod
    def hold(sources: Sequence[ByteSource], /) -> Callable[[], None]:
        """Keep the memory of sources of this class in place, and update their `address`.

        Core calls this before it copies the bytes or writes them from live memory. It then calls
        the returned function once, on any thread, to release the memory.
        """
        del sources
        return _nothing

    @staticmethod
    def still(sources: Sequence[ByteSource], action: Callable[[], T], /) -> T:
        """Run `action`, which takes milliseconds, while these sources' memory cannot move."""
        del sources
        return action()


def _nothing() -> None:
    """Release nothing: memory that never moves is not held."""


def versions_of(sources: Iterable[ByteSource]) -> list[int | None]:
    """Return the `version` of each source."""
    return _of_each(sources, attrgetter("version_each"))


def places_of(sources: Iterable[ByteSource]) -> list[int | None]:
    """Return the result of `locate` of each source."""
    return _of_each(sources, attrgetter("locate_each"))


def _of_each(
    sources: Iterable[ByteSource],
    method: Callable[[type[ByteSource]], Callable[[Sequence[ByteSource]], Sequence[int | None]]],
) -> list[int | None]:
    """Return the results for all sources, with one call per run of sources of the same class."""
    results: list[int | None] = []
    for kind, run in groupby(sources, type):
        results += method(kind)([*run])
    return results


class ByteSink(ABC):
    """Memory that receives an object's raw bytes, row-major over its region.

    The attributes are those of `ByteSource`. Targets of tied objects share one sink, which core
    fills once.
    """

    __slots__ = ()
    nbytes: int
    device: str
    address: int | None
    memory: MemoryKey | None

    @abstractmethod
    def view(self) -> memoryview | None:
        """Return a flat writable view without copying; None if there is no `address`."""

    @abstractmethod
    def copy_in(self, start: int, data: memoryview, /) -> None:
        """Copy `data` to bytes `[start, start + len(data))`; `data` may be reused on return.

        `start` and the length are multiples of the itemsize.
        """

    @classmethod
    def copy_in_each(
        cls, copies: Sequence[tuple[ByteSink, int, int, int]], data: memoryview, /
    ) -> None:
        """Copy `data` into several sinks of this class, like `copy_in` for each.

        Args:
            copies: Each is `(sink, start, low, high)`: bytes `[low, high)` of `data` go to the
                sink, starting at its byte `start`.
            data: Flat bytes that may be reused on return.
        """
        for sink, start, low, high in copies:
            sink.copy_in(start, data[low:high])

    def opened(self) -> None:  # noqa: B027 - most sinks have nothing to do
        """Called once before the first byte changes: bump versions, so that captures notice."""

    def written(self) -> None:  # noqa: B027 - most sinks have nothing to do
        """Called once after all bytes are verified, to bump versions and free scratch memory."""

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
    """Identity of memory: equal keys are the same elements in the same order.

    Attributes:
        device: `"cpu"`, `"cuda:0"`, ...
        storage: Address of the storage.
        offset: Bytes from `storage` to the first element.
        shape: Elements along each dimension.
        strides: Bytes from one element to the next along each dimension.
        dtype: The type of the elements, which distinguishes two readings of the same bytes.
    """

    device: str
    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class Lines(NamedTuple):
    """The bytes of an object that are compared, evenly spread over it.

    There are `steps` lines, the first at the first byte, and one more that ends with the last byte.

    Attributes:
        width: Bytes of each line; a multiple of the itemsize.
        step: Bytes from the start of a line to the start of the next; a multiple of the itemsize.
        steps: The number of lines except the last.
    """

    width: int
    step: int
    steps: int

    def starts(self, nbytes: int) -> list[int]:
        """Return where the lines of an object of `nbytes` begin."""
        return [*range(0, self.steps * self.step, self.step or 1), nbytes - self.width]


class PendingCopy(ABC):
    """A device copy in flight into host memory."""

    @abstractmethod
    def wait(self) -> None:
        """Block the host until the bytes have arrived."""

    @abstractmethod
    def order(self) -> None:
        """Make device work that the calling thread issues from now on run after the copy.

        A device that cannot order work waits, as `wait` does.
        """


class ByteSource(ABC):
    """An object's raw bytes on this rank, row-major over its region. Keeps the owner alive.

    Attributes:
        nbytes: Raw bytes.
        device: `"cpu"`, `"cuda:0"`, ...
        address: Host address if the bytes are contiguous in host memory, else None. Other threads
            read it too; it is valid while the memory is held (see `hold`).
        memory: Identity of the memory, None for values and empty tensors.
    """

    __slots__ = ()
    nbytes: int
    device: str
    address: int | None
    memory: MemoryKey | None

    @abstractmethod
    def view(self) -> memoryview | None:
        """Return a flat view without copying; callers never write it. None without `address`."""

    @abstractmethod
    def copy_out(self, start: int, out: memoryview, /) -> PendingCopy | None:
        """Copy bytes `[start, start + len(out))` to `out`.

        `start` and `len(out)` are multiples of the itemsize. None: complete on return. A pending
        copy runs after all device work that the *describing* thread had issued by then; `out` and
        the source stay in use until `wait` returns. Releases the GIL.
        """

    @classmethod
    def sample(
        cls, sources: Sequence[ByteSource], lines: Sequence[Lines], /
    ) -> Callable[[], Sequence[bytes]]:
        """Begin to copy a few lines of each source of this class that has no view.

        The thread that described them calls this, and may change the memory afterwards: copies from
        a device run after all device work that the thread has issued, and before its later work.
        This should not wait for a device, since `save` calls it.

        Returns:
            A function that waits for the copies, on any thread, and returns the bytes of the lines
            of each source, one after the other.
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
        """Return the sources that make up this one, in order; itself, if it has memory.

        A source made of several has neither `address` nor `memory`.
        """
        return (self,)

    def version(self) -> int | None:
        """Return a counter that rises with every tracked change; None if there is none."""
        return None

    def steady(self) -> bool:
        """Return whether the bytes may be hashed, and then written, from live memory.

        This needs a `version` that shows a change in between, and no other process that could make
        such a change.
        """
        return self.version() is not None

    def is_rounded(self, other: ByteSource, /) -> bool:
        """Return whether these are the elements of `other`, each rounded to nearest even.

        The two have equal regions, `other` is float32, and core holds the memory of both (see
        `hold`). The answer is exact to the bit, as `convert_floats` rounds, including NaN; False if
        the source cannot decide. It takes little memory, and ends at the first difference. On a
        device it is ordered like `copy_out`, and complete on return. Releases the GIL.
        """
        del other
        return False

    def locate(self) -> int | None:
        """Return the current address of element 0: 0 if freed or too small, None if fixed."""
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

        Called for large objects that are captured while the caller continues, before `hold`.
        """

    @staticmethod
    def hold(sources: Sequence[ByteSource], /) -> Callable[[], None]:
        """Keep the memory of sources of this class in place, and set their `address` again.

        Core calls it before it copies their bytes or writes them from live memory, and calls the
        result once after that, on any thread.
        """
        del sources
        return _nothing

    @staticmethod
    def still(sources: Sequence[ByteSource], action: Callable[[], T], /) -> T:
        """Run `action`, which takes milliseconds, while no memory of these sources moves."""
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
    """Return the results for all sources; calls the class method once per run of a class."""
    results: list[int | None] = []
    for kind, run in groupby(sources, type):
        results += method(kind)([*run])
    return results


class ByteSink(ABC):
    """Memory that receives an object's raw bytes, row-major over its region.

    Attributes as in `ByteSource`. Targets of tied objects share one sink: fill it once.
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
        """Copy `data` to bytes `[start, start + len(data))`; `data` is free on return.

        `start` and the length are multiples of the itemsize.
        """

    @classmethod
    def copy_in_each(
        cls, copies: Sequence[tuple[ByteSink, int, int, int]], data: memoryview, /
    ) -> None:
        """Do for several sinks of this class what `copy_in` does for one.

        Args:
            copies: Each is `(sink, start, low, high)`: bytes `[low, high)` of `data` go to the
                sink, starting at its byte `start`.
            data: Flat bytes, free on return.
        """
        for sink, start, low, high in copies:
            sink.copy_in(start, data[low:high])

    def opened(self) -> None:  # noqa: B027 - most sinks have nothing to do
        """Called once, before the first byte changes: bump versions, so that captures see it."""

    def written(self) -> None:  # noqa: B027 - most sinks have nothing to do
        """Called once, after all bytes are in place and verified (bump versions, free scratch)."""

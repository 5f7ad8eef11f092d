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
        offset: Bytes from there to the first element.
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
    """Some bytes of an object that are compared, evenly spread over it.

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
    """A device copy under way into host memory."""

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
        address: Host address when the bytes lie contiguously in host memory, else None. Other
            threads read it, too: it is right while the memory is held (see `hold`).
        memory: Identity of the memory, None for values and empty tensors.
    """

    __slots__ = ()
    nbytes: int
    device: str
    address: int | None
    memory: MemoryKey | None

    @abstractmethod
    def view(self) -> memoryview | None:
        """Return a flat view without copying, not to be written; None if there is no `address`."""

    @abstractmethod
    def copy_out(self, start: int, out: memoryview, /) -> PendingCopy | None:
        """Copy bytes `[start, start + len(out))` to `out`.

        `start` and `len(out)` are multiples of the itemsize. None: complete on return. A pending
        copy runs after all device work that the thread which *described* the object had issued by
        then; `out` and the source stay in use until `wait` returns. Releases the GIL.
        """

    @classmethod
    def sample(
        cls, sources: Sequence[ByteSource], lines: Sequence[Lines], /
    ) -> Callable[[], Sequence[bytes]]:
        """Begin to copy a few lines of each source of this class that has no view.

        Called by the thread that has described them, which may change the memory afterwards: copies
        from a device run after all device work that the thread has issued, and before its later
        work. It should wait for no device, since `save` calls it.

        Returns:
            A function that waits for the copies, on any thread, and returns the bytes of the lines
            of each source, one after the other.
        """
        taken = []
        pending = []
        for source, of in zip(sources, lines, strict=True):
            starts = of.starts(source.nbytes)
            data = bytearray(len(starts) * of.width)
            view = memoryview(data)
            for number, start in enumerate(starts):
                at = number * of.width
                pending.append(source.copy_out(start, view[at : at + of.width]))
            taken.append(data)

        def read() -> list[bytes]:
            for copy in pending:
                if copy is not None:
                    copy.wait()
            return [bytes(data) for data in taken]

        return read

    def pieces(self) -> Sequence[ByteSource]:
        """Return the sources whose bytes these are, one after the other; itself, if it has memory.

        A source of several has neither an `address` nor a `memory`.
        """
        return (self,)

    def version(self) -> int | None:
        """Return a counter that rises with every tracked change; None where none is kept."""
        return None

    def steady(self) -> bool:
        """Return whether the bytes may be hashed, and then written, from live memory.

        That needs a `version` that shows a change in between, and no other process that could make
        such a change.
        """
        return self.version() is not None

    def is_rounded(self, other: ByteSource, /) -> bool:
        """Return whether these are the elements of `other`, each rounded to nearest even.

        The two have equal regions, `other` is of float32, and core holds the memory of both (see
        `hold`). The answer is right for each bit, as `convert_floats` rounds, NaN included; False
        where the source cannot tell. It takes little memory, and ends at the first difference. On a
        device it is ordered as `copy_out`, and complete on return. Releases the GIL.
        """
        del other
        return False

    def locate(self) -> int | None:
        """Return the first element's address now: 0 once freed or too small, None if fixed."""
        return None

    @classmethod
    def version_each(cls, sources: Sequence[ByteSource], /) -> Sequence[int | None]:
        """Return what `version` returns of each of several sources of this class."""
        return [source.version() for source in sources]

    @classmethod
    def locate_each(cls, sources: Sequence[ByteSource], /) -> Sequence[int | None]:
        """Return what `locate` returns of each of several sources of this class."""
        return [source.locate() for source in sources]

    def keep(self) -> None:  # noqa: B027 - most memory is never freed by hand
        """Make an attempt to free the memory from now on raise an error.

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
        """Run `action`, which takes milliseconds, while no memory of such sources moves."""
        del sources
        return action()


def _nothing() -> None:
    """Release nothing: memory that never moves is not held."""


def versions_of(sources: Iterable[ByteSource]) -> list[int | None]:
    """Return what `version` returns of each source."""
    return _of_each(sources, attrgetter("version_each"))


def places_of(sources: Iterable[ByteSource]) -> list[int | None]:
    """Return what `locate` returns of each source."""
    return _of_each(sources, attrgetter("locate_each"))


def _of_each(
    sources: Iterable[ByteSource],
    method: Callable[[type[ByteSource]], Callable[[Sequence[ByteSource]], Sequence[int | None]]],
) -> list[int | None]:
    """Return what a class method returns of each source; it is asked once for a run of a class."""
    found: list[int | None] = []
    for kind, alike in groupby(sources, type):
        found += method(kind)([*alike])
    return found


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
        """Return a flat writable view without copying; None if there is no `address`."""

    @abstractmethod
    def copy_in(self, start: int, data: memoryview, /) -> None:
        """Copy `data` to bytes `[start, start + len(data))`; `data` is free again on return.

        `start` and the length are multiples of the itemsize.
        """

    @classmethod
    def copy_in_each(
        cls, copies: Sequence[tuple[ByteSink, int, int, int]], data: memoryview, /
    ) -> None:
        """Do for several sinks of this class what `copy_in` does for one.

        Args:
            copies: Each says `(sink, start, low, high)`: bytes `[low, high)` of `data` go to the
                sink, from its byte `start` on.
            data: Flat bytes, free again on return.
        """
        for sink, start, low, high in copies:
            sink.copy_in(start, data[low:high])

    def opened(self) -> None:  # noqa: B027 - most sinks have nothing to do
        """Called once, before the first byte changes: bump versions, so that a capture sees it."""

    def written(self) -> None:  # noqa: B027 - most sinks have nothing to do
        """Called once, after all bytes are in place and verified (bump versions, free scratch)."""

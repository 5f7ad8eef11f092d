"""The memory of several pieces of one tensor as one source."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from penstock.core.abc import ByteSource, PendingCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


class PiecesSource(ByteSource):
    """The bytes of some sources of one device, one after the other."""

    __slots__ = ("_pieces", "address", "device", "memory", "nbytes")

    def __init__(self, pieces: Sequence[ByteSource]) -> None:
        """Put `pieces` together, at least one."""
        self._pieces = tuple(pieces)
        self.nbytes = sum(piece.nbytes for piece in pieces)
        self.device = pieces[0].device
        self.address = None
        self.memory = None

    def pieces(self) -> Sequence[ByteSource]:
        return self._pieces

    def view(self) -> memoryview | None:
        return None

    def copy_out(self, start: int, out: memoryview, /) -> PendingCopy | None:
        copies: list[PendingCopy] = []
        at = 0
        for piece in self._pieces:
            first, stop = max(start, at), min(start + out.nbytes, at + piece.nbytes)
            if first < stop:
                copy = piece.copy_out(first - at, out[first - start : stop - start])
                copies += [] if copy is None else [copy]
            at += piece.nbytes
        return _Copies(copies) if copies else None

    def version(self) -> int | None:
        versions = [piece.version() for piece in self._pieces]
        known = [version for version in versions if version is not None]
        return sum(known) if len(known) == len(versions) else None

    def steady(self) -> bool:
        return all(piece.steady() for piece in self._pieces)

    def is_rounded(self, other: ByteSource, /) -> bool:
        pairs = list(zip(self._pieces, other.pieces(), strict=False))
        alike = len(self._pieces) == len(other.pieces()) and all(
            one.nbytes * other.nbytes == master.nbytes * self.nbytes for one, master in pairs
        )
        return alike and all(one.is_rounded(master) for one, master in pairs)

    def keep(self) -> None:
        for piece in self._pieces:
            piece.keep()

    @staticmethod
    def hold(sources: Sequence[ByteSource], /) -> Callable[[], None]:
        with ExitStack() as held:
            for kind, pieces in _by_kind(sources).items():
                held.callback(kind.hold(pieces))
            return held.pop_all().close

    @staticmethod
    def still(sources: Sequence[ByteSource], action: Callable[[], T], /) -> T:
        for kind, pieces in _by_kind(sources).items():
            action = partial(kind.still, pieces, action)
        return action()


class _Copies(PendingCopy):
    """Several copies under way."""

    __slots__ = ("_copies",)

    def __init__(self, copies: Sequence[PendingCopy]) -> None:
        self._copies = copies

    def wait(self) -> None:
        for copy in self._copies:
            copy.wait()

    def order(self) -> None:
        for copy in self._copies:
            copy.order()


def _by_kind(sources: Sequence[ByteSource]) -> dict[type[ByteSource], list[ByteSource]]:
    found: dict[type[ByteSource], list[ByteSource]] = {}
    for source in sources:
        for piece in source.pieces():
            found.setdefault(type(piece), []).append(piece)
    return found

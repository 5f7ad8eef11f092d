"""Takes the lines of tensors that ranks compare, when `save` is called, and reads them later."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from penstock.core.abc import Lines
from penstock.core.foreign import noting_origin
from penstock.core.plan.sample_lines import LINE_BYTES, LINES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.core.abc import ByteSource, StateObject
    from penstock.core.types import ObjectPath


def lines_within(nbytes: int, itemsize: int) -> Lines:
    """Return which bytes of a tensor are compared: the same, wherever and however it lies.

    Whether two are contiguous in memory, and on which device, is no difference between them. With
    eight equal steps one strided view has all lines of a tensor whose bytes are a multiple of 64.
    """
    width = max(LINE_BYTES // itemsize, 1) * itemsize
    if nbytes <= (LINES + 1) * width:
        return Lines(nbytes, 0, 0)
    return Lines(width, (nbytes - width) // LINES // itemsize * itemsize, LINES)


class TakenLines:
    """The lines of some tensors as they are when this is made. Memory may change afterwards.

    Those in host memory are copied at once. For those on a device copies are begun, since the
    caller of `save` would wait there for all the work that it has queued.
    """

    def __init__(self, entries: Iterable[StateObject]) -> None:
        """Take the lines of these tensors.

        Raises:
            TornSnapshotError: The memory of one was freed since it was described.
        """
        self._taken: dict[ObjectPath, bytes] = {}
        self._begun: list[tuple[list[ObjectPath], Callable[[], Sequence[bytes]]]] = []
        by_kind: dict[type[ByteSource], list[tuple[StateObject, Lines]]] = {}
        for entry in entries:
            source = entry.source
            if not source.nbytes:
                continue
            lines = lines_within(source.nbytes, entry.spec.itemsize)
            view = source.view()
            if view is None:
                by_kind.setdefault(type(source), []).append((entry, lines))
                continue
            starts = lines.starts(source.nbytes)
            self._taken[entry.path] = b"".join(view[at : at + lines.width] for at in starts)
        for kind, found in by_kind.items():
            with noting_origin(partial(_origin, kind)):
                read = kind.sample([e.source for e, _ in found], [of for _, of in found])
            self._begun.append(([entry.path for entry, _ in found], read))

    def read(self) -> Mapping[ObjectPath, bytes]:
        """Wait for the copies; return the lines by the paths of the tensors, empty ones apart."""
        found = dict(self._taken)
        for paths, read in self._begun:
            found.update(zip(paths, read(), strict=True))
        return found


def _origin(kind: type) -> str:
    return f"in {kind.__module__}.{kind.__qualname__}.sample"

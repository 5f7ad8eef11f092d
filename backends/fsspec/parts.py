"""Memory of the parts on their way to a store, and what they are made of."""

from __future__ import annotations

import mmap
import threading
from bisect import insort
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.abc import copy_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator


_ZEROS = memoryview(bytes(1 << 20))


@dataclass(slots=True)
class Part:
    """A part being filled: by the caller's own memory, and by what is copied.

    Attributes:
        index: Its place in the blob, from 0 on.
        size_bytes: That of every part.
        lent: Where pieces of the caller's memory begin, and the pieces; none overlap.
        memory: As long as every part, once something is copied.
        copied: Start and stop of what was, ascending.
        taken: Bytes that nobody will write any more.
        stop: Behind the last byte that was written.
    """

    index: int
    size_bytes: int
    lent: list[tuple[int, memoryview]] = field(default_factory=list)
    memory: memoryview | None = None
    copied: list[tuple[int, int]] = field(default_factory=list)
    taken: int = 0
    stop: int = 0

    def lend(self, at: int, source: memoryview) -> None:
        """Refer to `source` at `at`, until the part is sent or `own` is called."""
        self.lent.append((at, source))
        self.stop = max(self.stop, at + source.nbytes)

    def put(self, at: int, source: memoryview, *, memory: PartMemory) -> None:
        """Copy `source` to `at`."""
        if self.memory is None:
            self.memory = memory.take(self.size_bytes)
        copy_bytes(self.memory[at : at + source.nbytes], source)
        insort(self.copied, (at, at + source.nbytes))
        self.stop = max(self.stop, at + source.nbytes)

    def own(self, *, memory: PartMemory) -> None:
        """Copy what is lent."""
        lent, self.lent = self.lent, []
        for at, source in lent:
            self.put(at, source, memory=memory)

    def views(self, length: int) -> tuple[memoryview, ...]:
        """The first `length` bytes; those that were never written are zero."""
        found: list[memoryview] = []
        at = 0
        for start, source in sorted(self.lent, key=itemgetter(0)):
            if start >= length:
                break
            found += self._between(at, start)
            found.append(source[: length - start])
            at = start + source.nbytes
        found += self._between(at, length)
        return tuple(found)

    def _between(self, start: int, stop: int) -> Iterator[memoryview]:
        """All of a range in which nothing is lent."""
        if self.memory is None:
            for at in range(start, stop, _ZEROS.nbytes):
                yield _ZEROS[: stop - at]
        elif start < stop:
            at = start
            for first, last in [*self.copied, (stop, stop)]:
                if start <= first <= stop:
                    np.frombuffer(self.memory, np.uint8)[at:first] = 0
                    at = last
            yield self.memory[start:stop]


class PartMemory:
    """Memory for parts, reused; bounds what is in flight."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._in_flight = 0
        self._spare: dict[int, list[memoryview]] = {}
        self._changed = threading.Condition()  # guards all of the above

    def take(self, size_bytes: int) -> memoryview:
        """Memory for one part; what it holds is unspecified."""
        with self._changed:
            spare = self._spare.get(size_bytes)
            if spare:
                return spare.pop()
        return memoryview(mmap.mmap(-1, size_bytes))

    def send(self, memory: memoryview) -> None:
        """Count `memory` as in flight, once there is room for it; one part always has room."""
        with self._changed:
            while self._in_flight and self._in_flight + memory.nbytes > self._budget:
                self._changed.wait()
            self._in_flight += memory.nbytes

    def sent(self, memory: memoryview) -> None:
        """`memory` is no longer in flight."""
        with self._changed:
            self._in_flight -= memory.nbytes
            self._changed.notify_all()
        self.give(memory)

    def give(self, memory: memoryview) -> None:
        """Take back what nobody uses any more."""
        with self._changed:
            kept = sum(size * len(views) for size, views in self._spare.items())
            others = [views for size, views in self._spare.items() if size != memory.nbytes]
            for views in others:  # of blobs before; nobody may want that size again
                while views and kept + memory.nbytes > self._budget:
                    kept -= views.pop().nbytes
            if kept + memory.nbytes <= self._budget:
                self._spare.setdefault(memory.nbytes, []).append(memory)

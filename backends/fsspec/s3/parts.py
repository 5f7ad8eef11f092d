"""The parts of a blob on their way to S3, and the memory of what is copied into them."""

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
    """A part being filled, from the caller's own memory and from copies.

    Attributes:
        index: The number of the part in the blob, from 0.
        size_bytes: The size of every part.
        lent: Pieces of the caller's memory, each with its offset in the part; none overlap.
        memory: Memory for a whole part, once something is copied.
        copied: Start and stop of what was copied, ascending.
        taken: The bytes that no later request writes.
        stop: The offset behind the last byte that was written.
    """

    index: int
    size_bytes: int
    lent: list[tuple[int, memoryview]] = field(default_factory=list)
    memory: memoryview | None = None
    copied: list[tuple[int, int]] = field(default_factory=list)
    taken: int = 0
    stop: int = 0

    def lend(self, at: int, source: memoryview) -> None:
        """Refer to `source` at `at`, until the part is uploaded or `own` is called."""
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
        """Copy all that is lent."""
        lent, self.lent = self.lent, []
        for at, source in lent:
            self.put(at, source, memory=memory)

    def views(self, length: int) -> tuple[memoryview, ...]:
        """Return the first `length` bytes; those that were never written are zero."""
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
        """Yield the bytes of a range in which nothing is lent."""
        if self.memory is None:
            for at in range(start, stop, _ZEROS.nbytes):
                yield _ZEROS[: stop - at]
        elif start < stop:
            # Gaps are cleared here: memory is reused, and holds bytes of an earlier blob.
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
        self._changed = threading.Condition()  # guards `_in_flight` and `_spare`

    def take(self, size_bytes: int) -> memoryview:
        """Return memory for one part; its content is unspecified."""
        with self._changed:
            spare = self._spare.get(size_bytes)
            if spare:
                return spare.pop()
        return memoryview(mmap.mmap(-1, size_bytes))

    def send(self, memory: memoryview) -> None:
        """Wait until there is room for `memory`, then count it as in flight."""
        with self._changed:
            # A part larger than the budget is let through alone; else it would wait for ever.
            while self._in_flight and self._in_flight + memory.nbytes > self._budget:
                self._changed.wait()
            self._in_flight += memory.nbytes

    def sent(self, memory: memoryview) -> None:
        """Count `memory` as no longer in flight, and take it back."""
        with self._changed:
            self._in_flight -= memory.nbytes
            self._changed.notify_all()
        self.give(memory)

    def give(self, memory: memoryview) -> None:
        """Take back memory that is no longer used."""
        with self._changed:
            kept = sum(size * len(views) for size, views in self._spare.items())
            # Parts of earlier blobs had another size, which may never be needed again.
            others = [views for size, views in self._spare.items() if size != memory.nbytes]
            for views in others:
                while views and kept + memory.nbytes > self._budget:
                    kept -= views.pop().nbytes
            if kept + memory.nbytes <= self._budget:
                self._spare.setdefault(memory.nbytes, []).append(memory)

"""Memory of the parts on their way to a store, and what they are made of."""

from __future__ import annotations

import mmap
import threading
from bisect import insort
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Part:
    """A part being filled.

    Attributes:
        index: Its place in the blob, from 0 on.
        memory: As long as every part.
        covered: Start and stop of what was written, ascending, never overlapping.
        filled: Bytes written.
    """

    index: int
    memory: memoryview
    covered: list[tuple[int, int]] = field(default_factory=list)
    filled: int = 0

    def put(self, at: int, source: memoryview) -> None:
        """Copy `source` to `at`; what a request does not cover whole needs this one copy."""
        copy(self.memory[at : at + source.nbytes], source)
        insort(self.covered, (at, at + source.nbytes))
        self.filled += source.nbytes

    def zero_gaps(self) -> None:
        """Make every byte that was never written zero."""
        at = 0
        for start, stop in [*self.covered, (self.memory.nbytes,) * 2]:
            if start > at:
                np.frombuffer(self.memory, np.uint8)[at:start] = 0
            at = max(at, stop)
        self.covered = [(0, self.memory.nbytes)]


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
            if kept + memory.nbytes <= self._budget:
                self._spare.setdefault(memory.nbytes, []).append(memory)


def copy(target: memoryview, source: memoryview) -> None:
    """Copy outside the GIL, which a memoryview's slice assignment would hold."""
    if source.nbytes:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

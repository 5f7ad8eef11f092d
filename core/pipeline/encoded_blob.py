"""The blob of encoded frames, whose places are known only once each is encoded."""

from __future__ import annotations

import logging
import mmap
import threading
import time
from typing import TYPE_CHECKING

from penstock.core.concurrency.copy_bytes import copy_bytes
from penstock.core.types import PAGE_BYTES, WriteRequest, align_down

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from penstock.core.abc import Backend
    from penstock.core.concurrency.workers import BusyClock

log = logging.getLogger("penstock")

_GROUP_BYTES = 8 << 20  # encoded frames go out in writes of half of this at least
_GROUPS = 3


class EncodedBlob:
    """An `.enc` blob: frames appended when ready, written in groups cut at page boundaries.

    Any worker may append.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        *,
        size_hint: int,
        clock: BusyClock,
        tick: Callable[[int], None],
    ) -> None:
        self._backend = backend
        self._name = name
        self._writer = backend.create(name, size_hint=size_hint)
        self._clock = clock
        self._tick = tick
        self._lock = threading.Lock()  # guards everything below; appending is serial
        self._groups = [memoryview(mmap.mmap(-1, _GROUP_BYTES)) for _ in range(_GROUPS)]
        self._flights: list[Future[None] | None] = [None] * _GROUPS
        self._current = 0
        self._base = 0
        self._filled = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was appended."""
        with self._lock:
            return self._base + self._filled == 0

    def append(self, frame: memoryview) -> int:
        """Copy `frame` behind the frames before it and return its offset."""
        with self._lock:
            offset = self._base + self._filled
            at = 0
            while at < frame.nbytes:
                count = min(frame.nbytes - at, _GROUP_BYTES - self._filled)
                copy_bytes(self._groups[self._current][self._filled :], frame[at : at + count])
                self._filled += count
                at += count
                if self._filled == _GROUP_BYTES:
                    self._rotate()
            if self._filled >= _GROUP_BYTES // 2:
                self._rotate()
            return offset

    def seal(self) -> int:
        """Write the rest, make the blob durable, and return its length."""
        with self._lock:
            length = self._base + self._filled
            if self._filled:
                self._submit(self._filled)
            for flight in self._flights:
                if flight is not None:
                    flight.result()
            began = time.monotonic()
            self._writer.seal(length)
            seconds = time.monotonic() - began
            self._tick(0)
        log.debug("sealed %s: %d bytes in %.3f s", self._name, length, seconds)
        return length

    def abort(self) -> None:
        """Wait until nothing is in flight, then give the blob up."""
        for flight in self._flights:
            if flight is not None:
                flight.exception()
        self._writer.abort()

    def _rotate(self) -> None:
        """Submit whole pages; the rest of the last page opens the next group.

        No two writes touch one page, as direct I/O needs.
        """
        whole = align_down(self._filled, PAGE_BYTES)
        full, rest = self._current, self._filled - whole
        self._submit(whole)
        self._current = (full + 1) % _GROUPS
        flight = self._flights[self._current]
        if flight is not None:
            flight.result()
            self._flights[self._current] = None
        copy_bytes(self._groups[self._current], self._groups[full][whole : whole + rest])
        self._base += whole
        self._filled = rest

    def _submit(self, length: int) -> None:
        request = WriteRequest(self._base, (self._groups[self._current][:length],))
        flight = self._backend.submit_write(self._writer, [request])
        self._clock.start()

        def done(future: Future[None]) -> None:
            self._clock.stop()
            if future.exception() is None:
                self._tick(0)

        flight.add_done_callback(done)
        self._flights[self._current] = flight

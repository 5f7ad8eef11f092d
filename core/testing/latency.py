"""A backend that is slow on purpose, with the same delays in every run."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, ClassVar, TypeVar

from penstock.core.testing.wrapper import WrapperBackend, WrapperWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.testing.wrapper import Operation
    from penstock.core.types import ReadRequest, WriteRequest

_T = TypeVar("_T")


class _SlowWriter(WrapperWriter):
    def write(self, requests: Sequence[WriteRequest], /) -> None:
        assert isinstance(self.backend, LatencyBackend)
        self.backend.pass_bytes(sum(request.length for request in requests))
        super().write(requests)


class LatencyBackend(WrapperBackend):
    """Delays every call by `latency_s`, and limits the bytes moved to `bytes_per_s` in all.

    `jitter_s` adds a random delay of at most that much. It depends on `seed`, on the operation and
    on the number of such calls before, but not on the timing of other threads.
    """

    name: ClassVar[str] = "latency"
    writer_class = _SlowWriter

    def __init__(
        self,
        inner: Backend,
        /,
        *,
        latency_s: float | Mapping[str, float] = 0.0,
        jitter_s: float | Mapping[str, float] = 0.0,
        seed: int = 0,
        bytes_per_s: float | None = None,
    ) -> None:
        """Wrap `inner`; a mapping gives the seconds by operation."""
        super().__init__(inner)
        self._latency_s = latency_s
        self._jitter_s = jitter_s
        self._seed = seed
        self._bytes_per_s = bytes_per_s
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()  # guards `_calls`
        self._link = threading.Lock()  # held while bytes pass: requests in flight share the limit

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """Delegate after the time that the bytes take."""
        self.pass_bytes(sum(request.target.nbytes for request in requests))
        super().read(requests)

    def pass_bytes(self, count: int) -> None:
        """Sleep for the time that `count` bytes take."""
        if self._bytes_per_s:
            with self._link:
                time.sleep(count / self._bytes_per_s)

    def delay_s(self, operation: Operation, number: int) -> float:
        """Return the delay in seconds of call `number` (from 1) of `operation`."""
        jitter_s = _seconds(self._jitter_s, operation)
        if jitter_s:
            # Seeded by the call: one generator for all would depend on the order of threads.
            chance = random.Random(f"{self._seed} {operation} {number}")  # noqa: S311 - no secret
            jitter_s *= chance.random()
        return _seconds(self._latency_s, operation) + jitter_s

    def _around(self, operation: Operation, names: tuple[str, ...], call: Callable[[], _T]) -> _T:
        del names
        with self._lock:
            self._calls[operation] += 1
            number = self._calls[operation]
        time.sleep(self.delay_s(operation, number))
        return call()


def _seconds(of: float | Mapping[str, float], operation: str) -> float:
    return of if isinstance(of, int | float) else of.get(operation, 0.0)

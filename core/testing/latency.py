"""A backend that is slow on purpose, by the same delays in every run."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, ClassVar, TypeVar

from penstock.core.abc import BlobWriter
from penstock.core.testing.wrapper import WrapperBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.testing.wrapper import Operation
    from penstock.core.types import ReadRequest, WriteRequest

_T = TypeVar("_T")


class LatencyBackend(WrapperBackend):
    """Every call takes `latency_s` longer, and moved bytes pass at `bytes_per_s` at most.

    With `jitter_s` a call takes up to so much longer still. How much depends on `seed`, on the
    operation and on how many such calls came before, but not on what other threads do.
    """

    name: ClassVar[str] = "latency"

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
        """Wrap `inner`; a mapping gives the seconds of single operations."""
        super().__init__(inner)
        self._latency_s = latency_s
        self._jitter_s = jitter_s
        self._seed = seed
        self._bytes_per_s = bytes_per_s
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()  # guards `_calls`

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """Delegate, with a writer that is slow in proportion to its bytes."""
        return _SlowWriter(self, super().create(name, size_hint=size_hint))

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """Delegate, slowly."""
        self.pass_bytes(sum(request.target.nbytes for request in requests))
        super().read(requests)

    def pass_bytes(self, count: int) -> None:
        """Sleep as long as `count` bytes take."""
        if self._bytes_per_s:
            time.sleep(count / self._bytes_per_s)

    def delay_s(self, operation: Operation, number: int) -> float:
        """What call `number` (from 1) of `operation` takes longer, in seconds."""
        jitter_s = _seconds(self._jitter_s, operation)
        if jitter_s:
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


class _SlowWriter(BlobWriter):
    def __init__(self, backend: LatencyBackend, inner: BlobWriter) -> None:
        self._backend = backend
        self._inner = inner

    def write(self, requests: Sequence[WriteRequest], /) -> None:
        self._backend.pass_bytes(sum(request.length for request in requests))
        self._inner.write(requests)

    def seal(self, length: int, /) -> None:
        self._inner.seal(length)

    def abort(self) -> None:
        self._inner.abort()


def _seconds(of: float | Mapping[str, float], operation: str) -> float:
    return of if isinstance(of, int | float) else of.get(operation, 0.0)

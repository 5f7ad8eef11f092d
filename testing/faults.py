"""Backends that fail, hang, crash or lag on purpose, around any real backend.

Operations are `create write seal sync abort read publish list stat delete`; calls count from 1.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, TypeGuard, TypeVar, get_args

from penstock.core.abc import Backend, DelegatingBackend, DelegatingWriter
from penstock.core.errors import PenstockError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from penstock.core.abc import BlobWriter, delegating
    from penstock.core.types import ReadRequest, WriteRequest

__all__ = [
    "EFFECTS",
    "CrashAt",
    "Fault",
    "FaultyBackend",
    "SimulatedCrashError",
]

EFFECTS: tuple[Operation, ...] = (
    "create", "write", "seal", "sync", "abort", "publish", "delete",
)  # fmt: skip
"""The operations that change stored data."""

_T = TypeVar("_T")

Operation = Literal[
    "create", "write", "seal", "sync", "abort", "read", "publish", "list", "stat", "delete",
]  # fmt: skip

OPERATIONS: tuple[Operation, ...] = get_args(Operation)


class WrapperWriter(DelegatingWriter):
    """Delegates all calls; `abort` swallows injected errors."""

    def abort(self) -> None:
        """Abort, and never raise an error of the store."""
        try:
            super().abort()
        except StorageError:  # `abort` never raises: an injected error must not break the contract
            self.inner.abort()


class WrapperBackend(DelegatingBackend):
    """Delegates all calls; passes calls of `OPERATIONS` through `_around(operation, names, call)`.

    Background batches run in the pool of the base class, since the wrapped backend would run them
    without the faults.
    """

    name: ClassVar[str] = "wrapper"
    writer_class = WrapperWriter

    def around(
        self, operation: delegating.Operation, names: tuple[str, ...], call: Callable[[], _T], /
    ) -> _T:
        """Pass calls that read or change stored bytes to `_around`; `read_record` is a `read`."""
        named = "read" if operation == "read_record" else operation
        return self._around(named, names, call) if _counts(named) else call()

    def submit_write(self, writer: BlobWriter, requests: Sequence[WriteRequest], /) -> Future[None]:
        """Run `writer.write(requests)` in the background."""
        return Backend.submit_write(self, writer, requests)

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """Run `read(requests)` in the background."""
        return Backend.submit_read(self, requests)

    def store_time_s(self) -> float:
        """Return the store's time.

        The default method publishes a probe record to learn the time. If the inner backend inherits
        it, the probe is published through this wrapper, so that faults can hit it: a process may
        die right after the probe.
        """
        if type(self.inner).store_time_s is Backend.store_time_s:
            return Backend.store_time_s(self)
        return super().store_time_s()

    def _around(self, operation: Operation, names: tuple[str, ...], call: Callable[[], _T]) -> _T:
        del operation, names
        return call()


def _counts(operation: str) -> TypeGuard[Operation]:
    return operation in OPERATIONS


class SimulatedCrashError(BaseException):
    """Signals that the process counts as dead. No handler of `Exception` catches it."""


@dataclass(slots=True)
class Fault:
    """A fault that hits calls of one operation.

    Attributes:
        operation: The operation to hit.
        first: The number, from 1, of the first matching call to hit.
        times: The number of calls to hit in a row; None hits all calls from `first` on.
        match: A text that a name in the call must contain.
        error: The error to raise; None raises nothing.
        late: Whether to raise after the wrapped call has run, as if the answer were lost.
        seconds: The seconds to sleep before the call.
        until: An event to wait for before the call.
        seen: The number of matching calls so far.
        reached: An event that is set when a call is hit.
    """

    operation: Operation
    first: int = 1
    times: int | None = 1
    match: str = ""
    error: BaseException | type[BaseException] | None = None
    late: bool = False
    seconds: float = 0.0
    until: threading.Event | None = None
    seen: int = 0
    reached: threading.Event = field(default_factory=threading.Event)

    def applies(self, operation: str, names: tuple[str, ...]) -> bool:
        """Count the call if it matches, and return whether the fault hits it."""
        if operation != self.operation or not any(self.match in name for name in names or ("",)):
            return False
        self.seen += 1
        return self.seen >= self.first and (
            self.times is None or self.seen < self.first + self.times
        )


class FaultyBackend(WrapperBackend):
    """Fails, sleeps or blocks as the test asks.

    Example:
        `faulty.fail("publish", StorageError("no"), nth=2, match="commits/")`
    """

    name: ClassVar[str] = "faulty"

    def __init__(self, inner: Backend, /, *faults: Fault) -> None:
        """Wrap `inner`; more faults may be added at any time."""
        super().__init__(inner)
        self._faults = list(faults)
        self._calls: list[tuple[str, tuple[str, ...]]] = []
        self._lock = threading.Lock()  # guards `_faults` with their counts, and `_calls`

    @property
    def calls(self) -> list[tuple[str, tuple[str, ...]]]:
        """The `(operation, names)` of every call so far, in order."""
        with self._lock:
            return list(self._calls)

    def add(self, fault: Fault) -> Fault:
        """Add a fault, and return it."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Remove all faults; blocked calls stay blocked until their event is set."""
        with self._lock:
            self._faults.clear()

    def fail(
        self,
        operation: Operation,
        error: BaseException | type[BaseException] | None = None,
        *,
        nth: int = 1,
        times: int | None = 1,
        match: str = "",
        late: bool = False,
    ) -> Fault:
        """Raise `error` (default: a StorageError) in `times` matching calls from the `nth` on."""
        error = error or StorageError(f"simulated failure of {operation}")
        return self.add(Fault(operation, nth, times, match, error=error, late=late))

    def slow(self, operation: Operation, seconds: float, *, match: str = "") -> Fault:
        """Sleep before every matching call."""
        return self.add(Fault(operation, times=None, match=match, seconds=seconds))

    def block(
        self, operation: Operation, until: threading.Event, *, nth: int = 1, match: str = ""
    ) -> Fault:
        """Hold matching calls from the `nth` on until the event is set; see `Fault.reached`."""
        return self.add(Fault(operation, nth, None, match, until=until))

    def _around(self, operation: Operation, names: tuple[str, ...], call: Callable[[], _T]) -> _T:
        with self._lock:
            self._calls.append((operation, names))
            hits = [fault for fault in self._faults if fault.applies(operation, names)]
        for fault in hits:  # outside the lock: a blocked call must not block other calls
            fault.reached.set()
            if fault.seconds:
                time.sleep(fault.seconds)
            if fault.until is not None:
                fault.until.wait()
            if fault.error is not None and not fault.late:
                raise fault.error
        result = call()
        for fault in hits:
            if fault.error is not None:
                raise fault.error
        return result


class CrashAt(WrapperBackend):
    """Crashes at the `n`-th call, before or after running it; no later call runs.

    With `kill` the process is really killed (SIGKILL). Without it, the `n`-th and every later call
    raise `SimulatedCrashError`, so that the caller's clean-up cannot change the store.
    """

    name: ClassVar[str] = "crash"

    def __init__(
        self,
        inner: Backend,
        n: int,
        /,
        *,
        after: bool = False,
        kill: bool = False,
        operations: Sequence[Operation] = OPERATIONS,
    ) -> None:
        """Wrap `inner`; only calls of `operations` count."""
        super().__init__(inner)
        self._n = n
        self._after = after
        self._kill = kill
        self._operations = frozenset(operations)
        self._count = 0
        self._dead = False
        self._lock = threading.Lock()  # guards `_count` and `_dead`

    @property
    def crashed(self) -> bool:
        """Whether the `n`-th call was made."""
        return self._dead

    def _around(self, operation: Operation, names: tuple[str, ...], call: Callable[[], _T]) -> _T:
        del names
        with self._lock:
            was_dead = self._dead
            self._count += operation in self._operations
            now = not was_dead and operation in self._operations and self._count == self._n
            self._dead = was_dead or now
        if was_dead and self._kill:
            threading.Event().wait()  # forever: another thread is about to kill the process
        if now and self._after:
            with contextlib.suppress(PenstockError):  # a dead process receives no answer
                call()
        if now and self._kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if was_dead or now:
            msg = f"simulated crash at call {self._n} ({operation})"
            raise SimulatedCrashError(msg)
        return call()


class _SlowWriter(WrapperWriter):
    def write(self, requests: Sequence[WriteRequest], /) -> None:
        assert isinstance(self.backend, LatencyBackend)
        self.backend.pass_bytes(sum(request.length for request in requests))
        super().write(requests)


class LatencyBackend(WrapperBackend):
    """Delays every call by `latency_s`, and limits total throughput to `bytes_per_s`.

    `jitter_s` is the longest random delay to add. The random delay depends on `seed`, the operation
    and the number of its earlier calls, but not on the timing of other threads.
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
        """Wrap `inner`; a mapping gives seconds per operation."""
        super().__init__(inner)
        self._latency_s = latency_s
        self._jitter_s = jitter_s
        self._seed = seed
        self._bytes_per_s = bytes_per_s
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()  # guards `_calls`
        self._link = threading.Lock()  # held while bytes pass: parallel requests share the limit

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """Read after a sleep for the transfer time."""
        self.pass_bytes(sum(request.target.nbytes for request in requests))
        super().read(requests)

    def pass_bytes(self, count: int) -> None:
        """Sleep for the transfer time of `count` bytes."""
        if self._bytes_per_s:
            with self._link:
                time.sleep(count / self._bytes_per_s)

    def delay_s(self, operation: Operation, number: int) -> float:
        """Return the delay in seconds of call `number` (from 1) of `operation`."""
        jitter_s = _seconds(self._jitter_s, operation)
        if jitter_s:
            # Seeded per call: a shared generator would depend on the order of threads.
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

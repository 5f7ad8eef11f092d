"""Backends that fail, hang or crash on purpose, around any real backend.

Operations are `create write seal abort read publish list stat delete`; calls are counted from 1.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeVar

from penstock.core.errors import PenstockError, StorageError
from penstock.core.testing.wrapper import OPERATIONS, WrapperBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc import Backend
    from penstock.core.testing.wrapper import Operation

__all__ = [
    "EFFECTS",
    "CrashAt",
    "Fault",
    "FaultyBackend",
    "SimulatedCrashError",
]

EFFECTS: tuple[Operation, ...] = ("create", "write", "seal", "abort", "publish", "delete")
"""The operations that change stored data."""

_T = TypeVar("_T")


class SimulatedCrashError(BaseException):
    """The process counts as dead; not an `Exception`, so that no handler continues after it."""


@dataclass(slots=True)
class Fault:
    """A fault that hits calls of one operation.

    Attributes:
        operation: The operation to hit.
        first: The number, from 1, of the first matching call to hit.
        times: The number of calls to hit in a row; None hits all from `first` on.
        match: A text that a name in the call has to contain.
        error: The error to raise; None raises nothing.
        late: Whether to raise only after the wrapped call was carried out, as a lost answer does.
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
        """Count the call if it matches, and return whether it is hit."""
        if operation != self.operation or not any(self.match in name for name in names or ("",)):
            return False
        self.seen += 1
        return self.seen >= self.first and (
            self.times is None or self.seen < self.first + self.times
        )


class FaultyBackend(WrapperBackend):
    """Fails, sleeps or blocks as the test tells it.

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
        """The `(operation, names)` of every call so far, in order of arrival."""
        with self._lock:
            return list(self._calls)

    def add(self, fault: Fault) -> Fault:
        """Add a fault, and return it."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Remove all faults; calls that are blocked stay so until their event is set."""
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
        """Raise `error` (a StorageError by default) from the `nth` matching call on."""
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
        for fault in hits:  # outside of the lock: a blocked call must not hold up other calls
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
    """Crashes at the `n`-th call, before or after carrying it out; no later call is carried out.

    With `kill` the process is really killed (SIGKILL). Without it `SimulatedCrashError` is raised
    by this and every later call, so that no clean-up of the caller can change the store.
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
        """Whether the `n`-th call came."""
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

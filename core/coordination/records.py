"""Coordination by records of the root itself, for jobs without a store of torch.

Slower than a store in memory: each post is a durable record. A deletion of the folder while the job
runs would make its registers free again, so nothing but `prune` after the grace time may do that.
"""

from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING

from penstock.core.abc import (
    COORDINATION_VALUE_BYTES,
    Coordination,
    check_blob_name,
    check_coordination_key,
    check_coordination_value,
    current_timing,
)
from penstock.core.concurrency.pool import Pool
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.coordination.polling import wait_by_reading
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    CapabilityError,
    CoordinationError,
    PenstockError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from typing import TypeVar

    from penstock.core.abc import Backend

    T = TypeVar("T")

_PARALLEL = 64
_FIRST_POLL_S = 0.005
_MOST_POLL_S = 0.5
_TRIES = 3


class RecordCoordination(Coordination):
    """Values are records below one folder of the root; `decide` is an exclusive publish.

    Does not own the backend. A call that hangs in the store is left behind after `call_s`.
    """

    def __init__(self, backend: Backend, folder: str, *, call_s: float = 10.0) -> None:
        """Attach to a folder of the root.

        Args:
            backend: The store, which has to decide exclusive publishes by itself.
            folder: Names the job within the root; no job ever uses the one of another, nor one
                that it used before its restart: its registers are decided.
            call_s: The most seconds for one call.

        Raises:
            CapabilityError: The store has no exclusive publish.
        """
        check_blob_name(folder)
        if not backend.capabilities.exclusive_publish:
            msg = (
                f"{backend.url} cannot publish exclusively, so ranks cannot agree by its records: "
                "initialise torch.distributed, whose store is used then"
            )
            raise CapabilityError(msg)
        self._backend = backend
        self._folder = folder
        self._call_s = call_s
        self._pool = Pool(_PARALLEL, "penstock-ranks", stuck_s=call_s)
        self._closed = False

    def post(self, key: str, value: bytes, /) -> None:
        """Post as the contract says; the value is durable."""
        check_coordination_value(key, value)
        data, name = bytes(value), self._name(key)
        self._call(key, lambda: self._backend.publish(name, data))

    def read(self, keys: Sequence[str], /) -> list[bytes | None]:
        """Read as the contract says, 64 records at a time."""
        for key in keys:
            check_coordination_key(key)
        names = [self._name(key) for key in keys]
        return self._call_all(keys, [lambda name=name: self._record(name) for name in names])  # type: ignore[misc]

    def decide(self, key: str, value: bytes, /) -> bytes:
        """Decide as the contract says; the decision is durable."""
        check_coordination_value(key, value)
        data, name = bytes(value), self._name(key)
        return self._call(key, lambda: self._decide(name, data))

    def wait(self, key: str, timeout_s: float, /) -> bool:
        """Wait as the contract says: looks at the record again and again, at most twice a second.

        The pause grows, since ten thousand ranks may wait for one record.
        """
        return wait_by_reading(
            self, key, timeout_s, first_s=_FIRST_POLL_S, growth=2, most_s=_MOST_POLL_S
        )

    def close(self) -> None:
        """Close as the contract says; the backend stays open."""
        self._closed = True
        self._pool.shutdown(wait=False)

    def _name(self, key: str) -> str:
        return f"{self._folder}/{key}"

    def _record(self, name: str) -> bytes | None:
        try:
            return self._backend.read_record(name, limit_bytes=COORDINATION_VALUE_BYTES)
        except BlobNotFoundError:
            return None

    def _decide(self, name: str, data: bytes) -> bytes:
        for _ in range(_TRIES):
            try:
                self._backend.publish(name, data, exclusive=True)
            except BlobExistsError:
                found = self._record(name)
                if found is not None:
                    return found
                continue  # a listing or a cache of the store lags behind
            return data
        msg = f"{name} on {self._backend.url} is taken, and cannot be read"
        raise CoordinationError(msg)

    def _call(self, key: str, call: Callable[[], T]) -> T:
        return self._call_all([key], [call])[0]

    def _call_all(self, keys: Sequence[str], calls: Sequence[Callable[[], T]]) -> list[T]:
        if self._closed:
            msg = "this rank's coordination is closed"
            raise CoordinationError(msg)
        deadline = Deadline(self._call_s, current_timing().clock)
        try:
            futures: list[Future[T]] = [self._pool.submit(call) for call in calls]
        except RuntimeError as error:
            msg = "this rank's coordination was closed meanwhile"
            raise CoordinationError(msg) from error
        late = wait(futures, deadline.left_s()).not_done
        if late:
            msg = (
                f"{self._backend.url} did not answer in {self._call_s:g} s for {len(late)} of "
                f"{len(keys)} records below {self._folder}/"
            )
            raise CoordinationError(msg)
        try:
            return [future.result() for future in futures]
        except CoordinationError:
            raise
        except PenstockError as error:
            msg = f"{self._folder}/ on {self._backend.url}: {error}"
            raise CoordinationError(msg) from error

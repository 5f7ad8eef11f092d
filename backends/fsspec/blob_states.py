"""The base class of both writers, with the states of a blob from creation to seal or abort."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from enum import Enum, auto
from typing import TYPE_CHECKING

from penstock.backends.fsspec.messages import place
from penstock.core.abc import BlobWriter
from penstock.core.concurrency.pool import Lane
from penstock.core.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from penstock.backends.fsspec.store import Store
    from penstock.core.types import WriteRequest


class Batch:
    """A batch of writes, whose future completes when the last holder releases the batch.

    Holders are the creator of the batch, and each transfer that still uses the caller's memory.
    """

    def __init__(self) -> None:
        self.future: Future[None] = Future()
        self._holders = 1
        self._error: BaseException | None = None
        self._lock = threading.Lock()  # guards `_holders` and `_error`

    def hold(self) -> None:
        """Add a holder."""
        with self._lock:
            self._holders += 1

    def release(self, error: BaseException | None = None) -> None:
        """Remove a holder; the batch fails with the first error of a holder."""
        with self._lock:
            self._holders -= 1
            self._error = self._error or error
            last, error = self._holders == 0, self._error
        if not last:
            return
        # Outside the lock, since this runs the callbacks of the future.
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


def settle(futures: Collection[Future[None]]) -> None:
    """Wait until none of `futures` is running, then raise the first error.

    If one fails or the wait is interrupted, cancels futures that have not begun. Waits for running
    futures, which may still write into the caller's memory.
    """
    try:
        _, pending = wait(futures, return_when=FIRST_EXCEPTION)
    except BaseException:
        _end(futures)
        raise
    _end(pending)
    error = next((f.exception() for f in futures if not f.cancelled() and f.exception()), None)
    if error is not None:
        raise error


def _end(futures: Collection[Future[None]]) -> None:
    for future in futures:
        future.cancel()
    wait(futures)


class WriterState(Enum):
    """The states of a blob that is written, from its creation to its seal or abort."""

    OPEN = auto()
    SEALING = auto()  # an abort waits until this ends
    SEALED = auto()
    DEAD = auto()  # a write or the seal failed: may only be aborted
    ABORTED = auto()


class StoreWriter(BlobWriter):
    """Writes the batches of a blob, one at a time, in submission order.

    Args:
        store: The store of the blob; its `feeds` pool calls `_take` for the batches.
        name: The name of the blob.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.name = name
        self._store = store
        self._lane = Lane(store.feeds)
        self._pid = os.getpid()
        self._stop = threading.Event()  # once set, no transfer begins or is retried
        # Guards the three fields below; notified when a batch or a seal ends.
        self._changed = threading.Condition()
        self._cause: BaseException | None = None
        self._state = WriterState.OPEN
        self._batches = 0

    @abstractmethod
    def _take(self, request: WriteRequest, batch: Batch) -> None:
        """Start writing a request; never runs concurrently.

        Each transfer that uses the caller's memory after this returns must hold the batch.
        """

    def _own_memory(self) -> None:
        """Copy the bytes of the ending batch that are still needed.

        The caller may reuse its memory after the batch. Never runs concurrently.
        """

    @abstractmethod
    def _finish(self, length: int) -> None:
        """Cut the blob to `length` and make it durable; never runs concurrently."""

    @abstractmethod
    def _give_up(self) -> None:
        """Remove the partial blob if possible. Runs only with no batch in flight; never raises."""

    @property
    def over(self) -> bool:
        """Whether the blob is sealed or aborted, so that its name is free for another writer."""
        return self._state in {WriterState.SEALED, WriterState.ABORTED}

    def submit(self, requests: Sequence[WriteRequest]) -> Future[None]:
        """Queue a batch after all earlier batches; see `Backend.submit_write`.

        Raises:
            StorageError: The blob is sealed or dead, or belongs to the parent of this fork.
        """
        self._check_process("write")
        with self._changed:
            self._check_open("write")
            self._batches += 1
        batch = Batch()
        batch.future.add_done_callback(self._end_batch)
        self._lane.submit(lambda: self._feed(requests, batch))
        return batch.future

    def write(self, requests: Sequence[WriteRequest], /) -> None:
        self.submit(requests).result()

    def seal(self, length: int, /) -> None:
        self._check_process("seal")
        with self._changed:
            self._wait_idle()
            self._check_open("seal")
            self._state = WriterState.SEALING
        outcome = WriterState.DEAD
        try:
            self._finish(length)
            self._check_size(length)
            outcome = WriterState.SEALED
        except BaseException as error:
            self._die(error)
            raise
        finally:
            with self._changed:
                self._state = outcome
                self._changed.notify_all()

    def abort(self) -> None:
        if os.getpid() != self._pid:
            return  # the parent continues to write its blob
        self._stop.set()  # before waiting, so that transfers in flight end soon
        with self._changed:
            self._wait_idle()
            if self.over:
                return
            self._state = WriterState.ABORTED
        self._give_up()

    def _check_size(self, length: int) -> None:
        size = self._store.stat(self.name).size_bytes
        if size != length:
            msg = (
                f"{self._where('seal')}: the store kept {size} bytes instead of {length}: save to "
                "another store"
            )
            raise StorageError(msg)

    def _die(self, cause: BaseException) -> None:
        """Record a failure, after which no transfer begins and only an abort is possible."""
        with self._changed:
            self._cause = self._cause or cause
            if self._state is WriterState.OPEN:
                self._state = WriterState.DEAD
        self._stop.set()

    def _where(self, what: str) -> str:
        return place(what, self.name, self._store.url)

    def _feed(self, requests: Sequence[WriteRequest], batch: Batch) -> None:
        error: BaseException | None = None
        try:
            try:
                for request in requests:
                    self._check_alive()
                    self._take(request, batch)
            finally:
                self._own_memory()
        except BaseException as failure:  # noqa: BLE001 - the batch's future raises it
            error = failure
        batch.release(error)

    def _end_batch(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            self._die(error)
        with self._changed:
            self._batches -= 1
            self._changed.notify_all()

    def _wait_idle(self) -> None:
        while self._batches or self._state is WriterState.SEALING:
            self._changed.wait()

    def _check_process(self, what: str) -> None:
        # Before any lock: a thread of the parent may have held it at the fork.
        if os.getpid() != self._pid:
            msg = f"{self._where(what)}: it belongs to another process (fork)"
            raise StorageError(msg)

    def _check_alive(self) -> None:
        if self._stop.is_set():
            why = f" ({self._cause})" if self._cause else ""
            msg = f"{self._where('write')}: it was abandoned{why}"
            raise StorageError(msg)

    def _check_open(self, what: str) -> None:
        if self._state is not WriterState.OPEN:
            state = f"{self._state.name.lower()} already"
            if self._state is WriterState.DEAD:
                why = f" ({self._cause})" if self._cause else ""
                state = f"dead since an earlier failure{why}; abort it and write another blob"
            msg = f"{self._where(what)}: it is {state}"
            raise StorageError(msg)

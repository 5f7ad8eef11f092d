"""The life of a blob being written, whatever carries its bytes."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from enum import Enum, auto
from typing import TYPE_CHECKING

from penstock.backends.fsspec.errors import place
from penstock.backends.fsspec.waiting import Batch
from penstock.core.abc import BlobWriter
from penstock.core.concurrency.pool import Lane
from penstock.core.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from penstock.core.concurrency.pool import Pool
    from penstock.core.types import WriteRequest


class WriterState(Enum):
    """Where a blob stands."""

    OPEN = auto()
    SEALING = auto()  # an abort waits for its end
    SEALED = auto()
    DEAD = auto()  # a write or the seal failed: may only be aborted
    ABORTED = auto()


class StoreWriter(BlobWriter):
    """A blob being written by batches, taken one at a time in the order of their submission.

    Args:
        name: Of the blob.
        url: Of the store, for messages.
        feeds: Runs what takes the batches.
    """

    def __init__(self, name: str, url: str, *, feeds: Pool) -> None:
        self.name = name
        self.url = url
        self._lane = Lane(feeds)
        self._pid = os.getpid()
        self._stop = threading.Event()  # set: nothing further is begun
        # Guards the three below; notified when a batch or a seal is over.
        self._changed = threading.Condition()
        self._cause: BaseException | None = None
        self._state = WriterState.OPEN
        self._batches = 0

    @abstractmethod
    def _take(self, request: WriteRequest, batch: Batch) -> None:
        """Take a request over; what is in use after this holds the batch. Runs alone."""

    def _own_memory(self) -> None:
        """Copy what is needed of a batch, if nothing in use holds it. Runs alone."""

    @abstractmethod
    def _finish(self, length: int) -> None:
        """Cut the blob to `length`, make it durable, and check its length. Runs alone."""

    @abstractmethod
    def _give_up(self) -> None:
        """Remove what can be removed, once nothing is in use; raises nothing. Runs alone."""

    @property
    def over(self) -> bool:
        """Whether the blob is sealed or aborted: its name is no longer this writer's."""
        return self._state in {WriterState.SEALED, WriterState.ABORTED}

    def submit(self, requests: Sequence[WriteRequest]) -> Future[None]:
        """Begin to write, behind all that was submitted before; see `Backend.submit_write`.

        Raises:
            StorageError: The blob is sealed or dead; nothing was begun.
        """
        self._check_process("write")
        with self._changed:
            self._check_open("write")
            self._batches += 1
        batch = Batch()
        batch.future.add_done_callback(self._landed)
        self._lane.submit(lambda: self._feed(requests, batch))
        return batch.future

    def write(self, requests: Sequence[WriteRequest], /) -> None:
        """As the contract says."""
        self.submit(requests).result()

    def seal(self, length: int, /) -> None:
        """As the contract says."""
        self._check_process("seal")
        with self._changed:
            self._wait_idle()
            self._check_open("seal")
            self._state = WriterState.SEALING
        outcome = WriterState.DEAD
        try:
            self._finish(length)
            outcome = WriterState.SEALED
        except BaseException as error:
            self._die(error)
            raise
        finally:
            with self._changed:
                self._state = outcome
                self._changed.notify_all()

    def abort(self) -> None:
        """As the contract says."""
        if os.getpid() != self._pid:  # the parent's blob is not ours to end
            return
        self._stop.set()
        with self._changed:
            self._wait_idle()
            if self.over:
                return
            self._state = WriterState.ABORTED
        self._give_up()

    def _die(self, cause: BaseException) -> None:
        """After a failure: nothing further is begun, and only an abort is left."""
        with self._changed:
            self._cause = self._cause or cause
            if self._state is WriterState.OPEN:
                self._state = WriterState.DEAD
        self._stop.set()

    def _where(self, what: str) -> str:
        return place(what, self.name, self.url)

    def _feed(self, requests: Sequence[WriteRequest], batch: Batch) -> None:
        error: BaseException | None = None
        try:
            try:
                for request in requests:
                    self._check_alive()
                    self._take(request, batch)
            finally:
                self._own_memory()
        except BaseException as failure:  # noqa: BLE001 - raised by who waits for the batch
            error = failure
        batch.release(error)

    def _landed(self, future: Future[None]) -> None:
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
        if os.getpid() != self._pid:  # before any lock, which a fork may have left held
            msg = f"{self._where(what)}: it was begun in another process (fork)"
            raise StorageError(msg)

    def _check_alive(self) -> None:
        if self._stop.is_set():
            why = f" ({self._cause})" if self._cause else ""
            msg = f"{self._where('write')}: it was given up{why}"
            raise StorageError(msg)

    def _check_open(self, what: str) -> None:
        if self._state is not WriterState.OPEN:
            told = f"{self._state.name.lower()} already"
            if self._state is WriterState.DEAD:
                why = f" ({self._cause})" if self._cause else ""
                told = f"dead since an earlier failure{why}; abort it and write another blob"
            msg = f"{self._where(what)}: it is {told}"
            raise StorageError(msg)

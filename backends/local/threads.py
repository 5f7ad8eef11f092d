"""The engine of `posix`: a few threads that block in `preadv` and `pwritev`, without the GIL."""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from penstock.backends.local.transfer import Flight, Slot
from penstock.core.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.local.transfer import Transfer, TransferBatch

    Call = Callable[[int, Sequence[memoryview], int], int]


class ThreadEngine:
    """Moves transfers in at most `parallel` threads, which it starts on demand."""

    def __init__(
        self, parallel: int, *, readv: Call = os.preadv, writev: Call = os.pwritev
    ) -> None:
        self._parallel = parallel
        self._readv, self._writev = readv, writev
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards `_threads` and `_closed`

    def start(self, batch: TransferBatch, transfers: Sequence[Transfer]) -> None:
        """See `Engine.start`."""
        with self._lock:
            if self._closed:
                msg = "the backend is closed"
                raise StorageError(msg)
            for _ in range(min(self._parallel - len(self._threads), len(transfers))):
                thread = threading.Thread(
                    target=self._work, name=f"penstock-posix-{len(self._threads)}", daemon=True
                )
                try:
                    start_thread(thread)
                except StorageError:
                    if self._threads:
                        break  # the running threads move everything, only slower
                    raise
                self._threads.append(thread)
            batch.begin(len(transfers))
            for transfer in transfers:
                self._queue.put(transfer)

    def close(self) -> None:
        """See `Engine.close`."""
        if os.getpid() != self._pid:  # in a forked child, which lacks the threads
            return
        with self._lock:
            first, self._closed = not self._closed, True
            if first:
                for _ in self._threads:
                    self._queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _work(self) -> None:
        slot = Slot()
        while (transfer := self._queue.get()) is not None:
            batch = transfer.batch
            try:
                if not batch.failed:
                    carry(Flight(transfer, slot), self._readv, self._writev)
            except Exception as error:  # noqa: BLE001 - recorded; the thread must survive
                batch.fail(error, transfer)
            del transfer  # before `done`: then the owner of the buffers may free them
            batch.done()
            del batch


def start_thread(thread: threading.Thread) -> None:
    """Start a thread of an engine.

    Raises:
        StorageError: The process limit is reached.
    """
    try:
        thread.start()
    except RuntimeError as error:
        msg = (
            f"cannot start the thread {thread.name} ({error}): raise the process limit "
            "(ulimit -u, pids.max of the container)"
        )
        raise StorageError(msg) from error


def carry(flight: Flight, readv: Call, writev: Call) -> None:
    """Complete one transfer in the calling thread.

    Raises:
        OSError, EOFError: The transfer failed.
    """
    transfer = flight.transfer
    call = writev if transfer.write else readv
    while True:
        try:
            count = call(transfer.fd, flight.views(), flight.offset)
        except OSError as error:
            if not flight.retry_after(error.errno or 0):
                raise
            continue
        if flight.moved(count):
            return

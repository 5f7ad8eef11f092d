"""The backend `uring` and its engine: one thread keeps `depth` transfers in flight in the ring."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from penstock.backends.local.base import LocalBackend, LocalConfig
from penstock.backends.local.threads import start_thread
from penstock.backends.local.transfer import Flight, Slot
from penstock.backends.uring.ring import Ring
from penstock.core.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.local.transfer import Engine, Transfer, TransferBatch
    from penstock.core.abc import PluginConfig

log = logging.getLogger("penstock")

_LOST: list[RingEngine] = []  # engines that broke down while the kernel may still use their memory


class RingEngine:
    """Moves transfers in lanes 0 to depth-1. Each lane has a bounce slot, and moves one at a time.

    The ring has an entry for each lane, and each lane has at most one call in flight, so neither
    queue can overflow.
    """

    def __init__(self, ring: Ring, depth: int) -> None:
        self._ring = ring
        self._slots = [Slot() for _ in range(depth)]
        self._free = list(range(depth))
        self._flights: dict[int, Flight] = {}
        self._retries: deque[int] = deque()  # lanes whose call must be submitted again
        self._waiting: deque[Transfer] = deque()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._broken: Exception | None = None
        self._lock = threading.Lock()  # guards `_waiting`, `_thread`, `_closing`, `_broken`

    def start(self, batch: TransferBatch, transfers: Sequence[Transfer]) -> None:
        """See `Engine.start`."""
        with self._lock:
            if self._closing:
                msg = "the backend is closed"
                raise StorageError(msg)
            if self._broken is not None:
                msg = f"the io_uring engine broke down ({self._broken}); open a new backend"
                raise StorageError(msg)
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="penstock-uring", daemon=True)
                start_thread(thread)
                self._thread = thread
            batch.begin(len(transfers))
            self._waiting.extend(transfers)
            self._ring.wake()  # under the lock: without it the ring may already be closed

    def close(self) -> None:
        """See `Engine.close`."""
        if os.getpid() != self._pid:  # in a forked child: ring and thread are the parent's
            return
        with self._lock:
            first, self._closing = not self._closing, True
            thread = self._thread
            if thread is not None and thread.is_alive():
                self._ring.wake()
            elif first:
                self._ring.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # -- the ring's own thread ----------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._run_once():
                pass
        except Exception as error:  # noqa: BLE001 - recorded in every waiting future
            self._break_down(error)
        with self._lock:  # excludes `wake`, which would write to a closed eventfd
            self._ring.close()

    def _run_once(self) -> bool:
        self._fill()
        submitted = self._ring.submit()
        if not self._flights and not self._waiting:
            with self._lock:
                if self._closing and not self._waiting:
                    return False
        # No completion wakes this thread for a call that the kernel did not take, so it polls.
        if submitted and not self._retries:
            self._ring.wait()
        else:
            time.sleep(0.001)
        for lane, result in self._ring.completions():
            self._landed(lane, result)
        return True

    def _fill(self) -> None:
        while self._retries and self._launch(self._retries[0]):
            self._retries.popleft()
        while self._free and not self._retries:
            with self._lock:
                if not self._waiting:
                    return
                transfer = self._waiting.popleft()
            if transfer.batch.failed:
                self._end(transfer, None)
                continue
            lane = self._free.pop()
            try:
                self._flights[lane] = Flight(transfer, self._slots[lane])
            except Exception as error:  # noqa: BLE001 - recorded in the batch
                self._free.append(lane)
                self._end(transfer, error)
                continue
            if not self._launch(lane):
                self._retries.append(lane)

    def _launch(self, lane: int) -> bool:
        return self._ring.prepare(lane, self._flights[lane])

    def _landed(self, lane: int, result: int) -> None:
        flight = self._flights[lane]
        error: Exception | None = None
        try:
            if result >= 0:
                complete = flight.moved(result)
            elif flight.retry_after(-result):
                complete = False
            else:
                raise OSError(-result, os.strerror(-result))  # noqa: TRY301
        except Exception as failure:  # noqa: BLE001 - recorded in the batch
            error, complete = failure, True
        if not complete:
            self._retries.append(lane)
            return
        del self._flights[lane]
        self._free.append(lane)
        self._end(flight.transfer, error)

    def _end(self, transfer: Transfer, error: Exception | None) -> None:
        if error is not None:
            transfer.batch.fail(error, transfer)
        transfer.batch.done()

    def _break_down(self, error: Exception) -> None:
        """Fail all transfers, each only after the kernel no longer uses its memory.

        Closing the ring is not enough: the kernel may end some calls, such as direct writes, after
        `close` returns. But it still adds the completions of submitted calls to the shared queue,
        so this method waits for them. If that queue cannot be read, the futures stay unresolved and
        the memory is never freed. The caller's own deadline then ends its wait.
        """
        _LOST.append(self)
        with self._lock:
            self._broken = error
            waiting, self._waiting = list(self._waiting), deque()
        for transfer in waiting:
            self._end(transfer, error)
        try:
            held = self._ring.in_kernel()
            for lane in self._flights.keys() - held:
                self._end(self._flights.pop(lane).transfer, error)
            while self._flights:
                time.sleep(0.001)
                for lane, _ in self._ring.completions():
                    self._end(self._flights.pop(lane).transfer, error)
        except Exception:
            log.exception("io_uring broke down; its transfers in flight are abandoned")
            return
        _LOST.remove(self)


class UringConfig(LocalConfig):
    """Options of `uring`.

    Attributes:
        depth: Maximum calls in flight, each of up to 16 MiB.
    """

    depth: int = Field(default=16, ge=1, le=1024)


class UringBackend(LocalBackend):
    """Keeps blobs and records as files, moved by one io_uring instance.

    Does not open where io_uring cannot be used: if the package `liburing` does not work on this
    machine, if the kernel or a container forbids io_uring, or if the environment variable
    `PENSTOCK_DISABLE_URING` is set to anything but `0`.
    """

    name: ClassVar[str] = "uring"
    Config: ClassVar[type[PluginConfig]] = UringConfig
    _config: UringConfig

    def __init__(self, config: UringConfig, /) -> None:
        """Set up the ring to probe io_uring, without touching a file.

        Raises:
            CapabilityError: io_uring cannot be used here; the message says why.
        """
        super().__init__(config)
        self._running_engine()

    @property
    def _parallel(self) -> int:
        return self._config.depth

    def _open_engine(self) -> Engine:
        return RingEngine(Ring(self._config.depth), self._config.depth)

"""Batches: transfers that are submitted together, with one future for the end of all."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Protocol

from penstock.backends.local.failures import advised, storage_error
from penstock.core.errors import BlobTruncatedError, StorageError
from penstock.core.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.local.failures import Advise
    from penstock.backends.local.transfer import Transfer


class TransferBatch:
    """Counts transfers down; keeps the first error, and waits for the other transfers.

    The future is resolved only when the kernel no longer uses any buffer of the batch: its caller
    may free them at once.
    """

    def __init__(
        self,
        what: str,
        root: str,
        *,
        finish: Callable[[], None] | None = None,
        advise: Advise | None = None,
    ) -> None:
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # no cancelling: the kernel has the buffers
        self._what = what
        self._root = root
        self._finish = finish
        self._advise = advise
        self._left = 0
        self._error: Exception | None = None
        self._lock = threading.Lock()  # guards `_left` and `_error`

    @property
    def failed(self) -> bool:
        """Whether a transfer has failed, so that those not yet begun may be dropped."""
        return self._error is not None

    def begin(self, count: int) -> None:
        """Expect `count` calls of `done`; with none, the batch is complete at once."""
        self._left = count
        if count == 0:
            self._resolve()

    def fail(self, error: Exception, transfer: Transfer | None = None) -> None:
        """Keep an error, mapped to one of our own, if it is the first."""
        with self._lock:
            if self._error is None:
                self._error = self._explain(error, transfer)

    def done(self) -> None:
        """Count a transfer that has ended, with or without an error, and has freed its buffers."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._resolve()

    def _resolve(self) -> None:
        if self._finish is not None:
            self._finish()
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(None)

    def _explain(self, error: Exception, transfer: Transfer | None) -> Exception:
        name = transfer.name if transfer else ""
        if isinstance(error, OSError):
            advice = ""
            if self._advise is not None and transfer is not None:
                where = ByteRange(transfer.offset, transfer.offset + transfer.length)
                advice = self._advise(error, where)
            known = storage_error(error, self._what, name, self._root)
            mapped: Exception = advised(known, advice)
        elif isinstance(error, EOFError):
            msg = f"{name} under {self._root} ends before the range that was asked for"
            mapped = BlobTruncatedError(msg)
        elif isinstance(error, StorageError):
            return error
        else:
            msg = f"cannot {self._what} {name} under {self._root}: {error!r}"
            mapped = StorageError(msg)
        mapped.__cause__ = error
        return mapped


class Engine(Protocol):
    """Moves transfers; several batches may be in flight."""

    def start(self, batch: TransferBatch, transfers: Sequence[Transfer]) -> None:
        """Start the transfers without waiting for I/O; `batch.future` is resolved at their end."""

    def close(self) -> None:
        """Wait for the transfers in flight, and release everything; idempotent."""


def failed(error: StorageError) -> Future[None]:
    """Return a future with the error of a call that could not begin."""
    future: Future[None] = Future()
    future.set_exception(error)
    return future


def settle(future: Future[None]) -> None:
    """Wait for `future`, and raise its error.

    Even when interrupted (Ctrl-C) this returns only when no buffer is in use: the caller would
    free memory that the kernel still writes to.
    """
    try:
        future.result()
    finally:
        if not future.done():
            wait([future])

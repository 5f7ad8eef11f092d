"""Reads each blob from the first of several places that has it."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING

from penstock.core.errors import BlobNotFoundError, BlobTruncatedError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc import Backend
    from penstock.core.types import ReadRequest

log = logging.getLogger("penstock")


def read_from(backends: Sequence[Backend], requests: Sequence[ReadRequest]) -> None:
    """Fill every target from the first of `backends` that has its blob.

    A backend that fails otherwise is passed over with a warning; its error is raised if no other
    backend has the blob.

    Raises:
        StorageError: As `Backend.read`.
    """
    failure: StorageError | None = None
    todo = list(requests)
    for backend in backends:
        here = todo
        try:
            if failure is None:
                backend.read(todo)
                return
            todo = _read_singly(backend, here)
        except BlobNotFoundError as error:
            failure = error
            try:
                todo = _read_singly(backend, here)
            except BlobTruncatedError:
                raise
            except StorageError as worse:
                log.warning("%s cannot be read, trying the next tier: %s", backend.url, str(worse))
                failure, todo = worse, here
        except BlobTruncatedError:
            raise  # the blob is damaged: core reads it from another tier, and repairs it
        except StorageError as error:
            log.warning("%s cannot be read, trying the next tier: %s", backend.url, str(error))
            failure = error
        if not todo:
            return
    assert failure is not None
    raise failure


def _read_singly(backend: Backend, requests: Sequence[ReadRequest]) -> list[ReadRequest]:
    """Read the `requests` for blobs that this backend has; return the others."""
    there = {name: _has(backend, name) for name in {request.name for request in requests}}
    here = [request for request in requests if there[request.name]]
    rest = [request for request in requests if not there[request.name]]
    if here:
        try:
            backend.read(here)
        except BlobNotFoundError:  # evicted since `stat`: the next tier has it
            return list(requests)
    return rest


def _has(backend: Backend, name: str) -> bool:
    try:
        backend.stat(name)
    except BlobNotFoundError:
        return False
    return True


def read_in_background(
    backends: Sequence[Backend],
    requests: Sequence[ReadRequest],
    submit: Callable[[Callable[[], None]], object],
) -> Future[None]:
    """Read by the fastest backend's own engine; if that fails, let `submit` run `read_from`."""
    done: Future[None] = Future()

    def again() -> None:
        try:
            read_from(backends, requests)
        except BaseException as error:  # noqa: BLE001 - a task's boundary: the future has it
            done.set_exception(error)
        else:
            done.set_result(None)

    def first_is_over(first: Future[None]) -> None:
        if first.exception() is None:
            done.set_result(None)
        elif isinstance(first.exception(), StorageError):
            try:
                submit(again)
            except RuntimeError as error:  # closed meanwhile
                done.set_exception(StorageError(f"closed while it was read: {error}"))
        else:
            done.set_exception(first.exception())

    backends[0].submit_read(requests).add_done_callback(first_is_over)
    return done

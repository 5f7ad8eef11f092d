"""Maps the errors of fsspec's file systems to those of Penstock, without credentials."""

from __future__ import annotations

import errno
import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    CapabilityError,
    PenstockError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
)
from penstock.core.types import show_text

if TYPE_CHECKING:
    from collections.abc import Iterator

_USER_INFO = re.compile(r"(?<=://)(?:[^/\s'\"@]+@|[^/\s'\"@:]+:(?!\d+/)[^\s'\"@]*@)")
# http.client quotes the value in this message. It is mostly a credential that ends in a line break.
_HEADER = re.compile(r"(Invalid header value).*", re.DOTALL)
_QUERY = re.compile(r"(://[^\s'\"?]*)\?[^\s'\"]*")
_FULL = {errno.ENOSPC, errno.EDQUOT}
_MANY_REQUESTS, _NOT_FOUND, _NO_SUCH_RANGE, _SERVER_ERROR = 429, 404, 416, 500
_DENIED = {401, 403}


class RefusedAnswerError(Exception):
    """An answer of a server that the file system would accept, but Penstock refuses."""


class Scrubber:
    """Removes credentials from text."""

    def __init__(self, secrets: tuple[str, ...]) -> None:
        # Longest first: if one secret starts with another, the rest of the longer one would stay.
        self._secrets = sorted(secrets, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """Return `text` without known secrets, and its URLs without user names and queries."""
        text = _HEADER.sub(r"\1 (a credential may end with a line break)", text)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return _QUERY.sub(r"\1", _USER_INFO.sub("", text))


def place(what: str, name: str, url: str) -> str:
    """Return the start of an error text, with the operation, the name and the store."""
    return f"cannot {what} {name or 'the root'} on {url}"


def status_of(error: BaseException) -> int:
    """Return the HTTP status from the attributes that most file systems use; 0 if none is set."""
    status = getattr(error, "status", None) or getattr(error, "status_code", None)
    return status if isinstance(status, int) else 0


def is_transient(error: BaseException) -> bool:
    """Return whether another attempt may succeed."""
    if isinstance(error, PenstockError):
        return False
    status = status_of(error)
    if status:
        return status >= _SERVER_ERROR or status == _MANY_REQUESTS
    if isinstance(error, (TimeoutError, ConnectionError, EOFError)):
        return True
    # Network libraries raise errors without a number and with their own base classes.
    library = type(error).__module__.partition(".")[0]
    return library in {"aiohttp", "urllib3", "requests", "httpx"}


def storage_error(
    error: Exception, what: str, name: str, *, url: str, scrub: Scrubber
) -> StorageError:
    """Return `error` as a `StorageError`.

    Args:
        error: The error of the file system.
        what: The verb that failed.
        name: The blob or record; empty for the root.
        url: The store.
        scrub: Removes credentials.
    """
    where = place(what, name, url)
    status = status_of(error)
    text = show_text(scrub(str(error))) or type(error).__name__
    kind: type[StorageError] = StorageError
    if isinstance(error, FileNotFoundError) or status == _NOT_FOUND:
        kind, text = BlobNotFoundError, "it does not exist"
    elif isinstance(error, (IsADirectoryError, NotADirectoryError)):
        kind = BlobNotFoundError if what in {"read", "stat"} else StorageError
        text = "a folder is in the place of the blob, or a file in the place of a folder"
    elif isinstance(error, FileExistsError):
        kind, text = BlobExistsError, "the name is taken"
    elif status == _NO_SUCH_RANGE:
        kind, text = BlobTruncatedError, "it ends before the requested byte range"
    elif isinstance(error, PermissionError) or status in _DENIED:
        text = f"access denied ({text}); check credentials and permissions"
    elif isinstance(error, OSError) and error.errno in _FULL:
        kind, text = StorageFullError, f"{os.strerror(error.errno)}; make room or raise the quota"
    elif isinstance(error, NotImplementedError):
        kind = CapabilityError
        text = f"this kind of store cannot do that ({text}); save to another store"
    elif isinstance(error, TimeoutError):
        kind, text = StorageTimeoutError, "no answer in time; is the store reachable?"
    else:
        text = f"{type(error).__name__}: {text}"
        if is_transient(error):
            text += "; check that the store is reachable, and try again"
    return kind(f"{where}: {text}")


class Mapped(Protocol):
    """Converts a store's error to one of Penstock's errors, like `storage_error`."""

    def __call__(
        self, error: Exception, what: str, name: str, *, url: str, scrub: Scrubber
    ) -> StorageError: ...


@contextmanager
def explained(
    what: str, name: str, *, url: str, scrub: Scrubber, mapped: Mapped = storage_error
) -> Iterator[None]:
    """Convert every exception in the block to one of Penstock's errors."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:  # noqa: BLE001 - stores have no common root of errors
        # When fsspec asks for a size over HTTP, it turns every error into "not found", and only the
        # cause shows a refusal. A blob that seems not to exist would count as damaged.
        cause = error if isinstance(error, RefusedAnswerError) else error.__cause__
        failure = (
            StorageError(f"{place(what, name, url)}: {scrub(str(cause))}")
            if isinstance(cause, RefusedAnswerError)
            else mapped(error, what, name, url=url, scrub=scrub)
        )
        # A traceback shows the text of the cause, too, with the credentials that `scrub` removes.
        clean = scrub(str(error)) == str(error)
        raise failure from (error if clean else None)

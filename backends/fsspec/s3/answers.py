"""Maps errors of S3, of botocore and of the network to those of Penstock."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from penstock.backends.fsspec.messages import Scrubber, place
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    PenstockError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
)
from penstock.core.types import show_text

if TYPE_CHECKING:
    from collections.abc import Collection

SERVER_ERROR = 500
PRECONDITION_FAILED = 412

_MISSING = {"NoSuchKey", "NoSuchUpload", "404", "NotFound"}
_TRUNCATED = {"InvalidRange", "416"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "507"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_BUSY = {"SlowDown", "503", "Throttling", "ThrottlingException", "RequestLimitExceeded", "429"}
_AGAIN = _BUSY | {
    "InternalError",
    "ServiceUnavailable",
    "RequestTimeout",
    "RequestTimeoutException",
    "OperationAborted",
    "ConditionalRequestConflict",
    "BadDigest",  # bytes were changed or lost in transit
    "IncompleteBody",
}
_AGAIN_STATUS = {408, 429}
_HINTS = {
    "NoSuchBucket": "create the bucket, or fix the URL",
    "InvalidAccessKeyId": "check the credentials (AWS_ACCESS_KEY_ID, AWS_PROFILE, options.key)",
    "SignatureDoesNotMatch": "check the secret key, and the clock of this machine",
    "RequestTimeTooSkewed": "set the clock of this machine",
    "AccessDenied": "the credentials lack the permission for this, or for listing the bucket",
    "403": "the credentials lack the permission for this, or for listing the bucket",
    "400": "have the credentials expired, or is the bucket in another region (options.region)?",
    "401": "check the credentials",
    "EntityTooLarge": "the store accepts no blob of this size",
    "NotImplemented": "the store lacks this part of S3; for a put, set conditional_put = 'no'",
    "PermanentRedirect": "set options.region to the region of the bucket",
    "AuthorizationHeaderMalformed": "set options.region to the region of the bucket",
}
_CREDENTIALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "MetadataRetrievalError",
    "ProfileNotFound",
    "TokenRetrievalError",
    "SSOTokenLoadError",
    "UnauthorizedSSOTokenError",
    "RefreshWithMFAUnsupportedError",
)
# The credential errors of an agent or a metadata service, for which a retry may succeed.
_CREDENTIALS_AGAIN = ("CredentialRetrievalError", "MetadataRetrievalError")
_TIMEOUTS = ("ConnectTimeoutError", "ReadTimeoutError")
_NETWORK = (
    *_TIMEOUTS,
    "EndpointConnectionError",
    "ConnectionClosedError",
    "ConnectionError",
    "HTTPClientError",
    "ResponseStreamingError",
    "IncompleteReadError",
    "ProxyConnectionError",
    "gaierror",
)
_NO_ROUTE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}


class BrokenAnswerError(ConnectionError):
    """The answer is shorter than announced, or does not match the request."""


def code_of(error: BaseException) -> str:
    """Return the S3 error code of an error answer; empty if the store did not answer.

    For an answer without a code, such as the page of a gateway, returns its status: `HTTP 502`.
    """
    answer = getattr(error, "response", None)
    if not isinstance(answer, dict):
        return ""
    return str(answer.get("Error", {}).get("Code", "")) or f"HTTP {status_of(error)}"


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error answer; 0 if the store did not answer."""
    answer = getattr(error, "response", None)
    if not isinstance(answer, dict):
        return 0
    return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_transient(error: BaseException) -> bool:
    """Return whether another attempt may succeed: the store or the network is busy or broken."""
    if isinstance(error, PenstockError):
        return False
    if status_of(error) in _AGAIN_STATUS:  # first, since a proxy may send any code with it
        return True
    if code_of(error):
        return code_of(error) in _AGAIN or status_of(error) >= SERVER_ERROR
    return _named(error, _CREDENTIALS_AGAIN) or _is_network(error)


def is_definite(error: BaseException) -> bool:
    """Return whether the store definitely did not execute the request."""
    if _named(error, _CREDENTIALS):  # nothing was sent
        return True
    return bool(code_of(error)) and status_of(error) < SERVER_ERROR


def storage_error(
    error: Exception, what: str, name: str, *, url: str, scrub: Scrubber
) -> StorageError:
    """Return `error` as a `StorageError`; see `fsspec.messages.storage_error`."""
    where = place(what, name, url)
    code = code_of(error)
    if code:
        return _answered(error, where, scrub)
    text = show_text(scrub(str(error)).strip()) or type(error).__name__
    if _named(error, _CREDENTIALS):
        return StorageError(
            f"{where}: no usable credentials ({text}); set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or options = { anon = true } for a public bucket"
        )
    if _is_timeout(error):
        return StorageTimeoutError(f"{where}: no answer in time; is the store reachable?")
    if _is_network(error):
        if not isinstance(error, BrokenAnswerError):
            text = f"no complete answer ({text})"
        return StorageError(f"{where}: {text}; check that the store is reachable, and try again")
    return StorageError(f"{where}: {type(error).__name__}: {text}")


def _answered(error: Exception, where: str, scrub: Scrubber) -> StorageError:
    code = show_text(code_of(error))
    reason = show_text(
        scrub(str(getattr(error, "response", {}).get("Error", {}).get("Message", "")))
    )
    kind: type[StorageError] = StorageError
    if code in _MISSING:
        kind, text = BlobNotFoundError, "it does not exist"
    elif code in _TRUNCATED:
        kind, text = BlobTruncatedError, "it ends before the requested range"
    elif status_of(error) == PRECONDITION_FAILED:
        kind, text = BlobExistsError, "the name is taken"
    elif code in _EXPIRED:
        text = (
            f"the credentials have expired ({code}); renew them (aws sso login, or new AWS_* "
            "variables) and restart the process, or use a role that renews automatically"
        )
    elif code in _FULL:
        kind, text = StorageFullError, f"{reason or code}; make room or raise the quota"
    elif code in _BUSY:
        text = f"the store asks to slow down ({code}); lower `parallel`, or raise `retry_total_s`"
    else:
        hint = _HINTS.get(code.removeprefix("HTTP "))
        text = f"{reason or 'it gives no reason'} ({code})" + (f"; {hint}" if hint else "")
    return kind(f"{where}: {text}")


def _is_timeout(error: BaseException) -> bool:
    """Return whether the error or one of its causes is a timeout.

    If a store stops reading a request body, only the cause is a timeout.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError) or _named(cause, _TIMEOUTS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _is_network(error: BaseException) -> bool:
    if isinstance(error, (TimeoutError, ConnectionError)) or _named(error, _NETWORK):
        return True
    if isinstance(error, OSError) and error.errno in _NO_ROUTE:
        return True
    library = type(error).__module__.partition(".")[0]
    return library in {"urllib3", "http", "ssl"}


def _named(error: BaseException, names: Collection[str]) -> bool:
    """Return whether a class of the error has one of `names`; this needs no import of botocore."""
    return any(cls.__name__ in names for cls in type(error).__mro__)

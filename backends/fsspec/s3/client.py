"""S3 as a few blocking operations, with retries of those that are safe to repeat.

botocore signs, finds credentials and speaks HTTP. Its own retries are off: it does not know which
operations may be repeated, and would hide a lost answer to a conditional put.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.backends.fsspec.messages import Scrubber, place
from penstock.backends.fsspec.s3.answers import (
    PRECONDITION_FAILED,
    BrokenAnswerError,
    is_definite,
    is_transient,
    status_of,
    storage_error,
)
from penstock.backends.fsspec.s3.connect import Views, connect
from penstock.core.errors import (
    BlobNotFoundError,
    BlobTruncatedError,
    PenstockError,
    StorageError,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Iterator, Sequence

    from penstock.backends.fsspec.config import FsspecConfig, S3Options
    from penstock.backends.fsspec.store import Retry, Span

T = TypeVar("T")

_PIECE_BYTES = 1 << 20
_SCRATCH_BYTES = 64 << 10
# For each listing: the parameters that request the next page, and the fields that they come from.
_MARKERS = {
    "list_objects_v2": {"ContinuationToken": "NextContinuationToken"},
    "list_multipart_uploads": {
        "KeyMarker": "NextKeyMarker",
        "UploadIdMarker": "NextUploadIdMarker",
    },
    "list_parts": {"PartNumberMarker": "NextPartNumberMarker"},
}


class S3Client:
    """Sends requests about the objects below one prefix of a bucket.

    Thread-safe, but a forked child must not use its parent's.
    """

    def __init__(self, config: FsspecConfig, options: S3Options, *, retry: Retry) -> None:
        bucket, _, path = config.url.partition("://")[2].partition("/")
        self.bucket = bucket
        self.prefix = f"{path.strip('/')}/" if path.strip("/") else ""
        self.url = config.shown_url
        self._retry = retry
        self._scrub = Scrubber(config.secrets)
        self._api, self._transport = self._explained(
            "open",
            "",
            lambda: retry.run(lambda: connect(config, options), transient=is_transient),
        )

    @property
    def is_aws(self) -> bool:
        """Whether this is S3 of AWS, and not another store with the same protocol."""
        host = str(self._api.meta.endpoint_url).partition("://")[2].partition("/")[0]
        return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))

    def call(
        self,
        operation: str,
        what: str,
        name: str,
        *,
        needs: Collection[str] = (),
        body: Sequence[memoryview] | None = None,
        stop: threading.Event | None = None,
        **parameters: Any,
    ) -> dict[str, Any]:
        """Run one operation of botocore, which must be safe to repeat, and return its answer.

        An answer without all of `needs` is cut off, or comes from a gateway, so it counts as a
        failed attempt: botocore accepts any XML, and takes what is missing for empty.

        Args:
            operation: The method of botocore's client.
            what: The verb for error messages.
            name: The blob or record; empty for requests about the bucket.
            needs: The fields that a complete answer has.
            body: The bytes to send.
            stop: If another thread sets it, no further attempt begins.
            **parameters: Further parameters of the operation.
        """
        request = getattr(self._api, operation)
        if name:
            parameters["Key"] = self.prefix + name

        def attempt() -> dict[str, Any]:
            # A new stream for each attempt: the last attempt may have read a part of its own.
            sent = {} if body is None else _body(body)
            answer: dict[str, Any] = request(Bucket=self.bucket, **parameters, **sent)
            _check_whole(answer, needs)
            return answer

        return self._explained(
            what, name, lambda: self._retry.run(attempt, transient=is_transient, stop=stop)
        )

    def pages(self, operation: str, what: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """Yield the answers of a listing; requests each page only when it is needed."""
        seen: set[tuple[object, ...]] = set()
        while True:
            page = self.call(operation, what, "", needs=("IsTruncated",), **parameters)
            yield page
            if not page["IsTruncated"]:
                return
            for parameter, field in _MARKERS[operation].items():
                if field not in page:
                    msg = (
                        f"{place(what, '', self.url)}: the answer announces another page, but "
                        f"lacks {field}; the store lacks this part of S3"
                    )
                    raise StorageError(msg)
                parameters[parameter] = page[field]
            marker = tuple(page[field] for field in _MARKERS[operation].values())
            if marker in seen:
                msg = (
                    f"{place(what, '', self.url)}: the store names the same next page a second "
                    "time; the listing would never end"
                )
                raise StorageError(msg)
            seen.add(marker)

    def size(self, what: str, name: str) -> int:
        """Return the size of a blob, as the store reports it."""
        answer = self.call("head_object", what, name, needs=("ContentLength",))
        return int(answer["ContentLength"])

    def abort_upload(self, what: str, name: str, upload_id: str) -> None:
        """Delete a multipart upload; it is no error if it is gone already."""
        with suppress(BlobNotFoundError):
            self.call("abort_multipart_upload", what, name, UploadId=upload_id)

    def put(
        self,
        what: str,
        name: str,
        data: Sequence[memoryview],
        *,
        stop: threading.Event | None = None,
    ) -> None:
        """Store a blob or record as a whole; replaces one of that name."""
        self.call("put_object", what, name, needs=("ETag",), body=data, stop=stop)

    def put_if_absent(self, name: str, data: bytes) -> None:
        """Store a record unless the name is taken, by one conditional put.

        Repeating it is safe, since it never replaces a record. But once an attempt had an unknown
        outcome (a reset, a timeout, any 5xx), a later 412 may be about this very record. Then this
        reports an unknown outcome, not a lost race.

        Raises:
            BlobExistsError: The name is taken, and no attempt can have stored this record.
            StorageError: The put failed, or its outcome is unknown: the record must be read.
        """
        unknown: list[Exception] = []

        def attempt() -> None:
            try:
                answer = self._api.put_object(
                    Bucket=self.bucket,
                    Key=self.prefix + name,
                    IfNoneMatch="*",
                    **_body((memoryview(data),)),
                )
                _check_whole(answer, ("ETag",))
            except Exception as error:
                if unknown and status_of(error) == PRECONDITION_FAILED:
                    msg = (
                        f"{place('publish', name, self.url)}: unknown outcome. An answer was lost "
                        f"({self._scrub(str(unknown[0]))}), and by now the name is taken, "
                        "perhaps by this very record: read it to learn whose it is"
                    )
                    raise StorageError(msg) from error
                if not is_definite(error):
                    unknown.append(error)
                raise

        self._explained("publish", name, lambda: self._retry.run(attempt, transient=is_transient))

    def get(self, name: str, *, limit_bytes: int) -> bytes | int:
        """Return a whole record, all of one version, or its size if that is above `limit_bytes`."""

        def attempt() -> bytes | int:
            answer = self._api.get_object(Bucket=self.bucket, Key=self.prefix + name)
            with answer["Body"] as body:
                _check_whole(answer, ("ContentLength",))
                if "ContentRange" in answer:
                    msg = f"requested all, but the answer holds {answer['ContentRange']}"
                    raise BrokenAnswerError(msg)
                size = int(answer["ContentLength"])
                if size > limit_bytes:
                    return size
                data = bytearray(size)
                _fill(body, memoryview(data))
            return bytes(data)

        return self._explained(
            "read", name, lambda: self._retry.run(attempt, transient=is_transient)
        )

    def fill(self, span: Span, *, stop: threading.Event | None = None) -> None:
        """Read a span into its targets, by one request."""

        def attempt() -> None:
            answer = self._api.get_object(
                Bucket=self.bucket,
                Key=self.prefix + span.name,
                Range=f"bytes={span.start}-{span.stop - 1}",
            )
            with answer["Body"] as body:
                self._check_range(span, answer)
                at = span.start
                for piece in span.pieces:
                    _skip(body, piece.offset - at)
                    _fill(body, piece.target)
                    at = piece.stop

        self._explained(
            "read", span.name, lambda: self._retry.run(attempt, transient=is_transient, stop=stop)
        )

    def _check_range(self, span: Span, answer: dict[str, Any]) -> None:
        told = str(answer.get("ContentRange", ""))  # bytes 0-99/1000
        size = told.rpartition("/")[2]
        # First, since a blob that is cut off is damage, and another attempt would not help.
        if size.isdigit() and int(size) < span.stop:
            msg = (
                f"cannot read bytes {span.start} to {span.stop} of {span.name} on {self.url}: "
                f"it has {size}"
            )
            raise BlobTruncatedError(msg)
        expected = f"bytes {span.start}-{span.stop - 1}/"
        # An answer in chunks has no length in its head.
        length = int(answer.get("ContentLength", span.stop - span.start))
        if not told.startswith(expected) or length != span.stop - span.start:
            holds = f"{length} bytes" if "ContentLength" in answer else "no length"
            msg = f"requested {expected[:-1]}, but the answer holds {holds} ({told or 'all'})"
            raise BrokenAnswerError(msg)

    def _explained(self, what: str, name: str, operation: Callable[[], T]) -> T:
        try:
            return operation()
        except PenstockError:
            raise
        except Exception as error:  # noqa: BLE001 - botocore, urllib3, http, ssl: no common root
            found = storage_error(error, what, name, url=self.url, scrub=self._scrub)
            # A traceback shows the text of the cause, too, with the credentials.
            clean = self._scrub(str(error)) == str(error)
            raise found from (error if clean else None)

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._api.close()
        self._transport.close()


def _body(views: Sequence[memoryview]) -> dict[str, Any]:
    body = Views(views)
    return {"Body": body, "ContentLength": len(body)}


def _check_whole(answer: dict[str, Any], needs: Collection[str]) -> None:
    missing = [name for name in needs if name not in answer]
    # http.client takes any end of a connection for the end of the head.
    if str(answer.get("ETag", "")).count('"') == 1:
        missing.append("the end of its ETag")
    if missing:
        msg = f"the answer lacks {', '.join(missing)}; does a gateway answer for the store?"
        raise BrokenAnswerError(msg)


def _fill(body: Any, target: memoryview) -> None:
    at = 0
    while at < target.nbytes:
        # In small pieces: urllib3 copies each from memory of its own, which it reuses only then.
        count = body.readinto(target[at : at + _PIECE_BYTES])
        if not count:
            msg = f"the answer ended {target.nbytes - at} bytes early"
            raise BrokenAnswerError(msg)
        at += count


def _skip(body: Any, count: int) -> None:
    if count:
        scratch = memoryview(bytearray(min(count, _SCRATCH_BYTES)))
        for at in range(0, count, len(scratch)):
            _fill(body, scratch[: count - at])

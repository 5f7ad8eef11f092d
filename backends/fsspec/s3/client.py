"""S3 as a few blocking operations, with retries for what is safe to repeat.

botocore signs, finds credentials and speaks HTTP; its own retries are off, since it does not know
which operations of ours may be repeated, and would hide a lost answer to a conditional put.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.backends.fsspec.errors import Scrubber, place
from penstock.backends.fsspec.s3.connect import Views, connect
from penstock.backends.fsspec.s3.errors import (
    PRECONDITION_FAILED,
    BrokenAnswerError,
    is_definite,
    is_transient,
    status_of,
    storage_error,
)
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
    from penstock.backends.fsspec.ranges import Span
    from penstock.backends.fsspec.retry import Retry

T = TypeVar("T")

_PIECE_BYTES = 1 << 20
_SCRATCH_BYTES = 64 << 10
# What the next page is asked for with, and where the last one says it.
_MARKERS = {
    "list_objects_v2": {"ContinuationToken": "NextContinuationToken"},
    "list_multipart_uploads": {
        "KeyMarker": "NextKeyMarker",
        "UploadIdMarker": "NextUploadIdMarker",
    },
    "list_parts": {"PartNumberMarker": "NextPartNumberMarker"},
}


class S3Client:
    """One bucket, and a prefix in it. Thread-safe; not to be used across a fork."""

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
        """Whether this is S3 itself, and not a store that speaks the same."""
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
        """One operation that is safe to repeat; returns botocore's answer.

        An answer without all of `needs` is not the store's, or not whole, and asked for again:
        botocore takes any text that is XML for an answer in which nothing is said.
        """
        ask = getattr(self._api, operation)
        if name:
            parameters["Key"] = self.prefix + name

        def attempt() -> dict[str, Any]:
            # A fresh stream for each: the one before may have been read in part.
            sent = {} if body is None else _body(body)
            answer: dict[str, Any] = ask(Bucket=self.bucket, **parameters, **sent)
            _check_whole(answer, needs)
            return answer

        return self._explained(
            what, name, lambda: self._retry.run(attempt, transient=is_transient, stop=stop)
        )

    def pages(self, operation: str, what: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """All answers of a listing, each asked for when it is needed."""
        seen: set[tuple[object, ...]] = set()
        while True:
            page = self.call(operation, what, "", needs=("IsTruncated",), **parameters)
            yield page
            if not page["IsTruncated"]:
                return
            for asked, told in _MARKERS[operation].items():
                if told not in page:
                    msg = (
                        f"{place(what, '', self.url)}: the store says that there is more, but not "
                        f"from where on ({told}); it lacks this part of S3"
                    )
                    raise StorageError(msg)
                parameters[asked] = page[told]
            marker = tuple(page[told] for told in _MARKERS[operation].values())
            if marker in seen:
                msg = (
                    f"{place(what, '', self.url)}: the store goes on from a place a second time; "
                    "the listing would never end"
                )
                raise StorageError(msg)
            seen.add(marker)

    def size(self, what: str, name: str) -> int:
        """Bytes of a blob, as the store has them."""
        answer = self.call("head_object", what, name, needs=("ContentLength",))
        return int(answer["ContentLength"])

    def abort_upload(self, what: str, name: str, number: str) -> None:
        """End a multipart upload; that it is gone already is no error."""
        with suppress(BlobNotFoundError):
            self.call("abort_multipart_upload", what, name, UploadId=number)

    def put(
        self,
        what: str,
        name: str,
        data: Sequence[memoryview],
        *,
        stop: threading.Event | None = None,
    ) -> None:
        """Store a blob, replacing what is there; the same bytes twice are the same blob."""
        self.call("put_object", what, name, needs=("ETag",), body=data, stop=stop)

    def put_if_absent(self, name: str, data: bytes) -> None:
        """Store a record unless the name is taken, by one conditional put.

        Repeating it is safe: it can only create what is not there. But once an attempt had an
        unknown end (a reset, a timeout, any 5xx), a later 412 may be the answer to our own
        record, so it is not reported as a lost race but as what it is: an unknown outcome.

        Raises:
            BlobExistsError: The store refused, and nothing of ours can have been stored.
            StorageError: Unknown outcome; read the record to learn whose it is.
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
        """A whole blob as one version of it, or its size if that is above `limit_bytes`."""

        def attempt() -> bytes | int:
            answer = self._api.get_object(Bucket=self.bucket, Key=self.prefix + name)
            with answer["Body"] as body:
                _check_whole(answer, ("ContentLength",))
                if "ContentRange" in answer:
                    msg = f"asked for all, the answer holds {answer['ContentRange']}"
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
        if size.isdigit() and int(size) < span.stop:
            msg = (
                f"cannot read bytes {span.start} to {span.stop} of {span.name} on {self.url}: "
                f"it has {size}"
            )
            raise BlobTruncatedError(msg)
        expected = f"bytes {span.start}-{span.stop - 1}/"
        # What comes in chunks may have no length.
        length = int(answer.get("ContentLength", span.stop - span.start))
        if not told.startswith(expected) or length != span.stop - span.start:
            holds = f"{length} bytes" if "ContentLength" in answer else "no length"
            msg = f"asked for {expected[:-1]}, the answer holds {holds} ({told or 'all'})"
            raise BrokenAnswerError(msg)

    def _explained(self, what: str, name: str, operation: Callable[[], T]) -> T:
        try:
            return operation()
        except PenstockError:
            raise
        except Exception as error:  # noqa: BLE001 - botocore, urllib3, http, ssl: no common root
            found = storage_error(error, what, name, url=self.url, scrub=self._scrub)
            clean = self._scrub(str(error)) == str(error)
            raise found from (error if clean else None)

    def close(self) -> None:
        """Close the connections."""
        self._api.close()
        self._transport.close()


def _body(views: Sequence[memoryview]) -> dict[str, Any]:
    body = Views(views)
    return {"Body": body, "ContentLength": len(body)}


def _check_whole(answer: dict[str, Any], needs: Collection[str]) -> None:
    missing = [name for name in needs if name not in answer]
    if str(answer.get("ETag", "")).count('"') == 1:  # http.client takes any end for that of a head
        missing.append("the end of its ETag")
    if missing:
        msg = f"the answer lacks {', '.join(missing)}; is it a store of S3 that answers?"
        raise BrokenAnswerError(msg)


def _fill(body: Any, target: memoryview) -> None:
    at = 0
    while at < target.nbytes:
        # urllib3 reads into memory of its own, and copies that; a small piece of it is used again.
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

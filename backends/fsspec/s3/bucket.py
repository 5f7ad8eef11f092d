"""The store for `s3://`, which keeps blobs and records as objects under a prefix of a bucket.

botocore finds credentials, signs requests and sends them. Its retries are off: it does not know
which operations are safe to repeat, and would hide a lost answer to a conditional put.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from penstock.backends.fsspec.config import S3Options
from penstock.backends.fsspec.messages import Scrubber, explained, place
from penstock.backends.fsspec.s3.answers import (
    PRECONDITION_FAILED,
    BrokenAnswerError,
    is_definite,
    is_transient,
    status_of,
    storage_error,
)
from penstock.backends.fsspec.s3.connect import Views, connect
from penstock.backends.fsspec.s3.upload import PartMemory, S3Writer
from penstock.backends.fsspec.store import Retry, Store
from penstock.core.errors import (
    BlobNotFoundError,
    BlobTruncatedError,
    ConfigError,
    StorageError,
)
from penstock.core.types import PAGE_BYTES, BlobInfo, Capabilities

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Iterator, Sequence
    from datetime import datetime

    from penstock.backends.fsspec.blob_states import StoreWriter
    from penstock.backends.fsspec.config import FsspecConfig
    from penstock.backends.fsspec.store import Span

T = TypeVar("T")

_DELETE_AT_ONCE = 1000  # S3's limit
_DELETE_ROUNDS = 5  # some keys of a batch may fail although others do not
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


class S3Store(Store):
    """Keeps blobs as objects under a prefix. Uses no renames and no caches.

    A forked child must not use its parent's store.
    """

    def __init__(self, config: FsspecConfig) -> None:
        """Create the client without connecting to the store.

        Raises:
            ConfigError: `options` are not those of S3, or botocore is missing.
        """
        try:
            options = S3Options.model_validate(config.options)
        except ValidationError as error:
            # Only names and reasons: a value may be a secret.
            problems = sorted({(str(p["loc"][0]), p["msg"]) for p in error.errors() if p["loc"]})
            bad = ", ".join(f"{name} ({why})" for name, why in problems)
            known = ", ".join(S3Options.model_fields)
            msg = f"{config.shown_url}: options for S3 are {known}; wrong: {bad}"
            raise ConfigError(msg) from None
        super().__init__(config)
        self.bucket, _, path = config.url.partition("://")[2].partition("/")
        self.prefix = f"{path.strip('/')}/" if path.strip("/") else ""
        self.memory = PartMemory(config.buffer_bytes)
        self._retry = Retry(config.attempts, config.retry_total_s)
        self._scrub = Scrubber(config.secrets)
        self._api, self._transport = self._try("open", "", lambda: connect(config, options))

    def find_capabilities(self) -> Capabilities:
        exclusive, notes = self._conditional_puts()
        return Capabilities(
            # Raw frames fill whole pages anyway; a larger alignment would gain nothing.
            offset_alignment=PAGE_BYTES,
            preferred_io_bytes=self.config.part_bytes,
            preferred_parallel=self.config.parallel,
            exclusive_publish=exclusive,
            notes=notes,
        )

    def writer(self, name: str, *, size_hint: int | None) -> StoreWriter:
        return S3Writer(self, name, size_hint=size_hint)

    def fill(self, span: Span) -> None:
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

        self._try("read", span.name, attempt)

    def read_record(self, name: str, *, limit_bytes: int) -> bytes | int:
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

        return self._try("read", name, attempt)

    def put(self, name: str, data: bytes) -> None:
        self.call("put_object", "publish", name, needs=("ETag",), body=(memoryview(data),))

    def put_if_absent(self, name: str, data: bytes) -> None:
        # Repeating the put is safe, since it never replaces a record. But after an attempt with an
        # unknown outcome (a reset, a timeout, any 5xx), a later 412 may be due to this very record.
        # So it is reported as an unknown outcome, not as a lost race.
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
                        "perhaps by this very record: read the record to find out"
                    )
                    raise StorageError(msg) from error
                if not is_definite(error):
                    unknown.append(error)
                raise

        self._try("publish", name, attempt)

    def list(self, prefix: str) -> Sequence[BlobInfo]:
        skip = len(self.prefix)
        return [
            BlobInfo(entry["Key"][skip:], int(entry["Size"]), _seconds(entry["LastModified"]))
            for page in self.pages("list_objects_v2", "list", Prefix=self.prefix + prefix)
            for entry in page.get("Contents", ())
        ]

    def stat(self, name: str) -> BlobInfo:
        needs = ("ContentLength", "LastModified")
        answer = self.call("head_object", "stat", name, needs=needs)
        return BlobInfo(name, int(answer["ContentLength"]), _seconds(answer["LastModified"]))

    def delete(self, names: Sequence[str]) -> None:
        for at in range(0, len(names), _DELETE_AT_ONCE):
            self._delete_batch(list(dict.fromkeys(names[at : at + _DELETE_AT_ONCE])))

    def sweep(self, before_s: float) -> None:
        """Abort uploads that began before `before_s` and have received no part since."""
        skip = len(self.prefix)
        for page in self.pages("list_multipart_uploads", "sweep", Prefix=self.prefix):
            for upload in page.get("Uploads", ()):
                name, upload_id = upload["Key"][skip:], upload["UploadId"]
                if not name or _seconds(upload["Initiated"]) >= before_s:
                    continue
                # A long save may still be sending parts of an upload that it began long ago.
                if self._newest_part_s(name, upload_id) < before_s:
                    self.abort_upload("sweep", name, upload_id)

    def close(self) -> None:
        super().close()
        self._api.close()
        self._transport.close()

    # -- requests, also for writers -------------------------------------------------------------

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
        """Run one botocore operation with retries, and return its answer.

        The operation must be safe to repeat. An answer that lacks one of `needs` counts as a failed
        attempt: it is cut off or comes from a gateway, but botocore accepts any XML.

        Args:
            operation: The method of botocore's client.
            what: The verb for error messages.
            name: The blob or record; empty for requests about the bucket.
            needs: The fields that a complete answer has.
            body: The bytes to send.
            stop: Another thread sets this to prevent further attempts.
            **parameters: Further parameters of the operation.
        """
        request = getattr(self._api, operation)
        if name:
            parameters["Key"] = self.prefix + name

        def attempt() -> dict[str, Any]:
            # A new stream for each attempt: an earlier attempt may have read part of its stream.
            sent = {} if body is None else _body(body)
            answer: dict[str, Any] = request(Bucket=self.bucket, **parameters, **sent)
            _check_whole(answer, needs)
            return answer

        return self._try(what, name, attempt, stop=stop)

    def pages(self, operation: str, what: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """Yield the pages of a listing; requests each page only when it is needed."""
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
                    f"{place(what, '', self.url)}: the store names the same next page twice, so "
                    "the listing would never end"
                )
                raise StorageError(msg)
            seen.add(marker)

    def abort_upload(self, what: str, name: str, upload_id: str) -> None:
        """Abort a multipart upload; does nothing if it no longer exists."""
        with suppress(BlobNotFoundError):
            self.call("abort_multipart_upload", what, name, UploadId=upload_id)

    # -- below ----------------------------------------------------------------------------------

    def _try(
        self,
        what: str,
        name: str,
        attempt: Callable[[], T],
        *,
        stop: threading.Event | None = None,
    ) -> T:
        with explained(what, name, url=self.url, scrub=self._scrub, mapped=storage_error):
            return self._retry.run(attempt, transient=is_transient, stop=stop)

    def _check_range(self, span: Span, answer: dict[str, Any]) -> None:
        header = str(answer.get("ContentRange", ""))  # bytes 0-99/1000
        size = header.rpartition("/")[2]
        # Checked first: a truncated blob is damaged, and another attempt would not help.
        if size.isdigit() and int(size) < span.stop:
            msg = (
                f"cannot read bytes {span.start} to {span.stop} of {span.name} on {self.url}: "
                f"it ends at {size}"
            )
            raise BlobTruncatedError(msg)
        expected = f"bytes {span.start}-{span.stop - 1}/"
        # An answer in chunks has no length in its head.
        length = int(answer.get("ContentLength", span.stop - span.start))
        if not header.startswith(expected) or length != span.stop - span.start:
            holds = f"{length} bytes" if "ContentLength" in answer else "no length"
            msg = f"requested {expected[:-1]}, but the answer holds {holds} ({header or 'all'})"
            raise BrokenAnswerError(msg)

    def _delete_batch(self, names: Sequence[str]) -> None:
        left = {self.prefix + name: name for name in names}
        failed: dict[str, Any] = {}
        for _ in range(_DELETE_ROUNDS):
            answer = self.call(
                "delete_objects", "delete", "", Delete={"Objects": [{"Key": key} for key in left]}
            )
            # A key that the answer does not name counts as not deleted: the answer may be cut off,
            # or be the page of a gateway.
            failed = {entry.get("Key"): entry.get("Code") for entry in answer.get("Errors", ())}
            gone = {entry.get("Key") for entry in answer.get("Deleted", ())}
            gone.update(key for key, code in failed.items() if code == "NoSuchKey")
            left = {key: name for key, name in left.items() if key not in gone}
            if not left:
                return
        key, name = next(iter(left.items()))
        msg = (
            f"{place('delete', name, self.url)}: {failed.get(key, 'no result in the answer')} "
            f"({len(left)} of a batch could not be deleted)"
        )
        raise StorageError(msg)

    def _newest_part_s(self, name: str, upload_id: str) -> float:
        """Return the time of the newest part of an upload; 0 if it has none."""
        return max(
            (
                _seconds(part["LastModified"])
                for page in self.pages(
                    "list_parts", "sweep", Key=self.prefix + name, UploadId=upload_id
                )
                for part in page.get("Parts", ())
            ),
            default=0.0,
        )

    def _conditional_puts(self) -> tuple[bool, tuple[str, ...]]:
        if self.config.conditional_put != "auto":
            return self.config.conditional_put == "yes", ()
        host = str(self._api.meta.endpoint_url).partition("://")[2].partition("/")[0]
        is_aws = host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
        return (True, ()) if is_aws else self.probe_conditional_puts()


def _seconds(time: datetime) -> float:
    """Return whole seconds, since only some answers have fractions."""
    return float(int(time.timestamp()))


def _body(views: Sequence[memoryview]) -> dict[str, Any]:
    body = Views(views)
    return {"Body": body, "ContentLength": len(body)}


def _check_whole(answer: dict[str, Any], needs: Collection[str]) -> None:
    missing = [name for name in needs if name not in answer]
    # If the connection ends within the head, http.client takes the cut head as complete.
    if str(answer.get("ETag", "")).count('"') == 1:
        missing.append("the end of its ETag")
    if missing:
        msg = f"the answer lacks {', '.join(missing)}; does a gateway answer for the store?"
        raise BrokenAnswerError(msg)


def _fill(body: Any, target: memoryview) -> None:
    at = 0
    while at < target.nbytes:
        # In small pieces: urllib3 copies each from its own memory, and reuses only small memory.
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

"""A multipart upload: parts by number, sent in the background."""

from __future__ import annotations

import base64
from concurrent.futures import CancelledError, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.core.errors import BlobNotFoundError, PenstockError, StorageError

try:
    from isal.isal_zlib import crc32  # some six times as fast
except ImportError:
    from zlib import crc32

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from penstock.backends.fsspec.s3.client import S3Client
    from penstock.core.concurrency.pool import Pool


class Upload:
    """An upload, begun by its first part at the latest. `start` and `complete` are for one thread.

    Args:
        client: The bucket.
        name: Of the blob.
        pool: Sends the parts; its threads bound those in flight.
        checksums: Whether the store is given a CRC of each part to check.
        stop: Set: nothing is tried again.
        failed: Called, by any thread, with why a part cannot be sent.
    """

    def __init__(
        self,
        client: S3Client,
        name: str,
        *,
        pool: Pool,
        checksums: bool,
        stop: threading.Event,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._client = client
        self._name = name
        self._pool = pool
        self._checksums = checksums
        self._stop = stop
        self._failed = failed
        self._number: Future[str] | None = None
        self._parts: dict[int, Future[dict[str, Any]]] = {}

    @property
    def sends(self) -> bool:
        """Whether a part was given to it."""
        return bool(self._parts)

    def __contains__(self, index: int) -> bool:
        return index in self._parts

    def begin(self) -> None:
        """Let the store know of it, in the background, before there is a part."""
        if self._number is None:
            self._number = self._pool.submit(self._create)

    def start(
        self,
        index: int,
        views: Sequence[memoryview],
        *,
        over: Callable[[BaseException | None], None],
    ) -> None:
        """Send part `index` (from 0 on); call `over` with the error, if any, once it is done.

        Nothing uses `views` after that.
        """
        part = self._pool.submit(partial(self._send, index, views, self._numbered()))
        self._parts[index] = part

        def done(part: Future[dict[str, Any]]) -> None:
            error = StorageError("given up") if part.cancelled() else part.exception()
            if error is not None:
                self._failed(error)
            over(error)

        part.add_done_callback(done)

    def complete(self, count: int, length: int) -> None:
        """Make the first `count` parts the blob, of `length` bytes.

        Raises:
            StorageError: A part failed, or the blob may not be there.
        """
        parts = [self._parts[index].result() for index in range(count)]
        try:
            self._client.call(
                "complete_multipart_upload",
                "seal",
                self._name,
                UploadId=self._numbered(),
                MultipartUpload={"Parts": parts},
            )
        except StorageError as error:
            # An answer may have been lost after it was done; then the upload is gone, and the
            # blob, whose name nobody else uses, is there.
            try:
                size = self._client.size("seal", self._name)
            except BlobNotFoundError:
                raise error from None
            if size != length:
                raise

    def abort(self) -> None:
        """Give back what is stored, once nothing is in flight."""
        for part in self._parts.values():
            part.cancel()
        wait(self._parts.values())
        self._parts.clear()
        if self._number is not None:
            self._number.cancel()
            # What cannot be ended now is for `sweep`, or a rule of the bucket.
            with suppress(PenstockError, CancelledError):
                self._client.abort_upload("abort", self._name, self._number.result())

    def _numbered(self) -> str:
        self.begin()
        assert self._number is not None
        return self._number.result()

    def _create(self) -> str:
        extra: dict[str, Any] = {"ChecksumAlgorithm": "CRC32"} if self._checksums else {}
        answer = self._client.call(
            "create_multipart_upload",
            "create",
            self._name,
            needs=("UploadId",),
            stop=self._stop,
            **extra,
        )
        return str(answer["UploadId"])

    def _send(self, index: int, views: Sequence[memoryview], number: str) -> dict[str, Any]:
        checksum: dict[str, Any] = {}
        if self._checksums:
            crc = 0
            for view in views:
                crc = crc32(view, crc)
            checksum["ChecksumCRC32"] = base64.b64encode(crc.to_bytes(4, "big")).decode()
        answer = self._client.call(
            "upload_part",
            f"upload part {index + 1} of",
            self._name,
            needs=("ETag",),
            body=views,
            stop=self._stop,
            UploadId=number,
            PartNumber=index + 1,
            **checksum,
        )
        return {"PartNumber": index + 1, "ETag": answer["ETag"], **checksum}

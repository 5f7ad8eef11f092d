"""Writes one S3 blob: cuts it into parts by offset, and uploads full parts while others fill.

While a batch runs, parts refer to the caller's memory, without a copy. When the batch ends,
parts whose upload has not begun copy their bytes, since the caller may then reuse its memory.
"""

from __future__ import annotations

import base64
import mmap
import threading
from bisect import insort
from concurrent.futures import CancelledError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.fsspec.blob_states import StoreWriter
from penstock.backends.fsspec.config import MAX_PARTS
from penstock.core.abc import copy_bytes
from penstock.core.errors import BlobNotFoundError, PenstockError, StorageError
from penstock.core.types import PAGE_BYTES, align_down, align_up, flat_view

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from penstock.backends.fsspec.blob_states import Batch
    from penstock.backends.fsspec.s3.bucket import S3Store
    from penstock.core.types import WriteRequest


try:
    from isal.isal_zlib import crc32  # about six times as fast
except ImportError:
    from zlib import crc32

# At most this many incomplete parts wait for batches that arrive out of order.
_OPEN_PARTS = 3
_PART_UNIT = 1 << 20
# The largest part that a size hint gives. Parts should be large, since a request takes 2 ms of CPU;
# but core has 256 MiB in flight, which should still be sixteen parts.
_MOST_BYTES = 16 << 20
_PARTS = 32
_LENT_BYTES = 1 << 20  # shorter buffers are copied, which is cheaper than a call to send each

_ZEROS = memoryview(bytes(1 << 20))


def part_bytes_for(size_hint: int | None, least: int) -> int:
    """Return a part size that gives few requests, but enough for parallel uploads.

    A blob of `size_hint` bytes has at most `MAX_PARTS` parts.
    """
    size = size_hint or 0
    wanted = min(size // _PARTS, _MOST_BYTES)
    least = align_up(least, PAGE_BYTES)
    return max(least, align_up(max(wanted, -(-size // MAX_PARTS)), _PART_UNIT))


class S3Writer(StoreWriter):
    """Stores a blob by a multipart upload, or by one put if it fits into one part.

    Part `n` holds bytes `[n * part_bytes, (n + 1) * part_bytes)`, so a repeated upload of a part
    replaces it. Large buffers are uploaded from the caller's memory. The writer copies small
    buffers, and the first batch's bytes of a part that two batches share. It keeps up to three
    incomplete parts for batches that arrive out of order. If there are more, it uploads the first
    of them with zeros in its gaps. A later write into an uploaded part fails.

    A blob can be cut at the end of any part, but not inside an uploaded part.

    Args:
        store: The bucket.
        name: The name of the blob.
        size_hint: The expected size of the blob.
    """

    _store: S3Store

    def __init__(self, store: S3Store, name: str, *, size_hint: int | None) -> None:
        super().__init__(store, name)
        self._part_bytes = part_bytes_for(size_hint, store.config.part_bytes)
        self._memory = store.memory
        self._uploads = store.transfers
        self._checksums = store.config.checksums
        # The lane, `seal` and `abort` never run at the same time, so these fields need no lock.
        self._open: dict[int, Part] = {}
        self._newest = 0  # the last part that has been written to
        self._upload_id: Future[str] | None = None
        self._sent: dict[int, Future[dict[str, Any]]] = {}
        if (size_hint or 0) > self._part_bytes:
            self._begin_upload()  # early, so that the first part does not wait for the answer

    def _take(self, request: WriteRequest, batch: Batch) -> None:
        if not request.length:
            return
        at = request.offset
        for buffer in request.buffers:
            view = flat_view(buffer)
            self._place(at, view)
            at += view.nbytes
        self._count(request.offset, at)
        self._newest = max(self._newest, (at - 1) // self._part_bytes)
        for index in [i for i, part in self._open.items() if self._is_complete(i, part)]:
            self._send(self._open.pop(index), self._part_bytes, batch)
        while len(self._open) > _OPEN_PARTS:
            self._send(self._open.pop(min(self._open)), self._part_bytes, batch)

    def _is_complete(self, index: int, part: Part) -> bool:
        """Return whether a part can be uploaded because no later request writes to it.

        A part whose last page is not full may be the end of the blob. It waits for a write to a
        later part, since `seal` cannot cut an uploaded part.
        """
        if part.taken < self._part_bytes:
            return False
        return part.stop == self._part_bytes or index < self._newest

    def _own_memory(self) -> None:
        for part in self._open.values():
            part.own(memory=self._memory)

    def _place(self, offset: int, view: memoryview) -> None:
        while view.nbytes:
            index, at = divmod(offset, self._part_bytes)
            count = min(view.nbytes, self._part_bytes - at)
            self._check_part(index, offset)
            part = self._open.setdefault(index, Part(index, self._part_bytes))
            if count < _LENT_BYTES:
                part.put(at, view[:count], memory=self._memory)
            else:
                part.lend(at, view[:count])
            offset += count
            view = view[count:]

    def _count(self, start: int, stop: int) -> None:
        """Count the pages of a request as taken.

        No two requests touch the same page (`offset_alignment`), so no later request fills the rest
        of a page.
        """
        at, stop = align_down(start, PAGE_BYTES), align_up(stop, PAGE_BYTES)
        while at < stop:
            index = at // self._part_bytes
            count = min(stop, (index + 1) * self._part_bytes) - at
            self._open[index].taken += count
            at += count

    def _check_part(self, index: int, offset: int) -> None:
        if index in self._sent or offset < 0:
            msg = (
                f"{self._where('write')}: offset {offset} comes too late: its part is already "
                "uploaded; offsets must ascend from call to call"
            )
            raise StorageError(msg)
        if index >= MAX_PARTS:
            msg = (
                f"{self._where('write')}: a blob has at most {MAX_PARTS:,} parts, and each has "
                f"{self._part_bytes:,} bytes: raise part_bytes, or give `create` a size_hint"
            )
            raise StorageError(msg)

    def _send(self, part: Part, size: int, batch: Batch | None = None) -> None:
        """Upload a part in the background; the part holds the batch whose memory it uses."""
        assert batch is not None or not part.lent  # `seal` uploads only copies
        lender = batch if part.lent else None
        views, memory = part.views(size), part.memory
        if lender is not None:
            lender.hold()
        if memory is not None:
            self._memory.send(memory)

        def release(error: BaseException | None) -> None:
            if memory is not None:
                self._memory.sent(memory)
            if lender is not None:
                lender.release(error)

        def done(sent: Future[dict[str, Any]]) -> None:
            error = StorageError("aborted") if sent.cancelled() else sent.exception()
            if error is not None:
                self._die(error)
            release(error)

        try:
            upload_id = self._begin_upload().result()
            sent = self._uploads.submit(partial(self._upload_part, part.index, views, upload_id))
        except BaseException:
            release(None)  # the lane raises the error into the batch
            raise
        self._sent[part.index] = sent
        sent.add_done_callback(done)

    def _finish(self, length: int) -> None:
        count = -(-length // self._part_bytes)
        if count > 1 or self._sent:
            self._finish_parts(count, length)
        else:
            part = self._open.pop(0, None) or Part(0, self._part_bytes)
            self._store.call(
                "put_object",
                "seal",
                self.name,
                needs=("ETag",),
                body=part.views(length),
                stop=self._stop,
            )
            self._give(part)
            self._abort_upload()  # the size hint announced more than one part
        self._drop_open()  # the rest is after the end

    def _finish_parts(self, count: int, length: int) -> None:
        last = length - (count - 1) * self._part_bytes
        if not count or (last < self._part_bytes and count - 1 in self._sent):
            msg = (
                f"{self._where('seal')}: it cannot be cut to {length} bytes, since the part at "
                "that offset is already uploaded"
            )
            raise StorageError(msg)
        for index in range(count):
            if index not in self._sent:
                part = self._open.pop(index, None) or Part(index, self._part_bytes)
                self._send(part, self._part_bytes if index < count - 1 else last)
        parts = [self._sent[index].result() for index in range(count)]
        try:
            self._store.call(
                "complete_multipart_upload",
                "seal",
                self.name,
                UploadId=self._begin_upload().result(),
                MultipartUpload={"Parts": parts},
            )
        except StorageError as error:
            # The answer may have been lost after the store completed the upload. Then the upload is
            # gone, so a retry fails, but the blob exists, under a name that only this writer uses.
            try:
                size = self._store.stat(self.name).size_bytes
            except BlobNotFoundError:
                raise error from None
            if size != length:
                raise

    def _give_up(self) -> None:
        self._abort_upload()
        self._drop_open()

    def _drop_open(self) -> None:
        while self._open:
            self._give(self._open.popitem()[1])

    def _give(self, part: Part) -> None:
        if part.memory is not None:
            self._memory.give(part.memory)

    # -- requests -------------------------------------------------------------------------------

    def _begin_upload(self) -> Future[str]:
        """Return the upload's ID as a future; the first call creates the upload."""
        if self._upload_id is None:
            self._upload_id = self._uploads.submit(self._create_upload)
        return self._upload_id

    def _create_upload(self) -> str:
        extra: dict[str, Any] = {"ChecksumAlgorithm": "CRC32"} if self._checksums else {}
        answer = self._store.call(
            "create_multipart_upload",
            "create",
            self.name,
            needs=("UploadId",),
            stop=self._stop,
            **extra,
        )
        return str(answer["UploadId"])

    def _upload_part(
        self, index: int, views: Sequence[memoryview], upload_id: str
    ) -> dict[str, Any]:
        """Upload one part; return its entry for `complete_multipart_upload`."""
        checksum: dict[str, Any] = {}
        if self._checksums:
            crc = 0
            for view in views:
                crc = crc32(view, crc)
            checksum["ChecksumCRC32"] = base64.b64encode(crc.to_bytes(4, "big")).decode()
        answer = self._store.call(
            "upload_part",
            f"upload part {index + 1} of",
            self.name,
            needs=("ETag",),
            body=views,
            stop=self._stop,
            UploadId=upload_id,
            PartNumber=index + 1,
            **checksum,
        )
        return {"PartNumber": index + 1, "ETag": answer["ETag"], **checksum}

    def _abort_upload(self) -> None:
        """Abort the upload after its parts in flight end."""
        for part in self._sent.values():
            part.cancel()
        # A part that arrives after the abort would stay stored, and cost money. Also, the caller
        # may reuse its memory once `abort` returns.
        wait(self._sent.values())
        self._sent.clear()
        if self._upload_id is not None:
            self._upload_id.cancel()
            # An upload that cannot be aborted now is left to `sweep`, or to a rule of the bucket.
            with suppress(PenstockError, CancelledError):
                self._store.abort_upload("abort", self.name, self._upload_id.result())


@dataclass(slots=True)
class Part:
    """A part before its upload, made of the caller's memory and of copies.

    Attributes:
        index: The number of the part in the blob, from 0.
        size_bytes: The size of every part.
        lent: Buffers of the caller, each with its offset in the part, without overlaps.
        memory: Memory for a whole part; None until a buffer is copied.
        copied: Start and stop of each copied range, ascending.
        taken: The size in bytes of all pages that have been written to; no later request writes to
            them.
        stop: The offset after the last written byte.
    """

    index: int
    size_bytes: int
    lent: list[tuple[int, memoryview]] = field(default_factory=list)
    memory: memoryview | None = None
    copied: list[tuple[int, int]] = field(default_factory=list)
    taken: int = 0
    stop: int = 0

    def lend(self, at: int, source: memoryview) -> None:
        """Use `source` at `at` without a copy, until the part is uploaded or `own` is called."""
        self.lent.append((at, source))
        self.stop = max(self.stop, at + source.nbytes)

    def put(self, at: int, source: memoryview, *, memory: PartMemory) -> None:
        """Copy `source` to `at`."""
        if self.memory is None:
            self.memory = memory.take(self.size_bytes)
        copy_bytes(self.memory[at : at + source.nbytes], source)
        insort(self.copied, (at, at + source.nbytes))
        self.stop = max(self.stop, at + source.nbytes)

    def own(self, *, memory: PartMemory) -> None:
        """Copy all lent buffers."""
        lent, self.lent = self.lent, []
        for at, source in lent:
            self.put(at, source, memory=memory)

    def views(self, length: int) -> tuple[memoryview, ...]:
        """Return views of the first `length` bytes; bytes never written are zero."""
        views: list[memoryview] = []
        at = 0
        for start, source in sorted(self.lent, key=itemgetter(0)):
            if start >= length:
                break
            views += self._between(at, start)
            views.append(source[: length - start])
            at = start + source.nbytes
        views += self._between(at, length)
        return tuple(views)

    def _between(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes of a range without lent buffers."""
        if self.memory is None:
            for at in range(start, stop, _ZEROS.nbytes):
                yield _ZEROS[: stop - at]
        elif start < stop:
            # Gaps are cleared here: memory is reused, and holds bytes of an earlier blob.
            at = start
            for first, last in [*self.copied, (stop, stop)]:
                if start <= first <= stop:
                    np.frombuffer(self.memory, np.uint8)[at:first] = 0
                    at = last
            yield self.memory[start:stop]


class PartMemory:
    """Keeps reusable memory for parts, and limits the bytes in flight."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._in_flight = 0
        self._spare: dict[int, list[memoryview]] = {}
        self._changed = threading.Condition()  # guards `_in_flight` and `_spare`

    def take(self, size_bytes: int) -> memoryview:
        """Return memory for one part; its content is unspecified."""
        with self._changed:
            spare = self._spare.get(size_bytes)
            if spare:
                return spare.pop()
        return memoryview(mmap.mmap(-1, size_bytes))

    def send(self, memory: memoryview) -> None:
        """Wait until there is room for `memory`, then count it as in flight."""
        with self._changed:
            # A part larger than the budget goes through alone; else it would wait forever.
            while self._in_flight and self._in_flight + memory.nbytes > self._budget:
                self._changed.wait()
            self._in_flight += memory.nbytes

    def sent(self, memory: memoryview) -> None:
        """Count `memory` as no longer in flight, and keep it for reuse."""
        with self._changed:
            self._in_flight -= memory.nbytes
            self._changed.notify_all()
        self.give(memory)

    def give(self, memory: memoryview) -> None:
        """Keep unused memory for reuse."""
        with self._changed:
            kept = sum(size * len(views) for size, views in self._spare.items())
            # Parts of earlier blobs had another size, which may never be needed again.
            others = [views for size, views in self._spare.items() if size != memory.nbytes]
            for views in others:
                while views and kept + memory.nbytes > self._budget:
                    kept -= views.pop().nbytes
            if kept + memory.nbytes <= self._budget:
                self._spare.setdefault(memory.nbytes, []).append(memory)

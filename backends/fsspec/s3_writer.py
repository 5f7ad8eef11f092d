"""One blob of S3 being written: parts by offset, uploaded while later ones are filled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.fsspec.config import MAX_PARTS
from penstock.backends.fsspec.parts import Part
from penstock.backends.fsspec.s3_upload import Upload
from penstock.backends.fsspec.writer import StoreWriter
from penstock.core.errors import StorageError
from penstock.core.types import align_up, flat_view

if TYPE_CHECKING:
    from penstock.backends.fsspec.parts import PartMemory
    from penstock.backends.fsspec.s3_client import S3Client
    from penstock.backends.fsspec.waiting import Batch
    from penstock.core.pool import Pool
    from penstock.core.types import WriteRequest

# A part with gaps waits for calls that overtook each other; so many may wait.
_OPEN_PARTS = 3
_PART_UNIT = 1 << 20


def part_bytes_for(size_hint: int | None, least: int) -> int:
    """The size of a part with which a blob of `size_hint` has at most `MAX_PARTS`."""
    return max(least, align_up(-(-(size_hint or 0) // MAX_PARTS), _PART_UNIT))


class S3Writer(StoreWriter):
    """A multipart upload, or one put for a blob that fits into one part.

    Part `n` holds bytes `[n * part_bytes, (n + 1) * part_bytes)`, whatever the order of the
    writes, so that a part that is sent again replaces itself. What covers a part is sent from
    where it lies; the rest is copied once. Three parts that still have gaps are kept for calls
    that overtook each other; a later write into a part that is gone fails.

    A blob can be cut at the end of any part, but not inside one that is sent already.

    Args:
        client: The bucket.
        name: Of the blob.
        part_bytes: Of every part but the last.
        memory: For parts that are copied.
        uploads: Sends parts.
        feeds: Runs the copying.
        checksums: Whether the store is given a CRC of each part to check.
    """

    def __init__(
        self,
        client: S3Client,
        name: str,
        *,
        part_bytes: int,
        memory: PartMemory,
        uploads: Pool,
        feeds: Pool,
        checksums: bool,
    ) -> None:
        super().__init__(name, client.url, feeds=feeds)
        self._client = client
        self._part_bytes = part_bytes
        self._memory = memory
        self._open: dict[int, Part] = {}
        self._upload = Upload(
            client, name, pool=uploads, checksums=checksums, stop=self._stop, failed=self._die
        )

    def _take(self, request: WriteRequest, batch: Batch) -> None:
        at = request.offset
        for buffer in request.buffers:
            view = flat_view(buffer)
            self._place(at, view, batch)
            at += view.nbytes
        while len(self._open) > _OPEN_PARTS:
            self._send(self._open.pop(min(self._open)), self._part_bytes)

    def _place(self, offset: int, view: memoryview, batch: Batch) -> None:
        while view.nbytes:
            index, at = divmod(offset, self._part_bytes)
            count = min(view.nbytes, self._part_bytes - at)
            self._check_part(index, offset)
            if count == self._part_bytes:
                self._send_in_place(index, view[:count], batch)
            else:
                if index not in self._open:
                    self._open[index] = self._fresh(index)
                self._open[index].put(at, view[:count])
                if self._open[index].filled == self._part_bytes:
                    self._send(self._open.pop(index), self._part_bytes)
            offset += count
            view = view[count:]

    def _check_part(self, index: int, offset: int) -> None:
        if index in self._upload or offset < 0:
            msg = (
                f"{self._where('write')}: offset {offset} comes too late, its part is uploaded "
                "already; offsets must ascend from call to call"
            )
            raise StorageError(msg)
        if index >= MAX_PARTS:
            msg = (
                f"{self._where('write')}: a blob has at most {MAX_PARTS:,} parts, here of "
                f"{self._part_bytes:,} bytes: raise part_bytes, or give `create` a size_hint"
            )
            raise StorageError(msg)

    def _send_in_place(self, index: int, view: memoryview, batch: Batch) -> None:
        """From the caller's own memory; the batch is held until that is over."""
        batch.hold()
        try:
            self._upload.start(index, view, over=batch.release)
        except BaseException:
            batch.release()
            raise

    def _send(self, part: Part, size: int) -> None:
        part.zero_gaps()
        memory = part.memory
        self._memory.send(memory)
        try:
            self._upload.start(part.index, memory[:size], over=lambda _: self._memory.sent(memory))
        except BaseException:
            self._memory.sent(memory)
            raise

    def _finish(self, length: int) -> None:
        count = -(-length // self._part_bytes)
        if count > 1 or self._upload.begun:
            self._finish_parts(count, length)
        else:
            part = self._open.pop(0, None) or self._fresh(0)
            part.zero_gaps()
            self._client.put("seal", self.name, part.memory[:length], stop=self._stop)
            self._memory.give(part.memory)
        self._drop_open()  # all that is left lies behind the end
        size = self._client.size("seal", self.name)
        if size != length:
            msg = f"{self._where('seal')}: the store holds {size} bytes of {length}; do not use it"
            raise StorageError(msg)

    def _finish_parts(self, count: int, length: int) -> None:
        last = length - (count - 1) * self._part_bytes
        if not count or (last < self._part_bytes and count - 1 in self._upload):
            msg = (
                f"{self._where('seal')}: it cannot be cut to {length} bytes, since the part of "
                "that offset is uploaded already"
            )
            raise StorageError(msg)
        for index in range(count):
            if index not in self._upload:
                part = self._open.pop(index, None) or self._fresh(index)
                self._send(part, self._part_bytes if index < count - 1 else last)
        self._upload.complete(count, length)

    def _give_up(self) -> None:
        self._upload.abort()
        self._drop_open()

    def _fresh(self, index: int) -> Part:
        return Part(index, self._memory.take(self._part_bytes))

    def _drop_open(self) -> None:
        while self._open:
            self._memory.give(self._open.popitem()[1].memory)

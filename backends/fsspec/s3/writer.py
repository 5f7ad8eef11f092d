"""One blob of S3 being written: parts by offset, uploaded while later ones are filled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.fsspec.config import MAX_PARTS
from penstock.backends.fsspec.parts import Part
from penstock.backends.fsspec.s3.upload import Upload
from penstock.backends.fsspec.writer import StoreWriter
from penstock.core.errors import StorageError
from penstock.core.types import PAGE_BYTES, align_down, align_up, flat_view

if TYPE_CHECKING:
    from penstock.backends.fsspec.parts import PartMemory
    from penstock.backends.fsspec.s3.client import S3Client
    from penstock.backends.fsspec.waiting import Batch
    from penstock.core.concurrency.pool import Pool
    from penstock.core.types import WriteRequest

# A part with gaps waits for calls that overtook each other; so many may wait.
_OPEN_PARTS = 3
_PART_UNIT = 1 << 20
# A request takes a millisecond of CPU; sixteen such parts are what core has under way at once.
_MOST_BYTES = 16 << 20
_PARTS = 64
_LENT_BYTES = 1 << 20  # what is smaller is copied, which costs less than a call to send it


def part_bytes_for(size_hint: int | None, least: int) -> int:
    """The size of the parts of a blob of `size_hint`: few requests, but enough to share.

    At most `MAX_PARTS` of them.
    """
    size = size_hint or 0
    wanted = min(size // _PARTS, _MOST_BYTES)
    least = align_up(least, PAGE_BYTES)
    return max(least, align_up(max(wanted, -(-size // MAX_PARTS)), _PART_UNIT))


class S3Writer(StoreWriter):
    """A multipart upload, or one put for a blob that fits into one part.

    Part `n` holds bytes `[n * part_bytes, (n + 1) * part_bytes)`, whatever the order of the
    writes, so that a part that is sent again replaces itself. What one batch has of a part is sent
    from where it lies, unless it is small; of a part that two batches share, the first is copied.
    Three parts that still have gaps are kept for calls that overtook each other; a later write
    into a part that is gone fails.

    A blob can be cut at the end of any part, but not inside one that is sent already.

    Args:
        client: The bucket.
        name: Of the blob.
        size_hint: Expected bytes.
        part_bytes: Least size of every part but the last.
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
        size_hint: int | None,
        part_bytes: int,
        memory: PartMemory,
        uploads: Pool,
        feeds: Pool,
        checksums: bool,
    ) -> None:
        super().__init__(name, client.url, feeds=feeds)
        self._client = client
        self._part_bytes = part_bytes_for(size_hint, part_bytes)
        self._memory = memory
        self._open: dict[int, Part] = {}
        self._newest = 0  # the last part that anything was written to
        self._upload = Upload(
            client, name, pool=uploads, checksums=checksums, stop=self._stop, failed=self._die
        )
        if (size_hint or 0) > self._part_bytes:
            self._upload.begin()

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
        for index in [i for i, part in self._open.items() if self._is_over(i, part)]:
            self._send(self._open.pop(index), self._part_bytes, batch)
        while len(self._open) > _OPEN_PARTS:
            self._send(self._open.pop(min(self._open)), self._part_bytes, batch)

    def _is_over(self, index: int, part: Part) -> bool:
        """Whether all of a part is known: where its last page is not full the blob may end."""
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
        """Pages that a request touches are its own (`offset_alignment`): their gaps stay gaps."""
        at, stop = align_down(start, PAGE_BYTES), align_up(stop, PAGE_BYTES)
        while at < stop:
            index = at // self._part_bytes
            count = min(stop, (index + 1) * self._part_bytes) - at
            self._open[index].taken += count
            at += count

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

    def _send(self, part: Part, size: int, batch: Batch | None = None) -> None:
        """Send a part; `batch`, whose memory it may hold, is held until that is over."""
        views, memory = part.views(size), part.memory
        if part.lent:
            assert batch is not None
            batch.hold()
        if memory is not None:
            self._memory.send(memory)

        def over(error: BaseException | None) -> None:
            if memory is not None:
                self._memory.sent(memory)
            if part.lent:
                assert batch is not None
                batch.release(error)

        try:
            self._upload.start(part.index, views, over=over)
        except BaseException:
            over(None)
            raise

    def _finish(self, length: int) -> None:
        count = -(-length // self._part_bytes)
        if count > 1 or self._upload.sends:
            self._finish_parts(count, length)
        else:
            part = self._open.pop(0, None) or Part(0, self._part_bytes)
            self._client.put("seal", self.name, part.views(length), stop=self._stop)
            self._give(part)
            self._upload.abort()  # it was begun for more
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
                part = self._open.pop(index, None) or Part(index, self._part_bytes)
                self._send(part, self._part_bytes if index < count - 1 else last)
        self._upload.complete(count, length)

    def _give_up(self) -> None:
        self._upload.abort()
        self._drop_open()

    def _drop_open(self) -> None:
        while self._open:
            self._give(self._open.popitem()[1])

    def _give(self, part: Part) -> None:
        if part.memory is not None:
            self._memory.give(part.memory)

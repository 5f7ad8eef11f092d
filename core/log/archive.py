"""A read-only backend over an entry of a log, and a loader of its frames.

Tested in `tests/core/log/test_segments.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar, NoReturn

from penstock.core.abc import Backend, BlobWriter
from penstock.core.concurrency.copy_bytes import copy_bytes
from penstock.core.errors import (
    BlobNotFoundError,
    BlobTruncatedError,
    DamagedError,
    StorageError,
)
from penstock.core.format.segment import HEADER_BYTES, decode_directory
from penstock.core.pipeline.loader import Loader, LoadStats
from penstock.core.types import BlobInfo, Capabilities, ReadRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.log.segments import StoredEntry
    from penstock.core.pipeline.codec_chain import CodecChain
    from penstock.core.pipeline.exchange import Exchange
    from penstock.core.plan.reads import FrameJob


class EntryBackend(Backend):
    """Presents the files of an entry as blobs and records. Closing it leaves the store open."""

    name: ClassVar[str] = "log entry"

    def __init__(
        self, store: Backend, entry: StoredEntry, payload: memoryview | None = None
    ) -> None:
        """Read the directory of the entry's files.

        Args:
            store: The store.
            entry: The entry.
            payload: The whole payload of the entry; None: `read` reads from the store.

        Raises:
            FormatError: The directory is damaged.
        """
        self._store = store
        self._entry = entry
        self._payload = payload
        directory = bytearray(entry.header.directory_bytes)
        self._read(0, memoryview(directory))
        self._files = decode_directory(bytes(directory), entry.header, entry.segment)

    @property
    def url(self) -> str:
        """The URL of the store."""
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        """The default capabilities, which suffice for a reader."""
        return Capabilities()

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """Raise StorageError: entries are read-only."""
        del size_hint
        self._refuse(name)

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """Raise StorageError: entries are read-only."""
        del data, exclusive
        self._refuse(name)

    def delete(self, names: Sequence[str], /) -> None:
        """Raise StorageError: entries are read-only."""
        self._refuse(" ".join(names))

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """Read from the payload if it is in memory, else from the segment."""
        for request in requests:
            target = memoryview(request.target)
            self._read(self._start(request.name, request.offset, target.nbytes), target)

    def view(self, name: str, offset: int, length: int) -> memoryview:
        """Return bytes of a file without a copy; the payload must be in memory."""
        assert self._payload is not None
        start = self._start(name, offset, length)
        return self._payload[start : start + length].toreadonly()

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """List the files."""
        return [self.stat(name) for name in sorted(self._files) if name.startswith(prefix)]

    def stat(self, name: str, /) -> BlobInfo:
        """Return the size of a file; its modification time is reported as 0."""
        return BlobInfo(name, self._place(name)[1], 0.0)

    def _read(self, start: int, target: memoryview) -> None:
        if self._payload is not None:
            copy_bytes(target, self._payload[start : start + target.nbytes])
        else:
            at = self._entry.offset + HEADER_BYTES + start
            self._store.read([ReadRequest(self._entry.segment, at, target)])

    def _start(self, name: str, offset: int, length: int) -> int:
        """Return the offset in the payload at which these bytes of a file begin."""
        at, size = self._place(name)
        if offset < 0 or offset + length > size:
            msg = f"{name} in {self.url}/{self._entry.segment} has only {size} bytes"
            raise BlobTruncatedError(msg)
        return at + offset

    def _place(self, name: str) -> tuple[int, int]:
        try:
            return self._files[name]
        except KeyError:
            msg = f"{name} does not exist in the log under {self.url}"
            raise BlobNotFoundError(msg) from None

    def _refuse(self, name: str) -> NoReturn:
        msg = f"cannot change {name} in {self.url}: an entry of a log is read-only"
        raise StorageError(msg)


class EntryLoader(Loader):
    """Decodes the frames of an entry whose payload is in memory, so it needs no read threads."""

    backend: EntryBackend

    def run(
        self,
        jobs: Sequence[FrameJob[CodecChain]],
        *,
        decode: bool = True,
        progress: Callable[[int], None] | None = None,
        exchange: Exchange | None = None,
    ) -> LoadStats:
        """Verify, decode and place `jobs`; see `Loader.run`."""
        del progress, exchange
        stats = LoadStats(frames=len(jobs))
        tasks = [partial(self._finish, job, decode) for job in jobs]
        for job, outcome in zip(jobs, self.workers.side_by_side(tasks), strict=True):
            if isinstance(outcome, DamagedError | StorageError):
                stats.damaged += [(name, str(outcome), job.blob) for name in job.label]
            elif isinstance(outcome, BaseException):
                raise outcome
        return stats

    def _finish(self, job: FrameJob[CodecChain], decode: bool) -> None:  # noqa: FBT001 - of `run`
        frames = ((link.blob, link.frame) for link in reversed(job.links))
        stored = [self.backend.view(blob, frame.offset, frame.length) for blob, frame in frames]
        self.reader.finish(job, stored, decode=decode)

"""Read-only backends over entries of a log, whose files are ranges of segments.

Tested in `tests/core/log/test_segments.py`.
"""

from __future__ import annotations

from concurrent.futures import Future
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
from penstock.core.format.segment import decode_directory
from penstock.core.pipeline.loader import Loader, LoadStats
from penstock.core.types import BlobInfo, Capabilities, ReadRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.core.concurrency.workers import Workers
    from penstock.core.log.segments import StoredEntry
    from penstock.core.pipeline.codec_chain import CodecChain
    from penstock.core.pipeline.exchange import Exchange
    from penstock.core.plan.reads import FrameJob


class EntryBackend(Backend):
    """Shows the files of entries as blobs and records; closing it leaves the store open.

    Each entry is a checkpoint of another step and uid, so all names differ.
    """

    name: ClassVar[str] = "log entry"

    def __init__(self, store: Backend, files: Mapping[str, tuple[str, int, int]], /) -> None:
        """Show `files`, each with its segment, offset and length."""
        self._store = store
        self._files = files

    @property
    def url(self) -> str:
        """The URL of the store."""
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        """Those that a reader needs."""
        return Capabilities(local=self._store.capabilities.local)

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """Refuse to write."""
        del size_hint
        self._refuse(name)

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """Refuse to write."""
        del data, exclusive
        self._refuse(name)

    def delete(self, names: Sequence[str], /) -> None:
        """Refuse to delete."""
        self._refuse(" ".join(names))

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """Read from the segments."""
        self._store.read([self._moved(request) for request in requests])

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """Read from the segment in the background, without the time limit of `read`.

        The loader watches the progress: after a time-out of `read` it would use targets again that
        still belong to the store.
        """
        try:
            moved = [self._moved(request) for request in requests]
        except StorageError as error:
            failed: Future[None] = Future()
            failed.set_exception(error)
            return failed
        return self._store.submit_read(moved)

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """List the files."""
        return [self.stat(name) for name in sorted(self._files) if name.startswith(prefix)]

    def stat(self, name: str, /) -> BlobInfo:
        """Return the size of a file, and the time of its segment."""
        segment, _, length = self._place(name)
        return BlobInfo(name, length, self._store.stat(segment).modified_s)

    def _moved(self, request: ReadRequest) -> ReadRequest:
        segment, offset, length = self._place(request.name)
        if request.offset < 0 or request.offset + memoryview(request.target).nbytes > length:
            msg = f"{request.name} in {self.url}/{segment} has {length} bytes"
            raise BlobTruncatedError(msg)
        return ReadRequest(segment, offset + request.offset, request.target)

    def _place(self, name: str) -> tuple[str, int, int]:
        try:
            return self._files[name]
        except KeyError:
            msg = f"{name} does not exist in the log under {self.url}"
            raise BlobNotFoundError(msg) from None

    def _refuse(self, name: str) -> NoReturn:
        msg = f"cannot change {name} in {self.url}: an entry of a log is read-only"
        raise StorageError(msg)


class LoadedEntry(EntryBackend):
    """Shows the files of one entry whose payload is in memory; never asks the store."""

    def __init__(self, store: Backend, entry: StoredEntry, payload: memoryview) -> None:
        """Show the files of a whole payload.

        Raises:
            FormatError: Its directory is damaged.
        """
        directory = bytes(payload[: entry.header.directory_bytes])
        files = decode_directory(directory, entry.header, entry.segment)
        super().__init__(store, {name: (entry.segment, *place) for name, place in files.items()})
        self._payload = payload

    @property
    def capabilities(self) -> Capabilities:
        """Those of memory."""
        return Capabilities()

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """Copy from the payload."""
        for request in requests:
            target = memoryview(request.target)
            copy_bytes(target, self.view(request.name, request.offset, target.nbytes))

    def stat(self, name: str, /) -> BlobInfo:
        """Return the size of a file; its time is unknown."""
        return BlobInfo(name, self._place(name)[2], 0.0)

    def view(self, name: str, offset: int, length: int) -> memoryview:
        """Return bytes of a file, without a copy."""
        segment, at, size = self._place(name)
        if offset < 0 or offset + length > size:
            msg = f"{name} in {self.url}/{segment} has {size} bytes"
            raise BlobTruncatedError(msg)
        return self._payload[at + offset : at + offset + length].toreadonly()


class LoadedLoader(Loader):
    """Decodes the frames of a loaded entry where they are, without a thread that reads them."""

    def __init__(self, entry: LoadedEntry, workers: Workers) -> None:
        """Make the loader of an entry."""
        super().__init__(entry, workers)
        self._entry = entry

    def run(
        self,
        jobs: Sequence[FrameJob[CodecChain]],
        *,
        decode: bool = True,
        progress: Callable[[int], None] | None = None,
        exchange: Exchange | None = None,
    ) -> LoadStats:
        """Verify, decode and place `jobs`; see `Loader.run`."""
        assert exchange is None
        stats = LoadStats(frames=len(jobs))
        tasks = [partial(self._finish, job, decode=decode) for job in jobs]
        for job, outcome in zip(jobs, self.workers.side_by_side(tasks), strict=True):
            if isinstance(outcome, DamagedError):
                damage = [(name, str(outcome), job.blob) for name in job.label]
                stats.damaged += damage
            elif isinstance(outcome, BaseException):
                raise outcome
            stats.bytes_read += job.frame.length
            if progress is not None:
                progress(job.frame.length)
        return stats

    def _finish(self, job: FrameJob[CodecChain], *, decode: bool) -> None:
        try:
            stored = [
                self._entry.view(link.blob, link.frame.offset, link.frame.length)
                for link in reversed(job.links)
            ]
        except (BlobNotFoundError, BlobTruncatedError) as error:
            raise DamagedError(str(error), [job.blob]) from error
        self.reader.finish(job, stored, decode=decode)

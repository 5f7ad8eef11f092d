"""A read-only backend over one entry of a log: its files are ranges of a segment."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, ClassVar, NoReturn

from penstock.core.abc import Backend, BlobWriter
from penstock.core.errors import BlobNotFoundError, BlobTruncatedError, StorageError
from penstock.core.types import BlobInfo, Capabilities, ReadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class EntryBackend(Backend):
    """Shows the files of an entry as blobs and records; closing it leaves the store open."""

    name: ClassVar[str] = "log entry"

    def __init__(
        self, store: Backend, segment: str, files: Mapping[str, tuple[int, int]], /
    ) -> None:
        """Show `files`, each with offset in the segment and length."""
        self._store = store
        self._segment = segment
        self._files = files

    @property
    def url(self) -> str:
        """The URL of the segment."""
        return f"{self._store.url}/{self._segment}"

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
        """Read from the segment."""
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
        """Return the size of a file, and the time of the segment."""
        return BlobInfo(name, self._place(name)[1], self._store.stat(self._segment).modified_s)

    def _moved(self, request: ReadRequest) -> ReadRequest:
        offset, length = self._place(request.name)
        if request.offset < 0 or request.offset + memoryview(request.target).nbytes > length:
            msg = f"{request.name} in {self.url} has {length} bytes"
            raise BlobTruncatedError(msg)
        return ReadRequest(self._segment, offset + request.offset, request.target)

    def _place(self, name: str) -> tuple[int, int]:
        try:
            return self._files[name]
        except KeyError:
            msg = f"{name} does not exist in {self.url}"
            raise BlobNotFoundError(msg) from None

    def _refuse(self, name: str) -> NoReturn:
        msg = f"cannot change {name} in {self.url}: an entry of a log is read-only"
        raise StorageError(msg)

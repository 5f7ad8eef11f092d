"""A read-only backend over entries of a log: their files are ranges of segments."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, ClassVar, NoReturn

from penstock.core.abc import Backend, BlobWriter
from penstock.core.errors import BlobNotFoundError, BlobTruncatedError, StorageError
from penstock.core.types import BlobInfo, Capabilities, ReadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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

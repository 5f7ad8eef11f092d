"""What the file backends have in common: everything but how bytes are moved."""

from __future__ import annotations

import os
import threading
import weakref
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import quote

from penstock.backends.local.batch import Batch, failed, settle
from penstock.backends.local.blob import Ahead, FileWriter
from penstock.backends.local.config import LocalConfig, local_options
from penstock.backends.local.direct import DirectAccess
from penstock.backends.local.failures import explained
from penstock.backends.local.namespace import Namespace
from penstock.backends.local.threads import carry
from penstock.backends.local.transfer import Flight, OpenBlob, Slot, cut_read
from penstock.core.abc import Backend
from penstock.core.errors import BlobTruncatedError, FormatError, StorageError
from penstock.core.types import PAGE_BYTES, Capabilities, flat_view

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from penstock.backends.local.batch import Engine
    from penstock.backends.local.folders import Folders
    from penstock.backends.local.transfer import Transfer
    from penstock.core.abc import BlobWriter, PluginConfig
    from penstock.core.types import BlobInfo, ReadRequest, WriteRequest

SMALL_READ_BYTES = 256 << 10  # below, the page cache costs less than a bounce
INLINE_READ_BYTES = 1 << 20  # below, the caller reads by itself: no thread, no ring to start


class LocalBackend(Backend):
    """Blobs and records are files under `path`; subclasses choose the engine."""

    Config: ClassVar[type[PluginConfig]] = LocalConfig

    def __init__(self, config: LocalConfig, /) -> None:
        """Touches nothing: a root that is missing is made by the first write."""
        root = os.path.abspath(os.path.expanduser(config.path))
        self._config = config
        self._names = Namespace(root)
        self._direct = DirectAccess(config.direct_io, root)
        self._closed = False
        self._engine: Engine | None = None
        self._engine_pid = os.getpid()
        self._writers: weakref.WeakSet[FileWriter] = weakref.WeakSet()
        self._lock = threading.Lock()  # guards `_engine`, `_writers` and `_closed`

    @classmethod
    def from_url(cls, url: str, options: dict[str, str], /) -> PluginConfig:
        """Options for `posix:///abs/path`, `file://...` or a plain path."""
        return cls.Config.model_validate(local_options(url, options))

    @property
    def url(self) -> str:
        """The root, as a URL."""
        return f"{self.name}://{quote(self._names.root)}"

    @property
    def capabilities(self) -> Capabilities:
        """What was proved; probes direct I/O at the first call, without leaving a trace."""
        refusal = self._direct.refusal
        return Capabilities(
            direct_io=refusal is None,
            memory_alignment=PAGE_BYTES if refusal is None else 1,
            offset_alignment=PAGE_BYTES,
            preferred_parallel=self._parallel,
            local=True,
            notes=() if refusal is None else (f"page cache in use: {refusal}",),
        )

    @property
    @abstractmethod
    def _parallel(self) -> int:
        """Transfers in flight at most."""

    @abstractmethod
    def _open_engine(self) -> Engine: ...

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """As the contract says. The unfinished file may be listed before it is sealed."""
        engine = self._running_engine()
        fd, folders = self._create_file(name, size_hint)
        try:
            with explained("create", name, self._names.root):
                direct = self._direct.for_write(fd)
                blob = self._opened(name, fd, direct=direct, writing=True)
        except BaseException:
            os.unlink(name.rpartition("/")[2], dir_fd=folders.last)
            os.close(fd)
            folders.close()
            raise
        # Blocks reserved in memory file systems are memory, and buffered ones are placed late.
        ahead = Ahead(self._config.allocate_bytes if direct else 0, size_hint)
        writer = FileWriter(self._names.root, blob, folders, engine=engine, ahead=ahead)
        with self._lock:
            self._writers.add(writer)
        return writer

    def submit_write(self, writer: BlobWriter, requests: Sequence[WriteRequest], /) -> Future[None]:
        """Natively: returns at once; callbacks of the future run in the engine's thread."""
        if isinstance(writer, FileWriter):
            try:
                return writer.submit(requests)
            except StorageError as error:
                return failed(error)
        return super().submit_write(writer, requests)

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """As the contract says."""
        settle(self._begin_read(requests, inline=True))

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """Natively: returns at once; callbacks of the future run in the engine's thread."""
        try:
            return self._begin_read(requests, inline=False)
        except StorageError as error:
            return failed(error)

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        """As the contract says, and of one version even while the record is replaced."""
        self._check_open()
        fd = self._names.open_file(name)
        try:
            with explained("read", name, self._names.root):
                size = os.fstat(fd).st_size
                if size > limit_bytes:
                    msg = f"{name} on {self.url} has {size} bytes, more than {limit_bytes} allowed"
                    raise FormatError(msg, [name])
                data = bytearray()
                while len(data) < size and (more := os.pread(fd, size - len(data), len(data))):
                    data += more
        finally:
            os.close(fd)
        if len(data) < size:
            msg = f"{name} on {self.url} shrank while it was read"
            raise FormatError(msg, [name])
        return bytes(data)

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """As the contract says, by `link(2)` or `rename(2)`."""
        self._check_open()
        self._names.publish(name, data, exclusive=exclusive)

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """As the contract says; links are neither listed nor followed."""
        self._check_open()
        return self._names.list(prefix)

    def stat(self, name: str, /) -> BlobInfo:
        """As the contract says."""
        self._check_open()
        return self._names.stat(name)

    def delete(self, names: Sequence[str], /) -> None:
        """As the contract says; folders left empty are removed."""
        self._check_open()
        self._names.delete(names)

    def sweep(self, before_s: float, /) -> None:
        """As the contract says: temporary files, and folders without any file."""
        self._check_open()
        self._names.sweep(before_s)

    def free_bytes(self) -> int:
        """What the file system has for users without privileges; quotas are not heeded."""
        self._check_open()
        return self._names.free_bytes()

    def close(self) -> None:
        """As the contract says; blobs that were not sealed are aborted."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            engine, self._engine = self._engine, None
            writers = list(self._writers)
            ours = self._engine_pid == os.getpid()
        if ours:
            for writer in writers:
                writer.abort()
            if engine is not None:
                engine.close()
        super().close()

    # -- below --------------------------------------------------------------------------------

    def _create_file(self, name: str, size_hint: int | None) -> tuple[int, Folders]:
        """An empty file that did not exist; subclasses may give it a layout of its own."""
        del size_hint
        return self._names.create_file(name)

    def _opened(self, name: str, fd: int, *, direct: bool, writing: bool) -> OpenBlob:
        """A file to be written, or to be read in large requests; `OSError` is the caller's."""
        del writing
        return OpenBlob(name, fd, direct)

    def _check_open(self) -> None:
        if self._closed:
            msg = f"the backend {self.url} is closed"
            raise StorageError(msg)

    def _running_engine(self) -> Engine:
        if self._engine_pid != os.getpid():
            # A fork has neither the threads nor a usable ring, and its locks may be held for ever.
            self._lock = threading.Lock()
            self._engine, self._engine_pid = None, os.getpid()
            self._direct = DirectAccess(self._config.direct_io, self._names.root)
            self._writers = weakref.WeakSet()
        with self._lock:
            self._check_open()
            if self._engine is None:
                self._engine = self._open_engine()
                weakref.finalize(self, self._engine.close).atexit = False
            return self._engine

    def _begin_read(self, requests: Sequence[ReadRequest], *, inline: bool) -> Future[None]:
        self._check_open()
        blobs: dict[tuple[str, bool], OpenBlob] = {}
        batch = Batch("read", self._names.root, finish=lambda: _close_all(blobs))
        try:
            transfers: list[Transfer] = []
            for request in requests:
                target = flat_view(request.target)
                blob = self._open_blob(request.name, blobs, large=target.nbytes)
                self._check_range(blob, request.offset, target.nbytes)
                transfers += cut_read(batch, blob, request.offset, target)
            small = sum(t.length for t in transfers) <= INLINE_READ_BYTES
            if inline and small and not any(t.direct for t in transfers):
                _carry_all(batch, transfers)
            else:
                self._running_engine().start(batch, transfers)
        except BaseException:
            if not batch.future.done():
                _close_all(blobs)
            raise
        return batch.future

    def _open_blob(
        self, name: str, blobs: dict[tuple[str, bool], OpenBlob], *, large: int
    ) -> OpenBlob:
        wish = large >= SMALL_READ_BYTES
        blob = blobs.get((name, wish))
        if blob is None:
            fd = self._names.open_file(name)
            blobs[name, wish] = blob = OpenBlob(name, fd, direct=False)
            if wish:
                with explained("read", name, self._names.root):
                    direct = self._direct.for_read(fd)
                    blob = self._opened(name, fd, direct=direct, writing=False)
                blobs[name, wish] = blob
        return blob

    def _check_range(self, blob: OpenBlob, offset: int, length: int) -> None:
        size = os.fstat(blob.fd).st_size
        if offset < 0 or offset + length > size:
            msg = (
                f"cannot read bytes {offset} to {offset + length} of {blob.name} under "
                f"{self._names.root}: it has {size}"
            )
            raise BlobTruncatedError(msg)


def _close_all(blobs: dict[tuple[str, bool], OpenBlob]) -> None:
    while blobs:
        os.close(blobs.popitem()[1].fd)


def _carry_all(batch: Batch, transfers: Sequence[Transfer]) -> None:
    batch.begin(len(transfers))
    slot = Slot()
    for transfer in transfers:
        try:
            if not batch.failed:
                carry(Flight(transfer, slot), os.preadv, os.pwritev)
        except (OSError, EOFError) as error:
            batch.fail(error, transfer)
        batch.done()

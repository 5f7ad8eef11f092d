"""The base class of the file backends, which implements all but the engine that moves bytes."""

from __future__ import annotations

import os
import threading
import weakref
from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal
from urllib.parse import quote, unquote

from pydantic import Field

from penstock.backends.local.blob import DirectAccess, DirectMode, FileWriter, SpaceAhead
from penstock.backends.local.failures import explained
from penstock.backends.local.folders import Ownership
from penstock.backends.local.namespace import Namespace
from penstock.backends.local.threads import carry
from penstock.backends.local.transfer import (
    Flight,
    OpenBlob,
    Slot,
    TransferBatch,
    cut_read,
    failed,
    settle,
)
from penstock.core.abc import Backend, PluginConfig
from penstock.core.errors import BlobTruncatedError, ConfigError, FormatError, StorageError
from penstock.core.types import PAGE_BYTES, Capabilities, flat_view

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from penstock.backends.local.folders import Folders
    from penstock.backends.local.transfer import Engine, Transfer
    from penstock.core.abc import BlobWriter
    from penstock.core.types import BlobInfo, ReadRequest, WriteRequest

SMALL_READ_BYTES = 256 << 10  # below this the page cache costs less than a bounce page
INLINE_READ_BYTES = 1 << 20  # below this the calling thread reads: no thread, no ring to start
_MOST_DEVICES = 64  # the most devices to check: volumes can be stacked on each other


class LocalConfig(PluginConfig):
    """Options of every backend that keeps blobs in files.

    Attributes:
        path: The root folder; the first write creates it.
        direct_io: `auto` bypasses the page cache if a probe succeeds. `on` raises an error if the
            probe fails. `off` never bypasses the cache.
        allocate_bytes: The space to reserve ahead of direct writes, in bytes; 0 reserves none.
            `seal` frees the surplus. Writes through the page cache reserve none.
        owner: For a root in a folder that all users can write to (`/tmp`, `/dev/shm`): `self`
            requires that this user or root owns it, `any` trusts every owner.
    """

    path: str = Field(min_length=1, pattern=r"^[^\x00]*$")
    direct_io: DirectMode = "auto"
    allocate_bytes: int = Field(default=1 << 30, ge=0)
    owner: Literal["self", "any"] = "self"


class LocalBackend(Backend):
    """Keeps blobs and records as files under `path`; subclasses choose the engine."""

    Config: ClassVar[type[PluginConfig]] = LocalConfig

    def __init__(self, config: LocalConfig, /) -> None:
        """Create the backend without touching the root; the first write creates the root."""
        root = os.path.abspath(os.path.expanduser(config.path))
        self._config = config
        self._names = Namespace(root, ownership=None if config.owner == "any" else Ownership(root))
        self._direct = DirectAccess(config.direct_io, root)
        self._closed = False
        self._engine: Engine | None = None
        self._engine_pid = os.getpid()
        self._writers: weakref.WeakSet[FileWriter] = weakref.WeakSet()
        self._lock = threading.Lock()  # guards `_engine`, `_writers` and `_closed`

    @classmethod
    def from_url(cls, url: str, options: dict[str, str], /) -> PluginConfig:
        """Return the options for `posix:///abs/path`, `file://...` or a plain path."""
        return cls.Config.model_validate(local_options(url, options))

    @property
    def url(self) -> str:
        """The root as a `file://` URL, so that messages name a run the same way for all engines."""
        return f"file://{quote(self._names.root)}"

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do here. Probes direct I/O if needed, and leaves no file."""
        refusal = self._direct.refusal
        return Capabilities(
            direct_io=refusal is None,
            memory_alignment=PAGE_BYTES if refusal is None else 1,
            offset_alignment=PAGE_BYTES,
            preferred_parallel=self._parallel,
            appends=True,
            renames=True,
            local=True,
            prefers_huge_pages=refusal is None and self._is_virtio,
            notes=() if refusal is None else (f"page cache in use: {refusal}",),
        )

    @cached_property
    def _is_virtio(self) -> bool:
        return is_virtio(self._names.root)

    @property
    @abstractmethod
    def _parallel(self) -> int:
        """The maximum number of transfers in flight."""

    @abstractmethod
    def _open_engine(self) -> Engine: ...

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """See `Backend.create`. `list` may show the file before it is sealed."""
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
        # Direct I/O only: in a memory file system reserved blocks are memory, and for buffered
        # writes the file system places blocks late, when it knows the whole file.
        ahead = SpaceAhead(self._config.allocate_bytes if direct else 0, size_hint)
        writer = FileWriter(self._names.root, blob, folders, engine=engine, ahead=ahead)
        with self._lock:
            self._writers.add(writer)
        return writer

    def submit_write(self, writer: BlobWriter, requests: Sequence[WriteRequest], /) -> Future[None]:
        """Start a write and return at once; the future's callbacks run in an engine thread."""
        if isinstance(writer, FileWriter):
            try:
                return writer.submit(requests)
            except StorageError as error:
                return failed(error)
        return super().submit_write(writer, requests)

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """See `Backend.read`."""
        settle(self._begin_read(requests, inline=True))

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """Start a read and return at once; the future's callbacks run in an engine thread."""
        try:
            return self._begin_read(requests, inline=False)
        except StorageError as error:
            return failed(error)

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        """See `Backend.read_record`. Reads one open file, so a replace cannot mix versions."""
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
        """See `Backend.publish`. Publishes with `link(2)` or `rename(2)`."""
        self._check_open()
        self._names.publish(name, data, exclusive=exclusive)

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """See `Backend.list`. Does not follow links."""
        self._check_open()
        return self._names.list(prefix)

    def stat(self, name: str, /) -> BlobInfo:
        """See `Backend.stat`."""
        self._check_open()
        return self._names.stat(name)

    def delete(self, names: Sequence[str], /) -> None:
        """See `Backend.delete`. Also removes folders that become empty."""
        self._check_open()
        self._names.delete(names)

    def rename(self, old: str, new: str, /) -> None:
        """See `Backend.rename`."""
        self._check_open()
        self._names.rename(old, new)

    def check_writable(self) -> None:
        """Check that the root, or its nearest existing parent, can be written."""
        self._check_open()
        self._names.check_writable()

    def sweep(self, before_s: float, /) -> None:
        """Remove temporary files and empty folders that are older than `before_s`."""
        self._check_open()
        self._names.sweep(before_s)

    def free_bytes(self) -> int:
        """Return the free bytes for unprivileged users; ignores quotas."""
        self._check_open()
        return self._names.free_bytes()

    def close(self) -> None:
        """See `Backend.close`. Aborts unsealed blobs."""
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
        """Create a new empty file; subclasses may give it a layout."""
        del size_hint
        return self._names.create_file(name)

    def _opened(self, name: str, fd: int, *, direct: bool, writing: bool) -> OpenBlob:
        """Return an open file for writes or large reads; the caller maps `OSError`."""
        del writing
        return OpenBlob(name, fd, direct)

    def _check_open(self) -> None:
        if self._closed:
            msg = f"the backend {self.url} is closed"
            raise StorageError(msg)

    def _running_engine(self) -> Engine:
        if self._engine_pid != os.getpid():
            # A forked child has neither the threads nor a usable ring, and locks that a thread of
            # the parent held are never released in it.
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
        batch = TransferBatch("read", self._names.root, finish=lambda: _close_all(blobs))
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
                f"{self._names.root}: it ends at {size}"
            )
            raise BlobTruncatedError(msg)


def path_from_url(url: str) -> str:
    """Return the path of `url`, percent-decoded if it has a scheme.

    Raises:
        ConfigError: The URL names no folder, or names another machine (`file://host/...`).
    """
    scheme, separator, rest = url.partition("://")
    if not (rest if separator else url).strip():
        msg = f"{url!r} names no folder: give a path such as runs/gpt, or file:///absolute/path"
        raise ConfigError(msg)
    if not separator:
        return url
    if scheme == "file" and not rest.startswith(("/", ".", "~")):
        host, _, path = rest.partition("/")
        if host != "localhost":
            msg = f"{url}: a file URL is file:///absolute/path; {host!r} looks like a machine"
            raise ConfigError(msg)
        rest = "/" + path
    return unquote(rest)


def local_options(url: str, options: dict[str, str]) -> dict[str, str]:
    """Return `options` with the path of `url` added.

    Raises:
        ConfigError: The options also hold a path.
    """
    if "path" in options:
        msg = f"{url}: the path is in the URL; remove 'path' from its options"
        raise ConfigError(msg)
    return {**options, "path": path_from_url(url)}


def _close_all(blobs: dict[tuple[str, bool], OpenBlob]) -> None:
    while blobs:
        os.close(blobs.popitem()[1].fd)


def _carry_all(batch: TransferBatch, transfers: Sequence[Transfer]) -> None:
    batch.begin(len(transfers))
    slot = Slot()
    for transfer in transfers:
        try:
            if not batch.failed:
                carry(Flight(transfer, slot), os.preadv, os.pwritev)
        except (OSError, EOFError) as error:
            batch.fail(error, transfer)
        batch.done()


def is_virtio(folder: str, sys: str = "/sys/dev/block") -> bool:
    """Return whether `folder` is on a paravirtual disk of the hypervisor (virtio).

    Such a disk passes each small page to the host separately: direct reads into 4 KiB pages reached
    1.3 GB/s where huge pages reached 3.1 (Firecracker, Linux 6.18). For an NVMe controller the page
    size makes no difference. False if the disk is unknown, as for file systems without a device.

    Args:
        folder: The folder; if it does not exist, its nearest existing parent is checked.
        sys: Where the kernel describes devices by number; tests pass their own folder.
    """
    number = _device_of(folder)
    waiting = [] if number is None else [Path(sys, f"{os.major(number)}:{os.minor(number)}")]
    for _ in range(_MOST_DEVICES):
        if not waiting:
            break
        device = waiting.pop()
        try:
            if any(part.startswith("virtio") for part in device.resolve(strict=True).parts):
                return True
            waiting += (device / "slaves").iterdir()  # the devices of a volume
        except (OSError, RuntimeError):
            continue
    return False


def _device_of(folder: str) -> int | None:
    path = Path(folder)
    for ancestor in (path, *path.parents):
        try:
            return os.stat(ancestor).st_dev
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None

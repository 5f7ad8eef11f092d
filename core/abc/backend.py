"""The contract of backends: blobs and small records under one root."""

from __future__ import annotations

import re
import secrets
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar
from weakref import WeakKeyDictionary

from penstock.core.abc.plugin import API_VERSION, PluginConfig
from penstock.core.concurrency.pool import Lane, Pool, fulfil
from penstock.core.concurrency.timing import current_timing
from penstock.core.errors import BlobTruncatedError, FormatError, StorageError
from penstock.core.types import Capabilities, ReadRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc.tiers import Tier
    from penstock.core.types import BlobInfo, WriteRequest

T = TypeVar("T")

_SEGMENT = re.compile(r"[A-Za-z0-9._-]{1,255}")
_MOST_CHARACTERS = 800  # object stores allow 1,024 bytes, including the root's prefix
_SHOWN = 100


def check_blob_name(name: str, /, *, prefix: bool = False) -> None:
    """Check that a name is relative, with segments `[A-Za-z0-9._-]{1,255}` separated by `/`.

    Args:
        name: Blob name, or the beginning of one.
        prefix: Whether `name` is a prefix, whose last segment may be empty.

    Raises:
        StorageError: The name is malformed, longer than 800 characters, or has a segment `.` or
            `..`.
    """
    *folders, last = name.split("/")
    segments = [*folders, last] if last or not prefix else folders
    fine = all(_SEGMENT.fullmatch(part) and part not in {".", ".."} for part in segments)
    if fine and len(name) <= _MOST_CHARACTERS:
        return
    shown = repr(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}...")
    msg = (
        f"{shown} is not a blob name: use relative segments of 1 to 255 characters A-Z a-z 0-9 . "
        f"_ - (not '.' or '..'), at most {_MOST_CHARACTERS} characters in all"
    )
    raise StorageError(msg)


class BlobWriter(ABC):
    """Writes one blob for one save. Readers see the blob only after `seal` (or `sync`)."""

    @abstractmethod
    def write(self, requests: Sequence[WriteRequest], /) -> None:
        """Hand all bytes of `requests` to the store; they are durable only after `seal` or `sync`.

        Core guarantees that offsets ascend within a batch and from each batch to the next one that
        it submits, that no two requests overlap, and that no two requests touch the same
        `Capabilities.offset_alignment` unit. Bytes never written read as zero. Several threads may
        call this method at once, so batches may arrive out of order. With `Capabilities.ordered`,
        each batch arrives only after the previous call has returned.

        The backend must not use the buffers after this method returns or raises.

        Raises:
            StorageFullError: No space or quota; the blob can only be aborted.
            StorageError: Anything else went wrong; the blob can only be aborted.
        """

    @abstractmethod
    def seal(self, length: int, /) -> None:
        """Wait for all writes, cut the blob to `length` bytes and make it durable.

        On return the blob and its directory entries survive a power cut. Core never retries a
        failed `seal`; it only aborts the blob.

        Raises:
            StorageError: The blob may not be durable.
        """

    def sync(self, length: int, /) -> None:
        """Wait for all writes, then make the blob's first `length` bytes durable and readable.

        Optional: called only if `Capabilities.appends` is set. The blob stays open, and later
        writes begin at or after `length`. After a crash the blob still has these bytes, and
        possibly later ones.

        Raises:
            StorageError: The bytes may not be durable; the blob can only be aborted.
        """
        msg = f"this store cannot make the first {length} bytes of an unsealed blob durable"
        raise StorageError(msg)

    @abstractmethod
    def abort(self) -> None:
        """Abandon the blob. Idempotent, never raises, and allowed after a failed `seal`.

        The bytes that `sync` has made durable stay.

        Returns only when the store no longer uses any submitted buffer. The partial blob may
        remain; `delete` removes it. An abort removes only this writer's own blob: after a `delete`,
        another writer or process may have created a blob of the same name. A store that cannot
        distinguish the two blobs removes nothing.
        """


class Backend(ABC):
    """Stores blobs and small records under one root. Thread-safe.

    Names are relative and `/`-separated, with segments of `[A-Za-z0-9._-]` other than `.` and
    `..`. Every method raises a StorageError for other names, and for any call after `close`.
    Methods block and take batches; the backend decides how much of a batch runs in parallel.
    `name` is the entry-point name; `Config` has its options.
    """

    api_version: ClassVar[int] = API_VERSION
    name: ClassVar[str]
    Config: ClassVar[type[PluginConfig]] = PluginConfig

    _pool: Pool | None = None
    _lanes: WeakKeyDictionary[BlobWriter, Lane] | None = None
    _pool_lock: ClassVar[threading.Lock] = threading.Lock()  # guards their creation

    @classmethod
    def from_url(cls, url: str, options: dict[str, str], /) -> PluginConfig:
        """Return the `Config` for `url` (the part before `?`) and the query's `options`.

        The default returns `Config(url=url, **options)`.

        Raises:
            pydantic.ValidationError: The options do not fit; core turns it into a ConfigError.
        """
        return cls.Config.model_validate({"url": url, **options})

    @classmethod
    def open(cls, config: Any, /, *, open_backend: Callable[[Any], Backend]) -> Self:
        """Open the backend that `config` describes, and any backends that it wraps.

        Args:
            config: An instance of `Config`.
            open_backend: Opens another backend, named in `config` by a path, a URL or a table with
                `type`. The new instance must close every backend that it opened.

        Raises:
            StorageError: The root cannot be used; nothing stays open.
        """
        del open_backend
        return cls(config)

    @abstractmethod
    def __init__(self, config: Any, /) -> None:
        """Open the root that `config`, an instance of `Config`, names.

        The root need not exist yet: the first write may create it.

        Raises:
            StorageError: The root cannot be used.
        """

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL that messages show; never contains credentials."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The capabilities of this instance; a wrapper derives them from the wrapped backend."""

    @abstractmethod
    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """Start a new blob and return its writer, creating folders as needed.

        Args:
            name: Blob name; core never creates the same name twice.
            size_hint: Expected bytes, for layout only; may be wrong.

        Raises:
            BlobExistsError: A blob of that name exists.
            StorageError: The blob cannot be created.
        """

    @abstractmethod
    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """Fill every target completely. The backend must not use targets after this returns.

        After a failure the contents of all targets are unspecified.

        Raises:
            BlobNotFoundError: A blob does not exist.
            BlobTruncatedError: A blob ends before the range does.
            StorageError: Anything else went wrong.
        """

    @abstractmethod
    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """Store a small record, atomically and durably: readers see all of it or none.

        On return the record survives a power cut. With `exclusive`, exactly one of several
        publishers of a name succeeds, if the store has `Capabilities.exclusive_publish`.

        Raises:
            BlobExistsError: `exclusive` is set and the name exists; nothing was changed.
            UnsyncedError: The record is visible, but may not survive a power cut.
            StorageError: The outcome is unknown: the record may exist, but is never torn.
        """

    @abstractmethod
    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """List all blobs and records whose names begin with `prefix`, sorted by name.

        Omits temporary files of unfinished publishes. An unknown prefix gives an empty list.
        """

    @abstractmethod
    def stat(self, name: str, /) -> BlobInfo:
        """Return the size and modification time of one blob or record.

        Raises:
            BlobNotFoundError: The name does not exist.
        """

    @abstractmethod
    def delete(self, names: Sequence[str], /) -> None:
        """Delete `names` in order and durably, skipping those that do not exist.

        After a power cut during the call, any of the names may still exist; only separate calls
        are ordered. Empty folders may be removed.
        """

    def close(self) -> None:
        """Wait for all calls in flight, then release everything. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    # Slow-but-correct defaults -----------------------------------------------------------------

    def submit_write(self, writer: BlobWriter, requests: Sequence[WriteRequest], /) -> Future[None]:
        """Call `writer.write(requests)` in the background.

        The buffers are in use until the future ends. With `Capabilities.ordered`, the batches of
        one blob are written one at a time, in submission order.
        """
        if not self.capabilities.ordered:
            return self._executor().submit(lambda: writer.write(requests))
        future: Future[None] = Future()
        lane = self._lane(writer)
        lane.submit(lambda: fulfil(future, lambda: writer.write(requests)))
        return future

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """Call `read(requests)` in the background; the targets are in use until the future ends."""
        return self._executor().submit(lambda: self.read(requests))

    def _submit_or_read(
        self,
        first: Backend,
        requests: Sequence[ReadRequest],
        failure: type[StorageError] | tuple[type[StorageError], ...],
    ) -> Future[None]:
        """Read with `first.submit_read`; if that fails with `failure`, read with `self.read`."""
        done: Future[None] = Future()

        def settle(read: Future[None]) -> None:
            if (error := read.exception()) is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def first_is_over(read: Future[None]) -> None:
            if not isinstance(read.exception(), failure):
                settle(read)
                return
            try:
                read_again = Backend.submit_read(self, requests)
            except RuntimeError as error:
                done.set_exception(StorageError(f"the store was closed during a read: {error}"))
            else:
                read_again.add_done_callback(settle)

        first.submit_read(requests).add_done_callback(first_is_over)
        return done

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        """Return a whole small record, never a mix of two versions.

        The default calls `stat`, then `read`. Override it with a single read if a record of another
        length may be published between the two calls.

        Raises:
            FormatError: The record is larger than `limit_bytes`.
            BlobNotFoundError: The record does not exist.
        """
        size = self.stat(name).size_bytes
        if size > limit_bytes:
            msg = f"{name} on {self.url} has {size} bytes, more than the {limit_bytes} allowed"
            raise FormatError(msg, [name])
        data = bytearray(size)
        if size:
            try:
                self.read([ReadRequest(name, 0, memoryview(data))])
            except BlobTruncatedError as error:
                msg = f"{name} on {self.url} shrank while it was read"
                raise FormatError(msg, [name]) from error
        return bytes(data)

    @property
    def direct_io(self) -> bool:
        """The value of `capabilities.direct_io`, for callers that only read.

        A backend overrides this if it has to send requests to find its other capabilities.
        """
        return self.capabilities.direct_io

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers of this backend, the fastest first; empty for a backend without tiers.

        Core saves to one tier, copies from each tier to the next, and reads another copy if one is
        damaged.
        """
        return ()

    def rename(self, old: str, new: str, /) -> None:
        """Give a sealed blob another name, atomically and durably; replace a blob of that name.

        If `BlobWriter.sync` was called, the blob may be unsealed. Its writer then continues it
        under the new name.

        Optional: called only if `Capabilities.renames` is set.

        Raises:
            BlobNotFoundError: `old` does not exist.
        """
        msg = f"cannot rename {old} to {new}: this store does not rename"
        raise StorageError(msg)

    def free_bytes(self) -> int | None:
        """Return the free space in bytes; None if the store does not know it.

        Raises:
            StorageError: The store does not answer.
        """
        return None

    def check_writable(self) -> None:  # noqa: B027 - most stores can only be tried
        """Raise if this root is known to be read-only; never writes to test it.

        Core calls this when it opens a run, so that users learn of a read-only root before the
        first save. The default never raises.

        Raises:
            StorageError: The root cannot be written; the message says why.
        """

    def sweep(self, before_s: float, /) -> None:  # noqa: B027 - most stores hide nothing
        """Remove remains of crashes that `list` omits: temporary files and empty folders.

        Removes only those unchanged since `before_s` (by the store's clock). `prune` calls it.
        The default removes nothing.
        """

    def store_time_s(self) -> float:
        """Return the store's time (Unix time); the default publishes a record to learn it."""
        probe = f"clock/{secrets.token_hex(8)}"
        self.publish(probe, b"")
        try:
            return self.stat(probe).modified_s
        finally:
            self.delete([probe])

    def _lane(self, writer: BlobWriter) -> Lane:
        pool = self._executor()
        with Backend._pool_lock:
            if self._lanes is None:
                self._lanes = WeakKeyDictionary()
            return self._lanes.setdefault(writer, Lane(pool))

    def _executor(self) -> Pool:
        with Backend._pool_lock:
            if self._pool is None:
                # Two threads, so that one batch moves while the next is submitted.
                stuck_s = current_timing().batch_stuck_s
                self._pool = Pool(2, f"penstock-{self.name}", stuck_s=stuck_s)
            return self._pool

"""The contract of backends: blobs and small records under one root."""

from __future__ import annotations

import re
import secrets
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self
from weakref import WeakKeyDictionary

from penstock.core.abc.lane import Lane
from penstock.core.abc.plugin import API_VERSION, PluginConfig
from penstock.core.errors import BlobTruncatedError, FormatError, StorageError
from penstock.core.pool import Pool, fulfil
from penstock.core.types import Capabilities, ReadRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.types import BlobInfo, WriteRequest

_SEGMENT = re.compile(r"[A-Za-z0-9._-]{1,255}")
_MOST_CHARACTERS = 800  # object stores allow 1,024 bytes, the prefix of the root included
_SHOWN = 100
_STUCK_S = 60.0  # far above any batch of a store that answers


def check_blob_name(name: str, /, *, prefix: bool = False) -> None:
    """Refuse a name that is not relative, `/`-separated segments of `[A-Za-z0-9._-]{1,255}`.

    Args:
        name: Blob name, or the beginning of one.
        prefix: Whether `name` is a prefix: then its last segment may be empty.

    Raises:
        StorageError: It is malformed, longer than 800 characters, or a segment is `.` or `..`.
    """
    *folders, last = name.split("/")
    segments = [*folders, last] if last or not prefix else folders
    fine = all(_SEGMENT.fullmatch(part) and part not in {".", ".."} for part in segments)
    if fine and len(name) <= _MOST_CHARACTERS:
        return
    shown = repr(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}...")
    msg = (
        f"{shown} is not a blob name: use relative segments of at most 255 of A-Z a-z 0-9 . _ - "
        f"(no '..'), {_MOST_CHARACTERS} characters in all"
    )
    raise StorageError(msg)


@dataclass(frozen=True, slots=True)
class Tier:
    """One of the places of which a backend is made, and how what is there moves on.

    Attributes:
        name: For people, states and logs: `fast`, `durable`; nested ones `fast.durable`.
        backend: The place.
        drain_every: Every how many saves goes on to the next tier; 0: none by itself.
        drain_bytes_per_s: Most that is copied to the next tier; None: as fast as it goes.
        drain_in: Who copies to the next tier: a thread of this process, or a process of its own;
            `auto`: the latter for checkpoints that are worth it, where it can open the tiers.
        keep_last: How many checkpoints stay here, of those that the next tier has; None: as many
            as there is room for.
        on_full: What a save does that has no room here though all was evicted that may be, and
            for which the next tier does not answer either.
        durable: Whether a save counts as durable once it is whole here.
    """

    name: str
    backend: Backend
    drain_every: int = 1
    drain_bytes_per_s: float | None = None
    drain_in: Literal["auto", "process", "thread"] = "auto"
    keep_last: int | None = None
    on_full: Literal["block", "skip", "raise"] = "skip"
    durable: bool = False


class BlobWriter(ABC):
    """One blob being written. It exists for readers only after `seal`; used by one save."""

    @abstractmethod
    def write(self, requests: Sequence[WriteRequest], /) -> None:
        """Hand all bytes of `requests` to the store; they are durable only after `seal`.

        Core guarantees that offsets ascend from call to call, that no two requests overlap, and
        that no two requests touch one `Capabilities.offset_alignment` unit. Bytes never written
        read as zero. May be called from several threads at once; where `Capabilities.ordered`
        says so, only once the call before it has returned.

        The buffers belong to the backend until this returns (or raises), never after.

        Raises:
            StorageFullError: No space or quota; the blob can only be aborted.
            StorageError: Anything else went wrong; likewise.
        """

    @abstractmethod
    def seal(self, length: int, /) -> None:
        """Wait for all writes, cut the blob to `length` bytes and make it durable.

        On return the blob survives a power cut, its directory entries included. After a failure
        the blob is dead: never retried, only aborted.

        Raises:
            StorageError: The blob may not be durable.
        """

    @abstractmethod
    def abort(self) -> None:
        """Give the blob up; idempotent, never raises, allowed after a failed `seal`.

        Returns only when the store no longer uses any submitted buffer. Whether the partial blob
        stays behind is unspecified; `delete` removes it.
        """


class Backend(ABC):
    """Blobs and small records under one root. Thread-safe.

    Names are relative and `/`-separated, with segments of `[A-Za-z0-9._-]` other than `.` and
    `..`; every method refuses others with a StorageError, as does every method after `close`.
    Blocking methods over batches; how much runs in parallel inside a batch is the backend's own
    business. `name` is the entry-point name; `Config` its options.
    """

    api_version: ClassVar[int] = API_VERSION
    name: ClassVar[str]
    Config: ClassVar[type[PluginConfig]] = PluginConfig

    _pool: Pool | None = None
    _lanes: WeakKeyDictionary[BlobWriter, Lane] | None = None
    _pool_lock: ClassVar[threading.Lock] = threading.Lock()  # guards making the two

    @classmethod
    def from_url(cls, url: str, options: dict[str, str], /) -> PluginConfig:
        """Options for `url` (the part before `?`) and its query.

        Default: `Config(url=url, **options)`.

        Raises:
            pydantic.ValidationError: The options do not fit; core turns it into a ConfigError.
        """
        return cls.Config.model_validate({"url": url, **options})

    @classmethod
    def open(cls, config: Any, /, *, open_backend: Callable[[Any], Backend]) -> Self:
        """An instance for `config`; what is made of other backends opens them here.

        Args:
            config: An instance of `Config`.
            open_backend: Opens what a path, a URL or a table with `type` in `config` means. The
                instance closes what it has opened.

        Raises:
            StorageError: The root cannot be used; nothing stays open.
        """
        del open_backend
        return cls(config)

    @abstractmethod
    def __init__(self, config: Any, /) -> None:
        """Open the root, which the first write may make; `config` is an instance of `Config`.

        Raises:
            StorageError: The root cannot be used.
        """

    @property
    @abstractmethod
    def url(self) -> str:
        """What to show to people; never holds credentials."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this instance can do (a wrapper computes it from what it wraps)."""

    @abstractmethod
    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """Begin a new blob; parents come into being as needed.

        Args:
            name: Blob name; core never creates one name twice.
            size_hint: Expected bytes, for layout only; may be wrong.

        Raises:
            BlobExistsError: A blob of that name exists.
            StorageError: It cannot be created.
        """

    @abstractmethod
    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """Fill every target completely. Targets belong to the backend until this returns.

        After a failure the contents of all targets are unspecified.

        Raises:
            BlobNotFoundError: A blob is not there.
            BlobTruncatedError: A blob ends before the range does.
            StorageError: Anything else.
        """

    @abstractmethod
    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """Store a small record, atomically and durably: readers see all of it or none.

        On return it survives a power cut. With `exclusive`, exactly one of several publishers of
        one name succeeds (as far as `Capabilities.exclusive_publish` says).

        Raises:
            BlobExistsError: `exclusive` and the name is taken; nothing was changed.
            UnsyncedError: The record is there and visible, but may not survive a power cut.
            StorageError: Unknown outcome: the record may or may not be there, but is never torn.
        """

    @abstractmethod
    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """All blobs and records whose name begins with `prefix`, at any depth, sorted by name.

        Temporary files of unfinished publishes are not listed. An unknown prefix is empty.
        """

    @abstractmethod
    def stat(self, name: str, /) -> BlobInfo:
        """Size and store time of one blob or record.

        Raises:
            BlobNotFoundError: It is not there.
        """

    @abstractmethod
    def delete(self, names: Sequence[str], /) -> None:
        """Delete in the given order, durable on return; names that are not there are skipped.

        A power cut in the middle may spare any of them: the order holds between calls only.
        Folders left empty may be removed.
        """

    def close(self) -> None:
        """Release everything; waits for what is in flight. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    # Slow-but-correct defaults -----------------------------------------------------------------

    def submit_write(self, writer: BlobWriter, requests: Sequence[WriteRequest], /) -> Future[None]:
        """`writer.write(requests)` in the background; the buffers are in use until it is done.

        Where `Capabilities.ordered` says so, those of one blob one at a time, in the order of
        submission.
        """
        if not self.capabilities.ordered:
            return self._executor().submit(lambda: writer.write(requests))
        future: Future[None] = Future()
        lane = self._lane(writer)
        lane.submit(lambda: fulfil(future, lambda: writer.write(requests)))
        return future

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """`read(requests)` in the background; the targets are in use until it is done."""
        return self._executor().submit(lambda: self.read(requests))

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        """A whole small record, as one publisher wrote it.

        The default is right where a record that is replaced keeps its length or cannot be
        replaced between `stat` and `read`; other stores override it with one read.

        Raises:
            FormatError: It is larger than `limit_bytes`.
            BlobNotFoundError: It is not there.
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
        """`capabilities.direct_io`, for who only reads.

        Overridden where other capabilities are found out by requests that a reader has no need of.
        """
        return self.capabilities.direct_io

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The places of which this is made, the fastest first; empty: it is one place.

        Core then saves to one of them, copies from each to the next, and reads another's copy
        where one is damaged.
        """
        return ()

    def free_bytes(self) -> int | None:
        """Room for more blobs, as far as the store can tell; None: it cannot.

        Raises:
            StorageError: The store does not answer.
        """
        return None

    def sweep(self, before_s: float, /) -> None:  # noqa: B027 - most stores hide nothing
        """Remove what crashes left behind and no name shows: temporary files, empty folders.

        Only what has not changed since `before_s` (by the store's clock). Default: nothing.
        Called by `prune`.
        """

    def store_time_s(self) -> float:
        """Now, by the store's clock (Unix time); default: the time of a fresh record."""
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
                # Two: one batch moves while the next is handed over.
                self._pool = Pool(2, f"penstock-{self.name}", stuck_s=_STUCK_S)
            return self._pool

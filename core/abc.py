"""The three contracts: `StateProvider`, `Codec`, `Backend`, and the records that cross them.

Each contract carries an API version; the registry refuses a class of another one. Everything
after the second argument is keyword-only. Conformance suites ship in `penstock.core.testing`.
"""

from __future__ import annotations

import re
import secrets
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict

from penstock.core.errors import BlobTruncatedError, FormatError, StorageError
from penstock.core.types import (
    Capabilities,
    Kind,
    ObjectPath,
    ReadRequest,
    Region,
    Role,
    TensorSpec,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.core.types import BlobInfo, WriteRequest

API_VERSION = 1


class PluginConfig(BaseModel):
    """Base of every plugin's options: unknown keys are refused, instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# -- backends -----------------------------------------------------------------------------------

_SEGMENT = re.compile(r"[A-Za-z0-9._-]+")


def check_blob_name(name: str, /, *, prefix: bool = False) -> None:
    """Refuse a name that is not relative, `/`-separated segments of `[A-Za-z0-9._-]`.

    Args:
        name: Blob name, or the beginning of one.
        prefix: Whether `name` is a prefix: then its last segment may be empty.

    Raises:
        StorageError: It is malformed, or a segment is `.` or `..`.
    """
    *folders, last = name.split("/")
    segments = [*folders, last] if last or not prefix else folders
    if all(_SEGMENT.fullmatch(part) and part not in {".", ".."} for part in segments):
        return
    msg = f"{name!r} is not a blob name: use relative segments of A-Z a-z 0-9 . _ - (no '..')"
    raise StorageError(msg)


class BlobWriter(ABC):
    """One blob being written. It exists for readers only after `seal`; used by one save."""

    @abstractmethod
    def write(self, requests: Sequence[WriteRequest], /) -> None:
        """Hand all bytes of `requests` to the store; they are durable only after `seal`.

        Core guarantees that offsets ascend from call to call, that no two requests overlap, and
        that no two requests touch one `Capabilities.offset_alignment` unit. Bytes never written
        read as zero. May be called from several threads at once.

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

    _pool: ThreadPoolExecutor | None = None
    _pool_lock: ClassVar[threading.Lock] = threading.Lock()  # guards making a `_pool`

    @classmethod
    def from_url(cls, url: str, options: dict[str, str], /) -> PluginConfig:
        """Options for `url` (the part before `?`) and its query.

        Default: `Config(url=url, **options)`.

        Raises:
            pydantic.ValidationError: The options do not fit; core turns it into a ConfigError.
        """
        return cls.Config.model_validate({"url": url, **options})

    @abstractmethod
    def __init__(self, config: Any, /) -> None:
        """Open the root (made when missing). `config` is an instance of `Config`.

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

        Folders left empty may be removed.
        """

    def close(self) -> None:
        """Release everything; waits for what is in flight. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    # Slow-but-correct defaults -----------------------------------------------------------------

    def submit_write(self, writer: BlobWriter, requests: Sequence[WriteRequest], /) -> Future[None]:
        """`writer.write(requests)` in the background; the buffers are in use until it is done."""
        return self._executor().submit(writer.write, requests)

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """`read(requests)` in the background; the targets are in use until it is done."""
        return self._executor().submit(self.read, requests)

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

    def store_time_s(self) -> float:
        """Now, by the store's clock (Unix time); default: the time of a fresh record."""
        probe = f"clock/{secrets.token_hex(8)}"
        self.publish(probe, b"")
        try:
            return self.stat(probe).modified_s
        finally:
            self.delete([probe])

    def _executor(self) -> ThreadPoolExecutor:
        with Backend._pool_lock:
            if self._pool is None:
                # Two: one batch moves while the next is handed over.
                self._pool = ThreadPoolExecutor(2, thread_name_prefix=f"penstock-{self.name}")
            return self._pool


# -- codecs -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CodecContext:
    """What a codec may know of a chunk.

    Attributes:
        dtype: Dtype name of the elements; `"uint8"` for slabs, values and later chain links.
        itemsize: Bytes per element.
        shape: Shape of the region the chunk was cut from; `(raw_length,)` for slabs.
        start: Byte offset of the chunk in that region.
        raw_length: Bytes that go into `encode` and come out of `decode`.
        base: The same chunk of an earlier checkpoint, if the codec declared `needs_base`.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    start: int
    raw_length: int
    base: memoryview | None = None


class Codec(ABC):
    """Encodes chunks into frames that decode alone. Thread-safe; holds no per-chunk state.

    `name` is the entry-point name, `version` goes into the manifest and is checked on reading,
    as is `config`, which round-trips as JSON. Releases the GIL for anything longer than 1 ms.
    Never changes its input.
    """

    api_version: ClassVar[int] = API_VERSION
    name: ClassVar[str]
    version: ClassVar[int] = 1
    lossless: ClassVar[bool]
    needs_base: ClassVar[bool] = False
    Config: ClassVar[type[PluginConfig]] = PluginConfig

    def __init__(self, config: Any, /) -> None:
        """`config` is an instance of `Config`."""
        self.config: PluginConfig = config

    @abstractmethod
    def max_encoded_size(self, raw_length: int, /) -> int:
        """Bytes that `encode` may need at most for any chunk of `raw_length` bytes."""

    @abstractmethod
    def encode(self, chunk: memoryview, out: memoryview, /, *, context: CodecContext) -> int:
        """Encode `chunk` into `out` (at least `max_encoded_size` bytes) and return the length.

        Raises:
            CodecError: The chunk does not suit this codec.
        """

    @abstractmethod
    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        """Fill `out` (exactly `context.raw_length` bytes) from `frame`; trusts nothing.

        Raises:
            CodecError: The frame is not what `encode` makes, or decodes to another length.
        """


# -- state providers ----------------------------------------------------------------------------


class MemoryKey(NamedTuple):
    """Identity of memory: equal keys are the same elements in the same order."""

    device: str
    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class PendingCopy(ABC):
    """A device copy under way into host memory."""

    @abstractmethod
    def wait(self) -> None:
        """Block the host until the bytes are there."""

    @abstractmethod
    def order(self) -> None:
        """Make device work that the calling thread issues from now on run after the copy.

        Where the device cannot do that, the same as `wait`.
        """


class ByteSource(ABC):
    """An object's raw bytes on this rank, row-major over its region. Keeps the owner alive.

    Attributes:
        nbytes: Raw bytes.
        device: `"cpu"`, `"cuda:0"`, ...
        address: Host address when the bytes lie contiguously in host memory, else None.
        memory: Identity of the memory, None for values and empty tensors.
    """

    __slots__ = ()
    nbytes: int
    device: str
    address: int | None
    memory: MemoryKey | None

    @abstractmethod
    def view(self) -> memoryview | None:
        """A flat read-only-by-convention view without copying; None when there is no `address`."""

    @abstractmethod
    def copy_out(self, start: int, out: memoryview, /) -> PendingCopy | None:
        """Copy bytes `[start, start + len(out))` to `out`.

        `start` and `len(out)` are multiples of the itemsize. None: complete on return. A pending
        copy is ordered behind all device work that the thread which *described* the object had
        issued by then; `out` and the source stay in use until it is waited for. Releases the GIL.
        """

    def version(self) -> int | None:
        """A counter that rises with every tracked in-place change; None where there is none."""
        return None

    def steady(self) -> bool:
        """Whether its bytes may be hashed and written, one after the other, where they stand.

        That takes a `version` that would tell of a change in between, and no other process
        that could make one.
        """
        return self.version() is not None


class ByteSink(ABC):
    """Memory that takes an object's raw bytes, row-major over its region.

    Attributes as those of `ByteSource`. Targets of tied objects share one sink: fill it once.
    """

    __slots__ = ()
    nbytes: int
    device: str
    address: int | None
    memory: MemoryKey | None

    @abstractmethod
    def view(self) -> memoryview | None:
        """A flat writable view without copying; None when there is no `address`."""

    @abstractmethod
    def copy_in(self, start: int, data: memoryview, /) -> None:
        """Copy `data` to bytes `[start, start + len(data))`; `data` is free again on return.

        `start` and the length are multiples of the itemsize.
        """

    def opened(self) -> None:  # noqa: B027 - most sinks have nothing to do
        """Called once, before the first byte may change: bump versions, for who captures them."""

    def written(self) -> None:  # noqa: B027 - most sinks have nothing to do
        """Called once, after all bytes are in place and verified (bump versions, free scratch)."""


@dataclass(frozen=True, slots=True)
class StateObject:
    """One object as a provider describes it.

    Attributes:
        path: Where it stands.
        kind: Tensor, or a value frozen to bytes (then `spec` is `uint8` of its length).
        spec: Dtype and global shape.
        region: What of it this rank holds.
        role: Its purpose.
        form: Name of the leaf form a provider can rebuild (`"tensor"`, `"ndarray"`, `"json"`).
        source: Its bytes.
        same_as: Set by core when an earlier object has the same memory (tied weights).
    """

    path: ObjectPath
    kind: Kind
    spec: TensorSpec
    region: Region
    role: Role
    form: str
    source: ByteSource
    same_as: ObjectPath | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A container or composite in the tree: what `load` needs to build it again.

    Attributes:
        path: Where it stands; the root has `()`.
        form: `"dict"`, `"list"`, `"tuple"`, or a form that a provider declared.
        meta: JSON-able details (key types, class names).
    """

    path: ObjectPath
    form: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of a checkpoint, as far as placing it needs to know (after renaming)."""

    path: ObjectPath
    kind: Kind
    spec: TensorSpec
    role: Role
    form: str


@dataclass(frozen=True, slots=True)
class Target:
    """Memory to be filled with a stored tensor. `path` is the object's path in the template."""

    path: ObjectPath
    spec: TensorSpec
    region: Region
    sink: ByteSink


@dataclass(slots=True)
class Placement:
    """What a provider wants restored. Nothing live changes before `finish`, but targets' memory.

    Attributes:
        targets: Memory to fill. Core compares each with the stored object: absent is missing,
            another kind, dtype or shape is a mismatch.
        values: Paths of value objects that were used (for the report and for `missing`).
        missing: Further paths that the template has and the checkpoint lacks.
        problems: Whole sentences on any other difference, each naming its path.
        finish: Called once after every target of the *whole* restore is filled and verified;
            assigns values, and returns the object that belongs in the tree at this place.
    """

    targets: list[Target] = field(default_factory=list)
    values: list[ObjectPath] = field(default_factory=list)
    missing: list[ObjectPath] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    finish: Callable[[], object] | None = None
    notes: dict[str, str] = field(default_factory=dict)
    """Facts for the report, e.g. `{"matched_by": "order"}`."""
    settle: list[Callable[[], object]] = field(default_factory=list)
    """Run after every `finish` of the whole restore (random state, so that nothing draws later)."""

    def absorb(self, other: Placement) -> None:
        """Take over everything of `other` but its `finish`."""
        self.targets += other.targets
        self.values += other.values
        self.missing += other.missing
        self.problems += other.problems
        self.notes.update(other.notes)
        self.settle += other.settle


class DescribeContext(ABC):
    """What core offers a provider while it describes."""

    allow_pickle: bool

    @abstractmethod
    def describe(
        self, value: object, path: ObjectPath, /, *, role: Role | None = None
    ) -> Iterator[StateObject | Node]:
        """Describe a child by whichever provider claims it; `role` overrides the leaves' roles.

        Raises:
            UnsupportedStateError: Nobody can store it; the message names the full path.
        """

    @abstractmethod
    def parameter_names(self, tensor: object, /) -> Sequence[str]:
        """Names that modules of the tree give to this very tensor, best first; maybe none."""


class PlaceContext(ABC):
    """What core offers a provider while it plans a restore. Paths are the template's."""

    allow_pickle: bool

    @abstractmethod
    def place(self, value: object, path: ObjectPath, /) -> Placement:
        """Plan the restore of a child into `value`, by whichever provider claims it."""

    @abstractmethod
    def rebuild(self, path: ObjectPath, /, *, device: str | None = None) -> Placement:
        """Plan building what the checkpoint holds at `path` anew; `finish()` returns it.

        Tensors go to `device`, None: the CPU.
        """

    @abstractmethod
    def stored(self, path: ObjectPath, /) -> StoredObject | None:
        """The *selected* stored object at `path`, tied ones resolved; None if there is none."""

    @abstractmethod
    def node(self, path: ObjectPath, /) -> Node | None:
        """The stored container or composite at `path`, selected or not."""

    @abstractmethod
    def children(self, path: ObjectPath, /) -> Sequence[str]:
        """Next segments of what is *selected* below `path`, in stored order.

        That is: stored objects and empty containers.
        """

    @abstractmethod
    def value(self, path: ObjectPath, /) -> object:
        """The decoded value of a selected stored value object (a fresh one at each call).

        Raises:
            KeyError: There is none.
        """

    @abstractmethod
    def value_bytes(self, path: ObjectPath, /) -> bytes:
        """The stored bytes of a selected value object; for providers that decode a form.

        Raises:
            KeyError: There is none.
        """

    @abstractmethod
    def selected(self, path: ObjectPath, /) -> bool:
        """Whether an object at this template path is selected by include and exclude."""

    @abstractmethod
    def parameter_names(self, tensor: object, /) -> Sequence[str]:
        """As `DescribeContext.parameter_names`, for the template."""


class StateProvider(ABC):
    """Turns live values of certain types into objects, and places restored bytes back.

    Attributes:
        name: Entry-point name.
        forms: Leaf and node forms that `rebuild` understands; unique among all providers.
    """

    api_version: ClassVar[int] = API_VERSION
    name: ClassVar[str]
    version: ClassVar[int] = 1
    forms: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def claims(self, kind: type, /) -> int | None:
        """Priority with which this provider claims values of that type; None: not at all.

        Ours use 10 (anything with `state_dict`) to 50 (exact types); a tie is an error.
        """

    @abstractmethod
    def describe(
        self, value: Any, path: ObjectPath, /, *, context: DescribeContext
    ) -> Iterator[StateObject | Node]:
        """Describe `value` as objects and nodes at and below `path`, without copying tensors.

        A node comes before its children. Plain Python data is frozen to bytes here and now.

        Raises:
            UnsupportedStateError: Something in it cannot be stored; names the path.
        """

    @abstractmethod
    def place(self, value: Any, path: ObjectPath, /, *, context: PlaceContext) -> Placement:
        """Plan the in-place restore of `value` from the stored objects at and below `path`."""

    @abstractmethod
    def rebuild(
        self, stored: StoredObject | Node, /, *, device: str | None, context: PlaceContext
    ) -> Placement:
        """Plan building a value of one of `forms` with no template; `finish()` returns it."""

    def parameters(self, value: Any, /) -> Iterable[tuple[str, object]]:
        """`(name, tensor)` for every parameter of `value`, so that optimizers can name theirs."""
        del value
        return ()

    def claimed_memory(self, value: Any, /) -> Iterable[MemoryKey]:
        """Memory that only `value`'s own step changes (optimizers); core may defer just that."""
        del value
        return ()

    def unsteady_memory(self, value: Any, /) -> Iterable[tuple[str, int]]:
        """`(device, storage)` of memory that may change in forward; core never defers it."""
        del value
        return ()

"""A backend that delegates every call to another backend, so that a subclass changes one thing."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, TypeVar

from penstock.core.abc.backend import Backend, BlobWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from penstock.core.abc.tiers import Tier
    from penstock.core.types import BlobInfo, Capabilities, ReadRequest, WriteRequest

T = TypeVar("T")

Operation: TypeAlias = Literal[
    "url",
    "capabilities",
    "direct_io",
    "create",
    "write",
    "seal",
    "sync",
    "abort",
    "read",
    "read_record",
    "submit_write",
    "submit_read",
    "publish",
    "list",
    "stat",
    "delete",
    "rename",
    "tiers",
    "free_bytes",
    "check_writable",
    "sweep",
    "store_time_s",
    "close",
]
"""Every operation of a backend or its writer, by the name of the method or property."""

_IN_WORDS: Mapping[Operation, str] = {
    "url": "return its URL",
    "capabilities": "return its capabilities",
    "direct_io": "return its capabilities",
    "read_record": "read",
    "submit_write": "write",
    "submit_read": "read",
    "tiers": "return its tiers",
    "free_bytes": "return its free space",
    "check_writable": "check whether it can be written",
    "store_time_s": "return its time",
}


def in_words(operation: Operation, /) -> str:
    """Return a phrase for messages that follows "cannot", such as `return its free space`."""
    return _IN_WORDS.get(operation, operation)


class DelegatingBackend(Backend):
    """Delegates every call to `inner` through one hook, `around`.

    A subclass overrides the hook to change every call, or overrides single methods. `submit_read`
    and `submit_write` are delegated too, so they bypass an overridden `read` or `write`. A subclass
    that overrides `read` or `write` must also override the matching `submit_read` or
    `submit_write`; the method of `Backend`, which calls `read` or `write` on a thread, will do.
    """

    name: ClassVar[str] = "delegating"
    writer_class: ClassVar[type[DelegatingWriter]]
    """The class in which `create` wraps writers of `inner`: `DelegatingWriter` or a subclass."""

    def __init__(self, inner: Backend, /) -> None:
        """Wrap `inner`; closing the wrapper closes `inner`."""
        self._delegate = inner

    @property
    def inner(self) -> Backend:
        """The wrapped backend. Each call reads this property, so a subclass may replace it."""
        return self._delegate

    def around(self, operation: Operation, names: tuple[str, ...], call: Callable[[], T], /) -> T:
        """Run one call; a subclass overrides this to change it.

        Args:
            operation: The operation; `write`, `seal`, `sync` and `abort` belong to a writer.
            names: The blobs and records that the call names; for `list`, the prefix.
            call: Calls the wrapped backend.

        Returns:
            The result of `call`.
        """
        del operation, names
        return call()

    @property
    def url(self) -> str:
        """The URL of the wrapped backend."""
        return self.around("url", (), lambda: self.inner.url)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the wrapped backend."""
        return self.around("capabilities", (), lambda: self.inner.capabilities)

    @property
    def direct_io(self) -> bool:
        """Whether the wrapped backend uses direct I/O."""
        return self.around("direct_io", (), lambda: self.inner.direct_io)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The wrapped backend's tiers. They are not wrapped, so their calls bypass the hook."""
        return self.around("tiers", (), lambda: self.inner.tiers)

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """See `Backend.create`. The writer's calls also go through the hook."""
        call = lambda: self.inner.create(name, size_hint=size_hint)  # noqa: E731
        return self.writer_class(self, name, self.around("create", (name,), call))

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """See `Backend.read`."""
        self.around("read", _names(requests), lambda: self.inner.read(requests))

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        """See `Backend.read_record`."""
        call = lambda: self.inner.read_record(name, limit_bytes=limit_bytes)  # noqa: E731
        return self.around("read_record", (name,), call)

    def submit_write(self, writer: BlobWriter, requests: Sequence[WriteRequest], /) -> Future[None]:
        """See `Backend.submit_write`. For a writer of another class, calls `write` on a thread."""
        # A subclass may return its own writers, whose `write` must be called.
        if not isinstance(writer, DelegatingWriter):
            return super().submit_write(writer, requests)
        call = lambda: self.inner.submit_write(writer.inner, requests)  # noqa: E731
        return self.around("submit_write", (writer.name,), call)

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """See `Backend.submit_read`."""
        call = lambda: self.inner.submit_read(requests)  # noqa: E731
        return self.around("submit_read", _names(requests), call)

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """See `Backend.publish`."""
        call = lambda: self.inner.publish(name, data, exclusive=exclusive)  # noqa: E731
        self.around("publish", (name,), call)

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """See `Backend.list`."""
        return self.around("list", (prefix,), lambda: self.inner.list(prefix))

    def stat(self, name: str, /) -> BlobInfo:
        """See `Backend.stat`."""
        return self.around("stat", (name,), lambda: self.inner.stat(name))

    def delete(self, names: Sequence[str], /) -> None:
        """See `Backend.delete`."""
        self.around("delete", tuple(names), lambda: self.inner.delete(names))

    def rename(self, old: str, new: str, /) -> None:
        """See `Backend.rename`."""
        self.around("rename", (old, new), lambda: self.inner.rename(old, new))

    def free_bytes(self) -> int | None:
        """See `Backend.free_bytes`."""
        return self.around("free_bytes", (), self.inner.free_bytes)

    def check_writable(self) -> None:
        """See `Backend.check_writable`."""
        self.around("check_writable", (), self.inner.check_writable)

    def sweep(self, before_s: float, /) -> None:
        """See `Backend.sweep`."""
        self.around("sweep", (), lambda: self.inner.sweep(before_s))

    def store_time_s(self) -> float:
        """See `Backend.store_time_s`."""
        return self.around("store_time_s", (), self.inner.store_time_s)

    def close(self) -> None:
        """Close the wrapper's own threads, then the wrapped backend."""
        super().close()
        self.around("close", (), self.inner.close)


class DelegatingWriter(BlobWriter):
    """Delegates every call to a writer of the wrapped backend, through its `around`."""

    def __init__(self, backend: DelegatingBackend, name: str, inner: BlobWriter, /) -> None:
        """Wrap `inner`, which writes the blob `name`."""
        self.backend = backend
        self.name = name
        self.inner = inner

    def write(self, requests: Sequence[WriteRequest], /) -> None:
        """See `BlobWriter.write`."""
        self.backend.around("write", (self.name,), lambda: self.inner.write(requests))

    def seal(self, length: int, /) -> None:
        """See `BlobWriter.seal`."""
        self.backend.around("seal", (self.name,), lambda: self.inner.seal(length))

    def sync(self, length: int, /) -> None:
        """See `BlobWriter.sync`."""
        self.backend.around("sync", (self.name,), lambda: self.inner.sync(length))

    def abort(self) -> None:
        """See `BlobWriter.abort`. Raises only if the hook raises."""
        self.backend.around("abort", (self.name,), self.inner.abort)


DelegatingBackend.writer_class = DelegatingWriter


def _names(requests: Sequence[ReadRequest]) -> tuple[str, ...]:
    return tuple(request.name for request in requests)

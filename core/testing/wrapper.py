"""A backend around a backend: delegates all, so that a subclass changes one thing."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar, get_args

from penstock.core.abc import Backend, BlobWriter
from penstock.core.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.types import BlobInfo, Capabilities, ReadRequest, WriteRequest

Operation = Literal["create", "write", "seal", "abort", "read", "publish", "list", "stat", "delete"]

_T = TypeVar("_T")

OPERATIONS: tuple[Operation, ...] = get_args(Operation)


class WrapperBackend(Backend):
    """Delegates everything, each call through `_around(operation, names, call)`.

    Batches in the background run in the base class's own pool, so they meet the faults too.
    """

    name: ClassVar[str] = "wrapper"

    def __init__(self, inner: Backend, /) -> None:
        """Wrap `inner`; closing this closes it."""
        self.inner = inner

    @property
    def url(self) -> str:
        """The wrapped backend's."""
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        """The wrapped backend's."""
        return self.inner.capabilities

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """Delegate; the writer goes through `_around` as well."""
        writer = self._around(
            "create", (name,), lambda: self.inner.create(name, size_hint=size_hint)
        )
        return _WrapperWriter(self, name, writer)

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """Delegate."""
        names = tuple(request.name for request in requests)
        self._around("read", names, lambda: self.inner.read(requests))

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        """Delegate; counts as `read`."""
        call = lambda: self.inner.read_record(name, limit_bytes=limit_bytes)  # noqa: E731
        return self._around("read", (name,), call)

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """Delegate."""
        call = lambda: self.inner.publish(name, data, exclusive=exclusive)  # noqa: E731
        self._around("publish", (name,), call)

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """Delegate."""
        return self._around("list", (prefix,), lambda: self.inner.list(prefix))

    def stat(self, name: str, /) -> BlobInfo:
        """Delegate."""
        return self._around("stat", (name,), lambda: self.inner.stat(name))

    def delete(self, names: Sequence[str], /) -> None:
        """Delegate."""
        self._around("delete", tuple(names), lambda: self.inner.delete(names))

    def sweep(self, before_s: float, /) -> None:
        """Delegate."""
        self.inner.sweep(before_s)

    def close(self) -> None:
        """Close the own pool, then the wrapped backend."""
        super().close()
        self.inner.close()

    def _around(self, operation: Operation, names: tuple[str, ...], call: Callable[[], _T]) -> _T:
        del operation, names
        return call()


class _WrapperWriter(BlobWriter):
    def __init__(self, backend: WrapperBackend, name: str, inner: BlobWriter) -> None:
        self._backend = backend
        self._names = (name,)
        self._inner = inner

    def write(self, requests: Sequence[WriteRequest], /) -> None:
        self._through("write", lambda: self._inner.write(requests))

    def seal(self, length: int, /) -> None:
        self._through("seal", lambda: self._inner.seal(length))

    def abort(self) -> None:
        try:
            self._through("abort", self._inner.abort)
        except StorageError:  # `abort` never raises, whatever fault was ordered
            self._inner.abort()

    def _through(self, operation: Operation, call: Callable[[], None]) -> None:
        self._backend._around(operation, self._names, call)  # noqa: SLF001 - one unit of two

"""The base of the faulty backends: passes each call through one hook."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, TypeGuard, TypeVar, get_args

from penstock.core.abc import Backend, DelegatingBackend, DelegatingWriter
from penstock.core.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from penstock.core.abc import BlobWriter, delegating
    from penstock.core.types import ReadRequest, WriteRequest

Operation = Literal["create", "write", "seal", "abort", "read", "publish", "list", "stat", "delete"]

_T = TypeVar("_T")

OPERATIONS: tuple[Operation, ...] = get_args(Operation)


class WrapperWriter(DelegatingWriter):
    """Delegates all; an injected error of `abort` goes no further."""

    def abort(self) -> None:
        """As the contract says: it never raises an error of the store."""
        try:
            super().abort()
        except StorageError:  # `abort` never raises: an injected error must not break the contract
            self.inner.abort()


class WrapperBackend(DelegatingBackend):
    """Delegates all calls, those of `OPERATIONS` through `_around(operation, names, call)`.

    Batches in the background run in the pool of the base class: delegated to the wrapped backend
    they would not meet the faults.
    """

    name: ClassVar[str] = "wrapper"
    writer_class = WrapperWriter

    def around(
        self, operation: delegating.Operation, names: tuple[str, ...], call: Callable[[], _T], /
    ) -> _T:
        """Pass calls that read or change stored bytes to `_around`; `read_record` is a `read`."""
        named = "read" if operation == "read_record" else operation
        return self._around(named, names, call) if _counts(named) else call()

    def submit_write(self, writer: BlobWriter, requests: Sequence[WriteRequest], /) -> Future[None]:
        """Run `writer.write(requests)` in the background."""
        return Backend.submit_write(self, writer, requests)

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """Run `read(requests)` in the background."""
        return Backend.submit_read(self, requests)

    def store_time_s(self) -> float:
        """Return the store's time, by calls of this backend if the inner one inherits the method.

        The probe that the base class publishes has to meet the faults: a process may die right
        after it.
        """
        if type(self.inner).store_time_s is Backend.store_time_s:
            return Backend.store_time_s(self)
        return super().store_time_s()

    def _around(self, operation: Operation, names: tuple[str, ...], call: Callable[[], _T]) -> _T:
        del operation, names
        return call()


def _counts(operation: str) -> TypeGuard[Operation]:
    return operation in OPERATIONS

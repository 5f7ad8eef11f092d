"""Refuses to change the root of one of several hosts that was opened by its plain path.

Its commit records may need data on the other hosts, and theirs may need data here.

Tested in `tests/integration/ranks/test_hosts.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from penstock.core.abc import Backend, DelegatingBackend, read_host
from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import Deadline, call_with_deadline
from penstock.core.errors import FormatError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc.delegating import Operation

T = TypeVar("T")

_CHANGES: frozenset[Operation] = frozenset(
    ["create", "publish", "delete", "rename", "sweep", "check_writable", "store_time_s"]
)


def unchangeable_if_of_hosts(backend: Backend) -> Backend:
    """Return a folder that only reads if it is the root of one of several hosts, else `backend`.

    A root of the only host has the whole run, so it may change. If the folder does not answer, or
    cannot be read, returns `backend`.
    """
    try:
        is_folder = backend.url.startswith("file://")
    except StorageError:  # of a plugin that breaks its contract: its first use reports that
        is_folder = False
    if not is_folder:
        return backend
    timing = current_timing()
    look = partial(read_host, backend)
    try:
        record = call_with_deadline("host", look, Deadline(timing.opening_s), timing=timing)
    except FormatError as error:
        return _OneOfHosts(backend, f"may be the root of one of several hosts: {error}")
    except (StorageError, TimeoutError):
        return backend
    if record is None or not {*record.hosts} - {record.host}:
        return backend
    which = f"is the root of {record.host}, one of {len({*record.hosts, record.host})} hosts"
    return _OneOfHosts(backend, which)


class _OneOfHosts(DelegatingBackend):
    def __init__(self, inner: Backend, which: str) -> None:
        super().__init__(inner)
        self.name = inner.name  # type: ignore[misc] # reports name the wrapped backend
        self._why = (
            f"{inner.url} {which}. By its path alone it can only be read: to change the run, use "
            "the backend `hosts` with this path, in a job with all of its hosts"
        )

    def around(self, operation: Operation, names: tuple[str, ...], call: Callable[[], T], /) -> T:
        if operation in _CHANGES:
            raise StorageError(self._why)
        return super().around(operation, names, call)

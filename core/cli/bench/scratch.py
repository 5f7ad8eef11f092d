"""The place of a measurement: a run under a prefix of the store, removed at the end.

Tested in `tests/core/cli/test_bench.py`.
"""

from __future__ import annotations

import os
import secrets
import signal
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

from penstock.core.abc import DelegatingBackend, host_roots
from penstock.core.cli.output.render import warn
from penstock.core.cli.output.runs_on_disk import local_root, named_root
from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import Deadline, call_with_deadline
from penstock.core.config.plugin_choice import BackendConfig, scheme_of
from penstock.core.errors import ConfigError, PenstockError, StorageTimeoutError
from penstock.core.format.records import data_prefix
from penstock.core.storage.open import open_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path
    from types import FrameType

    from penstock.core.abc import Backend, BlobWriter
    from penstock.core.types import BlobInfo, ReadRequest

T = TypeVar("T")

STUCK_S = 60.0
"""A request that takes longer counts as stuck. A save waits much longer (`io_timeout_s`)."""


class Below(DelegatingBackend):
    """Keeps a run in another backend, with a prefix before each name."""

    def __init__(self, inner: Backend, prefix: str) -> None:
        """Wrap `inner`; `prefix` must end in `/`."""
        super().__init__(inner)
        self.name = inner.name  # type: ignore[misc] # reports name the wrapped backend
        self._prefix = prefix

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """See `Backend.create`."""
        return super().create(self._prefix + name, size_hint=size_hint)

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """See `Backend.read`."""
        super().read(self._renamed(requests))

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """See `Backend.submit_read`."""
        return super().submit_read(self._renamed(requests))

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        """See `Backend.read_record`."""
        return super().read_record(self._prefix + name, limit_bytes=limit_bytes)

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """See `Backend.publish`."""
        super().publish(self._prefix + name, data, exclusive=exclusive)

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """See `Backend.list`."""
        found = super().list(self._prefix + prefix)
        return [replace(info, name=info.name.removeprefix(self._prefix)) for info in found]

    def stat(self, name: str, /) -> BlobInfo:
        """See `Backend.stat`."""
        return replace(super().stat(self._prefix + name), name=name)

    def delete(self, names: Sequence[str], /) -> None:
        """See `Backend.delete`."""
        super().delete([self._prefix + name for name in names])

    def sweep(self, before_s: float, /) -> None:
        """Remove nothing: the rest of the store does not belong to this run."""

    def _renamed(self, requests: Sequence[ReadRequest]) -> Sequence[ReadRequest]:
        return [replace(request, name=self._prefix + request.name) for request in requests]


def spec_with(
    spec: str | BackendConfig, backend: Backend, changes: Mapping[str, Any]
) -> str | dict[str, Any]:
    """Return `spec` with the options `changes` added.

    Args:
        spec: A path, a URL or a table.
        backend: The backend that `spec` opens.
        changes: Options that `spec` does not set; if empty, a path or URL is returned unchanged.
    """
    if isinstance(spec, BackendConfig):
        return {"type": spec.type, **spec.options, **changes}
    if not changes:
        return spec
    if scheme_of(spec) in {"", "file"}:
        spec = f"{backend.name}://{quote(str(named_root(backend)))}"
    return f"{spec}{'&' if '?' in spec else '?'}{urlencode(changes)}"


@contextmanager
def scratch_place(spec: str | BackendConfig) -> Iterator[tuple[Backend, str]]:
    """Open a store, choose a prefix for a measurement, and remove everything below it at the end.

    If the removal fails, prints a warning that says where the remains are. If this process is
    killed, `prune` finds the remains like those of a broken save.

    Raises:
        ConfigError: The run is in tiers.
        StorageError: The store cannot be opened or written.
    """
    with opened(spec) as backend:
        _check_usable(backend)
        prefix = data_prefix(secrets.token_hex(16))
        with without_traces(local_root(backend)):
            try:
                yield backend, prefix
            finally:
                try:
                    in_time(backend, lambda: remove(backend, prefix))
                except PenstockError as error:
                    where = f"{prefix} is left in {backend.url}"
                    warn(f"{where}, where `penstock prune` finds it: {error}")


@contextmanager
def opened(spec: str | Mapping[str, Any] | BackendConfig) -> Iterator[Backend]:
    """Open a store, and close it at the end, unless it is stuck."""
    backend = open_backend(spec)
    try:
        yield backend
    finally:
        with suppress(StorageTimeoutError):
            in_time(backend, backend.close)


def in_time(
    backend: Backend,
    call: Callable[[], T],
    *,
    stuck_s: float | None = STUCK_S,
    cancel: Callable[[], None] = lambda: None,
) -> T:
    """Make a store call on its own thread, and return its result.

    The main thread would not do: there, an exception from a signal handler could leave a lock of
    the store held forever.

    Args:
        backend: The store.
        call: The call.
        stuck_s: The seconds after which the store counts as stuck; None waits forever.
        cancel: Asks `call` to end; called at Ctrl-C, or if the store is stuck.

    Raises:
        StorageTimeoutError: The call took longer than `stuck_s`.
    """

    def late() -> StorageTimeoutError:
        return StorageTimeoutError(
            f"{backend.url} did not answer for {stuck_s:g} s: check that it can be reached"
        )

    timing = current_timing()
    return call_with_deadline("bench", call, Deadline(stuck_s), late, timing=timing, cancel=cancel)


def _check_usable(backend: Backend) -> None:
    if backend.tiers:
        names = ", ".join(f"{tier.name} ({tier.backend.url})" for tier in backend.tiers)
        msg = f"the run is in tiers; measure each of them by its own URL: {names}"
        raise ConfigError(msg)
    for roots in host_roots(backend).values():
        roots.check_may_delete()  # before anything is written that could not be deleted
    backend.check_writable()


def remove(backend: Backend, prefix: str) -> None:
    """Delete everything below a prefix."""
    backend.delete([info.name for info in backend.list(prefix)])


@contextmanager
def without_traces(root: Path | None) -> Iterator[None]:
    """After the block, remove `root` and each of its parents that the block made and left empty.

    By default SIGTERM and SIGHUP end Python without running `finally`. In the block they raise
    SystemExit, so that the folders are removed then too.
    """
    missing = []
    if root is not None:
        missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    before = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for folder in missing:
            with suppress(OSError):  # it was never created, or another process put a file there
                folder.rmdir()
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def drop_cache(path: Path) -> bool:
    """Drop a file from the page cache; return whether the file is known to have left it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)  # succeeds from the cache only
    except BlockingIOError:
        return True
    except OSError:  # the file system does not support this
        return False
    else:
        return os.fstat(fd).st_size == 0
    finally:
        os.close(fd)

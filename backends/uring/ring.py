"""The ring: the only module that uses the PyPI package `liburing`.

Three properties of that package (2026.3) shape this module. Its blocking calls hold the GIL, so the
engine waits on an eventfd. `cqe[0].res` raises for a failed call. Buffers and `Iovec` must outlive
the call, so they are kept until its completion is reaped.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import deque
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.backends.local.kernel import address
from penstock.core.distributions import installed_only
from penstock.core.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.local.transfer import Flight

DISABLE_VARIABLE = "PENSTOCK_DISABLE_URING"
"""The environment variable that disables io_uring.

The name of an error, such as `ENOSYS`, simulates that error; any other value but `0`, EPERM.
"""

# IOSQE_ASYNC. Without it the submitting call copies buffered I/O itself, one request at a time.
_ASYNC = 1 << 4
_AGAIN = {errno.EAGAIN, errno.EINTR, errno.EBUSY}

# The wheel of `liburing` for x86-64 is compiled for a CPU with these flags. On other CPUs its calls
# kill the process (SIGILL).
_CPU_FLAGS = {"avx512f", "avx512bw", "avx512vl"}


@installed_only()
def _load() -> Any:
    try:
        import liburing  # type: ignore[import-untyped]  # noqa: PLC0415 - optional; it has no types
    except ImportError as error:
        msg = f"io_uring cannot be used: the package liburing cannot be imported ({error})"
        raise CapabilityError(msg) from error
    lacked = flags_lacked(_cpuinfo())
    if lacked:
        msg = (
            "io_uring cannot be used: the package liburing is compiled for another CPU; this one "
            f"lacks {', '.join(sorted(lacked))}"
        )
        raise CapabilityError(msg)
    return liburing


@cache  # the file has a page of text for each processor
def _cpuinfo() -> str:
    return Path("/proc/cpuinfo").read_text(encoding="utf-8")


def flags_lacked(cpuinfo: str) -> set[str]:
    """Return the CPU flags that `liburing` needs but `cpuinfo`, from `/proc/cpuinfo`, lacks."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = next((value for key, _, value in lines if key.strip() == "flags"), None)
    return set() if flags is None else _CPU_FLAGS - set(flags.split())  # None: not an x86


def _refuse_if_disabled() -> None:
    value = os.environ.get(DISABLE_VARIABLE, "")
    if value in {"", "0"}:
        return
    number = getattr(errno, value, errno.EPERM) if value.isalpha() else errno.EPERM
    raise OSError(number, f"{os.strerror(number)} ({DISABLE_VARIABLE}={value})")


class Ring:
    """The submission and completion queues. Only one thread may use them; any may call `wake`."""

    def __init__(self, entries: int) -> None:
        """Set up the ring, which also probes io_uring.

        Raises:
            CapabilityError: io_uring cannot be used here; the message says why.
        """
        try:
            _refuse_if_disabled()
            self._lib = _load()
            self._ring = self._lib.Ring()
            self._lib.io_uring_queue_init(entries, self._ring)
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "?")
            msg = f"io_uring cannot be used: io_uring_queue_init: {code}: {error.strerror}"
            raise CapabilityError(msg) from error
        self._event = os.eventfd(0, os.EFD_CLOEXEC)
        self._lib.io_uring_register_eventfd(self._ring, self._event)
        self._cqe = self._lib.Cqe()
        self._kept: dict[int, Any] = {}
        # The size of the completion queue. Completions beyond it wait in the kernel for a call that
        # this module never makes: their transfers would hang.
        self._room = 2 * entries
        self._queued: deque[int] = deque()  # prepared, in order; the kernel takes from the left
        self._open = True

    def prepare(self, token: int, flight: Flight) -> bool:
        """Queue the next call of `flight`; return False if either queue is full.

        The completion carries `token`, which must differ between calls in flight.
        """
        if len(self._kept) >= self._room:
            return False
        sqe = self._lib.io_uring_get_sqe(self._ring)
        if sqe is None:
            return False
        self._queued.append(token)
        views = flight.views()
        vector = self._vector(views)
        self._kept[token] = (vector, views)
        transfer = flight.transfer
        call = self._lib.io_uring_prep_writev if transfer.write else self._lib.io_uring_prep_readv
        call(sqe, transfer.fd, vector, flight.offset)
        sqe.user_data = token
        if not transfer.direct:
            sqe.flags = _ASYNC
        return True

    def _vector(self, views: list[memoryview]) -> Any:
        # An Iovec leaks a reference to each of its buffers. So it is made of views of bare
        # addresses, which own nothing: each leaks 0.5 KB, not 16 MiB. `_kept` keeps the memory
        # alive until the call is reaped.
        bare = [(ctypes.c_ubyte * view.nbytes).from_address(address(view)) for view in views]
        return self._lib.Iovec([memoryview(array) for array in bare])

    def submit(self) -> bool:
        """Submit the prepared calls; return False if the kernel cannot take all of them yet."""
        while self._lib.io_uring_sq_ready(self._ring):
            try:
                self._lib.io_uring_submit(self._ring)
            except OSError as error:
                if error.errno not in _AGAIN:
                    raise
                return False
        self._queued.clear()
        return True

    def in_kernel(self) -> set[int]:
        """Return the tokens of calls that the kernel took, and whose memory it may still use."""
        left = self._lib.io_uring_sq_ready(self._ring)
        while len(self._queued) > left:
            self._queued.popleft()
        return self._kept.keys() - set(self._queued)

    def wait(self) -> None:
        """Release the GIL and block until a completion arrives or `wake` is called."""
        # Not `os.eventfd_read`, which does not retry after a signal (PEP 475): a timer with a
        # handler would end it with EINTR, and break down the engine with all its transfers.
        os.read(self._event, 8)

    def wake(self) -> None:
        """End a `wait`. Any thread may call it, but must prevent a concurrent `close`."""
        if self._open:
            os.eventfd_write(self._event, 1)

    def completions(self) -> Iterator[tuple[int, int]]:
        """Reap the completions, and yield `(token, bytes moved or -errno)` for each."""
        lib = self._lib
        for _ in range(lib.io_uring_cq_ready(self._ring)):
            lib.io_uring_peek_cqe(self._ring, self._cqe)
            entry = self._cqe[0]
            token = entry.user_data
            try:
                result = entry.res
            except OSError as error:
                result = -(error.errno or errno.EIO)
            lib.io_uring_cq_advance(self._ring, 1)
            del self._kept[token]
            yield token, result

    def close(self) -> None:
        """Free the ring; no call may be in flight. Idempotent."""
        if self._open:
            self._open = False
            self._lib.io_uring_queue_exit(self._ring)
            os.close(self._event)

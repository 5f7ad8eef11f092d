"""The engines under short results, errors and overload, injected at the kernel's results."""

# ruff: noqa: PTH118, PTH123 - descriptors, flags and links are tested

import errno
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.backends.conftest import open_backend
from tests.interpreters import run as run_python

from penstock.backends.local import kernel
from penstock.backends.local.threads import ThreadEngine
from penstock.backends.local.transfer import Transfer, TransferBatch
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.backends.uring import ring as ring_module
from penstock.backends.uring.engine import _LOST, RingEngine, UringBackend, UringConfig
from penstock.backends.uring.ring import Ring
from penstock.core.errors import CapabilityError, StorageError
from penstock.core.types import ReadRequest, WriteRequest
from penstock.testing.expectations import at_phase, pattern

MIB = 1 << 20


def shorten(views):
    """A beginning of `views` that ends at a page, so that direct I/O accepts it."""
    total = sum(view.nbytes for view in views)
    keep = max(4096, random.Random(total).randrange(total) // 4096 * 4096)
    left = []
    for view in views:
        part = view[:keep]
        if part.nbytes:
            left.append(part)
        keep -= part.nbytes
    return left


class ShortRing(Ring):
    """The kernel is asked for less than the engine wanted, so its results are really short."""

    shortened = 0

    def _vector(self, views):
        if sum(view.nbytes for view in views) > 4096:
            self.shortened += 1
            views = shorten(views)
        return super()._vector(views)


class FailingRing(Ring):
    """Completions whose numbers are in `errors` report that error instead of success."""

    def __init__(self, entries, errors):
        super().__init__(entries)
        self.errors, self.reaped, self.threads = errors, 0, set()

    def prepare(self, token, flight):
        self.threads.add(threading.get_ident())
        return super().prepare(token, flight)

    def completions(self):
        for token, result in super().completions():
            self.reaped += 1
            yield token, -self.errors[self.reaped] if self.reaped in self.errors else result


class BrokenRing(Ring):
    def submit(self):
        if self._lib.io_uring_sq_ready(self._ring):
            raise OSError(errno.EBADF, "broken")
        return True


def uring(tmp_path, make_ring, depth=4, mode="auto"):
    backend = UringBackend(UringConfig(path=str(tmp_path / "root"), depth=depth, direct_io=mode))
    backend._engine.close()
    backend._engine = RingEngine(make_ring(depth), depth)
    return backend


def posix(tmp_path, mode="auto", **calls):
    backend = PosixBackend(PosixConfig(path=str(tmp_path / "root"), direct_io=mode))
    backend._engine = ThreadEngine(4, **calls)
    return backend


def round_trip(backend, name="data/a.raw"):
    data = pattern(MIB) * 6
    requests = [
        WriteRequest(n * 8 * MIB + 64, (at_phase(data[n:], phase), memoryview(b"tail")))
        for n, phase in enumerate((64, 3, 64))
    ]
    writer = backend.create(name)
    writer.write(requests)
    writer.seal(24 * MIB)
    with open(os.path.join(backend._names.root, name), "rb") as file:
        content = file.read()
    assert len(content) == 24 * MIB
    for request in requests:
        expected = b"".join(request.buffers)
        assert content[request.offset : request.offset + request.length] == expected
        target = at_phase(bytes(request.length), 64)
        backend.read([ReadRequest(name, request.offset, target)])
        assert target == expected


@pytest.fixture
def on_user_signal():
    """A handler of SIGUSR1 that does nothing, so that system calls are interrupted by it."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.uring
@pytest.mark.parametrize("mode", ["auto", "off"])
def test_ring_resumes_short_results_at_the_right_offset(mode, tmp_path, needs_uring):
    backend = uring(tmp_path, ShortRing, mode=mode)
    round_trip(backend)
    assert backend._engine._ring.shortened > 20
    backend.close()


@pytest.mark.uring
def test_a_signal_does_not_end_the_wait_of_the_ring(needs_uring, on_user_signal):
    engine = RingEngine(Ring(4), 4)
    reader, feeder = os.pipe()
    held = bytearray(5)
    future = pipe_read(engine, reader, held)
    for _ in range(50):
        signal.pthread_kill(engine._thread.ident, signal.SIGUSR1)
        time.sleep(0.001)
    os.write(feeder, b"bytes")
    future.result(300)
    assert held == b"bytes"
    engine.close()
    for fd in (reader, feeder):
        os.close(fd)


def test_a_signal_does_not_fail_a_system_call_of_ours(on_user_signal):
    with ThreadPoolExecutor(1) as threads:
        ident = threads.submit(threading.get_ident).result()
        call = threads.submit(kernel._call, "usleep", 100_000)
        for _ in range(20):
            signal.pthread_kill(ident, signal.SIGUSR1)
            time.sleep(0.001)
        call.result(300)


@pytest.mark.uring
def test_ring_retries_until_the_kernel_starts_a_worker(tmp_path, needs_uring):
    """At the process limit the kernel cancels calls without a thread."""
    program = """
import errno, os, resource, sys
from penstock.backends.uring.engine import RingEngine
from tests.backends.test_engines import FailingRing, pipe_read

class LimitedRing(FailingRing):
    def submit(self):  # in the thread of the ring: the next thread would be one of the kernel's
        limit = (hard, hard) if self.refused else (1, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, limit)
        return super().submit()

    def completions(self):
        for token, result in super().completions():
            self.refused |= result == -errno.ECANCELED
            yield token, result

    refused = False

reader, feeder = os.pipe()
os.write(feeder, b"bytes")
ring = LimitedRing(4, {})
if os.geteuid() == 0:  # root has no limit
    os.setresuid(54321, 54321, 54321)
hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
engine, held = RingEngine(ring, 4), bytearray(5)
pipe_read(engine, reader, held).result(300)
assert held == b"bytes"
assert ring.refused
engine.close()
"""
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr


def refuse_to_start(thread):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("kind", ["posix-off", "uring-off"])
def test_an_engine_without_a_thread_reports_it_and_retries(kind, tmp_path, monkeypatch):
    backend = open_backend(kind, tmp_path)
    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
    writer = backend.create("a.raw")
    with pytest.raises(StorageError, match=r"can't start new thread.*ulimit -u"):
        writer.write([WriteRequest(0, (memoryview(b"x"),))])
    writer.abort()
    monkeypatch.undo()
    round_trip(backend)
    backend.close()


@pytest.mark.uring
def test_only_one_thread_touches_the_submission_queue(tmp_path, needs_uring):
    backend = uring(tmp_path, lambda depth: FailingRing(depth, {}))
    writer = backend.create("a.raw")

    def write(first):
        for n in range(first, first + 20):
            writer.write([WriteRequest(n * 8192, (memoryview(b"x" * 5000),))])

    threads = [threading.Thread(target=write, args=(n * 100,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = backend._engine._ring.threads
    assert len(seen) == 1
    assert not seen & {thread.ident for thread in [*threads, threading.main_thread()]}
    backend.close()


@pytest.mark.uring
def test_ring_reaps_everything_before_a_failed_write_returns(tmp_path, needs_uring):
    backend = uring(tmp_path, lambda depth: FailingRing(depth, {2: errno.EIO}), depth=8)
    writer = backend.create("a.raw")
    requests = [WriteRequest(n * MIB, (at_phase(pattern(300_000), 0),)) for n in range(40)]
    with pytest.raises(StorageError, match=r"cannot write a\.raw .*EIO.*kernel log"):
        writer.write(requests)
    assert not backend._engine._flights
    assert not backend._engine._ring._kept
    assert backend._engine._ring.reaped < 40, "what had not begun was not dropped"
    with pytest.raises(StorageError, match="dead since an earlier failure"):
        writer.write([WriteRequest(99 * MIB, (memoryview(b"x"),))])
    with pytest.raises(StorageError, match="dead since an earlier failure"):
        writer.seal(5)
    writer.abort()
    assert backend.list("") == []
    round_trip(backend)
    backend.close()


def test_threads_finish_everything_before_a_failed_write_returns(tmp_path):
    busy, lock, calls = [], threading.Lock(), []

    def pwritev(fd, views, offset):
        with lock:
            busy.append(offset)
            calls.append(offset)
        try:
            if offset == 2 * MIB:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return os.pwritev(fd, views, offset)
        finally:
            with lock:
                busy.remove(offset)

    backend = posix(tmp_path, writev=pwritev)
    writer = backend.create("a.raw")
    requests = [WriteRequest(n * MIB, (at_phase(pattern(300_000), 0),)) for n in range(40)]
    with pytest.raises(StorageError, match=r"cannot write a\.raw .*EIO"):
        writer.write(requests)
    assert not busy
    assert len(calls) < 40
    with pytest.raises(StorageError, match="dead"):
        writer.seal(5)
    writer.abort()
    backend.close()


@pytest.mark.uring
def test_a_broken_ring_fails_all_futures(tmp_path, needs_uring):
    backend = uring(tmp_path, BrokenRing)
    writer = backend.create("a.raw")
    with pytest.raises(StorageError, match="EBADF"):
        writer.write([WriteRequest(n * MIB, (memoryview(b"x"),)) for n in range(20)])
    writer.abort()
    second = backend.create("b.raw")
    with pytest.raises(StorageError, match="broke down"):
        second.write([WriteRequest(0, (memoryview(b"x"),))])
    backend.close()


class LaterBrokenRing(Ring):
    """Hands the first call to the kernel and breaks at the second; then it may be unreadable."""

    def __init__(self, entries, *, unreadable=False):
        super().__init__(entries)
        self.handed, self.broken, self.unreadable = threading.Event(), False, unreadable

    def submit(self):
        if not self._lib.io_uring_sq_ready(self._ring):
            return True
        if self.handed.is_set():
            self.broken = True
            raise OSError(errno.EBADF, "broken")
        submitted = super().submit()
        self.handed.set()
        return submitted

    def completions(self):
        if self.broken and self.unreadable:
            raise OSError(errno.EIO, "unreadable")
        return super().completions()


def pipe_read(engine, fd, target):
    """A read that is in the kernel until a write to the pipe."""
    batch = TransferBatch("read", "/pipes")
    transfer = Transfer(batch, "pipe", fd, write=False, direct=False, offset=0)
    assert transfer.take(0, memoryview(target))
    engine.start(batch, [transfer])
    return batch.future


@pytest.mark.uring
@pytest.mark.parametrize("unreadable", [False, True])
def test_a_broken_ring_resolves_no_buffer_that_the_kernel_still_fills(needs_uring, unreadable):
    ring = LaterBrokenRing(4, unreadable=unreadable)
    engine = RingEngine(ring, 4)
    reader, feeder = os.pipe()
    held, never = bytearray(5), bytearray(5)
    in_kernel = pipe_read(engine, reader, held)
    assert ring.handed.wait(300)
    not_begun = pipe_read(engine, reader, never)
    with pytest.raises(StorageError, match="EBADF"):
        not_begun.result(300)
    assert not in_kernel.done()
    if unreadable:
        engine._thread.join(300)
        assert not in_kernel.done()
        assert engine in _LOST, "memory that the kernel may use was given up"
        _LOST.remove(engine)
    else:
        os.write(feeder, b"bytes")
        with pytest.raises(StorageError, match="EBADF"):
            in_kernel.result(300)
        assert held == b"bytes", "the kernel was not through with it"
    assert never == bytes(5)
    engine.close()
    assert not ring._open
    for fd in (reader, feeder):
        os.close(fd)


@pytest.mark.parametrize(
    ("value", "says"), [("EPERM", "EPERM"), ("ENOSYS", "ENOSYS"), ("1", "EPERM")]
)
def test_forbidden_ring_says_why(value, says, tmp_path, monkeypatch):
    monkeypatch.setenv(ring_module.DISABLE_VARIABLE, value)
    with pytest.raises(CapabilityError, match=f"io_uring_queue_init: {says}"):
        UringBackend(UringConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("cpuinfo", "lacked"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2\n", {"avx512f", "avx512bw", "avx512vl"}),
        ("flags\t: avx512f avx2 avx512vl avx512bw\n\nflags\t: avx2\n", set()),
        ("processor\t: 0\nFeatures\t: fp asimd\n", set()),  # an ARM
    ],
)
def test_cpu_that_the_package_would_crash_on_is_detected(cpuinfo, lacked):
    assert ring_module.flags_lacked(cpuinfo) == lacked


def test_futures_cannot_be_cancelled_while_buffers_are_in_use(files):
    writer = files.create("a.raw")
    future = files.submit_write(writer, [WriteRequest(0, (memoryview(pattern(MIB)),))])
    assert not future.cancel()
    future.result(300)
    writer.abort()


def test_seal_and_abort_wait_for_what_was_submitted(files):
    for finish in ("seal", "abort"):
        writer = files.create(f"{finish}.raw")
        data = pattern(MIB)
        futures = [
            files.submit_write(writer, [WriteRequest(n * MIB, (memoryview(data),))])
            for n in range(12)
        ]
        writer.seal(12 * MIB) if finish == "seal" else writer.abort()
        assert all(future.done() for future in futures)
    target = bytearray(12 * MIB)
    files.read([ReadRequest("seal.raw", 0, memoryview(target))])
    assert target == data * 12
    assert [info.name for info in files.list("")] == ["seal.raw"]


def test_close_waits_for_what_was_submitted(files):
    writer = files.create("a.raw")
    futures = [
        files.submit_write(writer, [WriteRequest(n * MIB, (memoryview(pattern(MIB)),))])
        for n in range(12)
    ]
    files.close()
    assert all(future.done() for future in futures)


def test_threads_retry_when_the_kernel_asks(tmp_path):
    answers = [errno.EINTR, errno.EAGAIN]

    def pwritev(fd, views, offset):
        if answers:
            number = answers.pop()
            raise OSError(number, os.strerror(number))
        return os.pwritev(fd, views, offset)

    backend = posix(tmp_path, writev=pwritev)
    round_trip(backend)
    assert not answers
    backend.close()


def test_a_zero_byte_write_is_an_error(tmp_path):
    backend = posix(tmp_path, writev=lambda fd, views, offset: 0)
    writer = backend.create("a.raw")
    with pytest.raises(StorageError, match="EIO"):
        writer.write([WriteRequest(0, (memoryview(bytes(9000)),))])
    writer.abort()
    backend.close()


def test_missing_package_fails(tmp_path, monkeypatch):
    monkeypatch.delenv("PENSTOCK_DISABLE_URING", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "liburing", None)
    with pytest.raises(CapabilityError, match="liburing cannot be imported"):
        UringBackend(UringConfig(path=str(tmp_path)))

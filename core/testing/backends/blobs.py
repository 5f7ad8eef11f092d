"""Checks of blobs: bytes are read as they were written, in any sizes, batches and threads."""

# ruff: noqa: D103, S311 - checks explain themselves by their names; nothing here is secret

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

from penstock.core.testing.codecs.lending import Lender
from penstock.core.testing.expectations import (
    MIB,
    Model,
    at_phase,
    declared,
    expect,
    expect_equal,
    pattern,
    promise,
    read_all,
    store,
)
from penstock.core.types import ReadRequest, WriteRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import Backend, BlobWriter
    from penstock.core.testing.expectations import BackendCheck, OpenRoot


_TRIES = 50  # on a machine with other work most are bad
_REST_S = 0.01  # after which a busy machine lets this process run first
_LONG_S = 0.03  # five times as long as a copy of 8 MiB takes


def _model(backend: Backend) -> Model:
    return Model(backend.capabilities.offset_alignment)


@promise
def blob_of_one_small_request_reads_back(open_root: OpenRoot) -> None:
    with closing(open_root("one")) as backend:
        model = _model(backend)
        model.put(memoryview(b"penstock"))
        store(backend, "data/one.raw", model)


@promise
def empty_blob_can_be_sealed(open_root: OpenRoot) -> None:
    with closing(open_root("empty")) as backend:
        writer = backend.create("data/empty.raw")
        writer.write([])
        writer.seal(0)
        expect(backend.stat("data/empty.raw").size_bytes, 0, "size_bytes of an empty blob")
        backend.read([ReadRequest("data/empty.raw", 0, memoryview(bytearray()))])


@promise
def odd_offsets_lengths_and_addresses_read_back(open_root: OpenRoot) -> None:
    rng = random.Random(20)
    with closing(open_root("odd")) as backend:
        for case in range(12):
            model = _model(backend)
            for _ in range(rng.randint(1, 6)):
                phase = rng.choice([0, 1, 64, 513, 4095])
                aligned = rng.choice([phase, rng.randrange(4096)])  # the file's phase, or another
                length = rng.choice([1, 63, 4095, 4096, 4097, rng.randrange(1, 300_000)])
                view = at_phase(pattern(length, rng.randrange(99)), aligned)
                model.put(view, gap=rng.choice([0, 0, 1, 3]), phase=phase)
            store(backend, f"data/{case}.raw", model)


@promise
def gathered_buffers_read_back(open_root: OpenRoot) -> None:
    rng = random.Random(21)
    with closing(open_root("gather")) as backend:
        for case in range(8):
            model = _model(backend)
            for _ in range(3):
                sizes = [rng.choice([0, 1, 100, 8192, 70_000]) for _ in range(rng.randint(2, 9))]
                views = [at_phase(pattern(n, case), rng.choice([0, 64, 7])) for n in sizes]
                model.put(*views, memoryview(b"end"), phase=rng.choice([0, 64]))
            store(backend, f"data/{case}.raw", model)


@promise
def more_buffers_than_a_system_call_takes_read_back(open_root: OpenRoot) -> None:
    with closing(open_root("vector")) as backend:
        model = _model(backend)
        data = memoryview(pattern(3000 * 7))  # Linux takes 1024 buffers in one call (IOV_MAX)
        model.put(*(data[at : at + 7] for at in range(0, len(data), 7)))
        store(backend, "data/many.raw", model)


@promise
def gaps_read_as_zero(open_root: OpenRoot) -> None:
    with closing(open_root("gaps")) as backend:
        model = _model(backend)
        for gap in (5, 0, 300):
            model.put(memoryview(b"\xff" * 5000), gap=gap)
        store(backend, "data/gaps.raw", model)
        writer = backend.create("data/hole.raw")
        writer.seal(123_457)
        expect_equal(read_all(backend, "data/hole.raw", 123_457), bytes(123_457))


@promise
def many_small_requests_read_back(open_root: OpenRoot) -> None:
    with closing(open_root("many")) as backend:
        model = _model(backend)
        for number in range(2000):
            model.put(memoryview(pattern(1 + number % 700, number)))
        store(backend, "data/many.raw", model)


@promise
def one_large_request_reads_back(open_root: OpenRoot) -> None:
    with closing(open_root("large")) as backend:
        data = pattern(MIB) * 40
        for phase, address in ((64, 64), (0, 9)):
            model = _model(backend)
            model.put(at_phase(data, address), phase=phase)
            store(backend, f"data/large-{address}.raw", model)


@promise
@declared(lambda capabilities: not capabilities.ordered, "that writes may come in any order")
def batches_from_threads_read_back(open_root: OpenRoot) -> None:
    with closing(open_root("threads")) as backend, ThreadPoolExecutor(4) as pool:
        model = _model(backend)
        for number in range(64):
            model.put(at_phase(pattern(50_000 + number, number), 64), phase=64)
        writer = backend.create("data/threads.raw")
        batches = [model.requests[at : at + 4] for at in range(0, 64, 4)]
        # Four at once and in reverse, so that any of them may come first.
        for start in range(0, len(batches), 4):
            list(pool.map(writer.write, reversed(batches[start : start + 4])))
        writer.seal(model.end)
        expect_equal(read_all(backend, "data/threads.raw", model.end), model.expected)


@promise
def batches_in_the_background_read_back(open_root: OpenRoot) -> None:
    with closing(open_root("background")) as backend:
        model = _model(backend)
        for number in range(16):
            model.put(at_phase(pattern(300_000, number), 64), phase=64)
        writer = backend.create("data/b.raw")
        writes = [backend.submit_write(writer, [request]) for request in model.requests]
        for write in writes:
            expect(write.result(60), None, "the result of submit_write")
        writer.seal(model.end)
        targets = [bytearray(request.length) for request in model.requests]
        reads = [
            backend.submit_read([ReadRequest("data/b.raw", request.offset, memoryview(target))])
            for request, target in zip(model.requests, targets, strict=True)
        ]
        for read in reads:
            expect(read.result(60), None, "the result of submit_read")
        for request, target in zip(model.requests, targets, strict=True):
            expect_equal(bytes(target), b"".join(request.buffers))


@promise
def buffers_are_free_after_write_returns(open_root: OpenRoot) -> None:
    with closing(open_root("free")) as backend:
        data = pattern(3 * MIB + 17)
        for phase in (64, 1):
            view = at_phase(data, phase)
            writer = backend.create(f"data/{phase}.raw")
            writer.write([WriteRequest(64, (view,))])
            view[:] = bytes(len(view))
            writer.seal(64 + len(data))
            got = read_all(backend, f"data/{phase}.raw", 64 + len(data))
            expect_equal(got[64:], data)


@promise
def buffers_are_only_lent(open_root: OpenRoot) -> None:
    lender = Lender()
    with closing(open_root("lent")) as backend:
        for name, data in (("small", pattern(5000)), ("large", pattern(MIB + 17))):
            writer = backend.create(f"data/{name}.raw")

            def write(view: memoryview, writer: BlobWriter = writer) -> None:
                writer.write([WriteRequest(0, (view,))])

            def read(view: memoryview, name: str = name) -> bytes:
                backend.read([ReadRequest(f"data/{name}.raw", 0, view)])
                return bytes(view)

            lender.lend(data, "`write`", write)
            writer.seal(len(data))
            expect_equal(lender.lend(bytes(len(data)), "`read` (its target)", read), data)


@promise
def other_threads_run_during_writes_and_reads(open_root: OpenRoot) -> None:
    with closing(open_root("threads-run")) as backend:
        data = memoryview(pattern(MIB) * 8)
        target = memoryview(bytearray(len(data)))
        found: dict[str, float] = {}
        for turn in range(_TRIES):
            writer = backend.create(f"data/{turn}.raw")

            def write(writer: BlobWriter = writer) -> None:
                writer.write([WriteRequest(0, (data,))])

            def read(turn: int = turn) -> None:
                backend.read([ReadRequest(f"data/{turn}.raw", 0, target)])

            held = {"write": _held_s(write)}
            writer.seal(len(data))
            held["read"] = _held_s(read)
            found = {name: s for name, s in held.items() if s > _LONG_S}
            if not found:
                return  # one good try is enough: a busy machine holds up threads as well
            time.sleep(_REST_S)
        msg = (
            f"{' and '.join(found)} of {len(data)} bytes held the GIL for "
            f"{max(found.values()):.2f} s at a time, in each of {_TRIES} tries: training stands "
            "still meanwhile; let it go around calls that take long"
        )
        raise AssertionError(msg)


def _held_s(call: Callable[[], None]) -> float:
    """Return the longest time that this thread did not run while `call` ran in another one."""
    over = threading.Event()
    failure: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that asked
            failure.append(error)
        finally:
            over.set()

    thread = threading.Thread(target=run)
    longest_s, last_s = 0.0, time.monotonic()
    thread.start()
    is_over = False
    while not is_over:
        is_over = over.is_set()  # before the clock: `call` may be over before this thread runs
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
        time.sleep(0.0005)
    thread.join()
    if failure:
        raise failure[0]
    return longest_s


@promise
def writing_does_not_change_the_source(open_root: OpenRoot) -> None:
    with closing(open_root("source")) as backend:
        data = pattern(200_001)
        view = at_phase(data, 64)
        writer = backend.create("data/s.raw")
        writer.write([WriteRequest(64, (view,))])
        writer.seal(64 + len(data))
        expect_equal(bytes(view), data)


@promise
def seal_cuts_to_length(open_root: OpenRoot) -> None:
    with closing(open_root("cut")) as backend:
        data = pattern(100_000)
        for length in (99_999, 4096, 1, 250_000):
            writer = backend.create(f"data/{length}.raw")
            writer.write([WriteRequest(0, (memoryview(data),))])
            writer.seal(length)
            size = backend.stat(f"data/{length}.raw").size_bytes
            expect(size, length, "size_bytes after seal")
            expected = data[:length] + bytes(max(0, length - len(data)))
            expect_equal(read_all(backend, f"data/{length}.raw", length), expected)


BLOB_CHECKS: tuple[BackendCheck, ...] = (
    blob_of_one_small_request_reads_back,
    empty_blob_can_be_sealed,
    odd_offsets_lengths_and_addresses_read_back,
    gathered_buffers_read_back,
    more_buffers_than_a_system_call_takes_read_back,
    gaps_read_as_zero,
    many_small_requests_read_back,
    one_large_request_reads_back,
    batches_from_threads_read_back,
    batches_in_the_background_read_back,
    buffers_are_free_after_write_returns,
    buffers_are_only_lent,
    other_threads_run_during_writes_and_reads,
    writing_does_not_change_the_source,
    seal_cuts_to_length,
)

"""Checks of blobs: what is written is what is read, whatever its shape, and when it exists."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    StorageError,
)
from penstock.core.types import ReadRequest, WriteRequest, align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.abc import Backend, BlobWriter

    OpenRoot: TypeAlias = Callable[[str], Backend]
    BackendCheck: TypeAlias = Callable[[OpenRoot], None]

MIB = 1 << 20


@contextmanager
def raises(*errors: type[Exception]) -> Iterator[None]:
    """Fail unless the block raises one of `errors`."""
    try:
        yield
    except errors:
        return
    names = ", ".join(error.__name__ for error in errors)
    msg = f"expected {names}, but nothing was raised"
    raise AssertionError(msg)


def pattern(length: int, seed: int = 0) -> bytes:
    """Reproducible bytes in which no two stretches are alike."""
    return random.Random(seed).randbytes(length)


def at_phase(data: bytes, phase: int) -> memoryview:
    """`data` in writable memory whose address has `phase` modulo 4096, if the machine tells."""
    import ctypes  # noqa: PLC0415 - only the checks need it

    memory = bytearray(len(data) + 2 * 4096)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = -base % 4096 + phase
    view = memoryview(memory)[start : start + len(data)]
    view[:] = data
    return view


@dataclass(slots=True)
class Model:
    """What a blob should hold, beside what was sent to it."""

    align: int
    expected: bytearray = field(default_factory=bytearray)
    requests: list[WriteRequest] = field(default_factory=list)
    end: int = 0

    def put(self, *parts: memoryview, gap: int = 0, phase: int | None = None) -> None:
        """Plan a request behind the last one, on a unit of its own."""
        offset = align_up(self.end, self.align) + gap * self.align
        offset += phase if phase is not None and self.align > 1 else 0
        data = b"".join(parts)
        self.expected.extend(bytes(offset - len(self.expected)))
        self.expected += data
        self.requests.append(WriteRequest(offset, parts))
        self.end = offset + len(data)


def read_all(backend: Backend, name: str, length: int) -> bytes:
    """The first `length` bytes of a blob."""
    target = bytearray(length)
    backend.read([ReadRequest(name, 0, memoryview(target))])
    return bytes(target)


def expect_equal(got: bytes, expected: bytes | bytearray) -> None:
    """Compare without printing megabytes."""
    if got == expected:
        return
    pairs = enumerate(zip(got, expected, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(got), len(expected)))
    msg = f"read {len(got)} bytes, expected {len(expected)}; the first difference is at {first}"
    raise AssertionError(msg)


def _store(backend: Backend, name: str, model: Model) -> None:
    writer = backend.create(name, size_hint=model.end)
    writer.write(model.requests)
    writer.seal(model.end)
    expect_equal(read_all(backend, name, model.end), model.expected)
    assert backend.stat(name).size_bytes == model.end


def _model(backend: Backend) -> Model:
    return Model(backend.capabilities.offset_alignment)


def blob_of_one_small_request_reads_back(open_root: OpenRoot) -> None:
    with closing(open_root("one")) as backend:
        model = _model(backend)
        model.put(memoryview(b"penstock"))
        _store(backend, "data/one.raw", model)


def empty_blob_can_be_sealed(open_root: OpenRoot) -> None:
    with closing(open_root("empty")) as backend:
        writer = backend.create("data/empty.raw")
        writer.write([])
        writer.seal(0)
        assert backend.stat("data/empty.raw").size_bytes == 0
        backend.read([ReadRequest("data/empty.raw", 0, memoryview(bytearray()))])


def odd_offsets_lengths_and_addresses_read_back(open_root: OpenRoot) -> None:
    rng = random.Random(20)
    with closing(open_root("odd")) as backend:
        for case in range(12):
            model = _model(backend)
            for _ in range(rng.randint(1, 6)):
                phase = rng.choice([0, 1, 64, 513, 4095])
                aligned = rng.choice([phase, rng.randrange(4096)])
                length = rng.choice([1, 63, 4095, 4096, 4097, rng.randrange(1, 300_000)])
                view = at_phase(pattern(length, rng.randrange(99)), aligned)
                model.put(view, gap=rng.choice([0, 0, 1, 3]), phase=phase)
            _store(backend, f"data/{case}.raw", model)


def gathered_buffers_read_back(open_root: OpenRoot) -> None:
    rng = random.Random(21)
    with closing(open_root("gather")) as backend:
        for case in range(8):
            model = _model(backend)
            for _ in range(3):
                sizes = [rng.choice([0, 1, 100, 8192, 70_000]) for _ in range(rng.randint(2, 9))]
                views = [at_phase(pattern(n, case), rng.choice([0, 64, 7])) for n in sizes]
                model.put(*views, memoryview(b"end"), phase=rng.choice([0, 64]))
            _store(backend, f"data/{case}.raw", model)


def more_buffers_than_a_system_call_takes_read_back(open_root: OpenRoot) -> None:
    with closing(open_root("vector")) as backend:
        model = _model(backend)
        data = memoryview(pattern(3000 * 7))
        model.put(*(data[at : at + 7] for at in range(0, len(data), 7)))
        _store(backend, "data/many.raw", model)


def gaps_read_as_zero(open_root: OpenRoot) -> None:
    with closing(open_root("gaps")) as backend:
        model = _model(backend)
        for gap in (5, 0, 300):
            model.put(memoryview(b"\xff" * 5000), gap=gap)
        _store(backend, "data/gaps.raw", model)
        writer = backend.create("data/hole.raw")
        writer.seal(123_457)
        expect_equal(read_all(backend, "data/hole.raw", 123_457), bytes(123_457))


def many_small_requests_read_back(open_root: OpenRoot) -> None:
    with closing(open_root("many")) as backend:
        model = _model(backend)
        for number in range(2000):
            model.put(memoryview(pattern(1 + number % 700, number)))
        _store(backend, "data/many.raw", model)


def one_large_request_reads_back(open_root: OpenRoot) -> None:
    with closing(open_root("large")) as backend:
        data = pattern(MIB) * 40
        for phase, address in ((64, 64), (0, 9)):
            model = _model(backend)
            model.put(at_phase(data, address), phase=phase)
            _store(backend, f"data/large-{address}.raw", model)


def batches_from_threads_read_back(open_root: OpenRoot) -> None:
    with closing(open_root("threads")) as backend, ThreadPoolExecutor(4) as pool:
        model = _model(backend)
        for number in range(64):
            model.put(at_phase(pattern(50_000 + number, number), 64), phase=64)
        writer = backend.create("data/threads.raw")
        batches = [model.requests[at : at + 4] for at in range(0, 64, 4)]
        list(pool.map(writer.write, batches))
        writer.seal(model.end)
        expect_equal(read_all(backend, "data/threads.raw", model.end), model.expected)


def batches_in_the_background_read_back(open_root: OpenRoot) -> None:
    with closing(open_root("background")) as backend:
        model = _model(backend)
        for number in range(16):
            model.put(at_phase(pattern(300_000, number), 64), phase=64)
        writer = backend.create("data/b.raw")
        writes = [backend.submit_write(writer, [request]) for request in model.requests]
        for write in writes:
            assert write.result(60) is None
        writer.seal(model.end)
        targets = [bytearray(request.length) for request in model.requests]
        reads = [
            backend.submit_read([ReadRequest("data/b.raw", request.offset, memoryview(target))])
            for request, target in zip(model.requests, targets, strict=True)
        ]
        for read in reads:
            assert read.result(60) is None
        for request, target in zip(model.requests, targets, strict=True):
            expect_equal(bytes(target), b"".join(request.buffers))


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


def writing_does_not_change_the_source(open_root: OpenRoot) -> None:
    with closing(open_root("source")) as backend:
        data = pattern(200_001)
        view = at_phase(data, 64)
        writer = backend.create("data/s.raw")
        writer.write([WriteRequest(64, (view,))])
        writer.seal(64 + len(data))
        expect_equal(bytes(view), data)


def seal_cuts_to_length(open_root: OpenRoot) -> None:
    with closing(open_root("cut")) as backend:
        data = pattern(100_000)
        for length in (99_999, 4096, 1, 250_000):
            writer = backend.create(f"data/{length}.raw")
            writer.write([WriteRequest(0, (memoryview(data),))])
            writer.seal(length)
            assert backend.stat(f"data/{length}.raw").size_bytes == length
            expected = data[:length] + bytes(max(0, length - len(data)))
            expect_equal(read_all(backend, f"data/{length}.raw", length), expected)


def reads_fill_many_targets_from_several_blobs(open_root: OpenRoot) -> None:
    rng = random.Random(22)
    with closing(open_root("reads")) as backend:
        blobs = {f"data/{n}.raw": pattern(3 * MIB + n, n) for n in range(3)}
        for name, data in blobs.items():
            writer = backend.create(name)
            writer.write([WriteRequest(0, (memoryview(data),))])
            writer.seal(len(data))
        requests = []
        for _ in range(60):
            name = rng.choice(sorted(blobs))
            length = rng.choice([0, 1, 5000, 300_000, 2 * MIB])
            offset = rng.randrange(len(blobs[name]) - length + 1)
            phase = rng.choice([offset % 4096, rng.randrange(4096)])
            requests.append(ReadRequest(name, offset, at_phase(bytes(length), phase)))
        size = len(blobs["data/0.raw"])
        requests.append(ReadRequest("data/0.raw", size - 1, memoryview(bytearray(1))))
        backend.read(requests)
        for request in requests:
            stop = request.offset + request.target.nbytes
            expect_equal(bytes(request.target), blobs[request.name][request.offset : stop])


def reads_touch_nothing_around_the_target(open_root: OpenRoot) -> None:
    with closing(open_root("around")) as backend:
        data = pattern(MIB)
        writer = backend.create("data/a.raw")
        writer.write([WriteRequest(0, (memoryview(data),))])
        writer.seal(len(data))
        for phase, start, length in ((64, 64, 700_001), (5, 100, 600_000)):
            memory = at_phase(b"\xaa" * (length + 200), phase - 100 & 4095)
            backend.read([ReadRequest("data/a.raw", start, memory[100:-100])])
            expect_equal(bytes(memory[100:-100]), data[start : start + length])
            expect_equal(bytes(memory[:100]) + bytes(memory[-100:]), b"\xaa" * 200)


def reading_what_is_not_there_says_so(open_root: OpenRoot) -> None:
    with closing(open_root("missing")) as backend:
        target = memoryview(bytearray(MIB))
        with raises(BlobNotFoundError):
            backend.read([ReadRequest("data/none.raw", 0, target)])
        with raises(BlobNotFoundError):
            backend.submit_read([ReadRequest("none", 0, target[:9])]).result(60)
        with raises(BlobNotFoundError):
            backend.read_record("data/none.json", limit_bytes=100)
        writer = backend.create("data/short.raw")
        writer.write([WriteRequest(0, (memoryview(pattern(MIB)),))])
        writer.seal(MIB)
        for offset, length in ((1, MIB), (MIB - 5, 6), (MIB + 1, 1), (10 * MIB, 4096)):
            with raises(BlobTruncatedError):
                backend.read([ReadRequest("data/short.raw", offset, target[:length])])
        with raises(BlobTruncatedError):
            backend.read(
                [
                    ReadRequest("data/short.raw", 0, target[:10]),
                    ReadRequest("data/short.raw", MIB, target[10:20]),
                ]
            )
        backend.read([ReadRequest("data/short.raw", 0, target)])
        expect_equal(bytes(target), pattern(MIB))


def create_never_takes_an_existing_name(open_root: OpenRoot) -> None:
    with closing(open_root("taken")) as backend:
        writer = backend.create("data/x.raw")
        with raises(BlobExistsError):
            backend.create("data/x.raw")
        writer.write([WriteRequest(0, (memoryview(b"first"),))])
        writer.seal(5)
        with raises(BlobExistsError):
            backend.create("data/x.raw")
        backend.publish("data/y.json", b"{}")
        with raises(BlobExistsError):
            backend.create("data/y.json")
        expect_equal(read_all(backend, "data/x.raw", 5), b"first")


def a_finished_writer_takes_no_more(open_root: OpenRoot) -> None:
    request = WriteRequest(0, (memoryview(b"12345"),))
    later = WriteRequest(1 << 16, (memoryview(b"12345"),))
    with closing(open_root("finished")) as backend:
        sealed = backend.create("data/sealed.raw")
        sealed.write([request])
        sealed.seal(5)
        aborted = backend.create("data/aborted.raw")
        aborted.write([request])
        aborted.abort()
        for writer in (sealed, aborted):
            _refuses_everything(backend, writer, later)
        sealed.abort()
        expect_equal(read_all(backend, "data/sealed.raw", 5), b"12345")


def _refuses_everything(backend: Backend, writer: BlobWriter, request: WriteRequest) -> None:
    with raises(StorageError):
        writer.write([request])
    with raises(StorageError):
        backend.submit_write(writer, [request]).result(60)
    with raises(StorageError):
        writer.seal(5)


def an_aborted_blob_can_be_deleted_and_made_again(open_root: OpenRoot) -> None:
    with closing(open_root("abort")) as backend:
        writer = backend.create("data/a.raw", size_hint=10 * MIB)
        writes = [
            backend.submit_write(writer, [WriteRequest(n * MIB, (memoryview(pattern(MIB)),))])
            for n in range(4)
        ]
        writer.abort()
        writer.abort()
        for write in writes:
            write.exception(60)
        backend.delete(["data/a.raw"])
        with raises(BlobNotFoundError):
            backend.stat("data/a.raw")
        again = backend.create("data/a.raw")
        again.write([WriteRequest(0, (memoryview(b"again"),))])
        again.seal(5)
        expect_equal(read_all(backend, "data/a.raw", 5), b"again")


def another_instance_sees_sealed_blobs(open_root: OpenRoot) -> None:
    with closing(open_root("shared")) as backend, closing(open_root("shared")) as other:
        writer = backend.create("data/s.raw")
        writer.write([WriteRequest(0, (memoryview(b"hello"),))])
        writer.seal(5)
        expect_equal(read_all(other, "data/s.raw", 5), b"hello")
        assert [info.name for info in other.list("")] == ["data/s.raw"]


def capabilities_are_sane_and_steady(open_root: OpenRoot) -> None:
    with closing(open_root("capabilities")) as backend:
        before = backend.capabilities
        for value in (before.memory_alignment, before.offset_alignment):
            assert value >= 1
            assert value & (value - 1) == 0
        assert before.preferred_io_bytes > 0
        assert before.preferred_parallel > 0
        model = _model(backend)
        model.put(memoryview(pattern(MIB)))
        _store(backend, "data/c.raw", model)
        assert backend.capabilities == before


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
    writing_does_not_change_the_source,
    seal_cuts_to_length,
    reads_fill_many_targets_from_several_blobs,
    reads_touch_nothing_around_the_target,
    reading_what_is_not_there_says_so,
    create_never_takes_an_existing_name,
    a_finished_writer_takes_no_more,
    an_aborted_blob_can_be_deleted_and_made_again,
    another_instance_sees_sealed_blobs,
    capabilities_are_sane_and_steady,
)

"""Checks of blobs of any size, batches and threads, a writer's life cycle, and capabilities."""

# ruff: noqa: D103, S311 - checks explain themselves by their names; nothing here is secret

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    StorageError,
)
from penstock.core.types import Capabilities, ReadRequest, WriteRequest
from penstock.testing.expectations import (
    MIB,
    Lender,
    Model,
    at_phase,
    declared,
    expect,
    expect_equal,
    expect_names,
    pattern,
    promise,
    raises,
    read_all,
    store,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import Backend, BlobWriter
    from penstock.testing.expectations import BackendCheck, OpenRoot

_TRIES = 50  # on a busy machine most fail
_REST_S = 0.01  # after this a busy machine runs this process first
_LONG_S = 0.03  # five times the copy of 8 MiB


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
                aligned = rng.choice([phase, rng.randrange(4096)])  # the file's phase, or any
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
        # Four at once and in reverse, so that any may come first.
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
        blocking: dict[str, float] = {}
        for turn in range(_TRIES):
            writer = backend.create(f"data/{turn}.raw")

            def write(writer: BlobWriter = writer) -> None:
                writer.write([WriteRequest(0, (data,))])

            def read(turn: int = turn) -> None:
                backend.read([ReadRequest(f"data/{turn}.raw", 0, target)])

            held = {"write": _held_s(write)}
            writer.seal(len(data))
            held["read"] = _held_s(read)
            blocking = {name: s for name, s in held.items() if s > _LONG_S}
            if not blocking:
                return  # one good try is enough: a busy machine delays threads too
            time.sleep(_REST_S)
        msg = (
            f"{' and '.join(blocking)} of {len(data)} bytes held the GIL for "
            f"{max(blocking.values()):.2f} s at a time, in each of {_TRIES} tries, and so "
            "blocked training; release it around long calls"
        )
        raise AssertionError(msg)


def _held_s(call: Callable[[], None]) -> float:
    """Return the longest pause of this thread while `call` ran in another thread."""
    over = threading.Event()
    failure: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below, in the calling thread
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


@promise
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
            # Direct I/O reads in place into memory of the file's phase, else by a copy.
            phase = rng.choice([offset % 4096, rng.randrange(4096)])
            requests.append(ReadRequest(name, offset, at_phase(bytes(length), phase)))
        size = len(blobs["data/0.raw"])
        requests.append(ReadRequest("data/0.raw", size - 1, memoryview(bytearray(1))))
        backend.read(requests)
        for request in requests:
            stop = request.offset + request.target.nbytes
            expect_equal(bytes(request.target), blobs[request.name][request.offset : stop])


@promise
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


@promise
def reading_what_is_not_there_says_so(open_root: OpenRoot) -> None:
    with closing(open_root("missing")) as backend:
        target = memoryview(bytearray(MIB))
        with raises(BlobNotFoundError, by="read of a missing blob"):
            backend.read([ReadRequest("data/none.raw", 0, target)])
        future = backend.submit_read([ReadRequest("none", 0, target[:9])])
        with raises(BlobNotFoundError, by="submit_read of a missing blob"):
            future.result(60)
        with raises(BlobNotFoundError, by="read_record of a missing record"):
            backend.read_record("data/none.json", limit_bytes=100)
        writer = backend.create("data/short.raw")
        writer.write([WriteRequest(0, (memoryview(pattern(MIB)),))])
        writer.seal(MIB)
        for offset, length in ((1, MIB), (MIB - 5, 6), (MIB + 1, 1), (10 * MIB, 4096)):
            with raises(BlobTruncatedError, by="read past the end of a blob"):
                backend.read([ReadRequest("data/short.raw", offset, target[:length])])
        with raises(BlobTruncatedError, by="read of a batch past the end of a blob"):
            backend.read(
                [
                    ReadRequest("data/short.raw", 0, target[:10]),
                    ReadRequest("data/short.raw", MIB, target[10:20]),
                ]
            )
        backend.read([ReadRequest("data/short.raw", 0, target)])
        expect_equal(bytes(target), pattern(MIB))


@promise
def create_never_takes_an_existing_name(open_root: OpenRoot) -> None:
    with closing(open_root("taken")) as backend:
        writer = backend.create("data/x.raw")
        with raises(BlobExistsError, by="create of a name that is being written"):
            backend.create("data/x.raw")
        writer.write([WriteRequest(0, (memoryview(b"first"),))])
        writer.seal(5)
        with raises(BlobExistsError, by="create of the name of a sealed blob"):
            backend.create("data/x.raw")
        backend.publish("data/y.json", b"{}")
        with raises(BlobExistsError, by="create of the name of a record"):
            backend.create("data/y.json")
        expect_equal(read_all(backend, "data/x.raw", 5), b"first")


@promise
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
        for writer, what in ((sealed, "a sealed blob"), (aborted, "an aborted blob")):
            _refuses_everything(backend, writer, later, what)
        sealed.abort()
        expect_equal(read_all(backend, "data/sealed.raw", 5), b"12345")


def _refuses_everything(
    backend: Backend, writer: BlobWriter, request: WriteRequest, what: str
) -> None:
    with raises(StorageError, by=f"write to {what}"):
        writer.write([request])
    future = backend.submit_write(writer, [request])
    with raises(StorageError, by=f"submit_write to {what}"):
        future.result(60)
    with raises(StorageError, by=f"seal of {what}"):
        writer.seal(5)


@promise
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
        with raises(BlobNotFoundError, by="stat of an aborted and deleted blob"):
            backend.stat("data/a.raw")
        again = backend.create("data/a.raw")
        again.write([WriteRequest(0, (memoryview(b"again"),))])
        again.seal(5)
        expect_equal(read_all(backend, "data/a.raw", 5), b"again")


@promise
def an_abort_leaves_a_later_blob_of_its_name_alone(open_root: OpenRoot) -> None:
    with closing(open_root("late")) as other:
        other.publish("data/b.json", b"{}")  # keeps the folder, which may end with its last file
        with closing(open_root("late")) as late:
            writer = late.create("data/a.raw")
            writer.write([WriteRequest(0, (memoryview(b"late!"),))])
            other.delete(["data/a.raw"])
            try:
                newer = other.create("data/a.raw")
            except BlobExistsError:
                return  # such a store reserves the name until its writer ends
            newer.write([WriteRequest(0, (memoryview(b"newer"),))])
            newer.seal(5)
            writer.abort()
            expect_equal(read_all(other, "data/a.raw", 5), b"newer")
        expect_equal(read_all(other, "data/a.raw", 5), b"newer")


@promise
def another_instance_sees_sealed_blobs(open_root: OpenRoot) -> None:
    with closing(open_root("shared")) as backend, closing(open_root("shared")) as other:
        writer = backend.create("data/s.raw")
        writer.write([WriteRequest(0, (memoryview(b"hello"),))])
        writer.seal(5)
        expect_equal(read_all(other, "data/s.raw", 5), b"hello")
        expect_names(other, "", ["data/s.raw"])


@promise
@declared(lambda capabilities: capabilities.appends, "durable appends (appends)")
def synced_bytes_are_readable_while_the_blob_grows(open_root: OpenRoot) -> None:
    with closing(open_root("appends")) as backend, closing(open_root("appends")) as other:
        unit = max(backend.capabilities.offset_alignment, 4096)
        writer = backend.create("data/log.raw")
        data = b""
        for number in range(3):
            data = data.ljust(number * unit, b"\0") + pattern(unit - 100 - number)
            writer.write([WriteRequest(number * unit, (memoryview(data[number * unit :]),))])
            writer.sync(len(data))
            for reader in (backend, other):
                expect_equal(read_all(reader, "data/log.raw", len(data)), data)
        writer.seal(len(data))
        expect(backend.stat("data/log.raw").size_bytes, len(data), "size_bytes after the seal")
        with raises(StorageError, by="sync of a sealed blob"):
            writer.sync(len(data))


@promise
@declared(lambda capabilities: capabilities.appends, "durable appends (appends)")
def synced_bytes_stay_after_an_abort(open_root: OpenRoot) -> None:
    with closing(open_root("aborted")) as backend, closing(open_root("aborted")) as other:
        data = pattern(5000)
        writer = backend.create("data/log.raw")
        writer.write([WriteRequest(0, (memoryview(data),))])
        writer.sync(len(data))
        writer.abort()
        expect_equal(read_all(other, "data/log.raw", len(data)), data)


@promise
@declared(lambda capabilities: capabilities.renames, "renames of blobs (renames)")
def renamed_blob_has_only_its_new_name(open_root: OpenRoot) -> None:
    with closing(open_root("renamed")) as backend, closing(open_root("renamed")) as other:
        for data in (pattern(5000), pattern(3000)[::-1]):  # the second replaces the first
            writer = backend.create("data/one/old.raw")
            writer.write([WriteRequest(0, (memoryview(data),))])
            writer.seal(len(data))
            backend.rename("data/one/old.raw", "data/two/new.raw")
            expect_equal(read_all(other, "data/two/new.raw", len(data)), data)
            expect_names(other, "", ["data/two/new.raw"])
        with raises(BlobNotFoundError, by="rename of a blob that does not exist"):
            backend.rename("data/one/old.raw", "data/two/new.raw")


@promise
@declared(lambda capabilities: capabilities.appends, "durable appends (appends)")
@declared(lambda capabilities: capabilities.renames, "renames of blobs (renames)")
def renamed_blob_grows_under_its_new_name(open_root: OpenRoot) -> None:
    with closing(open_root("growing")) as backend, closing(open_root("growing")) as other:
        unit = backend.capabilities.offset_alignment
        data = pattern(unit)
        writer = backend.create("data/one/old.raw")
        writer.write([WriteRequest(0, (memoryview(data),))])
        writer.sync(unit)
        backend.rename("data/one/old.raw", "data/two/new.raw")
        for finish in (writer.sync, writer.seal):
            writer.write([WriteRequest(len(data), (memoryview(data[:unit]),))])
            data += data[:unit]
            finish(len(data))
            expect_equal(read_all(other, "data/two/new.raw", len(data)), data)
            expect_names(other, "", ["data/two/new.raw"])


@promise
def capabilities_are_sane_and_steady(open_root: OpenRoot) -> None:
    with closing(open_root("capabilities")) as backend:
        before: object = backend.capabilities  # its constructor refuses values that core cannot use
        kind = type(before).__name__
        assert isinstance(before, Capabilities), f"capabilities is a {kind}, not Capabilities"
        model = Model(backend.capabilities.offset_alignment)
        model.put(memoryview(pattern(MIB)))
        store(backend, "data/c.raw", model)
        # Core plans a save by the first answer: a lazy probe must not change it later.
        expect(backend.capabilities, before, "capabilities, read again after a write,")


ACCESS_CHECKS: tuple[BackendCheck, ...] = (
    reads_fill_many_targets_from_several_blobs,
    reads_touch_nothing_around_the_target,
    reading_what_is_not_there_says_so,
    create_never_takes_an_existing_name,
    a_finished_writer_takes_no_more,
    an_aborted_blob_can_be_deleted_and_made_again,
    an_abort_leaves_a_later_blob_of_its_name_alone,
    another_instance_sees_sealed_blobs,
    synced_bytes_are_readable_while_the_blob_grows,
    synced_bytes_stay_after_an_abort,
    renamed_blob_has_only_its_new_name,
    renamed_blob_grows_under_its_new_name,
    capabilities_are_sane_and_steady,
)

"""Checks of reads, of a writer's life, and of capabilities."""

# ruff: noqa: D103, S311 - checks explain themselves by their names; nothing here is secret

from __future__ import annotations

import random
from contextlib import closing
from typing import TYPE_CHECKING

from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    StorageError,
)
from penstock.core.testing.expectations import (
    MIB,
    Model,
    at_phase,
    expect,
    expect_equal,
    expect_names,
    pattern,
    promise,
    raises,
    read_all,
    store,
)
from penstock.core.types import Capabilities, ReadRequest, WriteRequest

if TYPE_CHECKING:
    from penstock.core.abc import Backend, BlobWriter
    from penstock.core.testing.expectations import BackendCheck, OpenRoot


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
            # Direct I/O reads into memory of the file's phase in place, into any other by a copy.
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
        with raises(BlobNotFoundError, by="read of a blob that is not there"):
            backend.read([ReadRequest("data/none.raw", 0, target)])
        future = backend.submit_read([ReadRequest("none", 0, target[:9])])
        with raises(BlobNotFoundError, by="submit_read of a blob that is not there"):
            future.result(60)
        with raises(BlobNotFoundError, by="read_record of a record that is not there"):
            backend.read_record("data/none.json", limit_bytes=100)
        writer = backend.create("data/short.raw")
        writer.write([WriteRequest(0, (memoryview(pattern(MIB)),))])
        writer.seal(MIB)
        for offset, length in ((1, MIB), (MIB - 5, 6), (MIB + 1, 1), (10 * MIB, 4096)):
            with raises(BlobTruncatedError, by="read behind the end of a blob"):
                backend.read([ReadRequest("data/short.raw", offset, target[:length])])
        with raises(BlobTruncatedError, by="read of a batch that ends behind the end of a blob"):
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
        with raises(BlobNotFoundError, by="stat of an aborted blob, once it is deleted,"):
            backend.stat("data/a.raw")
        again = backend.create("data/a.raw")
        again.write([WriteRequest(0, (memoryview(b"again"),))])
        again.seal(5)
        expect_equal(read_all(backend, "data/a.raw", 5), b"again")


@promise
def an_abort_leaves_a_later_blob_of_its_name_alone(open_root: OpenRoot) -> None:
    with closing(open_root("late")) as other:
        other.publish("data/b.json", b"{}")  # keeps the folder, which may go with its last file
        with closing(open_root("late")) as late:
            writer = late.create("data/a.raw")
            writer.write([WriteRequest(0, (memoryview(b"late!"),))])
            other.delete(["data/a.raw"])
            try:
                newer = other.create("data/a.raw")
            except BlobExistsError:
                return  # such a store keeps the name taken until its writer has ended
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
def capabilities_are_sane_and_steady(open_root: OpenRoot) -> None:
    with closing(open_root("capabilities")) as backend:
        before: object = backend.capabilities  # its constructor refuses values that core cannot use
        kind = type(before).__name__
        assert isinstance(before, Capabilities), f"capabilities is a {kind}, no Capabilities"
        model = Model(backend.capabilities.offset_alignment)
        model.put(memoryview(pattern(MIB)))
        store(backend, "data/c.raw", model)
        # Core plans a save by the first answer: a lazy probe must not change it afterwards.
        expect(backend.capabilities, before, "capabilities, asked again after a blob was written,")


ACCESS_CHECKS: tuple[BackendCheck, ...] = (
    reads_fill_many_targets_from_several_blobs,
    reads_touch_nothing_around_the_target,
    reading_what_is_not_there_says_so,
    create_never_takes_an_existing_name,
    a_finished_writer_takes_no_more,
    an_aborted_blob_can_be_deleted_and_made_again,
    an_abort_leaves_a_later_blob_of_its_name_alone,
    another_instance_sees_sealed_blobs,
    capabilities_are_sane_and_steady,
)

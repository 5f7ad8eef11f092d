"""Frames -> verified bytes in sinks, frame by frame."""

import gc
import random
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import pytest
from tests.resident import measured, peak_bytes

from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.codecs.delta import DeltaCodec
from penstock.codecs.zstd import ZstdCodec
from penstock.core.abc import ByteSink, CodecContext, Tier
from penstock.core.concurrency.timing import Timing
from penstock.core.concurrency.workers import Workers
from penstock.core.errors import StorageError
from penstock.core.format.blocks import frame_blocks
from penstock.core.format.records import BlobRecord, CodecRecord, Frame
from penstock.core.pipeline.codec_chain import CodecChain, checksum, checksum_blocks
from penstock.core.pipeline.loader import Loader
from penstock.core.plan.earlier_frames import StoredFrame
from penstock.core.plan.reads import ChunkUse, FrameJob
from penstock.core.plugins.registry import default_registry
from penstock.core.restore.earlier import EarlierReader
from penstock.core.tree.paths import parse_path
from penstock.core.types import ByteRange, WriteRequest
from penstock.testing.faults import FaultyBackend, WrapperBackend

BLOCK = 4096


class Sink(ByteSink):
    """Takes bytes; with `direct` it also lends its memory."""

    def __init__(self, nbytes, *, direct):
        self.nbytes = nbytes
        self.device = "cpu"
        self.memory = self.address = None
        self.data = bytearray(b"\xee" * nbytes)
        self.copies = 0
        self._direct = direct

    def view(self):
        return memoryview(self.data) if self._direct else None

    def copy_in(self, start, data, /):
        self.copies += 1
        self.data[start : start + data.nbytes] = data


class Store:
    """A store with frames written by the test."""

    def __init__(self):
        self.backend = MemoryBackend(MemoryConfig())
        self.chain = CodecChain([ZstdCodec(ZstdCodec.Config())])
        self._chance = random.Random(1)

    def write(self, name, content):
        writer = self.backend.create(name)
        writer.write([WriteRequest(0, (memoryview(content),))])
        writer.seal(len(content))

    def corrupt(self, name, offset):
        self.backend._store.blobs[name].data[offset] ^= 0x40

    def cut(self, name, length):
        blobs = self.backend._store.blobs
        blobs[name] = replace(blobs[name], data=blobs[name].data[:length])

    def raw(self, length, *, name="raw", offset=64):
        """`(frame job without uses, its bytes)`."""
        data = self._chance.randbytes(length)
        self.write(name, bytes(offset) + data)
        sums = checksum_blocks(memoryview(data), frame_blocks(offset, length, BLOCK))
        frame = Frame(0, offset, length, length, 0, tuple(sums))
        return self.job(frame, name), data

    def encoded(self, length, *, name="enc"):
        data = self._chance.randbytes(length // 2) * 2
        out = memoryview(bytearray(self.chain.max_encoded_size(length)))
        context = CodecContext("uint8", 1, (length,), 0, length)
        made = self.chain.encode(memoryview(data), out, context=context)
        self.write(name, bytes(out[: made.length]))
        frame = Frame(
            0, 0, made.length, length, 1, (made.checksum,), made.raw_checksum, made.lengths
        )
        return self.job(frame, name), data

    def chained(self, length, links):
        """A frame and its bases, each in its own blob, the lowest raw; and the bytes."""
        delta, data = CodecChain([DeltaCodec(DeltaCodec.Config())]), self._chance.randbytes(length)
        context = CodecContext("uint8", 1, (length,), 0, length)
        bases = []
        for number in range(links):
            if not bases:
                self.write("link-0", data)
                sums = checksum_blocks(memoryview(data), frame_blocks(0, length, BLOCK))
                frame = Frame(0, 0, length, length, 0, tuple(sums))
            else:
                below, data = data, data[: number * 7] + bytes([number]) + data[number * 7 + 1 :]
                out = memoryview(bytearray(delta.max_encoded_size(length)))
                seen = replace(context, base=memoryview(below))
                made = delta.encode(memoryview(data), out, context=seen)
                self.write(f"link-{number}", out[: made.length])
                frame = Frame(
                    0, 0, made.length, length, 1, (made.checksum,), made.raw_checksum, made.lengths
                )
            job = self.job(frame, f"link-{number}")
            job.chain = delta if frame.chain else None
            bases.insert(0, job)
        bases[0].bases = tuple(bases[1:])
        return bases[0], data

    def job(self, frame, name, *, ranges=None, uses=(), label=("object",)):
        encoded = frame.chain != 0
        context = CodecContext("uint8", 1, (frame.raw_length,), 0, frame.raw_length)
        return FrameJob(
            frame, name, BLOCK, self.chain if encoded else None, context,
            ranges or (ByteRange(0, frame.length),), list(uses), list(map(parse_path, label)),
        )  # fmt: skip


def using(job, *uses, ranges=None, label=("object",)):
    return FrameJob(
        job.frame, job.blob, job.block_bytes, job.chain, job.context, ranges or job.ranges,
        list(uses), list(map(parse_path, label)), job.bases,
    )  # fmt: skip


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def workers():
    workers = Workers(2)
    yield workers
    workers.close()


@pytest.fixture
def loader(store, workers):
    return Loader(store.backend, workers)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("kind", ["raw", "encoded"])
def test_a_whole_frame_arrives_verified(kind, direct, store, loader):
    job, data = getattr(store, kind)(20_000)
    sink = Sink(30_000, direct=direct)
    stats = loader.run([using(job, ChunkUse(sink, 0, 5000, 20_000))])
    assert not stats.damaged
    assert (stats.frames, stats.bytes_read) == (1, job.frame.length)
    assert sink.data == b"\xee" * 5000 + data + b"\xee" * 5000
    assert bool(sink.copies) is not direct


@pytest.mark.parametrize("by_copy", [True, False])
def test_a_target_gets_only_verified_bytes_of_whole_frames(by_copy, store, workers):
    job, data = store.raw(20_000)
    large, rest = store.raw(200_000, name="large")  # longer than its share of the scratch memory
    sink, other = Sink(20_000, direct=True), Sink(200_000, direct=True)
    jobs = [using(job, ChunkUse(sink, 0, 0, 20_000)), using(large, ChunkUse(other, 0, 0, 200_000))]
    loader = Loader(store.backend, workers)
    loader.scratch_bytes, loader.by_copy = 200_000, by_copy
    assert not loader.run(jobs).damaged
    assert (sink.data, other.data) == (data, rest)
    assert (sink.copies, other.copies) == (by_copy, 0)
    sink.data[:] = b"\xee" * 20_000
    store.corrupt("raw", 64 + 100)
    assert loader.run(jobs).damaged
    assert (sink.data == b"\xee" * 20_000) is by_copy


def test_copies_are_read_in_pieces_of_whole_blocks(store, workers):
    job, data = store.raw(20_000)  # from 64 on: it has blocks of 4032, 4096, ... and 3584 bytes
    sink = Sink(21_000, direct=True)
    blocks = frame_blocks(64, 20_000, BLOCK)
    wanted = ByteRange(blocks[1].start + 5, 20_000)
    ranges = (ByteRange(blocks[1].start, 20_000),)
    use = using(
        job, ChunkUse(sink, wanted.start, 1000 + wanted.start, wanted.length), ranges=ranges
    )
    loader = Loader(store.backend, workers)
    loader.by_copy, loader.piece_bytes = True, 2 * BLOCK - 1
    assert not loader.run([use]).damaged
    assert sink.copies == 3  # block 1, blocks 2 and 3, block 4
    assert sink.data == b"\xee" * (1000 + wanted.start) + data[wanted.start :]
    sink.data[:] = b"\xee" * 21_000
    store.corrupt("raw", 64 + blocks[2].start)
    assert [name for name, _, _ in loader.run([use]).damaged] == [*job.label]
    bad = 1000 + blocks[2].start, 1000 + blocks[3].stop
    assert sink.data[bad[0] : bad[1]] == b"\xee" * (2 * BLOCK)
    assert sink.data[bad[1] :] == data[blocks[4].start :]


def test_only_flat_memory_is_split(store, workers):
    job, data = store.raw(20_000)
    sink = Sink(20_000, direct=False)  # as for a strided tensor, which takes whole elements
    loader = Loader(store.backend, workers)
    loader.by_copy, loader.piece_bytes = True, BLOCK
    assert not loader.run([using(job, ChunkUse(sink, 0, 0, 20_000))]).damaged
    assert (sink.data, sink.copies) == (data, 1)


def test_only_requested_ranges_are_read_and_placed(store, loader):
    job, data = store.raw(20_000)
    blocks = frame_blocks(64, 20_000, BLOCK)
    ranges = (
        ByteRange(blocks[0].start, blocks[0].stop),
        ByteRange(blocks[3].start, blocks[4].stop),
    )
    sink = Sink(20_000, direct=True)
    inside = [ByteRange(10, 500), ByteRange(blocks[3].start + 5, blocks[4].stop - 5)]
    store.corrupt("raw", 64 + blocks[1].start)  # no reader checks there
    stats = loader.run(
        [using(job, *(ChunkUse(sink, r.start, r.start, r.length) for r in inside), ranges=ranges)]
    )
    assert not stats.damaged
    assert stats.bytes_read == sum(r.length for r in ranges)
    for part in inside:
        assert sink.data[part.start : part.stop] == data[part.start : part.stop]
    assert sink.data[: inside[0].start] == b"\xee" * inside[0].start


def test_a_range_that_cuts_a_block_cannot_be_verified_and_is_refused(store, loader):
    job, _ = store.raw(20_000)
    sink = Sink(20_000, direct=False)
    stats = loader.run([using(job, ChunkUse(sink, 0, 0, 100), ranges=(ByteRange(0, 100),))])
    assert "not made of whole blocks" in stats.damaged[0][1]
    assert not sink.copies


@pytest.mark.parametrize("offset", [0, 1, 4032, 19_999])
def test_a_flipped_bit_anywhere_in_a_raw_frame_is_damage(offset, store, loader):
    job, _ = store.raw(20_000)
    store.corrupt("raw", 64 + offset)
    sink = Sink(20_000, direct=False)
    stats = loader.run([using(job, ChunkUse(sink, 0, 0, 20_000), label=("a/b", "c"))])
    assert [name for name, _, _ in stats.damaged] == ["a/b", "c"]
    assert "does not match" in stats.damaged[0][1]
    assert not sink.copies


@pytest.mark.parametrize("decode", [True, False])
def test_a_flipped_bit_in_an_encoded_frame_is_damage(decode, store, loader):
    job, _ = store.encoded(20_000)
    store.corrupt("enc", job.frame.length // 2)
    sink = Sink(20_000, direct=True)
    stats = loader.run([using(job, ChunkUse(sink, 0, 0, 20_000))], decode=decode)
    assert [name for name, _, _ in stats.damaged] == ["object"]
    assert sink.data == b"\xee" * 20_000


def test_a_frame_that_decodes_to_other_bytes_is_damage(store, loader):
    job, _ = store.encoded(20_000)
    frame = job.frame
    wrong = Frame(0, 0, frame.length, frame.raw_length, 1, frame.checksums, frame.raw_checksum ^ 1)
    assert not loader.run([store.job(wrong, "enc")], decode=False).damaged
    (damage,) = loader.run([store.job(wrong, "enc", uses=[ChunkUse(None, 0, 0, 20_000)])]).damaged
    assert "decoded bytes" in damage[1]
    assert "the fault is in zstd" in damage[1]


def test_a_frame_that_does_not_decode_is_damage(store, loader):
    garbage = bytes(range(200))
    store.write("enc", garbage)
    frame = Frame(0, 0, 200, 20_000, 1, (checksum(garbage),), 7)
    (damage,) = loader.run([store.job(frame, "enc", uses=[ChunkUse(None, 0, 0, 20_000)])]).damaged
    assert "does not decode" in damage[1]


def test_missing_or_short_blobs_damage_only_their_frames(store, loader):
    sinks = [Sink(9000, direct=True) for _ in range(3)]
    jobs = []
    for number, name in enumerate(["whole", "gone", "cut"]):
        job, data = store.raw(9000, name=name)
        jobs.append(using(job, ChunkUse(sinks[number], 0, 0, 9000), label=(name,)))
        if name == "whole":
            expected = data
    store.backend.delete(["gone"])
    store.cut("cut", 8000)
    stats = loader.run(jobs)
    assert {name for name, _, _ in stats.damaged} == {"gone", "cut"}
    assert stats.missing_blob
    assert sinks[0].data == expected


def test_every_frame_arrives_with_minimal_scratch(store, workers):
    loader = Loader(store.backend, workers)
    loader.scratch_bytes = 8192
    jobs, sinks = [], []
    for number, length in enumerate([100, 5000, 8000, 4096, 100_000, 8192, 1, 20_000, 300]):
        kind = [store.raw, store.encoded][number % 2]
        job, data = kind(length + length % 2, name=f"b{number}")
        sink = Sink(len(data), direct=False)
        jobs.append(using(job, ChunkUse(sink, 0, 0, len(data))))
        sinks.append((sink, data))
    assert not loader.run(jobs).damaged
    assert all(sink.data == data for sink, data in sinks)
    assert loader._idle[0]._used == 0


def test_an_error_of_the_store_is_raised_and_the_next_run_works(store, workers):
    faulty = FaultyBackend(store.backend)
    loader = Loader(faulty, workers)
    jobs = [using(store.raw(9000, name=f"b{n}")[0], ChunkUse(None, 0, 0, 9000)) for n in range(4)]
    faulty.fail("read", StorageError("the store is on fire"))
    with pytest.raises(StorageError, match="on fire"):
        loader.run(jobs)
    assert not loader.run(jobs).damaged
    faulty.close()


class Failing(WrapperBackend):
    """Keeps no error, unlike one with an error to raise."""

    def read(self, requests, /):
        raise StorageError("no")

    def submit_read(self, requests, /):
        if not self.late:
            raise StorageError("no")
        return super().submit_read(requests)


@pytest.mark.parametrize("late", [False, True])
def test_after_an_error_no_cycle_of_references_keeps_targets_alive(store, workers, late):
    faulty = Failing(store.backend)
    faulty.late = late
    loader = Loader(faulty, workers)
    job, _ = store.raw(9000)
    sink = Sink(9000, direct=True)
    gone = weakref.ref(sink)
    gc.disable()
    try:
        with pytest.raises(StorageError):
            loader.run([using(job, ChunkUse(sink, 0, 0, 9000))])
        del sink
        deadline = time.monotonic() + 30
        while gone() is not None and time.monotonic() < deadline:
            time.sleep(0.01)  # the thread has to end
        assert gone() is None
    finally:
        gc.enable()


def test_an_error_returns_memory_only_when_nothing_is_in_flight(store, workers):
    faulty = FaultyBackend(store.backend)
    loader = Loader(faulty, workers)
    job, _ = store.raw(9000)
    sinks = [Sink(9000, direct=True) for _ in range(600)]  # several batches
    faulty.fail("read", StorageError("no"))
    go_on = threading.Event()
    blocked = faulty.block("read", go_on, nth=2)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(loader.run, [using(job, ChunkUse(s, 0, 0, 9000)) for s in sinks])
        assert blocked.reached.wait(30)
        early = wait([run], timeout=0.1).done
        go_on.set()
        assert not early
        assert isinstance(run.exception(30), StorageError)
    faulty.close()


def test_ctrl_c_is_raised_only_once_nothing_is_in_flight(store):
    workers = Workers(2, Timing(interrupt_s=60.0))
    faulty = FaultyBackend(store.backend)
    loader = Loader(faulty, workers)
    job, data = store.raw(9000)
    sink = Sink(9000, direct=True)
    go_on = threading.Event()
    blocked = faulty.block("read", go_on)
    main = threading.get_ident()

    def interrupt():
        assert blocked.reached.wait(30)
        for _ in range(3):
            time.sleep(0.05)
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.1)
        seen.append(bytes(sink.data))
        go_on.set()

    seen = []
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        loader.run([using(job, ChunkUse(sink, 0, 0, 9000))])
    assert seen  # the caller had to wait
    assert sink.data == data
    thread.join()
    assert not loader.run([using(job, ChunkUse(sink, 0, 0, 9000))]).damaged
    faulty.close()
    workers.close()


def test_ctrl_c_does_not_wait_forever_for_a_stuck_store(store):
    workers = Workers(2, Timing(interrupt_s=0.3))
    faulty = FaultyBackend(store.backend)
    loader = Loader(faulty, workers)
    job, data = store.raw(9000)
    sink = Sink(9000, direct=True)
    go_on = threading.Event()
    blocked = faulty.block("read", go_on)
    main = threading.get_ident()

    def interrupt():
        assert blocked.reached.wait(30)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        loader.run([using(job, ChunkUse(sink, 0, 0, 9000))])
    assert "left behind" in caught.value.__notes__[0]
    thread.join()
    go_on.set()
    assert not loader.run([using(job, ChunkUse(sink, 0, 0, 9000))]).damaged
    assert sink.data == data
    faulty.close()
    workers.close()


# -- long chains ----------------------------------------------------------------------------------

LENGTH, LINKS = 20_000, 5


@pytest.fixture
def by_links(store, workers):
    """A loader for which every chain is too large to read at once."""
    loader = Loader(store.backend, workers)
    loader.together_bytes = LENGTH
    return loader


@pytest.mark.parametrize("direct", [True, False])
def test_a_chain_read_link_by_link_decodes_to_the_same(direct, store, by_links, loader):
    job, data = store.chained(LENGTH, LINKS)
    (other, more), sinks = store.raw(9000), [Sink(LENGTH, direct=direct) for _ in range(2)]
    for sink, reader in zip(sinks, (by_links, loader), strict=True):
        beside, seen = Sink(9000, direct=True), []
        jobs = [
            using(other, ChunkUse(beside, 0, 0, 9000)),
            using(job, ChunkUse(sink, 0, 0, LENGTH)),
        ]
        stats = reader.run([*jobs, jobs[0]], progress=seen.append)
        assert not stats.damaged
        assert sink.data == data
        assert beside.data == more
        assert stats.bytes_read == sum(seen) == 2 * 9000 + sum(o.frame.length for o in job.links)


def test_links_damaged_in_different_tiers_still_give_a_chunk(store, workers):
    other = Store()
    job, data = store.chained(LENGTH, LINKS)
    other.chained(LENGTH, LINKS)
    store.corrupt("link-2", 5000)
    other.corrupt("link-3", 5000)
    store.backend.delete(["link-0"])

    class TwoTiers(WrapperBackend):
        @property
        def tiers(self):
            return (Tier("fast", store.backend), Tier("slow", other.backend))

    reported = []
    loader = Loader(
        TwoTiers(store.backend), workers, on_failover=lambda *what: reported.append(what)
    )
    loader.together_bytes = LENGTH
    sink = Sink(LENGTH, direct=True)
    assert not loader.run([using(job, ChunkUse(sink, 0, 0, LENGTH))]).damaged
    assert sink.data == data
    assert reported == [("link-0", "slow"), ("link-2", "slow")]


@measured
def test_a_long_chain_of_large_chunks_uses_memory_for_a_few(store, loader):
    length, links = 8 << 20, 40
    job, data = store.chained(length, links)
    sink = Sink(length, direct=False)
    assert peak_bytes(lambda: loader.run([using(job, ChunkUse(sink, 0, 0, length))])) < 9 * length
    assert sink.data == data

    stored = None
    for link in reversed(job.links):
        chain = (CodecRecord("delta", 1, {}),) if link.frame.chain else ()
        blob = BlobRecord(link.blob, link.frame.length)
        stored = StoredFrame(link.frame, blob, chain, BLOCK, stored)
    out = memoryview(bytearray(length))
    earlier = EarlierReader(default_registry())
    assert peak_bytes(lambda: earlier.read(store.backend, stored, job.context, out)) < 14 * length
    assert out == data


def test_a_batch_is_awaited_even_if_a_later_one_is_done(store, workers):
    faulty = FaultyBackend(store.backend)
    loader = Loader(faulty, workers)
    loader.scratch_bytes = 24 << 10  # the batches have one frame each
    (held, data), (free, other) = store.raw(8000, name="held"), store.raw(8000, name="free")
    go_on = threading.Event()
    faulty.block("read", go_on, match="held")
    sinks = [Sink(8000, direct=False), Announcing(8000, go_on)]
    jobs = [
        using(job, ChunkUse(sink, 0, 0, 8000))
        for job, sink in zip([held, free], sinks, strict=True)
    ]
    assert not loader.run(jobs).damaged
    assert [sink.data for sink in sinks] == [data, other]
    faulty.close()


class Announcing(Sink):
    """Sets an event when it has its bytes."""

    def __init__(self, nbytes, event):
        super().__init__(nbytes, direct=False)
        self._event = event

    def copy_in(self, start, data, /):
        super().copy_in(start, data)
        self._event.set()

"""Capture: copies, loans, the order of delivery, and the waits."""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import Empty

import numpy as np
import pytest
from tests.core.planned import planned

from penstock.core.abc import ByteSource, PendingCopy
from penstock.core.concurrency.workers import Workers
from penstock.core.errors import SaveAbortedError, TornSnapshotError
from penstock.core.pipeline.staging import Staging
from penstock.core.plan.save import Capture, plan_save
from penstock.core.save.capture import CaptureRun, LentChunks
from penstock.core.save.request import SaveTurn
from penstock.core.types import PAGE_BYTES

CHUNK = 4 * PAGE_BYTES
MIB = 1 << 20
WORKERS = Workers(3)
NOW, DEFERRED, FROZEN = Capture.NOW, Capture.DEFERRED, Capture.FROZEN


class Host(ByteSource):
    """Bytes in memory that is flat, or (`flat=False`) only copied from."""

    __slots__ = ("_array", "_version", "address", "device", "memory", "nbytes")

    def __init__(self, nbytes, *, seed=0, flat=True, version=0, phase=64):
        self._array = np.random.default_rng(seed).integers(1, 255, nbytes, np.uint8)
        self.move(phase=phase)
        self._version = version
        self.nbytes = nbytes
        self.device = "cpu"
        self.memory = None
        if not flat:
            self.address = None

    def move(self, *, phase):
        """Move the same bytes to other memory."""
        whole = np.zeros(self._array.nbytes + 2 * PAGE_BYTES, np.uint8)
        start = (phase - whole.ctypes.data) % PAGE_BYTES
        moved = whole[start : start + self._array.nbytes]
        moved[:] = self._array
        self._array, self.address = moved, moved.ctypes.data

    def view(self):
        return None if self.address is None else self._array.data

    def copy_out(self, start, out, /):
        out[:] = self._array[start : start + len(out)].data

    def version(self):
        return self._version

    def change(self):
        self._version += 1
        self._array[:] = 255

    def write(self, at, value):
        """Change a byte without counting it."""
        self._array[at] = value

    def bytes(self):
        return self._array.tobytes()


class Broken(Host):
    __slots__ = ()

    def copy_out(self, start, out, /):
        raise ZeroDivisionError


class Device(Host):
    """Copies are in flight until a thread waits for them."""

    __slots__ = ("copies",)

    def __init__(self, nbytes, *, seed=0):
        super().__init__(nbytes, seed=seed, flat=False)
        self.device = "fake:0"
        self.copies = []

    def copy_out(self, start, out, /):
        copy = Flight(self, start, out)
        self.copies.append(copy)
        return copy


class Flight(PendingCopy):
    def __init__(self, source, start, out):
        self._source, self._start, self._out = source, start, out
        self.landed = False
        self.ordered = False

    def wait(self):
        Host.copy_out(self._source, self._start, self._out)
        self.landed = True

    def order(self):
        self.ordered = True


class Refusing(Device):
    """Its copies cannot be awaited, as during the capture of a CUDA graph."""

    __slots__ = ()

    def copy_out(self, start, out, /):
        return RefusingFlight(self, start, out)


class RefusingFlight(Flight):
    def wait(self):
        raise ZeroDivisionError


class Run:
    """A capture of `(source, when)` pairs, and its delivered chunks."""

    def __init__(
        self,
        *pairs,
        staging_bytes=1 << 20,
        chain=0,
        straight_first=False,
        device=None,
        masters=None,
        staging=None,
    ):
        self.sources = [source for source, _ in pairs]
        for source in self.sources:
            source.device = device or source.device
        objects = [
            planned(source, path=("g", str(number)), chain=chain, capture=when)
            for number, (source, when) in enumerate(pairs)
        ]
        self.plan = plan_save(objects, chunk_bytes=CHUNK, slab_limit_bytes=1000, masters=masters)
        self.staging = staging or Staging(staging_bytes)
        self._captured = []
        self.writer_needed = threading.Event()
        self.capture = CaptureRun(
            self.plan,
            self.staging,
            need_writer=self.writer_needed.set,
            straight_first=straight_first,
            workers=WORKERS,
            turn=SaveTurn(),
        )

    @property
    def captured(self):
        """Delivered chunks in order, not returned yet."""
        with suppress(Empty):
            while True:
                self._captured.append(self.capture.handed_on.get(block=False))
        return self._captured

    def contents(self):
        """Bytes of each object, as delivered."""
        found = {}
        for captured in self.captured:
            for piece in self.plan.chunks[captured.index].pieces:
                length = piece.stop - piece.start
                part = bytes(captured.view[piece.at : piece.at + length])
                found[piece.item] = found.get(piece.item, b"") + part
        return [found.get(number, b"") for number in range(len(self.sources))]

    def give_back(self, first=0):
        """Return chunks as the pipeline does after writing."""
        taken, self.captured[first:] = self.captured[first:], []
        for captured in taken:
            self.capture.release(captured)


def in_background(action):
    """Run `action` on a thread; the second of the pair returns its error, None, or its result."""
    outcome = []

    def run():
        try:
            outcome.append(action())
        except Exception as error:  # noqa: BLE001 - passed to the test
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join():
        thread.join()
        return outcome[0]

    return thread, join


# -- copies ----------------------------------------------------------------------------------------


def test_chunks_are_delivered_in_plan_order_deferred_last():
    sources = [Host(40_000, seed=n, flat=n % 2 == 0) for n in range(4)]
    run = Run(*zip(sources, (DEFERRED, NOW, DEFERRED, FROZEN), strict=True))
    run.capture.take_now()
    assert run.contents()[0] == run.contents()[2] == b""
    assert run.contents()[1] == sources[1].bytes()
    assert run.capture.deferred_bytes == 80_000
    run.capture.take_deferred()
    assert [c.index for c in run.captured] == list(range(len(run.plan.chunks)))
    assert run.contents() == [s.bytes() for s in sources]
    assert run.capture.deferred_bytes == 80_000, "it is still asked for when the save is over"
    assert run.capture.straight_bytes == 0
    assert not run.writer_needed.is_set()


def test_staged_bytes_are_a_copy_at_the_planned_phase():
    source = Host(40_000, phase=320)
    run = Run((source, NOW))
    run.capture.take_now()
    before = source.bytes()
    source.change()
    assert run.contents() == [before]
    for captured in run.captured:
        address = np.frombuffer(captured.view, np.uint8).ctypes.data
        assert address % PAGE_BYTES == run.plan.chunks[captured.index].phase


def test_gaps_in_a_slab_are_zero_in_used_memory():
    sources = [Host(10, seed=1), Host(20, seed=2, flat=False)]
    run = Run(*((source, NOW) for source in sources))
    (chunk,) = run.plan.chunks
    assert chunk.slab
    old = run.staging.acquire(4 * PAGE_BYTES, 0)
    old.view[:] = b"\xff" * old.view.nbytes
    run.staging.release(old)
    run.capture.take_now()
    expected = bytearray(chunk.length)
    for piece, source in zip(chunk.pieces, sources, strict=True):
        expected[piece.at : piece.at + source.nbytes] = source.bytes()
    assert bytes(run.captured[0].view) == bytes(expected)


class Moved(Host):
    """Memory that other threads move unless it is held."""

    __slots__ = ("_lost", "_still")

    def __init__(self, nbytes, *, seed=0, lost=False):
        super().__init__(nbytes, seed=seed)
        self._lost, self._still = lost, False

    def locate(self):
        assert self._still, "the memory may move while it is looked for"
        return 0 if self._lost else self._array.ctypes.data

    @staticmethod
    def hold(sources, /):
        raise AssertionError(f"{len(sources)} small objects are held one by one")

    @staticmethod
    def still(sources, action, /):
        for source in sources:
            described = source.address
            source.move(phase=320)
            source.address = described
            source._still = True
        try:
            return action()
        finally:
            for source in sources:
                source._still = False


class Strided(Host):
    """Elements in another order than in memory."""

    __slots__ = ()

    def __init__(self, nbytes, *, seed=0):
        super().__init__(nbytes, seed=seed, flat=False)

    def copy_out(self, start, out, /):
        out[:] = self._array[::-1][start : start + len(out)].tobytes()

    def locate(self):
        return self._array.ctypes.data

    def bytes(self):
        return self._array[::-1].tobytes()


@pytest.mark.parametrize("length", [1, 64, 100])
def test_small_objects_are_copied_together_from_current_places(length):
    moved = [Moved(length, seed=n) for n in range(2500)]
    others = [Host(length, seed=n) if n % 2 else Strided(length, seed=n) for n in range(10)]
    odd = [Host(n, seed=n) for n in range(101, 110)]
    sources = [*odd[:4], *moved[:1200], *others, *moved[1200:], *odd[4:]]
    run = Run(*((source, NOW) for source in sources), staging_bytes=4 << 20)
    run.capture.take_now()
    assert run.contents() == [source.bytes() for source in sources]


def test_small_object_with_freed_memory_fails_the_save_by_name():
    sources = [Moved(64, seed=n, lost=n == 5) for n in range(9)]
    run = Run(*((source, NOW) for source in sources))
    with pytest.raises(TornSnapshotError, match=r"^g/5 changed"):
        run.capture.take_now()
    assert run.staging._used == 0


# -- straight --------------------------------------------------------------------------------------


def test_bytes_of_a_slab_are_counted_without_its_gaps():
    run = Run((Host(10), DEFERRED), (Host(20), DEFERRED))
    assert run.plan.chunks[0].slab
    assert run.capture.deferred_bytes == 30


def test_a_blocking_caller_lends_flat_memory_and_the_rest_is_copied():
    flat, other = Host(40_000, seed=1), Host(40_000, seed=2, flat=False)
    run = Run((flat, NOW), (other, NOW), straight_first=True)
    thread, join = in_background(run.capture.take_now)
    assert run.writer_needed.wait(30)
    while len(run.captured) < len(run.plan.chunks):
        assert thread.is_alive()
    assert run.contents() == [flat.bytes(), other.bytes()]
    assert [c.block is None for c in run.captured] == [True] * 3 + [False] * 3
    assert run.capture.straight_bytes == 40_000
    address = np.frombuffer(run.captured[0].view, np.uint8).ctypes.data
    assert address == flat.address, "a copy was made"
    assert thread.is_alive(), "lent memory is captured only when it is written"
    run.give_back()
    assert join() is None


def test_data_beyond_staging_is_lent_and_awaited():
    source = Host(10 * CHUNK)
    run = Run((source, NOW), staging_bytes=2 * CHUNK)
    thread, join = in_background(run.capture.take_now)
    while len(run.captured) < len(run.plan.chunks):
        assert thread.is_alive()
    kinds = [c.block is None for c in run.captured]
    assert kinds == sorted(kinds), "staging first"
    assert kinds.count(False) == 2
    assert run.contents() == [source.bytes()]
    run.give_back()
    assert join() is None


@pytest.mark.parametrize("when", [NOW, DEFERRED])
def test_training_waits_only_until_staging_has_room_for_the_rest(when):
    """Blocks still at the writer are not reused; the writer is busy, so none is lent."""
    source = Host(20 * CHUNK)
    run = Run((source, when), staging_bytes=6 * CHUNK)
    run.capture.fence(0)
    take = run.capture.take_now if when is NOW else run.capture.take_deferred
    thread, join = in_background(take)
    handed_on, left, got = run.capture.handed_on, len(run.plan.chunks), b""
    while left:
        while handed_on.qsize() < min(left, 6):
            assert thread.is_alive()
        captured = handed_on.get()
        assert captured.block
        expected = source.bytes()[len(got) : len(got) + captured.view.nbytes]
        assert bytes(captured.view) == expected, "its memory was used again before it was written"
        got += expected
        left -= 1
        run.capture.release(captured)
        if left == 6:
            assert join() is None
            source.change()
            break
    got += b"".join(bytes(captured.view) for captured in run.captured)
    assert len(got) == source.nbytes
    assert 255 not in got
    assert run.capture.straight_bytes == 0
    assert run.staging.was_short
    assert run.staging.allocated_bytes <= 6 * CHUNK


def test_nothing_is_lent_while_staging_is_being_touched():
    """A hung store would block training as long, and there will soon be room."""
    may_go_on, both, begun = threading.Event(), threading.Barrier(2), []

    def populate(address, length):
        begun.append(address)
        both.wait(60)
        if address != min(begun):
            assert may_go_on.wait(60)
        return True

    staging = Staging(8 * MIB, populate=populate)
    staging.expect(8 * MIB)
    staging.touch()
    source = Host(8 * MIB - CHUNK)
    run = Run((source, NOW), staging=staging)
    thread, join = in_background(run.capture.take_now)
    while len(run.captured) < 4 * MIB // CHUNK:
        assert thread.is_alive()
    assert not run.writer_needed.is_set()
    may_go_on.set()
    assert join() is None
    assert all(captured.block for captured in run.captured)
    assert run.contents() == [source.bytes()]
    assert not thread.is_alive()


def test_nothing_is_lent_if_touching_ends_right_after_staging_was_refused():
    may_go_on = threading.Event()

    class TouchedTooLate(Staging):
        def acquire(self, length, phase):
            block = super().acquire(length, phase)
            while block is None and self.is_being_touched:
                may_go_on.set()
            return block

    staging = TouchedTooLate(8 * MIB, populate=lambda *_: may_go_on.wait(60))
    staging.expect(8 * MIB)
    staging.touch()
    run = Run((Host(8 * MIB - CHUNK), NOW), staging=staging)
    thread, join = in_background(run.capture.take_now)
    while thread.is_alive() and not run.writer_needed.is_set():
        thread.join(0.1)
    run.give_back()
    assert join() is None
    assert not run.writer_needed.is_set()
    assert run.capture.straight_bytes == 0


@pytest.mark.parametrize(
    "source",
    [Host(6 * CHUNK, flat=False), Host(6 * CHUNK, version=None)],
    ids=["not flat", "without a version"],
)
def test_unlendable_data_waits_for_staging(source):
    """Hashed and written separately: a change in between without a version bump would be damage."""
    run = Run((source, NOW), staging_bytes=2 * CHUNK)
    expected, got = source.bytes(), b""
    thread, join = in_background(run.capture.take_now)
    run.writer_needed.wait(60)  # or chunks may return before staging is ever full
    while thread.is_alive() or run.captured:
        if run.captured:
            assert run.captured[0].block
            got += bytes(run.captured[0].view)
            run.staging.release(run.captured.pop(0).block)
    assert join() is None
    assert got == expected
    assert run.writer_needed.is_set()


def test_raw_bytes_at_an_unplanned_phase_are_not_lent():
    source = Host(40_000, phase=64)
    run = Run((source, NOW), straight_first=True)
    source.move(phase=128)
    run.capture.take_now()
    assert all(c.block for c in run.captured)
    assert run.contents() == [source.bytes()]


def test_encoded_bytes_are_lent_at_any_phase():
    source = Host(40_000, phase=77)
    run = Run((source, NOW), straight_first=True, chain=1)
    thread, join = in_background(run.capture.take_now)
    while len(run.captured) < len(run.plan.chunks):
        assert thread.is_alive()
    assert not any(c.block for c in run.captured)
    assert run.contents() == [source.bytes()]
    run.give_back()
    assert join() is None


# -- the fence -------------------------------------------------------------------------------------


def test_deferred_memory_is_lent_only_after_the_fence():
    source = Host(10 * CHUNK)
    run = Run((source, DEFERRED), staging_bytes=2 * CHUNK)
    run.capture.take_now()
    _, join_capture = in_background(run.capture.take_deferred)
    assert run.writer_needed.wait(30)  # staging is full
    assert not run.capture.fence(0)
    training, join_fence = in_background(lambda: run.capture.fence(None))
    while len(run.captured) < len(run.plan.chunks):
        assert training.is_alive()
    assert [c.block is None for c in run.captured].count(False) == 2
    assert run.contents() == [source.bytes()]
    assert training.is_alive(), "lent memory is not written yet"
    run.give_back()
    assert join_fence() is True
    assert join_capture() is None
    source.change()
    run.capture.check()


def test_before_the_fence_deferred_memory_waits_for_staging():
    source = Host(6 * CHUNK)
    run = Run((source, DEFERRED), staging_bytes=2 * CHUNK)
    run.capture.take_now()
    thread, join = in_background(run.capture.take_deferred)
    got = b""
    while thread.is_alive() or run.captured:
        if run.captured:
            assert run.captured[0].block
            got += bytes(run.captured[0].view)
            run.staging.release(run.captured.pop(0).block)
    assert join() is None
    assert got == source.bytes()


def test_the_fence_of_a_capture_without_deferred_parts_is_open():
    run = Run((Host(40_000), NOW))
    assert run.capture.fence(0)


# -- devices ---------------------------------------------------------------------------------------


def test_device_copies_start_before_save_returns_and_are_delivered_on_landing():
    device = Device(3 * CHUNK)
    run = Run((Host(40_000), NOW), (device, DEFERRED))
    run.capture.take_now()
    assert len(device.copies) == len(run.plan.chunks) - 3
    assert not any(copy.landed for copy in device.copies)
    assert run.capture.deferred_bytes == 3 * CHUNK, "they are under way, not captured"
    run.capture.take_deferred()
    assert all(copy.landed for copy in device.copies)
    assert [c.index for c in run.captured] == list(range(len(run.plan.chunks)))
    assert run.contents()[1] == device.bytes()


def test_the_fence_orders_device_copies_without_waiting():
    device = Device(3 * CHUNK)
    run = Run((device, DEFERRED))
    run.capture.take_now()
    run.capture._all_issued.open()
    assert run.capture.fence(0)
    assert all(copy.ordered for copy in device.copies)
    assert not any(copy.landed for copy in device.copies)


def test_waiting_for_staging_delivers_device_copies_first():
    """They hold staging memory that only the writer frees."""
    device = Device(6 * CHUNK)
    run = Run((device, NOW), staging_bytes=2 * CHUNK)
    thread, join = in_background(run.capture.take_now)
    got = b""
    while thread.is_alive() or run.captured:
        if run.captured:
            got += bytes(run.captured[0].view)
            run.staging.release(run.captured.pop(0).block)
    assert join() is None
    assert got == device.bytes()


def test_order_is_kept_for_host_chunks_after_device_chunks():
    pairs = [(Device(40_000), NOW), (Host(40_000, seed=1), NOW), (Device(40_000, seed=2), NOW)]
    run = Run(*pairs)
    run.capture.take_now()
    assert [c.index for c in run.captured] == list(range(len(run.plan.chunks)))
    assert run.contents() == [source.bytes() for source, _ in pairs]


# -- versions --------------------------------------------------------------------------------------


def test_a_change_after_the_description_is_found():
    source = Host(40_000)
    run = Run((source, NOW))
    source.change()
    with pytest.raises(TornSnapshotError, match=r"^g/0 changed while save\(\) captured it"):
        run.capture.take_now()


def test_a_change_before_the_fence_is_found_by_the_first_check():
    for look in ("take_deferred", "fence"):
        source = Host(40_000)
        run = Run((source, DEFERRED))
        run.capture.take_now()
        if look == "fence":
            run.capture.take_deferred()
        source.change()
        with pytest.raises(TornSnapshotError, match=r"^g/0 changed before the fence"):
            run.capture.fence(None) if look == "fence" else run.capture.take_deferred()
        with pytest.raises(TornSnapshotError):
            run.capture.check()


def test_a_message_lists_some_of_many():
    sources = [Host(2000) for _ in range(11)]
    run = Run(*((source, NOW) for source in sources))
    for source in sources:
        source.change()
    with pytest.raises(TornSnapshotError, match=r"g/0, g/1, .*g/7 and 3 more changed"):
        run.capture.take_now()


def test_objects_without_a_version_are_not_compared():
    source = Host(40_000, version=None)
    run = Run((source, NOW))
    run.capture.take_now()
    assert run.contents() == [source.bytes()]


# -- samples ---------------------------------------------------------------------------------------

SIZES = [1, 2, 3, 7, 8, 63, 64, 65, 100, 130, 999, 40_000]


@pytest.mark.parametrize("when", ["before it is copied", "before the fence", "before the commit"])
def test_change_without_a_version_bump_is_found_at_both_ends(when):
    for nbytes in SIZES:
        for at in (0, nbytes - 1):
            sources = [Host(nbytes, seed=n) for n in range(3)]
            run = Run(*((source, DEFERRED) for source in sources))
            run.capture.take_now()
            if when == "before it is copied":
                sources[1].write(at, 0)
                look = run.capture.take_deferred
            else:
                run.capture.take_deferred()
                sources[1].write(at, 0)
                look = run.capture.check if when == "before the commit" else run.capture.fence
            with pytest.raises(TornSnapshotError, match=r"^g/1 changed before the fence"):
                look(None) if when == "before the fence" else look()


def test_change_between_samples_is_found_if_counted():
    source = Host(40_000)
    run = Run((source, DEFERRED))
    run.capture.take_now()
    run.capture.take_deferred()
    source._version += 1
    with pytest.raises(TornSnapshotError):
        run.capture.check()


def test_samples_stay_within_the_object():
    for nbytes in SIZES:
        whole = Host(nbytes + 128)
        inner = Host(nbytes)
        inner._array = whole._array[64:-64]
        inner.address = whole.address + 64
        run = Run((inner, DEFERRED))
        run.capture.take_now()
        whole.write(slice(0, 64), 0)
        whole.write(slice(-64, None), 0)
        run.capture.take_deferred()
        assert run.capture.fence(None)
        assert run.contents() == [inner.bytes()]


def test_after_the_fence_memory_may_change_in_any_way():
    source = Host(40_000)
    run = Run((source, DEFERRED))
    run.capture.take_now()
    run.capture.take_deferred()
    assert run.capture.fence(None)
    source.write(0, 0)
    run.capture.check()


def test_fence_for_foreign_memory_only_waits():
    """Another trainer's step: an operation on this one's tensors may still be running."""
    source = Host(40_000)
    run = Run((source, DEFERRED))
    run.capture.take_now()
    run.capture.take_deferred()
    assert run.capture.fence(None, passes=False)
    source.change()
    with pytest.raises(TornSnapshotError):
        run.capture.check()


# -- giving up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SaveAbortedError("given up"), ZeroDivisionError("disk")])
@pytest.mark.parametrize("waits_for", ["staging", "writing"])
def test_cancel_ends_every_wait(error, waits_for):
    if waits_for == "staging":
        run = Run((Host(6 * CHUNK, flat=False), NOW), staging_bytes=2 * CHUNK)
    else:
        run = Run((Host(6 * CHUNK), NOW), straight_first=True)
    _, join = in_background(run.capture.take_now)
    assert run.writer_needed.wait(30)
    run.capture.cancel(error)
    raised = join()
    assert isinstance(raised, SaveAbortedError)
    assert raised is error or raised.__cause__ is error
    run.give_back()
    run.capture.close()
    assert run.staging._used == 0


def test_cancel_opens_the_fence():
    run = Run((Host(6 * CHUNK), DEFERRED))
    run.capture.take_now()
    _, join = in_background(lambda: run.capture.fence(None))
    run.capture.cancel(SaveAbortedError("given up"))
    assert join() is True


def test_close_returns_memory_of_device_copies_once_they_land():
    device = Device(3 * CHUNK)
    run = Run((device, DEFERRED))
    run.capture.take_now()
    assert run.staging._used
    run.capture.cancel(SaveAbortedError("given up"))
    run.capture.close()
    assert all(copy.landed for copy in device.copies)
    assert run.staging._used == 0


@pytest.mark.parametrize("when", [NOW, DEFERRED])
def test_a_failed_source_leaves_no_staging(when):
    run = Run((Host(40_000), NOW), (Broken(40_000, flat=False), when))
    if when is DEFERRED:
        run.capture.take_now()
    with pytest.raises(ZeroDivisionError):
        run.capture.take_now() if when is NOW else run.capture.take_deferred()
    run.give_back()
    run.capture.close()
    assert run.staging._used == 0


class Gone(Host):
    """Its memory is freed before it is held."""

    __slots__ = ()

    @staticmethod
    def hold(sources, /):
        sources[0].address = 0
        return lambda: None


@pytest.mark.parametrize("when", [NOW, DEFERRED])
def test_freed_memory_that_training_awaits_leaves_no_staging(when):
    run = Run((Gone(5 * CHUNK), when))
    run.capture.fence(0)
    if when is DEFERRED:
        run.capture.take_now()
    with pytest.raises(TornSnapshotError, match="g/0 changed"):
        run.capture.take_now() if when is NOW else run.capture.take_deferred()
    run.capture.close()
    assert run.staging._used == 0


class Gated(Host):
    """Memory whose hold waits."""

    __slots__ = ("kept", "may_go_on", "reached")

    def keep(self):
        self.kept = True

    @staticmethod
    def hold(sources, /):
        sources[0].reached.set()
        assert sources[0].may_go_on.wait(60)
        return lambda: None


def test_the_fence_waits_for_concurrent_copies():
    source = Gated(5 * CHUNK)
    source.reached, source.may_go_on, source.kept = threading.Event(), threading.Event(), False
    run = Run((source, DEFERRED))
    run.capture.take_now()
    assert not run.capture.fence(0)
    _, join = in_background(run.capture.take_deferred)
    assert source.reached.wait(60)
    assert not run.capture.fence(0)
    source.may_go_on.set()
    assert source.kept, "an offloader could free it"
    assert run.capture.fence(None)
    expected = source.bytes()
    source.change()
    assert join() is None
    assert run.contents() == [expected]
    assert [captured.index for captured in run.captured] == list(range(len(run.plan.chunks)))


class Lent(Host):
    """Counts the holds on it; its memory cannot be read once it is held."""

    __slots__ = ("held",)

    def view(self):
        if getattr(self, "held", 0):
            raise ZeroDivisionError
        return super().view()

    @staticmethod
    def hold(sources, /):
        (source,) = sources
        source.held = 1

        def let_go():
            source.held -= 1

        return let_go


class Settling(Host):
    """Has its bytes at its address only while it is held."""

    __slots__ = ("elsewhere",)

    def __init__(self, nbytes, *, seed):
        super().__init__(nbytes, seed=seed)
        self.elsewhere = self.bytes()
        self.write(slice(None), 255)

    @staticmethod
    def hold(sources, /):
        for source in sources:
            source.write(slice(None), np.frombuffer(source.elsewhere, np.uint8))
        return lambda: None


def test_small_memory_valid_only_in_a_hold_is_held():
    sources = [Settling(100, seed=seed) for seed in range(6)]
    run = Run(*((source, NOW) for source in sources))
    assert len(run.plan.chunks) == 1
    run.capture.take_now()
    assert run.contents() == [source.elsewhere for source in sources]
    run.give_back()


def test_memory_that_proves_unlendable_is_released():
    source = Lent(40_000)
    run = Run((source, NOW), straight_first=True)
    with pytest.raises(ZeroDivisionError):
        run.capture.take_now()
    assert source.held == 0


def test_memory_of_a_slab_is_returned_only_after_its_copies_land():
    device = Device(100)
    run = Run((device, NOW), (Broken(100, flat=False), NOW), device="fake:0")
    assert len(run.plan.chunks) == 1
    with pytest.raises(ZeroDivisionError):
        run.capture.take_now()
    assert device.copies[0].landed
    assert run.staging._used == 0


# -- derived objects -------------------------------------------------------------------------------


class Twin(Host):
    """Derived from a master with the same bytes."""

    __slots__ = ()

    def is_rounded(self, other, /):
        return self.bytes() == other.bytes()


class Swapped(Twin):
    """Has other bytes during the comparison, like its master."""

    __slots__ = ("master",)

    def is_rounded(self, other, /):
        for source in (self, other):
            source.write(slice(None), 99)
        return super().is_rounded(other)

    @staticmethod
    def hold(sources, /):
        before = [(source, source.bytes()) for source in sources]

        def restore():
            for source, data in before:
                source.write(slice(None), np.frombuffer(data, np.uint8))

        return restore


class OfDevice(Device):
    """Counts its comparisons."""

    __slots__ = ("compared",)

    def is_rounded(self, other, /):
        self.compared = getattr(self, "compared", 0) + 1
        return True


@pytest.mark.parametrize("straight_first", [False, True])
def test_a_derived_object_is_compared_with_its_masters_and_not_captured(straight_first):
    sources = [Twin(40_000, seed=1), Host(40_000, seed=0), Host(40_000, seed=1)]
    run = Run(*((s, NOW) for s in sources), masters={0: (1, 2)}, straight_first=straight_first)
    thread, join = in_background(run.capture.take_now)
    while thread.is_alive():
        run.give_back()
        thread.join(0.01)
    assert join() is None
    assert run.capture.derived == {0: 2}
    assert run.plan.chunks[-1].pieces[0].item == 0


def test_each_chunk_of_a_derived_object_has_no_bytes():
    run = Run((Twin(40_000), NOW), (Host(40_000), NOW), masters={0: (1,)}, staging_bytes=1 << 20)
    run.capture.take_now()
    assert [c.index for c in run.captured] == list(range(len(run.plan.chunks)))
    without = [c for c in run.captured if not c.view.nbytes]
    assert {run.plan.chunks[c.index].pieces[0].item for c in without} == {0}
    assert len(without) * 2 == len(run.captured)
    assert all(c.block is None for c in without)
    run.give_back()
    assert run.staging._used == 0


def test_an_object_unequal_to_its_rounded_masters_is_captured():
    run = Run((Twin(40_000, seed=1), NOW), (Host(40_000), NOW), masters={0: (1,)})
    run.capture.take_now()
    assert not run.capture.derived
    assert run.contents() == [source.bytes() for source in run.sources]


def test_a_derived_object_changing_during_capture_is_found():
    run = Run((Twin(40_000), NOW), (Host(40_000), NOW), masters={0: (1,)})
    for source in run.sources:
        source.change()
    with pytest.raises(TornSnapshotError, match="g/0, g/1"):
        run.capture.take_now()


def test_a_change_of_both_undone_right_after_the_comparison_is_found():
    run = Run((Swapped(40_000), DEFERRED), (Host(40_000), DEFERRED), masters={0: (1,)})
    run.capture.take_now()
    with pytest.raises(TornSnapshotError, match="g/0, g/1"):
        run.capture.take_deferred()


def test_no_comparison_on_a_device_delays_save():
    sources = [OfDevice(40_000), Device(40_000)]
    run = Run(*((s, DEFERRED) for s in sources), masters={0: (1,)})
    run.capture.take_now()
    assert not hasattr(sources[0], "compared")
    assert sources[1].copies
    run.capture.take_deferred()
    assert sources[0].compared == 1
    assert run.capture.derived == {0: 1}


def test_copy_that_cannot_be_awaited_keeps_only_its_own_memory(caplog):
    refusing, other = Refusing(CHUNK), Device(CHUNK, seed=1)
    run = Run((refusing, NOW), (other, NOW), device="fake:0")
    with pytest.raises(ZeroDivisionError):
        run.capture.take_now()
    run.capture.close()
    assert other.copies[0].landed
    assert run.staging._used == CHUNK + PAGE_BYTES  # chunks begin within a page
    assert "so its memory stays in use: ZeroDivisionError()" in caplog.text


def test_a_wait_for_lent_chunks_ends_with_the_last_of_them():
    lent = LentChunks()
    assert lent.wait(None)
    lent.lend()
    lent.lend()
    lent.give_back()
    assert not lent.wait(0)
    lent.give_back()
    assert lent.wait(0)


def test_a_wait_for_lent_chunks_ends_if_the_save_fails():
    lent = LentChunks()
    lent.lend()
    _, join = in_background(lambda: lent.wait(None))
    lent.cancel()
    assert join()
    assert lent.wait(None)

"""Capture: what is copied, what is lent, in which order it is handed on, and who waits for whom."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from penstock.core.abc import ByteSource, PendingCopy
from penstock.core.capture import CaptureRun, Subject
from penstock.core.errors import SaveAbortedError, TornSnapshotError
from penstock.core.plan import Capture, PlanItem, plan_save
from penstock.core.staging import Staging
from penstock.core.types import PAGE_BYTES, Role

CHUNK = 4 * PAGE_BYTES
NOW, DEFERRED, FROZEN = Capture.NOW, Capture.DEFERRED, Capture.FROZEN


class Host(ByteSource):
    """Bytes in memory that is flat, or (`flat=False`) only copied from."""

    __slots__ = ("_array", "_version", "address", "device", "memory", "nbytes")

    def __init__(self, nbytes, *, seed=0, flat=True, version=0, phase=64):
        whole = np.zeros(nbytes + 2 * PAGE_BYTES, np.uint8)
        start = (phase - whole.ctypes.data) % PAGE_BYTES
        self._array = whole[start : start + nbytes]
        self._array[:] = np.random.default_rng(seed).integers(1, 255, nbytes, np.uint8)
        self._version = version
        self.nbytes = nbytes
        self.device = "cpu"
        self.address = self._array.ctypes.data if flat else None
        self.memory = None

    def view(self):
        return None if self.address is None else self._array.data

    def copy_out(self, start, out, /):
        out[:] = self._array[start : start + len(out)].data

    def version(self):
        return self._version

    def change(self):
        self._version += 1
        self._array[:] = 255

    def bytes(self):
        return self._array.tobytes()


class Broken(Host):
    __slots__ = ()

    def copy_out(self, start, out, /):
        raise ZeroDivisionError


class Device(Host):
    """Copies are under way until somebody waits for them."""

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


class Run:
    """A capture of `(source, when)` pairs, and what it handed on."""

    def __init__(
        self, *pairs, staging_bytes=1 << 20, chain=0, straight_first=False, phase=None, device=None
    ):
        self.sources = [source for source, _ in pairs]
        items = [
            PlanItem(
                nbytes=source.nbytes,
                itemsize=1,
                phase=(source.address or 64) % PAGE_BYTES if phase is None else phase,
                group="g",
                role=Role.OTHER,
                chain=chain,
                device=device or source.device,
                capture=when,
            )
            for source, when in pairs
        ]
        self.plan = plan_save(items, chunk_bytes=CHUNK, slab_limit_bytes=1000)
        self.staging = Staging(staging_bytes)
        self.captured = []
        self.writer_needed = threading.Event()
        self.capture = CaptureRun(
            self.plan,
            [Subject((f"g{n}",), s, s.version()) for n, s in enumerate(self.sources)],
            self.staging,
            deliver=self.captured.append,
            need_writer=self.writer_needed.set,
            straight_first=straight_first,
        )

    def contents(self):
        """Bytes of each object, as they came."""
        found = {}
        for captured in self.captured:
            for piece in self.plan.chunks[captured.index].pieces:
                length = piece.stop - piece.start
                part = bytes(captured.view[piece.at : piece.at + length])
                found[piece.item] = found.get(piece.item, b"") + part
        return [found.get(number, b"") for number in range(len(self.sources))]

    def give_back(self, first=0):
        """What the pipeline does with chunks that it has written."""
        taken, self.captured[first:] = self.captured[first:], []
        for captured in taken:
            if captured.block is not None:
                self.staging.release(captured.block)
            else:
                self.capture.straight_done(captured)


def in_background(action):
    """Run `action` on a thread; the second of the pair gives its error, None, or its result."""
    outcome = []

    def run():
        try:
            outcome.append(action())
        except Exception as error:  # noqa: BLE001 - handed to the test
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join():
        thread.join()
        return outcome[0]

    return thread, join


# -- copies ----------------------------------------------------------------------------------------


def test_chunks_are_handed_on_in_plan_order_what_is_deferred_last():
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


def test_staged_bytes_are_a_copy_and_lie_at_the_planned_phase():
    source = Host(40_000, phase=320)
    run = Run((source, NOW))
    run.capture.take_now()
    before = source.bytes()
    source.change()
    assert run.contents() == [before]
    for captured in run.captured:
        address = np.frombuffer(captured.view, np.uint8).ctypes.data
        assert address % PAGE_BYTES == run.plan.chunks[captured.index].phase


def test_gaps_in_a_slab_are_zero_whatever_the_memory_held_before():
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


# -- straight --------------------------------------------------------------------------------------


def test_a_caller_that_waits_anyway_has_flat_memory_lent_and_the_rest_copied():
    flat, other = Host(40_000, seed=1), Host(40_000, seed=2, flat=False)
    run = Run((flat, NOW), (other, NOW), straight_first=True)
    thread, join = in_background(run.capture.take_now)
    assert run.writer_needed.wait(30)
    while len(run.captured) < len(run.plan.chunks):
        assert thread.is_alive()
    assert run.contents() == [flat.bytes(), other.bytes()]
    assert [c.straight for c in run.captured] == [True] * 3 + [False] * 3
    assert run.capture.straight_bytes == 40_000
    address = np.frombuffer(run.captured[0].view, np.uint8).ctypes.data
    assert address == flat.address, "a copy was made"
    assert thread.is_alive(), "lent memory is captured only when it is written"
    run.give_back()
    assert join() is None


def test_what_has_no_room_in_staging_is_lent_and_waited_for():
    source = Host(10 * CHUNK)
    run = Run((source, NOW), staging_bytes=2 * CHUNK)
    thread, join = in_background(run.capture.take_now)
    while len(run.captured) < len(run.plan.chunks):
        assert thread.is_alive()
    kinds = [c.straight for c in run.captured]
    assert kinds == sorted(kinds), "staging first"
    assert kinds.count(False) == 2
    assert run.contents() == [source.bytes()]
    run.give_back()
    assert join() is None


@pytest.mark.parametrize(
    "source",
    [Host(6 * CHUNK, flat=False), Host(6 * CHUNK, version=None)],
    ids=["not flat", "without a version"],
)
def test_what_cannot_be_lent_waits_for_staging(source):
    """Hashed and written apart: a change in between that no version shows would be damage."""
    run = Run((source, NOW), staging_bytes=2 * CHUNK)
    expected, got = source.bytes(), b""
    thread, join = in_background(run.capture.take_now)
    while thread.is_alive() or run.captured:
        if run.captured:
            assert not run.captured[0].straight
            got += bytes(run.captured[0].view)
            run.staging.release(run.captured.pop(0).block)
    assert join() is None
    assert got == expected
    assert run.writer_needed.is_set()


def test_raw_bytes_at_another_phase_than_planned_are_not_lent():
    source = Host(40_000, phase=64)
    run = Run((source, NOW), straight_first=True, phase=128)
    run.capture.take_now()
    assert not any(c.straight for c in run.captured)
    assert run.contents() == [source.bytes()]


def test_encoded_bytes_are_lent_at_any_phase():
    source = Host(40_000, phase=77)
    run = Run((source, NOW), straight_first=True, chain=1)
    thread, join = in_background(run.capture.take_now)
    while len(run.captured) < len(run.plan.chunks):
        assert thread.is_alive()
    assert all(c.straight for c in run.captured)
    assert run.contents() == [source.bytes()]
    run.give_back()
    assert join() is None


# -- the fence -------------------------------------------------------------------------------------


def test_deferred_memory_is_lent_only_behind_the_fence():
    source = Host(10 * CHUNK)
    run = Run((source, DEFERRED), staging_bytes=2 * CHUNK)
    run.capture.take_now()
    _, join_capture = in_background(run.capture.take_deferred)
    assert run.writer_needed.wait(30)  # staging is full
    assert not run.capture.fence(0)
    training, join_fence = in_background(lambda: run.capture.fence(None))
    while len(run.captured) < len(run.plan.chunks):
        assert training.is_alive()
    assert [c.straight for c in run.captured].count(False) == 2
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
            assert not run.captured[0].straight
            got += bytes(run.captured[0].view)
            run.staging.release(run.captured.pop(0).block)
    assert join() is None
    assert got == source.bytes()


def test_the_fence_of_a_capture_without_deferred_parts_is_open():
    run = Run((Host(40_000), NOW))
    assert run.capture.fence(0)


# -- devices ---------------------------------------------------------------------------------------


def test_device_copies_start_before_save_returns_and_are_handed_on_when_they_have_landed():
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


def test_the_fence_orders_device_copies_instead_of_waiting_for_them():
    device = Device(3 * CHUNK)
    run = Run((device, DEFERRED))
    run.capture.take_now()
    run.capture._all_issued.open()
    assert run.capture.fence(0)
    assert all(copy.ordered for copy in device.copies)
    assert not any(copy.landed for copy in device.copies)


def test_who_waits_for_staging_hands_on_device_copies_first():
    """They hold staging that only the writer frees."""
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


def test_order_is_kept_where_host_chunks_follow_device_chunks():
    pairs = [(Device(40_000), NOW), (Host(40_000, seed=1), NOW), (Device(40_000, seed=2), NOW)]
    run = Run(*pairs)
    run.capture.take_now()
    assert [c.index for c in run.captured] == list(range(len(run.plan.chunks)))
    assert run.contents() == [source.bytes() for source, _ in pairs]


# -- versions --------------------------------------------------------------------------------------


def test_a_change_since_it_was_described_is_found():
    source = Host(40_000)
    run = Run((source, NOW))
    source.change()
    with pytest.raises(TornSnapshotError, match=r"^g0 changed while save\(\) captured it"):
        run.capture.take_now()


def test_a_change_before_the_fence_is_found_by_whoever_looks_first():
    for look in ("take_deferred", "fence"):
        source = Host(40_000)
        run = Run((source, DEFERRED))
        run.capture.take_now()
        if look == "fence":
            run.capture.take_deferred()
        source.change()
        with pytest.raises(TornSnapshotError, match=r"^g0 changed before the fence"):
            run.capture.fence(None) if look == "fence" else run.capture.take_deferred()
        with pytest.raises(TornSnapshotError):
            run.capture.check()


def test_a_message_lists_some_of_many():
    sources = [Host(2000) for _ in range(11)]
    run = Run(*((source, NOW) for source in sources))
    for source in sources:
        source.change()
    with pytest.raises(TornSnapshotError, match=r"g0, g1, .*g7 and 3 more changed"):
        run.capture.take_now()


def test_objects_without_a_version_are_not_compared():
    source = Host(40_000, version=None)
    run = Run((source, NOW))
    run.capture.take_now()
    assert run.contents() == [source.bytes()]


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
    assert run.staging.used_bytes == 0


def test_cancel_opens_the_fence():
    run = Run((Host(6 * CHUNK), DEFERRED))
    run.capture.take_now()
    _, join = in_background(lambda: run.capture.fence(None))
    run.capture.cancel(SaveAbortedError("given up"))
    assert join() is True


def test_close_gives_back_what_device_copies_hold_once_they_have_landed():
    device = Device(3 * CHUNK)
    run = Run((device, DEFERRED))
    run.capture.take_now()
    assert run.staging.used_bytes
    run.capture.cancel(SaveAbortedError("given up"))
    run.capture.close()
    assert all(copy.landed for copy in device.copies)
    assert run.staging.used_bytes == 0


@pytest.mark.parametrize("when", [NOW, DEFERRED])
def test_a_source_that_fails_leaves_no_staging_behind(when):
    run = Run((Host(40_000), NOW), (Broken(40_000, flat=False), when))
    if when is DEFERRED:
        run.capture.take_now()
    with pytest.raises(ZeroDivisionError):
        run.capture.take_now() if when is NOW else run.capture.take_deferred()
    run.give_back()
    run.capture.close()
    assert run.staging.used_bytes == 0


def test_memory_of_a_slab_goes_back_only_when_copies_under_way_have_landed():
    device = Device(100)
    run = Run((device, NOW), (Broken(100, flat=False), NOW), device="fake:0")
    assert len(run.plan.chunks) == 1
    with pytest.raises(ZeroDivisionError):
        run.capture.take_now()
    assert device.copies[0].landed
    assert run.staging.used_bytes == 0

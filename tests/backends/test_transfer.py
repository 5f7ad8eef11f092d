"""Cutting requests into direct transfers: whole pages, right bytes, no needless copy."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import examples

from penstock.backends.local.kernel import address
from penstock.backends.local.transfer import (
    MAX_VECTOR,
    SLOT_BYTES,
    Bounce,
    Flight,
    OpenBlob,
    Slot,
    TransferBatch,
    cut_read,
    cut_writes,
)
from penstock.core.types import PAGE_BYTES, align_up
from penstock.testing.expectations import at_phase

few = settings(max_examples=examples(15))  # with megabytes each
DIRECT = OpenBlob("blob", -1, direct=True)
PLAIN = OpenBlob("blob", -1, direct=False)

lengths = st.one_of(
    st.integers(0, 9000), st.integers(16 << 10, 300_000), st.sampled_from([4096, 8192, 1 << 20])
)
phases = st.sampled_from([0, 1, 64, 4095])


@st.composite
def plans(draw):
    """Requests on separate pages, with buffers at odd addresses; and the resulting file."""
    rng = random.Random(draw(st.integers(0, 99)))
    requests, end = [], 0
    for _ in range(draw(st.integers(1, 5))):
        offset = align_up(end, PAGE_BYTES) + draw(st.sampled_from([0, 0, 4096, 12288]))
        offset += draw(phases)
        parts = draw(st.lists(st.tuples(lengths, phases), min_size=1, max_size=5))
        buffers = tuple(at_phase(rng.randbytes(n), phase) for n, phase in parts)
        end = offset + sum(n for n, _ in parts)
        requests.append((offset, buffers))
    return requests


def expected_file(requests):
    content = bytearray()
    for offset, buffers in requests:
        content.extend(bytes(max(0, offset - len(content))))
        for buffer in buffers:
            content += buffer
    return content


@few
@given(plans())
def test_direct_writes_cover_whole_pages_with_the_right_bytes(requests):
    content = expected_file(requests)
    got = bytearray(align_up(len(content), PAGE_BYTES))
    position = 0
    for transfer in cut_writes(TransferBatch("write", "/"), DIRECT, requests):
        views = Flight(transfer, Slot()).views()
        assert transfer.offset % PAGE_BYTES == 0
        assert transfer.offset >= position, "transfers overlap or go back"
        assert len(views) <= MAX_VECTOR
        assert transfer.slot_bytes <= SLOT_BYTES
        position = transfer.offset
        for view in views:
            assert view.nbytes % PAGE_BYTES == 0
            assert address(view) % PAGE_BYTES == 0
            got[position : position + view.nbytes] = view
            position += view.nbytes
        assert position == transfer.offset + transfer.needed
    assert got.rstrip(b"\0") == content.rstrip(b"\0")


@few
@given(plans())
def test_buffered_writes_move_exactly_the_requests(requests):
    got = bytearray(len(expected_file(requests)))
    total = 0
    for transfer in cut_writes(TransferBatch("write", "/"), PLAIN, requests):
        at = transfer.offset
        for view in Flight(transfer, Slot()).views():
            got[at : at + view.nbytes] = view
            at += view.nbytes
            total += view.nbytes
    assert got == expected_file(requests)
    assert total == sum(b.nbytes for _, buffers in requests for b in buffers)


def copied(transfers):
    return sum(
        view.nbytes
        for transfer in transfers
        for part in transfer.parts
        if isinstance(part, Bounce)
        for _, view in part.copies
    )


def test_memory_of_another_phase_goes_through_slots_of_bounded_size():
    buffer = at_phase(bytes(5 << 20), 7)
    transfers = cut_writes(TransferBatch("write", "/"), DIRECT, [(64, (buffer,))])
    assert copied(transfers) == 5 << 20
    assert all(transfer.slot_bytes <= SLOT_BYTES for transfer in transfers)
    assert len(transfers) <= 6


@few
@given(plans(), st.data())
def test_short_results_are_resumed_where_they_stopped(requests, data):
    content = expected_file(requests)
    got = bytearray(align_up(len(content), PAGE_BYTES))
    for blob in (DIRECT, PLAIN):
        for transfer in cut_writes(TransferBatch("write", "/"), blob, requests):
            flight, complete, last = Flight(transfer, Slot()), False, 0
            while not complete:
                wire = b"".join(flight.views())
                at = flight.offset
                assert not blob.direct or at % PAGE_BYTES == 0
                least = max(1, transfer.offset + last - at + 1)
                count = data.draw(st.integers(min(least, len(wire)), len(wire)))
                got[at : at + count] = wire[:count]
                last = at + count - transfer.offset
                complete = flight.moved(count)
        assert got.rstrip(b"\0") == content.rstrip(b"\0")


@few
@given(plans())
def test_reads_fill_the_targets_and_may_end_with_the_file(requests):
    content = expected_file(requests)
    for start, buffers in requests:
        offset = start
        for buffer in buffers:
            buffer[:] = bytes(buffer.nbytes)
            for transfer in cut_read(TransferBatch("read", "/"), DIRECT, offset, buffer):
                flight = Flight(transfer, Slot())
                end = min(transfer.offset + transfer.length, len(content))
                wire = memoryview(content)[transfer.offset : end]
                assert len(wire) >= transfer.needed
                rest = wire
                for view in flight.views():
                    view[: len(rest[: view.nbytes])] = rest[: view.nbytes]
                    rest = rest[view.nbytes :]
                assert flight.moved(len(wire))
            assert buffer == content[offset : offset + buffer.nbytes]
            offset += buffer.nbytes

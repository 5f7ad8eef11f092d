"""Staging: blocks never overlap, phases are kept, and all memory is returned."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.pipeline.staging import (
    Staging,
    container_memory,
    default_budget,
    map_memory,
)
from penstock.core.types import PAGE_BYTES

MIB = 1 << 20

requests = st.tuples(st.integers(1, 300_000), st.integers(0, PAGE_BYTES - 1))
steps = st.lists(st.one_of(requests, st.integers(0, 50)), max_size=60)


@given(steps=steps, budget=st.integers(1, 40).map(lambda n: n * 64 * 1024))
def test_blocks_never_overlap_keep_phase_and_stay_in_budget(steps, budget):
    staging = Staging(budget)
    held = []
    for step in steps:
        if isinstance(step, int):
            if held:
                staging.release(held.pop(step % len(held)))
        else:
            length, phase = step
            block = staging.acquire(length, phase)
            if block is None:
                continue
            assert block.view.nbytes == length
            assert block.address % PAGE_BYTES == phase
            held.append(block)
        spans = sorted((b.address - b.address % PAGE_BYTES, b.reserved) for b in held)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
        assert staging._used == sum(b.reserved for b in held)
        assert staging.allocated_bytes <= staging.budget_bytes
    for block in held:
        staging.release(block)
    assert staging._used == 0


def test_a_forked_child_does_not_use_an_arena():
    staging = Staging(1 << 20)
    block = staging.acquire(1 << 20, 0)
    block.view[:] = b"\x07" * block.view.nbytes
    child = os.fork()
    if child == 0:
        seen = any(block.view)
        block.view[:] = b"\x01" * block.view.nbytes
        os._exit(int(seen))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert bytes(block.view) == b"\x07" * block.view.nbytes


def test_a_release_wakes_waiters_for_room():
    staging = Staging(MIB)
    block = staging.acquire(MIB, 0)
    waiting, seen = threading.Event(), []

    def wait() -> None:
        waiting.set()
        while (other := staging.acquire(MIB, 0)) is None:
            staging.wait(lambda: False, 30.0)
        seen.append(other)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    staging.release(block)
    thread.join(30)
    assert len(seen) == 1


PIECE = 4 * MIB  # the size that one thread touches at once


class Gates:
    """Touches pieces of an arena on demand, the lower of two first."""

    def __init__(self, *, can=True):
        self.can, self.touched, self.may_go_on = can, [], threading.Event()
        self._began, self._both = [], threading.Barrier(2)

    def populate(self, address, length):
        self._began.append(address)
        if len(self._began) <= 2:
            self._both.wait(60)
        if address != min(self._began[:2]):
            assert self.may_go_on.wait(60)
        self.touched.append((address, length))
        return self.can


def touched(gates=None, *, budget=3 * PIECE, expected=3 * PIECE, nbytes=None):
    staging = Staging(budget, populate=None if gates is None else gates.populate)
    staging.expect(expected)
    staging.touch(nbytes)
    return staging


def waited_for(staging, length):
    """A block, as soon as there is room for it."""
    while (block := staging.acquire(length, 0)) is None:
        staging.wait(lambda: False, 0.2)
    return block


def test_only_touched_memory_is_room_during_touching():
    gates = Gates()
    staging = touched(gates)
    first = waited_for(staging, PIECE)
    assert (first.offset, first.reserved) == (0, PIECE)
    assert staging.acquire(1, 0) is None
    assert staging.is_being_touched
    gates.may_go_on.set()
    second = waited_for(staging, 2 * PIECE)
    assert second.offset == PIECE
    assert not staging.is_being_touched
    assert sorted(gates.touched) == [(first.address + n * PIECE, PIECE) for n in range(3)]


def test_touching_maps_every_page_and_changes_no_byte():
    staging = touched(budget=64 * MIB, expected=64 * MIB)
    block = waited_for(staging, PIECE)
    block.view[:] = b"\x07" * PIECE
    rest = waited_for(staging, 60 * MIB)
    assert bytes(block.view) == b"\x07" * PIECE
    pages = np.zeros(64 * MIB // PAGE_BYTES, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    start = ctypes.c_void_p(block.address)
    assert not libc.mincore(start, ctypes.c_size_t(64 * MIB), ctypes.c_void_p(pages.ctypes.data))
    assert rest.address == block.address + PIECE
    assert pages.all()


def test_untouchable_memory_is_used_unprepared():
    gates = Gates(can=False)
    gates.may_go_on.set()
    staging = touched(gates)
    assert waited_for(staging, 3 * PIECE).offset == 0
    assert len(gates.touched) <= 2


def test_only_memory_missing_in_the_budget_is_touched():
    gates = Gates()
    gates.may_go_on.set()
    staging = touched(gates, budget=2 * PIECE, expected=9 * PIECE)
    waited_for(staging, 2 * PIECE)
    assert staging.allocated_bytes == sum(length for _, length in gates.touched) == 2 * PIECE
    staging.touch()
    assert staging.allocated_bytes == 2 * PIECE


def test_only_the_requested_memory_is_touched_before_use():
    gates = Gates()
    gates.may_go_on.set()
    staging = touched(gates, nbytes=2 * PIECE)
    assert waited_for(staging, 3 * PIECE).reserved == 3 * PIECE
    assert sum(length for _, length in gates.touched) == 2 * PIECE


def test_memory_for_device_copies_is_mapped_but_cuda_touches_it():
    gates = Gates()
    staging = Staging(2 * PIECE, populate=gates.populate)
    staging.expect(2 * PIECE, copied_from="cuda:0")
    staging.touch()
    assert staging.allocated_bytes == 2 * PIECE
    assert not staging.is_being_touched


def test_touching_ends_when_staging_closes():
    gates = Gates()
    staging = touched(gates, budget=9 * PIECE, expected=9 * PIECE)
    staging.release(waited_for(staging, 1))
    threads = [t for t in threading.enumerate() if t.name.startswith("penstock-touch")]
    staging.close()
    assert staging.allocated_bytes == 0
    gates.may_go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(gates.touched) <= 3


def test_forked_child_does_not_wait_for_parent_threads():
    gates = Gates()
    staging = touched(gates)
    waited_for(staging, PIECE)
    try:
        child = os.fork()  # left out by `--fast`, which skips the test here
        if child == 0:
            os._exit(staging.acquire(2 * PIECE, 0) is None)
        _, status = os.waitpid(child, 0)
    finally:
        gates.may_go_on.set()
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize(("state", "ranks"), [(10, 1), (1 << 60, 1), (1 << 60, 8)])
def test_the_default_budget_is_the_state_or_a_share_of_half_the_memory(state, ranks):
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    total = next(int(li.split()[1]) << 10 for li in lines if li.startswith("MemTotal"))
    budget = default_budget(state, ranks)
    assert 0 < budget <= min(state, total // 2 // ranks)


@given(steps=steps, budget=st.integers(1, 20).map(lambda n: n * 64 * 1024))
def test_a_block_is_refused_only_if_no_gap_fits_it(steps, budget):
    """Released neighbors are joined at once: no memory is lost to the allocator."""
    staging = Staging(budget)
    staging.expect(budget)  # one arena
    held = []
    for step in steps:
        if isinstance(step, int):
            if held:
                staging.release(held.pop(step % len(held)))
            continue
        length, phase = step
        need = -(-(length + phase) // PAGE_BYTES) * PAGE_BYTES
        ends = [0, *(b.offset + b.reserved for b in sorted(held, key=lambda b: b.offset))]
        starts = [*(b.offset for b in sorted(held, key=lambda b: b.offset)), staging.budget_bytes]
        gaps = [start - end for end, start in zip(ends, starts, strict=True)]
        block = staging.acquire(length, phase)
        assert (block is not None) == (max(gaps) >= need)
        if block is not None:
            held.append(block)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"memory.max": "max", "memory.current": "5", "memory.stat": ""}, None),
        (
            {
                "memory.max": "1000",
                "memory.current": "700",
                "memory.stat": "anon 300\ninactive_file 150\n",
            },
            450,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "1200",
                "memory/memory.stat": "total_inactive_file 50\n",
            },
            0,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "1",
                "memory/memory.stat": "",
            },
            None,
        ),
    ],
    ids=["no cgroup", "no limit", "version 2", "beyond the limit", "version 1 without limit"],
)
def test_the_limit_of_a_container_counts(tmp_path, files, expected):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert container_memory(str(tmp_path)) == expected


def is_pinned(address):
    import torch

    return torch.frombuffer(
        (ctypes.c_char * 1).from_address(address), dtype=torch.uint8
    ).is_pinned()


@pytest.mark.gpu
@pytest.mark.parametrize("end", ["closed", "dropped", "outgrown"])
def test_memory_for_device_copies_is_pinned_until_returned(end):
    """CUDA would keep writing to the old pages when other memory is mapped at their address."""
    staging = Staging(2 * MIB)
    staging.expect(MIB, copied_from="cuda:0")
    block = staging.acquire(MIB, 0)
    address = block.address
    assert is_pinned(address)
    if end != "dropped":
        staging.release(block)
    del block
    if end == "closed":
        staging.close()
    elif end == "outgrown":
        staging.expect(2 * MIB, largest_bytes=2 * MIB, copied_from="cuda:0")
    else:
        del staging
    assert not is_pinned(address)


@pytest.mark.gpu
def test_failed_pinning_leaves_no_pending_cuda_error():
    import torch

    memory = map_memory(MIB)
    first, second = Staging(MIB, memory), Staging(MIB, memory)
    first.expect(MIB, copied_from="cuda:0")
    second.expect(MIB, copied_from="cuda:0")  # CUDA refuses to pin it twice
    assert (torch.zeros(3, device="cuda") + 1).sum() == 3
    first.close()
    assert second.acquire(MIB, 0) is not None

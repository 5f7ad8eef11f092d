"""Damage to a log costs the steps after it, never a wrong value and never the checkpoint."""

import functools
import random

import pytest
from tests.integration.log.tiny import Tiny, bits_of, logged, restored
from tests.integration.support import memory

import penstock
from penstock.core.format.segment import HEADER_BYTES, log_prefix
from penstock.core.log.segments import StoredLog

LAST = 4


@functools.cache
def stored():
    """All names and bytes of a run, its uid, and its entries."""
    backend = memory()
    logged(backend, last=LAST)
    names = [info.name for info in backend.list("")]
    (segment,) = [name for name in names if name.endswith(".log")]
    uid = segment.split("/")[1]
    contents = {name: backend.read_record(name, limit_bytes=1 << 30) for name in names}
    return contents, uid, segment, StoredLog(backend, uid, 0).entries


def run_with(**changes):
    """A copy of the run, with other segments: their last names and bytes."""
    contents, uid, segment, _ = stored()
    backend = memory()
    for name, data in contents.items():
        if name != segment:
            backend.publish(name, data)
    for name, data in changes.items():
        backend.publish(f"data/{uid}/log/{name[1:].replace('_', '-')}.log", bytes(data))
    return backend


def run_of(data):
    return run_with(_00000_00000000=data)


def whole():
    return stored()[0][stored()[2]]


def entry(step):
    """The bytes of an entry, up to the next one."""
    found = stored()[3][step - 1]
    return whole()[found.offset : found.offset + found.header.stored_bytes]


def payload_end(step):
    found = stored()[3][step - 1]
    return found.offset + HEADER_BYTES + found.header.payload_bytes


def test_entries_read_back():
    assert restored(run_of(whole())) == LAST


@pytest.mark.parametrize(
    "seed", [*range(25), *(pytest.param(n, marks=pytest.mark.slow) for n in range(25, 400))]
)
def test_any_flipped_byte_costs_no_more_than_the_steps_after_it(seed):
    choice = random.Random(seed)
    step = choice.randint(1, LAST)
    start, end = stored()[3][step - 1].offset, payload_end(step)
    data = bytearray(whole())
    data[choice.randrange(start, end)] ^= 1 << choice.randrange(8)
    assert restored(run_of(data)) in {step - 1, LAST}  # zeros after a header are not read


@pytest.mark.parametrize("step", [1, LAST])
def test_any_truncation_leaves_the_whole_entries(step):
    start, end = stored()[3][step - 1].offset, payload_end(step)
    for length in (start, start + 1, start + HEADER_BYTES - 1, start + HEADER_BYTES, end - 1):
        assert restored(run_of(whole()[:length])) == step - 1
    assert restored(run_of(whole()[:end])) == step


def test_lost_and_swapped_entries_end_the_log_before_them():
    assert restored(run_of(entry(1) + entry(3) + entry(4))) == 1
    assert restored(run_of(entry(1) + entry(3) + entry(2) + entry(4))) == 1
    assert restored(run_of(entry(2) + entry(1))) == 0


def test_garbage_between_segments_is_ignored():
    assert restored(run_with(_00000_00000000=whole(), _00000_00000001=whole())) == LAST
    assert restored(run_with(_00000_00000000=whole(), _00000_00000001=b"")) == LAST
    assert restored(run_with(_00000_00000000=b"", _00000_00000001=whole())) == LAST
    assert restored(run_with(_00000_00000000=b"junk" * 5000, _00000_00000003=whole())) == LAST
    assert restored(run_with(_00000_00000000=whole(), _junk=b"junk" * 5000)) == LAST


def test_segment_of_another_run_or_rank_is_ignored(caplog):
    other = memory()
    logged(other)
    (info,) = [info for info in other.list("data/") if info.name.endswith(".log")]
    strange = other.read_record(info.name, limit_bytes=1 << 30)
    assert restored(run_of(strange)) == 0
    assert "belongs to another log" in caplog.text
    assert restored(run_with(_00000_00000000=whole(), _00000_00000001=strange)) == LAST
    assert restored(run_with(_00000_00000000=whole(), _00001_00000000=whole())) == LAST
    assert restored(run_with(_00001_00000000=whole())) == 0


@pytest.mark.parametrize("step", [1, 3])
def test_log_continues_after_damage_and_replaces_the_rest(step):
    data = bytearray(whole())
    data[payload_end(step) - 1] ^= 1
    backend = run_of(data)
    for _ in range(2):
        training = Tiny(seed=9)
        with penstock.Checkpointer(backend) as ckpt:
            first = ckpt.resume(training.state)
            training.step(first)
            assert ckpt.log(training.state, first)
        assert training.bits() == bits_of(first)
    assert first == step + 1
    assert restored(backend) == step + 1
    assert len(backend.list(log_prefix(stored()[1]))) == 3


def test_damage_before_a_step_that_is_asked_for_restores_the_base():
    data = bytearray(whole())
    data[payload_end(2) - 1] ^= 1
    training = Tiny(seed=9)
    with penstock.Checkpointer(run_of(data)) as ckpt:
        with pytest.raises(penstock.RestoreError, match=r"step 2: its entry in .* is damaged"):
            ckpt.restore(training.state, LAST)
        assert training.bits() == bits_of(0)
        assert ckpt.restore(training.state, 1).step == 1
        assert training.bits() == bits_of(1)

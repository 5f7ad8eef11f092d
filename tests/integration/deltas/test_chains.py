"""Checkpoints that are encoded against earlier ones."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from tests.integration.support import holding, place_of, same

import penstock
from penstock.core.errors import DamagedError, StorageError
from penstock.core.storage.open import open_backend
from penstock.testing.faults import FaultyBackend

RULES = [{"match": "**", "codecs": ["delta", "floatsplit"]}]


@functools.cache
def drifting():
    generator = torch.Generator().manual_seed(3)
    shapes = {"large": (600, 700), "odd": (1231, 77), **{f"small{n}": (40, 5) for n in range(5)}}
    return {
        name: tuple(torch.randn(shape, generator=generator) for _ in range(2))
        for name, shape in shapes.items()
    }


def weights(step):
    """A state whose tensors change slightly per step: large ones, and a slab of small ones."""
    state = {name: start + 1e-6 * step * drift for name, (start, drift) in drifting().items()}
    state["half"] = state["large"].bfloat16()
    return {"model": state, "epoch": step}


def run_of(root, steps, **options):
    with penstock.Checkpointer(root, rules=RULES, **options) as ckpt:
        return [ckpt.save(weights(step), step=step, mode="blocking").result() for step in steps]


def check(root, steps):
    with penstock.Checkpointer(root) as ckpt:
        for step in steps:
            assert same(ckpt.load(step), weights(step))
            report = ckpt.verify(step)
            assert report.ok, report.damaged


def bases_of(root, steps):
    with penstock.Checkpointer(root) as ckpt:
        catalog = ckpt._catalog
        return [(base.step, base.age) if (base := catalog.record(s).base) else None for s in steps]


def test_later_checkpoints_are_small_and_every_one_restores(tmp_path):
    first, *later = run_of(tmp_path, range(5))
    assert all(report.bytes_stored < 0.7 * first.bytes_stored for report in later)
    check(tmp_path, range(5))
    assert bases_of(tmp_path, range(5)) == [None, (0, 1), (1, 2), (2, 3), (3, 4)]


def test_every_nth_checkpoint_is_whole(tmp_path):
    run_of(tmp_path, range(5), deltas={"every": 2})
    assert bases_of(tmp_path, range(5)) == [None, (0, 1), None, (2, 1), None]
    check(tmp_path, range(5))


def test_no_chain_exceeds_its_limit(tmp_path):
    run_of(tmp_path, range(5), deltas={"every": 9, "max_chain": 1})
    with penstock.Checkpointer(tmp_path) as ckpt:
        for step in range(1, 5):
            contents = ckpt.open(step).contents
            depths = {len(list(f.links())) for o in contents.objects() for f in o.frames}
            assert depths == {1, 2}
            # The one frame below is of the whole checkpoint.
            assert len(contents.record.references) == 1
    check(tmp_path, range(5))


@pytest.mark.parametrize("memory", [None, 0])
def test_another_process_continues_the_chain(tmp_path, memory):
    deltas = {"memory_bytes": memory}
    for step in range(4):
        run_of(tmp_path, [step], deltas=deltas)
    assert bases_of(tmp_path, range(4)) == [None, (0, 1), (1, 2), (2, 3)]
    check(tmp_path, range(4))


def test_a_raw_base_stays_valid_when_optimizer_state_joins(tmp_path):
    made = torch.Generator().manual_seed(4)
    words = {n: torch.randint(-(2**31), 2**31, (1 << 19,), generator=made).int() for n in "ab"}
    steps = {str(n): torch.ones(()) for n in range(100)}
    with penstock.Checkpointer(tmp_path, rules=RULES) as ckpt:
        first = ckpt.save(words, step=0, mode="blocking").result()
        assert first.bytes_stored >= 4 << 20  # no data that the codecs could shrink
        for tensor in words.values():
            tensor[::99] += 1
        state = {"steps": steps, **words}
        assert ckpt.save(state, step=1, mode="blocking").result().bytes_stored < 1 << 20
        assert same(ckpt.load(1), state)


def test_a_later_step_is_no_base(tmp_path):
    with penstock.Checkpointer(tmp_path, rules=RULES) as ckpt:
        for step in (0, 2, 9):
            ckpt.save(weights(step), step=step, mode="blocking")
        for step in (2, 5):
            ckpt.save(weights(step), step=step, mode="blocking", overwrite=True)
    assert bases_of(tmp_path, [2, 5, 9]) == [(2, 2), (2, 3), (2, 2)]
    check(tmp_path, [0, 2, 5, 9])


@pytest.mark.parametrize("found_by", ["restore", "verify"])
def test_the_save_after_found_damage_does_not_depend_on_it(tmp_path, found_by):
    with penstock.Checkpointer(tmp_path, rules=RULES) as ckpt:
        for step in range(3):
            ckpt.save(weights(step), step=step, mode="blocking")
        place = place_of(ckpt.open(1), "model/large")
        blob = tmp_path / place.blob
        data = bytearray(blob.read_bytes())
        data[place.offset + 100] ^= 1
        blob.write_bytes(data)
        if found_by == "verify":
            assert not ckpt.verify(2).ok
        else:
            report = ckpt.restore(weights(7), on_damage="fallback")
            assert report.fell_back_from == (2, 1)
        ckpt.save(weights(3), step=3, mode="blocking")
    check(tmp_path, [0, 3])


def test_a_failed_save_is_no_base(tmp_path):
    store = FaultyBackend(open_backend(tmp_path))
    with penstock.Checkpointer(store, rules=RULES) as ckpt:
        ckpt.save(weights(0), step=0, mode="blocking")
        store.fail("publish", StorageError("full"), match="parts/")
        with pytest.raises(StorageError):
            ckpt.save(weights(1), step=1, mode="blocking")
        ckpt.save(weights(2), step=2, mode="blocking")
    assert bases_of(tmp_path, [2]) == [(0, 1)]
    check(tmp_path, [0, 2])


@pytest.mark.parametrize("codecs", [["delta", "floatsplit"], ["delta"]], ids=["encoded", "raw"])
def test_corrupted_kept_memory_is_no_base(tmp_path, codecs):
    rules = [{"match": "**", "codecs": codecs}]  # `delta` alone leaves the first checkpoint raw
    with penstock.Checkpointer(tmp_path, rules=rules) as ckpt:
        ckpt.save(weights(0), step=0, mode="blocking")
        kept = ckpt._saver._kept
        assert kept.size_bytes
        for view in kept._views.values():
            view[view.nbytes // 2] ^= 0x20
        ckpt.save(weights(1), step=1, mode="blocking")
    assert bases_of(tmp_path, [1]) == [(0, 1)]
    check(tmp_path, [0, 1])


def test_a_base_deleted_during_the_save_keeps_its_data(tmp_path):
    store = FaultyBackend(open_backend(tmp_path))
    with penstock.Checkpointer(store, rules=RULES) as ckpt:
        ckpt.save(weights(0), step=0, mode="blocking")
        with holding(store, "publish", match="parts/") as held:
            handle = ckpt.save(weights(1), step=1)
            held.reached.wait()
            with penstock.Checkpointer(tmp_path) as other:
                other.delete(0)
        handle.result()
    assert bases_of(tmp_path, [1]) == [(0, 1)]
    check(tmp_path, [1])


@pytest.mark.parametrize(("block_bytes", "base"), [(4096, (0, 1)), (8192, None)])
def test_a_raw_base_with_other_blocks_is_not_used(tmp_path, block_bytes, base):
    noise = {"model": torch.randint(256, (300_000,), dtype=torch.uint8)}
    nearly = {"model": noise["model"].clone()}
    nearly["model"][::1000] += 1
    for step, state in enumerate([noise, nearly]):
        blocks = block_bytes if step else 4096
        with penstock.Checkpointer(tmp_path, rules=RULES, block_bytes=blocks) as ckpt:
            ckpt.save(state, step=step, mode="blocking")
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.verify(1).ok
        assert same(ckpt.load(1), nearly)
    assert bases_of(tmp_path, [1]) == [base]


def damage(root, step):
    """Flip a byte in the middle of the step's own encoded blob."""
    with penstock.Checkpointer(root) as ckpt:
        uid = ckpt._catalog.record(step).uid
    (blob,) = (root / "data" / uid / "blobs").glob("*.enc")
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 0x10
    blob.write_bytes(data)


def test_a_damaged_base_makes_the_next_save_whole(tmp_path, caplog):
    run_of(tmp_path, [0])
    damage(tmp_path, 0)
    with caplog.at_level(logging.WARNING, "penstock"):
        run_of(tmp_path, [1])
    assert "step 0 is damaged" in caplog.text
    check(tmp_path, [1])


def test_one_object_of_a_chain_reads_only_its_frames(tmp_path):
    reports = run_of(tmp_path, range(3))
    with penstock.Checkpointer(tmp_path) as ckpt:
        state = weights(2)
        state["model"]["odd"] = torch.zeros(1231, 77)
        report = ckpt.restore(state, include="model/odd")
        assert same(state, weights(2))
    assert report.bytes_read == report.bytes_needed < 0.5 * sum(r.bytes_stored for r in reports)


def uid_of(root, step):
    with penstock.Checkpointer(root) as ckpt:
        return ckpt._catalog.record(step).uid


def test_damage_in_a_chain_error_names_the_step_to_fall_back_to(tmp_path):
    run_of(tmp_path, range(5), deltas={"every": 9})
    damage(tmp_path, 2)
    with penstock.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(DamagedError) as load:
            ckpt.load(4)
        with pytest.raises(DamagedError) as one:
            ckpt.open(4)["model"]
        for error in (load, one):
            message = str(error.value)
            assert "in the blobs of step 2, which step 4 is encoded against" in message
            assert "its chain is step 4, step 3, step 2, step 1, step 0." in message
            assert "Restore step 1, the newest older one that does not need it" in message
        target = weights(9)
        report = ckpt.restore(target, on_damage="fallback")
        assert (report.step, report.fell_back_from) == (1, (4, 3, 2))
        assert same(target, weights(1))


def test_a_lost_blob_of_a_deleted_base_fails_but_older_steps_restore(tmp_path):
    run_of(tmp_path, range(4), deltas={"every": 9})
    lost = uid_of(tmp_path, 2)
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.delete(2)
        (blob,) = (tmp_path / "data" / lost / "blobs").iterdir()
        blob.unlink()
        with pytest.raises(DamagedError) as error:
            ckpt.load(3)
        assert "in the blobs of step 2 (deleted), which step 3 is" in str(error.value)
        assert "Restore step 1, the newest older one" in str(error.value)
        report = ckpt.restore(weights(9), on_damage="fallback")
        assert (report.step, report.fell_back_from) == (1, (3,))


def test_error_says_if_every_older_step_needs_the_damaged_one(tmp_path):
    run_of(tmp_path, range(3))
    damage(tmp_path, 0)
    with penstock.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(DamagedError, match="Every older step needs it too"):
            ckpt.load(2)
        with pytest.raises(DamagedError):
            ckpt.load(2, on_damage="fallback")


@pytest.mark.parametrize("deep", [True, False])
def test_verify_names_the_damaged_links(tmp_path, deep):
    run_of(tmp_path, range(4), deltas={"every": 9})
    lost = uid_of(tmp_path, 1)
    (blob,) = (tmp_path / "data" / lost / "blobs").iterdir()
    blob.unlink()
    with penstock.Checkpointer(tmp_path) as ckpt:
        report = ckpt.verify(3, deep=deep)
        assert not report.ok
        assert [(link.uid, str(link)) for link in report.links] == [(lost, "step 1")]
        assert {one.blob for one in report.damaged} == {f"data/{lost}/blobs/{blob.name}"}
        assert ckpt.verify(1, deep=deep).links == ()
        assert ckpt.verify(0, deep=deep).ok

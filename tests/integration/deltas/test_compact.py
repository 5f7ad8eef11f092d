"""Compaction: checkpoints of a chain become whole despite concurrent changes of the run."""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests import interpreters
from tests.integration.atomic.crash_scenarios import DAY_S, check_no_garbage, mortal
from tests.integration.support import holding, same

import penstock
from penstock.core.abc import Codec, PluginConfig
from penstock.core.errors import (
    CheckpointGoneError,
    CheckpointNotFoundError,
    ConfigError,
    DamagedError,
)
from penstock.core.plugins.registry import Registry
from penstock.core.storage.open import open_backend
from penstock.testing.faults import EFFECTS, CrashAt, FaultyBackend
from penstock.testing.powercut import Disk, PowerCut

RULES = [{"match": "**", "codecs": ["delta", "floatsplit"]}]


def state_of(step):
    """A state that changes a little with each step, with an object that no codec takes."""
    generator = torch.Generator().manual_seed(5)
    start, drift = (torch.randn(90, 70, generator=generator) for _ in range(2))
    return {"model": {"w": start + 1e-6 * step * drift}, "step": step}


def save(root, steps, *, of=state_of, **options):
    with penstock.Checkpointer(root, rules=RULES) as ckpt:
        for step in steps:
            ckpt.save(of(step), step=step, mode="blocking", **options)


def check(root, steps, *, of=state_of):
    """Exactly these steps exist, whole, and restore to the saved state."""
    with penstock.Checkpointer(root) as ckpt:
        assert ckpt.steps() == [*steps]
        for step in steps:
            assert same(ckpt.load(step), of(step))
            report = ckpt.verify(step)
            assert report.ok, report.damaged


def records(root):
    with penstock.Checkpointer(root) as ckpt:
        return {step: ckpt._catalog.record(step) for step in ckpt.steps()}


def errors_at(ckpt, step):
    return {one.path: one.errors for one in ckpt.open(step).objects()}


def folders(root):
    return {folder.name for folder in (root / "data").iterdir()}


def another(step):
    return {"model": {"w": torch.full((90, 70), float(step))}, "step": -step}


# -- effects --------------------------------------------------------------------------------------


def test_a_compacted_checkpoint_is_equal_and_borrows_nothing(tmp_path):
    save(tmp_path, range(4), metadata={"loss": 2.5})
    before = records(tmp_path)
    with penstock.Checkpointer(tmp_path) as ckpt:
        report = ckpt.compact([2])
    (done,) = report.steps
    after = records(tmp_path)
    assert (done.step, done.uid, done.generation) == (2, after[2].uid, 1)
    assert (after[2].borrowed, after[2].base) == ((), None)
    assert after[2].metadata == {"loss": 2.5}
    assert done.bytes_before == before[2].bytes_stored < done.bytes_after == after[2].bytes_stored
    assert {step: after[step] for step in (0, 1, 3)} == {s: before[s] for s in (0, 1, 3)}
    check(tmp_path, range(4))
    # Step 3 borrows from the older generation, so only its blobs stay.
    kept = tmp_path / "data" / before[2].uid
    assert [path.name for path in kept.iterdir()] == ["blobs"]


def test_without_steps_the_data_of_deleted_checkpoints_is_freed(tmp_path):
    save(tmp_path, range(5))
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.delete(0)
        ckpt.delete(2)
        report = ckpt.compact()
    assert [one.step for one in report.steps] == [1, 3, 4]
    after = records(tmp_path)
    assert folders(tmp_path) == {record.uid for record in after.values()}
    assert not any(record.borrowed for record in after.values())
    assert report.bytes_after == sum(record.bytes_stored for record in after.values())
    check(tmp_path, [1, 3, 4])


def test_without_steps_a_run_without_kept_deleted_data_is_unchanged(tmp_path):
    save(tmp_path, range(3))
    before = records(tmp_path)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.compact().steps == ()
        assert records(tmp_path) == before
        assert [one.step for one in ckpt.compact(everything=True).steps] == [1, 2]
    check(tmp_path, range(3))


def test_a_whole_step_is_unchanged_and_a_missing_one_an_error(tmp_path):
    save(tmp_path, range(2))
    before = records(tmp_path)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.compact([0]).steps == ()
        with pytest.raises(CheckpointNotFoundError):
            ckpt.compact([1, 7])
        for wrong in (1, "latest", [1, "0"], [-1]):
            with pytest.raises(ConfigError, match="step"):
                ckpt.compact(wrong)
        with pytest.raises(ConfigError, match="not both"):
            ckpt.compact([1], everything=True)
    assert records(tmp_path) == before


def test_a_dry_run_changes_nothing_and_estimates_the_size(tmp_path):
    save(tmp_path, range(4))
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.delete(0)
        before = records(tmp_path)
        planned = ckpt.compact(dry_run=True)
        assert records(tmp_path) == before
        done = ckpt.compact()
    assert planned.dry_run
    assert [one.step for one in planned.steps] == [one.step for one in done.steps] == [1, 2, 3]
    assert planned.bytes_before == done.bytes_before
    assert planned.bytes_after == pytest.approx(done.bytes_after, rel=0.02)


def test_output_of_a_lossy_codec_is_not_rerounded(tmp_path):
    moments = torch.rand(64, 64, generator=torch.Generator().manual_seed(1)) ** 9
    rules = [{"match": "v", "codecs": ["log8"]}, *RULES]
    with penstock.Checkpointer(tmp_path, rules=rules) as ckpt:
        for step in range(2):
            ckpt.save({**state_of(step), "v": moments}, step=step, mode="blocking")
        before, errors = ckpt.load(1), errors_at(ckpt, 1)
        assert not torch.equal(before["v"], moments)
        assert [one.step for one in ckpt.compact([1]).steps] == [1]
        assert same(ckpt.load(1), before)
        assert errors_at(ckpt, 1) == errors
        assert errors["v",].absolute > 0
        assert ckpt.verify(1).ok


class Drift(Codec):
    """Lossy, and rounds again each time: the low bits of each byte count up."""

    api_version = 1
    name = "drift"
    lossless = False

    def __init__(self, config=None, /):
        super().__init__(config or PluginConfig())

    def max_encoded_size(self, raw_length, /):
        return raw_length

    def encode(self, chunk, out, /, *, context):
        out[: chunk.nbytes] = chunk
        return chunk.nbytes

    def decode(self, frame, out, /, *, context):
        out[:] = bytes(byte & 0xFC | byte + 1 & 3 for byte in bytes(frame))


def test_a_codec_that_would_reround_is_skipped(tmp_path):
    registry = Registry()
    registry.register(Drift)
    rules = [{"match": "v", "codecs": ["drift"]}, *RULES]
    values = torch.arange(256, dtype=torch.uint8)
    with penstock.Checkpointer(tmp_path, rules=rules, registry=registry) as ckpt:
        for step in range(2):
            ckpt.save({**state_of(step), "v": values}, step=step, mode="blocking")
        before = ckpt.load(1)
        assert not torch.equal(before["v"], values)
        assert [one.step for one in ckpt.compact([1]).steps] == [1]
        assert same(ckpt.load(1), before)


def test_the_next_save_builds_on_a_compacted_checkpoint(tmp_path):
    save(tmp_path, range(2))
    with penstock.Checkpointer(tmp_path, rules=RULES) as ckpt:
        ckpt.save(state_of(2), step=2, mode="blocking")
        (done,) = ckpt.compact([2]).steps
        ckpt.save(state_of(3), step=3, mode="blocking")
    record = records(tmp_path)[3]
    assert (record.base.uid, record.base.age) == (done.uid, 1)
    check(tmp_path, range(4))


def test_a_damaged_chain_is_not_compacted(tmp_path):
    save(tmp_path, range(3))
    before = records(tmp_path)
    (blob,) = (tmp_path / "data" / before[1].uid / "blobs").glob("*.enc")
    blob.write_bytes(bytes(blob.stat().st_size))
    with penstock.Checkpointer(tmp_path) as ckpt, pytest.raises(DamagedError):
        ckpt.compact([2])
    assert records(tmp_path) == before
    assert folders(tmp_path) == {record.uid for record in before.values()}


def test_the_last_tier_gets_the_whole_checkpoint(tmp_path):
    run = {"type": "tiered", "fast": f"posix://{tmp_path}/fast", "durable": f"posix://{tmp_path}/d"}
    save(run, range(3))
    with penstock.Checkpointer(run) as ckpt:
        ckpt.compact([2])
    check(run, range(3))
    assert not records(tmp_path / "d")[2].borrowed
    check(tmp_path / "d", range(3))


# -- concurrent faults -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operations", "count"),
    [(("publish", "delete"), 3), pytest.param(EFFECTS, 4, marks=pytest.mark.slow)],
    ids=["records", "all"],
)
def test_a_crash_before_any_effect_leaves_every_step_whole(operations, count):
    disk = Disk()
    steps = [0, *range(2, count)]
    save(PowerCut(disk), range(count))
    with penstock.Checkpointer(PowerCut(disk)) as ckpt:
        ckpt.delete(1)
    points, compacted = 0, set()
    while True:
        crashed = disk.copy()
        dying = CrashAt(PowerCut(crashed), points + 1, operations=operations)
        with mortal(), penstock.Checkpointer(dying) as ckpt:
            ckpt.compact()
        check(PowerCut(crashed), steps)
        found = records(PowerCut(crashed))
        compacted.add(sum(not record.borrowed for record in found.values()))
        crashed.advance(2 * DAY_S)
        with penstock.Checkpointer(PowerCut(crashed)) as ckpt:
            ckpt.compact()
            assert not ckpt.prune().refused
        check(PowerCut(crashed), steps)
        check_no_garbage(PowerCut(crashed), steps=len(steps))
        assert not any(record.borrowed for record in records(PowerCut(crashed)).values())
        if not dying.crashed:
            break
        points += 1
    assert points > 5
    assert compacted == {*range(1, len(steps) + 1)}  # step 0 is whole from the start


def compaction(root, step, operation, match, meanwhile, *, store=None):
    """Compact a step; act while that is held at a call of the store."""
    store = store or FaultyBackend(open_backend(root))
    with penstock.Checkpointer(store) as ckpt, ThreadPoolExecutor(1) as pool:
        with holding(store, operation, match=match) as held:
            done = pool.submit(ckpt.compact, [step])
            held.reached.wait()
            with penstock.Checkpointer(root, rules=RULES) as other:
                meanwhile(other)
        return done.result()


def test_a_step_deleted_meanwhile_stays_deleted(tmp_path):
    save(tmp_path, range(4))
    with pytest.raises(CheckpointGoneError, match="step 3 was deleted or saved again"):
        compaction(tmp_path, 3, "publish", "parts/", lambda other: other.delete(3))
    check(tmp_path, range(3))
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt._catalog.prune(grace_s=0, everything=True)
    assert folders(tmp_path) == {record.uid for record in records(tmp_path).values()}


@pytest.mark.parametrize("match", ["parts/", "commits/"])
def test_a_step_resaved_meanwhile_is_not_hidden(tmp_path, match):
    def anew(other):
        other.delete(3)
        other.save(another(3), step=3, mode="blocking")

    save(tmp_path, range(4))
    with pytest.raises(CheckpointGoneError):
        compaction(tmp_path, 3, "publish", match, anew)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert same(ckpt.load(3), another(3))
        ckpt._catalog.prune(grace_s=0)
        assert same(ckpt.load(3), another(3))
    assert folders(tmp_path) == {record.uid for record in records(tmp_path).values()}


@pytest.mark.parametrize("match", ["parts/", "commits/"])
def test_an_overwrite_meanwhile_wins(tmp_path, match):
    def overwrite(other):
        other.save(another(3), step=3, mode="blocking", overwrite=True)

    save(tmp_path, range(4))
    with pytest.raises((CheckpointGoneError, penstock.LostRaceError)):
        compaction(tmp_path, 3, "publish", match, overwrite)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert same(ckpt.load(3), another(3))
        ckpt._catalog.prune(grace_s=0)
    assert folders(tmp_path) == {record.uid for record in records(tmp_path).values()}


def test_a_started_overwrite_wins_even_if_the_compaction_commits_first(tmp_path):
    save(tmp_path, range(4))
    store = FaultyBackend(open_backend(tmp_path))
    with penstock.Checkpointer(store) as ckpt:
        with holding(store, "publish", match="parts/") as held:
            handle = ckpt.save(another(3), step=3, overwrite=True)
            held.reached.wait()
            with penstock.Checkpointer(tmp_path) as other:
                assert [one.step for one in other.compact([3]).steps] == [3]
        handle.result()
        ckpt.wait()
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert same(ckpt.load(3), another(3))
        assert ckpt.verify(3).ok
    assert folders(tmp_path) == {record.uid for record in records(tmp_path).values()}


def test_an_overwrite_wins_if_the_compaction_dies_at_its_commit(tmp_path):
    save(tmp_path, range(4))
    store = FaultyBackend(open_backend(tmp_path))

    def overwrite(other):
        other.save(another(3), step=3, mode="blocking", overwrite=True)
        store.fail("list", times=None)
        store.fail("delete", times=None)

    with pytest.raises(penstock.PenstockError):
        compaction(tmp_path, 3, "publish", "commits/", overwrite, store=store)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert same(ckpt.load(3), another(3))


def test_a_pruner_may_finish_the_overwrite(tmp_path):
    save(tmp_path, range(4))
    report = compaction(
        tmp_path,
        3,
        "read",
        "commits/00000003-1",
        lambda other: other._catalog.prune(grace_s=0),
    )
    assert [one.step for one in report.steps] == [3]
    check(tmp_path, range(4))


def test_deleting_its_lender_meanwhile_leaves_it_whole(tmp_path):
    save(tmp_path, range(4))

    def delete(other):
        for step in range(3):
            other.delete(step)

    compaction(tmp_path, 3, "publish", "intent", delete)
    check(tmp_path, [3])
    assert folders(tmp_path) == {records(tmp_path)[3].uid}


def test_a_save_encoded_against_the_older_generation_meanwhile_is_whole(tmp_path):
    save(tmp_path, range(3))
    store = FaultyBackend(open_backend(tmp_path))
    with penstock.Checkpointer(store, rules=RULES) as ckpt:
        with holding(store, "publish", match="parts/") as held:
            handle = ckpt.save(state_of(3), step=3)
            held.reached.wait()
            with penstock.Checkpointer(tmp_path) as other:
                other.compact([2])
        handle.result()
    assert records(tmp_path)[3].base.step == 2
    check(tmp_path, range(4))


COMPACT = """
import sys, penstock
from penstock.core.storage.open import open_backend
from penstock.testing.faults import EFFECTS, CrashAt
store = CrashAt(open_backend(sys.argv[1]), int(sys.argv[2]), kill=True, operations=EFFECTS)
penstock.Checkpointer(store).compact([2])
"""


def test_the_next_compaction_deletes_data_of_a_killed_one(tmp_path):
    save(tmp_path / "run", range(4))
    for n in itertools.count(2):
        root = shutil.copytree(tmp_path / "run", tmp_path / f"run{n}")
        before = folders(root)
        done = interpreters.run("-c", COMPACT, root, n)
        assert done.returncode == -signal.SIGKILL
        left = [root / "data" / uid for uid in folders(root) - before]
        # With an index its commit record may be in flight, and all of it would be left to `prune`.
        assert left
        assert not any((folder / "index").exists() for folder in left)
        blobs = sum(len([*folder.glob("blobs/*")]) for folder in left)
        with penstock.Checkpointer(root) as ckpt:
            ckpt.compact([3])
        assert not any(folder.exists() for folder in left)
        check(root, range(4))
        if blobs:
            break


@pytest.mark.slow
def test_a_compaction_killed_at_random_moments_leaves_every_step_whole(tmp_path):
    save(tmp_path, range(6))
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.delete(0)
    code = (
        "import sys, penstock\n"
        "ckpt = penstock.Checkpointer(sys.argv[1])\n"
        "print('ready', flush=True)\n"
        "ckpt.compact()\n"
    )
    chance = random.Random(11)
    killed = 0
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert process.stdout.readline() == b"ready\n"
        time.sleep(chance.random() * 0.03)
        process.send_signal(signal.SIGKILL)
        process.stdout.close()
        killed += process.wait() == -signal.SIGKILL
        check(tmp_path, range(1, 6))
    assert killed
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.compact()
        ckpt._catalog.prune(grace_s=0)
    check(tmp_path, range(1, 6))
    assert folders(tmp_path) == {record.uid for record in records(tmp_path).values()}

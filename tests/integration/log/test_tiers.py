"""A run in tiers logs to its fastest tier, and restores the base from any tier."""

import random
import shutil
import time

import pytest
import torch
from tests.integration.log.test_kill import kill_until_trained, train
from tests.integration.log.test_ranks import Replica, trained
from tests.integration.log.trainings import Training, equal
from tests.integration.ranks.saving import Job

import penstock
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.catalog.prune import prune
from penstock.core.errors import StorageError, StorageFullError
from penstock.testing.faults import Fault, FaultyBackend, WrapperBackend


class Run:
    """A run in two folders, and the bits of its training after each step."""

    def __init__(self, root):
        self.fast, self.durable = root / "fast", root / "durable"
        self.bits = {}

    def open(self, *, wrap=lambda fast: fast, durable=lambda place: place, keep=None, **options):
        fast = PosixBackend(PosixConfig(path=str(self.fast)))
        slow = PosixBackend(PosixConfig(path=str(self.durable)))
        config = TieredConfig(fast="a", durable="b", keep_fast=keep)
        backend = TieredBackend(config, fast=wrap(fast), durable=durable(slow))
        return penstock.Checkpointer(backend, **options)

    def train(self, ckpt, first, last, *, save_at=(), training=None, logs=True):
        training = training or Training()
        for step in range(first, last + 1):
            training.step()
            self.bits[step] = training.bits()
            if step in save_at:
                ckpt.save(training.state, step).result(300)
            else:
                assert ckpt.log(training.state, step) or not logs
        return training

    def resumes_at(self, step, **options):
        """Resume, and compare; return the training."""
        training = Training(seed=9)
        with self.open(**options) as ckpt:
            assert ckpt.latest() == step
            assert ckpt.resume(training.state) == step + 1
        assert equal(training.bits(), self.bits[step])
        return training

    def logs(self):
        """Return, for each tier, the number of checkpoints that have a log there."""
        return tuple(
            len({*root.glob("data/*/log")} if root.exists() else ())
            for root in (self.fast, self.durable)
        )


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def listed(root):
    return [int(path.name[:8]) for path in sorted(root.glob("commits/*"))]


def test_log_is_in_the_fast_tier_and_its_base_in_both(run):
    with run.open() as ckpt:
        run.train(ckpt, 1, 6, save_at=(1, 4))
        assert ckpt.latest() == 6
        assert ckpt.steps() == [1, 4]
        assert ckpt.verify(4).ok
    assert run.logs() == (2, 0)
    assert listed(run.fast) == listed(run.durable) == [1, 4]
    training = run.resumes_at(6)
    with run.open() as ckpt:
        ckpt.restore(training.state)
        run.train(ckpt, 7, 8, training=training)
    run.resumes_at(8)


def test_evicted_base_is_read_from_the_durable_tier_and_its_log_from_the_fast_one(run):
    with run.open(keep=0) as ckpt:
        run.train(ckpt, 1, 3, save_at=(1,))
    assert (listed(run.fast), listed(run.durable)) == ([], [1])
    run.resumes_at(3)
    with run.open(grace_s=1e-6) as ckpt:
        time.sleep(0.01)  # until the data is older than that
        assert ckpt.prune().uids == ()
    training = run.resumes_at(3)
    with run.open(keep=0) as ckpt:
        ckpt.restore(training.state)
        run.train(ckpt, 4, 6, save_at=(5,), training=training)
    assert run.logs() == (1, 0)  # the log of step 1 went once step 5 was copied
    run.resumes_at(6)


def test_prune_of_the_fast_tier_alone_keeps_the_log_of_an_evicted_checkpoint(run):
    fast = PosixBackend(PosixConfig(path=str(run.fast)))
    with run.open() as ckpt:
        training = run.train(ckpt, 1, 6, save_at=(1, 4))
        evicted = ckpt._catalog.record(4)
        ckpt._drains.eviction.evict(0, evicted)
    assert listed(run.fast) == [1]
    assert prune(fast, grace_s=-1.0).uids == ()
    run.resumes_at(6)
    with run.open() as ckpt:
        ckpt.restore(training.state)
        run.train(ckpt, 7, 7, save_at=(7,), training=training)
    assert prune(fast, grace_s=-1.0).uids == (evicted.uid,)
    fast.close()


def test_log_that_begins_during_an_eviction_stays(run):
    class Late(WrapperBackend):
        def delete(self, names, /):
            if any(name.startswith("commits/") for name in names):
                run.train(ckpt, 2, 3, training=training)
                ckpt._log.recorder.flush()
            super().delete(names)

    with run.open(wrap=Late) as ckpt:
        training = run.train(ckpt, 1, 1, save_at=(1,))
        record = ckpt._catalog.record(1)
        ckpt._drains.eviction.evict(0, record)
        assert listed(run.fast) == []
    run.resumes_at(3)


def test_lost_fast_tier_loses_no_saved_step(run, caplog):
    with run.open() as ckpt:
        run.train(ckpt, 1, 6, save_at=(1, 4))
    shutil.rmtree(run.fast)
    caplog.clear()
    training = run.resumes_at(4)
    assert "log" not in caplog.text
    with run.open() as ckpt:
        ckpt.restore(training.state)
        run.train(ckpt, 5, 7, training=training)  # the base is in the durable tier only
    run.resumes_at(7)
    with run.open(keep=2) as ckpt:
        ckpt.restore(training.state)
        run.train(ckpt, 8, 9, save_at=(8,), training=training)
    assert run.logs() == (1, 0)
    run.resumes_at(9)


def test_fast_tier_that_comes_back_does_not_win_over_a_newer_checkpoint(run, tmp_path):
    with run.open() as ckpt:
        run.train(ckpt, 1, 6, save_at=(1,))
    run.fast.rename(tmp_path / "away")
    training = run.resumes_at(1)
    with run.open() as ckpt:
        ckpt.restore(training.state)
        run.train(ckpt, 2, 4, save_at=(3,), training=training)
    shutil.rmtree(run.fast)
    (tmp_path / "away").rename(run.fast)
    assert run.logs()[0] == 1
    run.resumes_at(3)


def test_full_fast_tier_evicts_for_a_log(run):
    room = [10**12]

    class Small(WrapperBackend):
        def free_bytes(self):
            return room[0]

        def delete(self, names, /):
            super().delete(names)
            room[0] = 10**12

    with run.open(wrap=Small) as ckpt:
        training = run.train(ckpt, 1, 3, save_at=(1, 2))
        room[0] = 0
        run.train(ckpt, 4, 5, training=training)
    assert listed(run.fast) == [2]
    run.resumes_at(5)


def test_log_ends_by_name_when_the_fast_tier_stays_full(run, caplog):
    class Full(WrapperBackend):
        full = False

        def free_bytes(self):
            return 0 if self.full else 10**12

        def create(self, name, /, *, size_hint=None):
            if self.full:
                msg = f"cannot create {name}: ENOSPC"
                raise StorageFullError(msg)
            return super().create(name, size_hint=size_hint)

    full = []
    with run.open(wrap=lambda fast: full.append(Full(fast)) or full[0]) as ckpt:
        training = run.train(ckpt, 1, 2, save_at=(1, 2))
        full[0].full = True
        run.train(ckpt, 3, 3, training=training)
        ckpt._log.recorder.flush()
        assert "the log of gradients ends after step 3: cannot create data/" in caplog.text
        run.train(ckpt, 4, 5, save_at=(5,), training=training, logs=False)
        assert listed(run.durable) == [1, 2, 5]
        full[0].full = False
        run.train(ckpt, 6, 7, training=training)
    run.resumes_at(7)


def test_durable_tier_that_is_away_does_not_end_the_log(run):
    faulty = []

    def durable(place):
        faulty.append(FaultyBackend(place))
        return faulty[0]

    with run.open(durable=durable) as ckpt:
        training = run.train(ckpt, 1, 2, save_at=(1,))
        for operation in ("list", "publish", "create", "read", "stat", "delete"):
            fault = Fault(operation, times=None, error=StorageError("no route to host"))
            faulty[0].add(fault)
        run.train(ckpt, 3, 5, training=training)
        faulty[0].clear()
    run.resumes_at(5)


def test_deletion_and_rewind_delete_logs(run):
    with run.open() as ckpt:
        run.train(ckpt, 1, 9, save_at=(1, 4, 7))
        ckpt.delete(4)
        assert run.logs() == (2, 0)
        ckpt.rewind(1)
        assert run.logs() == (0, 0)
        assert ckpt.latest() == 1
    run.resumes_at(1)


def test_repair_of_the_base_keeps_its_log(run):
    with run.open() as ckpt:
        run.train(ckpt, 1, 3, save_at=(1,))
    (blob,) = run.fast.glob("data/*/blobs/*")
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    run.resumes_at(3)
    with run.open() as ckpt:
        assert ckpt.verify(1, repair=True).ok
    assert listed(run.fast) == [1]
    run.resumes_at(3)


def test_damage_of_the_log_is_reported_with_a_repair(run):
    with run.open() as ckpt:
        run.train(ckpt, 1, 3, save_at=(1,))
    (segment,) = run.fast.glob("data/*/log/*")
    data = bytearray(segment.read_bytes())
    data[len(data) // 4] ^= 1  # of the first of two entries
    segment.write_bytes(data)
    with run.open() as ckpt:
        assert not ckpt.verify(1, repair=True).ok


def test_log_of_a_run_that_gets_a_faster_tier_is_replayed(run, tmp_path):
    with penstock.Checkpointer(run.durable) as ckpt:
        training = run.train(ckpt, 1, 3, save_at=(1,))
    training = run.resumes_at(3)
    with run.open() as ckpt:
        ckpt.restore(training.state)
        training.step()
        assert not ckpt.log(training.state, 4)
        assert ckpt.latest() == 3
        run.train(ckpt, 5, 6, save_at=(5,), training=training)
    assert run.logs() == (1, 1)
    run.resumes_at(6)


def test_later_eviction_keeps_the_log_of_the_newest_checkpoint(run):
    with run.open(keep=0) as ckpt:
        training = run.train(ckpt, 1, 3, save_at=(1,))
        ckpt._drains.eviction.trim(0, verify=lambda *_: False)
        run.train(ckpt, 4, 4, training=training)
    run.resumes_at(4)


def test_ranks_log_to_the_fast_tier(run):
    url = f"tiered://?fast={run.fast}&durable={run.durable}&keep_fast=0"

    def train(ckpt, rank):
        replica = Replica()
        for number in range(6):
            replica.step(number)
            if number == 2:
                ckpt.save(replica.state, number, mode="blocking")
            elif number > 2:
                assert ckpt.log(replica.state, number)

    def restore(ckpt, rank):
        replica = Replica(seed=9)
        assert ckpt.restore(replica.state).step == 5
        assert torch.equal(replica.weights(), trained(5))

    assert Job(2, url).run(train) == [None] * 2
    assert listed(run.fast) == []
    assert Job(2, url).run(restore) == [None] * 2


@pytest.mark.process
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_killed_training_in_tiers_loses_at_most_one_step(run, seed):
    url = f"tiered://?fast={run.fast}&durable={run.durable}&keep_fast={seed % 2}"
    whole = dict(train(run.fast.parent / "whole")[1:])
    kill_until_trained(url, random.Random(seed), whole)

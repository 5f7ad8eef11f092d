"""Several ranks that save whenever `due` says so: always at the same steps."""

import random
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from tests import interpreters
from tests.integration.ranks.saving import PATIENCE_S, SHORT_TIMEOUT_S, Job
from tests.integration.ranks.test_processes import JOIN, end
from tests.integration.support import memory

import penstock
from penstock import RankError

STEPS = 400
EAGER = {"overhead": 1.0}  # as often as the store is fast


def train(ckpt, rank, *, steps=range(STEPS), pause_s=0.0):
    """Train with pauses of another length at each step and rank; return the saved steps."""
    dice, saved = random.Random(rank), []
    for step in steps:
        time.sleep(dice.uniform(0, pause_s))
        if ckpt.due(step):
            state = {"w": penstock.PerRank(torch.full((4,), rank)), "step": step}
            saved.append(ckpt.save(state, step).step)
    ckpt.wait()
    return saved


@pytest.mark.parametrize("pauses_s", [(0.002, 0.002, 0.002), (0.004, 0, 0), (0, 0.004, 0.001)])
def test_ranks_that_do_not_wait_for_each_other_save_at_the_same_steps(pauses_s):
    job = Job(3, memory(), schedule=EAGER)
    first, *others = job.run(lambda ckpt, rank: train(ckpt, rank, pause_s=pauses_s[rank]))
    assert first[0] == 0
    assert all(other == first for other in others), (first, *others)
    if pauses_s[0]:
        assert len(first) > 2


def test_training_that_goes_back_saves_at_the_same_steps():
    def work(ckpt, rank):
        saved = train(ckpt, rank, steps=range(100, 160), pause_s=0.002)
        if rank == 0:
            for step in ckpt.steps():
                ckpt.delete(step)
        return saved + train(ckpt, rank, steps=range(40, 80), pause_s=0.002)

    first, second = Job(2, memory(), schedule=EAGER).run(work)
    assert first == second
    assert 40 in first


def test_rank_that_is_ahead_gives_up_on_a_silent_rank_0():
    def work(ckpt, rank):
        return train(ckpt, rank, steps=range(2 if rank == 0 else 10))

    silent, ahead = Job(2, memory(), schedule=EAGER, timeout_s=SHORT_TIMEOUT_S).run(work)
    assert silent == [0]
    assert isinstance(ahead, RankError)
    assert ahead.rank == 0
    assert "has not decided whether a save is due at step" in str(ahead)


def test_only_rank_0_reports_the_interval():
    def work(ckpt, rank):
        train(ckpt, rank, steps=range(10), pause_s=0.001)
        ckpt.due(9)
        return ckpt.save({"step": 10}, 10).result(PATIENCE_S).interval

    first, second = Job(2, memory(), schedule=EAGER).run(work)
    assert first.steps >= 1
    assert second is None


TRAIN = """
import random
mine = torch.zeros(1 << 16)
state = {"w": penstock.Shard(mine, (mine.numel() * count,), (mine.numel() * rank,)), "step": 0}
saved = []
with penstock.Checkpointer(root, schedule={"overhead": 1.0}) as ckpt:
    for step in range(400):
        time.sleep(random.uniform(0, 0.01))
        if step % 50 == 0:  # so the ranks are many steps apart in between
            dist.all_reduce(torch.ones(1))
        state["step"] = step
        if ckpt.due(step):
            ckpt.save(state, step)
            saved.append(step)
print(*saved, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize(("count", "times"), [(3, 1), pytest.param(4, 20, marks=pytest.mark.slow)])
@pytest.mark.timeout(3000)
def test_processes_save_at_the_same_steps(tmp_path, count, times):
    for number in range(times):
        root = tmp_path / f"run{number}"
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [
            interpreters.start(
                "-c", JOIN + TRAIN, rank, count, store.port, root,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for rank in range(count)
        ]  # fmt: skip
        try:
            outputs = [process.communicate(timeout=PATIENCE_S) for process in ranks]
        finally:
            end(ranks)
        assert [process.returncode for process in ranks] == [0] * count, outputs
        (line,) = {out for out, _ in outputs}
        saved = [int(step) for step in line.split()]
        assert saved[0] == 0
        assert len(saved) > 2
        with penstock.Checkpointer(root) as ckpt:
            assert ckpt.steps() == saved
            assert ckpt.verify().ok
        print(f"{count} ranks saved at steps {line.strip()}")

"""A signal to one rank of a job: all ranks leave after the same step, with one checkpoint."""

import random
import subprocess
import time

import pytest
import torch.distributed as dist
from tests import interpreters
from tests.integration.ranks.saving import PATIENCE_S
from tests.integration.ranks.test_processes import JOIN, end

import penstock

TRAIN = """
import random
mine = torch.zeros(64)
state = {"w": penstock.Shard(mine, (64 * count,), (64 * rank,)), "steps": 0}
with penstock.Preemption() as leaving, penstock.Checkpointer(root) as ckpt:
    print("ready", flush=True)
    for step in range(ckpt.resume(state), 1_000_000):
        time.sleep(random.uniform(0, 0.01))
        if step % 4 == 0:  # so the ranks may be some steps apart
            dist.all_reduce(torch.ones(1))
        mine += 1
        state["steps"] += 1
        if leaving(step):
            ckpt.save(state, step, mode="blocking")
            break
        if step % 25 == 0:
            ckpt.save(state, step)
print("left", step, flush=True)
dist.destroy_process_group()
"""


def preempt(root, count, dice):
    """Start ranks, send SIGTERM to one at some moment, and return each rank's last step."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        interpreters.start(
            "-c", JOIN + TRAIN, rank, count, store.port, root,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        victim = dice.randrange(count)
        assert ranks[victim].stdout.readline() == "ready\n"
        time.sleep(dice.uniform(0, 1.5))
        ranks[victim].terminate()
        outputs = [process.communicate(timeout=PATIENCE_S) for process in ranks]
    finally:
        end(ranks)
    assert [process.returncode for process in ranks] == [0] * count, outputs
    return [out.removeprefix("ready\n") for out, _ in outputs]


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize(("count", "times"), [(3, 2), pytest.param(4, 50, marks=pytest.mark.slow)])
@pytest.mark.timeout(3000)
def test_signal_to_one_rank_at_any_moment_leaves_one_whole_checkpoint_of_one_step(
    tmp_path, count, times
):
    dice = random.Random(times)
    last = -1
    for _ in range(times):
        (left,) = set(preempt(tmp_path / "run", count, dice))
        step = int(left.removeprefix("left "))
        assert step > last
        with penstock.Checkpointer(tmp_path / "run") as ckpt:
            assert ckpt.latest() == step
            assert ckpt.verify().ok
            tree = ckpt.load()
            assert tree["steps"] == step + 1, "each start has resumed after the last one"
            assert tree["w"].tolist() == [step + 1.0] * 64 * count
            for older in ckpt.steps()[:-1]:
                ckpt.delete(older)
        last = step
        print(f"all {count} ranks left after step {step}")


WORKERS = """
import multiprocessing, os, pydoc, signal, sys, time, warnings
warnings.simplefilter("ignore")  # of torchdata
import torch, penstock
os.setsid()  # like torchrun for a rank
loader = pydoc.locate(sys.argv[2])(range(10_000), num_workers=2)
with penstock.Preemption() as leaving:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    child.start()
    for step, _ in enumerate(loader):
        if step == 5:
            child.terminate()
            child.join()
            os.killpg(0, signal.Signals[sys.argv[1]])
        if step == 100:  # an error of a worker that has ended comes before
            print(child.exitcode, leaving(step))
            break
        time.sleep(0.01)
"""


TORCH = "torch.utils.data.DataLoader"
TORCHDATA = "torchdata.stateful_dataloader.StatefulDataLoader"


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "loader"),
    [
        ("SIGTERM", TORCH),
        pytest.param("SIGUSR1", TORCH, marks=pytest.mark.slow),
        pytest.param("SIGTERM", TORCHDATA, marks=pytest.mark.slow),
    ],
)
def test_signal_to_the_process_group_of_a_rank_spares_loader_workers(name, loader):
    pytest.importorskip(loader.partition(".")[0], reason="needs torchdata")
    done = interpreters.run("-c", WORKERS, name, loader)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "-15 True\n"

"""Real processes that save a chain of checkpoints, restart in other numbers, and are killed."""

import os
import signal

import pytest
import torch
from tests.integration.ranks.test_processes import HANG, LIMIT_S, START, STEPS, end, start, store
from tests.integration.support import run_python

from penstock import Checkpointer

__all__ = ["store"]  # the fixture

TRAIN = """
import sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import penstock

root = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(50, 70), torch.nn.ReLU(), torch.nn.Linear(70, 31))
for parameter in net[0].parameters():
    parameter.requires_grad = False
for part in (net[0], net[2]):
    fully_shard(part)
fully_shard(net)
trained = [p for p in net.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-5)
state = {"model": net, "optimizer": optimizer, "plain": torch.arange(30_000.0), "epoch": 3}
"""

SAVE = """
rules = [{"match": "**", "codecs": ["delta", "zstd"]}]
with penstock.Checkpointer(root, rules=rules, share=True) as ckpt:
    first = 0
    if ckpt.latest() is not None:
        first = ckpt.restore(state).step + 1
    for number in range(first, first + 2):
        step()
        expected = tensors()
        handle = ckpt.save(state, number, mode="lazy")
        if dist.get_rank() == 0:
            torch.save(expected, f"{root}-{number}.pt")
        step()
        handle.result(300)
print("saved", flush=True)
dist.destroy_process_group()
"""

HANG_WITH_DELTAS = HANG.replace(
    "penstock.Checkpointer(backend,",
    'penstock.Checkpointer(backend, rules=[{"match": "**", "codecs": ["delta", "zstd"]}],',
)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.multirank
def test_torchrun_continues_the_chain_with_another_process_count(tmp_path):
    script, root = tmp_path / "job.py", tmp_path / "run"
    script.write_text(TRAIN + STEPS + SAVE)
    for count in (2, 3):
        done = run_python(
            "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", script,
            root, timeout=200, OMP_NUM_THREADS="1",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.count("saved") == count
    with Checkpointer(root) as ckpt:
        assert ckpt.steps() == [0, 1, 2, 3]
        sizes = []
        for step in ckpt.steps():
            record = ckpt._catalog.record(step)
            # The shards of three ranks are stored whole once; all else is referenced.
            assert (record.base and record.base.step) == [None, 0, None, 2][step]
            assert record.borrowed if step else not record.borrowed
            sizes.append(record.bytes_stored)
            assert ckpt.verify(step).ok
            checkpoint = ckpt.open(step)
            for path, tensor in torch.load(f"{root}-{step}.pt").items():
                assert torch.equal(checkpoint[path], tensor), (step, path)
            assert torch.equal(checkpoint["plain"], torch.arange(30_000.0))
        assert max(sizes[1:]) < sizes[0] / 2


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_leaves_the_base_unchanged(store, tmp_path, victim):
    root = tmp_path / "run"
    processes = start(START + HANG_WITH_DELTAS, 3, store.port, root, victim, LIMIT_S)
    others = [process for rank, process in enumerate(processes) if rank != victim]
    try:
        assert processes[victim].stdout.readline() == "writes\n"
        assert [process.stdout.readline() for process in others] == ["saves\n"] * 2
        os.kill(processes[victim].pid, signal.SIGKILL)
        words = f"{victim}|stood still for {LIMIT_S}\n"
        assert [process.stdout.readline() for process in others] == [words, words]
        assert [process.stdout.readline() for process in others] == ["1\n", "1\n"]
    finally:
        end(processes)
    with Checkpointer(root, rules=[{"match": "**", "codecs": ["delta", "zstd"]}]) as ckpt:
        assert ckpt.steps() == [1]
        assert ckpt.verify().ok
        assert ckpt.load()["w"].tolist() == [[1.0] * 4] * 27
        ckpt.save({"w": torch.ones(27, 4), "epoch": 1}, 2, mode="blocking")
        assert ckpt.verify().ok

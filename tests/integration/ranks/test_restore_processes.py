"""Real processes restore together: started by torchrun, in another number, when one dies."""

import os
import signal
import time

import pytest
import torch.distributed as dist
from tests import interpreters
from tests.integration.ranks.test_processes import LIMIT_S, START, end, start
from tests.integration.support import run_python

TORCHRUN = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
import penstock

root, expected = sys.argv[1], sys.argv[2]
dist.init_process_group("gloo")
count = dist.get_world_size()

def make(seed):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    fully_shard(net[0]), fully_shard(net[2]), fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return {"model": net, "optimizer": optimizer, "epoch": seed}

def step(state):
    loss = state["model"](torch.ones(4, 5)).square().sum()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    return loss.item()

def tensors(state):
    net, optimizer = state["model"], state["optimizer"]
    found = dict(net.state_dict())
    for name, parameter in net.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()}

with penstock.Checkpointer(root) as ckpt:
    state = make(1)
    if ckpt.latest() is None:
        for _ in range(3):
            step(state)
        ckpt.save(state, 3)  # asynchronous: the restore below waits for it
        found = {n: t.detach().clone() for n, t in tensors(state).items()}
        if dist.get_rank() == 0:
            torch.save(found, expected)
        other = make(2)
        report = ckpt.restore(other)
    else:
        other = make(2)
        report = ckpt.restore(other)
        found = torch.load(expected)
    mine = tensors(other)
    assert mine.keys() == found.keys()
    assert all(torch.equal(mine[name], found[name]) for name in found)
    assert (report.step, other["epoch"]) == (3, 1)
    losses = [step(other), step(other)]

# Replicas, as if each process were on its own host.
full = torch.arange(1 << 20)
options = {"read_once_per_host": False, "read_once_per_job": True, "chunk_bytes": 1 << 20}
with penstock.Checkpointer(f"{root}-{dist.get_world_size()}", **options) as ckpt:
    ckpt.save({"w": full.clone()}, 1, mode="blocking")
    found = torch.zeros_like(full)
    report = ckpt.restore({"w": found})
    assert torch.equal(found, full)
    read = torch.tensor([report.bytes_read, report.bytes_received])
    dist.all_reduce(read)
    assert read.tolist() == [full.nbytes, full.nbytes * (dist.get_world_size() - 1)], read
dist.destroy_process_group()
print("restored", dist.is_initialized(), flush=True)
"""

HANG = """
def stands_still(progress):
    if rank == victim and progress.phase == "read":
        print("reads", flush=True)
        time.sleep(1000)

victim, limit_s = int(sys.argv[5]), float(sys.argv[6])
ckpt = penstock.Checkpointer(root, rank_timeout_s=limit_s)
part = lambda n: penstock.Shard(torch.full((9, 4), float(n)), (9 * count, 4), (9 * rank, 0))
ckpt.save({"w": part(1)}, 1, mode="blocking")
if rank != victim:
    print("restores", flush=True)
try:
    ckpt.restore({"w": part(0)}, on_progress=stands_still)
except penstock.RankError as error:
    print(error.rank, error.cause.partition(" s ")[0], sep="|", flush=True)
"""

TOGETHER = """
def stands_still(progress):
    if rank == victim and progress.bytes_done:
        print("reads", flush=True)
        time.sleep(1000)

victim, limit_s, by_network = int(sys.argv[5]), float(sys.argv[6]), sys.argv[7] == "network"
options = {"read_once_per_host": not by_network, "read_once_per_job": by_network}
full = torch.arange(3 << 20)
ckpt = penstock.Checkpointer(root, rank_timeout_s=limit_s, chunk_bytes=1 << 20, **options)
ckpt.save({"w": full.clone()}, 1, mode="blocking")
found = torch.zeros_like(full)
report = ckpt.restore({"w": found})
got = report.bytes_received if by_network else report.bytes_shared
print(report.bytes_read, got, torch.equal(found, full), flush=True)
found.zero_()
try:
    ckpt.restore({"w": found}, on_progress=stands_still)
except penstock.RankError as error:
    cause = error.cause.partition(" s ")[0]
    print(error.rank, cause, torch.equal(found, full), *error.__notes__, sep="|", flush=True)
"""


def by_torchrun(count, *words):
    done = run_python(
        "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *words,
        timeout=200, OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [line for line in done.stdout.splitlines() if line.startswith("restored")]


def as_by_torchrun(count, *words):
    return [text.splitlines()[-1] for text in interpreters.run_as_torchrun(count, *words)]


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize(
    "launch", [as_by_torchrun, pytest.param(by_torchrun, marks=pytest.mark.slow)]
)
def test_torchrun_restores_on_another_process_count(tmp_path, launch):
    script = tmp_path / "job.py"
    script.write_text(TORCHRUN)
    for count in (2, 3):
        outputs = launch(count, script, tmp_path / "run", tmp_path / "expected.pt")
        assert outputs == ["restored False"] * count


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize(
    ("victim", "how"),
    [pytest.param(1, signal.SIGKILL, marks=pytest.mark.slow), (0, signal.SIGSTOP)],
)
def test_a_rank_that_dies_ends_the_restore_of_all_by_name(tmp_path, victim, how):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = start(START + HANG, 3, store.port, tmp_path / "run", victim, LIMIT_S)
    others = [process for rank, process in enumerate(processes) if rank != victim]
    try:
        assert processes[victim].stdout.readline() == "reads\n"
        assert [process.stdout.readline() for process in others] == ["restores\n"] * 2
        os.kill(processes[victim].pid, how)
        began_s = time.monotonic()
        words = f"{victim}|stood still for {LIMIT_S}\n"
        assert [process.stdout.readline() for process in others] == [words, words]
        print(f"known after {time.monotonic() - began_s:.2f} s of {LIMIT_S} s")
    finally:
        end(processes)


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize(
    ("victim", "how"),
    [(1, signal.SIGKILL), pytest.param(0, signal.SIGSTOP, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("way", ["memory", pytest.param("network", marks=pytest.mark.slow)])
def test_processes_read_once_together_even_after_one_dies(tmp_path, victim, how, way):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = start(START + TOGETHER, 3, store.port, tmp_path / "run", victim, LIMIT_S, way)
    others = [process for rank, process in enumerate(processes) if rank != victim]
    nbytes = 8 * (3 << 20)
    try:
        outputs = [process.stdout.readline().split() for process in processes]
        assert sum(int(read) for read, _, _ in outputs) == nbytes
        assert {(int(read) + int(shared), equal) for read, shared, equal in outputs} == {
            (nbytes, "True")
        }
        assert processes[victim].stdout.readline() == "reads\n"
        os.kill(processes[victim].pid, how)
        began_s = time.monotonic()
        note = "This rank has the values of step 1 now."
        words = f"{victim}|stood still for {LIMIT_S}|True|{note}\n"
        assert [process.stdout.readline() for process in others] == [words, words]
        print(f"known after {time.monotonic() - began_s:.2f} s of {LIMIT_S} s")
    finally:
        end(processes)

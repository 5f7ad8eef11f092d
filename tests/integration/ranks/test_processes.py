"""Real processes that train together by torch.distributed, and save together."""

import os
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from tests import interpreters

from penstock import Checkpointer

LIMIT_S = 8  # longer than a busy machine delays a progressing rank

JOIN = """
import sys, threading, time
import torch, torch.distributed as dist
import penstock

rank, count, port, root = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
store = dist.TCPStore("127.0.0.1", port, is_master=False)  # an agent hosts it, as with torchrun
dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
torch.manual_seed(0)
"""
START = "from torch.distributed.fsdp import fully_shard\n" + JOIN

STEPS = """
def step():
    net(torch.ones(4, net[0].in_features)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def tensors():
    found = {f"model/{n}": p.full_tensor() for n, p in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state[parameter].items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"optimizer/state/{name}/{key}"] = full
    return {path: tensor.detach().clone() for path, tensor in found.items()}
"""

TRAIN = """
net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
for part in (net[0], net[2]):
    fully_shard(part)
fully_shard(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
"""

SAVE = """
state = {"model": net, "optimizer": optimizer, "epoch": 3}
with penstock.Checkpointer(root) as ckpt:
    for number, mode in enumerate(["blocking", "async", "lazy"], 1):
        step()
        expected = tensors()
        net(torch.ones(4, 5))  # leaves gathered parameters
        handle = ckpt.save(state, number, mode=mode)
        if rank == 0:
            torch.save(expected, f"{root}-{number}.pt")
        step()  # the fence of the lazy save
        handle.result(300)
print("saved", flush=True)
dist.destroy_process_group()
"""

GROUPS = """
from torch.distributed.tensor import DTensor, Replicate
group = dist.new_group([2, 0])  # rank 2 of the job is rank 1 of the group in any order
# The first that holds this is rank 1, which is left out.
mesh = dist.DeviceMesh("cpu", [1, 0, 2])
replicated = DTensor.from_local(torch.arange(4.0), mesh, [Replicate()])
half = lambda: penstock.Shard(torch.full((3, 2), float(rank)), (6, 2), (3 * (rank > 0), 0))
if rank == 1:
    try:
        penstock.Checkpointer(root, group=group).save({"w": half()}, 1)
    except penstock.ConfigError as error:
        print("that this process is not in" in str(error), flush=True)
    with penstock.Checkpointer(f"{root}-alone", ranks="alone") as ckpt:
        ckpt.save({"rank": rank}, 1, mode="blocking")
else:
    if rank == 0:  # repairs and checks alone, without the other ranks
        with penstock.Checkpointer(root, group=group) as ckpt:
            ckpt.check({"w": half()}, 1)
        tiers = {"type": "tiered", "fast": f"{root}-fast", "durable": f"{root}-durable"}
        with penstock.Checkpointer(tiers, group=group) as ckpt:
            try:
                ckpt.verify(repair=True)
            except penstock.CheckpointNotFoundError:
                pass
    for step in (1, 2):  # one checkpointer at a time, in the same order on both
        with penstock.Checkpointer(root, group=group, rank_timeout_s=20) as ckpt:
            state = {"w": half(), "on all": replicated}
            print(ckpt.save(state, step).result(300).ranks, flush=True)
dist.destroy_process_group()
"""

HANG = """
from penstock.core.abc.delegating import DelegatingBackend
from penstock.core.plugins.registry import default_registry
from penstock.core.storage.open import open_backend

class Hanging(DelegatingBackend):
    hangs = False
    gate = threading.Event()

    def create(self, name, /, *, size_hint=0):
        if self.hangs:
            print("writes", flush=True)
            self.gate.wait()
        return super().create(name, size_hint=size_hint)

from penstock.core.config.model import load_config
config = load_config({"backend": root})
backend = Hanging(open_backend(config.backend, registry=default_registry()))
victim, limit_s = int(sys.argv[5]), float(sys.argv[6])
ckpt = penstock.Checkpointer(backend, rank_timeout_s=limit_s)
half = lambda n: penstock.Shard(torch.full((9, 4), float(n)), (9 * count, 4), (9 * rank, 0))
ckpt.save({"w": half(1), "epoch": 1}, 1, mode="blocking")
Hanging.hangs = rank == victim
handle = ckpt.save({"w": half(2), "epoch": 1}, 2)
if rank != victim:
    print("saves", flush=True)
try:
    handle.result(300)
except penstock.RankError as error:
    print(error.rank, error.cause.partition(" s ")[0], sep="|", flush=True)
    print(ckpt.latest(), flush=True)
except penstock.SaveError as error:  # of the rank that the others gave up on
    print("since this one stood still" in str(error), flush=True)
    Hanging.gate.set()
    ckpt.wait()
"""


def start(program, count, port, *arguments):
    return [
        interpreters.start("-c", program, rank, count, port, *arguments, stdout=subprocess.PIPE)
        for rank in range(count)
    ]


def end(processes):
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.process
@pytest.mark.multirank
def test_fsdp2_of_two_processes_is_loaded_by_one_bit_by_bit(store, tmp_path):
    root = tmp_path / "run"
    processes = start(START + TRAIN + STEPS + SAVE, 2, store.port, root)
    try:
        assert [process.communicate(timeout=300)[0] for process in processes] == ["saved\n"] * 2
    finally:
        end(processes)
    with Checkpointer(root) as ckpt:
        assert ckpt.steps() == [1, 2, 3]
        for step in ckpt.steps():
            expected = torch.load(f"{root}-{step}.pt")
            assert ckpt.verify(step).ok
            checkpoint = ckpt.open(step)
            assert checkpoint["epoch"] == 3
            for path, tensor in expected.items():
                assert torch.equal(checkpoint[path], tensor), (step, path)
            assert ckpt.load(step)["model"].keys() == {
                path.partition("/")[2] for path in expected if path.startswith("model")
            }


@pytest.mark.process
@pytest.mark.multirank
def test_a_group_saves_without_others_that_may_save_alone(store, tmp_path):
    root = tmp_path / "run"
    processes = start(START + GROUPS, 3, store.port, root)
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
        assert outputs == ["2\n2\n", "True\n", "2\n2\n"]
    finally:
        end(processes)
    with Checkpointer(root) as ckpt:
        assert ckpt.steps() == [1, 2]
        assert ckpt.load()["w"].tolist() == [[0.0, 0.0]] * 3 + [[2.0, 2.0]] * 3
        assert ckpt.load()["on all"].tolist() == [0, 1, 2, 3]
    with Checkpointer(f"{root}-alone") as ckpt:
        assert ckpt.load() == {"rank": 1}


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize(
    ("victim", "how"),
    [
        (0, signal.SIGSTOP),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.slow),  # `test_delta_processes` has it
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_ends_the_save_by_name_and_the_latest_stays(store, tmp_path, victim, how):
    root = tmp_path / "run"
    processes = start(START + HANG, 3, store.port, root, victim, LIMIT_S)
    others = [process for rank, process in enumerate(processes) if rank != victim]
    try:
        assert processes[victim].stdout.readline() == "writes\n"
        assert [process.stdout.readline() for process in others] == ["saves\n"] * 2
        os.kill(processes[victim].pid, how)
        began_s = time.monotonic()
        words = f"{victim}|stood still for {LIMIT_S}\n"
        assert [process.stdout.readline() for process in others] == [words, words]
        print(f"known after {time.monotonic() - began_s:.2f} s of {LIMIT_S} s")
        assert [process.stdout.readline() for process in others] == ["1\n", "1\n"]
        if how == signal.SIGSTOP:
            os.kill(processes[victim].pid, signal.SIGCONT)
            assert processes[victim].communicate(timeout=300)[0] == "True\n"
            others[0].wait(300)
            others[1].wait(300)
            assert len(list((root / "data").iterdir())) == 1  # its data is deleted, too
    finally:
        end(processes)
    with Checkpointer(root) as ckpt:
        assert ckpt.steps() == [1]
        assert ckpt.load()["w"].tolist() == [[1.0] * 4] * 27

"""Several ranks log their own parts, and replay to the last step that all of them have."""

import dataclasses
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from tests import interpreters
from tests.integration.ranks.saving import Job
from tests.integration.ranks.test_processes import JOIN, end
from torch import nn, optim

import penstock
from penstock.core.abc import API_VERSION
from penstock.core.plugins.registry import Registry
from penstock.providers.replayer import TorchReplayer

BASE, LAST = 2, 7


class Replica:
    """A training that is the same on every rank."""

    def __init__(self, seed=0):
        self.model = nn.Linear(6, 4)  # ranks are threads: they have one global generator
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
        self.optimizer = optim.AdamW(self.model.parameters(), 1e-2)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self, number):
        self.optimizer.zero_grad()
        inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(number))
        self.model(inputs).square().mean().backward()
        self.optimizer.step()

    def weights(self):
        return self.model.weight.detach().clone()


def trained(step):
    replica = Replica()
    for number in range(step + 1):
        replica.step(number)
    return replica.weights()


def save_and_log(root, *, count=2, act=lambda *_: None):
    def work(ckpt, rank):
        replica = Replica()
        for number in range(LAST + 1):
            act(replica, rank, number)
            replica.step(number)
            if number == BASE:
                ckpt.save(replica.state, number, mode="blocking")
            elif number > BASE:
                ckpt.log(replica.state, number)

    assert Job(count, str(root)).run(work) == [None] * count


def restore(root, *, count=2, step="latest", registries=None, logs_on=True):
    """Return the report of each rank, after a comparison with the training at its step."""

    def work(ckpt, rank):
        if registries:
            ckpt._log._replay = dataclasses.replace(ckpt._log._replay, registry=registries[rank])
        replica = Replica(seed=9)
        report = ckpt.restore(replica.state, step)
        assert torch.equal(replica.weights(), trained(report.step))
        replica.step(report.step + 1)
        assert ckpt.log(replica.state, report.step + 1) == logs_on
        return report

    reports = Job(count, str(root)).run(work)
    for report in reports:
        if isinstance(report, BaseException):
            raise report
    return reports


def segment(root, rank):
    (path,) = Path(root).glob(f"data/*/log/{rank:05}-*.log")
    return path


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_shards_that_no_optimizer_changes_end_the_log(tmp_path):
    def work(ckpt, rank):
        replica = Replica()
        mean = torch.zeros(int(rank < 2), 3)  # rank 2 has no part
        replica.state["mean"] = penstock.Shard(mean, (2, 3), (rank, 0))
        for number in range(4):
            replica.step(number)
            mean += 1
            if number == BASE:
                ckpt.save(replica.state, number, mode="blocking")
        return ckpt.log(replica.state, 3)

    assert Job(3, str(tmp_path)).run(work)[:2] == [False, False]
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.latest() == BASE


def test_all_ranks_resume_at_the_last_logged_step(tmp_path):
    save_and_log(tmp_path)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.latest() == LAST
    reports = restore(tmp_path)
    assert [(report.step, report.replayed_steps) for report in reports] == [(LAST, 5)] * 2


def test_step_in_the_middle_is_replayed_by_all_ranks(tmp_path):
    save_and_log(tmp_path)
    assert [report.step for report in restore(tmp_path, step=4)] == [4, 4]


@pytest.mark.parametrize("rank", [0, 1])
def test_last_step_that_all_ranks_have_counts(tmp_path, rank):
    save_and_log(tmp_path)
    path = segment(tmp_path, rank)
    flip(path, path.stat().st_size // 5 * 3 + 200)  # in the fourth of five equal entries
    assert [report.step for report in restore(tmp_path)] == [5, 5]
    restore(tmp_path)  # what was logged after that continues it


def test_rank_whose_log_ended_early_limits_all(tmp_path):
    def act(replica, rank, number):
        if rank == 1 and number == 6:
            with torch.no_grad():
                replica.model.weight += 0.0

    save_and_log(tmp_path, act=act)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.latest() == 5
    assert [report.step for report in restore(tmp_path)] == [5, 5]


@pytest.mark.parametrize("count", [1, 3])
def test_replicas_are_replayed_by_any_number_of_ranks(tmp_path, count):
    save_and_log(tmp_path)
    reports = restore(tmp_path, count=count, logs_on=False)
    assert [report.step for report in reports] == [LAST] * count


def test_old_entry_of_one_rank_is_no_entry_of_a_later_session(tmp_path):
    save_and_log(tmp_path)
    path = segment(tmp_path, 0)
    flip(path, path.stat().st_size // 5 * 3 + 200)  # rank 0 loses steps 6 and 7
    assert [report.step for report in restore(tmp_path)] == [5, 5]  # and logs another step 6
    # A crash before rank 1 has written its new step 6.
    next(tmp_path.glob("data/*/log/00001-00000001.log")).unlink()
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.latest() == 5
    assert [report.step for report in restore(tmp_path)] == [5, 5]


def test_rank_that_cannot_replay_sends_all_to_the_base(tmp_path, caplog):
    save_and_log(tmp_path)

    class Other(TorchReplayer):
        api_version = API_VERSION
        version = 2

    other = Registry()
    other.register(Other, replace=True)
    reports = restore(tmp_path, registries=[Registry(), other])
    assert [report.step for report in reports] == [BASE, BASE]
    assert "rank 1 cannot replay its log: optimizer does not step here as it did" in caplog.text


FULLY_SHARDED = (
    JOIN
    + """
import hashlib
from torch import nn, optim
from torch.distributed.fsdp import fully_shard

last, dies_at, options = int(sys.argv[5]), int(sys.argv[6]), eval(sys.argv[7])
kind, out = options.pop("kind", "AdamW"), options.pop("out", 5)
model = nn.Sequential(nn.Linear(12, 33), nn.Dropout(0.1), nn.ReLU(), nn.Linear(33, out))
fully_shard(model)
optimizer = getattr(optim, kind)(model.parameters(), 1e-2, **options)
state = {"model": model, "optimizer": optimizer, "rng": penstock.Rng()}
torch.manual_seed(100 + rank)

def bits():
    full = [p.full_tensor().detach().flatten() for p in model.parameters()]
    key = "exp_avg_sq" if kind == "AdamW" else "momentum_buffer"
    full += [optimizer.state[p][key].full_tensor().flatten() for p in model.parameters()
             if p in optimizer.state]
    return hashlib.sha256(torch.cat(full).numpy().tobytes()).hexdigest()

with penstock.Checkpointer(root) as ckpt:
    start = ckpt.resume(state)
    print(start - 1, bits(), flush=True)
    for step in range(start, last):
        optimizer.zero_grad()
        model(torch.randn(4, 12)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if step % 5 == 0:
            ckpt.save(state, step)
        else:
            ckpt.log(state, step)
        print(step, bits(), flush=True)
        if step == dies_at:
            print("dies", flush=True)
            time.sleep(600)
dist.destroy_process_group()
"""
)


REPLICATED = (
    JOIN
    + """
import hashlib
from torch import nn, optim
from penstock.core.abc import API_VERSION
from penstock.core.plugins.registry import Registry
from penstock.providers.replayer import TorchReplayer

last, dies_at, options = int(sys.argv[5]), int(sys.argv[6]), eval(sys.argv[7])
backwards = threading.Semaphore(0)

class Late(TorchReplayer):
    # Holds the log thread after the first optimizer until the next backward pass is over.
    api_version = API_VERSION

    def engine(self, optimizer):
        if optimizer is optimizers[0] and threading.current_thread() is not threading.main_thread():
            backwards.acquire()
        return super().engine(optimizer)

registry = Registry()
registry.register(Late, replace=True)
net = nn.Sequential(nn.Linear(12, 33), nn.Dropout(0.1), nn.ReLU(), nn.Linear(33, 5))
model = nn.parallel.DistributedDataParallel(net, **options)
optimizers = [optim.SGD(net[0].parameters(), 1e-2), optim.AdamW(net[3].parameters(), 1e-2)]
state = {"model": net, "optimizers": optimizers, "rng": penstock.Rng()}
torch.manual_seed(100 + rank)

def bits():
    tensors = [*net.parameters()]
    tensors += [state["exp_avg_sq"] for state in optimizers[1].state.values()]
    data = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()

with penstock.Checkpointer(root, registry=registry) as ckpt:
    start = ckpt.resume(state)
    print(start - 1, bits(), flush=True)
    for step in range(start, last):
        net.zero_grad()
        model(torch.randn(4, 12)).square().mean().backward()
        backwards.release()
        for optimizer in optimizers:
            optimizer.step()
        logged = bool(ckpt.save(state, step)) if step % 5 == 0 else ckpt.log(state, step)
        print(step, bits() if logged else "not-logged", flush=True)
        if step == dies_at:
            print("dies", flush=True)
            time.sleep(600)
    backwards.release()
dist.destroy_process_group()
"""
)


def train(root, count=2, *, last=12, dies_at=-1, code=FULLY_SHARDED, **options):
    """Train in processes, perhaps until they are killed; return each rank's lines."""
    # Each job has its own store: a killed one leaves its keys.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = store.port, root, last, dies_at, repr(options)
    processes = [
        interpreters.start("-c", code, rank, count, *command, stdout=subprocess.PIPE)
        for rank in range(count)
    ]
    try:
        if dies_at < 0:
            outputs = [process.communicate(timeout=300)[0] for process in processes]
            return [dict(map(str.split, output.splitlines())) for output in outputs]
        lines = [[*iter(process.stdout.readline, "dies\n")] for process in processes]
        for process in processes:
            process.send_signal(signal.SIGKILL)
        return [dict(map(str.split, of_rank)) for of_rank in lines]
    finally:
        end(processes)


@pytest.mark.process
@pytest.mark.multirank
def test_sharded_training_that_is_killed_repeats_all_bits(tmp_path):
    whole = train(tmp_path / "whole", fused=True)
    train(tmp_path / "killed", dies_at=9, fused=True)
    for resumed, expected in zip(train(tmp_path / "killed", fused=True), whole, strict=True):
        first = next(iter(resumed))
        assert first in {"8", "9"}  # the entry of step 9 may not have been durable
        assert resumed == {step: expected[step] for step in resumed}


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize("view", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradients_in_buckets_are_logged_before_the_next_backward(tmp_path, view):
    whole = train(tmp_path / "whole", code=REPLICATED, gradient_as_bucket_view=view)
    train(tmp_path / "killed", dies_at=9, code=REPLICATED, gradient_as_bucket_view=view)
    resumed = train(tmp_path / "killed", code=REPLICATED, gradient_as_bucket_view=view)
    for lines, expected in zip(resumed, whole, strict=True):
        assert "not-logged" not in expected.values()
        first = next(iter(lines))
        assert first in {"8", "9"}  # the log thread may hold the entry of step 9
        assert lines == {step: expected[step] for step in lines}
        assert list(lines)[-1] == "11"


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize(
    ("logged", "count"), [pytest.param(2, 1, marks=pytest.mark.slow), (2, 3), (1, 3)]
)
def test_other_ranks_replay_the_gradients_of_their_own_parts(tmp_path, logged, count):
    killed = train(tmp_path, logged, dies_at=9, foreach=True)
    for resumed in train(tmp_path, count, last=10, foreach=True):
        first, bits = next(iter(resumed.items()))
        assert first in {"8", "9"}
        assert bits == killed[0][first]


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize("options", [{"kind": "AdamW"}, {"kind": "SGD", "momentum": 0.9}], ids=str)
def test_ranks_without_a_part_of_a_parameter_log_it_too(tmp_path, options):
    of_job = {**options, "out": 1, "foreach": True}  # only rank 0 has a part of the last layer
    whole = train(tmp_path / "whole", 3, **of_job)
    train(tmp_path / "killed", 3, dies_at=9, **of_job)
    shutil.copytree(tmp_path / "killed", tmp_path / "again")
    same = train(tmp_path / "killed", 3, **of_job)
    for resumed, expected in zip(same, whole, strict=True):
        assert next(iter(resumed)) in {"8", "9"}  # the entry of step 9 may not have been durable
        assert resumed == {step: expected[step] for step in resumed}
    for resumed in train(tmp_path / "again", 2, last=10, **of_job):
        first, bits = next(iter(resumed.items()))
        assert first in {"8", "9"}
        assert bits == whole[0][first]


@pytest.mark.process
@pytest.mark.multirank
def test_fused_steps_are_not_replayed_on_other_parts(tmp_path):
    killed = train(tmp_path, dies_at=9, fused=True)
    (resumed,) = train(tmp_path, 1, last=6, fused=True)
    assert resumed == {"5": killed[0]["5"]}

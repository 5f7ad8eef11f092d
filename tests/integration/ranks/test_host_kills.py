"""Hosts are lost at random moments, each with its root; the job restarts on the others."""

import os
import random
import shutil
import subprocess
import threading
import time

import pytest
import torch.distributed as dist
from tests import interpreters
from tests.integration.ranks.test_processes import JOIN, end

BEGIN = (
    """
import ctypes, os, socket, sys
host = sys.argv[5]
if ctypes.CDLL(None, use_errno=True).unshare(0x04000000) == 0:  # CLONE_NEWUTS
    socket.sethostname(host)
"""
    + JOIN
    + """
def say(*words):
    os.write(1, " ".join(map(str, words)).encode() + b"\\n")

"""
)
HOST = (
    BEGIN
    + """
def state_of(step):
    rows = torch.arange(48.0 * 4096).reshape(48, 4096) + step
    size = 48 // count
    mine = rows[rank * size : (rank + 1) * size].clone()
    return {"w": penstock.Shard(mine, (48, 4096), (rank * size, 0)), "step": step}

def resume(ckpt):
    state = state_of(-1)
    first = ckpt.resume(state)
    whole = torch.equal(state["w"].tensor, state_of(first - 1)["w"].tensor)
    say("restored", first - 1, whole and state["step"] == first - 1)
    return first
"""
)
SAVED = (
    HOST
    + """
backend = {"type": "hosts", "path": f"{root}/{host}", "copies": 1}
ckpt = penstock.Checkpointer(
    {**backend, "copy_bytes_per_s": 1 << 20}, rank_timeout_s=60, retention={"keep_last": 2}
)
for step in range(resume(ckpt), 1 << 20):
    handle = ckpt.save(state_of(step), step)
    handle.committed.add_done_callback(lambda done, step=step: say("committed", step))
    handle.replicated.add_done_callback(
        lambda done, step=step: done.result() and say("replicated", step)
    )
    time.sleep(0.05)
"""
)


LOGGED = (
    BEGIN
    + """
class Training:
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self, step):
        self.optimizer.zero_grad()
        torch.manual_seed(step)
        self.model(torch.randn(8, 64)).square().mean().backward()
        if keeps_pace:
            dist.all_reduce(torch.zeros(1))  # as the gradients do: no rank is a step ahead
        self.optimizer.step()

backend = {"type": "hosts", "path": f"{root}/{host}", "copies": 1}
ckpt = penstock.Checkpointer(backend, rank_timeout_s=60, retention={"keep_last": 2})
training, uninterrupted, keeps_pace = Training(), Training(), False
first = ckpt.resume(training.state)
for step in range(first):
    uninterrupted.step(step)
keeps_pace = True
pairs = zip(training.model.parameters(), uninterrupted.model.parameters(), strict=True)
say("restored", first - 1, all(torch.equal(*pair) for pair in pairs))
for step in range(first, 1 << 20):
    training.step(step)
    if step % 8 == 0 or step == first:
        handle = ckpt.save(training.state, step)
        handle.replicated.add_done_callback(
            lambda done, step=step: done.result() and say("replicated", step)
        )
    else:
        assert ckpt.log(training.state, step)
        say("logged", step)
    time.sleep(0.05)
"""
)


class Run:
    """A job that is killed and started again, each time without one of its hosts."""

    def __init__(self, root, seed, train):
        self.root = root
        self._train = train
        self.choice = random.Random(seed)
        self.names = (f"host{number}" for number in range(1 << 20))
        self.hosts = [next(self.names) for _ in range(self.choice.choice([2, 3, 4]))]
        self.replicated = self.committed = -1
        self.most_lost = 0

    def kill_one(self):
        """Start the job, then kill a host at a random moment, and the others soon after."""
        count, choice = len(self.hosts), self.choice
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [
            interpreters.start(
                "-c", self._train, rank, count, store.port, self.root, host, stdout=subprocess.PIPE
            )
            for rank, host in enumerate(self.hosts)
        ]
        try:
            for process in ranks:
                word, step, whole = process.stdout.readline().split()
                assert (word, whole) == ("restored", "True")
                assert int(step) >= self.replicated, f"{self.hosts} lost step {self.replicated}"
            self.most_lost = max(self.most_lost, self.committed - int(step))
            self.committed = int(step)
            follower = threading.Thread(target=self._follow, args=(ranks[0].stdout,))
            follower.start()
            limit_s = time.monotonic() + 60
            known = self.replicated
            while self.replicated == known and time.monotonic() < limit_s:
                time.sleep(0.01)
            assert self.replicated > known, "nothing was replicated"
            time.sleep(choice.uniform(0, 0.5))
            lost = choice.randrange(count)
            ranks[lost].kill()
            ranks[lost].wait()
            shutil.rmtree(self.root / self.hosts[lost])
            time.sleep(choice.choice([0, choice.uniform(0, 0.5)]))
            for process in ranks:
                process.kill()
            follower.join()
        finally:
            end(ranks)
        del self.hosts[lost]
        while len(self.hosts) < 2 or len(self.hosts) < choice.choice([2, 3, 4]):
            self.hosts.append(next(self.names))
        choice.shuffle(self.hosts)

    def _follow(self, reports):
        for line in reports:
            word, step = line.split()
            if word in ("committed", "logged"):
                self.committed = max(self.committed, int(step))
            else:
                self.replicated = max(self.replicated, int(step))


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize("train", [SAVED, LOGGED], ids=["saved", "logged"])
@pytest.mark.parametrize("kills", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_replicated_steps_survive_hosts_killed_at_random_moments(tmp_path, kills, train):
    run = Run(tmp_path, int(os.environ.get("PENSTOCK_SEED", "1")), train)
    for _ in range(kills):
        run.kill_one()
    print(f"{kills} kills, steps lost at most: {run.most_lost}")

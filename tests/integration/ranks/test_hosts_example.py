"""The example for hosts under torchrun: a new host replaces a lost one."""

import os
import re
import shutil
import socket
import time
from pathlib import Path

import pytest
from tests import interpreters
from tests.integration.support import ROOT

from penstock import Checkpointer

EXAMPLE = ROOT / "examples" / "hosts.py"
LOSS = re.compile(r"^step (\d+) of (\d+) on: loss (.*)", re.MULTILINE)
# Without the first, agents of torch 2.13 wait forever after the loss of another agent.
VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
STEPS = "--steps=16"


class Host:
    """The agent of a host; each host has a root of its own."""

    def __init__(self, name, folder, port, *, leads):
        self.root, self.log = folder / name, folder / f"{name}.log"
        with self.log.open("a") as log:
            self.agent = interpreters.start(
                "-m", "torch.distributed.run", "--nnodes=2", "--max-restarts=3", "--rdzv-id=run",
                "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
                f"--rdzv-conf=is_host={int(leads)}", EXAMPLE, self.root, folder / "durable", STEPS,
                env={**os.environ, **VARIABLES}, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self):
        """Kill the agent and its workers, which are in sessions of their own."""
        try:
            workers = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text()
        except FileNotFoundError:
            workers = ""
        self.agent.kill()
        self.agent.wait()
        for worker in workers.split():
            os.kill(int(worker), 9)


def free_port():
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return line.getsockname()[1]


def losses(text):
    return {step: loss for step, _, loss in LOSS.findall(text)}


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize("lost", ["b", pytest.param("a", marks=pytest.mark.slow)])
def test_training_continues_with_a_new_host_as_if_none_was_lost(tmp_path, lost):
    env = {**os.environ, **VARIABLES}
    expected = losses(
        "".join(interpreters.run_as_torchrun(2, EXAMPLE, tmp_path / "x", STEPS, env=env))
    )
    assert len(expected) == 16
    port = free_port()
    hosts = {name: Host(name, tmp_path, port, leads=name == "a") for name in "ab"}
    try:
        while not any("step 3 survives" in host.log.read_text() for host in hosts.values()):
            time.sleep(0.05)
        hosts[lost].kill()
        shutil.rmtree(tmp_path / lost)
        with Checkpointer(tmp_path / "durable") as ckpt:
            assert ckpt.steps() == [0]  # nothing of later steps can be read there
        if lost == "a":  # it led the rendezvous
            hosts["b"].kill()
            port = free_port()
            hosts["b"] = Host("b", tmp_path, port, leads=True)
        hosts["c"] = Host("c", tmp_path, port, leads=False)
        del hosts[lost]
        assert [host.agent.wait(300) for host in hosts.values()] == [0, 0]
        texts = [(tmp_path / f"{name}.log").read_text() for name in "abc"]
        runs = {int(first) for text in texts for _, first, _ in LOSS.findall(text)}
        assert len(runs) == 2
        assert min(runs) == 0
        assert 4 <= max(runs) < 16
        for text in texts:
            assert losses(text).items() <= expected.items()
        assert {step for text in texts for step in losses(text)} == expected.keys()
    finally:
        for host in hosts.values():
            host.kill()

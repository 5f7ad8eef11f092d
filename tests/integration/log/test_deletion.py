"""Logs when checkpoints are deleted, replaced and pruned."""

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import penstock

DELTAS = {
    "rules": [{"match": "**", "codecs": ["delta", "floatsplit"]}],
    "deltas": {"every": 9},
}


class Run:
    """A training whose weights can be asked for at each step."""

    def __init__(self, root, **options):
        self.root = Path(root)
        self.model = nn.Linear(100, 64)
        nn.init.normal_(self.model.weight, generator=torch.Generator().manual_seed(0))
        nn.init.zeros_(self.model.bias)
        self.optimizer = optim.AdamW(self.model.parameters(), 1e-4)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.ckpt = penstock.Checkpointer(root, **options)
        self.weights = {}

    def step(self, number, *, save=False, **options):
        self.optimizer.zero_grad()
        inputs = torch.randn(3, 100, generator=torch.Generator().manual_seed(number))
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.weights[number] = self.model.weight.detach().clone()
        if save:
            self.ckpt.save(self.state, number, mode="blocking", **options)
        else:
            assert self.ckpt.log(self.state, number)

    def restored(self, step="latest"):
        """Restore in a new process of the run, compare, and return the step."""
        run = Run(self.root)
        with run.ckpt:
            report = run.ckpt.restore(run.state, step)
        assert torch.equal(run.model.weight, self.weights[report.step])
        return report.step


def logs(root):
    return sorted(path.name for path in Path(root).glob("data/*/log/*"))


@pytest.fixture
def chained(tmp_path):
    """Steps 0 and 3 are saved, 3 against 0, which is deleted; 1, 2, 4, 5 are logged."""
    run = Run(tmp_path / "run", **DELTAS)
    for number in range(6):
        run.step(number, save=number in {0, 3})
    run.ckpt.delete(0)
    yield run
    run.ckpt.close()


def test_retention_keeps_the_base_of_the_newest_log_after_a_failed_save(tmp_path):
    run = Run(tmp_path / "run", retention={"keep_last": 1})
    with run.ckpt:
        for number in range(4):
            run.step(number, save=number in {0, 2})
        run.step(4)
        with pytest.raises(penstock.PenstockError):
            run.ckpt.save({**run.state, "x": object()}, 4, mode="blocking")
        assert run.ckpt.steps() == [2]
        run.step(5)
    assert run.restored() == 5


def test_retention_by_metric_and_tag_deletes_logs_with_their_checkpoints(tmp_path):
    keep = {"keep_last": 1, "keep_best": 1, "best_metric": "loss", "best_mode": "min"}
    run = Run(tmp_path / "run", retention=keep)
    with run.ckpt:
        for number in range(10):
            run.step(number, save=number in {0, 2, 4, 8}, **(
                {"metadata": {"loss": number}} if number in {0, 2, 4, 8} else {}
            ))  # fmt: skip
            if number == 4:
                run.ckpt.pin(4, "good")
        assert run.ckpt.steps() == [0, 4, 8]
    assert len(logs(run.root)) == 3
    assert run.restored() == 9
    assert run.restored(1) == 1
    assert run.restored(5) == 5


def test_overwrite_deletes_the_log_and_begins_another(tmp_path):
    run = Run(tmp_path / "run")
    with run.ckpt:
        for number in range(2, 5):
            run.step(number, save=number == 2)
        run.ckpt.save(run.state, 2, mode="blocking", overwrite=True)
        run.weights[2] = run.weights[4]
        run.ckpt.wait()
        assert logs(run.root) == []
        assert run.ckpt.latest() == 2
        run.step(3)
    assert run.restored() == 3


def test_rewind_deletes_the_logs_after_its_step(tmp_path):
    run = Run(tmp_path / "run")
    with run.ckpt:
        for number in range(8):
            run.step(number, save=number in {0, 2, 5})
        assert len(logs(run.root)) == 3
        assert run.ckpt.rewind(2) == [5]
        assert len(logs(run.root)) == 1
        assert run.ckpt.latest() == 2
    assert run.restored() == 2
    assert run.restored(1) == 1


def test_delete_of_a_checkpoint_deletes_its_log(tmp_path):
    run = Run(tmp_path / "run")
    with run.ckpt:
        for number in range(6):
            run.step(number, save=number in {0, 3})
        run.ckpt.delete(0)
        assert len(logs(run.root)) == 1
        assert run.restored() == 5
        run.ckpt.delete(3)
        assert logs(run.root) == []


def test_prune_deletes_old_logs_of_no_checkpoint_only(tmp_path):
    run = Run(tmp_path / "run")
    with run.ckpt:
        for number in range(1, 4):
            run.step(number, save=number == 1)
        live = logs(run.root)
        (log,) = run.root.glob("data/*/log")
        for uid in ("a" * 32, "b" * 32):
            shutil.copytree(log, run.root / "data" / uid / "log")
        old = time.time() - 25 * 3600
        for path in (*log.iterdir(), *(run.root / "data" / ("a" * 32) / "log").iterdir()):
            os.utime(path, (old, old))
        assert run.ckpt.prune().uids == ("a" * 32,)
        assert len(logs(run.root)) == len(live) + 1
        run.step(4)
    assert run.restored() == 4

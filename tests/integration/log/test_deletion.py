"""Logs when checkpoints are compacted, deleted, replaced and pruned."""

import os
import time
from pathlib import Path

import pytest
import torch
from tests.core.cli.command import caller
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


def test_compaction_has_the_log_and_the_live_run_continues_it(chained):
    run = chained
    (compacted,) = run.ckpt.compact().steps
    assert compacted.step == 3
    assert run.ckpt.latest() == 5
    assert run.restored() == 5
    run.step(6)
    assert run.ckpt.verify().logged_entries == 3
    assert [path.parent.name for path in run.root.glob("data/*/log")] == [compacted.uid]
    assert run.restored() == 6


def test_compaction_that_fails_leaves_the_log_with_the_checkpoint(chained, monkeypatch):
    run = chained
    copied = run.ckpt._log.carry

    def carry(uid, new):
        copied(uid, new)
        raise OSError

    monkeypatch.setattr(run.ckpt._log, "carry", carry)
    with pytest.raises((penstock.PenstockError, OSError)):
        run.ckpt.compact()
    run.step(6)
    assert run.restored() == 6


def test_command_compacts_no_checkpoint_whose_log_may_be_being_written(
    chained, capsys, monkeypatch
):
    call = caller(capsys, monkeypatch)
    chained.ckpt.close()
    done = call("compact", chained.root)
    assert done.code == 1
    assert "step 3 is not compacted: its log was written less than 24 h ago" in done.out
    assert list(call("compact", chained.root, "--json").json["failed"]) == ["3"]
    old = time.time() - 25 * 3600
    for path in chained.root.glob("data/*/log/*"):
        os.utime(path, (old, old))
    assert call("compact", chained.root).code == 0
    assert chained.restored() == 5

"""Saves when `due` says so, in one process."""

import threading

import pytest
import torch
from tests.integration.support import checkpointer, memory

from penstock import ConfigError, Rng, SaverClosedError
from penstock.core.abc.delegating import DelegatingBackend


class Gate(DelegatingBackend):
    """A store that takes no blob before `opened`."""

    def __init__(self, inner):
        super().__init__(inner)
        self.opened = threading.Event()

    def create(self, name, /, *, size_hint=0):
        self.opened.wait()
        return super().create(name, size_hint=size_hint)


def state():
    return {"w": torch.ones(8)}


def test_no_save_is_due_while_one_is_in_flight():
    store = Gate(memory())
    with checkpointer(store, schedule={"overhead": 1.0}) as ckpt:
        assert ckpt.due(0)
        handle = ckpt.save(state(), 0)
        assert not any(ckpt.due(step) for step in range(1, 500))
        store.opened.set()
        handle.result()
        ckpt.wait()
        assert any(ckpt.due(step) for step in range(500, 1_000_000))


def test_report_has_the_interval_and_its_reason():
    with checkpointer(memory(), schedule={"every": 5}) as ckpt:
        saved = {}
        for step in range(1, 16):
            if ckpt.due(step):
                saved[step] = ckpt.save(state(), step, mode="blocking").result()
    assert list(saved) == [5, 10, 15]
    assert saved[15].interval.steps == 5
    assert saved[15].interval.lost_steps >= 2.5
    assert "next is due after 5 steps: every 5 steps as configured" in repr(saved[15])
    assert "every 5 steps as configured" in saved[15]._repr_html_()


def test_report_has_no_interval_without_due():
    with checkpointer(memory()) as ckpt:
        report = ckpt.save(state(), 1).result()
    assert report.interval is None
    assert "interval" not in report._repr_html_()
    assert "due" not in repr(report)


def test_run_that_logs_loses_at_most_one_step(tmp_path):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tree = {"model": model, "optimizer": optimizer, "rng": Rng()}
    reports = []
    with checkpointer(tmp_path, schedule={"every": 20}) as ckpt:
        for step in range(60):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            if ckpt.due(step):
                reports.append(ckpt.save(tree, step, mode="blocking").result())
            else:
                ckpt.log(tree, step)
    assert [report.step for report in reports] == [0, 20, 40]
    assert reports[-1].interval.lost_steps == 1.0
    with checkpointer(tmp_path) as ckpt:
        assert ckpt.resume(tree) == 60


@pytest.mark.parametrize("step", [-1, 1.5, "3", None])
def test_step_must_be_a_step(step):
    with checkpointer(memory()) as ckpt, pytest.raises(ConfigError, match="step must be"):
        ckpt.due(step)


def test_a_closed_checkpointer_is_refused():
    ckpt = checkpointer(memory())
    ckpt.close()
    with pytest.raises(SaverClosedError):
        ckpt.due(1)

"""The hook that blocks optimizer steps: one per process, armed only while needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
from tests.integration.support import memory
from tests.integration.training import Gate, Held, held_at_fence, held_checkpointer
from torch.optim import optimizer as torch_optimizer

from penstock.core.save import fence, hooks


class Outside:
    """An optimizer that no state tree holds; `step` counts."""

    def __init__(self):
        self.parameter = torch.zeros(1, requires_grad=True)
        self.parameter.grad = torch.ones(1)
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)

    def step(self):
        self.optimizer.step()

    @property
    def steps(self):
        return -int(self.parameter.detach())


@pytest.fixture
def outside():
    return Outside()


@pytest.fixture
def ckpt():
    with held_checkpointer(memory()) as ckpt:
        yield ckpt
        Gate.open_all()


def pending_save(ckpt, step=1):
    hold = Held()
    handle = ckpt.save({"hold": hold}, step, mode="lazy")
    hold.reached.wait()
    return hold, handle


def count_hooks():
    return len(torch_optimizer._global_optimizer_pre_hooks)


def test_without_a_pending_capture_steps_do_not_wait(outside):
    outside.step()
    assert outside.steps == 1


def test_a_save_that_defers_nothing_is_not_fenced(ckpt, outside):
    ckpt.save({"x": torch.zeros(3)}, 1, mode="lazy")
    assert not fence._pending
    outside.step()
    assert outside.steps == 1


def test_any_number_of_saves_share_one_hook(ckpt):
    hold, handle = pending_save(ckpt)
    installed = count_hooks()
    hold.let_go.set()
    handle.result()
    for step in (2, 3):
        hold, handle = pending_save(ckpt, step)
        hold.let_go.set()
        handle.result()
    assert count_hooks() == installed


def test_a_step_waits_for_the_captures_of_every_checkpointer(ckpt, outside):
    with held_checkpointer(memory()) as other:
        (one, _), (two, _) = pending_save(ckpt), pending_save(other)
        with held_at_fence(outside.step):
            one.let_go.set()
            ckpt._saver.job.handle.captured.result()
            assert outside.steps == 0
            two.let_go.set()
        assert outside.steps == 1
        ckpt.wait()
        other.wait()
        assert not fence._pending


def test_a_save_that_has_ended_leaves_nothing_armed(ckpt, outside):
    for step, error in ((1, None), (2, ZeroDivisionError())):
        hold, handle = pending_save(ckpt, step)
        assert list(fence._pending) == [ckpt._saver.job]
        hold.error = error
        hold.let_go.set()
        assert (handle.durable.exception() is None) is (error is None)
        assert not fence._pending
        outside.step()


def test_a_timeout_releases_the_step_and_fails_the_save(outside):
    with held_checkpointer(memory(), fence_timeout_s=0.01) as ckpt:
        hold, handle = pending_save(ckpt)
        outside.step()
        assert outside.steps == 1
        assert "0.01 s" in str(handle.durable.exception())
        outside.step()
        assert outside.steps == 2
        hold.let_go.set()


def test_fence_all_waits_for_every_capture(ckpt):
    hold, handle = pending_save(ckpt)
    with held_at_fence(fence.fence_all):
        assert not handle.captured.done()
        hold.let_go.set()
    assert handle.captured.done()


def test_torch_compile_does_not_trace_the_hook(ckpt):
    """Traced, the fence failed: it calls numpy on addresses."""
    model = torch.nn.Linear(30, 30)
    optimizer = torch.optim.SGD(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    ckpt.save(state, 1, mode="lazy").result()  # installs the hook

    @torch.compile(backend="eager")
    def call_hooks():
        for hook in torch_optimizer._global_optimizer_pre_hooks.values():
            hook(optimizer, (), {})

    for step in range(2, 8):
        handle = ckpt.save(state, step, mode="lazy")
        call_hooks()
        handle.result()


@pytest.mark.process
def test_the_hook_is_installed_without_torchs_compiler():
    """To import dynamo took 2.7 s of the first lazy save."""
    arm = "import sys; from penstock.core.save import fence; fence.arm(object(), 1.0)"
    loaded = f"{arm}; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_not_fenced_even_if_the_lock_was_held(ckpt, outside):
    hold, handle = pending_save(ckpt)
    with hooks._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(10)  # rather than hang
            outside.step()
            fence.fence_all()  # like a restore in the child
            os._exit(40 + outside.steps)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 41
    assert list(fence._pending) == [ckpt._saver.job]
    hold.let_go.set()
    handle.result()

"""The stored state is the state at `save`, despite any later change."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading

import pytest
import torch
from tests.integration.support import memory
from tests.integration.training import (
    CAPTURE,
    TINY_BUDGET,
    Everything,
    Gate,
    Held,
    copies,
    differences,
    held_at,
    held_at_fence,
    held_checkpointer,
)
from torch import nn

from penstock import FenceTimeoutError, SaveAbortedError, TornSnapshotError

AMPLE = {"staging_bytes": "8 MiB"}
SOME_ENCODED = [{"match": "optimizer/**", "codecs": ["zstd"]}]
ALL_ENCODED = [{"match": "**", "codecs": ["lz4"]}]
BUDGETS_AND_RULES = pytest.mark.parametrize(
    ("budget", "rules"),
    [(AMPLE, []), (AMPLE, SOME_ENCODED), (TINY_BUDGET, []), (TINY_BUDGET, ALL_ENCODED)],
    ids=["ample raw", "ample some encoded", "tiny raw", "tiny all encoded"],
)


def stored(ckpt, step):
    """The state restored into fresh objects."""
    fresh = Everything(seed=99)
    ckpt.restore(
        fresh.state, step, exclude=["hold"] if "hold" in set(ckpt.open(step).keys()) else None
    )
    return fresh.snapshot()


# -- everything changes ------------------------------------------------------------------------


@BUDGETS_AND_RULES
def test_async_stores_the_state_at_save(store, gate, budget, rules, caplog):
    tiny = budget is TINY_BUDGET
    # Ample: nothing has been written when everything changes. Tiny: `save` must write most of it,
    # slowly, and the written part is not durable yet.
    store.block("seal" if tiny else "create", gate)
    if tiny:
        store.slow("write", 0.002)
    job = Everything()
    with held_checkpointer(store, rules=rules, **budget) as ckpt:
        expected = job.snapshot()
        handle = ckpt.save(job.state, 1)
        assert handle.captured.done()
        job.mutate_all()
        assert not handle.done()
        gate.set()
        report = handle.result()
        assert not differences(stored(ckpt, 1), expected)
        assert differences(job.snapshot(), expected)
    assert bool(report.straight_bytes) is tiny
    warnings = [r for r in caplog.records if "staging is too small" in r.message]
    assert len(warnings) == tiny


@BUDGETS_AND_RULES
def test_lazy_stores_the_state_at_save(store, gate, budget, rules):
    if budget is AMPLE:
        store.block("create", gate)
    job, hold = Everything(), Held()
    with held_checkpointer(store, rules=rules, **budget) as ckpt:
        expected = job.snapshot()
        handle = ckpt.save({"hold": hold, **job.state}, 1, mode="lazy")
        assert not handle.captured.done()
        job.mutate_the_rest()
        with held_at_fence(job.optimizer.step):
            assert not handle.captured.done()
            hold.let_go.set()
        job.mutate_all()
        gate.set()
        report = handle.result()
        assert not differences(stored(ckpt, 1), expected)
    model = sum(p.nbytes for p in job.model.parameters())
    assert report.deferred_bytes >= 3 * model  # weights and both moments
    assert bool(report.straight_bytes) is (budget is TINY_BUDGET)


@pytest.mark.parametrize("rules", [[], ALL_ENCODED], ids=["raw", "encoded"])
def test_async_waits_until_overflow_is_written(store, gate, rules):
    fault = store.block("create", gate)
    state = {"optimizer": {"moment": torch.arange(50_000)}}
    handles = []
    with held_checkpointer(store, rules=rules, **TINY_BUDGET) as ckpt:
        with held_at(CAPTURE, lambda: handles.append(ckpt.save(state, 1))):
            fault.reached.wait()  # the part with room is captured, or `save` would not write yet
            assert not handles
            gate.set()
        state["optimizer"]["moment"].zero_()
        assert handles[0].result().straight_bytes
        assert torch.equal(ckpt.load(1)["optimizer"]["moment"], torch.arange(50_000))


def test_async_waits_for_no_write_if_tensors_have_other_page_offsets(store, gate):
    def tensors(shift):
        whole = [torch.arange(9000.0 + 1024) for _ in range(3)]
        starts = [(shift - w.data_ptr()) % 4096 // w.itemsize for w in whole]
        return [w[start : start + 9000] for w, start in zip(whole, starts, strict=True)]

    with held_checkpointer(store) as ckpt:
        ckpt.save({"w": tensors(64)}, 1).result()  # 64 and 36,000 bytes: nine pages
        store.block("create", gate)
        expected = tensors(2048)  # ten
        handle = ckpt.save({"w": expected}, 2)
        assert not handle.done()
        gate.set()
        assert handle.result().straight_bytes == 0
        assert all(map(torch.equal, ckpt.load(2)["w"], expected))


def test_a_stuck_store_with_little_staging_holds_the_step_until_all_is_written(store, gate):
    """The other kind of hold: not a slow copy, but no staging."""
    model = nn.Linear(200, 200, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    train(model, optimizer)
    expected = copies([model.state_dict(), optimizer.state_dict()])
    store.block("create", gate)
    with held_checkpointer(store, **TINY_BUDGET) as ckpt:
        handle = ckpt.save({"model": model, "optimizer": optimizer}, 1, mode="lazy")
        backward(model)
        with held_at_fence(optimizer.step):
            assert not handle.captured.done()
            gate.set()
        assert handle.result().straight_bytes
        other = nn.Linear(200, 200, bias=False)
        fresh = torch.optim.SGD(other.parameters(), momentum=0.9)
        ckpt.restore({"model": other, "optimizer": fresh})
        assert not differences(copies([other.state_dict(), fresh.state_dict()]), expected)


@pytest.mark.parametrize(
    ("mode", "budget"), [("async", TINY_BUDGET), ("lazy", AMPLE)], ids=["async", "lazy"]
)
def test_many_saves_in_a_row_reuse_staging_without_mixing(store, mode, budget):
    store.slow("write", 0.001)
    job = Everything()
    expected = {}
    with held_checkpointer(store, on_busy="wait", mode=mode, **budget) as ckpt:
        for step in range(1, 6):
            expected[step] = job.snapshot()
            ckpt.save(job.state, step)
            job.step()
            job.mutate_the_rest()
        ckpt.wait()
        for step, snapshot in expected.items():
            assert not differences(stored(ckpt, step), snapshot), step


# -- kinds of steps ------------------------------------------------------------------------------


def train(model, optimizer):
    backward(model)
    optimizer.step()


def backward(model):
    model.zero_grad()
    model(torch.randn(4, model.in_features)).sum().backward()


class Wrapper:
    """Like those of accelerators: not an `Optimizer`, and unknown to Penstock."""

    def __init__(self, optimizer):
        self.inner = optimizer

    def step(self):
        self.inner.step()


def plain_step(model, optimizer):
    return optimizer.step


def step_by_a_wrapper(model, optimizer):
    return Wrapper(optimizer).step


def step_by_a_scaler(model, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))  # starts its state
    return lambda: scaler.step(optimizer)


def step_by_a_scheduled_closure(model, optimizer):
    return lambda: optimizer.step(lambda: model(torch.randn(4, 60)).sum())


def step_of_an_optimizer_outside_the_tree(model, optimizer):
    return torch.optim.SGD(model.parameters(), lr=1.0).step


def step_of_a_fused_optimizer_outside_the_tree(model, optimizer):
    return torch.optim.AdamW(model.parameters(), fused=True).step  # versions do not show it


WAYS_TO_STEP = [
    plain_step,
    step_by_a_wrapper,
    step_by_a_scaler,
    step_by_a_scheduled_closure,
    step_of_an_optimizer_outside_the_tree,
    step_of_a_fused_optimizer_outside_the_tree,
]


@pytest.fixture
def job():
    """A model of several chunks, and its optimizer with state."""
    torch.manual_seed(3)
    model = nn.Linear(60, 300)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer)
    backward(model)
    return model, optimizer


def job_snapshot(job):
    model, optimizer = job
    return copies([model.state_dict(), optimizer.state_dict()])


def stored_job(ckpt, step):
    model = nn.Linear(60, 300)
    optimizer = torch.optim.Adam(model.parameters())
    ckpt.restore({"model": model, "optimizer": optimizer}, step, include=["model", "optimizer"])
    return job_snapshot((model, optimizer))


class PendingSave:
    """A lazy save of `job`, held before the first deferred byte is captured."""

    def __init__(self, ckpt, job, step=1):
        self.expected = job_snapshot(job)
        self.hold = Held()
        state = {"hold": self.hold, "model": job[0], "optimizer": job[1]}
        self.handle = ckpt.save(state, step, mode="lazy")
        self.hold.reached.wait()

    def let_go(self):
        self.hold.let_go.set()


@pytest.fixture
def ckpt(store):
    with held_checkpointer(store) as ckpt:
        yield ckpt
        Gate.open_all()


@pytest.mark.parametrize("way", WAYS_TO_STEP, ids=lambda w: w.__name__)
def test_every_optimizer_step_waits_for_a_pending_capture(ckpt, job, way):
    step = way(*job)
    save = PendingSave(ckpt, job)
    before = job_snapshot(job)[0]
    with held_at_fence(step):
        assert not differences(job_snapshot(job)[0], before)
        save.let_go()
    assert differences(job_snapshot(job)[0], before)
    save.handle.result()
    assert not differences(stored_job(ckpt, 1), save.expected)


def in_shared_memory():
    model = nn.Embedding(400, 60)
    model.share_memory()
    return model, True


def renormalized_in_forward():
    return nn.Embedding(400, 60, max_norm=0.5), True


def of_another_tree():
    return nn.Embedding(400, 60), False


class ListsOfState(torch.optim.SGD):
    """Has its state in lists, like Shampoo's preconditioners."""

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            for tensor in self.state[parameter].setdefault("all", [torch.zeros_like(parameter)]):
                tensor.add_(parameter.grad)


@pytest.mark.parametrize(
    ("make", "optimizer_class"),
    [
        (in_shared_memory, torch.optim.SGD),
        (renormalized_in_forward, ListsOfState),
        (of_another_tree, torch.optim.SGD),
    ],
)
def test_a_step_fences_its_state_even_without_deferred_parameters(ckpt, make, optimizer_class):
    model, is_stored = make()
    optimizer = optimizer_class(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.arange(400)).sum().backward()
    optimizer.step()
    hold = Held()
    expected = copies(optimizer.state_dict())
    state = {"hold": hold, "optimizer": optimizer} | ({"model": model} if is_stored else {})
    handle = ckpt.save(state, 1, mode="lazy")
    with held_at_fence(optimizer.step):
        hold.let_go.set()
    assert handle.result().deferred_bytes >= model.weight.nbytes
    stored = ckpt.load(1, include="optimizer")["optimizer"]
    assert not differences(stored["state"], expected["state"])


def test_an_optimizer_that_steps_in_backward_waits(ckpt):
    """One optimizer per parameter, as for large models: they step from inside autograd."""
    torch.manual_seed(3)
    model = nn.Linear(60, 300)
    each = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(parameter):
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    backward(model)
    hold = Held()
    expected = copies([model.state_dict(), *(o.state_dict() for o in each.values())])
    optimizers = {"weight": each[model.weight], "bias": each[model.bias]}
    handle = ckpt.save({"hold": hold, "model": model, "opt": optimizers}, 1, mode="lazy")
    hold.reached.wait()
    with held_at_fence(lambda: backward(model)):
        hold.let_go.set()
    assert differences(copies(model.state_dict()), expected[0])
    handle.result()
    tree = ckpt.load(1)
    assert not differences(dict(tree["model"]), dict(expected[0]))
    for key, state in zip(optimizers, expected[1:], strict=True):
        (momentum,) = [s["momentum_buffer"] for s in state["state"].values()]
        assert not differences(ckpt.open(1)[f"opt/{key}/state/{key}/momentum_buffer"], momentum)


def test_a_renormalizing_embedding_is_captured_before_save_returns(ckpt):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(400, 60, max_norm=0.5), nn.Linear(60, 300))
    optimizer = torch.optim.Adam(model.parameters())
    hold = Held()
    expected = copies(dict(model.state_dict()))
    handle = ckpt.save({"hold": hold, "model": model, "optimizer": optimizer}, 1, mode="lazy")
    hold.reached.wait()
    model(torch.arange(400))
    assert differences(copies(dict(model.state_dict())), expected)
    hold.let_go.set()
    handle.result()
    assert not differences(dict(ckpt.load(1)["model"]), expected)


@pytest.mark.parametrize("whose", ["own", "another"])
def test_restore_waits_for_every_pending_capture(ckpt, job, whose):
    state = {"model": job[0], "optimizer": job[1]}
    ckpt.save(state, 0, mode="blocking")
    first = job_snapshot(job)
    with held_checkpointer(memory()) as other:
        other.save(state, 0, mode="blocking")
        train(*job)
        save = PendingSave(ckpt, job)
        restoring = ckpt if whose == "own" else other
        with held_at_fence(lambda: restoring.restore(state, 0)):
            assert not differences(job_snapshot(job), save.expected)
            save.let_go()
    assert not differences(job_snapshot(job), first)
    save.handle.result()
    assert not differences(stored_job(ckpt, 1), save.expected)


# -- changes unseen by fences ----------------------------------------------------------------------


def clamp(model, optimizer):
    with torch.no_grad():
        model.weight.clamp_(-0.01, 0.01)
    return "model/weight"


def ema_swap(model, optimizer):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter))
    return "model/bias"


def load_state_dict(model, optimizer):
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    return "model/weight"


def change_of_optimizer_state(model, optimizer):
    optimizer.state[model.weight]["exp_avg"].zero_()
    return "optimizer/state/weight/exp_avg"


UNFENCED = [
    clamp,
    ema_swap,
    load_state_dict,
    change_of_optimizer_state,
]


@pytest.mark.parametrize("change", UNFENCED, ids=lambda c: c.__name__)
def test_a_change_before_the_fence_fails_that_save_and_no_other(ckpt, job, change, caplog):
    ckpt.save({"model": job[0], "optimizer": job[1]}, 0, mode="blocking")
    at_zero = job_snapshot(job)
    save = PendingSave(ckpt, job)
    path = change(*job)
    job[1].zero_grad()
    with held_at_fence(job[1].step):
        save.let_go()
    for _ in range(2):
        with pytest.raises(TornSnapshotError, match=rf"{path}.* changed before the fence"):
            save.handle.result()
    assert isinstance(save.handle.captured.exception(), TornSnapshotError)
    ckpt.wait()
    assert ckpt.steps() == [0]
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    later = job_snapshot(job)
    ckpt.save({"model": job[0], "optimizer": job[1]}, 2, mode="lazy").result()
    assert not differences(stored_job(ckpt, 0), at_zero)
    assert not differences(stored_job(ckpt, 2), later)


@pytest.mark.parametrize("change", [clamp, change_of_optimizer_state], ids=lambda c: c.__name__)
def test_after_an_explicit_fence_anything_may_change(ckpt, job, change):
    save = PendingSave(ckpt, job)
    with held_at_fence(ckpt.fence):
        save.let_go()
    assert save.handle.captured.done()
    change(*job)
    job[0].weight.data.zero_()
    save.handle.result()
    assert not differences(stored_job(ckpt, 1), save.expected)


@pytest.mark.parametrize("fenced", [False, True])
def test_a_change_after_the_capture_is_refused_until_it_was_awaited(ckpt, store, gate, job, fenced):
    """Versions alone cannot distinguish it from a change during the capture."""
    store.block("create", gate)
    save = PendingSave(ckpt, job)
    save.let_go()
    if fenced:
        save.handle.captured.result()  # as good as a fence
    else:
        concurrent.futures.wait([save.handle.captured])  # not on a training thread
    clamp(*job)
    gate.set()
    if fenced:
        save.handle.result()
        assert not differences(stored_job(ckpt, 1), save.expected)
        return
    with pytest.raises(TornSnapshotError, match="model/weight changed before the fence"):
        save.handle.result()
    assert ckpt.steps() == []


def data_write(model, optimizer):
    model.weight.data.zero_()


def foreach_write(model, optimizer):
    torch._foreach_mul_([p.data for p in model.parameters()], 0.5)


def clipping_of_data(model, optimizer):
    model.weight.data.clamp_(-0.01, 0.01)


def numpy_write(model, optimizer):
    model.weight.detach().numpy()[:] = 0


@pytest.mark.parametrize(
    ("change", "when"),
    [
        (data_write, "before the capture"),
        (data_write, "after the capture"),
        (foreach_write, "after the capture"),
        (clipping_of_data, "after the capture"),
        (numpy_write, "after the capture"),
    ],
)
def test_change_that_torch_does_not_count_fails_that_save(ckpt, store, job, change, when):
    gate = Gate()
    store.block("create", gate)  # or it may be committed before the change
    save = PendingSave(ckpt, job)
    if when == "before the capture":
        change(*job)
        save.let_go()
    else:
        save.let_go()
        concurrent.futures.wait([save.handle.captured])
        change(*job)
    job[1].step()
    gate.set()
    with pytest.raises(TornSnapshotError, match=r"model/weight.* changed before the fence"):
        save.handle.result()
    assert ckpt.steps() == []


def test_averaged_weights_swapped_in_and_out_fail_that_save(ckpt, store, gate, job):
    store.block("create", gate)  # or it may be committed before the swap back
    model = job[0]
    save = PendingSave(ckpt, job)
    trained = copies(dict(model.state_dict()))
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    save.let_go()
    concurrent.futures.wait([save.handle.captured])
    for name, parameter in model.named_parameters():
        parameter.data.copy_(trained[name])
    job[1].step()
    gate.set()
    with pytest.raises(TornSnapshotError):
        save.handle.result()


def test_change_of_channels_last_weights_fails_that_save(ckpt, store, gate):
    store.block("create", gate)
    model = nn.Conv2d(8, 64, 3, bias=False).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not model.weight.is_contiguous()
    save = PendingSave(ckpt, (model, optimizer))
    save.let_go()
    concurrent.futures.wait([save.handle.captured])
    model.weight.data.mul_(0.9)
    with pytest.raises(TornSnapshotError, match="model/weight"):
        ckpt.fence()
    gate.set()


def test_another_trainers_step_does_not_fence_these_tensors(store, gate, job):
    store.block("create", gate)
    other = nn.Linear(3, 3)
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)
    backward(other)
    with held_checkpointer(store, defer=()) as ckpt:
        handle = ckpt.save({"model": job[0], "optimizer": job[1]}, 1, mode="lazy")
        stranger.step()
        clamp(*job)
        gate.set()
        with pytest.raises(TornSnapshotError, match="model/weight changed before the fence"):
            handle.result()
        assert ckpt.steps() == []


# -- memory that moves -----------------------------------------------------------------------------


def move(model, optimizer):
    """To shared memory, as torch.multiprocessing moves tensors that it sends."""
    model.share_memory()
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.share_memory_()


@pytest.mark.parametrize("when", ["before the capture", "after the capture"])
def test_tensors_may_move_to_shared_memory_before_they_are_captured(ckpt, job, when):
    save = PendingSave(ckpt, job)
    if when == "after the capture":
        save.let_go()
        concurrent.futures.wait([save.handle.captured])
    move(*job)
    junk = [torch.full_like(p, 7) for p in job[0].parameters() for _ in range(20)]
    save.let_go()
    job[1].step()
    save.handle.result()
    assert not differences(stored_job(ckpt, 1), save.expected)
    del junk


def test_memory_written_in_place_does_not_move_meanwhile(store, gate):
    tensor = torch.arange(60_000)
    expected = tensor.clone()
    fault = store.block("write", gate)
    with held_checkpointer(store) as ckpt:
        saving = threading.Thread(target=lambda: ckpt.save({"t": tensor}, 1, mode="blocking"))
        saving.start()
        fault.reached.wait()
        with held_at(("penstock.providers.tensor.holds", "__enter__"), tensor.share_memory_):
            assert not tensor.is_shared()
            gate.set()
        saving.join()
        assert tensor.is_shared()
        assert torch.equal(ckpt.load(1)["t"], expected)


def test_tensors_shared_with_another_process_are_not_deferred(ckpt, job):
    """No fence of this process blocks the other one's step."""
    model, optimizer = job
    model.share_memory()
    save = ckpt.save({"model": model, "optimizer": optimizer}, 1, mode="lazy")
    assert save.result().deferred_bytes == sum(
        t.nbytes for s in optimizer.state.values() for t in s.values()
    )


class Mover:
    """Moves a tensor to other memory at the first request for its state."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.asked = 0

    def state_dict(self):
        self.asked += 1
        self.tensor.share_memory_()
        return {"asked": self.asked}

    def load_state_dict(self, state):
        pass


def test_state_that_moves_during_description_is_redescribed(ckpt):
    """Freed memory is reused: two tensors would be taken for one at the same address."""
    tensor = torch.arange(5000)
    mover = Mover(tensor)
    ckpt.save({"tensor": tensor, "mover": mover}, 1, mode="blocking")
    assert mover.asked == 2
    assert torch.equal(ckpt.load(1, include="tensor")["tensor"], tensor)


def test_the_step_is_not_a_change(ckpt, job):
    """Versions are compared before the step continues, not after it."""
    for step in range(1, 4):
        save = PendingSave(ckpt, job, step)
        with held_at_fence(job[1].step):
            save.let_go()
        save.handle.result()
    assert ckpt.steps() == [1, 2, 3]


def test_a_change_by_another_thread_while_save_captures_fails_it(store):
    loose, hold = torch.zeros(9000), Held()
    with held_checkpointer(store, defer=()) as ckpt:
        handles = []
        saving = threading.Thread(
            target=lambda: handles.append(ckpt.save({"a": loose, "hold": hold}, 1))
        )
        saving.start()
        hold.reached.wait()
        loose.add_(1)
        hold.let_go.set()
        saving.join()
        with pytest.raises(TornSnapshotError, match=r"a changed while save\(\) captured it"):
            handles[0].result()
        assert ckpt.steps() == []


# -- the explicit fence, and its timeout -----------------------------------------------------------


def test_fence_timeout_raises_and_the_save_continues(ckpt, job):
    save = PendingSave(ckpt, job)
    with pytest.raises(FenceTimeoutError, match="capture of step 1"):
        ckpt.fence(timeout=0.01)
    assert not save.handle.done()
    save.let_go()
    ckpt.fence()
    assert save.handle.captured.done()
    save.handle.result()
    assert not differences(stored_job(ckpt, 1), save.expected)


def test_fence_without_a_save_returns(ckpt):
    ckpt.fence()
    ckpt.fence(timeout=0)


def test_defer_covers_other_tensors(store, job):
    model, optimizer = job
    ema = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = copies(ema)
    size = sum(t.nbytes for t in ema.values())
    deferred = []
    for defer in ((), ("ema/**", "hold")):
        hold = Held()
        with held_checkpointer(store, defer=defer) as ckpt:
            step = 1 + len(deferred)
            state = {"hold": hold, "model": model, "optimizer": optimizer, "ema": ema}
            if not defer:
                hold.let_go.set()
            handle = ckpt.save(state, step, mode="lazy")
            with held_at_fence(optimizer.step) if defer else contextlib.nullcontext():
                hold.let_go.set()
            ckpt.fence()
            for tensor in ema.values():
                tensor.lerp_(torch.ones(()), 0.5)
            deferred.append(handle.result().deferred_bytes)
            assert not differences(ckpt.load(step, include="ema/**")["ema"], expected)
            expected = copies(ema)
    assert deferred[1] >= deferred[0] + size


def test_state_an_optimizer_may_change_outside_step_is_never_deferred(store):
    """Tensor learning rates, `capturable` and `differentiable`: no hook sees them change."""
    parameter = nn.Parameter(torch.randn(9000))
    for options in ({"capturable": True}, {"differentiable": True}, {"lr": torch.tensor(0.1)}):
        optimizer = torch.optim.AdamW([parameter], **options)
        parameter.grad = torch.ones_like(parameter)
        with torch.no_grad():
            torch.optim.AdamW([parameter]).step()
        state = {"w": parameter, "optimizer": optimizer}
        with held_checkpointer(memory()) as ckpt:
            report = ckpt.save(state, 1, mode="lazy").result()
        assert report.deferred_bytes == (parameter.nbytes if "lr" in options else 0)


def test_lazy_save_that_defers_nothing_logs_why_once(store, job, caplog):
    model, optimizer = job
    with held_checkpointer(store, mode="lazy", defer=()) as ckpt:
        ckpt.save({"epoch": 1}, 1).result()  # no tensors: nothing to defer
        ckpt.save({"model": model, "optimizer": optimizer}, 2).result()
        assert not caplog.records
        for step in (3, 4):
            ckpt.save({"model": model}, step).result()
        ckpt.save({"model": model}, 5, mode="async").result()
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "step 3: the lazy save defers nothing" in record.message
        assert 'defer="ema/**"' in record.message


def test_fence_timeout_lets_training_continue_and_fails_the_save(store, gate, job, caplog):
    store.block("create", gate)
    order = []
    model, optimizer = job
    with held_checkpointer(
        store,
        fence_timeout_s=0.05,  # short: no data moves meanwhile
        **TINY_BUDGET,
    ) as ckpt:
        handle = ckpt.save({"model": model, "optimizer": optimizer}, 1, mode="lazy")
        for name in ("durable", "committed", "captured"):
            getattr(handle, name).add_done_callback(lambda _, name=name: order.append(name))
        before = job_snapshot(job)
        optimizer.step()  # does not raise
        assert differences(job_snapshot(job), before)
        assert order == ["captured", "committed", "durable"]
        for _ in range(2):
            with pytest.raises(FenceTimeoutError, match="staging_bytes or fence_timeout_s"):
                handle.result()
        assert isinstance(handle.captured.exception(), SaveAbortedError)
        optimizer.step()  # nothing is pending now
        gate.set()
        ckpt.wait()
        assert ckpt.steps() == []
        assert [r.message for r in caplog.records if r.levelno >= logging.ERROR] == [
            f"save of step 1 failed: {handle.durable.exception()}"
        ]
        later = job_snapshot(job)
        ckpt.save({"model": model, "optimizer": optimizer}, 2, mode="lazy").result()
        assert ckpt.steps() == [2]
        assert not differences(stored_job(ckpt, 2), later)

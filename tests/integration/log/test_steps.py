"""Unusual steps: each replays to the same bits, or ends the log by name."""

import pytest
import torch
from tests.integration.support import memory
from torch import nn, optim

import penstock
from penstock.core.log.steps import StepWatch
from penstock.core.plugins.registry import Registry
from penstock.testing.faults import FaultyBackend

LAST = 6


def bits(state):
    """All tensors of a state, as bytes."""
    found = []
    for weight in state["weights"]:
        for optimizer in state["optimizers"]:
            held = optimizer.state.get(weight, {})
            found += [v for _, v in sorted(held.items()) if isinstance(v, torch.Tensor)]
        found.append(weight.detach())
    return [tensor.contiguous().view(-1).view(torch.uint8).tolist() for tensor in found]


def state_of(*optimizers, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in (5, 70)]
    return {"weights": weights, "optimizers": [make(weights) for make in optimizers]}


def backward(state, number, scale=1.0):
    generator = torch.Generator().manual_seed(number)
    for weight in state["weights"]:
        weight.grad = None
        grad = torch.randn(weight.shape, generator=generator) * scale
        if weight.requires_grad:
            weight.grad = grad.to(weight.dtype)


def step(state, number):
    backward(state, number)
    for optimizer in state["optimizers"]:
        optimizer.step()


def replayed(make, step=step, *, refused=None, caplog=None):
    """Train, log, and compare the replay; with `refused`, expect an end by this name instead."""
    store = memory()
    state = make()
    wanted = {}
    with penstock.Checkpointer(store) as ckpt:
        for number in range(LAST + 1):
            step(state, number)
            wanted[number] = bits(state)
            if number == 1:
                ckpt.save(state, number, mode="blocking")
            elif number > 1:
                ckpt.log(state, number)
    fresh = make(seed=9)
    with penstock.Checkpointer(store) as ckpt:
        last = ckpt.restore(fresh).step
    assert bits(fresh) == wanted[last]
    if refused is None:
        assert last == LAST
    else:
        assert last < LAST
        assert refused in caplog.text


def adamw(weights, **options):
    return optim.AdamW(weights, **{"lr": 0.1, **options})


NAN = {
    torch.float16: (torch.int16, [0x7E01, 0x7C02, -1, 0x7C00]),
    torch.bfloat16: (torch.int16, [0x7FC1, 0x7F82, -1, 0x7F80]),
    torch.float32: (torch.int32, [0x7FC00123, 0x7F800001, -1, 0x7F800000]),
    torch.float64: (torch.int64, [0x7FF8000000000123, 0x7FF0000000000001, -1, 0x7FF << 52]),
}


@pytest.mark.parametrize("dtype", NAN)
def test_payloads_of_nan_and_infinity(dtype):
    def odd_step(state, number):
        backward(state, number)
        integers, patterns = NAN[dtype]
        if number == 3:
            for weight in state["weights"]:
                weight.grad[:4] = torch.tensor(patterns, dtype=integers).view(dtype)
        state["optimizers"][0].step()

    replayed(lambda seed=0: state_of(adamw, dtype=dtype, seed=seed), odd_step)


@pytest.mark.parametrize("foreach", [False, True])
def test_rate_that_is_a_tensor_and_changes_in_place_after_the_step(foreach):
    def make(seed=0):
        # torch takes a tensor together with foreach only if the optimizer is capturable.
        options = {"foreach": False} if not foreach else {"fused": True}
        return state_of(lambda w: adamw(w, lr=torch.tensor(0.1), **options), seed=seed)

    def decayed_step(state, number):
        step(state, number)
        state["optimizers"][0].param_groups[0]["lr"].mul_(0.5)

    replayed(make, decayed_step)


def test_rate_and_betas_changed_by_hand():
    def changed_step(state, number):
        group = state["optimizers"][0].param_groups[0]
        group["lr"], group["betas"] = 0.1 / (1 + number), (0.5 + number / 100, 0.9)
        step(state, number)
        group["weight_decay"] = number / 10

    replayed(lambda seed=0: state_of(adamw, seed=seed), changed_step)


@pytest.mark.parametrize("options", [{"maximize": True}, {"amsgrad": True, "maximize": True}])
def test_maximize(options):
    replayed(lambda seed=0: state_of(lambda w: adamw(w, **options), seed=seed))


@pytest.mark.filterwarnings("ignore:optimizers/0. the parameters of this optimizer have no names")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_differentiable_step_of_tensors_that_are_no_leaves_ends_the_log(caplog):
    """The log's check takes it on leaves, where torch refuses it."""

    def make(seed=0):
        state = state_of(seed=seed)
        state["weights"] = [weight * 1 for weight in state["weights"]]
        state["optimizers"] = [optim.SGD(state["weights"], 0.1, differentiable=True)]
        return state

    def differentiable_step(state, number):
        generator = torch.Generator().manual_seed(number)
        for weight in state["weights"]:
            weight.grad = torch.randn(weight.shape, generator=generator)
        state["optimizers"][0].step()

    refused = "a leaf Variable that requires grad is being used in an in-place operation"
    replayed(make, differentiable_step, refused=refused, caplog=caplog)


def test_layer_that_is_frozen_and_thawed():
    def thawed_step(state, number):
        state["weights"][1].requires_grad_(number % 3 == 1)
        step(state, number)

    replayed(lambda seed=0: state_of(adamw, seed=seed), thawed_step)


def test_parameter_without_a_gradient_in_some_steps():
    def partial_step(state, number):
        backward(state, number)
        if number % 2:
            state["weights"][0].grad = None
        if number == 4:
            state["weights"][1].grad = None
        state["optimizers"][0].step()

    replayed(lambda seed=0: state_of(adamw, seed=seed), partial_step)


def test_two_optimizers_of_which_one_steps_every_second_time():
    def make(seed=0):
        return state_of(
            lambda w: adamw(w[:1]), lambda w: optim.SGD(w[1:], 0.1, momentum=0.9), seed=seed
        )

    def alternating_step(state, number):
        backward(state, number)
        state["optimizers"][0].step()
        if number % 2:
            state["optimizers"][1].step()

    replayed(make, alternating_step)


@pytest.mark.parametrize("empty", [False, True])
def test_group_added_after_the_save_ends_the_log(empty, caplog):
    def growing_step(state, number):
        if number == 3:
            added = [] if empty else [nn.Parameter(torch.ones(2))]
            state["optimizers"][0].add_param_group({"params": added})
        step(state, number)

    refused = "a parameter or the state of AdamW was changed outside a step"
    replayed(
        lambda seed=0: state_of(adamw, seed=seed), growing_step, refused=refused, caplog=caplog
    )


def scaled(scale, dtype=torch.float32, **options):
    """A training with small gradients and a scaler, which finds them infinite in step 3."""
    scalers = []

    def make(seed=0):
        scalers[:] = [torch.amp.GradScaler("cpu", init_scale=scale)]
        state = state_of(lambda w: adamw(w, **options), dtype=dtype, seed=seed)
        return {**state, "scaler": scalers[0]}

    def scaled_step(state, number):
        generator = torch.Generator().manual_seed(number)
        for optimizer in state["optimizers"]:
            optimizer.zero_grad()
        loss = sum(
            (weight.float() * torch.randn(weight.shape, generator=generator)).sum() * 1e-7
            for weight in state["weights"]
        )
        state["scaler"].scale(loss * (float("inf") if number == 3 else 1)).backward()
        state["scaler"].step(state["optimizers"][0])
        state["scaler"].update()

    return make, scaled_step


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 3.0), (torch.float64, 2.0**16)])
def test_step_that_a_scaler_skips(dtype, scale, fused):
    replayed(*scaled(scale, dtype, fused=fused))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fused_step_that_unscales_narrow_gradients_ends_the_log(dtype, caplog):
    """Its kernel uses the unscaled gradients before it rounds and stores them."""
    name = str(dtype).removeprefix("torch.")
    refused = f"AdamW unscales gradients of {name} in its fused step"
    replayed(*scaled(3.0, dtype, fused=True), refused=refused, caplog=caplog)


@pytest.mark.parametrize("codec", ["log8", "cast"])
def test_lossy_rule_is_named_at_the_first_call_and_no_log_begins(codec, caplog):
    store = memory()
    link = {"type": "cast", "to": "bfloat16"} if codec == "cast" else codec
    rules = [{"match": "optimizers/**/exp_avg_sq", "codecs": [link]}]
    state = state_of(adamw)
    with penstock.Checkpointer(store, rules=rules) as ckpt:
        step(state, 0)
        for saved in (1, 4):
            step(state, saved)
            ckpt.save(state, saved, mode="blocking")
            assert f"codec {codec} rounds" not in caplog.text or saved == 4
            for number in (saved + 1, saved + 2):
                step(state, number)
                assert not ckpt.log(state, number)
        assert caplog.text.count(f"steps are not logged: codec {codec} rounds optimizers/0/") == 1
        assert ckpt.latest() == 4
        # A restored state is exactly what the checkpoint holds.
        ckpt.restore(state)
        step(state, 5)
        assert ckpt.log(state, 5)
        wanted = bits(state)
    fresh = state_of(adamw, seed=9)
    with penstock.Checkpointer(store) as ckpt:
        assert ckpt.restore(fresh).step == 5
    assert bits(fresh) == wanted


def test_lossy_rule_that_matches_nothing_does_not_matter():
    rules = [{"match": "other/**/exp_avg_sq", "codecs": ["log8"]}]
    state = state_of(adamw)
    with penstock.Checkpointer(memory(), rules=rules) as ckpt:
        step(state, 1)
        ckpt.save(state, 1, mode="blocking")
        step(state, 2)
        assert ckpt.log(state, 2)


def test_step_whose_save_is_skipped_is_logged(gate):
    inner = memory()
    store = FaultyBackend(inner)
    state = state_of(adamw)
    with penstock.Checkpointer(store, on_busy="skip") as ckpt:
        for number in range(6):
            step(state, number)
            if number == 2:
                store.block("publish", gate, match="commits/")
            if number in {0, 2, 4}:
                ckpt.save(state, number)
            else:
                assert ckpt.log(state, number)
            if number == 0:
                ckpt.wait()
        gate.set()
        wanted = bits(state)
    fresh = state_of(adamw, seed=9)
    with penstock.Checkpointer(inner) as ckpt:
        assert ckpt.steps() == [0, 2]
        assert ckpt.restore(fresh).step == 5
    assert bits(fresh) == wanted


def test_gradients_of_an_entry_are_overwritten_only_after_it_is_written():
    state = state_of(lambda weights: optim.SGD(weights, 0.1))
    seen = []

    def idle():
        seen.extend(step.grads.flat["float32"].clone() for step in first)

    first = []
    registry = Registry()
    watch = StepWatch(registry.replayer, lambda *_: None, lambda _: None, idle)
    watch.keeps = True
    watch.start(state["optimizers"])
    step(state, 0)
    first += watch.steps
    wanted = first[0].grads.flat["float32"].clone()
    watch.clear()
    step(state, 1)
    watch.stop()
    assert [grads.tolist() for grads in seen] == [wanted.tolist()]
    assert first[0].grads.flat["float32"].tolist() != wanted.tolist()

"""The first steps of a run are replayed in the background, and named if they cannot be."""

import pytest
import torch
from tests.integration.log.trainings import Training, equal
from torch import nn, optim

import penstock
from penstock.core.abc import API_VERSION, Replayer, Unit
from penstock.core.log import proof
from penstock.core.log.steps import attributes_of
from penstock.core.plugins.registry import Registry
from penstock.providers.replayer import TorchReplayer


class Drifting(optim.Optimizer):
    """An optimizer that also depends on a number that no state has."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.taken = 0

    @torch.no_grad()
    def step(self):
        self.taken += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] / self.taken * parameter.grad)


class Credulous(Replayer):
    """Believes that steps of `Drifting` depend on gradients and options only."""

    name = "credulous"
    api_version = API_VERSION

    def handles(self, optimizer):
        return isinstance(optimizer, Drifting)


class Careful(Credulous):
    """Logs the number, too."""

    name = "careful"
    api_version = API_VERSION

    def unit(self, optimizer):
        return Unit.ELEMENT

    def capture_before(self, optimizer):
        return {"taken": optimizer.taken}

    def step(self, optimizer, captured):
        optimizer.taken = captured["taken"]
        optimizer.step()


def train(root, replayer, seed=0):
    registry = Registry()
    registry.register(replayer)
    torch.manual_seed(seed)
    model = nn.Linear(8, 3)
    optimizer = Drifting(model.parameters())
    optimizer.taken = 10
    state = {"model": model, "optimizer": optimizer, "rng": penstock.Rng()}
    with penstock.Checkpointer(root, registry=registry) as ckpt:
        first = ckpt.resume(state)
        for step in range(first, first + 7):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            if step % 5:
                ckpt.log(state, step)
            else:
                ckpt.save(state, step, mode="blocking")
        latest = ckpt.latest()
    return first, latest, model.weight.detach().clone()


def test_replayer_that_forgets_something_is_named_at_once(tmp_path, caplog):
    assert train(tmp_path, Credulous)[1] == 5  # saved; the save began no other log
    assert "after step 2: a replay of the step of optimizer gives other bits" in caplog.text
    assert "This process logs no more." in caplog.text


def test_replayer_that_captures_it_replays_to_the_same_bits(tmp_path):
    _, latest, weight = train(tmp_path, Careful)
    assert latest == 6
    registry = Registry()
    registry.register(Careful)
    model = nn.Linear(8, 3)
    state = {"model": model, "optimizer": Drifting(model.parameters()), "rng": penstock.Rng()}
    with penstock.Checkpointer(tmp_path, registry=registry) as ckpt:
        assert ckpt.restore(state).replayed_steps == 1
    assert torch.equal(model.weight, weight)


def test_proof_shares_nothing_that_a_step_may_change():
    model = nn.Linear(8, 3)
    optimizer = Drifting(model.parameters())
    optimizer.taken = torch.ones(())
    optimizer.own = {"parameters": [*model.parameters()], "counts": [1]}
    optimizer.generator = torch.Generator()
    state = optimizer.generator.get_state()
    copied = proof.begin_proof(optimizer, Careful(), attributes_of(optimizer)).copied
    copied.taken += 1
    copied.own["counts"].append(2)
    torch.rand(1, generator=copied.generator)
    with torch.no_grad():
        copied.own["parameters"][0].zero_()
    assert optimizer.taken == 1
    assert optimizer.own["counts"] == [1]
    assert torch.equal(optimizer.generator.get_state(), state)
    assert model.weight.any()
    assert not copied.param_groups[0]["params"][0].any()


class Noisy(optim.Optimizer):
    """Adds noise from some step on, as SGLD does after a burn-in."""

    def __init__(self, parameters, noise_from, generator=None):
        super().__init__(parameters, {"lr": 0.1, "taken": 0})
        self.noise_from, self.generator = noise_from, generator

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["taken"] += 1
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad)
                if group["taken"] > self.noise_from:
                    noise = torch.randn(parameter.shape, generator=self.generator)
                    parameter.add_(noise, alpha=0.01)


class NoisyReplayer(Replayer):
    """Logs the state of the optimizer's own generator."""

    name = "noisy"
    api_version = API_VERSION

    def handles(self, optimizer):
        return isinstance(optimizer, Noisy)

    def capture_before(self, optimizer):
        counts = [group["taken"] for group in optimizer.param_groups]
        own = optimizer.generator
        return {"counts": counts} | ({} if own is None else {"random": own.get_state()})

    def step(self, optimizer, captured):
        for group, count in zip(optimizer.param_groups, captured["counts"], strict=True):
            group["taken"] = count
        if optimizer.generator is not None:
            optimizer.generator.set_state(captured["random"])
        optimizer.step()


def train_with_noise(root, noise_from, generator=None, *, logs=True):
    """Save step 0, and log six steps; return the weights."""
    registry = Registry()
    registry.register(NoisyReplayer)
    torch.manual_seed(3)
    model = nn.Linear(8, 3)
    optimizer = Noisy(model.parameters(), noise_from, generator)
    state = {"model": model, "optimizer": optimizer, "rng": penstock.Rng()}
    with penstock.Checkpointer(root, registry=registry) as ckpt:
        for step in range(7):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            if step and logs:
                ckpt.log(state, step)
                ckpt._log.recorder.flush()
            elif not step:
                ckpt.save(state, step, mode="blocking")
    return model.weight.detach().clone()


def restore_noise(root, noise_from, generator=None):
    registry = Registry()
    registry.register(NoisyReplayer)
    model = nn.Linear(8, 3)
    optimizer = Noisy(model.parameters(), noise_from, generator)
    with penstock.Checkpointer(root, registry=registry) as ckpt:
        step = ckpt.restore({"model": model, "optimizer": optimizer, "rng": penstock.Rng()}).step
    return step, model.weight


@pytest.mark.parametrize("noise_from", [0, 4])
def test_noise_from_the_global_generator_ends_the_log(tmp_path, caplog, noise_from):
    weight = train_with_noise(tmp_path / "logged", noise_from)
    last = max(noise_from - 1, 0)
    draws = "Noisy draws from the global generator of torch in its steps"
    assert f"the log of gradients ends after step {last}: {draws}" in caplog.text
    assert restore_noise(tmp_path / "logged", noise_from)[0] == last
    # No replay in the background drew from the generator of the training.
    assert torch.equal(weight, train_with_noise(tmp_path / "plain", noise_from, logs=False))


def test_noise_from_a_captured_generator_is_replayed(tmp_path):
    weight = train_with_noise(tmp_path, 2, torch.Generator().manual_seed(1))
    step, replayed = restore_noise(tmp_path, 2, torch.Generator())
    assert step == 6
    assert torch.equal(weight, replayed)


class Brittle(Careful):
    """Fails once a run is restored."""

    name = "careful"
    api_version = API_VERSION

    def step(self, optimizer, captured):
        raise KeyError("taken")


def test_replayer_that_fails_leaves_the_checkpoint(tmp_path, caplog):
    train(tmp_path, Careful)
    registry = Registry()
    registry.register(Brittle)
    model = nn.Linear(8, 3)
    state = {"model": model, "optimizer": Drifting(model.parameters()), "rng": penstock.Rng()}
    with penstock.Checkpointer(tmp_path, registry=registry) as ckpt:
        assert ckpt.restore(state).step == 5
    assert "so step 5 is restored: the step of optimizer failed: KeyError: 'taken'" in caplog.text


class Silent(Careful):
    """Fails in the hook of the second step."""

    name = "silent"
    api_version = API_VERSION

    def capture(self, optimizer):
        if optimizer.taken == 12:
            raise OSError("no sensor")
        return {}


def test_replayer_that_fails_in_training_ends_the_log_only(tmp_path, caplog):
    plain = train(tmp_path / "careful", Careful)[2]
    assert torch.equal(train(tmp_path / "silent", Silent)[2], plain)
    assert "after step 0: the replayer of Drifting failed: OSError: no sensor" in caplog.text


# `test_replay.py` logs with all others: a failed proof would end the log.
@pytest.mark.parametrize("kind", ["AdamW foreach", "SGD fused", "Adafactor"])
def test_optimizers_of_torch_pass(tmp_path, kind, caplog, monkeypatch):
    checked = []
    check = proof.Proof.check

    def noting(self, *arguments):
        check(self, *arguments)
        checked.append(len(self.chosen))

    monkeypatch.setattr(proof.Proof, "check", noting)
    training = Training(kind, "clip in its own hook")
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save(training.state, 0)
        for step in range(1, 5):
            training.step()
            assert ckpt.log(training.state, step)
        bits = training.bits()
    assert checked == [6, 6]
    assert not caplog.text.count("ends")
    other = Training(kind, "clip in its own hook", seed=4)
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.restore(other.state)
    assert equal(bits, other.bits())


def test_proof_copies_at_most_16_mib_of_parameters():
    parameters = [nn.Parameter(torch.zeros(3 << 20)) for _ in range(2)]
    optimizer = optim.SGD(parameters, 0.1)
    begun = proof.begin_proof(optimizer, TorchReplayer(), vars(optimizer))
    assert begun.chosen == {0}

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

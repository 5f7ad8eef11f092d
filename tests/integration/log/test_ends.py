"""Never a wrong entry: what cannot be replayed ends the log by name."""

import weakref

import pytest
import torch
from tests.integration.log.trainings import Training, equal

import penstock
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.testing.faults import FaultyBackend


def begun(url):
    """A checkpointer with a checkpoint of step 1, and one entry."""
    training, ckpt = Training(), penstock.Checkpointer(url)
    training.step()
    ckpt.save(training.state, 1, mode="blocking")
    training.step()
    assert ckpt.log(training.state, 2)
    return training, ckpt


def in_place(training):
    with torch.no_grad():
        training.model[0].weight.mul_(0.5)
    training.step()


def clamped(training):
    training.step()
    with torch.no_grad():
        training.model[0].weight.clamp_(-0.01, 0.01)


def clamped_through_data(training):
    training.step()
    training.model[0].weight.data.clamp_(-0.01, 0.01)


def momentum(training):
    training.optimizer.state[training.model[0].weight]["exp_avg"].zero_()
    training.step()


def twice(training):
    training.step()
    training.step()


def outside(training):
    other = torch.optim.SGD(training.model.parameters(), 0.1)
    training.step()
    other.step()


def without_step(training):
    with torch.no_grad():
        training.model[0].weight += 1


def through_data(training):
    weight = training.model[0].weight
    weight.data = weight.data * 2


def lbfgs(training):
    training.optimizer.zero_grad()
    other = torch.optim.LBFGS(training.model.parameters(), 0.1)
    other.step(lambda: training._backward(0))


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (in_place, "a parameter or the state of AdamW was changed outside a step"),
        (clamped, "a parameter or the state of AdamW was changed outside a step"),
        (clamped_through_data, "a parameter of AdamW was changed through Tensor.data after a step"),
        (momentum, "a parameter or the state of AdamW was changed outside a step"),
        (twice, "AdamW stepped twice without a call of log"),
        (outside, "a parameter or the state of AdamW was changed outside a step"),
        (lbfgs, "a parameter or the state of AdamW was changed outside a step"),
        (through_data, "a parameter or the state of AdamW was changed outside a step"),
        (without_step, "a parameter or the state of AdamW was changed outside a step"),
    ],
)
def test_log_ends_by_name_and_the_next_save_begins_another(tmp_path, caplog, act, reason):
    training, ckpt = begun(tmp_path)
    with ckpt:
        act(training)
        ckpt.log(training.state, 3)
        ckpt._log.recorder.flush()
        assert reason in caplog.text
        assert ckpt.latest() == 2
        training.step()
        assert not ckpt.log(training.state, 4)
        ckpt.save(training.state, 5)
        training.step()
        assert ckpt.log(training.state, 6)
        bits = training.bits()
    other = Training(seed=9)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(other.state).step == 6
    assert equal(bits, other.bits())


def test_optimizer_that_is_not_in_the_state_ends_the_log(tmp_path, caplog):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.1)
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save({"weight": weight}, 1)
        weight.grad = torch.ones(3)
        optimizer.step()
        assert not ckpt.log({"weight": weight}, 2)
    assert "SGD changed memory of the state, but is not in the state" in caplog.text


def test_another_group_of_parameters_ends_the_log(tmp_path, caplog):
    training, ckpt = begun(tmp_path)
    with ckpt:
        training.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        training.optimizer.step()
        assert not ckpt.log(training.state, 3)
    assert "AdamW was changed outside a step" in caplog.text


@pytest.mark.parametrize(
    ("set_to_none", "reason"),
    [(True, "the gradients are gone"), (False, "a gradient was changed after the step")],
)
def test_first_call_after_zero_grad_ends_the_log(tmp_path, caplog, set_to_none, reason):
    training = Training()
    with penstock.Checkpointer(tmp_path) as ckpt:
        training.step()
        ckpt.save(training.state, 1)
        training.step()
        training.optimizer.zero_grad(set_to_none=set_to_none)
        assert not ckpt.log(training.state, 2)
        assert reason in caplog.text
        assert "the first call must come before zero_grad" in caplog.text.replace("\n", " ")


def zeroed(training):
    training.optimizer.zero_grad(set_to_none=False)


def zeroed_through_data(training):
    for parameter in training.model.parameters():
        parameter.grad.data.zero_()


def dropped(training):
    training.optimizer.zero_grad()


@pytest.mark.parametrize("change", [zeroed, zeroed_through_data, dropped])
def test_gradients_may_change_before_and_after_the_call(tmp_path, change):
    training, ckpt = begun(tmp_path)
    with ckpt:
        for number in (3, 4):
            training.step()
            change(training)
            assert ckpt.log(training.state, number)
        training.step()
        assert ckpt.log(training.state, 5)
        change(training)
        bits = training.bits()
    other = Training(seed=9)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(other.state).step == 5
    assert equal(bits, other.bits())


def test_log_without_a_checkpoint_is_refused_quietly(tmp_path):
    training = Training()
    with penstock.Checkpointer(tmp_path) as ckpt:
        training.step()
        assert not ckpt.log(training.state, 1)


def test_log_of_a_save_that_failed_ends(tmp_path, caplog):
    training = Training()
    store = FaultyBackend(PosixBackend(PosixConfig(path=str(tmp_path))))
    store.fail("publish", match="/index")
    with penstock.Checkpointer(store) as ckpt:
        training.step()
        handle = ckpt.save(training.state, 1)
        assert handle.committed.wait(300)
        training.step()
        assert not ckpt.log(training.state, 2)
        with pytest.raises(penstock.StorageError, match="simulated failure"):
            ckpt.wait()
        assert "ends after step 1: the save that it followed has failed" in caplog.text
        training.step()
        ckpt.save(training.state, 3)
        training.step()
        assert ckpt.log(training.state, 4)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(training.state).step == 4


def test_failed_saves_of_those_who_never_log_warn_of_no_log(tmp_path, caplog):
    training = Training()
    store = FaultyBackend(PosixBackend(PosixConfig(path=str(tmp_path))))
    store.fail("publish", match="/index")
    with penstock.Checkpointer(store) as ckpt:
        for step in (1, 2):
            training.step()
            assert (ckpt.save(training.state, step).committed.exception() is None) == (step == 2)
    assert "log of gradients" not in caplog.text


def test_step_must_rise(tmp_path):
    training, ckpt = begun(tmp_path)
    with ckpt:
        training.step()
        with pytest.raises(penstock.ConfigError, match="is not after step 2"):
            ckpt.log(training.state, 2)


def test_gradients_are_not_held_for_those_who_never_log(tmp_path):
    training = Training()
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save(training.state, 1)
        training.step()
        grad = weakref.ref(training.model[0].weight.grad)
        training.optimizer.zero_grad()
        assert grad() is None


def test_lbfgs_ends_the_log(tmp_path, caplog):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([weight], 0.1)
    state = {"weight": weight, "optimizer": optimizer}

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save(state, 1)
        optimizer.step(closure)
        assert not ckpt.log(state, 2)
    assert "steps of LBFGS cannot be replayed: no installed replayer handles it" in caplog.text


def test_other_trainings_of_the_process_do_not_matter(tmp_path):
    training, other = Training(), Training(seed=1)
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save(training.state, 1, mode="blocking")
        for number in (2, 3):
            training.step()
            other.step()
            other.step()
            assert ckpt.log(training.state, number)
        assert ckpt.latest() == 3


class Failing:
    """A value whose description fails while `fails` is set."""

    fails = False

    def state_dict(self):
        if self.fails:
            raise KeyError("simulated")
        return {"x": 1}

    def load_state_dict(self, state):
        pass


def test_call_that_fails_ends_the_log(tmp_path, caplog):
    training, failing = Training(), Failing()
    state = {**training.state, "failing": failing}
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save(state, 1, mode="blocking")
        training.step()
        assert ckpt.log(state, 2)
        training.step()
        failing.fails = True
        with pytest.raises(penstock.PenstockError):
            ckpt.log(state, 3)
        failing.fails = False
        training.step()
        assert not ckpt.log(state, 4)
        assert ckpt.latest() == 2
    assert "ends after step 2: log failed" in caplog.text


def test_state_without_a_key_of_the_checkpoint_ends_the_log(tmp_path, caplog):
    training, ckpt = begun(tmp_path)
    with ckpt:
        training.step()
        assert not ckpt.log({"model": training.model, "optimizer": training.optimizer}, 3)
    assert "the state of this call lacks rng, scaler, scheduler" in caplog.text


def test_another_optimizer_ends_the_log(tmp_path, caplog):
    training, ckpt = begun(tmp_path)
    with ckpt:
        training.optimizer = torch.optim.AdamW(training.model.parameters())
        assert not ckpt.log(training.state, 3)
    assert "optimizer is not the optimizer that was saved or restored" in caplog.text


def test_python_values_in_the_state_of_an_optimizer_end_the_log(tmp_path, caplog):
    training, ckpt = begun(tmp_path)
    with ckpt:
        training.step()
        training.optimizer.state["count"] = 7
        assert not ckpt.log(training.state, 3)
    assert "AdamW was changed outside a step" in caplog.text


def test_buffer_in_the_memory_of_parameters_ends_the_log(tmp_path, caplog):
    flat = torch.zeros(8)
    weight = torch.nn.Parameter(flat[:4])
    optimizer = torch.optim.SGD([weight], 0.1)
    state = {"weight": weight, "optimizer": optimizer, "count": flat[4:], "part": weight[:2]}
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save(state, 1, mode="blocking")
        weight.grad = torch.ones(4)
        optimizer.step()
        assert not ckpt.log(state, 2)
    assert "state/count shares an allocation with tensors of an optimizer" in caplog.text


class Trainer:
    """Stores a model with its own state, as trainers of other frameworks do."""

    def __init__(self, model):
        self.model, self.epoch = model, 0

    def state_dict(self):
        return {"model": self.model.state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.epoch = state["epoch"]


@pytest.mark.parametrize("place", ["also", "only"])
def test_object_that_contains_the_model_ends_the_log(tmp_path, caplog, place):
    training = Training()
    state = {**training.state, "trainer": Trainer(training.model)}
    if place == "only":
        del state["model"]
    with penstock.Checkpointer(tmp_path) as ckpt:
        training.step()
        ckpt.save(state, 1, mode="blocking")
        training.step()
        assert not ckpt.log(state, 2)
    assert "state/trainer is restored whole or not at all, but its part" in caplog.text


def clamp(optimizer, *_):
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_of_an_optimizer_that_change_parameters_end_the_log(tmp_path, caplog, kind):
    training, ckpt = begun(tmp_path)
    with ckpt:
        for number in (3, 4, 5):  # the first steps have a proof
            training.step()
            assert ckpt.log(training.state, number)
        getattr(training.optimizer, f"register_step_{kind}_hook")(clamp)
        training.step()
        assert not ckpt.log(training.state, 6)
    assert "ends after step 5: a parameter or the state of AdamW was changed" in caplog.text


def test_post_hooks_may_change_gradients_and_options(tmp_path):
    training, ckpt = begun(tmp_path)

    def halve(optimizer, *_):
        optimizer.param_groups[0]["weight_decay"] /= 2
        training.model[0].weight.grad.data.zero_()

    with ckpt:
        training.optimizer.register_step_post_hook(halve)
        for number in (3, 4, 5):
            training.step()
            assert ckpt.log(training.state, number)
        bits = training.bits()
    other = Training(seed=9)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(other.state).step == 5
    assert equal(bits, other.bits())
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.01 / 8


def test_save_by_a_signal_handler_during_a_call_ends_the_log(tmp_path, caplog):
    training, ckpt = begun(tmp_path)

    class Interrupted(dict):
        def items(self):  # describing the state runs the handler in the middle of the call
            if number == 3 and not handled:
                handled.append(1)
                ckpt.save(training.state, number, mode="blocking")
            return super().items()

    handled = []
    with ckpt:
        for number in (3, 4):
            training.step()
            assert ckpt.log(Interrupted(training.state), number) == (number == 3)
        bits = training.bits()
        assert ckpt.latest() == 3
        training.step()
        ckpt.save(training.state, 5)
    assert "a signal handler has saved or logged during this call" in caplog.text
    assert bits


def test_log_after_a_restore_of_an_older_checkpoint_needs_a_rewind(tmp_path):
    training = Training()
    with penstock.Checkpointer(tmp_path) as ckpt:
        for number in (1, 5):
            training.step()
            ckpt.save(training.state, number, mode="blocking")
        ckpt.restore(training.state, 1)
        training.step()
        assert not ckpt.log(training.state, 2)
        assert "call rewind(1) first" in ckpt._log.recorder.ended
        ckpt.rewind(1)
        ckpt.restore(training.state)
        training.step()
        assert ckpt.log(training.state, 2)
        assert ckpt.latest() == 2


@pytest.mark.parametrize("close", ["close", "error"])
def test_durable_entries_stay_after_a_full_disk(tmp_path, close):
    training = Training()
    store = FaultyBackend(PosixBackend(PosixConfig(path=str(tmp_path))))
    ckpt = penstock.Checkpointer(store)
    training.step()
    ckpt.save(training.state, 1, mode="blocking")
    for number in (2, 3):
        training.step()
        assert ckpt.log(training.state, number)
    ckpt._log.recorder.flush()
    held = ckpt._log.recorder._logs[0].writer._writer  # as the traceback of a failure may hold it
    store.fail("write", penstock.StorageFullError("simulated"), match="/log/", times=None)
    training.step()
    ckpt.log(training.state, 4)
    if close == "close":
        ckpt.close()
    else:
        ckpt.__exit__(KeyError, KeyError("simulated"), None)
    store.close()
    del held
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.latest() == 3
        assert ckpt.restore(training.state).step == 3

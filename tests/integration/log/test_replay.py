"""A logged step is restored to the same bits, however the step was made."""

import importlib
import itertools
import os
import random
import subprocess
import sys
import threading

import pytest
import torch
from tests.core.cli.command import caller
from tests.integration.log.tiny import Tiny
from tests.integration.log.trainings import KINDS, WAYS, Training, equal
from torch import nn, optim

import penstock
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.abc import StateObject
from penstock.core.plugins.registry import default_registry
from penstock.core.tree.describe import describe_tree
from penstock.core.tree.paths import show_path
from penstock.testing.faults import Fault, FaultyBackend

QUICK = {("AdamW fused", way) for way in WAYS} | {(kind, "plain") for kind in KINDS}
LAST = 9


def save_and_log(url, training, *, base=3, last=LAST):
    """Train to `last`, with a checkpoint of `base` and a log from there; return the losses."""
    losses = {}
    with penstock.Checkpointer(url) as ckpt:
        for step in range(1, last + 1):
            losses[step] = training.step(step)
            if step == base:
                ckpt.save(training.state, step)
            elif step > base:
                assert ckpt.log(training.state, step)
    return losses


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, marks=() if (kind, way) in QUICK else pytest.mark.slow)
        for kind, way in itertools.product(KINDS, WAYS)
    ],
)
def test_every_optimizer_is_replayed_to_the_same_bits(kind, way):
    url = f"memory://{random.getrandbits(64):x}"
    training = Training(kind, way)
    save_and_log(url, training)
    bits = training.bits()
    other = Training(kind, way, seed=5)
    with penstock.Checkpointer(url) as ckpt:
        assert ckpt.latest() == LAST
        report = ckpt.restore(other.state)
    assert (report.step, report.replayed_steps) == (LAST, LAST - 3)
    assert equal(bits, other.bits())


def test_training_continues_bit_for_bit_and_its_log_too(tmp_path):
    training = Training()
    losses = save_and_log(tmp_path, training)
    losses |= {step: training.step(step) for step in range(10, 15)}
    for first in (10, 13):
        training = Training(seed=first)
        with penstock.Checkpointer(tmp_path) as ckpt:
            assert ckpt.resume(training.state) == first
            for step in range(first, first + 3 if first == 10 else 15):
                assert training.step(step) == losses[step]
                assert ckpt.log(training.state, step)


@pytest.mark.parametrize("step", [3, 4, 8])
def test_any_saved_or_logged_step_is_restored(tmp_path, step):
    losses = save_and_log(tmp_path, Training())
    training = Training(seed=5)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(training.state, step).step == step
        for number in range(step + 1, LAST + 1):
            assert training.step(number) == losses[number]


def test_step_that_is_neither_saved_nor_logged_is_an_error(tmp_path):
    save_and_log(tmp_path, Training())
    with (
        penstock.Checkpointer(tmp_path) as ckpt,
        pytest.raises(penstock.CheckpointNotFoundError, match="no checkpoint of step 10"),
    ):
        ckpt.restore(Training().state, LAST + 1)


def test_other_engine_ends_the_restore_at_the_base(tmp_path, monkeypatch, caplog):
    losses = save_and_log(tmp_path, Training())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ANOTHER")
    training = Training(seed=5)
    with penstock.Checkpointer(tmp_path) as ckpt:
        report = ckpt.restore(training.state)
    assert (report.step, report.replayed_steps) == (3, 0)
    assert "the log cannot be replayed to step 9, so step 3 is restored" in caplog.text
    assert training.step(4) == losses[4]


def test_other_kernel_is_found_by_the_digest(tmp_path, monkeypatch, caplog):
    save_and_log(tmp_path, Training())
    module = importlib.import_module("torch.optim.adam")
    step = module.adam

    def other_kernel(params, *arguments, **options):
        step(params, *arguments, **options)
        params[0].mul_(1.0001)

    monkeypatch.setattr(module, "adam", other_kernel)
    training = Training(seed=5)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(training.state).step == 3
    assert "has other bits after a logged step" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damaged_entry_ends_the_replay_before_it(tmp_path, damage):
    losses = save_and_log(tmp_path, Training())
    (segment,) = tmp_path.rglob("*.log")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
    training = Training(seed=5)
    with penstock.Checkpointer(tmp_path) as ckpt:
        first = ckpt.restore(training.state).step
        assert 3 < first < LAST
        for step in range(first + 1, LAST + 1):
            assert training.step(step) == losses[step]
            assert ckpt.log(training.state, step)
        assert ckpt.latest() == LAST


def test_failed_save_does_not_end_the_log(tmp_path):
    store = FaultyBackend(PosixBackend(PosixConfig(path=str(tmp_path))))
    training = Training()
    with penstock.Checkpointer(store) as ckpt:
        ckpt.save(training.state, 0, mode="blocking")
        commit = Fault("publish", match="commits/00000003", error=penstock.StorageError("gone"))
        commit.until = threading.Event()
        store.add(commit)
        for step in range(1, 7):
            training.step(step)
            if step == 3:
                handle = ckpt.save(training.state, step)
            else:
                assert ckpt.log(training.state, step)
            if step == 4:
                commit.until.set()
                assert handle.committed.exception() is not None
        assert (ckpt.steps(), ckpt.latest()) == ([0], 6)
        bits = training.bits()
        other = Training(seed=5)
        assert ckpt.restore(other.state).step == 6
    assert equal(bits, other.bits())


@pytest.mark.parametrize("overwrite", [False, True])
def test_save_of_the_step_that_was_logged_last_begins_another_log(tmp_path, overwrite):
    training = Training()
    save_and_log(tmp_path, training)
    other = Training(seed=5)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(other.state).step == LAST
        ckpt.save(other.state, LAST)
        if overwrite:
            other.step(LAST)
            ckpt.save(other.state, LAST, overwrite=True)
        other.step(LAST + 1)
        assert ckpt.log(other.state, LAST + 1)
        bits = other.bits()
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(training.state).step == LAST + 1
    assert equal(bits, training.bits())


def test_restore_that_cannot_be_replayed_begins_a_log_of_the_base(tmp_path, monkeypatch):
    save_and_log(tmp_path, Training())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ANOTHER")
    training = Training(seed=5)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(training.state).step == 3
        training.step(4)
        assert ckpt.log(training.state, 4)
        assert ckpt.latest() == 4


def test_nothing_is_logged_after_a_part_was_restored(tmp_path):
    save_and_log(tmp_path, Training())
    training = Training(seed=5)
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.restore({"model": training.model}, 3)
        training.step(4)
        assert not ckpt.log(training.state, 4)
        ckpt.restore(training.state, 3, include="model/**")
        training.step(4)
        assert not ckpt.log(training.state, 4)
        assert ckpt.latest() == LAST


def test_rewind_to_a_damaged_record_still_deletes(tmp_path):
    training = Training()
    with penstock.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(training.state, step, mode="blocking")
        (record,) = (tmp_path / "commits").glob("00000001-*")
        record.write_bytes(b"damaged")
        assert ckpt.rewind(1) == [2]


def test_part_of_a_state_is_restored_from_the_checkpoint(tmp_path, caplog):
    save_and_log(tmp_path, Training())
    training = Training(seed=5)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore({"model": training.model}).step == 3
        assert "optimizer, whose steps are logged, is not in the state" in caplog.text
        assert ckpt.restore(training.state, include="model/**").step == 3
        with pytest.raises(penstock.CheckpointNotFoundError) as raised:
            ckpt.load(5)
        assert "Step 5 is logged: restore(state, 5) replays it." in raised.value.__notes__[0]


def test_rewind_deletes_the_log(tmp_path):
    training = Training()
    save_and_log(tmp_path, training)
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.rewind(3)
        assert ckpt.latest() == 3
        assert not [*tmp_path.rglob("*.log")]


def test_ls_shows_the_logged_step(tmp_path, capsys, monkeypatch):
    save_and_log(tmp_path, Training())
    done = caller(capsys, monkeypatch)("ls", tmp_path)
    assert "step 9 is logged: a restore loads step 3 and replays 6 steps" in done.out


def test_entry_holds_buffers_and_frozen_parameters_that_change(tmp_path):
    training = Training()
    frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    state = {**training.state, "frozen": frozen, "average": [torch.zeros(5)]}
    with penstock.Checkpointer(tmp_path) as ckpt:
        training.step()
        ckpt.save(state, 1)
        for step in range(2, 8):
            training.step()
            with torch.no_grad():
                state["average"][0].lerp_(torch.ones(5), 0.1)
                if step == 4:
                    frozen += 1
            assert ckpt.log(state, step)
    average = state["average"][0].clone()
    with torch.no_grad():
        frozen.zero_()
    state["average"][0].zero_()
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(state).step == 7
    assert torch.equal(state["average"][0], average)
    assert torch.equal(frozen, torch.ones(3))


def test_gradients_keep_nan_infinity_and_negative_zero(tmp_path):
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    state = {"weight": weight, "optimizer": optimizer}
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save(state, 1)
        weight.grad = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
        optimizer.step()
        assert ckpt.log(state, 2)
    bits = weight.detach().clone().view(torch.int32)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(state).step == 2
    assert torch.equal(weight.detach().view(torch.int32), bits)


def test_two_optimizers_of_which_one_steps_every_second_time(tmp_path):
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [torch.optim.AdamW([weight], lr=0.1) for weight in weights]
    state = {"weights": weights, "optimizers": optimizers}
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save(state, 0)
        for step in range(1, 8):
            for number, (weight, optimizer) in enumerate(zip(weights, optimizers, strict=True)):
                weight.grad = torch.randn(3)
                if step % (number + 1) == 0:
                    optimizer.step()
            assert ckpt.log(state, step)
    wanted = [weight.detach().clone() for weight in weights]
    for weight in weights:
        with torch.no_grad():
            weight.zero_()
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(state).step == 7
    assert equal(wanted, [weight.detach() for weight in weights])


def test_replay_leaves_gradients_and_hooks_alone(tmp_path):
    training = Training()
    save_and_log(tmp_path, training)
    calls = []
    training.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    grads = [parameter.grad.clone() for parameter in training.model.parameters()]
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.restore(training.state)
    assert equal(grads, [parameter.grad for parameter in training.model.parameters()])
    assert not calls
    training.step()
    assert calls == [1]


class Averaged:
    """A training of one layer, with frozen weights and an average of the trained ones."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 2))
        self.model[0].requires_grad_(requires_grad=False)
        self.average = nn.Linear(256, 2).requires_grad_(requires_grad=False)
        self.optimizer = optim.AdamW(self.model[1].parameters(), 1e-2)
        self.state = {"model": self.model, "optimizer": self.optimizer, "average": self.average}

    def step(self, number):
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 256) * number).square().mean().backward()
        self.optimizer.step()
        if number % 2:
            with torch.no_grad():
                for mean, new in zip(
                    self.average.parameters(), self.model[1].parameters(), strict=True
                ):
                    mean.lerp_(new, 0.1)

    def bits(self):
        return [p.clone() for p in (*self.model.parameters(), *self.average.parameters())]


def test_target_network_that_follows_through_data_is_logged(tmp_path):
    training = Tiny()
    target = torch.nn.Linear(300, 70, dtype=torch.bfloat16)
    state = {**training.state, "target": target}
    with penstock.Checkpointer(tmp_path) as ckpt:
        for step in range(4):
            training.step(step)
            for parameter in target.parameters():
                parameter.data.lerp_(torch.ones_like(parameter), 0.25)
            ckpt.log(state, step) if step else ckpt.save(state, step, mode="blocking")
    other = torch.nn.Linear(300, 70, dtype=torch.bfloat16)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore({**Tiny(seed=9).state, "target": other}).step == 3
    for here, there in zip(target.parameters(), other.parameters(), strict=True):
        assert torch.equal(here, there)


def test_frozen_weights_are_not_logged_and_changed_ones_are(tmp_path):
    training = Averaged()
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save(training.state, 0)
        for number in range(1, 7):
            training.step(number)
            ckpt.log(training.state, number)
        bits = training.bits()
    stored = sum(path.stat().st_size for path in tmp_path.glob("data/*/log/*"))
    assert stored < training.model[0].weight.nbytes / 2
    other = Averaged(seed=3)
    with penstock.Checkpointer(tmp_path) as ckpt:
        report = ckpt.restore(other.state)
    assert (report.step, report.replayed_steps) == (6, 6)
    assert equal(bits, other.bits())


def test_frozen_quantized_weights_are_logged_once(tmp_path):
    reason = "needs torchao, which `pip install .[dev]` brings"
    quantization = pytest.importorskip("torchao.quantization", reason=reason)

    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 1))
        quantization.quantize_(model[0], quantization.Int8WeightOnlyConfig())
        model[0].requires_grad_(False)
        return {"model": model, "optimizer": torch.optim.AdamW(model[1].parameters())}

    state = make(0)
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save(state, 0)
        for number in range(1, 5):
            state["optimizer"].zero_grad()
            state["model"](torch.randn(8, 64)).square().mean().backward()
            state["optimizer"].step()
            assert ckpt.log(state, number)
    other, inputs = make(1), torch.randn(8, 64)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(other).replayed_steps == 4
    assert torch.equal(state["model"](inputs), other["model"](inputs))


@pytest.mark.parametrize("kind", ["AdamW fused", "AdamW foreach", "SGD fused"])
def test_gradients_keep_their_memory_format(tmp_path, kind):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        return {"model": model, "optimizer": KINDS[kind](model.parameters())}

    state = make(0)
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save(state, 0)
        for number in range(1, 4):
            state["optimizer"].zero_grad()
            inputs = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
            state["model"](inputs).square().mean().backward()
            assert not state["model"].weight.grad.is_contiguous()
            state["optimizer"].step()
            ckpt.log(state, number)
    other = make(1)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(other).step == 3
    assert torch.equal(other["model"].weight, state["model"].weight)


def bits_by_path(state):
    """Return the bytes of the tensors of a state, by path."""
    found = describe_tree(state, providers=default_registry().providers, allow_pickle=False)
    bits = {}
    for entry in found.entries:
        if isinstance(entry, StateObject):
            bits[show_path(entry.path)] = out = bytearray(entry.source.nbytes)
            if out:
                entry.source.copy_out(0, memoryview(out))
    return bits


@pytest.mark.parametrize("kind", ["AdamW fused", "AdamW foreach", "Adafactor"])
def test_one_parameter_is_replayed_alone(tmp_path, kind):
    training = Training(kind)
    save_and_log(tmp_path, training)
    name = "4.weight"
    whole = {p: b for p, b in bits_by_path(training.state).items() if name in p}
    other = Training(kind, seed=5)
    before = bits_by_path(other.state)
    with penstock.Checkpointer(tmp_path) as ckpt:
        include = (f"{top}/{name}" for top in ("model", "optimizer/state"))
        report = ckpt.restore(other.state, include=include)
        assert (report.step, report.replayed_steps) == (LAST, 6)
        assert not ckpt.log(other.state, LAST + 1)  # it is no state of this run
    after = bits_by_path(other.state)
    assert len(whole) > 2
    assert {p: after[p] for p in whole} == whole
    untouched = [p for p in before if not p.startswith("rng") and p not in whole]
    assert {p: after[p] for p in untouched} == {p: before[p] for p in untouched}


def test_parameter_without_its_state_is_not_replayed(tmp_path, caplog):
    training = Training()
    save_and_log(tmp_path, training)
    with penstock.Checkpointer(tmp_path) as ckpt:
        report = ckpt.restore(Training(seed=5).state, include="model")
        assert (report.step, report.replayed_steps) == (3, 0)
        assert "model/0.weight is selected without optimizer/state" in caplog.text
        with pytest.raises(penstock.RestoreError, match="step 7 cannot be replayed; the state has"):
            ckpt.restore(Training(seed=5).state, 7, include="model")
        # Without the optimizer nothing shows which of these it has changed.
        report = ckpt.restore({"model": Training(seed=5).model}, include="model/**")
        assert (report.step, report.replayed_steps) == (3, 0)


def test_what_no_optimizer_changes_is_restored_alone(tmp_path):
    training = Training()
    save_and_log(tmp_path, training)
    other = Training(seed=5)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(other.state, include=["rng", "scheduler"]).replayed_steps == 6
    assert other.scheduler.last_epoch == training.scheduler.last_epoch


OTHER_CPU = """
import sys, torch, penstock
from tests.integration.log.trainings import Training

training = Training("AdamW foreach", seed=5)
with penstock.Checkpointer(sys.argv[1]) as ckpt:
    report = ckpt.restore(training.state)
print(torch.backends.cpu.get_cpu_capability(), report.step, report.replayed_steps)
"""


@pytest.mark.process
def test_other_cpu_instructions_end_the_restore_at_the_base(tmp_path):
    save_and_log(tmp_path, Training("AdamW foreach"))
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-c", OTHER_CPU, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["DEFAULT", "3", "0"]
    assert f"cpu {torch.backends.cpu.get_cpu_capability()}, now DEFAULT" in done.stderr


def test_change_that_leaves_no_mark_is_found_by_a_digest(tmp_path, caplog):
    training = Training()
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save(training.state, 0, mode="blocking")
        for number in range(1, 5):
            if number == 1:  # the first entry always has a digest
                training.model[0].weight.data.mul_(2)
            training.step()
            ckpt.log(training.state, number)
    other = Training(seed=5)
    with penstock.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(other.state).step == 0
    assert "has other bits after a logged step than it had in training" in caplog.text


class Wide:
    """Gradients of several chunks, other ones in each step, and a large mean of the weights."""

    def __init__(self):
        self.weight = nn.Parameter(torch.zeros(700_000))
        self.small = nn.Parameter(torch.zeros(300_000, dtype=torch.float16))
        self.optimizer = optim.SGD([self.weight, self.small], 0.1)
        self.mean = torch.zeros(700_000)
        self.state = {"weights": [self.weight, self.small], "optimizer": self.optimizer,
                      "mean": self.mean}  # fmt: skip

    def step(self, number):
        drawn = torch.Generator().manual_seed(number)
        bits = torch.randint(-(2**31), 2**31, (700_000,), dtype=torch.int32, generator=drawn)
        exact = bits.float().bfloat16().float() * 0.7  # `factor` takes these
        random = (bits & 0x3FFFFFFF).view(torch.float32)  # and declines these
        self.weight.grad = torch.cat([exact[:300_000], random[300_000:]])
        self.small.grad = torch.randn(300_000, generator=drawn).half() if number % 2 else None
        self.optimizer.step()
        self.mean.lerp_(self.weight.detach(), 0.1)


def test_entries_of_many_chunks_are_replayed():
    url = f"memory://{random.getrandbits(64):x}"
    training = Wide()
    with penstock.Checkpointer(url, chunk_bytes=1 << 20) as ckpt:
        ckpt.save(training.state, 0)
        for step in range(1, 6):
            training.step(step)
            assert ckpt.log(training.state, step)
    other = Wide()
    with penstock.Checkpointer(url) as ckpt:
        assert ckpt.restore(other.state).replayed_steps == 5
    assert equal(
        [training.weight, training.small, training.mean], [other.weight, other.small, other.mean]
    )

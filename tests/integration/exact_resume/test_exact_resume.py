"""Training after a restore into fresh objects is bit-identical to training that never stopped."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from tests import interpreters
from tests.integration.jobs import (
    Accumulation,
    Averaged,
    Clashing,
    Compiled,
    MixedOptimizer,
    Scaled,
    SparseJob,
    StatefulLoader,
    TwoOptimizers,
    with_closure,
    with_optimizer,
)
from tests.integration.support import Run, memory, place_of
from tests.integration.training import SMALL, differences
from torch import nn

import penstock

STEPS, AT = 7, 3  # an odd place: in the middle of an epoch and of an accumulation

JOBS = {
    "adamw": with_optimizer(torch.optim.AdamW, foreach=False),
    "adafactor": with_optimizer(torch.optim.Adafactor),
    "lbfgs": with_closure(torch.optim.LBFGS, max_iter=3, history_size=4),
    "sparse adam": SparseJob,
    "bf16 weights, fp32 state": MixedOptimizer,
    "compiled": Compiled,
    "scaler": Scaled,
    "scaler disabled": lambda seed: Scaled(seed, enabled=False),
    "accumulation": Accumulation,
    "averaged": Averaged,
    "two optimizers": TwoOptimizers,
    "names that clash": Clashing,
}
needs_torchdata = pytest.mark.skipif(
    importlib.util.find_spec("torchdata") is None, reason="needs torchdata"
)
# Other optimizers have state like AdamW's: the provider's tests have each of them.
SLOW = {"adamw", "compiled", "scaler disabled"}  # AdamW goes through every mode, below


def uninterrupted(make):
    job = make(0)
    losses = [job.step() for _ in range(STEPS)]
    return losses, job.snapshot()


# Of torchdata, under a newer torch.
torchdata_warns = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


# Of torch.compile, under Python 3.13.0.
guards_warn = pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")


@guards_warn
@torchdata_warns
@pytest.mark.parametrize(
    "make",
    [
        *(
            pytest.param(make, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
            for name, make in JOBS.items()
        ),
        pytest.param(StatefulLoader, id="torchdata loader", marks=needs_torchdata),
    ],
)
def test_training_continues_as_if_never_stopped(make):
    losses, end = uninterrupted(make)
    assert len(set(losses)) == STEPS
    with penstock.Checkpointer(memory(), **SMALL) as ckpt:
        job = make(0)
        assert [job.step() for _ in range(AT)] == losses[:AT]
        ckpt.save(job.state, AT, mode="lazy")
        assert [job.step() for _ in range(STEPS - AT)] == losses[AT:], "saving disturbed training"
        assert not differences(job.snapshot(), end)
        ckpt.wait()
        for seed, trained in ((1, 0), (2, 2)):  # never stepped, and with its own state
            fresh = make(seed)
            for _ in range(trained):
                fresh.step()
            report = ckpt.restore(fresh.state)
            fresh.restored()
            assert report.step == AT
            assert not report.missing
            assert not report.unexpected
            assert [fresh.step() for _ in range(STEPS - AT)] == losses[AT:]
            assert not differences(fresh.snapshot(), end)


@pytest.mark.parametrize(("mode", "codecs"), [("blocking", []), ("async", ["zstd"]), ("lazy", [])])
def test_every_mode_resumes_exactly(mode, codecs):
    rules = [{"match": "**", "codecs": codecs}]
    make = JOBS["adamw"]
    losses, end = uninterrupted(make)
    with penstock.Checkpointer(memory(), mode=mode, rules=rules, **SMALL) as ckpt:
        job = make(0)
        for step in range(1, STEPS + 1):
            assert job.step() == losses[step - 1]
            ckpt.save(job.state, step)
        ckpt.wait()
        for step in (1, AT, STEPS):
            fresh = make(9)
            ckpt.restore(fresh.state, step)
            assert [fresh.step() for _ in range(STEPS - step)] == losses[step:]
            assert not differences(fresh.snapshot(), end)


@guards_warn
def test_a_compiled_model_and_a_plain_one_share_checkpoints():
    losses, end = uninterrupted(Compiled)
    with penstock.Checkpointer(memory(), **SMALL) as ckpt:
        job = Compiled(0)
        for _ in range(AT):
            job.step()
        ckpt.save(job.state, AT).result()
        plain = Compiled(5, compiled=False)
        ckpt.restore(plain.state)
        assert [plain.step() for _ in range(STEPS - AT)] == losses[AT:]
        assert not differences(plain.snapshot(), end)


@needs_torchdata
@torchdata_warns
@pytest.mark.parametrize("at", [0, 3, 4, 5])
def test_loader_of_torchdata_resumes_exactly_from_any_place_of_an_epoch(at):
    """From before the first batch, between two, after the last one and after the loop."""
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(seed):
        torch.manual_seed(seed)
        own = DistributedSampler(range(8), num_replicas=1, rank=0)
        shuffled = StatefulDataLoader(range(8), batch_size=2, shuffle=True)
        by_epoch = StatefulDataLoader(range(8), batch_size=2, sampler=own)
        generator = torch.Generator().manual_seed(seed)
        drawn = StatefulDataLoader(range(8), batch_size=2, shuffle=True, generator=generator)
        loaders = {"shuffled": shuffled, "by_epoch": by_epoch, "drawn": drawn}
        return {"rng": penstock.Rng(), **loaders, "epoch": 0}

    def train(state, save=lambda _: None):
        seen = []
        for epoch in range(state["epoch"], 3):
            state["epoch"] = epoch
            state["by_epoch"].sampler.set_epoch(epoch)  # after the restore
            loaders = (state[name] for name in ("shuffled", "by_epoch", "drawn"))
            for batches in zip(*loaders, strict=True):
                seen.append(([batch.tolist() for batch in batches], torch.rand(1).item()))
                save(len(seen))
            state["epoch"] = epoch + 1
            save(len(seen) + 1)
        return seen

    with penstock.Checkpointer(memory()) as ckpt:

        def save(place):
            if place == at and ckpt.latest() is None:
                ckpt.save(state, 1, mode="blocking")

        state = make(0)
        save(0)  # asked for its state, the loader makes an iterator, which draws
        expected = train(state, save)
        fresh = make(5)
        assert ckpt.resume(fresh) == 2
        assert train(fresh) == expected[min(at, 4) :]


def test_a_fallback_to_an_older_checkpoint_leaves_random_state_as_stored(tmp_path):
    class Draws:
        """Draws each time its state is requested."""

        def state_dict(self):
            torch.rand(1)
            return {"n": 1}

        def load_state_dict(self, state):
            pass

    def make():
        model = nn.Linear(100, 100)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        return {"rng": penstock.Rng(), "draws": Draws(), "model": model, "opt": optimizer}

    run = Run(tmp_path)
    with run.open() as ckpt:
        state = make()
        state["model"](torch.ones(1, 100)).sum().backward()
        state["opt"].step()
        for step in (1, 2):
            ckpt.save(state, step).result()
        ckpt.restore(make(), 1)
        expected = torch.rand(3)
        place = place_of(ckpt.open(2), "opt/state/weight/momentum_buffer")
        run.flip(place.blob, place.offset)
        assert ckpt.restore(make(), on_damage="fallback").fell_back_from == (2,)
        assert torch.equal(torch.rand(3), expected)


@needs_torchdata
@torchdata_warns
def test_a_new_process_resumes_exactly(tmp_path):
    losses, _ = uninterrupted(StatefulLoader)
    job = StatefulLoader(0)
    for _ in range(AT):
        job.step()
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(job.state, AT)  # closing waits for it
    program = (
        "import json, sys, penstock\n"
        "from tests.integration.jobs import StatefulLoader\n"
        "job = StatefulLoader(4)\n"
        "with penstock.Checkpointer(sys.argv[1]) as ckpt:\n"
        "    step = ckpt.restore(job.state).step\n"
        "print(json.dumps([job.step() for _ in range(step, int(sys.argv[2]))]))\n"
    )
    done = interpreters.run("-c", program, tmp_path / "run", STEPS, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == losses[AT:]

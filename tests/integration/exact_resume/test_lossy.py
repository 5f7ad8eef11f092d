"""Lossy checkpoints report each object's distance from the saved one, and stay close."""

from __future__ import annotations

import math

import pytest
import torch
from tests.core.cli.command import caller
from torch import nn

import penstock

RULES = [
    {"match": "optimizer/**/exp_avg", "codecs": ["cast", "floatsplit"]},
    {"match": "optimizer/**/exp_avg_sq", "codecs": ["log8", "zstd"]},
]


def trained(steps=20):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(64, 300)).square().sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def updates(state):
    return [
        s["exp_avg"] / (s["exp_avg_sq"].sqrt() + 1e-8) for s in state["optimizer"].state.values()
    ]


def errors_of(ckpt, step=1):
    objects = ckpt.open(step).objects()
    return {"/".join(o.path): o.errors for o in objects if o.errors is not None}


@pytest.fixture
def opened(tmp_path):
    def opened(rules=RULES, **options):
        return penstock.Checkpointer(f"posix://{tmp_path}/run", rules=rules, **options)

    return opened


@pytest.mark.parametrize("mode", ["blocking", "async", "lazy"])
def test_adam_moments_stay_close_and_all_else_is_exact(opened, mode):
    job, other = trained(), trained(1)
    with opened(chunk_bytes=65536) as ckpt:
        ckpt.save(job, 1, mode=mode).result()
        ckpt.restore(other)

    for one, two in zip(job["model"].parameters(), other["model"].parameters(), strict=True):
        assert torch.equal(one, two)
        mine, theirs = job["optimizer"].state[one], other["optimizer"].state[two]
        assert mine["step"] == theirs["step"]
        assert not torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"])
    before, after = (torch.cat([u.flatten() for u in updates(s)]) for s in (job, other))
    assert (after - before).norm() / before.norm() < 4e-3


def test_the_manifest_has_the_worst_errors_of_each_object(opened):
    job = trained()
    with opened(chunk_bytes=65536) as ckpt:  # so that the large ones have several chunks
        ckpt.save(job, 1, mode="blocking")
        errors = errors_of(ckpt)
        given_back = {path: ckpt.open(1)[path] for path in errors}
        assert ckpt.verify(1).ok

    state = job["optimizer"].state
    assert len(errors) == 2 * len(state)  # no weights, no steps
    for name, parameter in job["model"].named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            path = f"optimizer/state/{name}/{key}"
            saved, given, found = state[parameter][key], given_back[path], errors[path]
            assert found.absolute == (saved - given).abs().max()
            assert math.isclose(
                found.relative,
                ((saved - given).abs() / saved.abs()).nan_to_num(0).max(),
                rel_tol=1e-6,
            )
            assert 0 < found.relative < 0.02


def test_objects_of_one_slab_have_separate_errors(opened):
    state = {"part": {"exact": torch.ones(100), "near": torch.full((100,), 1 + 2**-10)}}
    with opened([{"match": "part", "codecs": ["cast"]}]) as ckpt:
        ckpt.save(state, 1, mode="blocking")
        errors = errors_of(ckpt)
    assert (errors["part/exact"].absolute, errors["part/exact"].relative) == (0, 0)
    assert errors["part/near"].absolute == 2**-10


def test_a_frozen_tensor_has_errors_in_each_sharing_checkpoint(opened):
    state = {"w": torch.full((3000,), 1 + 2**-10), "other": torch.ones(3000)}
    with opened([{"match": "w", "codecs": ["cast"]}], share=True) as ckpt:
        for step in (1, 2):
            ckpt.save(state, step, mode="blocking")
        assert errors_of(ckpt, 1) == errors_of(ckpt, 2)
        assert errors_of(ckpt, 2)["w"].absolute == 2**-10
        assert ckpt.info(2).bytes_stored == 0


@pytest.fixture
def run(capsys, monkeypatch):
    return caller(capsys, monkeypatch)


def test_a_re_encoded_copy_keeps_the_errors(opened, tmp_path, run):
    state = {"w": torch.full((100,), 1 + 2**-10), "x": torch.ones(100)}
    with opened([{"match": "w", "codecs": ["cast"]}]) as ckpt:
        ckpt.save(state, 1, mode="blocking")
        errors = errors_of(ckpt)
    assert not run("copy", f"{tmp_path}/run", f"{tmp_path}/copy", "--codec", "zstd").code
    with penstock.Checkpointer(f"posix://{tmp_path}/copy") as copy:
        assert errors_of(copy) == errors

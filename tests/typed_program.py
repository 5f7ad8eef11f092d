"""A user's program for type checkers: `tools/other_pythons.py` checks it, nothing runs it."""

from collections.abc import Mapping
from typing import assert_type

import torch

import penstock

state = {"model": torch.nn.Linear(2, 2), "rng": penstock.Rng(), "step": 0}
with penstock.Checkpointer("runs/typed", mode="lazy") as ckpt:
    assert_type(ckpt.resume(state), int)
    handle = ckpt.save(state, step=1, metadata={"loss": 0.5})
    assert_type(handle, penstock.SaveHandle)
    assert_type(handle.result(), penstock.SaveReport)
    assert_type(ckpt.restore(state, include="model"), penstock.RestoreReport)
    assert_type(ckpt.steps(), list[int])
    assert_type(ckpt.open().specs(), Mapping[str, penstock.ObjectSpec])
    ckpt.save(state)  # type: ignore[call-arg]
    print(penstock.Chekpointer)  # type: ignore[attr-defined]

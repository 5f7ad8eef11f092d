"""A sharing save of a chain fails at any call: earlier steps stay, and the next save succeeds."""

from __future__ import annotations

import asyncio
import functools
import itertools

import pytest
import torch
from tests.integration.atomic.crash_scenarios import check_no_garbage
from tests.integration.support import memory, same

from penstock import Checkpointer, CommitUnknownError, PenstockError, StorageError
from penstock.testing.faults import FaultyBackend

OPTIONS = {
    "chunk_bytes": 8192,
    "block_bytes": 4096,
    "workers": 2,
    "rules": [{"match": "model/**", "codecs": ["delta", "zstd"]}],
    "share": True,
}
FAILING = 2  # the failing step
FOREIGN = [ZeroDivisionError(), asyncio.CancelledError(), SystemExit(3)]


@functools.cache
def state(step):
    """Slightly changing encoded chunks and a slab, unchanging raw ones, and a value."""
    chance = torch.Generator().manual_seed(4)

    def moved(*shape):
        start, drift = (torch.randn(shape, generator=chance) for _ in range(2))
        return start + 1e-6 * step * drift

    model = {"large": moved(60, 70), "bias": moved(40), "scale": moved(90)}
    return {"model": model, "still": torch.arange(9000.0), "plain": moved(2100), "step": step}


def fail_one_call(operation, nth, error, *, late, mode, memory_bytes):
    """Save two steps, one with a failing call, and another; return whether that call exists."""
    inner = memory()
    store = FaultyBackend(inner)
    with Checkpointer(store, **OPTIONS, deltas={"memory_bytes": memory_bytes}) as ckpt:
        for step in range(FAILING):
            ckpt.save(state(step), step, mode="blocking")
        assert ckpt._catalog.record(1).base
        assert any(blob.name.endswith(".raw") for blob in ckpt._catalog.record(1).borrowed)
        fault = store.fail(operation, error, nth=nth, late=late)
        failed = None
        try:
            ckpt.save(state(FAILING), FAILING, mode=mode).result(300)
        except (PenstockError, *map(type, FOREIGN)) as raised:  # `save` calls the store, too
            failed = raised
        ckpt.wait()
        store.clear()
        steps = [0, 1] if failed else [0, 1, FAILING]
        if isinstance(failed, CommitUnknownError) and len(ckpt.steps()) > len(steps):
            steps.append(FAILING)
        assert ckpt.steps() == steps
        assert ckpt._saver.memory.staging._used == 0
        ckpt.save(state(3), 3, mode="blocking")
        assert ckpt._catalog.record(3).references
    with Checkpointer(inner, **OPTIONS, grace_s=1e-6) as another:
        another.prune(everything=True)
        check_no_garbage(inner, steps=len(steps) + 1)
        assert another.steps() == [*steps, 3]
        for step in another.steps():
            assert same(another.load(step), state(step))
            assert another.verify(step).ok
    return fault.reached.is_set()


@pytest.mark.parametrize(
    ("operation", "memory_bytes"),
    [
        ("create", None), ("write", 0), ("seal", None), ("publish", 0), ("list", None),
        ("stat", 0), ("read", None), ("read", 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_failure_at_any_call_of_a_chain_save_loses_only_that_save(operation, memory_bytes, stride):
    for nth in itertools.count(1, stride):
        odd, memory = nth % 2 == 1, {"memory_bytes": memory_bytes}
        foreign = FOREIGN[nth % len(FOREIGN)]
        fail_one_call(operation, nth, StorageError("simulated"), late=odd, mode="async", **memory)
        if not fail_one_call(operation, nth, foreign, late=not odd, mode="blocking", **memory):
            break
    assert nth > 1

"""Memory for copies is ready before the first background save needs it."""

from __future__ import annotations

import time

import pytest
import torch
from tests.integration.support import checkpointer, memory
from tests.resident import measured, peak_bytes
from torch import nn

from penstock.core.errors import ConfigError, UnsupportedStateError

MIB = 1 << 20


@pytest.fixture
def state():
    """16 MiB of weights, and as much of momentum."""
    model = nn.Linear(1024, 4096, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model.weight.sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def gets(ckpt, nbytes):
    """Whether this much memory is soon there, all touched."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        staging = ckpt._saver.memory.staging
        if staging and staging.allocated_bytes >= nbytes and not staging.is_being_touched:
            return True
        time.sleep(0.01)
    return False


def test_prepare_and_check_get_the_memory_for_copies(state):
    for call in ("prepare", "check"):
        with checkpointer(memory()) as ckpt:
            getattr(ckpt, call)(state)
            assert gets(ckpt, 31 * MIB), call
            mapped = ckpt._saver.memory.staging.allocated_bytes
            ckpt.save(state, 1).result()
            assert ckpt._saver.memory.staging.allocated_bytes == mapped, "the save needs no more"


def test_restore_of_an_optimizer_gets_the_memory_for_copies(state):
    store = memory()
    with checkpointer(store) as ckpt:
        ckpt.save(state, 1, mode="blocking")
    with checkpointer(store) as ckpt:
        ckpt.restore(state, include="model")
        assert ckpt._saver.memory.staging is None, "a model alone may be there to be used only"
        ckpt.restore(state)
        assert gets(ckpt, 31 * MIB)


def test_blocking_saves_need_no_memory(state):
    with checkpointer(memory(), mode="blocking") as ckpt:
        ckpt.prepare(state)
        ckpt.save(state, 1)
        ckpt.restore(state)
        ckpt.prepare(state)
        assert ckpt._saver.memory.staging.allocated_bytes <= MIB
        with pytest.raises(ConfigError, match="fast"):
            ckpt.prepare(state, mode="fast")
        with pytest.raises(UnsupportedStateError, match="here"):
            ckpt.prepare({"here": object()})


@measured
@pytest.mark.parametrize("mode", ["async", "lazy"])
def test_state_larger_than_staging_takes_no_more_memory(tmp_path, state, mode):
    options = {"staging_bytes": "8 MiB", "chunk_bytes": 1 << 20, "mode": mode}
    with checkpointer(tmp_path / "warm", **options) as ckpt:
        ckpt.save(state, 1).result()  # its threads, and imports
    with checkpointer(tmp_path / "run", **options) as ckpt:

        def save():
            handle = ckpt.save(state, 1)
            ckpt.fence()
            handle.result()

        assert peak_bytes(save) < 12 * MIB
        assert ckpt._saver.memory.staging.allocated_bytes <= 8 * MIB
        loaded = ckpt.load(1, include="model/**")["model"]["weight"]
        assert torch.equal(loaded, state["model"].weight)

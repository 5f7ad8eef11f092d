"""Ranks that store equal bytes once."""

import pytest
import torch
from tests.integration.ranks.saving import save_steps
from tests.integration.support import checkpointer, memory, same

from penstock import Shard

ROWS = 300


def frozen(step):
    """A state that mostly never changes."""
    made = torch.Generator().manual_seed(5)
    state = {f"layer{n}": torch.randn(ROWS, 40, generator=made) for n in range(4)}
    state["small"] = [torch.randn(30, generator=made) for _ in range(20)]
    state["layer3"] += step
    return state


def pieces(step, rank, count):
    """Each rank has its own rows of each layer."""
    rows = -(-ROWS // count)
    return {
        key: Shard(value[rank * rows :][:rows].clone(), (ROWS, 40), (rank * rows, 0))
        if key.startswith("layer")
        else value
        for key, value in frozen(step).items()
    }


def whole(step, rank, count):
    del rank, count
    return frozen(step)


def save_all(store, count, steps, state_of, **options):
    return save_steps(store, count, steps, state_of, frozen, **{"share": True, **options})


def check(store, steps):
    with checkpointer(store) as ckpt:
        for step in steps:
            assert same(ckpt.load(step), frozen(step))
            assert ckpt.verify(step).ok


@pytest.mark.parametrize(
    ("state_of", "rules"), [(whole, []), (pieces, [{"match": "**", "codecs": ["zstd"]}])]
)
def test_unchanged_data_is_stored_once(state_of, rules):
    store = memory()
    first, *later = save_all(store, 3, range(3), state_of, rules=rules)
    # After a restart memory is empty: each rank finds its data in the checkpoint.
    later += save_all(store, 3, range(3, 5), state_of, rules=rules)
    assert max(later) < 0.4 * first
    check(store, range(5))
    with checkpointer(store) as ckpt:
        uids = ckpt._catalog.record(4).references
        assert ckpt._catalog.record(0).uid in uids

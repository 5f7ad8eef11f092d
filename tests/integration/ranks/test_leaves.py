"""Leaves of a tree, spread over ranks: `penstock.Leaves`."""

import pytest
import torch
from tests.core.stored_ranks import STEP
from tests.integration.ranks.saving import Job
from tests.integration.support import checkpointer, memory
from tests.providers.threads_as_ranks import run_ranks

from penstock import Leaves, RestoreMismatchError, Shard, UnsupportedStateError

LENGTHS = {("groups",): 2, ("groups", 0, "steps"): 3}
OF_RANKS = [
    {
        ("groups", 1, "lr"): 0.2,
        ("groups", 0, "steps", 2): 30,
        ("w",): Shard(torch.ones(2, 3), (4, 3), (0, 0)),
    },
    {
        ("groups", 0, "lr"): 0.1,
        ("groups", 0, "steps", 0): 10,
        ("groups", 0, "steps", 1): torch.tensor(20),
        ("w",): Shard(torch.zeros(2, 3), (4, 3), (2, 0)),
        ("names",): ["a", "b"],
    },
]


@pytest.fixture(scope="module")
def store():
    found = memory()
    job = Job(2, found)

    def save(rank):
        with job.checkpointer(rank) as ckpt:
            ckpt.save({"it": Leaves(OF_RANKS[rank], LENGTHS)}, STEP).result(300)

    run_ranks(2, save)
    return found


def test_leaves_of_two_ranks_form_their_tree(store):
    with checkpointer(store) as ckpt:
        assert ckpt.verify().ok
        found = ckpt.load()["it"]
    assert found["w"].tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2
    assert found["groups"] == [{"lr": 0.1, "steps": [10, torch.tensor(20), 30]}, {"lr": 0.2}]
    assert found["names"] == ["a", "b"]


def test_a_plain_value_takes_all_of_its_leaves_or_none(store):
    def live():
        return {"it": {"groups": [{"lr": 0.0, "steps": [0, torch.tensor(0), 0]}, {"lr": 0.0}]}}

    with checkpointer(store) as ckpt:
        state = live()
        ckpt.restore(state, include="it/groups")
        assert state["it"]["groups"][1] == {"lr": 0.2}
        assert state["it"]["groups"][0] == {"lr": 0.1, "steps": [10, torch.tensor(20), 30]}
        state = {"it": {"groups": [{"lr": 0.0, "steps": [0]}, {"lr": 0.0}]}}
        with pytest.raises(RestoreMismatchError, match="it is stored as a dict of objects"):
            ckpt.restore(state, include="it/groups")  # one of them is a tensor
        ckpt.save({"it": Leaves({("lr",): 0.1, ("decay",): 0.2})}, STEP + 1).result(300)
        state = {"it": {"lr": 0.5, "decay": 0.6}}
        with pytest.raises(RestoreMismatchError, match="it is stored as a dict of objects"):
            ckpt.restore(state, include="it/lr")
        assert state == {"it": {"lr": 0.5, "decay": 0.6}}
        ckpt.restore(state)
        assert state == {"it": {"lr": 0.1, "decay": 0.2}}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("w", "a path is a tuple"),
        (("w", 1.0), "a path is a tuple"),
        (("w", 2), "lengths= of the list .'w',. is None"),
        (("groups", 2), "lengths= of the list .'groups',. is 2"),
    ],
)
def test_paths_to_nothing_are_refused(path, message):
    with pytest.raises(UnsupportedStateError, match=message):
        Leaves({path: 1}, LENGTHS)

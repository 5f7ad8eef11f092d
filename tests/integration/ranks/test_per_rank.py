"""What differs between ranks: values, tensors and random state of each, stored side by side."""

import pytest
import torch
from tests.integration.ranks.saving import Job
from tests.integration.support import checkpointer, memory

from penstock import PerRank
from penstock.core.errors import RankError, RestoreMismatchError, UnsupportedStateError


def generator(seed):
    made = torch.Generator()
    made.manual_seed(seed)
    return made


def state_of(rank, **options):
    loader = {"position": 100 + rank, "order": torch.arange(5) * rank}
    return {"loader": PerRank(loader, **options), "random": generator(rank), "epoch": 3}


@pytest.fixture
def store():
    store = memory()
    assert [report.step for report in Job(3, store).save(state_of)] == [1, 1, 1]
    return store


def restored(store, count, template):
    def work(ckpt, rank):
        state = template(rank)
        ckpt.restore(state)
        return state

    return Job(count, store).run(work)


def blank(rank, **options):
    loader = {"position": 0, "order": torch.zeros(5, dtype=torch.int64)}
    return {"loader": PerRank(loader, **options), "random": generator(77), "epoch": 0}


def test_each_rank_gets_its_own_back(store):
    states = restored(store, 3, blank)
    for rank, state in enumerate(states):
        assert state["epoch"] == 3
        assert state["loader"].value["position"] == 100 + rank
        assert state["loader"].value["order"].tolist() == [n * rank for n in range(5)]
        assert torch.equal(state["random"].get_state(), generator(rank).get_state())


def test_one_process_loads_those_of_all(store):
    with checkpointer(store) as ckpt:
        assert ckpt.verify().ok
        tree = ckpt.load()
    assert [tree["loader"][str(rank)]["position"] for rank in range(3)] == [100, 101, 102]
    assert tree["loader"]["2"]["order"].tolist() == [0, 2, 4, 6, 8]
    assert tree["random"].keys() == {"0", "1", "2"}


@pytest.mark.parametrize("count", [2, 1])
def test_on_another_number_of_ranks_on_change_decides(store, count, caplog):
    def restore(**options):
        if count > 1:
            return restored(store, count, lambda rank: blank(rank, **options))
        state = blank(0, **options)
        with checkpointer(store) as ckpt:
            try:
                ckpt.restore(state)
            except RestoreMismatchError as error:
                return [error]
        return [state]

    for error in restore():
        assert isinstance(error, (RestoreMismatchError, RankError))
        assert f"loader is stored for 3 ranks, and here are {count}" in str(error)
    for state in restore(on_change="keep"):
        assert (state["epoch"], state["loader"].value["position"]) == (3, 0)
        assert torch.equal(state["random"].get_state(), generator(77).get_state())
    assert "random is random state of 3 ranks" in caplog.text
    for state in restore(on_change=lambda stored: max(one["position"] for one in stored)):
        assert (state["epoch"], state["loader"].value) == (3, 102)


def test_ranks_that_read_the_same_data_store_the_same_place():
    store = memory()
    job = Job(4, store)
    assert [r.step for r in job.save(lambda rank: state_of(rank // 2, index=rank // 2, count=2))]
    with checkpointer(store) as ckpt:
        assert ckpt.verify().ok
        assert ckpt.load()["loader"].keys() == {"0", "1"}
    states = restored(store, 2, lambda rank: {"loader": blank(rank)["loader"], "epoch": 0})
    assert [state["loader"].value["position"] for state in states] == [100, 101]


def test_one_process_alone_stores_one_and_gets_it_back():
    store = memory()
    with checkpointer(store) as ckpt:
        ckpt.save(state_of(5), 1, mode="blocking")
        state = blank(0)
        ckpt.restore(state)
    assert state["loader"].value["position"] == 105
    assert torch.equal(state["random"].get_state(), generator(5).get_state())


@pytest.mark.parametrize(
    "wrong", [{"index": 1}, {"index": 2, "count": 2}, {"index": -1, "count": 2}, {"on_change": "x"}]
)
def test_what_is_no_place_among_ranks_is_refused(wrong):
    with pytest.raises(UnsupportedStateError, match="PerRank"):
        PerRank(1, **wrong)

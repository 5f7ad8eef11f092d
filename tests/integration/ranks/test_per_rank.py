"""Rank-specific values, tensors and random state, stored side by side."""

import pytest
import torch
from tests.integration.ranks.saving import Job
from tests.integration.support import checkpointer, memory

from penstock import PerRank
from penstock.core.errors import (
    RankError,
    RestoreError,
    RestoreMismatchError,
    SaveError,
    UnsupportedStateError,
)


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


def test_each_rank_restores_its_own(store):
    states = restored(store, 3, blank)
    for rank, state in enumerate(states):
        assert state["epoch"] == 3
        assert state["loader"].value["position"] == 100 + rank
        assert state["loader"].value["order"].tolist() == [n * rank for n in range(5)]
        assert torch.equal(state["random"].get_state(), generator(rank).get_state())


def test_one_process_loads_all_ranks(store):
    with checkpointer(store) as ckpt:
        assert ckpt.verify().ok
        tree = ckpt.load()
    assert [tree["loader"][str(rank)]["position"] for rank in range(3)] == [100, 101, 102]
    assert tree["loader"]["2"]["order"].tolist() == [0, 2, 4, 6, 8]
    assert tree["random"].keys() == {"0", "1", "2"}


@pytest.mark.parametrize("count", [2, 1])
def test_on_change_decides_for_another_rank_count(store, count, caplog):
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
        assert f"loader is stored for 3 ranks, but this job has {count}" in str(error)
    caplog.clear()
    for state in restore(on_change="keep"):
        assert (state["epoch"], state["loader"].value["position"]) == (3, 0)
        assert torch.equal(state["random"].get_state(), generator(77).get_state())
    warning = f"random is stored for 3 ranks, but this job has {count}: it is left unchanged"
    assert [r.levelname for r in caplog.records if warning in r.getMessage()].count("WARNING") == 1
    for state in restore(on_change=lambda stored: max(one["position"] for one in stored)):
        assert (state["epoch"], state["loader"].value) == (3, 102)
    assert "that the template lacks" not in caplog.text


def by_pairs(rank, **changes):
    """Of 4 ranks, 2 and 2 read the same data."""
    loader = {"position": 100 + rank // 2, "order": torch.arange(40_000) + rank // 2} | changes
    return {"loader": PerRank(loader, index=rank // 2, count=2), "epoch": 3}


def test_ranks_with_the_same_data_store_it_once():
    store = memory()
    job = Job(4, store)
    first = job.save(by_pairs)
    sizes = [report.bytes_raw for report in first]
    assert sizes[0] > 320_000
    assert sizes[2] > 320_000
    assert sizes[1] == sizes[3] == 0
    with checkpointer(store) as ckpt:
        assert ckpt.verify().ok
        assert ckpt.load()["loader"].keys() == {"0", "1"}
        assert ckpt.info().bytes_raw == sum(sizes)
    for count in (2, 4):
        share = count // 2

        def template(rank, share=share):
            return {"loader": PerRank(blank(0)["loader"].value, index=rank // share, count=2)}

        def big(rank, template=template):
            state = template(rank)
            state["loader"].value["order"] = torch.zeros(40_000, dtype=torch.int64)
            return state | {"epoch": 0}

        states = restored(store, count, big)
        found = [state["loader"].value["position"] for state in states]
        assert found == [100 + rank // share for rank in range(count)]
        assert [int(state["loader"].value["order"][0]) for state in states] == [
            rank // share for rank in range(count)
        ]


def test_ranks_that_share_soon_capture_only_what_they_write():
    def work(ckpt, rank):
        counts = []
        for step in (1, 2):
            ckpt.save(by_pairs(rank), step).result(300)
            counts.append(ckpt._saver.job._capture.chunk_count)
        return counts

    first, second = zip(*Job(4, memory()).run(work), strict=True)
    assert len(set(first)) == 1
    assert [count > 0 for count in second] == [True, False, True, False]


def test_a_rank_with_changed_partners_logs_once():
    """It has captured its share for the ranks that previously gave its index."""

    def state_of(rank, step):
        index = 0 if step > 1 and rank == 2 else rank // 2
        return {"loader": PerRank({"position": index}, index=index, count=2)}

    def work(ckpt, rank):
        found = []
        for step in (1, 2, 3):
            try:
                found.append(ckpt.save(state_of(rank, step), step).result(300).step)
            except SaveError as error:
                found.append(str(error))
        return found

    results = Job(4, memory()).run(work)
    assert [(first, last) for first, _, last in results] == [(1, 3)] * 4
    assert any("captured its share" in str(middle) for _, middle, _ in results)


def test_rank_positions_are_unknown_after_a_failed_save():
    """Rank 3 shared with rank 2 at step 1, but no longer does; at step 2 no rank knew."""

    def state_of(rank, step):
        index = 0 if step == 3 and rank == 2 else rank // 2
        count = 5 if step == 2 and rank == 2 else 2
        return {"loader": PerRank({"position": index}, index=index, count=count)}

    def work(ckpt, rank):
        found = []
        for step in (1, 2, 3):
            try:
                found.append(ckpt.save(state_of(rank, step), step).result(300).step)
            except SaveError:
                found.append(None)
        return found

    assert Job(4, memory()).run(work) == [[1, None, 3]] * 4


@pytest.mark.parametrize(
    "change", [{"position": 7}, {"order": torch.arange(40_000) + 5}, {"more": 1}]
)
def test_ranks_of_one_index_that_differ_fail_the_save_by_name(change):
    results = Job(4, memory()).save(lambda rank: by_pairs(rank, **(change if rank == 3 else {})))
    assert all(isinstance(error, SaveError) for error in results)
    words = "loader is not equal on rank 2 and rank 3, which both give index=1 of penstock.PerRank"
    assert words in str(results[0])


def test_an_index_that_no_rank_gives_fails_the_save_by_name():
    results = Job(3, memory()).save(lambda rank: {"loader": PerRank(7, index=0, count=2)})
    assert "loader is a penstock.PerRank with count=2, and no rank gives index=1" in str(results[0])
    for error in results[1:]:
        assert isinstance(error, RankError)


class Loader:
    """Models data that each rank reads separately, like the libraries' loaders."""

    def __init__(self, position=0):
        self.position = position

    def state_dict(self):
        return {"position": self.position, "seen": {"rows": [self.position]}}

    def load_state_dict(self, state):
        assert state["seen"] == {"rows": [state["position"]]}
        self.position = state["position"]


class Reading(Loader, torch.utils.data.Dataset):
    pass


def loader_of_torchdata(position):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    loader = loaders.StatefulDataLoader(list(range(100)), batch_size=1)
    batches = iter(loader)
    for _ in range(position):
        next(batches)
    return loader, batches


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_stateful_loader_is_rank_specific():
    store = memory()
    held = [loader_of_torchdata(5 + rank) for rank in range(3)]
    reports = Job(3, store).save(lambda rank: {"loader": held[rank][0]})
    assert [report.step for report in reports] == [1] * 3

    fresh = [loader_of_torchdata(0)[0] for _ in range(3)]

    def resumed(rank):
        return {"loader": fresh[rank]}

    for rank, state in enumerate(restored(store, 3, resumed)):
        assert int(next(iter(state["loader"]))) == 5 + rank


def test_data_readers_are_rank_specific_and_schedulers_must_be_equal():
    for rank, report in enumerate(Job(2, memory()).save(lambda rank: {"data": Reading(rank)})):
        assert report.ranks == 2, rank
    for error in Job(2, memory()).save(lambda rank: {"scheduler": Loader(rank)}):
        assert isinstance(error, SaveError)
        assert "scheduler/position is not equal on rank 0 and rank 1" in str(error)
        assert "penstock.PerRank" in str(error)


@pytest.mark.parametrize("count", [1, 2])
def test_loaders_of_another_rank_count_are_an_error_with_a_remedy(count):
    store = memory()
    Job(3, store).save(lambda rank: {"data": Reading(rank), "epoch": 1})
    if count == 1:
        with checkpointer(store) as ckpt, pytest.raises(RestoreMismatchError) as raised:
            ckpt.restore({"data": Reading(), "epoch": 0})
        errors = [raised.value]
    else:
        errors = restored(store, count, lambda _: {"data": Reading(), "epoch": 0})
    for error in errors:
        assert f"data is stored for 3 ranks, but this job has {count}: put it into" in str(error)


@pytest.mark.parametrize("count", [1, 2])
def test_a_loader_loads_the_state_that_on_change_returns(count):
    store = memory()
    Job(3, store).save(lambda rank: {"data": PerRank(Reading(rank + 5)), "epoch": 1})
    live = [Reading() for _ in range(count)]

    def blank(rank):
        return {"data": PerRank(live[rank], on_change=max_position), "epoch": 0}

    if count == 1:
        state = blank(0)
        with checkpointer(store) as ckpt:
            ckpt.restore(state)
        states = [state]
    else:
        states = restored(store, count, blank)
    assert [loader.position for loader in live] == [7] * count
    assert [state["data"].value for state in states] == live


def max_position(stored):
    return max(stored, key=lambda state: state["position"])


def test_an_on_change_load_failure_is_an_error():
    store = memory()
    Job(2, store).save(lambda rank: {"data": PerRank({"loader": Reading(rank)})})
    live = Reading()
    with checkpointer(store) as ckpt:
        marker = PerRank({"loader": live}, on_change=lambda stored: stored[0])
        with pytest.raises(RestoreMismatchError, match="give each such object its own PerRank"):
            ckpt.restore({"data": marker})
    store = memory()
    Job(2, store).save(lambda rank: {"data": PerRank(Reading(rank))})
    with checkpointer(store) as ckpt:
        marker = PerRank(live, on_change=lambda stored: 1)
        with pytest.raises(RestoreError, match="data: load_state_dict failed on the result"):
            ckpt.restore({"data": marker})


@pytest.mark.parametrize(
    "wrong", [{"index": 1}, {"index": 2, "count": 2}, {"index": -1, "count": 2}, {"on_change": "x"}]
)
def test_invalid_rank_positions_are_refused(wrong):
    with pytest.raises(UnsupportedStateError, match="PerRank"):
        PerRank(1, **wrong)


def test_counts_that_differ_fail_the_save_by_name():
    results = Job(3, memory()).save(
        lambda rank: {"loader": PerRank(7, index=rank, count=4 if rank == 2 else 3)}
    )
    words = "with count=3 on ranks 0-1 and count=4 on rank 2: give the same count= on all"
    assert words in str(results[0])


def test_too_many_shared_values_for_a_post_are_refused():
    def state_of(rank):
        return {f"v{n}": PerRank(n, index=rank, count=2) for n in range(65)}

    for error in Job(2, memory()).save(state_of):
        assert isinstance(error, UnsupportedStateError)
        assert "put the values with the same index into one" in str(error)


@pytest.mark.parametrize("character", ["a", "\x01"], ids=ascii)
def test_long_names_are_posted_truncated(character):
    """Some characters take six bytes in a post."""
    store, name = memory(), character * 3000

    def state_of(rank):
        return {f"{name}{n}": PerRank(n, index=rank // 2, count=2) for n in range(64)}

    reports = Job(4, store).save(state_of)
    assert [report.bytes_raw > 0 for report in reports] == [True, False, True, False]
    with checkpointer(store) as ckpt:
        assert ckpt.load()[f"{name}63"] == {"0": 63, "1": 63}

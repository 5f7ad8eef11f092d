"""Runs of several ranks from their first to their last checkpoint, and partial restores."""

import pytest
import torch
from tests.integration.ranks.saving import Job
from tests.integration.ranks.topologies import Net, adam, fsdp2, train, values_of
from tests.integration.support import checkpointer, memory
from tests.providers.threads_as_ranks import run_ranks

import penstock
from penstock import CheckpointNotFoundError, RestoreMismatchError
from penstock.core.abc import DelegatingBackend

LAST = 5


class Loader:
    """Reads data: each rank has its own position."""

    def __init__(self, row=0):
        self.row = row

    def state_dict(self):
        return {"row": self.row}

    def load_state_dict(self, state):
        self.row = state["row"]


class Data(Loader, torch.utils.data.Dataset):
    pass


class Counting(DelegatingBackend):
    """Notes the deletions."""

    def __init__(self, inner):
        super().__init__(inner)
        self.deleted = []

    def delete(self, names, /):
        self.deleted += names
        super().delete(names)


def fresh(count, rank, seed=1):
    net = fsdp2(count)(Net(seed)) if count > 1 else Net(seed)
    optimizer = adam(net)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = {"model": net, "optimizer": optimizer, "schedule": schedule}
    return state | {"data": Data(100 * rank), "train": {"step": 0, "losses": []}}


def train_step(state, step):
    state["train"]["losses"] += train(state["model"], state["optimizer"], 1, start=step)
    state["train"]["step"] = step
    state["schedule"].step()
    state["data"].row += 8


@pytest.fixture(scope="module")
def run():
    """A run of two ranks that keeps three steps, the last one of only the model. The store, each
    rank's share of each step, and the deletions.
    """
    store = memory()
    stores = [Counting(store) for _ in range(2)]
    job = Job(2, lambda rank: stores[rank], retention={"keep_last": 3})

    def work(rank):
        state, held = fresh(2, rank, seed=0), {}
        with job.checkpointer(rank) as ckpt:
            for step in range(1, LAST + 1):
                train_step(state, step)
                kept = state if step < LAST else {"model": state["model"]}
                ckpt.save(kept, step, metadata={"whole": step < LAST}).result(300)
                held[step] = values_of(state), list(state["train"]["losses"]), state["data"].row
        return held

    return store, run_ranks(2, work), [one.deleted for one in stores]


def restored(store, count, work):
    """Return the result of `work(ckpt, rank, state)` on each of `count` ranks."""
    job = Job(count, store)

    def rank_works(rank):
        state = fresh(count, rank)
        with job.checkpointer(rank) as ckpt:
            return work(ckpt, rank, state)

    return run_ranks(count, rank_works)


def equal(found, expected):
    assert found.keys() == expected.keys()
    for path, tensor in expected.items():
        assert torch.equal(found[path], tensor), path


def test_a_given_step_is_restored_with_all_its_state(run):
    store, held, _ = run

    def work(ckpt, rank, state):
        assert ckpt.restore(state, step=3).step == 3
        values, losses, row = held[rank][3]
        equal(values_of(state), values)
        assert (state["train"], state["data"].row) == ({"step": 3, "losses": losses}, row)
        assert state["schedule"].get_last_lr() == [0.01 * 0.5**3]
        train_step(state, 4)
        equal(values_of(state), held[rank][4][0])
        assert state["train"]["losses"] == held[rank][4][1]

    restored(store, 2, work)


@pytest.mark.parametrize("count", [3, 1])
def test_another_rank_count_restores_a_part_only(run, count):
    """Without the data position, which cannot be split, and without the schedule."""
    store, held, _ = run

    def work(ckpt, rank, state):
        report = ckpt.restore(state, step=4, exclude=["data/**", "schedule/**"])
        assert (report.missing, report.matched_by) == ((), "name")
        assert state["train"]["losses"] == held[0][4][1]
        assert state["data"].row == 100 * rank
        assert state["schedule"].last_epoch == 0
        # The rate is an option of the optimizer.
        assert state["optimizer"].param_groups[0]["lr"] == 0.01 * 0.5**4
        return train(state["model"], state["optimizer"], 1, start=5)

    expected = [held[0][5][1][4]]
    for losses in restored(store, count, work):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("count", [2, 3])
def test_a_model_checkpoint_is_no_whole_state_on_any_rank(run, count):
    store, _, _ = run

    def work(ckpt, rank, state):
        before = values_of(state)
        with pytest.raises(penstock.PenstockError, match="not in the checkpoint") as raised:
            ckpt.restore(state)
        equal(values_of(state), before)
        report = ckpt.restore(state, strict=False)
        assert report.missing == ("optimizer", "schedule", "data", "train")
        return raised.type

    assert RestoreMismatchError in restored(store, count, work)


def test_a_run_continues_from_one_process_to_ranks_and_back():
    """Like a checkpoint of the first weights, made by one process for jobs of any size."""
    store = memory()
    first = fresh(1, 0, seed=0)
    first["data"] = penstock.PerRank(first["data"], on_change="keep")
    with checkpointer(store) as ckpt:
        ckpt.save(first, 0, mode="blocking")

    def work(ckpt, rank, state):
        state["data"] = penstock.PerRank(state["data"], on_change="keep")
        assert ckpt.restore(state).step in {0, 1}
        at = state["train"]["step"]
        losses = train(state["model"], state["optimizer"], 1, start=at + 1)
        state["train"] = {"step": at + 1, "losses": [*state["train"]["losses"], *losses]}
        state["schedule"].step()
        ckpt.save(state, at + 1).result(300)

    for count in (3, 2):
        restored(store, count, work)
    last = fresh(1, 0)
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == [0, 1, 2]
        ckpt.restore(last, exclude="data/**")
    alone = fresh(1, 0, seed=0)
    losses = []
    for step in (1, 2):
        losses += train(alone["model"], alone["optimizer"], 1, start=step)
        alone["schedule"].step()
    assert last["train"]["losses"] == pytest.approx(losses, rel=1e-5)
    assert last["schedule"].get_last_lr() == alone["schedule"].get_last_lr()
    for path, tensor in values_of(alone).items():
        torch.testing.assert_close(values_of(last)[path], tensor, rtol=1e-4, atol=1e-6)


def test_a_missing_step_is_the_same_error_on_all_ranks(run):
    store, _, _ = run

    def work(ckpt, rank, state):
        with pytest.raises(CheckpointNotFoundError, match="step 2"):
            ckpt.restore(state, step=2)
        assert ckpt.latest() == LAST

    restored(store, 3, work)

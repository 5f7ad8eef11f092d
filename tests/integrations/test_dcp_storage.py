"""`penstock.dcp`: saves and loads of DCP through it, as normal checkpoints."""

import datetime as dt
import fractions
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests import interpreters
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import penstock
import penstock.dcp  # also by this name
from penstock.integrations.dcp import Reader, Writer

# It warns of a single process, and of reading a missing checkpoint.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


NEEDS_PICKLE = re.compile("options/odd.*allow_pickle", re.DOTALL)


def save(state, place, writer=None, **options):
    dcp.save(state, checkpoint_id=place, storage_writer=writer or Writer(**options))


def load(state, place, **options):
    dcp.load(state, checkpoint_id=place, storage_reader=Reader(**options))
    return state


def trained(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    groups = [
        {"params": model[0].parameters(), "lr": 0.1 + seed},
        {"params": model[1].parameters()},
    ]
    optimizer = torch.optim.AdamW(groups)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def everything_of(model, optimizer):
    found = get_state_dict(model, optimizer)
    return {"model": found[0], "optimizer": found[1]}


def plain(tree):
    """A tree comparable by `==`: with dtypes and elements in place of tensors."""
    if isinstance(tree, torch.Tensor):
        return str(tree.dtype), tuple(tree.shape), tree.tolist()
    if isinstance(tree, dict):
        return {key: plain(item) for key, item in tree.items()}
    return type(tree)(map(plain, tree)) if isinstance(tree, list | tuple) else tree


def test_every_kind_of_state_is_restored_and_has_its_own_path(tmp_path):
    state = {
        "half": torch.arange(3, dtype=torch.bfloat16),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
        "list": [torch.ones(2), {"a/b%": torch.zeros(1), "": 4}],
        "tuple": (torch.full((2,), 7.0), 1),
        "pairs": [(torch.full((2,), 8.0), 1)],
        "when": dt.datetime(2026, 1, 2),
        "plain": {"lr": 0.1, "names": ["x", "y"], "null": None},
    }
    save(state, tmp_path / "run" / "step-3")
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.steps() == [3]
        specs = ckpt.open(3).specs()
        assert {*specs} == {
            "half", "turned", "none", "scalar", "list/0", "list/1/a%2Fb%25", "list/1/%00",
            "tuple/0", "tuple/1", "pairs/0/0", "pairs/0/1", "when", "plain/lr",
            "plain/names", "plain/null",
        }  # fmt: skip
        assert {spec.form for spec in specs.values()} == {"tensor", "json"}
        assert plain(ckpt.load()) == plain(state)
    reader = Reader(tmp_path / "run" / "step-3")
    assert plain(_load_state_dict_from_keys(storage_reader=reader)) == plain(state)
    # As with DCP's own storage the template decides on the dtype.
    assert load({"scalar": torch.zeros(())}, tmp_path / "run" / "step-3")["scalar"] == 3.0


def test_checkpoints_of_dcp_and_of_live_objects_restore_into_each_other(tmp_path):
    model, optimizer = trained(0)
    extra = {"epoch": 3, "curve": [1.5, {"best": 2}]}
    save({**everything_of(model, optimizer), "extra": extra}, tmp_path / "1")
    other, its_optimizer = trained(1)
    live = {"model": other, "optimizer": its_optimizer, "extra": {"epoch": 0, "curve": []}}
    with penstock.Checkpointer(tmp_path) as ckpt:
        report = ckpt.restore(live, 1)
        assert (report.unexpected, report.matched_by) == ((), "name")
        assert live["extra"] == extra
        assert plain(everything_of(other, its_optimizer)) == plain(everything_of(model, optimizer))
        other(torch.randn(5, 4)).sum().backward()
        its_optimizer.step()
        ckpt.save(live, 2, mode="blocking")
    model, optimizer = trained(2)
    state = {**everything_of(model, optimizer), "extra": {"epoch": 0, "curve": [0, {"best": 0}]}}
    load(state, tmp_path)  # no step: the newest
    set_state_dict(
        model, optimizer,
        model_state_dict=state["model"], optim_state_dict=state["optimizer"],
    )  # fmt: skip
    assert state["extra"] == extra
    assert plain(everything_of(model, optimizer)) == plain(everything_of(other, its_optimizer))


def test_the_end_of_a_url_may_name_a_step():
    for url, step, place in [
        ("runs/gpt/step-100", None, ("runs/gpt", 100)),
        ("runs/gpt/global_step_7/", None, ("runs/gpt", 7)),
        ("s3://b/gpt/00012?region=x", None, ("s3://b/gpt?region=x", 12)),
        ("5", None, (".", 5)),
        ("runs/llama3", None, ("runs/llama3", None)),
        ("runs/epoch-3", None, ("runs/epoch-3", None)),
        ("runs/7", 3, ("runs/7", 3)),
    ]:
        assert penstock.dcp.Writer(url, step)._place() == place
        assert Reader(path=url, step=step, thread_count=4)._place() == place


def test_a_checkpoint_is_replaced_and_any_step_order_works(tmp_path):
    for step, value in ((5, 1), (5, 2), (3, 3)):
        save({"v": value}, tmp_path / f"{step}")
    assert [load({"v": 0}, tmp_path / f"{step}")["v"] for step in (3, 5)] == [3, 2]
    with pytest.raises(CheckpointException, match="StepExistsError"):
        save({"v": 4}, tmp_path / "5", overwrite=False)
    with pytest.raises(CheckpointException, match="StepExistsError"):
        save({"v": 5}, tmp_path)  # as step 0 no reader would find it
    assert load({"v": 0}, tmp_path)["v"] == 2
    for value in (6, 7):
        save({"v": value}, tmp_path / "one")
    assert load({"v": 0}, tmp_path / "one")["v"] == 7


def test_a_writer_is_kept_and_plans_are_cached(tmp_path):
    writer = Writer(rules=[{"match": "**", "codecs": ["zstd"]}])
    for step in (1, 2, 3):
        state = {"w": torch.full((4,), float(step)), "n": {"v": step}}
        dcp.save(
            state, checkpoint_id=tmp_path / str(step), storage_writer=writer,
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )  # fmt: skip
    with penstock.Checkpointer(tmp_path) as ckpt:
        found = [ckpt.load(step) for step in ckpt.steps()]
        assert [(tree["w"].tolist(), tree["n"]) for tree in found] == [
            ([float(step)] * 4, {"v": step}) for step in (1, 2, 3)
        ]
        assert ckpt.open(3).specs()["w"].codecs == ("zstd",)


def test_objects_needing_pickle_are_refused_by_name_unless_allowed(tmp_path):
    state = {"options": {"odd": fractions.Fraction(1, 3), "even": 2}}
    with pytest.raises(CheckpointException, match=NEEDS_PICKLE):
        save(state, tmp_path / "1")
    save(state, tmp_path / "1", allow_pickle=True)
    with pytest.raises(CheckpointException, match=NEEDS_PICKLE):
        load({"options": {"even": 0}}, tmp_path / "1")
    found = load({"options": {"odd": 0, "even": 0}}, tmp_path / "1", allow_pickle=True)
    assert found == state


def test_a_missing_location_is_named(tmp_path):
    with pytest.raises(CheckpointException, match="checkpoint_id, such as"):
        dcp.save({"v": 1}, storage_writer=Writer())
    save({"v": 1}, tmp_path / "1")
    with pytest.raises(CheckpointException, match=r"no checkpoint of step 2 .*; steps there: 1"):
        load({"v": 0}, tmp_path / "2")


def test_ranks_outside_the_group_are_refused():
    plans = [SavePlan([], storage_data=rank) for rank in (0, 1)]
    with pytest.raises(penstock.ConfigError, match=r"ranks \[0, 1\] save, .* 3 ranks: .* group="):
        Writer("run", group=[0, 1, 2]).prepare_global_plan(plans)
    assert Writer("run", group=[0, 1]).prepare_global_plan(plans) is plans


def test_an_empty_state_is_saved(tmp_path):
    save({}, tmp_path / "1")
    assert load({}, tmp_path / "1") == {}


RANKS = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

import penstock
from penstock.integrations.dcp import Reader, Writer

def save(state, step, *, writer=None, **options):
    place = f"{sys.argv[1]}/step-{step}"
    dcp.save(state, checkpoint_id=place, storage_writer=writer or Writer(), **options)

def load(state, step, **options):
    place = f"{sys.argv[1]}/step-{step}"
    dcp.load(state, checkpoint_id=place, storage_reader=Reader(), **options)
    return state

def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

def check(step, model, optimizer):
    saved = get_state_dict(model, optimizer)[0]
    found = load({"model": {n: torch.zeros_like(t) for n, t in saved.items()}, "n": 0}, step)
    assert all(torch.equal(local(found["model"][n]), local(t)) for n, t in saved.items())
    assert found["n"] == step

def refused(text, action, *args, **options):
    try:
        action(*args, **options)
    except dcp.api.CheckpointException as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"not refused: {text}")

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.ones(1, 7)).sum().backward()
    optimizer.step()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))

    save({**state, "n": 1}, 1)
    check(1, model, optimizer)
    for step, kind in ((2, AsyncCheckpointerType.THREAD), (3, AsyncCheckpointerType.PROCESS)):
        dcp.async_save(
            {**state, "n": step}, checkpoint_id=f"{sys.argv[1]}/step-{step}",
            storage_writer=Writer(), async_checkpointer_type=kind,
        ).result()
        check(step, model, optimizer)

    save({**state, "n": 4}, 4, use_collectives=False)
    check(4, model, optimizer)

    # Two pieces of one tensor on each rank.
    places = ["rank:0/cpu", "rank:1/cpu", "rank:1/cpu", "rank:0/cpu"]
    cut = [sharded_tensor.rand(ChunkShardingSpec(0, places), 10, 6) for _ in range(2)]
    save({"w": cut[0]}, 5)
    load({"w": cut[1]}, 5)
    for one, other in zip(cut[0].local_shards(), cut[1].local_shards()):
        assert torch.equal(one.tensor, other.tensor)

    # Each rank alone, and some of the ranks.
    own = f"{sys.argv[1]}-of-{rank}"
    dcp.save({"n": rank}, checkpoint_id=f"{own}/1", storage_writer=Writer(), no_dist=True)
    with penstock.Checkpointer(own, ranks="alone") as ckpt:
        assert ckpt.load() == {"n": rank}
    group = dist.new_group([1])
    if rank == 1:
        save({"n": 6}, 6, process_group=group)
    # A failed rank tells the other at once, and the next save is unharmed.
    class Failing(DefaultSavePlanner):
        def resolve_data(self, item):
            if rank:
                raise OSError("no data here")
            return super().resolve_data(item)
    refused("rank 1 on", save, {"model": state["model"]}, 7, planner=Failing())
    save({**state, "n": 7}, 7)
    check(7, model, optimizer)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


@pytest.mark.process
@pytest.mark.multirank
def test_two_ranks_save_and_load_in_all_ways(tmp_path):
    program = tmp_path / "program.py"  # which the process of an asynchronous save imports
    program.write_text(RANKS)
    interpreters.run_as_torchrun(2, str(program), str(tmp_path / "run"))
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.steps() == [1, 2, 3, 4, 5, 6, 7]
        assert all(ckpt.verify(step).ok for step in ckpt.steps())
        specs = ckpt.open(1).specs()
        assert len(specs["model/0.weight"].shards) == 2
        model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
        optimizer = torch.optim.AdamW(model.parameters())
        live = {"model": model, "optimizer": optimizer, "n": 0}
        assert ckpt.restore(live, 2).unexpected == ()
        assert optimizer.state[model[0].weight]["step"] == 1

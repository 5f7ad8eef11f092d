"""Checkpoints that many ranks save together, read by one process, bit by bit."""

import pytest
import torch
from tests.core.stored_ranks import STEP
from tests.integration.ranks.saving import Job
from tests.integration.ranks.topologies import PLACES, Net, adam, trained, values_of
from tests.integration.support import checkpointer, memory
from tests.providers.threads_as_ranks import run_ranks

import penstock

FEW = ["DDP 2", "FSDP2 3", "HSDP 2 x 2", "TP 4", "FSDP2 x TP 2 x 2", "FSDP2 x TP 3 x 2"]
SLOW = {"FSDP2 3", "HSDP 2 x 2", "TP 4", "FSDP2 x TP 2 x 2"}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=pytest.mark.slow if name in SLOW else ())
        for name, mode in zip(FEW, ["blocking", "lazy"] * 3, strict=True)
    ],
)
def test_one_process_loads_a_save_of_ranks(name, mode):
    count, place = PLACES[name]
    store = memory()
    job = Job(count, store)

    def rank_saves(rank):
        state = trained(place)
        with job.checkpointer(rank) as ckpt:
            return ckpt.save(state, STEP, mode=mode).result(300)

    reports = run_ranks(count, rank_saves)
    # The same elements in one process; torch 2.13 cannot gather uneven ones itself.
    values = values_of(trained(lambda net: net))
    with checkpointer(store) as ckpt:
        assert ckpt.verify().ok
        tree = ckpt.load()
    assert tree["epoch"] == 7
    stored = {path: tree["model"][path[1]] for path in values if path[0] == "model"}
    assert stored
    for path, tensor in stored.items():
        assert torch.equal(tensor, values[path]), path
    net = Net(1)
    fresh = {"model": net, "optimizer": adam(net), "epoch": 0}
    with checkpointer(store) as ckpt:
        ckpt.restore(fresh)
    found = values_of(fresh)
    assert found.keys() == values.keys()
    for path, tensor in values.items():
        assert torch.equal(found[path], tensor), path
    assert {report.ranks for report in reports} == {count}
    # Each byte is written once: replicas share them.
    raw = sum(t.nbytes for t in values.values())
    values_bytes = sum(report.bytes_raw for report in reports) - raw
    assert 0 < values_bytes < 4096


@pytest.mark.parametrize("codecs", [[], ["zstd"]])
def test_replicas_share_the_bytes_and_soon_capture_no_more(codecs):
    count, store = 3, memory()
    state = {
        "big": torch.arange(520_000, dtype=torch.int32).view(-1, 10),
        "more": [torch.full((300, 7), float(n)) for n in range(9)],
        "epoch": 1,
    }
    rules = [{"match": "big", "codecs": codecs}]
    job = Job(count, store, writer_bytes=640 << 10, chunk_bytes="80KiB", rules=rules)
    total = 2_080_000 + 9 * 300 * 7 * 4

    def work(ckpt, rank):
        found = []
        for step in (1, 2):
            report = ckpt.save(state, step).result(300)
            found.append((report.bytes_raw, ckpt._saver.job._capture.chunk_count))
        return found

    first, second = zip(*job.run(work), strict=True)
    for reports in (first, second):
        sizes = [size for size, _ in reports]
        assert total <= sum(sizes) <= total + 100
        assert max(sizes) - min(sizes) <= 2 * (80 << 10)
    assert {chunks for _, chunks in first} == {first[0][1]}  # each rank's whole state
    assert max(chunks for _, chunks in second) < first[0][1] / 2  # its share
    with checkpointer(store) as ckpt:
        for step in (1, 2):
            tree = ckpt.load(step)
            assert torch.equal(tree["big"], state["big"])
            assert all(map(torch.equal, tree["more"], state["more"]))


def test_pipeline_stages_store_their_own_and_shared_objects():
    store = memory()
    shared = torch.randn(40, 3)

    def state_of(rank):
        stage = rank // 2
        own = {f"layer{stage}": torch.full((20, 5), float(stage)), "embedding": shared}
        return {"model": own, "epoch": 2, f"only{stage}": stage}

    reports = Job(4, store).save(state_of)
    assert [report.bytes_raw > 0 for report in reports] == [True, False, True, False]
    with checkpointer(store) as ckpt:
        assert ckpt.verify().ok
        tree = ckpt.load()
    assert torch.equal(tree["model"]["embedding"], shared)
    for stage in range(2):
        assert tree["model"][f"layer{stage}"].eq(stage).all()
        assert tree[f"only{stage}"] == stage


def restored(count, store, state_of):
    def work(ckpt, rank):
        state = state_of(rank)
        assert ckpt.restore(state).missing == ()
        return state

    found = Job(count, store).run(work)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


def test_tensors_of_some_ranks_restore_on_these_and_on_others():
    """Each under its own name, in any order of the names."""
    held = {"a": {0}, "b": {1}, "c": set(range(5)), "d": {3, 0}, "e": {1, 4}, "f": {4}}
    moved = {name: {(rank + 2) % 3 for rank in ranks} for name, ranks in held.items()}

    def state_of(places, *, value):
        def state(rank):
            names = [name for name in places if rank in places[name]]
            found = {n: torch.full((5, 3), float(ord(n)) if value else 0.0) for n in names}
            return {"all": dict(reversed(found.items())) if rank % 2 else found}

        return state

    store = memory()
    reports = Job(5, store).save(state_of(held, value=True))
    assert {report.ranks for report in reports} == {5}
    for count, places in ((5, held), (3, moved)):
        found = restored(count, store, state_of(places, value=False))
        for rank, state in enumerate(found):
            for name, tensor in state_of(places, value=True)(rank)["all"].items():
                assert torch.equal(state["all"][name], tensor), name


def test_metadata_and_overwrite_are_those_of_rank_0():
    store = memory()
    for epoch in (1, 2):
        reports = Job(2, store).run(
            lambda ckpt, rank, epoch=epoch: ckpt.save(
                {"epoch": epoch}, 1, metadata={"of": rank}, overwrite=rank == 0 and epoch == 2
            ).result(300)
        )
        assert [report.step for report in reports] == [1, 1]
    with checkpointer(store) as ckpt:
        assert ckpt.load() == {"epoch": 2}
        assert ckpt.info().metadata == {"of": 0}
    errors = Job(2, store).run(
        lambda ckpt, rank: ckpt.save({"epoch": 3}, 1, overwrite=rank == 1).result(300)
    )
    assert [type(error) for error in errors] == [penstock.StepExistsError] * 2

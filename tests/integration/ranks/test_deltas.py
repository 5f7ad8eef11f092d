"""Checkpoints of many ranks that refer to earlier ones of the same or another rank count."""

import itertools

import pytest
import torch
from tests.integration.ranks.saving import Job, save_steps
from tests.integration.ranks.topologies import PLACES, Net, adam, held_of, trained, values_of
from tests.integration.support import checkpointer, memory, same
from tests.providers.threads_as_ranks import run_ranks

from penstock import Shard
from penstock.core.abc.delegating import DelegatingBackend

RULES = [{"match": "**", "codecs": ["delta", "floatsplit"]}]
LARGE = (600, 130)


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Compiles the codec, which would take longer than a rank may stall here."""
    with checkpointer(memory(), rules=RULES) as ckpt:
        ckpt.save(weights(0), 0, mode="blocking")


def weights(step):
    """A state whose tensors change slightly per step: large ones, and a slab of small ones."""
    made = torch.Generator().manual_seed(3)
    shapes = {"large": LARGE, "odd": (1231, 7), **{f"small{n}": (40, 5) for n in range(30)}}
    state = {}
    for name, shape in shapes.items():
        start = torch.randn(shape, generator=made)
        state[name] = start + 1e-6 * step * torch.randn(shape, generator=made)
    return {"model": state, "epoch": step}


def plain(step, rank, count):
    """The state that each of some ranks saves: the same."""
    del rank, count
    return weights(step)


def in_rows(step, rank, count):
    """Each of some ranks has its own rows of the large tensor."""
    state = weights(step)
    rows = -(-LARGE[0] // count)
    own = state["model"]["large"][rank * rows : (rank + 1) * rows].clone()
    state["model"]["large"] = Shard(own, LARGE, (rank * rows, 0))
    return state


def in_columns(step, rank, count):
    """Each of some ranks has its own columns of the large tensor."""
    state = weights(step)
    first, stop = (LARGE[1] * n // count for n in (rank, rank + 1))
    own = state["model"]["large"][:, first:stop].clone()
    state["model"]["large"] = Shard(own, LARGE, (0, first))
    return state


def replicas_of_rows(step, rank, count):
    """Two halves of the large tensor, each on half of the ranks."""
    state = weights(step)
    half = LARGE[0] // 2
    own = state["model"]["large"][rank % 2 * half :][:half].clone()
    state["model"]["large"] = Shard(
        own, LARGE, (rank % 2 * half, 0), replica=(rank // 2, count // 2)
    )
    return state


def save_all(store, count, steps, state_of=plain, **options):
    return save_steps(store, count, steps, state_of, weights, **{"rules": RULES, **options})


def bases_of(store, steps):
    with checkpointer(store) as ckpt:
        records = [ckpt._catalog.record(step) for step in steps]
    return [(r.base.step, r.base.age) if r.base else None for r in records]


def depths_of(store, step, path):
    """The number of frames to decode the chunks of an object, for each of its regions."""
    with checkpointer(store) as ckpt:
        contents = ckpt.open(step).contents
        found = {}
        for record in contents.everywhere({path: ()}):
            for shard in record.shards:
                frames = [record.frames[ref.frame] for ref in shard.chunks]
                found[shard.region.offsets] = {len(list(frame.links())) for frame in frames}
        return found


def check(store, steps):
    with checkpointer(store) as ckpt:
        for step in steps:
            assert same(ckpt.load(step), weights(step))
            report = ckpt.verify(step)
            assert report.ok, report.damaged


QUICK = {(in_columns, None), (replicas_of_rows, 0)}


@pytest.mark.parametrize(
    ("state_of", "memory_bytes"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product((plain, in_rows, in_columns, replicas_of_rows), (None, 0))
    ],
)
def test_later_checkpoints_are_small_and_every_one_restores(state_of, memory_bytes):
    store = memory()
    options = {"deltas": {"memory_bytes": memory_bytes}}
    first, *later = save_all(store, 4, range(4), state_of, **options)
    assert all(size < 0.7 * first for size in later)
    assert bases_of(store, range(4)) == [None, (0, 1), (1, 2), (2, 3)]
    for depths in depths_of(store, 3, ("model", "large")).values():
        assert depths == {4}
    check(store, range(4))


@pytest.mark.parametrize(("first", "then"), [(2, 3), (1, 2)])
def test_another_rank_count_continues_the_chain(first, then):
    store = memory()
    save_all(store, first, [0, 1])
    save_all(store, then, [2, 3])
    assert bases_of(store, range(4)) == [None, (0, 1), (1, 2), (2, 3)]
    assert depths_of(store, 2, ("model", "large")) == {(0, 0): {3}}
    check(store, range(4))


class Counting(DelegatingBackend):
    """Counts the frames that are read."""

    frames = 0

    def read(self, requests, /):
        self.frames += sum("/blobs/" in request.name for request in requests)
        super().read(requests)


@pytest.mark.parametrize("state_of", [pytest.param(plain, marks=pytest.mark.slow), in_rows])
def test_a_rank_uses_the_base_in_memory_if_it_stored_it(state_of):
    store = memory()
    stores = [Counting(store) for _ in range(2)]
    job = Job(2, stores.__getitem__, rules=RULES)

    def work(ckpt, rank):
        for step in range(3):
            ckpt.save(state_of(step, rank, 2), step).result(300)
        return stores[rank].frames

    assert job.run(work) == [0, 0]
    # After a restart it is read.
    found = Job(2, stores.__getitem__, rules=RULES).save(lambda rank: state_of(3, rank, 2), 3)
    assert [report.step for report in found] == [3, 3]
    assert stores[0].frames + stores[1].frames > 10
    check(store, range(4))


def test_only_pieces_with_other_bounds_are_stored_whole():
    store = memory()
    save_all(store, 2, [0, 1], in_rows)
    save_all(store, 3, [2, 3], in_rows)
    assert depths_of(store, 1, ("model", "large")) == {(0, 0): {2}, (300, 0): {2}}
    assert depths_of(store, 2, ("model", "large")) == {(n, 0): {1} for n in (0, 200, 400)}
    assert depths_of(store, 2, ("model", "odd")) == {(0, 0): {3}}
    assert depths_of(store, 3, ("model", "large")) == {(n, 0): {2} for n in (0, 200, 400)}
    check(store, range(4))
    save_all(store, 1, [4, 5])
    assert depths_of(store, 4, ("model", "large")) == {(0, 0): {1}}
    check(store, [4, 5])


def test_a_base_is_found_in_the_part_of_another_rank():
    """The ranks swap: each reads data stored by another one."""
    store = memory()
    save_all(store, 3, [0], in_rows)
    save_all(store, 3, [1], lambda step, rank, count: in_rows(step, (rank + 1) % 3, count))
    assert depths_of(store, 1, ("model", "large")) == {(n, 0): {2} for n in (0, 200, 400)}
    check(store, [0, 1])


@pytest.mark.parametrize(
    "name",
    [
        "FSDP2 2",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("FSDP2 x TP 3 x 2", "HSDP 2 x 2")),
    ],
)
def test_shards_in_training_are_stored_as_deltas(name):
    count, place = PLACES[name]
    store = memory()
    job = Job(count, store, rules=RULES)

    def rank_saves(rank):
        state = trained(place)
        optimizer = state["optimizer"]
        with job.checkpointer(rank) as ckpt:
            for step in range(3):
                optimizer.step()
                ckpt.save(state, step, mode="lazy").result(300)

    run_ranks(count, rank_saves)
    state = trained(lambda net: net)
    for step in range(3):
        state["optimizer"].step()
        net = Net(1)
        fresh = {"model": net, "optimizer": adam(net), "epoch": 0}
        with checkpointer(store) as ckpt:
            assert ckpt.verify(step).ok
            ckpt.restore(fresh, step)
        found, values = values_of(fresh), values_of(state)
        for path, tensor in values.items():
            assert torch.equal(found[path], tensor), (step, path)
    assert bases_of(store, range(3)) == [None, (0, 1), (1, 2)]
    # Ranks of another topology restore it, too.
    count, place = PLACES["FSDP2 3"]
    other = Job(count, store)

    def rank_restores(rank):
        state = trained(place, seed=1)
        with other.checkpointer(rank) as ckpt:
            ckpt.restore(state)
        return held_of(state)

    for held in run_ranks(count, rank_restores):
        assert torch.equal(held["model", "seen"], values["model", "seen"])

"""Later saves of ranks whose structure is known: what is taken over, posted, and stored."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.integration.ranks.saving import Job
from tests.integration.ranks.topologies import PLACES, trained, values_of
from tests.integration.support import checkpointer, memory
from tests.providers.threads_as_ranks import run_ranks

from penstock import SaveError, Shard
from penstock.testing.coordination import MemoryCoordination

ROWS, WIDTH = 12, 64


def in_rows(rank, count, *, rows=ROWS, seed=0):
    """Each rank has rows of a few tensors, and all have the same small ones."""
    made = torch.Generator().manual_seed(seed)
    share = ROWS // count
    own = {
        name: Shard(torch.randn((share, WIDTH), generator=made), (rows, WIDTH), (rank * share, 0))
        for name in ("w", "v")
    }
    return {"cut": own, "plain": torch.full((5, 5), float(seed)), "epoch": seed}


def newest(ckpt):
    return ckpt._saver._parts.newest


@pytest.mark.parametrize(
    "name",
    [
        "FSDP2 2",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("HSDP 2 x 2", "pipeline 2 x FSDP2 2")),
    ],
)
def test_the_index_is_taken_over_and_the_bytes_are_new(name):
    count, place = PLACES[name]
    store = memory()
    job = Job(count, store)

    def rank_saves(rank):
        state = trained(place)
        known = []
        with job.checkpointer(rank) as ckpt:
            for step in (1, 2, 3):
                for parameter in state["model"].parameters():
                    parameter.data.mul_(2)
                state["epoch"] = 10**step
                ckpt.save(state, step).result(300)
                known.append(newest(ckpt))
        return known

    knowns = run_ranks(count, rank_saves)
    assert all(known is None for rank in range(1, count) for known in knowns[rank])
    blocks = {id(known.blocks) for known in knowns[0]}
    assert len(blocks) == 1
    expected = values_of(trained(lambda net: net))
    with checkpointer(store) as ckpt:
        for step in (1, 2, 3):
            assert ckpt.verify(step).ok
            tree = ckpt.load(step)
            assert tree["epoch"] == 10**step
            for path, tensor in expected.items():
                if path[0] == "model" and path[1] != "seen":
                    assert torch.equal(tree["model"][path[1]], tensor * 2**step), path


def test_a_tensor_that_has_grown_is_refused_though_each_rank_holds_what_it_did():
    store = memory()

    def saves(ckpt, rank):
        for step in (1, 2):
            ckpt.save(in_rows(rank, 2, seed=step), step).result(300)
        first = newest(ckpt)
        with pytest.raises(SaveError, match=r"cut/w, of shape \[13, 64\], no shard has elements"):
            ckpt.save(in_rows(rank, 2, rows=ROWS + 1), 3).result(300)
        ckpt.save(in_rows(rank, 2, seed=4), 4).result(300)
        return first is newest(ckpt)

    assert Job(2, store).run(saves) == [True, True]
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == [1, 2, 4]


class Counting(MemoryCoordination):
    """Notes the lengths of what a rank posts; beats repeat the slot, and count alike."""

    def __init__(self, board):
        super().__init__(board)
        self.lengths = []
        self._lock = threading.Lock()

    def post(self, key, value, /):
        super().post(key, value)
        with self._lock:
            self.lengths.append(len(value))


@pytest.mark.parametrize("count", [2, 4])
def test_a_save_of_a_known_structure_posts_little(count):
    """At most 6 posts of at most 512 bytes for each rank and save, beats among them."""
    job, posts = Job(count, memory()), {}

    def saves(rank):
        posts[rank] = Counting(job.board)
        with job.checkpointer(rank, coordination=posts[rank], timeout_s=30.0) as ckpt:
            told = []
            for step in (1, 2, 3):
                posts[rank].lengths.clear()
                ckpt.save(in_rows(rank, count, seed=step), step).result(300)
                ckpt.wait()
                told.append(list(posts[rank].lengths))
            return told

    for told in run_ranks(count, saves):
        for lengths in told[1:]:
            assert len(lengths) <= 6, told
            assert max(lengths) <= 512, told
        assert max(told[0]) <= 16 << 10


def test_state_that_changes_at_every_save_on_one_rank_loses_few_saves():
    """Rank 1 relies on what rank 0 has told of the save before, and is wrong once."""
    store, saved = memory(), range(1, 9)
    rows = [torch.arange(40.0), torch.arange(30.0)]

    def saves(ckpt, rank):
        failed = []
        for step in saved:
            more = {"now": rows[1]} if step % 2 and not rank else {}
            try:
                ckpt.save({"w": rows[0], **more}, step).result(30)
            except SaveError:
                failed.append(step)
        return failed

    assert Job(2, store).run(saves) == [[2], [2]]
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == [step for step in saved if step != 2]
        assert ckpt.verify(7).ok
        assert ckpt.load(7)["now"].equal(rows[1])


def test_record_and_manifest_of_many_ranks_are_small():
    """The record does not grow with the ranks; parts and index take at most 80 bytes a shard."""
    lengths, shards = {}, 0
    for count, objects in ((4, 40), (24, 40)):
        store = memory()

        def state(rank, count=count, objects=objects):
            own = torch.full((1, WIDTH), float(rank))
            return {
                "cut": {
                    f"layers.{n}.weight": Shard(own + n, (count, WIDTH), (rank, 0))
                    for n in range(objects)
                }
            }

        reports = Job(count, store).save(state)
        assert {report.ranks for report in reports} == {count}
        sizes = {blob.name: blob.size_bytes for blob in store.list("")}
        (record,) = [size for name, size in sizes.items() if name.startswith("commits/")]
        lengths[count] = record
        shards = count * objects
        manifest = sum(n for name, n in sizes.items() if "/parts/" in name or "/index" in name)
    assert manifest <= 80 * shards, manifest / shards
    assert max(lengths.values()) <= 16 << 10
    assert lengths[24] <= lengths[4] + 16  # the parts are listed in the index

"""Later saves of ranks with a known structure: reused, posted, and stored data."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.integration.ranks.saving import Job
from tests.integration.ranks.topologies import PLACES, trained, values_of
from tests.integration.support import checkpointer, memory
from tests.providers.threads_as_ranks import run_ranks

from penstock import Shard
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
def test_the_index_is_reused_and_the_bytes_are_new(name):
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


class Counting(MemoryCoordination):
    """Notes the lengths of a rank's posts; beats repeat the slot, and count as well."""

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
            posted = []
            for step in (1, 2, 3):
                posts[rank].lengths.clear()
                ckpt.save(in_rows(rank, count, seed=step), step).result(300)
                ckpt.wait()
                posted.append(list(posts[rank].lengths))
            return posted

    for posted in run_ranks(count, saves):
        for lengths in posted[1:]:
            assert len(lengths) <= 6, posted
            assert max(lengths) <= 512, posted
        assert max(posted[0]) <= 16 << 10


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

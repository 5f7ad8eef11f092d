"""A tensor shared by ranks of different structures is stored once for each structure.

Each structure cuts it at other elements, like pipeline stages of several replicas with a tied
embedding larger than one writer's share.
"""

import pytest
import torch
from tests.integration.ranks.saving import Job
from tests.integration.support import memory

from penstock import SaveError, Shard

TIED = torch.arange(40_000.0).reshape(400, 100)
OF_STAGE = {0: 300, 1: 120}  # rows of each stage's own objects


def state_of(rank):
    stage = rank // 2
    own = torch.full((OF_STAGE[stage], 100), float(stage))
    return {"tied": TIED.clone(), f"stage{stage}": own, "epoch": 7}


def saved_by_stages(store, step=1, **options):
    job = Job(4, store, writer_bytes=1, chunk_bytes=8192, **options)
    return job.save(state_of, step)


@pytest.mark.parametrize("ranks", [1, 3])
def test_differently_cut_copies_restore_in_any_cut(ranks):
    store = memory()
    saved_by_stages(store)

    def work(ckpt, rank):
        rows = 400 // ranks + 1
        start, stop = rank * rows, min(400, (rank + 1) * rows)
        piece = torch.zeros(stop - start, 100)
        report = ckpt.restore({"tied": Shard(piece, (400, 100), (start, 0))}, include="tied")
        assert report.bytes_needed <= TIED.nbytes  # of one copy
        return torch.equal(piece, TIED[start:stop])

    assert Job(ranks, store).run(work) == [True] * ranks


def test_a_piece_of_no_copy_fails_the_save():
    def pieces(rank):
        start, rows = [(0, 4), (4, 4), (2, 4)][rank]
        return {"w": Shard(torch.zeros(rows, 3), (8, 3), (start, 0))}

    errors = Job(3, memory()).save(pieces)
    assert isinstance(errors[0], SaveError)
    assert "several shards have elements [2:4, 0:3]" in str(errors[0])

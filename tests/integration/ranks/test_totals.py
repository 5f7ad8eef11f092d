"""The total writes of all ranks: counted equally on all, no duplicates, evenly shared."""

import pytest
import torch
from tests.integration.ranks.saving import Job
from tests.integration.ranks.topologies import PLACES, adam
from tests.integration.support import checkpointer, memory
from tests.providers.threads_as_ranks import run_ranks
from torch import nn

TOPOLOGIES = ["DDP 2", "HSDP 2 x 2", "pipeline 2 x FSDP2 2"]


class Wide(nn.Module):
    """The parts placed by the topologies, in sizes divisible by their ranks."""

    def __init__(self, seed=0):
        super().__init__()
        del seed
        self.embed = nn.Embedding(1200, 96)
        self.up = nn.Linear(96, 480)
        self.down = nn.Linear(480, 96)
        self.norm = nn.LayerNorm(96)
        self.head = nn.Linear(96, 1200, bias=False)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 1.0)


def state_at(place):
    net = place(Wide())
    optimizer = adam(net)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": net, "optimizer": optimizer, "epoch": 7}


def saved(count, state_of, store, **options):
    job = Job(count, store, writer_bytes=1, chunk_bytes=8192, **options)

    def work(rank):
        with job.checkpointer(rank) as ckpt:
            return ckpt.save(state_of(), 1).result(300)

    return run_ranks(count, work)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_no_byte_is_written_twice_and_ranks_write_equally(name):
    count, place = PLACES[name]
    store = memory()
    reports = saved(count, lambda: state_at(place), store)
    (total,) = {report.total for report in reports}
    assert total.bytes_raw == sum(report.bytes_raw for report in reports)
    assert total.bytes_stored == sum(report.bytes_stored for report in reports)
    assert total.blobs == sum(report.blobs for report in reports)
    assert total.bytes_twice == 0
    written = [report.bytes_raw for report in reports if report.bytes_raw]
    assert len(written) == count
    assert max(written) <= 1.05 * sum(written) / count
    with checkpointer(store) as ckpt:
        info = ckpt.info()
        assert (info.bytes_raw, info.bytes_stored) == (total.bytes_raw, total.bytes_stored)
        assert info.world_size == count
        assert ckpt.verify().ok


def test_objects_shared_by_stages_count_as_stored_twice():
    shared = torch.arange(600.0).view(-1, 6)
    store = memory()

    def state_of(rank):
        return {"embedding": shared, f"layer{rank // 2}": torch.ones(40, 5), "epoch": 3}

    reports = Job(4, store).save(state_of)
    assert {report.total.bytes_twice for report in reports} == {shared.nbytes}
    assert {report.total.bytes_raw for report in reports} == {sum(r.bytes_raw for r in reports)}
    with checkpointer(store) as ckpt:
        assert ckpt.verify().ok

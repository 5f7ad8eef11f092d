"""Several pieces of one tensor on one rank: `penstock.Shards`."""

import pytest
import torch
from tests.core.stored_ranks import STEP
from tests.integration.ranks.saving import Job
from tests.integration.support import Run, checkpointer, memory, place_of
from tests.providers.threads_as_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Rows
from torch.distributed.tensor import distribute_tensor

from penstock import (
    RankError,
    RestoreError,
    RestoreMismatchError,
    SaveError,
    Shard,
    Shards,
    TornSnapshotError,
    UnsupportedStateError,
)

SHAPE = (40, 70)


def whole(seed=0, dtype=torch.float32):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows(tensor, *bounds):
    """The rows of a tensor between two bounds, each piece in its own memory."""
    return [Shard(tensor[a:b].clone(), SHAPE, (a, 0)) for a, b in bounds]


def columns(tensor, *bounds):
    """Pieces that are strided views of one memory without common elements."""
    own = tensor.clone()
    return [Shard(own[:, a:b], SHAPE, (0, a)) for a, b in bounds]


def flat(tensor, *bounds):
    own = tensor.reshape(-1)
    return [Shard(own[a:b].clone(), SHAPE, flat_range=(a, b)) for a, b in bounds]


def by_rows(tensor):
    return distribute_tensor(tensor, init_device_mesh("cpu", (2,)), [Rows(0)], src_data_rank=None)


CUTS = {
    "0, 1, 1, 0": [
        lambda t: Shards(rows(t, (30, 40), (0, 10))),
        lambda t: Shards(rows(t, (10, 20), (20, 30))),
    ],
    "two, one, none": [
        lambda t: Shards(rows(t, (0, 5), (25, 40))),
        lambda t: rows(t, (5, 25))[0],
        lambda _: Shards([Shard(torch.zeros(0, 70), SHAPE, (40, 0))]),
    ],
    "columns": [
        lambda t: Shards(columns(t, (0, 20), (50, 70))),
        lambda t: Shards(columns(t, (20, 21), (21, 50))),
    ],
    "boxes": [
        lambda t: Shards(
            [Shard(t[a : a + 20, b : b + 35].clone(), SHAPE, (a, b)) for a, b in ((20, 35), (0, 0))]
        ),
        lambda t: Shards(
            [Shard(t[a : a + 20, b : b + 35].clone(), SHAPE, (a, b)) for a, b in ((0, 35), (20, 0))]
        ),
    ],
    "flat ranges": [
        lambda t: Shards([*flat(t, (2000, 2800), (0, 33))]),
        lambda t: Shards([*flat(t, (33, 900)), *flat(t, (900, 2000))]),
    ],
    "one rank": [lambda t: Shards(rows(t, (20, 40), (0, 20)))],
    "plain": [lambda t: t, lambda t: t],
    "DTensor": [by_rows] * 2,
}


def filled(value, tensor):
    """Whether a restored value has the elements of `tensor` at its position."""
    if isinstance(value, Shards):
        return all(filled(piece, tensor) for piece in value.pieces)
    if isinstance(value, Shard):
        if value.flat_range is not None:
            expected = tensor.reshape(-1)[slice(*value.flat_range)]
        else:
            sizes = zip(value.offsets, value.tensor.shape, strict=True)
            expected = tensor[tuple(slice(a, a + n) for a, n in sizes)]
        return torch.equal(value.tensor, expected)
    if type(value) is not torch.Tensor:
        expected = by_rows(tensor)
        return torch.equal(value._local_tensor, expected._local_tensor)
    return torch.equal(value, tensor)


def run(cut, store, work, **options):
    """The result of `work(checkpointer, rank)` on each rank of a cut."""
    count = len(CUTS[cut])
    job = Job(count, store, **options)

    def on_rank(rank):
        with checkpointer(store, **options) if count < 2 else job.checkpointer(rank) as ckpt:
            return work(ckpt, rank)

    return run_ranks(count, on_rank)


def save(cut, store, tensor, step=STEP, **options):
    def work(ckpt, rank):
        return ckpt.save({"w": CUTS[cut][rank](tensor)}, step, mode="async").result(300)

    return run(cut, store, work, **options)


@pytest.fixture(scope="module")
def stores():
    found = {}
    for number, cut in enumerate(CUTS):
        found[cut] = memory()
        rules = [{"match": "**", "codecs": ["zstd"]}] if number % 2 else []
        save(cut, found[cut], whole(), rules=rules)
    return found


QUICK = {"0, 1, 1, 0", "DTensor", "flat ranges"}


@pytest.mark.parametrize(
    "where", [pytest.param(cut, marks=() if cut in QUICK else pytest.mark.slow) for cut in CUTS]
)
def test_every_cut_restores_every_other_bit_by_bit(where, stores):
    for saved, store in stores.items():
        with checkpointer(store) as ckpt:
            assert ckpt.verify().ok
            assert torch.equal(ckpt.load()["w"], whole()), saved

        def work(ckpt, rank, saved=saved):
            state = {"w": CUTS[where][rank](torch.zeros(SHAPE))}
            value = state["w"]
            report = ckpt.restore(state)
            assert (report.restored, report.missing) == (("w",), ())
            assert state["w"] is value
            assert filled(value, whole()), saved

        run(where, store, work)


def test_pieces_are_written_once_in_few_rectangles():
    store = memory()
    reports = save("0, 1, 1, 0", store, whole())
    assert sum(report.bytes_raw for report in reports) == whole().nbytes
    with checkpointer(store) as ckpt:
        shards = ckpt.open().specs()["w"].shards
    assert sorted((s.offsets[0], s.sizes[0]) for s in shards) == [(0, 10), (10, 20), (30, 10)]


def test_one_process_without_some_pieces_or_rows_is_refused():
    for pieces in (rows(whole(), (0, 10), (20, 40)), columns(whole(), (0, 20), (20, 70))):
        with checkpointer(memory()) as ckpt:
            with pytest.raises(UnsupportedStateError, match=r"w is .* this process saves alone"):
                ckpt.save({"w": Shards(pieces)}, 1, mode="blocking")
            assert ckpt.steps() == []


def test_pieces_of_replicas_are_written_once():
    store = memory()

    def state_of(rank):
        # Listed in another order on each replica: stored in the order of the offsets.
        bounds = [(0, 10), (30, 40)] if rank % 2 else [(30, 40), (0, 10)]
        bounds = bounds if rank < 2 else [(10, 20), (20, 30)]
        pieces = [Shard(whole()[a:b].clone(), SHAPE, (a, 0), (rank % 2, 2)) for a, b in bounds]
        return {"w": Shards(pieces)}

    reports = Job(4, store, writer_bytes=64, chunk_bytes=4096).save(state_of)
    assert sum(report.bytes_raw for report in reports) == whole().nbytes
    with checkpointer(store) as ckpt:
        assert torch.equal(ckpt.load()["w"], whole())


def test_tied_pieces_are_stored_once():
    store = memory()

    def state_of(rank):
        value = [
            lambda: Shards(rows(whole(), (0, 5), (25, 40))),
            lambda: rows(whole(), (5, 25))[0],
        ][rank]()
        return {"w": value, "tied": Shards(value.pieces) if rank == 0 else value}

    reports = Job(2, store).save(state_of)
    assert sum(report.bytes_raw for report in reports) == whole().nbytes
    with checkpointer(store) as ckpt:
        assert ckpt.open().specs()["tied"].same_as == "w"
        assert torch.equal(ckpt.load()["tied"], whole())


def test_pieces_are_captured_when_an_asynchronous_save_returns():
    store = memory()

    def work(ckpt, rank):
        shards = CUTS["0, 1, 1, 0"][rank](whole())
        handle = ckpt.save({"w": shards}, STEP, mode="lazy")
        for piece in shards.pieces:
            piece.tensor.zero_()
        handle.result(300)

    run("0, 1, 1, 0", store, work, defer="**")
    with checkpointer(store) as ckpt:
        assert torch.equal(ckpt.load()["w"], whole())


@pytest.mark.parametrize("strict", [True, False])
def test_a_fallback_names_pieces_that_the_damaged_checkpoint_has_overwritten(strict, tmp_path):
    files = Run(tmp_path / "root")
    with files.open() as ckpt:
        ckpt.save({"a": torch.ones(9000)}, 1, mode="blocking")
        ckpt.save({"a": torch.ones(9000), "w": whole()}, 2, mode="blocking")
        place = place_of(ckpt.open(2), "a", 0)
        files.flip(place.blob, place.offset)
        state = {"a": torch.zeros(9000), "w": CUTS["one rank"][0](torch.zeros(SHAPE))}
        with pytest.raises(RestoreError, match=r"ndefined now: (a, )?w\. "):
            ckpt.restore(state, strict=strict, on_damage="fallback")


def test_pieces_in_one_memory_stay_if_stored_bytes_disagree():
    stored, own = whole(), torch.zeros(60, 70)
    # The last ten rows of the first piece are the first ten of the second.
    shards = Shards([Shard(own[:20], SHAPE, (0, 0)), Shard(own[10:30], SHAPE, (20, 0))])
    with checkpointer(memory()) as ckpt:
        ckpt.save({"w": stored}, 1, mode="blocking")
        with pytest.raises(RestoreMismatchError, match="w overlaps itself in the template"):
            ckpt.restore({"w": shards})
        assert not own.any()
        stored[20:30] = stored[10:20]
        ckpt.save({"w": stored}, 2, mode="blocking")
        ckpt.restore({"w": shards})
    assert torch.equal(own[:30], torch.cat([stored[:20], stored[30:40]]))


def test_pieces_count_as_filled_elsewhere_only_if_all_are():
    own = torch.zeros(SHAPE)
    top, bottom = Shard(own[:20], SHAPE, (0, 0)), Shard(own[20:], SHAPE, (20, 0))
    new = Shard(torch.zeros(20, 70), SHAPE, (20, 0))
    with checkpointer(memory()) as ckpt:
        ckpt.save({"w": whole()}, 1, mode="blocking")
        for second, filled_too in ((bottom, True), (new, False)):
            template = {"w": Shards([top, bottom]), "v": Shards([top, second])}
            with pytest.raises(RestoreMismatchError, match="v: not in the checkpoint") as caught:
                ckpt.restore(template)
            assert ("it is restored as w" in str(caught.value)) is filled_too


class Mover:
    """Moves a tensor to other memory at each description."""

    def __init__(self, tensor):
        self.storage = tensor.untyped_storage()

    def state_dict(self):
        self.storage.resize_(self.storage.nbytes() + 64)
        return {"moves": 1}

    def load_state_dict(self, state): ...


def test_pieces_moving_during_description_are_not_confused_with_others():
    shards = CUTS["one rank"][0](whole())
    state = {"w": shards, "mover": Mover(shards.pieces[1].tensor)}
    with checkpointer(memory()) as ckpt, pytest.raises(TornSnapshotError, match="w moved to other"):
        ckpt.save(state, 1, mode="blocking")


def test_elements_that_no_rank_holds_fail_the_save_and_leave_the_last_checkpoint():
    store = memory()
    save("0, 1, 1, 0", store, whole(), 1)
    bounds = [((0, 10), (30, 40)), ((10, 20), (21, 30))]
    job = Job(2, store)
    found = job.save(lambda rank: {"w": Shards(rows(whole(1), *bounds[rank]))}, 2)
    assert {type(one) for one in found} <= {SaveError, RankError}
    assert "w" in str(found[0])
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == [1]
        assert torch.equal(ckpt.load()["w"], whole())


def test_pieces_of_another_dtype_are_one_difference():
    with checkpointer(memory()) as ckpt:
        ckpt.save({"w": whole()}, 1, mode="blocking")
        state = {"w": CUTS["one rank"][0](torch.zeros(SHAPE, dtype=torch.int32))}
        with pytest.raises(RestoreMismatchError) as caught:
            ckpt.restore(state)
        assert str(caught.value).count("dtype float32 is stored") == 1
        report = ckpt.restore({"w": CUTS["one rank"][0](whole()), "new": whole()}, strict=False)
        assert report.missing == ("new",)

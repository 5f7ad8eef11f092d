"""Data of three ranks, damaged anywhere: found or harmless, for one process and two ranks."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.integration.ranks.saving import Job
from tests.integration.support import ENCODED, Run, blank, make_state, memory, same

from penstock import Checkpointer, CheckpointNotFoundError, DamagedError, RankError, Shard
from penstock.testing.faults import Fault, FaultyBackend

SAVERS, READERS = 3, 2
FLIPS = 6  # of each file, beside its first and its last byte
each_writer = pytest.mark.parametrize(
    "writers", [(1,), pytest.param(range(SAVERS), marks=pytest.mark.slow)], ids=["rank 1", "all"]
)


def cut(tree, rank, count):
    """The tree of one of `count` ranks, which each hold some rows of each tensor."""
    if isinstance(tree, dict):
        return {key: cut(value, rank, count) for key, value in tree.items()}
    if not isinstance(tree, torch.Tensor):
        return tree
    rows = [len(tree) * n // count for n in (rank, rank + 1)]
    offsets = (rows[0],) + (0,) * (tree.ndim - 1)
    return Shard(tree[slice(*rows)].clone(), tuple(tree.shape), offsets)


def held(tree):
    """The tensors of shards in place of these."""
    if isinstance(tree, dict):
        return {key: held(value) for key, value in tree.items()}
    return tree.tensor if isinstance(tree, Shard) else tree


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Steps 1 and 2, saved by three ranks; each has a raw and an encoded blob."""
    run = Run(tmp_path_factory.mktemp("pristine") / "root")
    job = Job(SAVERS, f"posix://{run.root}?direct_io=off", **ENCODED)

    def work(ckpt, rank):
        return [ckpt.save(cut(make_state(n), rank, SAVERS), n).result(300).ranks for n in (1, 2)]

    assert job.run(work) == [[SAVERS, SAVERS]] * SAVERS
    return run


def files_of(run, step, writers=range(SAVERS)):
    """The files of a step written by some ranks, and those of no rank, by kind."""
    with run.open() as ckpt:
        uid = ckpt.info(step).uid
    names = run.names(f"data/{uid}/**/*.*") + run.names(f"data/{uid}/*")
    names = {n for n in names if (run.root / n).is_file()}
    files = {n.removeprefix(f"data/{uid}/"): n for n in names} | {"commit": run.commit(step)}
    others = tuple(f"/{rank:05d}" for rank in range(SAVERS) if rank not in writers)
    return {kind: n for kind, n in files.items() if not any(other in n for other in others)}


def one_process(run, **options):
    """The tree read by a single process, or None if it finds damage."""
    with run.open() as ckpt:
        try:
            tree = ckpt.load(2, **options)
        except (DamagedError, CheckpointNotFoundError):
            return None
        return tree


def verified(run):
    with run.open() as ckpt:
        try:
            return ckpt.verify(2).ok
        except (DamagedError, CheckpointNotFoundError):
            return False


def two_ranks(run, **options):
    """The restored step and tree of each of two ranks, or its error."""
    job = Job(READERS, f"posix://{run.root}?direct_io=off")

    def work(ckpt, rank):
        target = cut(blank(make_state()), rank, READERS)
        return ckpt.restore(target, 2, **options).step, held(target)

    return job.run(work)


def expected(step):
    return [(step, held(cut(make_state(step), rank, READERS))) for rank in range(READERS)]


@each_writer
def test_any_flipped_bit_of_any_rank_is_found_or_harmless(pristine, tmp_path, writers):
    run = pristine.copy_to(tmp_path / "root")
    found = {}
    flips = FLIPS if len(writers) == SAVERS else 1
    for kind, name in files_of(run, 2, writers).items():
        whole = run.read(name)
        chance = random.Random(kind)
        places = [0, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(flips))]
        found[kind] = 0
        for place in places:
            run.flip(name, place, 1 << chance.randrange(8))
            is_whole, tree, results = verified(run), one_process(run), two_ranks(run)
            run.write(name, whole)
            where = f"{kind}, byte {place}"
            assert tree is None or same(tree, make_state(2)), where
            raised = [isinstance(result, Exception) for result in results]
            assert all(raised) or same(results, expected(2)), where
            for result in results:
                known = (DamagedError, CheckpointNotFoundError, RankError)
                assert not isinstance(result, Exception) or isinstance(result, known), where
            assert not is_whole or (tree is not None and not any(raised)), where
            found[kind] += not is_whole
    print(found)
    intent = found.pop("intent.json")
    assert intent == 0
    assert all(found.values())


def overwritten(run, name):
    """All but the edges: between frames a blob has unread bytes."""
    data = run.read(name)
    edge = len(data) // 8
    inner = bytes(byte ^ 0x10 for byte in data[edge:-edge])
    run.write(name, data[:edge] + inner + data[-edge:])


def removed(run, name):
    run.remove(name)


@each_writer
@pytest.mark.parametrize("damage", [overwritten, removed])
def test_damage_to_data_of_any_rank_makes_all_fall_back(damage, pristine, tmp_path, writers):
    run = pristine.copy_to(tmp_path / "root")
    for kind, name in files_of(run, 2, writers).items():
        if kind in {"intent.json", "commit"}:  # without a commit record there is no such step
            continue
        whole = run.read(name)
        damage(run, name)
        results = two_ranks(run, on_damage="fallback")
        tree = one_process(run, on_damage="fallback")
        run.write(name, whole)
        if kind == "index" and same(results, expected(2)):
            continue  # a full read needs no index
        assert same(tree, make_state(1)), kind
        assert same(results, expected(1)), (kind, results)
    assert same(two_ranks(run, on_damage="fallback"), expected(2))


@pytest.mark.parametrize("once", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_rank_reading_what_another_found_damaged_stops_and_falls_back(once):
    store, bad = memory(), memory()

    def filled(value):
        return {f"t{n:03}": torch.full((16384,), float(value)) for n in range(125)}

    for step in (1, 2):
        with Checkpointer(store, chunk_bytes=4096, block_bytes=4096) as ckpt:
            uid = ckpt.save(filled(step), step).result(300).uid
    bad._store.blobs.update(store._store.blobs)
    for name, blob in store._store.blobs.items():
        if uid in name and name.endswith(".raw"):
            data = np.frombuffer(blob.data, np.uint8) ^ 1
            bad._store.blobs[name] = replace(blob, data=bytearray(data))
    reads = Fault("read", match=uid, seconds=1.0, times=None)
    slow = FaultyBackend(store, reads)

    def work(ckpt, rank):
        state = filled(0) if rank else {"t000": torch.zeros(16384)}
        report = ckpt.restore(state, on_damage="fallback", strict=False)
        assert {float(tensor.max()) for tensor in state.values()} == {1.0}
        return report.step, report.fell_back_from

    job = Job(2, lambda rank: slow if rank else bad, host="one".format if once else "node{}".format)
    assert job.run(work) == [(1, (2,))] * 2
    stopped_after = reads.seen
    reads.seen, reads.seconds = 0, 0.0
    with Checkpointer(slow) as ckpt:
        ckpt.restore(filled(0), step=2)
    print(f"stopped after {stopped_after} of {reads.seen} reads")
    assert stopped_after < reads.seen

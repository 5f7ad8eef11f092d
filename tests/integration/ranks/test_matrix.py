"""Ranks of each topology restore the saves of each other one, bit by bit."""

import functools
from pathlib import Path

import pytest
import torch
from tests.core.pipeline.test_loader import peak_bytes
from tests.core.stored_ranks import STEP
from tests.integration.ranks.saving import Job
from tests.integration.ranks.topologies import (
    OPTIMIZERS,
    PLACES_OF_EXPERTS,
    ExpertNet,
    adam_of_experts,
    expected_of,
    held_of,
    memory_of,
    trained,
    values_of,
)
from tests.integration.support import checkpointer, memory
from tests.providers.threads_as_ranks import run_ranks

import penstock
from penstock import Checkpointer
from penstock.testing.faults import FaultyBackend


@pytest.fixture(scope="module")
def stored():
    """Returns a store with a checkpoint saved by the ranks of a topology."""

    @functools.cache
    def of_topology(name):
        count, _ = PLACES_OF_EXPERTS[name]
        store = memory()
        job = Job(count, store) if count > 1 else None

        def rank_saves(rank):
            state = state_of(name)
            with checkpointer_of(job, rank, store) as ckpt:
                ckpt.save(state, STEP, mode="async").result(300)

        run_ranks(count, rank_saves)
        return store

    return of_topology


def state_of(name, **options):
    _, place = PLACES_OF_EXPERTS[name]
    optimize = OPTIMIZERS.get(name, adam_of_experts)
    return trained(place, make=ExpertNet, optimize=optimize, **options)


def checkpointer_of(job, rank, store):
    """A checkpointer of this rank, or of a single process."""
    return checkpointer(store) if job is None else job.checkpointer(rank)


ALL = [*PLACES_OF_EXPERTS]
# Each way to cut, and to hold the optimizer's state, once.
FEW = ["one process", "FSDP2 x TP 2 x 2", "ZeRO-1 4", "FSDP1 3", "experts 2 x FSDP2 2"]


@pytest.mark.parametrize(
    ("where", "origins"),
    [
        pytest.param(FEW[-1], FEW, id=FEW[-1]),
        *(pytest.param(where, ALL, id=f"{where}, all", marks=pytest.mark.slow) for where in ALL),
    ],
)
def test_every_topology_restores_saves_of_every_other(stored, where, origins):
    stores = {name: stored(name) for name in origins}
    values = values_of(state_of("one process"))
    count, place = PLACES_OF_EXPERTS[where]
    jobs = dict.fromkeys(stores)
    for number, (saved, store) in enumerate(stores.items()):
        if count > 1:  # every second one on two hosts that read once for both
            two = {"host": lambda rank: f"node{rank % 2}", "read_once_per_job": True}
            jobs[saved] = Job(count, store, **(two if number % 2 else {}))

    def rank_restores(rank):
        state = state_of(where, seed=1)  # once: torch takes longer for that than a restore
        owned = {path[1] for path in held_of(state) if path[0] == "optimizer"}
        count_here = len(list(state["model"].parameters()))
        assert (len(owned) < count_here) == (where in OPTIMIZERS)
        expected = expected_of(values, place, make=ExpertNet, owned=owned)
        found = {}
        for saved, store in stores.items():
            spoil(state)
            with checkpointer_of(jobs[saved], rank, store) as ckpt:
                report = ckpt.restore(state)
            decays = [group["weight_decay"] for group in state["optimizer"].param_groups]
            assert decays == [0.01, 0.5]
            found[saved] = (held_of(state), state["epoch"], report)
        return expected, found

    for expected, found in run_ranks(count, rank_restores):
        for saved, (held, epoch, report) in found.items():
            assert held.keys() == expected.keys()
            for path, tensor in expected.items():
                assert torch.equal(held[path], tensor), (saved, path)
            assert (epoch, report.step, report.missing) == (7, STEP, ())


def spoil(state):
    """Change everything that a restore must set."""
    held = memory_of(state)
    with torch.no_grad():
        for path, tensor in held.items():
            # The step of a weight without elements on a rank changes nothing there, and stays.
            if held["model", path[1]].numel():
                tensor.fill_(-1)
    spoilt = held_of(state)
    assert all((spoilt[p] == -1).all() for p in held if held["model", p[1]].numel())
    for group in state["optimizer"].param_groups:
        group["weight_decay"] = -1.0
    state["epoch"] = -1


def test_restore_waits_for_the_save_in_flight():
    """The others would not know which of two rounds a rank is in."""
    store = FaultyBackend(memory())
    store.slow("create", 0.3)
    job = Job(2, store)

    def work(ckpt, rank):
        rows = torch.full((2, 3), float(rank))
        ckpt.save({"w": penstock.Shard(rows, (4, 3), (2 * rank, 0))}, STEP)
        found = torch.zeros(4, 3)
        assert ckpt.restore({"w": found}).step == STEP
        return found[:, 0].tolist()

    assert job.run(work) == [[0.0, 0.0, 1.0, 1.0]] * 2


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux measures the peak")
@pytest.mark.parametrize(
    "cut", [*(pytest.param(c, marks=pytest.mark.slow) for c in ("rows", "columns")), "strided"]
)
def test_memory_beside_the_targets_is_bounded(tmp_path, cut):
    """Rank 1 of 2 restores columns of a 256 MiB tensor saved by four ranks."""
    rows, columns = 4096, 16384
    job = Job(4, f"posix://{tmp_path}", chunk_bytes="16 MiB", block_bytes="4 MiB")

    def piece(rank):
        tensor = torch.full((rows, columns // 4), float(rank))
        return {"w": penstock.Shard(tensor, (rows, columns), (0, rank * columns // 4))}

    job.save(piece, STEP, mode="blocking")
    tensor, offsets = torch.ones(rows // 2, columns), (rows // 2, 0)
    if cut != "rows":
        tensor, offsets = torch.ones(rows, columns // 2), (0, columns // 2)
    if cut == "strided":
        tensor = torch.ones(columns // 2, rows).t()
    with Checkpointer(f"posix://{tmp_path}") as ckpt:
        state = {"w": penstock.Shard(tensor, (rows, columns), offsets)}
        assert peak_bytes(lambda: ckpt.restore(state)) < 128 << 20
    expected = torch.arange(4.0).repeat_interleave(columns // 4)
    assert torch.equal(tensor[-1], expected if cut == "rows" else expected[columns // 2 :])

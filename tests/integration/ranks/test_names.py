"""Ranks that meet under a name, after using any other checkpointers."""

import json
import subprocess

import pytest
import torch
import torch.distributed as dist
from tests import interpreters
from tests.integration.support import memory
from tests.providers.threads_as_ranks import run_ranks

from penstock import Checkpointer, ConfigError, Shard

LIMIT_S = 8  # longer than a busy machine delays a progressing rank
SHORT_LIMIT_S = 1  # of a save that another rank never joins

# A "fake" process group has a store and ranks, but no connections: a rank may start again alone.
JOB = """
import datetime, json, os, sys
import torch, torch.distributed as dist
import penstock

rank, port, first = (int(sys.argv[n]) for n in (1, 2, 6))
root, limit_s, short_limit_s = sys.argv[3], float(sys.argv[4]), float(sys.argv[5])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("fake", store=store, rank=rank, world_size=2)

def opened(name, limit_s=limit_s):
    return penstock.Checkpointer(root, name=name, group=[1, 0], rank_timeout_s=limit_s)

def saved(ckpt, step):
    half = penstock.Shard(torch.full((3, 2), step + rank / 2), (6, 2), (3 * rank, 0))
    return ckpt.save({"w": half}, step, mode="blocking").result().step

def act(number, what, name, step):
    if what == "save late":  # once the other rank has finished and left
        store.wait([f"done/{1 - rank}/{number}"], datetime.timedelta(seconds=250))
    if what == "fail":
        return "failed before it opened"
    if what == "save alone first":  # an unnamed one that the other rank never opens
        try:
            with penstock.Checkpointer(root) as ckpt:
                raise OSError
        except OSError:
            what = "save"
    with opened(name, short_limit_s if what == "save in vain" else limit_s) as ckpt:
        if what == "raise":
            raise OSError("no memory")
        return saved(ckpt, step)

for number, action in enumerate(json.loads(sys.argv[7])):
    try:
        print(json.dumps(act(first + number, *action[:3])), flush=True)
    except (penstock.PenstockError, OSError) as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
    store.set(f"done/{rank}/{first + number}", "1")
    if action[3:]:
        os._exit(0)  # without closing anything of the job
    both = [f"done/{r}/{first + number}" for r in range(2)]
    store.wait(both, datetime.timedelta(seconds=250))
"""


class Ranks:
    """The processes of two ranks, which act in lockstep."""

    def __init__(self, root):
        self.root = root
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = []

    def start(self, rank, *actions, first=0):
        limits = LIMIT_S, SHORT_LIMIT_S
        words = (rank, self.store.port, self.root, *limits, first, json.dumps(actions))
        process = interpreters.start("-c", JOB, *words, stdout=subprocess.PIPE)
        self.processes.append(process)
        return process

    def run(self, *plans):
        """Return the output of each action, by rank."""
        return [output_of(process) for process in [self.start(n, *p) for n, p in enumerate(plans)]]


def output_of(process):
    out, _ = process.communicate(timeout=280)
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def ranks(tmp_path):
    found = Ranks(tmp_path / "run")
    yield found
    for process in found.processes:
        process.kill()
        process.wait()
        process.stdout.close()


def stored(ranks, step):
    with Checkpointer(ranks.root) as ckpt:
        return ckpt.load(step)["w"][:, 0].tolist()


@pytest.mark.process
@pytest.mark.multirank
def test_after_a_failure_before_opening_a_save_under_another_name_works(ranks):
    first, second = ranks.run(
        [("save", "a", 1), ("save in vain", "b", 2), ("save", "c", 3)],
        [("save", "a", 1), ("fail", "b", 2), ("save alone first", "c", 3)],
    )
    assert first[0] == second[0] == 1
    assert first[1].startswith("RankError")
    assert "rank 1" in first[1]
    assert first[2] == second[2] == 3
    assert stored(ranks, 3) == [3.0] * 3 + [3.5] * 3


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize("absent", [0, 1])
def test_a_name_is_reused_after_a_rank_failed_before_opening(ranks, absent):
    failing = [("save", "n", 1), ("fail", "n", 2), ("save", "n", 3), ("save", "n", 4)]
    other = [failing[0], ("save in vain", "n", 2), *failing[2:]]
    found = ranks.run(*((failing, other) if absent == 0 else (other, failing)))
    waiting, failed = found[1 - absent], found[absent]
    assert waiting[1].startswith("RankError")
    assert f"rank {absent}" in waiting[1]
    assert [waiting[0], *waiting[2:]] == [failed[0], *failed[2:]] == [1, 3, 4]


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize("when", ["save", "save late"])
def test_a_failure_after_opening_is_known_and_the_name_is_reused(ranks, when):
    first, second = ranks.run(
        [("raise", "n", 1), ("save", "n", 2)], [(when, "n", 1), ("save", "n", 2)]
    )
    assert first[0] == "OSError: no memory"
    assert second[0].startswith("RankError")
    assert "OSError: no memory" in second[0]
    assert first[1] == second[1] == 2


@pytest.mark.process
@pytest.mark.multirank
def test_a_restarted_rank_meets_the_others_under_the_same_name(ranks):
    first = ranks.start(0, ("save", "n", 1), ("save", "n", 2))
    before = ranks.start(1, ("save", "n", 1, "exit"))
    assert output_of(before) == [1]
    ranks.store.set("done/1/0", "1")
    again = ranks.start(1, ("save", "n", 2), first=1)
    assert output_of(first) == [1, 2]
    assert output_of(again) == [2]
    assert stored(ranks, 2) == [2.0] * 3 + [2.5] * 3


def test_a_name_has_one_open_checkpointer_per_process():
    store = memory()

    def work(rank):
        with Checkpointer(store, name="n") as first, Checkpointer(store, name="n") as second:
            first.save({"x": 1}, 1, mode="blocking")
            with pytest.raises(ConfigError, match="name='n' is in use by another checkpointer"):
                second.save({"x": 2}, 2, mode="blocking")
            assert second.steps() == [1]
            with Checkpointer(store, name="m") as other:  # unnamed ones would have another order
                other.save({"x": 2}, 2, mode="blocking")
        with Checkpointer(store, name="n") as third:
            return third.save({"x": 3}, 3, mode="blocking").result().ranks

    assert run_ranks(2, work) == [2, 2]


def test_ranks_are_given_as_numbers():
    store, alone = memory(), [memory() for _ in range(3)]

    def work(rank):
        group = [2, 0]
        piece = Shard(torch.full((2,), float(rank)), (4,), (rank,))
        with Checkpointer(store, group=group, name="n") as ckpt:
            if rank == 1:
                with pytest.raises(ConfigError, match=r"group=\[0, 2\] .* is rank 1 of 3"):
                    ckpt.save({"w": piece}, 1)
            else:
                assert ckpt.save({"w": piece}, 1).result(300).ranks == 2
        with Checkpointer(alone[rank], group=[rank]) as ckpt:
            assert ckpt.save({"rank": rank}, 1).result(300).ranks == 1
        with (
            Checkpointer(store, group=[0, 1, 2, 3]) as ckpt,
            pytest.raises(ConfigError, match="of 3"),
        ):
            ckpt.save({"w": piece}, 2)
        dist.barrier()

    run_ranks(3, work)
    with Checkpointer(store) as ckpt:
        assert ckpt.steps() == [1]
        assert ckpt.load()["w"].tolist() == [0.0, 0.0, 2.0, 2.0]


def test_numbers_of_ranks_without_a_job_are_refused():
    with Checkpointer(memory(), group=[0, 1]) as ckpt:
        with pytest.raises(ConfigError, match=r"group= has 2 ranks, and torch.distributed is not"):
            ckpt.save({"x": 1}, 1)
        assert ckpt.steps() == []


@pytest.mark.parametrize("group", [[], [0, 0], [0, -1], [0, "1"], [True, 2], "01"], ids=repr)
def test_invalid_ranks_are_refused(group):
    with pytest.raises(ConfigError, match="list of different numbers of ranks"):
        Checkpointer(memory(), group=group)


@pytest.mark.parametrize("name", ["", 7, b"n"], ids=repr)
def test_invalid_name_is_refused(name):
    with pytest.raises(ConfigError, match="name must be a string"):
        Checkpointer(memory(), name=name)

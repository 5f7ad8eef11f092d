"""A rank that closes its checkpointer tells the others, so none waits for it."""

import threading
import time
from contextlib import suppress

import pytest
import torch
from tests.integration.ranks.saving import Job
from tests.integration.support import checkpointer, memory

from penstock.core.errors import RankError, UnsupportedStateError
from penstock.core.rounds.posts import result_key
from penstock.testing.coordination import MemoryCoordination

LONG_S = 60.0  # no test waits this long: its error text fails the test instead


def test_a_rank_that_leaves_by_an_error_is_named_by_all_later_saves():
    job = Job(3, memory())

    def work(ckpt, rank):
        ckpt.save({"epoch": 1}, 1).result(LONG_S)
        if rank == 1:
            raise ValueError("no data.")
        errors = []
        for step in (2, 3):
            with pytest.raises(RankError) as caught:
                ckpt.save({"epoch": 1}, step).result(LONG_S)
            errors.append(caught.value)
        return errors

    found = run(job, work)
    assert isinstance(found[1], ValueError)
    for error in [*found[0], *found[2]]:
        assert (error.rank, error.host) == (1, "node1")
        assert error.cause == "closed its checkpointer (because of ValueError: no data)"
        assert "rank 1 on node1 closed its checkpointer" in str(error)


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_waiting_for_a_closing_one_fails(leaver):
    job = Job(2, memory())

    def work(ckpt, rank):
        ckpt.save({"epoch": 1}, 1).result(LONG_S)
        if rank == leaver:
            return None
        with pytest.raises(RankError) as save:
            ckpt.save({"epoch": 1}, 2).result(LONG_S)
        with pytest.raises(RankError) as restore:
            ckpt.restore({"epoch": 0})
        return [(e.value.rank, e.value.cause) for e in (save, restore)]

    assert run(job, work)[1 - leaver] == [(leaver, "closed its checkpointer")] * 2


def test_close_does_not_wait_for_ranks_without_a_restore():
    store = memory()
    with checkpointer(store) as ckpt:
        ckpt.save({"epoch": 1}, 1, mode="blocking")
    with Job(3, store).checkpointer(0, timeout_s=1.0) as ckpt:  # short: there is no other rank
        with pytest.raises(RankError, match="rank 1 has not begun to restore") as raised:
            ckpt.restore({"epoch": 0})
        assert_says_what_to_do(raised.value)
        assert "If it is only late, raise rank_timeout_s" in str(raised.value)
        assert ckpt._ranks.of_restore().lost == {1, 2}


def test_close_does_not_wait_for_ranks_without_a_save():
    with Job(3, memory()).checkpointer(0, timeout_s=1.0) as ckpt:  # short: there is no other rank
        with pytest.raises(RankError, match="rank 1 has not begun to save"):
            ckpt.save({"epoch": 0}, 1, mode="blocking")
        assert ckpt._ranks.of_restore().lost == {1, 2}


def test_concurrent_save_and_restore_of_ranks_name_a_remedy():
    def work(ckpt, rank):
        if rank == 0:
            return ckpt.load()
        return ckpt.save({"epoch": 1}, 2).result(LONG_S)

    store = memory()
    with checkpointer(store) as ckpt:
        ckpt.save({"epoch": 1}, 1, mode="blocking")
    refusal, own = run(Job(2, store), work)
    assert "rank 1 on node1 wants to save while rank 0 wants to restore" in str(refusal)
    assert_says_what_to_do(refusal)
    assert_says_what_to_do(own)


def assert_says_what_to_do(error):
    text = str(error)
    assert (
        "make the same calls of save, restore and load, in one order over all checkpointers" in text
    )
    assert "inside `if rank == 0:` use a checkpointer with ranks='alone'" in text
    assert "..." not in text  # it is not truncated


def run(job, work):
    return job.run(work, timeout_s=LONG_S)


def test_rank_0_waits_at_close_for_a_failed_rank_that_rejoined():
    """Without torchrun the store ends with rank 0: the other would wait for its post in vain."""

    class Late(MemoryCoordination):
        def read(self, keys, /):
            if result_key(1) in keys:
                time.sleep(0.3)
            return super().read(keys)

    job, over = Job(2, memory()), {}

    def one(rank):
        coordination = (Late if rank else MemoryCoordination)(job.board)
        ckpt = job.checkpointer(rank, coordination=coordination)
        with pytest.raises((UnsupportedStateError, RankError)):
            ckpt.save({"w": threading.Lock() if rank else 1}, 1).result(300)
        with suppress(RankError):  # of the previous save, again
            ckpt.wait()
        handle = ckpt.save({"w": torch.ones(9)}, 2)
        if rank:
            handle.result(300)
            over[rank] = time.monotonic()
        ckpt.close()
        over.setdefault(rank, time.monotonic())

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    # It has the post of rank 1 a moment before that rank's own thread continues.
    assert over[1] < over[0] + 0.1

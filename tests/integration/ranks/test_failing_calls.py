"""Calls of the store that fail or hang on one of two ranks, one by one and drawn from seeds."""

import random
import threading
import time
from contextlib import suppress

import pytest
import torch
from tests.integration.ranks.saving import SHORT_TIMEOUT_S, Job
from tests.integration.support import FlyingClock, checkpointer, memory, same

from penstock import CommitUnknownError, PenstockError, RankError, Shard, StorageFullError
from penstock.core.concurrency.timing import SYSTEM_CLOCK, Timing
from penstock.core.errors import CoordinationError, StorageError
from penstock.testing.coordination import MemoryCoordination
from penstock.testing.faults import OPERATIONS, FaultyBackend, LatencyBackend

WORLD = 2
ENCODED = {"rules": [{"match": "encoded", "codecs": ["zstd"]}]}
CALLS = [
    ("create .raw", 1),
    ("create .enc", 0),
    ("write .raw", 0),
    ("write .enc", 1),
    ("seal .raw", 1),
    ("seal .enc", 0),
    ("publish parts/", 0),
    ("publish parts/", 1),
    *((call, 0) for call in ("publish intent", "read parts/00001", "publish index", "stat intent")),
]


def whole(number):
    return {
        "number": number,
        "raw": torch.arange(9000.0) + number,
        "encoded": torch.arange(9000.0) - number,
    }


def part(number, rank, count=WORLD):
    """The share of one of `count` ranks."""
    start, stop = (9000 * n // count for n in (rank, rank + 1))
    cut = whole(number)
    for name in ("raw", "encoded"):
        cut[name] = Shard(cut[name][start:stop].clone(), (9000,), (start,))
    return cut


def names(store):
    return {blob.name for blob in store.list("")}


@pytest.fixture
def saved():
    """A store with step 1, and all its data."""
    store = memory()
    assert [r.step for r in Job(WORLD, store, **ENCODED).save(lambda r: part(1, r))] == [1, 1]
    return store, names(store)


@pytest.mark.parametrize(
    ("call", "rank", "error"),
    [
        *((*call, StorageError("EIO")) for call in CALLS),
        (*CALLS[0], StorageFullError("No space left")),
    ],
)
def test_a_failed_call_on_one_rank_ends_the_save_on_all_without_data(call, rank, error, saved):
    store, _ = saved
    operation, _, match = call.partition(" ")
    stores = [FaultyBackend(store) for _ in range(WORLD)]
    fault = stores[rank].fail(operation, error, match=match)
    job = Job(WORLD, lambda r: stores[r], **ENCODED)
    results = job.run(lambda ckpt, r: [end_of(ckpt, r, step) for step in (2, 3)])
    assert fault.reached.is_set()
    first, second = zip(*results, strict=True)
    assert str(error) in str(first[rank])
    assert isinstance(first[1 - rank], RankError)
    assert (first[1 - rank].rank, first[1 - rank].host) == (rank, f"node{rank}")
    assert str(error) in first[1 - rank].cause
    assert second == (3, 3)
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == [1, 3]
        assert same(ckpt.load(1), whole(1))
        assert same(ckpt.load(3), whole(3))
        uids = {ckpt.info(step).uid for step in (1, 3)}
    left = [n for n in names(store) if n.startswith("data/") and n.split("/")[1] not in uids]
    if call == "stat intent":  # all had agreed to the commit: `prune` deletes rank 0's data
        left = [n for n in left if "/00001" in n]
    assert not left


def end_of(ckpt, rank, step):
    """The saved step, or the error."""
    try:
        return ckpt.save(part(step, rank), step).result(300).step
    except PenstockError as error:
        return error
    finally:
        ckpt._saver.job.released.wait(300)


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_rank_with_a_slow_store_is_awaited(rank, saved):
    store, _ = saved
    slow = LatencyBackend(store, latency_s={"write": 1.0, "seal": 1.0, "create": 1.0})
    options = {"chunk_bytes": 4096, "timeout_s": SHORT_TIMEOUT_S, **ENCODED}
    job = Job(WORLD, lambda r: slow if r == rank else store, **options)
    began_s = time.monotonic()
    assert [r.step for r in job.save(lambda r: part(2, r), 2)] == [2, 2]
    assert time.monotonic() - began_s > SHORT_TIMEOUT_S
    with checkpointer(store) as ckpt:
        assert same(ckpt.load(2), whole(2))


@pytest.mark.parametrize(
    ("call", "rank"), [("write .raw", 0), ("seal .enc", 1), ("publish parts/", 1)]
)
def test_a_hung_call_on_one_rank_ends_the_save_of_others_by_name(call, rank, saved, gate):
    store, before = saved
    operation, _, match = call.partition(" ")
    stores = [FaultyBackend(store) for _ in range(WORLD)]
    hung = stores[rank].block(operation, gate, match=match)
    job = Job(WORLD, lambda r: stores[r], **ENCODED)
    clocks = [FlyingClock(hung.reached.is_set) for _ in range(WORLD)]
    clocks[rank] = SYSTEM_CLOCK  # by which the other is not late
    group = job.group
    job.group = lambda r: group(r, timing=Timing(clock=clocks[r]))

    def work(ckpt, r):
        found = end_of_save(ckpt, r)
        if r != rank:
            gate.set()  # it was reported by now, and the hung call continues
        ckpt._saver.job.released.wait(300)
        return found

    def end_of_save(ckpt, r):
        try:
            return ckpt.save(part(2, r), 2).result(300).step
        except PenstockError as error:
            return error

    results = job.run(work)
    other = results[1 - rank]
    assert isinstance(other, RankError)
    assert other.rank == rank
    assert "stood still" in other.cause
    assert "since this one stood still" in str(results[rank])
    assert names(store) == before


@pytest.mark.parametrize("late", [False, True])
def test_a_commit_with_a_lost_reply_is_read_back_or_unknown_on_all(late, saved):
    store, before = saved
    faulty = FaultyBackend(store)
    faulty.fail("publish", StorageError("EIO"), match="commits/", late=late)
    job = Job(WORLD, lambda r: store if r else faulty, **ENCODED)
    results = job.run(lambda ckpt, r: end_of(ckpt, r, 2))
    if late:
        assert results == [2, 2]
        return
    for error in results:
        assert isinstance(error, CommitUnknownError)
        assert "EIO" in str(error)
    assert before < names(store)  # the record may still come
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == [1]
        assert same(ckpt.load(), whole(1))


# -- drawn from seeds ------------------------------------------------------------------------------


class Shaky(MemoryCoordination):
    """Loses calls, or their answers, and delays them."""

    def __init__(self, board, chance, lost):
        super().__init__(board)
        self._chance, self._lost = chance, lost

    def _shake(self, call):
        time.sleep(self._chance.random() * 0.01)
        fate = self._chance.random()
        if fate < self._lost / 2:
            msg = "lost"
            raise CoordinationError(msg)
        result = call()
        if fate < self._lost:
            msg = "its answer is lost"
            raise CoordinationError(msg)
        return result

    def post(self, key, value, /):
        self._shake(lambda: MemoryCoordination.post(self, key, value))

    def read(self, keys, /):
        return self._shake(lambda: MemoryCoordination.read(self, keys))

    def decide(self, key, value, /):
        return self._shake(lambda: MemoryCoordination.decide(self, key, value))


class World:
    """Two to four ranks that save over a failing store and a failing job store."""

    def __init__(self, seed):
        chance = random.Random(seed)
        self.count = chance.randint(2, 4)
        self.store = memory()
        self.outcome = {}  # by step and rank
        self._lost = chance.choice([0.0, 0.0, 0.05, 0.3])
        self._seed = seed
        self._job = Job(self.count, self._store_of, **ENCODED)

    def _store_of(self, rank):
        chance = random.Random(f"store {self._seed} {rank}")
        jitter = dict.fromkeys(("create", "write", "seal", "publish", "list"), 0.01)
        slow = LatencyBackend(self.store, jitter_s=jitter, seed=chance.getrandbits(30))
        faulty = FaultyBackend(slow)
        for _ in range(chance.choice([0, 0, 1, 2])):
            faulty.fail(
                chance.choice(OPERATIONS), nth=chance.randint(1, 12), late=chance.random() < 0.5,
                match=chance.choice(["", "", "commits/", "parts/", "index"]),
            )  # fmt: skip
        return faulty

    def run(self):
        threads = [
            threading.Thread(target=self._be, args=(rank,), daemon=True)
            for rank in range(self.count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive(), f"seed {self._seed}: a rank waits for ever"
        return self._words()

    def _be(self, rank):
        chance = random.Random(f"rank {self._seed} {rank}")
        member = Shaky(self._job.board, chance, self._lost)
        ckpt = self._job.checkpointer(
            rank,
            coordination=member,
            timeout_s=1.0,  # short: a rank may be lost, too
        )
        for step in (1, 2, 3):
            try:
                handle = ckpt.save(part(step, rank, self.count), step)
                self.outcome[step, rank] = handle.result(300).uid
            except PenstockError as error:
                self.outcome[step, rank] = error
        with suppress(PenstockError):  # reported once more
            ckpt.close()

    def _words(self):
        """The verified reports of the ranks."""
        with checkpointer(self.store) as ckpt:
            uids = {step: ckpt.info(step).uid for step in ckpt.steps()}
            for step in uids:
                assert same(ckpt.load(step), whole(step)), f"seed {self._seed}, step {step}"
                assert ckpt.verify(step).ok, f"seed {self._seed}, step {step}"
        words = set()
        for (step, rank), outcome in self.outcome.items():
            where = f"seed {self._seed}: rank {rank} of {self.count}, step {step}: {outcome!r}"
            if isinstance(outcome, str):
                words.add("committed")
                assert uids.get(step) == outcome, where
            elif isinstance(outcome, CommitUnknownError):
                words.add("unknown")
            else:
                words.add("aborted")
                assert step not in uids, where
        return words


@pytest.mark.parametrize(
    "chunk", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))]
)
def test_ranks_with_failing_stores_agree_on_what_exists(chunk):
    seen = set()
    for seed in range(chunk, 24, 4):
        seen |= World(seed).run()
    assert len(seen) > 1

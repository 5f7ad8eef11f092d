"""The tier that a save writes to."""

from contextlib import closing

import pytest
from tests.integration.support import checkpointer, make_state, memory

from penstock.core.abc import Tier
from penstock.core.catalog.catalog import Catalog
from penstock.core.concurrency.timing import CountedClock
from penstock.core.concurrency.workers import Workers
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.errors import SaveAbortedError, StorageError, StorageFullError
from penstock.core.tiers.eviction import MARGIN_BYTES, Eviction
from penstock.core.tiers.outages import Outages
from penstock.core.tiers.places import TierRoots
from penstock.core.tiers.room import TierRoom
from penstock.testing.faults import Fault, FaultyBackend, WrapperBackend
from penstock.testing.hasty import FAST


class Limited(WrapperBackend):
    """Has a fixed number of free bytes."""

    free = 0

    def free_bytes(self):
        return MARGIN_BYTES + self.free


def limited(free, backend=None):
    backend = Limited(memory() if backend is None else backend)
    backend.free = free
    return backend


@pytest.fixture
def workers():
    with closing(Workers(1)) as found:
        yield found


@pytest.fixture
def clock():
    return CountedClock()


@pytest.fixture
def room_of(waits, clock):
    """Creates the room of some tiers; appends the calls of `tidy` to `tidied`."""
    waits(FAST, clock=clock, repeat_log_s=50.0, tier_rest_first_s=50.0)
    with closing(Workers(1)) as workers:

        def make(*tiers, tidied=None):
            outages = Outages(tiers, workers, 60.0)
            return TierRoom(
                tiers,
                outages=outages,
                roots=TierRoots(tiers, outages),
                eviction=Eviction(tiers),
                timing=workers.timing,
                tidy=lambda *call: tidied.append(call),
            )

        yield make


def two(fast, durable, **options):
    return Tier("fast", fast, **options), Tier("durable", durable, durable=True)


def test_full_tier_is_bypassed_with_rare_warnings(room_of, clock, caplog):
    room = room_of(*two(limited(100), memory()))
    assert room.place(1, 100) == 0
    assert not caplog.records
    assert [room.place(step, 101) for step in (2, 3)] == [1, 1]
    assert [r.message for r in caplog.records if "straight to tier" in r.message] == [
        "step 2 is saved straight to tier durable: tier fast (memory://) is full"
    ]
    clock.advance(51.0)
    assert room.place(4, 101) == 1
    assert "step 4 is saved straight" in caplog.text


def test_tier_that_a_rank_cannot_use_is_bypassed_with_its_reason(room_of, caplog):
    room = room_of(*two(memory(), memory()))
    assert room.place(1, 100, refused={"fast": "cannot be used by rank 3"}) == 1
    assert "tier fast cannot be used by rank 3" in caplog.text


@pytest.mark.parametrize("policy", ["skip", "raise", "block"])
def test_without_room_the_policy_decides(room_of, policy, caplog):
    durable = FaultyBackend(memory())
    times = 5 if policy == "block" else None
    durable.add(Fault("list", times=times, error=StorageError("no route to host")))
    room = room_of(*two(limited(10), durable, on_full=policy))
    if policy == "raise":
        with pytest.raises(StorageFullError, match=r"tier fast .* is full.*no route to host"):
            room.place(1, 11)
    elif policy == "skip":
        assert room.place(1, 11) is None
        assert "step 1 is not saved" in caplog.text
    else:
        assert room.place(1, 11) == 1
        assert caplog.text.count("the save of step 1 waits") == 1


def test_caller_can_abandon_a_save_that_waits_for_room(room_of):
    room = room_of(*two(limited(10), limited(10), on_full="block"))
    looks = []

    def wait():
        looks.append(len(looks))
        if len(looks) == 3:
            raise SaveAbortedError

    with pytest.raises(SaveAbortedError):
        room.place(1, 11, wait=wait)
    assert looks == [0, 1, 2]


def test_away_names_the_tiers_before_the_first_reply(room_of):
    fast = FaultyBackend(memory())
    room = room_of(*two(fast, memory()))
    assert room.away() == []
    fast.add(Fault("list", error=StorageError("no route to host")))
    assert room.away() == ["fast"]


def test_paused_tier_counts_as_away(room_of, clock):
    room = room_of(*two(memory(), memory()))
    room.leave_alone(0)
    assert room.left_alone() == room.away() == ["fast"]
    clock.advance(51.0)
    assert room.left_alone() == room.away() == []


def test_later_copy_needing_a_read_first_is_left_to_the_background(room_of, workers):
    fast, durable = memory(), memory()
    with checkpointer(fast) as ckpt:
        ckpt.save(make_state(1), 1, mode="blocking")
    record = Catalog(fast).record(1)
    CheckpointCopy(fast, durable, record, workers=workers, grace_s=3600.0).run()
    tidied = []
    room = room_of(*two(limited(10, fast), durable), tidied=tidied)
    assert room.place(2, 11) == 1
    assert tidied == [(0, 11)]
    assert Catalog(fast).steps() == [1]

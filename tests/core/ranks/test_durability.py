"""All ranks learn the outcome of rank 0's copies to slower tiers, or that it is unknown."""

from contextlib import contextmanager
from queue import SimpleQueue

from penstock.core.concurrency.timing import Timing
from penstock.core.errors import NotDrainedError
from penstock.core.ranks.durability import FollowedDrains, ToldDrains
from penstock.core.rounds.posts import DrainedPost
from penstock.testing.coordination import MemoryBoard, MemoryCoordination

PATIENCE_S = 60.0


@contextmanager
def ranks(*, timeout_s=PATIENCE_S):
    """The reports of rank 0, and what another rank learns."""
    board = MemoryBoard()
    posted = ToldDrains(MemoryCoordination(board), timeout_s, "drains")
    followed = FollowedDrains(MemoryCoordination(board), timeout_s, Timing(), "drains")
    try:
        yield posted, followed
    finally:
        followed.close()
        posted.close()


def making_progress():
    return ""


def test_each_checkpoint_is_reported_once_in_any_order():
    ends = SimpleQueue()
    with ranks() as (posted, followed):
        for number in (0, 1):
            posted.begin(number, making_progress)
            followed.follow(number, ends.put)
        for number, tier in ((1, "second"), (0, "first")):
            posted.end(number, DrainedPost((tier,)))
            assert ends.get(timeout=PATIENCE_S) == DrainedPost((tier,))
        followed.settle()
    assert ends.empty()


def test_no_rank_waits_for_failing_copies_and_their_end_is_reported():
    ends = SimpleQueue()
    with ranks() as (posted, followed):
        posted.begin(0, lambda: "the durable tier is away")
        followed.follow(0, ends.put)
        followed.settle()
        assert followed.failing == "the durable tier is away"
        assert ends.empty()
        posted.end(0, DrainedPost(("durable",)))
        assert ends.get(timeout=PATIENCE_S).tiers == ("durable",)


def test_a_silent_rank_0_is_not_awaited():
    ends = SimpleQueue()
    with ranks(timeout_s=0.2) as (_, followed):
        followed.follow(0, ends.put)
        followed.settle()
        end = ends.get(timeout=PATIENCE_S)
    assert end.kind == NotDrainedError.__name__
    assert "was silent for 0.2 s" in end.error


def test_unknown_outcome_at_close_is_reported_as_not_durable():
    ends = SimpleQueue()
    with ranks() as (posted, followed):
        posted.begin(0, making_progress)
        followed.follow(0, ends.put)
        followed.close()
        assert "the run was closed before" in ends.get(timeout=PATIENCE_S).error

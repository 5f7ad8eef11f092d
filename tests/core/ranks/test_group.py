"""The group of ranks, and its state after close."""

import threading
import time

from tests import interpreters

from penstock.core.concurrency.watchdog import Deadline
from penstock.core.plan.writers import RankPlaces
from penstock.core.ranks.group import KnownPlaces, Parting, RankGroup
from penstock.core.rounds.posts import end_key
from penstock.core.rounds.round import RankPlace
from penstock.core.types import Replica
from penstock.testing.coordination import MemoryBoard, MemoryCoordination


class Slow(MemoryCoordination):
    """A store that takes a moment for each decision."""

    def decide(self, key, value):
        time.sleep(0.2)
        return super().decide(key, value)


def test_a_rank_reports_its_failure_before_it_closes():
    board, others = MemoryBoard(), {*threading.enumerate()}
    group = RankGroup(1, 2, Slow(board))
    group.give_up(0, "failed")
    group.close()
    assert board.read([end_key(0)]) != [None]
    assert not [
        thread
        for thread in {*threading.enumerate()} - others
        if thread.name.startswith("penstock-ranks")
    ]
    group.close()


def test_positions_once_mispredicted_must_be_stable_for_longer():
    known = KnownPlaces()
    together, alone = RankPlaces(Replica(1, 2)), RankPlaces()
    relied = []
    for places in (together, together, alone, alone, together, *[alone] * 5):
        relied.append(known.of("key"))
        known.note("key", places, assumed=known.of("key"))
    # Wrong at the third save and at the fifth: two equal saves were not enough, then four are.
    assert relied == [None, together, together, None, alone, *[None] * 4, alone]
    assert known.of("another") is None
    known.forget()
    assert known.of("key") is None


def parting_of(rank, board):
    return Parting(MemoryCoordination(board), RankPlace(rank, 3))


def waits(leader, *lost):
    """Whether rank 0 waits for the others, instead of closing the store."""
    deadline = Deadline(0.05)
    leader.wait(lost, deadline, 0.01)
    return deadline.is_over()


def test_rank_0_waits_until_no_rank_needs_the_store():
    board = MemoryBoard()
    leader, one, two = (parting_of(rank, board) for rank in range(3))
    assert not waits(leader)  # there was no round
    for parting in (leader, one, two):
        parting.ended(0)
        parting.ended(1)
    assert waits(leader)
    two.need(1)  # the outcome of its copies is unknown
    one.post()
    two.post()
    assert waits(leader)
    assert not waits(leader, 2)
    two.release(1)
    two.post()
    assert not waits(leader)


def test_rank_0_does_not_wait_for_ranks_that_have_left():
    board = MemoryBoard()
    leader, one, two = (parting_of(rank, board) for rank in range(3))
    leader.ended(7)
    for parting in (one, two):
        assert waits(leader)
        parting.need(3)
        parting.leave()
        parting.post()
    assert not waits(leader)


ENDS_BY_AN_EXCEPTION = """
import atexit
from penstock.testing.coordination import MemoryBoard, MemoryCoordination
from penstock.core.ranks.group import RankGroup
from penstock.core.rounds.posts import SlotPost, decode, slot_key
import penstock.core.save.pending  # closes groups that are still open

board = MemoryBoard()
group = RankGroup(1, 2, MemoryCoordination(board))
atexit.register(lambda: print(decode(SlotPost, board.read([slot_key(1)])[0]).part["cause"]))
raise ValueError("the loss is no number")
"""


def test_a_program_ended_by_an_exception_reports_it():
    ended = interpreters.run("-c", ENDS_BY_AN_EXCEPTION)
    assert ended.stdout == (
        "closed its checkpointer (because of ValueError: the loss is no number)\n"
    )

"""The group of ranks: what it leaves behind when it is closed."""

import threading
import time

from penstock.core.coordination.memory import MemoryBoard, MemoryCoordination
from penstock.core.ranks.group import RankGroup
from penstock.core.rounds.posts import end_key


class Slow(MemoryCoordination):
    """A store that takes a moment for each decision."""

    def decide(self, key, value):
        time.sleep(0.2)
        return super().decide(key, value)


def test_a_rank_that_closes_has_told_before_that_it_has_failed():
    board = MemoryBoard()
    group = RankGroup(1, 2, Slow(board))
    group.give_up(0, "failed")
    group.close()
    assert board.read([end_key(0)]) != [None]
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock-ranks")]
    group.close()

"""Promises on the next save: ranks at different steps, in any order, save at the same steps."""

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.schedule.horizon import Horizon

STEPS = 400


class Ranks:
    """Ranks that pass steps; rank 0 wants saves a given number of steps after the last one."""

    def __init__(self, count, intervals, late):
        self.store, self.intervals, self.late = {}, intervals, late
        self.at = [0] * count  # the last step that each has passed
        self.horizons = [Horizon.after(0, 0) for _ in range(count)]
        self.saved = [[0] for _ in range(count)]

    def wanted(self):
        """The step of the next save; None until the last one has been durable for a while."""
        horizon = self.horizons[0]
        if self.at[0] - horizon.saved < self.late[horizon.number % len(self.late)]:
            return None
        return horizon.saved + self.intervals[horizon.number % len(self.intervals)]

    def promise(self, step):
        horizon = self.horizons[0]
        post = horizon.next_promise(step, self.wanted())
        assert post.step >= horizon.promise.step, "a promise is never taken back"
        assert horizon.key not in self.store
        self.store[horizon.key] = post
        horizon.take(post)

    def move(self, rank):
        """Let a rank pass its next step; return whether it can."""
        step = self.at[rank] + 1
        while (due := self.horizons[rank].is_due(step)) is None:
            if rank == 0:
                self.promise(step)
            elif self.horizons[rank].key in self.store:
                self.horizons[rank].take(self.store[self.horizons[rank].key])
            else:
                return False
        if due:
            self.saved[rank].append(step)
            self.horizons[rank] = Horizon.after(step, self.horizons[rank].number + 1)
        self.at[rank] = step
        while rank == 0 and self.horizons[0].is_short(step):
            self.promise(step)
        return True


INTERVALS = st.lists(st.integers(1, 60), min_size=1, max_size=5)


@given(st.integers(2, 4), INTERVALS, INTERVALS, st.integers(0, 1 << 32))
def test_ranks_in_any_order_save_at_the_same_steps(count, intervals, late, seed):
    dice = random.Random(seed)
    ranks = Ranks(count, intervals, late)
    while min(ranks.at) < STEPS:
        rank = dice.randrange(count)
        # A run of moves, so that ranks get far apart.
        for _ in range(dice.randrange(40)):
            moved = ranks.at[rank] < STEPS and ranks.move(rank)
            assert moved or rank or ranks.at[0] == STEPS, "rank 0 waits for no rank"
            if not moved:
                assert ranks.at[rank] == STEPS or ranks.at[rank] >= ranks.at[0], (
                    "a rank waits only if it is ahead of rank 0"
                )
                break
    assert all(saved == ranks.saved[0] for saved in ranks.saved)


@given(INTERVALS)
def test_saves_are_at_the_wanted_steps_if_these_are_known_in_time(intervals):
    ranks = Ranks(1, [2 + n for n in intervals], [1])
    while ranks.at[0] < STEPS:
        ranks.move(0)
    for number, (before, after) in enumerate(zip(ranks.saved[0], ranks.saved[0][1:], strict=False)):
        assert after - before == ranks.intervals[number % len(intervals)]


def test_a_save_is_late_by_at_most_a_quarter_and_a_thousand_steps_take_few_promises():
    for late in range(1, 1000, 7):
        ranks = Ranks(1, [1], [late])
        while len(ranks.saved[0]) == 1:
            ranks.move(0)
        assert ranks.saved[0][1] <= 1.25 * late + 4
        assert len(ranks.store) < 50

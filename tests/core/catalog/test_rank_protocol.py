"""Every interleaving of the ranks of a job and other users of the root.

See `ranks.py` for how, and `docs/design/ranks.md` for the results.
"""

import pytest
from tests.core.catalog.protocol import (
    Deleter,
    Pruner,
    Reader,
    Saver,
    Scenario,
    Search,
    ViolationError,
)
from tests.core.catalog.ranks import Rank, ranks

from penstock.core.catalog.commit_table import TABLE, Action, Event, State
from penstock.core.catalog.publisher import Publisher
from penstock.core.rounds.posts import Verdict, decode
from penstock.core.rounds.round import Round
from penstock.core.rounds.standstill import OtherRanks
from penstock.core.rounds.table import SAVE_OTHERS, SAVE_RANK_0, Happening, Phase, Step

A, B, OLD = "a" * 32, "b" * 32, "c" * 32
ONE = ((1, 0, OLD),)

TWO = ranks(2, A, 2)
# With others on the root: a rank's writes appear at once where that cannot matter.
PAIR = ranks(2, A, 2, at_once=True)
PATIENT = ranks(2, A, 2, at_once=True, tires=False)
THREE = ranks(3, A, 2, at_once=True)
# One tick is more than all of this grace time.
GRACE_S = 0.9
SLEEPY = ranks(2, A, 2, at_once=True, grace_s=GRACE_S)
FAITHFUL = Rank(0, 2, A, 2, at_once=True, grace_s=GRACE_S, tires=False)

SCENARIOS = {
    "every fault, once": Scenario(PAIR, ONE, faults=1, crashes=1, cuts=1, full=1),
    "overwrite, and one dies": Scenario(
        ranks(2, A, 1, overwrite=True, at_once=True), ONE, crashes=1
    ),
}  # fmt: skip

LARGE = {
    "a restart with fewer ranks": Scenario((*PAIR, Saver(B, 2)), ONE, faults=1),
    "retention, and one dies": Scenario(ranks(2, A, 2, keep_last=1, at_once=True), ONE, crashes=1),
    "three ranks, one dies": Scenario(THREE, ONE, crashes=1),
    "the latest is deleted": Scenario((*PAIR, Deleter(1)), ONE),
    "prune": Scenario(
        (*ranks(2, A, 2, at_once=True, grace_s=GRACE_S, tires=False), Pruner(GRACE_S)), ONE, ticks=1
    ),
    "a late record, and its replacement is deleted": Scenario(
        (*PATIENT, Saver(B, 2), Deleter(2)), faults=1
    ),
    "every fault, once, and files seen late": Scenario(
        TWO, ONE, faults=1, crashes=1, cuts=1, full=1
    ),
    "three ranks, one dies, and an answer is lost": Scenario(THREE, ONE, faults=1, crashes=1),
    "a restart with fewer ranks, and one dies": Scenario(
        (*PAIR, Saver(B, 2)), ONE, faults=1, crashes=1
    ),
    "the latest is deleted, and one dies": Scenario((*PAIR, Deleter(1)), ONE, crashes=1),
    "prune, and ranks that may sleep": Scenario(
        (FAITHFUL, SLEEPY[1], Pruner(GRACE_S)), ONE, ticks=1
    ),
    "retention, one dies, and an answer is lost": Scenario(
        ranks(2, A, 2, keep_last=1, at_once=True), ONE, faults=1, crashes=1
    ),
    "overwrite and a reader": Scenario(
        (*ranks(2, A, 1, overwrite=True, at_once=True), Reader(1)), ONE
    ),
    "without exclusive publish": Scenario(
        (*PAIR, Saver(B, 2)), ONE, exclusive=False, crashes=1
    ),
    "two deaths": Scenario(TWO, ONE, faults=1, crashes=2, full=1),
    "cut off twice": Scenario(TWO, ONE, faults=1, cuts=2),
    "three ranks, and every fault": Scenario(THREE, ONE, crashes=1, cuts=1, full=1),
    "two jobs at one step": Scenario((*PAIR, *ranks(2, B, 2, job="next", at_once=True)), ONE),
    "a restart with fewer ranks, and a cut": Scenario(
        (*TWO, Saver(B, 2)), ONE, crashes=1, cuts=1
    ),
    "the latest is deleted, and one is cut off": Scenario((*PAIR, Deleter(1)), ONE, cuts=1),
    "their lender is deleted, and one dies": Scenario(
        (*ranks(2, A, 2, at_once=True, like=1), Deleter(1)), ONE, crashes=1
    ),
    "prune, and ranks that may sleep and tire": Scenario(
        (*SLEEPY, Pruner(GRACE_S)), ONE, ticks=1
    ),
    "prune by the process of a rank": Scenario(
        (*SLEEPY, Pruner(GRACE_S, (A,))), ONE, ticks=1
    ),
}  # fmt: skip


ALL = [
    *(pytest.param(scenario, id=name) for name, scenario in SCENARIOS.items()),
    *(pytest.param(scenario, id=name, marks=pytest.mark.slow) for name, scenario in LARGE.items()),
]


@pytest.mark.parametrize("scenario", ALL)
def test_no_interleaving_of_ranks_breaks_a_promise(scenario):
    explored = Search(scenario, limit=1_200_000).run()
    told = {word for words in explored.told for word in words}
    assert {"success", "aborted"} <= told
    print(f"{explored.states} states; told at the end: {sorted(explored.told)}")


# -- what the search would find --------------------------------------------------------------------


def break_asking(patch):
    """Rank 0 publishes without asking the register."""
    patch.setitem(SAVE_RANK_0, (Phase.MERGING, Happening.MERGED), (Phase.PUBLISHING, Step.PUBLISH))


def break_waiting_for_all(patch):
    """Rank 0 asks for the commit before the last rank has sealed."""
    real = Round._hear

    def hear(self, keys, values):
        real(self, keys, values)
        if self._leads and self.phase is Phase.SEALED:
            self._happen(Happening.ALL_SEALED)

    patch.setattr(Round, "_hear", hear)


def break_unknown_decisions(patch):
    """A sealed rank that cannot reach the register deletes its data."""
    given_up = (Phase.ABORTED, Step.CLEAN_UP)
    for phase in (Phase.SEALED, Phase.ABORTING):
        patch.setitem(SAVE_OTHERS, (phase, Happening.REGISTER_LOST), given_up)
    may_delete = (State.ABORTED, Action.FAIL_MAY_DELETE)
    patch.setitem(TABLE, (State.SEALED, Event.DECISION_UNKNOWN), may_delete)


def break_silent_leaders(patch):
    """After the decision to commit a silent rank 0 counts as a failure."""
    given_up = (Phase.ABORTED, Step.CLEAN_UP)
    patch.setitem(SAVE_OTHERS, (Phase.PUBLISHING, Happening.LEADER_LOST), given_up)


def break_absent_records(patch):
    """A record that has not landed yet counts as one that never lands."""
    may_delete = (State.ABORTED, Action.FAIL_MAY_DELETE)
    patch.setitem(TABLE, (State.UNKNOWN, Event.RECORD_ABSENT), may_delete)


def break_the_register(patch):
    """A rank that asks the register counts as answered."""

    def hear(self, data):
        self.verdict = self._wish() if self.phase in _ASKING else decode(Verdict, data)
        commit = self.verdict.commit
        self._happen(Happening.COMMIT_DECIDED if commit else Happening.ABORT_DECIDED)

    patch.setattr(Round, "_hear_verdict", hear)


def break_watching(patch):
    """No rank watches rank 0."""
    real = OtherRanks.hear

    def hear(self, rank, data):
        return None if rank == 0 else real(self, rank, data)

    patch.setattr(OtherRanks, "hear", hear)


def break_deleting(patch):
    """A decided abort leaves sealed data to `prune`."""
    for state in (State.WRITING, State.SEALED):
        patch.setitem(TABLE, (state, Event.ABORT_DECIDED), (State.ABORTED, Action.FAIL_KEEP))


def break_references(patch):
    """The intent does not list what the ranks borrow."""
    real = Publisher.publish_intent
    patch.setattr(Publisher, "publish_intent", lambda self, references: real(self))


_ASKING = {Phase.DECIDING, Phase.GIVING_UP, Phase.ABORTING}
WELL = Scenario(TWO, ONE)
CUT_OFF = Scenario(TWO, ONE, cuts=1)
BORROWS = Scenario((*ranks(2, A, 2, at_once=True, like=1, tires=False), Deleter(1)), ONE)
SLOW = {
    break_absent_records,
    break_references,
    break_the_register,
    break_unknown_decisions,
    break_waiting_for_all,
}
BROKEN = [
    (break_asking, WELL, "does not say commit"),
    (break_waiting_for_all, WELL, "giving up on rank 1 cannot see: the register says commit"),
    (break_unknown_decisions, CUT_OFF, "was told aborted, but its record is there"),
    (break_silent_leaders, WELL, "was told aborted, but its record is there"),
    (break_absent_records, CUT_OFF, "is there without"),
    (break_the_register, WELL, "was told aborted, but its record is there"),
    (break_watching, WELL, "cannot go on"),
    (break_deleting, WELL, "has left"),
    (break_references, BORROWS, "is there without"),
]


@pytest.mark.parametrize(
    ("breaks", "scenario", "harm"),
    [
        pytest.param(*case, id=case[0].__name__, marks=[pytest.mark.slow] * (case[0] in SLOW))
        for case in BROKEN
    ],
)
def test_a_broken_guard_of_the_ranks_is_found(breaks, scenario, harm, monkeypatch):
    breaks(monkeypatch)
    with pytest.raises(ViolationError, match=harm):
        Search(scenario).run()

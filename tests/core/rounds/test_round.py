"""A round on one rank whose job store answers some kinds of calls, and refuses others."""

import pytest

from penstock.core.catalog.commit_table import Commit, Event
from penstock.core.errors import CoordinationError
from penstock.core.rounds.posts import (
    At,
    GoPost,
    SlotPost,
    encode,
    go_key,
    slot_key,
)
from penstock.core.rounds.round import (
    Answer,
    Decide,
    Post,
    RankPlace,
    Read,
    Rest,
    RestoreRound,
    SaveRound,
    WaitFor,
)
from penstock.core.rounds.table import ENDS, Phase, Step

TIMEOUT_S = 8.0
CALLS_PER_S = 40  # most of them while rank 0 waits for the last parts
OF_KIND = {"post": Post, "read": Read, "decide": Decide, "wait": WaitFor}


class Rank:
    """One of two ranks on a virtual clock, in which calls take no time at all."""

    def __init__(self, kind, rank, until):
        """The other rank makes progress and seals; this one runs to the phase `until`."""
        place = RankPlace(rank, 2)
        if kind == "save":
            self.round = SaveRound(place, 0, commit=Commit(), timeout_s=TIMEOUT_S)
        else:
            self.round = RestoreRound(place, 0, timeout_s=TIMEOUT_S)
        self.rank = rank
        self.now_s = 0.0
        self.calls = 0
        self.broken = ()
        self.values = {}
        self._kind = kind
        self._until = until
        self._beats = 0

    def run(self, broken, horizon_s):
        """From the phase on, the store refuses the calls of these kinds at once."""
        operations = self.round.operations(0.0)
        if self.rank == 0:
            self.round.go({"generation": 0})
        answer = None
        while self.now_s < horizon_s:
            if self.round.phase is self._until and not self.broken:
                self.broken = tuple(OF_KIND[kind] for kind in broken)
                self.since_s = self.now_s
            try:
                operation = next(operations) if answer is None else operations.send(answer)
            except StopIteration:
                return
            answer = self._carry_out(operation)
            self._work()

    def _work(self):
        while self.round.steps:
            step = self.round.steps.popleft()
            if self.round.phase is self._until:
                continue  # here it stays without other actions
            if step is Step.WORK:
                self.round.seal({})
            elif step is Step.MERGE:
                self.round.merged()
        if self.round.phase is Phase.RESOLVING:
            self.round.resolved(Event.RECORD_ABSENT)

    def _carry_out(self, operation):
        self.calls += not isinstance(operation, Rest)
        assert self.calls <= CALLS_PER_S * (self.now_s + 1), "it asks without a pause"
        if isinstance(operation, Rest):
            self.now_s += operation.timeout_s
        elif isinstance(operation, self.broken):
            return Answer(self.now_s, None, CoordinationError("refused"))
        elif isinstance(operation, WaitFor):
            self.now_s += operation.timeout_s
        value = None
        if isinstance(operation, Post):
            self.values[operation.key] = operation.value
        elif isinstance(operation, Read):
            value = [self._read(key) for key in operation.keys]
        elif isinstance(operation, Decide):
            value = operation.value
        return Answer(self.now_s, value, None)

    def _read(self, key):
        other = 1 - self.rank
        if key == slot_key(other):
            self._beats += 1
            at = At.WORKING if self._until is Phase.WORKING else At.SEALED
            return encode(SlotPost(0, self._kind, at, self._beats, "", 0, 0, {}))
        if key == go_key(0) and self._until is not Phase.WAITING:
            return encode(GoPost(self._kind, {"generation": 0}))
        return None


def begun(kind, rank, phase):
    """A rank asked to give up in that phase."""
    made = Rank(kind, rank, phase)
    if phase is Phase.GIVING_UP:
        made.round.fail("failed")
    return made


DEAF = [
    (kind, rank, phase)
    for kind in ("save", "restore")
    for rank in (0, 1)
    for phase in (Phase.WORKING, Phase.GIVING_UP, *((Phase.WAITING, Phase.SEALED) if rank else ()))
]


def test_a_rank_that_posts_but_hears_nothing_ends_in_time():
    for case in DEAF:
        found = begun(*case)
        found.run(["read", "decide", "wait"], 100 * TIMEOUT_S)
        assert found.round.phase in ENDS, case
        assert found.now_s - found.since_s <= 1.25 * TIMEOUT_S, case


@pytest.mark.parametrize("broken", [["wait"], ["post"], ["read", "wait"], ["post", "read", "wait"]])
def test_a_store_that_refuses_at_once_is_asked_with_pauses(broken):
    for case in DEAF:
        found = begun(*case)
        found.run(broken, TIMEOUT_S)
        assert found.now_s >= TIMEOUT_S or found.round.phase in ENDS, case


def test_a_rank_with_refused_posts_continues_while_it_hears():
    found = begun("save", 1, Phase.WORKING)
    found.run(["post"], 10 * TIMEOUT_S)
    assert found.round.phase is Phase.WORKING

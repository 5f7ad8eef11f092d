"""The tables of rounds: every pair, and every history of allowed transitions."""

import itertools
from collections import deque
from pathlib import Path

import pytest

from penstock.core.catalog.commit_table import Commit, IllegalEventError, State
from penstock.core.errors import CoordinationError, FormatError
from penstock.core.rounds.posts import At, GoPost, SlotPost, decode, slot_key
from penstock.core.rounds.round import Answer, Post, RankPlace, RestoreRound, SaveRound
from penstock.core.rounds.table import (
    ENDS,
    RESTORE_OTHERS,
    RESTORE_RANK_0,
    SAVE_OTHERS,
    SAVE_RANK_0,
    TOO_LATE,
    Happening,
    Phase,
    Step,
)

TABLES = {
    "save, rank 0": SAVE_RANK_0,
    "save, others": SAVE_OTHERS,
    "restore, rank 0": RESTORE_RANK_0,
    "restore, others": RESTORE_OTHERS,
}
every_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


def round_of(table):
    rank = 0 if table in {id(SAVE_RANK_0), id(RESTORE_RANK_0)} else 1
    if table in {id(SAVE_RANK_0), id(SAVE_OTHERS)}:
        return SaveRound(RankPlace(rank, 2), 0, commit=Commit(), timeout_s=1.0)
    return RestoreRound(RankPlace(rank, 2), 0, timeout_s=1.0)


def paths(table):
    """Every path from the start to an end, as events and steps."""
    todo = deque([(Phase.WAITING, (), ())])
    while todo:
        phase, happenings, steps = todo.popleft()
        if phase in ENDS:
            yield phase, happenings, steps
            continue
        for (at, happening), (following, step) in table.items():
            if at is phase:
                todo.append((following, (*happenings, happening), (*steps, step)))


@every_table
def test_every_pair_is_in_the_table_or_too_late_or_refused_without_a_change(table):
    for phase, happening in itertools.product(Phase, Happening):
        tried = round_of(id(table))
        tried.phase = phase
        if (phase, happening) in table:
            continue
        if (phase, happening) in TOO_LATE:
            tried._happen(happening)
        else:
            with pytest.raises(IllegalEventError, match=str(happening)):
                tried._happen(happening)
        assert tried.phase is phase
        assert not tried.steps


@every_table
def test_every_phase_leads_to_an_end(table):
    ways = list(paths(table))
    assert {phase for phase, _, _ in ways} <= ENDS
    assert {phase for phase, _ in table} <= {
        phase
        for _, happenings, _ in ways
        for phase in phases_of(table, happenings)
    }  # fmt: skip


def phases_of(table, happenings):
    phase = Phase.WAITING
    yield phase
    for happening in happenings:
        phase = table[phase, happening][0]
        yield phase


@every_table
def test_success_needs_a_commit_decision_or_the_record(table):
    proofs = {Happening.COMMIT_DECIDED, Happening.RECORD_IS_OURS}
    for phase, happenings, _ in paths(table):
        if phase is Phase.COMMITTED:
            assert proofs & set(happenings), happenings


@every_table
def test_own_data_is_deleted_only_after_an_abort_or_unsealed(table):
    final = {Happening.ABORT_DECIDED, Happening.NEVER}
    for _, happenings, steps in paths(table):
        if Step.CLEAN_UP in steps:
            assert final & set(happenings) or Happening.SEALED not in happenings, happenings


def test_rank_0_publishes_only_after_all_parts_and_the_decision():
    for _, happenings, steps in paths(SAVE_RANK_0):
        if Step.PUBLISH in steps:
            before = happenings[: steps.index(Step.PUBLISH) + 1]
            assert before[-4:] == (
                Happening.SEALED,
                Happening.ALL_SEALED,
                Happening.MERGED,
                Happening.COMMIT_DECIDED,
            )


def test_a_seal_after_giving_up_is_never_posted():
    tried = SaveRound(RankPlace(1, 2), 0, commit=Commit(), timeout_s=1.0)
    tried._hear_go(GoPost("save", {"step": 100}))
    tried.fail("rank 0 sleeps")
    tried.seal({"bytes": 1})  # its engine was about to
    operations = tried.operations(0.0)
    answers = [Answer(n / 10, error=CoordinationError("no answer")) for n in range(1, 6)]
    posted = [next(operations), *map(operations.send, answers)]  # and beats continue
    slots = [decode(SlotPost, p.value) for p in posted if isinstance(p, Post)]
    assert len(slots) >= 2
    assert {slot.at for slot in slots} == {At.WORKING}
    assert tried.phase is Phase.GIVING_UP


@pytest.mark.parametrize("junk", [b"{}", b'{"v":7}'])
def test_a_rank_with_an_unreadable_post_is_named(junk):
    leader = SaveRound(RankPlace(0, 3), 0, commit=Commit(), timeout_s=1.0)
    leader.go({"step": 100})
    leader._hear([slot_key(1), slot_key(2)], [None, junk])
    assert leader.phase is Phase.GIVING_UP
    assert leader._blame.rank == 2
    assert leader._blame.cause.startswith("posted unreadable data")


def test_a_part_too_large_to_post_is_refused_before_any_change():
    tried = SaveRound(RankPlace(0, 2), 0, commit=(commit := Commit()), timeout_s=1.0)
    tried.go({"step": 100})
    with pytest.raises(FormatError, match="16384"):
        tried.seal({"names": "x" * 20_000})
    assert tried.phase is Phase.WORKING
    assert commit.state is State.WRITING


def test_only_rank_0_publishes_or_asks_for_a_commit():
    for table in (SAVE_OTHERS, RESTORE_OTHERS):
        steps = {step for _, step in table.values()}
        assert not {Step.PUBLISH, Step.MERGE, Step.DECIDE_COMMIT} & steps


def test_the_page_matches_the_largest_table():
    page = Path(__file__).parents[3] / "docs/design/ranks.md"
    assert shown(SAVE_RANK_0) in page.read_text()


@pytest.mark.parametrize("name", TABLES)
def test_the_page_lists_rank_actions_in_each_phase(name):
    page = (Path(__file__).parents[3] / "docs/design/ranks.md").read_text()
    for following, step in TABLES[name].values():
        (row,) = [
            row for row in page.splitlines() if row.startswith(f"| {cell(following, step)} | ")
        ]
        assert step in row


def cell(following, step):
    return f"{following}, kept" if step is Step.KEEP else following


def shown(table):
    """One row per event, one column per phase, and in the cells the next phase."""
    phases = dict.fromkeys(phase for phase, _ in table)
    lines = ["|  | " + " | ".join(phases) + " |", "|---" * (len(phases) + 1) + "|"]
    for happening in Happening:
        found = [table.get((phase, happening)) for phase in phases]
        if any(found):
            cells = [cell(*pair) if pair else "" for pair in found]
            lines.append(f"| {happening} | " + " | ".join(cells) + " |")
    return "\n".join(lines)

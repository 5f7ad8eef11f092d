"""Every interleaving of savers, deleters, pruners and readers, over the engine's own code.

See `protocol.py` for how, and `docs/design/commit-protocol.md` for the results.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.core.catalog.protocol import (
    Copier,
    Deleter,
    Pruner,
    Reader,
    Saver,
    Scenario,
    Search,
    ViolationError,
)
from tests.core.catalog.tiers import CompactingProcess, Drainer, TierSaver, stored_in_tiers

from penstock.core.catalog import catalog, deletion, prune, survey
from penstock.core.catalog.commit_table import TABLE, Action, Event, State
from penstock.core.catalog.publisher import Publisher
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.errors import BlobNotFoundError
from penstock.core.format.records import data_prefix, parse_commit_name
from penstock.core.save import prepare
from penstock.core.tiers import drains

A, B, OLD, RUBBISH = "a" * 32, "b" * 32, "c" * 32, "d" * 32
ONE = ((1, 0, OLD),)
LENT = (("blobs", OLD), (2, 0, RUBBISH, (OLD,)))
CHAIN = (*ONE, (2, 0, RUBBISH, (OLD,)))
DRAINED = stored_in_tiers(CHAIN, ())
WAITING = stored_in_tiers(ONE, CHAIN[1:])

# One tick is more than half of this grace time, and less than all of it; two are more than all.
SLEEPY = Saver(A, 2, grace_s=1.5)
PRUNER = Pruner(1.5)
REFERRING = replace(SLEEPY, like=1, batches=2)

SCENARIOS = {
    "same step": Scenario((Saver(A, 2), Saver(B, 2)), ONE, faults=2),
    "same step, one dies": Scenario((Saver(A, 2), Saver(B, 2)), ONE, faults=1, crashes=1),
    "different steps": Scenario((Saver(A, 2), Saver(B, 3)), ONE, faults=2),
    "same step and a reader": Scenario((Saver(A, 2), Saver(B, 2), Reader(2)), ONE, faults=1),
    "without exclusive publish": Scenario(
        (Saver(A, 2), Saver(B, 2)), ONE, exclusive=False, faults=2
    ),
    "overwrite and readers": Scenario(
        (Saver(A, 1, overwrite=True), Reader(1), Reader(1)), ONE, faults=1
    ),
    "overwrite and delete": Scenario((Saver(A, 1, overwrite=True), Deleter(1)), ONE, faults=1),
    "overwrite, without exclusive publish, and delete": Scenario(
        (Saver(A, 1, overwrite=True), Deleter(1)), ONE, exclusive=False
    ),
    "delete and read": Scenario((Deleter(1), Deleter(1), Reader(1)), ONE, scattered=True),
    "retention and read": Scenario((Saver(A, 2, keep_last=1), Reader(1)), ONE, faults=1),
    "resume, while the old process saves": Scenario(
        (Saver(A, 3), Deleter(1, rewind=True), Saver(B, 2)), ((1, 0, OLD), (2, 0, RUBBISH))
    ),
    "a reference and delete": Scenario(
        (Saver(A, 2, like=1), Deleter(1), Deleter(2)), ONE, faults=1
    ),
    "a reference and delete, in any order": Scenario(
        (Saver(A, 2, like=1), Deleter(1), Deleter(2)), ONE, scattered=True
    ),
    "a chain, a reader and delete": Scenario(
        (Reader(2), Deleter(1), Deleter(2)), CHAIN, scattered=True
    ),
    "a growing chain, and delete": Scenario(
        (Saver(A, 3, like=2), Deleter(1, then_delete=2)), CHAIN, faults=1
    ),
    "a chain that grows twice, and delete": Scenario(
        (Saver(A, 3, like=2), Saver(B, 4, like=2), Deleter(2)), CHAIN
    ),
    "the last borrowers are deleted": Scenario(
        (Deleter(1, then_delete=2), Deleter(3)), (*CHAIN, (3, 0, B, (OLD,)))
    ),
    "a growing chain, and retention": Scenario(
        (Saver(A, 3, like=2, keep_last=1), Reader(2), Reader(3)), CHAIN, faults=1
    ),
    "a chain that overwrites its base, and delete": Scenario(
        (Saver(A, 2, like=2, overwrite=True), Deleter(1)), CHAIN, faults=1
    ),
    "a copy, and its base is deleted": Scenario((Copier(A, 2, (OLD,)), Deleter(1)), ONE, crashes=1),
    "a copy, the last borrower is deleted, and a reader": Scenario(
        (Copier(A, 3, (OLD,)), Deleter(2), Reader(3)), LENT
    ),
    "a copy of the base left by a killed deletion": Scenario(
        (Copier(OLD, 1), Deleter(1)), ONE, crashes=1
    ),
    "a copy, and a killed deletion of the last borrower": Scenario(
        (Copier(A, 3, (OLD,)), Deleter(2)), LENT, crashes=1
    ),
    "two copies of one blob": Scenario((Copier(A, 2, (OLD,)), Copier(B, 3, (OLD,)))),
    "a copy of the base, and the last borrower is deleted": Scenario(
        (Copier(OLD, 1), Deleter(2)), LENT, faults=1
    ),
    "copies of the base and of a borrower": Scenario((Copier(OLD, 1), Copier(A, 3, (OLD,))), LENT),
    "a growing chain, prune and delete": Scenario(
        (replace(SLEEPY, step=3, like=2), Pruner(1.5, then_delete=2)), CHAIN, ticks=2
    ),
    "a reference and overwrite": Scenario(
        (Saver(A, 2, like=1), Saver(B, 1, overwrite=True)), ONE
    ),
    "prune and a saver that may sleep": Scenario((SLEEPY, PRUNER), ticks=3, faults=1),
    "prune that spares recordless data, and a saver that may sleep": Scenario(
        (SLEEPY, replace(PRUNER, everything=False)), ONE, ticks=2, faults=1
    ),
    "prune of overwrite leftovers": Scenario(
        (Pruner(), Reader(1), Reader(1)), ((1, 0, OLD), (1, 1, RUBBISH))
    ),
    "prune by the saver's own process": Scenario(
        (SLEEPY, Pruner(1.5, (A,))), ticks=3, faults=1, late=True
    ),
    "prune, and naps of a quarter": Scenario(
        (Saver(A, 1, grace_s=3.9), Pruner(3.9)), ticks=4, nap=1
    ),
    "a reference, prune and delete": Scenario(
        (REFERRING, Pruner(1.5, then_delete=1)), ONE, ticks=2
    ),
    "tiers: overwrite, drain and compaction": Scenario(
        (TierSaver(A, 2), CompactingProcess(B, 2)), store=DRAINED, records_only=True
    ),
    "tiers: overwrite, drain and compaction, one dies": Scenario(
        (TierSaver(A, 2), CompactingProcess(B, 2)), store=DRAINED, crashes=1, records_only=True
    ),
    "tiers: drain and compaction of one checkpoint": Scenario(
        (Drainer(RUBBISH, 2, (OLD,)), CompactingProcess(B, 2)), store=WAITING
    ),
    "tiers: overwrite and compaction of an undrained step": Scenario(
        (TierSaver(A, 2), CompactingProcess(B, 2)), store=WAITING, records_only=True
    ),
}  # fmt: skip

# Left to the run of all tests.
LARGE = {
    "a growing chain, and retention",
    "a chain, a reader and delete",
    "a growing chain, prune and delete",
    "a chain that grows twice, and delete",
    "a chain that overwrites its base, and delete",
    "a copy, and a killed deletion of the last borrower",
    "a copy, and its base is deleted",
    "a copy of the base, and the last borrower is deleted",
    "a copy of the base left by a killed deletion",
    "a reference and delete",
    "a reference and delete, in any order",
    "a reference and overwrite",
    "a reference, prune and delete",
    "copies of the base and of a borrower",
    "delete and read",
    "overwrite and delete",
    "overwrite, without exclusive publish, and delete",
    "prune by the saver's own process",
    "prune, and naps of a quarter",
    "resume, while the old process saves",
    "same step",
    "the last borrowers are deleted",
    "tiers: drain and compaction of one checkpoint",
    "tiers: overwrite, drain and compaction",
    "tiers: overwrite and compaction of an undrained step",
    "tiers: overwrite, drain and compaction, one dies",
    "two copies of one blob",
}


def scenario(name):
    marks = [pytest.mark.slow] if name in LARGE else []
    return pytest.param(SCENARIOS[name], id=name, marks=marks)


@pytest.mark.parametrize("scenario", [scenario(name) for name in SCENARIOS])
def test_no_interleaving_breaks_a_promise(scenario):
    explored = Search(scenario).run()
    assert explored.states > 100
    print(f"{explored.states} states; told at the end: {sorted(explored.told)}")


# -- what the search would find --------------------------------------------------------------------


def data_first(backend, names):
    names = list(names)
    for name in names:
        uid = survey.read_commit(backend, name).uid
        deletion.delete_data(backend, uid, backend.list(data_prefix(uid)))
    for name in names:
        backend.delete([name])


def without_data_check(backend, names):
    """Deletes the data of a record despite other references."""
    uids = {survey.read_commit(backend, name).uid for name in names}
    for name in names:
        backend.delete([name])
    delete_lent(backend, None, uids, gone=None)


def delete_lent(backend, surveys, lent, *, gone):
    """Deletes what a deleted checkpoint had borrowed despite other borrowers."""
    for uid in sorted(lent):
        deletion.delete_data(backend, uid, backend.list(data_prefix(uid)))


def check_intent(self, real=Publisher._check_intent):
    self._grace_s, grace_s = 1e9, self._grace_s
    try:
        real(self)
    finally:
        self._grace_s = grace_s


def attempt(self, name, data):
    self._backend.publish(name, data)
    return Event.PUBLISH_OK


def pruning(**other):
    real = prune.prune
    return lambda backend, **options: real(backend, **{**options, **other})


def gone_intent(data, name):
    raise BlobNotFoundError(name)


def in_table(state, event, *row):
    return lambda patch: patch.setitem(TABLE, (state, event), row)


def instead(*where):
    return lambda patch: patch.setattr(*where)


# The broken guard, and the scenario that shows it.
BROKEN = {
    "data goes first": (
        instead(catalog, "delete_records", data_first),
        "overwrite and delete",
    ),
    "references": (
        instead(catalog, "delete_records", without_data_check),
        "a reference and delete",
    ),
    "lent blobs": (instead(deletion, "delete_lent", delete_lent), "the last borrowers are deleted"),
    "borrowed blobs go with their manifest": (
        instead(deletion, "delete_manifest", deletion.delete_data),
        "a growing chain, and delete",
    ),
    "half of the grace time": (
        instead(Publisher, "_check_intent", check_intent),
        "prune in a shorter time, and a saver that may sleep",
    ),
    "absence after a lost reply counts as not published": (
        in_table(State.UNKNOWN, Event.RECORD_ABSENT, State.ABORTED, Action.FAIL_MAY_DELETE),
        "prune by the saver's own process",
    ),
    "a lost reply is a failure without a look-up": (
        in_table(State.PUBLISHING, Event.PUBLISH_ANSWER_LOST, State.ABORTED, Action.FAIL_LOST_RACE),
        "same step",
    ),
    "a taken name counts as ours": (
        instead(Publisher, "_read_back", lambda self, name: Event.RECORD_IS_OURS),
        "same step",
    ),
    "sealed data is deleted": (
        in_table(State.UNKNOWN, Event.FAILED, State.ABORTED, Action.FAIL_MAY_DELETE),
        "same step",
    ),
    "exclusive publish": (instead(Publisher, "_try", attempt), "same step"),
    "gone or damaged": (
        instead(catalog.Catalog, "gone_or_damaged", lambda self, step, uid, error: error),
        "delete and read",
    ),
    "own uids": (
        instead(catalog, "prune", pruning(own_uids=())),
        "prune by the saver's own process",
    ),
    "age": (instead(catalog, "prune", pruning(grace_s=-1.0)), "prune by another, without naps"),
    "intents of references": (
        instead(survey, "decode_intent", gone_intent),
        "a reference and delete",
    ),
    "an overwrite takes a generation like a compaction": (
        instead(
            prepare,
            "generation_above",
            lambda names: max(parse_commit_name(name)[1] for name in names) + 1,
        ),
        "tiers: overwrite, drain and compaction",
    ),
    "a drain replaces saves its saver knew, but no compaction": (
        instead(CheckpointCopy, "_makes_way", lambda self, there: there.uid in self._replace),
        "tiers: overwrite, drain and compaction",
    ),
    "a gone step counts as deleted despite its compaction": (
        instead(drains, "at_step", lambda backend, step: []),
        "tiers: drain and compaction of one checkpoint",
    ),
}
ONLY_BROKEN = {
    "prune by another, without naps": Scenario((SLEEPY, PRUNER)),
    "prune in a shorter time, and a saver that may sleep": Scenario(
        (SLEEPY, PRUNER), ticks=2, faults=1
    ),
}


SLOW = {
    "half of the grace time",
    "own uids",
    "a drain replaces saves its saver knew, but no compaction",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in BROKEN]
)
def test_a_broken_guard_is_found(name, monkeypatch):
    breaks, scenario = BROKEN[name]
    breaks(monkeypatch)
    with pytest.raises(ViolationError):
        Search({**SCENARIOS, **ONLY_BROKEN}[scenario]).run()


@pytest.mark.slow
def test_the_assumption_is_needed_that_a_record_lands_within_half_the_grace_time():
    scenario = Scenario((SLEEPY, PRUNER), ticks=3, nap=2)
    with pytest.raises(ViolationError, match="is there without"):
        Search(scenario).run()


# -- the table -------------------------------------------------------------------------------------


def test_the_page_matches_the_table():
    page = Path(__file__).parents[3] / "docs/design/commit-protocol.md"
    assert table() in page.read_text()


def table():
    lines = ["| state | event | next state | what the saver does |", "|---|---|---|---|"]
    lines += [
        f"| {state} | {event} | {following} | {action} |"
        for (state, event), (following, action) in TABLE.items()
        if action is not Action.NONE
    ]
    return "\n".join(lines)


def test_a_save_can_end_from_every_state():
    ends = {Action.DONE, Action.FAIL_MAY_DELETE, Action.FAIL_KEEP, Action.FAIL_LOST_RACE}
    ends |= {Action.FAIL_UNKNOWN}
    ending = {State.COMMITTED, State.ABORTED}
    for _ in State:
        ending |= {s for (s, _), (t, action) in TABLE.items() if action in ends or t in ending}
    assert ending == set(State)

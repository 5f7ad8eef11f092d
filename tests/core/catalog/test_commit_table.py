"""The states of a save: every pair of state and event, and every short history."""

import copy
import itertools

import pytest

from penstock.core.catalog.commit_table import (
    TABLE,
    Action,
    Commit,
    Event,
    IllegalEventError,
    State,
)

FAILURES = [Event.FAILED, Event.ABORT, Event.INTENT_GONE, Event.GRACE_HALF_PASSED]
STARTED = [Event.SEALED, Event.PUBLISH_STARTED]


def histories(length):
    """Every possible sequence of events, with its commit and actions."""
    open_ends = [((), (), Commit())]
    for _ in range(length):
        longer = []
        for (events, actions, commit), event in itertools.product(open_ends, Event):
            following = copy.copy(commit)
            try:
                action = following.feed(event)
            except IllegalEventError:
                continue
            longer.append(((*events, event), (*actions, action), following))
        yield from longer
        open_ends = longer


def replay(events):
    commit = Commit()
    for event in events:
        commit.feed(event)
    return commit


@pytest.fixture(scope="module")
def every_history():
    return list(histories(5))


def test_every_pair_is_in_the_table_or_refused_without_a_change():
    for state, event in itertools.product(State, Event):
        commit = Commit()
        commit._state = state
        if (state, event) in TABLE:
            assert commit.feed(event) is TABLE[state, event][1]
            assert commit.state is TABLE[state, event][0]
        else:
            with pytest.raises(IllegalEventError, match=str(event)):
                commit.feed(event)
            assert commit.state is state
            assert not commit.may_delete_own_data


def test_events_from_other_threads_are_legal_in_every_state():
    assert {(s, e) for s in State for e in FAILURES} <= TABLE.keys()


def test_every_state_can_be_reached(every_history):
    assert {commit.state for _, _, commit in every_history} | {State.WRITING} == set(State)


def test_sealed_data_is_kept_while_any_rank_can_still_publish_it(
    every_history,
):
    for events, actions, commit in every_history:
        if Event.SEALED in events:
            lost = Event.RECORD_IS_OTHER_FOR_GOOD in events
            aborted = bool({Event.ABORT_DECIDED, Event.NEVER_PUBLISHED} & set(events))
            assert not commit.may_delete_own_data or lost or aborted, events
            assert Action.FAIL_MAY_DELETE not in actions or aborted, events


def test_sealed_data_may_be_deleted_once_no_rank_can_publish_it():
    for history in [
        [Event.SEALED, Event.ABORT_DECIDED],
        [Event.SEALED, Event.COMMIT_DECIDED, Event.NEVER_PUBLISHED],
        [*STARTED, Event.PUBLISH_LOST, Event.RECORD_IS_OTHER_FOR_GOOD],
    ]:
        assert replay(history).may_delete_own_data


def test_an_attempted_record_may_appear_unless_the_store_refused_it():
    for history, never in [
        ([Event.SEALED, Event.INTENT_GONE], True),
        ([*STARTED, Event.PUBLISH_OK], False),
        ([*STARTED, Event.PUBLISH_ANSWER_LOST], False),
        ([*STARTED, Event.PUBLISH_ANSWER_LOST, Event.RECORD_IS_OTHER], False),
        ([*STARTED, Event.PUBLISH_LOST, Event.RECORD_IS_OTHER_FOR_GOOD], True),
    ]:
        assert replay(history).never_published is never


def test_a_decided_abort_neither_follows_nor_precedes_a_publish(every_history):
    for events, actions, _ in every_history:
        if (Event.ABORT_DECIDED, Action.FAIL_MAY_DELETE) in zip(events, actions, strict=True):
            assert Action.PUBLISH not in actions, events
            assert Event.COMMIT_DECIDED not in events, events


def test_unknown_decision_deletes_nothing_and_reads_the_record():
    commit = replay([Event.SEALED])
    assert commit.feed(Event.DECISION_UNKNOWN) is Action.RESOLVE
    assert commit.feed(Event.RECORD_ABSENT) is Action.FAIL_UNKNOWN
    assert not commit.may_delete_own_data


def test_a_save_that_fails_before_its_seal_may_delete_its_data():
    for failure in FAILURES:
        commit = Commit()
        assert commit.feed(failure) is Action.FAIL_MAY_DELETE
        assert commit.may_delete_own_data


def test_nothing_is_published_once_the_intent_is_gone_or_stale(every_history):
    for events, actions, _ in every_history:
        for position, event in enumerate(events):
            if event in FAILURES:
                assert Action.PUBLISH not in actions[position:], events


def test_the_record_is_published_at_most_once_and_only_when_sealed(every_history):
    for events, actions, _ in every_history:
        assert actions.count(Action.PUBLISH) <= 1, events
        if Action.PUBLISH in actions:
            assert Event.SEALED in events[: actions.index(Action.PUBLISH)], events


def test_committed_needs_the_stores_success_or_our_own_record(every_history):
    proofs = {Event.PUBLISH_OK, Event.RECORD_IS_OURS}
    for events, actions, commit in every_history:
        assert (commit.state is State.COMMITTED) == bool(proofs & set(events)), events
        assert actions.count(Action.DONE) == (commit.state is State.COMMITTED), events


def test_committed_and_aborted_are_final():
    for state in (State.COMMITTED, State.ABORTED):
        for event in Event:
            next_state, action = TABLE.get((state, event), (state, Action.NONE))
            assert (next_state, action) == (state, Action.NONE)


@pytest.mark.parametrize("state", [State.PUBLISHING, State.AWAITING])
def test_pending_publish_never_counts_as_failed_without_a_look_up(state):
    never = {Event.NEVER_PUBLISHED} if state is State.AWAITING else set()
    for event in set(Event) - never:
        following, action = TABLE.get((state, event), (state, Action.NONE))
        assert following is not State.ABORTED
        assert action in {Action.NONE, Action.DONE, Action.RESOLVE}


def test_an_absent_record_proves_nothing():
    commit = replay([*STARTED, Event.PUBLISH_ANSWER_LOST])
    assert commit.feed(Event.RECORD_ABSENT) is Action.FAIL_UNKNOWN
    assert commit.state is State.UNKNOWN
    assert commit.feed(Event.RECORD_IS_OURS) is Action.DONE


def test_a_taken_name_may_be_our_earlier_attempt():
    commit = replay(STARTED)
    assert commit.feed(Event.PUBLISH_LOST) is Action.RESOLVE
    assert commit.feed(Event.RECORD_IS_OURS) is Action.DONE


def test_another_savers_record_loses_the_race_and_keeps_the_data():
    commit = replay([*STARTED, Event.PUBLISH_LOST])
    assert commit.feed(Event.RECORD_IS_OTHER) is Action.FAIL_LOST_RACE
    assert commit.state is State.ABORTED
    assert not commit.may_delete_own_data

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
    """Every sequence of events that can happen, with the commit it led to and its actions."""
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


def test_what_may_come_from_another_thread_is_legal_in_every_state():
    assert {(s, e) for s in State for e in FAILURES} <= TABLE.keys()


def test_every_state_can_be_reached(every_history):
    assert {commit.state for _, _, commit in every_history} | {State.WRITING} == set(State)


def test_nothing_is_deleted_once_a_rank_has_sealed_unless_nobody_can_publish_it_any_more(
    every_history,
):
    for events, actions, commit in every_history:
        if Event.SEALED in events:
            lost = Event.RECORD_IS_OTHER_FOR_GOOD in events
            aborted = bool({Event.ABORT_DECIDED, Event.NEVER_PUBLISHED} & set(events))
            assert not commit.may_delete_own_data or lost or aborted, events
            assert Action.FAIL_MAY_DELETE not in actions or aborted, events


def test_sealed_data_may_be_deleted_where_nobody_can_publish_it_any_more():
    for history in [
        [Event.SEALED, Event.ABORT_DECIDED],
        [Event.SEALED, Event.COMMIT_DECIDED, Event.NEVER_PUBLISHED],
        [*STARTED, Event.PUBLISH_LOST, Event.RECORD_IS_OTHER_FOR_GOOD],
    ]:
        assert replay(history).may_delete_own_data


def test_a_record_that_was_tried_may_come_unless_the_store_has_refused_it():
    for history, never in [
        ([Event.SEALED, Event.INTENT_GONE], True),
        ([*STARTED, Event.PUBLISH_OK], False),
        ([*STARTED, Event.PUBLISH_ANSWER_LOST], False),
        ([*STARTED, Event.PUBLISH_ANSWER_LOST, Event.RECORD_IS_OTHER], False),
        ([*STARTED, Event.PUBLISH_LOST, Event.RECORD_IS_OTHER_FOR_GOOD], True),
    ]:
        assert replay(history).never_published is never


def test_an_abort_that_was_decided_cannot_follow_a_publish_nor_be_followed_by_one(every_history):
    for events, actions, _ in every_history:
        if (Event.ABORT_DECIDED, Action.FAIL_MAY_DELETE) in zip(events, actions, strict=True):
            assert Action.PUBLISH not in actions, events
            assert Event.COMMIT_DECIDED not in events, events


def test_an_unknown_decision_deletes_nothing_and_reads_the_record():
    commit = replay([Event.SEALED])
    assert commit.feed(Event.DECISION_UNKNOWN) is Action.RESOLVE
    assert commit.feed(Event.RECORD_ABSENT) is Action.FAIL_UNKNOWN
    assert not commit.may_delete_own_data


def test_own_data_may_be_deleted_when_a_save_fails_before_it_has_sealed():
    for failure in FAILURES:
        commit = Commit()
        assert commit.feed(failure) is Action.FAIL_MAY_DELETE
        assert commit.may_delete_own_data


def test_nothing_is_published_after_the_intent_was_gone_or_too_old(every_history):
    for events, actions, _ in every_history:
        for position, event in enumerate(events):
            if event in FAILURES:
                assert Action.PUBLISH not in actions[position:], events


def test_the_record_is_published_at_most_once_and_only_when_sealed(every_history):
    for events, actions, _ in every_history:
        assert actions.count(Action.PUBLISH) <= 1, events
        if Action.PUBLISH in actions:
            assert Event.SEALED in events[: actions.index(Action.PUBLISH)], events


def test_committed_is_reached_only_by_the_stores_yes_or_our_own_record(every_history):
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
def test_who_waits_for_a_publish_never_counts_as_failed_without_looking(state):
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


def test_a_taken_name_may_be_our_own_earlier_try():
    commit = replay(STARTED)
    assert commit.feed(Event.PUBLISH_LOST) is Action.RESOLVE
    assert commit.feed(Event.RECORD_IS_OURS) is Action.DONE


def test_another_savers_record_loses_the_race_and_keeps_the_data():
    commit = replay([*STARTED, Event.PUBLISH_LOST])
    assert commit.feed(Event.RECORD_IS_OTHER) is Action.FAIL_LOST_RACE
    assert commit.state is State.ABORTED
    assert not commit.may_delete_own_data

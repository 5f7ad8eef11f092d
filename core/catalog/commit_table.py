"""The state table of a save, sans-IO.

The engine feeds events and executes the returned actions. The table keeps three promises. A saver
that has sealed keeps the data of its uid, unless another saver has won for good or it is certain
that no rank will publish the save. A save publishes nothing after its intent is found gone, or is
not refreshed for half the grace time. A save reaches COMMITTED only if the store confirms the
publish, the publishing rank reports it, or the record read back is ours.

If several ranks save together, each has its own table, which its round (`core/rounds/round.py`)
feeds. Only rounds feed the last four events.
"""

from __future__ import annotations

from enum import StrEnum

from penstock.core.errors import SaveError


class State(StrEnum):
    """The states of a save."""

    WRITING = "writing"
    SEALED = "sealed"
    PUBLISHING = "publishing"
    AWAITING = "awaiting"  # this rank does not publish, and waits for the rank that does
    COMMITTED = "committed"
    UNKNOWN = "unknown"
    ABORTED = "aborted"


class Event(StrEnum):
    """The events that the engine feeds."""

    SEALED = "sealed"  # every blob of this rank is durable; about to be reported
    FAILED = "failed"  # an error of anything except the publish of the commit record
    ABORT = "abort"  # the user, a timeout or `close` gave up
    INTENT_GONE = "intent gone"
    GRACE_HALF_PASSED = "half the grace time passed without a refresh of the intent"
    PUBLISH_STARTED = "publish started"  # parts and index are durable, the intent was there
    PUBLISH_OK = "publish ok"
    PUBLISH_LOST = "publish lost"  # the name is taken, perhaps by an earlier request of our own
    PUBLISH_ANSWER_LOST = "publish answer lost"  # any error: the record may or may not exist
    RECORD_IS_OURS = "record is ours"
    RECORD_IS_OTHER = "record is another's"
    RECORD_IS_OTHER_FOR_GOOD = (
        "the name was refused as taken, and the record is another's: ours can never be published"
    )
    RECORD_ABSENT = "record absent"  # or unreadable: proves nothing
    COMMIT_DECIDED = "the ranks decided to commit"  # fed on ranks that do not publish
    ABORT_DECIDED = "the ranks decided to abort"
    DECISION_UNKNOWN = "what the ranks decided cannot be learned"
    NEVER_PUBLISHED = "the rank that publishes has not, and never will"


class Action(StrEnum):
    """The actions that the engine executes."""

    PREPARE = "publish part and index, check the intent, then feed PUBLISH_STARTED"
    PUBLISH = "publish the commit record, once"
    AWAIT = "wait for the result of the rank that publishes"
    RESOLVE = "read the commit record and feed the event that it shows"
    DONE = "report success"
    FAIL_MAY_DELETE = "report failure; own data may be deleted"
    FAIL_KEEP = "report failure; leave own data to prune"
    FAIL_LOST_RACE = "report that another saver won; leave own data to prune"
    FAIL_LOST_MAY_DELETE = "report that another saver won; own data may be deleted"
    FAIL_UNKNOWN = "report that the checkpoint may or may not exist; delete nothing"
    NONE = "nothing: too late to matter"


class IllegalEventError(SaveError):
    """An event was fed in a state in which it cannot happen: a bug in the engine."""


_S, _E, _A = State, Event, Action

TABLE: dict[tuple[State, Event], tuple[State, Action]] = {
    (_S.WRITING, _E.SEALED): (_S.SEALED, _A.PREPARE),
    (_S.WRITING, _E.FAILED): (_S.ABORTED, _A.FAIL_MAY_DELETE),
    (_S.WRITING, _E.ABORT): (_S.ABORTED, _A.FAIL_MAY_DELETE),
    (_S.WRITING, _E.INTENT_GONE): (_S.ABORTED, _A.FAIL_MAY_DELETE),
    (_S.WRITING, _E.GRACE_HALF_PASSED): (_S.ABORTED, _A.FAIL_MAY_DELETE),
    (_S.SEALED, _E.PUBLISH_STARTED): (_S.PUBLISHING, _A.PUBLISH),
    (_S.SEALED, _E.FAILED): (_S.ABORTED, _A.FAIL_KEEP),
    (_S.SEALED, _E.ABORT): (_S.ABORTED, _A.FAIL_KEEP),
    (_S.SEALED, _E.INTENT_GONE): (_S.ABORTED, _A.FAIL_KEEP),
    (_S.SEALED, _E.GRACE_HALF_PASSED): (_S.ABORTED, _A.FAIL_KEEP),
    # Once the register of the ranks (`core/rounds`) says abort, no rank publishes, since a publish
    # needs "commit" there. So each rank may delete its data at once, even after it has sealed.
    (_S.WRITING, _E.ABORT_DECIDED): (_S.ABORTED, _A.FAIL_MAY_DELETE),
    (_S.SEALED, _E.ABORT_DECIDED): (_S.ABORTED, _A.FAIL_MAY_DELETE),
    (_S.SEALED, _E.COMMIT_DECIDED): (_S.AWAITING, _A.AWAIT),
    (_S.SEALED, _E.DECISION_UNKNOWN): (_S.UNKNOWN, _A.RESOLVE),
    (_S.AWAITING, _E.NEVER_PUBLISHED): (_S.ABORTED, _A.FAIL_MAY_DELETE),
    (_S.AWAITING, _E.PUBLISH_OK): (_S.COMMITTED, _A.DONE),
    (_S.AWAITING, _E.PUBLISH_ANSWER_LOST): (_S.UNKNOWN, _A.RESOLVE),
    (_S.AWAITING, _E.FAILED): (_S.UNKNOWN, _A.RESOLVE),
    (_S.AWAITING, _E.ABORT): (_S.AWAITING, _A.NONE),
    (_S.AWAITING, _E.INTENT_GONE): (_S.AWAITING, _A.NONE),
    (_S.AWAITING, _E.GRACE_HALF_PASSED): (_S.AWAITING, _A.NONE),
    (_S.PUBLISHING, _E.PUBLISH_OK): (_S.COMMITTED, _A.DONE),
    (_S.PUBLISHING, _E.PUBLISH_LOST): (_S.UNKNOWN, _A.RESOLVE),
    (_S.PUBLISHING, _E.PUBLISH_ANSWER_LOST): (_S.UNKNOWN, _A.RESOLVE),
    (_S.PUBLISHING, _E.FAILED): (_S.UNKNOWN, _A.RESOLVE),
    # The record may be in flight, and store calls cannot be cancelled: an abort here could report
    # failure of a checkpoint that exists a moment later.
    (_S.PUBLISHING, _E.ABORT): (_S.PUBLISHING, _A.NONE),
    (_S.PUBLISHING, _E.INTENT_GONE): (_S.PUBLISHING, _A.NONE),
    (_S.PUBLISHING, _E.GRACE_HALF_PASSED): (_S.PUBLISHING, _A.NONE),
    (_S.UNKNOWN, _E.RECORD_IS_OURS): (_S.COMMITTED, _A.DONE),
    (_S.UNKNOWN, _E.RECORD_IS_OTHER): (_S.ABORTED, _A.FAIL_LOST_RACE),
    (_S.UNKNOWN, _E.RECORD_IS_OTHER_FOR_GOOD): (_S.ABORTED, _A.FAIL_LOST_MAY_DELETE),
    (_S.UNKNOWN, _E.RECORD_ABSENT): (_S.UNKNOWN, _A.FAIL_UNKNOWN),
    (_S.UNKNOWN, _E.FAILED): (_S.UNKNOWN, _A.FAIL_UNKNOWN),
    (_S.UNKNOWN, _E.ABORT): (_S.UNKNOWN, _A.FAIL_UNKNOWN),
    (_S.UNKNOWN, _E.INTENT_GONE): (_S.UNKNOWN, _A.NONE),
    (_S.UNKNOWN, _E.GRACE_HALF_PASSED): (_S.UNKNOWN, _A.NONE),
    (_S.COMMITTED, _E.FAILED): (_S.COMMITTED, _A.NONE),
    (_S.COMMITTED, _E.ABORT): (_S.COMMITTED, _A.NONE),
    (_S.COMMITTED, _E.INTENT_GONE): (_S.COMMITTED, _A.NONE),
    (_S.COMMITTED, _E.GRACE_HALF_PASSED): (_S.COMMITTED, _A.NONE),
    (_S.ABORTED, _E.FAILED): (_S.ABORTED, _A.NONE),
    (_S.ABORTED, _E.ABORT_DECIDED): (_S.ABORTED, _A.NONE),
    (_S.ABORTED, _E.ABORT): (_S.ABORTED, _A.NONE),
    (_S.ABORTED, _E.INTENT_GONE): (_S.ABORTED, _A.NONE),
    (_S.ABORTED, _E.GRACE_HALF_PASSED): (_S.ABORTED, _A.NONE),
}
"""(state, event) -> (next state, action); other pairs cannot happen."""


class Commit:
    """The state of one save. Not thread-safe: the engine feeds it under a lock."""

    __slots__ = ("_may_delete", "_state", "_tried")

    def __init__(self) -> None:
        self._state = State.WRITING
        self._tried = False
        self._may_delete = False

    @property
    def state(self) -> State:
        """The state of the save."""
        return self._state

    @property
    def may_delete_own_data(self) -> bool:
        """Whether the saver may delete its own data.

        It may only if it failed before it sealed, another saver has won for good, or it is certain
        that no rank will publish the save.
        """
        return self._may_delete

    @property
    def never_published(self) -> bool:
        """Whether no commit record of this save exists, and none can appear without a new publish.

        After a publish without a reply, the record may still appear, even after another saver's
        record of that name is deleted. That is ruled out only once the store has refused the name
        as taken. Until then other ranks keep their data.
        """
        return self._may_delete or not self._tried

    def feed(self, event: Event) -> Action:
        """Move to the next state for `event`, and return the action to execute.

        Raises:
            IllegalEventError: The event cannot happen in this state; nothing changed.
        """
        try:
            state, action = TABLE[self._state, event]
        except KeyError:
            msg = f"a bug: a save that is {self._state} received an impossible event: {event}"
            raise IllegalEventError(msg) from None
        self._state = state
        self._tried |= action is Action.PUBLISH
        self._may_delete |= action in {Action.FAIL_MAY_DELETE, Action.FAIL_LOST_MAY_DELETE}
        return action

"""One rank's round with all other ranks, sans-IO.

Two sides drive a round. The *engine*, which is the save or the restore of this rank, takes steps
from `steps` and reports their results. The *session* carries out what `operations` yields: posts,
reads, decisions and waits. Neither side waits for the other. Tests run the same code on a virtual
clock.

Not thread-safe: `session` holds a lock, as the engine does for its table of a save.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.core.catalog.commit_table import Event, IllegalEventError
from penstock.core.concurrency.timing import Timing
from penstock.core.errors import FormatError, RankError
from penstock.core.rounds.posts import (
    At,
    GoPost,
    Kind,
    Outbox,
    Result,
    ResultPost,
    SlotPost,
    Verdict,
    decode,
    encode,
    end_key,
    ended,
    go_key,
    result_key,
    slot_key,
)
from penstock.core.rounds.standstill import (
    BEATS,
    LOOKS,
    MOST_COUNTED,
    ONE_ORDER,
    ONE_RANK,
    CountedLooks,
    OtherRanks,
)
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

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from penstock.core.catalog.commit_table import Commit
    from penstock.core.errors import CoordinationError
    from penstock.core.rounds.table import RoundTable

# While rank 0 waits for the last parts, each pause is a tenth of the time waited so far, but at
# least four times as long as the last poll took. So rank 0 notices the last part soon, and does not
# overload the store.
_WAITED_SHARE = 0.1
_LOOK_SHARE = 4


@dataclass(frozen=True, slots=True)
class Post:
    """Post a value."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Read:
    """Read values."""

    keys: Sequence[str]


@dataclass(frozen=True, slots=True)
class Decide:
    """Decide a register."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Wait until a key has a value."""

    key: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Rest:
    """Wait until the engine reports an event, or until the time has passed."""

    timeout_s: float


Operation: TypeAlias = Post | Read | Decide | WaitFor | Rest


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of an operation.

    Attributes:
        now_s: The monotonic clock after the operation.
        value: The values read (a list) or decided (bytes).
        error: The error after which the outcome is unknown; None if the store has answered.
    """

    now_s: float
    value: Any = None
    error: CoordinationError | None = None


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of this rank among the others.

    Attributes:
        rank: The number of this rank; rank 0 leads.
        world_size: The number of ranks.
        host: The name of this host.
        members: The numbers of these ranks in the job, in order; empty if they are the whole job.
    """

    rank: int
    world_size: int
    host: str = ""
    members: tuple[int, ...] = ()


class _Pace:
    """Schedules polls and heartbeats of a rank, and measures how long the job's store is silent.

    Args:
        looks: Counts the time in which this rank polls.
        world_size: The number of ranks that poll one store.
        limit_s: The time after which a store without an answer counts as gone.
        called_s: When this rank was called, on the monotonic clock. The time since then counts as
            if this rank had polled; None: time counts from the first poll.
        timing: How often a rank polls.
    """

    def __init__(
        self,
        looks: CountedLooks,
        world_size: int,
        limit_s: float,
        called_s: float | None,
        timing: Timing,
    ) -> None:
        self.looks = looks
        look_s = timing.rank_look_s + world_size * timing.rank_share_s
        self.look_s = min(look_s, timing.rank_look_most_s, limit_s / LOOKS)
        """The seconds between two polls of the others while this rank has work to do."""
        self.least_s = timing.rank_look_first_s
        """The shortest pause of a rank that only polls."""
        self.now_s = self.next_beat_s = self.next_slots_s = 0.0
        self.sealed_s = 0.0
        """When this rank sealed, in counted seconds."""
        self.took_s = 0.0
        """The seconds that the last poll took."""
        self.failed = False
        """Whether a call has failed since the last pause."""
        self._limit_s = limit_s
        self._called_s = called_s
        self._heard_s = looks.counted_s

    def begin(self, now_s: float) -> None:
        """Start at `now_s`; a heartbeat and a poll are due at once."""
        self.now_s = self.next_beat_s = self.next_slots_s = now_s
        if self._called_s is not None:
            self.looks.look(min(self._called_s, now_s))

    def answered(self, answer: Answer, *, hears: bool = True) -> Answer:
        """Record an answer. With `hears`, an answer without an error shows that the store works."""
        self.now_s = answer.now_s
        self.looks.look(self.now_s)
        self.failed |= answer.error is not None
        if answer.error is None and hears:
            self._heard_s = self.looks.counted_s
        return answer

    @property
    def is_silent(self) -> bool:
        """Whether the store has been silent for the whole limit."""
        return self.silence_left_s <= 0.0

    @property
    def silence_left_s(self) -> float:
        """The seconds until the store has been silent for the whole limit."""
        return self._heard_s + self._limit_s - self.looks.counted_s


class Round:
    """A round of a save or a restore on one rank. Subclasses fix the kind and the tables."""

    kind: Kind
    tables: tuple[RoundTable, RoundTable]
    """The tables of rank 0 and of the others."""

    def __init__(
        self,
        place: RankPlace,
        number: int,
        *,
        timeout_s: float,
        commit: Commit | None = None,
        expects: Callable[[Mapping[str, Any]], str] = lambda _: "",
        called_s: float | None = None,
        timing: Timing | None = None,
    ) -> None:
        """Prepare the round; nothing is posted before `operations` runs.

        Args:
            place: This rank.
            number: The number of the round: the same on all ranks, and increasing.
            timeout_s: A rank without progress for this long counts as stuck.
            commit: The table of this rank's save, which the round feeds; None for a restore.
            expects: Returns why this rank cannot accept rank 0's terms; empty if it can.
            called_s: When this rank was called to save or restore, on the monotonic clock; None:
                when `operations` begins. The wait for late ranks starts then. This rank's own work
                since then, such as the cleanup after the previous save, counts for at most a
                quarter of the timeout.
            timing: How often this rank polls; None: the default.
        """
        self.place = place
        self.number = number
        self.timeout_s = timeout_s
        self.phase = Phase.WAITING
        self.steps: deque[Step] = deque()
        self.terms: Mapping[str, Any] = {}
        self.stop = ""
        self.verdict: Verdict | None = None
        self.result: ResultPost | None = None
        looks = CountedLooks(timeout_s * MOST_COUNTED)
        self.others = OtherRanks(place, self.kind, number, looks, timeout_s)
        """The posts of the ranks that this rank watches."""
        self.outbox = Outbox(place.rank, SlotPost(number, self.kind, At.HERE, host=place.host))
        """The waiting posts of this rank."""
        self._table = self.tables[min(place.rank, 1)]
        self._expects = expects
        self._commit = commit
        self._gathers = False  # rank 0 waits for all before it says go
        self._blame: Verdict | None = None
        self._pace = _Pace(looks, place.world_size, timeout_s, called_s, timing or Timing())

    # -- the side of the engine ----------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the round is over on this rank."""
        return self.phase in ENDS

    def arrive(self, arrival: Mapping[str, Any]) -> None:
        """Set the data of the first post; rank 0 then waits for the other ranks' first posts.

        Called before `operations` runs.

        Raises:
            FormatError: `arrival` is too large for a post; nothing has changed.
        """
        self.outbox.slot = self.outbox.fitting(At.HERE, arrival)
        self._gathers = self._leads

    def go(self, terms: Mapping[str, Any]) -> None:
        """Order all ranks to begin under `terms`; only on rank 0.

        Raises:
            FormatError: The terms are too large for a post; nothing has changed.
        """
        if self.phase is Phase.WAITING:  # else the round is already given up
            self.outbox.put(go_key(self.number), GoPost(self.kind, terms))
            self.terms = terms
        self._happen(Happening.GO)

    def refuse(self, reason: str, terms: Mapping[str, Any] | None = None) -> None:
        """Order all ranks to stop because rank 0 is busy or cannot begin."""
        if self.phase is Phase.WAITING:
            self.stop, self.terms = reason, terms or {}
            self.outbox.put(go_key(self.number), GoPost(self.kind, self.terms, stop=reason))
        self._happen(Happening.STOP)

    def moved(self, done: int = 0, total: int = 0) -> None:
        """Record progress; a rank that does not call this for `timeout_s` counts as stuck."""
        self.outbox.slot = replace(self.outbox.slot, done=done, total=total)
        self.outbox.moved()

    def seal(self, part: Mapping[str, Any]) -> None:
        """Report that this rank's contribution is durable; `part` goes to rank 0.

        Raises:
            FormatError: `part` is too large for a post; nothing has changed.
        """
        sealed = self.outbox.fitting(At.SEALED, part)
        if self.phase is Phase.WORKING:
            self.outbox.slot = sealed
            self._pace.sealed_s = self._pace.looks.counted_s
        self._happen(Happening.SEALED)

    def merged(self) -> None:
        """Report that the merged parts cover everything; only on rank 0."""
        self._happen(Happening.MERGED)

    def fail(self, cause: str) -> None:
        """Give up; the errors of all other ranks name this rank and `cause`."""
        self._accuse(self.place.rank, self.place.host, cause)

    # -- the side of the session -----------------------------------------------------------------

    def operations(self, now_s: float) -> Generator[Operation, Answer, None]:
        """Yield the operations on the job's store, one at a time, until the round is over."""
        pace = self._pace
        pace.begin(now_s)
        while True:
            pace.looks.look(pace.now_s)
            began_s, pace.failed = pace.now_s, False
            yield from self._post_due()
            if self.over:
                if self.outbox.is_empty or pace.is_silent:
                    return
                pace.now_s = (yield Rest(pace.look_s)).now_s
                continue
            before = self.phase
            if not pace.is_silent:  # else a further call may hang for long, too
                yield from self._ask() if before in _ASKING else self._look()
            if pace.is_silent and (self.phase, Happening.REGISTER_LOST) in self._table:
                self._happen(Happening.REGISTER_LOST)
            if self.phase is before:
                yield from self._wait(began_s)

    def error(self, what: str, stays: str = "", *, own: bool = False) -> RankError | None:
        """Return the error of an abort; None without one.

        The rank at fault has an error of its own, so it also gets None unless `own` is set.

        Args:
            what: The failure, such as "step 300 was not saved".
            stays: A sentence about the latest checkpoint; may be empty.
            own: Whether the rank at fault gets the error too.
        """
        verdict = self.verdict
        if verdict is None or verdict.commit or (verdict.rank == self.place.rank and not own):
            return None
        return error_of(verdict, what, stays)

    # -- within ----------------------------------------------------------------------------------

    def _wait(self, began_s: float) -> Generator[Operation, Answer, None]:
        """Wait for the next poll; the last poll began at `began_s`."""
        pace = self._pace
        if not pace.failed and self.outbox.is_empty:
            answer = yield self._pause()
            pace.now_s = answer.now_s
            pace.failed = answer.error is not None
        left_s = began_s + pace.look_s - pace.now_s
        if not pace.is_silent:
            left_s = min(left_s, pace.silence_left_s)
        if pace.failed and left_s > 0.0:
            # A store that refuses calls at once would otherwise be called without a pause.
            pace.now_s = (yield Rest(left_s)).now_s

    def _post_due(self) -> Generator[Operation, Answer, None]:
        pace = self._pace
        if pace.now_s >= pace.next_beat_s:
            self.outbox.put_slot()
            pace.next_beat_s = pace.now_s + self.timeout_s / BEATS
        for key, value in self.outbox.waiting:
            # If this rank also reads or asks, an accepted post is no sign of life: the store may
            # accept posts and leave reads unanswered.
            listens = self.phase in _ASKING or bool(self._keys(slots=False))
            answer = pace.answered((yield Post(key, value)), hears=not listens)
            if answer.error is None:
                self.outbox.taken(key, value)

    def _ask(self) -> Generator[Operation, Answer, None]:
        wished = Decide(end_key(self.number), encode(self._wish()))
        answer = self._pace.answered((yield wished))
        if answer.error is None and not self.over:
            self._hear_verdict(answer.value)

    def _look(self) -> Generator[Operation, Answer, None]:
        pace, others = self._pace, self.others
        due = pace.now_s >= pace.next_slots_s or self._waits_for_others
        slots = self._leads and (due or others.left_s(others.pending) <= 0.0)
        keys = self._keys(slots=slots)
        if keys:
            began_s = pace.now_s
            answer = pace.answered((yield Read(keys)))
            pace.took_s = pace.now_s - began_s
            if answer.error is None and not self.over:
                if self._waits_for_others:  # this rank only polls, so each poll is progress
                    self.outbox.moved()
                self._hear(keys, answer.value)
        if slots:
            pace.next_slots_s = pace.now_s + self.timeout_s / LOOKS

    @property
    def _leads(self) -> bool:
        return self.place.rank == 0

    @property
    def _waits_for_others(self) -> bool:
        if not self._leads:
            return self.phase is Phase.WAITING
        gathers = self._gathers and not self.others.all_here
        return self.phase is Phase.SEALED or (self.phase is Phase.WAITING and gathers)

    def _pause(self) -> Operation:
        pace = self._pace
        pause_s = max(0.0, min(pace.look_s, pace.next_beat_s - pace.now_s))
        if watched := self._watched():
            pause_s = min(pause_s, max(self.others.left_s(watched), pace.least_s))
        if self._leads:
            if self._waits_for_others:
                waited_s = pace.looks.counted_s - pace.sealed_s
                least_s = max(pace.least_s, _LOOK_SHARE * pace.took_s, _WAITED_SHARE * waited_s)
                pause_s = min(pause_s, least_s)
            return Rest(pause_s)
        if self.phase is Phase.WAITING:
            return WaitFor(go_key(self.number), pause_s)
        if self.phase is Phase.SEALED:
            return WaitFor(end_key(self.number), pause_s)
        if self.phase is Phase.PUBLISHING:
            return WaitFor(result_key(self.number), pause_s)
        return Rest(pause_s)

    def _keys(self, *, slots: bool) -> list[str]:
        number = self.number
        if self._leads:
            if self.phase not in _OPEN:
                return []
            watched = self._watched()
            if not slots:  # a rank that has not arrived may post that its checkpointer is closed
                watched = [rank for rank in watched if rank not in self.others.arrived]
            return [end_key(number), *map(slot_key, watched)]
        keys = {
            Phase.WAITING: [end_key(number), go_key(number)],
            Phase.WORKING: [end_key(number)],
            Phase.SEALED: [end_key(number)],
            Phase.PUBLISHING: [result_key(number)],
        }.get(self.phase, [])
        return [*keys, slot_key(0)] if keys else []

    def _watched(self) -> Sequence[int]:
        if self._leads:
            return sorted(self.others.pending) if self.phase in _OPEN - {Phase.MERGING} else ()
        return (0,) if self._keys(slots=False) else ()

    def _wish(self) -> Verdict:
        if self.phase is Phase.DECIDING:
            return Verdict(commit=True)
        assert self._blame is not None
        return self._blame

    def _hear(self, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        posts = dict(zip(keys, values, strict=True))
        # The register first: it is final, whatever else was posted.
        end = posts.pop(end_key(self.number), None)
        if end is not None:
            self._hear_verdict(end)
            return
        go = posts.pop(go_key(self.number), None)
        result = posts.pop(result_key(self.number), None)
        try:
            if go is not None:
                self._hear_go(decode(GoPost, go))
            if result is not None:
                self.result = decode(ResultPost, result)
                self._happen(_OF_RESULT[self.result.result])
            for rank in sorted(self.others.pending) if self._leads else (0,):
                if self.over or (data := posts.get(slot_key(rank), b"")) == b"":
                    continue
                if (lost := self.others.hear(rank, data)) is not None:
                    self._leader_or_rank_lost(rank, lost)
        except FormatError as error:
            self._leader_or_rank_lost(0, f"posted unreadable data: {error}")
        if self._leads and self.phase is Phase.SEALED and not self.others.pending:
            self._happen(Happening.ALL_SEALED)

    def _hear_verdict(self, data: bytes) -> None:
        try:
            self.verdict = decode(Verdict, data)
        except FormatError:  # an unreadable register decides nothing, like an unreachable one
            if (self.phase, Happening.REGISTER_LOST) in self._table:
                self._happen(Happening.REGISTER_LOST)
            return
        commit = self.verdict.commit
        self._happen(Happening.COMMIT_DECIDED if commit else Happening.ABORT_DECIDED)

    def _hear_go(self, post: GoPost) -> None:
        if post.kind != self.kind:
            both = f"wants to {self.kind} while rank 0 wants to {post.kind}"
            self.fail(f"{both}: {ONE_ORDER}; {ONE_RANK}")
        elif post.stop:
            self.stop, self.terms = post.stop, post.terms
            self._happen(Happening.STOP)
        elif reason := self._expects(post.terms):
            self.fail(reason)
        else:
            self.terms = post.terms
            self._happen(Happening.GO)

    def _leader_or_rank_lost(self, rank: int, cause: str) -> None:
        if self.phase is Phase.PUBLISHING:
            self._happen(Happening.LEADER_LOST)
            return
        self._accuse(rank, self.others.host_of(rank), cause)

    def _accuse(self, rank: int, host: str, cause: str) -> None:
        if self._blame is None:
            self._blame = Verdict(commit=False, rank=rank, host=host, cause=cause)
        self._happen(Happening.FAILED)

    def _happen(self, happening: Happening) -> None:
        key = self.phase, happening
        if key not in self._table:
            if key in TOO_LATE:
                return
            msg = f"a round that is {self.phase} on rank {self.place.rank} cannot see: {happening}"
            raise IllegalEventError(msg)
        self._tell(happening)
        self.phase, step = self._table[key]
        if self.phase is not Phase.WAITING and self.outbox.slot.at is At.HERE:
            self.outbox.slot = replace(self.outbox.slot, at=At.WORKING, part={})
        if step in {Step.WORK, Step.POST_SEALED}:
            self.outbox.put_slot()
        self.steps.append(step)

    def _tell(self, happening: Happening) -> None:
        """Feed the save's table before this round continues."""


class RestoreRound(Round):
    """The round of a restore: all ranks restore one checkpoint, or all raise.

    A rank that returns knows that every rank has restored rank 0's choice. A rank that cannot learn
    the decision raises, though the others may have returned: no protocol can avoid that. Such a
    rank ends in a separate phase (`Phase.UNKNOWN`).
    """

    kind: Kind = "restore"
    tables = RESTORE_RANK_0, RESTORE_OTHERS


class SaveRound(Round):
    """The round of a save: all ranks commit one checkpoint, or none does.

    Feeds the table of this rank's save (`Commit`), which alone decides what may be deleted. On rank
    0 the publisher feeds that table from the publish on.
    """

    kind: Kind = "save"
    tables = SAVE_RANK_0, SAVE_OTHERS

    def published(self, result: Result, cause: str = "", totals: Sequence[int] = ()) -> None:
        """Report the result of the publish; only on rank 0."""
        self.result = ResultPost(result, cause, tuple(totals))
        self.outbox.put(result_key(self.number), self.result)
        self._happen(_OF_RESULT[result])

    def resolved(self, record: Event) -> None:
        """Report whether the commit record in the root is ours, another's, or unreadable."""
        self._happen(_OF_RECORD[record])

    def _tell(self, happening: Happening) -> None:
        event = _FEEDS.get(happening)
        if happening is Happening.REGISTER_LOST:
            event = self._of_lost_register()
            if self._leads:  # its commit request may land late; the others then wait for a result
                never = ResultPost(Result.NEVER, "rank 0 could not reach the register")
                self.outbox.put(result_key(self.number), never)
        elif self._leads and happening not in _FED_ON_RANK_0:
            event = None
        if event is not None:
            assert self._commit is not None
            self._commit.feed(event)

    def _of_lost_register(self) -> Event:
        if self.phase is Phase.PUBLISHING:
            return Event.PUBLISH_ANSWER_LOST
        if self.outbox.slot.at is At.SEALED and not self._leads:
            return Event.DECISION_UNKNOWN
        return Event.FAILED


def error_of(verdict: Verdict, what: str, stays: str) -> RankError:
    """Return the error of an abort, which names the rank at fault."""
    who = f"rank {verdict.rank}" + (f" on {verdict.host}" if verdict.host else "")
    msg = f"{ended(f'{what}: {who} {verdict.cause}')} {stays}".rstrip()
    return RankError(msg, verdict.rank, verdict.host, verdict.cause)


_ASKING = frozenset({Phase.DECIDING, Phase.GIVING_UP, Phase.ABORTING})
_OPEN = frozenset({Phase.WAITING, Phase.WORKING, Phase.SEALED, Phase.MERGING})
_OF_RESULT = {
    Result.COMMITTED: Happening.COMMITTED,
    Result.NEVER: Happening.NEVER,
    Result.UNKNOWN: Happening.UNSURE,
}
_OF_RECORD = {
    Event.RECORD_IS_OURS: Happening.RECORD_IS_OURS,
    Event.RECORD_IS_OTHER: Happening.RECORD_IS_OTHER,
    Event.RECORD_ABSENT: Happening.RECORD_ABSENT,
}
_FEEDS = {
    Happening.STOP: Event.ABORT,
    Happening.SEALED: Event.SEALED,
    Happening.COMMIT_DECIDED: Event.COMMIT_DECIDED,
    Happening.ABORT_DECIDED: Event.ABORT_DECIDED,
    Happening.COMMITTED: Event.PUBLISH_OK,
    Happening.NEVER: Event.NEVER_PUBLISHED,
    Happening.UNSURE: Event.PUBLISH_ANSWER_LOST,
    Happening.LEADER_LOST: Event.PUBLISH_ANSWER_LOST,
    Happening.RECORD_IS_OURS: Event.RECORD_IS_OURS,
    Happening.RECORD_IS_OTHER: Event.RECORD_IS_OTHER,
    Happening.RECORD_ABSENT: Event.RECORD_ABSENT,
}
_FED_ON_RANK_0 = frozenset({Happening.STOP, Happening.SEALED, Happening.ABORT_DECIDED})

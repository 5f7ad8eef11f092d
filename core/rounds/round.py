"""One rank's way through a round that all ranks go together, sans-IO.

A round is driven from two sides. The *engine* (the save or the restore of this rank) takes steps
out of `steps` and tells what came of them. The *session* carries out what `operations` yields:
posts, reads, decisions and waits. Neither side ever waits for the other. Tests run the same code on
a virtual clock.

Nothing here is thread-safe: `session` holds a lock, as the engine does for its table of a save.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.catalog.commit_table import IllegalEventError
from penstock.core.errors import FormatError, RankError
from penstock.core.limits import MAX_INT
from penstock.core.rounds.operations import Answer, Decide, Operation, Post, Read, Rest, WaitFor
from penstock.core.rounds.posts import (
    At,
    GoPost,
    Kind,
    Result,
    ResultPost,
    SlotPost,
    Verdict,
    decode_go,
    decode_result,
    decode_slot,
    decode_verdict,
    encode_go,
    encode_slot,
    encode_verdict,
    end_key,
    ended,
    go_key,
    result_key,
    slot_key,
)
from penstock.core.rounds.standstill import BEATS, LOOKS, MOST_COUNTED, CountedLooks, Standstill
from penstock.core.rounds.table import (
    ENDS,
    TOO_LATE,
    Happening,
    Phase,
    Step,
)
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from penstock.core.rounds.table import RoundTable

# What each rank asks of the store of the job while it writes; less often where there are many,
# since the store has one thread. Always below 1 s, the time in which an error is told.
_LOOK_S = 0.25
_LOOK_S_PER_RANK = 1 / 20_000
_MOST_LOOK_S = 0.8
_LEAST_LOOK_S = 0.02
# Rank 0, when it waits for the last parts, pauses for a tenth of what it has waited by then, and
# four times as long as the last look took: it notices the last part soon, and does not poll hard.
_WAITED_SHARE = 0.1
_LOOK_SHARE = 4

# Short: a cause is cut at 300 bytes.
_ONE_ORDER = (
    "all ranks have to call save, restore and load alike, of several checkpointers in one order"
)
_ONE_RANK = "for what stands behind `if rank == 0:` use a checkpointer with ranks='alone'"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """This rank among the others.

    Attributes:
        rank: Its number; 0 leads.
        world_size: How many there are.
        host: The name of its machine.
        members: The numbers of all of them in the job, in order, where others of the job are left
            out; empty: they are all of it.
    """

    rank: int
    world_size: int
    host: str = ""
    members: tuple[int, ...] = ()


class Round:
    """A round of a save or a restore on one rank; see the subclasses."""

    kind: Kind = "save"

    def __init__(
        self,
        place: RankPlace,
        number: int,
        *,
        table: RoundTable,
        timeout_s: float,
        expects: Callable[[Mapping[str, Any]], str] = lambda _: "",
        called_s: float | None = None,
    ) -> None:
        """Prepare the round; nothing is posted before `operations` runs.

        Args:
            place: This rank.
            number: The number of the round: the same on all ranks, and higher in each.
            table: What follows what.
            timeout_s: A rank that makes no progress for this long counts as standing still.
            expects: Returns why this rank cannot go on under the terms of rank 0; empty: it can.
            called_s: When this rank was called to save or to restore, on the monotonic clock; None:
                now. Who does not come is waited for from then on: of what this rank has done since
                then, the clean-up behind the save before say, a quarter of the time-out counts.
        """
        self.place = place
        self.number = number
        self.timeout_s = timeout_s
        self.phase = Phase.WAITING
        self.steps: deque[Step] = deque()
        self.terms: Mapping[str, Any] = {}
        self.arrived: dict[int, Mapping[str, Any]] = {}
        """On rank 0: what the others have posted with `arrive`, by rank."""
        self.parts: dict[int, Mapping[str, Any]] = {}
        self.stop = ""
        self.verdict: Verdict | None = None
        self.result: ResultPost | None = None
        self.posts = 0
        self._table = table
        self._expects = expects
        self._moves = 0
        self._done = (0, 0)
        self._part: Mapping[str, Any] = {}
        self._arrival: Mapping[str, Any] | None = None
        self._sealed = False
        self._sealed_s = 0.0
        self._blame: Verdict | None = None
        self._outbox: dict[str, bytes] = {}
        self._looks = CountedLooks(timeout_s * MOST_COUNTED)
        self._called_s = called_s
        others = range(1, place.world_size) if self._leads else range(1)
        self._still = Standstill(self._looks, others, timeout_s)
        self._slots: dict[int, SlotPost] = {}
        self._slot_bytes: dict[int, bytes] = {}
        self._pending = set(others) if self._leads else set()
        self._heard_s = self._looks.counted_s
        self._now_s = self._next_beat_s = self._next_slots_s = 0.0
        self._took_s = 0.0
        self._failed = False  # a call, since the last pause

    # -- the side of the engine ----------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the round is over on this rank."""
        return self.phase in ENDS

    @property
    def all_here(self) -> bool:
        """Whether rank 0 has heard of every other rank in this round; rank 0 alone."""
        return len(self.arrived) == self.place.world_size - 1

    @property
    def still(self) -> set[int]:
        """The ranks that rank 0 waits for, and that have stood still for half of the time-out.

        Where one host dies with several ranks, the verdict names one of them.
        """
        return {r for r in self._pending if self._still.is_over(r, share=1 / 2)}

    def host_of(self, rank: int) -> str:
        """Return the name of the host of a watched rank; empty: it was not heard of."""
        post = self._slots.get(rank)
        return "" if post is None else post.host

    def arrive(self, arrival: Mapping[str, Any]) -> None:
        """Take what is posted with the first post; rank 0 then waits for that of all others.

        To be called before `operations` runs.

        Raises:
            FormatError: `arrival` is larger than a post may be; nothing has changed.
        """
        most, host = MAX_INT, self.place.host
        encode_slot(SlotPost(self.number, self.kind, At.HERE, most, host, most, most, arrival))
        self._arrival = arrival

    def go(self, terms: Mapping[str, Any]) -> None:
        """Tell all ranks to begin, under `terms`; rank 0 alone.

        Raises:
            FormatError: The terms are larger than a post may be; nothing has changed.
        """
        data = encode_go(GoPost(self.kind, terms))
        if self.phase is Phase.WAITING:  # else it is given up already
            self.terms = terms
            self._outbox[go_key(self.number)] = data
        self._happen(Happening.GO)

    def refuse(self, reason: str, terms: Mapping[str, Any] | None = None) -> None:
        """Tell all ranks that nothing is done, since rank 0 is busy or cannot begin."""
        if self.phase is Phase.WAITING:
            self.stop, self.terms = reason, terms or {}
            post = GoPost(self.kind, self.terms, stop=reason)
            self._outbox[go_key(self.number)] = encode_go(post)
        self._happen(Happening.STOP)

    def moved(self, done: int = 0, total: int = 0) -> None:
        """Note progress; whoever does not call it for `timeout_s` counts as standing still."""
        self._moves += 1
        self._done = done, total

    def seal(self, part: Mapping[str, Any]) -> None:
        """Tell that what this rank contributes is durable; `part` goes to rank 0.

        Raises:
            FormatError: `part` is larger than a post may be; nothing has changed.
        """
        most, host = MAX_INT, self.place.host  # counts that a later beat may have
        encode_slot(SlotPost(self.number, self.kind, At.SEALED, most, host, most, most, part))
        if self.phase is Phase.WORKING:
            self._part = part
            self._sealed = True
            self._sealed_s = self._looks.counted_s
        self._happen(Happening.SEALED)

    def merged(self) -> None:
        """Tell that the parts are whole; rank 0 alone."""
        self._happen(Happening.MERGED)

    def fail(self, cause: str) -> None:
        """Give up; all other ranks will name this one, with `cause`."""
        self._accuse(self.place.rank, self.place.host, cause)

    # -- the side of the session -----------------------------------------------------------------

    def operations(self, now_s: float) -> Generator[Operation, Answer, None]:
        """Yield what is to be done in the store of the job, one after the other, to the end."""
        self._now_s = self._next_beat_s = self._next_slots_s = now_s
        if self._called_s is not None:
            self._looks.look(min(self._called_s, now_s))
        while True:
            self._looks.look(self._now_s)
            began_s, self._failed = self._now_s, False
            yield from self._post_due()
            if self.over:
                if not self._outbox or self._is_silent():
                    return
                self._now_s = (yield Rest(self._look_s())).now_s
                continue
            before = self.phase
            if not self._is_silent():  # a call that hangs takes long
                yield from self._ask() if before in _ASKING else self._look()
            if self._is_silent() and (self.phase, Happening.REGISTER_LOST) in self._table:
                self._happen(Happening.REGISTER_LOST)
            if self.phase is before:
                yield from self._wait(began_s)

    def error(self, what: str, stays: str = "", *, own: bool = False) -> RankError | None:
        """Return the error of an abort for the ranks that are not its cause; None on that one.

        Args:
            what: What was not done: "step 300 was not saved".
            stays: What is the latest checkpoint now; empty: nothing is said of it.
            own: Whether the rank that is the cause gets it, too.
        """
        verdict = self.verdict
        if verdict is None or verdict.commit or (verdict.rank == self.place.rank and not own):
            return None
        who = f"rank {verdict.rank}" + (f" on {verdict.host}" if verdict.host else "")
        msg = f"{ended(f'{what}: {who} {verdict.cause}')} {stays}".rstrip()
        return RankError(msg, verdict.rank, verdict.host, verdict.cause)

    # -- within ----------------------------------------------------------------------------------

    def _wait(self, began_s: float) -> Generator[Operation, Answer, None]:
        """Wait for the next look; the last one began at `began_s`."""
        if not self._failed and not self._outbox:
            answer = yield self._pause()
            self._now_s = answer.now_s
            self._failed = answer.error is not None
        left_s = began_s + self._look_s() - self._now_s
        if not self._is_silent():
            left_s = min(left_s, self._silence_left_s())
        if self._failed and left_s > 0.0:
            # A store that refuses calls at once would otherwise be called without a pause.
            self._now_s = (yield Rest(left_s)).now_s

    def _post_due(self) -> Generator[Operation, Answer, None]:
        if self._now_s >= self._next_beat_s:
            self._outbox[slot_key(self.place.rank)] = self._slot()
            self._next_beat_s = self._now_s + self.timeout_s / BEATS
        for key, value in list(self._outbox.items()):
            answer = self._answered((yield Post(key, value)), hears=not self._listens)
            self.posts += 1
            if answer.error is None and self._outbox.get(key) is value:
                del self._outbox[key]

    def _ask(self) -> Generator[Operation, Answer, None]:
        answer = self._answered((yield Decide(end_key(self.number), self._wish())))
        if answer.error is None and not self.over:
            self._hear_verdict(answer.value)

    def _look(self) -> Generator[Operation, Answer, None]:
        due = self._now_s >= self._next_slots_s or self._waits_for_others
        slots = self._leads and (due or self._still.left_s(self._pending) <= 0.0)
        keys = self._keys(slots=slots)
        if keys:
            began_s = self._now_s
            answer = self._answered((yield Read(keys)))
            self._took_s = self._now_s - began_s
            if answer.error is None and not self.over:
                if self._waits_for_others:
                    self._moves += 1  # to look is all that it has to do
                self._hear(keys, answer.value)
        if slots:
            self._next_slots_s = self._now_s + self.timeout_s / LOOKS

    @property
    def _leads(self) -> bool:
        return self.place.rank == 0

    @property
    def _waits_for_others(self) -> bool:
        if not self._leads:
            return self.phase is Phase.WAITING
        gathers = self._arrival is not None and not self.all_here
        return self.phase is Phase.SEALED or (self.phase is Phase.WAITING and gathers)

    def _look_s(self) -> float:
        look_s = min(_LOOK_S + self.place.world_size * _LOOK_S_PER_RANK, _MOST_LOOK_S)
        return min(look_s, self.timeout_s / LOOKS)

    def _pause(self) -> Operation:
        pause_s = max(0.0, min(self._look_s(), self._next_beat_s - self._now_s))
        if watched := self._watched():
            pause_s = min(pause_s, max(self._still.left_s(watched), _LEAST_LOOK_S))
        if self._leads:
            if self._waits_for_others:
                waited_s = self._looks.counted_s - self._sealed_s
                least_s = max(_LEAST_LOOK_S, _LOOK_SHARE * self._took_s, _WAITED_SHARE * waited_s)
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
            if not slots:  # who has not come may have closed its checkpointer, and tells it so
                watched = [rank for rank in watched if rank not in self.arrived]
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
            return sorted(self._pending) if self.phase in _OPEN - {Phase.MERGING} else ()
        return (0,) if self._keys(slots=False) else ()

    def _answered(self, answer: Answer, *, hears: bool = True) -> Answer:
        self._now_s = answer.now_s
        self._looks.look(self._now_s)
        self._failed |= answer.error is not None
        if answer.error is None and hears:
            self._heard_s = self._looks.counted_s
        return answer

    @property
    def _listens(self) -> bool:
        """Whether this rank reads or asks now: that a post is taken then tells it nothing."""
        return self.phase in _ASKING or bool(self._keys(slots=False))

    def _is_silent(self) -> bool:
        return self._silence_left_s() <= 0.0

    def _silence_left_s(self) -> float:
        return self._heard_s + self.timeout_s - self._looks.counted_s

    def _slot(self) -> bytes:
        at, part = (At.SEALED if self._sealed else At.WORKING), self._part
        if self.phase is Phase.WAITING:
            at, part = At.HERE, self._arrival or {}
        done, total = self._done
        return encode_slot(
            SlotPost(self.number, self.kind, at, self._moves, self.place.host, done, total, part)
        )

    def _wish(self) -> bytes:
        if self.phase is Phase.DECIDING:
            return encode_verdict(Verdict(commit=True))
        assert self._blame is not None
        return encode_verdict(self._blame)

    def _hear(self, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        found = dict(zip(keys, values, strict=True))
        # The register first: what it says is final, whatever else was posted.
        end = found.pop(end_key(self.number), None)
        if end is not None:
            self._hear_verdict(end)
            return
        go = found.pop(go_key(self.number), None)
        result = found.pop(result_key(self.number), None)
        try:
            if go is not None:
                self._hear_go(decode_go(go))
            if result is not None:
                self._hear_result(decode_result(result))
            for rank in sorted(self._pending) if self._leads else (0,):
                if self.over or (data := found.get(slot_key(rank), b"")) == b"":
                    continue
                self._hear_slot(rank, data)
        except FormatError as error:
            self._leader_or_rank_lost(0, f"posted what cannot be read: {error}")
        if self._leads and self.phase is Phase.SEALED and not self._pending:
            self._happen(Happening.ALL_SEALED)

    def _hear_verdict(self, data: bytes) -> None:
        try:
            self.verdict = decode_verdict(data)
        except FormatError:  # as good as a register that cannot be reached
            if (self.phase, Happening.REGISTER_LOST) in self._table:
                self._happen(Happening.REGISTER_LOST)
            return
        commit = self.verdict.commit
        self._happen(Happening.COMMIT_DECIDED if commit else Happening.ABORT_DECIDED)

    def _hear_go(self, post: GoPost) -> None:
        if post.kind != self.kind:
            both = f"wants to {self.kind} while rank 0 wants to {post.kind}"
            self.fail(f"{both}: {_ONE_ORDER}; {_ONE_RANK}")
        elif post.stop:
            self.stop, self.terms = post.stop, post.terms
            self._happen(Happening.STOP)
        elif reason := self._expects(post.terms):
            self.fail(reason)
        else:
            self.terms = post.terms
            self._happen(Happening.GO)

    def _hear_result(self, post: ResultPost) -> None:
        self.result = post
        self._happen(OF_RESULT[post.result])

    def _hear_slot(self, rank: int, data: bytes | None) -> None:
        """Look at the slot of a watched rank: it has moved, sealed, gone on, or stands still."""
        before = self._slot_bytes.get(rank)
        if data is not None and data != before:
            self._slot_bytes[rank] = data
            try:
                post = decode_slot(data)
            except FormatError as error:
                self._leader_or_rank_lost(rank, f"posted what cannot be read: {error}")
                return
            self._slots[rank] = post
            if post.at is At.CLOSED:
                self._leader_or_rank_lost(rank, str(post.part.get("cause", "")))
                return
            # What another has posted before this rank looked tells when only where it is not from
            # a round before, and not of one that waits for rank 0: that moves with each beat.
            waits = self._leads and post.at is At.HERE
            if before is not None or not (waits or post.round < self.number):
                self._still.moved(rank)
            if post.round == self.number:
                self.arrived.setdefault(rank, post.part)
            if post.round > self.number:
                self._leader_or_rank_lost(rank, f"has left this {self.kind} behind")
            elif post.round == self.number and post.at is At.SEALED and self._leads:
                self.parts[rank] = post.part
                self._pending.discard(rank)
                return
        if self._still.is_over(rank):
            self._leader_or_rank_lost(rank, self._still_words(rank))

    def _leader_or_rank_lost(self, rank: int, cause: str) -> None:
        if self.phase is Phase.PUBLISHING:
            self._happen(Happening.LEADER_LOST)
            return
        self._accuse(rank, self.host_of(rank), cause)

    def _still_words(self, rank: int) -> str:
        post = self._slots.get(rank)
        if post is None or post.round < self.number:
            late = f"has not begun to {self.kind} for {self.timeout_s:g} s"
            return f"{late}: {_ONE_ORDER}; {_ONE_RANK}. If it comes later, raise rank_timeout_s"
        still = f"stood still for {self.timeout_s:g} s {self._doing_words(post)}"
        return f"{still}: it is dead or stuck; if it only pauses, raise rank_timeout_s"

    def _doing_words(self, post: SlotPost) -> str:
        if post.at is At.HERE:
            return f"before it began to {self.kind}"
        if post.at is At.SEALED:
            return "behind its last byte"
        doing = "while it wrote" if self.kind == "save" else "while it restored"
        if not post.total:
            return doing
        return f"{doing} ({size_text(post.done)} of {size_text(post.total)})"

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
        if step in {Step.WORK, Step.POST_SEALED}:
            self._outbox[slot_key(self.place.rank)] = self._slot()
        self.steps.append(step)

    def _tell(self, happening: Happening) -> None:
        """Tell the table of the save, before this round goes on."""


_ASKING = frozenset({Phase.DECIDING, Phase.GIVING_UP, Phase.ABORTING})
_OPEN = frozenset({Phase.WAITING, Phase.WORKING, Phase.SEALED, Phase.MERGING})
OF_RESULT = {
    Result.COMMITTED: Happening.COMMITTED,
    Result.NEVER: Happening.NEVER,
    Result.UNKNOWN: Happening.UNSURE,
}

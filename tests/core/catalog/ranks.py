"""The ranks of a job as actors of the search in `protocol.py`.

It runs the product's own code: the round of each rank, its table, the table of its save, and on
rank 0 the claim of a step, `Publisher` and the clean-up. `_Engine` models the save thread, and
`_Conducted` the thread of the round. A rank is both; the search chooses which of them continues.

The search owns the clock of the timeouts: a waiting rank may time out at any moment, whether the
others are dead, asleep or only slow. So a rank may also time out too early, and a sleeping rank is
one without a turn. Heartbeats are left out: they only postpone timeouts. Neither the requester nor
the reason of an abort matters.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace

from tests.core.catalog.protocol import (
    Actor,
    ModelClock,
    note_looks,
    word_of,
)

from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.commit_table import Commit, Event, State
from penstock.core.catalog.publisher import Publisher
from penstock.core.catalog.retention import clean_up_after
from penstock.core.catalog.survey import is_whole, read_commit
from penstock.core.config.model import Retention
from penstock.core.errors import (
    BlobNotFoundError,
    CheckpointNotFoundError,
    CoordinationError,
    PenstockError,
    SaveAbortedError,
    SaveError,
)
from penstock.core.format.records import (
    BlobRecord,
    CommitRecord,
    IndexEntry,
    PartEntry,
    borrowed_from,
    commit_name,
    index_name,
    intent_name,
    part_name,
)
from penstock.core.rounds.posts import (
    At,
    Result,
    SlotPost,
    Verdict,
    decode,
    encode,
    end_key,
    slot_key,
)
from penstock.core.rounds.round import Answer, Decide, Post, RankPlace, Read, SaveRound
from penstock.core.rounds.table import ENDS, Phase, Step
from penstock.core.save.prepare import claim_generation

_TIMEOUT_S = 8.0
_LEAP_S = _TIMEOUT_S / 4  # the longest time that counts between two polls
_ROUND = 0
_ABORT = encode(Verdict(commit=False))  # for any requester and reason
_PART = {"bytes": 32}
_WATCHING = frozenset({Phase.WAITING, Phase.WORKING, Phase.SEALED, Phase.PUBLISHING})


def board_name(job, key):
    """The name in the model's store of the posts and decisions of a job's ranks."""
    return f"board/{job}/{key}"


class _Conducted:
    """Replaces `RankSession`: hands the requests of a round to the search, one by one.

    A read that finds nothing new is no step of the search; it is answered here.
    """

    def __init__(self, round_, job, *, tires):
        self._round = round_
        self._job = job
        self._tires = tires
        self._now_s = 0.0
        self._posted = {}
        self._seen = {}
        self._looked = None  # the phase of the last read
        self._waited = None  # the phase in which a timeout passed without effect
        self._told = self._rests = False
        self._operations = round_.operations(0.0)
        self._operation = next(self._operations)

    def tell(self, what):
        """Call `what` with the round, as the save thread does."""
        what(self._round)
        self._told = True

    def pending(self):
        """Return the next operation, or None while the round waits for the save."""
        while (operation := self._operation) is not None:
            match operation:
                case Post(key, value):
                    value = self._settled(key, value)
                    if value is not None and self._posted.get(key) != value:
                        return "post", board_name(self._job, key), value
                    self._go_on()
                case Decide(key, value):
                    if not decode(Verdict, value).commit:
                        value = _ABORT
                    return "decide", board_name(self._job, key), value
                case Read(keys):
                    if not self._told and self._looked is self._round.phase:
                        return self._look(keys)
                    self._told, self._looked = False, self._round.phase
                    self._go_on([self._seen.get(key) for key in keys])
                case _:
                    if self._rests and not self._told:
                        return None
                    self._told = False
                    self._go_on()
                    self._rests = True
        return None

    def hear(self, answer):
        """Continue with the search's answer."""
        kind, *rest = answer
        operation = self._operation
        if kind == "cut":
            self._leap(None)
        elif isinstance(operation, Read):
            keys = operation.keys if kind == "said" else self._wide(operation.keys)
            found = dict(zip(keys, rest[0], strict=True))
            self._seen |= found
            if kind == "vain":
                self._waited = self._round.phase
                self._leap(found)
            else:
                self._go_on([found[key] for key in keys])
        elif isinstance(operation, Post):
            self._posted[operation.key] = self._settled(operation.key, operation.value)
            self._go_on()
        else:
            self._go_on(rest[0])

    def _look(self, keys):
        wide = self._wide(keys)
        seen = tuple(self._seen.get(key) for key in keys)
        names = [tuple(board_name(self._job, key) for key in some) for some in (keys, wide)]
        phase = self._round.phase
        patient = self._tires and phase in _WATCHING and phase is not self._waited
        return "look", names[0], seen, names[1], patient

    def _wide(self, keys):
        """What this rank reads during a timeout."""
        place = self._round.place
        others = range(1, place.world_size) if place.rank == 0 else ()
        return tuple(dict.fromkeys([*keys, *map(slot_key, others)]))

    def _settled(self, key, value):
        """Return a post without its time; None: no rank needs it."""
        if not key.startswith("slots/"):
            return value
        post = decode(SlotPost, value)
        if post.at is not At.SEALED or self._round.place.rank == 0:
            return None
        return encode(replace(post, moves=0, done=0, total=0))

    def _leap(self, board):
        """Let a timeout pass with an unchanged `board`, or (None) without any answer."""
        phase, until_s = self._round.phase, self._now_s + 2 * _TIMEOUT_S
        while self._operation is not None and self._round.phase is phase and self._now_s < until_s:
            operation = self._operation
            if board is None:
                self._now_s += _LEAP_S
                self._go_on(error=CoordinationError("no answer"))
            elif isinstance(operation, Read):
                self._go_on([board[key] for key in operation.keys])
            elif isinstance(operation, Decide):
                return
            elif isinstance(operation, Post):
                value = self._settled(operation.key, operation.value)
                if value is not None and self._posted.get(operation.key) != value:
                    return
                self._go_on()
            else:
                self._now_s += _LEAP_S
                self._go_on()

    def _go_on(self, value=None, error=None):
        self._rests = False
        try:
            self._operation = self._operations.send(Answer(self._now_s, value, error))
        except StopIteration:
            self._operation = None


class _Engine:
    """Replaces the save thread: one blob and one part on each rank."""

    def __init__(self, turn, actor):
        self._turn = turn
        self._actor = actor
        self._commit = Commit()
        self._publisher = None
        self._name = ""
        self._error = None  # of the publish, on rank 0
        self._borrowed = ()
        self.round = SaveRound(
            RankPlace(actor.rank, actor.world_size),
            _ROUND,
            commit=self._commit,
            timeout_s=_TIMEOUT_S,
            expects=lambda terms: "" if terms["step"] == actor.step else "saves another step",
        )
        self._beside = turn.beside = _Conducted(self.round, actor.job, tires=actor.tires)

    def run(self):
        if self._actor.rank == 0:
            self._begin_all()
        while (step := self._next_step()) not in _TOLD:
            if step is Step.WORK:
                self._try(self._work)
            elif step is Step.MERGE:
                self._try(self._merge)
            elif step is Step.PUBLISH:
                self._publish()
            elif step is Step.RESOLVE:
                self._resolve()
        self._end(step)
        while self._beside.pending() is not None:
            self._turn.wait()

    def _next_step(self):
        while True:
            self._beside.pending()  # continues until it needs an answer
            if self.round.steps:
                return self.round.steps.popleft()
            self._turn.wait()

    def _try(self, work):
        try:
            work()
        except PenstockError as error:
            commit, cause = self._commit, str(error)
            # Its intent was too old: `prune` deletes its sealed data, whatever the decision.
            pruned = commit.state is State.ABORTED and not commit.may_delete_own_data
            self._turn.note(pruned=pruned)
            self._beside.tell(lambda r: r.fail(cause))

    def _raise_if_over(self):
        if self.round.phase in ENDS:
            msg = "the ranks gave up"
            raise SaveAbortedError(msg)

    def _begin_all(self):
        actor, catalog = self._actor, Catalog(self._turn)
        try:
            generation = claim_generation(
                actor.step, catalog.entries(), url=self._turn.url, overwrite=actor.overwrite
            )
            self._learn(generation)
            base = self._chosen(catalog)
        except PenstockError as error:
            reason = str(error)
            self._beside.tell(lambda r: r.refuse(reason))
            return
        terms = {"step": actor.step, "generation": generation, "uid": actor.uid, "base": base}
        self._beside.tell(lambda r: r.go(terms))

    def _chosen(self, catalog):
        """Publish the intent; return the base that all ranks learn, like `Finish`."""
        like, base = self._actor.like, None
        if like is not None:
            with suppress(CheckpointNotFoundError):
                base = catalog.record(like)
        references = () if base is None else {base.uid, *base.references}
        self._publisher.publish_intent(references=references)
        if base is None or not is_whole(self._turn, base):
            return None
        self._borrowed = lent_by(base)
        return [base.uid, base.step, base.generation]

    def _adopt(self, uid, step, generation):
        with suppress(BlobNotFoundError):
            base = read_commit(self._turn, commit_name(step, generation))
            if base.uid == uid:
                self._borrowed = lent_by(base)

    def _learn(self, generation):
        actor, turn = self._actor, self._turn
        self._name = commit_name(actor.step, generation)
        clock = ModelClock(turn, stopped=actor.stopped_clock)
        self._publisher = Publisher(
            turn, self._commit, uid=actor.uid, step=actor.step, grace_s=actor.grace_s, clock=clock
        )
        note_looks(self._publisher, turn)
        turn.note(name=self._name, uid=actor.uid)

    def _work(self):
        actor = self._actor
        if actor.rank != 0:
            self._learn(self.round.terms["generation"])
            if self.round.terms["base"] is not None:
                self._adopt(*self.round.terms["base"])
        else:
            self._publisher.refresh_intent()
        names = actor.own_names()
        for some in [names] if actor.at_once else [[name] for name in names]:
            self._raise_if_over()
            self._turn.ask("write", actor.uid.encode(), *some)
        part = {**_PART, "borrowed": [[blob.name, blob.length] for blob in self._borrowed]}
        self._beside.tell(lambda r: r.seal(part))

    def _merge(self):
        actor = self._actor
        for rank in range(1, actor.world_size):
            try:
                self._turn.read_record(part_name(actor.uid, rank), limit_bytes=64)
            except BlobNotFoundError as error:
                msg = f"what rank {rank} has stored is not there: is the root shared?"
                raise SaveError(msg) from error
        self._raise_if_over()
        self._publisher.refresh_intent()
        self._turn.publish(index_name(actor.uid), actor.uid.encode())
        self._beside.tell(lambda r: r.merged())

    def _publish(self):
        try:
            self._publisher.publish_commit(self._record(), begin=self._begin_to_publish)
        except PenstockError as error:
            result = Result.NEVER if self._commit.never_published else Result.UNKNOWN
            self._error = error
        else:
            result = Result.COMMITTED
        self._beside.tell(lambda r: r.published(result))

    def _resolve(self):
        found = self._publisher._read_back(self._name)
        self._beside.tell(lambda r: r.resolved(found))

    def _begin_to_publish(self):
        self._commit.feed(Event.PUBLISH_STARTED)

    def _record(self):
        actor = self._actor
        parts = [
            PartEntry(part_name(actor.uid, rank), 32, 32, "0" * 64)
            for rank in range(actor.world_size)
        ]
        generation = self.round.terms["generation"]
        posted = [row for part in self.round.others.parts.values() for row in part["borrowed"]]
        every = {*self._borrowed, *(BlobRecord(*row) for row in posted)}
        return CommitRecord(
            actor.uid, actor.step, generation, "2026-01-01T00:00:00Z", actor.world_size,
            IndexEntry(index_name(actor.uid), 32, 32, "0" * 64), tuple(parts),
            1, 32 * actor.world_size, 32 * actor.world_size,
            borrowed=borrowed_from(every, actor.uid),
        )  # fmt: skip

    def _end(self, step):
        actor = self._actor
        told = _TOLD[step] if self._error is None else word_of(self._error)
        if step is Step.KEEP and actor.rank != 0:
            told = "lost"
        self._turn.note(told=told, verdict=self.round.verdict, looking=False)
        if step is Step.DONE:
            if actor.rank == 0:
                self._clean_up_older()
            return
        self._commit.feed(Event.FAILED)
        if self._publisher is not None and self._commit.may_delete_own_data:
            if actor.rank == 0:
                self._turn.delete([intent_name(actor.uid)])
                self._turn.delete([index_name(actor.uid)])
            names = actor.own_names()
            for some in [names] if actor.at_once else [[name] for name in names]:
                self._turn.ask("remove", *some)

    def _clean_up_older(self):
        actor = self._actor
        retention = actor.keep_last and Retention(keep_last=actor.keep_last)
        clean_up_after(
            SimpleNamespace(step=actor.step),
            Catalog(self._turn),
            overwrite=actor.overwrite,
            retention=retention,
            protect=(),
            events=SimpleNamespace(emit=lambda event: None),
        )


_TOLD = {
    Step.DONE: "success",
    Step.CLEAN_UP: "aborted",
    Step.KEEP: "aborted",
    Step.REPORT_UNKNOWN: "unknown",
    Step.REPORT_STOPPED: "refused",
}


def lent_by(base):
    """The blobs that a save borrows from a checkpoint."""
    return BlobRecord(f"data/{base.uid}/blobs/0.raw", 32), *base.borrowed


def blob_name(uid, rank):
    """The only blob that a rank writes."""
    return f"data/{uid}/blobs/{rank}.raw"


@dataclass(frozen=True)
class Rank(Actor):
    """One rank of a job that saves a step; the other ranks are separate actors."""

    rank: int
    world_size: int
    uid: str
    step: int
    job: str = "job"
    overwrite: bool = False
    keep_last: int | None = None
    grace_s: float = 4.0
    stopped_clock: bool = False
    at_once: bool = False  # whether blob and part appear and vanish in one step: fewer states
    like: int | None = None  # the step that it borrows from, if found
    tires: bool = True  # whether it ever waits until it counts others as dead

    words = frozenset({"success", "lost", "unknown", "aborted", "refused"})
    saves = True

    def run(self, turn):
        _Engine(turn, self).run()

    @property
    def deletes(self):
        """Retention does."""
        return self.keep_last is not None

    def own_names(self):
        """The data that this rank writes and may delete; rank 0 also has intent and index."""
        return [blob_name(self.uid, self.rank), part_name(self.uid, self.rank)]

    def violations(self, store, records):
        """What a record of this job also needs: all parts, and the register's decision."""
        end = store.get(board_name(self.job, end_key(_ROUND)))
        for name, record in records.items():
            if record.uid != self.uid:
                continue
            if end is None or not decode(Verdict, end[0]).commit:
                yield f"{name} is there, and the register does not say commit"
            if len(record.parts) != self.world_size:
                yield f"{name} is there without the parts of all ranks"

    def violations_at_the_end(self, store, notes):
        """A decided abort lets each rank delete its own data at once."""
        verdict = notes.get("verdict")
        if verdict is not None and not verdict.commit and not notes.get("pruned"):
            left = [name for name in self.own_names() if name in store]
            if left:
                yield f"rank {self.rank} knows of the abort, and has left {left}"


def ranks(world_size, uid, step, **options):
    """All ranks of one job."""
    return tuple(Rank(rank, world_size, uid, step, **options) for rank in range(world_size))

"""Tries every order in which savers, deleters, pruners and readers can meet. No threads.

It runs the engine's own code: `SaveJob._run` and `Finish` with `Publisher` and the table,
`prune` and `Catalog`. Each store operation is one atomic step on a `MemoryBackend`. An actor is a
function of the store's answers so far: it runs again from its start with those answers, and stops
at the first operation without one. So the whole state is a hashable value: the store, the time, and
each actor's answers.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

from penstock import PenstockError
from penstock.backends.memory import MemoryBackend, MemoryConfig, _Blob
from penstock.core.abc import Backend
from penstock.core.catalog import publisher as publishing
from penstock.core.catalog import survey
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.commit_table import Commit
from penstock.core.catalog.publisher import Publisher
from penstock.core.catalog.retention import clean_up_after
from penstock.core.catalog.survey import is_whole
from penstock.core.concurrency.latch import Latch
from penstock.core.concurrency.timing import Clock, Timing
from penstock.core.concurrency.watchdog import Watchdog
from penstock.core.config.model import Retention
from penstock.core.copy import blob_sites
from penstock.core.copy import lease as leases
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.copy.lease import Lease
from penstock.core.copy.mover import CheckedBlob
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BusyError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CommitUnknownError,
    FormatError,
    LostRaceError,
    SaveAbortedError,
    StepExistsError,
    StorageError,
    StorageFullError,
)
from penstock.core.format.commit_record import decode_commit, encode_commit, encode_intent
from penstock.core.format.index import EMPTY
from penstock.core.format.records import (
    NOTES_PREFIX,
    BlobRecord,
    CommitRecord,
    IndexEntry,
    IntentRecord,
    PartEntry,
    borrowed_from,
    commit_name,
    index_name,
    intent_name,
    parse_commit_name,
    part_name,
)
from penstock.core.pipeline.writer import BATCH_BYTES
from penstock.core.ranks.agreement import AgreementOfOne
from penstock.core.reporting.handle import Ending
from penstock.core.reporting.reports import SaveHandle
from penstock.core.save import finish as finishes
from penstock.core.save.finish import Finish
from penstock.core.save.job import SaveJob
from penstock.core.save.manifest import ALONE, RankManifest
from penstock.core.save.prepare import claim_generation
from penstock.core.save.request import Destination, SaveSurroundings, SaveTurn
from penstock.core.types import Capabilities

_NOW = "2026-01-01T00:00:00Z"
_decode = lru_cache(None)(decode_commit)  # its content is a function of the bytes


class ViolationError(AssertionError):
    """A broken promise; the message shows how it happened."""


class _Pause(BaseException):
    """The actor has reached an operation without an answer."""


class Turn(Backend):
    """One actor's view of the store in one run from its start."""

    name = "turn"

    def __init__(self, answers, scenario):
        self._answers = iter(answers)
        self._exclusive = scenario.exclusive
        self._timeless = not scenario.ticks
        self._notes = {}
        self.stop = None  # the operation that has no answer, with the notes of that moment
        self.beside = None  # on a rank: the round of its job, whose operations may be interleaved

    @property
    def url(self):
        return "model://"

    @property
    def capabilities(self):
        return Capabilities(exclusive_publish=self._exclusive, local=True)

    def note(self, **notes):
        """What the actor knows and is from here on."""
        self._notes = {**self._notes, **notes}

    def ask(self, *operation):
        if self._timeless and operation[0] in {"time", "clock"} and self.stop is None:
            return 0.0
        while self.beside is not None and (other := self.beside.pending()) is not None:
            mine, answer = self._ask(("either", operation, other))
            if mine:
                return _unless_error(answer)
            self.beside.hear(answer)
        return _unless_error(self._ask(operation))

    def wait(self):
        """Advance the round by one operation; the actor has nothing to do."""
        other = self.beside.pending()
        assert other is not None, "a rank waits for a round that does nothing"
        self.beside.hear(self._ask(("either", None, other))[1])

    def _ask(self, operation):
        if self.stop is None:
            answer = next(self._answers, _Pause)
            if answer is not _Pause:
                return answer
            self.stop = operation, self._notes
        raise _Pause

    def end(self):
        if self.stop is None:
            self.stop = None, self._notes

    def publish(self, name, data, /, *, exclusive=False):
        self.ask("publish", name, bytes(data), exclusive)

    def read_record(self, name, /, *, limit_bytes):
        return self.ask("read", name)

    def list(self, prefix, /):
        if NOTES_PREFIX in prefix:
            return ()  # no actor adds notes, and each listing would double the search
        return self.ask("list", prefix)

    def stat(self, name, /):
        return self.ask("stat", name)

    def delete(self, names, /):
        if names:
            self.ask("delete", *names)

    def store_time_s(self):
        return self.ask("time")

    def create(self, name, /, *, size_hint=None):
        raise NotImplementedError

    def read(self, requests, /):
        raise FormatError("the model has no manifests", [request.name for request in requests])


def _unless_error(answer):
    if isinstance(answer, PenstockError):
        raise type(answer)(str(answer))
    return answer


# -- actors ----------------------------------------------------------------------------------------


class Actor:
    """An actor of a search; `run` is a function of the answers of its turn."""

    words = frozenset()  # answers that it may get
    saves = False
    deletes = False  # whether it may delete a step
    tires = True  # whether it ends even if all others stop

    def violations(self, store, records):
        """Yield the errors of a store that concern this actor."""
        return ()

    def violations_at_the_end(self, store, notes):
        """Yield the errors of a store at the end."""
        return ()


class _Writer:
    """Replaces the frame writer: one blob that appears when it is sealed."""

    idle = True
    blob_names = ()  # `list` shows everything

    def __init__(self, turn, uid):
        self._turn = turn
        self._uid = uid
        self.results = {}
        self.choices = SimpleNamespace(report=lambda results: ())

    def put(self, batch):
        self.results[len(self.results)] = batch

    def finish(self):
        name = f"data/{self._uid}/blobs/0.raw"
        self._turn.publish(name, self._uid.encode())
        return [(name, 32)]

    def abort(self):
        pass


class ModelClock(Clock):
    """Uses the model's time, which stops for an actor with a stopped clock."""

    def __init__(self, turn, *, stopped):
        self._turn = turn
        self._stopped = stopped

    def boot_s(self):
        return 0.0 if self._stopped else self._turn.ask("clock")

    def now_iso(self):
        return _NOW


class _Bases:
    """Replaces the bases of a save: all of one checkpoint, if its record still exists."""

    chosen = None

    def __init__(self, turn, base, finish):
        self._turn, self._base, self._finish = turn, base, finish

    def choose(self, backend):
        return {self._base.uid, *self._base.references}

    def confirm(self):
        if not is_whole(self._turn, self._base):
            self._finish._borrowed = ()

    def committed(self, *stored):
        pass

    def failed(self):
        pass

    def find(self, chunks):
        pass

    def refer(self, results):
        return True

    def entry(self):
        pass


class _Part(RankManifest):
    """Replaces a part whose frames later saves reference."""

    def stored_frames(self, block_bytes):
        return ()


class _Finish(Finish):
    """The engine's save from intent to clean-up; only capture and writing are stubs."""

    def __init__(
        self, turn, clock, ending, *, uid, generation, grace_s, batches, borrowed, base,
        compacts="",
    ):  # fmt: skip
        step = ending.handle.step
        self._compacts = compacts
        self.uid = uid
        self.bytes_done = 0
        self.commit = Commit()
        self.watchdog = Watchdog(600)
        self.may_write = Latch()
        self.may_write.open()
        self._turn = SaveTurn()
        self._agreement = AgreementOfOne(self.commit)
        self._agreement.uid = uid
        self._share = ALONE
        self._backend = turn
        self._destination = Destination(turn)
        self._ending = ending
        self._workers = SimpleNamespace(timing=Timing())
        self._borrowed = borrowed
        self._bases = None if base is None else _Bases(turn, base, self)
        chunk = SimpleNamespace(
            view=SimpleNamespace(nbytes=BATCH_BYTES), pieces=[SimpleNamespace(item=0)]
        )
        chunks = [chunk] * batches
        self.request = SimpleNamespace(
            step=step,
            generation=generation,
            block_bytes=4096,
            plan=SimpleNamespace(chunks=chunks, raw_bytes=32),
            chains=(),
            providers=(),
        )
        self._manifest = SimpleNamespace(encode=self._encode, encode_part=self._encode_part)
        self._writer = _Writer(turn, uid)
        self._publisher = Publisher(
            turn, self.commit, uid=uid, step=step, grace_s=grace_s, clock=clock
        )
        self._capture = _Capture(chunks)
        self._clock = SimpleNamespace(commit_began=None)

    def forget(self):
        """There is no state."""

    def _report(self, blobs):
        return SimpleNamespace(
            step=self.request.step, uid=self.uid, generation=self.request.generation, bytes_raw=0,
            seconds={"total": 0, "blocked": 0},
        )  # fmt: skip

    def _encode_part(self, uid, results, blobs, **_):
        entry = PartEntry(part_name(uid, 0), 32, 32, "0" * 64)
        summary = SimpleNamespace(entry=entry, bytes_raw=32)
        return _Part(uid.encode(), summary, EMPTY, 0, {}, None)

    def _encode(self, uid, parts, blocks, *, engine, created, **_):
        assert not blocks.shards
        index, (part,) = index_name(uid), parts
        record = CommitRecord(
            uid, self.request.step, self.request.generation, created, 1,
            IndexEntry(index, 32, 32, "0" * 64), (part.entry,),
            1, 32, 32, borrowed=self._borrowed, compacts=self._compacts, engine=engine,
        )  # fmt: skip
        return uid.encode(), record


class _Capture:
    """Replaces a capture: all is captured."""

    def __init__(self, chunks):
        self.derived = {}
        self.chunk_count = len(chunks)
        self.handed_on = queue.SimpleQueue()
        for chunk in chunks:
            self.handed_on.put(chunk)

    def cancel(self, error):
        pass

    def nothing(self):
        pass

    check = close = forget = release_unwritten = wake = nothing


class Job(SaveJob):
    """The engine's save on the actor's thread."""

    def __init__(self, turn, clock, surroundings, *, step, place=None, **finish):
        self._turn = turn
        self.handle = SaveHandle(step)
        self._over = self.handle.durable
        self._onward = None
        self._rank_turn = SaveTurn()
        self.ending = Ending(self.handle)
        self.ending.capture()
        self._finish = _Finish(turn if place is None else place, clock, self.ending, **finish)
        self._capture = self._finish._capture
        self._capture_over = Latch()
        self._capture_over.open()
        self._may_run = threading.Lock()
        self.released = Latch()
        self.handle.durable.add_done_callback(self._ended)
        self._surroundings = surroundings
        self._log_failure = True

    def _ended(self, durable):
        error = durable.exception()
        self.report = None if error is not None else durable.result()
        self._turn.note(told="success" if error is None else word_of(error))


def word_of(error):
    words = {
        LostRaceError: "lost", CommitUnknownError: "unknown", SaveAbortedError: "aborted",
        StepExistsError: "refused", CheckpointGoneError: "gone", CheckpointNotFoundError: "none",
        StorageError: "failed", BusyError: "busy",
    }  # fmt: skip
    return words.get(type(error), repr(error))


@dataclass(frozen=True)
class Saver(Actor):
    """Claims a step, saves, cleans up as `Checkpointer` does. `like`: a step to borrow from."""

    words = frozenset({"success", "lost", "unknown", "aborted", "refused", "failed", "none"})
    saves = True

    uid: str
    step: int
    overwrite: bool = False
    like: int | None = None
    grace_s: float = 4.0
    batches: int = 1
    keep_last: int | None = None
    stopped_clock: bool = False

    @property
    def deletes(self):
        """Retention does."""
        return self.keep_last is not None

    def run(self, turn):
        catalog = Catalog(turn)
        retention = self.keep_last and Retention(keep_last=self.keep_last)
        base, borrowed = None, ()
        try:
            generation = claim_generation(
                self.step, catalog.entries(), url=turn.url, overwrite=self.overwrite
            )
            if self.like is not None:
                base = catalog.record(self.like)
                blob = BlobRecord(f"data/{base.uid}/blobs/0.raw", 32)
                borrowed = borrowed_from([blob, *base.borrowed], self.uid)
        except (StepExistsError, CheckpointNotFoundError) as error:
            turn.note(told=word_of(error))
            return

        def after_commit(request, report):
            turn.note(looking=False)
            clean_up_after(
                report,
                catalog,
                overwrite=self.overwrite,
                retention=retention,
                protect=(),
                events=silent,
            )

        surroundings = SaveSurroundings()
        surroundings.after_commit = after_commit
        job = Job(
            turn, ModelClock(turn, stopped=self.stopped_clock), surroundings,
            uid=self.uid, step=self.step, generation=generation, grace_s=self.grace_s,
            batches=self.batches, borrowed=borrowed, base=base,
        )  # fmt: skip
        name = commit_name(self.step, generation)
        turn.note(name=name, uid=self.uid)
        note_looks(job._finish._publisher, turn)
        job._run()


silent = SimpleNamespace(emit=lambda event: None)


def note_looks(publisher, turn):
    """Note that a publisher has checked its intent, and its record has yet to land."""
    publish, read_back = publisher.publish_commit, publisher._read_back
    check_data = publisher._check_data

    def publish_commit(record, *, begin):
        turn.note(looking=True)
        publish(record, begin=begin)

    def resolve(name):
        turn.note(looking=False)
        return read_back(name)

    def landed(name, record):
        turn.note(looking=False)
        check_data(name, record)

    publisher.publish_commit = publish_commit
    publisher._read_back = resolve
    publisher._check_data = landed


@dataclass(frozen=True)
class Pruner(Actor):
    """`prune`, by another process or (`own`) by a saver's; then perhaps `delete` of a step.

    It deletes as much as it may, to test the other protections of data.
    """

    grace_s: float = 4.0
    own: tuple[str, ...] = ()
    then_delete: int | None = None
    everything: bool = True

    @property
    def deletes(self):
        """`prune` deletes no step."""
        return self.then_delete is not None

    def run(self, turn):
        catalog = Catalog(turn)
        catalog.prune(grace_s=self.grace_s, own_uids=self.own, everything=self.everything)
        if self.then_delete is not None:
            with suppress(CheckpointNotFoundError):
                catalog.delete(self.then_delete)


@dataclass(frozen=True)
class Deleter(Actor):
    """`delete`, or `rewind` to a step; then perhaps `delete` of another step."""

    words = frozenset({"none"})
    deletes = True

    step: int
    rewind: bool = False
    then_delete: int | None = None

    def run(self, turn):
        catalog = Catalog(turn)
        try:
            (catalog.rewind if self.rewind else catalog.delete)(self.step)
            if self.then_delete is not None:
                catalog.delete(self.then_delete)
        except CheckpointNotFoundError:
            turn.note(told="none")


class _Mover:
    """Replaces the mover of blobs: each blob appears when it is sealed."""

    def __init__(self, copy, turn):
        self._copy = copy
        self._turn = turn

    def check(self):
        pass

    def pause(self, seconds):
        self._turn.ask("awaits", self._turn.ask("deletions"))

    def run(self, transfers):
        for transfer in transfers:
            name = transfer.blob.name
            data = name.split("/")[1].encode()
            if transfer.target is not None:
                transfer.target.publish(name, data, exclusive=True)
                self._copy._sites.seal(name)
            else:
                try:
                    transfer.source.read_record(name, limit_bytes=64)
                except BlobNotFoundError as error:
                    self._copy._missing(transfer, error)


@dataclass(frozen=True)
class Copier(Actor):
    """Copies a checkpoint from a source that does not change; its leases never expire."""

    words = frozenset({"copied", "busy", "aborted", "unknown", "lost"})

    uid: str
    step: int
    borrows: tuple[str, ...] = ()

    def run(self, turn):
        files, name = one_stored(self.step, 0, self.uid, self.borrows)
        record = _decode(files[name][0], name)
        copy_by(turn, MemoryBackend(MemoryConfig()), turn, record)
        turn.note(told="copied")


def copy_by(turn, source, target, record, **how):
    """Copy a checkpoint; assumes that the source keeps its data."""
    clock = ModelClock(turn, stopped=True)
    made = partial(_named_lease, f"copy of step {record.step}")
    with patch.object(blob_sites, "Lease", made):
        copy = CheckpointCopy(
            source, target, record,
            workers=SimpleNamespace(timing=Timing(clock=clock)), grace_s=4.0, **how,
        )  # fmt: skip
        copy._mover = _Mover(copy, turn)
        copy._check_source = lambda **_: None
        names = (part_name(record.uid, 0), index_name(record.uid))
        blobs = [f"data/{uid}/blobs/0.raw" for uid in (record.uid, *record.references)]
        copy._contents = SimpleNamespace(
            parts=record.parts,
            read=lambda: [CheckedBlob(blob, 32, None, None, None) for blob in blobs],
            records=lambda: [(name, record.uid.encode()) for name in names],
        )
        copy._run()


def _named_lease(token, backend, uid, timing):
    lease = Lease(backend, uid, timing)
    lease._record = replace(lease._record, token=token, process="")
    return lease


@dataclass(frozen=True)
class Reader(Actor):
    """Reads all of a checkpoint in the order of a restore."""

    words = frozenset({"whole", "gone", "none"})

    step: int

    def run(self, turn):
        catalog = Catalog(turn)
        try:
            record = catalog.record(self.step)
        except CheckpointNotFoundError:
            turn.note(told="none")
            return
        try:
            for name in needed_names(record):
                data = turn.read_record(name, limit_bytes=64)
                if data.decode() != name.split("/")[1]:
                    turn.note(told="a mix")
                    return
        except BlobNotFoundError as error:
            turn.note(told=word_of(catalog.gone_or_damaged(self.step, record.uid, error)))
        else:
            turn.note(told="whole")


def needed_names(record):
    yield record.index.name
    for part in record.parts:
        yield part.name
        yield f"data/{record.uid}/blobs/{part.rank}.raw"
    yield from (blob.name for blob in record.borrowed)


# -- the world -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """The actors, the store, and the possible faults.

    `faults`: how many responses to publishes of commit records can get lost; `ticks`: how far time
    can advance, one second each; `nap`: ticks that may pass between a saver's check of its intent
    and the landing of its record (the engine's assumption: less than half the grace time); `late`:
    whether a record with a lost response may land later; `alone`: no other actor moves then;
    `scattered`: a call that deletes several names does so in any order, not only in one. For ranks
    (see `ranks.py`): `cuts` is how often one cannot reach the others for a whole timeout, `full`
    how often one has no room for its data.
    """

    actors: tuple
    # (step, generation, uid, uids it borrows from), or (uid,) without a record, or ("blobs", uid)
    stored: tuple = ()
    exclusive: bool = True
    faults: int = 0
    crashes: int = 0
    ticks: int = 0
    nap: int = 0
    late: bool = False
    alone: bool = False
    scattered: bool = False
    cuts: int = 0
    full: int = 0
    store: dict | None = None  # the initial store, in place of `stored`
    # Whether an actor runs until it lists, publishes or deletes commit records before any other
    # moves: its operations on its own data change nothing for the others.
    records_only: bool = False


class _Actor(NamedTuple):  # created a million times: a dataclass takes three times as long
    history: int = 0
    left: frozenset | None = None  # names that a running deletion has yet to delete
    slept: int = 0
    dead: bool = False


class _State(NamedTuple):
    store: int
    now: int
    actors: tuple[_Actor, ...]
    flying: tuple = ()  # publishes without a response that may still land: (operation, slept)
    faults: int = 0
    crashes: int = 0
    cuts: int = 0
    full: int = 0
    deleted: frozenset = frozenset()  # names of deleted commit records


@dataclass
class Explored:
    """The results of a search."""

    states: int = 0
    told: set = field(default_factory=set)  # all answers that the actors have at an end


class Search:
    """Every state of one scenario, breadth first."""

    def __init__(self, scenario, limit=400_000):
        self._scenario = scenario
        self._limit = limit
        self._stores = []  # number -> {name: (data, modified)}
        self._store_numbers = {}
        self._histories = [(None, None)]  # number -> (previous, answer)
        self._history_numbers = {}
        self._runs = {}
        self._folds = {}
        self._steps_before = None  # the steps with a checkpoint at the start
        by_name = [a for a in scenario.actors if isinstance(a, Deleter | Pruner)]
        self._empties = any(actor.deletes for actor in by_name)
        self._applied = {}
        self._parents = {}
        self._records = {}  # errors of a store, by its number

    def run(self):
        """Return the results. A search runs only once: it then drops its state.

        The tracebacks of its errors refer to it, so it would keep up to a gigabyte until the next
        full garbage collection.
        """
        try:
            with _small_engine(), _no_collection():
                return self._explore()
        finally:
            vars(self).clear()
            _decode.cache_clear()

    def _explore(self):
        first = _State(
            self._store_number(self._scenario.store or _stored(self._scenario.stored)),
            0,
            tuple(_Actor() for _ in self._scenario.actors),
            faults=self._scenario.faults,
            crashes=self._scenario.crashes,
            cuts=self._scenario.cuts,
            full=self._scenario.full,
        )
        self._parents[first] = None
        result = Explored()
        todo = deque([first])
        while todo:
            state = todo.popleft()
            seen = [self._peek(n, actor.history) for n, actor in enumerate(state.actors)]
            notes = [note for _, note in seen]
            self._check(state, notes)
            pairs = zip(state.actors, seen, strict=True)
            if all(actor.dead or operation is None for actor, (operation, _) in pairs):
                result.told.add(tuple(note.get("told", "-") for note in notes))
                self._check_end(state, notes)
            for label, following in self._following(state, seen):
                if following not in self._parents:
                    self._parents[following] = (state, label)
                    todo.append(following)
            assert len(self._parents) <= self._limit, "the scenario is too large"
        result.states = len(self._parents)
        return result

    # -- possible next events ----------------------------------------------------------------------

    def _following(self, state, seen):
        scenario = self._scenario
        pairs = zip(state.actors, seen, strict=True)
        looking = [n for n, (a, its) in enumerate(pairs) if not a.dead and _is_looking(*its)]
        if scenario.records_only and (first := self._aside(state, seen)) is not None:
            yield from self._steps(state, first, state.actors[first], seen[first][0])
            return
        for number, actor in enumerate(state.actors):
            operation, _ = seen[number]
            if operation is None or actor.dead:
                continue
            if scenario.alone and looking and number not in looking:
                continue
            if operation[0] == "either":
                steps = [*self._steps_of_rank(state, number, actor, *operation[1:])]
                if not steps and self._scenario.actors[number].tires:
                    self._fail(state, f"{number} cannot go on unless others do")
                yield from steps
            elif operation[0] == "awaits" and {*operation[1]} & self._deletions(state):
                continue
            else:
                yield from self._steps(state, number, actor, operation)
            if state.crashes:
                dead = self._folded(number, actor, dead=True)
                crashed = self._with(state, number, dead, crashes=state.crashes - 1)
                yield f"{number} crashes", crashed
        for place, (operation, _) in enumerate(state.flying):
            rest = state.flying[:place] + state.flying[place + 1 :]
            yield "a record is lost for ever", state._replace(flying=rest)
            _, store = self._apply(state, operation)
            yield "a record lands late", state._replace(store=store, flying=rest)
        if state.now < scenario.ticks:
            yield from self._tick(state, looking)

    @staticmethod
    def _aside(state, seen):
        """Return an actor whose next operation concerns no record, or None."""
        for number, actor in enumerate(state.actors):
            operation, _ = seen[number]
            if operation is not None and not actor.dead and not _is_of_records(operation):
                return number
        return None

    def _deletions(self, state):
        """The numbers of the actors in a deletion."""
        return {
            number
            for number, actor in enumerate(state.actors)
            if isinstance(self._scenario.actors[number], Deleter | Pruner)
            and actor.history
            and not actor.dead
            and self._peek(number, actor.history)[0] is not None
        }

    def _tick(self, state, looking):
        nap = self._scenario.nap
        if any(state.actors[n].slept >= nap for n in looking):
            return
        if not self._scenario.late and any(slept >= nap for _, slept in state.flying):
            return
        actors = tuple(
            a._replace(slept=a.slept + 1) if n in looking else a for n, a in enumerate(state.actors)
        )
        flying = tuple((operation, slept + 1) for operation, slept in state.flying)
        yield "time passes", state._replace(now=state.now + 1, actors=actors, flying=flying)

    def _steps_of_rank(self, state, number, actor, own, other):
        """A rank has two threads: the save thread and the thread of its round."""
        if own is not None:
            yield from self._steps(state, number, actor, own, threads=True)
        kind, name, *rest = other
        keep = {"slept": actor.slept, "left": actor.left}

        def said(answer, store=state.store, **changes):
            return self._answered(state, number, (False, answer), store, **keep, **changes)

        if kind == "look":
            seen, wide, patient = rest
            found, _ = self._apply(state, ("look", name))
            if found != seen:
                yield f"{number} reads {_shown(found)}", said(("said", found))
            elif patient:
                found, _ = self._apply(state, ("look", wide))
                yield f"{number} waits in vain", said(("vain", found))
        else:
            answer, store = self._apply(state, other)
            yield f"{number} {kind}s {_shown([rest[0]])}", said(("said", answer), store)
        if state.cuts:
            fewer = {"cuts": state.cuts - 1}
            yield f"{number} is cut off", said(("cut",), **fewer)
            if kind != "look" and store != state.store:
                lands = said(("cut",), store, **fewer)
                yield f"{number} {kind}s {_shown([rest[0]])}, and is cut off", lands

    def _steps(self, state, number, actor, operation, *, threads=False):
        if operation[0] == "delete":
            left = actor.left if actor.left is not None else frozenset(operation[1:])
            for name in sorted(left)[: None if self._scenario.scattered else 1]:
                following = self._delete(state, number, actor, name, left, threads=threads)
                yield f"{number} deletes {name}", following
            return
        if operation[0] in {"deletions", "awaits"}:
            begun = tuple(sorted(self._deletions(state)))
            yield (
                f"{number} {operation[0]} {begun}",
                self._answered(state, number, begun, state.store),
            )
            return
        answer, store = self._apply(state, operation)
        word = f"{number} {' '.join(map(str, operation[:2]))}"

        def said(answer, store=state.store, **changes):
            answer = (True, answer) if threads else answer
            return self._answered(state, number, answer, store, **changes)

        slept = actor.slept if operation[0] == "stat" else 0
        yield word, said(answer, store, slept=slept)
        if state.full and operation[0] == "write":
            yield word + " finds no room", said(StorageFullError("no room"), full=state.full - 1)
        if operation[0] == "publish" and operation[1].startswith("commits/") and state.faults:
            lost = StorageError("no answer")
            fewer = {"faults": state.faults - 1}
            yield word + " lost", said(lost, **fewer)
            yield word + " lost answer", said(lost, store, **fewer)
            flying = ((operation, actor.slept), *state.flying)
            yield word + " late", said(lost, flying=flying, **fewer)
            if self._scenario.exclusive:
                yield word + " twice", said(BlobExistsError("a retry met itself"), store, **fewer)

    def _delete(self, state, number, actor, name, left, *, threads):
        _, store = self._apply(state, ("delete", name))
        left = left - {name}
        deleted = state.deleted | {name} if "commits/" in name else state.deleted
        if left:
            return self._with(
                state, number, actor._replace(left=left), store=store, deleted=deleted
            )
        answer = (True, None) if threads else None
        return self._answered(state, number, answer, store, deleted=deleted)

    def _answered(self, state, number, answer, store, *, slept=0, left=None, **changes):
        before = state.actors[number].history
        key = (before, answer if not _has_error(answer) else repr(answer))
        history = self._history_numbers.get(key)
        if history is None:
            history = self._history_numbers[key] = len(self._histories)
            self._histories.append((before, answer))
        actor = self._folded(number, _Actor(history, left, slept))
        if changes.get("flying") is None:
            changes.pop("flying", None)
        return self._with(state, number, actor, store=store, **changes)

    def _folded(self, number, actor, *, dead=False):
        """Return the actor with one common history for all that ended, or died, with its notes.

        Its path no longer matters, and there are many.
        """
        operation, notes = self._peek(number, actor.history)
        if not dead and operation is not None:
            return actor
        key = number, dead, tuple(notes.items())
        return _Actor(self._folds.setdefault(key, actor.history), dead=dead)

    @staticmethod
    def _with(state, number, actor, **changes):
        actors = (*state.actors[:number], actor, *state.actors[number + 1 :])
        return state._replace(actors=actors, **changes)

    # -- actors and store --------------------------------------------------------------------------

    def _peek(self, number, history):
        """An actor's next operation after all its answers, or None at its end; and its notes."""
        key = number, history
        found = self._runs.get(key)
        if found is None:
            answers = []
            at = history
            while at:
                at, answer = self._histories[at]
                answers.append(answer)
            turn = self.turn = Turn(reversed(answers), self._scenario)
            self.actor = self._scenario.actors[number]
            try:
                self.actor.run(turn)
            except _Pause:
                pass
            except Exception as error:  # noqa: BLE001 - reported to the caller
                turn.note(told=word_of(error))
            turn.end()
            found = self._runs[key] = turn.stop
        return found

    def _apply(self, state, operation):
        if operation[0] in {"time", "clock"}:
            return float(state.now), state.store
        key = state.store, state.now, operation
        found = self._applied.get(key)
        if found is None:
            found = self._applied[key] = self._do(*key)
        return found

    def _do(self, store, now, operation):
        memory = MemoryBackend(MemoryConfig())
        blobs = memory._store.blobs
        blobs.update({n: _Blob(data, at) for n, (data, at) in self._stores[store].items()})
        kind, *rest = operation
        try:
            if kind == "publish":
                name, data, exclusive = rest
                memory.publish(name, data, exclusive=exclusive)
                blobs[name] = _Blob(data, float(now))
                answer = None
            elif kind == "delete":
                answer = memory.delete(rest)
            elif kind == "read":
                answer = memory.read_record(rest[0], limit_bytes=1 << 20)
            elif kind == "list":
                answer = tuple(memory.list(rest[0]))
            elif kind == "write":
                data, *names = rest
                blobs.update({name: _Blob(data, float(now)) for name in names})
                answer = None
            elif kind == "remove":
                for name in rest:
                    blobs.pop(name, None)
                answer = None
            elif kind == "look":
                answer = tuple(blobs[n].data if n in blobs else None for n in rest[0])
            elif kind in {"post", "decide"}:
                name, data = rest
                if kind == "post" or name not in blobs:
                    blobs[name] = _Blob(data, 0.0)
                answer = blobs[name].data
            else:
                answer = memory.stat(rest[0])
        except PenstockError as error:
            return error.with_traceback(None), store
        return answer, self._store_number({n: (b.data, b.modified_s) for n, b in blobs.items()})

    def _store_number(self, store):
        key = frozenset(store.items())
        if key not in self._store_numbers:
            self._store_numbers[key] = len(self._stores)
            self._stores.append(store)
        return self._store_numbers[key]

    # -- broken promises ---------------------------------------------------------------------------

    def _check(self, state, notes_of_all):
        if state.store not in self._records:
            self._records[state.store] = self._check_store(state)
        records = self._records[state.store]
        owners, told_of = {}, {}
        for number, notes in enumerate(notes_of_all):
            told = notes.get("told")
            if told is None:
                continue
            self._check_actor(state, number, told, notes, records)
            if "uid" not in notes:
                continue
            name, uid = notes["name"], notes["uid"]
            told_of.setdefault((uid, name), set()).add(told)
            other = told == "success" and owners.setdefault(name, uid) != uid
            if self._scenario.exclusive and other and name not in state.deleted:
                self._fail(state, f"two savers were told that they own {name}")
        for (_, name), words in told_of.items():  # of one save by many ranks
            lost = "lost" in words and self._scenario.exclusive and name not in state.deleted
            if "success" in words and (lost or words & {"aborted", "refused"}):
                self._fail(state, f"ranks were told {sorted(words)} of {name}")

    def _check_store(self, state):
        """The stored records, which must all have their data."""
        store = self._stores[state.store]
        records = {}
        for name, (data, _) in store.items():
            place, prefix, rest = name.rpartition("commits/")  # a tier, or nothing
            if prefix and parse_commit_name(prefix + rest) is not None:
                record = records[name] = _decode(data, prefix + rest)
                missing = [n for n in needed_names(record) if place + n not in store]
                if missing:
                    self._fail(state, f"{name} is there without {missing}")
        uids = {(record.step, record.generation, record.uid) for record in records.values()}
        if len(uids) > len({(step, generation) for step, generation, _ in uids}):
            self._fail(state, "two tiers have two checkpoints of one step and generation")
        for actor in self._scenario.actors:
            for violation in actor.violations(store, records):
                self._fail(state, violation)
        if self._steps_before is None:
            self._steps_before = {record.step for record in records.values()}
        lost = self._steps_before - {record.step for record in records.values()}
        if lost and not any(actor.deletes for actor in self._scenario.actors):
            self._fail(state, f"nobody was to delete steps {lost}")
        if self._steps_before and not records and not self._empties:
            self._fail(state, "no checkpoint is left")
        return records

    def _check_end(self, state, notes):
        for number, actor in enumerate(self._scenario.actors):
            if not state.actors[number].dead:
                store = self._stores[state.store]
                for violation in actor.violations_at_the_end(store, notes[number]):
                    self._fail(state, violation)

    def _check_actor(self, state, number, told, notes, records):
        actor = self._scenario.actors[number]
        if told not in actor.words:
            self._fail(state, f"{actor} was told {told}")
        if not actor.saves or "uid" not in notes:
            return
        name = notes["name"]
        ours = name in records and records[name].uid == notes["uid"]
        lied = told == "success" and not ours and name not in state.deleted
        if lied and self._scenario.exclusive:
            self._fail(state, f"{actor} was told success, but {name} is not its own")
        if told in {"aborted", "failed"} and ours:
            self._fail(state, f"{actor} was told {told}, but its record is there")
        if told == "lost" and ours and not (state.deleted or not self._scenario.exclusive):
            self._fail(state, f"{actor} was told that it lost, but its record is there")

    def _fail(self, state, why):
        lines = []
        at = state
        while self._parents[at] is not None:
            at, label = self._parents[at]
            lines.append(label)
        raise ViolationError("\n  ".join([why, *reversed(lines)]))


def _is_looking(operation, notes):
    if operation is not None and operation[0] == "either":
        operation = operation[1]
    return operation is not None and operation[0] != "clock" and notes.get("looking", False)


def _is_of_records(operation):
    kind, name, *_ = operation
    return kind in {"list", "publish", "delete"} and "commits/" in name


def _has_error(answer):
    if isinstance(answer, tuple) and len(answer) == 2:  # of one of the threads of a rank
        answer = answer[1]
    return isinstance(answer, Exception)


def _shown(values):
    return " ".join("-" if value is None else value.decode() for value in values)


@contextmanager
def _no_collection():
    """None of a search's millions of objects is garbage before its end."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _small_engine():
    """Speed up logging, reading `/proc`, and repeated encoding and decoding."""
    with (
        patch.object(publishing, "decode_commit", _decode),
        patch.object(publishing, "encode_commit", _by_text(publishing.encode_commit)),
        patch.object(publishing, "encode_intent", _by_text(publishing.encode_intent)),
        patch.object(survey, "decode_commit", _decode),
        patch.object(survey, "decode_intent", lru_cache(None)(survey.decode_intent)),
        patch.object(leases, "identity_of", lru_cache(None)(leases.identity_of)),
        patch.object(finishes, "identity_of", lru_cache(None)(finishes.identity_of)),
    ):
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


def _by_text(encode):
    """`encode`, which is a function of the record."""
    encoded = {}

    def known(record):
        text = repr(record)
        if text not in encoded:
            encoded[text] = encode(record)
        return encoded[text]

    return known


def _stored(checkpoints):
    store = {}
    for checkpoint in checkpoints:
        store |= one_stored(*checkpoint)[0]
    return store


@lru_cache(None)
def one_stored(*checkpoint):
    """All data of a checkpoint, and the name of its record."""
    *place, uid = [item for item in checkpoint if not isinstance(item, tuple)]
    lent = next((item for item in checkpoint if isinstance(item, tuple)), ())
    store = {f"data/{uid}/blobs/0.raw": (uid.encode(), 0.0)}
    if place == ["blobs"]:
        return store, None
    for name in (index_name(uid), part_name(uid, 0)):
        store[name] = (uid.encode(), 0.0)
    intent = IntentRecord(uid, place[0] if place else 0, lent, "host", 1, _NOW, _NOW)
    store[intent_name(uid)] = (encode_intent(intent), 0.0)
    if not place:
        return store, None
    record = CommitRecord(
        uid, *place, _NOW, 1, IndexEntry(index_name(uid), 32, 32, "0" * 64),
        (PartEntry(part_name(uid, 0), 32, 32, "0" * 64),), 1, 32, 32,
        borrowed=tuple(BlobRecord(f"data/{other}/blobs/0.raw", 32) for other in lent),
    )  # fmt: skip
    store[commit_name(*place)] = (encode_commit(record), 0.0)
    return store, commit_name(*place)

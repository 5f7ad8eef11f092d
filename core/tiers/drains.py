"""Copies checkpoints from tier to tier in the background.

Training never waits for this, and never fails because of it. What a tier has yet to copy stands in
its mark (see `tiers`), so whatever ends the process, the next one goes on.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.core.catalog.prune import CLOCK_PREFIX
from penstock.core.catalog.survey import is_whole
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.errors import (
    NotDrainedError,
    PenstockError,
    StorageError,
    StorageFullError,
)
from penstock.core.format.records import COMMIT_PREFIX
from penstock.core.save.request import Destination
from penstock.core.tiers.eviction import Rooms
from penstock.core.tiers.link import DrainLink
from penstock.core.tiers.outages import Answers, known_entries
from penstock.core.tiers.process import CopyProcess
from penstock.core.tiers.repairs import TierRepairs
from penstock.core.tiers.roots import TierRoots
from penstock.core.tiers.whereabouts import (
    at_step,
    is_marked,
    lost_behind,
    mark,
    note_staying,
    pending,
    saved_behind_since,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.concurrency.workers import Workers
    from penstock.core.format.records import CommitRecord
    from penstock.core.save.request import SaveRequest
    from penstock.core.tiers.link import DrainState

log = logging.getLogger("penstock")
left_log = logging.getLogger(__name__)  # what is not copied at all: `penstock drain` shows this

_MOST_LISTED = 10
_LEFT = (
    "it is whole in a faster tier, where the next process that saves there, or `penstock drain`, "
    "goes on with it; it was not copied to the durable one yet"
)


class Drains:
    """All links between neighbouring tiers of one run. Thread-safe."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        workers: Workers,
        grace_s: float,
        stuck_s: float = 600.0,
        backend: str | dict[str, Any] | None = None,
    ) -> None:
        """Prepare links; nothing is copied yet.

        Args:
            tiers: From the fastest on.
            workers: Threads for checksums and for what waits.
            grace_s: As `prune` has it.
            stuck_s: A store that neither moves nor fails for so long is not waited for.
            backend: What another process can open the same tiers from; None: threads copy.
        """
        self._tiers = tiers
        self._told: dict[str, Callable[[BaseException | None], None]] = {}
        self._counts = [0] * len(tiers)
        self._timing = workers.timing
        self._answers = Answers(workers, min(stuck_s, self._timing.tier_answer_s))
        self._closed = False
        self._telling: list[threading.Thread] = []
        # Guards `_told`, `_counts`, `_closed`, `_telling` and `_sent_back`.
        self._lock = threading.Lock()
        self._workers = workers
        self._resumed = False
        self._owed: set[str] = set()  # copied on though it is not their turn
        self._sent_back = 0
        self._quiet = Deadline(0.0)  # over when it is said again that saves go past a tier
        self.roots = TierRoots(tiers, self._answers)
        self.rooms = Rooms(tiers, renew=self._renew)
        self.repairs = TierRepairs(
            tiers, rooms=self.rooms, workers=workers, grace_s=grace_s, stuck_s=stuck_s
        )
        self._links = [
            DrainLink(
                tiers,
                number,
                self,
                workers=workers,
                grace_s=grace_s,
                stuck_s=stuck_s,
                process=None
                if backend is None or tiers[number].drain_in == "thread"
                else CopyProcess(backend, number, stuck_s=stuck_s, timing=workers.timing),
            )
            for number in range(len(tiers) - 1)
        ]
        self.durable = max((n for n, tier in enumerate(tiers) if tier.durable), default=0)

    def destination(self, request: SaveRequest) -> Destination | None:
        """The fastest tier that has room for a save; None: the save is to be skipped.

        Raises:
            StorageFullError: No tier has room, and the configuration says `raise`.
            StorageError: A tier does not answer, and the step is to be overwritten.
        """
        # Before anything of this save is there: what another process commits from now on stays.
        replaces = self.known_at(request.step) if request.generation else frozenset()
        self.resume_once()
        number = self.place(request.step, request.plan.raw_bytes)
        if number is None:
            return None
        return Destination(self._tiers[number].backend, DrainOfSave(self, number, replaces))

    def place(self, step: int, need_bytes: int) -> int | None:
        """The fastest tier that has room, made if need be; None: this save is to be skipped.

        Raises:
            StorageFullError: None has, and the configuration says `raise`.
        """
        said = False
        while True:
            why: list[str] = []
            for number, tier in enumerate(self._tiers):
                try:
                    if self._has_room(number, need_bytes):
                        self._say_past(step, tier, why)
                        return number
                    why.append(f"tier {tier.name} ({tier.backend.url}) is full")
                except StorageError as error:
                    why.append(f"tier {tier.name} does not answer: {error}")
            msg = (
                f"no tier has room for the {need_bytes} bytes of step {step}: {'; '.join(why)}. "
                "What is only in the fast tier is not given up for it."
            )
            policy = self._tiers[0].on_full
            if policy == "raise":
                raise StorageFullError(msg)
            if policy == "skip":
                log.error("step %d is not saved: %s", step, msg)
                return None
            if not said:
                log.error("the save of step %d waits: %s", step, msg)
                said = True
            time.sleep(self._timing.tier_full_poll_s)

    def _say_past(self, step: int, tier: Tier, why: Sequence[str]) -> None:
        """Say that a save goes past faster tiers: once, then every ten minutes."""
        if why and self._quiet.is_over():
            self._quiet = Deadline(self._timing.repeat_log_s, self._timing.clock)
            log.warning("step %d is saved straight to tier %s: %s", step, tier.name, "; ".join(why))

    def is_silent(self) -> bool:
        """Whether a tier did not answer when it was asked last, and is left alone for a while."""
        return self._answers.is_any_silent()

    def is_failing(self) -> bool:
        """Whether a tier has failed for so long that waiting for it makes no sense."""
        return any(link.is_failing() for link in self._links)

    def is_stuck(self) -> bool:
        """Whether a store neither answers nor fails; what it was given may be in use for ever."""
        return self.repairs.is_stuck() or any(link.is_stuck() for link in self._links)

    def _has_room(self, number: int, need_bytes: int) -> bool:
        return self._answers.ask(number, lambda: self._would_fit(number, need_bytes))

    def _would_fit(self, number: int, need_bytes: int) -> bool:
        if number:  # of one that cannot tell its room it has to be known that it is there
            self._tiers[number].backend.list(CLOCK_PREFIX)
            self.roots.check(number)
        unproved: list[CommitRecord] = []

        def prove(_backend: Backend, record: CommitRecord) -> bool:
            unproved.append(record)
            return False

        fits = self.rooms.make_room(number, need_bytes, prove=prove)
        if unproved:  # training does not wait while they are read
            self._links[number].tidy(need_bytes)
        return fits

    def _renew(self, record: CommitRecord, good: int, bad: int) -> None:
        """Bring a damaged copy anew; what is cut short is copied as whatever is marked."""

        def failed() -> None:
            with suppress(StorageError):  # then the next process finds the mark
                if bad == good + 1 and is_marked(self._tiers[good].backend, record.uid):
                    self._links[good].add(record)

        self.repairs.begin_renewal(record, good, bad, failed=failed)

    def entries(self, *, strict: bool) -> dict[int, list[str]]:
        """Names of commit records by step; `strict`: an error unless every tier answers.

        Raises:
            StorageError: No tier answers, or (`strict`) one does not.
        """
        return known_entries(self._tiers, self._answers, strict=strict)

    def prepare(
        self, number: int, uid: str, step: int, replaces: Collection[str] | None = None
    ) -> bool:
        """Before a checkpoint is committed in a tier: mark it, if it shall go on from there.

        Args:
            number: Of the tier.
            uid: Of the checkpoint.
            step: Likewise.
            replaces: As for `mark`.

        Raises:
            StorageError: The tier failed.
        """
        wanted = number < len(self._links) and (uid in self._owed or self._is_turn(number))
        if wanted:
            mark(self._tiers[number].backend, uid, step, replaces)
        elif number < len(self._links):
            note_staying(self._tiers[number].backend, uid, step)
        return wanted

    def known_at(self, step: int) -> frozenset[str]:
        """Uids of the checkpoints that any tier has at a step: what an overwrite replaces.

        Raises:
            StorageError: A tier does not answer.
        """
        found: set[str] = set()
        for number, tier in enumerate(self._tiers):
            look = partial(at_step, tier.backend, step)
            found.update(record.uid for record in self._answers.ask(number, look, silent_too=True))
        return frozenset(found)

    def again(self, number: int, record: CommitRecord) -> bool:
        """Tier `number` has lost what it was to copy on: let it come there once more.

        Returns:
            Whether a faster tier has it, and brings it; else it is gone, or about to be deleted.

        Raises:
            StorageError: A tier failed.
        """
        for faster in reversed(range(number)):
            backend = self._tiers[faster].backend
            if is_whole(backend, record):
                self._owed.add(record.uid)
                mark(backend, record.uid, record.step)
                self._links[faster].add(record)
                with self._lock:  # once it is queued: who waits from now on finds it there
                    self._sent_back += 1
                # Of what that link was told to drop before it had it, nobody was told.
                return not self.repairs.is_withdrawn(record.uid)
        return False

    def committed(
        self,
        number: int,
        record: CommitRecord,
        told: Callable[[BaseException | None], None],
        *,
        marked: bool,
    ) -> None:
        """A checkpoint is whole in a tier: go on from there if it is marked.

        Args:
            number: Of the tier.
            record: Of the checkpoint.
            told: Called once, when it is as durable as it shall be, or with why it is not.
            marked: What `prepare` has said of it.
        """
        waits = marked and number < self.durable
        with self._lock:
            closed = self._closed
            if waits and not closed:
                self._told[record.uid] = told
        if not waits:
            told(None)
        elif closed:
            told(_left_by_close())
        if marked:
            self._links[number].add(record)

    def resume_once(self) -> None:
        """Begin to `resume`, in the background, unless that was begun before.

        Raises:
            ConfigError: The tiers are no tiers of one run in this order.
        """
        if not self._resumed:
            self.roots.register()
            self._resumed = True
            self._workers.spawn("resume", self._resume)

    def _resume(self) -> None:
        try:
            self.reconcile()
        except PenstockError as error:  # what is marked goes on all the same
            log.error("the tiers are not compared: %s", str(error))  # noqa: TRY400 - its text says it
        self.resume()

    def withdraw(self, uids: Collection[str]) -> None:
        """Copy these no more; on return none of them is being copied.

        Before they are deleted: else the record of a copy could come after the deletion of its
        data.
        """
        self.repairs.withdraw(uids)
        for link in self._links:
            link.withdraw(uids)

    def reinstate(self, uids: Collection[str]) -> None:
        """What was withdrawn was not deleted after all: what of it is marked goes on."""
        self.repairs.reinstate(uids)
        for link in self._links:
            link.reinstate(uids)
        self._workers.spawn("resume", self._resume)

    def reconcile(self) -> tuple[list[CommitRecord], dict[str, str]]:
        """Mark what slower tiers have lost, as far as these answer: so it is copied once more.

        A tier may have been restored from an older backup, or replaced by an empty one.

        Returns:
            What was marked; and by name the tiers that do not answer, with the reason.
        """
        self.roots.register()
        marked: list[CommitRecord] = []
        silent: dict[str, str] = {}
        for number in range(len(self._links)):
            backend, name = self._tiers[number].backend, self._tiers[number].name
            try:
                behind = self.roots.behind(number)
                lost = lost_behind(self._tiers, number, behind)
                staying = self._not_lost(number, lost)
                for record in staying:
                    note_staying(backend, record.uid, record.step, behind)
                stays = {record.uid for record in staying}
                lost = [record for record in lost if record.uid not in stays]
                for record in lost:
                    mark(backend, record.uid, record.step)
            except StorageError as error:
                log.debug("tier %s: what slower tiers have lost: %s", name, str(error))
                silent |= _silence(self._tiers[number:])
                continue
            marked += lost
            if lost:
                log.warning(
                    "no tier behind %s has step %s any more: copied there once more. Was it "
                    "restored from an older backup, or replaced?",
                    name,
                    _listed(lost),
                )
        return marked, silent

    def _not_lost(self, number: int, lost: Sequence[CommitRecord]) -> Sequence[CommitRecord]:
        """Those of `lost` that are missing behind a tier on purpose, which is said."""
        tier, slower = self._tiers[number], self._tiers[number + 1 :]
        if self.roots.was_used_before(number):
            if self.roots.is_before_older(number):
                return ()
            staying = saved_behind_since(self._tiers, number, lost)
            why = "was deleted behind it, where others have saved since"
        elif tier.drain_every and not any(one.backend.list(COMMIT_PREFIX) for one in slower):
            return ()  # `drain_every` leaves out no first one: nothing was ever copied from here
        else:
            # Earlier versions did not note what `drain_every` has left out.
            staying = list(lost)
            why = "counts as left out by an earlier version, which did not note that"
        if staying:
            left_log.warning(
                "step %s is in tier %s, and %s: it is not copied on. `penstock copy` does, if that "
                "is wrong",
                _listed(staying),
                tier.name,
                why,
            )
        return staying

    def resume(self) -> int:
        """Go on with what was left by whoever used these tiers before; returns how many."""
        found = 0
        for number, link in enumerate(self._links):
            try:
                left = pending(self._tiers[number].backend)
            except StorageError as error:
                log.warning(
                    "tier %s: what is left to copy: %s", self._tiers[number].name, str(error)
                )
                continue
            for record in left:
                found += link.add(record)
        return found

    def having(self, record: CommitRecord) -> tuple[str, ...]:
        """Names of the tiers that have a checkpoint, of those that answer."""
        found = []
        for number, tier in enumerate(self._tiers):
            try:
                if self._answers.ask(number, partial(is_whole, tier.backend, record)):
                    found.append(tier.name)
            except StorageError:
                continue
        return tuple(found)

    def states(self) -> list[DrainState]:
        """What each link is doing, from the fastest tier on."""
        return [link.state() for link in self._links]

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left, or what is left is failing; False: neither, in time."""
        deadline = Deadline(timeout_s, self._timing.clock)
        while True:
            before = self._sent_back
            self.repairs.settle(deadline)
            # What one has finished is the next one's to do.
            settled = all(link.settle(deadline) for link in self._links)
            self.repairs.settle(deadline)  # trimming may have found a damaged copy
            if before == self._sent_back:
                return settled and self._all_told(deadline)

    def _all_told(self, deadline: Deadline) -> bool:
        """Wait for callbacks; one of them may call this, and does not wait for itself."""
        with self._lock:
            telling = [t for t in self._telling if t is not threading.current_thread()]
        for thread in telling:
            thread.join(None if deadline.limit_s == math.inf else deadline.left_s())
        return not any(thread.is_alive() for thread in telling)

    def close(self) -> None:
        """Stop; whoever waits for a checkpoint that is still on its way is told so."""
        self._say_what_is_left()
        for link in self._links:
            link.close()
        with self._lock:
            self._closed = True
            left, self._told = self._told, {}
        for told in left.values():
            told(_left_by_close())

    def _say_what_is_left(self) -> None:
        for state in self.states():
            if steps := state.unfinished():
                listed = ", ".join(map(str, steps[:_MOST_LISTED]))
                log.warning(
                    "%d checkpoint(s) were not copied from tier %s to %s: step %s%s. `penstock "
                    "drain` copies them, or the next process that saves there",
                    len(steps),
                    state.source,
                    state.target,
                    listed,
                    ", ..." if len(steps) > _MOST_LISTED else "",
                )

    def _is_turn(self, number: int) -> bool:
        every = self._tiers[number].drain_every
        with self._lock:
            count, self._counts[number] = self._counts[number], self._counts[number] + 1
        return every > 0 and count % every == 0

    def arrived(self, number: int, record: CommitRecord) -> None:
        """A link has copied a checkpoint to tier `number`."""
        self._answers.answered(number)
        marked = number < len(self._links) and is_marked(self._tiers[number].backend, record.uid)
        if marked:
            self._links[number].add(record)
        if number >= self.durable or not marked:
            self.tell(record, None)

    def tell(self, record: CommitRecord, error: BaseException | None) -> None:
        """Let know who waits for a checkpoint, if anybody does."""
        self._owed.discard(record.uid)
        with self._lock:
            told = self._told.pop(record.uid, None)
            self._telling = [thread for thread in self._telling if thread.is_alive()]
            if told is not None:
                # Callbacks may do anything, also wait for a link.
                self._telling.append(self._workers.spawn("told", partial(_tell, told, error)))


def _tell(told: Callable[[BaseException | None], None], error: BaseException | None) -> None:
    try:
        told(error)
    except BaseException as raised:  # noqa: BLE001 - the caller's code: recorded in the log
        log.error("a callback at the end of a save raised %s", repr(raised))  # noqa: TRY400


def _listed(records: Sequence[CommitRecord]) -> str:
    steps = ", ".join(str(record.step) for record in records[:_MOST_LISTED])
    return f"{steps}, ..." if len(records) > _MOST_LISTED else steps


def _silence(tiers: Sequence[Tier]) -> dict[str, str]:
    """Names of tiers that do not list their checkpoints, each with the reason."""
    silent = {}
    for tier in tiers:
        try:
            tier.backend.list(COMMIT_PREFIX)
        except StorageError as error:
            silent[tier.name] = str(error)
    return silent


def _left_by_close() -> NotDrainedError:
    return NotDrainedError(f"{_LEFT}, since the run was closed before")


class DrainOfSave:
    """What becomes of one save that was committed in tier `number`; see `save.request.Onward`."""

    def __init__(self, drains: Drains, number: int, replaces: Collection[str] = ()) -> None:
        self._drains = drains
        self._number = number
        self._replaces = replaces
        self._record: CommitRecord | None = None
        self._marked = False

    def prepare(self, record: CommitRecord) -> None:
        """Mark it, if it shall go on."""
        self._record = record
        self._marked = self._drains.prepare(self._number, record.uid, record.step, self._replaces)

    def go(self, told: Callable[[BaseException | None], None]) -> None:
        """Let it go on, if it is marked."""
        assert self._record is not None
        self._drains.committed(self._number, self._record, told, marked=self._marked)

    def tiers(self) -> tuple[str, ...]:
        """Names of those that have it by now."""
        assert self._record is not None
        return self._drains.having(self._record)

    def check(self) -> None:
        """Raise if a tier has been failing for long."""
        if self._drains.is_failing():
            why = "; ".join(state.error for state in self._drains.states() if state.error)
            msg = f"{_LEFT}: {why}"
            raise NotDrainedError(msg)

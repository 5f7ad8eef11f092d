"""Copies checkpoints from tier to tier in the background.

Training never waits for these copies and never fails because of them. Each pending copy has a mark
in the tier to copy from (see `whereabouts`), so after a crash the next process continues the
copies.
"""

from __future__ import annotations

import logging
import math
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.core.catalog.survey import is_whole
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.errors import (
    CheckpointGoneError,
    NotDrainedError,
    PenstockError,
    StorageError,
)
from penstock.core.save.request import Destination
from penstock.core.suggest import listed
from penstock.core.tiers.eviction import Eviction
from penstock.core.tiers.link import DrainLink
from penstock.core.tiers.losses import mark_lost
from penstock.core.tiers.outages import Outages
from penstock.core.tiers.places import TierRoots
from penstock.core.tiers.process import ProcessSetup
from penstock.core.tiers.repairs import TierRepairs
from penstock.core.tiers.room import TierRoom
from penstock.core.tiers.save_drain import DrainOfSave, FollowedDrain, LeadingDrain, TierOfRanks
from penstock.core.tiers.whereabouts import (
    at_step,
    compacted,
    is_marked,
    mark,
    note_staying,
    pending,
)
from penstock.core.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.concurrency.workers import Workers
    from penstock.core.format.records import CommitRecord
    from penstock.core.save.request import RankTurn, SaveRequest
    from penstock.core.tiers.host_orders import HostOrders
    from penstock.core.tiers.link import DrainState
    from penstock.core.tiers.save_drain import OnEnd

log = logging.getLogger("penstock")

_LEFT = (
    "the checkpoint is whole in a faster tier, but not copied to the durable one yet; the next "
    "process that saves there, or `penstock drain`, continues the copy"
)


class Drains:
    """All links between neighboring tiers of one run. Thread-safe."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        workers: Workers,
        grace_s: float,
        stuck_s: float = 600.0,
        backend: str | dict[str, Any] | None = None,
        leads: Callable[[], bool] = lambda: True,
        orders: HostOrders | None = None,
    ) -> None:
        """Prepare the links; starts no copy.

        Args:
            tiers: The tiers, the fastest first.
            workers: Threads for checksums and for background tasks.
            grace_s: The grace time of `prune`.
            stuck_s: The longest wait for a store without progress.
            backend: The configuration that lets another process open the same tiers; None if
                threads of this process must copy.
            leads: Returns whether this process copies, evicts and repairs. With several ranks, only
                rank 0 does.
            orders: Executes the orders for this host, if hosts copy their own files.
        """
        self._leads = leads
        self._tiers = tiers
        self._workers = workers
        self._timing = workers.timing
        self._callbacks: dict[str, OnEnd] = {}  # by uid
        self._callback_threads: list[threading.Thread] = []
        self._counts = [0] * len(tiers)  # saves to each tier, for `drain_every`
        self._closed = False
        self._sent_again = 0
        self._lock = threading.Lock()  # guards the five above
        self._resumed = False
        self._out_of_turn: set[str] = set()  # uids to copy regardless of `drain_every`
        self._outages = Outages(tiers, workers, min(stuck_s, self._timing.tier_answer_s))
        self.roots = TierRoots(tiers, self._outages)
        self.eviction = Eviction(tiers, on_damage=self._replace_damaged)
        self.room = TierRoom(
            tiers,
            outages=self._outages,
            roots=self.roots,
            eviction=self.eviction,
            timing=workers.timing,
            tidy=lambda number, need_bytes: self._links[number].tidy(need_bytes),
        )
        self.repairs = TierRepairs(
            tiers,
            eviction=self.eviction,
            workers=workers,
            grace_s=grace_s,
            stuck_s=stuck_s,
            leads=leads,
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
                else ProcessSetup(backend, number, stuck_s),
                helper=None
                if orders is None
                else orders.helper(number, tiers[number].drain_bytes_per_s, stuck_s),
            )
            for number in range(len(tiers) - 1)
        ]
        self.durable = max((n for n, tier in enumerate(tiers) if tier.durable), default=0)

    # -- a save ----------------------------------------------------------------------------------

    def entries(self, *, strict: bool) -> dict[int, list[str]]:
        """Return the names of commit records by step, as `Outages.entries` does.

        Raises:
            StorageError: No tier answers; with `strict`, at least one does not answer.
        """
        return self._outages.entries(strict=strict)

    def destination(self, request: SaveRequest) -> Destination | None:
        """Return the fastest tier that has room for a save; None if the save is to be skipped.

        Raises:
            StorageFullError: No tier has room, and the configuration says `raise`.
            StorageError: A tier does not answer, and the step is to be overwritten.
        """
        # Looked up before this save writes anything, so that it does not replace a checkpoint that
        # another process commits meanwhile.
        replaces = self._uids_at(request.step) if request.generation else frozenset()
        self.resume_once()
        number = self.room.place(request.step, request.plan.raw_bytes)
        if number is None:
            return None
        return Destination(self._tiers[number].backend, DrainOfSave(self, replaces, number))

    def destination_of_ranks(self, request: SaveRequest, turn: RankTurn) -> Destination:
        """Return the destination of a save by several ranks; rank 0 chooses its tier later.

        Raises:
            StorageError: Only on rank 0: a tier does not answer, and the step is to be overwritten.
        """
        first = self._tiers[0].backend
        if turn.rank:
            choice = TierOfRanks(self.room, request, away=self.room.away())
            return Destination(first, FollowedDrain(turn), choice)
        replaces = self._uids_at(request.step) if request.generation else frozenset()
        self.resume_once()
        choice = TierOfRanks(self.room, request, away=self.room.left_alone())
        return Destination(first, LeadingDrain(self, choice, turn, replaces), choice)

    def prepare(
        self, number: int, uid: str, step: int, replaces: Collection[str] | None = None
    ) -> bool:
        """Mark a checkpoint before its commit in a tier, if it must be copied from there.

        If it is not to be copied, writes a note about that instead, except in the last tier.

        Args:
            number: The number of the tier.
            uid: The uid of the checkpoint.
            step: The step of the checkpoint.
            replaces: As in `mark`.

        Returns:
            Whether the checkpoint is marked.

        Raises:
            StorageError: The tier failed.
        """
        wanted = number < len(self._links) and (uid in self._out_of_turn or self._is_turn(number))
        if wanted:
            mark(self._tiers[number].backend, uid, step, replaces)
        elif number < len(self._links):
            note_staying(self._tiers[number].backend, uid, step)
        return wanted

    def _is_turn(self, number: int) -> bool:
        every = self._tiers[number].drain_every
        with self._lock:
            count, self._counts[number] = self._counts[number], self._counts[number] + 1
        return every > 0 and count % every == 0

    def _uids_at(self, step: int) -> frozenset[str]:
        """Return the uids of all tiers' checkpoints at a step.

        Raises:
            StorageError: A tier does not answer.
        """
        uids: set[str] = set()
        for number, tier in enumerate(self._tiers):
            look = partial(at_step, tier.backend, step)
            records = self._outages.ask(number, look, despite_pause=True)
            uids.update(record.uid for record in records)
        return frozenset(uids)

    def committed(self, number: int, record: CommitRecord, on_end: OnEnd, *, marked: bool) -> None:
        """Queue the copy of a checkpoint that was committed in a tier, if it is marked.

        Args:
            number: The number of the tier.
            record: The commit record.
            on_end: Called once, when the copies up to the durable tier have ended.
            marked: The result of `prepare`.
        """
        waits = marked and number < self.durable
        with self._lock:
            closed = self._closed
            if waits and not closed:
                self._callbacks[record.uid] = on_end
        if not waits:
            on_end(None)
        elif closed:
            on_end(_left_by_close())
        if marked:
            self._links[number].add(record)

    def having(self, record: CommitRecord) -> tuple[str, ...]:
        """Return the names of the tiers that answer and hold the checkpoint."""
        names = []
        for number, tier in enumerate(self._tiers):
            with suppress(Exception):  # of any kind: the save itself has succeeded
                if self._outages.ask(number, partial(_holds, tier.backend, record)):
                    names.append(tier.name)
        return tuple(names)

    # -- what earlier processes left -------------------------------------------------------------

    def resume_once(self) -> None:
        """Register the tiers, and start `resume` in the background; later calls do nothing.

        Raises:
            ConfigError: Two tiers are the same place, are swapped, or belong to different runs.
        """
        if not self._resumed:
            self.roots.register()
            self._resumed = True
            self._workers.spawn("resume", self._resume)

    def _resume(self) -> None:
        try:
            self.reconcile()
        except PenstockError as error:  # checkpoints that are already marked are copied anyway
            log.error(  # noqa: TRY400 - the text is enough
                "cannot look for checkpoints that tiers have lost: %s", str(error)
            )
        self.resume()

    def resume(self) -> int:
        """Queue the copies that earlier processes left; return their number."""
        count = 0
        for number, link in enumerate(self._links):
            try:
                left = pending(self._tiers[number].backend)
            except StorageError as error:
                log.warning(
                    "tier %s: cannot list pending copies: %s", self._tiers[number].name, str(error)
                )
                continue
            for record in left:
                count += link.add(record)
        return count

    def reconcile(self) -> tuple[list[CommitRecord], dict[str, str]]:
        """Mark the checkpoints that slower tiers have lost; see `mark_lost`."""
        self.roots.register()
        return mark_lost(self._tiers, self.roots)

    # -- deletion --------------------------------------------------------------------------------

    def withdraw(self, uids: Collection[str]) -> None:
        """Cancel the copies of these checkpoints before the checkpoints are deleted.

        No copy of them is in flight on return. A copy could otherwise publish its commit record
        after the deletion of its data.
        """
        self.repairs.withdraw(uids)
        for link in self._links:
            link.withdraw(uids)

    def reinstate(self, uids: Collection[str]) -> None:
        """Accept withdrawn checkpoints after a failed deletion, and copy those still marked."""
        self.repairs.reinstate(uids)
        for link in self._links:
            link.reinstate(uids)
        if self._leads():
            self._workers.spawn("resume", self._resume)

    # -- called by links -------------------------------------------------------------------------

    def arrived(self, number: int, record: CommitRecord) -> None:
        """Queue the next copy, if any, of a checkpoint that a link has copied to tier `number`."""
        self._outages.end(number)
        marked = number < len(self._links) and is_marked(self._tiers[number].backend, record.uid)
        if marked:
            self._links[number].add(record)
        if number >= self.durable or not marked:
            self.end(record, None)

    def send_again(self, number: int, record: CommitRecord) -> bool:
        """Queue another copy to tier `number`, which lost a checkpoint before passing it on.

        Returns:
            Whether a faster tier has the checkpoint and copies it. If not, the checkpoint is gone
            or about to be deleted.

        Raises:
            StorageError: A tier failed.
        """
        for faster in reversed(range(number)):
            backend = self._tiers[faster].backend
            if is_whole(backend, record):
                self._out_of_turn.add(record.uid)
                mark(backend, record.uid, record.step)
                self._links[faster].add(record)
                with self._lock:  # after `add`: `settle` compares this, and then sees the copy
                    self._sent_again += 1
                # A deletion before `add` found no copy there, so it did not call `on_end`.
                return not self.repairs.is_withdrawn(record.uid)
        return False

    def end(self, record: CommitRecord, error: BaseException | None) -> None:
        """Call the `on_end` of a checkpoint, unless there is none or it was already called."""
        self._out_of_turn.discard(record.uid)
        with self._lock:
            on_end = self._callbacks.pop(record.uid, None)
            self._callback_threads = [t for t in self._callback_threads if t.is_alive()]
            if on_end is not None:
                # On its own thread: users' callbacks may do anything, even wait for the link.
                thread = self._workers.spawn("told", partial(_call_back, on_end, error))
                self._callback_threads.append(thread)

    def end_gone(self, number: int, record: CommitRecord) -> None:
        """Call the `on_end` of a checkpoint that is gone before its copy to tier `number`.

        Passes a CheckpointGoneError, but None if a durable tier has a compaction of the checkpoint,
        which holds all of its objects. The compaction deletes the older generation in faster tiers,
        even where that generation waits to be copied.
        """
        newer: list[CommitRecord] = []
        for at, tier in enumerate(self._tiers):
            with suppress(StorageError):
                look = partial(at_step, tier.backend, record.step)
                there = self._outages.ask(at, look)
                if at >= self.durable and any(r.compacts == record.uid for r in there):
                    self.end(record, None)
                    return
                newer += [r for r in there if r.generation > record.generation]
        is_replaced = any(not self.repairs.is_withdrawn(r.uid) for r in newer)
        what = "replaced by an overwrite" if is_replaced else "deleted"
        msg = f"step {record.step} was {what} before it was in tier {self._tiers[number].name}"
        self.end(record, CheckpointGoneError(msg))

    def _replace_damaged(self, record: CommitRecord, good: int, bad: int) -> None:
        """Replace a damaged copy; if that fails, let its link copy a marked checkpoint again."""

        def failed() -> None:
            with suppress(StorageError):  # then the next process finds the mark
                if bad == good + 1 and is_marked(self._tiers[good].backend, record.uid):
                    self._links[good].add(record)

        self.repairs.begin_replacing(record, good, bad, failed=failed)

    # -- state and end ---------------------------------------------------------------------------

    def is_silent(self) -> bool:
        """Return whether any tier's calls are paused because it did not answer."""
        return self._outages.is_any_paused()

    def failing(self) -> str:
        """Return why callers should not wait for the copies; empty if they may wait.

        A reason exists once a tier has failed for long or a store is stuck.
        """
        if not any(link.is_failing() for link in self._links):
            return ""
        why = "; ".join(state.error for state in self.states() if state.error)
        return f"{_LEFT}. The last error: {why}"

    def is_stuck(self) -> bool:
        """Return whether a store is stuck. A call in flight may still use its buffers."""
        return self.repairs.is_stuck() or any(link.is_stuck() for link in self._links)

    def states(self) -> list[DrainState]:
        """Return the state of each link, from the fastest tier on."""
        return [link.state() for link in self._links]

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until each copy has ended or is failing; return False after `timeout_s`."""
        deadline = Deadline(timeout_s, self._timing.clock)
        while True:
            before = self._sent_again
            self.repairs.settle(deadline)
            # In this order, because each link queues its copies at the next link.
            settled = all(link.settle(deadline) for link in self._links)
            self.repairs.settle(deadline)  # trimming may have found a damaged copy
            if before == self._sent_again:
                return settled and self._join_callbacks(deadline)

    def _join_callbacks(self, deadline: Deadline) -> bool:
        """Wait for callbacks; a callback that calls this does not wait for its own end."""
        with self._lock:
            threads = [t for t in self._callback_threads if t is not threading.current_thread()]
        for thread in threads:
            thread.join(None if deadline.limit_s == math.inf else deadline.left_s())
        return not any(thread.is_alive() for thread in threads)

    def close(self) -> None:
        """Cancel all copies; end each checkpoint that is not durable with a NotDrainedError."""
        self._warn_of_unfinished()
        for link in self._links:
            link.close()
        with self._lock:
            self._closed = True
            left, self._callbacks = self._callbacks, {}
        for on_end in left.values():
            on_end(_left_by_close())

    def _warn_of_unfinished(self) -> None:
        for state in self.states():
            if steps := state.unfinished():
                log.warning(
                    "not copied from tier %s to %s: %s, step %s. `penstock drain`, or the next "
                    "process that saves there, copies the rest",
                    state.source,
                    state.target,
                    counted(len(steps), "checkpoint"),
                    listed([str(step) for step in steps]),
                )


def _holds(backend: Backend, record: CommitRecord) -> bool:
    return is_whole(backend, record) or compacted(backend, record)


def _call_back(on_end: OnEnd, error: BaseException | None) -> None:
    try:
        on_end(error)
    except BaseException as raised:  # noqa: BLE001 - the caller's code: recorded in the log
        log.error("a callback at the end of a save raised %s", repr(raised))  # noqa: TRY400


def _left_by_close() -> NotDrainedError:
    return NotDrainedError(f"the run was closed before the copy ended: {_LEFT}")

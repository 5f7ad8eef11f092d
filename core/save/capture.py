"""Captures described state: copies it out of the memory that training is about to change.

A chunk is copied into staging memory, which the writer gives back after use. If the copy would keep
the writer waiting, or the caller waits anyway, the chunk is lent *straight* instead: the writer
reads the live tensor, and the chunk counts as captured once it is written. Tensor versions are
compared before and after. Deferred tensors are also compared with samples of their memory.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from penstock.core.concurrency.latch import Latch
from penstock.core.errors import SaveAbortedError
from penstock.core.foreign import noting_origin
from penstock.core.pipeline.chunks import Captured
from penstock.core.plan.save import Capture
from penstock.core.save.live_memory import copy_chunk, flat_copies, held, shown
from penstock.core.save.samples import TornCheck
from penstock.core.tree.paths import show_path
from penstock.core.types import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from penstock.core.abc import PendingCopy
    from penstock.core.concurrency.workers import Workers
    from penstock.core.pipeline.staging import Block, Staging
    from penstock.core.plan.save import Chunk, SavePlan
    from penstock.core.save.request import SaveTurn

log = logging.getLogger("penstock")

_QUEUED = 4  # chunks of 16 MiB that the writer takes at once
_SIDE_BY_SIDE = 8  # chunks per thread: with few, the other threads would wait long for the last


class LentChunks:
    """Counts the chunks that the writer still reads from live memory; threads wait for zero.

    `wait` takes no lock, since the training thread may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all fields
        self._open = 0
        self._waiting: list[Latch] = []  # opened when no chunk is lent
        self._cancelled = False

    def lend(self) -> None:
        """Count one more lent chunk."""
        with self._lock:
            self._open += 1

    def give_back(self) -> None:
        """Count one lent chunk less: it was written or given up."""
        with self._lock:
            self._open -= 1
            if not self._open:
                self._let_pass()

    def cancel(self) -> None:
        """Wake all waiting threads; later waits return at once."""
        with self._lock:
            self._cancelled = True
            self._let_pass()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until no chunk is lent, or `cancel` is called; return False after `timeout_s`."""
        over = Latch()
        # Append before reading the count: `give_back` may count the last chunk in between, and it
        # opens only the latches in the list.
        self._waiting.append(over)
        if not self._open or self._cancelled:
            over.open()
        return over.wait(timeout_s)

    def _let_pass(self) -> None:
        while self._waiting:
            self._waiting.pop().open()


class Derivation:
    """Finds objects whose bytes equal those of a master, rounded to the object's dtype.

    Compares each object when its first chunk is due.

    Attributes:
        masters: The objects that may be derived, each with its possible masters.
        derived: Maps each derived object's number to its master's.
    """

    def __init__(
        self, masters: Mapping[int, Sequence[int]], torn: TornCheck, *, captures: bool
    ) -> None:
        """Prepare to compare.

        Args:
            masters: The attribute `masters`.
            torn: Has the objects of the plan.
            captures: Whether to capture derived objects too, because this rank may learn only later
                which rank stores them as derived.
        """
        self.masters = masters
        self.derived: dict[int, int] = {}
        self._torn = torn
        self._captures = captures

    def omits(self, chunk: Chunk) -> bool:
        """Return whether a chunk need not be captured because its object is derived.

        Raises:
            TornSnapshotError: The object or its master changed before they were compared.
        """
        piece = chunk.pieces[0]
        if piece.item not in self.masters:
            return False
        if not piece.start:
            self._compare(piece.item, deferred=chunk.capture is Capture.DEFERRED)
        return piece.item in self.derived and not self._captures

    def _compare(self, item: int, *, deferred: bool) -> None:
        objects = self._torn.objects
        entry = objects[item].entry
        for number in self.masters[item]:
            master = objects[number].entry
            sources = [entry.source, master.source]
            if deferred:
                for source in sources:
                    source.keep()
            with held(sources), noting_origin(partial(shown, entry)):
                if not entry.source.is_rounded(master.source):
                    continue
                # A change before the comparison may be undone before the fence, for example when
                # averaged weights are swapped in, and no copy of the object shows it.
                if deferred:
                    self._torn.check_items((item, number))
            self.derived[item] = number
            log.debug("%s is derived from %s", show_path(entry.path), show_path(master.path))
            return
        log.debug("%s is stored: it equals none of its masters", show_path(entry.path))


class CaptureRun:
    """The capture of one save.

    The capture thread calls `take_now`, then `take_deferred`; any thread may call `fence`. Captured
    chunks go to `handed_on` in plan order. The consumer of a chunk calls `release` when it no
    longer needs the memory.
    """

    def __init__(
        self,
        plan: SavePlan,
        staging: Staging,
        *,
        need_writer: Callable[[], None],
        straight_first: bool,
        workers: Workers,
        turn: SaveTurn,
    ) -> None:
        """Prepare to capture.

        Args:
            plan: The chunks and objects of the save.
            staging: The memory for copies.
            need_writer: Called before each wait that only writing can end.
            straight_first: Whether chunks are lent where memory allows, since the caller waits.
            workers: The threads that copy while training waits.
            turn: Has the chunks that other ranks write, and the objects that may be derived.
        """
        self._chunks = plan.chunks
        self._staging = staging
        self.handed_on: SimpleQueue[Captured] = SimpleQueue()
        self._need_writer = need_writer
        self._workers = workers
        self._straight_first = straight_first
        own = [(i, c) for i, c in enumerate(plan.chunks) if i not in turn.skip]
        self.chunk_count = len(own)
        """How many chunks are handed on."""
        self._now = [i for i, c in own if c.capture is not Capture.DEFERRED]
        self._later = deque(i for i, c in own if c.capture is Capture.DEFERRED)
        self._torn = TornCheck(plan.chunks, plan.objects, now=self._now, deferred=[*self._later])
        masters = plan.masters if turn.masters is None else turn.masters
        self._derivation = Derivation(masters, self._torn, captures=turn.captures_derived)
        self._gathered: list[Captured] = []  # have staging, but are not copied yet
        self._issued: deque[tuple[Captured, list[PendingCopy]]] = deque()
        self._lent = LentChunks()
        self._fenced = False
        self._all_issued = Latch()
        if not self._later:
            self._all_issued.open()
        self._error: BaseException | None = None
        self.has_device_copies = False
        self.straight_bytes = 0
        self.deferred_bytes = plan.bytes_of_chunks(self._later)  # the fence protects these

    @property
    def derived(self) -> Mapping[int, int]:
        """The number of each derived object, mapped to its master's."""
        return self._derivation.derived

    def take_now(self) -> None:
        """Capture all chunks that are not deferred; on return training may change their memory.

        Raises:
            TornSnapshotError: A tensor changed during the capture.
            SaveAbortedError: The save was given up.
        """
        for index in self._now:
            self._take(index, is_awaited=lambda: True)
        self._flush()
        self._wait_lent(None)
        self._torn.check(deferred=False)
        self._torn.sample()
        self._issue_device_copies()

    def take_deferred(self) -> None:
        """Capture the deferred chunks; on return all chunks are captured.

        Raises:
            TornSnapshotError: A tensor changed before its capture was complete.
            SaveAbortedError: The save was given up.
        """
        while self._later:
            self._take(self._later[0], is_awaited=lambda: self._fenced)
            self._later.popleft()
        self._copy_gathered()
        self._all_issued.open()
        self._flush()
        self._wait_lent(None)
        self._torn.check(deferred=True)

    def fence(
        self,
        timeout_s: float | None,
        *,
        passes: bool = True,
        while_comparing: AbstractContextManager[None] | None = None,
    ) -> bool:
        """Wait until deferred memory may change; return False if the capture takes longer.

        Does not wait for device copies in flight, since later device work of this thread runs after
        them. Takes no lock: the training thread calls this, and a signal handler that saves may
        interrupt it anywhere and would then wait for the lock forever.

        Args:
            timeout_s: How long to wait for the capture.
            passes: Whether the deferred memory is about to change. If not, this only waits, and
                later checks still compare the memory, which other threads may be changing.
            while_comparing: A context to enter while memory and versions are compared.

        Raises:
            TornSnapshotError: A deferred tensor changed too early.
        """
        self._fenced = True
        self._staging.wake()
        if not self._all_issued.wait(timeout_s):
            return False
        if self._error is not None:
            return True
        pending = [p for _, copies in list(self._issued) for p in copies]
        if not self._wait_lent(timeout_s):
            return False
        for copy in pending:
            copy.order()
        if passes and not self._torn.passed:
            with while_comparing or nullcontext():
                self._torn.check(deferred=True, samples=True)
                self._torn.passed = True
        return True

    def check(self) -> None:
        """Check that deferred memory is unchanged, unless the fence was passed.

        torch counts an in-place change when the change *ends*, so a check in the middle misses it.
        So the capture checks at its end, the fence checks on the training thread (which runs no
        operation then), and the save checks once more before it commits.

        Raises:
            TornSnapshotError: A deferred tensor changed.
        """
        self._torn.check(deferred=True, samples=True)

    def owns(self, storages: Callable[[], Iterable[int]]) -> bool:
        """Return whether any address that `storages` yields holds deferred memory."""
        deferred = self._torn.deferred_sources()
        described = {s.memory.storage for s in deferred if s.memory is not None}
        if any(address in described for address in storages()):
            return True
        moved = set()
        for source in deferred:
            at = source.locate()
            if at and source.memory is not None:
                moved.add(at - source.memory.offset)
        return not described >= moved and any(address in moved for address in storages())

    def cancel(self, error: BaseException) -> None:
        """Make every waiting method raise or return soon."""
        self._error = self._error or error
        self._lent.cancel()
        self._all_issued.open()
        self._staging.wake()

    def close(self) -> None:
        """Wait for the device copies that a failure left in flight, then release their memory."""
        for captured in self._gathered:
            self.release(captured)
        self._gathered = []
        while self._issued:
            captured, copies = self._issued.popleft()
            try:
                for copy in copies:
                    copy.wait()
            except Exception as error:  # noqa: BLE001 - the save failed already, and must end
                # CUDA refuses to wait while a graph is being captured. The copy may be in flight,
                # so its memory stays reserved.
                log.warning("cannot wait for a device copy, so its memory stays in use: %r", error)
                continue
            if captured.block is not None:
                self._staging.release(captured.block)

    def forget(self) -> None:
        """Drop all references to the state after the save, so that the user can free it."""
        self._torn.forget()
        self._chunks = ()

    def release(self, captured: Captured) -> None:
        """Release the memory of a chunk. Called once per chunk, from any thread."""
        if captured.block is not None:
            self._staging.release(captured.block)
        if captured.end_hold is None:
            return
        captured.end_hold()
        self._lent.give_back()

    def wake(self) -> None:
        """Wake the capture: the writer has accepted chunks, and may be lent more."""
        self._staging.wake()

    def release_unwritten(self) -> None:
        """Release the captured chunks that a failed writer will never accept."""
        with suppress(Empty):
            while True:
                self.release(self.handed_on.get(block=False))

    def _take(self, index: int, *, is_awaited: Callable[[], bool]) -> None:
        """Capture a chunk; `is_awaited` returns whether training waits for it."""
        chunk = self._chunks[index]
        if self._derivation.omits(chunk):
            self._copy_gathered()
            self.handed_on.put(Captured(index, memoryview(b"")))
            return
        lendable = self._lendable(chunk) is not None
        if lendable and self._straight_first and self._lend(index):
            return
        # All threads copy flat memory that training waits for.
        gathers = lendable and is_awaited()
        if not gathers:
            self._copy_gathered()
        block = self._reserve(index, lendable=lendable, is_awaited=is_awaited)
        if block is None:
            return
        captured = Captured(index, block.view, block)
        if gathers:
            self._gathered.append(captured)
            if len(self._gathered) >= _SIDE_BY_SIDE * self._workers.count:
                self._copy_gathered()
        else:
            self._hand_on(captured, self._copy_or_release(index, block))

    def _reserve(
        self, index: int, *, lendable: bool, is_awaited: Callable[[], bool]
    ) -> Block | None:
        """Reserve staging for a chunk; return None if the chunk was lent instead."""
        chunk = self._chunks[index]

        def may_be_lent() -> bool:
            # A lent chunk blocks training until it is written. So it is lent only to a writer that
            # has nothing else to do until staging is free again.
            is_needed = self.handed_on.qsize() < _QUEUED and not self._staging.is_being_touched
            return lendable and is_awaited() and is_needed

        while True:
            # Asked first, since `acquire` may fail right before the last piece is touched.
            is_short = not self._staging.is_being_touched
            block = self._staging.acquire(chunk.length, chunk.phase)
            if block is not None:
                return block
            self._raise_if_cancelled()
            # Memory that is being touched is ready soon; a store may stall for minutes.
            if is_short:
                self._need_writer()
                self._staging.was_short = self._staging.was_short or is_awaited()
            # A thread that waits for staging must hold none, or two threads could wait for each
            # other forever: finish the copies in flight and hand them on first.
            self._flush()
            if is_short and may_be_lent():
                if self._lend(index):
                    return None
                lendable = False
            self._staging.wait(
                lambda: bool(self._error) or may_be_lent(), self._workers.timing.staging_poll_s
            )

    def _hand_on(self, captured: Captured, copies: list[PendingCopy]) -> None:
        """Hand a chunk on in order, once its `copies` from devices have landed."""
        if copies or self._issued:
            self.has_device_copies = True
            self._issued.append((captured, copies))
        else:
            self.handed_on.put(captured)

    def _copy_gathered(self) -> None:
        """Copy the gathered chunks in parallel, and hand them on."""
        if not self._gathered:
            return
        pairs = [(captured, captured.block) for captured in self._gathered if captured.block]
        chunks = [self._chunks[captured.index] for captured, _ in pairs]
        blocks = [block for _, block in pairs]
        with flat_copies(chunks, self._torn.objects, blocks) as moves:
            for outcome in self._workers.side_by_side(moves):
                if isinstance(outcome, BaseException):
                    try:
                        raise outcome
                    finally:
                        # Else a cycle (error, traceback, this frame) would keep tensors alive.
                        del outcome
            self._torn.check_copies({captured.index: b.address for captured, b in pairs})
        gathered, self._gathered = self._gathered, []
        for captured in gathered:
            self._hand_on(captured, [])

    def _copy_or_release(self, index: int, block: Block) -> list[PendingCopy]:
        copies: list[PendingCopy] = []
        try:
            copy_chunk(self._chunks[index], self._torn.objects, block, copies)
            if not copies:
                self._torn.check_copies({index: block.address})
        except BaseException:
            for copy in copies:
                copy.wait()
            self._staging.release(block)
            raise
        return copies

    def _lendable(self, chunk: Chunk) -> memoryview | None:
        """Return the chunk's bytes in live host memory, if they can be written from there."""
        if chunk.slab:
            return None
        piece = chunk.pieces[0]
        planned = self._torn.objects[piece.item]
        entry, source = planned.entry, planned.entry.source
        with noting_origin(partial(shown, entry)):
            if not source.address or not source.steady():
                return None
        may_be_raw = not chunk.chain or planned.may_stay_raw
        if may_be_raw and (source.address + piece.start) % PAGE_BYTES != chunk.phase:
            return None
        view = source.view()
        return None if view is None else view[piece.start : piece.stop]

    def _lend(self, index: int) -> bool:
        """Hand the chunk on without a copy; return False if it can no longer be lent."""
        self._need_writer()
        self._flush()
        chunk = self._chunks[index]
        source = self._torn.objects[chunk.pieces[0].item].entry.source
        with ExitStack() as unless_lent:
            end_hold = type(source).hold([source])
            unless_lent.callback(end_hold)
            # Before the hold, the tensor may have moved to memory that another process writes.
            view = self._lendable(chunk)
            if view is None:
                return False
            unless_lent.pop_all()  # `release` ends the hold from here
        self._lent.lend()
        self.straight_bytes += view.nbytes
        self.handed_on.put(Captured(index, view, end_hold=end_hold))
        return True

    def _issue_device_copies(self) -> None:
        """Start copies of deferred device tensors, without waiting, while staging is free."""
        objects = self._torn.objects
        while self._later:
            chunk = self._chunks[self._later[0]]
            if chunk.pieces[0].item in self._derivation.masters:
                return  # a comparison waits for the device
            if any(objects[p.item].entry.source.device == "cpu" for p in chunk.pieces):
                return
            block = self._staging.acquire(chunk.length, chunk.phase)
            if block is None:
                return
            self.has_device_copies = True
            captured = Captured(self._later.popleft(), block.view, block)
            self._issued.append((captured, self._copy_or_release(captured.index, block)))

    def _flush(self) -> None:
        """Copy the gathered chunks, wait for device copies in order, and hand their chunks on."""
        self._copy_gathered()
        while self._issued:
            captured, copies = self._issued[0]
            for copy in copies:
                copy.wait()
            self._issued.popleft()
            self.handed_on.put(captured)

    def _wait_lent(self, timeout_s: float | None) -> bool:
        over = self._lent.wait(timeout_s)
        self._raise_if_cancelled()
        return over

    def _raise_if_cancelled(self) -> None:
        error = self._error
        if isinstance(error, SaveAbortedError):
            raise error
        if error is not None:
            msg = "the save was given up because another part of it failed"
            raise SaveAbortedError(msg) from error

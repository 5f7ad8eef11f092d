"""Moves described state out of the memory that training is about to change.

A chunk is either copied into staging, or, when staging is too small or the caller waits anyway,
lent *straight*: the writer then takes it from the live tensor, and it counts as captured only
when it has been written. Versions of tensors are compared before and after, and of those that are
captured later also samples of their memory.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from penstock.core.concurrency.garbage import collections_held
from penstock.core.concurrency.latch import Latch
from penstock.core.errors import SaveAbortedError, TornSnapshotError
from penstock.core.foreign import noting_origin
from penstock.core.pipeline.writer import Captured
from penstock.core.plan.save import Capture
from penstock.core.save.samples import MemorySamples
from penstock.core.tree.paths import show_path
from penstock.core.types import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from penstock.core.abc import ByteSource, PendingCopy, StateObject
    from penstock.core.concurrency.timing import Timing
    from penstock.core.pipeline.staging import Block, Staging
    from penstock.core.plan.save import Chunk, SavePlan
    from penstock.core.types import ObjectPath

    Hold: TypeAlias = Callable[[Sequence[ByteSource]], Callable[[], None]]

_LISTED = 8


class CaptureRun:
    """The capture of one save.

    `take_now` runs on the caller's thread, `take_deferred` on a background one, `fence` on any.
    Captured chunks go to `handed_on` in plan order; who takes one calls `release` when its memory
    is no longer needed.
    """

    def __init__(
        self,
        plan: SavePlan,
        staging: Staging,
        *,
        need_writer: Callable[[], None],
        straight_first: bool,
        timing: Timing,
    ) -> None:
        self._chunks = plan.chunks
        self._objects = plan.objects
        self._staging = staging
        self.handed_on: SimpleQueue[Captured] = SimpleQueue()
        self._need_writer = need_writer  # called before anything that only writing can end
        self._timing = timing
        self._straight_first = straight_first  # blocking mode: no copies where memory allows
        self._now = [i for i, c in enumerate(plan.chunks) if c.capture is not Capture.DEFERRED]
        self._later = [i for i, c in enumerate(plan.chunks) if c.capture is Capture.DEFERRED]
        self._issued: deque[tuple[Captured, list[PendingCopy]]] = deque()
        self._lock = threading.Lock()  # guards the fields below, and `_issued`
        self._waiting: list[Latch] = []  # opened when nothing is lent any more
        self._straight_open = 0
        self._fenced = False
        self._all_issued = Latch()
        if not self._later:
            self._all_issued.open()
        self._error: BaseException | None = None
        self._passed = False
        self._samples: MemorySamples | None = None  # of deferred memory, as `take_now` left it
        self.has_device_copies = False
        self.straight_bytes = 0
        self.deferred_bytes = plan.bytes_of(Capture.DEFERRED)  # behind the fence

    def take_now(self) -> None:
        """Capture all that is not deferred; on return that memory may change.

        Raises:
            TornSnapshotError: A tensor changed meanwhile.
            SaveAbortedError: The save was given up.
        """
        for index in self._now:
            self._take(index, may_lend=lambda: True)
        self._flush()
        self._wait_straight(None)
        self._raise_if_changed(deferred=False)
        if self._later:
            self._samples = MemorySamples(self._chunks, self._later, self._objects)
        self._issue_device_copies()

    def take_deferred(self) -> None:
        """Capture what is left; on return (after `fence` at the latest) everything is captured.

        Raises:
            TornSnapshotError: A tensor changed before its capture was complete.
            SaveAbortedError: The save was given up.
        """
        while self._later:
            self._take(self._later[0], may_lend=lambda: self._fenced)
            self._later.pop(0)
        self._all_issued.open()
        self._flush()
        self._wait_straight(None)
        if not self._passed:
            self._raise_if_changed(deferred=True)

    def fence(
        self,
        timeout_s: float | None,
        *,
        passes: bool = True,
        while_comparing: AbstractContextManager[None] | None = None,
    ) -> bool:
        """Let deferred memory change once this returns True; False: not complete in time.

        Device copies that are under way are ordered before later work of this thread instead of
        waited for. The calling thread trains, so no lock is taken here: a signal handler that
        saves may interrupt it anywhere, and waits for threads that would wait for the lock.

        Args:
            timeout_s: How long to wait for the capture.
            passes: Whether it is the deferred memory that is about to change. If not, this only
                waits: what is going on in other threads is still to be compared.
            while_comparing: Entered while memory and versions are compared.

        Raises:
            TornSnapshotError: A deferred tensor changed before.
        """
        self._fenced = True
        self._staging.wake()
        if not self._all_issued.wait(timeout_s):
            return False
        if self._error is not None:
            return True
        pending = [p for _, copies in list(self._issued) for p in copies]
        if not self._wait_straight(timeout_s):
            return False
        for copy in pending:
            copy.order()
        if passes and not self._passed:
            with while_comparing or nullcontext():
                self._raise_if_changed(deferred=True, samples=self._samples)
                self._passed = True
        return True

    def check(self) -> None:
        """Compare deferred memory, unless the fence was passed: then it may differ.

        torch counts an in-place change when it is *over*: a check in the middle of one sees
        nothing. So the capture checks at its end, the fence on the thread that trains (which is
        in no operation then), and the save once more before it commits.

        Raises:
            TornSnapshotError: A deferred tensor changed.
        """
        if not self._passed:
            self._raise_if_changed(deferred=True, samples=self._samples)

    def owns(self, storages: Callable[[], Iterable[int]]) -> bool:
        """Whether deferred memory is in one of `storages`, given by their addresses."""
        objects = self._objects
        numbers = self._items(deferred=True) if objects else ()
        deferred = [objects[number].entry.source for number in numbers]
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
        with self._lock:
            self._error = self._error or error
            self._let_pass()
        self._all_issued.open()
        self._staging.wake()

    def close(self) -> None:
        """After a failure: wait for device copies still under way, then give their memory back."""
        while self._issued:
            captured, copies = self._issued.popleft()
            for copy in copies:
                copy.wait()
            if captured.block is not None:
                self._staging.release(captured.block)

    def forget(self) -> None:
        """The save is over: let go of the state, which may live no longer than this."""
        self._passed = True  # nothing is left to compare
        self._objects = self._chunks = ()
        self._samples = None

    def release(self, captured: Captured) -> None:
        """Give the memory of a chunk back; called once for each, from any thread."""
        if captured.block is not None:
            self._staging.release(captured.block)
            return
        if captured.end_hold is not None:
            captured.end_hold()
        with self._lock:
            self._straight_open -= 1
            if not self._straight_open:
                self._let_pass()

    def release_unwritten(self) -> None:
        """Give back what is captured and no writer has taken: after a failure none will."""
        with suppress(Empty):
            while True:
                self.release(self.handed_on.get(block=False))

    def _let_pass(self) -> None:
        while self._waiting:
            self._waiting.pop().open()

    # ------------------------------------------------------------------------------------------

    def _take(self, index: int, *, may_lend: Callable[[], bool]) -> None:
        chunk = self._chunks[index]
        lendable = self._lendable(chunk) is not None
        if lendable and self._straight_first and self._lend(index):
            return

        def may_be_lent() -> bool:
            return lendable and may_lend()

        while (block := self._staging.acquire(chunk.length, chunk.phase)) is None:
            self._raise_if_cancelled()
            self._need_writer()
            if may_be_lent():
                if self._lend(index):
                    return
                lendable = False
            # Whoever waits holds nothing: copies under way are finished and handed on first.
            self._flush()
            self._staging.wait(
                lambda: bool(self._error) or may_be_lent(), self._timing.staging_poll_s
            )
        captured = Captured(index, block.view, block, straight=False)
        copies = self._copy_or_release(index, block)
        if copies or self._issued:
            self.has_device_copies = True
            with self._lock:
                self._issued.append((captured, copies))
        else:
            self.handed_on.put(captured)

    def _copy_or_release(self, index: int, block: Block) -> list[PendingCopy]:
        copies: list[PendingCopy] = []
        try:
            self._copy(self._chunks[index], block, copies)
            # Changed before it was copied, though it may be as it was again at the fence.
            if self._samples is not None and not copies:
                changed = self._samples.changed_in(index, block.address)
                if changed:
                    self._raise_if_changed(deferred=True, samples=self._samples, known=changed)
        except BaseException:
            for copy in copies:
                copy.wait()
            self._staging.release(block)
            raise
        return copies

    def _copy(self, chunk: Chunk, block: Block, copies: list[PendingCopy]) -> None:
        if chunk.slab:
            ctypes.memset(block.address, 0, chunk.length)  # gaps are zero, not old state
        elif chunk.capture is Capture.DEFERRED:
            self._objects[chunk.pieces[0].item].entry.source.keep()
        with self._held(chunk):
            self._copy_pieces(chunk, block, copies)

    @contextmanager
    def _held(self, chunk: Chunk) -> Iterator[None]:
        """While the chunk is copied nobody may move its memory, and free it where it was."""
        by_hold: dict[Hold, list[ByteSource]] = {}
        for piece in chunk.pieces:
            source = self._objects[piece.item].entry.source
            by_hold.setdefault(type(source).hold, []).append(source)
        with ExitStack() as held:
            # A slab takes thousands of holds, enough to start collections that would look at all
            # that planning has made; those took ten times as long as the holds.
            with collections_held:
                for hold, sources in by_hold.items():
                    held.callback(hold(sources))
            yield

    def _copy_pieces(self, chunk: Chunk, block: Block, copies: list[PendingCopy]) -> None:
        for piece in chunk.pieces:
            entry = self._objects[piece.item].entry
            source = entry.source
            length = piece.stop - piece.start
            if source.address is not None:
                if not source.address:
                    raise _torn([entry.path], deferred=True)  # it was freed
                ctypes.memmove(block.address + piece.at, source.address + piece.start, length)
                continue
            out = block.view[piece.at : piece.at + length]
            with noting_origin(partial(_shown, entry)):
                copy = source.copy_out(piece.start, out)
            if copy is not None:
                copies.append(copy)

    def _lendable(self, chunk: Chunk) -> memoryview | None:
        """The chunk's bytes in live host memory, if they can be written from there."""
        if chunk.slab:
            return None
        piece = chunk.pieces[0]
        entry = self._objects[piece.item].entry
        source = entry.source
        with noting_origin(partial(_shown, entry)):
            if not source.address or not source.steady():
                return None
        if chunk.offset is not None and (source.address + piece.start) % PAGE_BYTES != chunk.phase:
            return None
        view = source.view()
        return None if view is None else view[piece.start : piece.stop]

    def _lend(self, index: int) -> bool:
        """Hand on the chunk where it stands; False: it can no longer be lent."""
        self._need_writer()
        self._flush()
        chunk = self._chunks[index]
        source = self._objects[chunk.pieces[0].item].entry.source
        with ExitStack() as unless_lent:
            end_hold = type(source).hold([source])
            unless_lent.callback(end_hold)
            # It may have moved before the hold, to memory that another process can write.
            view = self._lendable(chunk)
            if view is None:
                return False
            unless_lent.pop_all()  # from here on who has the chunk lets go
        with self._lock:
            self._straight_open += 1
            self.straight_bytes += view.nbytes
        self.handed_on.put(Captured(index, view, None, straight=True, end_hold=end_hold))
        return True

    def _issue_device_copies(self) -> None:
        """Start copies of deferred device tensors as far as staging goes, without waiting."""
        while self._later:
            chunk = self._chunks[self._later[0]]
            if any(self._objects[p.item].entry.source.device == "cpu" for p in chunk.pieces):
                return
            block = self._staging.acquire(chunk.length, chunk.phase)
            if block is None:
                return
            self.has_device_copies = True
            captured = Captured(self._later.pop(0), block.view, block, straight=False)
            self._issued.append((captured, self._copy_or_release(captured.index, block)))

    def _flush(self) -> None:
        """Wait for device copies in order and hand their chunks on."""
        while self._issued:
            captured, copies = self._issued[0]
            for copy in copies:
                copy.wait()
            with self._lock:
                self._issued.popleft()
            self.handed_on.put(captured)

    def _wait_straight(self, timeout_s: float | None) -> bool:
        over = Latch()
        self._waiting.append(over)  # first: who lends nothing any more may have looked by now
        if not self._straight_open or self._error is not None:
            over.open()
        done = over.wait(timeout_s)
        self._raise_if_cancelled()
        return done

    def _raise_if_cancelled(self) -> None:
        error = self._error
        if isinstance(error, SaveAbortedError):
            raise error
        if error is not None:
            msg = "the save was given up because another part of it failed"
            raise SaveAbortedError(msg) from error

    def _raise_if_changed(
        self,
        *,
        deferred: bool,
        samples: MemorySamples | None = None,
        known: Collection[int] = (),
    ) -> None:
        """Compare versions, and what `samples` there are, with what they were at `save`.

        Raises:
            TornSnapshotError: Some differ, or some are `known` to.
        """
        objects = self._objects
        if not objects:
            return  # the save is over
        changed = set(known)
        for item in self._items(deferred=deferred):
            planned = objects[item]
            version = planned.version
            if version is not None and planned.entry.source.version() != version:
                changed.add(item)
        if samples is not None:
            changed |= samples.changed()
        # What passed the fence meanwhile has been compared there, and may have changed since.
        if changed and not (deferred and self._passed):
            raise _torn([objects[item].entry.path for item in sorted(changed)], deferred=deferred)

    def _items(self, *, deferred: bool) -> dict[int, None]:
        return {
            piece.item: None
            for chunk in self._chunks
            if (chunk.capture is Capture.DEFERRED) is deferred
            for piece in chunk.pieces
        }


def _shown(entry: StateObject) -> str:
    """The object and the class of its source, for a message."""
    kind = type(entry.source)
    return f"in {kind.__module__}.{kind.__qualname__}, the source of {show_path(entry.path)}"


def _torn(paths: Sequence[ObjectPath], *, deferred: bool) -> TornSnapshotError:
    more = len(paths) - _LISTED
    shown = ", ".join(map(show_path, paths[:_LISTED])) + (f" and {more} more" if more > 0 else "")
    when = (
        "before the fence; call fence() before changing it"
        if deferred
        else "while save() captured it: another thread writes to it"
    )
    return TornSnapshotError(
        f"{shown} changed {when}. This save is given up; nothing was committed."
    )

"""Captures described state: moves it out of the memory that training is about to change.

A chunk is copied into staging. Or, when staging is too small or the caller waits anyway, it is lent
*straight*: the writer reads the live tensor, and the chunk counts as captured once it is written.
The versions of tensors are compared before and after. A deferred tensor is also compared with
samples of its memory.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from penstock.core.abc import ByteSource
from penstock.core.concurrency.garbage import collections_held
from penstock.core.concurrency.gather import MOST_WIDTH, gather
from penstock.core.concurrency.latch import Latch
from penstock.core.errors import SaveAbortedError, TornSnapshotError
from penstock.core.foreign import noting_origin
from penstock.core.pipeline.chunks import Captured
from penstock.core.plan.save import SLAB_ALIGNMENT, Capture
from penstock.core.save.samples import MemorySamples, by_class, while_still
from penstock.core.tree.paths import show_path
from penstock.core.types import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from penstock.core.abc import PendingCopy, StateObject
    from penstock.core.concurrency.timing import Timing
    from penstock.core.pipeline.staging import Block, Staging
    from penstock.core.plan.save import Chunk, Piece, SavePlan
    from penstock.core.types import ObjectPath

    Hold: TypeAlias = Callable[[Sequence[ByteSource]], Callable[[], None]]

log = logging.getLogger("penstock")

_LISTED = 8

_TOGETHER = 2048  # objects that are kept still together, and copied, which takes some 2 ms
_FEW = 4  # objects of one length, which one by one are copied as fast
_GATHERED_BYTES = 1 << 21  # copied twice, the second time from the cache


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
        timing: Timing,
        skip: Collection[int] = (),
        masters: Mapping[int, Sequence[int]] | None = None,
        captures_derived: bool = False,
    ) -> None:
        self._skip = skip  # the chunks that other ranks write
        # With several ranks it may be known only later which of them stores an object as derived:
        # so all compare it, and capture it all the same.
        self._captures_derived = captures_derived
        self._chunks = plan.chunks
        self._objects = plan.objects
        self._masters = plan.masters if masters is None else masters
        self.derived: dict[int, int] = {}
        """The numbers of derived objects, and of those that they are derived from."""
        self._staging = staging
        self.handed_on: SimpleQueue[Captured] = SimpleQueue()
        self._need_writer = need_writer  # called before each wait that only writing can end
        self._timing = timing
        self._straight_first = straight_first  # blocking mode: no copies where memory allows
        taken = [(i, c) for i, c in enumerate(plan.chunks) if i not in skip]
        self.chunk_count = len(taken)
        """How many chunks are handed on."""
        self._now = [i for i, c in taken if c.capture is not Capture.DEFERRED]
        self._later = [i for i, c in taken if c.capture is Capture.DEFERRED]
        self._issued: deque[tuple[Captured, list[PendingCopy]]] = deque()
        self._lock = threading.Lock()  # guards the fields below, and `_issued`
        self._waiting: list[Latch] = []  # opened when no chunk is lent any more
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
        self.deferred_bytes = plan.bytes_of_chunks(self._later)  # behind the fence

    def take_now(self) -> None:
        """Capture everything that is not deferred; on return that memory may change.

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
        """Capture the deferred chunks; on return, which may need the fence, all are captured.

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
        """Wait until deferred memory may change; False: the capture was not complete in time.

        Device copies in flight are not waited for: later work of this thread is ordered behind
        them. The calling thread trains, so it takes no lock here: a signal handler that saves may
        interrupt it anywhere, and would wait for threads that wait for the lock.

        Args:
            timeout_s: How long to wait for the capture.
            passes: Whether the deferred memory is about to change. If not, this only waits, and
                later checks still compare the memory, which other threads may be changing.
            while_comparing: A context to enter while memory and versions are compared.

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
        """Compare deferred memory, unless the fence was passed: behind it the memory may differ.

        torch counts an in-place change when it is *over*, so a check in the middle of one misses
        it. So the capture checks at its end, the fence checks on the thread that trains (which is
        in no operation then), and the save checks once more before it commits.

        Raises:
            TornSnapshotError: A deferred tensor changed.
        """
        if not self._passed:
            self._raise_if_changed(deferred=True, samples=self._samples)

    def owns(self, storages: Callable[[], Iterable[int]]) -> bool:
        """Whether deferred memory lies in one of `storages`, which yields their addresses."""
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
        """Make every method that waits raise or return soon."""
        with self._lock:
            self._error = self._error or error
            self._let_pass()
        self._all_issued.open()
        self._staging.wake()

    def close(self) -> None:
        """Wait for the device copies that a failure left in flight, then release their memory."""
        while self._issued:
            captured, copies = self._issued.popleft()
            try:
                for copy in copies:
                    copy.wait()
            except Exception as error:  # noqa: BLE001 - the save failed already, and must end
                # CUDA refuses to wait while a graph is being captured. The copy may be in flight,
                # so its memory stays reserved.
                log.warning("a device copy of a failed save cannot be waited for: %r", error)
                continue
            if captured.block is not None:
                self._staging.release(captured.block)

    def forget(self) -> None:
        """Drop all references to the state once the save is over: the user may free it now."""
        self._passed = True  # later fences compare nothing
        self._objects = self._chunks = ()
        self._masters = {}
        self._samples = None

    def release(self, captured: Captured) -> None:
        """Release the memory of a chunk; called once for each, from any thread."""
        if captured.block is not None:
            self._staging.release(captured.block)
        if captured.end_hold is None:
            return
        captured.end_hold()
        with self._lock:
            self._straight_open -= 1
            if not self._straight_open:
                self._let_pass()

    def release_unwritten(self) -> None:
        """Release the captured chunks that the writer has not taken and, failed, never will."""
        with suppress(Empty):
            while True:
                self.release(self.handed_on.get(block=False))

    def _let_pass(self) -> None:
        while self._waiting:
            self._waiting.pop().open()

    def _take(self, index: int, *, may_lend: Callable[[], bool]) -> None:
        chunk = self._chunks[index]
        if self._is_derived(chunk):
            self.handed_on.put(Captured(index, memoryview(b"")))
            return
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
            # A thread that waits for staging must hold none of it, or two could wait for each
            # other for ever: finish the copies in flight and hand them on first.
            self._flush()
            self._staging.wait(
                lambda: bool(self._error) or may_be_lent(), self._timing.staging_poll_s
            )
        captured = Captured(index, block.view, block)
        copies = self._copy_or_release(index, block)
        if copies or self._issued:
            self.has_device_copies = True
            with self._lock:
                self._issued.append((captured, copies))
        else:
            self.handed_on.put(captured)

    def _is_derived(self, chunk: Chunk) -> bool:
        """Return whether the chunk is of a derived object; compares when its first chunk is due."""
        piece = chunk.pieces[0]
        if piece.item not in self._masters:
            return False
        if not piece.start:
            self._compare_with_masters(piece.item)
        return piece.item in self.derived and not self._captures_derived

    def _compare_with_masters(self, item: int) -> None:
        """Find the master whose elements, rounded, are those of the object.

        Raises:
            TornSnapshotError: One of the two changed before they were compared.
        """
        entry = self._objects[item].entry
        deferred = self._objects[item].capture is Capture.DEFERRED
        for number in self._masters[item]:
            master = self._objects[number].entry
            sources = [entry.source, master.source]
            if deferred:
                for source in sources:
                    source.keep()
            with self._held(sources), noting_origin(partial(_shown, entry)):
                if not entry.source.is_rounded(master.source):
                    continue
                # A change before the comparison may be undone by the time of the fence, as when
                # averaged weights are swapped in, and no copy of the object shows it.
                if deferred and self._samples is not None:
                    changed = {n for n in (item, number) if self._samples.is_changed(n)}
                    if changed:
                        self._raise_if_changed(deferred=True, known=changed)
            self.derived[item] = number
            log.debug("%s is derived from %s", show_path(entry.path), show_path(master.path))
            return
        log.debug("%s is stored: it equals none of its masters", show_path(entry.path))

    def _copy_or_release(self, index: int, block: Block) -> list[PendingCopy]:
        copies: list[PendingCopy] = []
        try:
            self._copy(self._chunks[index], block, copies)
            # A tensor that was changed before its copy may be restored by the time of the fence,
            # as averaged weights are: only the copy shows it.
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
        pieces: Sequence[Piece] = chunk.pieces
        if chunk.slab:
            if sum([piece.stop for piece in pieces]) < chunk.length:
                ctypes.memset(block.address, 0, chunk.length)  # gaps are zero, not old state
            if chunk.capture is not Capture.DEFERRED:
                pieces = self._copy_alike(pieces, block)
        elif chunk.capture is Capture.DEFERRED:
            self._objects[pieces[0].item].entry.source.keep()
        if pieces:
            self._copy_held(pieces, block, copies)

    def _copy_alike(self, pieces: Sequence[Piece], block: Block) -> list[Piece]:
        """Copy small objects of equal lengths together; return the pieces that are left.

        A hold of each object would take longer than its copy. A copy behind the fence needs the
        holds: training has the GIL then, and nothing would move for as long as this thread waits.
        """
        by_length: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_length.setdefault(piece.stop, []).append(piece)
        left: list[Piece] = []
        for length, alike in by_length.items():
            if length > MOST_WIDTH or len(alike) < _FEW:
                left += alike
                continue
            for first in range(0, len(alike), _TOGETHER):
                part = alike[first : first + _TOGETHER]
                sources = [self._objects[piece.item].entry.source for piece in part]
                if not all(map(_may_stay_still, set(map(type, sources)))):
                    left += part
                    continue
                copy = partial(self._copy_still, part, sources, block)
                left += while_still(by_class(sources), copy)
        return left

    def _copy_still(
        self, pieces: Sequence[Piece], sources: Sequence[ByteSource], block: Block
    ) -> list[Piece]:
        """Copy objects of one length whose memory does not move, all that have an address."""
        found = [_address_now(source) for source in sources]
        left: list[Piece] = []
        if None in found:
            left = [piece for piece, at in zip(pieces, found, strict=True) if at is None]
            pieces = [piece for piece, at in zip(pieces, found, strict=True) if at is not None]
            found = [at for at in found if at is not None]
        if 0 in found:
            freed = self._objects[pieces[found.index(0)].item].entry
            raise _torn([freed.path], deferred=True)
        if not pieces:
            return left
        addresses, length = np.array(found, np.int64), pieces[0].stop
        slots = np.array([piece.at for piece in pieces]) // SLAB_ALIGNMENT
        count = (block.view.nbytes - length) // SLAB_ALIGNMENT + 1
        out: NDArray[np.void] = np.ndarray(
            count, f"V{length}", block.view, strides=(SLAB_ALIGNMENT,)
        )
        step = max(1, _GATHERED_BYTES // length)
        for first in range(0, len(pieces), step):
            part = slice(first, first + step)
            out[slots[part]] = gather(addresses[part], length)
        return left

    def _copy_held(self, pieces: Sequence[Piece], block: Block, copies: list[PendingCopy]) -> None:
        with self._held([self._objects[piece.item].entry.source for piece in pieces]):
            self._copy_pieces(pieces, block, copies)

    @contextmanager
    def _held(self, sources: Sequence[ByteSource]) -> Iterator[None]:
        """Keep other threads from moving and freeing the memory of `sources` while it is read."""
        by_hold: dict[Hold, list[ByteSource]] = {}
        for source in sources:
            by_hold.setdefault(type(source).hold, []).append(source)
        with ExitStack() as held:
            # A slab takes thousands of holds, enough to start garbage collections that look at
            # all objects of the plan; these took ten times as long as the holds.
            with collections_held:
                for hold, together in by_hold.items():
                    held.callback(hold(together))
            yield

    def _copy_pieces(
        self, pieces: Sequence[Piece], block: Block, copies: list[PendingCopy]
    ) -> None:
        for piece in pieces:
            entry = self._objects[piece.item].entry
            source = entry.source
            length = piece.stop - piece.start
            if source.address is not None:
                if not source.address:
                    raise _torn([entry.path], deferred=True)  # the memory was freed
                ctypes.memmove(block.address + piece.at, source.address + piece.start, length)
                continue
            out = block.view[piece.at : piece.at + length]
            with noting_origin(partial(_shown, entry)):
                copy = source.copy_out(piece.start, out)
            if copy is not None:
                copies.append(copy)

    def _lendable(self, chunk: Chunk) -> memoryview | None:
        """Return the chunk's bytes in live host memory, if they can be written from there."""
        if chunk.slab:
            return None
        piece = chunk.pieces[0]
        planned = self._objects[piece.item]
        entry, source = planned.entry, planned.entry.source
        with noting_origin(partial(_shown, entry)):
            if not source.address or not source.steady():
                return None
        may_be_raw = not chunk.chain or planned.may_stay_raw
        if may_be_raw and (source.address + piece.start) % PAGE_BYTES != chunk.phase:
            return None
        view = source.view()
        return None if view is None else view[piece.start : piece.stop]

    def _lend(self, index: int) -> bool:
        """Hand the chunk on without a copy; False: it can no longer be lent."""
        self._need_writer()
        self._flush()
        chunk = self._chunks[index]
        source = self._objects[chunk.pieces[0].item].entry.source
        with ExitStack() as unless_lent:
            end_hold = type(source).hold([source])
            unless_lent.callback(end_hold)
            # The tensor may have moved before the hold, to memory that another process writes.
            view = self._lendable(chunk)
            if view is None:
                return False
            unless_lent.pop_all()  # from here on `release` ends the hold
        with self._lock:
            self._straight_open += 1
            self.straight_bytes += view.nbytes
        self.handed_on.put(Captured(index, view, end_hold=end_hold))
        return True

    def _issue_device_copies(self) -> None:
        """Start copies of deferred device tensors as far as staging goes, without waiting."""
        while self._later:
            chunk = self._chunks[self._later[0]]
            if chunk.pieces[0].item in self._masters:
                return  # a comparison waits for the device
            if any(self._objects[p.item].entry.source.device == "cpu" for p in chunk.pieces):
                return
            block = self._staging.acquire(chunk.length, chunk.phase)
            if block is None:
                return
            self.has_device_copies = True
            captured = Captured(self._later.pop(0), block.view, block)
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
        # Before the count is read: `release` may return the last lent chunk in between, and
        # opens only the latches that are in the list by then.
        self._waiting.append(over)
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
        """Compare versions and `samples`, if given, with those at the time of `save`.

        Raises:
            TornSnapshotError: Some tensors differ, or some are `known` to.
        """
        objects = self._objects
        if not objects:
            return  # the save is over
        changed = set(known)
        for chunk in self._taken(deferred=deferred):
            for piece in chunk.pieces:
                entry, _, _, version, _ = objects[piece.item]
                if version is not None and entry.source.version() != version:
                    changed.add(piece.item)
        if samples is not None:
            changed |= samples.changed()
        # If the fence was passed meanwhile, it compared this memory, which may change since then.
        if changed and not (deferred and self._passed):
            raise _torn([objects[item].entry.path for item in sorted(changed)], deferred=deferred)

    def _items(self, *, deferred: bool) -> dict[int, None]:
        return {p.item: None for c in self._taken(deferred=deferred) for p in c.pieces}

    def _taken(self, *, deferred: bool) -> Iterator[Chunk]:
        """Yield the chunks that are captured here, those that are deferred or all others."""
        for number, chunk in enumerate(self._chunks):
            if (chunk.capture is Capture.DEFERRED) is deferred and number not in self._skip:
                yield chunk


def _may_stay_still(kind: type[ByteSource]) -> bool:
    """Return whether `still` does for a copy, as it does not where only `hold` keeps memory."""
    return kind.hold is ByteSource.hold or kind.still is not ByteSource.still


def _address_now(source: ByteSource) -> int | None:
    """Return where flat bytes begin: 0 where their memory was freed, None for others."""
    described = source.address
    if described is None:
        return None
    at = source.locate()
    return described if at is None else at


def _shown(entry: StateObject) -> str:
    """Return the object and the class of its source for a message."""
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

"""Moves described state out of the memory that training is about to change.

A chunk is either copied into staging, or, when staging is too small or the caller waits anyway,
lent *straight*: the writer then takes it from the live tensor, and it counts as captured only
when it has been written. Versions of tensors are compared before and after.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.blame import blaming
from penstock.core.errors import SaveAbortedError, TornSnapshotError
from penstock.core.latch import Latch
from penstock.core.paths import show_path
from penstock.core.plan import Capture
from penstock.core.types import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc import ByteSource, PendingCopy
    from penstock.core.plan import Chunk, SavePlan
    from penstock.core.staging import Block, Staging
    from penstock.core.types import ObjectPath

_LISTED = 8
_POLL_S = 0.05  # only bounds how late an abort is noticed while waiting for staging


@dataclass(eq=False, slots=True)
class Captured:
    """A chunk's bytes, ready for encoding and writing.

    Attributes:
        index: Number of the chunk in the plan.
        view: Its raw bytes.
        block: Staging to give back, None when straight.
        straight: Whether the bytes are the live tensor's own memory.
    """

    index: int
    view: memoryview
    block: Block | None
    straight: bool


@dataclass(frozen=True, slots=True)
class Subject:
    """One object to capture: where it stands, its bytes, and its version when described."""

    path: ObjectPath
    source: ByteSource
    version: int | None

    def shown(self) -> str:
        """Which object it is, and whose."""
        kind = type(self.source)
        return f"in {kind.__module__}.{kind.__qualname__}, the source of {show_path(self.path)}"


class CaptureRun:
    """The capture of one save.

    `take_now` runs on the caller's thread, `take_deferred` on a background one, `fence` on any.
    Captured chunks go to `deliver` in plan order; for straight ones the pipeline calls
    `straight_done`.
    """

    def __init__(
        self,
        plan: SavePlan,
        subjects: Sequence[Subject],
        staging: Staging,
        *,
        deliver: Callable[[Captured], None],
        need_writer: Callable[[], None],
        straight_first: bool,
    ) -> None:
        self._plan = plan
        self._subjects = subjects
        self._staging = staging
        self._deliver = deliver
        self._need_writer = need_writer  # called before anything that only writing can end
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
        self._check_lock = threading.Lock()  # nobody passes the fence while versions are compared
        self._passed = False
        self.straight_bytes = 0
        self.deferred_bytes = sum(plan.chunks[i].length for i in self._later)  # behind the fence

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
        self._check_versions(deferred=False)
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
        self.check()

    def fence(self, timeout_s: float | None) -> bool:
        """Let deferred memory change once this returns True; False: not complete in time.

        Device copies that are under way are ordered before later work of this thread instead of
        waited for.

        Raises:
            TornSnapshotError: A deferred tensor changed before.
        """
        self._fenced = True
        self._staging.wake()
        if not self._all_issued.wait(timeout_s):
            return False
        with self._lock:
            if self._error is not None:
                return True
            pending = [p for _, copies in list(self._issued) for p in copies]
        if not self._wait_straight(timeout_s):
            return False
        for copy in pending:
            copy.order()
        with self._check_lock:
            if not self._passed:
                self._check_versions(deferred=True)
                self._passed = True
        return True

    def check(self) -> None:
        """Compare versions of deferred tensors, unless the fence was passed: then they may differ.

        torch counts an in-place change when it is *over*: a check in the middle of one sees
        nothing. So the capture checks at its end, the fence on the thread that trains (which is
        in no operation then), and the save once more before it commits.

        Raises:
            TornSnapshotError: One changed.
        """
        with self._check_lock:
            if not self._passed:
                self._check_versions(deferred=True)

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
        with self._check_lock:
            self._passed = True  # nothing is left to compare
            self._subjects = ()

    def straight_done(self, captured: Captured) -> None:
        """The pipeline no longer needs a straight chunk's memory."""
        del captured
        with self._lock:
            self._straight_open -= 1
            if not self._straight_open:
                self._let_pass()

    def _let_pass(self) -> None:
        for latch in self._waiting:
            latch.open()
        self._waiting.clear()

    # ------------------------------------------------------------------------------------------

    def _take(self, index: int, *, may_lend: Callable[[], bool]) -> None:
        chunk = self._plan.chunks[index]
        lendable = self._lendable(chunk)
        if lendable is not None and self._straight_first:
            self._lend(index, lendable)
            return
        while (block := self._staging.acquire(chunk.length, chunk.phase)) is None:
            self._raise_if_cancelled()
            self._need_writer()
            if lendable is not None and may_lend():
                self._lend(index, lendable)
                return
            # Whoever waits holds nothing: copies under way are finished and handed on first.
            self._flush()
            self._staging.wait(
                lambda: bool(self._error) or (lendable is not None and may_lend()), _POLL_S
            )
        captured = Captured(index, block.view, block, straight=False)
        copies = self._copy_or_release(chunk, block)
        if copies or self._issued:
            with self._lock:
                self._issued.append((captured, copies))
        else:
            self._deliver(captured)

    def _copy_or_release(self, chunk: Chunk, block: Block) -> list[PendingCopy]:
        copies: list[PendingCopy] = []
        try:
            self._copy(chunk, block, copies)
        except BaseException:
            for copy in copies:
                copy.wait()
            self._staging.release(block)
            raise
        return copies

    def _copy(self, chunk: Chunk, block: Block, copies: list[PendingCopy]) -> None:
        if chunk.slab:
            ctypes.memset(block.address, 0, chunk.length)  # gaps are zero, not old state
        for piece in chunk.pieces:
            subject = self._subjects[piece.item]
            source = subject.source
            length = piece.stop - piece.start
            if source.address is not None:
                ctypes.memmove(block.address + piece.at, source.address + piece.start, length)
                continue
            out = block.view[piece.at : piece.at + length]
            with blaming(subject.shown):
                copy = source.copy_out(piece.start, out)
            if copy is not None:
                copies.append(copy)

    def _lendable(self, chunk: Chunk) -> memoryview | None:
        """The chunk's bytes in live host memory, if they can be written from there."""
        if chunk.slab:
            return None
        piece = chunk.pieces[0]
        subject = self._subjects[piece.item]
        source = subject.source
        with blaming(subject.shown):
            if source.address is None or not source.steady():
                return None
        if chunk.offset is not None and (source.address + piece.start) % PAGE_BYTES != chunk.phase:
            return None
        view = source.view()
        return None if view is None else view[piece.start : piece.stop]

    def _lend(self, index: int, view: memoryview) -> None:
        self._need_writer()
        self._flush()
        with self._lock:
            self._straight_open += 1
            self.straight_bytes += view.nbytes
        self._deliver(Captured(index, view, None, straight=True))

    def _issue_device_copies(self) -> None:
        """Start copies of deferred device tensors as far as staging goes, without waiting."""
        while self._later:
            chunk = self._plan.chunks[self._later[0]]
            if any(self._subjects[p.item].source.device == "cpu" for p in chunk.pieces):
                return
            block = self._staging.acquire(chunk.length, chunk.phase)
            if block is None:
                return
            captured = Captured(self._later.pop(0), block.view, block, straight=False)
            self._issued.append((captured, self._copy_or_release(chunk, block)))

    def _flush(self) -> None:
        """Wait for device copies in order and hand their chunks on."""
        while self._issued:
            captured, copies = self._issued[0]
            for copy in copies:
                copy.wait()
            with self._lock:
                self._issued.popleft()
            self._deliver(captured)

    def _wait_straight(self, timeout_s: float | None) -> bool:
        over = Latch()
        with self._lock:
            self._waiting.append(over)
            if not self._straight_open or self._error is not None:
                self._let_pass()
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

    def _check_versions(self, *, deferred: bool) -> None:
        changed = []
        seen = set()
        for chunk in self._plan.chunks:
            if (chunk.capture is Capture.DEFERRED) is not deferred:
                continue
            for piece in chunk.pieces:
                if piece.item in seen:
                    continue
                seen.add(piece.item)
                subject = self._subjects[piece.item]
                if subject.version is not None and subject.source.version() != subject.version:
                    changed.append(show_path(subject.path))
        if changed:
            more = len(changed) - _LISTED
            shown = ", ".join(changed[:_LISTED]) + (f" and {more} more" if more > 0 else "")
            when = (
                "before the fence; call fence() before changing it"
                if deferred
                else "while save() captured it: another thread writes to it"
            )
            msg = f"{shown} changed {when}. This save is given up; nothing was committed."
            raise TornSnapshotError(msg)

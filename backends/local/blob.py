"""One file being written: created, filled by batches, sealed or aborted."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from enum import Enum, auto
from typing import TYPE_CHECKING

from penstock.backends.local.batch import Batch, settle
from penstock.backends.local.failures import explained
from penstock.backends.local.kernel import fallocate
from penstock.backends.local.transfer import OpenBlob, cut_writes
from penstock.core.abc import BlobWriter
from penstock.core.errors import StorageError
from penstock.core.types import PAGE_BYTES, align_up, flat_view

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from penstock.backends.local.batch import Engine
    from penstock.backends.local.folders import Folders
    from penstock.core.types import WriteRequest


class _State(Enum):
    OPEN = auto()
    SEALING = auto()  # a thread is syncing the file: an abort waits for it
    SEALED = auto()
    DEAD = auto()  # a write, the seal or an fsync failed: may only be aborted
    ABORTED = auto()


class FileWriter(BlobWriter):
    """`BlobWriter` over one open file and an engine that moves bytes."""

    def __init__(
        self, root: str, blob: OpenBlob, folders: Folders, *, engine: Engine, ahead: Ahead
    ) -> None:
        self._root = root
        self._blob = blob
        self._folders = folders
        self._engine = engine
        self._ahead = ahead
        self._pid = os.getpid()
        self._open = True
        self._state = _State.OPEN
        self._in_flight = 0
        self._edges: set[int] = set()
        # Guards `_open`, `_state`, `_in_flight`, `_edges`; notified when a batch has landed and
        # when a seal is over.
        self._changed = threading.Condition()

    def submit(self, requests: Sequence[WriteRequest]) -> Future[None]:
        """Begin to write; the buffers are in use until the future is done.

        Raises:
            StorageError: Nothing was begun: the blob is sealed or dead, or two requests touch one
                page.
        """
        flat = [(r.offset, tuple(flat_view(b) for b in r.buffers)) for r in requests if r.length]
        with self._changed:
            self._check_open("write")
            self._claim_edges(flat)
            self._in_flight += 1
        batch = Batch("write", self._root, advise=self._blob.advise)
        batch.future.add_done_callback(self._landed)
        try:
            if flat:
                last, buffers = flat[-1]
                self._ahead.reach(self._blob.fd, last + sum(b.nbytes for b in buffers))
            self._engine.start(batch, cut_writes(batch, self._blob, flat))
        except BaseException as error:
            if not batch.future.done():
                batch.future.set_exception(error)
            raise
        return batch.future

    def write(self, requests: Sequence[WriteRequest], /) -> None:
        """As the contract says."""
        settle(self.submit(requests))

    def seal(self, length: int, /) -> None:
        """As the contract says: all completions, one fsync of the file, then of the folders."""
        ours, outcome = False, _State.DEAD
        try:
            with self._changed:
                self._wait_idle()
                self._check_open("seal")
                ours, self._state = True, _State.SEALING
            with explained("seal", self._blob.name, self._root, self._blob.advise):
                os.ftruncate(self._blob.fd, length)
                os.fsync(self._blob.fd)
                self._folders.sync()
            outcome = _State.SEALED
        finally:
            if ours:
                with self._changed:
                    self._state = outcome
                    if outcome is _State.SEALED:
                        self._release()
                    self._changed.notify_all()

    def abort(self) -> None:
        """As the contract says; the file is removed, so its space is free at once."""
        if os.getpid() != self._pid:  # the parent's blob is not ours to remove
            return
        with self._changed:
            self._wait_idle()
            if self._state in {_State.SEALED, _State.ABORTED}:
                return
            self._state = _State.ABORTED
        try:
            os.unlink(self._blob.name.rpartition("/")[2], dir_fd=self._folders.last)
        except OSError:  # already gone, or the store is: `delete` is there for what stays behind
            pass
        finally:
            with self._changed:
                self._release()

    # -- below --------------------------------------------------------------------------------

    def _check_open(self, what: str) -> None:
        if self._state is not _State.OPEN:
            msg = f"cannot {what} {self._blob.name} under {self._root}: it is {self._describe()}"
            raise StorageError(msg)
        if os.getpid() != self._pid:
            msg = f"cannot {what} {self._blob.name}: it was begun in another process (fork)"
            raise StorageError(msg)

    def _describe(self) -> str:
        if self._state is _State.DEAD:
            return "dead since an earlier failure; abort it and write another blob"
        return self._state.name.lower() + " already"

    def _claim_edges(self, requests: list[tuple[int, tuple[memoryview, ...]]]) -> None:
        """Two requests that share a page would overwrite each other with zeros; refuse before.

        A shared page is an edge page of both, so remembering the edges is enough.
        """
        fresh: set[int] = set()
        for offset, buffers in requests:
            stop = offset + sum(b.nbytes for b in buffers)
            edges = {offset // PAGE_BYTES, (stop - 1) // PAGE_BYTES}
            if offset < 0 or edges & fresh or edges & self._edges:
                msg = (
                    f"cannot write {self._blob.name}: two requests touch one unit of {PAGE_BYTES} "
                    f"bytes at offset {offset} (see Capabilities.offset_alignment)"
                )
                raise StorageError(msg)
            fresh |= edges
        self._edges |= fresh

    def _landed(self, future: Future[None]) -> None:
        with self._changed:
            self._in_flight -= 1
            if future.exception() is not None and self._state is _State.OPEN:
                self._state = _State.DEAD
            self._changed.notify_all()

    def _wait_idle(self) -> None:
        while self._in_flight or self._state is _State.SEALING:
            self._changed.wait()

    def _release(self) -> None:
        if not self._open:  # a second close would hit whoever got the number since
            return
        self._open = False
        with suppress(OSError):  # all is synced, or given up
            os.close(self._blob.fd)
        with suppress(OSError):
            self._folders.close()

    def __del__(self) -> None:
        # Batches in flight hold a reference to this, so here nothing uses the file any more.
        self._release()


class Ahead:
    """Reserves space in windows, ahead of the writes: 1.3x faster on ext4, and fewer extents.

    Never fails: where space cannot be reserved, the write itself will tell.
    """

    def __init__(self, window_bytes: int, size_hint: int | None) -> None:
        self._window = window_bytes
        self._hint = size_hint or 0
        self._reserved = 0
        self._lock = threading.Lock()  # guards `_reserved` and `_window`

    def reach(self, fd: int, stop: int) -> None:
        """Have everything below `stop` reserved."""
        with self._lock:
            if not self._window or stop <= self._reserved:
                return
            goal = align_up(stop, self._window)
            if stop <= self._hint:
                goal = min(goal, align_up(self._hint, PAGE_BYTES))
            for target in (goal, align_up(stop, PAGE_BYTES)):
                try:
                    fallocate(fd, self._reserved, target - self._reserved)
                except OSError as error:
                    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                        continue  # a window may be too much where the bytes themselves are not
                    break
                self._reserved = target
                return
            self._window = 0

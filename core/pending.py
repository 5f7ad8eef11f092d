"""The save of a checkpointer that may be under way, and an error that nobody has seen yet."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from penstock.core.errors import BusyError, FenceTimeoutError

if TYPE_CHECKING:
    from penstock.core.draining import Drains
    from penstock.core.reports import SaveHandle
    from penstock.core.saving import SaveJob


class Pending:
    """One save at a time; used by the thread that trains."""

    def __init__(self, drains: Drains | None = None) -> None:
        self._drains = drains
        self.job: SaveJob | None = None
        """The newest save, which may have ended."""
        self._unseen: SaveHandle | None = None
        self._pid = os.getpid()
        _every.add(self)

    def take_turn(self, on_busy: str) -> bool:
        """Make room for the next save; False when that one shall be skipped.

        Raises:
            BusyError: A save is under way, and `on_busy` is `raise`.
            SaveError: Called in a callback that the save waits for.
        """
        job = self.job
        if job is None or job.finished(0):
            return True
        if on_busy == "skip":
            return False
        if on_busy == "raise":
            msg = (
                f"the save of step {job.request.step} is still under way "
                f"({job.progress().phase}); wait(), or use on_busy='wait' or 'skip'"
            )
            raise BusyError(msg)
        self.end()
        return True

    def begin(self, job: SaveJob) -> None:
        """`job` is the newest save from now on."""
        self.job, self._unseen = job, job.handle

    def fence(self, timeout: float | None) -> None:
        """Wait until what was deferred may change.

        Raises:
            FenceTimeoutError: Not within `timeout` seconds; the save goes on.
            SaveError: Called in a callback that the save waits for.
        """
        job = self.job
        if job is not None:
            job.ending.check_may_wait()
            if not job.fence(timeout, give_up=False):
                msg = f"the capture of step {job.request.step} is not complete after {timeout:g} s"
                raise FenceTimeoutError(msg)

    def wait(self, timeout: float | None) -> None:
        """Wait until no save is under way.

        Raises:
            TimeoutError: One still is, after `timeout` seconds.
            SaveError: Called in a callback that the save waits for.
        """
        job = self.job
        if job is not None:
            job.ending.check_may_wait()
            job.fence(timeout, give_up=False)  # this thread waits, so it changes nothing
            if not job.finished(timeout):
                msg = f"the save of step {job.request.step} is still under way"
                raise TimeoutError(msg)

    def check_may_end(self) -> None:
        """See `Ending.check_may_wait`."""
        if self.job is not None:
            self.job.ending.check_may_wait()

    def end(self) -> None:
        """Wait for the save; give it up if its capture takes too long.

        Raises:
            SaveError: Called in a callback that the save waits for.
        """
        self.check_may_end()
        if self.job is not None:
            self.job.fence(None)
            self.job.finished(None)

    @property
    def released(self) -> bool:
        """Whether the save's memory is free again."""
        return self.job is None or self.job.released.is_open

    def unseen_error(self) -> BaseException | None:
        """The error of a background save that has ended, once, if nobody has seen it."""
        handle, self._unseen = self._unseen, None
        # What fails behind the commit is no failure of the save: the log, its future and
        # `penstock ls` tell of it.
        if handle is None or handle.error_seen or not handle.committed.done():
            waits = handle is not None and not handle.committed.done()
            self._unseen = handle if waits else None
            return None
        return handle.committed.exception()

    def raise_unseen(self) -> None:
        """Raise it."""
        error = self.unseen_error()
        if error is not None:
            raise error

    def finish_at_exit(self) -> None:
        """Wait for the save, unless it is that of the process which forked this one."""
        if self.job is not None and self._pid == os.getpid():
            self.job.finished(None)
            if self._drains is not None:
                self._drains.settle()


_every: weakref.WeakSet[Pending] = weakref.WeakSet()


def _finish_at_exit() -> None:
    """Let pending saves end before the interpreter stops its thread pools."""
    for pending in list(_every):
        pending.finish_at_exit()


# `atexit` comes after the pools are gone; this is what concurrent.futures itself uses.
threading._register_atexit(_finish_at_exit)  # type: ignore[attr-defined] # noqa: SLF001

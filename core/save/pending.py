"""Tracks the save under way, and the errors of saves that the user has not seen.

Tested in `tests/integration/torn_snapshot/test_signals.py`.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, TypeVar

from penstock.core.errors import BusyError, FenceTimeoutError
from penstock.core.ranks.group import close_groups_at_exit

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.reporting.reports import SaveHandle
    from penstock.core.save.job import SaveJob
    from penstock.core.tiers.drains import Drains

T = TypeVar("T")


class Pending:
    """Lets one save run at a time. Only the training thread uses it; others may read `released`."""

    def __init__(self, tiers: Drains | None = None) -> None:
        self._tiers = tiers
        self.job: SaveJob | None = None
        """The newest save, which may have ended."""
        self._unseen: SaveHandle | None = None
        self._earlier: BaseException | None = None  # unseen error of a save before the newest
        self._preparing: int | None = None  # the thread that prepares a save
        # `_refused` was raised in a signal handler that interrupted that thread; `_broke_off` left
        # the handler and ended the call that the handler had interrupted.
        self._refused: BusyError | None = None
        self._broke_off: BusyError | None = None
        self._pid = os.getpid()
        _every.add(self)

    def may_prepare(self, on_busy: str) -> bool:
        """Return whether a save can be prepared here; if not, it is skipped.

        Raises:
            BusyError: The caller is a signal handler that interrupted a save, and `on_busy` is not
                `skip`.
            SaveError: The caller is a callback that the save waits for.
        """
        if on_busy == "skip" and self._preparing == threading.get_ident():
            return False
        self.check_may_wait()
        return True

    def take_turn(self, on_busy: str) -> bool:
        """Wait for the save under way; return False to skip the next save.

        Raises:
            BusyError: A save is under way, and `on_busy` is `raise`.
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
        job.fence(None)
        job.finished(None)
        return True

    def rest(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for the save under way."""
        if self.job is not None:
            self.job.finished(timeout_s)

    def prepare(self, action: Callable[[], T]) -> T:
        """Run `action`, which prepares a save and calls `prepared` when the save has begun.

        Until then, a signal handler that interrupts `action` can neither save nor wait. Its save
        would be newer than the interrupted one, which would then be refused. If the handler lets
        its BusyError escape, `action` ends and runs again, so the save is not lost.
        """
        before = self.job
        try:
            while True:
                self._preparing = threading.get_ident()
                try:
                    if self.job is not before and self.job is not None:
                        self.job.finished(None)  # the save of the last attempt was given up
                    return action()
                except BusyError as error:
                    if error is not self._refused:
                        raise
                    self._broke_off = error
        finally:
            self.prepared()

    def prepared(self) -> None:
        """Let signal handlers save again: the save has begun, or will not begin."""
        self._preparing = self._refused = None  # the error would keep its stack frames alive

    def outlast(self, wait: Callable[[], None]) -> None:
        """Run `wait` to its end, even if a refused signal handler raises its BusyError in it."""
        while True:
            try:
                return wait()
            except BusyError as error:
                self._broke_off = error

    def begin(self, job: SaveJob) -> None:
        """Make `job` the newest save."""
        self._earlier = self._earlier or self.unseen_error()
        self.job, self._unseen = job, job.handle

    def fence(self, timeout: float | None) -> None:
        """Wait until deferred memory may change.

        Raises:
            FenceTimeoutError: The capture needs more than `timeout` seconds; the save continues.
            SaveError: The caller is a callback that the save waits for.
        """
        self.check_may_wait()
        job = self.job
        if job is not None and not job.fence(timeout, give_up=False):
            msg = (
                f"the capture of step {job.request.step} is not complete after {timeout:g} s; the "
                "save continues: call fence() again before its tensors change"
            )
            raise FenceTimeoutError(msg)

    def wait(self, timeout: float | None) -> None:
        """Wait until no save is under way.

        Raises:
            TimeoutError: A save is still under way after `timeout` seconds.
            SaveError: The caller is a callback that the save waits for.
        """
        self.check_may_wait()
        job = self.job
        if job is not None:
            # The caller blocks here and cannot change the state: an unfinished capture continues.
            job.fence(timeout, give_up=False)
            if not job.finished(timeout):
                msg = f"the save of step {job.request.step} is still under way"
                raise TimeoutError(msg)

    def check_may_wait(self) -> None:
        """Raise if a wait here would never end.

        Raises:
            BusyError: The caller is a signal handler that interrupted a save, which cannot
                continue before the handler returns.
            SaveError: The caller is a callback that the save itself waits for.
        """
        if self.job is not None:
            self.job.ending.check_may_wait()
        if self._preparing == threading.get_ident():
            msg = (
                "called in a signal handler that interrupted save() of this checkpointer, which "
                "cannot continue before the handler returns. Set a flag in the handler, and save "
                "when the training loop sees it; the interrupted save continues afterwards"
            )
            self._refused = BusyError(msg)
            raise self._refused

    def end(self) -> None:
        """Wait until the save has ended.

        Raises:
            SaveError: The caller is a callback that the save waits for.
        """
        self.check_may_wait()
        if self.job is not None:
            self.job.fence(None)
            self.job.finished(None)

    @property
    def released(self) -> bool:
        """Whether the memory of the newest save is free again."""
        return self.job is None or self.job.released.is_open

    def is_over(self) -> bool:
        """Return whether no save is under way, so that a new save would not wait."""
        job = self.job
        return job is None or job.released.is_open or job.handle.failed

    def unseen_error(self) -> BaseException | None:
        """Return the error of an ended background save once, if the user has not seen it."""
        handle, self._unseen = self._unseen, None
        # A copy to a slower tier that fails after the commit is not a failure of the save: the log,
        # the future `durable` and `penstock ls` report it.
        if handle is None or handle.error_seen or not handle.committed.done():
            waits = handle is not None and not handle.committed.done()
            self._unseen = handle if waits else None
            return None
        return handle.committed.exception()

    def raise_earlier(self, job: SaveJob) -> None:
        """Raise the error of a refused signal handler or of an earlier save, once, with a note."""
        broke_off, self._broke_off = self._broke_off, None
        earlier = self._earlier
        if earlier is not None and earlier is job.ending.error:
            # A callback of the failed save began `job` on another thread, which raises the error.
            earlier = None
        else:
            self._earlier = None
        how = "has failed too" if job.handle.failed else "has started"
        step = job.request.step
        if broke_off is not None:
            broke_off.add_note(f"The save of step {step}, which the handler interrupted, {how}.")
            raise broke_off from earlier
        if earlier is not None:
            earlier.add_note(f"This earlier save failed; the save of step {step} {how}.")
            raise earlier

    def raise_unseen(self) -> None:
        """Raise the error that `unseen_error` returns, if any."""
        error = self.unseen_error()
        if error is not None:
            raise error

    def finish_at_exit(self) -> None:
        """Wait for the save, unless it belongs to the process that forked this one."""
        if self.job is not None and self._pid == os.getpid():
            self.job.finished(None)
            if self._tiers is not None:
                self._tiers.settle()


_every: weakref.WeakSet[Pending] = weakref.WeakSet()


def _finish_at_exit() -> None:
    """Let pending saves end before the interpreter stops its thread pools."""
    for pending in list(_every):
        pending.finish_at_exit()
    close_groups_at_exit()


# `atexit` would run after the thread pools are gone; concurrent.futures itself uses this hook.
threading._register_atexit(_finish_at_exit)  # type: ignore[attr-defined] # noqa: SLF001

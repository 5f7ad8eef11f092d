"""Telling a caller how far a save, a restore, a load or a verification is."""

from __future__ import annotations

import logging
import time
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.core.reports import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.reports import SaveHandle

log = logging.getLogger("penstock")

_EVERY_S = 0.1


class Listener:
    """The callback of a caller, which cannot harm what it listens to.

    An exception of it is logged, as text; after that it is not called any more.
    """

    def __init__(self, on_progress: Callable[[Progress], None] | None, what: str) -> None:
        self._on_progress = on_progress
        self._what = what

    def __call__(self, progress: Progress) -> None:
        """Tell it."""
        if self._on_progress is None:
            return
        try:
            self._on_progress(progress)
        except Exception:  # noqa: BLE001 - the caller's code: recorded in the log
            self._on_progress = None
            log.error(  # noqa: TRY400 - a record with the exception would hold its frames
                "on_progress of %s raised, and is not called any more:\n%s",
                self._what,
                traceback.format_exc(),
            )


class Meter:
    """Counts the bytes of one operation, and tells its caller, some ten times per second.

    The beginning of a phase is always told. Calls never overlap: whoever opens a phase waits while
    others count its bytes.
    """

    def __init__(
        self,
        on_progress: Callable[[Progress], None] | None = None,
        what: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = Listener(on_progress, what)
        self._clock = clock
        self._phase = ""
        self._done = 0
        self._total = 0
        self._told_s = 0.0
        self._over = False

    def begin(self, phase: str) -> None:
        """The operation begins, perhaps once more with another checkpoint: count from zero."""
        self._done = self._total = 0
        self.enter(phase)

    def enter(self, phase: str) -> None:
        """The next phase begins."""
        self._phase = phase
        self._tell(self._clock())

    def will_enter(self, phase: str) -> None:
        """The next phase begins with the bytes that are expected next: told together."""
        self._phase = phase

    def expect(self, size_bytes: int) -> None:
        """So many bytes more are to be read."""
        self._total += size_bytes
        self._tell(self._clock())

    def advance(self, size_bytes: int) -> None:
        """So many bytes more were read, and verified."""
        self._done += size_bytes
        now_s = self._clock()
        if now_s - self._told_s >= _EVERY_S:
            self._tell(now_s)

    def end(self, phase: str) -> None:
        """The operation is over; a straggler of it that a stuck store lets go is not told."""
        self.enter(phase)
        self._over = True

    def _tell(self, now_s: float) -> None:
        if not self._over:
            self._told_s = now_s
            self._listener(Progress(self._done, self._total, self._phase))


@contextmanager
def metered(on_progress: Callable[[Progress], None] | None, what: str) -> Iterator[Meter]:
    """The meter of one operation; the end of the block is told as `done` or `failed`."""
    meter = Meter(on_progress, what)
    try:
        yield meter
    except BaseException:
        meter.end("failed")
        raise
    meter.end("done")


def follow(handle: SaveHandle, on_progress: Callable[[Progress], None]) -> None:
    """Tell how far a save is until it ended, well or badly; does not count as seeing an error.

    Looks at it instead of being told: the threads of a save have no time for callbacks, and call
    under locks.
    """
    listener = Listener(on_progress, f"the save of step {handle.step}")
    told = None
    while not handle.durable.done():
        now = handle.progress()
        if now != told:
            listener(now)
        told = now
        handle.durable.wait(_EVERY_S)
    listener(handle.progress())

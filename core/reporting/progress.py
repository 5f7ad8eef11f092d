"""Progress of a save, a restore, a load or a verification, passed to the caller's callback."""

from __future__ import annotations

import logging
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.reporting.reports import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.concurrency.timing import Timing
    from penstock.core.reporting.reports import SaveHandle

log = logging.getLogger("penstock")


class Listener:
    """Calls a caller's `on_progress` so that it cannot break the operation.

    After its first exception, which is logged as text, the callback is not called any more.
    """

    def __init__(self, on_progress: Callable[[Progress], None] | None, what: str) -> None:
        self._on_progress = on_progress
        self._what = what

    def __call__(self, progress: Progress) -> None:
        """Pass on the progress."""
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
    """Counts the bytes of one operation, and reports them about ten times per second.

    The beginning of a phase is always reported. No lock is needed, since calls never overlap: the
    thread that opens a phase waits while another one counts the phase's bytes.
    """

    def __init__(
        self,
        on_progress: Callable[[Progress], None] | None = None,
        what: str = "",
        timing: Timing | None = None,
    ) -> None:
        self._listener = Listener(on_progress, what)
        self._timing = timing or current_timing()
        self._phase = ""
        self._done = 0
        self._total = 0
        self._quiet = Deadline(0.0)  # over when bytes are told again
        self._over = False

    def begin(self, phase: str) -> None:
        """Count from zero: the operation begins, or begins again with another checkpoint."""
        self._done = self._total = 0
        self.enter(phase)

    def enter(self, phase: str) -> None:
        """Begin the next phase, and report it."""
        self._phase = phase
        self._tell()

    def will_enter(self, phase: str) -> None:
        """Begin the next phase without a report: the next `expect` reports both together."""
        self._phase = phase

    def expect(self, size_bytes: int) -> None:
        """Add to the bytes that are to be read, and report the new total."""
        self._total += size_bytes
        self._tell()

    def advance(self, size_bytes: int) -> None:
        """Add to the bytes that were read and verified; report them every tenth of a second."""
        self._done += size_bytes
        if self._quiet.is_over():
            self._tell()

    def end(self, phase: str) -> None:
        """Report the last phase, and nothing after it.

        A read that a stuck store answers late may still count bytes: the caller would see progress
        of an operation that has ended.
        """
        self.enter(phase)
        self._over = True

    def _tell(self) -> None:
        if not self._over:
            self._quiet = Deadline(self._timing.progress_interval_s, self._timing.clock)
            self._listener(Progress(self._done, self._total, self._phase))


@contextmanager
def metered(
    on_progress: Callable[[Progress], None] | None, what: str, timing: Timing | None = None
) -> Iterator[Meter]:
    """Yield the meter of one operation; the end of the block is reported as `done` or `failed`."""
    meter = Meter(on_progress, what, timing)
    try:
        yield meter
    except BaseException:
        meter.end("failed")
        raise
    meter.end("done")


def follow(
    handle: SaveHandle,
    on_progress: Callable[[Progress], None],
    timing: Timing | None = None,
) -> None:
    """Report the progress of a save until it ends; does not count as seeing its error.

    Polls instead of being called: the threads of a save have no time for callbacks, and would call
    while they hold locks.
    """
    listener = Listener(on_progress, f"the save of step {handle.step}")
    interval_s = (timing or current_timing()).progress_interval_s
    told = None
    while not handle.durable.done():
        now = handle.progress()
        if now != told:
            listener(now)
        told = now
        handle.durable.wait(interval_s)
    listener(handle.progress())

"""Reports the progress of an operation to a callback or on standard error."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.reporting.reports import Progress
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress as Bars

    from penstock.core.concurrency.timing import Timing
    from penstock.core.reporting.reports import SaveHandle

log = logging.getLogger("penstock")

_ENDS = {"done", "durable", "failed", "skipped"}


class Listener:
    """Calls a caller's `on_progress` so that it cannot break the operation.

    Logs the callback's first exception as text, and then no longer calls it.
    """

    def __init__(self, on_progress: Callable[[Progress], None] | None, what: str) -> None:
        self._on_progress = on_progress
        self._what = what

    def __call__(self, progress: Progress) -> None:
        """Pass `progress` to the callback."""
        if self._on_progress is None:
            return
        try:
            self._on_progress(progress)
        except Exception:  # noqa: BLE001 - the caller's code: recorded in the log
            self._on_progress = None
            log.error(  # noqa: TRY400 - a record with the exception would hold its frames
                "on_progress of %s raised, and is no longer called:\n%s",
                self._what,
                traceback.format_exc(),
            )


class Meter:
    """Counts the bytes of one operation, and reports them about ten times per second.

    Always reports the start of a phase. Needs no lock because calls never overlap: the thread that
    opens a phase waits while another thread counts the phase's bytes.
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
        self._quiet = Deadline(0.0)  # over when bytes may be reported again
        self._over = False

    def begin(self, phase: str) -> None:
        """Count from zero, for a new operation or a retry with another checkpoint."""
        self._done = self._total = 0
        self.enter(phase)

    def enter(self, phase: str) -> None:
        """Start the next phase, and report it."""
        self._phase = phase
        self._report()

    def will_enter(self, phase: str) -> None:
        """Start the next phase without a report; the next `expect` reports both."""
        self._phase = phase

    def expect(self, size_bytes: int) -> None:
        """Add to the bytes to read, and report the new total."""
        self._total += size_bytes
        self._report()

    def advance(self, size_bytes: int) -> None:
        """Add to the bytes read and verified; report them at most ten times per second."""
        self._done += size_bytes
        if self._quiet.is_over():
            self._report()

    def end(self, phase: str) -> None:
        """Report the last phase, and stop reporting.

        Bytes that a stuck store delivers later would otherwise show as progress of an ended
        operation.
        """
        self.enter(phase)
        self._over = True

    def _report(self) -> None:
        if not self._over:
            self._quiet = Deadline(self._timing.progress_interval_s, self._timing.clock)
            self._listener(Progress(self._done, self._total, self._phase))


@contextmanager
def metered(
    on_progress: Callable[[Progress], None] | None, what: str, timing: Timing | None = None
) -> Iterator[Meter]:
    """Yield the meter of one operation; report the end of the block as `done` or `failed`."""
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
    """Report the progress of a save until it ends. Does not mark the save's error as seen.

    Polls, because the threads of a save have no time for callbacks, and would call them while they
    hold locks.
    """
    listener = Listener(on_progress, f"the save of step {handle.step}")
    interval_s = (timing or current_timing()).progress_interval_s
    reported = None
    while not handle.durable.done():
        now = handle.progress()
        if now != reported:
            listener(now)
        reported = now
        handle.durable.wait(interval_s)
    listener(handle.progress())


class ProgressBar:
    """Shows the progress of one operation at a time; pass an instance as `on_progress`.

    Shows a bar on standard error in a terminal or a notebook. In a pipe, writes a line of text
    every `every_s` seconds, and no line for an operation that ends sooner. An instance can be
    reused after an operation ends.
    """

    def __init__(
        self,
        label: str = "",
        *,
        every_s: float | None = 5.0,
        transient: bool = False,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a bar, which shows nothing until its first call.

        Args:
            label: The name of the operation, such as `"restore"`.
            every_s: The seconds between lines in a pipe; None writes no lines.
            transient: Whether the bar disappears at the end.
            file: The stream to write to; None: standard error.
            clock: Returns seconds; tests replace it.
        """
        self._label = label
        self._every_s = every_s
        self._transient = transient
        self._file = file
        self._clock = clock
        self._bar: Bars | None = None
        self._began_s: float | None = None
        self._line_s: float | None = None

    def __call__(self, progress: Progress) -> None:
        """Show `progress`."""
        if self._began_s is None:
            self._began_s = self._clock()
            self._bar = _open_bar(self._label, self._stream, transient=self._transient)
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0],
                completed=progress.bytes_done,
                total=progress.bytes_total or None,  # None: rich shows a bar without an end
                phase=progress.phase,
                refresh=True,  # rich's refresh thread could outlive the bar
            )
        else:
            self._write_line(progress)
        if progress.phase in _ENDS:
            self.close()

    def close(self) -> None:
        """Finish the bar and restore the terminal. Called when the operation ends; idempotent."""
        bar, self._bar = self._bar, None
        self._began_s = self._line_s = None
        if bar is not None:
            bar.stop()

    @property
    def _stream(self) -> TextIO:
        return self._file or sys.stderr  # looked up late: tests and notebooks replace it

    def _write_line(self, progress: Progress) -> None:
        if self._every_s is None or self._began_s is None:
            return
        now_s = self._clock()
        since_s = self._began_s if self._line_s is None else self._line_s
        # The end gets a line only after an earlier line: a log that shows an operation under way
        # must show its end, and short operations leave no line at all.
        over = progress.phase in _ENDS and self._line_s is not None
        if over or now_s - since_s >= self._every_s:
            self._line_s = now_s
            self._stream.write(f"{line_of(self._label, progress, now_s - self._began_s)}\n")
            self._stream.flush()


def line_of(label: str, progress: Progress, seconds: float) -> str:
    """Format a line such as `restore: read, 1.2 GiB of 4.0 GiB (30 %), 600.0 MiB/s`."""
    done, total = progress.bytes_done, progress.bytes_total
    text = f"{label}: {progress.phase}" if label else progress.phase
    if total:
        text += f", {size_text(done)} of {size_text(total)} ({100 * done // total} %)"
    if done and seconds > 0:
        text += f", {size_text(done / seconds)}/s"
    return text


def _open_bar(label: str, stream: TextIO, *, transient: bool) -> Bars | None:
    if not stream.isatty() and "ipykernel" not in sys.modules:
        return None  # before importing rich, which takes a tenth of a second
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        Progress,
        ProgressColumn,
        TextColumn,
    )
    from rich.table import Column  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    class Amount(ProgressColumn):
        """Shows sizes and speed in the units of our other output; rich's columns count in kB."""

        def render(self, task: Any) -> Text:
            done, total, speed = task.completed, task.total, task.finished_speed or task.speed
            text = f"{size_text(done)} of {size_text(total)}" if total else size_text(done)
            return Text(f"{text}, {size_text(speed)}/s" if speed else text)

    console = Console(file=stream)
    if not (console.is_terminal or console.is_jupyter):
        return None
    bars = Progress(
        TextColumn("{task.description}{task.fields[phase]}", markup=False),
        BarColumn(None),
        Amount(Column(no_wrap=True)),
        console=console,
        transient=transient,
        auto_refresh=False,
        expand=True,
    )
    bars.add_task(f"{label}: " if label else "", total=None, phase="")
    bars.start()
    return bars

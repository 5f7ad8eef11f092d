"""Progress on standard error: a bar in a terminal, a line every few seconds in a log."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.reporting.reports import Progress

_ENDS = {"done", "durable", "failed", "skipped"}


class ProgressBar:
    """Shows the progress of one operation at a time; an instance is passed as `on_progress`.

    In a terminal and in a notebook it shows a bar on standard error. In a pipe it writes a line of
    text to standard error every `every_s` seconds, and none for an operation that ends sooner. It
    can be used again when an operation has ended.
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
        """Create a bar that shows nothing before its first call.

        Args:
            label: The name of the operation, such as `"restore"`.
            every_s: The seconds between lines in a pipe; None writes no lines.
            transient: Whether the bar disappears at the end.
            file: The stream to write to, instead of standard error.
            clock: Returns seconds; tests replace it.
        """
        self._label = label
        self._every_s = every_s
        self._transient = transient
        self._file = file
        self._clock = clock
        self._bar: _Bar | None = None
        self._began_s: float | None = None
        self._line_s: float | None = None

    def __call__(self, progress: Progress) -> None:
        """Show `progress`."""
        if self._began_s is None:
            self._began_s = self._clock()
            self._bar = _open_bar(self._label, self._stream, transient=self._transient)
        if self._bar is not None:
            self._bar.show(progress)
        else:
            self._write_line(progress)
        if progress.phase in _ENDS:
            self.close()

    def close(self) -> None:
        """Finish the bar and restore the terminal; idempotent, called when the operation ends."""
        bar, self._bar = self._bar, None
        self._began_s = self._line_s = None
        if bar is not None:
            bar.close()

    @property
    def _stream(self) -> TextIO:
        return self._file or sys.stderr  # looked up late: tests and notebooks replace it

    def _write_line(self, progress: Progress) -> None:
        if self._every_s is None or self._began_s is None:
            return
        now_s = self._clock()
        since_s = self._began_s if self._line_s is None else self._line_s
        # The end gets a line only if there was one before it: a log that shows an operation under
        # way must show its end, and short operations leave no line at all.
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


class _Bar:
    """A bar of rich that is drawn at each call: rich's refresh thread could outlive the bar."""

    def __init__(self, bars: Any, task: Any) -> None:
        self._bars = bars
        self._task = task

    def show(self, progress: Progress) -> None:
        self._bars.update(
            self._task,
            completed=progress.bytes_done,
            total=progress.bytes_total or None,  # None: rich shows a bar without an end
            phase=progress.phase,
            refresh=True,
        )

    def close(self) -> None:
        self._bars.stop()


def _open_bar(label: str, stream: TextIO, *, transient: bool) -> _Bar | None:
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
        """Sizes and speed in the units of our other output: rich's own columns count in kB."""

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
    task = bars.add_task(f"{label}: " if label else "", total=None, phase="")
    bars.start()
    return _Bar(bars, task)

"""`ProgressBar`: a bar for whoever watches, a line now and then for a log."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest
import torch

import penstock
from penstock.core.reporting.progress import ProgressBar, line_of
from penstock.core.reporting.reports import Progress

START = Progress(0, 0, "plan")
HALF = Progress(2 << 20, 4 << 20, "read")
DONE = Progress(4 << 20, 4 << 20, "done")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pipe(clock):
    out = io.StringIO()
    bar = ProgressBar("restore", file=out, clock=clock)

    def show(progress, later_s=0.0):
        clock.now += later_s
        bar(progress)
        return out.getvalue().splitlines()

    return show


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def shown(self):
        """What came since the last call."""
        found = self.getvalue()
        self.seek(0)
        self.truncate()
        return found


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


# -- in a pipe ----------------------------------------------------------------------------------


def test_what_is_over_soon_leaves_no_line_in_a_pipe(pipe):
    pipe(START)
    pipe(HALF, 2)
    assert pipe(DONE, 2.9) == []


def test_in_a_pipe_there_is_a_line_every_few_seconds_and_one_at_the_end(pipe):
    pipe(START)
    pipe(HALF, 4)
    pipe(HALF, 1)
    pipe(HALF, 4.9)
    pipe(HALF, 0.1)
    assert pipe(DONE, 1) == [
        "restore: read, 2.0 MiB of 4.0 MiB (50 %), 409.6 KiB/s",
        "restore: read, 2.0 MiB of 4.0 MiB (50 %), 204.8 KiB/s",
        "restore: done, 4.0 MiB of 4.0 MiB (100 %), 372.4 KiB/s",
    ]


def test_the_next_operation_begins_anew(pipe):
    pipe(START)
    before = pipe(DONE, 100)
    pipe(START, 1000)
    assert pipe(DONE, 4.9) == before == ["restore: done, 4.0 MiB of 4.0 MiB (100 %), 41.0 KiB/s"]


def test_lines_can_be_left_out(clock):
    out = io.StringIO()
    bar = ProgressBar(every_s=None, file=out, clock=clock)
    bar(START)
    clock.now += 1000
    bar(DONE)
    assert out.getvalue() == ""


def test_a_line_says_no_more_than_is_known():
    assert line_of("", START, 5.0) == "plan"
    assert line_of("x", Progress(0, 10 << 20, "write"), 0.0) == "x: write, 0 B of 10.0 MiB (0 %)"


@pytest.mark.process
def test_rich_is_not_imported_where_nobody_watches():
    code = (
        "import sys, penstock; bar = penstock.ProgressBar('x')\n"
        "bar(penstock.Progress(0, 1, 'read')); bar(penstock.Progress(1, 1, 'done'))\n"
        "print('rich' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "False\n"
    assert done.stderr == ""


# -- in a terminal ------------------------------------------------------------------------------


def test_in_a_terminal_it_is_a_bar_that_stays(terminal):
    bar = ProgressBar("restore", file=terminal)
    bar(START)
    bar(HALF)
    assert "restore: read" in terminal.shown()
    bar(DONE)
    end = terminal.shown()
    assert "restore: done" in end
    assert "4.0 MiB of 4.0 MiB, " in end
    assert not re.search(r"\d [kMG]?B\b", end)  # nothing counts in thousands
    assert end.rindex("\x1b[?25h") > end.rindex("restore")  # the cursor is back


def test_a_bar_takes_one_line_in_a_narrow_terminal(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    bar = ProgressBar("restore", file=terminal)
    bar(Progress(1 << 30, 3 << 30, "read"))
    bar(Progress(3 << 30, 3 << 30, "done"))
    assert terminal.getvalue().count("\n") == 1


def test_with_no_color_a_bar_has_no_style(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    bar = ProgressBar("restore", file=terminal)
    bar(HALF)
    bar(DONE)
    assert "restore: done" in terminal.getvalue()
    assert not re.search(r"\x1b\[[\d;]*m", terminal.getvalue())


def test_a_transient_bar_goes_away(terminal):
    bar = ProgressBar("restore", file=terminal, transient=True)
    bar(HALF)
    bar(DONE)
    end = terminal.shown()
    assert end.rindex("\x1b[2K") > end.rindex("restore: done")  # the line is wiped


def test_a_bar_can_be_used_again_and_closed_before_its_end(terminal):
    bar = ProgressBar("x", file=terminal)
    bar(HALF)
    bar.close()
    bar.close()
    bar(DONE)
    end = terminal.shown()
    assert end.count("\x1b[?25l") == end.count("\x1b[?25h") == 2


def test_markup_in_a_label_is_text(terminal):
    bar = ProgressBar("[red]x", file=terminal)
    bar(DONE)
    assert "[red]x: done" in terminal.shown()


def test_one_bar_shows_saves_and_restores(terminal, tmp_path):
    bar = ProgressBar(file=terminal)
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save({"w": torch.ones(1000)}, step=1, mode="blocking", on_progress=bar)
        assert "durable" in terminal.shown()
        ckpt.restore({"w": torch.ones(1000)}, on_progress=bar)
        assert "done" in terminal.shown()
        with pytest.raises(penstock.RestoreMismatchError):
            ckpt.restore({"w": torch.ones(5)}, on_progress=bar)
        end = terminal.shown()
        assert "failed" in end
        assert end.count("\x1b[?25l") == end.count("\x1b[?25h") == 1

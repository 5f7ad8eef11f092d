"""`ProgressBar`: a bar for a terminal, occasional lines for a log."""

import io
import subprocess
import sys

import pytest

from penstock.core.reporting.progress import ProgressBar
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


# -- in a pipe ----------------------------------------------------------------------------------


def test_short_work_prints_no_line_to_a_pipe(pipe):
    pipe(START)
    pipe(HALF, 2)
    assert pipe(DONE, 2.9) == []


def test_a_pipe_gets_a_line_every_few_seconds_and_at_the_end(pipe):
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


@pytest.mark.process
def test_rich_is_not_imported_without_a_viewer():
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

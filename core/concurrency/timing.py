"""How long the engine waits for anything, and by which clock.

Each wait that is not an option of the user has its length here. A `Timing` is handed down: whoever
opens a run or runs a command takes the one in force, and everything below gets it as an argument.
A test puts one of its own in force (`timing_in_force`) instead of patching constants.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Clock:
    """The clocks of this machine. A test hands in a subclass that tells another time."""

    def monotonic_s(self) -> float:
        """Seconds since some moment; stands still while the machine sleeps, and is never set."""
        return time.monotonic()

    def boot_s(self) -> float:
        """Seconds since some moment; goes on while the machine sleeps, and is never set."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall_s(self) -> float:
        """Seconds since 1970. Anybody may set this clock, so nothing that is safe relies on it."""
        return time.time()

    def now_iso(self) -> str:
        """The wall clock's time as it stands in records."""
        return datetime.fromtimestamp(self.wall_s(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class CountedClock(Clock):
    """A monotonic clock that goes on by what is counted only.

    For a wait for another process: whatever stops this one, as a debugger or `SIGSTOP` do, as a
    rule stops that one, so the time in which this one stood still is not the other's silence.
    """

    def __init__(self) -> None:
        self._now_s = 0.0

    def advance(self, seconds: float) -> None:
        """So many seconds have passed."""
        self._now_s += seconds

    def monotonic_s(self) -> float:
        """What was counted."""
        return self._now_s


SYSTEM_CLOCK = Clock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Lengths of all waits, in seconds. Those that users choose stand in the configuration."""

    clock: Clock = SYSTEM_CLOCK
    """What tells the time to deadlines, watchdogs, leases and intents."""

    poll_s: float = 1.0
    """A thread that waits for a store looks this often whether the store is stuck, or the wait is
    over for another reason. It bounds only how late that is noticed."""

    capture_poll_s: float = 0.2
    """The thread of a save that waits for captured chunks looks this often whether the save was
    given up."""

    staging_poll_s: float = 0.05
    """A capture that waits for staging memory looks this often whether the save was given up, or
    training has come to the fence."""

    stuck_s: float = 600.0
    """Where no configuration gives `io_timeout_s` (in commands): a store that makes no progress
    for so long counts as stuck."""

    batch_stuck_s: float = 60.0
    """A thread of a backend whose batch takes longer is not counted any more, and another thread
    takes its place. Far above any batch of a store that answers."""

    transfer_stuck_s: float = 600.0
    """As `batch_stuck_s`, for fsspec: not every file system ends its calls by itself."""

    interrupt_s: float = 5.0
    """After Ctrl-C, or a timeout, the caller waits so long for the end of the call that is under
    way; then the call's thread is left behind."""

    release_s: float = 5.0
    """Once a save has ended, the next one waits so long until its memory is free; then it goes on
    without. Only a store that is stuck keeps the memory for longer."""

    opening_s: float = 5.0
    """Opening a run waits so long for the store to say whether it can be written; then the run is
    open without a warning."""

    last_progress_s: float = 5.0
    """A blocking save waits so long for its last `on_progress` to return; then it returns."""

    progress_interval_s: float = 0.1
    """Between two calls of `on_progress`, and between two reports of a process that copies."""

    repeat_log_s: float = 600.0
    """A warning about the same trouble is logged again after so long."""

    command_end_s: float = 2.0
    """When the time of `--timeout` is over, a command may take so much more to end what is under
    way and to look once more."""

    probe_s: float = 4.0
    """`penstock doctor` writes for so long to measure a place, and then reads for so long."""

    request_retry_first_s: float = 0.2
    """After a passing error of an object store the request is tried again after a random part of
    this; doubled with each further error."""

    request_retry_most_s: float = 10.0
    """The longest pause between two tries of a request."""

    tier_answer_s: float = 10.0
    """A tier that takes longer for one small record, or for its names, counts as away: the save,
    or the opening, goes on without it."""

    tier_quick_error_s: float = 0.5
    """An error of a tier that comes sooner costs a save nothing, so the tier is asked again by the
    next save. After a slower one the tier is left alone for `tier_rest_first_s`."""

    tier_rest_first_s: float = 60.0
    """A tier that did not answer is left alone for so long; doubled with each further time."""

    tier_rest_most_s: float = 600.0
    """The longest time for which a tier is left alone."""

    tier_full_poll_s: float = 0.5
    """A save that waits because all tiers are full looks this often whether one has room again."""

    tier_reopen_s: float = 1.0
    """A tier that could not be opened is tried again after so long at the earliest, or after as
    long as the last try took, if that is longer."""

    drain_retry_first_s: float = 1.0
    """After an error a checkpoint's copy to the next tier is tried again after so long at most;
    doubled with each further error."""

    drain_retry_most_s: float = 60.0
    """The longest pause between two tries."""

    drain_failing_s: float = 30.0
    """A tier that has failed for longer is not waited for any more: a blocking save raises
    `NotDrainedError`, and `close` leaves the rest to the next process."""

    lease_refresh_s: float = 60.0
    """A copy says this often in its lease that it is alive. Far below the time after which other
    machines take a silent copy for dead (`SILENT_S`), which all of them have to agree on."""

    copy_alive_s: float = 5.0
    """While a store takes its time over one piece, a copy says this often that it is alive, so
    that it keeps its lease."""

    process_start_s: float = 120.0
    """The process that copies has so long for its imports, on a slow shared file system; then
    threads of the trainer copy."""

    process_end_s: float = 10.0
    """The process that copies has so long to end, or to give up a copy; then it is killed, which a
    copy survives."""

    store_tick_s: float = 2.5
    """A conformance suite waits so long for a store's time to go on: file systems and stores have
    times of whole seconds, some of every second one."""

    process_leave_s: float = 5.0
    """Told to end, that process waits so long for its copy to release the lease."""


_in_force = [Timing()]


def current_timing() -> Timing:
    """The timing in force, for whoever opens a run, a store or a command."""
    return _in_force[-1]


@contextmanager
def timing_in_force(timing: Timing) -> Iterator[Timing]:
    """Put `timing` in force, in all threads, for what is opened from now on: for tests."""
    _in_force.append(timing)
    try:
        yield timing
    finally:
        _in_force.remove(timing)

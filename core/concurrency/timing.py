"""The clocks, and the lengths of all waits that users cannot configure.

A `Timing` is passed down: the code that opens a run, or runs a command, takes the current timing,
and everything below gets it as an argument. A test sets its own timing (`timing_in_force`) instead
of patching constants.
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
    """Reads the clocks of this machine; a test passes a subclass with another time."""

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary point.

        This clock stops while the machine sleeps, and cannot be set.
        """
        return time.monotonic()

    def boot_s(self) -> float:
        """Return seconds since an arbitrary point.

        This clock keeps running while the machine sleeps, and cannot be set.
        """
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall_s(self) -> float:
        """Return seconds since 1970; users may set this clock, so no safety may depend on it."""
        return time.time()

    def now_iso(self) -> str:
        """Return the wall clock's time in the form used in records."""
        return datetime.fromtimestamp(self.wall_s(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class CountedClock(Clock):
    """A monotonic clock that advances only by the seconds that its owner counts.

    Used to wait for another process. A debugger or `SIGSTOP` usually stops both processes, so the
    time in which this process was stopped does not count as the other's silence.
    """

    def __init__(self) -> None:
        self._now_s = 0.0

    def advance(self, seconds: float) -> None:
        """Add `seconds`."""
        self._now_s += seconds

    def monotonic_s(self) -> float:
        """Return the seconds counted so far."""
        return self._now_s


SYSTEM_CLOCK = Clock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Holds the lengths, in seconds, of all waits that users cannot configure."""

    clock: Clock = SYSTEM_CLOCK
    """The clock of deadlines, watchdogs, leases and intents."""

    poll_s: float = 1.0
    """A thread that waits for a store checks this often whether the store is stuck, or the wait
    has ended for another reason. So a stuck store is noticed at most this late."""

    capture_poll_s: float = 0.2
    """While the save thread waits for captured chunks, it checks this often whether the save was
    given up."""

    staging_poll_s: float = 0.05
    """A capture that waits for staging memory checks this often whether the save was given up, or
    training waits at the fence."""

    stuck_s: float = 600.0
    """In commands, which have no `io_timeout_s`, a store that makes no progress for this long
    counts as stuck."""

    batch_stuck_s: float = 60.0
    """A backend thread whose batch takes more time counts as stuck, and another thread takes its
    place. A store that answers needs far less for any batch."""

    transfer_stuck_s: float = 600.0
    """The same as `batch_stuck_s`, for one transfer of the fsspec backend: some of its file systems
    have no timeout of their own."""

    interrupt_s: float = 5.0
    """After Ctrl-C or a timeout, the caller waits this long for the call in flight to end; then
    it leaves the call's thread behind."""

    release_s: float = 5.0
    """A save waits this long for the staging memory of the previous save, which has ended; then
    it continues without it. Only a stuck store keeps that memory for longer."""

    opening_s: float = 5.0
    """Opening a run waits this long for the check whether the store can be written; then the run
    opens without a warning."""

    preemption_poll_s: float = 1.0
    """A rank asks the store of the job this often whether another rank was asked to leave."""

    preemption_share_s: float = 1 / 5_000
    """With N ranks, each asks at most once in N times this: the store of the job has one thread."""

    preemption_s: float = 60.0
    """The ranks have this long to agree on the step after which they leave, if the user gives no
    deadline."""

    rank_poll_s: float = 0.05
    """A thread that waits for other ranks checks this often whether to continue without them."""

    rank_look_first_s: float = 0.02
    """The first pause between two looks at another rank's posts, and the shortest of an idle
    rank."""

    rank_look_s: float = 0.25
    """A rank that writes looks this often at the other ranks' posts; less often with many ranks.
    Always below 1 s, the time in which an error is reported to all."""

    rank_look_most_s: float = 0.8
    """The longest pause between two such looks, however many ranks there are."""

    rank_share_s: float = 1 / 20_000
    """With N ranks, each pauses for N times this or more between two looks: the store of the job
    has one thread."""

    rank_left_poll_s: float = 0.01
    """When rank 0 closes, it checks this often whether the others still need its store."""

    store_poll_first_s: float = 0.002
    """The first pause between two looks for a key in the store of the job."""

    busy_poll_first_s: float = 0.005
    """A rank that is still busy with the previous save checks whether rank 0 skips the new one.
    This is the first pause between two checks; doubled with each further check."""

    busy_poll_most_s: float = 0.1
    """The longest of these pauses."""

    hosts_poll_first_s: float = 0.005
    """Ranks that read together pause for this long between two looks at each other's posts, doubled
    with each further look, and between two attempts to connect to each other."""

    hosts_poll_most_s: float = 0.05
    """The longest pause between two such looks."""

    hosts_look_s: float = 0.25
    """A rank that waits for ranks of its host checks this often whether one of them cannot join
    the reading, or another rank has failed."""

    copies_look_first_s: float = 0.05
    """Rank 0 looks whether hosts have copied a checkpoint this long after it has asked them to, or
    after the last progress; 1.5 times as long after each further look, at most 1 s."""

    last_progress_s: float = 5.0
    """A blocking save waits this long for its last `on_progress` call; then it returns."""

    progress_interval_s: float = 0.1
    """The pause between two calls of `on_progress`, and between two reports of a copy process."""

    repeat_log_s: float = 600.0
    """A warning about the same trouble is logged again after this long."""

    command_end_s: float = 2.0
    """After `--timeout` has passed, a command may take this much more to end its calls in flight
    and to list the rest."""

    probe_s: float = 4.0
    """`penstock doctor` and `bench` write a raw blob for this long, and then read for as long."""

    request_retry_first_s: float = 0.2
    """The first backoff after a transient error of an object store; doubled with each further
    error. The request is retried after a random part of it."""

    request_retry_most_s: float = 10.0
    """The longest backoff between two attempts of a request."""

    tier_answer_s: float = 10.0
    """A tier that takes longer to read one small record, or to list its names, counts as away:
    the save, or the opening of the run, continues without it."""

    tier_quick_error_s: float = 0.5
    """A tier's error that comes sooner hardly delays a save, so the next save tries the tier
    again. After a slower error, saves skip the tier for `tier_rest_first_s`."""

    tier_rest_first_s: float = 60.0
    """A tier that did not answer is skipped for this long; doubled with each further time."""

    tier_rest_most_s: float = 600.0
    """The longest time for which a tier is skipped."""

    tier_full_poll_s: float = 0.5
    """A save that waits because all tiers are full checks this often whether one has room."""

    tier_reopen_s: float = 1.0
    """A tier that could not be opened is retried after this long at the earliest, or after the
    duration of the last attempt if that is longer."""

    drain_retry_first_s: float = 1.0
    """The first backoff after an error of a drain; doubled with each further error. The copy is
    retried after a random part of it, at least half."""

    drain_retry_most_s: float = 60.0
    """The longest backoff between two attempts of a drain."""

    drain_failing_s: float = 30.0
    """If a tier has failed for longer, a blocking save raises `NotDrainedError` instead of waiting
    for it, and `close` leaves the rest to the next process."""

    lease_refresh_s: float = 60.0
    """A copy renews its lease this often. Far below the time after which other machines take a
    silent copy for dead (`SILENT_S`), which must be the same on all machines."""

    copy_alive_s: float = 5.0
    """While a store is slow with one piece, a copy reports this often that it is alive, to keep its
    lease."""

    deletion_s: float = 60.0
    """A copy that finds data without a record waits this long, in case a deletion is under way.
    Deleting one list of names takes far less."""

    process_start_s: float = 120.0
    """The copy process has this long for its imports, on a slow shared file system; then threads
    of the training process copy instead."""

    process_end_s: float = 10.0
    """The copy process has this long to end, or to give up a copy; then it is killed, and the next
    process continues the copy."""

    store_tick_s: float = 2.5
    """A conformance suite waits this long for a store's time to advance: file systems and stores
    keep times in whole seconds, some only in even ones."""


_in_force = [Timing()]


def current_timing() -> Timing:
    """Return the current timing, for code that opens a run, a store or a command."""
    return _in_force[-1]


@contextmanager
def timing_in_force(timing: Timing) -> Iterator[Timing]:
    """Use `timing` in all threads, for all runs and stores opened in the block; for tests."""
    _in_force.append(timing)
    try:
        yield timing
    finally:
        _in_force.remove(timing)

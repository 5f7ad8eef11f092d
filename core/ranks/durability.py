"""Reports to all ranks whether the copies of their checkpoint succeeded.

These are copies to slower tiers, or to other hosts. Rank 0 posts the outcome of each, and
heartbeats while others wait for a copy. If rank 0 is silent for the timeout, the others count it as
dead and stop waiting.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.concurrency.timing import SYSTEM_CLOCK
from penstock.core.concurrency.watchdog import spawn
from penstock.core.errors import CoordinationError, FormatError, NotDrainedError
from penstock.core.rounds.posts import (
    DrainedPost,
    DrainsPost,
    copied_key,
    copies_key,
    decode,
    encode,
)
from penstock.core.rounds.standstill import BEATS, LOOKS, MOST_COUNTED, CountedLooks, Standstill

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import Coordination
    from penstock.core.concurrency.timing import Timing

_GROWTH = 1.5


class ToldDrains:
    """Posts rank 0's reports on its copies. Thread-safe."""

    def __init__(self, coordination: Coordination, timeout_s: float, kind: str) -> None:
        """Prepare; nothing is posted before `begin`.

        Args:
            coordination: The store where the ranks agree.
            timeout_s: The others count this rank as dead after this long without a post.
            kind: The kind of the copies, as for `FollowedDrains`.
        """
        self._coordination = coordination
        self._kind = kind
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards all below
        self._open: dict[int | str, Callable[[], str]] = {}
        self._outbox: dict[int | str, bytes] = {}
        self._running = False
        self._closed = False
        self._told = False
        self._moves = 0

    def begin(self, name: int | str, failing: Callable[[], str]) -> None:
        """Start heartbeats for the ranks that wait for a copy.

        Args:
            name: The number of the round of the save, or its uid.
            failing: Returns why waiting is useless; empty: the copies make progress.
        """
        with self._changed:
            self._open[name] = failing
            self._run_on()

    def end(self, name: int | str, post: DrainedPost) -> None:
        """Report how the copies of a checkpoint ended. Returns at once."""
        with self._changed:
            self._open.pop(name, None)
            self._outbox[name] = encode(post)
            self._run_on()

    def close(self) -> None:
        """Wait until the last post is sent, at most for the timeout, then stop posting."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._outbox and self._running), self._timeout_s)
            self._closed = True
            self._run_on()

    def _run_on(self) -> None:
        self._told = True
        self._changed.notify_all()
        if not (self._running or self._closed):
            self._running = True
            spawn("drained", self._run)

    def _run(self) -> None:
        heard_s = SYSTEM_CLOCK.monotonic_s()
        while True:
            with self._changed:
                if self._closed or not (self._open or self._outbox):
                    self._running = False
                    self._changed.notify_all()
                    return
                posts = dict(self._outbox)
                asked = list(self._open.values())
                self._told = False
            failing = next(filter(None, (ask() for ask in asked)), "")
            sent = self._send(posts, failing)
            with self._changed:
                now_s = SYSTEM_CLOCK.monotonic_s()
                if sent:
                    heard_s = now_s
                if sent or now_s - heard_s >= self._timeout_s:  # the others have given up, too
                    for name in posts:
                        del self._outbox[name]
                    self._changed.notify_all()
                self._changed.wait_for(lambda: self._told, self._timeout_s / BEATS)

    def _send(self, posts: dict[int | str, bytes], failing: str) -> bool:
        self._moves += 1
        try:
            for name, data in posts.items():
                self._coordination.post(copied_key(self._kind, name), data)
            self._coordination.post(
                copies_key(self._kind), encode(DrainsPost(self._moves, failing))
            )
        except CoordinationError:
            return False
        return True


class FollowedDrains:
    """Learns, on a rank other than 0, how rank 0's copies end. Thread-safe."""

    def __init__(
        self, coordination: Coordination, timeout_s: float, timing: Timing, kind: str
    ) -> None:
        """Prepare; nothing is read before `follow`.

        Args:
            coordination: The store where the ranks agree.
            timeout_s: Rank 0 counts as dead once it is silent for this long.
            timing: How often to poll, and the clock that measures the silence.
            kind: The kind of the copies: `drains` or `replicas`.
        """
        self._coordination = coordination
        self._kind = kind
        self._timeout_s = timeout_s
        self._timing = timing
        self._changed = threading.Condition()  # guards all below
        self._unknown: set[int | str] = set()  # the copies whose outcome is unknown
        self._threads: dict[int | str, threading.Thread] = {}
        self._closed = False
        self._failing = ""

    @property
    def failing(self) -> str:
        """Why waiting is useless, as rank 0 last reported; empty: its copies make progress."""
        return self._failing

    def follow(self, name: int | str, on_end: Callable[[DrainedPost], None]) -> None:
        """Call `on_end` once, on a separate thread, when the copies of a checkpoint end.

        Calls it with a failure on `close`, or if rank 0 is silent for the timeout.

        Args:
            name: The number of the round of the save, or its uid.
            on_end: Gets the outcome; may do anything, even wait for the next outcome.
        """
        with self._changed:
            if not self._unknown:
                self._failing = ""
            self._unknown.add(name)
            self._threads = {n: t for n, t in self._threads.items() if t.is_alive()}
            self._threads[name] = spawn("drained", partial(self._follow, name, on_end))

    def settle(self) -> None:
        """Wait until the outcome of all copies is known, or until rank 0's copies are failing."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unknown or self._failing)
            telling = [t for n, t in self._threads.items() if n not in self._unknown]
        for thread in telling:
            if thread is not threading.current_thread():
                thread.join()

    def close(self) -> None:
        """Stop all waits. A checkpoint not known to be durable is reported as not durable."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _follow(self, name: int | str, on_end: Callable[[DrainedPost], None]) -> None:
        post = self._end(name)
        with self._changed:
            self._unknown.discard(name)
            self._changed.notify_all()
        on_end(post)

    def _end(self, name: int | str) -> DrainedPost:
        looks = CountedLooks(self._timeout_s * MOST_COUNTED)
        still = Standstill(looks, [0], self._timeout_s)
        beat: bytes | None = None
        pause_s = self._timing.rank_look_first_s
        while True:
            try:
                found, end = self._coordination.read(
                    [copies_key(self._kind), copied_key(self._kind, name)]
                )
            except CoordinationError:
                found, end = beat, None
            looks.look(self._timing.clock.monotonic_s())
            if found != beat:
                beat = found
                still.moved(0)
            if end is not None:
                return _end_in(end)
            with self._changed:
                self._failing = _failing_in(beat)
                self._changed.notify_all()
                if still.is_over(0):
                    why = f"rank 0, which copies it, was silent for {self._timeout_s:g} s"
                    return _ended(why)
                if self._changed.wait_for(lambda: self._closed, pause_s):
                    return _ended("the run was closed before rank 0 reported it")
            pause_s = min(pause_s * _GROWTH, self._timeout_s / LOOKS)


def _failing_in(data: bytes | None) -> str:
    try:
        return "" if data is None else decode(DrainsPost, data).failing
    except FormatError as error:
        return str(error)


def _end_in(data: bytes) -> DrainedPost:
    try:
        return decode(DrainedPost, data)
    except FormatError as error:
        return _ended(str(error))


def _ended(why: str) -> DrainedPost:
    msg = (
        "the checkpoint is whole in a faster tier, but this rank does not know whether it was "
        f"copied to the durable tier: {why}. The next process that saves to this run continues the "
        "copy, and so does `penstock drain`"
    )
    return DrainedPost(kind=NotDrainedError.__name__, error=msg)

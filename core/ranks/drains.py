"""Tells all ranks how the copies of what they have saved together to slower tiers end.

Rank 0 alone copies. It posts the end of each copy, and posts again and again that it lives while
others wait for one: they take a rank 0 that is silent for the time-out for dead, and wait no more.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock.core.concurrency.timing import SYSTEM_CLOCK, Timing
from penstock.core.concurrency.watchdog import spawn
from penstock.core.errors import CoordinationError, FormatError, NotDrainedError
from penstock.core.rounds.posts import (
    DrainedPost,
    DrainsPost,
    decode,
    drained_key,
    drains_key,
    encode,
)
from penstock.core.rounds.standstill import BEATS, LOOKS, MOST_COUNTED, CountedLooks, Standstill

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import Coordination

_GROWTH = 1.5


class ToldDrains:
    """What rank 0 tells of its copies. Thread-safe."""

    def __init__(self, coordination: Coordination, timeout_s: float) -> None:
        """Prepare; nothing is posted before `begin`.

        Args:
            coordination: Where the ranks agree.
            timeout_s: The others take this rank for dead once it is silent for this long.
        """
        self._coordination = coordination
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards all below
        self._open: dict[int, Callable[[], str]] = {}
        self._outbox: dict[int, bytes] = {}
        self._running = False
        self._closed = False
        self._told = False
        self._moves = 0

    def begin(self, number: int, failing: Callable[[], str]) -> None:
        """Tell the others from now on that this rank lives: they wait for a copy.

        Args:
            number: The number of the round of the save.
            failing: Returns why waiting makes no sense; empty: the copies make progress.
        """
        with self._changed:
            self._open[number] = failing
            self._run_on()

    def end(self, number: int, post: DrainedPost) -> None:
        """Tell how the copies of a checkpoint ended; returns at once."""
        with self._changed:
            self._open.pop(number, None)
            self._outbox[number] = encode(post)
            self._run_on()

    def close(self) -> None:
        """Wait until the last post has gone out, at most for the time-out; then post no more."""
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
                    for number in posts:
                        del self._outbox[number]
                    self._changed.notify_all()
                self._changed.wait_for(lambda: self._told, self._timeout_s / BEATS)

    def _send(self, posts: dict[int, bytes], failing: str) -> bool:
        self._moves += 1
        try:
            for number, data in posts.items():
                self._coordination.post(drained_key(number), data)
            self._coordination.post(drains_key(), encode(DrainsPost(self._moves, failing)))
        except CoordinationError:
            return False
        return True


class FollowedDrains:
    """What another rank learns of the copies of rank 0. Thread-safe."""

    def __init__(
        self, coordination: Coordination, timeout_s: float, timing: Timing | None = None
    ) -> None:
        """Prepare; nothing is read before `follow`.

        Args:
            coordination: Where the ranks agree.
            timeout_s: Rank 0 counts as dead once it is silent for this long.
            timing: Says how often it looks, and by which clock the silence is counted; None:
                as usual.
        """
        self._coordination = coordination
        self._timeout_s = timeout_s
        self._timing = timing or Timing()
        self._changed = threading.Condition()  # guards all below
        self._waiting: dict[int, Callable[[DrainedPost], None]] = {}
        self._telling: list[threading.Thread] = []
        self._running = False
        self._closed = False
        self._failing = ""

    @property
    def failing(self) -> str:
        """Why waiting makes no sense, as rank 0 has told last; empty: its copies make progress."""
        return self._failing

    def follow(self, number: int, told: Callable[[DrainedPost], None]) -> None:
        """Call `told` once, on a thread of its own, with the end of the copies of a checkpoint.

        If rank 0 is silent for the time-out, or this is closed before, that is the end.

        Args:
            number: The number of the round of the save.
            told: May do anything, even wait for the next one.
        """
        with self._changed:
            self._waiting[number] = told
            if self._closed:
                self._tell([number], _ended("the run was closed before"))
            elif not self._running:
                self._running = True
                self._failing = ""
                spawn("drained", self._run)
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until each checkpoint has been told of, or the copies of rank 0 are failing."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._failing)
            telling = [t for t in self._telling if t is not threading.current_thread()]
        for thread in telling:
            thread.join()

    def close(self) -> None:
        """Wait for nothing any more: what is not durable as far as is known is told so."""
        with self._changed:
            self._closed = True
            self._tell(list(self._waiting), _ended("the run was closed before"))
            self._changed.notify_all()

    def _tell(self, numbers: list[int], post: DrainedPost) -> None:
        for number in numbers:
            told = self._waiting.pop(number)
            self._telling = [t for t in self._telling if t.is_alive()]
            self._telling.append(spawn("told", lambda told=told: told(post)))  # type: ignore[misc]
        self._changed.notify_all()

    def _run(self) -> None:
        looks = CountedLooks(self._timeout_s * MOST_COUNTED)
        still = Standstill(looks, [0], self._timeout_s)
        beat: bytes | None = None
        pause_s = self._timing.rank_look_first_s
        while True:
            with self._changed:
                numbers = list(self._waiting)
                if not numbers:
                    self._running = False
                    return
            keys = [drains_key(), *map(drained_key, numbers)]
            try:
                found = self._coordination.read(keys)
            except CoordinationError:
                found = [beat, *([None] * len(numbers))]
            looks.look(self._timing.clock.monotonic_s())
            if found[0] != beat:
                beat = found[0]
                still.moved(0)
            with self._changed:
                self._failing = _failing_in(beat)
                for number, data in zip(numbers, found[1:], strict=True):
                    if data is not None and number in self._waiting:
                        self._tell([number], _end_in(data))
                if still.is_over(0):
                    silent = f"rank 0, which copies it on, was silent for {self._timeout_s:g} s"
                    self._tell(list(self._waiting), _ended(silent))
                self._changed.notify_all()
                known = set(self._waiting)
                if self._changed.wait_for(lambda: self._waiting.keys() - known, pause_s):  # noqa: B023
                    pause_s = self._timing.rank_look_first_s
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
        "it is whole in a faster tier, and whether it was copied to the durable one is not known "
        f"here: {why}. The next process that saves there goes on with it, or `penstock drain`"
    )
    return DrainedPost(kind=NotDrainedError.__name__, error=msg)

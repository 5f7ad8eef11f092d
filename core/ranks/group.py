"""Joins the ranks that save and restore together, through the store that they share."""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import Deadline, spawn
from penstock.core.errors import ConfigError, CoordinationError, RankError
from penstock.core.limits import MAX_INT
from penstock.core.plan.writers import WRITER_BYTES
from penstock.core.ranks.durability import FollowedDrains, ToldDrains
from penstock.core.ranks.torch_job import (
    TorchCoordination,
    job_prefix,
    missing_job,
    place_in_job,
)
from penstock.core.rounds.posts import (
    At,
    DrainedPost,
    GoPost,
    Kind,
    SlotPost,
    Verdict,
    cut_bytes,
    decode,
    encode,
    end_key,
    go_key,
    slot_key,
)
from penstock.core.rounds.round import RankPlace
from penstock.core.types import show_value

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from penstock.core.abc import Coordination
    from penstock.core.concurrency.timing import Timing
    from penstock.core.config.model import CheckpointerConfig
    from penstock.core.plan.writers import RankPlaces

SEVERAL_CHECKPOINTERS = (
    "If the job has several checkpointers, use them for the first time in the same order on all "
    "ranks, or give each a name=; inside `if rank == 0:` use a checkpointer with ranks='alone'"
)
"""A second remedy if ranks see different roots, which may be the roots of two checkpointers."""

_FAILED = "failed with "
_NONCE_KEY = "nonce"
_SEATS_AT_ONCE = 64
_MISSED = b"missed"


class KnownPlaces:
    """The places of this rank in its last save, which the next save may assume.

    A place is this rank's number among the ranks with the same data. It determines which share of
    the data this rank writes, and is known for certain only after the ranks have met. A save that
    assumes its places captures only that share before then, and fails if the places were wrong.
    Each failure doubles the number of saves for which the places must stay the same before a
    save assumes them again. So a state that changes at every save loses only a few saves.
    """

    def __init__(self) -> None:
        self._known: dict[object, RankPlaces] = {}
        self._newest: tuple[object, RankPlaces] | None = None
        self._times_alike = 0  # consecutive saves with the newest places
        self._times_needed = 1  # before a save assumes them

    def of(self, key: object) -> RankPlaces | None:
        """Return the places of this rank for a save with `key`; None if unknown."""
        return self._known.get(key)

    def forget(self) -> None:
        """Forget all places until the next `note`."""
        self._known = {}

    def note(self, key: object, places: RankPlaces, *, assumed: RankPlaces | None) -> None:
        """Record this rank's places in a save, as reported by rank 0.

        Args:
            key: The `Brought.key` of this rank's save.
            places: Its places.
            assumed: The places that the save assumed, if any.
        """
        newest = key, places
        self._times_alike = self._times_alike + 1 if newest == self._newest else 1
        self._newest = newest
        if assumed is not None and assumed != places:
            self._times_needed *= 2
        self._known = {key: places} if self._times_alike >= self._times_needed else {}


class Parting:
    """Keeps rank 0 from closing the store of the job while another rank needs it. Thread-safe.

    The store may live in the process of rank 0.
    """

    def __init__(self, coordination: Coordination, place: RankPlace) -> None:
        """Prepare; nothing is sent.

        Args:
            coordination: The store of the job.
            place: This rank.
        """
        self._coordination = coordination
        self._place = place
        self._lock = threading.Lock()  # guards `_last` and `_needed`
        self._last = -1
        self._needed: set[int] = set()
        self._gone = False
        self._posting = threading.Lock()  # held during a post, so that the last post is the newest

    def ended(self, number: int) -> None:
        """Record that this rank knows the outcome of this round and of all earlier rounds."""
        with self._lock:
            self._last = max(self._last, number)

    def need(self, number: int) -> None:
        """Record that this rank needs the store for a round even after the round ends."""
        with self._lock:
            self._needed.add(number)

    def release(self, number: int) -> None:
        """Record that this rank no longer needs the store for a round."""
        with self._lock:
            self._needed.discard(number)

    def leave(self) -> None:
        """Record that this rank no longer needs the store for any round."""
        self._gone = True

    def post(self) -> None:
        """Post the number of the last round up to which this rank no longer needs the store.

        Raises:
            CoordinationError: The store of the job cannot be reached.
        """
        with self._posting:
            with self._lock:
                left = min(self._needed, default=self._last + 1) - 1
            if self._gone:
                left = MAX_INT
            if left >= 0:
                self._coordination.post(_left_key(self._place.rank), str(left).encode())

    def wait(self, lost: Collection[int], deadline: Deadline, pause_s: float) -> None:
        """Wait until no other rank needs the store for a round that this rank knows of.

        Args:
            lost: The ranks not to wait for.
            deadline: The limit of the wait.
            pause_s: The pause between two polls.
        """
        while self._last >= 0 and not self._all_left(lost) and not deadline.is_over():
            time.sleep(pause_s)

    def _all_left(self, lost: Collection[int]) -> bool:
        others = set(range(1, self._place.world_size)).difference(lost)
        try:
            values = self._coordination.read([_left_key(rank) for rank in sorted(others)])
        except CoordinationError:
            return True  # no rank can read the store any more
        return all(value is not None and int(value) >= self._last for value in values)


class RankGroup:
    """The ranks of one checkpointer. Thread-safe.

    Every save and every restore takes a number, so all ranks must call them in the same order.
    """

    def __init__(  # noqa: PLR0913 - options of tests among them
        self,
        rank: int,
        world_size: int,
        coordination: Coordination,
        *,
        timeout_s: float = 60.0,
        host: str = "",
        writer_bytes: int = WRITER_BYTES,
        members: Sequence[int] = (),
        name: str = "",
        timing: Timing | None = None,
    ) -> None:
        """Join the ranks; nothing is sent.

        Args:
            rank: The number of this rank, from 0.
            world_size: The number of ranks.
            coordination: The store where the ranks agree; the group closes it.
            timeout_s: A rank that makes no progress for this long counts as dead.
            host: The name of this machine in messages; default: its host name.
            writer_bytes: The fewest bytes that one of several replicas writes; equal on all ranks.
            members: The ranks' numbers in the job, in order; empty if they are the whole job.
            name: The name under which the ranks meet, if any.
            timing: How long to wait, and the clock that measures the others' silence; None: the
                current timing.
        """
        self.writer_bytes = writer_bytes
        self.place = RankPlace(rank, world_size, host or socket.gethostname(), tuple(members))
        self.name = name
        self.coordination = coordination
        self.timeout_s = timeout_s
        self.timing = timing or current_timing()
        self.places = KnownPlaces()
        """The places of this rank in the newest saves."""
        self.by_host: tuple[tuple[int, ...], ...] | None = None
        """The sets of ranks that read together, each set on one host; None: not known yet."""
        self.reads_apart = False
        """Whether the ranks of this host cannot read together."""
        self.lost: set[int] = set()
        """The ranks that are dead or have failed; no rank waits for them."""
        self.shared: set[str] = set()
        """The URLs of the places that this rank is known to share with rank 0."""
        self.told_drains = ToldDrains(coordination, timeout_s, "drains")
        """On rank 0: its reports on its copies to slower tiers."""
        self.followed_drains = FollowedDrains(coordination, timeout_s, self.timing, "drains")
        """On the other ranks: follows rank 0's copies."""
        self._parting = Parting(coordination, self.place)
        self._next = 0
        self._closed = self._reported_close = False
        self._lock = threading.Lock()  # guards `_next`, `_nonce` and `_senders`
        self._nonce = b""
        self._senders: list[threading.Thread] = []
        self._pid = os.getpid()
        _every.add(self)

    def next_number(self) -> int:
        """Return the number of the next save or restore."""
        with self._lock:
            self._next += 1
            return self._next - 1

    def uid(self, number: int) -> str:
        """Return the uid of the save with this number, the same on every rank.

        Raises:
            CoordinationError: The store of the job cannot be reached.
        """
        with self._lock:
            if not self._nonce:
                drawn = secrets.token_hex(16).encode()
                self._nonce = self.coordination.decide(_NONCE_KEY, drawn)
            seed = b"%b/%d" % (self._nonce, number)
        return hashlib.blake2b(seed, digest_size=16).hexdigest()

    def give_up(self, number: int, cause: str) -> None:
        """Report to all ranks that this rank failed before it began and cannot take part.

        Posts on a separate thread, because the caller is about to raise an error.
        """
        verdict = Verdict(commit=False, rank=self.place.rank, host=self.place.host, cause=cause)
        self._send(lambda: self.coordination.decide(end_key(number), encode(verdict)))
        self.ended(number)

    def refuse(
        self, number: int, kind: Kind, reason: str, terms: Mapping[str, Any] | None = None
    ) -> None:
        """Report to all ranks that rank 0 does not begin; posts on a separate thread."""
        post = GoPost(kind, terms or {}, stop=reason)
        self._send(lambda: self.coordination.post(go_key(number), encode(post)))
        self.ended(number)

    def word(self, number: int) -> GoPost | None:
        """Return rank 0's answer for a round; None if there is none yet.

        Raises:
            CoordinationError: The store of the job cannot be reached.
        """
        data = self.coordination.read([go_key(number)])[0]
        return None if data is None else decode(GoPost, data)

    def post(self, key: str, value: bytes) -> None:
        """Post a value of rank 0 for all ranks, on a separate thread.

        Never post to the same key twice, since two posts may arrive in either order.
        """
        self._send(lambda: self.coordination.post(key, value))

    def wait_for_rank_0(self, key: str, what: str) -> bytes:
        """Return the value that rank 0 posts under `key`; wait for it.

        Args:
            key: The key.
            what: What rank 0 decides, for the message.

        Raises:
            RankError: Rank 0 has not posted it within `timeout_s`.
            CoordinationError: The store of the job cannot be reached.
        """
        value = self.coordination.read([key])[0]
        if value is None and self.coordination.wait(key, self.timeout_s):
            value = self.coordination.read([key])[0]
        if value is None:
            cause = f"has not decided {what} for {self.timeout_s:g} s"
            msg = f"rank 0 {cause}: it made no progress, or its loop differs from this rank's"
            raise RankError(msg, 0, cause=cause)
        return value

    def need_store(self) -> None:
        """Keep rank 0 from closing the store of the job before this rank closes."""
        if self.place.rank:
            self._parting.need(0)

    def ended(self, number: int) -> None:
        """Record that this rank knows how a round ended, and no longer needs the store for it.

        Rank 0 waits for this before it closes, because the store may live in its process.
        """
        self._parting.ended(number)
        if self.place.rank:
            self._send(self._parting.post)

    def follow(self, number: int, on_end: Callable[[DrainedPost], None]) -> None:
        """Call `on_end` when the copies of a round's checkpoint end, as `FollowedDrains` does.

        This rank needs the store for that round until then.
        """
        self._parting.need(number)

        def release(post: DrainedPost) -> None:
            self._parting.release(number)
            self._send(self._parting.post)
            on_end(post)

        self.followed_drains.follow(number, release)

    def settle(self) -> None:
        """Wait until this rank knows what is durable, or until rank 0's copies are failing."""
        self.followed_drains.settle()

    def close(self, error: BaseException | None = None) -> None:
        """Close the coordination; on rank 0 after the others know how the last round ended.

        Rank 0 waits for the others at most `timeout_s`. Each rank reports that it has closed, so
        that no rank waits for it. No thread of this group is left on return, unless the store
        hangs. Idempotent.

        Args:
            error: Why this rank closes, for the messages of the others; None if nothing went wrong.
        """
        if self._closed or self._pid != os.getpid():
            return  # in a forked child: the threads belong to the parent
        self._closed = True
        deadline = Deadline(self.timeout_s)
        self.followed_drains.close()
        self.told_drains.close()
        self.report_close(error)
        if self.name:
            self._send(self._take_seats_of_lost)
        if self.place.rank:
            self._parting.leave()
            with suppress(CoordinationError):  # rank 0 then waits for `timeout_s`
                self._parting.post()
        else:
            self._parting.wait(self.lost, deadline, self.timing.rank_left_poll_s)
        with self._lock:
            senders = self._senders
        for sender in senders:
            sender.join(deadline.left_s())
        self.coordination.close()

    def report_close(self, error: BaseException | None = None) -> None:
        """Report to all ranks, once, that this rank closes and why."""
        if self._reported_close:
            return
        self._reported_close = True
        cause = "closed its checkpointer"
        if error is not None:
            cause += f" (because of {type(error).__name__}: {_line_of(error)})"
        part = {"cause": cut_bytes(cause)}
        post = SlotPost(self._next, "save", At.CLOSED, host=self.place.host, part=part)
        self._send(lambda: self.coordination.post(slot_key(self.place.rank), encode(post)))

    def _take_seats_of_lost(self) -> None:
        """Take the seats of ranks that never arrived, so that they meet the others next time."""
        for rank in sorted(self.lost):
            self.coordination.decide(_seat_key(rank), _MISSED)

    def _send(self, call: Any) -> None:
        def send() -> None:
            with suppress(CoordinationError):  # the others find this rank silent
                call()

        with self._lock:
            senders = [thread for thread in self._senders if thread.is_alive()]
            self._senders = [*senders, spawn("ranks", send)]


_every: weakref.WeakSet[RankGroup] = weakref.WeakSet()


def close_groups_at_exit() -> None:
    """Close the groups that are still open, so that no thread of theirs aborts the process.

    A daemon thread may return from a C++ library while the interpreter exits. It then gets an
    exception that the library does not expect, which aborts the process. If an exception has ended
    the program, the other ranks get it as the reason.
    """
    for group in list(_every):
        group.close(getattr(sys, "last_value", None))


class RanksOfJob:
    """Finds the ranks on first use, because a checkpointer may be older than its process group."""

    def __init__(
        self, given: Any, *, config: CheckpointerConfig, url: str, name: str | None = None
    ) -> None:
        """Prepare; does not look for the ranks.

        Args:
            given: A process group, the numbers of ranks in the job, or a `RankGroup`; None takes
                the default process group.
            config: Holds the timeout, and whether this process is alone.
            url: The URL of the run, for messages.
            name: The name under which the ranks meet; None: the n-th checkpointers of all ranks
                meet.

        Raises:
            ConfigError: The name is empty or not a string, or `given` has no ranks.
        """
        if name is not None and (type(name) is not str or not name):
            msg = (
                "name must be a string that is not empty and is the same on all ranks, "
                f"not {show_value(name)}"
            )
            raise ConfigError(msg)
        self._given = _numbers(given) if isinstance(given, Iterable) else given
        self._name = name or ""
        self._token = secrets.token_hex(16).encode()  # names one seat, even if requested again
        self._config = config
        self._url = url
        self._group: RankGroup | None = None
        self._saves_alone = False

    def leads(self) -> bool:
        """Return whether this process does the tasks that only one process of the job may do.

        That is rank 0, or a process that is alone. Does not join the ranks: if only some ranks call
        this, joining would shift the count by which the n-th checkpointers of all ranks meet.

        Raises:
            ConfigError: This process is not in the group that it was given.
        """
        if self._config.ranks == "alone":
            return True
        place = self._place()
        if place is not None:
            return place.rank == 0
        return not missing_job() or os.environ.get("RANK") == "0"

    def settle(self) -> None:
        """Wait until this rank knows which checkpoints are durable; see `RankGroup.settle`."""
        if self._group is not None:
            self._group.settle()

    def obstacle(self) -> str:
        """Return why this process cannot yet save as one of several ranks; empty if it can."""
        waits = self._config.ranks == "auto" and self._given is None
        return missing_job() if waits else ""

    def place(self) -> RankPlace | None:
        """Return the place of this process among the ranks that save together; None: it is alone.

        Does not join the ranks, like `leads`.

        Raises:
            ConfigError: There are several ranks, and this one cannot find the others.
        """
        if self._config.ranks == "alone":
            return None
        found = self._place()
        self._check_findable(found)
        self._check_not_alone(found)
        return found

    def alone_among_several(self) -> str:
        """Return a remedy if other processes also seem to save here; empty if none do."""
        count = os.environ.get("WORLD_SIZE", "1")
        if self._config.ranks != "alone" or count == "1":
            return ""
        return (
            f"This process has ranks='alone', and WORLD_SIZE is {count}: if the other processes of "
            "this job have the same root, give each process its own root, or leave out ranks=, so "
            "that they save one checkpoint together."
        )

    def of_save(self) -> RankGroup | None:
        """Return the ranks that save together; None: this process saves alone.

        Raises:
            ConfigError: There are several ranks, and this one cannot find the others.
        """
        found = self.of_restore()
        self._check_findable(found)
        self._saves_alone = found is None
        return found

    def of_restore(self) -> RankGroup | None:
        """Return the ranks that restore together; None: this process is alone.

        Raises:
            ConfigError: This process is not in the group that it was given.
        """
        if self._config.ranks == "alone" or self._group is not None:
            return self._group
        found = self._given if isinstance(self._given, RankGroup) else None
        if found is None:
            found = group_of_job(
                self._given,
                timeout_s=self._config.rank_timeout_s,
                name=self._name,
                token=self._token,
            )
        self._check_not_alone(found)
        self._group = found
        return found

    def close(self, error: BaseException | None = None) -> None:
        """Close the group, if it was found, with `error` as the reason."""
        if error is not None:  # the others may soon wait for this rank
            with suppress(ConfigError, CoordinationError):
                self.of_restore()
        if self._group is not None:
            self._group.close(error)

    def _place(self) -> RankPlace | None:
        """Return the place of this process, without joining the ranks; None if it is alone."""
        group = self._given if isinstance(self._given, RankGroup) else self._group
        return place_in_job(self._given) if group is None else group.place

    def _check_findable(self, found: RankGroup | RankPlace | None) -> None:
        if found is None and self._config.ranks == "auto" and (obstacle := missing_job()):
            raise ConfigError(obstacle)

    def _check_not_alone(self, found: RankGroup | RankPlace | None) -> None:
        if found is not None and self._saves_alone:
            msg = (
                f"the checkpointer of {self._url} has saved before torch.distributed was "
                "initialized, as one process: make a new checkpointer for the ranks"
            )
            raise ConfigError(msg)


def cause_of(error: BaseException) -> str:
    """Return the one-line cause that other ranks get for an error."""
    return f"{failed_with(type(error).__name__)}{_line_of(error)}"


def failed_with(name: str) -> str:
    """Return the start of the cause for an error with this class name."""
    return f"{_FAILED}{name}: "


def is_logged(error: RankError) -> bool:
    """Return whether rank 0 has logged the error. A silent or dead rank 0 has not."""
    return error.rank != 0 or error.cause.startswith(_FAILED)


def _line_of(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _seat_key(rank: int) -> str:
    return f"seat/{rank:05d}"


def _left_key(rank: int) -> str:
    return f"left/{rank:05d}"


def group_of_job(
    group: Any = None,
    *,
    timeout_s: float,
    name: str = "",
    token: bytes = b"",
) -> RankGroup | None:
    """Return the ranks of the torch.distributed job; None if this process is alone.

    Args:
        group: A process group, or the numbers of ranks; None takes the default group.
        timeout_s: As in `RankGroup`.
        name: The name under which the ranks meet; empty: the n-th groups of all processes meet.
        token: With a name: random bytes that identify this checkpointer, so that its retry returns
            to the same meeting of the ranks.

    Raises:
        ConfigError: This process is not in `group`, the job's store cannot be used, or the name is
            in use in this process.
        CoordinationError: The job's store does not answer.
    """
    place = place_in_job(group)
    if place is None:
        return None
    prefix = job_prefix(place.members, name)
    seat = os.getpid(), prefix, place.rank
    holder = _named.get(seat)
    if holder is not None and not holder._closed:  # noqa: SLF001 - of this module
        msg = (
            f"name={name!r} is in use by another checkpointer of this process that has saved or "
            "restored and is still open: close that one first, or use another name on all ranks"
        )
        raise ConfigError(msg)
    meet = partial(
        TorchCoordination,
        world_size=place.world_size,
        call_s=min(10.0, timeout_s / 4),  # so that a hanging store is noticed in time
    )
    if name:
        with meet(prefix=prefix) as meetings:
            prefix = f"{prefix}/{_take_seat(meetings, place.rank, token)}"
    coordination = meet(prefix=prefix)
    found = RankGroup(
        place.rank,
        place.world_size,
        coordination,
        timeout_s=timeout_s,
        members=place.members,
        name=name,
    )
    if name:
        _named[seat] = found
    return found


_named: weakref.WeakValueDictionary[tuple[int, str, int], RankGroup] = weakref.WeakValueDictionary()


def _take_seat(coordination: Coordination, rank: int, token: bytes) -> int:
    """Return the number of the first meeting of a name where this rank's seat is free.

    A rank has one seat per meeting, and a seat is taken once: by the rank when it arrives, or by
    ranks that have given up waiting for it. So a rank that failed before it arrived meets the
    others at the next meeting. A restarted rank does too, because its earlier seats are taken.
    """
    for first in itertools.count(0, _SEATS_AT_ONCE):
        numbers = range(first, first + _SEATS_AT_ONCE)
        keys = [f"{number}/{_seat_key(rank)}" for number in numbers]
        for number, key, value in zip(numbers, keys, coordination.read(keys), strict=True):
            taken = coordination.decide(key, token) if value is None else value
            if taken == token:
                return number
    raise AssertionError


def _numbers(ranks: Iterable[object]) -> tuple[int, ...]:
    """Return the ranks' numbers in ascending order.

    Raises:
        ConfigError: The list is empty, or its items are not distinct rank numbers.
    """
    given = list(ranks)
    numbers = sorted({rank for rank in given if type(rank) is int and rank >= 0})
    if not given or len(numbers) < len(given):
        msg = (
            "group= takes a process group of torch.distributed, or a list of different numbers of "
            f"ranks in the job such as [0, 1], not {show_value(given)}"
        )
        raise ConfigError(msg)
    return tuple(numbers)

"""The ranks that save and restore together: which of them this process is, and where they agree."""

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
from penstock.core.errors import ConfigError, CoordinationError
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
    from penstock.core.errors import RankError
    from penstock.core.plan.writers import RankPlaces

SEVERAL_CHECKPOINTERS = (
    "Of several checkpointers in a job each has to be used for the first time in the same order on "
    "all ranks, or needs a name=; for what stands behind `if rank == 0:` use a checkpointer with "
    "ranks='alone'"
)
"""What else to look at where ranks see different roots: they may be those of two checkpointers."""

_FAILED = "failed with "
_NONCE_KEY = "nonce"
_SEATS_AT_ONCE = 64
_MISSED = b"missed"


class KnownPlaces:
    """Says on which places of this rank a save may rely before the ranks have met.

    A save that relies on its places captures the share of this rank alone. Each time that they were
    wrong, a save has failed. So places then have to stay the same for twice as many saves before
    they are relied on: a state that changes at every save loses a few of them, not all.
    """

    def __init__(self) -> None:
        self._known: dict[object, RankPlaces] = {}
        self._newest: tuple[object, RankPlaces] | None = None
        self._times_alike = 0  # saves in a row in which the places were the newest ones
        self._times_needed = 1  # before they are relied on

    def of(self, key: object) -> RankPlaces | None:
        """Return the places of this rank where it brings `key` to a save; None: not known."""
        return self._known.get(key)

    def forget(self) -> None:
        """Know no places until the next `note`."""
        self._known = {}

    def note(self, key: object, places: RankPlaces, *, assumed: RankPlaces | None) -> None:
        """Note the places of this rank in a save, as rank 0 has reported them.

        Args:
            key: What this rank has brought to the save.
            places: Its places.
            assumed: The places that the save has relied on, if it has.
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
            coordination: Where the ranks agree.
            place: This rank.
        """
        self._coordination = coordination
        self._place = place
        self._lock = threading.Lock()  # guards `_last` and `_needed`
        self._last = -1
        self._needed: set[int] = set()
        self._gone = False
        self._posting = threading.Lock()  # held during a post, so that the newest is the last one

    def ended(self, number: int) -> None:
        """Note that this rank knows how a round, and all before it, ended."""
        with self._lock:
            self._last = max(self._last, number)

    def need(self, number: int) -> None:
        """Note that this rank needs the store for a round even when that has ended."""
        with self._lock:
            self._needed.add(number)

    def release(self, number: int) -> None:
        """Note that this rank does not need the store for a round any more."""
        with self._lock:
            self._needed.discard(number)

    def leave(self) -> None:
        """Note that this rank needs the store for no round any more."""
        self._gone = True

    def post(self) -> None:
        """Post for which rounds this rank needs the store no longer.

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
            lost: The ranks that are not waited for.
            deadline: For how long to wait.
            pause_s: How long to pause between two looks.
        """
        while self._last >= 0 and not self._all_left(lost) and not deadline.is_over():
            time.sleep(pause_s)

    def _all_left(self, lost: Collection[int]) -> bool:
        others = set(range(1, self._place.world_size)).difference(lost)
        try:
            values = self._coordination.read([_left_key(rank) for rank in sorted(others)])
        except CoordinationError:
            return True  # nobody can learn anything there any more
        return all(value is not None and int(value) >= self._last for value in values)


class RankGroup:
    """The ranks of one checkpointer. Thread-safe.

    Every save and every restore takes a number, so all ranks have to call them in the same order.
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
            world_size: How many there are.
            coordination: Where they agree; the group closes it.
            timeout_s: A rank that makes no progress for this long counts as dead.
            host: The name of this machine, for messages; default: what it says itself.
            writer_bytes: The least bytes that one of several replicas writes; alike on all ranks.
            members: Their numbers in the job, in order, where others of the job are left out;
                empty: they are all of it.
            name: The name under which they meet, if they have one.
            timing: Says how long is waited, and by which clock the silence of others is counted;
                None: the timing in force.
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
        """The ranks in sets that read together, each on one host, once they are known."""
        self.reads_apart = False
        """Whether the ranks of this host have found that they cannot read together."""
        self.lost: set[int] = set()
        """The ranks that were found dead, or have failed; nobody waits for them any more."""
        self.shared: set[str] = set()
        """The places that this rank was seen to share with rank 0, by URL."""
        self.told_drains = ToldDrains(coordination, timeout_s)
        """On rank 0: what it tells of its copies to slower tiers."""
        self.followed_drains = FollowedDrains(coordination, timeout_s, self.timing)
        """On the others: what they learn of the copies of rank 0."""
        self._parting = Parting(coordination, self.place)
        self._next = 0
        self._closed = False
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
        """Tell all ranks that this one cannot take part, since something failed before it began.

        On a thread of its own: the caller is on its way out with an error.
        """
        verdict = Verdict(commit=False, rank=self.place.rank, host=self.place.host, cause=cause)
        self._send(lambda: self.coordination.decide(end_key(number), encode(verdict)))
        self.ended(number)

    def refuse(
        self, number: int, kind: Kind, reason: str, terms: Mapping[str, Any] | None = None
    ) -> None:
        """Tell all ranks that rank 0 does not begin; on a thread of its own."""
        post = GoPost(kind, terms or {}, stop=reason)
        self._send(lambda: self.coordination.post(go_key(number), encode(post)))
        self.ended(number)

    def word(self, number: int) -> GoPost | None:
        """Return the word of rank 0 on a round; None if it has said nothing yet.

        Raises:
            CoordinationError: The store of the job cannot be reached.
        """
        data = self.coordination.read([go_key(number)])[0]
        return None if data is None else decode(GoPost, data)

    def ended(self, number: int) -> None:
        """Note that this rank has learned how a round ended, and needs the store no longer for it.

        Rank 0 waits for that before it closes, since the store may live in its process.
        """
        self._parting.ended(number)
        if self.place.rank:
            self._send(self._parting.post)

    def follow(self, number: int, told: Callable[[DrainedPost], None]) -> None:
        """Call `told` with the end of the copies of what was saved in a round, as `FollowedDrains`.

        This rank needs the store for that round until then.
        """
        self._parting.need(number)

        def release(post: DrainedPost) -> None:
            self._parting.release(number)
            self._send(self._parting.post)
            told(post)

        self.followed_drains.follow(number, release)

    def settle(self) -> None:
        """Wait until this rank knows which checkpoints are durable, or rank 0 cannot copy them."""
        self.followed_drains.settle()

    def close(self, error: BaseException | None = None) -> None:
        """Close the coordination; on rank 0 once the others know how the last round ended.

        Waits for them at most as long as a rank may stand still. Tells them that this one has
        closed, so that nobody waits for it. No thread of this group is left on return, unless the
        store hangs. Idempotent.

        Args:
            error: Why this rank closes, for the messages of the others; None: nothing went wrong.
        """
        if self._closed or self._pid != os.getpid():
            return  # in a forked child: the threads belong to the parent
        self._closed = True
        deadline = Deadline(self.timeout_s)
        self.followed_drains.close()
        self.told_drains.close()
        cause = "closed its checkpointer"
        if error is not None:
            cause += f" (because of {type(error).__name__}: {_line_of(error)})"
        part = {"cause": cut_bytes(cause)}
        post = SlotPost(self._next, "save", At.CLOSED, host=self.place.host, part=part)
        self._send(lambda: self.coordination.post(slot_key(self.place.rank), encode(post)))
        if self.name:
            self._send(self._take_seats_of_lost)
        if self.place.rank:
            self._parting.leave()
            with suppress(CoordinationError):  # rank 0 waits for as long as it may stand still
                self._parting.post()
        else:
            self._parting.wait(self.lost, deadline, self.timing.rank_left_poll_s)
        with self._lock:
            senders = self._senders
        for sender in senders:
            sender.join(deadline.left_s())
        self.coordination.close()

    def _take_seats_of_lost(self) -> None:
        """Take the seats of ranks that never came: they meet the others at the next meeting."""
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
    """Close the groups that nobody has closed.

    Where an exception has ended the program, the others learn of it.

    A daemonic thread that returns from a C++ library while the interpreter exits is ended by an
    exception that the library does not expect, which aborts the process.
    """
    for group in list(_every):
        group.close(getattr(sys, "last_value", None))


class RanksOfJob:
    """Finds the ranks of a checkpointer when they are needed: it may be older than the group."""

    def __init__(
        self, given: Any, *, config: CheckpointerConfig, url: str, name: str | None = None
    ) -> None:
        """Prepare; nothing is looked for.

        Args:
            given: A process group, the numbers of ranks in the job, or a `RankGroup`; None takes
                the default process group.
            config: Says whether this process is alone, and the time-out.
            url: The run, for messages.
            name: Where the ranks meet, in place of counting the checkpointers of each process.

        Raises:
            ConfigError: The name is empty or no string, or `given` are no numbers of ranks.
        """
        if name is not None and (type(name) is not str or not name):
            msg = f"name must be a string, not empty, the same on all ranks; not {show_value(name)}"
            raise ConfigError(msg)
        self._given = _numbers(given) if isinstance(given, Iterable) else given
        self._name = name or ""
        self._token = secrets.token_hex(16).encode()  # of one seat, however often it is asked for
        self._config = config
        self._url = url
        self._group: RankGroup | None = None
        self._saves_alone = False

    def leads(self) -> bool:
        """Return whether this process is alone, or rank 0: what is done once is done here.

        Does not join the ranks. One of them may ask that the others do not, and the n-th
        checkpointer that joins on each rank is taken for one and the same.

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
        """Return why this process cannot save as one of several ranks by now; empty if it can."""
        waits = self._config.ranks == "auto" and self._given is None
        return missing_job() if waits else ""

    def place(self) -> RankPlace | None:
        """Return the place of this process among the ranks that save together; None: it is alone.

        Does not join the ranks, as `leads`.

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
        """Return what to look at where others seem to save here, too; empty: nothing is known."""
        count = os.environ.get("WORLD_SIZE", "1")
        if self._config.ranks != "alone" or count == "1":
            return ""
        return (
            f"This process was told ranks='alone', and WORLD_SIZE is {count}: if the others of "
            "this job have the same root, give each process a root of its own, or leave ranks= "
            "out, so that they save one checkpoint together."
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
        """Close the group, if it was found; `error` is why."""
        if error is not None:  # the others may be about to wait for this rank
            with suppress(ConfigError, CoordinationError):
                self.of_restore()
        if self._group is not None:
            self._group.close(error)

    def _place(self) -> RankPlace | None:
        """Return the place of this process, without joining the ranks; None: it is alone."""
        group = self._given if isinstance(self._given, RankGroup) else self._group
        return place_in_job(self._given) if group is None else group.place

    def _check_findable(self, found: RankGroup | RankPlace | None) -> None:
        if found is None and self._config.ranks == "auto" and (obstacle := missing_job()):
            raise ConfigError(obstacle)

    def _check_not_alone(self, found: RankGroup | RankPlace | None) -> None:
        if found is not None and self._saves_alone:
            msg = (
                f"the checkpointer of {self._url} has saved before torch.distributed was "
                "initialised, as one process: make a new one for the ranks"
            )
            raise ConfigError(msg)


def cause_of(error: BaseException) -> str:
    """Return what the other ranks are told of an error, in one line."""
    return f"{failed_with(type(error).__name__)}{_line_of(error)}"


def failed_with(name: str) -> str:
    """Return how the cause begins of a rank that failed with an error of this name."""
    return f"{_FAILED}{name}: "


def is_logged(error: RankError) -> bool:
    """Return whether rank 0 has logged the error: not where it is itself silent or dead."""
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
    """Return the ranks of the torch.distributed job; None for a process that is alone.

    Args:
        group: A process group, or the numbers of ranks; None takes the default group.
        timeout_s: As in `RankGroup`.
        name: Where they meet; empty: at the n-th group of each process.
        token: With a name: identifies the checkpointer that takes the seat, also if it asks again.

    Raises:
        ConfigError: This process is not in `group`, the store of the job cannot be used, or the
            name is in use in this process.
        CoordinationError: The store of the job does not answer.
    """
    place = place_in_job(group)
    if place is None:
        return None
    prefix = job_prefix(place.members, name)
    seat = os.getpid(), prefix, place.rank
    other = _named.get(seat)
    if other is not None and not other._closed:  # noqa: SLF001 - of this module
        msg = (
            f"name={name!r} is that of another checkpointer of this process, which has saved or "
            "restored and is still open: close it first, or take another name, on all ranks alike"
        )
        raise ConfigError(msg)
    meet = partial(
        TorchCoordination,
        world_size=place.world_size,
        call_s=min(10.0, timeout_s / 4),  # so that a store that hangs is noticed in time
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
    """Return the number of the first meeting of a name in which the seat of this rank is free.

    Each rank has one seat in each meeting, which is taken once: by the rank when it comes, or by
    those that have waited for it in vain. So a rank that failed before it came meets the others at
    the next meeting. So does a rank that was started again: its earlier seats are taken.
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
    """Return numbers of ranks in ascending order.

    Raises:
        ConfigError: They are none.
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

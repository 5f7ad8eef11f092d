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
from typing import TYPE_CHECKING, Any

from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import Deadline, spawn
from penstock.core.errors import ConfigError, CoordinationError
from penstock.core.limits import MAX_INT
from penstock.core.plan.ranks import WRITER_BYTES
from penstock.core.ranks.drains import FollowedDrains, ToldDrains
from penstock.core.ranks.torch_store import TorchCoordination, job_prefix
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
    from collections.abc import Callable, Mapping, Sequence

    from penstock.core.abc import Coordination
    from penstock.core.concurrency.timing import Timing
    from penstock.core.config.model import CheckpointerConfig
    from penstock.core.errors import RankError
    from penstock.core.plan.ranks import RankPlaces

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


class RankGroup:
    """The ranks of one checkpointer. Thread-safe.

    Every save and every restore takes a number, so all ranks have to call them in the same order.
    """

    def __init__(  # noqa: PLR0913 - options, each by name
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
        self.alike: dict[object, RankPlaces] = {}
        """The places of this rank among those alike, by what it brought to the newest save.

        As rank 0 told them then; no other structure is known. Empty while places change too often
        to be relied on.
        """
        self._newest: tuple[object, RankPlaces] | None = None
        self._times_alike = 0  # saves in a row in which the places were the newest ones
        self._times_needed = 1  # before they are relied on
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
        self._numbers = itertools.count()
        self._next = 0
        self._closed = False
        self._lock = threading.Lock()  # guards `_nonce`, `_last`, `_followed`, `_senders`
        self._nonce = b""
        self._last = -1
        self._followed: set[int] = set()
        self._senders: list[threading.Thread] = []
        self._posting = threading.Lock()  # held during a post, so that the newest is the last one
        self._pid = os.getpid()
        _every.add(self)

    def next_number(self) -> int:
        """Return the number of the next save or restore."""
        number = next(self._numbers)
        self._next = number + 1
        return number

    def note_places(self, key: object, places: RankPlaces, *, assumed: RankPlaces | None) -> None:
        """Note the places of this rank in a save, as rank 0 has told them.

        A later save relies on them and captures this rank's share alone. Each time that this was
        wrong, a save has failed. So places then have to stay the same for twice as many saves
        before they are relied on: a state that changes at every save loses a few of them, not all.

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
        self.alike = {key: places} if self._times_alike >= self._times_needed else {}

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
        with self._lock:
            self._last = max(self._last, number)
        if self.place.rank:
            self._send(self._post_left)

    def follow(self, number: int, told: Callable[[DrainedPost], None]) -> None:
        """Call `told` with the end of the copies of what was saved in a round, as `FollowedDrains`.

        This rank needs the store for that round until then.
        """
        with self._lock:
            self._followed.add(number)

        def forget(post: DrainedPost) -> None:
            with self._lock:
                self._followed.discard(number)
            self._send(self._post_left)
            told(post)

        self.followed_drains.follow(number, forget)

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
        with self._lock:
            last, senders = self._last, self._senders
        if self.place.rank:
            with suppress(CoordinationError):  # rank 0 waits for as long as it may stand still
                self._post_left()
        elif last >= 0:
            while not self._all_left(last) and not deadline.is_over():
                time.sleep(self.timing.rank_left_poll_s)
        for sender in senders:
            sender.join(deadline.left_s())
        self.coordination.close()

    def _post_left(self) -> None:
        with self._posting:
            with self._lock:
                left = min(self._followed, default=self._last + 1) - 1
            if self._closed:
                left = MAX_INT
            if left >= 0:
                self.coordination.post(_left_key(self.place.rank), str(left).encode())

    def _take_seats_of_lost(self) -> None:
        """Take the seats of ranks that never came: they meet the others at the next meeting."""
        for rank in sorted(self.lost):
            self.coordination.decide(_seat_key(rank), _MISSED)

    def _all_left(self, last: int) -> bool:
        others = set(range(1, self.place.world_size)) - self.lost
        keys = [_left_key(rank) for rank in sorted(others)]
        try:
            values = self.coordination.read(keys)
        except CoordinationError:
            return True  # nobody can learn anything there any more
        return all(value is not None and int(value) >= last for value in values)

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
        self._timing = current_timing()
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
        group = self._given if isinstance(self._given, RankGroup) else self._group
        if group is not None:
            return group.place.rank == 0
        place = _place_in_job(self._given)
        if place is not None:
            return place.rank == 0
        return promised_ranks() < 2 or os.environ.get("RANK") == "0"  # noqa: PLR2004 - one is alone

    def settle(self) -> None:
        """Wait until this rank knows which checkpoints are durable; see `RankGroup.settle`."""
        if self._group is not None:
            self._group.settle()

    def obstacle(self) -> str | None:
        """Return why this process cannot save as one of several ranks by now; None if it can."""
        ranks = promised_ranks()
        waits = ranks > 1 and self._config.ranks == "auto" and self._given is None
        return obstacle_of_ranks(ranks) if waits else None

    def place(self) -> RankPlace | None:
        """Return the place of this process among the ranks that save together; None: it is alone.

        Does not join the ranks, as `leads`.

        Raises:
            ConfigError: There are several ranks, and this one cannot find the others.
        """
        if self._config.ranks == "alone":
            return None
        group = self._given if isinstance(self._given, RankGroup) else self._group
        found = _place_in_job(self._given) if group is None else group.place
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
        found: RankGroup | None
        if isinstance(self._given, RankGroup):
            found = self._given
        else:
            found = group_of_job(
                self._given,
                timeout_s=self._config.rank_timeout_s,
                name=self._name,
                token=self._token,
                timing=self._timing,
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

    def _check_findable(self, found: RankGroup | RankPlace | None) -> None:
        ranks = promised_ranks()
        if found is None and ranks > 1 and self._config.ranks == "auto":
            raise ConfigError(obstacle_of_ranks(ranks))

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
    timing: Timing | None = None,
) -> RankGroup | None:
    """Return the ranks of the torch.distributed job; None for a process that is alone.

    Args:
        group: A process group, or the numbers of ranks; None takes the default group.
        timeout_s: As in `RankGroup`.
        name: Where they meet; empty: at the n-th group of each process.
        token: With a name: identifies the checkpointer that takes the seat, also if it asks again.
        timing: As in `RankGroup`.

    Raises:
        ConfigError: This process is not in `group`, the store of the job cannot be used, or the
            name is in use in this process.
        CoordinationError: The store of the job does not answer.
    """
    place = _place_in_job(group)
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
    coordination = TorchCoordination(
        prefix=prefix,
        world_size=place.world_size,
        call_s=min(10.0, timeout_s / 4),  # so that a store that hangs is noticed in time
        timing=timing,
    )
    if name:
        try:
            coordination.enter(str(_take_seat(coordination, place.rank, token)))
        except BaseException:
            coordination.close()
            raise
    found = RankGroup(
        place.rank,
        place.world_size,
        coordination,
        timeout_s=timeout_s,
        members=place.members,
        name=name,
        timing=timing,
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


def _place_in_job(group: Any) -> RankPlace | None:
    """Return the place of this process, without its host; None where it is alone."""
    # Looked up, not imported: a process that has not imported it has one rank.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        if isinstance(group, tuple) and len(group) > 1:
            raise ConfigError(obstacle_of_ranks(len(group), f"group= has {len(group)} ranks"))
        return None
    if isinstance(group, tuple):
        return _place_among(group, distributed.get_rank(), distributed.get_world_size())
    rank: int = distributed.get_rank(group)
    world_size: int = distributed.get_world_size(group)
    if rank < 0:
        msg = (
            "group= is a process group that this process is not in: give each process the group "
            "that it saves with, or ranks='alone' where it saves for itself"
        )
        raise ConfigError(msg)
    if world_size < 2:  # noqa: PLR2004 - one rank is alone
        return None
    members = () if group is None else tuple(distributed.get_process_group_ranks(group))
    return RankPlace(rank, world_size, members=members)


def _place_among(members: tuple[int, ...], rank: int, world_size: int) -> RankPlace | None:
    """Return the place of a rank of the job among `members`; None if it is alone there.

    Raises:
        ConfigError: It is not among them, or some of them are not in the job.
    """
    if members[-1] >= world_size or rank not in members:
        msg = (
            f"group={list(members)} are the ranks that save together, and this process is rank "
            f"{rank} of {world_size}: give each process the ranks that it saves with, or "
            "ranks='alone' where it saves for itself"
        )
        raise ConfigError(msg)
    if len(members) < 2:  # noqa: PLR2004 - one rank is alone
        return None
    return RankPlace(members.index(rank), len(members), members=members)


def promised_ranks() -> int:
    """Return the number of ranks that the environment promises, while nothing is initialised."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return 1
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isascii() and text.isdigit() else 1


def obstacle_of_ranks(ranks: int, promise: str = "") -> str:
    """Return what to do where several ranks are promised, and none can be found."""
    return (
        f"{promise or f'WORLD_SIZE is {ranks}'}, and torch.distributed is not initialised, so this "
        "rank cannot find the others to save with: call torch.distributed.init_process_group(...) "
        "first, or open the checkpointer with ranks='alone' and a root of its own for each process"
    )

"""Finds the ranks of each host, and whether they can read together."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.abc import COORDINATION_VALUE_BYTES
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.errors import CoordinationError
from penstock.core.hosts.division import MOST_RANKS
from penstock.core.ranks.structure import classes_of, pack_numbers, unpack_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.core.ranks.group import RankGroup
    from penstock.core.ranks.session import RankSession
    from penstock.core.rounds.round import RestoreRound

log = logging.getLogger("penstock")

_HOSTS_KEY = "hosts"
_POLL_SHARE = 4  # pause at least 4 times as long as the last read took, to spare a slow store


class Census:
    """Collects, for one restore, the hosts that a job's ranks report through the job's store.

    A wait for other ranks ends when the restore ends, or after the time limit for a stuck rank.
    """

    def __init__(self, session: RankSession[RestoreRound]) -> None:
        """Prepare, and start the time limit for other ranks; send nothing."""
        self._session = session
        self._group = session.group
        self._timing = self._group.timing
        self._deadline = Deadline(self._group.timeout_s, self._timing.clock)
        self._next_look = Deadline(0.0, self._timing.clock)

    @staticmethod
    def announce(group: RankGroup) -> None:
        """Post this rank's host early, so that rank 0 does not wait for the post later.

        Raises:
            CoordinationError: The job's store cannot be reached.
        """
        place = group.place
        if group.by_host is None and place.rank:
            name = host_identity(place.host, place.rank).encode()
            group.coordination.post(_key(place.rank), name)

    @property
    def is_late(self) -> bool:
        """Whether the time limit for other ranks has passed."""
        return self._deadline.is_over()

    def gives_up(self) -> bool:
        """Return whether to stop waiting, because other ranks are late or one has failed.

        Also reports progress, so that the others do not take the waiting rank for a stuck one.
        """
        self._session.moved(0, 0)
        return self.is_late or self._session.has_news

    def sets(self) -> tuple[tuple[int, ...], ...]:
        """Return sets of the job's ranks that read together, the same on every rank.

        Runs once per job: each rank posts its host, and rank 0 posts all hosts. The ranks of a host
        form one or more sets of at most `MOST_RANKS`.

        Returns:
            The sets, each ascending, in the order of their first ranks; empty if a rank has not
            reported its host in time, or if the hosts of all ranks do not fit in one post.

        Raises:
            CoordinationError: The job's store cannot be reached.
            FormatError: Rank 0's post cannot be read.
        """
        if self._group.by_host is None:
            self._group.by_host = self._asked()
        return self._group.by_host or ()

    def read_all(self, keys: Mapping[int, str]) -> dict[int, bytes] | None:
        """Return the value of each key once all are posted; None if one is not posted in time.

        Raises:
            CoordinationError: The job's store cannot be reached.
        """
        found: dict[int, bytes] = {}
        pause_s = self._timing.hosts_poll_first_s
        while missing := [number for number in keys if number not in found]:
            timer = Deadline(None, self._timing.clock)
            values = self._group.coordination.read([keys[number] for number in missing])
            took_s = timer.taken_s()
            known = {n: v for n, v in zip(missing, values, strict=True) if v is not None}
            if not known:
                if self.gives_up():
                    return None
                time.sleep(min(max(pause_s, _POLL_SHARE * took_s), self._deadline.left_s()))
                pause_s = min(2 * pause_s, self._timing.hosts_poll_most_s)
            found |= known
        return found

    def part(self, ranks: Sequence[int], reason: str) -> None:
        """Tell the ranks of one set to read alone, for the rest of this job.

        Without this report, they would wait in each restore until this rank counts as stuck.
        """
        place = self._group.place
        log.warning(
            "rank %d cannot read together with the other ranks of %s, so each of them reads "
            "alone: %s",
            place.rank,
            place.host,
            reason,
        )
        self._group.reads_apart = True
        with suppress(CoordinationError):  # without the report, the others only wait longer
            self._group.coordination.post(_apart_key(ranks), b"-")

    def are_apart(self, ranks: Sequence[int]) -> bool:
        """Return whether a rank of the set has reported that its ranks must read alone (`part`).

        Asks the store at most every `hosts_look_s`, because ranks that meet do not need the answer.
        """
        if not self._group.reads_apart and self._next_look.is_over():
            self._next_look = Deadline(self._timing.hosts_look_s, self._timing.clock)
            with suppress(CoordinationError):
                (posted,) = self._group.coordination.read([_apart_key(ranks)])
                self._group.reads_apart = posted is not None
        return self._group.reads_apart

    def _asked(self) -> tuple[tuple[int, ...], ...] | None:
        place, board = self._group.place, self._group.coordination
        if place.rank:
            self.announce(self._group)
            look_s = self._timing.hosts_look_s
            while not board.wait(_HOSTS_KEY, min(look_s, self._deadline.left_s())):
                if self.gives_up():
                    return None
            numbers = unpack_numbers(board.read([_HOSTS_KEY])[0] or b"")
        else:
            names = self.read_all({rank: _key(rank) for rank in range(1, place.world_size)})
            if names is None:
                return None
            name = host_identity(place.host, place.rank).encode()
            numbers = classes_of([name, *(names[rank] for rank in range(1, place.world_size))])
            board.post(_HOSTS_KEY, _packed(numbers))
        if len(numbers) != place.world_size:
            return ()
        hosts: dict[int, list[int]] = defaultdict(list)
        for rank, number in enumerate(numbers):
            hosts[number].append(rank)
        sets = (
            tuple(ranks[first : first + MOST_RANKS])
            for ranks in hosts.values()
            for first in range(0, len(ranks), MOST_RANKS)
        )
        return tuple(sorted(sets))


def host_identity(host: str, rank: int) -> str:
    """Return an identifier that is equal for all processes that can meet on one host.

    Socket names are visible within one network namespace, so containers with their own networks
    count as separate hosts, whatever their host names. Processes of different users do not meet.
    Where the kernel does not identify the namespace, the identifier is unique: the rank is alone.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = os.readlink("/proc/self/ns/net")  # noqa: PTH115 - not a path
    except OSError:
        return f"-{rank}"
    seed = "\0".join((host, boot, network, str(os.getuid())))
    return hashlib.blake2b(seed.encode(), digest_size=12).hexdigest()


def _packed(numbers: list[int]) -> bytes:
    """Encode the host numbers of all ranks as one post; an empty list if they do not fit."""
    data = pack_numbers(numbers).encode()
    return data if len(data) <= COORDINATION_VALUE_BYTES else pack_numbers([]).encode()


def _key(rank: int) -> str:
    return f"host/{rank:05d}"


def _apart_key(ranks: Sequence[int]) -> str:
    return f"apart/{ranks[0]:05d}"

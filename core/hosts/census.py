"""Finds out which ranks are on which host."""

from __future__ import annotations

import hashlib
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.abc import COORDINATION_VALUE_BYTES
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.hosts.division import MOST_RANKS
from penstock.core.ranks.structure import classes_of, pack_numbers, unpack_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.core.concurrency.timing import Timing
    from penstock.core.ranks.group import RankGroup

_HOSTS_KEY = "hosts"
_POLL_SHARE = 4  # rank 0 pauses so many times as long as it takes to look at all: the store is slow


def ranks_by_host(
    group: RankGroup, deadline: Deadline, ended: Callable[[], bool], timing: Timing
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of the job in sets that read together, the same on every rank.

    Asks once for each job: each rank posts where it is, and rank 0 tells all. The ranks of a host
    are one set, or several, each of at most `MOST_RANKS`.

    Args:
        group: The ranks.
        deadline: For how long to wait for the others.
        ended: Returns whether the ranks have given up what they do.
        timing: Says how often a rank looks for the others.

    Returns:
        The sets, in the order of their first ranks, each ascending; empty if they are not known by
        the deadline.

    Raises:
        CoordinationError: The store of the job cannot be reached.
        FormatError: What rank 0 has told cannot be read.
    """
    if group.by_host is None:
        group.by_host = _asked(group, deadline, ended, timing)
    return group.by_host or ()


def read_all(
    group: RankGroup,
    keys: Mapping[int, str],
    deadline: Deadline,
    ended: Callable[[], bool],
    timing: Timing,
) -> dict[int, bytes] | None:
    """Return the value of each key, once all are posted; None if some are not by the deadline.

    Raises:
        CoordinationError: The store of the job cannot be reached.
    """
    found: dict[int, bytes] = {}
    pause_s = timing.hosts_poll_first_s
    while missing := [number for number in keys if number not in found]:
        taken = Deadline(None, timing.clock)
        values = group.coordination.read([keys[number] for number in missing])
        took_s = taken.taken_s()
        known = {n: v for n, v in zip(missing, values, strict=True) if v is not None}
        if not known:
            if deadline.is_over() or ended():
                return None
            time.sleep(min(max(pause_s, _POLL_SHARE * took_s), deadline.left_s()))
            pause_s = min(2 * pause_s, timing.hosts_poll_most_s)
        found |= known
    return found


def tell_apart(group: RankGroup, ranks: Sequence[int]) -> None:
    """Tell the ranks of one set that they cannot read together, neither now nor later in this job.

    Raises:
        CoordinationError: The store of the job cannot be reached.
    """
    group.reads_apart = True
    group.coordination.post(_apart_key(ranks), b"-")


def are_apart(group: RankGroup, ranks: Sequence[int]) -> bool:
    """Return whether one of the ranks of a set has told that they cannot read together.

    Raises:
        CoordinationError: The store of the job cannot be reached.
    """
    if not group.reads_apart:
        group.reads_apart = group.coordination.read([_apart_key(ranks)])[0] is not None
    return group.reads_apart


def _asked(
    group: RankGroup, deadline: Deadline, ended: Callable[[], bool], timing: Timing
) -> tuple[tuple[int, ...], ...] | None:
    place, board = group.place, group.coordination
    name = _host_name(place.host, place.rank)
    if place.rank:
        board.post(_key(place.rank), name.encode())
        while not board.wait(_HOSTS_KEY, min(timing.hosts_look_s, deadline.left_s())):
            if deadline.is_over() or ended():
                return None
        numbers = unpack_numbers(board.read([_HOSTS_KEY])[0] or b"")
    else:
        keys = {rank: _key(rank) for rank in range(1, place.world_size)}
        names = read_all(group, keys, deadline, ended, timing)
        if names is None:
            return None
        names[0] = name.encode()
        numbers = classes_of([names[rank] for rank in range(place.world_size)])
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


def _host_name(host: str, rank: int) -> str:
    """Return a word for where this process can meet others; one of its own if nowhere.

    Sockets are found by name within one network namespace, so containers with networks of their own
    are hosts of their own, whatever they are called. Other users' processes are not met.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = os.readlink("/proc/self/ns/net")  # noqa: PTH115 - not a path
    except OSError:
        return f"-{rank}"
    seed = "\0".join((host, boot, network, str(os.getuid())))
    return hashlib.blake2b(seed.encode(), digest_size=12).hexdigest()


def _packed(numbers: list[int]) -> bytes:
    """Return the hosts of all ranks for a post; nothing, if they are too many for one."""
    data = pack_numbers(numbers).encode()
    return data if len(data) <= COORDINATION_VALUE_BYTES else pack_numbers([]).encode()


def _key(rank: int) -> str:
    return f"host/{rank:05d}"


def _apart_key(ranks: Sequence[int]) -> str:
    return f"apart/{ranks[0]:05d}"

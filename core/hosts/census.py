"""Finds out which ranks are on the host of this one."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.abc import COORDINATION_VALUE_BYTES
from penstock.core.hosts.division import MOST_RANKS
from penstock.core.ranks.structure import classes_of, pack_numbers, unpack_numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.concurrency.watchdog import Deadline
    from penstock.core.ranks.group import RankGroup

_HOSTS_KEY = "hosts"
_NOWHERE = "-"
_POLL_S = 0.005
_MOST_POLL_S = 0.05
_LOOK_S = 0.25  # how often a rank that waits looks whether the others have given up
_POLL_SHARE = 4  # rank 0 pauses so many times as long as it takes to look at all: the store is slow


def ranks_of_host(
    group: RankGroup, deadline: Deadline, ended: Callable[[], bool]
) -> tuple[int, ...]:
    """Return the ranks that read together with this one, itself among them, ascending.

    Asks once for each job: each rank posts where it is, and rank 0 tells all. Of a host with many
    ranks they are a part of at most `MOST_RANKS`.

    Args:
        group: The ranks.
        deadline: For how long to wait for the others.
        ended: Returns whether the ranks have given up what they do.

    Returns:
        The ranks; empty if they are not known by the deadline, or this one tells nobody where it
        is.

    Raises:
        CoordinationError: The store of the job cannot be reached.
        FormatError: What rank 0 has told cannot be read.
    """
    if group.of_host is None:
        group.of_host = _asked(group, deadline, ended)
    return group.of_host or ()


def _asked(
    group: RankGroup, deadline: Deadline, ended: Callable[[], bool]
) -> tuple[int, ...] | None:
    place, board = group.place, group.coordination
    if place.rank:
        board.post(_key(place.rank), _host_name(place.host).encode())
        while not board.wait(_HOSTS_KEY, min(_LOOK_S, deadline.left_s())):
            if deadline.is_over() or ended():
                return None
        numbers = unpack_numbers((board.read([_HOSTS_KEY])[0] or b"").decode())
    else:
        names = _names(group, deadline, ended)
        if names is None:
            return None
        numbers = classes_of(names)
        board.post(_HOSTS_KEY, _packed(numbers))
    if len(numbers) != place.world_size or _host_name(place.host) == _NOWHERE:
        return ()
    found = [rank for rank, number in enumerate(numbers) if number == numbers[place.rank]]
    first = found.index(place.rank) // MOST_RANKS * MOST_RANKS
    return tuple(found[first : first + MOST_RANKS])


def _names(group: RankGroup, deadline: Deadline, ended: Callable[[], bool]) -> list[str] | None:
    """Return where each rank is, once all have told it; rank 0 alone."""
    names = {0: _host_name(group.place.host)}
    pause_s = _POLL_S
    while missing := [rank for rank in range(group.place.world_size) if rank not in names]:
        began_s = time.monotonic()
        values = group.coordination.read([_key(rank) for rank in missing])
        took_s = time.monotonic() - began_s
        known = {r: v.decode() for r, v in zip(missing, values, strict=True) if v is not None}
        if not known:
            if deadline.is_over() or ended():
                return None
            time.sleep(min(max(pause_s, _POLL_SHARE * took_s), deadline.left_s()))
            pause_s = min(2 * pause_s, _MOST_POLL_S)
        names |= known
    return [names[rank] for rank in range(group.place.world_size)]


def _host_name(host: str) -> str:
    """Return a word for where this process can meet others: `_NOWHERE` if nowhere.

    Sockets are found by name within one network namespace, so containers with networks of their own
    are hosts of their own, whatever they are called. Other users' processes are not met.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = os.readlink("/proc/self/ns/net")  # noqa: PTH115 - not a path
    except OSError:
        return _NOWHERE
    seed = "\0".join((host, boot, network, str(os.getuid())))
    return hashlib.blake2b(seed.encode(), digest_size=12).hexdigest()


def _packed(numbers: list[int]) -> bytes:
    """Return the hosts of all ranks for a post; nothing, if they are too many for one."""
    data = pack_numbers(numbers).encode()
    return data if len(data) <= COORDINATION_VALUE_BYTES else pack_numbers([]).encode()


def _key(rank: int) -> str:
    return f"host/{rank:05d}"

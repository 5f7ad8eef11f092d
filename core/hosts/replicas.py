"""Finds what several hosts need alike, and divides it among them. Sans-IO.

The hosts do not send each other their plans, which may have a million rows: each tells digests of
what it needs. What is equal on several hosts, down to the members that need it, has equal digests,
and of that each host knows all the rows itself. Digests that are equal by chance cost time and
nothing else: a rank that is asked for what it does not read says so.
"""

from __future__ import annotations

from collections import defaultdict
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.format.compressed import compress, decompress
from penstock.core.hosts.division import Relayed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from penstock.core.hosts.division import HostNeeds

MOST_HOSTS = 64
"""The most hosts that read together: a rank has two connections to one of each other one."""

# Each component falls into one of these by its own digest, and a bucket in which hosts differ is
# not shared. So what each rank has for itself, its random state say, costs as many buckets at most,
# wherever it is stored; with digests of neighbours it would cost whole blobs.
_BUCKETS = 8192
_BUCKET_SHIFT = np.uint64(64 - 13)
_HALF = np.uint64(32)


def component_numbers(needs: HostNeeds) -> npt.NDArray[np.uint64]:
    """Return 64 bits for each component: of its bytes, of who needs it, and of how many could."""
    digests = (blake2b(name.encode(), digest_size=8).digest() for name in needs.blobs)
    names = np.array([int.from_bytes(digest, "little") for digest in digests], np.uint64)
    columns = needs.components.astype(np.uint64)
    found = names[needs.components[:, 0]]
    count = np.full(len(found), needs.member_count, np.uint64)
    for column in (*columns[:, 1:].T, needs.masks.astype(np.uint64), count):
        found = _mixed(found ^ column)
    return found


def bucket_digests(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """Return a digest for each bucket; 0 for an empty one."""
    sums = np.zeros(_BUCKETS, np.uint64)
    np.add.at(sums, _buckets(numbers), _mixed(numbers))
    return (sums >> _HALF).astype(np.uint32)


def encode_digests(digests: npt.NDArray[np.uint32]) -> bytes:
    """Return the digests for a post, in at most some 32 KiB."""
    return compress(digests.astype("<u4").tobytes())


def decode_digests(data: bytes) -> npt.NDArray[np.uint32]:
    """Return the digests that `encode_digests` made bytes of.

    Raises:
        FormatError: The bytes are no digests.
    """
    name = "the needs of a host"
    content = decompress(data, name, raw_length=4 * _BUCKETS)
    return np.frombuffer(content, "<u4").astype(np.uint32)


def hosts_together(
    sets: Sequence[tuple[int, ...]], rank: int
) -> tuple[Sequence[tuple[int, ...]], int]:
    """Return the hosts that share with that of `rank`, at most `MOST_HOSTS`, and its place there.

    Args:
        sets: The ranks of each host, the same on every rank.
        rank: A rank, which is in one of them.
    """
    here = next(number for number, ranks in enumerate(sets) if rank in ranks)
    first = here // MOST_HOSTS * MOST_HOSTS
    return sets[first : first + MOST_HOSTS], here - first


def relayed(
    needs: HostNeeds,
    digests: Mapping[int, npt.NDArray[np.uint32]],
    hosts: Sequence[tuple[int, ...]],
    here: int,
) -> dict[int, Relayed]:
    """Return how what other hosts need as well gets from one of them to the others.

    All hosts that need it come to the same result, without further words: one reads it, the one
    with the fewest bytes so far, by one of the members that need it; the same member of each other
    host gets it.

    Args:
        needs: The needs of this host.
        digests: The digests of all hosts that take part, by place in `hosts`.
        hosts: The ranks of each host.
        here: The place of this one.

    Returns:
        For each component that other hosts need, too, its way.
    """
    numbers = component_numbers(needs)
    found: dict[int, Relayed] = {}
    for together, components in _sets(needs, numbers, digests, hosts, here).items():
        chosen = _readers(needs, components, len(together))
        for component, (place, member) in zip(components, chosen, strict=True):
            ranks = {host: hosts[host][member] for host in together}
            reader = together[place]
            is_here = reader == here
            others = tuple(rank for host, rank in ranks.items() if host != here)
            found[component] = Relayed(
                member=member,
                source=None if is_here else ranks[reader],
                recipients=others if is_here else (),
            )
    return found


def _sets(
    needs: HostNeeds,
    numbers: npt.NDArray[np.uint64],
    digests: Mapping[int, npt.NDArray[np.uint32]],
    hosts: Sequence[tuple[int, ...]],
    here: int,
) -> dict[tuple[int, ...], list[int]]:
    """Return the components of this host by the hosts that need them alike, in one order."""
    own = bucket_digests(numbers)
    # Of other hosts the digests cannot be equal but by chance.
    alike = [h for h in sorted(digests) if len(hosts[h]) == needs.member_count and h != here]
    equal = {host: digests[host] == own for host in alike}
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    buckets = _buckets(numbers).tolist()
    by_place = sorted(
        range(len(numbers)),
        key=lambda c: (needs.blobs[needs.components[c, 0]], *needs.components[c, 1:].tolist()),
    )
    for component in by_place:
        others = [host for host in alike if equal[host][buckets[component]]]
        if others:
            found[tuple(sorted([here, *others]))].append(component)
    return found


def _readers(needs: HostNeeds, components: Sequence[int], host_count: int) -> list[tuple[int, int]]:
    """Return host and member that read each component: neighbours by one, all of them evenly."""
    rows = needs.components[components]
    length = rows[:, 4] - rows[:, 3]
    load = np.zeros((host_count, needs.member_count), np.int64)
    run_bytes = needs.run_bytes(length, load.size)
    found: list[tuple[int, int]] = []
    run: tuple[int, int] | None = None
    left = 0
    chosen = 0, 0
    for component, size in zip(components, length.tolist(), strict=True):
        blob, mask = int(needs.components[component, 0]), int(needs.masks[component])
        if run != (blob, mask) or left < size:
            run, left = (blob, mask), run_bytes
            members = needs.members(component)
            place, at = divmod(int(np.argmin(load[:, members])), len(members))
            chosen = place, members[at]
        left -= size
        load[chosen] += size
        found.append(chosen)
    return found


def _buckets(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    return (numbers >> _BUCKET_SHIFT).astype(np.int64)


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return other numbers whose bits all depend on all bits: the finaliser of splitmix64."""
    found = numbers + np.uint64(0x9E3779B97F4A7C15)
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))

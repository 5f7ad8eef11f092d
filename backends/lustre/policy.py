"""The striping policy: computes layouts without I/O, and with the same result on every rank.

A checkpoint of any number of ranks should load all OSTs equally, with as few stripes per blob as
possible. Fewer stripes mean fewer objects to create, to lock and to lose, and fewer writers on one
disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Final

from penstock.core.types import align_up

STRIPE_UNIT: Final = 64 << 10  # LOV_MIN_STRIPE_SIZE: every stripe size is a multiple
MAX_STRIPE_BYTES: Final = 1 << 30  # Lustre itself allows almost 4 GiB
MAX_STRIPES: Final = 2000  # LOV_MAX_STRIPE_COUNT
MIN_OBJECT_BYTES: Final = 64 << 20  # less on one OST is not worth its own object
MIN_IO_BYTES: Final = 4 << 20  # DT_DEF_BRW_SIZE: the bytes of one RPC
MAX_RUN_BYTES: Final = 128 << 20  # the most consecutive bytes to one object, if an OST has several
WIDEST: Final = 160  # more stripes do not fit where inodes have no room for large attributes
SLACK: Final = 1.01  # how much slower than the best balance, to have fewer stripes
SEPARATE_SLACK: Final = 1.08  # the same, to have blobs that share no OST
STEPS: Final = 2  # a blob goes around its stripes at least this many times
UNKNOWN_BLOB_BYTES: Final = 1 << 30
UNKNOWN_OSTS_STRIPES: Final = 4  # the server places stripes at random: several even out the load
ROOM: Final = 2  # an OST is used if it has room for this many times its share of a checkpoint

# The last column of `lfs df`: an OST with one of the first flags takes no new objects, and a
# degraded one should get none (`lfs-df(1)`).
_CLOSED: Final = frozenset("NRSI")
_SLOW: Final = frozenset("D")


@dataclass(frozen=True, slots=True)
class Ost:
    """An object storage target.

    Attributes:
        index: The index.
        free_bytes: The free bytes.
        flags: The state flags in the last column of `lfs df`.
    """

    index: int
    free_bytes: int
    flags: str = ""


@dataclass(frozen=True, slots=True)
class Demand:
    """A blob to stripe, and how ranks will write it.

    Attributes:
        blob_bytes: The expected size of the blob; None if unknown.
        writers: The number of ranks that write such a blob at the same time.
        writer: The number of this rank among the writers, from 0.
        io_bytes: Maximum bytes of one request.
        in_flight: Maximum requests in flight per writer.
        in_flight_bytes: Maximum bytes in flight per writer.
        salt: A number that rotates the OSTs, the same for all blobs of one kind in one checkpoint.
            Otherwise the first ranks of all jobs would use the first OST.
    """

    blob_bytes: int | None
    writers: int = 1
    writer: int = 0
    io_bytes: int = 16 << 20
    in_flight: int = 64
    in_flight_bytes: int = 256 << 20
    salt: int = 0


@dataclass(frozen=True, slots=True)
class Striping:
    """The striping of a new file.

    Attributes:
        stripe_count: The number of stripes, at least one.
        stripe_bytes: The stripe size in bytes, a multiple of `STRIPE_UNIT`.
        osts: The OST index of every stripe; empty if the metadata server chooses.
    """

    stripe_count: int
    stripe_bytes: int
    osts: tuple[int, ...] = ()


def plan_striping(demand: Demand, osts: tuple[Ost, ...], /) -> Striping:
    """Return the striping of one blob.

    * A blob has several stripes only if each holds at least `MIN_OBJECT_BYTES`.
    * If there are at least as many writers as OSTs, they form rounds of one writer for each OST,
      and each writer in a full round has one stripe. The remaining writers have the fewest stripes
      that balance the OSTs within `SLACK`.
    * If there are fewer writers than OSTs, each writer has its own OSTs, at most one for each
      request in flight. If a writer could use more OSTs, and separate OSTs are balanced worse than
      `SEPARATE_SLACK` allows, writers share OSTs instead: they have the fewest stripes that balance
      the OSTs, and start evenly spaced.
    * The stripe size is, within limits, half of a writer's bytes in flight, divided by its share of
      the OSTs (OSTs per writer). Few writers have large shares, so their stripes are short and all
      OSTs work at once. Many writers have small shares, so their stripes are long: each writer uses
      one OST at a time, and an OST, which idles while it switches objects, switches seldom.
    * A single writer lets the metadata server choose the OSTs, since the server knows them best.
      For several writers the server would choose at random if free space differs, and writers
      would share OSTs. So each of several writers has its own place on a ring of the OSTs that have
      room.

    Args:
        demand: The blob, and how ranks will write it.
        osts: The known OSTs; may be empty.
    """
    usable = usable_osts(demand, osts)
    useful = useful_stripes(demand, len(usable) or UNKNOWN_OSTS_STRIPES)
    if not usable:
        return Striping(useful, _in_units(demand.io_bytes))
    if demand.writers == 1:
        count = min(useful, _short_requests(demand))
        return Striping(count, _stripe_bytes(demand, count, len(usable)))
    places = _own_places(demand, usable, useful)
    return Striping(len(places), _stripe_bytes(demand, len(places), len(usable)), places)


def usable_osts(demand: Demand, osts: tuple[Ost, ...], /) -> tuple[int, ...]:
    """Return the indices of the OSTs that accept new objects and have room, ascending.

    Includes degraded OSTs only if there are no others.
    """
    usable = [ost for ost in osts if not _CLOSED & set(ost.flags)]
    fast = [ost for ost in usable if not _SLOW & set(ost.flags)] or usable
    share = -(-_blob_bytes(demand) * demand.writers // max(1, len(fast)))
    roomy = [ost for ost in fast if ost.free_bytes >= ROOM * share]
    return tuple(sorted({ost.index for ost in roomy}))


def useful_stripes(demand: Demand, osts: int, /) -> int:
    """Return the highest useful number of stripes for one blob of `demand` on `osts` OSTs."""
    return max(1, min(osts, WIDEST, _blob_bytes(demand) // MIN_OBJECT_BYTES))


def load(writers: int, osts: int, count: int, /) -> float:
    """Return the load of the busiest OST, in blobs, if each writer's blob has `count` stripes."""
    return -(-writers * count // osts) / count


def _balanced(demand: Demand, rest: int, osts: int, useful: int) -> int:
    """Return the number of stripes for each of the `rest` writers outside of full rounds."""
    rounds = demand.writers // osts
    loads = [rounds + load(rest, osts, count) for count in range(1, useful + 1)]
    best = min(loads)
    if rounds == 0:
        flight = _short_requests(demand)
        separate = min(osts // rest, useful, flight)
        if separate == flight or 1 / separate <= best * SEPARATE_SLACK:
            return separate
        exact = osts // gcd(osts, rest)
        if exact <= useful:
            return exact
    return next(n for n, value in enumerate(loads, start=1) if value <= best * SLACK)


def _own_places(demand: Demand, usable: tuple[int, ...], useful: int) -> tuple[int, ...]:
    """Return the OSTs of this writer: evenly spaced on the ring, or adjacent if writers share OSTs.

    OSTs with adjacent indices are often on one server, so spacing spreads the load.
    """
    ring, writer = len(usable), demand.writer % demand.writers
    rounds, rest = divmod(demand.writers, ring)
    if writer < rounds * ring:
        turn, place = divmod(writer, ring)
        places = [place * _stride(ring, turn)]
    else:
        count = _balanced(demand, rest, ring, useful)
        number = writer - rounds * ring
        if rest * count <= ring:
            places = [(number * count + n) * ring // (rest * count) for n in range(count)]
        else:
            places = [number * ring // rest + n for n in range(count)]
    return tuple(usable[(place + demand.salt) % ring] for place in places)


def _stride(ring: int, turn: int) -> int:
    """Return the stride between adjacent writers of a round: coprime with the ring, to fill it.

    Each round has a different stride. Otherwise the ranks of two nodes would share all their OSTs,
    and wait for one link at a time.
    """
    strides = [n for n in range(1, ring) if gcd(n, ring) == 1] or [1]
    return strides[turn % len(strides)]


def _short_requests(demand: Demand) -> int:
    """Return how many short requests a writer can have in flight."""
    return max(1, min(demand.in_flight, demand.in_flight_bytes // MIN_IO_BYTES))


def _stripe_bytes(demand: Demand, count: int, ring: int) -> int:
    """Return the stripe size in bytes; see `plan_striping`."""
    if count == 1:
        return _in_units(demand.io_bytes)
    flight = min(demand.in_flight_bytes, demand.in_flight * demand.io_bytes)
    shared = demand.writers * count > ring
    most = min(
        flight * demand.writers // (2 * ring),
        _blob_bytes(demand) // (STEPS * count),
        MAX_RUN_BYTES if shared else demand.io_bytes,
    )
    return _in_units(max(_power_below(most), min(MIN_IO_BYTES, demand.io_bytes)))


def _in_units(size_bytes: int) -> int:
    return min(max(align_up(size_bytes, STRIPE_UNIT), STRIPE_UNIT), MAX_STRIPE_BYTES)


def _blob_bytes(demand: Demand) -> int:
    return UNKNOWN_BLOB_BYTES if demand.blob_bytes is None else demand.blob_bytes


def _power_below(value: int) -> int:
    return 1 << (max(1, value).bit_length() - 1)

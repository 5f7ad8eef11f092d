"""How a blob is striped, decided from numbers alone. No I/O, and the same on every rank.

The aim: a checkpoint of any number of ranks loads every OST alike, with as few stripes per blob
as that takes. Fewer stripes are fewer objects to create, to lock and to lose, and fewer writers
that meet on one disk. `benchmarks/lustre_sim.py` compares the outcome with other layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Final

from penstock.core.types import align_up

STRIPE_UNIT: Final = 64 << 10  # LOV_MIN_STRIPE_SIZE: every stripe size is a multiple
MAX_STRIPE_BYTES: Final = 1 << 30  # Lustre: below 4 GiB
MAX_STRIPES: Final = 2000  # LOV_MAX_STRIPE_COUNT
MIN_OBJECT_BYTES: Final = 64 << 20  # less on one OST does not pay for an object of its own
MIN_IO_BYTES: Final = 4 << 20  # DT_DEF_BRW_SIZE: what one RPC carries
MAX_RUN_BYTES: Final = 128 << 20  # of one object at a time, where OSTs hold several
WIDEST: Final = 160  # more stripes do not fit where inodes have no room for large attributes
SLACK: Final = 1.01  # this much slower than the best balance is accepted for fewer stripes
APART_SLACK: Final = 1.08  # and this much where blobs then do not share OSTs at all
STEPS: Final = 2  # a blob goes round its stripes this often at least
UNKNOWN_BLOB_BYTES: Final = 1 << 30
UNKNOWN_OSTS_STRIPES: Final = 4  # at random places, so several even out; more are more to seek
ROOM: Final = 2  # an OST is used if its share of a checkpoint fits this often

# `lfs df`, last column: no new objects go where one of the first is set, and none should go to
# a degraded OST (`lfs-df(1)`).
_CLOSED: Final = frozenset("NRSI")
_SLOW: Final = frozenset("D")


@dataclass(frozen=True, slots=True)
class Ost:
    """An object storage target: its index, its free bytes, its states as `lfs df` shows them."""

    index: int
    free_bytes: int
    flags: str = ""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is about to be written.

    Attributes:
        blob_bytes: Expected size of the blob; None: unknown.
        writers: Ranks that write such a blob at the same time.
        writer: Which of them this is, from 0.
        io_bytes: Bytes of one request, at most.
        in_flight: Requests that one writer has in flight, at most.
        in_flight_bytes: Bytes that it has in flight, at most.
        salt: The same for all blobs of one kind in one checkpoint; turns the OSTs around, so that
            not everybody's first rank meets on the first OST.
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
    """How a new file is to be striped.

    Attributes:
        stripe_count: Stripes, at least one.
        stripe_bytes: Bytes of one; a multiple of `STRIPE_UNIT`.
        osts: Index of the OST of every stripe; empty: the metadata server chooses.
    """

    stripe_count: int
    stripe_bytes: int
    osts: tuple[int, ...] = ()


def plan_striping(demand: Demand, osts: tuple[Ost, ...], /) -> Striping:
    """The layout of one blob.

    * No stripe holds less than `MIN_OBJECT_BYTES`, so small blobs have one.
    * Writers that fill the OSTs a whole number of times have one stripe each. The rest have the
      smallest number that balances the OSTs within `SLACK`.
    * Fewer writers than OSTs keep to OSTs of their own, with no more stripes than requests in
      flight, if that balances the OSTs within `APART_SLACK`. Else they share, with the smallest
      number that loads all alike, and begin evenly apart: each follows the one before it.
    * A writer's share of the OSTs is busy with half of what it has in flight. So stripes are
      short where writers are few, and long where each needs one OST at a time: an OST that turns
      from one object to another stands still.
    * A lone writer leaves the choice of the OSTs to the metadata server, which knows them best.
      Many writers that all asked it would meet: where free space differs, it draws at random. So
      each takes its own place on a ring of the OSTs that have room.

    Args:
        demand: What will be written.
        osts: What is known of the OSTs; empty: nothing.
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
    """Indices of the OSTs that take new objects and have room for their share, ascending.

    Degraded ones only if nothing else is left.
    """
    opened = [ost for ost in osts if not _CLOSED & set(ost.flags)]
    fast = [ost for ost in opened if not _SLOW & set(ost.flags)] or opened
    share = -(-_blob_bytes(demand) * demand.writers // max(1, len(fast)))
    roomy = [ost for ost in fast if ost.free_bytes >= ROOM * share]
    return tuple(sorted({ost.index for ost in roomy}))


def useful_stripes(demand: Demand, osts: int, /) -> int:
    """The most stripes that could make one blob of `demand` faster on so many OSTs."""
    return max(1, min(osts, WIDEST, _blob_bytes(demand) // MIN_OBJECT_BYTES))


def load(writers: int, osts: int, count: int, /) -> float:
    """Blobs' worth of bytes on the busiest OST, with `count` stripes for each writer's blob."""
    return -(-writers * count // osts) / count


def _balanced(demand: Demand, rest: int, osts: int, useful: int) -> int:
    """Stripes for each of `rest` writers, where all others fill whole rounds."""
    rounds = demand.writers // osts
    loads = [rounds + load(rest, osts, count) for count in range(1, useful + 1)]
    best = min(loads)
    if rounds == 0:
        flight = _short_requests(demand)
        apart = min(osts // rest, useful, flight)
        if apart == flight or 1 / apart <= best * APART_SLACK:
            return apart
        exact = osts // gcd(osts, rest)
        if exact <= useful:
            return exact
    return next(n for n, value in enumerate(loads, start=1) if value <= best * SLACK)


def _own_places(demand: Demand, usable: tuple[int, ...], useful: int) -> tuple[int, ...]:
    """Places in a row on the ring, or, where it has more places than stripes, evenly apart.

    Neighbouring indices are often OSTs of one server.
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
    """How far apart neighbours stand in a round; coprime with the ring, so that it fills it.

    Another one each round: the ranks of two nodes that met on all their OSTs would wait for one
    link at a time.
    """
    strides = [n for n in range(1, ring) if gcd(n, ring) == 1] or [1]
    return strides[turn % len(strides)]


def _short_requests(demand: Demand) -> int:
    """How many requests a writer can have in flight, if they are short."""
    return max(1, min(demand.in_flight, demand.in_flight_bytes // MIN_IO_BYTES))


def _stripe_bytes(demand: Demand, count: int, ring: int) -> int:
    """So long that half of what is in flight covers a writer's share of the ring."""
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

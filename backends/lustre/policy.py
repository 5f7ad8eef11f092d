"""How a blob is striped, decided from numbers alone. No I/O, and the same on every rank.

The aim: a checkpoint of any number of ranks loads every OST alike, with as few stripes per blob
as that takes. Fewer stripes are fewer objects to create, to lock and to lose, and fewer writers
that meet on one disk. `benchmarks/lustre_sim.py` compares the outcome with other layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.core.types import align_up

STRIPE_UNIT: Final = 64 << 10  # LOV_MIN_STRIPE_SIZE: every stripe size is a multiple
MAX_STRIPE_BYTES: Final = 1 << 30  # Lustre: below 4 GiB
MAX_STRIPES: Final = 2000  # LOV_MAX_STRIPE_COUNT
MIN_OBJECT_BYTES: Final = 64 << 20  # less on one OST does not pay for an object of its own
SLACK: Final = 1.03  # this much slower than the best balance is accepted for fewer stripes
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
        io_bytes: Bytes of one request.
        in_flight: Requests that one writer has in flight.
        salt: The same for all blobs of one kind in one checkpoint; turns the OSTs around, so that
            not everybody's first rank meets on the first OST.
    """

    blob_bytes: int | None
    writers: int = 1
    writer: int = 0
    io_bytes: int = 16 << 20
    in_flight: int = 16
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
    * No more stripes than requests in flight: others would idle. A stripe is one request long,
      so consecutive requests keep that many OSTs busy.
    * Writers that fill the OSTs a whole number of times have one stripe each. The rest, or all
      where they are fewer than the OSTs, have the smallest of these counts that balances the OSTs
      within `SLACK`.
    * A lone writer leaves the choice of the OSTs to the metadata server, which knows them best.
      Many writers that all asked it would meet: where free space differs, it draws at random. So
      each takes its own place on a ring of the OSTs that have room.

    Args:
        demand: What will be written.
        osts: What is known of the OSTs; empty: nothing.
    """
    stripe_bytes = _stripe_bytes(demand.io_bytes)
    usable = usable_osts(demand, osts)
    useful = useful_stripes(demand, len(usable) or UNKNOWN_OSTS_STRIPES)
    if not usable:
        return Striping(useful, stripe_bytes)
    if demand.writers == 1:
        return Striping(useful, stripe_bytes)
    places = _own_places(demand, usable, useful)
    return Striping(len(places), stripe_bytes, places)


def usable_osts(demand: Demand, osts: tuple[Ost, ...], /) -> tuple[int, ...]:
    """Indices of the OSTs that take new objects and have room for their share, ascending.

    Degraded ones only if nothing else is left.
    """
    opened = [ost for ost in osts if not _CLOSED & set(ost.flags)]
    fast = [ost for ost in opened if not _SLOW & set(ost.flags)] or opened
    blob = UNKNOWN_BLOB_BYTES if demand.blob_bytes is None else demand.blob_bytes
    share = -(-blob * demand.writers // max(1, len(fast)))
    roomy = [ost for ost in fast if ost.free_bytes >= ROOM * share]
    return tuple(sorted({ost.index for ost in roomy}))


def useful_stripes(demand: Demand, osts: int, /) -> int:
    """The most stripes that could make one blob of `demand` faster on so many OSTs."""
    blob = UNKNOWN_BLOB_BYTES if demand.blob_bytes is None else demand.blob_bytes
    return max(1, min(osts, demand.in_flight, MAX_STRIPES, blob // MIN_OBJECT_BYTES))


def load(writers: int, osts: int, count: int, /) -> float:
    """Blobs' worth of bytes on the busiest OST, with `count` stripes for each writer's blob."""
    return -(-writers * count // osts) / count


def _balanced(rounds: int, rest: int, osts: int, useful: int) -> int:
    """Stripes for each of `rest` writers, where every OST has `rounds` whole blobs already."""
    loads = [rounds + load(rest, osts, count) for count in range(1, useful + 1)]
    best = min(loads)
    return next(n for n, value in enumerate(loads, start=1) if value <= best * SLACK)


def _own_places(demand: Demand, usable: tuple[int, ...], useful: int) -> tuple[int, ...]:
    """Places in a row on the ring, or, where it has more places than stripes, evenly apart.

    Neighbouring indices are often OSTs of one server.
    """
    ring, writer = len(usable), demand.writer % demand.writers
    rounds, rest = divmod(demand.writers, ring)
    if writer < rounds * ring:
        places = [writer]
    else:
        count = _balanced(rounds, rest, ring, useful)
        first = (writer - rounds * ring) * count
        places = list(range(first, first + count))
        if rest * count < ring:
            places = [place * ring // (rest * count) for place in places]
    return tuple(usable[(place + demand.salt) % ring] for place in places)


def _stripe_bytes(io_bytes: int) -> int:
    return min(max(align_up(io_bytes, STRIPE_UNIT), STRIPE_UNIT), MAX_STRIPE_BYTES)

"""Layouts of a checkpoint: Penstock's own, and those that it is compared with."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from lustre_system import MIB, File, Job, Window

from penstock.backends.lustre.config import LustreConfig
from penstock.backends.lustre.policy import Demand, plan_striping
from penstock.backends.lustre.policy import Ost as KnownOst
from penstock.core.pipeline.writer import BATCH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from lustre_system import System

GIB = 1 << 30
REQUEST = 16 * MIB
SLIDING = Window(REQUEST, 16)  # the others: as many bytes in flight, refilled one by one

# `FrameWriter` waits for its oldest batch when it has handed over the fourth. How many requests
# these become, and are in flight, `tests/backends/lustre/test_backend.py` shows.
BATCH = BATCH_BYTES
BATCHES = 4
LANES = LustreConfig.model_fields["parallel"].default

# A rank's calls to the metadata server besides those that make the blob itself: folders that are
# there already are made and opened, the blob is linked and loses its first name; then its part is
# published (made, linked, its first name removed). As `tests/backends/lustre/test_metadata.py`
# counts them.
BEFORE = ("change",) * 10
AFTER = ("change",) * 11 + ("create",)


def bytes_per_rank(ranks: int) -> int:
    """Its share of 1.5 TiB in whole requests, but 16 GiB at most and 1 GiB at least."""
    share = 1536 * GIB // ranks // REQUEST * REQUEST
    return min(16 * GIB, max(GIB, share))


def operations(system: System, names: tuple[str, ...]) -> tuple[float, ...]:
    cost = {"change": system.change_s, "create": system.create_s}
    return tuple(cost[name] for name in names)


class Server:
    """Chooses OSTs as the metadata server does: in turn, or, if free space differs, at random."""

    def __init__(self, system: System, *, even: bool) -> None:
        self._osts = system.osts
        self._even = even
        self._next = 0
        self._rng = random.Random(7)

    def choose(self, stripes: int) -> tuple[int, ...]:
        if not self._even:
            return tuple(self._rng.sample(range(self._osts), stripes))
        start, self._next = self._next, self._next + stripes
        return tuple((start + n) % self._osts for n in range(stripes))


def file_per_tensor(system: System, ranks: int) -> list[Job]:
    server = Server(system, even=True)
    count = bytes_per_rank(ranks) // REQUEST
    return [
        Job([File(server.choose(1), REQUEST, REQUEST) for _ in range(count)], SLIDING)
        for _ in range(ranks)
    ]


def _file_per_rank(system: System, ranks: int, stripes: int, *, even: bool) -> list[Job]:
    server = Server(system, even=even)
    size = bytes_per_rank(ranks)
    return [Job([File(server.choose(stripes), size, REQUEST)], SLIDING) for _ in range(ranks)]


def one_stripe(system: System, ranks: int) -> list[Job]:
    return _file_per_rank(system, ranks, 1, even=True)


def one_stripe_uneven(system: System, ranks: int) -> list[Job]:
    return _file_per_rank(system, ranks, 1, even=False)


def all_stripes(system: System, ranks: int) -> list[Job]:
    return _file_per_rank(system, ranks, system.osts, even=True)


def one_shared_file(system: System, ranks: int) -> list[Job]:
    osts, size = tuple(range(system.osts)), bytes_per_rank(ranks)
    return [Job([File(osts, size, REQUEST, shared=True)], SLIDING) for _ in range(ranks)]


def chosen(system: System, ranks: int) -> list[Job]:
    return penstock(system, ranks, known=True)


def chosen_blindly(system: System, ranks: int) -> list[Job]:
    """As chosen, but where `lfs df` is not to be had, and free space differs."""
    return penstock(system, ranks, known=False)


def window(stripes: int, stripe_bytes: int) -> Window:
    """As the pipeline hands batches over, and the engine cuts them: at stripes, if several."""
    request = REQUEST if stripes == 1 else min(REQUEST, stripe_bytes)
    return Window(request, LANES, BATCH, BATCHES)


def penstock(system: System, ranks: int, *, known: bool, stripes: int | None = None) -> list[Job]:
    server = Server(system, even=False)
    osts = tuple(KnownOst(n, 1 << 60) for n in range(system.osts)) if known else ()
    size = bytes_per_rank(ranks)
    jobs = []
    for rank in range(ranks):
        demand = Demand(size, ranks, rank, REQUEST, salt=41)
        plan = plan_striping(demand, osts)
        places = plan.osts or server.choose(plan.stripe_count)
        stripe_bytes = plan.stripe_bytes
        if stripes is not None:
            places = tuple((rank * stripes + n) % system.osts for n in range(stripes))
            stripe_bytes = REQUEST
        jobs.append(
            Job(
                [File(places, size, stripe_bytes)],
                window(len(places), stripe_bytes),
                operations(system, BEFORE),
                operations(system, AFTER),
            )
        )
    return jobs


LAYOUTS: dict[str, Callable[[System, int], list[Job]]] = {
    "file per tensor, 1 stripe": file_per_tensor,
    "file per rank, 1 stripe": one_stripe,
    "the same, free space uneven": one_stripe_uneven,
    "file per rank, all stripes": all_stripes,
    "one shared file, all stripes": one_shared_file,
    "Penstock, OSTs unknown": chosen_blindly,
    "**Penstock**": chosen,
}
OURS = "**Penstock**"

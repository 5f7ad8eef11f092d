"""What the model of Lustre knows of a system, and of the jobs that write to it.

What is modelled, and from where the numbers come:

* A rank has requests in flight, up to a number; Penstock hands them over in batches and waits
  for the oldest one, as its pipeline does. A request is sent as RPCs of 4 MiB, and of these a
  node has 8 on their way to one OST (`DT_DEF_BRW_SIZE`, `OBD_MAX_RIF_DEFAULT` in the sources,
  github.com/lustre/lustre-release).
* A node sends through one link, shared by its ranks, first come, first served. 15 GB/s: what one
  client reaches over HDR InfiniBand (Lustre Operations Manual, table 1.1, doc.lustre.org).
* An OST serves one RPC at a time: bytes at its bandwidth; a switch cost when the object is
  another than before; a lock when a client meets an object first, or another client had it.
  5 GB/s: half of the 10 GB/s of a server with two OSTs (the same table, production use).
  It serves RPCs of one object together, up to a quantum, as the object-based round robin of
  the request scheduler and the disks' own queues do (wiki.lustre.org/Lustre_NRS_Configuration).
  128 MiB, which is assumed: the scheduler's own quantum is 256 RPCs (`NRS_ORR_QUANTUM_DFLT`), but
  servers need not use it.
* The metadata server serves one operation at a time. Creates: 29,000 per second at one stripe,
  with "a significant decrease" at 24 stripes; removals 160,000, stats 544,000 (mdtest, Dell HPC
  Lustre Storage with Mellanox EDR, figure 12). That decrease is put at 10 % per further stripe;
  opens, links and folders that exist already are put at the cost of a removal.
* Who does not name its OSTs gets them from the server: in turn where free space is even, at
  random where it is not (wiki.lustre.org/Managing_Free_Space).

Assumed, without a source: the switch costs (0.5 ms for disks behind a write-back cache, 0.02 ms
for flash), locks of 0.02 ms when free and 1 ms when taken away from another client, 0.1 ms for
the way of a message, 20 ms for the fsync of a file, ranks that start within 50 ms. What is not
modelled: the network between the links, other jobs, servers with several OSTs, read-ahead,
failures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class System:
    """One Lustre with its clients; seconds and bytes."""

    osts: int = 96
    ost_bytes_s: float = 5e9
    switch_s: float = 0.5e-3
    quantum_bytes: int = 128 * MIB
    rpc_bytes: int = 4 * MIB
    rpcs_in_flight: int = 8
    lock_s: float = 0.02e-3
    revoke_s: float = 1e-3
    object_s: float = 0.02e-3  # creating one object on its OST
    link_bytes_s: float = 15e9
    ranks_per_node: int = 8
    create_s: float = 1 / 29_000
    per_stripe: float = 0.1
    change_s: float = 1 / 160_000
    look_s: float = 1 / 544_000
    message_s: float = 0.1e-3
    fsync_s: float = 20e-3
    start_within_s: float = 50e-3


@dataclass(frozen=True, slots=True)
class File:
    """A file of one rank: its stripes' OSTs, its size, and what making it costs the server.

    `shared` files of all ranks have one object per stripe for all of them.
    """

    osts: tuple[int, ...]
    length: int
    stripe_bytes: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """What a rank has in flight: `requests` at most, handed over in batches, `batches` at most.

    Where there is no `batches`, each request that is done makes room for the next.
    """

    request_bytes: int
    requests: int
    batch_bytes: int = 0
    batches: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """One rank: its files, how it writes them, and metadata operations around them.

    As many files are written at once as requests may be in flight, each with its share of them.
    """

    files: Sequence[File]
    window: Window
    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()


def ideal_s(system: System, ranks: int, bytes_per_rank: int) -> float:
    """The least time that links and OSTs allow, with nothing else in the way."""
    busiest = min(ranks, system.ranks_per_node) * bytes_per_rank / system.link_bytes_s
    return max(busiest, ranks * bytes_per_rank / (system.osts * system.ost_bytes_s))

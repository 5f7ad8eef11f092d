"""A discrete-event model of Lustre: clients, metadata server, object storage targets.

What is modelled, and from where the numbers come:

* A node sends through one link, shared by its ranks, first come, first served. 15 GB/s: what one
  client reaches over HDR InfiniBand (Lustre Operations Manual, table 1.1, doc.lustre.org).
* An OST serves one request at a time: bytes at its bandwidth; a switch cost when the object is
  another than before; a lock when a client meets an object first, or another client had it.
  5 GB/s: half of the 10 GB/s of a server with two OSTs (the same table, production use).
  It serves requests of one object together, up to a quantum, as the object-based round robin of
  the request scheduler and the disks' own queues do (wiki.lustre.org/Lustre_NRS_Configuration).
* The metadata server serves one operation at a time. Creates: 29,000 per second at one stripe,
  with "a significant decrease" at 24 stripes; removals 160,000, stats 544,000 (mdtest, Dell HPC
  Lustre Storage with Mellanox EDR, figure 12). That decrease is put at 10 % per further stripe;
  opens, links and folders that exist already are put at the cost of a removal.
* Who does not name its OSTs gets them from the server: in turn where free space is even, at
  random where it is not (wiki.lustre.org/Managing_Free_Space).

Assumed, without a source: the switch costs (0.5 ms for disks behind a write-back cache, 0.02 ms
for flash), locks of 0.02 ms when free and 1 ms when taken away from another client, 0.1 ms for
the way of a message, 20 ms for the fsync of a file, ranks that start within 50 ms. What is not
modelled: the network between the links, other jobs, servers with several OSTs, read-ahead, RPCs
smaller than a request, failures.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class System:
    """One Lustre with its clients; seconds and bytes."""

    osts: int = 96
    ost_bytes_s: float = 5e9
    switch_s: float = 0.5e-3
    quantum: int = 8
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
class Job:
    """One rank: its files, and metadata operations around them.

    As many files are written at once as requests may be in flight, each with its share of them.
    """

    files: Sequence[File]
    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()


class Ost:
    """One object storage target: its queue by object, and what it is at."""

    __slots__ = ("busy", "holders", "last", "order", "queues", "run")

    def __init__(self) -> None:
        self.busy = False
        self.last = None
        self.run = 0
        self.holders: dict = {}
        self.queues: dict = {}
        self.order: deque = deque()


class Simulation:
    """Runs jobs to their end; `finished_s` is when the last rank is done."""

    def __init__(self, system: System, jobs: Sequence[Job], *, request_bytes: int, window: int):
        self.system = system
        self.jobs = jobs
        self.request = request_bytes
        self.window = window
        self._events: list = []
        self._sequence = count()
        self._osts = [Ost() for _ in range(system.osts)]
        self._links = [0.0] * (-(-len(jobs) // system.ranks_per_node))
        self._mds_free_s = 0.0
        self.metadata_operations = 0
        self.finished_s = 0.0

    def run(self, seed: int = 1) -> float:
        rng = random.Random(seed)
        for rank, job in enumerate(self.jobs):
            start = rng.uniform(0, self.system.start_within_s)
            lanes = min(len(job.files), self.window)
            for lane in range(lanes):
                files = job.files[lane::lanes]
                self.at(start, Lane(self, rank, files, self.window // lanes).begin)
        while self._events:
            now, _, action, argument = heapq.heappop(self._events)
            action(now, argument)
        return self.finished_s

    # -- parts --------------------------------------------------------------------------------

    def at(self, when: float, action: Callable, argument: object = None) -> None:
        heapq.heappush(self._events, (when, next(self._sequence), action, argument))

    def metadata(self, now: float, costs: Sequence[float], then: Callable) -> None:
        """One operation after the other, each through the server's queue."""
        if not costs:
            then(now, None)
            return
        self.metadata_operations += 1
        self._mds_free_s = max(self._mds_free_s, now + self.system.message_s) + costs[0]
        rest = costs[1:]
        self.at(self._mds_free_s + self.system.message_s, lambda t, _: self.metadata(t, rest, then))

    def send(self, now: float, rank: int, key: tuple, length: int, done: Callable) -> None:
        """A request: over the node's link, then to the OST that `key` begins with."""
        node = rank // self.system.ranks_per_node
        free = max(self._links[node], now) + length / self.system.link_bytes_s
        self._links[node] = free
        self.at(free + self.system.message_s, self._arrive, (key, rank, length, done))

    def _arrive(self, now: float, request: tuple) -> None:
        ost = self._osts[request[0][0]]
        waiting = ost.queues.get(request[0])
        if waiting is None:
            ost.queues[request[0]] = waiting = deque()
            ost.order.append(request[0])
        waiting.append(request)
        if not ost.busy:
            self._serve(now, ost)

    def _serve(self, now: float, ost: Ost) -> None:
        if not ost.order:
            ost.busy = False
            return
        ost.busy = True
        system, took = self.system, 0.0
        key = ost.last
        if key not in ost.queues or ost.run >= system.quantum:
            if key in ost.queues:
                ost.order.remove(key)
                ost.order.append(key)
            key = ost.order[0]
            took += system.switch_s if key != ost.last else 0.0
            ost.last, ost.run = key, 0
        ost.run += 1
        waiting = ost.queues[key]
        _, rank, length, done = waiting.popleft()
        if not waiting:
            del ost.queues[key]
            ost.order.remove(key)
        holder = ost.holders.get(key)
        if holder is None:
            took += system.object_s + system.lock_s
        elif holder != rank:
            took += system.revoke_s
        ost.holders[key] = rank
        self.at(now + took + length / system.ost_bytes_s, self._served, (ost, done))

    def _served(self, now: float, what: tuple) -> None:
        ost, done = what
        self._serve(now, ost)
        # At once, though the answer is on its way: a third of all events less, and the link's
        # order is off by no more than a message.
        done(now + self.system.message_s, None)


class Lane:
    """Makes files in order, keeps a window of requests in flight, ends with its operations."""

    def __init__(self, world: Simulation, rank: int, files: Sequence[File], window: int) -> None:
        self._world = world
        self._rank = rank
        self._job = world.jobs[rank]
        self._files = files
        self._window = window
        self._number = -1
        self._offset = 0
        self._flying = 0

    def begin(self, now: float, _: object) -> None:
        self._world.metadata(now, self._job.before, self._next_file)

    def _next_file(self, now: float, _: object) -> None:
        self._number += 1
        if self._number == len(self._files):
            self._world.metadata(now, self._job.after, self._end)
            return
        system = self._world.system
        file = self._files[self._number]
        stripes = 1 + system.per_stripe * (len(file.osts) - 1)
        first = not file.shared or self._rank == 0
        costs = (system.create_s * stripes, system.look_s) if first else (system.look_s,)
        self._world.metadata(now, costs, self._write)

    def _write(self, now: float, _: object) -> None:
        self._offset = 0
        self._fill(now)

    def _fill(self, now: float) -> None:
        file = self._files[self._number]
        while self._flying < self._window and self._offset < file.length:
            length = min(self._world.request, file.length - self._offset)
            place = self._offset + (self._rank * file.length if file.shared else 0)
            stripe = place // file.stripe_bytes % len(file.osts)
            who = 0 if file.shared else id(file)
            self._flying += 1
            self._offset += length
            key = (file.osts[stripe], who)
            self._world.send(now, self._rank, key, length, self._landed)

    def _landed(self, now: float, _: object) -> None:
        self._flying -= 1
        file = self._files[self._number]
        if self._offset < file.length:
            self._fill(now)
        elif not self._flying:
            self._world.at(now + self._world.system.fsync_s, self._next_file)

    def _end(self, now: float, _: object) -> None:
        self._world.finished_s = max(self._world.finished_s, now)


def ideal_s(system: System, ranks: int, bytes_per_rank: int) -> float:
    """The least time that links and OSTs allow, with nothing else in the way."""
    busiest = min(ranks, system.ranks_per_node) * bytes_per_rank / system.link_bytes_s
    return max(busiest, ranks * bytes_per_rank / (system.osts * system.ost_bytes_s))

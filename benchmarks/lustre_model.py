"""A discrete-event model of Lustre: clients, metadata server, object storage targets.

What is modelled, and from where its numbers come, says `lustre_system.py`.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lustre_system import File, Job, System, Window


class Request:
    """A write of a lane on its way: how many of its RPCs are not answered; one lock is for all."""

    __slots__ = ("batch", "lane", "left", "locked")

    def __init__(self, lane: Lane, batch: list[int]) -> None:
        self.lane = lane
        self.batch = batch
        self.left = 0
        self.locked = False


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

    def __init__(self, system: System, jobs: Sequence[Job]) -> None:
        self.system = system
        self.jobs = jobs
        self._under_way: dict[tuple[int, int], int] = {}
        self._held: dict[tuple[int, int], deque] = {}
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
            lanes = min(len(job.files), job.window.requests)
            for lane in range(lanes):
                files = job.files[lane::lanes]
                self.at(start, Lane(self, rank, files, job.window.requests // lanes).begin)
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

    def send(self, now: float, rank: int, key: tuple, length: int, request: Request) -> None:
        """As RPCs over the node's link to the OST that `key` begins with."""
        pair = rank // self.system.ranks_per_node, key[0]
        rpcs = -(-length // self.system.rpc_bytes)
        request.left = rpcs
        under_way = self._under_way.get(pair, 0)
        for n in range(rpcs):
            part = min(self.system.rpc_bytes, length - n * self.system.rpc_bytes)
            rpc = pair, key, rank, part, request
            if under_way < self.system.rpcs_in_flight:
                under_way += 1
                self._transmit(now, rpc)
            else:
                self._held.setdefault(pair, deque()).append(rpc)
        self._under_way[pair] = under_way

    def _transmit(self, now: float, rpc: tuple) -> None:
        node = rpc[0][0]
        free = max(self._links[node], now) + rpc[3] / self.system.link_bytes_s
        self._links[node] = free
        self.at(free + self.system.message_s, self._arrive, rpc)

    def _arrive(self, now: float, rpc: tuple) -> None:
        key = rpc[1]
        ost = self._osts[key[0]]
        waiting = ost.queues.get(key)
        if waiting is None:
            ost.queues[key] = waiting = deque()
            ost.order.append(key)
        waiting.append(rpc)
        if not ost.busy:
            self._serve(now, ost)

    def _serve(self, now: float, ost: Ost) -> None:
        if not ost.order:
            ost.busy = False
            return
        ost.busy = True
        system, took = self.system, 0.0
        key = ost.last
        if key not in ost.queues or ost.run >= system.quantum_bytes:
            if key in ost.queues:
                ost.order.remove(key)
                ost.order.append(key)
            key = ost.order[0]
            took += system.switch_s if key != ost.last else 0.0
            ost.last, ost.run = key, 0
        waiting = ost.queues[key]
        rpc = waiting.popleft()
        _, _, rank, length, request = rpc
        ost.run += length
        if not waiting:
            del ost.queues[key]
            ost.order.remove(key)
        if not request.locked:
            took += self._lock_s(ost, key, rank)
            request.locked = True
        self.at(now + took + length / system.ost_bytes_s, self._served, (ost, rpc))

    def _lock_s(self, ost: Ost, key: tuple, rank: int) -> float:
        holder = ost.holders.get(key)
        ost.holders[key] = rank
        if holder is None:
            return self.system.object_s + self.system.lock_s
        return 0.0 if holder == rank else self.system.revoke_s

    def _served(self, now: float, what: tuple) -> None:
        ost, (pair, _, _, _, request) = what
        self._serve(now, ost)
        # At once, though the answer is on its way: a third of all events less, and the link's
        # order is off by no more than a message.
        answered = now + self.system.message_s
        held = self._held.get(pair)
        if held:
            self._transmit(answered, held.popleft())
        else:
            self._under_way[pair] -= 1
        request.left -= 1
        if not request.left:
            request.lane.landed(answered, request.batch)


class Lane:
    """Makes files in order, keeps a window of requests in flight, ends with its operations."""

    def __init__(self, world: Simulation, rank: int, files: Sequence[File], requests: int) -> None:
        self._world = world
        self._rank = rank
        self._job = world.jobs[rank]
        self._files = files
        self._requests = requests
        self._number = -1
        self._offset = 0
        self._flying = 0
        self._batches: deque[list[int]] = deque()
        self._waiting: deque[tuple[tuple, int, list[int]]] = deque()

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
        file, window = self._files[self._number], self._job.window
        batches = window.batches or self._requests
        while len(self._batches) < batches and self._offset < file.length:
            self._hand_over(file, window)
        while self._waiting and self._flying < self._requests:
            key, length, batch = self._waiting.popleft()
            self._flying += 1
            self._world.send(now, self._rank, key, length, Request(self, batch))

    def _hand_over(self, file: File, window: Window) -> None:
        """A batch: how many of its requests are not done, and these."""
        end = min(self._offset + (window.batch_bytes or window.request_bytes), file.length)
        batch = [0]
        while self._offset < end:
            length = min(window.request_bytes, end - self._offset)
            place = self._offset + (self._rank * file.length if file.shared else 0)
            stripe = place // file.stripe_bytes % len(file.osts)
            who = 0 if file.shared else id(file)
            self._offset += length
            batch[0] += 1
            self._waiting.append(((file.osts[stripe], who), length, batch))
        self._batches.append(batch)

    def landed(self, now: float, batch: list[int]) -> None:
        self._flying -= 1
        batch[0] -= 1
        if not self._job.window.batches:
            self._batches.remove(batch)
        while self._batches and not self._batches[0][0]:
            self._batches.popleft()
        file = self._files[self._number]
        if self._offset < file.length or self._waiting:
            self._fill(now)
        elif not self._flying:
            self._world.at(now + self._world.system.fsync_s, self._next_file)

    def _end(self, now: float, _: object) -> None:
        self._world.finished_s = max(self._world.finished_s, now)

"""Joins the roots of all hosts of a job, once, before the job first looks at its checkpoints.

Each rank reports its root to rank 0, which names the rank that serves each root. A rank connects to
another host only when it needs a blob from there.

Tested in `tests/integration/ranks/test_hosts.py`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.abc import HostRecord, HostRoot, host_roots, read_host, read_root
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.errors import (
    ConfigError,
    CoordinationError,
    FormatError,
    PenstockError,
    RankError,
    StorageError,
)
from penstock.core.foreign import said
from penstock.core.hosts.blob_http import Credentials, own_address
from penstock.core.hosts.census import host_identity
from penstock.core.hosts.remote_root import RemoteRoot, RootServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.core.abc import Backend
    from penstock.core.ranks.group import RankGroup, RanksOfJob
    from penstock.core.rounds.round import RankPlace

_SERVERS_KEY = "roots/servers"
# The share of the time limit for stuck ranks that a rank waits for a silent host, so that it does
# not itself count as stuck.
_PATIENCE = 1 / 4


class _Posted(NamedTuple):
    """A rank's report of its root. Ranks with equal identities have the same root."""

    identity: str
    host: str
    epoch: int
    domain: str
    copies: int
    run: str  # as in `HostRecord`
    tiers: str  # the run of its root record as a tier, if it has one
    address: str
    port: int

    def root(self, backend: Backend, rank: int) -> HostRoot:
        return HostRoot(self.host, self.epoch, backend, self.domain, run=self.run, rank=rank)


class RootsOfJob:
    """This rank's roots, joined with those of the job's other hosts."""

    def __init__(
        self,
        store: Backend,
        ranks: RanksOfJob,
        *,
        network: str | None,
        order: Callable[[int, str, bytes], bytes],
    ) -> None:
        """Prepare; contacts no rank.

        Args:
            store: The backend of the run.
            ranks: Finds the ranks of the job.
            network: The network between hosts, as in `own_address`.
            order: Executes an order of another host, given the number of the tier, the order's
                kind and its body; returns the answer.
        """
        self._places = host_roots(store)
        self._ranks = ranks
        self._network = network
        self._order = order
        self._group: RankGroup | None = None
        self._servers: dict[int, RootServer] = {}
        self._joined = False

    def join(self) -> bool:
        """Join the roots; later calls do nothing. All ranks of the job must call this.

        Joins nothing if the ranks cannot find each other yet; the next call tries again.

        Returns:
            Whether this call joined the roots.

        Raises:
            RankError: Another rank has not called this in time, or has failed.
            PenstockError: This rank cannot serve its root.
        """
        if self._joined or not self._places:
            return False
        group = self._ranks.of_restore()
        if group is not None:
            self._join_ranks(group)
        elif self._ranks.obstacle():
            return False  # the ranks cannot find each other yet
        else:
            for place in self._places.values():
                record = _record(place.own)
                own = HostRoot("", record.epoch, place.own, run=record.run)
                place.join(own, (), leads=True)
        self._joined = True
        return True

    def close(self, error: BaseException | None = None) -> None:
        """Wait until all other ranks close too, or the timeout is over; then stop serving roots.

        A rank that serves no root does not wait.

        Args:
            error: The failure that makes this rank close. With a failure, it does not wait for the
                other ranks either.
        """
        group = self._group
        if group is None:
            return
        group.report_close(error)  # before the wait: else a rank in a save would wait for this one
        with suppress(CoordinationError):  # the job's store is gone, and rank 0 with it
            group.coordination.post(_end_key(group.place.rank), b"-")
            others = set(range(group.place.world_size)).difference(group.lost)
            deadline = Deadline(0 if error or not self._servers else group.timeout_s)
            while not deadline.is_over():
                keys = [_end_key(rank) for rank in sorted(others)]
                if None not in group.coordination.read(keys):
                    break
                time.sleep(group.timing.rank_left_poll_s)
        for server in self._servers.values():
            server.close()

    def _join_ranks(self, group: RankGroup) -> None:
        rank, board = group.place.rank, group.coordination
        secret = hashlib.blake2b(group.uid(-1).encode(), person=b"roots").digest()
        try:
            try:
                posted = {n: self._serve(n, group, secret) for n in self._places}
            except PenstockError as error:
                failure = json.dumps({"error": said(error), "rank": rank}).encode()
                board.post(_key(rank), failure)
                if not rank:  # the others wait for rank 0's answer
                    board.post(_SERVERS_KEY, failure)
                raise
            board.post(_key(rank), json.dumps(posted).encode())
            serving = self._serving(group)
            others = self._read(group, {r for ranks in serving.values() for r in ranks})
            _check(rank, posted, others)
        except BaseException:
            while self._servers:
                self._servers.popitem()[1].close()
            raise
        patience_s = group.timeout_s * _PATIENCE
        for number, place in self._places.items():
            mine = posted[number]
            leaders = serving.get(number, [])  # empty if rank 0 has no root in this place
            if rank in leaders:
                self._servers[number].start(patience_s)
            else:
                self._servers.pop(number).close()
            peers, leader = [], rank
            for other in leaders:
                there = others[other][number]
                if there.identity == mine.identity:
                    leader = other
                else:
                    remote = RemoteRoot(
                        f"{there.host} of rank {other}",
                        (there.address, there.port),
                        _clients(secret, _server_number(number, other), group.place),
                        patience_s=patience_s,
                        timing=group.timing,
                    )
                    peers.append(there.root(remote, other)._replace(ask=remote.order))
            place.join(mine.root(place.own, leader), peers, leads=not rank)
        self._group = group

    def _serve(self, number: int, group: RankGroup, secret: bytes) -> _Posted:
        """Listen for other hosts, and return this rank's report of its root."""
        place, root = group.place, self._places[number]
        try:
            server = self._servers[number] = RootServer(
                root.own,
                own_address(group.coordination.host, self._network),
                credentials=partial(Credentials.of, secret, _server_number(number, place.rank)),
                order=partial(self._order, number),
                timing=group.timing,
            )
        except (OSError, ValueError) as error:
            msg = f"cannot serve {root.own.url} to other hosts: {said(error)}"
            raise StorageError(msg) from error
        identity = _identity(host_identity(place.host, place.rank), root.own.url)
        domain, copies = root.domain or place.host, root.copies
        record, tier = _record(root.own), None
        with suppress(FormatError):  # tiers replace a damaged record
            tier = read_root(root.own)
        tiers = "" if tier is None else tier.run
        host, port, *_ = server.server_address
        at = str(host), port
        return _Posted(identity, place.host, record.epoch, domain, copies, record.run, tiers, *at)

    def _serving(self, group: RankGroup) -> dict[int, list[int]]:
        """Return the ranks that serve roots, by the tier's number: the first rank of each root.

        Raises:
            RankError: A rank has not reported in time, or has failed.
        """
        if group.place.rank:
            data = json.loads(group.wait_for_rank_0(_SERVERS_KEY, "which ranks serve their roots"))
            if "error" in data:
                raise RankError(data["error"], data["rank"], cause=data["error"])
            return {int(number): ranks for number, ranks in data.items()}
        try:
            posted = self._read(group, set(range(group.place.world_size)))
        except RankError as error:
            failure = json.dumps({"error": str(error), "rank": error.rank}).encode()
            group.coordination.post(_SERVERS_KEY, failure)
            raise
        serving: dict[int, list[int]] = {}
        for number in self._places:
            first: dict[str, int] = {}
            for rank in sorted(posted):
                if number in posted[rank]:
                    first.setdefault(posted[rank][number].identity, rank)
            serving[number] = sorted(first.values())
        group.coordination.post(_SERVERS_KEY, json.dumps(serving).encode())
        return serving

    def _read(self, group: RankGroup, ranks: set[int]) -> dict[int, Mapping[int, _Posted]]:
        """Wait for the reports of these ranks.

        Raises:
            RankError: A rank has not reported in time, or has failed.
        """
        deadline = Deadline(group.timeout_s, group.timing.clock)
        found: dict[int, Mapping[int, _Posted]] = {}
        pause_s = group.timing.hosts_poll_first_s
        while missing := sorted(ranks - found.keys()):
            values = group.coordination.read([_key(rank) for rank in missing])
            for rank, value in zip(missing, values, strict=True):
                if value is not None:
                    found[rank] = _decoded(rank, value)
            if missing[0] not in found and deadline.is_over():
                cause = f"has not reported its root for {group.timeout_s:g} s"
                msg = (
                    f"rank {missing[0]} {cause}: with the backend `hosts`, all ranks must use the "
                    "checkpointer"
                )
                raise RankError(msg, missing[0], cause=cause)
            time.sleep(0 if len(found) == len(ranks) else pause_s)
            pause_s = min(2 * pause_s, group.timing.hosts_poll_most_s)
        return found


def _check(
    rank: int, mine: Mapping[int, _Posted], others: Mapping[int, Mapping[int, _Posted]]
) -> None:
    """Raise if hosts have roots of different runs, or another number of copies than this rank.

    The newest run would replace the others. Rank 0 would ask in vain for more copies.
    """
    first: dict[int, _Posted] = {}
    for other, posted in others.items():
        for number, there in posted.items():
            copies = mine[number].copies if number in mine else there.copies
            if copies != there.copies:
                msg = (
                    f"copies is {copies} on rank {rank}, but {there.copies} on rank {other}: give "
                    "all ranks the same configuration"
                )
                raise ConfigError(msg)
            known = first.setdefault(number, there) if there.epoch else there
            same_tiers = known.tiers and known.tiers == there.tiers
            if known.run != there.run and not same_tiers:
                msg = (
                    f"the roots of the hosts {known.host} and {there.host} belong to different "
                    "runs. Nothing was changed. Give each run its own path, or move the root that "
                    "another run has left away"
                )
                raise ConfigError(msg)


def _decoded(rank: int, value: bytes) -> Mapping[int, _Posted]:
    data = json.loads(value)
    if "error" in data:
        cause = f"failed with {data['error']}"
        msg = f"rank {rank} {cause}"
        raise RankError(msg, rank, cause=cause)
    return {int(number): _Posted(*fields) for number, fields in data.items()}


def _record(root: Backend) -> HostRecord:
    """Return the record of a root; one with the epoch 0 if it has none.

    Raises:
        FormatError: The record is damaged, so whether the root's records count is unknown.
    """
    try:
        record = read_host(root)
    except FormatError as error:
        msg = (
            f"{error}. Without this record, it is not known whether this host missed a job, so "
            "nothing was changed. To continue without this host's checkpoints, move its root away"
        )
        raise FormatError(msg, error.damaged) from error
    return record or HostRecord("", 0, (), "")


def _identity(host: str, url: str) -> str:
    """Return an identifier of a root.

    It includes the mount namespace: containers on one host may see different files under one path.
    """
    files = ""
    with suppress(OSError):
        files = os.readlink("/proc/self/ns/mnt")  # noqa: PTH115 - not a path
    return hashlib.blake2b(f"{host}\0{files}\0{url}".encode(), digest_size=12).hexdigest()


def _clients(secret: bytes, server: int, place: RankPlace) -> Iterator[tuple[int, Credentials]]:
    """Yield client numbers that no other rank uses, with their credentials."""
    for number in itertools.count(place.rank, place.world_size):
        yield number, Credentials.of(secret, server, number)


def _server_number(number: int, rank: int) -> int:
    return rank << 8 | number


def _end_key(rank: int) -> str:
    return f"roots/{rank:05d}/end"


def _key(rank: int) -> str:
    return f"roots/{rank:05d}"

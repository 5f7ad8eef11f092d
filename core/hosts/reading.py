"""Reads for one rank what it needs of a checkpoint, together with the other ranks of the job."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.concurrency.watchdog import Deadline, Watchdog
from penstock.core.errors import CoordinationError, FormatError
from penstock.core.foreign import noting_origin, said
from penstock.core.hosts.blob_http import BlobRange
from penstock.core.hosts.census import are_apart, ranks_by_host, read_all, tell_apart
from penstock.core.hosts.division import NOTHING_RELAYED, HostNeeds, OwnPlan
from penstock.core.hosts.meeting import Meeting
from penstock.core.hosts.network import own_address
from penstock.core.hosts.relay import Relay, RelayedBytes
from penstock.core.hosts.relayed_store import RelayedStore
from penstock.core.hosts.replicas import (
    bucket_digests,
    component_numbers,
    decode_digests,
    encode_digests,
    hosts_together,
    relayed,
)
from penstock.core.pipeline.exchange import Exchange, Peer, Share, TakersStuckError
from penstock.core.pipeline.loader import LoadStats, place
from penstock.core.pipeline.staging import Staging
from penstock.core.ranks.templates import RoundOverError
from penstock.core.types import PAGE_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.core.concurrency.timing import Timing
    from penstock.core.hosts.division import Division, Relayed
    from penstock.core.hosts.meeting import Met
    from penstock.core.pipeline.chain import CodecChain
    from penstock.core.pipeline.loader import Loader
    from penstock.core.plan.restore import FrameJob
    from penstock.core.ranks.group import RankGroup

log = logging.getLogger("penstock")

# The windows of a host, together; each has room for two chunks of 16 MiB, and a page for each.
_WINDOWS_BYTES = 128 << 20
_LEAST_WINDOW_BYTES = 32 << 20
_PHASES_BYTES = 16 * PAGE_BYTES
_PIECES_PER_WINDOW = 2
# Of the time after which a rank counts as standing still: one that waits for another in vain, and
# then reads alone, must not be taken for dead itself.
_PATIENCE = 1 / 2
# With a rank of another host less: those of this host wait meanwhile for what it was to hand on.
_PATIENCE_BETWEEN_HOSTS = 1 / 4
_NOT_HERE = b"-"  # in the place of an address, or of digests: this rank takes no part


@dataclass(frozen=True, slots=True)
class Sharing:
    """What ranks read once, and hand on; alike on all ranks of a restore.

    Attributes:
        per_host: Whether what several ranks of a host need is read by one of them.
        per_job: Whether what several hosts need is read by one of them.
    """

    per_host: bool = True
    per_job: bool = False

    def to_terms(self) -> list[bool]:
        """Return it for the word of rank 0."""
        return [self.per_host, self.per_job]

    @classmethod
    def from_terms(cls, terms: Any) -> Sharing:
        """Return what rank 0 has told."""
        return cls(*terms)


class JobReading:
    """One restore of the ranks of a job, as this rank takes part in it.

    Each rank calls `share` once. A rank of which the others hear nothing reads alone, and they
    without it: what one of them does never depends on another that fails.
    """

    def __init__(
        self,
        group: RankGroup,
        number: int,
        sharing: Sharing,
        *,
        network: str | None = None,
        ended: Callable[[], bool],
        moved: Callable[[], None],
        timing: Timing,
    ) -> None:
        """Prepare; nothing is sent.

        Args:
            group: The ranks.
            number: The number of the round.
            sharing: What is read once.
            network: The network between hosts, `10.1.0.0/16`; None: the one that leads to the
                store of the job.
            ended: Returns whether the round has ended on this rank before it has restored: another
                one has failed.
            moved: Tells the others that this rank gets on: it does while it waits for one of them
                to come, since they watch that one, and it waits no longer than they do.
            timing: Says how often `ended` is asked.
        """
        self._group = group
        self._number = number
        self._sharing = sharing
        self._network = network
        self._ended = ended
        self._timing = timing
        self._moved = moved
        self._next_look = Deadline(0.0, timing.clock)

    def share(self, jobs: Sequence[FrameJob[CodecChain]]) -> SharedReading | None:
        """Agree with the other ranks on who reads what.

        Args:
            jobs: What this rank needs, maybe nothing.

        Returns:
            The reading of what is needed here; None if this rank reads alone.

        Raises:
            RoundOverError: Another rank has failed.
        """
        rank, deadline = self._group.place.rank, Deadline(self._group.timeout_s, self._timing.clock)
        with ExitStack() as opened:
            sets = self._sets(deadline)
            here = next((ranks for ranks in sets if rank in ranks), ())
            room = max(_WINDOWS_BYTES // max(len(here), 1), _LEAST_WINDOW_BYTES)
            own = OwnPlan(jobs, most_bytes=room // _PIECES_PER_WINDOW)
            met: Met | None = None
            if len(here) > 1:
                met = self._meet(own, here, room, deadline)
            if met is not None:
                opened.callback(met.part)
            needs: HostNeeds | None = None
            if met is not None or len(here) == 1:
                needs = HostNeeds([own.plan] if met is None else met.plans)
            ways: Ways | None = None
            if self._sharing.per_job and sets:
                ways = self._ways(needs, sets, deadline, opened)
            if self._ended():
                msg = "another rank has failed"
                raise RoundOverError(msg)
            if needs is None or (met is None and ways is None):
                return None
            me = here.index(rank)
            division = own.divide(needs, me, NOTHING_RELAYED if ways is None else ways.relayed)
            try:
                found = SharedReading(
                    division,
                    met,
                    ways,
                    me,
                    limit_s=self._group.timeout_s,
                    ended=self._ended,
                    timing=self._timing,
                )
            except OSError as error:  # out of descriptors; the others find its sockets closed
                self._part(here, said(error))
                return None
            opened.pop_all()
        return found

    def _sets(self, deadline: Deadline) -> Sequence[tuple[int, ...]]:
        """Return the ranks in sets that read through shared memory; none if they are not known."""
        if not self._sharing.per_host:
            return [(rank,) for rank in range(self._group.place.world_size)]
        try:
            return ranks_by_host(self._group, deadline, self._look, self._timing)
        except (CoordinationError, FormatError) as error:
            log.debug("rank %d reads alone: %s", self._group.place.rank, said(error))
            return ()

    def _meet(
        self, own: OwnPlan[CodecChain], here: tuple[int, ...], room: int, deadline: Deadline
    ) -> Met | None:
        rank = self._group.place.rank
        if self._are_apart(here):
            return None
        try:
            secret = self._group.uid(self._number)
            meeting = Meeting(
                secret, here, rank, window_bytes=room + _PHASES_BYTES, timing=self._timing
            )
            over = lambda: self._look() or self._are_apart(here)  # noqa: E731
            met = meeting.hold(own.plan, deadline, over)
        except CoordinationError as error:
            log.debug("rank %d reads alone: %s", rank, said(error))
            return None
        except (OSError, ValueError) as error:
            self._part(here, said(error))
            return None
        if met is None and deadline.is_over():
            self._part(here, "some of them did not come")
        return met

    def _part(self, here: Sequence[int], reason: str) -> None:
        """Tell the others of this host that all read for themselves from now on.

        Else they would wait for this rank as long as a rank may stand still, in each restore.
        """
        place = self._group.place
        log.warning(
            "rank %d cannot read together with the other ranks of %s, so each of them reads for "
            "itself: %s",
            place.rank,
            place.host,
            reason,
        )
        with suppress(CoordinationError):  # then they wait
            tell_apart(self._group, here)

    def _are_apart(self, here: Sequence[int]) -> bool:
        """Return whether a rank of this host has told so; asks now and then."""
        if self._next_look.is_over():
            self._next_look = Deadline(self._timing.hosts_look_s, self._timing.clock)
            with suppress(CoordinationError):  # those who meet need no store
                return are_apart(self._group, here)
        return self._group.reads_apart

    # -- other hosts -------------------------------------------------------------------------------

    def _ways(
        self,
        needs: HostNeeds | None,
        sets: Sequence[tuple[int, ...]],
        deadline: Deadline,
        opened: ExitStack,
    ) -> Ways | None:
        """Agree with other hosts on who reads what; None if this host goes on without them."""
        try:
            with ExitStack() as new:
                ways = self._agree(needs, sets, deadline, new)
                if ways is not None:
                    opened.push(new.pop_all())
                return ways
        except (CoordinationError, FormatError, OSError, ValueError) as error:
            log.warning("read_once_per_job: each host reads for itself: %s", said(error))
            return None

    def _agree(
        self,
        needs: HostNeeds | None,
        sets: Sequence[tuple[int, ...]],
        deadline: Deadline,
        opened: ExitStack,
    ) -> Ways | None:
        group, rank = self._group, self._group.place.rank
        hosts, place_here = hosts_together(sets, rank)
        if len(hosts) == 1:
            return None
        me = hosts[place_here].index(rank)
        relay: Relay | None = None
        line = digests = _NOT_HERE
        try:
            if needs is not None:
                digests = encode_digests(bucket_digests(component_numbers(needs)))
                relay, line = self._listen(opened)
        finally:  # others wait for this word, be it what it may
            group.coordination.post(self._line_key(rank), line)
            if not me:
                group.coordination.post(self._needs_key(rank), digests)
        if needs is None:
            return None
        keys = {h: self._needs_key(ranks[0]) for h, ranks in enumerate(hosts)}
        found = read_all(group, keys, deadline, self._look, self._timing)
        peers = {ranks[me]: self._line_key(ranks[me]) for ranks in hosts if len(ranks) > me}
        lines = found and read_all(group, peers, deadline, self._look, self._timing)
        if found is None or lines is None:
            if not self._ended():
                log.warning("read_once_per_job: not all hosts have come, so each reads for itself")
            return None
        told = {h: decode_digests(data) for h, data in found.items() if data != _NOT_HERE}
        addresses = {r: _address_in(data) for r, data in lines.items() if data != _NOT_HERE}
        if relay is None:  # but it divides as the others of this host do, who count on that
            addresses = {}
        return Ways(relayed(needs, told, hosts, place_here), addresses, relay)

    def _listen(self, opened: ExitStack) -> tuple[Relay | None, bytes]:
        """Listen for other hosts; return also the word that tells them where.

        A rank that cannot listen says so: it takes nothing from other hosts, and hands nothing on.
        """
        rank, uid = self._group.place.rank, self._group.uid(self._number)
        secret = hashlib.blake2b(uid.encode(), person=b"relay").digest()
        try:
            address = own_address(self._group.coordination.host, self._network)
            relay = Relay(secret, rank, address, self._timing)
        except (OSError, ValueError) as error:
            log.warning("read_once_per_job: rank %d reads for itself: %s", rank, said(error))
            return None, _NOT_HERE
        opened.callback(relay.close)
        return relay, json.dumps([address, relay.port]).encode()

    def _line_key(self, rank: int) -> str:
        return f"line/{self._number}/{rank:05d}"

    def _needs_key(self, rank: int) -> str:
        return f"needs/{self._number}/{rank:05d}"

    def _look(self) -> bool:
        self._moved()
        return self._ended()


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways between this host and others.

    Attributes:
        relayed: How what they need, too, gets there, by component.
        addresses: Where the ranks listen that this one deals with.
        relay: Carries it; None: this rank cannot listen, and takes no part.
    """

    relayed: Mapping[int, Relayed]
    addresses: Mapping[int, tuple[str, int]]
    relay: Relay | None

    def relayed_by(
        self, division: Division[CodecChain], me: int, *, together_bytes: int
    ) -> Iterator[RelayedBytes]:
        """Yield the stored bytes that member `me` takes from other hosts, or hands on to them.

        Ranks without an address take no part: what they were to read is read here. Chains of more
        than `together_bytes` are read by each host.
        """
        for piece in division.pieces:
            way = piece.relayed
            if piece.reader != me or way is None:
                continue
            links = piece.job.links
            if len(links) > 1 and sum(link.frame.length for link in links) > together_bytes:
                continue
            source = way.source if way.source in self.addresses else None
            recipients = tuple(rank for rank in way.recipients if rank in self.addresses)
            if source is None and not recipients:
                continue
            raw = piece.job.chain is None
            for link in links:
                start = piece.span.start if raw else 0
                length = piece.span.length if raw else link.frame.length
                where = BlobRange(link.blob, link.frame.offset + start, length)
                yield RelayedBytes(where, source, recipients)


class SharedReading:
    """What one rank reads for itself and for others, and takes from others."""

    def __init__(
        self,
        division: Division[CodecChain],
        met: Met | None,
        ways: Ways | None,
        me: int,
        *,
        limit_s: float,
        ended: Callable[[], bool],
        timing: Timing,
    ) -> None:
        """Prepare; see `JobReading.share`."""
        self._division = division
        self._ended = ended
        self._limit_s = limit_s
        self._timing = timing
        self._progress: Callable[[int], None] | None = None
        self._lock = threading.Lock()  # guards the callback: two threads count bytes
        own: list[Share] = []
        taken: list[tuple[int, Share]] = []
        single: list[FrameJob[CodecChain]] = []
        for piece in division.pieces:
            share = Share(piece.number, piece.job, piece.span, piece.takers)
            if piece.reader != me:
                taken.append((piece.reader, share))
            elif piece.takers:
                own.append(share)
            else:
                single.append(piece.job)
        self._own = own
        # The others wait for what only their hosts need besides this one: so it comes first.
        self._alone = [*single, *division.alone]
        self._met = met
        self._ways = ways
        self._me = me
        self._exchange: Exchange | None = None
        if met is not None and (own or taken):
            peers = [
                Peer(number, socket, window, Watchdog(limit_s * _PATIENCE, timing.clock))
                for number, socket, window in met.others
            ]
            self._exchange = Exchange(
                Staging(len(met.window), met.window),
                peers,
                own=own,
                taken=taken,
                place=self._place,
                timing=timing,
            )
        spans = (span for job in division.alone for link in job.links for span in link.ranges)
        self.bytes_expected = sum(p.span.length for p in division.pieces) + sum(
            span.length for span in spans
        )
        """The bytes that this rank gets, from the store or from others."""
        self.bytes_taken = 0
        """The bytes that other ranks of this host have read for this rank."""
        self.bytes_received = 0
        """The stored bytes that ranks of other hosts have read for this one."""

    def run(self, loader: Loader, progress: Callable[[int], None] | None = None) -> LoadStats:
        """Read everything; as `Loader.run`.

        Raises:
            RoundOverError: Another rank has failed.
            BaseException: As `Loader.run`.
        """
        self._progress = progress
        relay = None if self._ways is None else self._ways.relay
        if self._ways is None or relay is None:
            return self._run(loader, loader)
        try:
            found = self._ways.relayed_by(
                self._division, self._me, together_bytes=loader.together_bytes
            )
            if not (relayed_bytes := tuple(found)):
                relay.close()
                return self._run(loader, loader)
            # Less than the store has, too: a rank that waits for another does not hang itself.
            limit_s = min(self._limit_s, loader.io_timeout_s or self._limit_s)
            store = RelayedStore(loader.backend, relay, relayed_bytes)
            try:
                relay.start(
                    relayed_bytes,
                    self._ways.addresses,
                    patience_s=limit_s * _PATIENCE_BETWEEN_HOSTS,
                    ended=self._ended,
                )
            except (OSError, RuntimeError) as error:  # out of descriptors, or of threads
                relay.close()
                log.warning("read_once_per_job: this rank reads alone: %s", said(error))
                return self._run(loader, loader)
            stats = self._run(loader.over(store), loader, relay)
        finally:
            relay.close()
        self.bytes_received = store.bytes_received
        stats.bytes_read -= store.bytes_received
        return stats

    def _run(self, loader: Loader, alone: Loader, relay: Relay | None = None) -> LoadStats:
        """Read everything by `loader`, and by `alone` what others did not lend."""
        # Not kept here: it holds this object, too, and the window would last as long as the cycle.
        stats, exchange, self._exchange = LoadStats(), self._exchange, None
        if exchange is None or self._met is None:
            if self._met is not None:
                self._met.part()
            stats.add(loader.run(self._alone, progress=self._count))
            return stats
        exchange.start()

        def count(size_bytes: int) -> None:
            exchange.check()  # where a target has failed, the rest need not be read
            self._count(size_bytes)

        try:
            jobs = [*self._lend(exchange, loader, stats, relay, count), *self._alone]
            exchange.lent_all()
            together = relay is None or not relay.is_over
            stats.add((loader if together else alone).run(jobs, progress=count))
            left = exchange.wait(self._ended)
            if left and self._ended():
                msg = "another rank has failed"
                raise RoundOverError(msg)
        finally:
            exchange.close()
            self._met.part()
            self.bytes_taken = exchange.bytes_taken
        if left:
            log.debug("%d pieces that others did not read are read here", len(left))
            stats.add(alone.run(left, progress=self._count))
        return stats

    def _lend(
        self,
        exchange: Exchange,
        loader: Loader,
        stats: LoadStats,
        relay: Relay | None,
        progress: Callable[[int], None],
    ) -> Sequence[FrameJob[CodecChain]]:
        """Read what others need, too; return what could not be lent, which is still to be read."""
        if not self._own:
            return ()
        assert self._met is not None
        try:
            needs = (align_up(p.span.length, PAGE_BYTES) + PAGE_BYTES for p in self._own)
            self._met.allocate(sum(needs))
            jobs = [share.job for share in self._own]
            stats.add(loader.run(jobs, progress=progress, exchange=exchange))
        except (OSError, TakersStuckError) as error:
            log.warning("this rank reads alone: %s", said(error))
            if relay is not None:  # what is left is read in another order than other hosts read it
                relay.give_up()
            return exchange.lend_no_more()
        return ()

    def _place(self, share: Share, data: memoryview) -> None:
        with noting_origin(lambda: f"with {' '.join(share.job.label)}"):
            place(share.job.uses, data, base=share.span.start)
        self._count(share.span.length)

    def _count(self, size_bytes: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._progress(size_bytes)


def _address_in(data: bytes) -> tuple[str, int]:
    """Return the address that another rank has told.

    Raises:
        ValueError: It is none.
    """
    try:
        address, port = json.loads(data)
        return str(address), int(port)
    except (TypeError, ValueError) as error:
        msg = "the address of another rank cannot be read"
        raise ValueError(msg) from error

"""Reads the data that one rank needs of a checkpoint, together with the job's other ranks.

Tested in `tests/integration/ranks/test_host_reading.py` and `test_job_reading.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.concurrency.watchdog import Watchdog
from penstock.core.errors import CoordinationError, FormatError
from penstock.core.foreign import noting_origin, said
from penstock.core.hosts.blob_http import BlobRange, own_address
from penstock.core.hosts.census import Census
from penstock.core.hosts.division import (
    HostNeeds,
    OwnPlan,
    bucket_digests,
    component_numbers,
    decode_digests,
    encode_digests,
    hosts_together,
    relayed,
)
from penstock.core.hosts.meeting import Meeting
from penstock.core.hosts.relay import Relay, RelayedBytes, RelayedStore
from penstock.core.pipeline.exchange import Exchange, Peer, TakersStuckError
from penstock.core.pipeline.loader import LoadStats, place
from penstock.core.pipeline.staging import Staging
from penstock.core.ranks.templates import RoundOverError
from penstock.core.types import PAGE_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.core.hosts.division import Division, Relayed
    from penstock.core.hosts.meeting import Met
    from penstock.core.pipeline.codec_chain import CodecChain
    from penstock.core.pipeline.exchange import Share
    from penstock.core.pipeline.loader import Loader
    from penstock.core.plan.reads import FrameJob
    from penstock.core.ranks.session import RankSession
    from penstock.core.rounds.round import RestoreRound

log = logging.getLogger("penstock")

# The size of all windows of a host together. Each window has room for at least two 16 MiB chunks.
_WINDOWS_BYTES = 128 << 20
_LEAST_WINDOW_BYTES = 32 << 20
_PHASES_BYTES = 16 * PAGE_BYTES
_PIECES_PER_WINDOW = 2
# The share of the time limit for stuck ranks that a rank waits for another rank before it reads
# alone, so that it does not itself count as stuck.
_PATIENCE = 1 / 2
# Less between hosts: while a rank waits for another host, the ranks of its own host wait for it.
_PATIENCE_BETWEEN_HOSTS = 1 / 4
_NOT_HERE = b"-"  # posted instead of an address or digests by a rank that takes no part


class Sharing(NamedTuple):
    """Which reads are done once and shared; the same on all ranks of a restore.

    Attributes:
        per_host: Whether only one rank reads the bytes that several ranks of a host need.
        per_job: Whether only one host reads the bytes that several hosts need.
    """

    per_host: bool = True
    per_job: bool = False


class JobReading:
    """This rank's part in one restore by the ranks of a job.

    Each rank calls `share` once. If a rank does not report in time, it and the ranks that would
    share with it read alone, so no rank depends on a failed one.
    """

    def __init__(
        self, session: RankSession[RestoreRound], sharing: Sharing, *, network: str | None
    ) -> None:
        """Prepare; send nothing.

        Args:
            session: The round of the restore. Its `has_news` is true before this rank has restored
                only if another rank has failed.
            sharing: Which reads are done once.
            network: The network between hosts, such as `10.1.0.0/16`; None: the network that leads
                to the job's store.
        """
        self._session = session
        self._group = session.group
        self._sharing = sharing
        self._network = network

    def announce(self) -> None:
        """Report this rank's host to rank 0 before planning; if that fails, `share` tries again."""
        if self._sharing.per_host:
            with suppress(CoordinationError):
                Census.announce(self._group)

    def share(self, jobs: Sequence[FrameJob[CodecChain]]) -> SharedReading | None:
        """Agree with the other ranks on which rank reads which bytes.

        Args:
            jobs: The reads that this rank needs, possibly none.

        Returns:
            The shared reading; None if this rank reads alone.

        Raises:
            RoundOverError: Another rank has failed.
        """
        rank, census = self._group.place.rank, Census(self._session)
        with ExitStack() as opened:
            sets = self._sets(census)
            here = next((ranks for ranks in sets if rank in ranks), ())
            room = max(_WINDOWS_BYTES // max(len(here), 1), _LEAST_WINDOW_BYTES)
            own = OwnPlan(jobs, most_bytes=room // _PIECES_PER_WINDOW)
            met: Met | None = None
            if len(here) > 1:
                met = self._meet(census, own, here, room)
            if met is not None:
                opened.callback(met.part)
            needs: HostNeeds | None = None
            if met is not None or len(here) == 1:
                needs = HostNeeds([own.plan] if met is None else met.plans)
            ways: Ways | None = None
            if self._sharing.per_job and sets:
                ways = self._ways(census, needs, sets, opened)
            if self._session.has_news:
                msg = "another rank has failed"
                raise RoundOverError(msg)
            if needs is None or (met is None and ways is None):
                return None
            me = here.index(rank)
            division = own.divide(needs, me, {} if ways is None else ways.relayed)
            try:
                found = SharedReading(self._session, division, met, ways, me)
            except OSError as error:  # out of descriptors; the others see closed sockets
                census.part(here, said(error))
                return None
            opened.pop_all()
        return found

    def _sets(self, census: Census) -> Sequence[tuple[int, ...]]:
        """Return the sets of ranks that share reads within a host; empty if they are unknown."""
        if not self._sharing.per_host:
            return [(rank,) for rank in range(self._group.place.world_size)]
        try:
            return census.sets()
        except (CoordinationError, FormatError) as error:
            log.debug("rank %d reads alone: %s", self._group.place.rank, said(error))
            return ()

    def _meet(self, census: Census, own: OwnPlan, here: tuple[int, ...], room: int) -> Met | None:
        group, rank = self._group, self._group.place.rank
        if census.are_apart(here):
            return None
        window_bytes = room + _PHASES_BYTES
        try:
            secret = group.uid(self._session.round.number)
            meeting = Meeting(secret, here, rank, window_bytes=window_bytes, timing=group.timing)
            met = meeting.hold(own.plan, lambda: census.gives_up() or census.are_apart(here))
        except CoordinationError as error:
            log.debug("rank %d reads alone: %s", rank, said(error))
            return None
        except (OSError, ValueError) as error:
            census.part(here, said(error))
            return None
        if met is None and census.is_late:
            census.part(here, "some of them did not join in time")
        return met

    # -- other hosts -------------------------------------------------------------------------------

    def _ways(
        self,
        census: Census,
        needs: HostNeeds | None,
        sets: Sequence[tuple[int, ...]],
        opened: ExitStack,
    ) -> Ways | None:
        """Agree with other hosts on which host reads which bytes; None if this host reads alone."""
        hosts, place_here = hosts_together(sets, self._group.place.rank)
        if len(hosts) == 1:
            return None
        relay = None if needs is None else self._listen()
        if relay is not None:
            opened.callback(relay.close)
        try:
            ways = self._agree(census, needs, relay, hosts, place_here)
        except (CoordinationError, FormatError, OSError, ValueError) as error:
            log.warning("read_once_per_job: each host reads alone: %s", said(error))
            ways = None
        if ways is None and relay is not None:
            relay.close()
        return ways

    def _agree(
        self,
        census: Census,
        needs: HostNeeds | None,
        relay: Relay | None,
        hosts: Sequence[tuple[int, ...]],
        here: int,
    ) -> Ways | None:
        rank, post = self._group.place.rank, self._group.coordination.post
        me = hosts[here].index(rank)
        # Posted even if this rank takes no part, because the other hosts wait for the post.
        post(self._line_key(rank), _NOT_HERE if relay is None else json.dumps(relay.at).encode())
        if not me:
            digests = None if needs is None else bucket_digests(component_numbers(needs))
            post(self._needs_key(rank), _NOT_HERE if digests is None else encode_digests(digests))
        if needs is None:
            return None
        found = census.read_all({h: self._needs_key(ranks[0]) for h, ranks in enumerate(hosts)})
        peers = {ranks[me]: self._line_key(ranks[me]) for ranks in hosts if len(ranks) > me}
        lines = found and census.read_all(peers)
        if found is None or lines is None:
            if not self._session.has_news:
                log.warning("read_once_per_job: not all hosts reported, so each host reads alone")
            return None
        digests_of = {h: decode_digests(data) for h, data in found.items() if data != _NOT_HERE}
        addresses = {r: _address_in(data) for r, data in lines.items() if data != _NOT_HERE}
        if relay is None:  # exchanges nothing, but must divide like the other ranks of this host
            addresses = {}
        return Ways(relayed(needs, digests_of, hosts, here), addresses, relay)

    def _listen(self) -> Relay | None:
        """Listen for other hosts. Return None, after a warning, if this rank cannot.

        Such a rank receives no bytes from other hosts, and passes none on.
        """
        group = self._group
        try:
            uid = group.uid(self._session.round.number)
            secret = hashlib.blake2b(uid.encode(), person=b"relay").digest()
            address = own_address(group.coordination.host, self._network)
            return Relay(secret, group.place.rank, address, group.timing)
        except (CoordinationError, OSError, ValueError) as error:
            rank = group.place.rank
            log.warning("read_once_per_job: rank %d reads alone: %s", rank, said(error))
            return None

    def _line_key(self, rank: int) -> str:
        return f"line/{self._session.round.number}/{rank:05d}"

    def _needs_key(self, rank: int) -> str:
        return f"needs/{self._session.round.number}/{rank:05d}"


class Ways(NamedTuple):
    """The routes between this host and the other hosts.

    Attributes:
        relayed: The routes of bytes that other hosts also need, by component in `HostNeeds`.
        addresses: The addresses of the ranks that exchange bytes with this rank.
        relay: Transfers the bytes; None: this rank cannot listen and exchanges no bytes.
    """

    relayed: Mapping[int, Relayed]
    addresses: Mapping[int, tuple[str, int]]
    relay: Relay | None


class SharedReading:
    """The bytes that one rank reads for itself and for others, and receives from others."""

    def __init__(
        self,
        session: RankSession[RestoreRound],
        division: Division,
        met: Met | None,
        ways: Ways | None,
        me: int,
    ) -> None:
        """Prepare; see `JobReading.share`.

        Raises:
            OSError: This process is out of file descriptors.
        """
        # A lambda, not a method: the relay keeps it, and a method would keep this object and its
        # window alive.
        self._ended: Callable[[], bool] = lambda: session.has_news
        self._limit_s = limit_s = session.group.timeout_s
        self._progress: Callable[[int], None] | None = None
        self._lock = threading.Lock()  # guards the callback: two threads count bytes
        taken = [piece for piece in division.pieces if piece.reader != me]
        self._read = [piece for piece in division.pieces if piece.reader == me]
        self._own = own = [piece for piece in self._read if piece.takers]
        # Pieces for other hosts come first, because those hosts wait for them.
        self._alone = [*(piece.job for piece in self._read if not piece.takers), *division.alone]
        self._met = met
        self._ways = ways
        self._exchange: Exchange | None = None
        if met is not None and (own or taken):
            timing = session.group.timing
            peers = [
                Peer(number, socket, window, Watchdog(limit_s * _PATIENCE, timing.clock))
                for number, socket, window in met.others
            ]
            window = Staging(len(met.window), met.window)
            self._exchange = Exchange(
                window, peers, own=own, taken=taken, place=self._place, timing=timing
            )
        spans = (span for job in division.alone for link in job.links for span in link.ranges)
        self.bytes_expected = sum(p.span.length for p in division.pieces) + sum(
            span.length for span in spans
        )
        """The bytes that this rank gets, from the store or from others."""
        self.bytes_taken = 0
        """The bytes that other ranks of this host have read for this rank."""
        self.bytes_received = 0
        """The stored bytes that ranks of other hosts have read for this rank."""

    def run(self, loader: Loader, progress: Callable[[int], None] | None = None) -> LoadStats:
        """Read everything, as `Loader.run` does.

        Raises:
            RoundOverError: Another rank has failed.
            BaseException: As in `Loader.run`.
        """
        self._progress = progress
        ways = self._ways
        relay = None if ways is None else ways.relay
        if ways is None or relay is None:
            return self._run(loader, loader)
        try:
            relayed_bytes = [*self._relayed(ways, loader.together_bytes)]
            store = RelayedStore(loader.backend, relay, relayed_bytes)
            if not relayed_bytes or not self._begins(relay, relayed_bytes, ways, loader):
                relay.close()
                return self._run(loader, loader)
            stats = self._run(loader.over(store), loader, relay)
        finally:
            relay.close()
        self.bytes_received = store.bytes_received
        stats.bytes_read -= store.bytes_received
        return stats

    def _relayed(self, ways: Ways, together_bytes: int) -> Iterator[RelayedBytes]:
        """Yield the stored bytes that this rank receives from other hosts, or passes on to them.

        Ranks without an address take no part: this rank reads from the store what such a rank would
        pass on. Each host reads a chain of deltas itself if its frames exceed `together_bytes`.
        """
        for piece in self._read:
            way, links = ways.relayed.get(piece.number), piece.job.links
            if way is None:
                continue
            if len(links) > 1 and sum(link.frame.length for link in links) > together_bytes:
                continue
            source = way.source if way.source in ways.addresses else None
            recipients = tuple(rank for rank in way.recipients if rank in ways.addresses)
            if source is None and not recipients:
                continue
            raw = piece.job.chain is None
            for link in links:
                start = piece.span.start if raw else 0
                length = piece.span.length if raw else link.frame.length
                where = BlobRange(link.blob, link.frame.offset + start, length)
                yield RelayedBytes(where, source, recipients)

    def _begins(
        self, relay: Relay, relayed_bytes: Sequence[RelayedBytes], ways: Ways, loader: Loader
    ) -> bool:
        # Below the store's own limit too: else a wait for another rank would count as a hung read.
        limit_s = min(self._limit_s, loader.io_timeout_s or self._limit_s)
        try:
            relay.start(
                relayed_bytes,
                ways.addresses,
                patience_s=limit_s * _PATIENCE_BETWEEN_HOSTS,
                ended=self._ended,
            )
        except (OSError, RuntimeError) as error:  # out of descriptors, or of threads
            log.warning("read_once_per_job: this rank reads alone: %s", said(error))
            return False
        return True

    def _run(self, loader: Loader, alone: Loader, relay: Relay | None = None) -> LoadStats:
        """Read everything with `loader`; the loader `alone` reads what others did not lend."""
        # Moved out of `self`: the exchange refers to this object, and a cycle would keep the window
        # alive.
        stats, exchange, self._exchange = LoadStats(), self._exchange, None
        if exchange is None or self._met is None:
            if self._met is not None:
                self._met.part()
            stats.add(loader.run(self._alone, progress=self._count))
            return stats
        exchange.start()

        def count(size_bytes: int) -> None:
            exchange.check()  # if a target has failed, the rest need not be read
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
            log.debug("this rank reads %d pieces that other ranks did not pass on", len(left))
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
        """Read and lend the pieces that others also need; return the jobs that are still unread."""
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
            if relay is not None:  # from here on, this rank does not read in the common order
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
    """Return the address that another rank has posted.

    Raises:
        ValueError: The data is not an address.
    """
    try:
        address, port = json.loads(data)
        return str(address), int(port)
    except (TypeError, ValueError) as error:
        msg = "the address of another rank cannot be read"
        raise ValueError(msg) from error

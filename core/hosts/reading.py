"""Reads for one rank what it needs of a checkpoint, together with the other ranks of its host."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from penstock.core.concurrency.watchdog import Deadline, Watchdog
from penstock.core.errors import CoordinationError, FormatError
from penstock.core.foreign import noting_origin, said
from penstock.core.hosts.census import ranks_of_host
from penstock.core.hosts.division import OwnPlan
from penstock.core.hosts.meeting import Meeting
from penstock.core.pipeline.exchange import Exchange, Peer, Share, TakersStuckError
from penstock.core.pipeline.reader import LoadStats, place
from penstock.core.pipeline.staging import Staging
from penstock.core.ranks.templates import RoundOverError
from penstock.core.types import PAGE_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.concurrency.timing import Timing
    from penstock.core.hosts.division import Division
    from penstock.core.hosts.meeting import Met
    from penstock.core.pipeline.chain import CodecChain
    from penstock.core.pipeline.reader import Loader
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


class HostReading:
    """One restore of the ranks of a host, as this rank takes part in it.

    Each rank calls `share` once. A rank of which the others hear nothing reads alone, and they
    without it: what one of them does never depends on another that fails.
    """

    def __init__(
        self,
        group: RankGroup,
        number: int,
        *,
        ended: Callable[[], bool],
        moved: Callable[[], None],
        timing: Timing,
    ) -> None:
        """Prepare; nothing is sent.

        Args:
            group: The ranks.
            number: The number of the round.
            ended: Returns whether the round has ended on this rank before it has restored: another
                one has failed.
            moved: Tells the others that this rank gets on: it does while it waits for one of them
                to come, since they watch that one, and it waits no longer than they do.
            timing: Says how often `ended` is asked.
        """
        self._group = group
        self._number = number
        self._ended = ended
        self._timing = timing
        self._moved = moved

    def share(self, jobs: Sequence[FrameJob[CodecChain]]) -> SharedReading | None:
        """Agree with the other ranks of this host on who reads what.

        Args:
            jobs: What this rank needs, maybe nothing.

        Returns:
            The reading of what is needed here; None if this rank reads alone.

        Raises:
            RoundOverError: Another rank has failed.
        """
        deadline = Deadline(self._group.timeout_s, self._timing.clock)
        met: Met | None = None
        ranks: tuple[int, ...] = ()
        own: OwnPlan[CodecChain] | None = None
        try:
            ranks = ranks_of_host(self._group, deadline, self._look)
            if len(ranks) > 1:
                room = max(_WINDOWS_BYTES // len(ranks), _LEAST_WINDOW_BYTES)
                own = OwnPlan(jobs, most_bytes=room // _PIECES_PER_WINDOW)
                secret = self._group.uid(self._number)
                rank = self._group.place.rank
                meeting = Meeting(secret, ranks, rank, window_bytes=room + _PHASES_BYTES)
                met = meeting.hold(own.plan, deadline, self._look)
        except (CoordinationError, FormatError, OSError, ValueError) as error:
            log.debug("rank %d reads alone: %s", self._group.place.rank, said(error))
        if self._ended():
            if met is not None:
                met.part()
            msg = "another rank has failed"
            raise RoundOverError(msg)
        if met is None or own is None:
            return None
        me = ranks.index(self._group.place.rank)
        return SharedReading(
            own.divide(met.plans, me),
            met,
            me,
            patience_s=self._group.timeout_s * _PATIENCE,
            ended=self._ended,
            timing=self._timing,
        )

    def _look(self) -> bool:
        self._moved()
        return self._ended()


class SharedReading:
    """What one rank reads for itself and for others, and takes from others."""

    def __init__(
        self,
        division: Division[CodecChain],
        met: Met,
        me: int,
        *,
        patience_s: float,
        ended: Callable[[], bool],
        timing: Timing,
    ) -> None:
        """Prepare; see `HostReading.share`."""
        self._division = division
        self._ended = ended
        self._progress: Callable[[int], None] | None = None
        self._lock = threading.Lock()  # guards the callback: two threads count bytes
        own: list[Share] = []
        taken: list[tuple[int, Share]] = []
        for piece in division.pieces:
            share = Share(piece.number, piece.job, piece.span, piece.takers)
            if piece.reader == me:
                own.append(share)
            else:
                taken.append((piece.reader, share))
        self._own = own
        self._met = met
        self._exchange: Exchange | None = None
        if own or taken:
            peers = [
                Peer(number, socket, window, Watchdog(patience_s, timing.clock))
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
        """The bytes that others have read for this rank."""

    def run(self, loader: Loader, progress: Callable[[int], None] | None = None) -> LoadStats:
        """Read everything; as `Loader.run`.

        Raises:
            RoundOverError: Another rank has failed.
            BaseException: As `Loader.run`.
        """
        self._progress = progress
        # Not kept here: it holds this object, too, and the window would last as long as the cycle.
        stats, exchange, self._exchange = LoadStats(), self._exchange, None
        if exchange is None:
            self._met.part()
            stats.add(loader.run(self._division.alone, progress=progress))
            return stats
        exchange.start()
        try:
            jobs = [*self._lend(exchange, loader, stats), *self._division.alone]
            exchange.lent_all()
            stats.add(loader.run(jobs, progress=self._count))
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
            stats.add(loader.run(left, progress=self._count))
        return stats

    def _lend(
        self, exchange: Exchange, loader: Loader, stats: LoadStats
    ) -> Sequence[FrameJob[CodecChain]]:
        """Read what others need, too; return what could not be lent, which is still to be read."""
        if not self._own:
            return ()
        try:
            needs = (align_up(p.span.length, PAGE_BYTES) + PAGE_BYTES for p in self._own)
            self._met.allocate(sum(needs))
            jobs = [share.job for share in self._own]
            stats.add(loader.run(jobs, progress=self._count, exchange=exchange))
        except (OSError, TakersStuckError) as error:
            log.warning("this rank reads alone: %s", said(error))
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

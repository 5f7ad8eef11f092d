"""Lends verified bytes to other processes of the host through shared memory, and takes theirs.

Each process reads into a window: its own memory, which the others map read-only. Messages use
sockets: when a message arrives, its bytes are already in the window, and a socket closes when its
process dies. Three rules make this safe:

* bytes are announced only after they are verified;
* a taker answers when it has copied the bytes, and their place in the window is reused only after
  all takers have answered;
* a process waits only a limited time for an answer, and then no longer uses its own window. So a
  stopped peer that continues hours later still finds the bytes announced to it.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from penstock.core.concurrency.latch import Latch
from penstock.core.concurrency.watchdog import Watchdog, spawn
from penstock.core.errors import PenstockError, RestoreError
from penstock.core.foreign import said

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Mapping, Sequence

    from penstock.core.concurrency.timing import Timing
    from penstock.core.pipeline.codec_chain import CodecChain
    from penstock.core.pipeline.staging import Block, Staging
    from penstock.core.plan.reads import FrameJob
    from penstock.core.types import ByteRange

log = logging.getLogger("penstock")

# The most messages without an answer. These and their answers fit into a socket's buffer, so that
# no two processes wait for each other because an answer has no room.
_MOST_UNANSWERED = 16
_MOST_RECORDS = 256
_HEADER = struct.Struct("<BI")  # the kind of the message, and its number
_RECORD = struct.Struct("<qq")  # the piece, and its place in the window; -1: read it yourself
_LOAN, _ANSWER = 1, 2
_MESSAGE_BYTES = _HEADER.size + _MOST_RECORDS * _RECORD.size
_REFUSED = -1
_NO_ANSWER = (1 << 32) - 1  # the number of a message that needs none


class TakersStuckError(RestoreError):
    """Another process of the host does not take the bytes lent to it. Nothing more is lent."""


@dataclass(frozen=True, slots=True)
class Share:
    """A piece of a frame that this process reads or takes.

    Attributes:
        number: Its number, the same in all processes.
        job: The frame, and where its bytes go in this process.
        span: The bytes within the chunk.
        reader: The process that reads them.
        takers: The processes that the reader lends them to.
    """

    number: int
    job: FrameJob[CodecChain]
    span: ByteRange
    reader: int
    takers: tuple[int, ...] = ()


@dataclass(eq=False, slots=True)
class _Loan:
    """Bytes in the window, and the number of processes that have not taken them yet."""

    block: Block
    takers: int


_Entry: TypeAlias = "tuple[int, int, _Loan | None]"  # the piece, its place, and its loan


@dataclass(eq=False, slots=True)
class Peer:
    """Another process of the host.

    Attributes:
        number: Its number among the processes.
        socket: Keeps message boundaries (`SOCK_SEQPACKET`).
        window: Its memory, read-only.
        quiet: Expires when it sends no piece for too long.
        awaited: The pieces that it has to lend and has not lent yet, by number.
        unanswered: The loans to it that it has not answered, by the number of the message.
        sent: The number of messages that needed an answer so far.
        gone: Whether nothing more is lent to it or taken from it.
    """

    number: int
    socket: socket.socket
    window: mmap.mmap
    quiet: Watchdog
    awaited: dict[int, Share] = field(default_factory=dict)
    unanswered: dict[int, list[_Loan]] = field(default_factory=dict)
    sent: int = 0
    gone: bool = False


class Exchange:
    """Lends pieces to the other processes of the host, and takes theirs, in one restore.

    The reading thread calls `acquire`, `lend` and `refuse`. The exchange's own thread takes and
    places what others lend. If that thread fails, `acquire` and `check` raise its error, since
    reading the rest is pointless.
    """

    def __init__(
        self,
        window: Staging,
        peers: Sequence[Peer],
        *,
        own: Sequence[Share],
        taken: Sequence[Share],
        place: Callable[[Share, memoryview], None],
        timing: Timing,
    ) -> None:
        """Prepare the exchange; `start` starts its thread.

        Args:
            window: Allocates the memory that the others see, from one arena.
            peers: The other processes; the caller closes their sockets after `close`.
            own: The pieces that this process reads.
            taken: The pieces that others read.
            place: Puts the bytes of a piece into their place here.
            timing: The interval at which the thread polls, the time limit of `close`, and a clock.
        """
        self.window = window
        self.bytes_taken = 0
        self._own = {id(share.job): share for share in own}
        # `(taker, piece)`: this taker was not sent the piece, which is no longer in `_own`.
        self._unsent: list[tuple[int, int]] = []
        self._peers = {peer.number: peer for peer in peers}
        for share in taken:
            self._peers[share.reader].awaited[share.number] = share
        self._place = place
        self._poll_s = timing.poll_s
        self._interrupt_s = timing.interrupt_s
        self._clock = timing.clock
        self._limit_s = min((peer.quiet.limit_s for peer in peers), default=0.0)
        self._changed = threading.Condition()  # guards `unanswered`, `gone` and `_left`
        self._left: list[Share] = []
        # Only the taking thread may drop these. A dropped process may overwrite its window, which
        # must not happen while that thread copies from it.
        self._deaf: list[Peer] = []
        self._lends = bool(own)
        self._given_up = False
        self._error: BaseException | None = None
        self._over = Latch()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def start(self) -> None:
        """Start the taking thread."""
        spawn("exchange", self._run)

    # -- the reading thread ----------------------------------------------------------------------

    def acquire(self, length: int, phase: int) -> Block:
        """Wait for a free block of the window, and return it; see `Staging.acquire`.

        Raises:
            TakersStuckError: The takers free no block; the window is given up.
            PenstockError: As `check`.
        """
        with self._changed:
            quiet = Watchdog(self._limit_s, self._clock)
            while (block := self.window.acquire(length, phase)) is None:
                self._check_answers(quiet)
                self._changed.wait(min(self._poll_s, quiet.left_s()))
            return block

    def lend(self, lent: Sequence[tuple[FrameJob[CodecChain], Block]]) -> None:
        """Lend verified pieces, each in a window block that is released once all have taken it.

        Raises:
            TakersStuckError: A process does not take its pieces.
        """
        messages: dict[int, list[_Entry]] = defaultdict(list)
        for job, block in lent:
            share = self._own.pop(id(job))
            loan = _Loan(block, len(share.takers))
            at = block.address - block.arena.address
            for taker in share.takers:
                messages[taker].append((share.number, at, loan))
        self._send_all(messages)

    def refuse(self, job: FrameJob[CodecChain]) -> None:
        """Make the takers of a piece read it themselves, since it looks damaged here.

        Raises:
            TakersStuckError: As `lend`.
        """
        share = self._own.pop(id(job))
        self._send_all({taker: [(share.number, _REFUSED, None)] for taker in share.takers})

    def lend_no_more(self) -> list[FrameJob[CodecChain]]:
        """Make the takers read the rest themselves; return the jobs left for this process."""
        rest = [*self._own.values()]
        refused = [(taker, share.number) for share in rest for taker in share.takers]
        for taker, number in (*self._unsent, *refused):
            peer = self._peers[taker]
            try:
                record = _RECORD.pack(number, _REFUSED)
                peer.socket.send(_HEADER.pack(_LOAN, _NO_ANSWER) + record, socket.MSG_DONTWAIT)
            except OSError:  # its buffer is full because it hangs, or it is gone
                if peer not in self._deaf:
                    self._deaf.append(peer)
        self._wake()
        return [share.job for share in rest]

    def lent_all(self) -> None:
        """Note that nothing more will be lent."""
        self._lends = False
        self._wake()

    # -- the waiting thread ----------------------------------------------------------------------

    def wait(self, ended: Callable[[], bool]) -> list[FrameJob[CodecChain]]:
        """Wait until the other processes lend nothing more.

        Args:
            ended: Returns whether the ranks have given up this restore.

        Returns:
            The pieces that others did not lend because they died, hung, or refused.

        Raises:
            PenstockError: A piece could not be placed.
        """
        while not self._over.wait(self._poll_s):
            if ended():
                break
        self.close()
        self.check()
        return [share.job for share in self._left]

    def check(self) -> None:
        """Raise the error of the taking thread, if any. Any thread may call this.

        Raises:
            PenstockError: A piece could not be placed.
        """
        if isinstance(self._error, PenstockError):
            raise self._error
        if self._error is not None:
            msg = f"reading failed: {said(self._error)}"
            raise RestoreError(msg) from self._error

    def close(self) -> None:
        """Stop taking and lending; on return, no thread writes to targets.

        A target that hangs during a write is abandoned after `Timing.interrupt_s`.
        """
        if self._wake_fd < 0:
            return
        self._given_up = True
        self._wake()
        if not self._over.wait(self._interrupt_s):
            return
        wake_fd, self._wake_fd = self._wake_fd, -1
        os.close(wake_fd)

    # -- within ----------------------------------------------------------------------------------

    def _send_all(self, messages: Mapping[int, list[_Entry]]) -> None:
        """Send each taker its entries; note those not sent because a taker is stuck."""
        try:
            for taker, records in messages.items():
                while records:
                    self._send(self._peers[taker], records[:_MOST_RECORDS])
                    del records[:_MOST_RECORDS]
        except TakersStuckError:
            self._unsent += [(taker, entry[0]) for taker in messages for entry in messages[taker]]
            raise

    def _send(self, peer: Peer, records: Sequence[_Entry]) -> None:
        loans = [loan for _, _, loan in records if loan is not None]
        with self._changed:
            quiet = Watchdog(self._limit_s, self._clock)
            while len(peer.unanswered) >= _MOST_UNANSWERED and not peer.gone:
                self._check_answers(quiet)
                self._changed.wait(min(self._poll_s, quiet.left_s()))
            if peer.gone:
                self._release(loans)
                return
            number, peer.sent = peer.sent, peer.sent + 1
            peer.unanswered[number] = loans
        packed = b"".join(_RECORD.pack(piece, at) for piece, at, _ in records)
        try:
            peer.socket.send(_HEADER.pack(_LOAN, number) + packed)
        except TimeoutError as error:
            raise self._stuck() from error
        except OSError:  # it is gone: the taking thread notices that, too, and frees its loans
            self._wake()

    def _check_answers(self, quiet: Watchdog) -> None:
        self.check()
        if quiet.is_over() or self._given_up:
            raise self._stuck()

    def _stuck(self) -> TakersStuckError:
        msg = f"a rank of this host has not taken the bytes lent to it for {self._limit_s:g} s"
        return TakersStuckError(msg)

    def _release(self, loans: Sequence[_Loan]) -> None:
        """Note that one taker no longer needs these loans; the caller holds `_changed`."""
        for loan in loans:
            loan.takers -= 1
            if not loan.takers:
                self.window.release(loan.block)
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._error = error
        finally:
            for peer in self._peers.values():
                self._drop(peer, ended=False)
            self._over.open()

    def _serve(self) -> None:
        poller = select.poll()
        by_fd = {peer.socket.fileno(): peer for peer in self._peers.values()}
        for fd in (self._wake_fd, *by_fd):
            poller.register(fd, select.POLLIN)
        while not self._given_up:
            here = [peer for peer in self._peers.values() if not peer.gone]
            waits = [peer for peer in here if peer.awaited]
            if not waits and not (self._lends and here):
                return
            left_s = min((peer.quiet.left_s() for peer in waits), default=self._poll_s)
            for fd, _ in poller.poll(1000 * min(left_s, self._poll_s) + 1):
                peer = by_fd.get(fd)
                if peer is None:
                    with suppress(BlockingIOError):
                        os.eventfd_read(self._wake_fd)
                elif not peer.gone and not self._hear(peer):
                    poller.unregister(fd)
            still = [peer for peer in waits if peer.awaited and peer.quiet.is_over()]
            for peer in (*still, *self._deaf):
                if not peer.gone:
                    log.warning(
                        "a rank of this host hangs, so this rank reads that rank's share, too"
                    )
                    poller.unregister(peer.socket.fileno())
                    self._drop(peer, ended=False)

    def _hear(self, peer: Peer) -> bool:
        """Handle all messages from another process; return whether more may come."""
        while not self._given_up:
            try:
                data = peer.socket.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                continue  # it closed with answers unread; its earlier messages come first
            if not data:
                self._drop(peer, ended=True)
                return False
            what, number = _HEADER.unpack_from(data)
            if what == _ANSWER:
                with self._changed:
                    self._release(peer.unanswered.pop(number, ()))
                continue
            for piece, at in _RECORD.iter_unpack(data[_HEADER.size :]):
                if not self._take(peer, piece, at):
                    self._drop(peer, ended=False)
                    return False
            with suppress(OSError):  # a closed process needs no answer
                if number != _NO_ANSWER:
                    peer.socket.send(_HEADER.pack(_ANSWER, number))
            peer.quiet.moved()
        return True

    def _take(self, peer: Peer, piece: int, at: int) -> bool:
        """Place one piece; return whether the other process follows the protocol."""
        share = peer.awaited.pop(piece, None)
        if share is None or at + share.span.length > len(peer.window):
            if share is not None:
                self._left.append(share)
            return False
        if at < 0:
            self._left.append(share)
            return True
        with memoryview(peer.window) as window, window[at : at + share.span.length] as data:
            self._place(share, data)
        self.bytes_taken += share.span.length
        return True

    def _drop(self, peer: Peer, *, ended: bool) -> None:
        """Stop dealing with another process. Only the taking thread calls this.

        Its loans become free only if it has `ended`. A hanging process may continue later and read
        the window.
        """
        with self._changed:
            if peer.gone:
                return
            peer.gone = True
            self._left += peer.awaited.values()
            peer.awaited.clear()
            unanswered, peer.unanswered = peer.unanswered, {}
            for loans in unanswered.values() if ended else ():
                self._release(loans)
            self._changed.notify_all()
        with suppress(OSError):  # not closed: the reading thread may be sending
            peer.socket.shutdown(socket.SHUT_RDWR)

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

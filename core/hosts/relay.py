"""Hands stored bytes on to ranks of other hosts over the network, and takes theirs.

A rank asks for a piece once it has memory for it, and gets it once the rank that reads it has it.
So nothing is sent that has no place to go, no memory is needed beside that of the reads under way,
and no connection is blocked by bytes that nobody takes. What makes it safe:

* nothing that comes from another rank is trusted: the rank that takes it compares it with the
  checksums of the checkpoint;
* a rank that dies closes its connections, and one that is silent for too long is given up: a rank
  that waits for it reads for itself, and closes the connection, so that nothing can come later;
* bytes to hand on belong to a read that is under way, and that does not end before all have them,
  or are given up.
"""

from __future__ import annotations

import hmac
import logging
import os
import select
import struct
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from penstock.core.concurrency.latch import Latch
from penstock.core.concurrency.watchdog import Deadline, Watchdog, spawn
from penstock.core.foreign import said
from penstock.core.hosts.network import StrangerError, accepted_socket, connecting_socket

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Generator, Iterable, Mapping

    from penstock.core.concurrency.timing import Timing
    from penstock.core.hosts.network import Greeting

log = logging.getLogger("penstock")

# Yields how many bytes are needed next, or the memory that they go to, and gets them.
Steps: TypeAlias = "Generator[int | memoryview, memoryview, None]"

_ASK = struct.Struct("<QI")  # the number of a piece, and of the link in its chain
_ANSWER = struct.Struct("<QIq")  # the same, and how many bytes follow; -1: read it yourself
REFUSED = -1
# What one connection gets of the thread before the next one has its turn.
_TURN_BYTES = 4 << 20
_MOST_ASLEEP = 1 / 4  # of the patience: how long this process may stand still between two looks
_MOST_SILENT = 64  # connections of which nobody knows yet whose they are
_UNDISTURBED = 1 / 16  # of the patience: how long none of them is given up for a newer one


class RelayKey(NamedTuple):
    """Names stored bytes that are handed on: of a piece, the frame itself, or one of its bases.

    Attributes:
        piece: The number of the piece, the same on all ranks.
        link: Which frame of its chain; 0 is its own.
    """

    piece: int
    link: int


@dataclass(eq=False, slots=True)
class _Ask:
    """Bytes that are to come; `done` is told how many have, or `REFUSED`."""

    target: memoryview
    done: Callable[[int], None]


@dataclass(eq=False, slots=True)
class _Offer:
    """Bytes that are to be handed on; `done` is called once all have them that still take them."""

    data: memoryview
    left: set[int]
    done: Callable[[], None]


@dataclass(eq=False, slots=True)
class _Line:
    """A connection: what is to be sent, and the steps that take what comes.

    Attributes:
        socket: None of its calls waits.
        deadline: Until when the other end has to prove who it is.
        steps: Take what comes.
        target: The memory that is filled now.
        at: How far.
        out: What is to be sent, each with what to do when it is.
        owner: Whose connection it is; None while that is not known.
    """

    socket: socket.socket
    deadline: Deadline
    steps: Steps | None = None
    target: memoryview = field(default_factory=lambda: memoryview(b""))
    at: int = 0
    out: deque[tuple[memoryview, Callable[[], None] | None]] = field(default_factory=deque)
    owner: _Source | _Recipient | None = None

    def begin(self, steps: Steps) -> None:
        """Take what comes by `steps`."""
        self.steps, self.target = steps, _room(next(steps))

    def end(self) -> None:
        """Close the connection, and hold no memory of anybody any longer."""
        self.socket.close()
        self.out.clear()
        self.target = memoryview(b"")
        if self.steps is not None:
            self.steps.close()
            self.steps = None

    def say(self, data: bytes | memoryview, sent: Callable[[], None] | None = None) -> None:
        """Send `data` when there is room, then call `sent`."""
        self.out.append((memoryview(data), sent))

    def send(self) -> None:
        """Send as much as goes, up to one turn."""
        left = _TURN_BYTES
        while self.out and left > 0:
            data, sent = self.out[0]
            try:
                count = self.socket.send(data[:left])
            except BlockingIOError:
                return
            left -= count
            if count < data.nbytes:
                self.out[0] = data[count:], sent
                continue
            self.out.popleft()
            if sent is not None:
                sent()

    def receive(self) -> None:
        """Take as much as is there, up to one turn.

        Raises:
            EOFError: The other end has closed.
        """
        left = _TURN_BYTES
        while left > 0 and self.steps is not None:
            try:
                count = self.socket.recv_into(self.target[self.at :])
            except BlockingIOError:
                return
            if not count:
                raise EOFError
            left -= count
            self.at += count
            if self.at == self.target.nbytes:
                self.target, self.at = _room(self.steps.send(self.target)), 0


@dataclass(eq=False, slots=True)
class _Source:
    """A rank that reads for this one.

    Attributes:
        rank: Its number.
        quiet: Passes when it has handed nothing on for too long, or has not greeted at all.
        line: The connection to it; None before the start, and when it is given up.
        greeted: Whether both ends have proved who they are.
        asks: What is to come from it.
        gone: Whether it is given up.
    """

    rank: int
    quiet: Watchdog
    line: _Line | None = None
    greeted: bool = False
    asks: dict[RelayKey, _Ask] = field(default_factory=dict)
    gone: bool = False


@dataclass(eq=False, slots=True)
class _Recipient:
    """A rank that this one reads for.

    Attributes:
        rank: Its number.
        quiet: Passes when it has taken nothing for too long.
        line: Its connection; None while it has not connected, and when it is given up.
        asked: What it has asked for, and is not here yet.
        waited: How many offers wait for it.
        gone: Whether it is given up.
    """

    rank: int
    quiet: Watchdog
    line: _Line | None = None
    asked: set[RelayKey] = field(default_factory=set)
    waited: int = 0
    gone: bool = False


class Relay:
    """What one rank hands on to ranks of other hosts, and takes from them, in one restore.

    `ask`, `offer` and `refuse` are for any thread; a thread of its own sends and receives, and
    calls `done`.
    """

    def __init__(
        self,
        greeting: Greeting,
        listener: socket.socket | None,
        *,
        sources: Mapping[int, tuple[str, int]],
        recipients: Iterable[int],
        offers: Iterable[RelayKey],
        patience_s: float,
        ended: Callable[[], bool],
        timing: Timing,
    ) -> None:
        """Prepare; `start` begins.

        Args:
            greeting: Proves both ends of a connection to each other.
            listener: Where the recipients connect; belongs to this object. None: there are none.
            sources: The ranks that read for this one, with the addresses at which they listen.
            recipients: The ranks that this one reads for.
            offers: All that is going to be offered, or refused.
            patience_s: For how long a rank is waited for that does nothing.
            ended: Returns whether the ranks have given up what they do: nobody waits then.
            timing: Says how often the thread looks around (`poll_s`).
        """
        self._greeting = greeting
        self._listener = listener
        self._addresses = dict(sources)
        self._patience_s = patience_s
        self._clock = timing.clock
        self._sources = {rank: _Source(rank, self._watchdog()) for rank in sources}
        self._recipients = {rank: _Recipient(rank, self._watchdog()) for rank in recipients}
        self._to_come = set(offers)
        self._offers: dict[RelayKey, _Offer] = {}
        self._silent: list[_Line] = []
        self._ended = ended
        self._poll_s = timing.poll_s
        self._interrupt_s = timing.interrupt_s
        self._warned = False
        self.failure: BaseException | None = None
        """Why this rank has given up, if it failed."""
        self._given_up = False
        self._lock = threading.Lock()  # guards `_commands` and `_closed`
        self._commands: deque[Callable[[], None]] = deque()
        self._closed = False
        self._over = Latch()
        self._started = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def start(self) -> None:
        """Start the thread."""
        spawn("relay", self._run)
        self._started = True

    @property
    def is_over(self) -> bool:
        """Whether this rank has given up, or the ranks have: what does not come is not needed."""
        return self._given_up or self._ended()

    def ask(
        self, source: int, key: RelayKey, target: memoryview, done: Callable[[int], None]
    ) -> None:
        """Ask a rank for a piece that it reads.

        Args:
            source: The rank.
            key: Names the piece.
            target: Gets its bytes; written to until `done` is called, and never behind that.
            done: Called once, with the number of bytes that are there, or with `REFUSED`: this rank
                has to read them itself. On any thread.
        """
        self._order(lambda: self._ask(source, key, _Ask(target, done)), lambda: done(REFUSED))

    def offer(
        self, key: RelayKey, recipients: Iterable[int], data: memoryview, done: Callable[[], None]
    ) -> None:
        """Hand a piece on.

        Args:
            key: Names the piece.
            recipients: The ranks that need it.
            data: Its bytes; not to be changed until `done` is called.
            done: Called once all have it that are not given up; on any thread.
        """
        offer = _Offer(data, {*recipients}, done)
        self._order(lambda: self._offer(key, offer), done)

    def refuse(self, key: RelayKey) -> None:
        """Tell the recipients of a piece to read it themselves."""
        self._order(lambda: self._refuse(key), lambda: None)

    def give_up(self, failure: BaseException | None = None) -> None:
        """Let those that wait for this rank go on alone; returns at once.

        Args:
            failure: Why; None: this rank goes on without the relay.
        """
        self.failure = self.failure or failure
        self._given_up = True
        self._wake()

    def close(self) -> None:
        """Take and hand on nothing more; returns when no target is written to any longer."""
        self.give_up()
        if not self._started:
            self._started = True
            self._run()
        if self._over.wait(self._interrupt_s):
            with self._lock:
                wake_fd, self._wake_fd = self._wake_fd, -1
            if wake_fd >= 0:
                os.close(wake_fd)

    # -- orders of other threads -------------------------------------------------------------------

    def _order(self, command: Callable[[], None], too_late: Callable[[], None]) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._commands.append(command)
        if closed:
            too_late()
        else:
            self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _ask(self, source: int, key: RelayKey, ask: _Ask) -> None:
        peer = self._sources.get(source)
        if peer is None or peer.gone or key in peer.asks:
            ask.done(REFUSED)
            return
        if not peer.asks and peer.greeted:
            peer.quiet.moved()
        peer.asks[key] = ask
        if peer.greeted and peer.line is not None:
            peer.line.say(_ASK.pack(*key))

    def _offer(self, key: RelayKey, offer: _Offer) -> None:
        self._to_come.discard(key)
        offer.left = {rank for rank in offer.left if not self._recipients[rank].gone}
        self._offers[key] = offer
        for peer in [self._recipients[rank] for rank in offer.left]:
            if not peer.waited:
                peer.quiet.moved()
            peer.waited += 1
            if key in peer.asked:
                peer.asked.discard(key)
                self._hand(peer, key, offer)
        self._finish(key, offer)

    def _refuse(self, key: RelayKey) -> None:
        self._to_come.discard(key)
        for peer in self._recipients.values():
            if key in peer.asked and peer.line is not None:
                peer.asked.discard(key)
                peer.line.say(_ANSWER.pack(*key, REFUSED))

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if not self.is_over:
                # To all at once: those that cannot be reached cost one wait, not one after another.
                for source in self._sources.values():
                    self._connect(source)
            while not self.is_over:
                began_s = self._clock.monotonic_s()
                self._obey()
                self._turn()
                self._look(self._clock.monotonic_s() - began_s)
        except BaseException as error:  # noqa: BLE001 - this rank goes on alone
            log.warning("this rank reads without those of other hosts: %s", said(error))
        finally:
            self._end()

    def _end(self) -> None:
        """Close everything: what was asked has failed then, and what was offered is free."""
        with self._lock:
            self._closed = True
        try:
            for line in self._silent:
                line.end()
            if self._listener is not None:
                self._listener.close()
            for source in self._sources.values():
                self._lose_source(source, "")
            for recipient in self._recipients.values():
                self._lose_recipient(recipient, "")
            self._obey()
        finally:
            self._over.open()

    def _obey(self) -> None:
        while True:
            try:
                command = self._commands.popleft()
            except IndexError:
                return
            command()

    def _turn(self) -> None:
        """Wait a moment for what connections can do, and let them do it."""
        lines = [*self._silent, *(p.line for p in self._peers() if p.line is not None)]
        by_fd = {line.socket.fileno(): line for line in lines}
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        if self._listener is not None and self._may_accept():
            poller.register(self._listener.fileno(), select.POLLIN)
        for fd, line in by_fd.items():
            poller.register(fd, select.POLLIN | (select.POLLOUT if line.out else 0))
        for fd, events in poller.poll(1000 * min(self._poll_s, self._left_s()) + 1):
            if fd == self._wake_fd:
                with suppress(BlockingIOError):
                    os.eventfd_read(fd)
            elif fd in by_fd:
                self._serve(by_fd[fd], events)
            else:
                self._accept()

    def _serve(self, line: _Line, events: int) -> None:
        try:
            if events & select.POLLOUT:
                line.send()
            if events & ~select.POLLOUT:
                line.receive()
        except EOFError:
            self._lose(line, "it has closed its connection")
        except OSError as error:
            self._lose(line, said(error))

    def _lose(self, line: _Line, why: str) -> None:
        if isinstance(line.owner, _Source):
            self._lose_source(line.owner, why)
        elif isinstance(line.owner, _Recipient):
            self._lose_recipient(line.owner, why)
        elif line in self._silent:
            log.debug("a connection from elsewhere was closed: %s", why)
            self._silent.remove(line)
            line.end()

    def _left_s(self) -> float:
        """Return how long nothing runs out."""
        waits: list[Deadline] = [s.quiet for s in self._sources.values() if s.asks]
        waits += [r.quiet for r in self._recipients.values() if r.waited]
        waits += [line.deadline for line in self._silent]
        return min((wait.left_s() for wait in waits), default=self._poll_s)

    def _look(self, taken_s: float) -> None:
        """Give up who has been silent for too long, `taken_s` after the last look."""
        if taken_s > self._poll_s + self._patience_s * _MOST_ASLEEP:
            # This process stood still, and has not heard the others: it accuses nobody.
            for watchdog in (peer.quiet for peer in self._peers()):
                watchdog.moved()
        silent = f"it did nothing for {self._patience_s:g} s"
        closed = f"there was no connection within {self._patience_s:g} s: does a firewall stop it?"
        for source in self._sources.values():
            if source.asks and source.quiet.is_over():
                self._lose_source(source, silent if source.greeted else closed)
        for recipient in self._recipients.values():
            if recipient.waited and recipient.quiet.is_over():
                self._lose_recipient(recipient, closed if recipient.line is None else silent)
        for line in [line for line in self._silent if line.deadline.is_over()]:
            self._lose(line, silent)

    # -- who reads for this rank -------------------------------------------------------------------

    def _connect(self, peer: _Source) -> None:
        peer.quiet.moved()
        try:
            connection = connecting_socket(*self._addresses[peer.rank])
        except (OSError, ValueError) as error:
            self._lose_source(peer, said(error))
            return
        peer.line = _Line(connection, peer.quiet, owner=peer)
        peer.line.begin(self._take(peer, peer.line))

    def _take(self, peer: _Source, line: _Line) -> Steps:
        claim, expected = yield from self._greeting.claim(peer.rank)
        line.say(claim)
        if not hmac.compare_digest((yield len(expected)), expected):
            msg = "it does not know the secret of this job"
            raise StrangerError(msg)
        peer.greeted = True
        peer.quiet.moved()
        for key in peer.asks:
            line.say(_ASK.pack(*key))
        while True:
            piece, link, length = _ANSWER.unpack((yield _ANSWER.size))
            key = RelayKey(piece, link)
            ask = peer.asks.get(key)
            if ask is None or length not in {REFUSED, ask.target.nbytes}:
                msg = "it answers what was not asked"
                raise StrangerError(msg)
            if length > 0:
                yield ask.target
            del peer.asks[key]
            peer.quiet.moved()
            ask.done(length)

    def _lose_source(self, peer: _Source, why: str) -> None:
        if peer.line is not None:
            peer.line.end()
        peer.line, peer.gone = None, True
        asks, peer.asks = peer.asks, {}
        if why and (asks or not peer.greeted):
            self._warn(f"what rank {peer.rank} was to hand on is read here: {why}")
        for ask in asks.values():
            ask.done(REFUSED)

    # -- whom this rank reads for ------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_MOST_SILENT):
            if self._listener is None or not self._may_accept():
                return
            if not self._accept_one(self._listener):
                return

    def _may_accept(self) -> bool:
        """Return whether one more may connect.

        Who came has a while to say whose it is. Else many strangers at once would drive out a rank
        that gets no processor meanwhile.
        """
        least_s = self._patience_s * _UNDISTURBED
        return not self._is_full() or self._silent[0].deadline.taken_s() >= least_s

    def _is_full(self) -> bool:
        # The recipients connect all at once.
        return len(self._silent) >= _MOST_SILENT + len(self._recipients)

    def _accept_one(self, listener: socket.socket) -> bool:
        """Take a connection; return whether there was one."""
        try:
            found = accepted_socket(listener)
        except (BlockingIOError, ConnectionError):
            return False
        except OSError as error:  # no room for a socket: the listener would be ready for ever
            self._warn(f"ranks of other hosts cannot connect: {said(error)}")
            listener.close()
            self._listener = None
            return False
        if self._is_full():
            self._lose(self._silent[0], "there are too many")
        line = _Line(found, Deadline(self._patience_s, self._clock))
        self._silent.append(line)
        line.begin(self._give(line))
        return True

    def _give(self, line: _Line) -> Steps:
        challenge = self._greeting.challenge()
        line.say(challenge)
        rank, proof = yield from self._greeting.admit(challenge)
        peer = self._recipients.get(rank)
        if peer is None or peer.gone or peer.line is not None:
            msg = f"rank {rank} takes nothing here"
            raise StrangerError(msg)
        self._silent.remove(line)
        peer.line, line.owner = line, peer
        line.say(proof)
        while True:
            key = RelayKey(*_ASK.unpack((yield _ASK.size)))
            peer.quiet.moved()
            offer = self._offers.get(key)
            if offer is not None and rank in offer.left:
                self._hand(peer, key, offer)
            elif key in self._to_come:
                peer.asked.add(key)
            else:
                line.say(_ANSWER.pack(*key, REFUSED))

    def _hand(self, peer: _Recipient, key: RelayKey, offer: _Offer) -> None:
        def sent() -> None:
            peer.quiet.moved()
            if peer.rank in offer.left:
                offer.left.discard(peer.rank)
                peer.waited -= 1
                self._finish(key, offer)

        assert peer.line is not None
        peer.line.say(_ANSWER.pack(*key, offer.data.nbytes))
        peer.line.say(offer.data, sent)

    def _finish(self, key: RelayKey, offer: _Offer) -> None:
        if not offer.left and self._offers.pop(key, None) is not None:
            offer.done()

    def _lose_recipient(self, peer: _Recipient, why: str) -> None:
        if peer.line is not None:
            peer.line.end()
        peer.line, peer.gone = None, True
        if peer.waited and why:
            self._warn(f"rank {peer.rank} reads for itself what this one was to hand on: {why}")
        peer.waited = 0
        for key, offer in list(self._offers.items()):
            offer.left.discard(peer.rank)
            self._finish(key, offer)

    # -- both --------------------------------------------------------------------------------------

    def _peers(self) -> list[_Source | _Recipient]:
        return [*self._sources.values(), *self._recipients.values()]

    def _watchdog(self) -> Watchdog:
        return Watchdog(self._patience_s, self._clock)

    def _warn(self, message: str) -> None:
        """Warn once, since what comes of one cause may come many times."""
        log.log(
            logging.DEBUG if self._warned else logging.WARNING, "read_once_per_job: %s", message
        )
        self._warned = True


def _room(wanted: int | memoryview) -> memoryview:
    return memoryview(bytearray(wanted)) if isinstance(wanted, int) else wanted

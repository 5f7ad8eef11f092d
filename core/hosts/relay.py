"""Passes stored bytes on to ranks of other hosts, and receives theirs, in one restore.

Each rank serves the bytes that it reads for others (`blob_http`) while the batch that read them is
in flight. The batch ends after all recipients have received the bytes, so no bytes are kept beyond
their batch. Two rules make this safe:

* A rank does not trust bytes from another rank. It compares them with the checkpoint's checksums.
* No rank waits forever. A rank that dies loses its connections; if a rank is silent for too long,
  the others close its connection, so that no bytes can arrive later. Then they read alone.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict, deque
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from penstock.core.abc import DelegatingBackend, Tier
from penstock.core.concurrency.pool import Pool, fulfil
from penstock.core.concurrency.watchdog import Deadline, Watchdog, spawn
from penstock.core.errors import BlobNotFoundError, BlobTruncatedError, StorageError
from penstock.core.hosts.blob_http import BlobClient, BlobRange, BlobServer, Credentials
from penstock.core.ranks.templates import RoundOverError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.concurrency.timing import Timing
    from penstock.core.types import ReadRequest

log = logging.getLogger("penstock")

# Share of the patience. If this process stops for longer between two checks, it gives up no rank.
_MOST_ASLEEP = 1 / 4


class RelayedBytes(NamedTuple):
    """Stored bytes that cross the network.

    Attributes:
        place: The stored range.
        source: The rank that passes the bytes on to this rank; None: this rank reads them from the
            store.
        recipients: The ranks to which this rank passes the bytes on after it has read them.
    """

    place: BlobRange
    source: int | None
    recipients: tuple[int, ...]


@dataclass(eq=False, slots=True)
class _Source:
    """A rank that reads for this rank. The pool has one thread, so requests keep their order."""

    client: BlobClient
    quiet: Watchdog
    pool: Pool
    connected: Future[None] | None = None
    pending: int = 0


@dataclass(eq=False, slots=True)
class _Recipient:
    """A rank that this rank reads for; `waited` counts the offers that it has not taken yet."""

    quiet: Watchdog
    waited: int = 0


@dataclass(eq=False, slots=True)
class Offer:
    """Bytes that this rank has read for other ranks.

    Attributes:
        place: The stored range.
        data: The bytes.
        left: The ranks that have not received the bytes.
        sending: The ranks in `left` to which the bytes are being sent.
    """

    place: BlobRange
    data: memoryview
    left: set[int]
    sending: set[int] = field(default_factory=set)


class Relay:
    """Offers bytes that this rank has read to ranks of other hosts, and fetches theirs.

    Thread-safe. Listens from construction on. `start` sets which bytes this rank will offer and
    receive.
    """

    def __init__(self, secret: bytes, rank: int, address: str, timing: Timing) -> None:
        """Listen.

        Args:
            secret: Known only to the ranks of this job; new for each restore.
            rank: This rank.
            address: The address to listen on.
            timing: Sets how often a waiting thread checks (`poll_s`).

        Raises:
            OSError: This host lacks the address, or no socket is available.
        """
        self._secret = secret
        self._rank = rank
        self._timing = timing
        self._changed = threading.Condition()  # guards all below
        self._sources: dict[int, _Source] = {}
        self._recipients: dict[int, _Recipient] = {}
        self._to_come: Counter[BlobRange] = Counter()
        self._offers: dict[BlobRange, list[Offer]] = defaultdict(list)
        self._warned = self._closed = False
        self._patience_s = 0.0
        self._ended: Callable[[], bool] = lambda: False
        self.failure: BaseException | None = None
        """The error with which this rank's store failed; None if it has not failed."""
        self.is_over = False
        """Whether this rank has given up the relay, or all ranks have given up the restore."""
        self._server = BlobServer(
            address, credentials=self._credentials, lend=self._lend, left=self._drop, timing=timing
        )

    @property
    def at(self) -> tuple[str, int]:
        """The address and the port on which this rank listens."""
        host, port, *_ = self._server.server_address
        return str(host), int(port)

    def start(
        self,
        relayed: Iterable[RelayedBytes],
        addresses: Mapping[int, tuple[str, int]],
        *,
        patience_s: float,
        ended: Callable[[], bool],
    ) -> None:
        """Connect to all ranks that read for this rank; serve the bytes that this rank will offer.

        Connects to all ranks at the same time, so that unreachable ranks cost only one wait.

        Args:
            relayed: The bytes that this rank receives, and all bytes that it will offer or refuse.
            addresses: The addresses on which other ranks listen.
            patience_s: The longest wait for a rank that shows no activity.
            ended: Returns whether the ranks have given up the restore. If so, all waits end.

        Raises:
            OSError: This process cannot get a socket.
        """
        self._patience_s, self._ended = patience_s, ended
        for one in relayed:
            self._to_come[one.place] += bool(one.recipients)
            for rank in one.recipients:
                self._recipients.setdefault(rank, _Recipient(self._watchdog()))
            if one.source is not None and one.source not in self._sources:
                known = Credentials.of(self._secret, one.source, self._rank)
                address = addresses[one.source]
                client = BlobClient(address, self._rank, known, connect_s=patience_s)
                pool = Pool(1, "penstock-relay", timing=self._timing)
                self._sources[one.source] = _Source(client, self._watchdog(), pool)
        for source in self._sources.values():
            source.connected = source.pool.submit(source.client.connect)
        self._server.start(patience_s)

    def fetch(self, rank: int, request: ReadRequest) -> Future[None]:
        """Read bytes that another rank offers. The reads from one rank complete in order.

        Returns:
            A future. It fails with `BlobNotFoundError` if that rank refuses, and with a
            StorageError if the connection to it is lost.
        """
        source = self._sources[rank]
        if self.is_over:
            over: Future[None] = Future()
            over.set_exception(StorageError("this rank reads alone"))
            return over
        with self._changed:
            if not source.pending and source.connected is not None and source.connected.done():
                source.quiet.moved()
            source.pending += 1
        future = source.pool.submit(partial(source.client.read, [request]))
        future.add_done_callback(lambda _: self._came(source))
        return future

    def offer(self, place: BlobRange, recipients: Iterable[int], data: memoryview) -> Offer:
        """Offer `data` to recipients; it must stay unchanged until the offer's `left` is empty."""
        with self._changed:
            self._to_come[place] -= 1
            offer = Offer(place, data, {rank for rank in recipients if rank in self._recipients})
            for recipient in (self._recipients[rank] for rank in offer.left):
                if not recipient.waited:
                    recipient.quiet.moved()
                recipient.waited += 1
            self._offers[place].append(offer)
            self._changed.notify_all()
        return offer

    def refuse(self, place: BlobRange) -> None:
        """Make the recipients of these bytes read them from the store."""
        with self._changed:
            self._to_come[place] -= 1
            self._changed.notify_all()

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done()`; meanwhile give up ranks that show no activity for too long."""
        pause_s = min(self._timing.poll_s, self._patience_s * _MOST_ASLEEP)
        clock = self._timing.clock
        while True:
            began_s = clock.monotonic_s()
            with self._changed:
                if is_done():
                    return
                self._changed.wait(pause_s)
            self._look(clock.monotonic_s() - began_s)

    def warn(self, message: str) -> None:
        """Log only the first message as a warning, later ones at DEBUG: one cause, many effects."""
        level = logging.DEBUG if self._warned or self.is_over else logging.WARNING
        log.log(level, "read_once_per_job: %s", message)
        self._warned = True

    def give_up(self, failure: BaseException | None = None) -> None:
        """Make the ranks that wait for this rank continue alone. Returns at once.

        Args:
            failure: The error of this rank's store; None if this rank continues without the relay.
        """
        self.failure = self.failure or failure
        self.is_over = True
        self._server.close()
        for source in self._sources.values():
            source.client.close("this rank reads alone")
        for rank in [*self._recipients]:
            self._drop(rank)

    def close(self) -> None:
        """Stop receiving and passing on bytes; return once no thread writes to a target any more.

        Threads that hang are abandoned after `Timing.interrupt_s`.
        """
        self.give_up()
        if self._closed:
            return
        self._closed = True
        deadline = Deadline(self._timing.interrupt_s)
        for source in self._sources.values():
            source.pool.submit(source.client.dispose)
            source.pool.shutdown(wait=False)
        for source in self._sources.values():
            source.pool.join(deadline.left_s())
        self._server.join(deadline)

    # -- ranks that this rank reads for ------------------------------------------------------------

    def _credentials(self, rank: int) -> Credentials | None:
        known = rank in self._recipients
        return Credentials.of(self._secret, self._rank, rank) if known else None

    @contextmanager
    def _lend(self, rank: int, place: BlobRange) -> Iterator[memoryview | None]:
        with self._changed:
            self._move(rank)
            while (offer := self._offer_to(rank, place)) is None and self._to_come[place] > 0:
                if rank not in self._recipients:
                    break
                self._changed.wait(self._timing.poll_s)
            if offer is not None:
                offer.sending.add(rank)
        try:
            yield None if offer is None else offer.data
        finally:
            if offer is not None:
                with self._changed:
                    self._move(rank)
                    self._take(rank, offer)

    def _offer_to(self, rank: int, place: BlobRange) -> Offer | None:
        known = self._offers.get(place, ()) if rank in self._recipients else ()
        return next((o for o in known if rank in o.left and rank not in o.sending), None)

    def _take(self, rank: int, offer: Offer) -> None:
        """Record that a rank no longer needs an offer."""
        offer.left.discard(rank)
        if rank in self._recipients:
            self._recipients[rank].waited -= 1
        if not offer.left:
            self._offers[offer.place].remove(offer)
        self._changed.notify_all()

    def _move(self, rank: int) -> None:
        if rank in self._recipients:
            self._recipients[rank].quiet.moved()

    def _drop(self, rank: int, why: str = "it has closed its connection") -> None:
        """Stop offering bytes to a rank. An offer being sent is released when its sending fails."""
        with self._changed:
            recipient = self._recipients.pop(rank, None)
            for offer in [offer for offers in self._offers.values() for offer in offers]:
                if rank in offer.left and rank not in offer.sending:
                    self._take(rank, offer)
            self._changed.notify_all()
        self._server.disconnect(rank)
        if recipient is not None and recipient.waited:
            self.warn(f"could not pass bytes on to rank {rank}, which reads them itself: {why}")

    # -- both --------------------------------------------------------------------------------------

    def _came(self, source: _Source) -> None:
        with self._changed:
            source.pending -= 1
            source.quiet.moved()
            self._changed.notify_all()

    def _look(self, taken_s: float) -> None:
        """Give up ranks that were silent too long; `taken_s` is the time since the last check."""
        if self._ended():
            self.give_up()
        late = f"it was silent for {self._patience_s:g} s: check for a firewall between the hosts"
        with self._changed:
            if taken_s > self._timing.poll_s + self._patience_s * _MOST_ASLEEP:
                # This process was stopped and could not hear the others, so it gives up no rank.
                quiets = [source.quiet for source in self._sources.values()]
                quiets += [recipient.quiet for recipient in self._recipients.values()]
                for quiet in quiets:
                    quiet.moved()
            sources = [s for s in self._sources.values() if s.pending and s.quiet.is_over()]
            ranks = [n for n, r in self._recipients.items() if r.waited and r.quiet.is_over()]
        for source in sources:
            source.client.close(late)
        for rank in ranks:
            self._drop(rank, late)

    def _watchdog(self) -> Watchdog:
        return Watchdog(self._patience_s, self._timing.clock)


class RelayedStore(DelegatingBackend):
    """Reads like `inner`, but exchanges bytes with other ranks instead of reading them twice.

    Only `submit_read` exchanges bytes; `read` always reads from the store. If another rank does not
    pass its bytes on, they come from the store too. The first of `tiers` is the store itself: a
    reader that finds received bytes damaged reads them there.
    """

    name: ClassVar[str] = "relayed"

    def __init__(self, inner: Backend, relay: Relay, relayed: Iterable[RelayedBytes]) -> None:
        """Wrap `inner`; closing the wrapper closes `inner`.

        Args:
            inner: The store to read from.
            relay: The connections to the other ranks.
            relayed: The bytes that cross the network, in reading order. If several frames need the
                same bytes for decoding, the bytes are listed once per frame.
        """
        super().__init__(inner)
        self._relay = relay
        self._relayed: dict[BlobRange, deque[RelayedBytes]] = defaultdict(deque)
        for one in relayed:
            self._relayed[one.place].append(one)
        self._lock = threading.Lock()  # guards `_received` and `bytes_received`
        # The source of each read, with repetitions: several chunks may need the same bytes.
        self._received: dict[BlobRange, list[int]] = defaultdict(list)
        self.bytes_received = 0
        """The number of bytes that came from other ranks instead of the store."""

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """See `Backend.submit_read`. The future ends once all recipients have their bytes, too."""
        fetched: list[tuple[ReadRequest, int, Future[None]]] = []
        stored: list[ReadRequest] = []
        offered: list[tuple[ReadRequest, RelayedBytes]] = []
        for request in requests:
            waiting = self._relayed.get(_place(request))
            one = waiting.popleft() if waiting else None
            if one is not None and one.source is not None:
                fetched.append((request, one.source, self._relay.fetch(one.source, request)))
                continue
            stored.append(request)
            if one is not None:
                offered.append((request, one))
        if not fetched and not offered:
            return self.inner.submit_read(requests)
        future: Future[None] = Future()
        batch = partial(self._read_together, stored, fetched, offered)
        spawn("relay", partial(fulfil, future, batch))
        return future

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The store itself, to replace damaged bytes of other ranks; then the store's own tiers."""
        return Tier("", _StoreAgain(self)), *super().tiers

    def forget(self, request: ReadRequest) -> int | None:
        """Count bytes from another rank as read from the store instead; return that rank.

        Returns None, and counts nothing, if the bytes came from the store.
        """
        with self._lock:
            ranks = self._received.get(_place(request))
            if not ranks:
                return None
            self.bytes_received -= request.target.nbytes
            return ranks.pop()

    def _read_together(
        self,
        stored: Sequence[ReadRequest],
        fetched: Sequence[tuple[ReadRequest, int, Future[None]]],
        offered: Sequence[tuple[ReadRequest, RelayedBytes]],
    ) -> None:
        """Read one batch; return when all its bytes are here and passed on."""
        error = self._read_stored(stored)
        offers = []
        for request, one in offered:
            # Not verified first: the recipients verify in any case.
            if error is None:
                offers.append(self._relay.offer(one.place, one.recipients, request.target))
            else:
                self._relay.refuse(one.place)
        self._relay.wait(lambda: all(future.done() for _, _, future in fetched))
        missing = [
            request for request, rank, future in fetched if not self._came(request, rank, future)
        ]
        if missing and self._relay.is_over:
            # The caller may have left already, so no target may be written to any more.
            over = RoundOverError("the ranks have given up this restore")
            error = error or self._relay.failure or over
        elif missing:
            error = error or self._read_stored(missing)
        self._relay.wait(lambda: not any(offer.left for offer in offers))
        try:
            if error is not None:
                raise error
        finally:
            del error  # a cycle of error, traceback and this frame would keep targets alive

    def _read_stored(self, requests: Sequence[ReadRequest]) -> BaseException | None:
        if not requests:
            return None
        try:
            self.inner.submit_read(requests).result()
        except (BlobNotFoundError, BlobTruncatedError) as error:
            return error
        except BaseException as error:  # noqa: BLE001 - the future raises it
            self._relay.give_up(error)  # this rank and the others must not wait for each other
            return error
        return None

    def _came(self, request: ReadRequest, rank: int, future: Future[None]) -> bool:
        error = future.exception()
        if error is not None:
            if not isinstance(error, BlobNotFoundError):
                self._relay.warn(
                    f"rank {rank} did not pass on its bytes, so this rank reads them from the "
                    f"store: {error}"
                )
            return False
        with self._lock:
            self._received[_place(request)].append(rank)
            self.bytes_received += request.target.nbytes
        return True


class _StoreAgain(DelegatingBackend):
    """The store as a tier from which a reader replaces damaged bytes of another rank."""

    name: ClassVar[str] = "relayed"

    def __init__(self, relayed: RelayedStore) -> None:
        super().__init__(relayed.inner)
        self._relayed = relayed

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """Read from the store the bytes that another rank has passed on.

        Raises:
            StorageError: The bytes came from the store in the first place.
        """
        for request in requests:
            rank = self._relayed.forget(request)
            if rank is None:
                msg = f"{request.name} came from the store, not from another rank"
                raise StorageError(msg)
            log.warning(
                "%d bytes at %s:%d from rank %d are damaged, so this rank reads them from the "
                "store. That rank's memory or network, or the store, may be at fault",
                request.target.nbytes,
                request.name,
                request.offset,
                rank,
            )
        self.inner.read(requests)


def _place(request: ReadRequest) -> BlobRange:
    return BlobRange(request.name, request.offset, request.target.nbytes)

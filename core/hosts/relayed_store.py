"""A store some of whose bytes come from ranks of other hosts, or go to them when they are read."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from penstock.core.abc import DelegatingBackend, Tier
from penstock.core.errors import BlobNotFoundError, BlobTruncatedError, StorageError
from penstock.core.hosts.relay import REFUSED
from penstock.core.ranks.templates import RoundOverError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.core.abc import Backend
    from penstock.core.hosts.relay import Relay, RelayKey
    from penstock.core.types import ReadRequest

log = logging.getLogger("penstock")


class Place(NamedTuple):
    """Where stored bytes are: what is read there is the same on all ranks."""

    blob: str
    offset: int
    length: int


class RelayedBytes(NamedTuple):
    """Stored bytes that cross the network.

    Attributes:
        key: What the ranks call them.
        place: Where they are stored.
        source: The rank that hands them on to this one; None: this one reads them.
        recipients: The ranks to which this one then hands them on.
    """

    key: RelayKey
    place: Place
    source: int | None
    recipients: tuple[int, ...]


class RelayedStore(DelegatingBackend):
    """Reads as `inner`, but takes from other ranks what they read, and hands on what it reads.

    Only `submit_read` does so. `read` reads from the store: it is called where something is wrong
    with what came. What another rank does not hand on is read from the store, too. What it hands on
    is there a second time, as the first of `tiers`: a reader that finds it damaged looks there.
    """

    name: ClassVar[str] = "relayed"

    def __init__(self, inner: Backend, relay: Relay, relayed: Iterable[RelayedBytes]) -> None:
        """Wrap `inner`; closing the wrapper closes `inner`.

        Args:
            inner: The store.
            relay: The way to the other ranks.
            relayed: What crosses the network, in the order in which it will be read. Bytes that
                several frames are decoded with stand there several times.
        """
        super().__init__(inner)
        self._relay = relay
        self._relayed: dict[Place, deque[RelayedBytes]] = defaultdict(deque)
        for one in relayed:
            self._relayed[one.place].append(one)
        self._lock = threading.Lock()  # guards `_received` and `bytes_received`
        # Once for each time: several chunks may be decoded with the same bytes.
        self._received: dict[Place, list[int]] = defaultdict(list)
        self.bytes_received = 0
        """The bytes that came from other ranks, and not from the store."""

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """Read as the contract says; done when those that need them have the bytes, too."""
        asked: list[tuple[ReadRequest, RelayedBytes]] = []
        offered: list[tuple[ReadRequest, RelayedBytes]] = []
        stored: list[ReadRequest] = []
        for request in requests:
            waiting = self._relayed.get(_place(request))
            one = waiting.popleft() if waiting else None
            if one is not None and one.source is not None:
                asked.append((request, one))
                continue
            stored.append(request)
            if one is not None:
                offered.append((request, one))
        if not asked and not offered:
            return self.inner.submit_read(requests)
        return _RelayedBatch(self.inner, self._relay, self._note).begin(stored, asked, offered)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The store again, for what came from other ranks; then the places that it consists of."""
        return Tier("", _StoreAgain(self)), *super().tiers

    def forget(self, request: ReadRequest) -> int | None:
        """Note that bytes are read from the store; return the rank that they had come from."""
        with self._lock:
            ranks = self._received.get(_place(request))
            if not ranks:
                return None
            self.bytes_received -= request.target.nbytes
            return ranks.pop()

    def _note(self, request: ReadRequest, rank: int) -> None:
        with self._lock:
            self._received[_place(request)].append(rank)
            self.bytes_received += request.target.nbytes


class _StoreAgain(DelegatingBackend):
    """The store itself, for bytes that another rank has handed on, and that are damaged."""

    name: ClassVar[str] = "relayed"

    def __init__(self, relayed: RelayedStore) -> None:
        super().__init__(relayed.inner)
        self._relayed = relayed

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """Read what another rank has handed on.

        Raises:
            StorageError: It came from the store before.
        """
        for request in requests:
            rank = self._relayed.forget(request)
            if rank is None:
                msg = f"{request.name} was read from the store itself"
                raise StorageError(msg)
            log.warning(
                "%d bytes at %s:%d are damaged as rank %d handed them on: they are read from the "
                "store. Its memory, its network or the store may be at fault",
                request.target.nbytes,
                request.name,
                request.offset,
                rank,
            )
        self.inner.read(requests)


class _RelayedBatch:
    """One batch of reads: done when all is here, and handed on.

    Nothing waits in it: each part that ends begins the next one.
    """

    def __init__(
        self, inner: Backend, relay: Relay, received: Callable[[ReadRequest, int], None]
    ) -> None:
        self._inner = inner
        self._relay = relay
        self._received = received
        self._lock = threading.Lock()  # guards `_parts`, `_asked`, `_missing` and `_error`
        self._parts = 0
        self._asked = 0
        self._missing: list[ReadRequest] = []
        self._error: BaseException | None = None
        self._future: Future[None] = Future()

    def begin(
        self,
        stored: Sequence[ReadRequest],
        asked: Sequence[tuple[ReadRequest, RelayedBytes]],
        offered: Sequence[tuple[ReadRequest, RelayedBytes]],
    ) -> Future[None]:
        """Begin all reads."""
        self._parts = 1 + len(asked) + len(offered)
        self._asked = len(asked)
        self._future.set_running_or_notify_cancel()
        for request, one in asked:
            assert one.source is not None
            done = partial(self._came, request, one.source)
            self._relay.ask(one.source, one.key, request.target, done)
        self._read(stored, partial(self._hand_on, offered))
        return self._future

    def _read(
        self, requests: Sequence[ReadRequest], then: Callable[[BaseException | None], None]
    ) -> None:
        """Read from the store; `then` is told how that ended."""
        if not requests:
            then(None)
            return
        try:
            future = self._inner.submit_read(requests)
        except BaseException as error:  # noqa: BLE001 - the future raises it
            then(error)
            return
        future.add_done_callback(lambda ended: then(ended.exception()))

    def _hand_on(
        self,
        offered: Sequence[tuple[ReadRequest, RelayedBytes]],
        error: BaseException | None,
    ) -> None:
        # Not verified before: the recipients do that, whatever was found here.
        for request, one in offered:
            if error is None:
                self._relay.offer(one.key, one.recipients, request.target, self._end)
            else:
                self._relay.refuse(one.key)
                self._end()
        self._end(error)

    def _came(self, request: ReadRequest, rank: int, came: int) -> None:
        if came != REFUSED:
            self._received(request, rank)
        with self._lock:
            self._asked -= 1
            if came == REFUSED:
                self._missing.append(request)
            last = not self._asked
        if last and self._missing and self._relay.is_over:
            # The caller may have left already: no target is to be written to any more.
            over = RoundOverError("the ranks have given up this restore")
            self._end(self._relay.failure or over)
        elif last:
            self._read(self._missing, self._end)
        else:
            self._end()

    def _end(self, error: BaseException | None = None) -> None:
        """Note that one part has ended; the last one ends the batch."""
        if error is not None and not isinstance(error, BlobNotFoundError | BlobTruncatedError):
            self._relay.give_up(error)  # nobody is to wait for this rank, nor it for others
        with self._lock:
            self._parts -= 1
            self._error = self._error or error
            over, error = not self._parts, self._error
        if over and error is None:
            self._future.set_result(None)
        elif over:
            self._future.set_exception(error)


def _place(request: ReadRequest) -> Place:
    return Place(request.name, request.offset, request.target.nbytes)

"""A store some of whose bytes come from ranks of other hosts, or go to them when they are read."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from penstock.core.abc import DelegatingBackend, Tier
from penstock.core.concurrency.pool import fulfil
from penstock.core.concurrency.watchdog import spawn
from penstock.core.errors import BlobNotFoundError, BlobTruncatedError, StorageError
from penstock.core.hosts.blob_http import BlobRange
from penstock.core.ranks.templates import RoundOverError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.core.abc import Backend
    from penstock.core.hosts.relay import Relay, RelayedBytes
    from penstock.core.types import ReadRequest

log = logging.getLogger("penstock")


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
                several frames are decoded with are listed several times.
        """
        super().__init__(inner)
        self._relay = relay
        self._relayed: dict[BlobRange, deque[RelayedBytes]] = defaultdict(deque)
        for one in relayed:
            self._relayed[one.place].append(one)
        self._lock = threading.Lock()  # guards `_received` and `bytes_received`
        # Once for each time: several chunks may be decoded with the same bytes.
        self._received: dict[BlobRange, list[int]] = defaultdict(list)
        self.bytes_received = 0
        """The bytes that came from other ranks, and not from the store."""

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """Read as the contract says; done when those that need them have the bytes, too."""
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

    def _read_together(
        self,
        stored: Sequence[ReadRequest],
        fetched: Sequence[tuple[ReadRequest, int, Future[None]]],
        offered: Sequence[tuple[ReadRequest, RelayedBytes]],
    ) -> None:
        """Read one batch, and return when all is here, and handed on."""
        error = self._read_stored(stored)
        offers = []
        for request, one in offered:
            # Not verified before: the recipients do that, whatever was found here.
            if error is None:
                offers.append(self._relay.offer(one.place, one.recipients, request.target))
            else:
                self._relay.refuse(one.place)
        self._relay.wait(lambda: all(future.done() for _, _, future in fetched))
        missing = [
            request for request, rank, future in fetched if not self._came(request, rank, future)
        ]
        if missing and self._relay.is_over:
            # The caller may have left already: no target is to be written to any more.
            over = RoundOverError("the ranks have given up this restore")
            error = error or self._relay.failure or over
        elif missing:
            error = error or self._read_stored(missing)
        self._relay.wait(lambda: not any(offer.left for offer in offers))
        try:
            if error is not None:
                raise error
        finally:
            del error  # else a cycle of the error, its traceback and this frame keeps targets alive

    def _read_stored(self, requests: Sequence[ReadRequest]) -> BaseException | None:
        if not requests:
            return None
        try:
            self.inner.submit_read(requests).result()
        except (BlobNotFoundError, BlobTruncatedError) as error:
            return error
        except BaseException as error:  # noqa: BLE001 - the future raises it
            self._relay.give_up(error)  # nobody is to wait for this rank, nor it for others
            return error
        return None

    def _came(self, request: ReadRequest, rank: int, future: Future[None]) -> bool:
        error = future.exception()
        if error is not None:
            if not isinstance(error, BlobNotFoundError):
                self._relay.warn(f"what rank {rank} was to hand on is read here: {error}")
            return False
        with self._lock:
            self._received[_place(request)].append(rank)
            self.bytes_received += request.target.nbytes
        return True


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


def _place(request: ReadRequest) -> BlobRange:
    return BlobRange(request.name, request.offset, request.target.nbytes)

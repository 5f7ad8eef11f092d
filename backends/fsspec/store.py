"""What the backend needs of a kind of store; all that depends on which one it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING

from penstock.backends.fsspec.errors import place
from penstock.backends.fsspec.ranges import plan_spans
from penstock.backends.fsspec.waiting import settle
from penstock.core.abc import current_timing
from penstock.core.concurrency.pool import Pool
from penstock.core.errors import BlobExistsError, BlobNotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.fsspec.config import FsspecConfig
    from penstock.backends.fsspec.ranges import Span
    from penstock.backends.fsspec.writer import StoreWriter
    from penstock.core.types import BlobInfo, Capabilities, ReadRequest

_FEEDS = 2  # one batch moves while the next is handed over


class Store(ABC):
    """One root of one process; names are checked by the backend. Thread-safe."""

    def __init__(self, config: FsspecConfig) -> None:
        self.config = config
        self.url = config.shown_url
        stuck_s = current_timing().transfer_stuck_s
        self.transfers = Pool(config.parallel, "penstock-fsspec-transfer", stuck_s=stuck_s)
        self.feeds = Pool(_FEEDS, "penstock-fsspec-feed", stuck_s=stuck_s)

    @cached_property
    def capabilities(self) -> Capabilities:
        """As the contract says; found out once."""
        return self.find_capabilities()

    @abstractmethod
    def find_capabilities(self) -> Capabilities:
        """What the store can do."""

    @abstractmethod
    def writer(self, name: str, *, size_hint: int | None) -> StoreWriter:
        """Begin a blob; that the name is free is known."""

    @abstractmethod
    def fill(self, span: Span) -> None:
        """Read one span into its targets."""

    @abstractmethod
    def read_record(self, name: str, *, limit_bytes: int) -> bytes | int:
        """All of a record, or its size if that is above `limit_bytes`."""

    @abstractmethod
    def publish(self, name: str, data: bytes, *, exclusive: bool) -> None:
        """As the contract says."""

    @abstractmethod
    def list(self, prefix: str) -> Sequence[BlobInfo]:
        """As the contract says, in any order, foreign names included."""

    @abstractmethod
    def stat(self, name: str) -> BlobInfo:
        """As the contract says."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """As the contract says."""

    @abstractmethod
    def sweep(self, before_s: float) -> None:
        """As the contract says."""

    def refuse_taken(self, what: str, name: str) -> None:
        """Look whether a name is free.

        Raises:
            BlobExistsError: It is not.
        """
        with suppress(BlobNotFoundError):
            self.stat(name)
            msg = f"{place(what, name, self.url)}: the name is taken"
            raise BlobExistsError(msg)

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """As the contract says, near ranges merged and several at a time."""
        for name in {r.name for r in requests if not r.target.nbytes}:
            self.stat(name)
        spans = plan_spans(
            requests,
            piece_bytes=self.config.part_bytes,
            gap_bytes=self.config.merge_gap_bytes,
        )
        if len(spans) == 1:
            self.fill(spans[0])
        elif spans:
            settle([self.transfers.submit(partial(self.fill, span)) for span in spans])

    def close(self) -> None:
        """Wait for what is in flight and not stuck, then release everything."""
        self.feeds.shutdown(wait=True)
        self.transfers.shutdown(wait=True)

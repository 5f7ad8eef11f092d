"""The base of the two kinds of store: S3, and any file system of fsspec."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING

from penstock.backends.fsspec.errors import place
from penstock.backends.fsspec.ranges import plan_spans
from penstock.backends.fsspec.waiting import settle
from penstock.core.abc import current_timing
from penstock.core.concurrency.pool import Pool
from penstock.core.errors import BlobExistsError, BlobNotFoundError, StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.fsspec.config import FsspecConfig
    from penstock.backends.fsspec.ranges import Span
    from penstock.backends.fsspec.writer import StoreWriter
    from penstock.core.types import BlobInfo, Capabilities, ReadRequest

_FEEDS = 2  # one batch moves while the next is handed over


class Store(ABC):
    """The root of one process, behind `FsspecBackend`, which checks names. Thread-safe.

    Methods without a docstring do what those of `Backend` with the same name promise.
    """

    def __init__(self, config: FsspecConfig) -> None:
        self.config = config
        self.url = config.shown_url
        stuck_s = current_timing().transfer_stuck_s
        self.transfers = Pool(config.parallel, "penstock-fsspec-transfer", stuck_s=stuck_s)
        self.feeds = Pool(_FEEDS, "penstock-fsspec-feed", stuck_s=stuck_s)

    @cached_property
    def capabilities(self) -> Capabilities:
        """The capabilities, found at the first use."""
        return self.find_capabilities()

    @abstractmethod
    def find_capabilities(self) -> Capabilities:
        """Return the capabilities; may probe the store."""

    @abstractmethod
    def writer(self, name: str, *, size_hint: int | None) -> StoreWriter:
        """Return a writer for a new blob, before it is known whether the name is free."""

    @abstractmethod
    def fill(self, span: Span) -> None:
        """Read one span into its targets."""

    @abstractmethod
    def read_record(self, name: str, *, limit_bytes: int) -> bytes | int:
        """Return all of a record, or its size if that is above `limit_bytes`."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Store a record as a whole; replaces one of that name."""

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> None:
        """Store a record by one conditional put, so that the store decides between publishers.

        Raises:
            BlobExistsError: The store refused, and nothing of ours can have been stored.
            StorageError: The put failed, or its outcome is unknown.
        """

    @abstractmethod
    def list(self, prefix: str) -> Sequence[BlobInfo]:
        """Return what has the prefix, in any order, with names that are not ours."""

    @abstractmethod
    def stat(self, name: str) -> BlobInfo: ...

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None: ...

    @abstractmethod
    def sweep(self, before_s: float) -> None: ...

    def publish(self, name: str, data: bytes, *, exclusive: bool) -> None:
        if exclusive and self.capabilities.exclusive_publish:
            self.put_if_absent(name, data)
            return
        if exclusive:
            # Two publishers may both find the name free; so `exclusive_publish` is not declared.
            self.refuse_taken("publish", name)
        self.put(name, data)

    def refuse_taken(self, what: str, name: str) -> None:
        """Check that a name is free.

        Raises:
            BlobExistsError: The name is taken.
        """
        with suppress(BlobNotFoundError):
            self.stat(name)
            msg = f"{place(what, name, self.url)}: the name is taken"
            raise BlobExistsError(msg)

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Read all requests, near ranges merged, several at a time."""
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

    def probe_conditional_puts(self) -> tuple[bool, tuple[str, ...]]:
        """Put a record of its own twice, to see whether the store refuses the second put.

        Some stores ignore a condition without an error, and then both of two savers of one step
        would win.

        Returns:
            Whether the store decides between publishers, and notes on why it does not.
        """
        probe = f"clock/{secrets.token_hex(8)}"  # a folder that `prune` cleans up after a crash
        try:
            self.put(probe, b"1")
        except StorageError as error:
            return False, (f"conditional puts could not be tried out: {error}",)
        try:
            self.put_if_absent(probe, b"2")
        except BlobExistsError:
            return True, ()
        except StorageError as error:
            return False, (f"conditional puts do not work: {error}",)
        finally:
            with suppress(StorageError):
                self.delete([probe])
        return False, ("the store ignores the condition of a put, so one saver per root",)

    def close(self) -> None:
        """Wait for what is in flight and not stuck, then release all threads and connections."""
        self.feeds.shutdown(wait=True)
        self.transfers.shutdown(wait=True)

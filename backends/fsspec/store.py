"""The base class of the stores for S3 and for fsspec's file systems, with retries and ranges.

Retries are limited in number and in time, with exponential backoff and full jitter. Reads of
nearby ranges are merged into one request, and large reads are split.
"""

from __future__ import annotations

import random
import secrets
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from penstock.backends.fsspec.blob_states import settle
from penstock.backends.fsspec.messages import place
from penstock.core.abc import Deadline, Timing, current_timing
from penstock.core.concurrency.pool import Pool
from penstock.core.errors import BlobExistsError, BlobNotFoundError, StorageError
from penstock.core.types import flat_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.backends.fsspec.blob_states import StoreWriter
    from penstock.backends.fsspec.config import FsspecConfig
    from penstock.core.types import BlobInfo, Capabilities, ReadRequest

_FEEDS = 2  # one batch moves while the next is handed over

T = TypeVar("T")

_WASTE = 20  # a span may have `gap_bytes` of gaps, and one more byte for each 20 wanted bytes


class Store(ABC):
    """Accesses one root for `FsspecBackend`, which checks names. Thread-safe.

    For methods without a docstring, see `Backend`.
    """

    def __init__(self, config: FsspecConfig) -> None:
        self.config = config
        self.url = config.shown_url
        stuck_s = current_timing().transfer_stuck_s
        self.transfers = Pool(config.parallel, "penstock-fsspec-transfer", stuck_s=stuck_s)
        self.feeds = Pool(_FEEDS, "penstock-fsspec-feed", stuck_s=stuck_s)

    @cached_property
    def capabilities(self) -> Capabilities:
        """The cached capabilities."""
        return self.find_capabilities()

    @abstractmethod
    def find_capabilities(self) -> Capabilities:
        """Return the capabilities; may probe the store."""

    @abstractmethod
    def writer(self, name: str, *, size_hint: int | None) -> StoreWriter:
        """Return a writer for a new blob, without checking that the name is free."""

    @abstractmethod
    def fill(self, span: Span) -> None:
        """Read one span into its targets."""

    @abstractmethod
    def read_record(self, name: str, *, limit_bytes: int) -> bytes | int:
        """Return a whole record, or only its size if that is above `limit_bytes`."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Store a whole record; replaces any record of that name."""

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> None:
        """Store a record by one conditional put, so that the store decides between publishers.

        Raises:
            BlobExistsError: The name is taken, and certainly not by this put.
            StorageError: The put failed, or its outcome is unknown.
        """

    @abstractmethod
    def list(self, prefix: str) -> Sequence[BlobInfo]:
        """Return all names with the prefix, in any order, even names that are not blob names."""

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
            # Two publishers may both find the name free, so `exclusive_publish` is not declared.
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
        """Read all requests in parallel; merges nearby ranges."""
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
        """Put a test record twice to see whether the store refuses the second put.

        Some stores silently ignore the condition; two writers of one step would then both succeed.

        Returns:
            Whether the store decides between publishers; and if it does not, a note with the
            reason.
        """
        probe = f"clock/{secrets.token_hex(8)}"  # a folder that `prune` cleans up after a crash
        try:
            self.put(probe, b"1")
        except StorageError as error:
            return False, (f"conditional puts could not be tested: {error}",)
        try:
            self.put_if_absent(probe, b"2")
        except BlobExistsError:
            return True, ()
        except StorageError as error:
            return False, (f"conditional puts do not work: {error}",)
        finally:
            with suppress(StorageError):
                self.delete([probe])
        return False, ("the store ignores the condition of a put: use one saver per root",)

    def close(self) -> None:
        """Wait for transfers that are not stuck, then release all threads and connections."""
        self.feeds.shutdown(wait=True)
        self.transfers.shutdown(wait=True)


@dataclass(frozen=True, slots=True)
class Retry:
    """Runs an operation until it succeeds, fails permanently, or reaches a limit.

    Full jitter (a random time below the exponential bound) keeps the ranks of a large job from
    retrying all at once; after Brooker, "Exponential Backoff And Jitter", AWS 2015.

    Attributes:
        attempts: Maximum attempts.
        total_s: The seconds after which no further attempt begins.
        random: Draws the pauses from the system, so that forked ranks draw different pauses.
        timing: The bounds of the pauses between attempts.
    """

    attempts: int
    total_s: float
    random: random.Random = field(default_factory=random.SystemRandom)
    timing: Timing = field(default_factory=current_timing)

    def run(
        self,
        operation: Callable[[], T],
        *,
        transient: Callable[[Exception], bool],
        stop: threading.Event | None = None,
    ) -> T:
        """Return the result of the first attempt that succeeds.

        Args:
            operation: What to run; must be safe to repeat after an attempt with unknown outcome.
            transient: Returns whether an error is worth another attempt.
            stop: If another thread sets it, no further attempt begins.

        Raises:
            Exception: The error of the last attempt.
        """
        stop = stop or threading.Event()
        timing = self.timing
        deadline = Deadline(self.total_s, timing.clock)
        for attempt in range(1, self.attempts + 1):
            try:
                return operation()
            except Exception as error:
                if attempt == self.attempts or not transient(error):
                    raise
                most_s = timing.request_retry_first_s * 2 ** (attempt - 1)
                delay_s = self.random.uniform(0, min(most_s, timing.request_retry_most_s))
                # `stop` ends the wait: an abort must not last as long as the pauses.
                if deadline.left_s() < delay_s or stop.wait(delay_s):
                    raise
        msg = "a Retry needs at least one attempt"
        raise AssertionError(msg)


@dataclass(frozen=True, slots=True)
class RangePiece:
    """A range of a blob that starts at `offset`, and its target memory."""

    offset: int
    target: memoryview

    @property
    def stop(self) -> int:
        """The offset after the last byte."""
        return self.offset + self.target.nbytes


@dataclass(frozen=True, slots=True)
class Span:
    """One request to the store: ascending pieces that do not overlap, and the gaps between them."""

    name: str
    pieces: tuple[RangePiece, ...]

    @property
    def start(self) -> int:
        """The offset of the first byte."""
        return self.pieces[0].offset

    @property
    def stop(self) -> int:
        """The offset after the last byte of the last piece."""
        return self.pieces[-1].stop


def plan_spans(requests: Sequence[ReadRequest], *, piece_bytes: int, gap_bytes: int) -> list[Span]:
    """Return spans that together fill every target; leaves out empty targets.

    Args:
        requests: The reads, in any order; they may overlap.
        piece_bytes: Maximum bytes of a span.
        gap_bytes: The longest gap that a span may include. All gaps of a span together are at most
            this plus a twentieth of its wanted bytes, so that many small reads far apart do not
            become one read of nearly the whole blob.
    """
    spans: list[Span] = []
    wanted = sorted((r for r in requests if r.target.nbytes), key=attrgetter("name"))
    for name, group in groupby(wanted, key=attrgetter("name")):
        pieces = sorted(
            (piece for request in group for piece in _cut(request, piece_bytes)),
            key=attrgetter("offset"),
        )
        spans += [Span(name, tuple(run)) for run in _runs(pieces, piece_bytes, gap_bytes)]
    return spans


def _cut(request: ReadRequest, piece_bytes: int) -> Iterator[RangePiece]:
    target = flat_view(request.target)
    count = -(-target.nbytes // piece_bytes)
    share = -(-target.nbytes // count)  # even pieces end at about the same time
    for at in range(0, target.nbytes, share):
        yield RangePiece(request.offset + at, target[at : at + share])


def _runs(pieces: list[RangePiece], piece_bytes: int, gap_bytes: int) -> Iterator[list[RangePiece]]:
    run: list[RangePiece] = []
    wanted = waste = 0
    for piece in pieces:
        if run:
            gap = piece.offset - run[-1].stop
            near = 0 <= gap <= gap_bytes and waste + gap <= gap_bytes + wanted // _WASTE
            if not near or piece.stop - run[0].offset > piece_bytes:
                yield run
                run, wanted, waste = [], 0, 0
            else:
                waste += gap
        run.append(piece)
        wanted += piece.target.nbytes
    if run:
        yield run

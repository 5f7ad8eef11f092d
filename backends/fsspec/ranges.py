"""Turns a batch of reads into requests: merges near ranges, and cuts large ones."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from penstock.core.types import flat_view

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.types import ReadRequest

_WASTE = 20  # one byte of gaps is allowed for so many wanted ones, besides `gap_bytes`


@dataclass(frozen=True, slots=True)
class RangePiece:
    """Bytes of a blob from `offset` on, and the memory that they go to."""

    offset: int
    target: memoryview

    @property
    def stop(self) -> int:
        """The offset behind the last byte."""
        return self.offset + self.target.nbytes


@dataclass(frozen=True, slots=True)
class Span:
    """One request to the store: ascending pieces without overlap, and the gaps between them."""

    name: str
    pieces: tuple[RangePiece, ...]

    @property
    def start(self) -> int:
        """The offset of the first byte."""
        return self.pieces[0].offset

    @property
    def stop(self) -> int:
        """The offset behind the last byte of the last piece."""
        return self.pieces[-1].stop


def plan_spans(requests: Sequence[ReadRequest], *, piece_bytes: int, gap_bytes: int) -> list[Span]:
    """Return spans that together fill every target; leaves out empty targets.

    Args:
        requests: The reads, in any order; they may overlap.
        piece_bytes: The most bytes of a span.
        gap_bytes: The longest gap that is read along. All gaps of a span together are at most this
            much and a twentieth of its wanted bytes, so that many small reads far apart do not
            become one of nearly all the blob.
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

"""Which requests a batch of reads becomes: near ranges merged, large ones cut."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from penstock.core.types import flat_view

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.types import ReadRequest

_WASTE = 20  # of what a span reads, at most one part in so many may be gaps, beyond the first gap


@dataclass(frozen=True, slots=True)
class RangePiece:
    """Bytes of a blob from `offset` on, and where they go."""

    offset: int
    target: memoryview

    @property
    def stop(self) -> int:
        """The offset behind the last byte."""
        return self.offset + self.target.nbytes


@dataclass(frozen=True, slots=True)
class Span:
    """One request to the store: ascending pieces that do not overlap, and the gaps between."""

    name: str
    pieces: tuple[RangePiece, ...]

    @property
    def start(self) -> int:
        """The first byte."""
        return self.pieces[0].offset

    @property
    def stop(self) -> int:
        """Behind the last byte."""
        return self.pieces[-1].stop


def plan_spans(requests: Sequence[ReadRequest], *, piece_bytes: int, gap_bytes: int) -> list[Span]:
    """Requests that together fill every target; empty targets are left out.

    Args:
        requests: In any order; may overlap.
        piece_bytes: No span is longer.
        gap_bytes: No gap that is read along is longer. Of each span, gaps are at most this much
            and a twentieth of what is wanted.
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

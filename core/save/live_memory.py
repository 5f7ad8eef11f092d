"""Copies the memory of live objects, and keeps it from being moved or freed during the copy.

Tested in `tests/core/save/test_capture.py`.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from penstock.core.abc import ByteSource, places_of
from penstock.core.concurrency.garbage import collections_held
from penstock.core.concurrency.gather import MOST_WIDTH, gather
from penstock.core.errors import TornSnapshotError
from penstock.core.foreign import noting_origin
from penstock.core.plan.save import SLAB_ALIGNMENT, Capture
from penstock.core.tree.paths import show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.core.abc import PendingCopy, StateObject
    from penstock.core.pipeline.staging import Block
    from penstock.core.plan.save import Chunk, Piece, PlannedObject
    from penstock.core.types import ObjectPath

    Hold: TypeAlias = Callable[[Sequence[ByteSource]], Callable[[], None]]

T = TypeVar("T")

_LISTED = 8

_TOGETHER = 2048  # objects that are kept still and copied together, which takes about 2 ms
_FEW = 4  # fewer objects of one length are copied one by one, which is as fast
_GATHERED_BYTES = 1 << 21  # few enough that the second copy, into the block, reads the cache


def copy_chunk(
    chunk: Chunk, objects: Sequence[PlannedObject], block: Block, copies: list[PendingCopy]
) -> None:
    """Copy a chunk from live memory into `block`.

    Args:
        chunk: The chunk.
        objects: The objects of the plan.
        block: The memory for the copy.
        copies: Gets the copies from devices that are in flight on return, or after an error.

    Raises:
        TornSnapshotError: The memory of an object was freed.
    """
    pieces: Sequence[Piece] = chunk.pieces
    if chunk.slab:
        if sum([piece.stop for piece in pieces]) < chunk.length:
            ctypes.memset(block.address, 0, chunk.length)  # gaps are zero, not old state
        if chunk.capture is not Capture.DEFERRED:
            pieces = _copy_alike(pieces, objects, block)
    elif chunk.capture is Capture.DEFERRED:
        objects[pieces[0].item].entry.source.keep()
    if pieces:
        with held([objects[piece.item].entry.source for piece in pieces]):
            _copy_pieces(pieces, objects, block, copies)


@contextmanager
def flat_copies(
    chunks: Sequence[Chunk], objects: Sequence[PlannedObject], blocks: Sequence[Block]
) -> Iterator[list[Callable[[], object]]]:
    """Yield one function per chunk that copies it into its block; any thread may call them.

    Args:
        chunks: Chunks of one piece each, in flat host memory.
        objects: The objects of the plan.
        blocks: The memory for each chunk.

    Raises:
        TornSnapshotError: The memory of an object was freed.
    """
    pieces = [chunk.pieces[0] for chunk in chunks]
    entries = [objects[piece.item].entry for piece in pieces]
    for chunk, entry in zip(chunks, entries, strict=True):
        if chunk.capture is Capture.DEFERRED:
            entry.source.keep()
    with held([entry.source for entry in entries]):
        copies: list[Callable[[], object]] = []
        for piece, entry, block in zip(pieces, entries, blocks, strict=True):
            if not entry.source.address:
                raise torn([entry.path], deferred=True)  # the memory was freed
            start, length = entry.source.address + piece.start, piece.stop - piece.start
            copies.append(partial(ctypes.memmove, block.address, start, length))
        yield copies


def _copy_alike(
    pieces: Sequence[Piece], objects: Sequence[PlannedObject], block: Block
) -> list[Piece]:
    """Copy small objects of equal length together; return the remaining pieces.

    Holding each object would take longer than copying it. Deferred chunks still use holds, since
    they are copied while training runs: here, no memory could be moved while this thread waits for
    the GIL.
    """
    by_length: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_length.setdefault(piece.stop, []).append(piece)
    left: list[Piece] = []
    for length, alike in by_length.items():
        if length > MOST_WIDTH or len(alike) < _FEW:
            left += alike
            continue
        for first in range(0, len(alike), _TOGETHER):
            part = alike[first : first + _TOGETHER]
            sources = [objects[piece.item].entry.source for piece in part]
            if not all(map(_may_stay_still, set(map(type, sources)))):
                left += part
                continue
            copy = partial(_copy_still, part, objects, sources, block)
            left += while_still(by_class(sources), copy)
    return left


def _copy_still(
    pieces: Sequence[Piece],
    objects: Sequence[PlannedObject],
    sources: Sequence[ByteSource],
    block: Block,
) -> list[Piece]:
    """Copy objects of one length whose memory stays still; return those without an address."""
    pairs = zip([source.address for source in sources], places_of(sources), strict=True)
    starts = [
        at if described is not None and at is not None else described for described, at in pairs
    ]
    left: list[Piece] = []
    if None in starts:
        left = [piece for piece, at in zip(pieces, starts, strict=True) if at is None]
        pieces = [piece for piece, at in zip(pieces, starts, strict=True) if at is not None]
        starts = [at for at in starts if at is not None]
    if 0 in starts:
        freed = objects[pieces[starts.index(0)].item].entry
        raise torn([freed.path], deferred=True)
    if not pieces:
        return left
    addresses, length = np.array(starts, np.int64), pieces[0].stop
    slots = np.array([piece.at for piece in pieces]) // SLAB_ALIGNMENT
    count = (block.view.nbytes - length) // SLAB_ALIGNMENT + 1
    out: NDArray[np.void] = np.ndarray(count, f"V{length}", block.view, strides=(SLAB_ALIGNMENT,))
    step = max(1, _GATHERED_BYTES // length)
    for first in range(0, len(pieces), step):
        part = slice(first, first + step)
        out[slots[part]] = gather(addresses[part], length)
    return left


def _copy_pieces(
    pieces: Sequence[Piece],
    objects: Sequence[PlannedObject],
    block: Block,
    copies: list[PendingCopy],
) -> None:
    for piece in pieces:
        entry = objects[piece.item].entry
        source = entry.source
        length = piece.stop - piece.start
        if source.address is not None:
            if not source.address:
                raise torn([entry.path], deferred=True)  # the memory was freed
            ctypes.memmove(block.address + piece.at, source.address + piece.start, length)
            continue
        out = block.view[piece.at : piece.at + length]
        with noting_origin(partial(shown, entry)):
            copy = source.copy_out(piece.start, out)
        if copy is not None:
            copies.append(copy)


@contextmanager
def held(sources: Sequence[ByteSource]) -> Iterator[None]:
    """Keep other threads from moving and freeing the memory of `sources` while it is read."""
    by_hold: dict[Hold, list[ByteSource]] = {}
    for source in sources:
        by_hold.setdefault(type(source).hold, []).append(source)
    with ExitStack() as holds:
        # A slab takes thousands of holds, enough to start garbage collections that scan all
        # objects of the plan; these took ten times as long as the holds.
        with collections_held:
            for hold, together in by_hold.items():
                holds.callback(hold(together))
        yield


def by_class(sources: Iterable[ByteSource]) -> dict[Any, list[ByteSource]]:
    """Group sources by the function of their class that keeps memory still."""
    groups: dict[Any, list[ByteSource]] = {}
    for source in sources:
        groups.setdefault(type(source).still, []).append(source)
    return groups


def while_still(groups: dict[Any, list[ByteSource]], action: Callable[[], T]) -> T:
    """Run `action`, which takes milliseconds, while the memory of all sources stays still.

    Args:
        groups: The sources, as `by_class` returns them.
        action: What to run.
    """
    for still, sources in groups.items():
        action = partial(still, sources, action)
    return action()


def _may_stay_still(kind: type[ByteSource]) -> bool:
    """Return whether `still` is enough for a copy; it is not if a class overrides only `hold`."""
    return kind.hold is ByteSource.hold or kind.still is not ByteSource.still


def shown(entry: StateObject) -> str:
    """Return the object and the class of its source for a message."""
    kind = type(entry.source)
    return f"in {kind.__module__}.{kind.__qualname__}, the source of {show_path(entry.path)}"


def torn(paths: Sequence[ObjectPath], *, deferred: bool) -> TornSnapshotError:
    """Return the error for objects at `paths` that changed too early."""
    more = len(paths) - _LISTED
    names = ", ".join(map(show_path, paths[:_LISTED])) + (f" and {more} more" if more > 0 else "")
    when = (
        "before the fence: call fence() before the change"
        if deferred
        else "while save() captured it: another thread writes to it"
    )
    return TornSnapshotError(
        f"{names} changed {when}. This save is given up; nothing was committed."
    )

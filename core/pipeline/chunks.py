"""Defines the records of a chunk in a save: `Captured`, and then `ChunkResult` once it is stored.

Tested in `tests/core/save/test_capture.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.pipeline.staging import Block
    from penstock.core.plan.earlier_frames import StoredFrame
    from penstock.core.types import WorstErrors


@dataclass(eq=False, slots=True)
class Captured:
    """A chunk's bytes, ready for encoding and writing; empty for a derived object.

    Attributes:
        index: Number of the chunk in the plan.
        view: Its raw bytes.
        block: The staging memory that holds the bytes; None if they are in live memory.
        end_hold: Ends the hold on live memory; None if the bytes are not there.
    """

    index: int
    view: memoryview
    block: Block | None = None
    end_hold: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The stored frame of one chunk. Fields that are not listed here are as in `Frame`.

    `declined` has the numbers of the codecs that declined the chunk. `base` is the frame of an
    earlier checkpoint that the chunk is encoded against, if any. `chain` is the number of the chain
    chosen while the save ran; None: the plan's. `content` is the hash of the chunk's bytes, if
    computed. `errors` has the errors of each piece; empty unless a lossy codec was used.

    A chunk that is stored already gets no frame of its own: `shared` is its frame in an earlier
    checkpoint, or `same_as` is the number of an equal chunk of this save.
    """

    offset: int
    length: int
    checksums: tuple[int, ...]
    raw_checksum: int | None = None
    lengths: tuple[int, ...] = ()
    declined: tuple[int, ...] = ()
    base: StoredFrame | None = None
    chain: int | None = None
    content: int | None = None
    shared: StoredFrame | None = None
    errors: tuple[WorstErrors | None, ...] = ()
    same_as: int | None = None

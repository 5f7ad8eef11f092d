"""Defines the records of a chunk in flight: first captured, then stored.

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
        block: The staging memory that holds them, to give back.
        end_hold: Ends the hold on the live memory that lends the bytes, if any does.
    """

    index: int
    view: memoryview
    block: Block | None = None
    end_hold: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The stored frame of one chunk. Fields that are not listed here are as in `Frame`.

    `declined` has the codecs that declined the chunk. `base` is a frame of an earlier checkpoint.
    `chain` is the number of the chain chosen while the save ran; None: the plan's. `content` is the
    hash of the chunk's bytes, if computed. A chunk that is stored already has only `shared`, its
    frame in an earlier checkpoint, or `same_as`, the number of an equal chunk of this save.
    `errors` has the errors of each piece; empty unless a lossy codec was used.
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

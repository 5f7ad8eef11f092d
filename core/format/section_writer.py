"""Writes one section of a part as JSON columns. Sans-IO.

Columns instead of one JSON object per record: half the bytes, and `section_reader` checks types and
bounds of a column at C speed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.format.strict_json import dump_json
from penstock.core.limits import MAX_GROUPS
from penstock.core.tree.paths import path_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.format.records import Frame
    from penstock.core.types import ObjectPath

FRAME_KEYS = (
    "blob", "offset", "length", "raw_length", "chain", "checksums", "raw_checksum", "lengths",
)  # fmt: skip
SLAB_KEY = "elements"
"""Name of an optional column of frames; left out where no frame has elements."""

OBJECT_KEYS = ("ordinal", "path", "type", "shape", "shards", "same_as")


@dataclass(slots=True)
class SectionDraft:
    """The columns of a section before they are encoded, and its figures for the part's head."""

    frames: list[Frame]
    types: list[list[Any]]
    columns: dict[str, list[Any]]
    node_rows: list[list[Any]]

    @property
    def objects(self) -> int:
        """Number of objects."""
        return len(self.columns["path"])

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.node_rows)

    @property
    def groups(self) -> tuple[str, ...] | None:
        """Top-level keys, ascending; None where there are too many to list."""
        return top_level_keys(self.columns["path"], [row[1] for row in self.node_rows])

    def hashes(self) -> list[int]:
        """Return the path hashes of the objects, in the order of the objects."""
        return [path_hash(path) for path in self.columns["path"]]

    def dump(self) -> bytes:
        """Return the JSON of the section."""
        return dump_json(
            {
                "frames": _frame_columns(self.frames),
                "types": self.types,
                "objects": self.columns,
                "nodes": self.node_rows,
            }
        )


def new_draft() -> SectionDraft:
    """Return an empty draft."""
    return SectionDraft([], [], {key: [] for key in OBJECT_KEYS}, [])


def top_level_keys(
    paths: Sequence[ObjectPath], nodes: Sequence[ObjectPath]
) -> tuple[str, ...] | None:
    """Return the top-level keys of objects and nodes, ascending; None if too many to list."""
    groups = {path[0] for path in paths if path} | {path[0] for path in nodes if path}
    return tuple(sorted(groups)) if len(groups) <= MAX_GROUPS else None


def _frame_columns(frames: Sequence[Frame]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        "blob": [f.blob for f in frames],
        "offset": [f.offset for f in frames],
        "length": [f.length for f in frames],
        "raw_length": [f.raw_length for f in frames],
        "chain": [f.chain for f in frames],
        "checksums": [struct.pack(f">{len(c)}Q", *c).hex() for f in frames for c in [f.checksums]],
        "raw_checksum": [
            None if f.raw_checksum is None else f"{f.raw_checksum:016x}" for f in frames
        ],
        "lengths": [f.lengths for f in frames],
    }
    if any(f.elements for f in frames):
        columns[SLAB_KEY] = [f.elements for f in frames]
    return columns

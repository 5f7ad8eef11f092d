"""One section of a part on its way into bytes: JSON columns. Sans-IO.

Columns instead of one JSON object per record: half the bytes, and the reader (`section`) checks
types and bounds of a column at C speed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.fields import dump_json, refuse
from penstock.core.paths import path_hash
from penstock.core.types import Region

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.manifest import Frame, Section, ShardRecord
    from penstock.core.types import ObjectPath, TensorSpec

MAX_GROUPS = 16
"""A section with more top-level keys does not list them in the head."""

MAX_SEGMENTS = 1024
"""A path is no longer: a reader needs memory by the square of it."""

FRAME_KEYS = (
    "blob", "offset", "length", "raw_length", "chain", "checksums", "raw_checksum", "lengths",
)  # fmt: skip
OBJECT_KEYS = ("ordinal", "path", "type", "shape", "shards", "same_as")


@dataclass(slots=True)
class SectionDraft:
    """A section on its way into a part: its columns, and what the head says of it."""

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
        """Path hashes of the objects, in their order."""
        return [path_hash(path) for path in self.columns["path"]]

    def dump(self) -> bytes:
        """The JSON of the section.

        Raises:
            FormatError: A path is longer than any reader takes.
        """
        rows = [*self.columns["path"], *(row[1] for row in self.node_rows)]
        if max(map(len, rows), default=0) > MAX_SEGMENTS:
            refuse("the state tree", f"is nested deeper than {MAX_SEGMENTS} levels: flatten it")
        return dump_json(
            {
                "frames": _frame_columns(self.frames),
                "types": self.types,
                "objects": self.columns,
                "nodes": self.node_rows,
            }
        )


def new_draft() -> SectionDraft:
    """A draft without anything in it."""
    return SectionDraft([], [], {key: [] for key in OBJECT_KEYS}, [])


def draft_section(section: Section) -> SectionDraft:
    """The draft of a section that is at hand as records."""
    draft = new_draft()
    draft.frames.extend(section.frames)
    numbers: dict[tuple[Any, ...], int] = {}
    columns = draft.columns
    for record in section.objects:
        spec = record.spec
        key = (record.kind, spec.dtype, spec.itemsize, record.role, record.form)
        if key not in numbers:
            numbers[key] = len(numbers)
            draft.types.append(list(key))
        if record.same_as is not None:
            columns["same_as"].append([len(columns["path"]), record.same_as])
        columns["ordinal"].append(record.ordinal)
        columns["path"].append(record.path)
        columns["type"].append(numbers[key])
        columns["shape"].append(spec.shape)
        columns["shards"].append([_shard_row(s, spec) for s in record.shards])
    draft.node_rows.extend([n.ordinal, n.path, n.form, n.meta] for n in section.nodes)
    return draft


def top_level_keys(
    paths: Sequence[ObjectPath], nodes: Sequence[ObjectPath]
) -> tuple[str, ...] | None:
    """Top-level keys of objects and nodes, ascending; None where there are too many to list."""
    groups = {path[0] for path in paths if path} | {path[0] for path in nodes if path}
    return tuple(sorted(groups)) if len(groups) <= MAX_GROUPS else None


def _shard_row(shard: ShardRecord, spec: TensorSpec) -> list[Any]:
    refs = [n for ref in shard.chunks for n in (ref.frame, ref.at, ref.stop - ref.start)]
    if shard.region == Region.whole(spec.shape):
        return [refs]
    return [refs, shard.region.offsets, shard.region.sizes]


def _frame_columns(frames: Sequence[Frame]) -> dict[str, list[Any]]:
    return {
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

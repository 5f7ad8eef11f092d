"""Writes one section of a part as JSON columns. Sans-IO.

Tested in `tests/core/format/test_records.py`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from penstock.core.format.section import (
    DERIVED_KEY,
    OBJECT_KEYS,
    OPTIONAL_OBJECT_KEYS,
    top_level_keys,
)
from penstock.core.format.strict_json import dump_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.abc import Node, StateObject
    from penstock.core.format.records import Frame, NodeRecord, ObjectRecord
    from penstock.core.types import ObjectPath


class SectionWriter:
    """Collects the objects and nodes of one section in columns.

    Attributes:
        frames: The frames that its objects use, each after its base.
        types: The distinct kinds of objects: kind, dtype, itemsize, role and form.
        columns: The objects, a list for each column.
        node_rows: The nodes.
        count: The number of objects and nodes.
        weight: The approximate bytes of its JSON.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.types: list[list[Any]] = []
        self.columns: dict[str, list[Any]] = {
            key: [] for key in (*OBJECT_KEYS, *OPTIONAL_OBJECT_KEYS)
        }
        self.node_rows: list[list[Any]] = []
        self.count = 0
        self.weight = 0
        self._frame_numbers: dict[tuple[int, int], int] = {}
        self._type_numbers: dict[tuple[Any, ...], int] = {}
        self._last: StateObject | ObjectRecord | None = None
        self._last_type = 0

    @property
    def objects(self) -> int:
        """The number of objects."""
        return len(self.columns["path"])

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.node_rows)

    @property
    def groups(self) -> tuple[str, ...] | None:
        """The top-level keys, ascending; None if there are too many to list."""
        return top_level_keys(self.columns["path"], [row[1] for row in self.node_rows])

    def add_node(self, ordinal: int, node: Node | NodeRecord) -> None:
        """Add a node."""
        self.node_rows.append([ordinal, node.path, node.form, node.meta])
        self.count += 1
        self.weight += sum(map(len, node.path)) + len(repr(node.meta))

    def add_object(
        self,
        ordinal: int,
        entry: StateObject | ObjectRecord,
        shards: Sequence[Sequence[Any]],
        *,
        derived: ObjectPath | None = None,
        errors: Sequence[float | None] | None = None,
    ) -> None:
        """Add an object.

        Args:
            ordinal: Its place in the order in which the tree was described.
            entry: The object; it may be tied.
            shards: A list for each shard. It begins with the chunks, in one flat list: frame
                number (of `frame_number`), offset and length of each. Unless the shard is the whole
                object, the offsets and the sizes of its region follow.
            derived: The object that this one is derived from.
            errors: The errors that lossy codecs caused in it.
        """
        columns = self.columns
        position = len(columns["path"])
        if entry.same_as is not None:
            columns["same_as"].append([position, entry.same_as])
        if derived is not None:
            columns[DERIVED_KEY].append([position, derived])
        if errors is not None:
            columns["errors"].append([position, *errors])
        columns["ordinal"].append(ordinal)
        columns["path"].append(entry.path)
        columns["type"].append(self._type_number(entry))
        columns["shape"].append(entry.spec.shape)
        columns["shards"].append(shards)
        self.count += 1
        self.weight += sum(map(len, entry.path))

    def frame_number(self, frame: Frame) -> int:
        """Return a frame's number in the section. Adds a new frame after its base."""
        place = frame.blob, frame.offset
        number = self._frame_numbers.get(place)
        if number is None:
            if frame.base is not None:
                self.frame_number(frame.base)
            number = self._frame_numbers[place] = len(self.frames)
            self.frames.append(frame)
            self.weight += 20 * len(frame.checksums)
        return number

    def _type_number(self, entry: StateObject | ObjectRecord) -> int:
        spec, last = entry.spec, self._last
        if (
            last is not None
            and entry.kind is last.kind
            and entry.role is last.role
            and entry.form == last.form
            and spec.dtype == last.spec.dtype
            and spec.itemsize == last.spec.itemsize
        ):
            return self._last_type  # hashing two enum members a million times takes a second
        key = (entry.kind, spec.dtype, spec.itemsize, entry.role, entry.form)
        number = self._type_numbers.get(key)
        if number is None:
            number = self._type_numbers[key] = len(self.types)
            self.types.append(list(key))
        self._last, self._last_type = entry, number
        return number

    def dump(self) -> bytes:
        """Return the JSON of the section."""
        columns = {k: v for k, v in self.columns.items() if v or k not in OPTIONAL_OBJECT_KEYS}
        return dump_json(
            {
                "frames": _frame_columns(self.frames),
                "types": self.types,
                "objects": columns,
                "nodes": self.node_rows,
            }
        )


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
    numbers = {(f.blob, f.offset): number for number, f in enumerate(frames)}
    optional: dict[str, list[Any]] = {
        "elements": [f.elements for f in frames],
        "base": [None if f.base is None else numbers[f.base.blob, f.base.offset] for f in frames],
        "content": [None if f.content is None else f"{f.content:032x}" for f in frames],
    }
    return columns | {
        key: column for key, column in optional.items() if column.count(None) < len(column)
    }

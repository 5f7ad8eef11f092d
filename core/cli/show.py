"""`penstock show`."""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.catalog import Catalog
from penstock.core.cli.ls import record_json
from penstock.core.cli.render import (
    Column,
    metadata_text,
    print_json,
    print_line,
    print_table,
    ratio_text,
    size_text,
    visible,
)
from penstock.core.contents import Contents
from penstock.core.opening import open_backend
from penstock.core.paths import show_path
from penstock.core.registry import default_registry
from penstock.core.select import Selection
from penstock.core.types import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.contents import Located
    from penstock.core.manifest import CommitRecord, ObjectRecord

_COLUMNS = (
    Column("PATH", flexible=True),
    Column("TYPE"),
    Column("SHAPE", keep=4),
    Column("BYTES", right=True, keep=5),
    Column("STORED", right=True, keep=2, spare=True),
    Column("CODECS", keep=3, spare=True),
    Column("ROLE", keep=1, spare=True),
)


@dataclass(frozen=True, slots=True)
class Shown:
    """One object and how it is stored; `bytes_stored` is its share of frames with others in."""

    record: ObjectRecord
    codecs: tuple[str, ...]
    bytes_stored: int

    @property
    def nbytes(self) -> int:
        """Raw bytes; none where a tied object is stored elsewhere."""
        return 0 if self.record.same_as is not None else self.record.spec.nbytes


def run(
    url: str,
    *,
    step: int | None,
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    as_json: bool,
) -> None:
    """Print the selected objects of one checkpoint, in tree order.

    Raises:
        PenstockError: There is no such checkpoint, it is damaged, or a pattern matches nothing.
    """
    selection = Selection(include or None, exclude or None)
    with closing(open_backend(url, must_exist=True, light=True)) as backend:
        catalog = Catalog(backend)
        record = catalog.record(catalog.require_latest() if step is None else step)
        contents = Contents(backend, record, default_registry())
        located = contents.objects()
        selection.check_used(one.record.path for one in located)
        chosen = [one for one in located if selection.selects(one.record.path)]
        shown = [describe(one, contents) for one in chosen]
    if as_json:
        checkpoint = {"step": record.step, **record_json(record)}
        print_json({"checkpoint": checkpoint, "objects": [_as_json(one) for one in shown]})
    else:
        _print(record, shown)


def describe(located: Located, contents: Contents) -> Shown:
    """How an object is stored, as its part of the manifest says."""
    head = contents.head(located.part)
    frames = contents.section(located.part, located.section).frames
    codecs: dict[str, None] = {}
    # Bytes of the object in each frame: a slab's stored bytes are shared out among its objects.
    used: dict[int, int] = defaultdict(int)
    for shard in located.record.shards:
        for chunk in shard.chunks:
            used[chunk.frame] += chunk.stop - chunk.start
            codecs |= dict.fromkeys(link.name for link in head.chains[frames[chunk.frame].chain])
    stored = sum(
        round(frames[number].length * size / frames[number].raw_length)
        for number, size in used.items()
        if size
    )
    return Shown(located.record, tuple(codecs), stored)


def _print(record: CommitRecord, shown: list[Shown]) -> None:
    print_line(
        f"step {record.step}, generation {record.generation}, of {record.created}, "
        f"written by penstock {visible(record.penstock)} through {visible(record.engine)}"
    )
    if record.metadata:
        print_line(metadata_text(record.metadata))
    print_line("")
    print_table(_COLUMNS, [_as_row(one) for one in shown])
    raw = sum(one.nbytes for one in shown)
    stored = sum(one.bytes_stored for one in shown)
    print_line(
        f"\n{len(shown)} of {record.objects} objects, {size_text(raw)}, "
        f"{size_text(stored)} stored ({ratio_text(raw, stored)})"
    )


def _as_row(one: Shown) -> list[str]:
    record, tensor = one.record, one.record.kind is Kind.TENSOR
    path = visible(show_path(record.path))
    if record.same_as is not None:
        path += f" = {visible(show_path(record.same_as))}"
    return [
        path,
        visible(record.spec.dtype if tensor else record.form),
        "x".join(map(str, record.spec.shape)) if tensor else "",
        size_text(one.nbytes),
        size_text(one.bytes_stored),
        "+".join(one.codecs) or "raw",
        record.role.value,
    ]


def _as_json(one: Shown) -> dict[str, Any]:
    record = one.record
    return {
        "path": show_path(record.path),
        "segments": list(record.path),
        "kind": record.kind.value,
        "form": record.form,
        "role": record.role.value,
        "dtype": record.spec.dtype,
        "shape": list(record.spec.shape),
        "bytes_raw": one.nbytes,
        "bytes_stored": one.bytes_stored,
        "codecs": list(one.codecs),
        "same_as": None if record.same_as is None else show_path(record.same_as),
    }

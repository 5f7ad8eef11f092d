"""Checks the whole manifest of a checkpoint, record by record.

Tested in `tests/integration/damage/test_hostile_records.py`.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.errors import FormatError
from penstock.core.foreign import memory_permitting
from penstock.core.format.index import (
    dump_table,
    encode_index,
    regions_of,
    shard_table,
    shards_of,
    traits_of,
)
from penstock.core.plan.regions import flaw_of_cover
from penstock.core.restore.contents import (
    DIFFERENT,
    check_ties,
    containers,
    differ,
)
from penstock.core.tree.paths import path_hash, show_path
from penstock.core.types import Region

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.core.format.index import ShardTable
    from penstock.core.format.records import IndexEntry, ObjectRecord, PartEntry, PartHead
    from penstock.core.restore.contents import Contents
    from penstock.core.restore.manifest_reader import ManifestReader
    from penstock.core.types import ObjectPath

_SHOWN_FLAWS = 4


def check_cover(manifest: ManifestReader) -> None:
    """Check that the parts agree about each object, and together have all of its elements.

    Raises:
        FormatError: They do not, which the message shows for the first objects; or a part is
            damaged.
    """
    step = manifest.record.step
    if manifest.record.world_size == 1:
        return  # reading a section fails unless each of its objects is one whole shard
    with memory_permitting(f"step {step}"):
        parts = range(len(manifest.parts))
        sections = (section for part in parts for section in manifest.sections(part))
        flaws = [*_flaws(record for section in sections for record in section.objects)]
    if flaws:
        shown = "; ".join(f"{path}: {why}" for path, why in flaws[:_SHOWN_FLAWS])
        msg = f"step {step}: {len(flaws)} object(s) are not whole: {shown}"
        raise FormatError(msg, [path for path, _ in flaws])


def sweep(
    contents: Contents, damage: Callable[[str, str], None]
) -> tuple[list[PartHead], list[ObjectRecord]]:
    """Read every record of the manifest; report each damage instead of stopping.

    Args:
        contents: The checkpoint.
        damage: Called with the name of the damaged record, or the shown path of the damaged object,
            and a sentence about the damage.

    Returns:
        The readable heads, and the readable objects that are not tied.
    """
    manifest, index = contents.manifest, contents.record.index
    heads: list[PartHead] = []
    objects: list[ObjectRecord] = []
    tables: list[ShardTable] = []
    with _reported(index.name, damage):
        manifest.check_index()
    parts: tuple[PartEntry, ...] = ()
    with _reported(index.name, damage):
        parts = manifest.parts
    for part, entry in enumerate(parts):
        with _reported(entry.name, damage):
            manifest.check_size(entry.name, entry.length)
        with _reported(entry.name, damage):
            heads.append(manifest.head(part))
        if part not in manifest.heads:
            continue
        with _reported(entry.name, damage):
            tables.append(manifest.shards(part))
        for number in range(len(manifest.head(part).sections)):
            with _reported(f"{entry.name} section {number}", damage):
                objects += manifest.section(part, number).objects
        with _reported(entry.name, damage):
            _check_shards(manifest, part, tables)
    with _reported(index.name, damage):
        manifest.check_borrowed()
    absent: set[ObjectPath] = set()
    with _reported(index.name, damage):
        absent = _check_paths(contents, objects, damage)
    # A lookup of one path relies on the index, but a full read relies on the sections. So a path
    # that the index lacks would hide the object from some readers only.
    if parts and len(tables) == len(parts):
        with _reported(index.name, damage):
            tables = [table.without(map(path_hash, absent)) for table in tables]
            if _index_over(manifest, tables) != index:
                msg = f"{index.name}: does not list exactly the shards that the parts have"
                raise FormatError(msg, [index.name])
    if len(heads) == len(parts) and contents.record.world_size > 1:
        for path, why in _flaws(objects):
            damage(path, why)
    try:
        check_ties(objects)
    except FormatError as error:
        for name in error.damaged:
            damage(name, str(error))
    return heads, [o for o in objects if o.same_as is None]


@contextmanager
def _reported(name: str, damage: Callable[[str, str], None]) -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        damage(name, str(error))


def _check_shards(manifest: ManifestReader, part: int, tables: Sequence[ShardTable]) -> None:
    """Compare the table of a part, the last of `tables`, with the shards in its sections."""
    places = [(part, number) for number in range(len(manifest.head(part).sections))]
    if len(tables) <= part or any(place not in manifest.kept for place in places):
        return  # a section or a table could not be read, which is reported already
    several = manifest.record.world_size > 1
    actual = shard_table(
        shards_of(
            [o.path for o in objects],
            [regions_of(o.shards, Region.whole(o.spec.shape)) for o in objects],
            [
                traits_of(o.kind, o.spec, o.role, o.form, (o.same_as, o.derived))
                for o in objects
                if several
            ],
        )
        for objects in (manifest.kept[place].objects for place in places)
    )
    same_traits = np.array_equal(actual.traits, tables[part].traits)
    if dump_table(actual) != dump_table(tables[part]) or not same_traits:
        name = manifest.parts[part].name
        msg = f"{name}: its table does not list the shards that are in its sections"
        raise FormatError(msg, [name])


def _check_paths(
    contents: Contents, objects: Sequence[ObjectRecord], damage: Callable[[str, str], None]
) -> set[ObjectPath]:
    """Report each object with other objects below it, unless it is a value outside the index.

    No reader sees a value that the index leaves out, so it is no damage. Returns the paths of these
    values.
    """
    nodes = [node for section in contents.manifest.kept.values() for node in section.nodes]
    both = containers(objects, nodes) & {o.path for o in objects}
    absent = contents.unlisted([o for o in objects if o.path in both])
    for path in sorted(both - absent):
        damage(show_path(path), "is stored as one object, but other objects are below it")
    return absent


def _index_over(manifest: ManifestReader, tables: Sequence[ShardTable]) -> IndexEntry:
    record = manifest.record
    parts = () if record.many_parts is None else manifest.parts
    entry, borrowed = encode_index(record.uid, tables, parts).entry, record.many_borrowed
    return replace(entry, length=entry.length + (borrowed.length if borrowed else 0))


def _flaws(described: Iterable[ObjectRecord]) -> Iterator[tuple[str, str]]:
    """Yield each object that the parts describe differently or have only in part, and why."""
    by_path: dict[ObjectPath, list[ObjectRecord]] = {}
    for record in described:
        by_path.setdefault(record.path, []).append(record)
    for path, records in by_path.items():
        first = records[0]
        if any(differ(record, first) for record in records):
            yield show_path(path), DIFFERENT
        elif first.same_as is None and first.derived is None:
            regions = (shard.region for record in records for shard in record.shards)
            if flaw := flaw_of_cover(first.spec.shape, regions):
                yield show_path(path), flaw

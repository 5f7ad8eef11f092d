"""The records of a manifest are read once, few at a time, and only if unchanged."""

import numpy as np
import pytest
from tests.core.stored_ranks import store_ranks
from tests.integration.support import memory

from penstock.core.errors import FormatError
from penstock.core.restore.contents import Contents
from penstock.core.restore.manifest_reader import ManifestReader
from penstock.core.restore.sweep import check_cover, sweep
from penstock.core.types import Region
from penstock.testing.faults import FaultyBackend

RANKS = 4
PATHS = [("w", f"{number}") for number in range(6)]


@pytest.fixture
def stored():
    """A store that counts calls, and the record: six matrices, by rows on four ranks."""
    store = FaultyBackend(memory())
    rows = [Region((rank, 0), (1, 5)) for rank in range(RANKS)]
    array = np.arange(RANKS * 5, dtype=np.int16).reshape(RANKS, 5)
    ranks = [[(path, array, [row]) for path in PATHS] for row in rows]
    return store, store_ranks(store, ranks, per_section=2)


@pytest.fixture
def manifest(stored):
    return ManifestReader(*stored)


def reads(store):
    return [names for operation, names in store.calls if operation == "read"]


def test_adjacent_sections_are_one_read(stored, manifest):
    head = manifest.head(2)
    before = len(reads(stored[0]))
    sections = [*manifest.sections(2)]
    assert [[o.path for o in one.objects] for one in sections] == [
        PATHS[0:2],
        PATHS[2:4],
        PATHS[4:6],
    ]
    assert len(head.sections) == 3
    assert len(reads(stored[0])) == before + 1
    assert not manifest.kept


def test_read_ahead_takes_one_batch_of_heads_and_one_of_sections(stored, manifest):
    places = [(part, number) for part in range(RANKS) for number in range(3)]
    manifest.read_ahead(places)
    assert [len(names) for names in reads(stored[0])] == [RANKS, 3 * RANKS]
    assert manifest.kept.keys() == {*places}


def test_read_ahead_skips_a_missing_part_and_its_reader_names_it(stored, manifest):
    name = manifest.parts[3].name
    stored[0].delete([name])
    manifest.read_ahead([(0, 0), (3, 0)])
    assert not manifest.heads
    assert manifest.section(0, 0).objects
    with pytest.raises(FormatError, match=name):
        manifest.section(3, 0)


@pytest.mark.parametrize("place", [(RANKS, 0), (0, 3)])
def test_a_missing_section_is_damage_of_the_index(manifest, place):
    assert manifest.checked_place((0, 2)) == (0, 2)
    with pytest.raises(FormatError, match="which does not exist") as error:
        manifest.checked_place(place)
    assert error.value.damaged == (manifest.record.index.name,)


def test_an_object_is_found_through_its_one_section(stored):
    contents = Contents(*stored, None)
    assert contents.find(PATHS[4]).path == PATHS[4]
    assert contents.find(("w", "none")) is None
    assert contents.manifest.kept.keys() == {(0, 2)}


def test_the_sweep_reports_the_damage_of_each_record_and_reads_the_others(stored):
    store, record = stored
    damage = []
    heads, objects = sweep(Contents(store, record, None), lambda *one: damage.append(one))
    assert (damage, len(heads), len(objects)) == ([], RANKS, RANKS * len(PATHS))
    name = record.parts[1].name
    store.delete([name])
    heads, objects = sweep(Contents(store, record, None), lambda *one: damage.append(one))
    assert {what for what, _ in damage} == {name}
    assert (len(heads), len(objects)) == (RANKS - 1, (RANKS - 1) * len(PATHS))
    with pytest.raises(FormatError, match=name):
        check_cover(ManifestReader(store, record))

"""Rank 0 reuses the index of the previous save if, and only if, the parts list the same."""

from types import SimpleNamespace

import numpy as np
import pytest
from tests.core.manifests import UID, tensor, tied
from tests.core.stored_ranks import STEP, part_of_rank
from tests.integration.support import memory

from penstock.core.errors import FormatError, SaveError
from penstock.core.format.index import encode_index, index_of
from penstock.core.format.records import blob_name
from penstock.core.save import merge
from penstock.core.save.merge import KnownParts, PartsOfRanks
from penstock.core.types import Region

W, B, HERE = ("model", "w"), ("model", "b"), ("of", "stage")
SHAPES = {W: (9, 5), B: (4,), HERE: (6, 2)}


def rows(start, stop, width=5):
    return Region((start, 0), (stop - start, width))


def share():
    """The shares of three ranks in each object; rank 0 lacks the last."""
    return [
        {W: [rows(0, 3)], B: [Region((0,), (4,))]},
        {W: [rows(3, 6)], B: None, HERE: [rows(0, 3, 2)]},
        {W: [rows(6, 9)], B: None, HERE: [rows(3, 6, 2)]},
    ]


class Saves:
    """Successive saves of ranks, merged by a rank 0 that knows the previous one."""

    def __init__(self):
        self.known = KnownParts()

    def merge(self, held=None, shapes=None, *, spoil=None, entries=None, seed=0):
        """Return the index blocks of a save, and the index that its reader would compute."""
        held, shapes = held or share(), shapes or SHAPES
        arrays = {path: np.random.default_rng(seed).random(shape) for path, shape in shapes.items()}
        store, posts, parts = memory(), {}, []
        for rank, objects in enumerate(held):
            listed = [(path, arrays[path], regions) for path, regions in objects.items()]
            part, blob = part_of_rank(rank, len(held), listed)
            if not listed:
                continue
            parts.append(part)
            store.publish(part.entry.name, part.data)
            store.publish(blob_name(UID, rank, 0, "raw"), blob)
            row = [part.entry.length, part.entry.head_length, part.entry.head_sha256]
            posts[rank] = {"part": row, "listing": part.listing_bytes, "raw": 0}
        if spoil is not None:
            spoil(store, parts)
        del posts[0]
        if entries is None:
            entries = [tensor(path, shapes[path]) for path in held[0]]
        reader = PartsOfRanks(
            store,
            uid=UID,
            step=STEP,
            world_size=len(held),
            references=(),
            tick=lambda: None,
            known=self.known,
        )
        reader.read(SimpleNamespace(entry=parts[0].entry, borrowed=()), posts)
        found = reader.merge(parts[0].shards, entries).blocks
        assert index_of(UID, found) == encode_index(UID, [part.shards for part in parts])
        return found


def test_new_bytes_of_the_same_shards_reuse_the_index():
    saves = Saves()
    first = saves.merge()
    assert saves.merge(seed=1) is first
    assert saves.merge(seed=2) is first


def test_nothing_of_the_tables_is_decoded_again(monkeypatch):
    saves = Saves()
    saves.merge()
    monkeypatch.delattr(merge, "decode_shards")
    monkeypatch.delattr(merge, "merged")
    saves.merge(seed=1)


def missing_row(held):
    held[2][W] = [rows(6, 8)]


def stored_twice(held):
    held[1][W] = [rows(2, 6)]


def missing_shard(held):
    held[1][W] = None


def missing_part(held):
    held[2].clear()


def missing_row_of_another_stage(held):
    held[2][HERE] = [rows(3, 5, 2)]


@pytest.mark.parametrize(
    "change",
    [missing_row, stored_twice, missing_shard, missing_part, missing_row_of_another_stage],
)
def test_other_shards_are_rechecked(change):
    saves = Saves()
    first = saves.merge()
    held = share()
    change(held)
    with pytest.raises(SaveError, match=r"(model/w|of/stage), of shape"):
        saves.merge(held)
    assert saves.merge() is first  # a failed save is not known


def test_other_complete_shards_get_a_new_index():
    saves = Saves()
    first = saves.merge()
    held = share()
    held[1][W], held[2][W] = held[2][W], held[1][W]
    assert saves.merge(held) is not first
    del held[0][B]
    held[1][B] = [Region((0,), (4,))]
    assert saves.merge(held).objects == first.objects


def test_a_larger_shape_of_the_same_shards_is_found():
    saves = Saves()
    saves.merge()
    with pytest.raises(SaveError, match=r"model/w, of shape \[10, 5\]: no shard has elements \[9:"):
        saves.merge(shapes=SHAPES | {W: (10, 5)})


def test_an_object_that_now_needs_bytes_is_found():
    saves, held = Saves(), [{W: [rows(0, 9)], B: None}, {B: None}]
    entries = [tensor(W, (9, 5)), tied(B, tensor(W, (9, 5)))]
    saves.merge(held, entries=entries)
    with pytest.raises(SaveError, match="model/b, of shape"):
        saves.merge(held)


def test_a_larger_shape_that_rank_0_does_not_have_is_found():
    """The tables of the parts summarize an object."""
    saves = Saves()
    saves.merge()
    with pytest.raises(SaveError, match=r"of/stage, of shape \[7, 2\]: no shard has elements \[6:"):
        saves.merge(shapes=SHAPES | {HERE: (7, 2)})


def test_a_larger_shape_only_on_rank_0_is_found():
    saves = Saves()
    saves.merge()
    entries = [tensor(W, (10, 5)), tensor(B, (4,))]
    with pytest.raises(SaveError, match=r"model/w, of shape \[10, 5\]: no shard has elements \[9:"):
        saves.merge(entries=entries)


def cut_off(store, parts):
    store.delete([parts[2].entry.name])
    store.publish(parts[2].entry.name, parts[2].data[:-1])


def gone(store, parts):
    store.delete([parts[2].entry.name])


def without_its_blob(store, parts):
    del parts
    store.delete([blob_name(UID, 1, 0, "raw")])


def damaged(at):
    def damage(store, parts):
        part = parts[1]
        data = bytearray(part.data)
        data[part.entry.head_length - 1 if at == "head" else part.listing_bytes - 3] ^= 1
        store.delete([part.entry.name])
        store.publish(part.entry.name, bytes(data))

    return damage


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (cut_off, SaveError),
        (gone, SaveError),
        (without_its_blob, SaveError),
        (damaged("head"), FormatError),
        (damaged("table"), FormatError),
    ],
    ids=["cut off", "gone", "without its blob", "damaged head", "damaged table"],
)
def test_parts_of_a_known_structure_are_still_read_back(spoil, error):
    saves = Saves()
    first = saves.merge()
    with pytest.raises(error):
        saves.merge(spoil=spoil)
    assert saves.merge() is first


def test_an_object_of_rank_0_in_no_part_is_refused_even_for_known_parts():
    saves = Saves()
    saves.merge()
    entries = [tensor(path, SHAPES[path]) for path in (W, B)] + [tensor(("left",), (2, 2))]
    with pytest.raises(SaveError, match="no rank has stored left"):
        saves.merge(entries=entries)

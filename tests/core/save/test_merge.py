"""Rank 0 checks that the parts of all ranks hold every byte once."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.manifests import (
    OTHER,
    UID,
    frames_for,
    plan_of,
    results_of,
    tensor,
    tied,
    value,
)
from tests.core.planned import raw_places
from tests.integration.support import memory

from penstock.core.errors import SaveError
from penstock.core.format.index import SectionShards, merged, shard_table
from penstock.core.format.part import encode_part
from penstock.core.format.records import BlobRecord, PartEntry, blob_name, part_name
from penstock.core.plan.regions import flaw_of_cover
from penstock.core.save.manifest import build_sections
from penstock.core.save.merge import PartsOfRanks
from penstock.core.tree.paths import path_hash
from penstock.core.types import Region


def check(entries, ranks):
    """Check parts of ranks that store `{path: regions}`; True: the whole, False: nothing."""
    parts = []
    for held in ranks:
        pairs = [(path_hash(path), one) for path, regions in held.items() for one in regions]
        hashes, regions = zip(*pairs, strict=True) if pairs else ((), ())
        parts.append(shard_table([SectionShards(hashes, regions)]))
    reader = PartsOfRanks(
        None, uid=UID, step=7, world_size=len(ranks), references=(), tick=lambda: None
    )
    reader.check_cover(merged(parts), range(len(ranks)), entries)


def read(borrowed, *, lent, references):
    """Read a part of rank 1 that borrows blobs, where the store has the blobs `lent`."""
    store = memory()
    for blob in lent:
        store.publish(blob.name, bytes(blob.length))
    own = SimpleNamespace(entry=PartEntry(part_name(UID, 0), 1, 1, "0" * 64), borrowed=())
    part = encode_part(
        [], uid=UID, rank=1, world_size=2, step=7, block_bytes=4096, blobs=borrowed, chains=[()]
    )
    store.publish(part.entry.name, part.data)
    post = post_of(part)
    reader = PartsOfRanks(
        store, uid=UID, step=7, world_size=2, references=references, tick=lambda: None
    )
    return reader.read(own, {1: post})


def post_of(part):
    entry = part.entry
    row = [entry.length, entry.head_length, entry.head_sha256]
    return {"part": row, "listing": part.listing_bytes, "raw": 0}


def rows(start, stop, width=5):
    return Region((start, 0), (stop - start, width))


W = ("model", "w")
ENTRY = tensor(W, (9, 5))


def test_missing_or_duplicate_data_is_named():
    for ranks, flaw in [
        ([[rows(0, 4)], [rows(4, 9)]], None),
        ([[rows(4, 9)], [], [rows(0, 4)]], None),
        ([[rows(0, 4)], [rows(5, 9)]], "no shard has elements [4:5, 0:5]"),
        ([[rows(0, 4)], [rows(4, 8)]], "no shard has elements [8:9, 0:5]"),
        ([[rows(0, 5)], [rows(4, 9)]], "several shards have elements [4:5, 0:5]"),
        ([[rows(0, 4)], [rows(0, 4)], [rows(4, 9)]], None),  # replicas
        ([[True], [rows(4, 9)]], "several shards have elements [4:9, 0:5]"),
        ([[True], [True]], None),
        ([[True], [False]], None),
        ([[False], [False]], "no shard has elements [0:9, 0:5]"),
        ([[Region((0, 0), (9, 2))], [Region((0, 2), (9, 3))]], None),
        ([[Region((0, 0), (9, 2))], [Region((0, 2), (9, 2))]], "no shard has elements [0:9, 4:5]"),
        ([[rows(0, 4), rows(6, 9)], [rows(4, 6)]], None),
        ([[rows(0, 4)], [Region((4,), (5,))]], "a shard has another number of dimensions"),
    ]:
        held = [{W: regions} for regions in ranks]
        if flaw is None:
            check([ENTRY], held)
            continue
        with pytest.raises(SaveError) as info:
            check([ENTRY], held)
        assert f"step 7: model/w, of shape [9, 5]: {flaw}" in str(info.value)


def test_an_object_without_own_bytes_needs_none():
    entries = [ENTRY, tied(("tied",), ENTRY), tensor(("empty",), (0, 5))]
    check(entries, [{W: [True], ("tied",): [False], ("empty",): [False]}])


def test_a_value_of_any_length_is_stored_whole():
    entries = [value(("v",), 3)]
    check(entries, [{("v",): [True]}, {("v",): [True]}])
    with pytest.raises(SaveError, match=r"v, of shape .*another number of dimensions"):
        check(entries, [{("v",): [Region((0,), (2,))]}, {("v",): [Region((2,), (1,))]}])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5))
def test_rows_are_checked_like_regions(spans):
    regions = [rows(min(a, b), max(a, b)) for a, b in spans]
    flaw = flaw_of_cover((9, 5), regions)
    ranks = [{W: [region]} for region in regions]
    if flaw is None:
        check([ENTRY], ranks)
        return
    with pytest.raises(SaveError) as info:
        check([ENTRY], ranks)
    assert flaw in str(info.value)


def parts_of(*described):
    """Parts of ranks 1 and up that have sealed: of each its entries, and what it derives."""
    store, posts = memory(), {}
    for rank, (entries, derived) in enumerate(described, 1):
        plan = plan_of(entries)
        results, _ = results_of(plan, 4096)
        drafts = build_sections(entries, plan, frames_for(plan, results), derived=derived)
        blob = BlobRecord(blob_name(UID, rank, 0, "raw"), raw_places(plan)[1])
        part = encode_part(
            drafts, uid=UID, rank=rank, world_size=len(described) + 1, step=7, block_bytes=4096,
            blobs=[blob], chains=[()],
        )  # fmt: skip
        store.publish(part.entry.name, part.data)
        store.publish(blob.name, bytes(blob.length))
        posts[rank] = post_of(part)
    reader = PartsOfRanks(
        store, uid=UID, step=7, world_size=len(posts) + 1, references=(), tick=lambda: None
    )
    own = SimpleNamespace(entry=PartEntry(part_name(UID, 0), 1, 1, "0" * 64), borrowed=())
    reader.read(own, posts)
    return reader


MASTER = tensor(("master", "w"), (9, 5))
NUMPY = ENTRY._replace(form="ndarray")
UNLIKE = {
    "derived": (
        ([ENTRY, MASTER], {0: 1}),
        ([ENTRY, MASTER], {}),
        r"5\] that is rounded from master/w on rank 1, and a .* 5\] on rank 2: give all ranks",
    ),
    "form": (
        ([ENTRY], {}),
        ([NUMPY], {}),
        r"5\] \(tensor\) on rank 1, and a .* 5\] \(ndarray\) on rank 2: one path has to be",
    ),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_differing_descriptions_of_ranks_are_explained(what):
    one, other, message = UNLIKE[what]
    nothing = shard_table([SectionShards((), ())])
    with pytest.raises(SaveError, match=f"step 7: model/w is a float32 parameter .*{message}"):
        parts_of(one, other).merge(nothing, [])


def test_many_objects_are_separated():
    paths = [("model", str(n)) for n in range(50)]
    entries = [tensor(path, (8, 5)) for path in paths]
    ranks = [{path: [rows(2 * rank, 2 * rank + 2)] for path in paths} for rank in range(4)]
    check(entries, ranks)
    del ranks[2][paths[17]]
    with pytest.raises(SaveError, match=r"model/17, of shape .*no shard has elements \[4:6"):
        check(entries, ranks)
    assert np.unique([path_hash(path) for path in paths]).size == 50


def test_objects_of_rank_0_in_no_part_are_named():
    left = tensor(("model", "left"), (9, 5))
    for ranks in ([[True]], [[rows(0, 4)], [rows(4, 9)]], [[]]):
        with pytest.raises(SaveError, match="no rank has stored model/left, which rank 0 has"):
            check([ENTRY, left] if ranks[0] else [left], [{W: regions} for regions in ranks])


def test_borrowed_data_exists_and_is_protected():
    blob = BlobRecord(blob_name(OTHER, 1, 0, "enc"), 9)
    _, part = read([blob], lent=[blob], references={OTHER})
    assert (part.borrowed, part.bytes_stored) == ((blob,), 0)
    for lent in [[], [BlobRecord(blob.name, 8)]]:
        with pytest.raises(SaveError, match="the data of rank 1 is not on memory"):
            read([blob], lent=lent, references={OTHER})
    with pytest.raises(SaveError, match=r"rank 1 refers to .* does not protect"):
        read([blob], lent=[blob], references={"ab" * 16})

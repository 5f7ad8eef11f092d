"""Bytes of parts and sections: round trips, and refusals."""

import copy
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.core import manifests

from penstock.core.abc import Node
from penstock.core.errors import FormatError, SaveError
from penstock.core.format.compressed import compress, decompress, digest
from penstock.core.format.part import (
    decode_section,
    decode_shards,
    encode_part,
    read_head,
)
from penstock.core.format.records import (
    BlobRecord,
    ChunkRef,
    Frame,
    NodeRecord,
    ObjectRecord,
    PartEntry,
    Section,
    ShardRecord,
    blob_uid,
    commit_name,
    compacted_generation,
    generation_above,
    parse_commit_name,
    part_name,
)
from penstock.core.format.section import read_section
from penstock.core.format.strict_json import dump_json, load_json
from penstock.core.limits import MAX_FRAME_BYTES
from penstock.core.save.manifest import build_sections
from penstock.core.tree.paths import path_hash
from penstock.core.types import PAGE_BYTES, Kind, Region, Role, TensorSpec

any_text = st.text(st.characters(), max_size=8)  # lone surrogates included
paths = st.lists(any_text, max_size=4).map(tuple)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def described(draw):
    entries, stored, chains = [], [], {}
    for path in draw(st.lists(paths, unique=True, max_size=25)):
        kind = draw(st.sampled_from(["tensor", "value", "tied", "node"]))
        if kind == "node":
            meta = draw(st.dictionaries(any_text, json_values, max_size=2))
            entries.append(Node(path, draw(any_text), meta))
            continue
        if kind == "tied" and stored:
            entries.append(manifests.tied(path, draw(st.sampled_from(stored))))
            continue
        chains[len(stored)] = draw(st.integers(0, 2))
        if kind == "value":
            stored.append(manifests.value(path, draw(st.integers(0, 900))))
        else:
            shape = draw(st.lists(st.integers(0, 20), max_size=3))
            stored.append(manifests.tensor(path, shape))
        entries.append(stored[-1])
    return entries, chains


def flat(sections):
    """Everything that sections hold, with chunk references resolved to frames."""
    found = {}
    for section in sections:
        for record in section.objects:
            places = [
                (section.frames[r.frame], r.at, r.start, r.stop)
                for s in record.shards
                for r in s.chunks
            ]
            found[record.ordinal] = (record._replace(shards=(), frames=(), head=None), places)
        for node in section.nodes:
            found[node.ordinal] = node
    return found


@given(described(), st.integers(1, 6), st.integers(1, 3))
@example(([manifests.tensor(("\ud83d\ude00",))], {}), 1, 1)
@example(([manifests.tensor((name,)) for name in "ab"], {0: 1, 1: 1}), 1, 1)
def test_descriptions_round_trip(case, section_objects, pages):
    entries, chains = case
    block_bytes = pages * PAGE_BYTES
    made = manifests.Manifest(
        entries, chains=chains, section_objects=section_objects, block_bytes=block_bytes
    )
    expected = {}
    for ordinal, entry in enumerate(entries):
        if isinstance(entry, Node):
            expected[ordinal] = NodeRecord(ordinal, entry.path, entry.form, entry.meta)
            continue
        record = ObjectRecord(
            ordinal, entry.path, entry.kind, entry.spec, entry.role, entry.form, (), None,
            same_as=entry.same_as,
        )  # fmt: skip
        places = [
            (
                Frame(
                    int(chunk.chain > 0), r.offset, r.length, chunk.length, chunk.chain,
                    r.checksums, r.raw_checksum, r.lengths,
                    # What a reader cannot infer from the objects: several in an encoded slab.
                    (chunk.dtype, chunk.itemsize)
                    if chunk.chain and len(chunk.pieces) > 1 and chunk.dtype != "uint8"
                    else None,
                ),
                piece.at, piece.start, piece.stop,
            )
            for chunk, r in zip(made.plan.chunks, made.results, strict=True)
            for piece in chunk.pieces
            if made.plan.objects[piece.item].entry is entry
        ]  # fmt: skip
        expected[ordinal] = (record, places)
    sections = made.sections()
    assert flat(sections) == expected
    assert all(len(s.objects) + len(s.nodes) <= section_objects for s in sections)
    assert made.head().block_bytes == block_bytes
    assert made.head().chains == tuple(manifests.CHAINS)
    assert made.head().choices == tuple(manifests.CHOICES)


@given(described(), st.integers(1, 4))
def test_path_hashes_lead_to_the_section_that_holds_the_path(case, section_objects):
    entries, chains = case
    made = manifests.Manifest(entries, chains=chains, section_objects=section_objects)
    head = made.head()
    info = head.shards
    table = decode_shards(made.part.data[info.offset : info.offset + info.length], head)
    got = sorted(zip(table.hashes.tolist(), table.sections.tolist(), strict=True))
    want = [
        (path_hash(o.path), number) for number, s in enumerate(made.sections()) for o in s.objects
    ]
    assert got == sorted(want)


def test_sections_of_two_ranks_with_shards_round_trip():
    spec = TensorSpec("bfloat16", 2, (8, 6))
    frames = (Frame(0, 4160, 48, 48, 0, (1,)), Frame(1, 0, 10, 24, 1, (2,), 3))
    shards = (
        ShardRecord(Region((2, 0), (4, 6)), (ChunkRef(0, 0, 0, 48),)),
        ShardRecord(Region((6, 3), (2, 3)), (ChunkRef(1, 2, 0, 8), ChunkRef(1, 12, 8, 12))),
    )
    section = Section(
        frames,
        (
            ObjectRecord(
                4, ("a", "b"), Kind.TENSOR, spec, Role.OTHER, "tensor", frames, None, shards
            ),
        ),
        (NodeRecord(0, (), "dict", {}),),
    )
    part = encode_part(
        [manifests.section_of(section)],
        uid=manifests.UID,
        rank=1,
        world_size=2,
        step=5,
        block_bytes=PAGE_BYTES,
        blobs=[
            BlobRecord(f"data/{manifests.UID}/blobs/00001-0.raw", 5000),
            BlobRecord(f"data/{manifests.OTHER}/blobs/00001-0.enc", 10),
        ],
        chains=manifests.CHAINS,
    )
    entry = part.entry
    assert entry.name == part_name(manifests.UID, 1)
    binding = {"uid": manifests.UID, "rank": 1, "world_size": 2}
    data = part.data[: entry.head_length]
    (name, length) = f"data/{manifests.OTHER}/blobs/00001-0.enc", 10
    for borrowed in ([], [BlobRecord(name, length + 1)], [BlobRecord(name[:-3] + "raw", length)]):
        with pytest.raises(FormatError, match="nor borrowed by the commit record"):
            read_head(data, entry, **binding, borrowed=borrowed)
    head = read_head(data, entry, **binding, borrowed=[BlobRecord(name, length)])
    info = head.sections[0]
    assert info.groups == ("a",)
    data = part.data[info.offset : info.offset + info.length]
    records = tuple(record._replace(head=head) for record in section.objects)
    assert decode_section(data, info, head) == replace(section, objects=records)


def test_a_slab_with_objects_in_two_sections_is_listed_in_both():
    entries = [manifests.tensor(("m", str(n)), (4,)) for n in range(6)]
    made = manifests.Manifest(entries, section_objects=4)
    first, second = made.sections()
    assert first.frames == second.frames
    assert [len(first.objects), len(second.objects)] == [4, 2]


def test_a_plan_that_misses_bytes_is_refused():
    entries = [manifests.tensor(("a",), (9000,))]
    plan = manifests.plan_of(entries)
    results, _ = manifests.results_of(plan, PAGE_BYTES)
    for keep in (slice(0, -1), slice(1, None), slice(None, None, -1)):
        cut = replace(plan, chunks=plan.chunks[keep])
        with pytest.raises(SaveError, match=r"of item 0|bytes of"):
            build_sections(entries, cut, manifests.frames_for(cut, results[keep]))


def read_all(made):
    head = made.head()
    made.sections()
    info = head.shards
    decode_shards(made.part.data[info.offset : info.offset + info.length], head)


# -- damage -------------------------------------------------------------------------------------


@given(data=st.data())
def test_every_flipped_bit_of_a_part_is_found(data):
    made = manifests.example()
    good = made.part.data
    at = data.draw(st.integers(0, len(good) * 8 - 1))
    bad = bytearray(good)
    bad[at // 8] ^= 1 << at % 8
    made.part = replace(made.part, data=bytes(bad))
    with pytest.raises(FormatError, match=part_name(manifests.UID, 0)):
        read_all(made)


@pytest.mark.parametrize("change", [{"uid": manifests.OTHER}, {"step": 99}, {"world_size": 2}])
def test_the_part_of_another_save_is_refused(change):
    made = manifests.example()
    made.record = replace(made.record, **change)
    with pytest.raises(FormatError):
        made.head()


def nodes_of(value, path=()):
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from nodes_of(value[key], (*path, key))


def changed(value, path, new):
    if not path:
        return new
    result = copy.copy(value)
    result[path[0]] = changed(value[path[0]], path[1:], new)
    return result


def removed(value, path):
    result = copy.copy(value)
    if len(path) == 1:
        del result[path[0]]
    else:
        result[path[0]] = removed(value[path[0]], path[1:])
    return result


replacements = (
    st.integers(-3, 40)
    | st.sampled_from([2**62, 2**63, 2**200, -1.5, 1e400, True, None, "", "x", [], {}, [[]], [0]])
    | json_values
)


@st.composite
def mutated(draw, body):
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(list(nodes_of(body))))
        if path and draw(st.booleans()):
            body = removed(body, path)
        else:
            body = changed(body, path, draw(replacements))
        if not isinstance(body, dict | list):
            break
    return body


@given(data=st.data())
def test_mutated_and_re_signed_section_is_refused_or_consistent(data):
    made = manifests.example()
    head = made.head()
    number = data.draw(st.integers(0, len(made.writers) - 1))
    body = data.draw(mutated(load_json(made.writers[number].dump(), "")))
    try:
        section = read_section(dump_json(body), head, head.sections[number], "x")
    except FormatError as error:
        assert error.damaged  # noqa: PT017
        return
    for record in section.objects:
        for shard in record.shards:
            start = 0
            for ref in shard.chunks:
                assert ref.start == start
                assert ref.at + ref.stop - ref.start <= section.frames[ref.frame].raw_length
                start = ref.stop
            assert start == record.spec.itemsize * shard.region.numel == record.spec.nbytes
    for frame in section.frames:
        assert 0 <= frame.offset <= frame.offset + frame.length <= head.blobs[frame.blob].length
    assert manifests.section_of(section).dump()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("shape", (1,) * 65),
        ("shape", (0, 1 << 62)),
        ("path", ("x",) * 1025),
        ("ordinal", 1 << 62),
        ("shards", [[0, 0, 1]]),
    ],
)
def test_a_part_that_no_reader_accepts_is_not_encoded(column, value):
    made = manifests.example()
    drafts = [copy.deepcopy(draft) for draft in made.writers]
    drafts[0].columns[column][0] = value
    head = made.head()
    with pytest.raises(FormatError, match=r"section (at|to be stored)"):
        encode_part(
            drafts, uid=head.uid, rank=0, step=100, block_bytes=head.block_bytes,
            blobs=head.blobs, chains=head.chains,
        )  # fmt: skip


@given(data=st.data())
def test_mutated_and_re_signed_head_is_refused_or_consistent(data):
    made = manifests.example()
    good = load_json(decompress(made.part.data[: made.part.entry.head_length], ""), "")
    body = data.draw(mutated(good))
    raw = compress(dump_json(body))
    length = made.part.entry.length - made.part.entry.head_length + len(raw)
    entry = PartEntry(made.part.entry.name, length, len(raw), digest(raw))
    try:
        head = read_head(raw, entry, uid=manifests.UID, rank=0, world_size=1)
    except FormatError:
        return
    assert head.uid == manifests.UID
    assert head.chains[0] == ()
    assert head.block_bytes % PAGE_BYTES == 0
    assert {blob_uid(blob.name) for blob in head.blobs} <= {manifests.UID}
    end = len(raw)
    for info in (head.shards, *head.sections):
        assert info.offset == end
        end += info.length
    assert end == length


def lie(number, *path):
    """A change of one field of the example's section, then decoded."""
    *where, new = path

    def check():
        made = manifests.example()
        body = load_json(made.writers[number].dump(), "")
        info = made.head().sections[number]
        read_section(dump_json(changed(body, tuple(where), new)), made.head(), info, "x")

    return check


def test_a_lie_is_named():
    for check, complaint in [
        (lie(0, "frames", "offset", 0, 10**9), "beyond blob"),
        (lie(0, "frames", "blob", 0, 2), "integers"),
        (lie(0, "frames", "chain", 0, 3), "integers"),
        (lie(0, "frames", "chain", 0, 1), "no checksum of its content"),
        (lie(0, "frames", "checksums", 0, "00" * 8), "checksum for each"),
        (lie(0, "frames", "checksums", 0, "0g" * 24), "checksum for each"),
        (lie(0, "frames", "raw_length", 0, 1), "fields of an encoded frame"),
        (lie(0, "frames", "raw_length", 0, 1 << 31), "integers"),
        (lie(0, "objects", "shards", 0, 0, 0, 2, 1), "unlike its shape"),
        (lie(0, "objects", "shards", 0, 0, 0, 0, 7), "that frame 7 does not have"),
        (lie(0, "objects", "shards", 0, 0, 0, 1, 4), "that frame 0 does not have"),
        (lie(0, "objects", "shards", 0, []), "0 shards"),
        (lie(0, "objects", "shards", 0, [3]), "list"),
        (lie(0, "objects", "shards", 0, [[[], [0, 0], [0, 0]]]), "stored whole"),
        (lie(0, "objects", "shape", 0, [60, -70]), "integers"),
        (lie(0, "objects", "shape", 0, [60, 70.0]), "integers"),
        (lie(0, "objects", "path", 1, ["model", "wte.weight"]), "path twice"),
        (lie(0, "objects", "path", 1, ["model", 5]), "strings"),
        (lie(0, "objects", "path", 1, ["other", "x"]), "top-level keys"),
        (lie(0, "objects", "ordinal", 1, 1), "ordinal twice"),
        (lie(0, "objects", "type", 0, 9), "integers"),
        (lie(0, "types", 0, 0, "thing"), "thing"),
        (lie(0, "types", 0, 3, "nothing"), "nothing"),
        (lie(0, "nodes", 0, 3, []), "meta"),
        (lie(1, "objects", "same_as", [[0, ["model", "head.weight"]]]), "tied"),
    ]:
        with pytest.raises(FormatError, match=complaint):
            check()


@pytest.mark.parametrize("position", [0, 3, 8])
def test_one_lie_among_objects_checked_together_is_named(position):
    entries = [manifests.tensor(("m", str(n)), (n // 2 + 1,)) for n in range(9)]
    made = manifests.Manifest(entries, section_objects=9)
    info, good = made.head().sections[0], load_json(made.writers[0].dump(), "")
    ((_, offset, length),) = good["objects"]["shards"][position][0]
    end, size = good["frames"]["raw_length"][0], position // 2 + 1
    for ref, shape, complaint in [
        ([False, offset, length], [size], "integers"),
        ([0, float(offset), length], [size], "integers"),
        ([-1, offset, length], [size], "integers"),
        ([0, -4, length], [size], "integers"),
        ([1, offset, length], [size], "that frame 1 does not have"),
        ([0, end - length + 1, length], [size], "that frame 0 does not have"),
        ([0, offset, length - 1], [size], "unlike its shape"),
        ([0, offset, 0], [0], "empty chunk"),
        ([0, offset, length], [size + 1], "unlike its shape"),
        ([0, offset, length], [float(size)], "integers"),
        ([0, offset, length], [size] + [1] * 64, "65 dimensions"),
    ]:
        body = copy.deepcopy(good)
        body["objects"]["shards"][position] = [[ref]]
        body["objects"]["shape"][position] = shape
        with pytest.raises(FormatError, match=f"object {position}: .*{complaint}"):
            read_section(dump_json(body), made.head(), info, "x")
    good["objects"]["same_as"] = [[position, ["m", "x"]]]
    with pytest.raises(FormatError, match=f"object {position}: .*has shards"):
        read_section(dump_json(good), made.head(), info, "x")


def test_a_lie_about_a_derived_object_is_named():
    for derived, shards, complaint in [
        ([[0, ["model", "x"]]], None, "has shards"),
        ([[0, ["model", "wte.weight"]]], [], "to itself"),
        ([[99, ["model", "x"]]], None, "integers"),
        ([[0, ["x"]], [0, ["y"]]], [], "object twice"),
        ([[0, 7]], [], "list"),
        ([0], [], "list"),
        ([], [], "0 shards"),
    ]:
        made = manifests.example()
        body = load_json(made.writers[0].dump(), "")
        body["objects"]["derived"] = derived
        if shards is not None:
            body["objects"]["shards"][0] = shards
        with pytest.raises(FormatError, match=complaint):
            read_section(dump_json(body), made.head(), made.head().sections[0], "x")


def test_a_lie_about_errors_is_named():
    for errors, complaint in [
        ([[0, 1.0]], "list"),
        ([7], "list"),
        ([[99, 1.0, 1.0]], "integers"),
        ([[0, 1.0, 1.0], [0, 2.0, 2.0]], "object twice"),
        ([[0, -1.0, 1.0]], "finite number"),
        ([[0, 1.0, "1"]], "finite number"),
        ([[0, True, 1.0]], "finite number"),
        ([[0, 1.0, float("inf")]], "finite number"),
        ([[0, float("nan"), 1.0]], "finite number"),
    ]:
        made = manifests.example()
        body = load_json(made.writers[0].dump(), "")
        body["objects"]["errors"] = errors
        with pytest.raises(FormatError, match=complaint):
            read_section(dump_json(body), made.head(), made.head().sections[0], "x")


def test_a_lie_about_choices_is_named():
    for choices, complaint in [
        ([["other uint8", None]], "list"),
        ([7], "list"),
        ([[7, None, "raw"]], "objects is not a string"),
        ([["other uint8", 7, "raw"]], "codec is not a string"),
        ([["other uint8", "zstd" * 100, "raw"]], "codec is not a string"),
        ([["other uint8", None, None]], "why is not a string"),
        ([["other uint8", None, "raw"], ["other uint8", "zstd", "zstd"]], "a class twice"),
    ]:
        with pytest.raises(FormatError, match=complaint):
            head_with(choices=choices)


def head_with(**changes):
    """Read the head of a part with other fields, signed again."""
    made = manifests.example().part
    head = load_json(decompress(made.data[: made.entry.head_length], ""), "")
    raw = compress(dump_json(head | changes))
    length = made.entry.length - made.entry.head_length + len(raw)
    entry = replace(made.entry, length=length, head_length=len(raw), head_sha256=digest(raw))
    return read_head(raw, entry, uid=manifests.UID, rank=0, world_size=1)


def test_an_unknown_required_feature_of_a_part_is_named_an_optional_ignored():
    with pytest.raises(FormatError, match=r"parts/00000.* requires 'tape'.* use a newer release"):
        head_with(requires=["tape"])
    plain, hinted = head_with(), head_with(requires=[], optional={"hints": 1})
    assert (hinted.blobs, hinted.chains) == (plain.blobs, plain.chains)


def test_unknown_fields_are_refused():
    made = manifests.example()
    body = load_json(made.writers[0].dump(), "")
    with pytest.raises(FormatError, match="unknown fields: 'extra'"):
        read_section(dump_json({**body, "extra": 1}), made.head(), made.head().sections[0], "x")


def test_a_frame_that_decompresses_to_more_than_it_declares_is_refused():
    bomb = compress(b"a" * 1000)
    with pytest.raises(FormatError, match="declares 1000"):
        decompress(bomb, "x", raw_length=999)


def test_a_frame_beyond_the_limit_is_refused_before_it_is_decompressed():
    magic, declares_eight_bytes, empty_last_block = b"\x28\xb5\x2f\xfd", b"\xe0", b"\x01\x00\x00"
    size = (MAX_FRAME_BYTES + 1).to_bytes(8, "little")
    bomb = magic + declares_eight_bytes + size + empty_last_block
    with pytest.raises(FormatError, match=f"declares {MAX_FRAME_BYTES + 1}"):
        decompress(bomb, "x")


@pytest.mark.parametrize(
    "data", [b"", b"junk", compress(b"abc") + b"x", compress(b"abc") * 2, compress(b"abcdefg")[:-1]]
)
def test_input_other_than_one_frame_is_refused(data):
    with pytest.raises(FormatError):
        decompress(data, "x")


def test_deeply_nested_json_is_refused():
    with pytest.raises(FormatError):
        load_json(b"[" * 100_000, "x")


# -- names --------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 50), min_size=1), st.integers(0, 50))
def test_a_compaction_ranks_between_its_checkpoint_and_later_overwrites(present, late):
    overwrite = generation_above(commit_name(7, generation) for generation in present)
    for generation in present:
        assert generation < compacted_generation(generation) < overwrite
    # Whatever the two know, they never choose one name.
    assert compacted_generation(late) != overwrite


def test_other_names_are_no_commit_names():
    for name in [
        "commits/00000001-0.json\n",
        "commits/1-0.json",
        "commits/000000001-0.json",
        "commits/00000001-00.json",
        "commits/00000001.json",
        "commits/x/00000001-0.json",
        "commits/٠٠٠٠٠٠٠١-0.json",
    ]:
        assert parse_commit_name(name) is None


def test_other_names_are_no_blob_names():
    for name in [
        f"data/{manifests.UID}/blobs/../x",
        f"data/{manifests.UID}/blobs/..",
        f"data/{manifests.UID}/blobs/",
        f"data/{manifests.UID}/blobs/a/b",
        f"data/{manifests.UID}/blobs/a\n",
        f"/data/{manifests.UID}/blobs/a",
        f"data/{manifests.UID.upper()}/blobs/a",
        f"data/{manifests.UID}/parts/a",
        f"data/{manifests.UID}/blobs/{'a' * 500}",
    ]:
        assert blob_uid(name) is None

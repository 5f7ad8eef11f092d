"""Damage to what is stored is found, named, and never becomes a value."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from tests.integration.support import (
    ENCODED,
    Run,
    bits,
    blank,
    checkpointer,
    leaves,
    make_state,
    memory,
    place_of,
    same,
)

from penstock import (
    CheckpointNotFoundError,
    DamagedError,
    RestoreError,
    RestoreMismatchError,
)

STEP = 2
ALL = {path for path, _ in leaves(make_state())}
ENCODED_PATHS = {path for path in ALL if path.startswith("optimizer/")}
RAW_PATHS = ALL - ENCODED_PATHS


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Steps 1 and 2 of one layout with other contents, and what was saved as step 2."""
    run = Run(tmp_path_factory.mktemp("pristine") / "root")
    state = make_state(1)
    with run.open(**ENCODED) as ckpt:
        ckpt.save(state, 1, mode="blocking")
        for (_, tensor), (_, new) in zip(leaves(state), leaves(make_state(STEP)), strict=True):
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(new)
        state["epoch"] = STEP
        ckpt.save(state, STEP, mode="blocking")
    return run, state


@pytest.fixture
def run(pristine, tmp_path):
    return pristine[0].copy_to(tmp_path / "root")


@pytest.fixture
def saved(pristine):
    return pristine[1]


@pytest.fixture
def ckpt(run):
    with run.open() as ckpt:
        yield ckpt


def read_all_ways(ckpt, saved, step=STEP):
    """Names of what each way of reading finds damaged; what it returns instead has to be exact."""
    found = {}

    def attempt(way, read, expected):
        try:
            got = read()
        except DamagedError as error:
            found[way] = set(error.damaged)
            said = str(error)
        else:
            assert same(got, expected), f"{way} returned wrong values"
            return
        assert found[way], way
        assert any(name in said for name in found[way]), way

    def restore():
        tree = blank(saved)
        ckpt.restore(tree, step)
        return tree

    attempt("restore", restore, saved)
    attempt("load", lambda: ckpt.load(step), saved)
    for path, value in leaves(saved):
        attempt(f"open {path}", lambda path=path: ckpt.open(step)[path], value)
        if isinstance(value, torch.Tensor):
            part = (slice(1, 6),)
            attempt(
                f"region {path}", lambda path=path, part=part: ckpt.open(step).read(path, part),
                value[part].contiguous(),
            )  # fmt: skip
    attempt("subtree", lambda: ckpt.open(step)["model"], saved["model"])
    return found


def damage_of(ckpt, step=STEP):
    report = ckpt.verify(step)
    assert report.ok is (not report.damaged)
    return {damage.what for damage in report.damaged}


def step_of(ckpt, step):
    """What the names of a step's data begin with."""
    return f"data/{ckpt.open(step).info.uid}"


# -- blobs -----------------------------------------------------------------------------------------


def flip_in_a_raw_block(run, checkpoint):
    place = place_of(checkpoint, "model/weight", 1)
    run.flip(place.blob, place.offset + 9000)
    return {"model/weight"}


def flip_in_the_last_byte_of_an_object(run, checkpoint):
    place = place_of(checkpoint, "table", 1)
    run.flip(place.blob, place.offset + place.length - 1, mask=0x80)
    return {"table"}


def flip_in_a_slab(run, checkpoint):
    place = place_of(checkpoint, "model/bias")
    run.flip(place.blob, place.offset + 5)
    return {"model/bias"}


def flip_in_an_encoded_frame(run, checkpoint):
    place = place_of(checkpoint, "optimizer/moment", 2)
    run.flip(place.blob, place.offset + place.length // 2)
    return {"optimizer/moment"}


def flip_in_an_encoded_slab(run, checkpoint):
    place = place_of(checkpoint, "optimizer/step")
    run.flip(place.blob, place.offset + place.length - 1)
    return {"optimizer/step", "optimizer/variance"}


def swapped_frames(run, checkpoint):
    one, other = (place_of(checkpoint, "model/weight", number) for number in (1, 2))
    assert (one.blob, one.length) == (other.blob, other.length)
    run.swap(one.blob, one.offset, other.offset, one.length)
    return {"model/weight"}


def raw_blob_cut_in_the_middle(run, checkpoint):
    place = place_of(checkpoint, "model/weight", 1)
    run.truncate(place.blob, place.offset + 100)
    return {"model/weight"}


def encoded_blob_missing(run, checkpoint):
    run.remove(place_of(checkpoint, "optimizer/step").blob)
    return ENCODED_PATHS


def raw_blob_of_another_step(run, checkpoint):
    return blob_of_another_step(run, checkpoint, "raw", RAW_PATHS)


def encoded_blob_of_another_step(run, checkpoint):
    return blob_of_another_step(run, checkpoint, "enc", ENCODED_PATHS)


def blob_of_another_step(run, checkpoint, kind, paths):
    mine = place_of(checkpoint, min(paths)).blob
    (other,) = (name for name in run.names(f"data/*/blobs/*.{kind}") if name != mine)
    run.write(mine, run.read(other))
    return paths


# `test_matrix` has more kinds of damage, for one object each.
BLOB_DAMAGE = [
    flip_in_an_encoded_slab,
    swapped_frames,
    raw_blob_of_another_step,
    encoded_blob_of_another_step,
]


@pytest.mark.parametrize("damage", BLOB_DAMAGE, ids=lambda d: d.__name__)
def test_damage_in_a_blob_is_named_by_path_on_every_way_of_reading(damage, run, ckpt, saved):
    expected = damage(run, ckpt.open(STEP))
    found = read_all_ways(ckpt, saved)
    # Values are read first; where they are damaged, tensors are not looked at any more.
    assert found["restore"] & expected
    assert found["load"] & expected
    for path in expected:
        assert found[f"open {path}"] == {path}
    assert expected <= damage_of(ckpt)
    assert not found["restore"] & (RAW_PATHS if expected <= ENCODED_PATHS else ENCODED_PATHS)
    assert not read_all_ways(ckpt, make_state(1), step=1)  # the other step is whole


def test_damage_elsewhere_does_not_keep_whole_objects_from_being_read(run, ckpt, saved):
    flip_in_a_raw_block(run, ckpt.open(STEP))
    found = read_all_ways(ckpt, saved)
    assert {way for way in found if way.startswith(("open", "region"))} <= {
        "open model/weight",
        "region model/weight",
    }
    tree = ckpt.load(STEP, exclude="model/weight")
    assert same(tree["optimizer"], saved["optimizer"])
    target = {"table": torch.zeros(6000)}
    ckpt.restore(target, STEP, include="table")
    assert same(target["table"], saved["table"])


def test_a_region_is_read_while_other_blocks_of_the_tensor_are_damaged(run, ckpt, saved):
    place = place_of(ckpt.open(STEP), "model/weight", 3)
    run.flip(place.blob, place.offset + place.length - 1)
    checkpoint = ckpt.open(STEP)
    assert same(checkpoint.read("model/weight", (slice(0, 10),)), saved["model"]["weight"][:10])
    with pytest.raises(DamagedError) as caught:
        checkpoint.read("model/weight", (slice(90, 100),))
    assert caught.value.damaged == ("model/weight",)


def test_verify_lists_all_damage_not_only_the_first(run, ckpt):
    checkpoint = ckpt.open(STEP)
    expected = flip_in_a_raw_block(run, checkpoint) | flip_in_an_encoded_frame(run, checkpoint)
    expected |= flip_in_a_slab(run, checkpoint) | flip_in_the_last_byte_of_an_object(
        run, checkpoint
    )
    assert expected <= damage_of(ckpt)


def test_verify_lists_damage_of_manifest_and_blobs_at_once(run, ckpt):
    prefix = step_of(ckpt, STEP)
    expected = flip_in_a_raw_block(run, ckpt.open(STEP))
    encoded = place_of(ckpt.open(STEP), "optimizer/moment").blob
    run.remove(encoded)
    run.flip(f"{prefix}/index", 20)
    found = damage_of(ckpt)
    assert expected <= found
    assert {f"{prefix}/index", encoded} <= found
    assert found >= ENCODED_PATHS


def test_a_shallow_verify_finds_missing_and_cut_blobs(run, ckpt):
    raw_blob_cut_in_the_middle(run, ckpt.open(STEP))
    encoded_blob_missing(run, ckpt.open(STEP))
    report = ckpt.verify(STEP, deep=False)
    named = {damage.what for damage in report.damaged}
    assert {name.rpartition(".")[2] for name in named} == {"raw", "enc"}
    assert not report.deep


def test_bytes_between_frames_may_differ_without_harm(run, ckpt, saved):
    checkpoint = ckpt.open(STEP)
    name = place_of(checkpoint, "table").blob
    used = bytearray(len(run.read(name)))
    for start, stop in frames_of(checkpoint)[name]:
        used[start:stop] = b"\x01" * (stop - start)
    assert not all(used)
    data = bytearray(run.read(name))
    run.write(
        name, bytes(byte if inside else 0xEE for byte, inside in zip(data, used, strict=True))
    )
    assert run.read(name) != data
    assert not read_all_ways(ckpt, saved)
    assert ckpt.verify(STEP).ok


# -- manifest --------------------------------------------------------------------------------------


def cut(run, name):
    run.truncate(name, len(run.read(name)) // 2)


def missing(run, name):
    run.remove(name)


def flip_middle(run, name):
    run.flip(name, len(run.read(name)) // 2)


def of_another_step(run, name):
    leaf = name.split("/", 2)[2]
    (other,) = (n for n in run.names(f"data/*/{leaf}") if n != name)
    run.write(name, run.read(other))


@pytest.mark.parametrize("damage", [flip_middle, of_another_step], ids=lambda d: d.__name__)
def test_a_damaged_part_is_found_by_every_way_of_reading(damage, run, ckpt, saved):
    name = f"{step_of(ckpt, STEP)}/parts/00000.json.zst"
    damage(run, name)
    found = read_all_ways(ckpt, saved)
    assert found.keys() >= {"restore", "load", "open table", "region table", "subtree"}
    assert all(any(name in what for what in names) for names in found.values())
    assert any(name in what for what in damage_of(ckpt))


@pytest.mark.parametrize("damage", [flip_middle, missing], ids=lambda d: d.__name__)
def test_a_damaged_index_is_found_by_verify_and_by_whoever_uses_it(damage, run, ckpt, saved):
    name = f"{step_of(ckpt, STEP)}/index"
    damage(run, name)
    found = read_all_ways(ckpt, saved)
    assert found.keys() >= {"open table", "region table", "subtree"}
    assert all(name in names for names in found.values())
    assert name in damage_of(ckpt)
    with pytest.raises(DamagedError, match="index"):
        ckpt.open(STEP).__contains__("no such object")


@pytest.mark.parametrize("name", ["index", "parts/00000.json.zst"])
def test_verify_finds_bytes_behind_the_end_of_a_record(name, run, ckpt, saved):
    name = f"{step_of(ckpt, STEP)}/{name}"
    run.write(name, run.read(name) + b"more")
    assert not read_all_ways(ckpt, saved)  # nobody reads them
    assert name in damage_of(ckpt)


def test_verify_finds_damage_in_the_path_hashes_of_a_part(run, ckpt, saved):
    checkpoint = ckpt.open(STEP)
    name = f"{step_of(ckpt, STEP)}/parts/00000.json.zst"
    run.flip(name, checkpoint.contents.manifest.head(0).shards.offset + 3)
    assert not read_all_ways(ckpt, saved)  # only a merge of several parts uses them
    assert any(name in what for what in damage_of(ckpt))


@pytest.mark.parametrize("damage", [flip_middle, cut])
def test_a_damaged_commit_record_is_a_damaged_checkpoint(damage, run, ckpt, saved):
    name = run.commit(STEP)
    damage(run, name)
    found = read_all_ways(ckpt, saved)
    assert found.keys() >= {"restore", "load", "open table", "region table", "subtree"}
    assert all(names == {name} for names in found.values())
    for read in (ckpt.verify, ckpt.info, ckpt.latest, ckpt.open, ckpt.load):
        with pytest.raises(DamagedError) as caught:
            read()
        assert caught.value.damaged == (name,)
    assert ckpt.steps() == [1, STEP]


def test_a_commit_record_under_another_name_is_refused(run, ckpt):
    run.write(run.commit(3), run.read(run.commit(STEP)))
    with pytest.raises(DamagedError, match=run.commit(3)):
        ckpt.load(3)


def test_without_its_commit_record_a_checkpoint_does_not_exist(run, ckpt, saved):
    run.remove(run.commit(STEP))
    assert ckpt.steps() == [1]
    with pytest.raises(CheckpointNotFoundError):
        ckpt.restore(blank(saved), STEP)


# -- anything --------------------------------------------------------------------------------------


def frames_of(checkpoint):
    """`(start, stop)` of every frame by blob, those included that others are encoded against."""
    contents = checkpoint.contents
    found = {}
    for located in contents.objects():
        for shard in located.record.shards:
            for ref in shard.chunks:
                for frame in located.frames[ref.frame].links():
                    name = contents.manifest.head(located.part).blobs[frame.blob].name
                    found.setdefault(name, set()).add((frame.offset, frame.offset + frame.length))
    return found


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_flipped_bit_is_found_or_harmless(count, run, ckpt, saved):
    chance = random.Random(20240607)
    prefix = step_of(ckpt, STEP)
    frames = frames_of(ckpt.open(STEP))
    names = [run.commit(STEP), *run.names(f"{prefix}/parts/*"), f"{prefix}/index", *frames]
    outcomes = set()
    for number in range(count):
        name = names[number % len(names)]
        at = chance.randrange(len(run.read(name)))
        mask = 1 << chance.randrange(8)
        run.flip(name, at, mask)
        harmless = name in frames and not any(a <= at < b for a, b in frames[name])
        try:
            whole = not damage_of(ckpt)
        except DamagedError:
            whole = False
        assert whole is harmless, (name, at, mask)
        tree = blank(saved)
        try:
            ckpt.restore(tree, STEP)
        except DamagedError:
            assert not harmless, (name, at, mask)
        else:
            assert same(tree, saved), (name, at, mask)
        outcomes.add((name, whole))
        run.flip(name, at, mask)
    assert {name for name, whole in outcomes if not whole} == set(names)
    assert ckpt.verify(STEP).ok


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_any_flipped_bit_of_a_chain_is_found_by_every_step_that_needs_it(rounds, tmp_path):
    """By those alone: the model stands still and is shared, the optimizer is encoded."""
    states, run = [make_state(0) for _ in range(4)], Run(tmp_path / "root")
    options = {"rules": [{"match": "optimizer/**", "codecs": ["delta", "zstd"]}], "share": True}
    with run.open(**options) as ckpt:
        for step, state in enumerate(states):
            state["optimizer"]["moment"] += 1e-6 * step
            state["table"] += step
            ckpt.save(state, step, mode="blocking")
        needed = [frames_of(ckpt.open(step)) for step in range(4)]
        parts = [f"{step_of(ckpt, step)}/parts/00000.json.zst" for step in range(4)]
        indexes = [f"{step_of(ckpt, step)}/index" for step in range(4)]
        uids = [ckpt.info(step).uid for step in range(4)]
    blobs = [{name.split("/")[1] for name in frames} for frames in needed]
    assert blobs == [{*uids[: step + 1]} for step in range(4)]
    chance, found = random.Random(20261123), set()
    names = sorted({*parts, *indexes, *map(run.commit, range(4))}.union(*needed))
    for number in range(rounds * len(names)):
        name = names[number % len(names)]
        at, mask = chance.randrange(len(run.read(name))), 1 << chance.randrange(8)
        run.flip(name, at, mask)
        with run.open() as ckpt:
            for step, state in enumerate(states):
                where = (name, at, mask, step)
                hit = any(a <= at < b for a, b in needed[step].get(name, ()))
                hit |= name == run.commit(step)
                try:
                    assert same(ckpt.load(step), state)
                    assert not hit, where
                    # `load` reads neither the index nor the hashes of paths in a part.
                    unread = {indexes[step], parts[step]}
                    assert ckpt.verify(step).ok is (name not in unread), where
                except DamagedError:
                    assert hit or name == parts[step], where
                    found.add((name, step))
        run.flip(name, at, mask)
    assert {step for _, step in found} == {0, 1, 2, 3}


# -- what a failed restore leaves ------------------------------------------------------------------


def test_a_mismatch_leaves_the_template_untouched(ckpt, saved):
    target = make_state(9)
    target["table"] = torch.zeros(5999)
    before = make_state(9)
    versions = {path: t._version for path, t in leaves(target) if isinstance(t, torch.Tensor)}
    with pytest.raises(RestoreMismatchError, match="table") as caught:
        ckpt.restore(target, STEP)
    assert "nothing was changed" in str(caught.value)
    assert same(target["model"], before["model"])
    assert same(target["optimizer"], before["optimizer"])
    assert target["epoch"] == 9
    for path, tensor in leaves(target):
        if path in versions:
            assert tensor._version == versions[path]


def test_damage_touches_nothing_that_was_not_selected_and_assigns_no_value(run, ckpt):
    flip_in_an_encoded_frame(run, ckpt.open(STEP))
    target = make_state(9)
    with pytest.raises(DamagedError) as caught:
        ckpt.restore(target, STEP, include=["optimizer", "epoch"])
    (note,) = caught.value.__notes__
    assert note.startswith("Undefined now: ")
    assert all(path in note for path in ENCODED_PATHS)
    assert "model" not in note
    assert same(target["model"], make_state(9)["model"])
    assert same(target["table"], make_state(9)["table"])
    assert target["epoch"] == 9


# -- fallback --------------------------------------------------------------------------------------


def missing_part(run, checkpoint):
    run.remove(f"data/{checkpoint.info.uid}/parts/00000.json.zst")


def damaged_record(run, checkpoint):
    run.flip(run.commit(checkpoint.step), 200)


def unknown_version(run, checkpoint):
    name = run.commit(checkpoint.step)
    run.write(name, run.read(name).replace(b'{"penstock": 0', b'{"penstock": 7', 1))


@pytest.mark.parametrize(
    ("damage", "asked"),
    [
        (flip_in_a_raw_block, "latest"), (flip_in_an_encoded_frame, STEP),
        (missing_part, "latest"), (damaged_record, "latest"), (unknown_version, STEP),
    ],
)  # fmt: skip
def test_fallback_takes_the_newest_whole_checkpoint_and_says_so(damage, asked, run, ckpt, caplog):
    damage(run, ckpt.open(STEP))
    target = blank(make_state())
    with caplog.at_level(logging.WARNING, logger="penstock"):
        report = ckpt.restore(target, asked, on_damage="fallback")
    assert same(target, make_state(1))
    assert report.step == 1
    assert report.fell_back_from == (STEP,)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any(f"step {STEP}" in text and "damaged" in text for text in warnings)
    assert same(ckpt.load(asked, on_damage="fallback"), make_state(1))


def test_fallback_does_nothing_special_where_all_is_whole(ckpt, saved):
    target = blank(saved)
    report = ckpt.restore(target, on_damage="fallback")
    assert (report.step, report.fell_back_from) == (STEP, ())
    assert same(target, saved)


def test_fallback_never_goes_forward_or_to_what_was_not_asked_for(run, ckpt, saved):
    flip_in_a_raw_block(run, ckpt.open(1))
    with pytest.raises(DamagedError):
        ckpt.restore(blank(saved), 1, on_damage="fallback")
    with pytest.raises(CheckpointNotFoundError):
        ckpt.restore(blank(saved), 7, on_damage="fallback")


def test_with_everything_damaged_fallback_raises(run, ckpt, saved):
    for step in (1, STEP):
        flip_in_a_raw_block(run, ckpt.open(step))
    with pytest.raises(DamagedError, match="model/weight"):
        ckpt.restore(blank(saved), on_damage="fallback")


def test_only_damage_in_what_is_selected_makes_it_fall_back(run, ckpt, saved):
    flip_in_a_raw_block(run, ckpt.open(STEP))
    target = {"optimizer": blank(saved["optimizer"])}
    report = ckpt.restore(target, include="optimizer", on_damage="fallback")
    assert (report.step, report.fell_back_from) == (STEP, ())
    assert same(target["optimizer"], saved["optimizer"])


def fallback_to_fewer_objects(run):
    """Step 2 has an object that step 1 lacks, and is damaged."""
    state = {"a": torch.arange(9000.0), "b": torch.arange(9000.0)}
    with run.open() as ckpt:
        ckpt.save({"a": state["a"]}, 1, mode="blocking")
        ckpt.save(state, STEP, mode="blocking")
        place = place_of(ckpt.open(STEP), "b", 1)
        run.flip(place.blob, place.offset + 77)


@pytest.mark.parametrize("strict", [True, False])
def test_a_fallback_never_passes_off_what_the_damaged_one_left_behind(strict, tmp_path):
    run = Run(tmp_path / "root")
    fallback_to_fewer_objects(run)
    target = {"a": torch.zeros(9000), "b": torch.full((9000,), 5.0)}
    with run.open() as ckpt, pytest.raises((RestoreError, RestoreMismatchError)) as caught:
        ckpt.restore(target, strict=strict, on_damage="fallback")
    assert "nothing was changed" not in str(caught.value)
    assert "b" in str(caught.value)
    assert "ndefined now" in str(caught.value)


def test_damage_in_memory_is_found_as_well():
    state = make_state()
    store = memory()
    with checkpointer(store, **ENCODED) as ckpt:
        ckpt.save(state, 1, mode="blocking")
        place = place_of(ckpt.open(), "model/weight", 1)
        store._store.blobs[place.blob].data[place.offset] ^= 1
        with pytest.raises(DamagedError) as caught:
            ckpt.load()
        assert caught.value.damaged == ("model/weight",)
        assert bits(ckpt.load(exclude="model/weight")["table"]) == bits(state["table"])

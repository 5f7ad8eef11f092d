"""Damage to stored data is found, named, and never becomes a value."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from tests.integration.support import (
    ENCODED,
    Run,
    blank,
    leaves,
    make_state,
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


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Steps 1 and 2 of one layout with other contents, and the state of step 2."""
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


def damage_of(ckpt, step=STEP):
    report = ckpt.verify(step)
    assert report.ok is (not report.damaged)
    return {damage.what for damage in report.damaged}


def step_of(ckpt, step):
    """The prefixes of a step's data."""
    return f"data/{ckpt.open(step).info.uid}"


# -- blobs -----------------------------------------------------------------------------------------


def flip_in_a_raw_block(run, checkpoint):
    place = place_of(checkpoint, "model/weight", 1)
    run.flip(place.blob, place.offset + 9000)
    return {"model/weight"}


def flip_in_an_encoded_frame(run, checkpoint):
    place = place_of(checkpoint, "optimizer/moment", 2)
    run.flip(place.blob, place.offset + place.length // 2)
    return {"optimizer/moment"}


def test_undamaged_objects_are_readable_despite_other_damage(run, ckpt, saved):
    flip_in_a_raw_block(run, ckpt.open(STEP))
    tree = ckpt.load(STEP, exclude="model/weight")
    assert same(tree["optimizer"], saved["optimizer"])
    target = {"table": torch.zeros(6000)}
    ckpt.restore(target, STEP, include="table")
    assert same(target["table"], saved["table"])


def test_a_region_is_readable_despite_damage_in_other_blocks(run, ckpt, saved):
    place = place_of(ckpt.open(STEP), "model/weight", 3)
    run.flip(place.blob, place.offset + place.length - 1)
    checkpoint = ckpt.open(STEP)
    assert same(checkpoint.read("model/weight", (slice(0, 10),)), saved["model"]["weight"][:10])
    with pytest.raises(DamagedError) as caught:
        checkpoint.read("model/weight", (slice(90, 100),))
    assert caught.value.damaged == ("model/weight",)


# -- anything --------------------------------------------------------------------------------------


def frames_of(checkpoint):
    """`(start, stop)` of every frame by blob, bases included."""
    contents = checkpoint.contents
    found = {}
    for record in contents.objects():
        for shard in record.shards:
            for ref in shard.chunks:
                for frame in record.frames[ref.frame].links():
                    name = record.head.blobs[frame.blob].name
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


# -- effects of a failed restore -------------------------------------------------------------------


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


def test_damage_leaves_unselected_targets_and_values_unchanged(run, ckpt):
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


def unknown_version(run, checkpoint):
    name = run.commit(checkpoint.step)
    run.write(name, run.read(name).replace(b'{"penstock": 1', b'{"penstock": 7', 1))


@pytest.mark.parametrize(
    ("damage", "asked"),
    [(missing_part, "latest"), (unknown_version, STEP)],
)
def test_fallback_takes_the_newest_whole_checkpoint_and_logs_it(damage, asked, run, ckpt, caplog):
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


def test_fallback_never_goes_forward_or_beyond_the_request(run, ckpt, saved):
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


def test_only_damage_in_the_selection_causes_fallback(run, ckpt, saved):
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
def test_a_fallback_never_keeps_values_of_the_damaged_one(strict, tmp_path):
    run = Run(tmp_path / "root")
    fallback_to_fewer_objects(run)
    target = {"a": torch.zeros(9000), "b": torch.full((9000,), 5.0)}
    with run.open() as ckpt, pytest.raises((RestoreError, RestoreMismatchError)) as caught:
        ckpt.restore(target, strict=strict, on_damage="fallback")
    assert "nothing was changed" not in str(caught.value)
    assert "b" in str(caught.value)
    assert "ndefined now" in str(caught.value)

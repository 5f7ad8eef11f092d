"""Which objects may be rounded copies of which others: by names, shapes, and times of capture."""

import pytest
from tests.core.planned import NoBytes, planned

from penstock.core.plan.derived import DERIVED_BYTES, find_masters
from penstock.core.plan.save import Capture, plan_save

COUNT = DERIVED_BYTES // 2


def half(*path, count=COUNT, dtype="bfloat16", **other):
    return planned(NoBytes(2 * count), itemsize=2, dtype=dtype, path=path, **other)


def full(*path, count=COUNT, dtype="float32", **other):
    return planned(NoBytes(4 * count), itemsize=4, dtype=dtype, path=path, **other)


def found(*objects, lossy=()):
    return find_masters(objects, is_exact=lambda chain: chain not in lossy)


def test_a_master_has_the_weight_name_in_its_path():
    for path in [
        ("master", "wte.weight"),
        ("optimizer", "state", "wte.weight", "master_param"),
        ("wte.weight",),
        ("wte.weight", "x"),
    ]:
        for dtype in ["bfloat16", "float16"]:
            assert found(half("model", "wte.weight", dtype=dtype), full(*path)) == {0: (1,)}


def test_no_others_are_masters():
    for other in [
        full("master", "wpe.weight"),
        full("master", "wte.weight.x"),
        full("master", "wte.weight", count=COUNT + 2),
        full("master", "wte.weight", dtype="int32"),
        full("master", "wte.weight", chain=1),
        half("master", "wte.weight"),
        planned(
            NoBytes(4 * COUNT, device="cuda:0"), itemsize=4, dtype="float32", path=("wte.weight",)
        ),
    ]:
        assert not found(half("model", "wte.weight"), other, lossy=[1])


NOW, DEFERRED = Capture.NOW, Capture.DEFERRED


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [(NOW, NOW, True), (NOW, DEFERRED, True), (DEFERRED, DEFERRED, True), (DEFERRED, NOW, False)],
)
def test_a_master_does_not_change_before_the_two_are_compared(one, other, fits):
    assert bool(found(half("model", "w", capture=one), full("master", "w", capture=other))) is fits


def test_a_name_shared_by_many_matches_none():
    layers = [str(n) for n in range(20)]
    weights = [half("model", layer, "weight") for layer in layers]
    masters = [full("master", layer, "weight") for layer in layers]
    assert found(*weights, *masters) == {n: (20 + n,) for n in range(20)}
    nested = [full("all", "masters", layer, "weight") for layer in layers]
    assert not found(*weights, *nested)


def test_derivable_objects_come_last_and_in_no_slab():
    objects = [half("model", "w"), full("master", "w"), full("model", "x", count=10)]
    plan = plan_save(objects, chunk_bytes=1 << 20, masters={0: (1,)})
    assert plan.masters == {0: (1,)}
    assert plan.chunks[-1].pieces[0].item == 0
    assert [chunk.slab for chunk in plan.chunks] == [True, True, False]

"""Weights that are rounded master weights: stored without their own bytes, and read back."""

import pytest
import torch
from tests.integration.support import Run, blank, checkpointer, memory, place_of, same
from tests.integration.training import Held, held_checkpointer

from penstock.core.concurrency.workers import Workers
from penstock.core.config.model import load_config
from penstock.core.copy.reencode import Reencoding, copy_objects
from penstock.core.diff.checkpoints import diff_checkpoints
from penstock.core.errors import DamagedError, TornSnapshotError
from penstock.core.plugins.registry import default_registry
from penstock.core.tree.select import Selection

MASTER_BYTES = 250 * 300 * 4


def mixed(dtype=torch.bfloat16, seed=0, **others):
    """Two weights in half precision, and their masters."""
    made = torch.Generator().manual_seed(seed)
    masters = {name: torch.randn(250, 300, generator=made) for name in ("a.weight", "b.weight")}
    weights = {name: master.to(dtype) for name, master in masters.items()}
    return {"model": weights, "master": masters, **others}


def saved(state, *, share=True, mode="blocking", **options):
    backend = memory()
    # With smaller chunks the gaps between them, of a page each, would count.
    options = {"chunk_bytes": 1 << 20, **options}
    with checkpointer(backend, share=share, **options) as ckpt:
        report = ckpt.save(state, 1, mode=mode).result()
    return backend, report


def derived(backend):
    with checkpointer(backend) as ckpt:
        objects = ckpt.open(1).objects()
    return {"/".join(o.path): "/".join(o.derived) for o in objects if o.derived}


def restored(backend, state, **which):
    target = blank(state)
    with checkpointer(backend) as ckpt:
        report = ckpt.restore(target, 1, **which)
    return target, report


# -- the save --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "dtype", "codecs"),
    [
        ("blocking", torch.bfloat16, []),
        ("async", torch.float16, []),
        ("lazy", torch.bfloat16, ["zstd"]),
    ],
)
def test_a_rounded_weight_takes_no_bytes_and_restores_exactly(mode, dtype, codecs):
    state = mixed(dtype, epoch=3)
    rules = [{"match": "**", "codecs": codecs}]
    backend, report = saved(state, mode=mode, rules=rules, defer="**")
    _, without = saved(state, mode=mode, rules=rules, defer="**", share=False)
    assert derived(backend) == {
        "model/a.weight": "master/a.weight",
        "model/b.weight": "master/b.weight",
    }
    assert report.bytes_raw == without.bytes_raw
    weights = sum(w.nbytes for w in state["model"].values())
    assert without.bytes_stored - report.bytes_stored >= (weights if not codecs else weights // 2)
    assert same(restored(backend, state)[0], state)
    with checkpointer(backend) as ckpt:
        assert same(ckpt.load(1), state)
        assert ckpt.verify(1).ok


def test_sharing_is_opt_in():
    assert not derived(saved(mixed(), share=False)[0])


def test_a_master_of_the_optimizer_is_found_by_the_name_of_the_weight():
    state = mixed()
    masters = state.pop("master")
    state["optimizer"] = {
        "state": {
            name: {"exp_avg": torch.ones_like(m), "master_param": m} for name, m in masters.items()
        }
    }
    backend, _ = saved(state)
    assert derived(backend) == {
        f"model/{name}": f"optimizer/state/{name}/master_param" for name in masters
    }
    assert same(restored(backend, state)[0], state)


def differs_in_one_bit(weight):
    weight.view(torch.int16)[-1, -1] ^= 1


def has_another_zero(weight):
    weight[0, 0] = -0.0


def has_a_nan(weight):
    weight[7, 7] = torch.nan


# The comparison of values does not depend on the mode, only its time does.
@pytest.mark.parametrize(
    ("change", "mode"),
    [(differs_in_one_bit, "blocking"), (has_another_zero, "async"), (has_a_nan, "lazy")],
)
def test_a_weight_unequal_to_its_rounded_master_is_stored(change, mode):
    state = mixed()
    state["master"]["a.weight"][0, 0] = 0.0
    state["model"]["a.weight"][0, 0] = 0.0
    change(state["model"]["a.weight"])
    backend, _ = saved(state, mode=mode, defer="**")
    assert derived(backend) == {"model/b.weight": "master/b.weight"}
    assert same(restored(backend, state)[0], state)


def test_a_weight_of_another_layout_is_compared_per_element():
    state = mixed()
    state["model"]["a.weight"] = state["model"]["a.weight"].t().contiguous().t()
    state["master"]["b.weight"] = state["master"]["b.weight"].t().contiguous().t()
    backend, _ = saved(state)
    assert len(derived(backend)) == 2
    assert same(restored(backend, state)[0], state)


def test_a_weight_whose_master_may_change_before_comparison_is_stored():
    state = mixed()
    backend, _ = saved(state, mode="lazy", defer="model/a.weight")
    assert derived(backend) == {"model/b.weight": "master/b.weight"}


def test_a_weight_captured_before_its_deferred_master_is_derived():
    state = mixed()
    backend, _ = saved(state, mode="lazy", defer="master/**")
    assert len(derived(backend)) == 2
    assert same(restored(backend, state)[0], state)


def test_a_change_of_a_derived_weight_before_the_fence_fails_the_save():
    state, hold = mixed(), Held()
    with held_checkpointer(memory(), share=True, defer="**") as ckpt:
        handle = ckpt.save({"hold": hold, **state}, 1, mode="lazy")
        hold.reached.wait()
        state["model"]["a.weight"].add_(1)
        hold.let_go.set()
        with pytest.raises(TornSnapshotError, match=r"model/a\.weight"):
            handle.result()
        handle.error_seen = True


# -- reading ---------------------------------------------------------------------------------------


def test_the_weights_alone_are_restored_from_their_masters():
    state = mixed(other=torch.ones(90_000))
    backend, _ = saved(state)
    target, report = restored(backend, {"model": state["model"]}, include="model/**")
    assert same(target["model"], state["model"])
    assert report.bytes_needed == 2 * MASTER_BYTES
    assert report.restored == ("model/a.weight", "model/b.weight")
    with checkpointer(backend) as ckpt:
        assert same(
            ckpt.load(1, include="model/b.*"), {"model": {"b.weight": state["model"]["b.weight"]}}
        )
        assert same(ckpt.open(1)["model/a.weight"], state["model"]["a.weight"])


@pytest.mark.parametrize(
    "region",
    [
        (slice(3, 4),),
        (slice(0, 250), slice(1, 3)),
        (slice(100, 200), slice(0, 300)),
        (slice(5, 5),),
    ],
)
def test_a_region_of_a_weight_is_read_from_that_region_of_its_master(region):
    state = mixed()
    backend, _ = saved(state)
    with checkpointer(backend) as ckpt:
        found = ckpt.open(1).read("model/a.weight", region)
    assert same(found, state["model"]["a.weight"][region])


def test_a_tie_to_a_derived_weight_is_kept():
    state = mixed()
    state["model"]["head"] = state["model"]["a.weight"]
    backend, _ = saved(state)
    assert set(derived(backend)) == {"model/a.weight", "model/b.weight"}
    with checkpointer(backend) as ckpt:
        found = ckpt.load(1)["model"]
        assert same(ckpt.open(1)["model/head"], state["model"]["head"])
    assert found["head"].data_ptr() == found["a.weight"].data_ptr()
    assert same(found, state["model"])


def test_damage_of_a_master_is_damage_of_the_weight(tmp_path):
    state = mixed()
    run = Run(tmp_path / "run")
    with run.open(share=True) as ckpt:
        ckpt.save(state, 1, mode="blocking")
        place = place_of(ckpt.open(1), "master/b.weight")
        run.flip(place.blob, place.offset + 5)
        assert {d.what for d in ckpt.verify(1).damaged} == {"master/b.weight", "model/b.weight"}
        with pytest.raises(DamagedError) as caught:
            ckpt.restore(blank({"model": state["model"]}), 1, include="model/**")
        assert caught.value.damaged == ("model/b.weight",)
        ckpt.restore(blank({"model": state["model"]}), 1, include="model/a.*")


# -- copies, comparisons, lists --------------------------------------------------------------------


def copied(backend, selection=None, **config):
    target = memory()
    with checkpointer(backend) as ckpt:
        how = Reencoding(
            config=load_config({"backend": target, **config}), selection=selection or Selection()
        )
        workers = Workers(1)
        try:
            copy_objects(ckpt.open(1), target, how, registry=default_registry(), workers=workers)
        finally:
            workers.close()
    return target


def test_a_copy_without_the_masters_stores_the_weights():
    state = mixed()
    backend, _ = saved(state)
    target = copied(backend, Selection(include=["model/**", "master/a.*"]))
    assert derived(target) == {"model/a.weight": "master/a.weight"}
    found = restored(target, state, include="model/**")[0]
    assert same(found["model"], state["model"])


def test_a_derived_weight_is_compared_with_a_stored_one_by_its_values():
    state = mixed()
    one, other = saved(state)[0], saved(state, share=False)[0]
    changed = mixed()
    changed["master"]["a.weight"] += 1e-12  # too little for any weight
    changed["master"]["a.weight"][0, 0].add_(1)
    changed["model"]["a.weight"] = changed["master"]["a.weight"].bfloat16()
    third = saved(changed)[0]
    with checkpointer(one) as a, checkpointer(other) as b, checkpointer(third) as c:
        assert diff_checkpoints(a.open(1), a.open(1)).bytes_read == 0
        assert diff_checkpoints(a.open(1), b.open(1)).same
        found = {change.path for change in diff_checkpoints(a.open(1), c.open(1)).changes}
    assert found == {"model/a.weight", "master/a.weight"}

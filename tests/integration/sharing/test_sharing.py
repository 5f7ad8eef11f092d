"""Chunks of an earlier checkpoint are referenced: unchanged data is stored once."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from tests.integration.support import holding, place_of, same

import penstock
from penstock.core.errors import DamagedError
from penstock.core.storage.open import open_backend
from penstock.testing.faults import FaultyBackend

DELTA = ["delta", "floatsplit"]


def rules(*codecs):
    return [{"match": "**", "codecs": list(codecs)}]


def layers(step, *, frozen=9, shape=(120, 300)):
    """Ten layers with a bias each; all but `frozen` change with the step; and a value."""
    made = torch.Generator().manual_seed(5)
    state = {}
    for number in range(10):
        weight = torch.randn(shape, generator=made)
        state[f"{number}.weight"] = weight if number < frozen else weight + step
        state[f"{number}.bias"] = torch.randn(40, generator=made)
    return {"model": state, "epoch": step}


def opened(root, *, share=True, **options):
    # With such chunks a weight is not one of the small tensors that share a slab.
    return penstock.Checkpointer(root, **{"share": share, "chunk_bytes": 65536, **options})


def save(root, state, step, *, mode="blocking", **options):
    with opened(root, **options) as ckpt:
        return ckpt.save(state, step=step, mode=mode).result()


def saved(root, steps, *, states=layers, **options):
    """Reports of saves by one process, which caches the newest checkpoint."""
    with opened(root, **options) as ckpt:
        return [ckpt.save(states(step), step=step, mode="blocking").result() for step in steps]


def check(root, expected):
    with penstock.Checkpointer(root) as ckpt:
        for step, state in expected.items():
            assert same(ckpt.load(step), state)
            report = ckpt.verify(step)
            assert report.ok, report.damaged


def borrowed(root, step):
    """The steps of the saves that a checkpoint borrows from."""
    with penstock.Checkpointer(root) as ckpt:
        uids = {ckpt._catalog.record(s).uid: s for s in ckpt.steps()}
        return [uids.get(uid, "deleted") for uid in ckpt._catalog.record(step).references]


@pytest.mark.parametrize(
    ("codecs", "mode", "one_process"),
    [([], "blocking", True), (["zstd"], "lazy", False), (DELTA, "async", True)],
)
def test_frozen_nine_tenths_of_a_model_are_stored_once(tmp_path, codecs, mode, one_process):
    options = {"rules": rules(*codecs), "mode": mode, "block_bytes": 4096}
    if one_process:
        with opened(tmp_path, **options) as ckpt:
            first, second, third = (ckpt.save(layers(n), step=n).result() for n in range(3))
    else:
        first, second, third = (save(tmp_path, layers(n), n, **options) for n in range(3))
    for later in (second, third):
        assert later.bytes_stored <= 0.12 * first.bytes_stored  # small tensors, so large gaps
        assert later.bytes_raw == first.bytes_raw
    assert borrowed(tmp_path, 2)[-1:] <= [0, 1]
    assert 0 in borrowed(tmp_path, 2)
    check(tmp_path, {n: layers(n) for n in range(3)})


@pytest.mark.parametrize("codecs", [[], DELTA])
def test_unchanged_data_takes_no_space(tmp_path, codecs):
    saved(tmp_path, [0], rules=rules(*codecs))
    for step in (1, 2):
        report = save(tmp_path, layers(0), step, rules=rules(*codecs))
        assert (report.bytes_stored, report.blobs) == (0, 0)
    assert borrowed(tmp_path, 2) == [0]
    check(tmp_path, dict.fromkeys(range(3), layers(0)))


def test_without_the_option_everything_is_stored_again(tmp_path):
    first = save(tmp_path, layers(0), 0, share=False)
    second = save(tmp_path, layers(0), 1, share=False)
    third = save(tmp_path, layers(0), 2)  # the earlier saves did not hash their chunks
    for report in (first, second, third):
        assert report.bytes_stored >= report.bytes_raw
    assert borrowed(tmp_path, 2) == []


def positive(step):
    """Layers that `log8` accepts: it declines negative numbers."""
    state = layers(step)["model"]
    return {"model": {path: tensor.abs() for path, tensor in state.items()}}


def rounded(*codecs):
    return [{"match": "model/*.weight", "codecs": list(codecs)}]


def errors_at(root, step):
    with penstock.Checkpointer(root) as ckpt:
        return {one.path: one.errors for one in ckpt.open(step).objects()}


@pytest.mark.parametrize(
    ("codecs", "one_process"), [(["cast"], True), (["log8", "zstd"], False)], ids=str
)
def test_unchanged_lossy_data_is_stored_once(tmp_path, codecs, one_process):
    options = {"rules": rounded(*codecs)}
    if one_process:
        first, second = saved(tmp_path / "run", range(2), states=positive, **options)
    else:
        first, second = (save(tmp_path / "run", positive(n), n, **options) for n in range(2))
    assert second.bytes_stored <= 0.12 * first.bytes_stored
    alone = save(tmp_path / "alone", positive(1), 1, share=False, **options)
    assert alone.bytes_stored > 5 * second.bytes_stored
    assert errors_at(tmp_path / "run", 1) == errors_at(tmp_path / "alone", 1)
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        with penstock.Checkpointer(tmp_path / "alone") as other:
            assert same(ckpt.load(1), other.load(1))
        assert ckpt.verify(1).ok


CHANGED = [
    (["cast"], []),
    ([], ["cast"]),
    (["cast", "floatsplit"], ["floatsplit"]),
    (["cast"], [{"type": "cast", "to": "float16"}]),
    (["cast"], ["log8"]),
]


@pytest.mark.parametrize(("before", "now"), CHANGED, ids=str)
def test_another_chain_than_the_stored_one_is_honored(tmp_path, before, now):
    saved(tmp_path / "run", [0], states=positive, rules=rounded(*before))
    save(tmp_path / "run", positive(0), 1, rules=rounded(*now))
    save(tmp_path / "alone", positive(0), 1, share=False, rules=rounded(*now))
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        with penstock.Checkpointer(tmp_path / "alone") as other:
            expected = other.load(1)
        assert same(ckpt.load(1), expected)
        assert not same(ckpt.load(0), expected)
    assert errors_at(tmp_path / "run", 1) == errors_at(tmp_path / "alone", 1)


def test_equally_many_codecs_may_differ(tmp_path):
    """`floatsplit` took the chunk of the first save; in the second it declines the rest."""
    codes = torch.randint(0, 120, (400, 300), generator=torch.Generator().manual_seed(1))
    signs = 1 - 2 * torch.randint(0, 2, codes.shape, generator=torch.Generator().manual_seed(2))
    numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).float() * signs
    state = {"w": numbers * (1 + 2**-10)}
    split, narrow = "floatsplit", {"type": "cast", "to": "float8_e4m3fn"}
    for step, codecs in enumerate([[split], [narrow, split]]):
        save(tmp_path, state, step, rules=[{"match": "w", "codecs": codecs}])
    with penstock.Checkpointer(tmp_path) as ckpt:
        heads = [ckpt.open(step).contents.manifest.head(0) for step in range(2)]
        chains = [[codec.name for codec in head.chains[-1]] for head in heads]
        assert chains == [["floatsplit"], ["cast"]]
        assert torch.equal(ckpt.load(0)["w"], state["w"])
        assert torch.equal(ckpt.load(1)["w"], numbers)


def test_one_bit_is_a_difference(tmp_path):
    state = layers(0)
    saved(tmp_path, [0])
    state["model"]["3.weight"].view(torch.int32)[50, 7] ^= 1
    state["model"]["4.bias"].view(torch.int32)[0] ^= 1
    save(tmp_path, state, 1)
    check(tmp_path, {0: layers(0), 1: state})


@pytest.mark.parametrize(("blocks", "shared"), [(4096, True), (8192, False)])
def test_raw_frames_with_other_blocks_are_not_shared(tmp_path, blocks, shared):
    save(tmp_path, layers(0), 0, block_bytes=4096)
    report = save(tmp_path, layers(0), 1, block_bytes=blocks)
    assert (report.bytes_stored == 0) is shared
    check(tmp_path, {0: layers(0), 1: layers(0)})


def test_shared_data_stays_shared_when_optimizer_state_joins(tmp_path):
    model = {"a": torch.randn(1 << 19), "b": torch.randn(1 << 19)}
    steps = {str(n): torch.ones(()) for n in range(100)}
    save(tmp_path, model, 0, chunk_bytes=16 << 20)
    report = save(tmp_path, {"steps": steps, **model}, 1, chunk_bytes=16 << 20)
    assert report.bytes_stored < 64 << 10
    check(tmp_path, {0: model, 1: {"steps": steps, **model}})


def test_data_of_the_newest_checkpoint_is_cached_and_not_reread(tmp_path):
    store = FaultyBackend(open_backend(tmp_path))
    with opened(store) as ckpt:
        for step in range(3):
            ckpt.save(layers(step), step=step, mode="blocking")
    assert not [names for call, names in store.calls if call == "read" and "parts/" in names[0]]
    assert borrowed(tmp_path, 2) == [0]


def test_a_frame_of_two_objects_is_a_base_for_both(tmp_path):
    made = torch.Generator().manual_seed(1)
    weight = torch.randn(200, 300, generator=made)
    options = {"rules": rules("delta", "floatsplit"), "chunk_bytes": 1 << 20}
    states = [{"a": weight, "b": weight.clone()}] * 2
    states.append({"a": weight + 1e-6, "b": weight + 2e-6})
    reports = [save(tmp_path, state, step, **options) for step, state in enumerate(states)]
    assert reports[1].bytes_stored == 0
    assert reports[2].bytes_stored < 0.7 * reports[2].bytes_raw
    check(tmp_path, dict(enumerate(states)))


# -- equal chunks of one save ----------------------------------------------------------------------


def twins():
    """One weight under two names and in a third shape, zeros, and a slab under two keys."""
    made = torch.Generator().manual_seed(8)
    weight, small = torch.randn(400, 300, generator=made), torch.randn(50, generator=made)
    return {
        "model": {"embed": weight, "bias": small},
        "head": {"weight": weight.clone(), "bias": small.clone()},
        "moments": torch.zeros(400, 300),
        "turned": weight.clone().view(300, 400),
    }


@pytest.mark.parametrize(("codecs", "mode"), [([], "blocking"), (DELTA, "lazy")])
def test_equal_chunks_of_one_save_are_stored_once(tmp_path, codecs, mode):
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    options = {"rules": rules(*codecs), "mode": mode}
    report = save(shared, twins(), 0, **options)
    without = save(alone, twins(), 0, share=False, **options)
    # Of the four weights one is stored with codecs for each shape, otherwise one for all.
    assert report.bytes_stored < (0.7 if codecs else 0.35) * without.bytes_stored
    assert report.bytes_raw == without.bytes_raw
    target = {k: torch.ones_like(v) for k, v in twins().items() if isinstance(v, torch.Tensor)}
    with penstock.Checkpointer(shared) as ckpt:
        ckpt.restore(target, include=list(target))
    assert same(target, {k: twins()[k] for k in target})
    check(shared, {0: twins()})
    assert save(shared, twins(), 1, **options).bytes_stored == 0
    check(shared, {0: twins(), 1: twins()})


def test_equal_chunks_of_other_codecs_are_stored_by_these(tmp_path):
    weight = twins()["turned"].sign()
    state = {name: weight.clone() for name in ("raw", "zstd", "lz4", "again")}
    by_name = [{"match": name, "codecs": [name]} for name in ("zstd", "lz4")]
    save(tmp_path, state, 0, rules=[*by_name, {"match": "again", "codecs": ["lz4"]}])
    with penstock.Checkpointer(tmp_path) as ckpt:
        contents = ckpt.open(0).contents
        chains = {
            "/".join(o.path): {
                link.name
                for ref in o.shards[0].chunks
                for link in contents.manifest.head(0).chains[o.frames[ref.frame].chain]
            }
            for o in contents.objects()
        }
    assert chains == {"raw": set(), "zstd": {"zstd"}, "lz4": {"lz4"}, "again": {"lz4"}}
    check(tmp_path, {0: state})


def test_a_compacted_checkpoint_also_has_equal_chunks_once(tmp_path):
    first, _ = saved(tmp_path, range(2), states=lambda _: twins())
    with opened(tmp_path, share=False) as ckpt:  # the checkpoint was saved with it
        (step,) = ckpt.compact([1]).steps
    assert step.bytes_after <= first.bytes_stored + 65536  # a few pages between frames
    check(tmp_path, {0: twins(), 1: twins()})
    assert save(tmp_path, twins(), 2).bytes_stored == 0


# -- which data is kept alive ----------------------------------------------------------------------


def test_little_used_data_keeps_no_old_save(tmp_path):
    with opened(tmp_path) as ckpt:
        for step in range(3):
            # The second save needs four tenths of the first one's data, and the third would as
            # well.
            ckpt.save(layers(min(step, 1), frozen=4), step=step, mode="blocking")
    assert borrowed(tmp_path, 1) == [0]
    assert borrowed(tmp_path, 2) == [1]
    check(tmp_path, {0: layers(0), 1: layers(1, frozen=4), 2: layers(1, frozen=4)})


def test_a_whole_checkpoint_shares_whole_frames_only(tmp_path):
    def nearly(step):
        still = layers(0)["model"]
        return {"model": {k: v + (1e-6 if step else 0) for k, v in still.items()}}

    options = {"rules": rules("delta", "floatsplit"), "deltas": {"every": 2}}
    saved(tmp_path, range(4), states=nearly, **options)
    with penstock.Checkpointer(tmp_path) as ckpt:
        ages = [(b.age if (b := ckpt._catalog.record(n).base) else 0) for n in range(4)]
        depths = [
            max(len(list(f.links())) for o in ckpt.open(n).contents.objects() for f in o.frames)
            for n in range(4)
        ]
    assert ages == [0, 1, 0, 0]
    assert depths == [1, 2, 1, 1]
    check(tmp_path, {n: nearly(n) for n in range(4)})


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("moment", "shares"), [("intent", False), ("parts/", True)])
def test_a_checkpoint_deleted_meanwhile_keeps_its_data_or_is_not_needed(tmp_path, moment, shares):
    store = FaultyBackend(open_backend(tmp_path))
    with opened(store) as ckpt:
        ckpt.save(layers(0), step=0, mode="blocking")
        with holding(store, "publish", match=moment) as held:
            handle = ckpt.save(layers(1), step=1)
            held.reached.wait()
            with penstock.Checkpointer(tmp_path) as other:
                other.delete(0)
        handle.result()
    assert borrowed(tmp_path, 1) == (["deleted"] if shares else [])
    check(tmp_path, {1: layers(1)})


@pytest.mark.parametrize("codecs", [[], ["delta", "floatsplit"]])
def test_a_checkpoint_about_to_lose_its_data_is_not_referenced(tmp_path, codecs):
    store, slow = (FaultyBackend(open_backend(tmp_path)) for _ in range(2))
    with (
        opened(store, rules=rules(*codecs)) as ckpt,
        penstock.Checkpointer(slow) as other,
        holding(slow, "delete", match="data/") as deleting,
    ):
        ckpt.save(layers(0), step=0, mode="blocking")
        with holding(store, "publish", match="intent") as held:
            handle = ckpt.save(layers(1), step=1)
            held.reached.wait()
            thread = threading.Thread(target=other.delete, args=[0])
            thread.start()
            deleting.reached.wait()
        handle.result()
    thread.join()
    assert borrowed(tmp_path, 1) == []
    check(tmp_path, {1: layers(1)})


@pytest.mark.parametrize(
    ("codecs", "cut", "one_process"),
    [([], True, True), (["zstd"], False, True), (DELTA, True, False), ([], False, False)],
)
def test_frames_of_a_lost_blob_are_not_referenced(tmp_path, codecs, cut, one_process):
    options = {"rules": rules(*codecs)}
    with opened(tmp_path, **options) as ckpt:
        ckpt.save(layers(0), step=0, mode="blocking")
        for blob in tmp_path.glob("data/*/blobs/*"):
            os.truncate(blob, 5000) if cut else blob.unlink()
        if one_process:
            ckpt.save(layers(1), step=1, mode="blocking")
    save(tmp_path, layers(2), 2, **options)
    check(tmp_path, {n: layers(n) for n in ([1] if one_process else []) + [2]})


@pytest.mark.parametrize("codecs", [[], ["zstd"]])
def test_the_next_process_does_not_reference_damage(tmp_path, codecs):
    options = {"rules": rules(*codecs)}
    saved(tmp_path, range(2), **options)
    with penstock.Checkpointer(tmp_path) as ckpt:
        place = place_of(ckpt.open(1), "model/3.weight")
    blob = tmp_path / place.blob
    data = bytearray(blob.read_bytes())
    data[place.offset + place.length // 2] ^= 8
    blob.write_bytes(data)
    save(tmp_path, layers(2), 2, **options)
    check(tmp_path, {2: layers(2)})


def test_a_process_reads_referenced_data_once(tmp_path):
    def reads(save_of):
        before = len(store.calls)
        save_of()
        return {name for what, names in store.calls[before:] if what == "read" for name in names}

    saved(tmp_path, [0])
    store = FaultyBackend(open_backend(tmp_path))
    with opened(store) as ckpt:
        first = reads(lambda: ckpt.save(layers(1), step=1, mode="blocking"))
        second = reads(lambda: ckpt.save(layers(2), step=2, mode="blocking"))
    assert any(name.endswith(".raw") for name in first)
    assert second
    assert all(name.startswith("commits/") for name in second)


def test_a_lost_blob_of_an_earlier_save_is_damage(tmp_path):
    saved(tmp_path, range(2))
    with penstock.Checkpointer(tmp_path) as ckpt:
        place = place_of(ckpt.open(1), "model/3.weight")
        (tmp_path / place.blob).unlink()
        assert not ckpt.verify(1, deep=False).ok
        with pytest.raises(DamagedError) as caught:
            ckpt.load(1)
    message = "in the blobs of step 0, which step 1 shares chunks with: it needs step 1, step 0."
    assert message in str(caught.value)

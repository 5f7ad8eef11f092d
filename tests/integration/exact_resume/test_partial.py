"""Any part of a checkpoint alone: only its data is read, only its targets are touched."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from tests.integration.support import checkpointer, memory, same
from torch import nn

from penstock import Grads, Region, RestoreError, RestoreMismatchError, SelectionError
from penstock.testing.faults import WrapperBackend

DEFAULTS = {"chunk_bytes": 16 << 20, "block_bytes": 4 << 20}
BLOCK = 65536


class Counting(WrapperBackend):
    """Counts the bytes read from blobs, and from everything else."""

    def __init__(self, inner):
        super().__init__(inner)
        self.reset()

    def reset(self):
        self.blobs = self.records = 0

    def read(self, requests, /):
        for request in requests:
            if "/blobs/" in request.name:
                self.blobs += request.target.nbytes
            else:
                self.records += request.target.nbytes
        super().read(requests)


class Model(nn.Module):
    """A small language model: tied embedding, two layers, a norm with statistics."""

    def __init__(self, width=160, words=2000):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x))


def make(seed, *, steps=0, **sizes):
    torch.manual_seed(seed)
    model = Model(**sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (seed + 1))
    state = {"model": model, "optimizer": optimizer, "epoch": seed, "log": {"losses": [1.5, seed]}}
    for number in range(steps):
        train(state, number)
    return state


def train(state, number):
    tokens = torch.arange(7) * (number + 1) % 2000
    state["model"](tokens).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def weights(state):
    return {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}


def moments(state):
    found = state["optimizer"].state_dict()["state"]
    return {
        (number, key): tensor.clone() for number, d in found.items() for key, tensor in d.items()
    }


@pytest.fixture(scope="module")
def saved():
    """A store with step 1, and the saved state: three steps trained."""
    store, state = memory(), make(0, steps=3)
    with checkpointer(store, **DEFAULTS) as ckpt:
        ckpt.save(state, 1, mode="blocking")
    return store, state


@pytest.fixture
def backend(saved):
    return Counting(saved[0])


@pytest.fixture
def ckpt(backend):
    with checkpointer(backend, **DEFAULTS) as ckpt:
        yield ckpt


# -- bytes read ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("part", "codecs"), [("optimizer", []), ("model", ["zstd"])])
def test_only_the_needed_bytes_are_read(part, codecs, saved):
    store, state = memory(), saved[1]
    backend = Counting(store)
    with checkpointer(backend, **DEFAULTS, rules=[{"match": "**", "codecs": codecs}]) as ckpt:
        ckpt.save(state, 1, mode="blocking")
        backend.reset()
        report = ckpt.restore(make(5, steps=1), include=part)
        assert backend.blobs == report.bytes_read
        assert report.bytes_read <= 1.02 * report.bytes_needed
        tensors = [state["model"].state_dict(keep_vars=True), moments(state)][part == "optimizer"]
        size = sum(t.nbytes for t in {id(t): t for t in tensors.values()}.values())
        if codecs:
            assert 0 < report.bytes_needed < size + 65536
        else:
            assert size <= report.bytes_needed <= size + 4096  # and its values
        assert 0 < backend.records == report.bytes_metadata
        backend.reset()
        whole = ckpt.restore(make(5, steps=1))
        assert backend.blobs == whole.bytes_read > 1.2 * report.bytes_read


def test_the_part_of_a_tied_tensor_is_read_once(ckpt, backend, saved):
    target = make(5)
    report = ckpt.restore({"model": target["model"]}, include=["model/embed", "model/head"])
    assert report.restored == ("model/embed.weight", "model/head.weight")
    assert report.bytes_needed == saved[1]["model"].embed.weight.nbytes
    assert torch.equal(target["model"].head.weight, saved[1]["model"].embed.weight)


@pytest.fixture
def large():
    """`(backend, checkpoint, tensor)`: a raw tensor of many blocks in several chunks."""
    tensor = torch.randn(1500, 700)
    backend = Counting(memory())
    with checkpointer(backend, chunk_bytes=16 * BLOCK, block_bytes=BLOCK) as ckpt:
        ckpt.save({"w": tensor, "other": torch.ones(9)}, 1, mode="blocking")
        checkpoint = ckpt.open()
        assert "w" in checkpoint
        backend.reset()
        yield backend, checkpoint, tensor


def test_a_region_reads_at_most_one_extra_block_at_each_end(large):
    backend, checkpoint, tensor = large
    for rows in ((0, 1), (0, 1500), (370, 380), (374, 375), (1000, 1499), (1499, 1500), (7, 7)):
        backend.reset()
        part = checkpoint.read("w", (slice(*rows),))
        assert same(part, tensor[slice(*rows)].clone())
        assert part.nbytes <= backend.blobs <= part.nbytes + 2 * BLOCK or not part.numel()
        assert part.numel() or not backend.blobs


def test_rows_of_an_average_tensor_are_read_with_little_overhead():
    backend = Counting(memory())
    state = {name: torch.randn(512, 1024) for name in "abc"}  # 2 MiB
    with checkpointer(backend, chunk_bytes=16 << 20, block_bytes=None) as ckpt:
        ckpt.save(state, 1, mode="blocking")
        for rows in ((0, 128), (100, 300), (255, 257), (500, 512)):
            backend.reset()
            part = ckpt.open().read("b", (slice(*rows),))
            assert same(part, state["b"][slice(*rows)].clone())
            assert part.nbytes <= backend.blobs <= part.nbytes + 2 * (2 << 20) // 3


def test_a_region_of_columns_reads_the_blocks_that_hold_them_once(large):
    backend, checkpoint, tensor = large
    region = Region((10, 650), (300, 50))
    assert same(checkpoint.read("w", region), tensor[10:310, 650:].clone())
    assert backend.blobs <= 300 * 700 * 4 + 2 * BLOCK


# -- selections ------------------------------------------------------------------------------------

EVERYTHING = {
    "model/embed.weight", "model/layers.0.weight", "model/layers.0.bias", "model/layers.1.weight",
    "model/layers.1.bias", "model/norm.weight", "model/norm.bias", "model/norm.running_mean",
    "model/norm.running_var", "model/norm.num_batches_tracked", "model/head.weight",
}  # fmt: skip

SELECTIONS = [
    ("model", None, EVERYTHING),
    ("model/layers", None, {k for k in EVERYTHING if "layers" in k}),
    ("model/*.bias", None, {k for k in EVERYTHING if k.endswith(".bias")}),
    ("model/layers.?.weight", None, {"model/layers.0.weight", "model/layers.1.weight"}),
    ("model/layers.[1-9].*", None, {"model/layers.1.weight", "model/layers.1.bias"}),
    ("**/norm.*", "**/*running_*", {
        "model/norm.weight", "model/norm.bias", "model/norm.num_batches_tracked",
    }),
    (["model/embed", "model/head.weight"], None, {"model/embed.weight", "model/head.weight"}),
    ("model", ["model/layers", "model/norm"], {"model/embed.weight", "model/head.weight"}),
]  # fmt: skip


def test_include_and_exclude_select_objects(ckpt, saved):
    for include, exclude, restored in SELECTIONS:
        target = make(5)
        before = weights(target)
        report = ckpt.restore(target, include=include, exclude=exclude)
        assert set(report.restored) == restored
        touched = {k.removeprefix("model/") for k in restored}
        tied = {"embed.weight", "head.weight"}
        touched |= tied if tied & touched else set()
        for name, tensor in weights(target).items():
            expected = saved[1]["model"].state_dict() if name in touched else before
            assert torch.equal(tensor, expected[name]), (include, exclude, name)
        tree = ckpt.load(include=include, exclude=exclude)
        assert {f"model/{k}" for k in tree.pop("model")} == restored
        assert tree == {}


def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_names(ckpt):
    target = make(5)
    before = weights(target)
    for option, pattern, near in (
        ("include", "modle", "model"),
        ("include", "model/layer", "model/layers"),
        ("exclude", "optimiser/**", "optimizer"),
        ("exclude", "model/emded", "model/embed.weight"),
    ):
        for read in (ckpt.load, lambda **o: ckpt.restore(target, **o)):
            with pytest.raises(SelectionError) as caught:
                read(**{option: pattern})
            assert pattern in str(caught.value)
            assert near in str(caught.value).split("nearest")[1]
    assert same(weights(target), before)


HEADS = {
    "tensor": lambda: torch.full((2,), 7.0),
    "value": lambda: "mine",
    "module": lambda: nn.Linear(2, 2),
    "container": lambda: {"ema": [torch.ones(2)], "count": 3},
    "optimizer": lambda: torch.optim.SGD([torch.zeros(1, requires_grad=True)]),
    "grads": lambda: Grads(nn.Linear(2, 2)),
    "generator": torch.Generator,
}


def test_template_only_objects_can_be_excluded():
    with checkpointer(memory()) as ckpt:
        ckpt.save({"a": torch.ones(1)}, 1, mode="blocking")
        for name, head in HEADS.items():
            for pattern in ("head", "head/**"):
                target = {"a": torch.zeros(1), "head": head()}
                live = target["head"]
                assert ckpt.restore(target, exclude=pattern).missing == (), name
                assert target["a"] == 1
                assert target["head"] is live


@pytest.mark.parametrize("steps", [0, 2])
def test_restoring_only_the_optimizer_resumes_exactly(steps, ckpt, saved):
    original, target = make(0, steps=3), make(5, steps=steps)
    target["model"].load_state_dict(original["model"].state_dict())
    report = ckpt.restore(target, include="optimizer")
    assert report.matched_by == "name"
    assert same(moments(target), moments(saved[1]))
    for number in range(3):
        train(original, number)
        train(target, number)
    assert same(weights(target), weights(original))
    assert same(moments(target), moments(original))


# -- mismatches ------------------------------------------------------------------------------------


def test_all_differences_are_listed_in_one_error_before_anything_is_read(ckpt, backend):
    target = make(5)
    target["model"].layers[0] = nn.Linear(160, 161, dtype=torch.float64)
    target["model"].extra = nn.Linear(2, 2)
    target["model"].norm.weight = nn.Parameter(torch.ones(160, dtype=torch.bfloat16))
    target["epoch"] = torch.zeros(1)
    target["new"] = 7
    before = weights(target)
    with pytest.raises(RestoreMismatchError) as caught:
        ckpt.restore(target, include=["model", "epoch", "new"])
    named = " ".join(caught.value.problems)
    for path in (
        "model/layers.0.weight", "model/layers.0.bias", "model/extra.weight", "model/extra.bias",
        "model/norm.weight", "epoch", "new",
    ):  # fmt: skip
        assert path in named
        assert path in str(caught.value)
    for word in ("float64", "float32", "bfloat16", "[160, 160]", "[161, 160]"):
        assert word in named.replace("(", "[").replace(")", "]")
    assert len(caught.value.problems) == 7
    assert same(weights(target), before)
    assert backend.blobs < 4096 + (4 << 20)  # at most values, never weights
    assert not any(t._version > 1 for t in target["model"].buffers())


def test_renames_are_shown_with_the_remedy(ckpt):
    with pytest.raises(RestoreMismatchError) as caught:
        ckpt.restore({"net": make(5)["model"]})
    assert all("net/" in problem for problem in caught.value.problems)
    assert "template lacks: model/" in str(caught.value)
    assert "rename={'old': 'new'}" in str(caught.value)


def test_an_optimizer_without_its_module_is_one_problem_in_total(ckpt):
    with pytest.raises(RestoreMismatchError, match="put the module into the tree") as caught:
        ckpt.restore({"optimizer": make(5)["optimizer"]})
    assert len(caught.value.problems) == 1


def test_without_strict_missing_objects_are_reported_and_kept(ckpt, saved):
    target = make(5)
    target["model"].extra = nn.Linear(2, 2)
    target["new"] = "mine"
    kept = target["model"].extra.weight.detach().clone()
    report = ckpt.restore(target, include=["model", "new"], strict=False)
    assert set(report.missing) == {"model/extra.weight", "model/extra.bias", "new"}
    assert torch.equal(target["model"].extra.weight, kept)
    assert target["new"] == "mine"
    assert torch.equal(target["model"].embed.weight, saved[1]["model"].embed.weight)


def test_without_strict_other_shapes_are_left_alone_with_their_state(ckpt, saved, caplog):
    target = make(5, steps=1, words=1999)
    before, kept = weights(target), moments(target)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        report = ckpt.restore(target, strict=False)
    there = saved[1]["model"].state_dict()
    for name, tensor in target["model"].state_dict().items():
        tied = name in {"embed.weight", "head.weight"}
        assert torch.equal(tensor, before[name] if tied else there[name])
    state = target["optimizer"].state[target["model"].embed.weight]
    assert all(torch.equal(state[key], kept[0, key]) for key in state)
    fresh = target["optimizer"].state[target["model"].norm.weight]
    theirs = saved[1]["optimizer"].state[saved[1]["model"].norm.weight]
    assert same(dict(fresh), dict(theirs))
    found = {m.path: (m.stored, m.here) for m in report.mismatched}
    state = ("the state of a parameter of shape [2000, 160]", "a parameter of shape [1999, 160]")
    shapes = ("shape [2000, 160]", "shape [1999, 160]")
    assert found == {
        "model/embed.weight": shapes,
        "model/head.weight": shapes,
        "optimizer/state/embed.weight": state,
    }
    assert (report.missing, report.unexpected) == ((), ())
    assert not {p for p in report.restored if p.startswith(tuple(found))}
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "differs from the template in 3 places" in warning
    assert "model/embed.weight (shape [2000, 160] stored, shape [1999, 160] here)" in warning
    train(target, 3)


class Numbered(torch.optim.SGD):
    """Has its own state dict, so it is stored whole."""

    def state_dict(self):
        return super().state_dict() | {"more": 1}


def test_without_strict_state_by_number_is_not_restored_while_a_parameter_is_skipped():
    def job(width):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, width))
        optimizer = Numbered(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    with checkpointer(memory()) as ckpt:
        ckpt.save(job(3), 1, mode="blocking")
        target = job(4)
        before = weights(target)
        with pytest.raises(RestoreMismatchError, match=r"optimizer loads .* by their numbers"):
            ckpt.restore(target, strict=False)
        assert same(weights(target), before)
        report = ckpt.restore(target, exclude="optimizer", strict=False)
        assert [m.path for m in report.mismatched] == ["model/1.weight", "model/1.bias"]
        ckpt.restore(job(3), strict=False)


def test_another_shape_is_one_problem_and_never_a_new_name(ckpt):
    target = make(5)
    target["model"].norm = nn.BatchNorm1d(160, affine=False)
    target["model"].layers[0] = nn.Linear(160, 161)
    target["model"].extra = nn.Linear(2, 2)
    target["optimizer"] = torch.optim.AdamW(target["model"].parameters())
    with pytest.raises(RestoreMismatchError) as caught:
        ckpt.restore(target, include=["model", "optimizer/state"])
    listed = [p for p in caught.value.problems if "layers.0.weight" in p]
    assert len(listed) == 2
    assert listed[0].startswith(
        "optimizer/state/layers.0.weight is the state of a parameter of shape"
    )
    assert listed[1].startswith(
        "model/layers.0.weight: shape [160, 160] is stored, but the template has"
    )
    assert all(problem.endswith(" (strict=False leaves it alone)") for problem in listed)
    hint = str(caught.value).splitlines()[-1]
    assert "norm.weight" in hint
    assert "layers" not in hint


def grouped(model, *, groups):
    layers = [model[0], model[1]][:groups]
    return torch.optim.AdamW([{"params": layer.parameters()} for layer in layers], lr=0.5)


def unfrozen(*, groups):
    torch.manual_seed(groups)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = grouped(model, groups=groups)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "opt": optimizer}


@pytest.mark.parametrize("swapped", [False, True], ids=["more", "moved"])
def test_without_strict_the_options_of_other_groups_stay(swapped):
    saved, target = unfrozen(groups=2 if swapped else 1), unfrozen(groups=2)
    if swapped:
        target["opt"].param_groups[0]["params"], target["opt"].param_groups[1]["params"] = (
            target["opt"].param_groups[1]["params"], target["opt"].param_groups[0]["params"],
        )  # fmt: skip
    with checkpointer(memory()) as ckpt:
        ckpt.save(saved, 1, mode="blocking")
        for group in target["opt"].param_groups:
            group["lr"] = 7.0
        report = ckpt.restore(target, strict=False)
    assert [group["lr"] for group in target["opt"].param_groups] == [7.0, 7.0]
    assert [m.path for m in report.mismatched] == ["opt/param_groups"]
    assert report.unexpected == ()
    weight, theirs = target["model"][0].weight, saved["model"][0].weight
    assert same(dict(target["opt"].state[weight]), dict(saved["opt"].state[theirs]))


@pytest.mark.filterwarnings("ignore:.*matched by order")
def test_without_strict_another_shape_still_fails_a_match_by_order():
    def nameless(*shapes):
        parameters = [torch.ones(shape, requires_grad=True) for shape in shapes]
        optimizer = torch.optim.AdamW(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return {"opt": optimizer}

    with checkpointer(memory()) as ckpt:
        ckpt.save(nameless(2, 3), 1, mode="blocking")
        with pytest.raises(RestoreMismatchError, match="state of a parameter of shape"):
            ckpt.restore(nameless(2, 4), strict=False)


# -- renamed ---------------------------------------------------------------------------------------


def test_keys_that_moved_are_found_by_rename(ckpt, saved):
    target = {"net": nn.Module()}
    target["net"].blocks = nn.ModuleList(nn.Linear(160, 160) for _ in range(2))
    for rename in (
        {"model/layers": "net/blocks"},
        {"model": "net", "model/layers.0": "net/blocks.0", "model/layers.1": "net/blocks.1"},
        lambda path: path.replace("model/layers", "net/blocks"),
    ):
        for parameter in target["net"].parameters():
            nn.init.zeros_(parameter)
        report = ckpt.restore(target, include="net/blocks", rename=rename)
        assert set(report.restored) == {
            f"net/blocks.{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias")
        }
        for mine, theirs in zip(target["net"].blocks, saved[1]["model"].layers, strict=True):
            assert torch.equal(mine.weight, theirs.weight)
            assert torch.equal(mine.bias, theirs.bias)


# -- tied weights ----------------------------------------------------------------------------------


def test_a_model_is_loaded_to_meta_without_reading_a_tensor(ckpt, backend, saved):
    tree = ckpt.load(include="model", device="meta")
    there = saved[1]["model"].state_dict()
    assert {n: (t.shape, t.dtype) for n, t in tree["model"].items()} == {
        n: (t.shape, t.dtype) for n, t in there.items()
    }
    assert all(t.is_meta for t in tree["model"].values())
    assert tree["model"]["head.weight"] is tree["model"]["embed.weight"]
    assert backend.blobs == 0


def test_a_template_tying_untied_objects_is_restored_if_their_bytes_agree():
    with checkpointer(memory()) as ckpt:
        ckpt.save({"a": torch.arange(3.0), "b": torch.arange(3.0)}, 1, mode="blocking")
        tied = torch.zeros(3)
        report = ckpt.restore({"a": tied, "b": tied})
    assert torch.equal(tied, torch.arange(3.0))
    assert report.restored == ("a", "b")


def test_a_template_tying_differing_objects_is_refused():
    a, b = torch.zeros(3), torch.ones(3)
    with checkpointer(memory()) as ckpt:
        ckpt.save({"a": a, "b": b}, 1, mode="blocking")
        tied = torch.full((3,), 7.0)
        with pytest.raises(RestoreMismatchError, match="share memory"):
            ckpt.restore({"a": tied, "b": tied})
        assert torch.equal(tied, torch.full((3,), 7.0))
        ckpt.restore({"a": tied, "b": tied}, include="b")
        assert torch.equal(tied, b)


VIEWS = {
    "row": lambda w: w[5],
    "rows": lambda w: w[3:70],
    "flat": lambda w: w.view(-1)[130:9000],
    "column": lambda w: w[:, 7],
    "columns": lambda w: w[:, 3:90],
    "transposed": lambda w: w.t(),
    "every other": lambda w: w[::2, 1::3],
    "reversed rows": lambda w: w.numpy()[::-1, ::-1],
    "halves": lambda w: w.view(torch.int16)[:, 5:12],
    "bytes": lambda w: w.view(-1)[3:5000].view(torch.uint8)[7:],
    "expanded": lambda w: w[4].expand(9, 120),
}


@pytest.mark.parametrize("base", [lambda w: w, lambda w: w[:, :119]], ids=["whole", "strided"])
def test_views_of_one_memory_are_restored_if_stored_bytes_agree(base):
    with checkpointer(memory()) as ckpt:
        for step, (name, view) in enumerate(VIEWS.items()):
            whole, target = torch.randn(200, 120), torch.zeros(200, 120)
            saved = {"w": base(whole), "v": view(whole)}
            ckpt.save(saved, step, mode="blocking")
            template = {"w": base(target), "v": view(target)}
            ckpt.restore(template)
            assert same(template["w"], saved["w"]), name
            assert same(template["v"], saved["v"]), name


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_one_memory_are_left_alone_if_stored_bytes_differ(view):
    whole, other = torch.randn(200, 120), torch.randn(200, 120)
    other[4] = whole[4]  # the expanded view alone would agree
    if view is VIEWS["expanded"]:
        other[4, 3] += 1
    with checkpointer(memory()) as ckpt:
        ckpt.save({"w": whole, "v": view(other), "x": torch.ones(5)}, 1, mode="blocking")
        target, rest = torch.zeros(200, 120), torch.zeros(5)
        template = {"w": target, "v": view(target), "x": rest}
        with pytest.raises(RestoreMismatchError, match="share memory"):
            ckpt.restore(template)
        assert not target.any()
        assert not rest.any()
        ckpt.restore(template, exclude="v")
        assert torch.equal(target, whole)


def test_parts_of_one_memory_that_do_not_overlap_may_differ():
    saved = {"a": torch.randn(50, 60), "b": torch.randn(50, 60), "c": torch.randn(17)}
    whole = torch.zeros(50, 120)
    tail = torch.zeros(100)
    template = {"a": whole[:, ::2], "b": whole[:, 1::2], "c": tail[:17]}
    with checkpointer(memory()) as ckpt:
        ckpt.save(saved, 1, mode="blocking")
        ckpt.restore(template)
    assert torch.equal(whole[:, ::2], saved["a"])
    assert torch.equal(whole[:, 1::2], saved["b"])
    assert torch.equal(tail[:17], saved["c"])
    assert not tail[17:].any()


# -- in place --------------------------------------------------------------------------------------


def read_only(array):
    array.flags.writeable = False
    return array


def test_a_read_only_array_in_a_tuple_is_found_before_anything_is_written():
    with checkpointer(memory()) as ckpt:
        ckpt.save({"a": torch.ones(2), "pair": (np.ones(2), 1)}, 1, mode="blocking")
        target = {"a": torch.zeros(2), "pair": (read_only(np.zeros(2)), 1)}
        with pytest.raises(
            RestoreMismatchError, match="pair/0 is a ndarray that cannot be"
        ) as caught:
            ckpt.restore(target)
        assert "nothing was changed" in str(caught.value)
        assert not target["a"].any()
        ckpt.restore(target, exclude="pair/0")
        assert target["a"].all()


def test_a_read_only_array_that_the_checkpoint_lacks_stays():
    with checkpointer(memory()) as ckpt:
        ckpt.save({"a": torch.ones(1)}, 1, mode="blocking")
        array = read_only(np.arange(4.0))
        target = {"a": torch.zeros(1), "array": array}
        assert ckpt.restore(target, strict=False).missing == ("array",)
    assert target["array"] is array


def test_a_graph_built_before_a_restore_refuses_to_run_backward(ckpt):
    target = make(5)
    loss = target["model"](torch.arange(5)).square().mean()
    ckpt.restore(target, include="model")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- unselected objects --------------------------------------------------------------------------


class Secret(nn.Module):
    """A module that must not be inspected."""

    def state_dict(self, *args, **kwargs):
        raise AssertionError


@pytest.mark.parametrize("include", ["m/one", "m/o*", ["m/one", "m/two"]])
def test_unselected_objects_are_not_checked(include):
    state = {"m": {"one": torch.ones(3), "two": torch.ones(3)}, "other": torch.ones(9)}
    with checkpointer(memory()) as ckpt:
        ckpt.save(state, 1, mode="blocking")
        target = {
            "other": Secret(),
            "m": {"one": torch.zeros(3), "two": torch.zeros(3), "deep": {"x": Secret()}},
        }
        report = ckpt.restore(target, include=include)
    assert "m/one" in report.restored
    assert target["m"]["one"].sum() == 3


@pytest.mark.parametrize(
    "options",
    [
        {"include": "modl"},
        {"include": ["model", "mode"]},
        {"include": "model", "exclude": "model/nothing"},
        {"include": "model/head.weight"},
    ],
)
def test_errors_also_name_unselected_objects(options):
    state = {"model": {"weight": torch.ones(2)}, "mode": {"x": 1, "t": torch.ones(1)}}
    target = {"model": {"weight": torch.ones(3), "head.weight": torch.ones(1)}, "other": 1}
    messages = []
    with checkpointer(memory()) as ckpt:
        ckpt.save(state, 1, mode="blocking")
        # A selection without exclusions checks everything.
        for wide in ({}, {"rename": lambda path: path}):
            with pytest.raises((SelectionError, RestoreMismatchError)) as caught:
                ckpt.restore(target, **options, **wide)
            messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_tied_tensor_whose_owner_is_not_selected_is_restored_alone():
    shared = torch.arange(4.0)
    with checkpointer(memory()) as ckpt:
        ckpt.save({"a": {"w": shared}, "b": {"w": shared}}, 1, mode="blocking")
        target = {"a": {"w": torch.zeros(4)}, "b": {"w": torch.zeros(4)}}
        ckpt.restore(target, include="b")
        assert target["b"]["w"].equal(shared)
        assert not target["a"]["w"].any()
        assert ckpt.load(include="b")["b"]["w"].equal(shared)
        assert ckpt.open()["b"]["w"].equal(shared)


def test_a_region_outside_the_tensor_is_refused(large):
    backend, checkpoint, _ = large
    for region in (
        (slice(0, 3), slice(0, 3), slice(0, 3)),
        (slice(0, 10, 2),),
        Region((0,), (5,)),
        Region((0, 0), (1501, 1)),
        Region((-1, 0), (1, 1)),
    ):
        with pytest.raises(SelectionError, match="w"):
            checkpoint.read("w", region)
    assert not backend.blobs


def test_extra_groups_are_an_error_with_a_remedy_not_about_names():
    with checkpointer(memory()) as ckpt:
        ckpt.save(unfrozen(groups=1), 1, mode="blocking")
        target = unfrozen(groups=2)
        with pytest.raises(RestoreMismatchError) as caught:
            ckpt.restore(target)
        assert "rename" not in str(caught.value)
        assert (
            "opt/param_groups has 1 group in the checkpoint, 2 in the template (exclude="
            "'opt/param_groups/**' keeps the options of the template; strict=False leaves it alone)"
        ) in caught.value.problems

        report = ckpt.restore(target, exclude="opt/param_groups/**", strict=False)
        assert set(report.missing) == {"opt/state/1.weight", "opt/state/1.bias"}
        assert report.mismatched == ()


def test_a_mistyped_name_of_a_template_only_object_is_an_error():
    with checkpointer(memory()) as ckpt:
        ckpt.save({"a": torch.ones(1)}, 1, mode="blocking")
        with pytest.raises(SelectionError, match="'haed' matches nothing; nearest: head"):
            ckpt.restore({"a": torch.zeros(1), "head": torch.zeros(1)}, exclude="haed")


def test_a_rename_that_matches_nothing_or_collides_is_an_error(ckpt):
    with pytest.raises(SelectionError, match=r"nearest: .*model/layers"):
        ckpt.restore(make(5), rename={"model/leyers": "model/blocks"})
    with pytest.raises(SelectionError, match="both"):
        ckpt.restore(make(5), rename={"model/layers.0": "model/layers.1"})


def test_a_self_overlapping_array_is_refused_if_stored_bytes_differ():
    base = np.zeros(6)
    window = np.lib.stride_tricks.as_strided(base, (5, 2), (8, 8))
    with checkpointer(memory()) as ckpt:
        ckpt.save({"a": np.arange(10.0).reshape(5, 2)}, 1, mode="blocking")
        with pytest.raises(RestoreError, match="overlapping"):
            ckpt.restore({"a": window})


def test_memory_an_overlapping_array_shares_with_a_target_is_filled_once():
    for shared in (np.zeros(4), torch.zeros(4, dtype=torch.float64)):
        rows = np.lib.stride_tricks.as_strided(np.asarray(shared), (2, 4), (0, 8))
        with checkpointer(memory()) as ckpt:
            ckpt.save({"a": np.full((2, 4), 1.0), "b": shared + 2}, 1, mode="blocking")
            with pytest.raises(RestoreMismatchError, match="share memory"):
                ckpt.restore({"a": rows, "b": shared})
        assert not shared.any()

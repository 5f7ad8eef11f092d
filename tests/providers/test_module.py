from collections import OrderedDict

import pytest
import torch
from torch import nn

from penstock.core.errors import RestoreError, UnsupportedStateError
from penstock.testing.providers import check_provider


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(7, 6)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 6, bias=False))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("keep", torch.randn(3))
        self.register_buffer("drop", torch.randn(3), persistent=False)

    def forward(self, x):
        return self.head(self.body(self.emb(x)))


def equal(one, other):
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == c and torch.equal(b, d) for (a, b), (c, d) in pairs)


def scramble(module):
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.copy_(torch.ones_like(tensor))


def names(stored):
    return ["/".join(o.path[1:]) for o in stored.tree.objects]


def test_module_keeps_the_contract(providers):
    check_provider(Net, scramble, equal, providers=providers)


def test_restored_in_place_and_still_tied(save):
    stored = save({"model": Net()})
    net = Net(1)
    before = {name: t.data_ptr() for name, t in net.state_dict().items()}
    drop = net.drop.clone()
    net.body.requires_grad_(False)
    stored.restore({"model": net})
    assert equal(net, Net())
    assert {name: t.data_ptr() for name, t in net.state_dict().items()} == before
    assert net.head.weight is net.emb.weight
    assert torch.equal(net.drop, drop)
    assert not any(p.requires_grad for p in net.body.parameters())
    assert net.emb.weight.requires_grad


def test_differences_are_all_listed(save):
    stored = save({"model": Net(), "x": 1})
    net = Net(1)
    net.body[0] = nn.Linear(3, 5)
    net.body[2].double()
    net.extra = nn.Linear(2, 2)
    placement = stored.plan({"model": net, "x": torch.ones(1)})
    assert placement.missing == [("model", "extra.weight"), ("model", "extra.bias")]
    assert placement.problems == [
        "model/body.0.weight: shape [5, 6] is stored, but the template has [5, 3]",
        "model/body.2.weight: dtype float32 is stored, but the template has float64",
        "x is stored as a value, but is a tensor in the template",
    ]
    assert all(t.path not in placement.missing for t in placement.targets)
    unselected = stored.plan({"model": net}, include="model/emb")
    assert not unselected.missing
    assert not unselected.problems


def test_renamed_module_finds_its_parameters(save):
    stored = save({"net": nn.ModuleDict({"old": nn.Linear(2, 3)})})
    target = nn.ModuleDict({"new": nn.Linear(2, 3)})
    renamed = stored.renamed({"net/old": "model/new"})
    renamed.restore({"model": target})
    assert torch.equal(target["new"].weight, stored.load()["net"]["old.weight"])


class Wrapped(nn.Module):
    def __init__(self, wrap, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = wrap(nn.Linear(3, 3))
        self.rest = nn.Sequential(wrap(wrap(nn.Linear(3, 3))), nn.Linear(3, 3))


def wrappers(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def compile_once(module):
        # torch does not compile twice; any other wrapper around a compiled module will do.
        compiled = type(module).__name__ == "OptimizedModule"
        return nn.DataParallel(module) if compiled else torch.compile(module)

    return {
        "compile": compile_once,
        "data parallel": nn.DataParallel,
        "checkpoint": checkpoint_wrapper,
        "ddp": nn.parallel.DistributedDataParallel,
    }


@pytest.fixture
def wrap(request, tmp_path):
    kind = request.param
    if kind == "ddp":
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
        )
    yield wrappers(tmp_path)[kind]
    if kind == "ddp":
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # torch's own, on compiling and on DDP without gradients
@pytest.mark.parametrize("wrap", ["compile", "data parallel", "checkpoint", "ddp"], indirect=True)
def test_wrappers_do_not_change_names(save, wrap):
    bare = Wrapped(lambda m: m)
    stored = save({"model": bare})
    for module in (wrap(bare), wrap(wrap(bare)), Wrapped(wrap), wrap(Wrapped(wrap))):
        assert names(save({"model": module})) == names(stored)
        target = module
        scramble(module)
        stored.restore({"model": target})
        assert save({"model": module}).data == stored.data


class Extra(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.state = state
        self.weight = nn.Parameter(torch.zeros(2))

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize(
    "state",
    [
        {"step": 3, "when": (1, 2)},
        {"t": torch.arange(3), "n": {1: torch.ones(1)}},
        5,
        torch.ones(2),
    ],
    ids=["values", "tensors", "number", "tensor"],
)
def test_extra_state_goes_through_the_module(save, state):
    net = nn.Sequential(nn.Linear(1, 1), Extra(state))
    stored = save({"model": net})
    target = nn.Sequential(nn.Linear(1, 1), Extra(None))
    old = target[1].state
    placement = stored.plan({"model": target})
    stored.fill(placement)
    assert target[1].state is old
    placement.finish()
    torch.testing.assert_close(target[1].state, state, rtol=0, atol=0)
    loaded = nn.Sequential(nn.Linear(1, 1), Extra(None))
    loaded.load_state_dict(stored.load()["model"])
    torch.testing.assert_close(loaded[1].state, state, rtol=0, atol=0)


class Hooked(nn.Linear):
    """Has its weight under another name in its state dict, and a copy of its bias."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_state_dict_post_hook(self._change)

    @staticmethod
    def _change(module, state, prefix, metadata):
        state[f"{prefix}renamed"] = state.pop(f"{prefix}weight")
        state[f"{prefix}copy"] = module.bias.detach() * 2


def test_state_dict_hooks_are_respected_and_copies_are_a_problem_on_restore(save):
    stored = save({"model": Hooked()})
    assert names(stored) == ["bias", "renamed", "copy"]
    target = Hooked()
    placement = stored.plan({"model": target})
    assert len(placement.problems) == 1
    assert placement.problems[0].startswith("model/copy is made by a state-dict hook")
    stored.restore({"model": target}, exclude="model/copy")
    assert torch.equal(target.weight, stored.load()["model"]["renamed"])


def test_parametrized_modules_round_trip(save):
    def make():
        return nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))

    check_provider_of(make, save)


def check_provider_of(make, save):
    torch.manual_seed(0)
    one = make()
    target = make()
    save({"m": one}).restore({"m": target})
    assert equal(one, target)


def test_plain_state_dicts_and_modules_are_interchangeable(save):
    stored = save({"model": Net().state_dict()})
    net = Net(1)
    stored.restore({"model": net})
    assert equal(net, Net())
    state = OrderedDict(Net(1).state_dict())
    save({"model": Net()}).restore({"model": state})
    assert torch.equal(state["keep"], Net().keep)


def test_tensors_written_in_forward_are_never_deferred(save):
    net = nn.ModuleList([nn.Embedding(4, 2, max_norm=1.0), nn.EmbeddingBag(4, 2, max_norm=1.0)])
    net.append(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters())
    stored = save({"m": net, "o": optimizer})
    deferrable = stored.description.deferrable
    entries = [entry for entry in stored.description.entries if entry.path in deferrable]
    deferred = {entry.source.memory.storage for entry in entries}
    assert net[2].weight.data_ptr() in deferred
    assert net[0].weight.data_ptr() not in deferred
    assert net[1].weight.data_ptr() not in deferred


@pytest.mark.filterwarnings("ignore")
def test_fsdp_is_refused_with_a_remedy(save, tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        from torch.distributed.fsdp import FullyShardedDataParallel

        sharded = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
        with pytest.raises(
            UnsupportedStateError, match=r"a/b is sharded by FSDP1 .*use_orig_params=True"
        ):
            save({"a": {"b": nn.Sequential(sharded)}})
    finally:
        dist.destroy_process_group()


class Keeper(nn.Module):
    """Puts a plain value into its state dict, and loads it again."""

    def __init__(self, epoch):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(len(str(epoch)))))
        self.epoch = epoch

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}epoch"] = self.epoch

    def _load_from_state_dict(self, state, prefix, *args):
        self.epoch = state.pop(f"{prefix}epoch")
        super()._load_from_state_dict(state, prefix, *args)


class Overriding(nn.Linear):
    """Adds to its `state_dict`, and loads that in `load_state_dict`."""

    def __init__(self, epoch):
        super().__init__(2, 2)
        self.epoch = epoch

    def state_dict(self, *args, **kwargs):
        return super().state_dict(*args, **kwargs) | {"epoch": self.epoch}

    def load_state_dict(self, state):
        state = dict(state)
        self.epoch = state.pop("epoch")
        return super().load_state_dict(state)


class WithHooks(nn.Linear):
    """The same by hooks."""

    def __init__(self, epoch):
        super().__init__(2, 2)
        self.epoch = epoch
        self.register_state_dict_post_hook(self._add)
        self.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _add(module, state, prefix, metadata):
        state[f"{prefix}epoch"] = module.epoch

    @staticmethod
    def _take(module, state, prefix, *args):
        module.epoch = state.pop(f"{prefix}epoch")


VALUES = [7, "text", None, True, 2.5, [1, "a"], {"a": (1, 2)}]


@pytest.mark.parametrize("make", [Keeper, Overriding, WithHooks])
def test_plain_state_dict_values_restore_through_the_module(save, make):
    for value in VALUES:
        one, other = make(value), make(0)
        placement = save({"m": one}).restore({"m": other})
        assert ("m", "epoch") in placement.values
        assert (type(other.epoch), other.epoch) == (type(value), value)
        assert torch.equal(other.weight, one.weight)


def test_the_module_loads_nothing_before_everything_is_read(save):
    stored = save({"m": Keeper(7)})
    target = Keeper(0)
    placement = stored.plan({"m": target})
    stored.fill(placement)
    assert target.epoch == 0
    placement.finish()
    assert target.epoch == 7


def test_a_value_without_loading_code_is_refused_by_name(save):
    class Shown(nn.Linear):
        """Has an attribute in its state dict that it never loads."""

        value = 0

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}value"] = self.value

    for value in (*VALUES, (3, 4)):
        one = Shown(1, 1)
        one.value = value
        stored, target = save({"m": one}), Shown(1, 1)
        for attribute in (0, value):
            target.value = attribute
            (problem,) = stored.plan({"m": target}).problems
            assert problem.startswith("m/value is a plain ")
            assert "exclude it" in problem
        target.value = 0
        stored.restore({"m": target}, exclude="m/value")
        assert target.value == 0
        assert torch.equal(target.weight, one.weight)


def test_a_value_the_module_ignores_is_an_error(save):
    class Deaf(Keeper):
        def _load_from_state_dict(self, *args):
            nn.Module._load_from_state_dict(self, *args)

    with pytest.raises(RestoreError, match=r"^m: .* left epoch in the state dict"):
        save({"m": Keeper(7)}).restore({"m": Deaf(0)})


class Derived(nn.Module):
    """Keeps twice its weight, recomputed by a hook after each load of a state dict."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(value)))
        self.register_buffer("twice", self.weight.detach() * 2, persistent=False)
        self.calls = 0
        self.register_load_state_dict_post_hook(self._derive)

    @staticmethod
    def _derive(module, incompatible):
        assert incompatible.missing_keys == incompatible.unexpected_keys == []
        module.calls += 1
        module.twice.copy_(module.weight.detach() * 2)


def test_load_hooks_derive_values_from_restored_state(save):
    stored = save({"m": nn.Sequential(Derived(1), Derived(2)), "x": 1})
    target = nn.Sequential(Derived(3), Derived(4))
    memory = target[0].weight.data_ptr()
    stored.restore({"m": target, "x": 0})
    assert [d.twice.tolist() for d in target] == [[2, 2], [4, 4]]
    assert [d.calls for d in target] == [1, 1]
    assert target[0].weight.data_ptr() == memory
    stored.restore({"m": target, "x": 0}, include="x")
    assert [d.calls for d in target] == [1, 1]


def test_a_module_may_reset_before_it_reads_loaded_state(save):
    class Resets(nn.Linear):
        def _load_from_state_dict(self, *args):
            with torch.no_grad():
                self.weight.zero_()
            super()._load_from_state_dict(*args)

    one, other = Resets(2, 2), Resets(2, 2)
    weight = other.weight
    save({"m": one}).restore({"m": other})
    assert torch.equal(other.weight, one.weight)
    assert other.weight is weight


@pytest.mark.parametrize("inference", [False, True])
def test_module_code_works_beside_tensors_torch_barely_writes(save, inference):
    def make(epoch):
        with torch.inference_mode(inference):
            module = nn.Sequential(Keeper(epoch))
            module[0].register_buffer("wide", torch.full((1,), float(epoch)).expand(3))
        return module

    target = make(1)
    save({"m": make(7)}).restore({"m": target})
    assert target[0].epoch == 7
    assert target[0].wide.tolist() == [7, 7, 7]
    assert target[0].weight.tolist() == make(7)[0].weight.tolist()


def test_unstored_extra_state_is_missing(save):
    plain = nn.Sequential(nn.Linear(1, 1), nn.ParameterDict({"weight": torch.zeros(2)}))
    placement = save({"model": plain}).plan({"model": nn.Sequential(nn.Linear(1, 1), Extra(1))})
    assert placement.missing == [("model", "1._extra_state")]
    assert not placement.problems


def test_a_value_in_place_of_a_module_is_a_problem(save):
    placement = save({"m": 1}).plan({"m": nn.Linear(1, 1)})
    assert placement.problems == ["m is stored as one object, but is a module in the template"]


def test_unselected_parts_of_a_module_keep_their_values(save):
    stored = save({"m": nn.ModuleList([Keeper([7]), Keeper(8)])})
    target = nn.ModuleList([Keeper([1, 2]), Keeper(3)])
    items = target[0].epoch
    stored.restore({"m": target}, include="m/1")
    assert [k.epoch for k in target] == [[1, 2], 8]
    assert items == [1, 2]
    stored.restore({"m": target}, include="m/*.weight")
    assert [k.epoch for k in target] == [[1, 2], 8]
    assert torch.equal(target[0].weight, torch.full((2,), 3.0))
    untouched = Keeper(3)
    untouched._load_from_state_dict = None  # would fail if it were called
    save({"m": Keeper(1), "x": torch.ones(1)}).restore(
        {"m": untouched, "x": torch.ones(1)}, include="x"
    )


def test_failing_load_code_of_a_module_names_its_path(save):
    class Broken(Keeper):
        def _load_from_state_dict(self, *args):
            raise ValueError("no")

    with pytest.raises(RestoreError, match=r"^a/m: .*own code failed .*ValueError: no"):
        save({"a": {"m": Keeper(7)}}).restore({"a": {"m": Broken(0)}})


class Averages(nn.Module):
    """Has its own state dict, nested and without any of torch's options."""

    def __init__(self, decay):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.decay = decay

    def state_dict(self):
        self.shown = {"inner": self.inner.state_dict(), "decay": self.decay}
        return self.shown

    def load_state_dict(self, state):
        assert state is not self.shown
        self.inner.load_state_dict(state["inner"])
        self.decay = state["decay"]


def test_a_state_dict_without_torch_options_round_trips(save):
    one, other = Averages(0.9), Averages(0.5)
    weight = other.inner.weight
    stored = save({"m": one})
    stored.restore({"m": other})
    assert other.decay == 0.9
    assert torch.equal(weight, one.inner.weight)


class LiveList(nn.Module):
    """Has live objects in its state dict that it does not load: restored in place."""

    def __init__(self, value):
        super().__init__()
        self.live = {"t": torch.full((2,), float(value)), "n": value}

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}live"] = self.live


def test_values_beside_tensors_in_a_live_container_are_restored(save):
    one, other = LiveList(1), LiveList(2)
    tensor = other.live["t"]
    save({"m": one}).restore({"m": other})
    assert other.live["n"] == 1
    assert other.live["t"] is tensor
    assert tensor.tolist() == [1, 1]

"""What a save caches from the previous one: no stale results, and no user memory."""

import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

from penstock import Checkpointer
from penstock.core.abc import Node, StateObject, StateProvider, places_of, versions_of
from penstock.core.errors import PluginError, UnsupportedStateError
from penstock.core.plugins.registry import default_registry
from penstock.core.tree.describe import describe_tree
from penstock.core.tree.known import Known
from penstock.providers.optimizer import OptimizerProvider
from penstock.providers.tensor.sources import TensorSource, memory_key
from penstock.testing.stored import StaticProviders


def test_result_is_reused_while_its_basis_is_equal():
    made = []

    def make(result):
        return lambda: made.append(result) or result

    first = Known()
    assert first.recall("a", [1], make("one")) == "one"
    assert first.recall("b", [1], make("of b")) == "of b"
    second = Known(first)
    assert second.recall("a", [1], make("not made")) == "one"
    assert second.recall("b", [2], make("new")) == "new"
    # A place that the second save did not visit is dropped, and one that it created is known.
    third = Known(Known(second))
    assert third.recall("a", [1], make("again")) == "again"
    assert Known(second).recall("b", [2], make("not made")) == "new"
    # Concurrent descriptions know their common predecessor.
    assert Known(first).recall("b", [1], make("not made")) == "of b"
    assert made == ["one", "of b", "new", "again"]


def test_failure_is_not_kept():
    known = Known()
    with pytest.raises(ZeroDivisionError):
        known.recall("a", 1, lambda: 1 // 0)
    assert Known(known).recall("a", 1, lambda: 3) == 3


class Job:
    """A model and its optimizer after a training step, and more."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        self.optimizer = torch.optim.Adam(self.model[0].parameters())
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "alone": torch.optim.SGD(nn.Linear(2, 2).named_parameters(), momentum=0.5),
            "loose": {"b": torch.ones(2), "a": torch.ones(3)},
            "lr": 0.5,
        }
        self.step()

    def step(self):
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()


def shown(job, known=None):
    """Return all data of a description without the objects it holds."""
    providers = default_registry().providers
    found = describe_tree(job.state, providers=providers, allow_pickle=False, known=known)
    lines = []
    for entry in found.entries:
        if isinstance(entry, Node):
            lines.append((entry.path, entry.form, entry.meta))
            continue
        source = entry.source
        data = bytes(source.view() or b"") if entry.kind == "value" else None
        deferrable = entry.path in found.deferrable
        facts = source.nbytes, source.address, source.memory, source.version()
        lines.append((*entry[:6], *entry[7:], *(facts if data is None else [data]), deferrable))
    return lines, [(one.path, id(one.value)) for one in found.seen]


CHANGES = {}


def change(function):
    CHANGES[function.__name__] = function
    return function


@change
def nothing(job):
    job.step()


@change
def parameter_is_replaced(job):
    job.model[0].weight = nn.Parameter(torch.ones(3, 3))


@change
def parameter_is_replaced_in_the_dict_of_its_module(job):
    job.model[0]._parameters["weight"] = nn.Parameter(torch.ones(3, 3))


@change
def data_is_of_another_shape(job):
    job.model[2].weight.data = torch.ones(5, 2)


@change
def data_is_of_another_dtype(job):
    job.model[2].weight.data = torch.ones(3, 3, dtype=torch.float64)


@change
def data_is_transposed(job):
    job.model[2].weight.data = torch.ones(3, 3).t()


@change
def data_is_in_other_memory(job):
    job.model[2].weight.data = job.model[2].weight.data.clone()


@change
def data_is_negated_when_read(job):
    job.model[2].weight.data = torch.ones(3, 3, dtype=torch.complex64).conj().imag


@change
def data_is_conjugated_when_read(job):
    job.state["loose"]["a"].data = torch.ones(3, dtype=torch.complex64).conj()


@change
def buffer_is_resized(job):
    job.model[1].running_mean.resize_(7)


@change
def tensor_is_swapped(job):
    torch.utils.swap_tensors(job.state["loose"]["a"], torch.zeros(9))


@change
def memory_is_shared_with_other_processes(job):
    job.model[0].weight.share_memory_()


@change
def state_of_the_optimizer_is_shared(job):
    job.optimizer.state[job.model[0].bias]["exp_avg"].share_memory_()


@change
def weights_are_tied(job):
    job.model[2].weight = job.model[0].weight


@change
def parameter_is_frozen(job):
    job.model[0].weight.requires_grad_(requires_grad=False)


@change
def parameter_is_no_leaf(job):
    job.optimizer.param_groups[0]["params"][0] = job.model[0].weight * 1


@change
def state_appears(job):
    job.optimizer.add_param_group({"params": list(job.model[2].parameters())})
    job.step()


@change
def state_of_one_parameter_has_another_key(job):
    job.optimizer.state[job.model[0].bias]["more"] = torch.ones(3)


@change
def state_of_one_parameter_has_another_order(job):
    state = job.optimizer.state[job.model[0].bias]
    state["step"] = state.pop("step")


@change
def state_is_replaced(job):
    job.optimizer.state[job.model[0].bias]["exp_avg"] = torch.ones(3)


@change
def state_is_a_number(job):
    job.optimizer.state[job.model[0].bias]["step"] = 3


@change
def state_is_gone(job):
    del job.optimizer.state[job.model[0].bias]


@change
def group_is_added(job):
    job.optimizer.add_param_group({"params": [job.model[2].weight], "lr": 3.0})


@change
def parameters_change_places(job):
    job.optimizer.param_groups[0]["params"].reverse()


@change
def parameter_moves_to_another_group(job):
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    first, second = job.optimizer.param_groups
    second["params"].append(first["params"].pop())


@change
def learning_rate(job):
    job.optimizer.param_groups[0]["lr"] = 0.125


@change
def learning_rate_is_a_tensor_of_the_state(job):
    state = job.optimizer.state[job.model[0].bias]
    job.optimizer.param_groups[0]["lr"] = state["exp_avg"]


@change
def steps_are_captured(job):
    job.optimizer.param_groups[0]["capturable"] = True


@change
def parameter_is_renamed_in_its_group(job):
    job.state["alone"].param_groups[0]["param_names"][1] = "other"


@change
def module_is_renamed(job):
    job.model._modules["first"] = job.model._modules.pop("0")


@change
def modules_change_places(job):
    job.model._modules["0"] = job.model._modules.pop("0")


@change
def modules_change_names(job):
    modules = job.model._modules
    modules["0"], modules["2"] = modules["2"], modules["0"]


@change
def buffer_is_no_longer_stored(job):
    job.model[1].register_buffer("running_mean", torch.ones(3), persistent=False)


@change
def buffer_becomes_a_parameter(job):
    del job.model[1].running_mean
    job.model[1].running_mean = nn.Parameter(torch.ones(3))


@change
def hook_shows_other_values(job):
    other, more = torch.full((3, 3), 7.0), torch.ones(1)

    def hook(module, state, prefix, meta):
        del module, meta
        state[prefix + "weight"] = other
        state[prefix + "more"] = more

    job.model[2]._register_state_dict_hook(hook)


@change
def module_is_of_another_class(job):
    class Other(nn.Sequential):
        pass

    job.model.__class__ = Other


@change
def module_is_wrapped(job):
    job.model._modules["0"] = nn.DataParallel(job.model[0])


@change
def another_module_comes_first(job):
    other = nn.Sequential(job.model[0])
    job.state = {"other": other, **job.state}


@change
def another_module_has_the_same_names(job):
    job.state["other"] = nn.Sequential(nn.Linear(3, 3))


@change
def embedding_writes_in_forward(job):
    embedding = nn.Embedding(3, 3, max_norm=1.0)
    embedding.weight = job.model[0].weight
    job.model.append(embedding)


@change
def module_is_gone(job):
    del job.state["model"]


@change
def key_is_renamed(job):
    loose = job.state["loose"]
    loose["c"] = loose.pop("b")


@change
def keys_are_of_another_type(job):
    job.state["loose"] = {1: torch.ones(2), 2: torch.ones(3)}


@change
def keys_change_places(job):
    loose = job.state["loose"]
    loose["b"] = loose.pop("b")


@change
def dict_is_of_another_class(job):
    job.state["loose"] = OrderedDict(job.state["loose"])


@change
def tensor_becomes_a_value(job):
    job.state["loose"]["b"] = 3


@change
def values(job):
    job.state["lr"] = 0.25


UNSEEN = {"parameter_is_frozen", "module_is_wrapped"}
"""Changes after which the same is stored."""


@pytest.mark.parametrize("name", CHANGES)
def test_cached_objects_are_described_like_new(name):
    job, known = Job(), Known()
    assert shown(job, known) == (before := shown(job)) == shown(job, known := Known(known))
    CHANGES[name](job)
    after = shown(job)
    assert (after == before) is (name in UNSEEN)
    assert shown(job, Known(known)) == after
    assert shown(job, Known(known)) == after


def test_many_tensors_are_described_like_single_ones():
    """Neighbors that differ in one layout trait; most tensors share all."""
    plain, other = torch.ones(3, 3), torch.ones(3, 3, dtype=torch.complex64)
    alike = [
        plain,
        plain.clone().t(),
        plain.clone(),
        torch._neg_view(plain.clone()),
        plain.clone(),
        plain.int(),
        plain.clone(),
        plain.clone()[:2],
        other,
        other.clone().conj(),
        other.clone(),
    ]

    def facts(*tensors):
        job = Job()
        job.state = {"many": list(tensors)}
        return [(one[1:9], one[10]._replace(storage=0)) for one in shown(job)[0][1:]]

    assert facts(*alike) == [fact for tensor in alike for fact in facts(tensor)]


class OwnClaims(OptimizerProvider):
    """A third-party provider that claims by memory."""

    def claimed_memory(self, value, /):
        return self.answer if self.answer is not None else super().claimed_memory(value)

    answer = None


def deferrable(job, provider):
    providers = [*default_registry().providers.all()]
    providers = [provider if one.name == provider.name else one for one in providers]
    providers = StaticProviders(providers)
    return describe_tree(job.state, providers=providers, allow_pickle=False).deferrable


@pytest.mark.parametrize("name", CHANGES)
def test_values_and_memory_make_equal_claims(name):
    job = Job()
    CHANGES[name](job)
    claimed = deferrable(job, OptimizerProvider())
    assert claimed == deferrable(job, OwnClaims())
    assert claimed or name == "steps_are_captured"


def test_a_subclass_may_claim_less():
    job, own = Job(), OwnClaims()
    own.answer = [memory_key(job.model[0].bias)]
    assert deferrable(job, own) == {("model", "0.bias")}


class Box:
    """A value whose provider returns what a test sets."""


def test_third_party_is_asked_each_time_and_checked_each_time():
    answers = []

    class Boxes(StateProvider):
        name = "boxes"
        forms = ("box",)

        def claims(self, kind, /):
            return 40 if kind is Box else None

        def describe(self, value, path, /, *, context):
            del value, context
            return [Node((*path, *below), "box", meta) for below, meta in answers]

        def place(self, value, path, /, *, context):
            raise NotImplementedError

        def rebuild(self, stored, /, *, device, context):
            raise NotImplementedError

    providers = StaticProviders([*default_registry().providers.all(), Boxes()])
    known = Known()

    def described(*given):
        nonlocal known
        answers[:] = given
        state, now = {"b": Box(), "t": torch.ones(1)}, Known(known)
        found = describe_tree(state, providers=providers, allow_pickle=False, known=now)
        known = now
        return [(e.path, e.meta) for e in found.entries if not isinstance(e, StateObject)]

    assert described(((), {})) == [(("b",), {})]
    assert described(((), {"more": 1}), (("x",), {})) == [(("b",), {"more": 1}), (("b", "x"), {})]
    with pytest.raises(PluginError, match="yields the path b/x twice"):
        described(((), {"more": 1}), (("x",), {}), (("x",), {}))
    with pytest.raises(PluginError, match="cannot be stored as JSON"):
        described(((), {"more": {1}}), (("x",), {}))
    kept = {"more": [1]}
    described(((), kept))
    kept["more"] = (1,)  # in place
    with pytest.raises(PluginError, match="JSON would change it"):
        described(((), kept))
    with pytest.raises(PluginError, match="not a tuple of strings"):
        described(((), {"more": 1}), ((3,), {}))
    with pytest.raises(UnsupportedStateError, match="use shorter keys"):
        described(((), {"more": 1}), (("x" * 100_000,), {}))


def test_third_parties_get_their_own_nodes_and_names():
    class Counts(OptimizerProvider):
        def describe(self, value, path, /, *, context):
            assert not isinstance(context.parameter_names(torch.ones(1)), list)
            for entry in super().describe(value, path, context=context):
                if isinstance(entry, Node) and "objects" in entry.meta:
                    entry.meta["objects"] += 1
                yield entry

    others = [one for one in default_registry().providers.all() if one.name != "optimizer"]
    providers, known, counts = StaticProviders([*others, Counts()]), None, []
    state = {"optimizer": Job().optimizer}
    for _ in range(2):
        known = Known(known)
        found = describe_tree(state, providers=providers, allow_pickle=False, known=known)
        counts.append([e.meta.get("objects") for e in found.entries if isinstance(e, Node)])
    assert counts[0] == counts[1]


def test_sources_of_a_custom_class_are_asked_one_by_one():
    class Own(TensorSource):
        def version(self):
            return 42

        def locate(self):
            return None if super().locate() else 0

    some = [Own(torch.ones(2)), Own(torch.ones(2))]
    assert versions_of(some) == [42, 42]
    assert places_of(some) == [None, None]
    with torch.inference_mode():
        frozen = torch.ones(2)
    assert versions_of([TensorSource(frozen)]) == [None]


def test_the_cache_keeps_no_state_alive(tmp_path):
    job = Job()
    with Checkpointer(tmp_path) as ckpt:
        for step, mode in enumerate(["async", "lazy", "blocking", "lazy"]):
            ckpt.save(job.state, step, mode=mode)
            ckpt.wait()
            job.step()
        held = [weakref.ref(tensor) for tensor in [*job.model.parameters(), *job.model.buffers()]]
        held += [weakref.ref(t) for s in job.optimizer.state.values() for t in s.values()]
        storages = [t.untyped_storage()._weak_ref() for t in job.model.parameters()]
        held += [weakref.ref(job.model), weakref.ref(job.optimizer)]
        del job
        gc.collect()
        assert not any(ref() for ref in held)
        assert all(map(torch.UntypedStorage._expired, storages))
        for storage in storages:
            torch.UntypedStorage._free_weak_ref(storage)

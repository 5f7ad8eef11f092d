"""Children that a provider places in a batch are restored like single ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.core.abc import Placement
from penstock.core.errors import PluginError, UnsupportedStateError
from penstock.core.tree.place import overlapping
from penstock.providers.tensor import TensorProvider
from penstock.providers.tensor.sources import TensorSink
from penstock.providers.values import ValueProvider
from penstock.testing.providers import store
from penstock.testing.stored import StaticProviders


def saved(state, provider=None):
    return store(state, providers=StaticProviders([provider or TensorProvider(), ValueProvider()]))


def named(count=3):
    return {str(number): torch.full((4,), float(number)) for number in range(count)}


class Answers(TensorProvider):
    def __init__(self, answer):
        super().__init__()
        self._answer = answer

    def place_all(self, values, paths, /, *, context):
        return self._answer


def test_non_list_result_is_an_error_naming_the_provider():
    stored = saved({"t": named()}, Answers(Placement()))
    with pytest.raises(PluginError, match=r"t: provider 'tensor'.*place_all returned Placement"):
        stored.plan({"t": named()})


def test_result_without_one_target_per_path_is_an_error():
    first, second, _ = saved({"t": named()}).plan({"t": named()}).targets
    for answer in ([], [first, second], [first, first, second], [None], ["x", "y", "z"]):
        stored = saved({"t": named()}, Answers(answer))
        with pytest.raises(PluginError, match=r"t: provider 'tensor'.*place_all returned"):
            stored.plan({"t": named()})


def test_none_makes_single_calls():
    assert len(saved({"t": named()}, Answers(None)).plan({"t": named()}).targets) == 3


def test_provider_overriding_only_place_gets_single_calls():
    class Upper(TensorProvider):
        def place(self, value, path, /, *, context):
            placed.append(path)
            return super().place(value, path, context=context)

    placed = []
    saved({"t": named()}, Upper()).plan({"t": named()})
    assert placed == [("t", "0"), ("t", "1"), ("t", "2")]


def test_data_of_a_later_provider_version_is_refused():
    stored = saved({"t": named()})
    tree = replace(stored.tree, providers={"tensor": TensorProvider.version + 1})
    with pytest.raises(PluginError, match=r"^t/0 was written by provider .*: upgrade it"):
        replace(stored, tree=tree).plan({"t": named()})


def test_rank_specific_values_are_placed_one_by_one():
    class OfEachRank(TensorProvider):
        def on_other_ranks(self, kind, /):
            return "keep"

        def place_all(self, values, paths, /, *, context):
            raise AssertionError

    stored = saved({"t": named()}, OfEachRank())
    live = {"t": {name: torch.zeros(4) for name in named()}}
    stored.restore(live)
    assert all(torch.equal(live["t"][name], tensor) for name, tensor in named().items())


def test_tensor_with_freed_memory_is_named_among_many():
    stored, live = saved({"t": named()}), named()
    live["1"].untyped_storage().resize_(0)
    with pytest.raises(UnsupportedStateError, match="t/1 "):
        stored.plan({"t": live})


def test_tensors_in_a_tuple_are_filled_in_place():
    live = (torch.zeros(4), torch.zeros(4))
    state = {"t": live}
    saved({"t": (torch.ones(4), torch.full((4,), 2.0))}).restore(state)
    assert state["t"] is live
    assert [tensor[0].item() for tensor in live] == [1, 2]


def test_one_other_shape_among_many_is_reported():
    placement = saved({"t": named()}).plan({"t": {**named(), "1": torch.zeros(5)}})
    assert [difference.path for difference in placement.differences] == [("t", "1")]
    assert [target.path[1] for target in placement.targets] == ["0", "2"]


def groups(*tensors):
    """The groups of the targets of these tensors that may share memory, as numbers."""
    state = {"t": {str(number): tensor for number, tensor in enumerate(tensors)}}
    plan = saved({"t": {n: torch.zeros(t.shape) for n, t in state["t"].items()}}).plan(state)
    return [sorted(int(target.path[1]) for target in group) for group in overlapping(plan.targets)]


def test_memory_shared_by_targets_is_found_in_any_layout():
    base = torch.zeros(8)
    assert groups(base[:4], base[4:], torch.zeros(3), torch.empty(0)) == []
    assert groups(base, torch.zeros(3), base[5:6]) == [[0, 2]]
    assert groups(base[:5], torch.zeros(3), base[4:]) == [[0, 2]]
    # The sink of an expanded tensor has scratch memory, and names the expanded memory.
    assert groups(base[:1].expand(5), torch.zeros(3), base) == [[0, 2]]


def test_memory_named_by_a_third_party_sink_counts_anywhere():
    class Buffered(TensorSink):
        """Takes the bytes into other memory, then puts them into the memory that it names."""

        def __init__(self, tensor):
            super().__init__(tensor)
            self.scratch = torch.zeros(4)
            self.address = self.scratch.data_ptr()

    base = torch.zeros(8)
    plan = saved({"t": named()}).plan({"t": {"0": base[:4], "1": torch.zeros(4), "2": base[4:]}})
    first = plan.targets[0]
    shared = [first._replace(sink=Buffered(base[:4])), first._replace(sink=Buffered(base[2:6]))]
    assert len(overlapping([*shared, plan.targets[1]])) == 1

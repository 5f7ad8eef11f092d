"""The suite for providers catches every way that we know of to break the contract."""

from __future__ import annotations

import copy

import pytest
import torch

from penstock.core.abc import (
    ByteSink,
    ByteSource,
    MemoryKey,
    Node,
    Placement,
    StateObject,
    StateProvider,
    Target,
)
from penstock.core.errors import PluginError
from penstock.core.registry import default_registry
from penstock.core.testing.providers import check_provider
from penstock.core.tree import StaticProviders
from penstock.core.types import Kind, Region, Role, TensorSpec

# -- a composite and a leaf that keep the contract ----------------------------------------------


class Mean:
    """A tensor and a count."""

    def __init__(self):
        self.total = torch.arange(40.0)
        self.count = 3


class Ring:
    """Numbers of two bytes each, in memory of its own."""

    def __init__(self):
        self.data = bytearray(range(200))
        self.turns = 0


class Good(StateProvider):
    api_version = 1
    name = "good"
    forms = ("good-mean", "good-ring")

    def claims(self, kind, /):
        return 40 if kind in (Mean, Ring) else None

    def describe(self, value, path, /, *, context):
        if isinstance(value, Mean):
            yield from self.mean(value, path, context)
        else:
            yield self.ring(value, path)

    def mean(self, value, path, context):
        yield Node(path, "good-mean")
        yield from context.describe(value.total, (*path, "total"))
        yield from context.describe(value.count, (*path, "count"))

    def ring(self, value, path):
        spec = self.spec(value)
        region = Region.whole(spec.shape)
        return StateObject(
            path, Kind.TENSOR, spec, region, Role.OTHER, "good-ring", self.Source(value)
        )

    def spec(self, value):
        return TensorSpec("int16", 2, (len(value.data) // 2,))

    def place(self, value, path, /, *, context):
        if isinstance(value, Ring):
            return self.place_ring(value, path, context)
        return self.place_mean(value, path, context)

    def place_ring(self, value, path, context):
        if not context.selected(path):
            return Placement(finish=lambda: value)
        return self.into(value, path)

    def into(self, value, path):
        spec = self.spec(value)
        target = Target(path, spec, Region.whole(spec.shape), self.Sink(value))
        return Placement([target], finish=lambda: value)

    def place_mean(self, value, path, context):
        total = context.place(value.total, (*path, "total"))
        count = context.place(value.count, (*path, "count"))

        def finish():
            if total.finish is not None:
                value.total = total.finish()
            if count.finish is not None:
                value.count = count.finish()
            return value

        return self.joined(total, count, finish)

    def joined(self, total, count, finish):
        placement = Placement(finish=finish)
        placement.absorb(total)
        placement.absorb(count)
        return placement

    def rebuild(self, stored, /, *, device, context):
        if stored.form == "good-ring":
            ring = Ring()
            ring.data = bytearray(stored.spec.nbytes)
            return self.into(ring, stored.path)
        mean = Mean()
        total = context.rebuild((*stored.path, "total"), device=device)
        count = context.rebuild((*stored.path, "count"), device=device)

        def finish():
            mean.total, mean.count = total.finish(), count.finish()
            return mean

        return self.joined(total, count, finish)

    class Memory:
        def __init__(self, value):
            self.value = value
            self.nbytes = len(value.data)
            self.device = "cpu"
            self.address = None
            self.memory = MemoryKey("cpu", id(value.data), 0, (self.nbytes // 2,), (2,), "ring")

        def view(self):
            return None

    class Source(Memory, ByteSource):
        def copy_out(self, start, out, /):
            out[:] = memoryview(self.value.data)[start : start + len(out)]

    class Sink(Memory, ByteSink):
        def copy_in(self, start, data, /):
            self.value.data[start : start + len(data)] = data


def equal(one, other):
    if isinstance(one, Ring):
        return one.data == other.data
    return torch.equal(one.total, other.total) and one.count == other.count


def change(value):
    if isinstance(value, Ring):
        value.data[:] = bytes(len(value.data))
    else:
        value.total += 1
        value.count += 1


def check(cls, kind, *others):
    ours = [p for p in default_registry().providers.all() if p.name in {"tensor", "value"}]
    providers = StaticProviders([cls(), *others, *ours])
    check_provider(kind, change, equal, providers=providers, loaded=equal)


@pytest.mark.parametrize("kind", [Mean, Ring])
def test_the_good_one_passes(kind):
    check(Good, kind)


MUTANTS = {}


def caught_by(message, kind):
    def add(mutant):
        MUTANTS[mutant] = (message, kind)
        return mutant

    return add


# -- what it says of itself ---------------------------------------------------------------------


@caught_by("for version 2 of the contract", Mean)
class OtherVersion(Good):
    api_version = 2


@caught_by("needs a name", Mean)
class Nameless(Good):
    name = ""


@caught_by("versions count from 1", Mean)
class VersionZero(Good):
    version = 0


@caught_by("forms is a tuple", Mean)
class OneFormAsText(Good):
    forms = "good-mean"


@caught_by("forms are unique", Mean)
class TakesOurForm(Good):
    forms = (*Good.forms, "tensor")


@caught_by("which it cannot know", Ring)
class ClaimsEverything(Good):
    def claims(self, kind, /):
        return 60 if kind in (Mean, Ring) else 1


@caught_by("good-mean", Mean)
class FormIsNotDeclared(Good):
    forms = ("good-ring",)


# -- describing ---------------------------------------------------------------------------------


@caught_by("nothing is described", Mean)
class DescribesNothing(Good):
    def mean(self, value, path, context):
        return iter(())


@caught_by("comes after what is below it", Mean)
class NodeComesLast(Good):
    def mean(self, value, path, context):
        node, *rest = super().mean(value, path, context)
        yield from rest
        yield node


@caught_by("outside of its part", Mean)
class LeavesItsPart(Good):
    def mean(self, value, path, context):
        yield Node(path, "good-mean")
        yield from context.describe(value.total, ("total",))
        yield from context.describe(value.count, (*path, "count"))


@caught_by("'part', 'count'", Mean)
class ForgetsAChild(Good):
    def mean(self, value, path, context):
        yield Node(path, "good-mean")
        yield from context.describe(value.total, (*path, "total"))


@caught_by("describing changes the state", Mean)
class CountsDescriptions(Good):
    def mean(self, value, path, context):
        value.count += 1
        yield from super().mean(value, path, context)


@caught_by("a second description differs", Mean)
class PathsChange(Good):
    def mean(self, value, path, context):
        self.calls = getattr(self, "calls", 0) + 1
        yield Node(path, "good-mean")
        yield from context.describe(value.total, (*path, f"total{self.calls}"))
        yield from context.describe(value.count, (*path, "count"))


@caught_by("other nodes", Mean)
class NodesChange(Good):
    def mean(self, value, path, context):
        self.calls = getattr(self, "calls", 0) + 1
        _, *rest = super().mean(value, path, context)
        yield Node(path, "good-mean", {"calls": self.calls})
        yield from rest


@caught_by("size and spec differ", Ring)
class SpecIsTooLarge(Good):
    def spec(self, value):
        return TensorSpec("int16", 2, (len(value.data),))


# -- sources ------------------------------------------------------------------------------------


@caught_by("a view goes with an address", Ring)
class AddressWithoutView(Good):
    class Source(Good.Source):
        def __init__(self, value):
            super().__init__(value)
            self.address = 4096


@caught_by("view and copy_out differ", Ring)
class ViewOfTheWrongEnd(Good):
    class Source(Good.Source):
        def __init__(self, value):
            super().__init__(value)
            self.address = 4096

        def view(self):
            return memoryview(bytes(reversed(self.value.data)))


@caught_by("the view must be flat", Ring)
class ViewWithSteps(Good):
    class Source(Good.Source):
        def __init__(self, value):
            super().__init__(value)
            self.address = 4096

        def view(self):
            return memoryview(bytes(2 * self.nbytes))[::2]


@caught_by("piece at .* differs", Ring)
class CopiesFromTheStart(Good):
    class Source(Good.Source):
        def copy_out(self, start, out, /):
            out[:] = self.value.data[: len(out)]


# -- placing ------------------------------------------------------------------------------------


@caught_by("planning changed the target", Mean)
class PlansInPlace(Good):
    def place_mean(self, value, path, context):
        placement = super().place_mean(value, path, context)
        if context.selected((*path, "count")):
            value.count = 0
        return placement


@caught_by("an unselected restore changed it", Mean)
class ChangesWhatIsNotSelected(Good):
    def place_mean(self, value, path, context):
        if not context.selected((*path, "total")):
            value.total.zero_()
        return super().place_mean(value, path, context)


@caught_by("not equal", Mean)
class ForgetsToPlaceAChild(Good):
    def joined(self, total, count, finish):
        placement = Placement(finish=finish)
        placement.absorb(count)
        return placement


@caught_by("put a NoneType into the tree", Mean)
class FinishReturnsNothing(Good):
    def place_mean(self, value, path, context):
        placement = super().place_mean(value, path, context)
        finish = placement.finish

        def nothing():
            finish()

        placement.finish = nothing
        return placement


@caught_by("not equal", Mean)
class FinishAssignsNothing(Good):
    def place_mean(self, value, path, context):
        placement = super().place_mean(value, path, context)
        placement.finish = lambda: value
        return placement


@caught_by("is not noticed", Mean)
class SwallowsWhatIsMissing(Good):
    def joined(self, total, count, finish):
        placement = super().joined(total, count, finish)
        placement.missing.clear()
        placement.targets = [t for t in placement.targets if self.stored_at(t.path)]
        return placement

    def stored_at(self, path):
        return self.context.stored(path) is not None

    def place_mean(self, value, path, context):
        self.context = context
        return super().place_mean(value, path, context)

    def rebuild(self, stored, /, *, device, context):
        self.context = context
        return super().rebuild(stored, device=device, context=context)


@caught_by("size and spec differ", Ring)
class BelievesTheStoredShape(Good):
    def place_ring(self, value, path, context):
        placement = super().place_ring(value, path, context)
        stored = context.stored(path)
        for number, target in enumerate(placement.targets):
            if stored is not None:
                region = Region.whole(stored.spec.shape)
                placement.targets[number] = Target(path, stored.spec, region, target.sink)
        return placement


# -- sinks --------------------------------------------------------------------------------------


@caught_by("not equal", Ring)
class FillsFromTheStart(Good):
    class Sink(Good.Sink):
        def copy_in(self, start, data, /):
            self.value.data[: len(data)] = data


@caught_by("not equal", Ring)
class ExpectsAnOrder(Good):
    class Sink(Good.Sink):
        at = 0

        def copy_in(self, start, data, /):
            self.value.data[self.at : self.at + len(data)] = data
            self.at += len(data)


@caught_by("not equal", Ring)
class FillsACopy(Good):
    class Sink(Good.Sink):
        def __init__(self, value):
            super().__init__(copy.deepcopy(value))


# -- loading ------------------------------------------------------------------------------------


@caught_by("load gives another state", Mean)
class LoadsWithoutTheCount(Good):
    def rebuild(self, stored, /, *, device, context):
        placement = super().rebuild(stored, device=device, context=context)
        finish = placement.finish

        def forget():
            mean = finish()
            mean.count = 0
            return mean

        placement.finish = forget
        return placement


# -- the proofs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda cls: cls.__name__)
def test_suite_catches(mutant):
    message, kind = MUTANTS[mutant]
    with pytest.raises((AssertionError, PluginError), match=message):
        check(mutant, kind)


class Silent(StateProvider):
    name = "silent"
    forms = Good.forms
    claims, describe, place, rebuild = Good.claims, Good.describe, Good.place, Good.rebuild


def test_a_provider_that_says_nothing_of_its_version_is_told_what_to_write():
    with pytest.raises(AssertionError, match="write `api_version = 1` into Silent"):
        check(Silent, Mean)


def test_a_change_that_changes_nothing_is_no_check():
    with pytest.raises(AssertionError, match="`change` changes nothing"):
        check_provider(Mean, lambda mean: mean, equal, providers=_with(Good()))


def _with(provider):
    ours = [p for p in default_registry().providers.all() if p.name in {"tensor", "value"}]
    return StaticProviders([provider, *ours])

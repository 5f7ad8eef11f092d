"""The suite for providers catches every way that we know of to break the contract."""

from __future__ import annotations

import copy
import ctypes
from weakref import WeakKeyDictionary

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
from penstock.core.errors import UnsupportedStateError
from penstock.core.plugins.registry import default_registry
from penstock.core.types import Kind, Region, Role, TensorSpec
from penstock.testing.providers import check_provider
from penstock.testing.stored import StaticProviders

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
            path, Kind.TENSOR, spec, (region,), Role.OTHER, "good-ring", self.Source(value)
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
        target = Target(path, spec, (Region.whole(spec.shape),), self.Sink(value))
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
                regions = (Region.whole(stored.spec.shape),)
                placement.targets[number] = Target(path, stored.spec, regions, target.sink)
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


@caught_by("load gives another state than was stored", Mean)
class LoadsTheCountOfANewOne(Good):
    """Right for a value that nobody has changed yet."""

    def rebuild(self, stored, /, *, device, context):
        placement = super().rebuild(stored, device=device, context=context)
        finish = placement.finish

        def forget():
            mean = finish()
            mean.count = Mean().count
            return mean

        placement.finish = forget
        return placement


# -- what it says, by type ----------------------------------------------------------------------


@caught_by(r"claims\(Mean\) .* returned '40', which is of type str: return an int", Mean)
class ClaimsInWords(Good):
    def claims(self, kind, /):
        return "40" if kind in (Mean, Ring) else None


@caught_by(r"claims\(Stranger\) .* returned False, .* bool", Mean)
class ClaimsYesOrNo(Good):
    def claims(self, kind, /):
        return kind in (Mean, Ring) and 40


@caught_by("parameters gives 0 for a name: it is a str", Mean)
class NumbersItsParameters(Good):
    def parameters(self, value, /):
        return enumerate([value.total])


@caught_by("claimed_memory gives 'cpu': it is a MemoryKey", Ring)
class ClaimsADevice(Good):
    def claimed_memory(self, value, /):
        return ["cpu"]


@caught_by(r"unsteady_memory gives 4096: it is \(device, storage\)", Ring)
class NamesAnAddress(Good):
    def unsteady_memory(self, value, /):
        return [4096]


@caught_by("left_out gives 0 for a name: it is a str", Ring)
class NumbersWhatItLeavesOut(Good):
    def left_out(self, value, /):
        return [(0, value)]


@caught_by("provider 'good' .* describe yields the path part/total twice", Mean)
class DescribesTwice(Good):
    def mean(self, value, path, context):
        yield from super().mean(value, path, context)
        yield from context.describe(value.total, (*path, "total"))


@caught_by("provider 'good' .* the Node part of the form 'good-meen', .*did you mean", Mean)
class MisspellsItsForm(Good):
    def mean(self, value, path, context):
        _, *rest = super().mean(value, path, context)
        yield Node(path, "good-meen")
        yield from rest


@caught_by("provider 'good' .* the meta of the Node part cannot be stored as JSON", Mean)
class PutsAClassIntoItsMeta(Good):
    def mean(self, value, path, context):
        _, *rest = super().mean(value, path, context)
        yield Node(path, "good-mean", {"class": Mean})
        yield from rest


# -- live memory --------------------------------------------------------------------------------


@caught_by("part/total: two descriptions name two memories, so describe copies", Mean)
class ClonesItsTensor(Good):
    def mean(self, value, path, context):
        yield Node(path, "good-mean")
        yield from context.describe(value.total.clone(), (*path, "total"))
        yield from context.describe(value.count, (*path, "count"))


@caught_by("part: two descriptions name two memories, so describe copies", Ring)
class CopiesItsBytes(Good):
    def ring(self, value, path):
        return super().ring(copy.deepcopy(value), path)


@caught_by("describe replaces tensors of the value", Mean)
class ReplacesItsTensor(Good):
    def mean(self, value, path, context):
        value.total = value.total.clone()
        yield from super().mean(value, path, context)


@caught_by("its description still is that of earlier", Mean)
class RemembersACopy(Good):
    def __init__(self):
        self.kept = WeakKeyDictionary()

    def mean(self, value, path, context):
        if value not in self.kept:
            self.kept[value] = copy.deepcopy(value)
        yield from super().mean(self.kept[value], path, context)


class NumpySource(ByteSource):
    """Live, and of what numpy knows."""

    def __init__(self, tensor):
        self.array = tensor.numpy()
        self.nbytes = self.array.nbytes
        self.device, self.address = "cpu", None
        self.memory = MemoryKey("cpu", tensor.untyped_storage().data_ptr(), 0, (40,), (4,), "t")

    def view(self):
        return None

    def copy_out(self, start, out, /):
        flat = self.array.reshape(-1).view("u1")
        out[:] = memoryview(flat)[start : start + len(out)]


@caught_by("describing a value with tensors of bfloat16, .*unsupported ScalarType BFloat16", Mean)
class AsksNumpy(Good):
    def mean(self, value, path, context):
        yield Node(path, "good-mean")
        (entry,) = context.describe(value.total, (*path, "total"))
        yield entry._replace(source=NumpySource(value.total))
        yield from context.describe(value.count, (*path, "count"))


@caught_by("float8_e4m3fn.* comes back changed", Mean)
class RoundsOnTheWay(Good):
    def place_mean(self, value, path, context):
        placement = super().place_mean(value, path, context)
        finish = placement.finish

        def rounded():
            finish()
            if value.total.dtype is torch.float8_e4m3fn:
                value.total = (value.total.float() * 2).to(torch.float8_e4m3fn)
            return value

        placement.finish = rounded
        return placement


# -- buffers that are lent ----------------------------------------------------------------------


@caught_by("`copy_out` of Source keeps a view of the buffer that it was given", Ring)
class KeepsWhatItFilled(Good):
    class Source(Good.Source):
        def copy_out(self, start, out, /):
            super().copy_out(start, out)
            self.last = out


@caught_by("part: `copy_in` of Sink keeps a view of the buffer that it was given", Ring)
class AssignsLater(Good):
    class Sink(Good.Sink):
        def __init__(self, value):
            super().__init__(value)
            self.pieces = []

        def copy_in(self, start, data, /):
            self.pieces.append((start, data))

        def written(self):
            for start, data in self.pieces:
                self.value.data[start : start + len(data)] = data


@caught_by("not equal", Ring)
class KeepsAnAddress(Good):
    """As an extension in C could."""

    class Sink(Good.Sink):
        def __init__(self, value):
            super().__init__(value)
            self.pieces = []

        def copy_in(self, start, data, /):
            address = ctypes.addressof(ctypes.c_char.from_buffer(data))
            self.pieces.append((start, address, len(data)))

        def written(self):
            for start, address, size in self.pieces:
                self.value.data[start : start + size] = ctypes.string_at(address, size)


@caught_by("piece at .* differs", Ring)
class ReadsToTheEnd(Good):
    """Right at the start and at the end, wrong in between."""

    class Source(Good.Source):
        def copy_out(self, start, out, /):
            start = len(self.value.data) - len(out) if start else 0
            out[:] = memoryview(self.value.data)[start : start + len(out)]


# -- parts of a composite -----------------------------------------------------------------------


@caught_by(r"restoring part/\w+ alone .*TypeError: 'NoneType' object is not callable", Mean)
class FinishesWhatIsNotSelected(Good):
    def place_mean(self, value, path, context):
        total = context.place(value.total, (*path, "total"))
        count = context.place(value.count, (*path, "count"))

        def finish():
            value.total, value.count = total.finish(), count.finish()
            return value

        return self.joined(total, count, finish)


@caught_by("only part/total was selected, but part/count changed", Mean)
class TakesTheCountAlong(Good):
    def place_mean(self, value, path, context):
        placement = super().place_mean(value, path, context)
        finish = placement.finish

        def reset():
            finish()
            value.count = value.count if context.selected((*path, "count")) else 0
            return value

        if context.children(path):
            placement.finish = reset
        return placement


@caught_by("part/total alone was selected, but not restored", Mean)
class AllOrNothing(Good):
    def place_mean(self, value, path, context):
        if len(context.children(path)) == 1:
            return Placement(finish=lambda: value)
        return super().place_mean(value, path, context)


@caught_by("only part/count was selected, but place says that part/total is missing", Mean)
class NeverAsksWhatIsSelected(Good):
    def place_mean(self, value, path, context):
        placement = super().place_mean(value, path, context)
        lacking = context.stored((*path, "total")) is None
        if lacking and context.children(path):
            placement.missing.append((*path, "total"))
        return placement


@caught_by("a checkpoint without part/count is not noticed", Mean)
class DropsWhatItsValueLacks(Good):
    def place_mean(self, value, path, context):
        placement = super().place_mean(value, path, context)
        lacking = (*path, "count")
        if context.children(path):  # of an empty checkpoint it says so
            placement.missing = [p for p in placement.missing if p != lacking]
        return placement


@caught_by("loading part/total alone: .*ZeroDivisionError", Mean)
class LoadsOnlyTheWhole(Good):
    def rebuild(self, stored, /, *, device, context):
        if len(context.children(stored.path)) == 1:
            return Placement(finish=lambda: 1 // 0)
        return super().rebuild(stored, device=device, context=context)


# -- the proofs ---------------------------------------------------------------------------------


@caught_by("describing changes the value", Mean)
class CountsItsDescriptions(Good):
    """Once, so that a second description is the same."""

    def describe(self, value, path, /, *, context):
        value.count = 4
        yield from super().describe(value, path, context=context)


def test_suite_catches():
    for mutant, (message, kind) in MUTANTS.items():
        with pytest.raises(AssertionError, match=message) as caught:
            check(mutant, kind)
        assert any(note.startswith("while checking ") for note in caught.value.__notes__)


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


# -- what the author gave to the suite ----------------------------------------------------------


class LoadsAList(Good):
    def rebuild(self, stored, /, *, device, context):
        placement = super().rebuild(stored, device=device, context=context)
        finish = placement.finish
        placement.finish = lambda: [finish()]
        return placement


def refuses(*_):
    raise AssertionError


SLIPS = {
    "`change` is a int: give a function": {"change": 3},
    "`change` returned a int for a Mean: return the changed value": {"change": lambda mean: 3},
    "`equal` returned a NoneType: return True or False": {"equal": lambda a, b: None},
    "`equal` returned a Tensor: return True or False": {"equal": lambda a, b: a.total == b.total},
    "`loaded` returned a function: return True or False": {"loaded": lambda a, b: equal},
    "without a template: an `assert` without a text failed": {"loaded": refuses},
    "load gives a Mean, not a dict": {"loads": dict},
}


def test_slip_of_the_author_is_said_in_words():
    for complaint, slip in SLIPS.items():
        given = {"change": change, "equal": equal} | slip
        with pytest.raises(AssertionError, match=complaint):
            check_provider(Mean, providers=_with(Good()), **given)


def test_truth_of_torch_is_an_answer_too():
    check_provider(
        Mean, change, lambda a, b: (a.total == b.total).all() & (a.count == b.count),
        providers=_with(Good()),
    )  # fmt: skip


def test_load_that_gives_another_type_is_found_unless_it_is_meant():
    with pytest.raises(AssertionError, match=r"load gives a list for a Mean: .* as `loads`"):
        check_provider(Mean, change, equal, providers=_with(LoadsAList()))
    check_provider(Mean, change, equal, providers=_with(LoadsAList()), loads=list)


class Lender(Good):
    """Describes what its value gives, and that is a copy."""

    def mean(self, value, path, context):
        yield Node(path, "good-mean")
        yield from context.describe(value.total.clone(), (*path, "total"))
        yield from context.describe(value.count, (*path, "count"))


def test_values_that_give_out_copies_may_say_so():
    check_provider(Mean, change, equal, providers=_with(Lender()), copies=True)


class RefusesHalves(Good):
    def mean(self, value, path, context):
        if value.total.dtype is not torch.float32:
            raise UnsupportedStateError("part holds no float32: convert it")
        yield from super().mean(value, path, context)

    def place_mean(self, value, path, context):
        if len(context.children(path)) == 1:
            return Placement(problems=["part comes whole or not at all"])
        return super().place_mean(value, path, context)


def test_what_is_refused_in_words_is_no_breach():
    check(RefusesHalves, Mean)


def _with(provider):
    ours = [p for p in default_registry().providers.all() if p.name in {"tensor", "value"}]
    return StaticProviders([provider, *ours])

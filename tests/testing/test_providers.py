"""The provider suite catches every known way to break the contract."""

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
    """Numbers of two bytes each, in its own memory."""

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


# -- parts of the mutants ------------------------------------------------------------------------

MUTANTS = {}


def broken(message, name, kind=Mean, /, *, source=None, sink=None, **members):
    """Adds a mutant of the good one for this kind, which the suite must catch with this message."""
    if source is not None:
        members["Source"] = type("Source", (Good.Source,), source)
    if sink is not None:
        members["Sink"] = type("Sink", (Good.Sink,), sink)
    MUTANTS[name] = message, kind, type(name, (Good,), members)


def described(node=lambda path: (path, "good-mean"), total="total", value=lambda value: value):
    """Describes a mean with another node, place or value."""

    def mean(_, state, path, context):
        given = value(state)
        yield Node(*node(path))
        yield from context.describe(given.total, (*path, total))
        yield from context.describe(given.count, (*path, "count"))

    return mean


def counting(name):
    """Describes a mean with a counter of its descriptions."""

    def mean(self, value, path, context):
        self.calls = getattr(self, "calls", 0) + 1
        if name == "path":
            made = described(total=f"total{self.calls}")
        else:
            made = described(node=lambda path: (path, "good-mean", {"calls": self.calls}))
        yield from made(self, value, path, context)

    return mean


def before(effect):
    def mean(self, value, path, context):
        effect(value)
        yield from Good.mean(self, value, path, context)

    return mean


def placed(change):
    """Changes the placement of a mean: `change(placement, value, path, context)`."""

    def place_mean(self, value, path, context):
        placement = Good.place_mean(self, value, path, context)
        return change(placement, value, path, context) or placement

    return place_mean


def finished(effect):
    """Finishes a mean with an effect, whose result goes into the tree."""

    def change(placement, value, path, context):
        finish = placement.finish
        placement.finish = lambda: (finish(), effect(value, path, context))[1]

    return placed(change)


def rebuilt(effect):
    def rebuild(self, stored, /, *, device, context):
        placement = Good.rebuild(self, stored, device=device, context=context)
        finish = placement.finish
        placement.finish = lambda: effect(finish())
        return placement

    return rebuild


def copied(value):
    given = Mean()
    given.total, given.count = value.total.clone(), value.count
    return given


def with_count(mean, count):
    mean.count = count
    return mean


def node_last(self, value, path, context):
    node, *rest = Good.mean(self, value, path, context)
    yield from (*rest, node)


def without_count(_, value, path, context):
    yield Node(path, "good-mean")
    yield from context.describe(value.total, (*path, "total"))


def outside(_, value, path, context):
    yield Node(path, "good-mean")
    yield from context.describe(value.total, ("total",))
    yield from context.describe(value.count, (*path, "count"))


def described_twice(self, value, path, context):
    yield from Good.mean(self, value, path, context)
    yield from context.describe(value.total, (*path, "total"))


def described_once_with_four(self, value, path, /, *, context):
    value.count = 4
    yield from Good.describe(self, value, path, context=context)


def joined_without_total(_, total, count, finish):
    placement = Placement(finish=finish)
    placement.absorb(count)
    return placement


def addressed(view):
    """A source at an address, with another view of its bytes."""

    def init(self, value):
        Good.Source.__init__(self, value)
        self.address = 4096

    return {"__init__": init} | ({} if view is None else {"view": view})


def keep_pieces(take):
    """A sink that takes pieces late, in the order kept by `take`."""

    def init(self, value):
        Good.Sink.__init__(self, value)
        self.pieces = []

    def written(self):
        for start, read in self.pieces:
            data = read()
            self.value.data[start : start + len(data)] = data

    return {
        "__init__": init,
        "written": written,
        "copy_in": lambda self, start, data: self.pieces.append((start, take(data))),
    }


def address_of(data):
    address, size = ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data)
    return lambda: ctypes.string_at(address, size)


def in_order(self, start, data, /):
    at = getattr(self, "at", 0)
    self.value.data[at : at + len(data)] = data
    self.at = at + len(data)


def to_the_end(self, start, out, /):
    """Right at the start and at the end, wrong in between."""
    start = len(self.value.data) - len(out) if start else 0
    out[:] = memoryview(self.value.data)[start : start + len(out)]


class SwallowsWhatIsMissing(Good):
    def joined(self, total, count, finish):
        placement = super().joined(total, count, finish)
        placement.missing.clear()
        placement.targets = [t for t in placement.targets if self.context.stored(t.path)]
        return placement

    def place_mean(self, value, path, context):
        self.context = context
        return super().place_mean(value, path, context)

    def rebuild(self, stored, /, *, device, context):
        self.context = context
        return super().rebuild(stored, device=device, context=context)


def place_as_stored(self, value, path, context):
    placement = Good.place_ring(self, value, path, context)
    stored = context.stored(path)
    for number, target in enumerate(placement.targets):
        if stored is not None:
            regions = (Region.whole(stored.spec.shape),)
            placement.targets[number] = Target(path, stored.spec, regions, target.sink)
    return placement


class RemembersACopy(Good):
    def __init__(self):
        self.kept = WeakKeyDictionary()

    def mean(self, value, path, context):
        if value not in self.kept:
            self.kept[value] = copy.deepcopy(value)
        yield from super().mean(self.kept[value], path, context)


class NumpySource(ByteSource):
    """Live, and of a type known to numpy."""

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


def described_by_numpy(self, value, path, context):
    for entry in Good.mean(self, value, path, context):
        is_total = entry.path == (*path, "total")
        yield entry._replace(source=NumpySource(value.total)) if is_total else entry


def rounded(value, path, context):
    if value.total.dtype is torch.float8_e4m3fn:
        value.total = (value.total.float() * 2).to(torch.float8_e4m3fn)
    return value


def finish_all(self, value, path, context):
    total = context.place(value.total, (*path, "total"))
    count = context.place(value.count, (*path, "count"))

    def finish():
        value.total, value.count = total.finish(), count.finish()
        return value

    return self.joined(total, count, finish)


def reset_count(placement, value, path, context):
    finish = placement.finish
    count = 0 if not context.selected((*path, "count")) else None
    if context.children(path):
        placement.finish = lambda: (
            finish() and with_count(value, value.count if count is None else count)
        )


def all_or_nothing(placement, value, path, context):
    if len(context.children(path)) == 1:
        return Placement(finish=lambda: value)
    return None


def add_missing(placement, value, path, context):
    if context.stored((*path, "total")) is None and context.children(path):
        placement.missing.append((*path, "total"))


def drop_missing(placement, value, path, context):
    if context.children(path):  # it reports an empty checkpoint
        placement.missing = [p for p in placement.missing if p != (*path, "count")]


def load_only_the_whole(self, stored, /, *, device, context):
    if len(context.children(stored.path)) == 1:
        return Placement(finish=lambda: 1 // 0)
    return Good.rebuild(self, stored, device=device, context=context)


def claim(priority, others=None):
    return lambda self, kind, /: priority if kind in (Mean, Ring) else others


# -- the mutants ---------------------------------------------------------------------------------

# fmt: off
broken("declares api_version 2", "OtherVersion", api_version=2)
broken("needs a name", "Nameless", name="")
broken("versions count from 1", "VersionZero", version=0)
broken("forms must be a tuple", "OneFormAsText", forms="good-mean")
broken("a form must belong to one provider", "TakesOurForm", forms=(*Good.forms, "tensor"))
broken("an unknown type", "ClaimsEverything", Ring, claims=claim(60, 1))
broken("good-mean", "FormIsNotDeclared", forms=("good-ring",))

broken("nothing is described", "DescribesNothing", mean=lambda *_: iter(()))
broken("comes after its children", "NodeComesLast", mean=node_last)
broken("outside its part", "LeavesItsPart", mean=outside)
broken("'part', 'count'", "ForgetsAChild", mean=without_count)
broken("describing changes the state", "CountsDescriptions",
       mean=before(lambda value: with_count(value, value.count + 1)))
broken("describing changes the value", "CountsItsDescriptions", describe=described_once_with_four)
broken("a second description differs", "PathsChange", mean=counting("path"))
broken("other nodes", "NodesChange", mean=counting("node"))
broken("source and spec sizes differ", "SpecIsTooLarge", Ring,
       spec=lambda self, value: TensorSpec("int16", 2, (len(value.data),)))

broken("view and address go together", "AddressWithoutView", Ring, source=addressed(None))
broken("view and copy_out differ", "ViewOfTheWrongEnd", Ring,
       source=addressed(lambda self: memoryview(bytes(reversed(self.value.data)))))
broken("the view must be flat", "ViewWithSteps", Ring,
       source=addressed(lambda self: memoryview(bytes(2 * self.nbytes))[::2]))
broken("piece at .* differs", "CopiesFromTheStart", Ring, source={
    "copy_out": lambda self, start, out: out.__setitem__(
        slice(None), self.value.data[:len(out)])})
broken("piece at .* differs", "ReadsToTheEnd", Ring, source={"copy_out": to_the_end})

broken("planning changed the target", "PlansInPlace",
       place_mean=placed(lambda placement, value, path, context:
           setattr(value, "count", 0) if context.selected((*path, "count")) else None))
broken("a plan without selected objects changed", "ChangesWhatIsNotSelected",
       place_mean=placed(lambda placement, value, path, context: (
           context.selected((*path, "total")) or value.total.zero_(), None)[1]))
broken("not equal", "ForgetsToPlaceAChild", joined=joined_without_total)
broken("put a NoneType into the tree", "FinishReturnsNothing",
       place_mean=finished(lambda value, path, context: None))
broken("not equal", "FinishAssignsNothing", place_mean=placed(
    lambda placement, value, *_: setattr(placement, "finish", lambda: value)))
MUTANTS["SwallowsWhatIsMissing"] = "is not noticed", Mean, SwallowsWhatIsMissing
broken("sink and spec sizes differ", "BelievesTheStoredShape", Ring, place_ring=place_as_stored)

broken("not equal", "FillsFromTheStart", Ring, sink={
    "copy_in": lambda self, start, data: self.value.data.__setitem__(slice(len(data)), data)})
broken("not equal", "ExpectsAnOrder", Ring, sink={"copy_in": in_order})
broken("not equal", "FillsACopy", Ring, sink={
    "__init__": lambda self, value: Good.Sink.__init__(self, copy.deepcopy(value))})

broken("load gives a state that was not stored", "LoadsWithoutTheCount",
       rebuild=rebuilt(lambda mean: with_count(mean, 0)))
broken("load gives a state that was not stored", "LoadsTheCountOfANewOne",
       rebuild=rebuilt(lambda mean: with_count(mean, Mean().count)))

broken(r"claims\(Mean\) .* returned '40', which is of type str: return an int", "ClaimsInWords",
       claims=claim("40"))
broken(r"claims\(Stranger\) .* returned False, .* bool", "ClaimsYesOrNo", claims=claim(40, False))
broken("parameters gives the name 0: it must be a str", "NumbersItsParameters",
       parameters=lambda self, value, /: enumerate([value.total]))
broken("claimed_memory gives 'cpu': give a MemoryKey", "ClaimsADevice", Ring,
       claimed_memory=lambda self, value, /: ["cpu"])
broken(r"unsteady_memory gives 4096: give \(device, storage\)", "NamesAnAddress", Ring,
       unsteady_memory=lambda self, value, /: [4096])
broken("left_out gives the name 0: it must be a str", "NumbersWhatItLeavesOut", Ring,
       left_out=lambda self, value, /: [(0, value)])
broken("provider 'good' .* describe yields the path part/total twice", "DescribesTwice",
       mean=described_twice)
broken("provider 'good' .* the Node part of the form 'good-meen', .*did you mean",
       "MisspellsItsForm", mean=described(lambda path: (path, "good-meen")))
broken("provider 'good' .* the meta of the Node part cannot be stored as JSON",
       "PutsAClassIntoItsMeta", mean=described(lambda path: (path, "good-mean", {"class": Mean})))

broken("part/total: two descriptions name two memories, so describe copies", "ClonesItsTensor",
       mean=described(value=copied))
broken("part: two descriptions name two memories, so describe copies", "CopiesItsBytes", Ring,
       ring=lambda self, value, path: Good.ring(self, copy.deepcopy(value), path))
broken("describe replaces tensors of the value", "ReplacesItsTensor",
       mean=before(lambda value: setattr(value, "total", value.total.clone())))
MUTANTS["RemembersACopy"] = "its next description still shows the old state", Mean, RemembersACopy
broken("describing a value with tensors of bfloat16, .*unsupported ScalarType BFloat16",
       "AsksNumpy", mean=described_by_numpy)
broken("float8_e4m3fn.* comes back changed", "RoundsOnTheWay", place_mean=finished(rounded))

broken("`copy_out` of Source keeps a view of the buffer that it was given", "KeepsWhatItFilled",
       Ring, source={"copy_out": lambda self, start, out: (
           Good.Source.copy_out(self, start, out), setattr(self, "last", out))[1]})
broken("part: `copy_in` of Sink keeps a view of the buffer that it was given", "AssignsLater",
       Ring, sink=keep_pieces(lambda data: lambda: data))
broken("not equal", "KeepsAnAddress", Ring, sink=keep_pieces(address_of))  # as C could

broken(r"restoring part/\w+ alone .*TypeError: 'NoneType' object is not callable",
       "FinishesWhatIsNotSelected", place_mean=finish_all)
broken("only part/total was selected, but part/count changed", "TakesTheCountAlong",
       place_mean=placed(reset_count))
broken("part/total alone was selected, but not restored", "AllOrNothing",
       place_mean=placed(all_or_nothing))
broken("only part/count was selected, but place reports part/total as missing",
       "NeverAsksWhatIsSelected", place_mean=placed(add_missing))
broken("a checkpoint without part/count is not noticed", "DropsWhatItsValueLacks",
       place_mean=placed(drop_missing))
broken("loading part/total alone: .*ZeroDivisionError", "LoadsOnlyTheWhole",
       rebuild=load_only_the_whole)
# fmt: on


def test_suite_catches():
    for message, kind, mutant in MUTANTS.values():
        with pytest.raises(AssertionError, match=message) as caught:
            check(mutant, kind)
        assert any(note.startswith("while checking ") for note in caught.value.__notes__)


class Silent(StateProvider):
    name = "silent"
    forms = Good.forms
    claims, describe, place, rebuild = Good.claims, Good.describe, Good.place, Good.rebuild


def test_a_provider_without_a_version_learns_what_to_write():
    with pytest.raises(AssertionError, match="write `api_version = 1` into Silent"):
        check(Silent, Mean)


def test_a_change_without_effect_is_no_check():
    with pytest.raises(AssertionError, match="`change` changes nothing"):
        check_provider(Mean, lambda mean: mean, equal, providers=_with(Good()))


# -- the author's input to the suite ------------------------------------------------------------


def refuses(*_):
    raise AssertionError


SLIPS = {
    "`change` is a int: pass a function": {"change": 3},
    "`change` returned a int for a Mean: return the changed value": {"change": lambda mean: 3},
    "`equal` returned a NoneType: return True or False": {"equal": lambda a, b: None},
    "`equal` returned a Tensor: return True or False": {"equal": lambda a, b: a.total == b.total},
    "`loaded` returned a function: return True or False": {"loaded": lambda a, b: equal},
    "without a template: an `assert` without a text failed": {"loaded": refuses},
    "load gives a Mean, not a dict": {"loads": dict},
}


def test_author_mistakes_are_explained():
    for complaint, slip in SLIPS.items():
        given = {"change": change, "equal": equal} | slip
        with pytest.raises(AssertionError, match=complaint):
            check_provider(Mean, providers=_with(Good()), **given)


def test_torch_booleans_are_accepted():
    check_provider(
        Mean, change, lambda a, b: (a.total == b.total).all() & (a.count == b.count),
        providers=_with(Good()),
    )  # fmt: skip


def test_load_of_another_type_is_found_unless_declared():
    lists = type("LoadsAList", (Good,), {"rebuild": rebuilt(lambda mean: [mean])})
    with pytest.raises(AssertionError, match=r"load gives a list for a Mean: .* as `loads`"):
        check_provider(Mean, change, equal, providers=_with(lists()))
    check_provider(Mean, change, equal, providers=_with(lists()), loads=list)


def test_values_returning_copies_may_say_so():
    lender = MUTANTS["ClonesItsTensor"][2]
    check_provider(Mean, change, equal, providers=_with(lender()), copies=True)


class RefusesHalves(Good):
    def mean(self, value, path, context):
        if value.total.dtype is not torch.float32:
            raise UnsupportedStateError("part holds no float32: convert it")
        yield from super().mean(value, path, context)

    def place_mean(self, value, path, context):
        if len(context.children(path)) == 1:
            return Placement(problems=["part comes whole or not at all"])
        return super().place_mean(value, path, context)


def test_an_explained_refusal_is_no_breach():
    check(RefusesHalves, Mean)


def _with(provider):
    ours = [p for p in default_registry().providers.all() if p.name in {"tensor", "value"}]
    return StaticProviders([provider, *ours])

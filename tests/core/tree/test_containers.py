import sys
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.abc import Node, StateObject
from penstock.core.errors import FormatError, PluginError, UnsupportedStateError
from penstock.core.tree.place import Placing
from penstock.core.tree.stored_tree import StoredTree
from penstock.providers.module import ModuleProvider
from penstock.providers.optimizer import OptimizerProvider
from penstock.providers.tensor import TensorProvider
from penstock.providers.values import ValueProvider
from penstock.testing.providers import store
from penstock.testing.stored import StaticProviders

PROVIDERS = StaticProviders(
    [TensorProvider(), ValueProvider(), ModuleProvider(), OptimizerProvider()]
)
Pair = namedtuple("Pair", "left right")
Pair.__module__ = "penstock_test_tree"
sys.modules["penstock_test_tree"] = type(sys)("penstock_test_tree")
sys.modules["penstock_test_tree"].Pair = Pair


def save(state, **options):
    return store(state, providers=PROVIDERS, **options)


def t(*values):
    return torch.tensor(values)


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


TREES = {
    "nested": {"a": {"b": [t(1), {"c": (t(2), 3)}]}, "x": 1},
    "odd keys": {
        "a/b": t(1),
        "a%2Fb": t(2),
        "..": t(3),
        "": t(4),
        "é": {"": {"%00": t(5)}},
        "%": 1,
    },
    "integer keys": {0: t(1), 1: {2: t(3), -5: "x"}},
    "mixed keys": {"m": {1: t(1), "a": t(2), None: 3, False: 4, 2.5: t(5), "1.5": 6}},
    "ordered": {"o": OrderedDict(b=t(1), a=2)},
    "default": {"d": defaultdict(list, {"a": [t(1)]})},
    "named": {"p": Pair(t(1), [t(2)])},
    "empties": {"a": {}, "b": [], "c": (), "d": None, "t": {"x": t(1), "e": {}}},
    "deep": {"a": {"a": {"a": {"a": {"a": t(1)}}}}},
    "values only": {"epoch": 7, "info": {"a": [1, {2: (3,)}]}, "c": Counter("aab")},
    "nothing": {},
    "long keys": {"k" * 5000: t(1), ("é" * 300): {"x" * 1000: 2}},
}


def test_tree_round_trips():
    for name, tree in TREES.items():
        assert same(save(tree).load(), tree), name


def test_tree_restores_into_itself_without_a_difference():
    for name, tree in TREES.items():
        stored = save(tree)
        stored.restore(tree)
        assert save(tree).data == stored.data, name


def test_only_dicts_with_string_keys_have_no_node():
    nodes = save(TREES["nested"] | TREES["ordered"] | {"n": TREES["integer keys"]}).tree.nodes
    assert nodes == [
        Node(("a", "b"), "list", {"length": 2}),
        Node(("a", "b", "1", "c"), "tuple", {"length": 2}),
        Node(("o",), "dict", {"class": "OrderedDict"}),
        Node(("n",), "dict", {"keys": "int"}),
        Node(("n", "1"), "dict", {"keys": "int"}),
    ]


keys = st.one_of(
    st.sampled_from(["a/b", "a%2Fb", "..", ".", "", "%", "%00", "0", "a", "$", "a.b"]),
    st.text(st.characters(codec=None), max_size=4), st.integers(-3, 3), st.booleans(), st.none(),
)  # fmt: skip
leaves = st.one_of(
    st.integers(0, 9).map(t), st.integers(), st.text(max_size=3), st.none(),
    st.lists(st.integers(-9, 9), max_size=3).map(torch.tensor),
)  # fmt: skip


def unambiguous(mapping):
    return len({k if isinstance(k, str) else repr(k) for k in mapping}) == len(mapping)


def dicts(inner, kind=dict):
    return st.dictionaries(keys, inner, max_size=4).filter(unambiguous).map(kind)


trees = dicts(
    st.recursive(
        leaves,
        lambda inner: st.one_of(
            dicts(inner), dicts(inner, OrderedDict), st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple), st.tuples(inner, inner).map(Pair._make),
        ),
        max_leaves=15,
    )
)  # fmt: skip


@given(trees)
def test_any_tree_round_trips(tree):
    stored = save(tree)
    assert same(stored.load(), tree)
    stored.restore(tree)
    assert save(tree).data == stored.data


@given(trees, st.data())
def test_any_part_of_a_random_tree_can_be_restored_alone(tree, data):
    stored = save(tree)
    before = dict(stored.data)
    for tensor in list(flat_tensors(tree)):
        tensor.add_(1)
    changed = dict(save(tree).data)
    paths = [o.path for o in stored.tree.objects]
    chosen = data.draw(st.sets(st.sampled_from(paths))) if paths else set()
    placing = Placing(PROVIDERS, stored.tree, chosen.__contains__, allow_pickle=False)
    placement = placing.place_tree(tree)
    assert not placement.missing
    assert not placement.problems
    stored.fill(placement)
    placement.finish()
    after = save(tree).data
    assert after == {p: (before if p in chosen else changed)[p] for p in paths}


MAPPINGS = {
    "UserDict": UserDict,
    "read-only": MappingProxyType,
    "subclass": type("State", (dict,), {}),
}


@pytest.mark.parametrize("kind", MAPPINGS.values(), ids=MAPPINGS)
def test_values_directly_in_a_root_without_values_are_found_before_writing(kind):
    stored = save({"a": t(1), "epoch": 7})
    target = kind({"a": t(0), "epoch": 8})
    if kind is not MappingProxyType:
        stored.restore(target)
        assert target["epoch"] == 7
        return
    assert stored.plan(target).problems == [
        "epoch is in a read-only mapping and differs from the stored value: pass a dict"
    ]


def flat_tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from flat_tensors(item)


def test_trees_that_cannot_be_rebuilt_are_refused():
    for state, reason in [
        ({1: t(1), "1": t(2)}, "the state has two keys that are both written '1'"),
        ({"a": {None: t(1), "None": 1}}, "a has two keys that are both written 'None'"),
        ({"a": {(1, 2): t(1)}}, r"a has the key \(1, 2\) of type tuple"),
        ({"a": {b"x": t(1)}}, "a has the key b'x' of type bytes"),
        ({"a": defaultdict(lambda: 1, x=t(1))}, "a is a defaultdict of"),
        ({"a": type("D", (dict,), {})(x=t(1))}, "a is a .*D that holds tensors"),
        ({"a": type("L", (list,), {})([t(1)])}, "a is a .*L that holds tensors"),
        ({"a": type("T", (tuple,), {})([t(1)])}, "a is a .*T: only plain tuples"),
        ({"a": namedtuple("Local", "x")(t(1))}, "a is a .*Local: only plain tuples"),
        ({"a": {"b": {t(1)}}}, r"a/b\{\} is a torch.Tensor"),
    ]:
        with pytest.raises(UnsupportedStateError, match=reason):
            save(state)


def test_cycles_are_refused_with_the_path():
    state = {"a": {"x": t(1)}}
    state["a"]["b"] = [state["a"]]
    with pytest.raises(UnsupportedStateError, match=r"^a/b/0 holds itself"):
        save(state)
    with pytest.raises(UnsupportedStateError, match="holds itself"):
        save({"a": {"x": t(1)}}).plan(state)


def test_one_container_in_two_places_is_stored_twice_and_its_tensors_once():
    shared = {"t": t(1)}
    stored = save({"a": shared, "b": [shared]})
    assert stored.tree.aliases == {("b", "0", "t"): ("a", "t")}
    loaded = stored.load()
    assert loaded["a"]["t"] is loaded["b"][0]["t"]


def test_other_kinds_are_problems():
    for stored, template, problem in [
        (
            {"a": {"t": t(1), "x": t(2)}},
            {"a": {"t": 5, "x": t(2)}},
            "a/t is stored as a tensor, but is an int",
        ),
        ({"a": {"t": 5}}, {"a": {"t": t(1)}}, "a is stored as one value, but is a dict of objects"),
        ({"a": {"t": t(1)}}, {"a": 5}, "a is stored as a dict of objects, but is a plain int"),
        ({"a": [t(1)]}, {"a": {"0": t(1)}}, "a is stored as a list, but is a dict in"),
        ({"a": (t(1),)}, {"a": [t(1)]}, "a is stored as a tuple, but is a list in"),
        ({"a": {"t": t(1)}}, {"a": None}, "a is stored as a dict of objects, but is a plain None"),
        ({"a": {"b": t(1)}}, {"a": t(1)}, "a is stored as a container, but is a tensor"),
        ({"a": 5}, {"a": t(1)}, "a is stored as a value, but is a tensor in"),
    ]:
        (found,) = save(stored).plan(template).problems
        assert found.startswith(problem)


def test_all_missing_paths_of_the_selection_are_listed():
    stored = save({"a": t(1), "l": [t(1)]})
    template = {"a": t(0), "b": t(1), "c": 5, "l": [t(0), t(0), "x"], "d": {"e": t(1)}}
    placement = stored.plan(template)
    assert placement.missing == [("c",), ("l", "2"), ("b",), ("l", "1"), ("d", "e")]
    assert [target.path for target in placement.targets] == [("a",), ("l", "0")]
    assert not stored.plan(template, include="a").missing


def test_nothing_changes_before_finish():
    stored = save({"epoch": 5, "l": [1, t(1)]})
    state = {"epoch": 0, "l": [0, t(0)]}
    placement = stored.plan(state)
    assert state["epoch"] == state["l"][0] == 0
    stored.fill(placement)
    assert state["epoch"] == state["l"][0] == 0
    assert placement.finish() is state
    assert state["epoch"] == 5
    assert state["l"][0] == 1


def test_planning_a_restore_takes_calls_linear_in_the_values():
    assert calls_of_a_restore(400) < 2.2 * calls_of_a_restore(200)


def calls_of_a_restore(count):
    state = {"t": t(1), **{f"v{n}": n for n in range(count)}}
    stored = save(state)
    calls = 0

    def note(frame, event, arg):
        nonlocal calls
        calls += 1

    sys.setprofile(note)
    try:
        placing = Placing(PROVIDERS, stored.tree, lambda _: True, allow_pickle=False)
        stored.complete(placing.place_tree(state))
        for n in range(count):
            placing.restored_value((f"v{n}",))
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    "node",
    [
        Node(("p",), "dict", {"class": "Evil"}),
        Node(("p",), "dict", {"class": "defaultdict", "factory": "eval"}),
        Node(("p",), "dict", {"keys": "int"}),
        Node(("p",), "dict", {"keys": "what"}),
        Node(("p",), "list", {"length": 1}),
    ],
)
def test_mismatched_nodes_are_a_format_error(node):
    stored = save({"p": {"x": t(1)}})
    tree = StoredTree(stored.tree.objects, [node])
    placing = Placing(PROVIDERS, tree, lambda _: True, allow_pickle=False)
    placement = placing.rebuild_tree(device=None)
    with pytest.raises(FormatError, match="p "):
        placement.finish()


class Below(TensorProvider):
    """Puts an object below an object."""

    def describe(self, value, path, *, context):
        yield from super().describe(value, path, context=context)
        yield from super().describe(value + 1, (*path, "more"), context=context)


def test_an_object_below_an_object_is_refused():
    providers = StaticProviders([Below(), ValueProvider()])
    with pytest.raises(UnsupportedStateError, match="a/b is an object, but"):
        store({"a": {"b": t(1)}}, providers=providers)


class Twice:
    """Holds a tensor."""


class Describes(TensorProvider):
    """Yields what a test sets for a `Twice`."""

    name = "describes"
    forms = ("twice",)

    def claims(self, kind, /):
        return 50 if kind is Twice else None

    def describe(self, value, path, *, context):
        yield from self.entries(path, context)


def of(entries):
    provider = Describes()
    provider.entries = entries
    return StaticProviders([provider, TensorProvider(), ValueProvider()])


def meta(value):
    return lambda path, context: iter([Node(path, "twice", value)])


class Own(StateObject):
    """A subclass, which no provider would store."""


HOLDS_ITSELF = {}
HOLDS_ITSELF["again"] = HOLDS_ITSELF

BROKEN_ENTRIES = {
    "path twice": (
        lambda path, context: [e for _ in "12" for e in context.describe(t(1), (*path, "x"))],
        "describe yields the path a/b/x twice",
    ),
    "path of a number": (
        lambda path, context: context.describe(t(1), (*path, 0)),
        r"describe yields the path \('a', 'b', 0\), which is not a tuple of strings",
    ),
    "path elsewhere": (
        lambda path, context: context.describe(t(1), ("x",)),
        "describe yields x, which is outside its part",
    ),
    "form of nobody": (
        lambda path, context: iter([Node(path, "twise")]),
        r"describe yields the Node a/b of the form 'twise', which .*did you mean twice\?",
    ),
    "the only object elsewhere": (
        lambda path, context: tuple(context.describe(t(1), ("x",))),
        "describe yields x, which is outside its part",
    ),
    "the only object of a form of nobody": (
        lambda path, context: tuple(e._replace(form="x") for e in context.describe(t(1), path)),
        r"describe yields the StateObject a/b of the form 'x', which no provider",
    ),
    "the only thing is none": (lambda path, context: (path,), "describe yields tuple, no"),
    "an object of a class of its own": (
        lambda path, context: [Own(*entry) for entry in context.describe(t(1), path)],
        "describe yields Own, not a StateObject or Node",
    ),
    "meta with a key of an integer": (
        meta({1: "x"}),
        "meta of the Node a/b .*JSON would change it",
    ),
    "meta with a tuple": (meta({"shape": (1, 2)}), "meta of the Node a/b .*JSON would change it"),
    "meta with nan": (meta({"loss": float("nan")}), "meta of the Node a/b .*not JSON compliant"),
    "meta with a class": (meta({"class": Twice}), "meta of the Node a/b .*type is not JSON"),
    "meta that holds itself": (meta(HOLDS_ITSELF), "meta of the Node a/b .*Circular"),
    "meta that is a list": (meta([]), "meta of the Node a/b .*it is not a dict"),
}


def test_a_forbidden_description_is_refused_with_provider_and_path():
    for entries, complaint in BROKEN_ENTRIES.values():
        blamed = rf"a/b: provider 'describes' \(.*Describes\) broke its contract: .*{complaint}"
        with pytest.raises(PluginError, match=blamed):
            store({"a": {"b": Twice()}}, providers=of(entries))


@pytest.mark.parametrize("root", [[t(1)], t(1), torch.nn.Linear(1, 1), None])
def test_a_non_dict_root_is_refused(root):
    with pytest.raises(UnsupportedStateError, match="pass a dict of named parts"):
        save(root)
    with pytest.raises(UnsupportedStateError, match="pass a dict of named parts"):
        save({"a": 1}).plan(root)


def test_deep_trees_are_refused_not_crashed():
    state = {"x": t(1)}
    for _ in range(5000):
        state = {"d": state}
    with pytest.raises(UnsupportedStateError, match="too deeply"):
        save(state)


def test_loading_imports_no_named_tuples():
    stored = save({"p": Pair(t(1), t(2))})
    node = Node(("p",), "tuple", {"length": 2, "class": "antigravity:X"})
    tree = StoredTree(stored.tree.objects, [node])
    placing = Placing(PROVIDERS, tree, lambda _: True, allow_pickle=False)
    placement = placing.rebuild_tree(device=None)
    with pytest.raises(UnsupportedStateError, match=r"antigravity:X, which is not loaded"):
        placement.finish()
    assert "antigravity" not in sys.modules


class Rival(TensorProvider):
    name = "rival"


def test_a_tie_between_providers_is_an_error_that_names_both():
    providers = StaticProviders([TensorProvider(), Rival(), ValueProvider()])
    with pytest.raises(PluginError, match="'tensor' and 'rival' both claim Tensor"):
        store({"a": t(1)}, providers=providers)


def test_an_unknown_form_is_an_error():
    stored = save({"a": t(1)})
    providers = StaticProviders([ValueProvider()])
    placing = Placing(providers, stored.tree, lambda _: True, allow_pickle=False)
    with pytest.raises(PluginError, match="form 'tensor'"):
        placing.rebuild_tree(device=None)

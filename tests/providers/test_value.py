from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import enum
import json
import math
import pathlib
import struct
import subprocess
import sys
import types
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import FormatError, UnsupportedStateError
from penstock.core.tree.containers import NOTHING, is_nothing
from penstock.providers.values.decode import decode_value
from penstock.providers.values.encode import encode_value
from penstock.testing.providers import check_provider

# A test module, loaded under a name that a checkpoint can find.
HOME = types.ModuleType("penstock_test_home")
sys.modules[HOME.__name__] = HOME


class Phase(enum.Enum):
    WARM = "w"
    COLD = ("c", 1)


class Space:
    class Inner(enum.IntEnum):
        ONE = 1


class Flags(enum.Flag):
    A = 1
    B = 2


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    layers: list = dataclasses.field(default_factory=list)
    made: str = dataclasses.field(default="", init=False)

    def __post_init__(self):
        self.made = "by __init__"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    inner: Config
    phase: Phase
    limit: int = 3


class Hidden:
    __slots__ = ("secret",)


@dataclasses.dataclass
class Slotted(Hidden):
    count: int = 0


@dataclasses.dataclass
class Rows(dict):
    count: int = 0


for kind in (Phase, Flags, Point, Space, Space.Inner, Config, Frozen, Rows):
    kind.__module__ = HOME.__name__
    setattr(
        HOME, kind.__qualname__.split(".")[0], getattr(HOME, kind.__qualname__.split(".")[0], kind)
    )


def same(one, other):
    """Equal in type, order and every bit, recursively."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        if getattr(one, "default_factory", 0) is not getattr(other, "default_factory", 0):
            return False
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(same(a, b) for a, b in pairs)
    if isinstance(one, list | tuple | deque):
        if getattr(one, "maxlen", 0) != getattr(other, "maxlen", 0) or len(one) != len(other):
            return False
        return all(map(same, one, other))
    if isinstance(one, float | complex) and not isinstance(one, np.generic):
        packed = [struct.pack("<dd", v.real, v.imag) for v in (one, other)]
        return packed[0] == packed[1]
    if isinstance(one, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dt.datetime | dt.time):
        zones = [None if v.tzinfo is None else (repr(v.tzinfo), v.tzname()) for v in (one, other)]
        return one == other and zones[0] == zones[1] and one.fold == other.fold
    if isinstance(one, set | frozenset):
        return {*map(repr, one)} == {*map(repr, other)}
    return one == other


def trip(value):
    data = encode_value(value, ("v",))
    json.loads(data)
    return decode_value(data, ("v",))


PAYLOAD_NAN = struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0]

VALUES = [
    None, True, False, 0, -1, 2**63, -(2**63), 2**5000, 1.5, -0.0, 0.1, 5e-324, math.inf, -math.inf,
    math.nan, PAYLOAD_NAN, "", "text", "é\u2028\U0001f600", "\ud800", "\ud83d\ude00", "\x00", b"",
    b"\x00\xff", bytearray(b"ab"), 1 + 2j, complex(-0.0, math.inf), [], (), {}, set(), frozenset(),
    [1, [2, (3,)]], {"a": {"b": [1]}}, {"$": 1}, {"$": "tuple", "v": [1]}, {1: "a", "1": "b"},
    {(1, "x"): 2, None: 3, 1.5: 4, True: 5, b"k": 6, frozenset({1}): 7}, {"\ud800": 1},
    {1, "a", (2,)}, frozenset({1.5}), OrderedDict(b=1, a=2), Counter("abca"), Counter({8: 2, 4: 1}),
    defaultdict(list, {"a": [1]}), defaultdict(None, {1: 2}), deque([1, 2], 5), deque(),
    defaultdict(Counter), dt.date(2024, 2, 29), dt.datetime(2024, 1, 2, 3, 4, 5, 678901),
    dt.datetime(2024, 1, 2, tzinfo=dt.UTC),
    dt.datetime(2024, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=-3, microseconds=5), "hey")),
    dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("UTC")),
    dt.time(1, 2, 3, fold=1), dt.time(5, tzinfo=dt.UTC), dt.timedelta(-5, 3, 2),
    np.float32(1.1), np.float64(-0.0), np.bool_(True), np.int8(-3), np.uint64(2**64 - 1),
    np.complex64(1j), np.float16(np.inf), np.str_("é"), np.str_(""), np.bytes_(b"x"),
    np.datetime64("2024-01-02T03:04:05.678901"), np.timedelta64(5, "s"), np.longdouble(1) / 3,
    torch.Size([1, 2]), torch.bfloat16, torch.device("cuda", 1), torch.device("cpu"),
    pathlib.Path("/a/b"), pathlib.PurePosixPath("x"), pathlib.PureWindowsPath("c:\\x"),
    pathlib.Path("\udcff"), Phase.WARM, Phase.COLD, Space.Inner.ONE, Flags.A | Flags.B,
    Flags(0), Point(1, [2]), Config(0.5, [(1, None)]), Frozen(Config(), Phase.WARM),
    [Frozen(Config(math.inf), Phase.COLD, 2**70)], argparse.Namespace(),
    argparse.Namespace(lr=0.5, **{"$": 2, "no name": [argparse.Namespace(a=(1,))]}),
    types.SimpleNamespace(x={"y": b"z"}),
]  # fmt: skip


def test_value_round_trips_in_type_and_every_bit():
    for value in VALUES:
        assert same(trip(value), value), value
        assert same(trip({"k": [value]}), {"k": [value]}), value


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_subnormal=True), st.complex_numbers(),
    st.text(st.characters(codec=None), max_size=6), st.binary(max_size=5), st.dates(),
    st.datetimes(), st.timedeltas(), st.sampled_from([Phase.WARM, torch.int8, np.int16(3)]),
)  # fmt: skip
keys = st.one_of(
    st.text(st.characters(codec=None), max_size=4), st.integers(), st.booleans(), st.none(),
    st.tuples(st.integers(), st.text(max_size=2)), st.sampled_from(["$", "v", "a/b", "%2F", ".."]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=3).map(lambda v: deque(v, 3)),
        st.dictionaries(keys, inner, max_size=3).map(lambda v: defaultdict(dict, v)),
    ),
    max_leaves=12,
)  # fmt: skip


@given(values)
def test_random_values_round_trip(value):
    assert same(trip(value), value)


def test_core_knows_the_bytes_of_empty_values():
    assert frozenset(encode_value(value, ()) for value in (None, {}, [], ())) == NOTHING
    assert all(map(is_nothing, (None, {}, [], ())))
    assert not any(map(is_nothing, (0, False, "", set(), OrderedDict(), [None], {"a": None})))


class Thing:
    pass


REFUSED = [
    ({"list": [1, 2, 3, {"x": Thing()}]}, r"info/list\[3\]/x is a .*Thing"),
    ([[Thing()]], r"info\[0\]\[0\] is a"),
    ({"a/b": Thing()}, "info/a%2Fb is a"),
    ({(1, 2): Thing()}, r"info/\(1, 2\) is a"),
    ({Thing(): 1}, "info/key .*Thing"),
    ((deque([Thing()]),), r"info\[0\]\[0\]"),
    ({"f": len}, "info/f is a builtins.builtin_function_or_method"),
    ({"f": defaultdict(lambda: 1)}, "info/f is a defaultdict of"),
    ({1, torch.zeros(())}, r"info\{\} is a torch.Tensor"),
    ({"a": int}, "info/a is a builtins.type"),
    (np.void(b"abc"), "info is a numpy scalar"),
    (torch.strided, "info is a torch.layout"),
    (dt.datetime(2024, 1, 1, tzinfo=type("Z", (dt.tzinfo,), {})()), "info has the time zone"),
    (enum.Enum("Local", "A").A, "info is of the Enum Local, which cannot be imported"),
    (type("S", (str,), {})("x"), "info is a .*S"),
    (range(3), "info is a builtins.range"),
    (memoryview(b"x"), "info is a builtins.memoryview"),
]


def test_unstorable_values_are_refused_with_their_inner_path(save):
    for value, where in REFUSED:
        with pytest.raises(UnsupportedStateError, match=f"^{where}"):
            save({"info": value})


def test_cycles_are_refused(save):
    loop = [1]
    loop.append({"x": loop})
    with pytest.raises(UnsupportedStateError, match="holds itself"):
        save({"info": loop})
    with pytest.raises(UnsupportedStateError, match="holds itself"):
        save({"info": [loop, torch.zeros(1)]})


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {"k": v}, lambda v: {1: (v,)}])
def test_depth_bombs_are_refused_and_accepted_values_readable(save, wrap):
    value = 0
    for depth in range(1, 20_000):
        value = wrap(value)
        if depth in (10, 45):
            assert same(trip(value), value)
    bearable = 0
    for _ in range(101):
        bearable = [bearable]
    with pytest.raises(UnsupportedStateError, match="more than 100 levels deep"):
        save({"info": bearable})
    with pytest.raises(UnsupportedStateError, match="deep"):
        save({"info": value})
    with pytest.raises(UnsupportedStateError, match="deep"):
        save({"info": [value, torch.zeros(1)]})


DAMAGED = [
    b"", b"{", b"\xff", b'{"$":"nothing","v":1}', b'{"$":"tuple"}', b'{"$":["tuple"],"v":[]}',
    b'{"$":"float","v":"zz"}',
    b'{"$":"float","v":"00"}', b'{"$":"int","v":5}', b'{"$":"bytes","v":"*"}',
    b'{"$":"dict","v":[[1]]}', b'{"$":"dict","v":[[[],1]]}', b'{"$":"set","v":[[]]}',
    b'{"$":"numpy","dtype":"O","v":"00"}', b'{"$":"numpy","dtype":"<f4","v":"00"}',
    b'{"$":"numpy","dtype":"what","v":"00"}', b'{"$":"deque","v":[1,2],"maxlen":1}',
    b'{"$":"defaultdict","factory":"eval","v":[]}', b'{"$":"path","class":"x","v":"y"}',
    b'{"$":"date","v":"2024-13-01"}', b'{"$":"datetime","v":"2024-01-01","tz":"No/Where","fold":0}',
    b'{"$":"torch.dtype","v":"nn"}',
    b'{"$":"torch.dtype","v":"zzz"}', b'{"$":"torch.device","v":"x"}',
    b'{"$":"enum","class":"builtins:dict","v":"A"}',
    b'{"$":"enum","class":"penstock_test_home:Phase","v":"HOT"}',
    b'{"$":"namedtuple","class":"builtins:tuple","v":[1]}',
    b'{"$":"dataclass","class":"builtins:dict","v":{}}',
    b'{"$":"dataclass","class":"penstock_test_home:Rows","v":{"count":1}}',
    b'{"$":"dataclass","class":"penstock_test_home:Config","v":[1]}',
    b'{"$":"namespace","class":"builtins:dict","v":{}}',
    b'{"$":"namespace","class":"argparse.Namespace","v":{"$":"dict","v":[[1,2]]}}',
    b'{"$":"namespace","class":"argparse.Namespace","v":3}',
    b'{"$":"namedtuple","class":"penstock_test_home:Point","v":[1]}',
    b"[" * 100_000, b'{"$":"tuple","v":' * 5000,
]  # fmt: skip


def test_damaged_values_are_a_format_error_with_the_path():
    for data in DAMAGED:
        with pytest.raises(FormatError, match=r"^a/b ") as caught:
            decode_value(data, ("a", "b"))
        assert caught.value.damaged == ("a/b",), data[:40]


@given(st.binary(max_size=60), st.integers(0, len(VALUES) - 1), st.data())
def test_mangled_bytes_decode_to_something_or_a_clear_error(noise, which, data):
    good = encode_value(VALUES[which], ())
    at = data.draw(st.integers(0, len(good)))
    for bad in (noise, good[:at], good[:at] + noise + good[at + len(noise) :]):
        with contextlib.suppress(FormatError, UnsupportedStateError):
            decode_value(bad, ("v",))


def test_reading_never_imports_what_a_checkpoint_names():
    assert "antigravity" not in sys.modules
    for tag in ("enum", "flag", "namedtuple", "dataclass"):
        data = json.dumps({"$": tag, "class": "antigravity:X", "v": "A"}).encode()
        with pytest.raises(UnsupportedStateError, match="antigravity:X is not loaded: import"):
            decode_value(data, ("v",))
        assert "antigravity" not in sys.modules, tag


def test_a_dataclass_round_trips_by_its_fields(save):
    config = Config()
    config.made = "later"
    stored = save({"config": config})
    assert {one.form for one in stored.tree.objects} == {"json"}
    config.layers.append(1)
    assert stored.load()["config"].made == "later"
    state = {"config": None}
    stored.restore(state)
    assert same(state["config"], Config(0.1, [])) is False
    assert (state["config"].layers, state["config"].made) == ([], "later")


def test_a_dataclass_that_would_lose_state_is_refused(save):
    config = Config()
    config.cache = 1
    with pytest.raises(UnsupportedStateError, match=r"c is of the dataclass .*Config, and cache "):
        save({"c": config})
    del config.cache, config.made, config.lr
    vars(config).clear()
    with pytest.raises(UnsupportedStateError, match="and layers would not come back"):
        save({"c": config})
    with pytest.raises(
        UnsupportedStateError, match=r"c is a penstock_test_home\.Rows, which cannot"
    ):
        save({"c": Rows()})
    with pytest.raises(UnsupportedStateError, match=r"c/layers is a torch\.Tensor, which cannot"):
        save({"c": Config(layers=torch.ones(1))})
    Slotted.__module__, HOME.Slotted = HOME.__name__, Slotted
    with pytest.raises(UnsupportedStateError, match=r"Slotted, which cannot be stored"):
        save({"c": Slotted()})
    Local = dataclasses.make_dataclass("Local", ["a"])
    with pytest.raises(UnsupportedStateError, match="cannot be imported by name: define it"):
        save({"c": Local(1)})


def test_a_dataclass_with_a_state_dict_goes_through_it(save):
    @dataclasses.dataclass
    class Progress:
        step: int = 0

        def state_dict(self):
            return {"s": self.step}

        def load_state_dict(self, state):
            self.step = state["s"] + 100

    progress = Progress(1)
    save({"p": progress}).restore({"p": progress})
    assert progress.step == 101


def test_values_are_assigned_back_into_dicts_and_lists(save):
    stored = save({"epoch": 7, "deep": {"list": [torch.ones(1), "new", {"k": 1}]}})
    inner = [torch.zeros(1), "old", None]
    state = {"epoch": 0, "deep": {"list": inner}}
    placement = stored.restore(state)
    assert state["epoch"] == 7
    assert state["deep"]["list"] is inner
    assert inner[1:] == ["new", {"k": 1}]
    assert inner[0] == 1
    assert sorted(placement.values) == [("deep", "list", "1"), ("deep", "list", "2"), ("epoch",)]


def test_pickles_need_permission_at_both_ends(save):
    state = {"cfg": {"when": complex, "n": 1}, "t": torch.ones(1)}
    stored = save(state, allow_pickle=True)
    forms = {o.path: o.form for o in stored.tree.objects}
    assert forms == {("cfg",): "pickle", ("t",): "tensor"}
    with pytest.raises(
        UnsupportedStateError, match=r"cfg was saved as a pickle.*allow_pickle=True"
    ):
        stored.load()
    with pytest.raises(UnsupportedStateError, match="cfg was saved as a pickle"):
        stored.plan({"cfg": None, "t": torch.zeros(1)})
    target = {"cfg": None, "t": torch.zeros(1)}
    stored.restore(target, allow_pickle=True)
    assert target["cfg"] == {"when": complex, "n": 1}
    assert stored.load(exclude="cfg").keys() == {"t"}
    with pytest.raises(UnsupportedStateError, match="cannot be pickled either"):
        save({"f": lambda: 1}, allow_pickle=True)


@pytest.mark.process
def test_values_need_neither_torch_nor_pickle():
    code = (
        "import sys\n"
        "from penstock.providers.values.decode import decode_value\n"
        "from penstock.providers.values.encode import encode_value\n"
        "before = set(sys.modules)\n"
        "from penstock.providers.values import ValueProvider\n"
        "assert ValueProvider().claims(dict)\n"
        "assert decode_value(encode_value({'a': (1, 2.5)}, ()), ()) == {'a': (1, 2.5)}\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'pickle' not in set(sys.modules) - before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_values_keep_the_contract(providers):
    check_provider(
        lambda: {"a": [1, {2: (3, None)}]},
        lambda v: v["a"].append(4),
        same,
        providers=providers,
    )


# A zone of one offset, in the first version of the format.
ZONE = b"TZif".ljust(20, b"\0") + struct.pack(">6l", 0, 0, 0, 0, 1, 4) + bytes(6) + b"UTC\0"


@pytest.fixture
def tzdata(tmp_path, monkeypatch):
    """An installed package tzdata, and one in the run, which is the working directory."""
    for name in [name for name in sys.modules if name.split(".")[0] == "tzdata"]:
        monkeypatch.delitem(sys.modules, name)
    packages, run = tmp_path / "packages", tmp_path / "run"
    data = packages / "tzdata" / "zoneinfo" / "Penstock"
    data.mkdir(parents=True)
    for folder in (data, *data.parents[:2]):
        (folder / "__init__.py").touch()
    (data / "Zone").write_bytes(ZONE)
    (run / "tzdata").mkdir(parents=True)
    (run / "tzdata" / "__init__.py").write_text("raise AssertionError('code of the run ran')")
    monkeypatch.chdir(run)
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(packages)])
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "tzdata"]:
        del sys.modules[name]


def test_an_unknown_zone_is_refused_and_nothing_imported(tzdata):
    for key in ("Penstock/Nowhere", "no.where/Zone", "../Zone", "", "a" * 5000):
        data = json.dumps({"$": "time", "v": "00:00:00", "fold": 0, "tz": key}).encode()
        with pytest.raises(FormatError, match="t holds a value that cannot be decoded"):
            decode_value(data, ("t",))
        assert "tzdata" not in sys.modules, key


LONG = "\x1b[31m" + "A" * 100_000


def test_messages_quote_few_stored_bytes_and_escape_them():
    for stored in (
        {"$": LONG, "v": 1},
        {"$": "defaultdict", "factory": LONG, "v": []},
        {"$": "path", "class": LONG, "v": ""},
        {"$": "enum", "class": LONG, "v": "x"},
        {"$": "numpy", "dtype": "<i4", "v": "00" * 100_000},
        {"$": "date", "v": LONG},
        {"$": "time", "v": "00:00:00", "fold": 0, "tz": LONG},
    ):
        with pytest.raises((FormatError, UnsupportedStateError)) as caught:
            decode_value(json.dumps(stored).encode(), ("v",))
        assert len(str(caught.value)) < 500
        assert str(caught.value).isprintable()


def test_the_same_list_twice_is_no_cycle(save):
    shared = [1]
    assert save({"info": [shared, shared]}).load() == {"info": [[1], [1]]}


def test_a_dataclass_with_other_fields_now_is_an_error_that_names_them(save):
    stored = save({"c": Config()})
    fields = Config.__dataclass_fields__
    gone = fields.pop("made")
    try:
        with pytest.raises(
            UnsupportedStateError, match="fields lr, layers, made, but now has lr, lay"
        ):
            stored.load()
    finally:
        fields["made"] = gone


def test_a_value_in_a_tuple_can_stay_but_not_change(save):
    stored = save({"pair": (torch.ones(2), 3)})
    state = {"pair": (torch.zeros(2), 3)}
    stored.restore(state)
    assert state["pair"][0].all()
    placement = stored.plan({"pair": (torch.zeros(2), 4)})
    assert placement.problems == [
        "pair/1 is in a tuple and differs from the stored value: make it a list"
    ]
    assert not stored.plan({"pair": (torch.zeros(2), 4)}, include="pair/0").problems


def test_damaged_pickle_is_a_format_error(save):
    stored = save({"cfg": complex}, allow_pickle=True)
    stored.tree.values["cfg",] = b"\x80\x04."
    with pytest.raises(FormatError, match="cfg cannot be unpickled"):
        stored.load(allow_pickle=True)

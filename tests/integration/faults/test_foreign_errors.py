"""Plugins with forbidden errors: one of our errors names the plugin, all else is whole.

Codec, provider and backend are third-party here: Penstock does not know them.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
from concurrent.futures import CancelledError
from contextlib import closing

import pytest
import torch
from tests.integration.support import memory, same
from tests.integration.training import SMALL, penstock_threads

from penstock import Checkpointer, DamagedError, PenstockError
from penstock.core.abc import (
    ByteSink,
    ByteSource,
    Codec,
    MemoryKey,
    Placement,
    StateObject,
    StateProvider,
    Target,
)
from penstock.core.errors import (
    CodecError,
    CommitUnknownError,
    PluginError,
    RestoreError,
    SaveError,
    StorageError,
)
from penstock.core.plugins.registry import GROUPS, Registry
from penstock.core.storage.guarded import guarded
from penstock.core.types import Kind, Region, Role, TensorSpec
from penstock.testing.faults import WrapperBackend

OPTIONS = {**SMALL, "rules": [{"match": "encoded", "codecs": ["acme"]}], "grace_s": 3600}
PLAN: dict[str, BaseException] = {}  # the error of a method, or of a method on some blob
HITS: list[str] = []


class Odd(BaseException):
    """Like a plugin's own way to exit a thread."""


KINDS = [RuntimeError, MemoryError, Odd]


def meet(method, *names):
    for wanted, error in PLAN.items():
        which, _, part = wanted.partition(" ")
        if which == method and (not part or any(part in name for name in names)):
            HITS.append(wanted)
            raise error


class AcmeCodec(Codec):
    api_version = 1
    name = "acme"
    lossless = True

    def max_encoded_size(self, raw_length, /):
        meet("max_encoded_size")
        return raw_length

    def encode(self, chunk, out, /, *, context):
        meet("encode")
        out[: len(chunk)] = chunk
        return len(chunk)

    def decode(self, frame, out, /, *, context):
        meet("decode")
        out[:] = frame


class Box:
    def __init__(self, data):
        self.data = bytearray(data)


class BoxMemory:
    address = None
    device = "cpu"

    def __init__(self, box):
        self.box = box
        self.nbytes = len(box.data)
        self.memory = MemoryKey("cpu", id(box.data), 0, (self.nbytes,), (1,), "box")

    def view(self):
        meet("view")


class BoxSource(BoxMemory, ByteSource):
    def copy_out(self, start, out, /):
        meet("copy_out")
        out[:] = memoryview(self.box.data)[start : start + len(out)]

    def version(self):
        meet("version")


class BoxSink(BoxMemory, ByteSink):
    def opened(self):
        meet("opened")

    def copy_in(self, start, data, /):
        meet("copy_in")
        memoryview(self.box.data)[start : start + len(data)] = data

    def written(self):
        meet("written")


class BoxProvider(StateProvider):
    api_version = 1
    name = "box"
    forms = ("box",)

    def claims(self, kind, /):
        return 50 if kind is Box else None

    def describe(self, value, path, /, *, context):
        meet("describe")
        spec = TensorSpec("uint8", 1, (len(value.data),))
        whole = Region.whole(spec.shape)
        yield StateObject(path, Kind.TENSOR, spec, (whole,), Role.OTHER, "box", BoxSource(value))

    def place(self, value, path, /, *, context):
        meet("place")
        return into(value, path)

    def rebuild(self, stored, /, *, device, context):
        meet("rebuild")
        return into(Box(bytes(stored.spec.nbytes)), stored.path)

    def parameters(self, value, /):
        meet("parameters")
        return ()

    def claimed_memory(self, value, /):
        meet("claimed_memory")
        return [BoxMemory(value).memory]

    def unsteady_memory(self, value, /):
        meet("unsteady_memory")
        return ()


def into(box, path):
    def finish():
        meet("finish")
        return box

    spec = TensorSpec("uint8", 1, (len(box.data),))
    target = Target(path, spec, (Region.whole(spec.shape),), BoxSink(box))
    return Placement([target], finish=finish, settle=[lambda: meet("settle")])


class AcmeBackend(WrapperBackend):
    api_version = 1
    name = "acme"

    def _around(self, operation, names, call):
        meet(operation, *names)
        return call()

    @property
    def capabilities(self):
        meet("capabilities")
        return super().capabilities

    def submit_write(self, writer, requests, /):
        meet("submit_write")
        return super().submit_write(writer, requests)

    def submit_read(self, requests, /):
        meet("submit_read")
        return super().submit_read(requests)

    def store_time_s(self):
        meet("store_time_s")
        return super().store_time_s()

    def sweep(self, before_s, /):
        meet("sweep")

    def close(self):
        meet("close")
        super().close()


@functools.cache
def installed():
    groups = GROUPS.values()
    return [e for group in groups for e in importlib.metadata.entry_points(group=group)]


def registry():
    point = importlib.metadata.EntryPoint
    own = [
        point("box", f"{__name__}:BoxProvider", GROUPS["provider"]),
        point("acme", f"{__name__}:AcmeCodec", GROUPS["codec"]),
    ]
    return Registry([*installed(), *own])


def make(number):
    model = torch.nn.Linear(20, 30)
    return {
        "box": Box(bytes([number]) * 20_000),
        "encoded": torch.arange(9000.0) + number,
        "raw": torch.arange(9000.0) - number,
        "optimizer": torch.optim.SGD(model.parameters()),  # asks all for names
        "model": model,
        "number": number,
    }


def is_whole(ckpt, step):
    tree = ckpt.load(step, exclude=["model", "optimizer"])
    wanted = make(step)
    boxes = tree.pop("box").data == wanted["box"].data
    return boxes and all(same(tree[key], wanted[key]) for key in tree)


SAVE = {
    "max_encoded_size": (CodecError, "codec acme"),
    "encode": (CodecError, "codec acme"),
    "describe": (PluginError, "box", "provider 'box'"),
    "parameters": (PluginError, "box", "provider 'box'"),
    "claimed_memory": (PluginError, "box", "provider 'box'"),
    "unsteady_memory": (PluginError, "box", "provider 'box'"),
    "version": (PluginError, "box"),
    "copy_out": (SaveError, "step 2", "the source of box", "BoxSource"),
    "list commits/": (StorageError, "backend 'acme'", "commits/"),
    "capabilities": (PenstockError, "backend 'acme'"),
    "publish intent": (StorageError, "backend 'acme'", "intent.json"),
    "create .raw": (StorageError, "backend 'acme'", ".raw"),
    "create .enc": (StorageError, "backend 'acme'", ".enc"),
    "submit_write": (StorageError, "backend 'acme'", "blobs/"),
    "write .raw": (StorageError, "backend 'acme'", ".raw"),
    "write .enc": (StorageError, "backend 'acme'", ".enc"),
    "seal .raw": (StorageError, "backend 'acme'", ".raw"),
    "seal .enc": (StorageError, "backend 'acme'", ".enc"),
    "publish parts/": (StorageError, "backend 'acme'", "parts/"),
    "publish index": (StorageError, "backend 'acme'", "index"),
    "stat intent": (StorageError, "backend 'acme'", "intent.json"),
    "publish commits/": (CommitUnknownError, "step 2", "commits/"),
}
READ = {
    "max_encoded_size": (CodecError, "codec acme"),
    "list commits/": (StorageError, "backend 'acme'", "commits/"),
    "read commits/": (StorageError, "backend 'acme'", "commits/"),
    "read parts/": (StorageError, "backend 'acme'", "parts/"),
    "read .raw": (PenstockError, "backend 'acme'", ".raw"),
    "submit_read": (PenstockError, "backend 'acme'", "blobs/"),
}
PLACE = {
    "opened": (RestoreError, "box", "BoxSink"),
    "view": (RestoreError, "step 1", "box", "BoxSink"),
    "copy_in": (RestoreError, "step 1", "box", "BoxSink"),
    "written": (RestoreError, "box", "BoxSink"),
    "finish": (RestoreError, "step 1"),
    "settle": (RestoreError, "step 1"),
}
TABLE = {
    "save": SAVE,
    "restore": {
        **READ,
        **PLACE,
        "place": (PluginError, "box", "provider 'box'"),
        "parameters": (PluginError, "box", "provider 'box'"),
    },
    "load": {"settle": PLACE["settle"], "rebuild": (RestoreError, "box")},  # reads like restore
    "verify": {**READ, "stat .raw": (StorageError, "backend 'acme'", ".raw")},
    "prune": {
        "store_time_s": (StorageError, "backend 'acme'"),
        "list commits/": (StorageError, "backend 'acme'", "commits/"),
        "list data/": (StorageError, "backend 'acme'", "data/"),
        "read commits/": (StorageError, "backend 'acme'", "commits/"),
        "sweep": (StorageError, "backend 'acme'"),
    },
    "delete": {
        "list commits/": (StorageError, "backend 'acme'", "commits/"),
        "read commits/": (StorageError, "backend 'acme'", "commits/"),
        "delete commits/": (StorageError, "backend 'acme'", "commits/"),
    },
    "open": {
        "read commits/": (StorageError, "backend 'acme'", "commits/"),
        "read parts/": (StorageError, "backend 'acme'", "parts/"),
    },
}
DO = {
    "save": lambda ckpt: ckpt.save(make(2), 2, mode="lazy").result(300),
    "restore": lambda ckpt: ckpt.restore(make(0), 1),
    "load": lambda ckpt: ckpt.load(1),
    "verify": lambda ckpt: ckpt.verify(1),
    "prune": lambda ckpt: ckpt.prune(),
    "delete": lambda ckpt: ckpt.delete(1),
    "open": lambda ckpt: ckpt.open(1)["raw"],
}


@pytest.fixture(autouse=True)
def working():
    """Every plugin works before and after."""
    PLAN.clear()
    HITS.clear()
    yield
    PLAN.clear()


@pytest.fixture
def store():
    with closing(memory()) as store, Checkpointer(store, registry=registry(), **OPTIONS) as ckpt:
        ckpt.save(make(1), 1).result()
        yield store


def root_of(error):
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def check_run_continues(ckpt, *steps):
    PLAN.clear()
    ckpt.wait()
    assert ckpt._saver.memory.staging is None or ckpt._saver.memory.staging._used == 0
    assert ckpt.steps() == list(steps)
    for step in steps:
        assert ckpt.verify(step, deep=True).ok
        assert is_whole(ckpt, step)
    ckpt.save(make(3), 3).result(300)
    assert is_whole(ckpt, 3)
    ckpt.delete(3)


def fail_once(ckpt, does, method, kind):
    """Let one call fail, and check the resulting error."""
    expected, *texts = TABLE[does][method]
    error = PLAN[method] = kind("boom")
    with pytest.raises((PenstockError, Odd)) as caught:
        DO[does](ckpt)
    assert HITS, "nobody called it"
    assert root_of(caught.value) is error
    if kind is not Odd:
        assert isinstance(caught.value, expected)
        for text in texts:
            assert text in str(caught.value)
        assert kind.__name__ in str(caught.value)
    PLAN.clear()
    HITS.clear()
    ckpt.wait()
    assert ckpt._saver.memory.staging is None or ckpt._saver.memory.staging._used == 0
    assert ckpt.steps() == [1]


# Each place gets one kind of error here, and the other kinds in the slow run.
@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("does", TABLE)
def test_plugin_errors_are_mapped_and_harm_nothing_else(does, turn, store):
    before = penstock_threads()
    with Checkpointer(AcmeBackend(store), registry=registry(), **OPTIONS) as ckpt:
        for number, method in enumerate(TABLE[does], start=turn):
            try:
                fail_once(ckpt, does, method, KINDS[number % len(KINDS)])
            except BaseException as error:
                error.add_note(f"{does}, {method}")
                raise
        check_run_continues(ckpt, 1)
    gc.collect()
    pools = OPTIONS["workers"] + 2  # of the store: they live until it is closed
    assert len(penstock_threads()) <= len(before) + pools


@pytest.mark.parametrize(
    ("error", "mapped"),
    [
        (KeyError("boom"), True),
        (CancelledError(), True),
        (StorageError("boom"), False),
        (Odd("boom"), False),
    ],
    ids=repr,
)
def test_only_foreign_exceptions_are_mapped(error, mapped):
    with closing(memory()) as inner, closing(guarded(AcmeBackend(inner))) as backend:
        PLAN["list"] = error
        with pytest.raises((StorageError, Odd)) as caught:
            backend.list("data/")
        assert (caught.value is not error) is mapped
        if mapped:
            assert type(caught.value) is StorageError
            assert caught.value.__cause__ is error


@pytest.mark.parametrize("does", ["restore", "load", "verify"])
def test_a_failed_decode_names_codec_and_object(does, store):
    """Its own errors are its verdict on the frame; a lack of memory, or an exit, is none."""
    with Checkpointer(AcmeBackend(store), registry=registry(), **OPTIONS) as ckpt:
        for kind in (MemoryError, Odd):
            error = PLAN["decode"] = kind("boom")
            with pytest.raises(RestoreError, match=r"codec acme.*encoded") as caught:
                DO[does](ckpt)
            assert root_of(caught.value) is error
        PLAN["decode"] = RuntimeError("boom")
        if does == "verify":
            (damage, *_) = DO[does](ckpt).damaged
            assert damage.what == "encoded"
            assert "codec acme" in damage.detail
        else:
            with pytest.raises(DamagedError, match="codec acme") as caught:
                DO[does](ckpt)
            assert caught.value.damaged == ("encoded",)
        check_run_continues(ckpt, 1)


def test_a_failing_close_is_reported(store):
    ckpt = Checkpointer(AcmeBackend(store), registry=registry(), **OPTIONS)
    ckpt._owns_backend = True
    error = PLAN["close"] = RuntimeError("boom")
    with pytest.raises(StorageError, match="cannot close") as caught:
        ckpt.close()
    assert root_of(caught.value) is error
    ckpt.close()


@pytest.mark.parametrize("kind", [RuntimeError, Odd])
def test_a_failed_clean_up_hides_no_reason(kind, store):
    with Checkpointer(AcmeBackend(store), registry=registry(), **OPTIONS) as ckpt:
        first = PLAN["seal .raw"] = kind("boom")
        PLAN["delete data/"] = kind("of the clean-up")
        with pytest.raises(SaveError if kind is Odd else StorageError) as caught:
            ckpt.save(make(2), 2).result(300)
        assert root_of(caught.value) is first
        ckpt.wait()
        ckpt._saver.job.released.wait(300)
        assert HITS == ["seal .raw", "delete data/"]
        check_run_continues(ckpt, 1)


@pytest.mark.parametrize("kind", [RuntimeError, Odd])
def test_a_writer_that_cannot_abort_loses_only_that_save(kind, store):
    with Checkpointer(AcmeBackend(store), registry=registry(), **OPTIONS) as ckpt:
        first = PLAN["write .raw"] = kind("boom")
        PLAN["abort"] = kind("of the abort")
        with pytest.raises(SaveError if kind is Odd else StorageError) as caught:
            ckpt.save(make(2), 2).result(300)
        assert root_of(caught.value) is first
        ckpt.wait()
        ckpt._saver.job.released.wait(300)
        assert HITS == ["write .raw", "abort", "abort"]  # of the raw and of the encoded blob
        check_run_continues(ckpt, 1)

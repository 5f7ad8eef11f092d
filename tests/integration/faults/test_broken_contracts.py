"""Plugins with forbidden results: one sentence names the plugin at fault, and the place."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
import types
from contextlib import closing

import pytest
import torch
from tests.integration.support import memory

import penstock
from penstock import Checkpointer, ConfigError, PluginError, StorageError
from penstock.backends.memory import MemoryBackend
from penstock.core.abc import Placement, StateProvider
from penstock.core.plugins.registry import GROUPS, Registry
from penstock.core.storage.open import open_backend
from penstock.core.types import BlobInfo

STATE = {"w": torch.arange(5000.0)}


@functools.cache
def installed():
    return [e for group in GROUPS.values() for e in importlib.metadata.entry_points(group=group)]


def registry_with(monkeypatch, kind, cls):
    """Everything installed, and `cls` as a third party's."""
    module = "somebodys_plugin"
    made = types.ModuleType(module)
    made.Plugin = cls
    cls.__module__ = module
    monkeypatch.setitem(sys.modules, module, made)
    entry = importlib.metadata.EntryPoint(cls.name, f"{module}:Plugin", GROUPS[kind])
    return Registry([*installed(), entry])


class Thing:
    def __init__(self):
        self.tensor = torch.ones(3)


class ThingProvider(StateProvider):
    api_version = 1
    name = "thing"
    forms = ("thing",)

    def claims(self, kind, /):
        return 10 if issubclass(kind, Thing) else None

    def describe(self, value, path, /, *, context):
        yield penstock.core.abc.Node(path, "thing", {})
        yield from context.describe(value.tensor, (*path, "tensor"))

    def place(self, value, path, /, *, context):
        return context.place(value.tensor, (*path, "tensor"))

    def rebuild(self, stored, /, *, device, context):
        placed = context.rebuild((*stored.path, "tensor"), device=device)
        placed.finish = Thing
        return placed


BROKEN = {
    "describe": (lambda self, *a, **k: iter([3]), "save", "describe yields int"),
    "place": (lambda self, *a, **k: None, "restore", "returned NoneType, not a Placement"),
    "rebuild": (lambda self, *a, **k: None, "load", "returned NoneType, not a Placement"),
    "rebuild without finish": (lambda self, *a, **k: Placement(), "load", "without finish"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_provider(what, monkeypatch):
    method, use, complaint = BROKEN[what]
    broken = type("Broken", (ThingProvider,), {what.split()[0]: method})
    store, state = memory(), {"thing": Thing(), "other": 1}
    good = registry_with(monkeypatch, "provider", type("Good", (ThingProvider,), {}))
    with closing(Checkpointer(store, registry=good)) as ckpt:
        ckpt.save(state, 1, mode="blocking")
        assert isinstance(ckpt.load(1)["thing"], Thing)
    uses = {
        "save": lambda ckpt: ckpt.save(state, 2, mode="blocking"),
        "restore": lambda ckpt: ckpt.restore(state),
        "load": lambda ckpt: ckpt.load(1),
    }
    registry = registry_with(monkeypatch, "provider", broken)
    with Checkpointer(store, registry=registry) as ckpt:
        with pytest.raises(PluginError, match=f"thing: provider 'thing' .*{complaint}"):
            uses[use](ckpt)
        assert ckpt.steps() == [1]


@pytest.mark.parametrize(
    ("attribute", "value", "complaint"),
    [
        ("create", lambda self, name, /, **options: None, r"create\('data.*is NoneType"),
        ("capabilities", None, "NoneType"),
        ("list", lambda self, prefix, /: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_backend_by_its_name(attribute, value, complaint, monkeypatch):
    odd = type("Odd", (MemoryBackend,), {"api_version": 1, "name": "odd", attribute: value})
    registry = registry_with(monkeypatch, "backend", odd)
    opened = Checkpointer({"type": "odd"}, registry=registry)
    with opened as ckpt, pytest.raises(StorageError, match=f"'odd'.*{complaint}"):
        ckpt.save(STATE, 1, mode="blocking")


def answers(value):
    """A method that always returns `value`."""
    return lambda self, *arguments, **options: value


ANSWERS = [
    ("list", answers(None), r"list\('.*'\) is NoneType, not a sequence of BlobInfo"),
    ("list", answers(iter([])), r"list\('.*'\) is list_iterator, not a sequence"),
    ("list", answers([("a", 1, 2.0)]), r"an item of list\('.*'\) is tuple, not a BlobInfo"),
    ("list", answers([BlobInfo("a", 1.5, 0.0)]), "size_bytes of an item .* is float, not an"),
    ("stat", answers(None), r"stat\('r'\) is NoneType, not a BlobInfo"),
    ("stat", answers(BlobInfo("r", 1, "now")), "modified_s of .* is str, not a float"),
    ("stat", answers(BlobInfo(b"r", 1, 0.0)), "name of .* is bytes, not a str"),
    ("read_record", answers(None), r"read_record\('r'\) is NoneType, not bytes"),
    ("read_record", answers(bytearray(b"x")), "is bytearray, not bytes"),
    ("url", None, "url is NoneType, not a str"),
    ("url", "", "url is str, not a str that shows"),
    ("direct_io", "yes", "direct_io is str, not True or False"),
    ("free_bytes", answers("all"), r"free_bytes\(\) is str, not an int or None"),
    ("store_time_s", answers(None), r"store_time_s\(\) is NoneType, not a float"),
    ("submit_read", answers(None), r"submit_read\(\) is NoneType, not a Future"),
    ("tiers", ["fast"], "tiers is list, not a tuple of Tier"),
    ("tiers", ("fast",), "one of the tiers is str, not a Tier"),
]


def ask(backend, attribute):
    """Call the method, or read the property, of that name."""
    calls = {
        "list": lambda: backend.list("x"),
        "stat": lambda: backend.stat("r"),
        "read_record": lambda: backend.read_record("r", limit_bytes=9),
        "free_bytes": backend.free_bytes,
        "store_time_s": backend.store_time_s,
        "submit_read": lambda: backend.submit_read([]),
    }
    calls.get(attribute, lambda: getattr(backend, attribute))()


def test_backend_results_are_checked(monkeypatch):
    for attribute, value, complaint in ANSWERS:
        odd = type("Odd", (MemoryBackend,), {"api_version": 1, "name": "odd", attribute: value})
        registry = registry_with(monkeypatch, "backend", odd)
        with (
            closing(open_backend({"type": "odd"}, registry)) as backend,
            pytest.raises(StorageError, match=rf"'odd' \(somebodys_plugin\..*{complaint}"),
        ):
            ask(backend, attribute)


def test_a_malformed_list_fails_by_name_in_every_call(monkeypatch):
    odd = type("Odd", (MemoryBackend,), {"api_version": 1, "name": "odd", "list": answers(None)})
    registry = registry_with(monkeypatch, "backend", odd)
    with Checkpointer({"type": "odd"}, registry=registry) as ckpt:
        for ask in (ckpt.steps, ckpt.latest, lambda: ckpt.save(STATE, 1, mode="blocking")):
            with pytest.raises(StorageError, match=r"'odd'.* broke its contract: list"):
                ask()


# -- paths mistaken for a run ----------------------------------------------------------------------


@pytest.mark.parametrize("there", [False, True])
def test_a_configuration_file_is_no_run(there, tmp_path):
    for name in ("penstock.toml", "run.yaml", "run.YML", "run.json"):
        path = tmp_path / name
        if there:
            path.write_text("")
        with pytest.raises(ConfigError, match="from_config"):
            Checkpointer(path)
        assert path.exists() is there
    (tmp_path / "folder.json").mkdir()
    Checkpointer(tmp_path / "folder.json").close()


@pytest.mark.parametrize("kind", ["posix://", "uring://", ""])
def test_a_file_is_no_empty_run(kind, tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import torch")
    try:
        ckpt = Checkpointer(f"{kind}{path}")
    except penstock.PenstockError as error:
        if kind == "uring://":
            pytest.skip(str(error))
        raise
    with ckpt:
        for use in (ckpt.latest, ckpt.steps, ckpt.load):
            with pytest.raises(StorageError, match="a file or a link is where"):
                use()

"""What a checkpoint records of its plugins, and the errors of a reader without them."""

import sys

import pytest
import torch

import penstock
from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.core.catalog.catalog import Catalog
from penstock.core.errors import PluginError
from penstock.core.plugins.registry import Registry

PLUGINS = """
    from penstock.codecs.zstd import ZstdCodec
    from penstock.core.abc import Node, Placement, StateProvider

    class Own(ZstdCodec):
        api_version = 1
        name = "own"

    class Ema:
        def __init__(self, shadow):
            self.shadow = shadow

    class EmaProvider(StateProvider):
        api_version = 1
        name = "ema"
        version = {version}
        forms = ("acme-ema",)
        seen = []

        def claims(self, kind, /):
            return 40 if kind is Ema else None

        def describe(self, value, path, /, *, context):
            yield Node(path, "acme-ema")
            yield from context.describe(value.shadow, (*path, "shadow"))

        def place(self, value, path, /, *, context):
            self.seen.append(context.provider_version("ema"))
            return context.place(value.shadow, (*path, "shadow"))

        def rebuild(self, stored, /, *, device, context):
            self.seen.append(context.provider_version("ema"))
            built = context.rebuild((*stored.path, "shadow"), device=device)
            return Placement(built.targets, finish=lambda: Ema(built.finish()))
"""


def install(plugin_site, version):
    """The plugins of `acme-penstock`, and a registry that has them."""
    for other in plugin_site.folder.glob("acme_penstock-*"):
        other.rename(other.with_name(f"gone-{version}"))
    module = f"acme_{version}"
    targets = {
        "penstock.codecs": {"own": f"{module}:Own"},
        "penstock.providers": {"ema": f"{module}:EmaProvider"},
    }
    source = PLUGINS.format(version=version)
    plugin_site.add("acme-penstock", targets, version=f"0.{version}", **{module: source})
    registry = Registry()
    assert registry.providers.for_form("acme-ema").name == "ema"
    return registry, sys.modules[module]


@pytest.fixture
def store(plugin_site):
    """A checkpoint written by version 2 of the plugins."""
    registry, acme = install(plugin_site, 2)
    store = MemoryBackend(MemoryConfig())
    rules = [{"match": "w", "codecs": ["own"]}]
    state = {
        "ema": {"of": acme.Ema(torch.ones(5))},
        "w": torch.arange(5000.0),
        "raw": torch.ones(2),
    }
    with penstock.Checkpointer(store, registry=registry, rules=rules) as ckpt:
        ckpt.save(state, 1, mode="blocking")
        assert ckpt.load()["ema"]["of"].shadow.tolist() == [1.0] * 5
        ckpt.restore(state)
        assert acme.EmaProvider.seen == [2, 2]
    return store


@pytest.fixture
def bare():
    """A registry without third parties' plugins."""
    ours = [
        entry
        for kind in ("provider", "codec")
        for entries in Registry()._entries(kind).values()
        for entry in entries
        if entry.dist.name == "penstock"
    ]
    return Registry(ours)


@pytest.fixture
def without(store, bare):
    """The same without any third-party distribution."""
    with penstock.Checkpointer(store, registry=bare) as ckpt:
        yield ckpt


def test_the_record_names_only_third_party_distributions(store):
    record = Catalog(store).record(1)
    assert record.plugins == {
        "codec own": "acme-penstock 0.2",
        "provider ema": "acme-penstock 0.2",
    }
    with penstock.Checkpointer("memory://") as ckpt:
        ckpt.save({"w": torch.ones(3)}, 1, mode="blocking")
        assert ckpt.info(1).plugins == {}


def test_a_missing_codec_error_says_what_to_install(without):
    with pytest.raises(
        PluginError, match=r"no codec called 'own'.* written with acme-penstock 0\.2"
    ):
        without.load(include="w")


def test_a_missing_provider_error_has_path_distribution_and_workaround(without):
    with pytest.raises(PluginError) as caught:
        without.load(include="ema")
    text = str(caught.value)
    assert text.startswith("ema/of: no installed provider rebuilds 'acme-ema'")
    assert "not installed here: provider ema (acme-penstock 0.2)" in text
    assert "to do without this object, pass exclude='ema/of'" in text
    assert without.load(exclude=["ema/of", "w"])["raw"].tolist() == [1.0, 1.0]


def test_a_subtree_of_a_composite_is_read_without_its_provider(plugin_site, bare):
    registry, acme = install(plugin_site, 3)
    state = {"ema": {"of": acme.Ema({"a": torch.ones(2), "b": [1, 2]})}}
    store = MemoryBackend(MemoryConfig())
    with penstock.Checkpointer(store, registry=registry) as ckpt:
        ckpt.save(state, 1, mode="blocking")
    with penstock.Checkpointer(store, registry=bare) as ckpt:
        opened = ckpt.open(1)
        assert opened["ema/of/shadow/a"].tolist() == [1.0, 1.0]
        shadow = opened["ema/of/shadow"]
        assert shadow["a"].tolist() == [1.0, 1.0]
        assert shadow["b"] == [1, 2]
        assert opened["ema/of/shadow/b"] == [1, 2]
        for whole in ("ema/of", "ema"):
            with pytest.raises(PluginError, match="ema/of: no installed provider rebuilds"):
                _ = opened[whole]
        with pytest.raises(KeyError, match="of/shade"):
            _ = opened["ema/of/shade"]


@pytest.mark.parametrize("use", ["load", "restore"])
def test_data_of_a_later_provider_version_is_refused(store, plugin_site, use):
    registry, acme = install(plugin_site, 1)
    template = {"ema": {"of": acme.Ema(torch.zeros(5))}}
    with penstock.Checkpointer(store, registry=registry) as ckpt:
        calls = {
            "load": lambda: ckpt.load(include="ema"),
            "restore": lambda: ckpt.restore(template, include="ema"),
        }
        message = r"ema/of was written by provider 'ema' version 2 \(acme-penstock 0\.2\), but "
        with pytest.raises(
            PluginError, match=message + r".*acme_1\.EmaProvider .*has version 1: upgrad"
        ):
            calls[use]()
    assert template["ema"]["of"].shadow.tolist() == [0.0] * 5
    assert acme.EmaProvider.seen == []

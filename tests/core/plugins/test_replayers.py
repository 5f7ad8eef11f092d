"""Which replayer the registry chooses for an optimizer."""

import logging
from importlib.metadata import entry_points

import pytest

from penstock.core.abc import Replayer
from penstock.core.errors import PluginError
from penstock.core.plugins.registry import Registry
from penstock.providers.replayer import TorchReplayer

SOURCE = """
    from penstock.core.abc import Replayer

    class Own(Replayer):
        api_version = 1
        name = "{name}"
        def handles(self, optimizer, /):
            return {handles}
"""


class SGD:
    """What `TorchReplayer` goes by."""

    __module__ = "torch.optim.sgd"


def add(site, name, *, distribution="", handles="True", source=SOURCE):
    distribution = distribution or f"p-{name}"
    module = distribution.replace("-", "_")
    targets = {"penstock.replayers": {name: f"{module}:Own"}}
    site.add(distribution, targets, **{module: source.format(name=name, handles=handles)})


def registry():
    """A registry of Penstock's replayer and those that the test installed."""
    entries = entry_points(group="penstock.replayers")
    return Registry([e for e in entries if e.dist.name.startswith(("p-", "penstock"))])


def listed(name):
    return [i for i in registry().listing() if (i.kind, i.name) == ("replayer", name)]


def test_penstocks_own_handles_torch():
    assert registry().replayer(SGD()).name == "torch"
    assert registry().replayer(object()) is None


def test_third_party_comes_before_ours(plugin_site):
    add(plugin_site, "zeal", handles="type(optimizer).__name__ == 'SGD'")
    assert registry().replayer(SGD()).name == "zeal"
    assert registry().replayer(type("Adam", (SGD,), {"__module__": "torch.optim.adam"})()).name == (
        "torch"
    )


def test_third_parties_are_asked_by_name(plugin_site):
    for name in ("second", "first"):
        add(plugin_site, name)
    assert registry().replayer(SGD()).name == "first"


def test_two_of_one_name_are_an_error_until_prefer_chooses(plugin_site):
    for distribution in ("p-one", "p-two"):
        add(plugin_site, "same", distribution=distribution)
    hint = r'p-one.*p-two.*prefer=\{"replayer": \{"same": "p-one"\}\}'
    with pytest.raises(PluginError, match=rf"replayer 'same' is claimed by {hint}"):
        registry().replayer(SGD())
    chosen = registry().preferring({"replayer": {"same": "p-two"}})
    assert type(chosen.replayer(SGD())).__module__ == "p_two"
    assert [i.state for i in listed("same")] == ["conflict", "conflict"]


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
        (SOURCE.replace("= 1", "= 2"), "version 2 of the Replayer contract"),
        (SOURCE.replace("api_version = 1", ""), "write `api_version = 1` into"),
        (SOURCE.replace("def handles", "def handle"), "lacks handles"),
        (SOURCE + "        version = 0\n", "has the version 0"),
        ("class Own: pass", "is not a subclass of Replayer"),
    ],
)
def test_broken_one_is_left_out_with_one_warning(plugin_site, caplog, source, complaint):
    add(plugin_site, "bad", source=source)
    found = registry()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert found.replayer(SGD()).name == "torch"
    (record,) = caplog.records
    assert "replayer 'bad' of p-bad 1.0" in record.getMessage()
    assert complaint in record.getMessage()
    assert record.getMessage().endswith("continuing without it")
    (info,) = listed("bad")
    assert info.state == "failed"
    assert complaint in info.error


def test_one_that_fails_on_an_optimizer_is_left_out_with_one_warning(plugin_site, caplog):
    add(plugin_site, "bad", handles="optimizer.missing")
    found = registry()
    for _ in range(3):
        assert found.replayer(SGD()).name == "torch"
    assert len(caplog.records) == 1
    assert "replayer 'bad' of p-bad 1.0 failed on SGD; continuing without it: Attr" in caplog.text
    assert listed("bad")[0].state == "failed"


def test_handles_that_returns_no_bool_is_listed_as_failed(plugin_site):
    add(plugin_site, "bad", handles="None")
    assert "returned None from handles: it must be True or False" in listed("bad")[0].error


def test_registered_class_replaces_ours_only_on_request():
    class Own(TorchReplayer):
        api_version = 1

    found = registry()
    assert type(found.replayer(SGD())) is TorchReplayer
    with pytest.raises(PluginError, match=r"replayer 'torch' cannot be registered: penstock"):
        found.register(Own)
    found.register(Own, replace=True)
    assert type(found.replayer(SGD())) is Own


def test_registered_class_is_asked_from_then_on():
    found = registry()
    assert found.replayer(object()) is None

    @found.register
    class Own(Replayer):
        api_version = 1
        name = "own"

        def handles(self, optimizer, /):
            return type(optimizer) is object

    assert type(found.replayer(object())) is Own
    assert type(found.preferring({"replayer": {"own": "x"}}).replayer(object())) is Own

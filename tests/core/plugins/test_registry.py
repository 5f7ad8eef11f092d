import logging
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest

from penstock.core.errors import PluginError
from penstock.core.plugins.registry import Registry

CODEC = """
    from penstock.core.abc import Codec, PluginConfig

    class GoodConfig(PluginConfig):
        level: int = 1

    class Good(Codec):
        api_version = 1
        name = "{name}"
        version = {version}
        lossless = True
        Config = GoodConfig
        def max_encoded_size(self, raw_length, /): return raw_length
        def encode(self, chunk, out, /, *, context):
            out[:] = chunk
            return len(chunk)
        def decode(self, frame, out, /, *, context): out[:] = frame
"""

PROVIDER = """
    from penstock.core.abc import StateProvider

    class Provider(StateProvider):
        api_version = 1
        name = "{name}"
        forms = {forms}
        def claims(self, kind, /):
            return {claims}
        def describe(self, value, path, /, *, context): raise NotImplementedError
        def place(self, value, path, /, *, context): raise NotImplementedError
        def rebuild(self, stored, /, *, device, context): raise NotImplementedError
"""


def _codec(name, version=1):
    return CODEC.format(name=name, version=version)


def _provider(name, claims="None", forms=()):
    return PROVIDER.format(name=name, claims=claims, forms=tuple(forms))


def _add_codec(site, distribution, name, *, module, source=None, cls="Good", **options):
    target = f"{module}:{cls}"
    source = source or _codec(name)
    site.add(distribution, {"penstock.codecs": {name: target}}, **{module: source}, **options)


def _add_provider(site, distribution, name, *, module, source):
    target = {"penstock.providers": {name: f"{module}:Provider"}}
    site.add(distribution, target, **{module: source})


# -- finding and loading ------------------------------------------------------------------------


def test_third_party_codec_is_found_loaded_and_configured(plugin_site):
    _add_codec(plugin_site, "acme-codecs", "acme", module="acme_codec")
    codec = Registry().codec("acme", {"level": 4})
    assert codec.name == "acme"
    assert codec.config.model_dump() == {"level": 4}


def test_nothing_is_imported_before_first_use(plugin_site):
    _add_codec(plugin_site, "acme-codecs", "acme", module="acme_codec")
    registry = Registry()
    assert "acme" in registry.names("codec")
    registry.listing(load=False)
    assert "acme_codec" not in sys.modules
    registry.codec_class("acme")
    assert "acme_codec" in sys.modules


def test_own_codecs_are_found_by_entry_points_of_pyproject(plugin_site):
    plugin_site.add_penstock()
    registry = Registry()
    for name in ("zstd", "lz4"):
        assert registry.codec(name, {}).name == name
    assert {"memory", "posix", "uring"} <= set(registry.names("backend"))
    assert {"module", "optimizer", "tensor", "value"} <= set(registry.names("provider"))


def test_unknown_name_lists_the_nearest_and_installed_ones(plugin_site):
    _add_codec(plugin_site, "acme-codecs", "acme", module="acme_codec")
    with pytest.raises(PluginError, match=r"no codec called 'acne'.*did you mean acme") as caught:
        Registry().codec_class("acne")
    assert "installed: " in str(caught.value)


# -- broken plugins -----------------------------------------------------------------------------

BROKEN = {
    "import": ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
    "syntax": ("def (:", "SyntaxError"),
    "raises": ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
    "exits": ("raise SystemExit('no licence')", "SystemExit: no licence"),
    "missing": ("Bad = 1", "AttributeError"),
    "not_a_class": ("Good = 3", "is not a subclass of Codec"),
    "other_class": ("class Good: pass", "is not a subclass of Codec"),
    "abstract": (_codec("bad").replace("def decode", "def decoed"), "lacks decode"),
    "other_api": (_codec("bad") + "    Good.api_version = 99", "version 99 of the Codec contract"),
    "no_api": (_codec("bad").replace("api_version", "other"), "write `api_version = 1` into"),
    "other_name": (_codec("good"), "calls itself 'good', not 'bad'"),
    "no_name": (_codec("bad") + "    del Good.name", "calls itself None, not 'bad'"),
    "not_lossless_nor_lossy": (
        _codec("bad").replace("lossless = True", "bound = 3"),
        "does not declare lossless: write `lossless = True` or `lossless = False`",
    ),
    "lossless_by_a_word": (
        _codec("bad").replace("lossless = True", "lossless = 'yes'"),
        "has lossless = 'yes'",
    ),
    "version_zero": (_codec("bad", 0), "has the version 0: it must be an integer, at least 1"),
    "other_config": (_codec("bad") + "    Good.Config = dict", "not a subclass of PluginConfig"),
}


def test_broken_plugins_are_reported_with_their_distributions_and_break_no_other(plugin_site):
    for name, (source, _) in BROKEN.items():
        named = source.replace("bad", name)
        _add_codec(plugin_site, f"{name}-codecs", name, module=name, source=named, version="2.1")
    _add_codec(plugin_site, "acme-codecs", "acme", module="acme_codec")
    registry = Registry()
    for name, (_, complaint) in BROKEN.items():
        for _ in range(2):  # the second answer is cached
            with pytest.raises(PluginError, match=rf"'{name}' of {name}-codecs 2\.1") as caught:
                registry.codec_class(name)
            assert complaint.replace("bad", name) in str(caught.value)
    assert registry.codec("acme", {}).name == "acme"
    states = {i.name: i for i in registry.listing() if i.distribution.endswith("-codecs")}
    assert (states["acme"].state, states["acme"].error) == ("ok", None)
    for name, (_, complaint) in BROKEN.items():
        assert (states[name].state, states[name].version) == ("failed", "2.1")
        assert complaint.replace("bad", name) in states[name].error


def test_two_plugins_of_one_name_are_an_error_naming_both(plugin_site):
    _add_codec(plugin_site, "first-codecs", "same", module="first_codec")
    _add_codec(plugin_site, "second-codecs", "same", module="second_codec", version="2.0")
    _add_codec(plugin_site, "acme-codecs", "acme", module="acme_codec")
    registry = Registry()
    with pytest.raises(PluginError, match=r"codec 'same' is claimed by") as caught:
        registry.codec("same", {})
    assert "first-codecs 1.0" in str(caught.value)
    assert "second-codecs 2.0" in str(caught.value)
    assert "first_codec" not in sys.modules
    assert registry.codec("acme", {}).name == "acme"
    same = [i for i in registry.listing() if i.name == "same"]
    assert [i.state for i in same] == ["conflict", "conflict"]
    assert {i.distribution for i in same} == {"first-codecs", "second-codecs"}


def _shipped_codec_and(plugin_site, *more):
    """The codec `zstd`, and distributions that claim its name."""
    for name in more:
        _add_codec(plugin_site, name, "zstd", module=name.replace("-", "_"), source=_codec("zstd"))
    return [e for e in _installed() if e.group == "penstock.codecs"]


def test_claiming_a_shipped_name_is_an_error_with_a_one_line_fix(plugin_site):
    registry = Registry(_shipped_codec_and(plugin_site, "acme-codecs"))
    with pytest.raises(PluginError, match=r"zstd.*acme-codecs 1\.0 \(acme_codecs:Good\)") as caught:
        registry.codec_class("zstd")
    assert str(caught.value).endswith('as in prefer={"codec": {"zstd": "penstock"}}')
    assert "acme_codecs" not in sys.modules
    states = {i.distribution: i.state for i in registry.listing() if i.name == "zstd"}
    assert states == {"penstock": "conflict", "acme-codecs": "conflict"}


def test_the_preferred_plugin_is_used(plugin_site):
    entries = _shipped_codec_and(plugin_site, "acme-codecs", "Other_Codecs")
    for given, module in (
        ("acme-codecs", "acme_codecs"),
        ("other.codecs", "Other_Codecs"),
        ("penstock", "penstock.codecs.zstd"),
    ):
        registry = Registry(entries).preferring({"codec": {"zstd": given}})
        assert registry.codec_class("zstd").__module__ == module
        states = [i.state for i in registry.listing() if i.name == "zstd"]
        assert sorted(states) == ["conflict", "conflict", "ok"]
    nobody = Registry(entries).preferring({"codec": {"zstd": "nobody"}})
    with pytest.raises(PluginError, match="codec 'zstd' is claimed by penstock"):
        nobody.codec_class("zstd")
    plain = Registry(entries)
    assert plain.preferring({"codec": {}}) is plain


def test_a_class_is_registered_at_run_time(plugin_site):
    names = {}
    exec(textwrap.dedent(_codec("mine")), names)
    registry = Registry()
    assert registry.register(names["Good"]) is names["Good"]
    assert registry.codec("mine", {"level": 3}).config.level == 3
    assert registry.codec("zstd", {}).name == "zstd"
    assert [i.state for i in registry.listing() if i.name == "mine"] == ["ok"]
    other = registry.preferring({"codec": {"x": "y"}})
    assert other.codec_class("mine") is names["Good"]
    with pytest.raises(PluginError, match="no codec called 'mine'"):
        Registry().codec_class("mine")


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (
            lambda names: names["Good"](None),
            "is not a subclass of any of StateProvider, Codec, Back",
        ),
        (lambda names: dict, "is not a subclass of any of"),
        (lambda names: type("Own", (names["Good"],), {"version": "1"}), "has the version '1'"),
    ],
)
def test_contract_breaking_classes_are_not_registered(made, complaint):
    names = {}
    exec(textwrap.dedent(_codec("mine")), names)
    with pytest.raises(PluginError, match=complaint):
        Registry().register(made(names))


def test_a_registered_provider_is_asked_from_then_on():
    names = {}
    exec(textwrap.dedent(_provider("mine", claims="99 if kind is dict else None")), names)
    registry = Registry()
    assert registry.providers.for_type(dict).name != "mine"
    registry.register(names["Provider"])
    assert registry.providers.for_type(dict).name == "mine"


# -- close checks -------------------------------------------------------------------------------


NOT_USABLE = {
    "no_instance": (
        _provider("bad") + "        def __init__(self): raise OSError('no key')\n",
        "provider 'bad' of p-bad 1.0 cannot be created: OSError: no key",
    ),
    "exits": (
        _provider("bad") + "        def __init__(self): raise SystemExit(3)\n",
        "provider 'bad' of p-bad 1.0 cannot be created: SystemExit: 3",
    ),
    "wants_arguments": (
        _provider("bad") + "        def __init__(self, key): pass\n",
        "missing 1 required positional argument: 'key'",
    ),
    "claims_by_a_word": (
        _provider("bad", claims="'always'"),
        "'bad' of p-bad 1.0 cannot be used: it returned 'always' of type str from claims(object)",
    ),
    "claims_by_truth": (_provider("bad", claims="kind is dict"), "returned False of type bool"),
    "claims_fail": (_provider("bad", claims="1 // 0"), "ZeroDivisionError"),
    "no_forms": (
        _provider("bad").replace("forms = ()", "kinds = ()"),
        "does not declare its forms: list in `forms` what its `rebuild` accepts",
    ),
    "form_is_a_word": (
        _provider("bad").replace("forms = ()", "forms = 'bad'"),
        "has the forms 'bad': they must be a tuple of strings",
    ),
}


def test_providers_that_fail_only_in_use_are_listed_with_the_reason(plugin_site):
    for name, (source, _) in NOT_USABLE.items():
        named = source.replace("bad", name)
        _add_provider(plugin_site, f"p-{name}", name, module=f"p_{name}", source=named)
    _add_provider(plugin_site, "p-good", "good", module="p_good", source=_provider("good"))
    listed = {info.name: info for info in Registry().listing()}
    for name, (_, complaint) in NOT_USABLE.items():
        assert listed[name].state == "failed"
        assert complaint.replace("bad", name) in listed[name].error
    assert listed["good"].state == "ok"


def test_providers_declaring_one_form_conflict_and_others_do_not(plugin_site):
    for name, forms in (("one", ["a", "both"]), ("two", ["b", "both"]), ("three", ["c"])):
        source = _provider(name, forms=forms)
        _add_provider(plugin_site, f"p-{name}", name, module=f"p_{name}", source=source)
    found = {i.name: i for i in _third_party_only().listing()}
    assert [found[n].state for n in ("one", "two", "three")] == ["conflict", "conflict", "ok"]
    assert found["one"].error == found["two"].error
    assert found["one"].error.startswith("form 'both' is declared by provider 'one' of p-one 1.0")
    assert "provider 'two' of p-two 1.0" in found["one"].error


# -- codecs of checkpoints ----------------------------------------------------------------------


def test_versions_before_the_oldest_readable_one_are_refused(plugin_site):
    source = _codec("acme", version=4) + "        oldest_readable = 3\n"
    _add_codec(plugin_site, "acme-codecs", "acme", module="acme_codec", source=source)
    assert Registry().codec_from_record("acme", 3, {}).version == 4
    complaint = (
        "written by version 2 of codec 'acme', but acme-codecs 1.0 has version 4, which reads "
        "versions 3 to 4: install an older release to read this data"
    )
    with pytest.raises(PluginError, match=complaint):
        Registry().codec_from_record("acme", 2, {})


@pytest.mark.parametrize(
    ("name", "version", "config", "complaint"),
    [
        ("acme", 2, {}, "written by version 2 of codec 'acme', but acme-codecs 1.0 has version 1"),
        ("gone", 1, {}, "no codec called 'gone' is installed"),
        ("acme", 1, {"speed": 1}, "acme-codecs 1.0 cannot read data written with these"),
    ],
)
def test_unavailable_recorded_codec_is_refused(plugin_site, name, version, config, complaint):
    _add_codec(plugin_site, "acme-codecs", "acme", module="acme_codec")
    with pytest.raises(PluginError, match=complaint):
        Registry().codec_from_record(name, version, config)


# -- providers ----------------------------------------------------------------------------------


def _installed():
    from importlib.metadata import entry_points

    return [e for g in ("codecs", "providers") for e in entry_points(group=f"penstock.{g}")]


def _third_party_only():
    """A registry of the distributions that the test installed."""
    return Registry([e for e in _installed() if e.dist.name.startswith("p-")])


def test_provider_with_the_highest_priority_is_chosen(plugin_site):
    low = _provider("low", claims="10 if issubclass(kind, dict) else None")
    high = _provider("high", claims="20 if kind is dict else None")
    _add_provider(plugin_site, "p-low", "low", module="p_low", source=low)
    _add_provider(plugin_site, "p-high", "high", module="p_high", source=high)
    providers = _third_party_only().providers
    sub = type("Sub", (dict,), {})
    assert providers.for_type(dict).name == "high"
    assert providers.for_type(sub).name == "low"
    assert providers.for_type(list) is None


def test_tie_is_an_error_naming_both_distributions_for_that_type_only(plugin_site):
    one = _provider("one", claims="{dict: 20, set: 5}.get(kind)")
    two = _provider("two", claims="{dict: 20, set: 6}.get(kind)")
    _add_provider(plugin_site, "p-one", "one", module="p_one", source=one)
    _add_provider(plugin_site, "p-two", "two", module="p_two", source=two)
    providers = _third_party_only().providers
    with pytest.raises(PluginError, match=r"builtins\.dict is claimed with priority 20") as caught:
        providers.for_type(dict)
    assert "p-one 1.0" in str(caught.value)
    assert "p-two 1.0" in str(caught.value)
    assert providers.for_type(set).name == "two"


def test_a_tie_with_a_shipped_provider_selects_it(plugin_site, caplog):
    source = _provider("greedy", claims="50", forms=["tensor", "own"])
    _add_provider(plugin_site, "p-greedy", "greedy", module="p_greedy", source=source)
    entries = [e for e in _installed() if e.name in {"greedy", "ndarray"}]
    ndarray = next(e for e in entries if e.name == "ndarray")
    import numpy as np

    providers = Registry(entries).providers
    assert ndarray.load()().claims(np.ndarray) == 50
    for _ in range(2):
        assert providers.for_type(np.ndarray).name == "ndarray"
    assert "provider 'greedy' of p-greedy 1.0 too: provider 'ndarray' of pen" in caplog.text
    assert len(caplog.records) == 1


def test_a_shipped_form_is_never_replaced(plugin_site, caplog):
    source = _provider("greedy", forms=["ndarray", "own"])
    _add_provider(plugin_site, "p-greedy", "greedy", module="p_greedy", source=source)
    registry = Registry([e for e in _installed() if e.name in {"greedy", "ndarray"}])
    for _ in range(2):
        assert registry.providers.for_form("ndarray").name == "ndarray"
    assert len(caplog.records) == 1
    states = {i.name: i.state for i in registry.listing()}
    assert states == {"greedy": "conflict", "ndarray": "ok"}


def test_broken_third_party_provider_is_skipped_with_one_warning(plugin_site, caplog):
    broken = "import no_such_module_anywhere"
    _add_provider(plugin_site, "p-bad", "bad", module="p_bad", source=broken)
    _add_provider(plugin_site, "p-good", "good", module="p_good", source=_provider("good", "1"))
    registry = _third_party_only()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [p.name for p in registry.providers.all()] == ["good"]
    assert len(caplog.records) == 1
    assert "provider 'bad' of p-bad 1.0" in caplog.text


def test_third_party_provider_with_failing_claims_is_skipped_with_one_warning(plugin_site, caplog):
    _add_provider(plugin_site, "p-bad", "bad", module="p_bad", source=_provider("bad", "1 // 0"))
    _add_provider(plugin_site, "p-good", "good", module="p_good", source=_provider("good", "1"))
    providers = _third_party_only().providers
    assert providers.for_type(dict).name == "good"
    assert providers.for_type(list).name == "good"
    assert len(caplog.records) == 1
    assert "provider 'bad' of p-bad 1.0 failed on dict" in caplog.text


def test_two_providers_of_one_name_stop_everything(plugin_site):
    for n in ("one", "two"):
        _add_provider(plugin_site, f"p-{n}", "same", module=f"p_{n}", source=_provider("same"))
    with pytest.raises(PluginError, match=r"p-one 1\.0.*p-two 1\.0|p-two 1\.0.*p-one 1\.0"):
        _ = _third_party_only().providers


def test_form_is_rebuilt_by_the_provider_that_declares_it(plugin_site):
    for name, forms in (("one", ["a", "both"]), ("two", ["b", "both"])):
        source = _provider(name, forms=forms)
        _add_provider(plugin_site, f"p-{name}", name, module=f"p_{name}", source=source)
    providers = _third_party_only().providers
    assert providers.for_form("a").name == "one"
    assert providers.for_form("b").name == "two"
    with pytest.raises(PluginError, match=r"form 'both' is declared by.*p-one.*p-two"):
        providers.for_form("both")
    with pytest.raises(PluginError, match=r"no installed provider rebuilds 'bothe'.*mean both"):
        providers.for_form("bothe")


def test_concurrent_threads_create_one_instance(plugin_site):
    source = _provider("slow") + (
        "        made = []\n"
        "        def __init__(self):\n"
        "            import time; time.sleep(0.02); self.made.append(1)\n"
    )
    _add_provider(plugin_site, "p-slow", "slow", module="p_slow", source=source)
    registry = _third_party_only()
    seen = []
    barrier = threading.Barrier(4)

    def ask():
        barrier.wait()
        seen.append(registry.providers.all()[0])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen[0].made == [1]
    assert all(provider is seen[0] for provider in seen)


def test_threads_get_names_while_a_signal_handler_interrupts_the_loading(plugin_site, monkeypatch):
    source = _provider("slow") + (
        "        def __init__(self):\n            import p_hook; p_hook.interrupt()\n"
    )
    _add_provider(plugin_site, "p-slow", "slow", module="p_slow", source=source)
    registry, answers = _third_party_only(), []

    def interrupt():  # like a saving handler that waits for the thread that writes the record
        asker = threading.Thread(
            target=lambda: answers.append(registry.shipper("provider slow")), daemon=True
        )
        asker.start()
        asker.join(10)

    monkeypatch.setitem(sys.modules, "p_hook", SimpleNamespace(interrupt=interrupt))
    registry.providers.all()
    assert answers == ["p-slow 1.0"]


def test_a_provider_that_cannot_be_imported_yet_is_tried_again(plugin_site):
    source = "    import p_later\n" + _provider("late")
    _add_provider(plugin_site, "p-late", "late", module="p_late", source=source)
    registry = _third_party_only()
    registry.preload()
    sys.modules["p_later"] = SimpleNamespace()
    try:
        assert [one.name for one in registry.providers.all()] == ["late"]
    finally:
        del sys.modules["p_later"]


def test_a_conflict_of_two_plugins_names_the_remedy(plugin_site):
    for name in ("first", "second"):
        _add_codec(plugin_site, f"{name}-codecs", "same", module=f"{name}_codec")
    hint = (
        "or choose one with the option prefer, "
        r'as in prefer=\{"codec": \{"same": "first-codecs"\}\}'
    )
    with pytest.raises(PluginError, match=hint):
        Registry().codec_class("same")


def test_a_taken_name_is_registered_only_on_request():
    names = {}
    exec(textwrap.dedent(_codec("zstd")), names)
    registry = Registry()
    with pytest.raises(PluginError, match=r"zstd' cannot be registered: penstock .* has it"):
        registry.register(names["Good"])
    registry.register(names["Good"], replace=True)
    assert registry.codec_class("zstd") is names["Good"]


BACKEND = """
    from penstock.backends.memory import MemoryBackend, MemoryConfig

    class Store(MemoryBackend):
        api_version = 1
        name = "{name}"
        closed = []
        def close(self):
            super().close()
            self.closed.append(True)
"""


def _listed(name):
    (info,) = [i for i in Registry().listing() if i.name == name]
    return info


@pytest.mark.parametrize("name", ["Ev-Upper", "ev_under"])
def test_backend_with_a_name_invalid_in_urls_is_refused_uncreated(plugin_site, name):
    target = {"penstock.backends": {name: "acme_store:Store"}}
    plugin_site.add("acme-store", target, acme_store=BACKEND.format(name=name))
    assert f"is called {name!r}, which no URL can begin with" in _listed(name).error
    with pytest.raises(PluginError, match=r"of acme-store 1\.0 cannot be used"):
        Registry().backend_class(name)
    assert sys.modules["acme_store"].Store.closed == []


@pytest.mark.parametrize("oldest", [0, 3, "1", True])
def test_an_impossible_oldest_readable_version_is_refused(plugin_site, oldest):
    source = _codec("acme", version=2) + f"        oldest_readable = {oldest!r}\n"
    _add_codec(plugin_site, "acme-codecs", "acme", module="acme_codec", source=source)
    with pytest.raises(PluginError, match=rf"oldest_readable = {oldest!r}: .* its version, 2"):
        Registry().codec("acme", {})


@pytest.mark.parametrize("claim", ["'always'", "2.5", "True"])
def test_claim_of_an_invalid_priority_is_an_error_naming_the_provider(plugin_site, claim):
    bad = _provider("bad", claims=f"{claim} if kind is dict else None")
    _add_provider(plugin_site, "p-bad", "bad", module="p_bad", source=bad)
    _add_provider(plugin_site, "p-good", "good", module="p_good", source=_provider("good", "1"))
    providers = _third_party_only().providers
    with pytest.raises(PluginError, match=r"^provider 'bad' of p-bad 1\.0 returned .* the prior"):
        providers.for_type(dict)
    assert providers.for_type(list).name == "good"


def test_unknown_name_near_to_none_lists_installed_ones_once(plugin_site):
    plugin_site.add_penstock()
    with pytest.raises(PluginError) as caught:
        Registry().codec_class("brotli")
    assert str(caught.value).count("zstd") == 1
    assert str(caught.value).endswith("): install the package that provides it")

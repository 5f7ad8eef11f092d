"""The example plugin is installed like any other, in a separate environment, and used there."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from tests.environments import Environment, missing_to_install

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "plugin"

pytestmark = pytest.mark.slow  # `test_docs` uses plugins that are found by their entry points


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    if missing_to_install():
        pytest.skip(f"needs {missing_to_install()}, to build and install the example")
    environment = Environment(tmp_path_factory.mktemp("plugin"))
    environment.install(EXAMPLE)
    return environment


EXPECTED = {
    ("backend", "sqlite", "penstock_example_plugin.sqlite_backend:SqliteBackend"),
    ("codec", "lzma", "penstock_example_plugin.lzma_codec:LzmaCodec"),
    ("provider", "array", "penstock_example_plugin.array_provider:ArrayProvider"),
    ("replayer", "lion", "penstock_example_plugin.lion:LionReplayer"),
}


def test_it_is_installed_not_imported_from_sources(environment):
    done = environment.code("import penstock_example_plugin as p; print(p.__file__)")
    assert Path(done.stdout.strip()).is_relative_to(environment.site)


def test_plugins_lists_all_four_with_their_distribution(environment):
    plugins = environment.plugins("--check")
    ours = [p for p in plugins if p["distribution"] == "penstock-example-plugin"]
    assert {(p["kind"], p["name"], p["target"]) for p in ours} == EXPECTED
    assert {p["version"] for p in ours} == {"1.2.0"}
    assert {p["state"] for p in ours} == {"ok"}
    assert [p for p in plugins if p["error"]] == []


CONFIG = """
backend = "sqlite://run.db"

[[rules]]
match = "weight"
codecs = [{ type = "lzma", preset = 0 }]
"""

# Two processes; the second knows only what the first stored.
SAVE = """
    from array import array
    import penstock, torch

    state = {"weight": torch.arange(50_000.0), "seen": array("q", range(1000)), "step": 3}
    with penstock.Checkpointer.from_config("penstock.toml") as ckpt:
        ckpt.save(state, step=3).result()
"""
RESTORE = """
    from array import array
    import penstock, torch

    state = {"weight": torch.zeros(50_000), "seen": array("q", bytes(8000)), "step": 0}
    with penstock.Checkpointer.from_config("penstock.toml") as ckpt:
        ckpt.restore(state)
        assert ckpt.verify().ok
    assert torch.equal(state["weight"], torch.arange(50_000.0))
    assert state["seen"] == array("q", range(1000))
    assert state["step"] == 3
"""


def test_configuration_alone_saves_and_restores_with_all_three(environment):
    (environment.folder / "penstock.toml").write_text(CONFIG)
    environment.code(SAVE)
    environment.code(RESTORE)
    shown = environment.program("-m", "penstock", "show", "sqlite://run.db", "--json").stdout
    assert "lzma" in shown
    assert "array" in shown
    environment.program("-m", "penstock", "doctor", "sqlite://run.db", "--no-probe")


def test_its_own_tests_pass(environment):
    # Only the tests: beside the sources they could pass without an install.
    shutil.copytree(EXAMPLE / "tests", environment.folder / "tests")
    options = ("-rs", "-p", "no:cacheprovider", "-W", "error", "--rootdir", environment.folder)
    # SQLite syncs its file with each commit, and there are thousands: in memory that costs nothing.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        done = environment.program("-m", "pytest", *options, f"--basetemp={folder}/runs", "tests")
    assert "passed" in done.stdout
    left_out = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("declare" in line for line in left_out), left_out


# -- a plugin for another version of the contract -----------------------------------------------

FOREIGN = """
import penstock_example_plugin.array_provider as array
import penstock_example_plugin.lion as lion
import penstock_example_plugin.lzma_codec as lzma
import penstock_example_plugin.sqlite_backend as sqlite


class Backend(sqlite.SqliteBackend):
    api_version = {version}
    name = "{name}"


class Codec(lzma.LzmaCodec):
    api_version = {version}
    name = "{name}"


class Provider(array.ArrayProvider):
    api_version = {version}
    name = "{name}"
    forms = ("{name}",)

    def claims(self, kind, /):
        raise AssertionError("a provider for another contract was asked")


class Replayer(lion.LionReplayer):
    api_version = {version}
    name = "{name}"

    def handles(self, optimizer, /):
        raise AssertionError("a replayer for another contract was asked")
"""


@pytest.fixture
def foreign(environment):
    """One distribution for a newer contract than ours, one for an older; removed afterwards."""
    added = []
    for name, version in (("newer", 2), ("older", 0)):
        module = environment.site / f"{name}_plugin.py"
        module.write_text(FOREIGN.format(name=name, version=version))
        info = environment.site / f"{name}_plugin-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 0.1\n"
        )
        (info / "entry_points.txt").write_text(
            "".join(
                f"[penstock.{kind.lower()}s]\n{name} = {name}_plugin:{kind}\n"
                for kind in ("Backend", "Codec", "Provider", "Replayer")
            )
        )
        added += [module, info]
    yield {"newer": 2, "older": 0}
    for path in added:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_plugins_for_another_contract_are_listed_with_the_reason(environment, foreign):
    plugins = environment.plugins("--check", check=False)
    failed = {(p["kind"], p["name"]): p["error"] for p in plugins if p["state"] == "failed"}
    kinds = ("backend", "codec", "provider", "replayer")
    assert set(failed) == {(kind, name) for kind in kinds for name in foreign}
    for (kind, name), error in failed.items():
        assert f"{kind} {name!r} of {name}-plugin 0.1 cannot be used" in error
        assert f"is for version {foreign[name]} of the" in error
        assert "this Penstock has version 1" in error
        remedy = "penstock" if foreign[name] > 1 else f"{name}-plugin"
        assert error.endswith(f"upgrade {remedy}")
    assert {p["state"] for p in plugins if p["distribution"] == "penstock-example-plugin"} == {"ok"}


REFUSED = """
    import sys
    import penstock

    for name in sys.argv[1:]:
        for options in (
            {"backend": f"{name}://run.db"},
            {"backend": "memory://", "rules": [{"match": "**", "codecs": [name]}]},
        ):
            try:
                with penstock.Checkpointer.from_config(options) as ckpt:
                    ckpt.save({"a": 1}, step=1).result()
            except penstock.PluginError as error:
                print(error)
"""


def test_plugins_for_another_contract_break_only_their_users(environment, foreign):
    (environment.folder / "penstock.toml").write_text(CONFIG.replace("run.db", "beside.db"))
    saved = environment.code(SAVE)
    for name in foreign:
        assert saved.stderr.count(f"provider '{name}' of {name}-plugin 0.1") == 1
    assert saved.stderr.count("continuing without it") == 2
    environment.code(RESTORE)
    lines = iter(environment.code(REFUSED, *foreign).stdout.splitlines())
    for name, version in foreign.items():
        for kind in ("Backend", "Codec"):
            line = next(lines)
            assert f"{kind.lower()} '{name}' of {name}-plugin 0.1" in line
            assert f"for version {version} of the {kind} contract" in line
    assert list(lines) == []

import json
import logging
import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.codecs.zstd import ZstdCodec
from penstock.core.config.model import (
    CheckpointerConfig,
    json_schema,
    load_config,
    parse_size,
)
from penstock.core.config.plugin_choice import BackendConfig
from penstock.core.errors import ConfigError, PluginError, StorageError
from penstock.core.plugins.registry import Registry
from penstock.core.save.rules import codec_chain
from penstock.core.storage.open import open_backend

ROOT = Path(__file__).resolve().parents[3]

EXAMPLE = {
    "backend": {"type": "posix", "path": "runs/gpt", "direct_io": "off"},
    "rules": [
        {"match": "optimizer/**", "codecs": ["lz4", {"type": "zstd", "level": 5}]},
        {"match": ["model/**", "ema/**"], "codecs": []},
    ],
    "retention": {"keep_last": 3, "keep_every": 1000},
    "staging_bytes": "4 GiB",
    "mode": "lazy",
}


@pytest.fixture
def registry(plugin_site):
    plugin_site.add_penstock()
    return Registry()


# -- loading ------------------------------------------------------------------------------------


def test_mapping_becomes_a_configuration():
    config = load_config(EXAMPLE)
    assert config.backend == BackendConfig(type="posix", path="runs/gpt", direct_io="off")
    assert config.backend.options == {"path": "runs/gpt", "direct_io": "off"}
    assert config.staging_bytes == 4 << 30
    assert config.mode == "lazy"
    assert config.rules[0].match == ("optimizer/**",)
    assert [(c.type, c.options) for c in config.rules[0].codecs] == [
        ("lz4", {}),
        ("zstd", {"level": 5}),
    ]
    assert config.rules[1].match == ("model/**", "ema/**")
    assert config.retention.keep_every == 1000


# -- refusing -----------------------------------------------------------------------------------


def test_wrong_values_are_reported_by_place():
    for changes, line in [
        ({"mod": "lazy"}, "mod: unknown key; did you mean mode?"),
        ({"zzz": 1}, "zzz: unknown key; known names: allow_pickle, backend"),
        ({"retention": {"keep_lats": 1}}, "retention.keep_lats: unknown key; did you mean keep_l"),
        (
            {"rules": [{"match": "a", "codecs": [], "macth": "b"}]},
            "rules[0].macth: unknown key; did you mean match?",
        ),
        ({"rules": [{"match": "a"}]}, "rules[0].codecs: Field required"),
        (
            {"rules": [{"match": "a", "codecs": ["zstd", {"level": 1}]}]},
            "rules[0].codecs[1].type: Field required",
        ),
        ({"mode": "asink"}, "mode: Input should be 'blocking', 'async' or 'lazy'"),
        ({"staging_bytes": "4 GiBs"}, "staging_bytes: not a size: give bytes, or a number with"),
        ({"staging_bytes": -1}, "staging_bytes: Input should be greater than or equal to 0"),
        ({"chunk_bytes": 5000}, "chunk_bytes: Input should be a multiple of 4096"),
        (
            {"chunk_bytes": "1 MB"},
            'chunk_bytes: Input should be a multiple of 4096: "1 MiB" is one, "1 MB" is not',
        ),
        ({"retention": {}}, "retention: needs keep_last, keep_every, keep_best or keep_within"),
        (
            {"retention": {"keep_best": 2}},
            "retention: keep_best, best_metric and best_mode go together",
        ),
        (
            {"retention": {"keep_last": 2, "best_metric": "loss"}},
            "retention: keep_best, best_metric and best_mode go together",
        ),
        (
            {"retention": {"keep_best": 1, "best_metric": "loss", "best_mode": "low"}},
            "retention.best_mode",
        ),
        (
            {"retention": {"keep_within": "a week"}},
            "retention.keep_within: 'a week' is not a time such as 90s",
        ),
        ({"retention": {"keep_within": "0s"}}, "retention.keep_within"),
        ({"retention": {"keep_within": float("nan")}}, "retention.keep_within"),
        ({"retention": {"keep_last": 0}}, "retention.keep_last: Input should be greater than"),
        ({"backend": {"path": "x"}}, "backend.type: Field required"),
        ({"backend": 7}, "backend: Input should be a path, a URL, a table with `type`, or an open"),
        ({"backend": None}, "backend: Input should be a path, a URL, a table with `type`, or an"),
        ({"fence_timeout_s": 0}, "fence_timeout_s: Input should be greater than 0"),
        ({"grace_s": 0}, "grace_s: has to be above 0, because a save that makes no progress"),
        ({"grace_s": "long"}, "grace_s: Input should be a valid number"),
        ({"workers": 0}, "workers: Input should be greater than or equal to 1"),
        ({"rules": {"match": "a", "codecs": []}}, "rules: Input should be a list"),
        (
            {"rules": [{"match": "a", "codecs": "atuo"}]},
            "rules[0].codecs: Input should be a list; did you mean auto?",
        ),
        (
            {"rules": [{"match": "a", "codecs": ["zstd", "auto"]}]},
            'rules[0].codecs: "auto" must not be in a list: write codecs = "auto"',
        ),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_config({"backend": "x", **changes})
        assert f"\n  {line}" in str(caught.value)


def test_messages_never_show_values():
    wrong = {
        "backend": {"path": "s3cret"},
        "mode": "s3cret",
        "staging_bytes": "s3cret",
        "workers": "s3cret",
        "unknown": "s3cret",
        "retention": "s3cret",
    }
    with pytest.raises(ConfigError) as caught:
        load_config(wrong)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_wrong_file_is_refused_by_name(tmp_path):
    for name, text, complaint in [
        ("a.toml", "mode = ", "is not valid"),
        ("a.json", "{", "is not valid"),
        ("a.yaml", "a: [", "is not valid"),
        ("a.yaml", "- 1", "holds a list, not a table"),
        ("a.yaml", "", "holds a NoneType, not a table"),
        ("a.ini", "", "its suffix is .ini: use .toml, .yaml, .yml or .json"),
        ("plain", "", "its suffix is missing"),
        ("a.toml", "mod = 1", "mod: unknown key"),
    ]:
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(path) in str(caught.value)
        assert complaint in str(caught.value)


def test_a_yaml_error_does_not_quote_the_file(tmp_path):
    (tmp_path / "a.yaml").write_text('backend:\n  options:\n    secret: "hunter2SECRET\n')
    with pytest.raises(ConfigError, match=r"is not valid.* in line 4, column 1") as caught:
        load_config(tmp_path / "a.yaml")
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))


def test_a_configuration_shows_no_credentials():
    options = {"key": "AKIASECRET", "secret": "hunter2SECRET"}
    table = {"type": "fsspec", "url": "s3://u:SECRET@b/r", "options": options}
    for backend in (
        table,
        {"type": "tiered", "fast": "/nvme", "durable": table},
        "sftp://user:SECRET@host/run",
    ):
        config = load_config({"backend": backend})
        shown = f"{config!r} {config} {config.backend!s} {config.backend!r}"
        assert "SECRET" not in (shown if isinstance(backend, dict) else f"{config!r} {config}")
    assert "type='fsspec', options=['options', 'url']" in repr(load_config({"backend": table}))


def test_yaml_cannot_make_objects(tmp_path):
    (tmp_path / "a.yaml").write_text("backend: !!python/object/apply:os.getcwd []")
    with pytest.raises(ConfigError, match="is not valid"):
        load_config(tmp_path / "a.yaml")


# -- sizes --------------------------------------------------------------------------------------


def test_size_with_a_unit_is_bytes():
    for text, size in [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("1 kB", 1000),
        ("2KiB", 2048),
        ("1.5 MiB", 3 << 19),
        (" 4 GiB ", 4 << 30),
        ("4gib", 4 << 30),
        ("1 TB", 10**12),
        ("1 TiB", 1 << 40),
    ]:
        assert parse_size(text) == size


# -- schema -------------------------------------------------------------------------------------


def test_json_schema_names_every_key_and_both_forms_of_a_codec():
    schema = json_schema()
    assert set(schema["properties"]) == set(CheckpointerConfig.model_fields)
    assert schema["additionalProperties"] is False
    forms = schema["$defs"]["CodecConfig"]["anyOf"]
    assert [form["type"] for form in forms] == ["string", "object"]
    assert {"type": "string"} in schema["properties"]["backend"]["oneOf"]
    json.dumps(schema)


# -- rules --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "error", "complaint"),
    [
        ("zstt", PluginError, "did you mean zstd"),
        ({"type": "zstd", "level": 99}, ConfigError, "level: Input should be less than"),
        ({"type": "zstd", "lvl": 3}, ConfigError, "lvl: unknown key; did you mean level"),
        ({"type": "lz4", "level": 3, "acceleration": 2}, ConfigError, "not both"),
    ],
)
def test_rule_with_a_wrong_codec_is_refused(registry, codec, error, complaint):
    config = load_config({"backend": "x", "rules": [{"match": "a", "codecs": [codec]}]})
    with pytest.raises(error) as caught:
        codec_chain(config.rules[0], registry)
    assert complaint in str(caught.value)


# -- opening ------------------------------------------------------------------------------------


@pytest.fixture
def opened(registry):
    """Opens with our own backends, and closes."""
    backends = []

    def open_one(spec, **options):
        backends.append(open_backend(spec, registry, **options))
        return backends[-1]

    yield open_one
    for backend in backends:
        backend.close()


@pytest.mark.parametrize("scheme", ["posix://", "uring://"])
def test_explicit_scheme_opens_that_backend(opened, tmp_path, scheme):
    if scheme == "uring://":
        _skip_without_uring(opened, tmp_path)
    backend = opened(f"{scheme}{tmp_path}/run")
    assert backend.name == scheme.removesuffix("://")
    backend.publish("a", b"1")
    assert (tmp_path / "run" / "a").read_bytes() == b"1"


def _skip_without_uring(opened, tmp_path):
    try:
        opened(f"uring://{tmp_path}")
    except StorageError as error:
        pytest.skip(f"needs io_uring: {error}")


@pytest.mark.parametrize("form", ["path", "Path", "file", "table", "config"])
def test_every_form_of_a_local_folder_opens_it(opened, tmp_path, form):
    root = tmp_path / "a run%20"
    spec = {
        "path": str(root),
        "Path": root,
        "file": f"file://{tmp_path}/a%20run%2520?direct_io=off",
        "table": {"type": "posix", "path": str(root)},
        "config": BackendConfig(type="posix", path=str(root)),
    }[form]
    opened(spec).publish("a", b"1")
    assert (root / "a").read_bytes() == b"1"


def test_folder_that_must_exist_is_not_made(opened, tmp_path):
    for spec in (tmp_path / "no", f"posix://{tmp_path}/no", {"type": "posix", "path": "no/no"}):
        with pytest.raises(ConfigError, match="there is no folder"):
            opened(spec, must_exist=True)
    assert list(tmp_path.glob("no")) == []
    (tmp_path / "run").mkdir()
    assert opened(tmp_path / "run", must_exist=True).list("") == []


def test_wrong_spec_is_refused(opened):
    for spec, error, complaint in [
        ("nope://b/run", ConfigError, "no installed backend serves nope://: install "),
        ("s4://b/run", ConfigError, "posix, s3, s3a, tiered, uring, and those of fsspec"),
        ("gss://b/run", ConfigError, "did you mean gs or "),
        ("s3://", ConfigError, "url: it should be s3://bucket/folder"),
        ("s3://key:word@bucket/run", ConfigError, "credentials do not belong in the URL"),
        ("s3://bucket/run?secret=word", ConfigError, "s3://bucket/run: secret: credentials"),
        ("nope://b/run", ConfigError, "install the package that provides it; known names: "),
        ("posx:///a", ConfigError, "did you mean posix?"),
        ("my_store://h/run", ConfigError, "my_store:// does not begin a URL: a scheme has letters"),
        ("7z:///a", ConfigError, "write ./7z:/... for a folder"),
        ("posix:///a?dirct_io=on", ConfigError, "dirct_io: unknown key; did you mean direct_io?"),
        ("posix:///a?direct_io=on&direct_io=off", ConfigError, "'direct_io' is given twice"),
        ({"type": "posx", "path": "a"}, PluginError, "no backend called 'posx' is installed; did"),
        ({"type": "posix", "pth": "a"}, ConfigError, "options of backend 'posix'"),
        ({"path": "a"}, ConfigError, "type: Field required"),
        ("", ConfigError, "path"),
    ]:
        with pytest.raises(error) as caught:
            opened(spec)
        assert complaint in str(caught.value)


def test_urls_are_shown_without_credentials(opened):
    with pytest.raises(ConfigError) as caught:
        opened("s3://key:s3cret@bucket/run?token=s3cret")
    assert "s3cret" not in str(caught.value)
    assert "s3://bucket/run" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        opened("posix:///a?token=s3cret")
    assert "s3cret" not in str(caught.value)


def test_third_party_backend_is_opened_by_its_scheme(plugin_site):
    plugin_site.add(
        "acme-store",
        {"penstock.backends": {"acme": "acme_store:Store"}},
        acme_store="""
            from penstock.core.abc import PluginConfig
            from penstock.backends.memory import MemoryBackend

            class Config(PluginConfig):
                url: str
                region: str = "eu"

            class Store(MemoryBackend):
                api_version = 1
                name = "acme"
                from_url = classmethod(lambda cls, url, options: Config(url=url, **options))
                Config = Config
                def __init__(self, config, /):
                    if config.region == "moon":
                        raise RuntimeError("too far")
                    self.asked = config
        """,
    )
    registry = Registry()
    backend = open_backend("acme://bucket/run?region=us", registry)
    assert backend.inner.asked.model_dump() == {"url": "acme://bucket/run", "region": "us"}
    with pytest.raises(
        PluginError, match=r"backend 'acme' \(acme_store\.Store of acme-store 1\.0\).*too far"
    ):
        open_backend("acme://bucket?region=moon", registry)


_FALL_BACK = """
import sys, logging
from penstock.core.storage.open import open_backend
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
for _ in range(3):
    backend = open_backend(sys.argv[1])
    print(backend.name)
    backend.close()
"""


@pytest.mark.process
def test_path_falls_back_to_threads_with_one_warning_that_says_why(plugin_site, tmp_path):
    plugin_site.add_penstock()
    path = os.pathsep.join([str(plugin_site.folder), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "PENSTOCK_DISABLE_URING": "EPERM"}
    done = subprocess.run(
        [sys.executable, "-c", _FALL_BACK, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert sorted(lines)[1:] == ["posix"] * 3
    (warning,) = (line for line in lines if line != "posix")
    assert warning.startswith("WARNING uring is not used, so posix takes its place")
    assert "EPERM" in warning


def test_only_what_uring_cannot_do_falls_back(plugin_site, tmp_path, caplog):
    plugin_site.add(
        "acme-store",
        {
            "penstock.backends": {
                "uring": "acme_uring:Store",
                "posix": "penstock.backends.posix:PosixBackend",
            }
        },
        acme_uring="""
            from penstock.core.errors import StorageError
            from penstock.backends.posix import PosixBackend

            class Store(PosixBackend):
                api_version = 1
                name = "uring"
                def __init__(self, config, /):
                    raise StorageError("the disk is on fire")
        """,
    )
    from importlib.metadata import entry_points

    mine = [e for e in entry_points(group="penstock.backends") if e.dist.name == "acme-store"]
    with caplog.at_level(logging.WARNING), pytest.raises(StorageError, match="on fire"):
        open_backend(tmp_path, Registry(mine))
    assert caplog.records == []


@pytest.mark.process
def test_importing_the_configuration_imports_neither_torch_nor_plugins(tmp_path):
    code = (
        "import sys, penstock.core.config\n"
        "heavy = {'torch', 'numpy', 'yaml', 'typer', 'rich', 'xxhash', 'liburing'}\n"
        "plugins = {'penstock.codecs', 'penstock.backends', 'penstock.providers'}\n"
        "print(sorted((heavy | plugins) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_from_config_takes_live_objects(tmp_path, monkeypatch):
    class Own(ZstdCodec):
        api_version = 1
        name = "own"

    path, events, registry = tmp_path / "penstock.toml", [], Registry()
    registry.register(Own)
    monkeypatch.setenv("OWN_CODEC", "own")
    path.write_text('backend = "memory://"\n[[rules]]\nmatch = "w"\ncodecs = ["${OWN_CODEC}"]\n')
    with penstock.Checkpointer.from_config(path, registry=registry, on_event=events.append) as ckpt:
        ckpt.save({"w": np.zeros(5000)}, 1, mode="blocking")
        assert list(ckpt.info(1).codecs) == ["own"]
    assert [type(event).__name__ for event in events][:1] == ["SaveEvent"]


@pytest.mark.parametrize("every", ["auto", 1, 500])
def test_a_schedule_takes_a_number_of_steps_or_auto(every):
    config = load_config({"backend": "memory://", "schedule": {"every": every}})
    assert config.schedule.every == every
    assert config.schedule.overhead == 0.01


@pytest.mark.parametrize(
    ("schedule", "place"),
    [
        ({"every": 0}, "schedule.every"),
        ({"every": "often"}, "schedule.every"),
        ({"every": True}, "schedule.every"),
        ({"overhead": 0}, "schedule.overhead"),
        ({"overhead": 2}, "schedule.overhead"),
        ({"mtbf_s": -1}, "schedule.mtbf_s"),
        ({"mtbf": 3}, "mtbf_s"),
    ],
)
def test_a_wrong_schedule_is_refused_by_its_place(schedule, place):
    with pytest.raises(ConfigError, match=place) as caught:
        load_config({"backend": "memory://", "schedule": schedule})
    assert "<" not in str(caught.value), "no internal name"

"""`penstock bench` and `penstock tune`: the figures, the choice, and no leftovers."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing

import pytest
from tests import interpreters
from tests.core.cli.bench_reports import figures, row, write_report
from tests.core.cli.command import tree_of

import penstock
from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.core.cli.bench.measurement import cases_of
from penstock.core.cli.bench.raw import measure_limit
from penstock.core.cli.bench.scratch import Below, scratch_place, spec_with
from penstock.core.cli.bench.verdict import limit_of
from penstock.core.cli.commands.bench import _read
from penstock.core.cli.output.runs_on_disk import local_root
from penstock.core.config.model import load_config
from penstock.core.config.plugin_choice import BackendConfig
from penstock.core.storage.open import open_backend

SMALL = ("--size", "1MiB", "--seconds", "1s")
ONCE = ("--size", "1MiB", "--seconds", "600s", "--rounds", "1")


@pytest.fixture
def measured(tmp_path):
    """A function that writes what `bench --json` prints, and returns the file and the URL."""

    def write(*rows, **more):
        file = tmp_path / "bench.json"
        write_report(file, f"file://{tmp_path}/run", *rows, **more)
        return file, f"posix://{tmp_path}/run"

    return write


# -- bench ----------------------------------------------------------------------------------------


def test_bench_measures_engine_and_raw_limit_and_leaves_no_files(call, tmp_path):
    with penstock.Checkpointer(f"posix://{tmp_path}") as ckpt:
        ckpt.save({"number": 1}, step=1, mode="blocking")
    before = tree_of(tmp_path)
    done = call("bench", f"posix://{tmp_path}", *ONCE, "--json")
    assert (done.code, done.err) == (0, "")
    report = done.json
    assert (report["engine"], report["bytes"], report["local"]) == ("posix", 1 << 20, True)
    assert [raw["blobs"] for raw in report["raw"]] == [1, 4]
    assert all(raw["write_bytes_per_s"] > 0 < raw["read_bytes_per_s"] for raw in report["raw"])
    options = {row["option"] for row in report["rows"]}
    assert options >= {None, "chunk_bytes", "workers", "direct_io", "tensor_bytes", "processes"}
    assert all(min(row["median"].values()) >= 0 for row in report["rows"])
    assert {len(row["rounds"]) for row in report["rows"]} == {1}
    assert " limits saves (" in report["limit"]
    after = tree_of(tmp_path)
    assert {path: after[path] for path in after if path.is_file()} == {
        path: before[path] for path in before if path.is_file()
    }
    assert after.keys() == before.keys()


def test_bench_draws_a_table_and_names_the_limit(call, tmp_path):
    done = call("bench", f"posix://{tmp_path}/run", *SMALL)
    assert (done.code, done.err) == (0, "")
    assert "posix" in done.out.splitlines()[0]
    assert "\nplain loop, 4 blobs " in done.out
    assert "\ndefault " in done.out
    assert " limits saves (" in done.out.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_bench_of_a_store_without_files_uses_its_backend(call):
    done = call("bench", "memory://bench", *SMALL, "--json")
    assert done.code == 0
    assert (done.json["local"], done.json["cold"]) == (False, False)
    assert "processes" not in {row["option"] for row in done.json["rows"]}
    with penstock.Checkpointer("memory://bench") as ckpt:
        assert ckpt.steps() == []


@pytest.mark.parametrize("given", ["url", "table"])
def test_options_set_by_the_user_are_kept(tmp_path, given):
    spec = f"posix://{tmp_path}?direct_io=off&parallel=8"
    if given == "table":
        spec = BackendConfig(type="posix", path=str(tmp_path), direct_io="off", parallel=8)
    with closing(open_backend(spec)) as backend:
        cases = cases_of(spec, {"chunk_bytes": 4096}, backend)
        assert {"direct_io", "parallel", "chunk_bytes"}.isdisjoint(case.option for case in cases)
        assert {"workers", "allocate_bytes"} <= {case.option for case in cases}
        assert len(set(cases)) == len(cases)
        changed = spec_with(spec, backend, {"allocate_bytes": 0})
    with closing(open_backend(changed)) as backend:
        assert not backend.direct_io
        assert local_root(backend) == tmp_path


def test_options_of_a_configuration_are_not_swept(call, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('backend = "memory://configured"\nchunk_bytes = 4096\nworkers = 1\n')
    rows = call("bench", config, *ONCE, "--json").json["rows"]
    assert {row["option"] for row in rows} == {None, "block_bytes", "tensor_bytes"}


def test_bench_refuses_a_run_in_tiers_and_names_them(call, tmp_path):
    done = call("bench", f"tiered://?fast={tmp_path}/fast&durable={tmp_path}/durable", *SMALL)
    assert done.code == 1
    assert f"{tmp_path}/fast" in done.err
    assert "by its own URL" in done.err


def test_bench_refuses_a_size_without_room(call, tmp_path):
    done = call("bench", f"posix://{tmp_path}/run", "--size", "4TiB")
    assert done.code == 1
    assert "do not fit into" in done.err
    assert list(tmp_path.iterdir()) == []


def test_bench_of_a_file_fails_without_touching_it(call, tmp_path):
    (tmp_path / "file").write_text("mine")
    done = call("bench", f"posix://{tmp_path}/file", *SMALL)
    assert done.code == 1
    assert "file" in done.err
    assert (tmp_path / "file").read_text() == "mine"


class _Failing(MemoryBackend):
    def read(self, requests):
        raise KeyError("no such shelf")


def test_a_failed_loop_leaves_no_files():
    backend = _Failing(MemoryConfig())
    with pytest.raises(KeyError, match="no such shelf"):
        measure_limit(backend, 1 << 20, root=None, blobs=2, stuck_s=60)
    assert list(backend.list("")) == []


def save_in_place(url, error):
    with scratch_place(url) as (backend, prefix):
        with penstock.Checkpointer(Below(backend, prefix)) as ckpt:
            ckpt.save({"number": 1}, step=1, mode="blocking")
            assert ckpt.steps() == [1]
        assert list(backend.list(prefix))
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, penstock.StorageError])
def test_the_place_is_cleared_after_an_error(tmp_path, error):
    with pytest.raises(error):
        save_in_place(f"posix://{tmp_path}/run", error)
    assert list(tmp_path.iterdir()) == []


def test_a_leftover_place_is_garbage_of_the_run(tmp_path):
    with penstock.Checkpointer(f"posix://{tmp_path}") as ckpt:
        ckpt.save({"number": 1}, step=1, mode="blocking")
        with scratch_place(f"posix://{tmp_path}") as (backend, prefix):
            with penstock.Checkpointer(Below(backend, prefix)) as inner:
                inner.save({"number": 2}, step=2, mode="blocking")
            assert ckpt.steps() == [1]
            for info in backend.list(prefix):
                os.utime(tmp_path / info.name, (1, 1))
            assert ckpt.prune().uids == (prefix.split("/")[1],)
            assert list(backend.list(prefix)) == []
        assert ckpt.load()["number"] == 1


@pytest.mark.process
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_terminated_bench_leaves_no_files(tmp_path, number):
    root = tmp_path / "not" / "there"
    process = interpreters.start(
        "-c",
        "from penstock.core.cli.main import main; main()",
        *("bench", f"posix://{root}", "--size", "64MiB", "--seconds", "600s"),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    # A commit record of the sweep: then the engine is at work.
    while process.poll() is None and not any("commits" in to for _, to, _ in os.walk(root)):
        time.sleep(0.001)
    process.send_signal(number)
    assert process.wait(120) != 0
    assert list(tmp_path.iterdir()) == []


# -- what limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("default", "rows", "what", "why"),
    [
        (figures(190, 190), [], "the store limits", "(95% of the raw limit)"),
        (figures(cores=1.9), [], "the CPU limits", "(1.9 of 2 cores busy, 50% of the raw limit)"),
        (
            figures(),
            [row("engine", "chunk_bytes", 4 << 20, *[figures(150, 150)] * 2)],
            "the configuration limits",
            "(1.50 times as fast with chunk_bytes = 4.0 MiB, 50% of the raw limit)",
        ),
        (
            figures(),
            [],
            "waiting between requests limits",
            "(0.1 of 2 cores busy, 50% of the raw limit)",
        ),
    ],
)
def test_limit_is_named(measured, default, rows, what, why):
    report = _read(*measured(*rows, default=[default] * 2))
    text = limit_of(report).lower()
    assert text.startswith(f"{what} saves {why}, and {what} restores {why}.".lower())
    assert ("raise --seconds" in text) == (what.startswith("waiting"))


def test_wait_advice_fits_the_options_tried(measured):
    tried = row("engine", "chunk_bytes", 4 << 20, *[figures()] * 2)
    text = limit_of(_read(*measured(tried, default=[figures()] * 2)))
    assert text.endswith(
        "No option that was tried makes saves or restores faster: try a larger state (--size)."
    )


def test_advice_names_only_waiting_work(measured):
    tried = row("engine", "chunk_bytes", 4 << 20, *[figures(100, 150)] * 2)
    text = limit_of(_read(*measured(tried, default=[figures()] * 2)))
    assert "the configuration limits restores" in text
    assert text.endswith(
        "No option that was tried makes saves faster: try a larger state (--size)."
    )


# -- tune -----------------------------------------------------------------------------------------


def test_tune_sets_better_options_and_says_why(call, measured, tmp_path):
    file, url = measured(
        row("engine", "chunk_bytes", 4 << 20, figures(120), figures(130), figures(125)),
        row("engine", "chunk_bytes", 64 << 20, figures(140), figures(150), figures(145)),
        row("engine", "workers", 1, figures(103), figures(103), figures(103)),
        row("engine", "block_bytes", 4096, figures(90), figures(120), figures(120)),
        row("backend", "parallel", 16, *[figures(150, 80)] * 3),
        row("backend", "direct_io", "off", *[figures(100, 200)] * 3),
        row("processes", "processes", 2, *[figures(200, 200)] * 3),
    )
    out = tmp_path / "penstock.toml"
    done = call("tune", url, "--from", file, "--out", out)
    assert (done.code, done.err) == (0, "")
    assert "chunk_bytes = 64.0 MiB, direct_io = off" in done.out
    config = load_config(out)
    assert config.backend == f"{url}?direct_io=off"
    assert config.model_fields_set == {"backend", "chunk_bytes"}
    assert config.chunk_bytes == 64 << 20
    assert "save 1.50, restore 1.00" in out.read_text()
    with penstock.Checkpointer.from_config(out) as ckpt:
        ckpt.save({"number": 1}, step=1, mode="blocking")


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([], "No option was measured twice, so none is set: raise --seconds or --rounds."),
        (
            [row("engine", "workers", 1, *[figures(104)] * 3)],
            "None of these was clearly better (by more than 5%): workers = 1.",
        ),
        (  # one round does not show the noise
            [row("engine", "workers", 1, figures(500))],
            "No option was measured twice, so none is set: raise --seconds or --rounds.",
        ),
    ],
)
def test_tune_sets_nothing_if_nothing_is_better(call, measured, rows, why):
    file, url = measured(*rows)
    done = call("tune", url, "--from", file)
    assert done.code == 0
    assert done.out.splitlines()[-2:] == [
        f"# {why}",
        f'backend = "{url}"',
    ]


def test_tune_keeps_the_table_of_a_configuration_and_its_variables(call, measured, tmp_path):
    file, _ = measured(row("backend", "direct_io", "off", *[figures(200)] * 3))
    config = tmp_path / "run.toml"
    config.write_text(f'[backend]\ntype = "posix"\npath = "${{HERE:-{tmp_path}}}/run"\n')
    text = call("tune", config, "--from", file).out
    assert f'path" = "${{HERE:-{tmp_path}}}/run", "direct_io" = "off"' in text
    (tmp_path / "new.toml").write_text(text)
    assert load_config(tmp_path / "new.toml").backend.options["path"] == f"{tmp_path}/run"


def test_tune_replaces_a_file_only_with_force(call, measured, tmp_path):
    file, url = measured()
    out = tmp_path / "penstock.toml"
    out.write_text("mine")
    done = call("tune", url, "--from", file, "--out", out)
    assert (done.code, out.read_text()) == (1, "mine")
    assert "--force" in done.err
    assert call("tune", url, "--from", file, "--out", out, "--force").code == 0
    assert load_config(out).backend == url


def test_tune_refuses_input_not_from_bench(call, measured, tmp_path):
    file, _ = measured()
    other = call("tune", f"posix://{tmp_path}/other", "--from", file)
    assert (other.code, other.out) == (1, "")
    assert f"measurements of file://{tmp_path}/run, not of" in other.err
    for text, why in [("{}", "missing or wrong: .*url"), ("x", "it is not a JSON object")]:
        file.write_text(text)
        printed = call("tune", f"posix://{tmp_path}/run", "--from", file).err
        assert re.search(rf"is not the output of `penstock bench --json`: {why}", printed)


def test_tune_can_run_bench(call, tmp_path):
    done = call("tune", f"posix://{tmp_path}/run", *SMALL, "--json")
    assert (done.code, done.err) == (0, "")
    assert f'backend = "posix://{tmp_path}/run' in done.json["configuration"]
    assert list(tmp_path.iterdir()) == []

"""The benchmarks page matches its generator's output for the JSON of one run."""

import json
import re
import sys
import textwrap
from pathlib import Path

import pytest
from tests import interpreters

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "benchmarks" / "recorded" / "run.json"


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    before = set(sys.modules)
    import page

    yield page
    for name in ("bench", "page"):  # names that others may want
        if name not in before:
            del sys.modules[name]


def test_the_page_and_its_charts_match_the_generator_and_recorded_run(page):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    edited = [
        name
        for name, text in page.made([RUN]).items()
        if (ROOT / name).read_text(encoding="utf-8") != text
    ]
    assert not edited, "run benchmarks/page.py; edit benchmarks/page.md instead"


def test_runs_of_two_commits_make_no_page(page):
    one = json.loads(RUN.read_text(encoding="utf-8"))
    other = {**one, "about": {**one["about"], "commit": "0123456789ab"}}
    with pytest.raises(SystemExit, match=r"different commits: .*0123456789ab"):
        page.Run([one, other])


def test_a_run_with_a_missing_part_keeps_the_page(page, tmp_path):
    run = json.loads(RUN.read_text(encoding="utf-8"))
    del run["parts"]["loop"]
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(SystemExit, match="not measured: 'loop'"):
        page.publish([tmp_path / "run.json"], tmp_path / "repository")
    assert not (tmp_path / "repository").exists()


def test_a_failed_contender_keeps_its_row_with_the_reason(page):
    run = json.loads(RUN.read_text(encoding="utf-8"))
    for part in ("state", "loop"):
        failed = {"rounds": [], "failed": "ModuleNotFoundError: No module named 'torchsnapshot'"}
        run["parts"][part]["results"]["TorchSnapshot async_take"] = failed
    text = page.page(page.Run([run]), json.loads((ROOT / page.GPU).read_text(encoding="utf-8")))
    reason = "failed: ModuleNotFoundError: No module named 'torchsnapshot'"
    assert text.count(f"| TorchSnapshot async_take | {reason} |") == 2
    assert "| TorchSnapshot | failed: " in text


@pytest.mark.process
@pytest.mark.slow
def test_the_benchmark_of_logs_measures_all_that_their_page_shows(page, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    out = tmp_path / "log.json"
    small = "--rounds=1", "--batch=1", "--steps=1", "--entries=2", "--shorten=20"
    where = f"--folder={tmp_path}", f"--out={out}"
    done = interpreters.run(str(ROOT / "benchmarks" / "log.py"), *small, *where)
    assert done.returncode == 0, done.stderr
    run = page.Run([json.loads(out.read_text(encoding="utf-8"))])
    assert "An entry has" in page.log_verdict(run)
    assert "Written per parameter and step" in page.log_chart(run)


@pytest.mark.process
@pytest.mark.slow
def test_the_benchmark_of_hosts_measures_all_that_their_page_says(page, tmp_path):
    out = tmp_path / "hosts.json"
    small = "--rounds=1", "--gb=.1", "--training-gb=.05", "--memory-gb=.1", "--copy-mb-per-s=1000"
    where = f"--folder={tmp_path}", f"--out={out}", f"--memory={tmp_path / 'hosts'}"
    done = interpreters.run(str(ROOT / "benchmarks" / "hosts.py"), *small, *where)
    assert done.returncode == 0, done.stderr
    run = page.Run([json.loads(out.read_text(encoding="utf-8"))])
    assert "After the loss of one" in page.hosts_verdict(run)


@pytest.mark.process
@pytest.mark.slow
def test_killed_trainings_with_a_log_lose_at_most_one_step():
    done = interpreters.run(str(ROOT / "benchmarks" / "log.py"), "--kills", "4")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"kills 4 most steps lost [01] wrong losses 0\n", done.stdout)


PROGRAM = """
import json, os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import bench

def peer(folder, options):
    import no_such_peer

def killed(folder, options):
    os.kill(os.getpid(), signal.SIGKILL)

def rank(folder, options):
    return {"rank": int(os.environ["RANK"]), "of": int(os.environ["WORLD_SIZE"])}

def pair(folder, options):
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 gives up")
    time.sleep(600)

def ours(folder, options):
    return {"pid": os.getpid()}

measures = {"Penstock": ours, "peer": peer, "killed": killed}
groups = {"alone": measures, "together": {"Penstock": rank, "pair": pair}}
benchmark = bench.Benchmark(sys.argv[0], "", groups, {"ranks": (0, "")})
parts = [bench.Part("alone", benchmark, "alone", tuple(measures), {}, 2),
         bench.Part("together", benchmark, "together", ("Penstock", "pair"), {"ranks": 2}, 1)]
print(json.dumps(bench.measure(parts, Path(sys.argv[2]))["parts"]))
"""


@pytest.mark.process
def test_each_measurement_is_a_process_and_failures_only_are_reported(tmp_path):
    program = textwrap.dedent(PROGRAM)
    done = interpreters.run("-c", program, str(ROOT / "benchmarks"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    parts = json.loads(done.stdout.splitlines()[-1])
    alone, together = (parts[name]["results"] for name in ("alone", "together"))
    first, second = (row["pid"] for row in alone["Penstock"]["rounds"])
    assert first != second
    assert alone["peer"] == {
        "rounds": [],
        "failed": "ModuleNotFoundError: No module named 'no_such_peer'",
    }
    assert alone["killed"] == {"rounds": [], "failed": "killed by signal 9"}
    assert together["Penstock"]["rounds"] == [{"rank": 0, "of": 2}]
    assert together["pair"] == {"rounds": [], "failed": "ValueError: rank 1 gives up"}
    assert not list(tmp_path.iterdir())

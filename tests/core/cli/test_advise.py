"""`penstock advise`: how often a run should save."""

import json
import os
from dataclasses import replace

import pytest
import torch
from tests.core.cli.command import caller

import penstock
from penstock.core.concurrency.timing import current_timing
from penstock.testing.hasty import ShiftedClock, timing_in_force


@pytest.fixture
def call(capsys, monkeypatch):
    return caller(capsys, monkeypatch)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Steps 0, 10 to 40, saved 20 s after one another."""
    root, clock = tmp_path_factory.mktemp("advise") / "run", ShiftedClock()
    timing = replace(current_timing(), clock=clock)
    with timing_in_force(timing), penstock.Checkpointer(root) as ckpt:
        for number in range(5):
            clock.ahead_s = 20.0 * number
            ckpt.save({"w": torch.ones(5)}, 10 * number, mode="blocking")
    return root


def test_interval_fits_the_times_of_checkpoints(call, run):
    done = call("advise", run, "--blocked-s", "0.1", "--json")
    assert done.code == 0, done.err
    document = done.json
    assert document["inputs"]["step_s"]["seconds"] == pytest.approx(2.0, rel=0.1)
    assert document["inputs"]["step_s"]["origin"] == "median of 4 gaps between checkpoints"
    assert document["inputs"]["blocked_s"] == {"seconds": 0.1, "origin": "given"}
    assert document["inputs"]["log_s"]["origin"] == "assumed"
    saves, logs = document["plans"]
    assert (saves["what"], saves["steps"], saves["why"]) == ("saves", 5, "overhead of 1 %")
    assert saves["lost_steps"] == pytest.approx(3.0, rel=0.1)
    assert (logs["what"], logs["lost_steps"]) == ("saves and a log", 1.0)


def test_table_and_origins_are_printed(call, run):
    done = call(
        "advise", run, "--step-s", "1", "--blocked-s", "0.02", "--mtbf", "3h", "--log-s", "0.002"
    )
    lines = done.out.splitlines()
    assert lines[0].split("  ")[0] == "WITH"
    assert "21 steps (21 s)" in lines[1]
    assert "Young's interval for an MTBF of 3 h" in lines[1]
    assert "at most 1 step (1 s)" in lines[2]
    assert "a save is durable after 1 s: median of 5 saves, in whole seconds" in lines
    assert "logging a step blocks training for 2 ms: given" in lines
    assert not done.err


def test_events_have_all_times(call, run, tmp_path):
    seconds = {"blocked": 0.02, "total": 0.5}
    event = {"kind": "durable", "uid": "a", "seconds": seconds}
    event["interval"] = {"steps": 4, "seconds": 8.0}
    (tmp_path / "events").write_text(json.dumps(event) + "\n")
    inputs = call("advise", run, "--events", tmp_path / "events", "--json").json["inputs"]
    assert {key: value["seconds"] for key, value in inputs.items()} == {
        "step_s": 2.0, "blocked_s": 0.02, "duration_s": 0.5, "log_s": 0.0,
    }  # fmt: skip


def test_what_the_run_does_not_show_is_asked_for(call, run, tmp_path):
    done = call("advise", run)
    assert done.code == 1
    assert "does not show how long a save blocks training: give --blocked-s SECONDS" in done.err
    with penstock.Checkpointer(tmp_path / "one") as ckpt:
        ckpt.save({"w": 1}, 1, mode="blocking")
    assert "--step-s SECONDS" in call("advise", tmp_path / "one", "--blocked-s", "1").err


def test_options_are_those_of_the_configuration_unless_given(call, run, tmp_path):
    file = tmp_path / "penstock.toml"
    file.write_text(f'backend = "{os.fspath(run)}"\n[schedule]\noverhead = 0.1\nmtbf_s = 10.0\n')
    found = call("advise", file, "--blocked-s", "0.1", "--json").json
    assert (found["overhead"], found["mtbf_s"]) == (0.1, 10.0)
    found = call("advise", file, "--blocked-s", "0.1", "--overhead", "0.5", "--json").json
    assert (found["overhead"], found["mtbf_s"]) == (0.5, 10.0)
    assert "overhead" in call("advise", file, "--blocked-s", "0.1", "--overhead", "0").err

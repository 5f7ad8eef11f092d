"""`penstock report`: what the page holds, and how a browser shows it."""

import json
import math
import re
import shutil
import subprocess
import sys

import pytest
import torch
from tests.core.cli.command import caller

import penstock
from penstock.core.cli.commands import report
from penstock.core.cli.commands.report import boxes_of, gather, read_events
from penstock.integrations.events import JsonLinesSink, Sinks

NEEDED = "needs plotly, which `make test-hosts` brings"
EVIL = "</script><script>document.title='pwned'</script><img src=x><a href='http://a.test'>b</a>"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


@pytest.fixture
def call(capsys, monkeypatch):
    return caller(capsys, monkeypatch)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Steps 1 to 4; 3 is deleted and 4 has no event; an attacker chose the names."""
    folder = tmp_path_factory.mktemp("report")
    state = {"model": {EVIL: torch.randn(20000), **{f"b{n}": torch.ones(3) for n in range(40)}}}
    rules = [{"match": "x/**", "codecs": ["delta", "floatsplit"]}]
    options = {"rules": rules, "deltas": {"every": 9}}
    weight = torch.randn(90000, generator=torch.Generator().manual_seed(0))
    sinks = Sinks(JsonLinesSink(folder / "events.jsonl"), close_s=100)
    with penstock.Checkpointer(f"posix://{folder}/run", on_event=sinks, **options) as ckpt:
        for step in range(1, 5):
            if step == 4:
                sinks.close()
            state["x"] = {"w": weight.clone().mul_(1 + step / 4096)}
            ckpt.save(state, step=step, metadata={"note": EVIL}).result()
        ckpt.delete(3)
    with (folder / "events.jsonl").open("a") as lines:
        lines.write('{"kind": "durable", "uid": "' + "0" * 32)  # a process was killed
    return folder


def test_times_come_from_events_or_else_from_records(saved):
    facts = gather(f"posix://{saved}/run", None, [str(saved / "events.jsonl")])
    lines = (saved / "events.jsonl").read_text().splitlines()
    durable = {e["step"]: e for e in map(json.loads, lines[:-1]) if e["kind"] == "durable"}
    assert facts.unread == 1
    assert (facts.step, [record.step for record in facts.records]) == (4, [1, 2, 4])
    bars = {bar["name"]: bar for bar in report.save_times(facts)["data"]}
    assert bars["training blocked"]["x"] == ["1", "2"]
    assert bars["training blocked"]["y"] == [durable[n]["seconds"]["blocked"] for n in (1, 2)]
    totals = [
        blocked + more
        for blocked, more in zip(
            bars["training blocked"]["y"], bars["in the background"]["y"], strict=True
        )
    ]
    assert totals == pytest.approx([durable[n]["seconds"]["total"] for n in (1, 2)])
    assert bars["from start of writing until commit"]["x"] == ["4"]
    assert report.chains(facts)["data"][0]["y"] == [0, 1, 3]
    assert [step for step, _ in report.gaps_of(facts)] == [2, 4]


def test_lines_other_than_events_are_counted(tmp_path):
    file = tmp_path / "events.jsonl"
    file.write_text('[]\n{"kind": "durable", "uid": "a"}\n{"kind": "started"}\nx\n')
    assert read_events([str(file)]) == ({}, 3)


def test_small_objects_share_a_box_and_nothing_is_lost(saved):
    facts = gather(f"posix://{saved}/run", 1, [])
    outer, *boxes = boxes_of(facts.objects, "step 1")
    assert outer.bytes_raw == sum(one.nbytes for one in facts.objects)
    names = {one.id: one.group for one in (outer, *boxes)}
    assert {(names[one.parent], one.objects) for one in boxes if "small" in one.group} == {
        ("model", 40)
    }
    for box in (outer, *boxes):
        inside = [one for one in boxes if one.parent == box.id]
        if inside:
            for figure in ("objects", "bytes_raw", "bytes_stored"):
                assert sum(getattr(one, figure) for one in inside) == getattr(box, figure)


def test_without_plotly_the_extra_is_named(call, saved, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    done = call("report", saved / "run", tmp_path / "out.html")
    assert done.code == 1
    assert "pip install 'penstock[report]'" in done.err
    assert not [*tmp_path.iterdir()]


def test_an_existing_out_is_kept_unless_replace_is_given(call, saved, tmp_path):
    out = tmp_path / "out.html"
    out.write_text("mine")
    done = call("report", saved / "run", out)
    assert done.code == 1
    assert "--overwrite" in done.err
    assert out.read_text() == "mine"
    pytest.importorskip("plotly", reason=NEEDED)
    done = call("report", saved / "run", out, "--overwrite", "--json")
    assert done.json["steps"] == [1, 2, 4]
    assert (done.json["step"], done.json["out"]) == (4, str(out))
    assert out.read_text().startswith("<!doctype html>")
    assert [*tmp_path.iterdir()] == [out]


@pytest.mark.process
@pytest.mark.parametrize("width", [500, 1280])
def test_browser_shows_every_chart_and_stored_names_as_text(call, saved, tmp_path, width):
    pytest.importorskip("plotly", reason=NEEDED)
    if BROWSER is None:
        pytest.skip("needs chromium")
    out = tmp_path / "out.html"
    assert call("report", saved / "run", out, "--events", saved / "events.jsonl").code == 0
    probe = "<script>addEventListener('load', () => setTimeout(() => { document.body.dataset.wide ="
    probe += " document.documentElement.scrollWidth; }, 500));</script>"
    page = out.read_text()
    out.write_text(page.replace("</body>", probe + "</body>"))
    dom = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=9000",
            f"--user-data-dir={tmp_path}/profile", f"--window-size={width},2000", "--dump-dom",
            out.as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=300,
    ).stdout  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", dom)[1]
    assert title == f"Report on file://{saved}/run"
    body = re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)
    assert not re.findall(r"<(?:img|a)\b", body)  # plotly turns texts into links if allowed
    assert body.count("&lt;img src=x&gt;") >= 4  # the box, and the metadata of each row
    charts_shown = {*re.findall(r'id="chart-(\d)"', dom)}
    assert len(charts_shown) == 5  # sizes by path, over steps, times, gaps, chains
    assert len(re.findall(r'<svg class="main-svg"', dom)) >= len(charts_shown)
    assert math.isclose(int(re.search(r'data-wide="(\d+)"', dom)[1]), width, abs_tol=20)

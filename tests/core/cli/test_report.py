"""`penstock report`: what the page holds, and how a browser shows it."""

import math
import re
import shutil
import subprocess

import pytest
import torch

import penstock
from penstock.integrations.events import JsonLinesSink, Sinks

NEEDED = "needs plotly, which `make test-hosts` brings"
EVIL = "</script><script>document.title='pwned'</script><img src=x><a href='http://a.test'>b</a>"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Steps 1 to 4, of which 3 is deleted and 4 has no event; names are those of an attacker."""
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
    assert not re.findall(r"<(?:img|a)\b", body)  # plotly makes links of texts, if it is let to
    assert body.count("&lt;img src=x&gt;") >= 4  # the box, and the metadata of each row
    charts_shown = {*re.findall(r'id="chart-(\d)"', dom)}
    assert len(charts_shown) == 5  # sizes by path, over steps, times, gaps, chains
    assert len(re.findall(r'<svg class="main-svg"', dom)) >= len(charts_shown)
    assert math.isclose(int(re.search(r'data-wide="(\d+)"', dom)[1]), width, abs_tol=20)

"""The Python blocks of the documentation are complete, and work in the order of the page."""

import inspect
import json
import os
import re
import signal
import textwrap
import tomllib
from pathlib import Path

import pytest
from tests import interpreters

import penstock
from penstock.core import abc

DOCS = Path(__file__).resolve().parent.parent / "docs"
TORCHRUN = re.compile(
    r"^```python\n(.*?)^```\n(<!-- not run here: torchrun)?", re.DOTALL | re.MULTILINE
)
BLOCK = re.compile(r"^```python\n(.*?)^```\n(<!-- not run)?", re.DOTALL | re.MULTILINE)
SUITE = re.compile(r"^ *check_(backend|codec|replayer)\(", re.MULTILINE)


def blocks(page):
    """Code with its place in the page, as one program per page."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        if found[2] is None:
            yield text.count("\n", 0, found.start(1)), found[1]


# The programs of docs/trainers are run, killed and resumed by tests/integrations/hosts.
TRAINERS = DOCS / "trainers"
PAGES = sorted(page for page in DOCS.rglob("*.md") if page.parent != TRAINERS and any(blocks(page)))


def test_the_pages_that_must_run_are_found():
    kinds = ("backend", "codec", "provider", "replayer")
    must = {"quickstart", *(f"write-a-{kind}" for kind in kinds)}
    assert must <= {page.stem for page in PAGES}


DIRECTIVE = re.compile(r"^::: (penstock[\w.]*)$", re.MULTILINE)


def test_the_reference_has_every_public_name():
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    shown = [path.removeprefix("penstock.") for path in DIRECTIVE.findall(text)]
    assert [name for name in penstock.__all__ if name not in shown] == []


def test_the_reference_for_plugins_has_every_contract_and_suite():
    text = (DOCS / "reference-plugins.md").read_text(encoding="utf-8")
    shown = set(DIRECTIVE.findall(text))
    contracts = [name for name in abc.__all__ if inspect.isabstract(getattr(abc, name))]
    assert {"Backend", "Codec", "Replayer", "StateProvider"} <= set(contracts)
    assert {f"penstock.core.abc.{name}" for name in contracts} - shown == set()
    members = set(re.findall(r"\bcheck_\w+", text))
    for suite in ("backends", "codecs", "coordination", "providers", "replayers"):
        assert f"penstock.testing.{suite}" in shown
        assert f"check_{suite.removesuffix('s')}" in members


# The page of `test_the_quickstart_reruns_...` runs there.
ONCE = [page for page in PAGES if page.stem != "quickstart"]


@pytest.mark.parametrize("page", ONCE, ids=lambda page: page.stem)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Leading newlines make line numbers in tracebacks those of the page.
    program = [
        (compile("\n" * line + code, str(page), "exec"), SUITE.search(code))
        for line, code in blocks(page)
    ]
    names = {"__name__": f"docs.{page.stem}"}
    for block, _ in program:
        exec(block, names)
    for block, suite in program:  # users run an example again, over its checkpoints
        if not suite:  # takes seconds, and leaves no files
            exec(block, names)
    for name, test in list(names.items()):
        if name.startswith("test_"):
            (mark,) = test.pytestmark
            for value in mark.args[1][:3]:  # the page makes all of these checks
                test(value, tmp_path / name)


@pytest.mark.process
@pytest.mark.multirank
def test_the_program_for_ranks_continues_with_any_number_of_them(tmp_path):
    page = (DOCS / "ranks.md").read_text(encoding="utf-8")
    program = "".join(code for code, rest in TORCHRUN.findall(page) if rest)
    program += 'print("ran until", step, state["data"].value["row"], flush=True)\n'
    (tmp_path / "train.py").write_text(program)
    lasts = []
    for count in (2, 3):
        outputs = interpreters.run_as_torchrun(count, "train.py", cwd=tmp_path)
        lasts.append(sorted(re.findall(r"ran until (\d+ \d+)", "".join(outputs))))
    assert lasts == [["2 1024", "2 24"], ["5 1048", "5 2048", "5 48"]]


README_PROGRAM = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")  # of torchdata
import torch
torch.set_num_threads(1)
seed, kill_at = map(int, sys.argv[1:])
torch.manual_seed(seed)
dataset = torch.randn(96 * 32, 4, generator=torch.Generator().manual_seed(0))
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)

def train_one_step(batch):
    if step == kill_at:
        ckpt.wait()  # so the newest checkpoint is known
        os.kill(os.getpid(), signal.SIGKILL)
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    print(step, loss.item().hex(), flush=True)

"""


@pytest.mark.process
def test_the_readme_loop_resumes_exactly_after_a_kill_in_an_epoch(tmp_path):
    pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")
    code = BLOCK.findall((DOCS.parent / "README.md").read_text(encoding="utf-8"))[0][0]

    def train(run, seed, kill_at):
        program = README_PROGRAM + code.replace("runs/gpt", str(tmp_path / run))
        done = interpreters.run("-c", program, seed, kill_at)
        assert done.returncode == (-signal.SIGKILL if kill_at < 288 else 0), done.stderr
        return done.stdout.splitlines()

    expected = train("whole", 0, 288)
    assert [line.split()[0] for line in expected] == [str(step) for step in range(288)]
    assert train("killed", 0, 150) == expected[:150]  # in the second of three epochs of 96 batches
    assert train("killed", 1, 250) == expected[101:250]
    assert train("killed", 2, 288) == expected[201:]


def test_the_quickstart_reruns_after_a_full_or_interrupted_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = DOCS / "quickstart.md"
    code = [compile(code, str(page), "exec") for _, code in blocks(page)]
    for part in (code, code[:-3], code):
        names = {"__name__": "docs.quickstart"}
        for block in part:
            exec(block, names)
        names["ckpt"].close()


# -- the pages for plugin authors, followed to the letter ---------------------------------------

PLUGIN_PAGES = {
    "write-a-backend": "folder",
    "write-a-codec": "deflate",
    "write-a-provider": "mean",
    "write-a-replayer": "slowing",
}
TOML = re.compile(r"^```toml\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def test_every_part_of_a_plugin_author_page_is_tested():
    for page in PLUGIN_PAGES:
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        assert "<!-- not run" not in text
        assert len(list(blocks(DOCS / f"{page}.md"))) == text.count("```python")
        assert "api_version = 1" in text


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """`your_package` as on the pages: a module each, before the check, and the entry points."""
    site = tmp_path_factory.mktemp("site")
    (site / "your_package").mkdir()
    (site / "your_package" / "__init__.py").touch()
    info = site / "your_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: your-package\nVersion: 1.0\n")
    lines, settings = [], []
    for page, module in PLUGIN_PAGES.items():
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        code = BLOCK.findall(text[: text.index("## Check it")])
        (site / "your_package" / f"{module}.py").write_text("\n\n".join(c for c, _ in code))
        for found in TOML.findall(text):
            groups = tomllib.loads(found).get("project", {}).get("entry-points", {})
            for group, entries in groups.items():
                lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
            if not groups:
                settings.append(found)
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (site / "penstock.toml").write_text('backend = "folder://runs/own"\n' + "\n".join(settings))
    return site


def run_in(site, *arguments):
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = interpreters.run("-W", "error", *arguments, cwd=site, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_plugins_of_the_pages_are_found_and_valid(site):
    plugins = json.loads(run_in(site, "-m", "penstock", "plugins", "--check", "--json"))["plugins"]
    ours = [p for p in plugins if p["distribution"] == "your-package"]
    assert {(p["kind"], p["name"]) for p in ours} == {
        ("backend", "folder"),
        ("codec", "deflate"),
        ("provider", "running-mean"),
        ("provider", "window"),
        ("provider", "box"),
        ("replayer", "slowing"),
    }
    assert {p["state"] for p in ours} == {"ok"}


USE = """
    import penstock, torch
    from your_package.mean import Box, RunningMean, Window

    def state(n):
        return {
            "optimizer": {"m": torch.full((70_000,), float(n))},
            "mean": RunningMean(torch.full((3,), float(n)), n),
            "box": Box([n] * 300),
            "window": Window(n, [torch.full((n, 2), float(i)) for i in range(n)]),
        }

    with penstock.Checkpointer.from_config("penstock.toml") as ckpt:
        ckpt.save(state(5), step=1).result()
        target = state(0)
        ckpt.restore(target)
        assert ckpt.verify().ok
    assert (target["optimizer"]["m"] == 5).all()
    assert (target["mean"].total == 5).all()
    assert target["mean"].count == 5
    assert target["box"].data == bytes([5] * 300)
    window = [tensor.tolist() for tensor in target["window"].tensors]
    assert window == [[[float(i)] * 2] * 5 for i in range(5)]
    assert target["window"].limit == 5
"""


def test_plugins_of_the_pages_work_by_configuration_together(site):
    run_in(site, "-c", textwrap.dedent(USE))
    shown = run_in(site, "-m", "penstock", "show", "folder://runs/own", "--json")
    assert "deflate" in shown
    assert "running-mean" in shown

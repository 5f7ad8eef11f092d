"""Files in the working directory are not installed unless a path file names them."""

import importlib.util
import os
import subprocess
import sys
import textwrap
import threading

import pytest

import penstock
from penstock.core import distributions
from penstock.core.distributions import installed_only

pytestmark = pytest.mark.process

LOADS = """
    import penstock.core.distributions as d
    print([entry.name for entry in d.installed("penstock.providers") if entry.name == "evil"])
"""
EVIL, NONE = "['evil']", "[]"


@pytest.fixture
def run(tmp_path):
    """A folder with a distribution, and modules that shadow installed ones."""
    folder = tmp_path / "run"
    info = folder / "evil-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[penstock.providers]\nevil = evil:Provider\n")
    (folder / "typer.py").write_text("raise SystemExit('code of the run was executed')")
    return folder


def output_of(*arguments, cwd, **environment):
    environment = {**os.environ, **environment}
    environment = {name: value for name, value in environment.items() if value}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or done.stderr.strip()


def test_plugins_of_the_working_directory_are_not_found(run, tmp_path):
    code = textwrap.dedent(LOADS)
    assert output_of("-c", code, cwd=run, PYTHONPATH="") == NONE
    (run / "looks.py").write_text(code)
    assert output_of("-m", "looks", cwd=run, PYTHONPATH="") == NONE
    # A session that has changed its folder since its start.
    assert output_of("-c", f"import os\nos.chdir({str(run)!r})\n{code}", cwd=tmp_path) == NONE


def test_a_folder_named_by_a_pth_file_is_searched(run, tmp_path, monkeypatch):
    """As for a project installed in place and tested from its root."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.setattr(sys, "path", [str(run), str(packages), *sys.path])
    monkeypatch.setattr(distributions, "_began_in", str(run))
    monkeypatch.setattr(distributions.site, "getsitepackages", lambda: [str(packages)])
    names = lambda: {e.name for e in distributions.installed("penstock.providers")}  # noqa: E731
    assert "evil" not in names()
    (packages / "project.pth").write_text(f"import nothing\n{run}\n")
    assert "evil" in names()


def test_the_command_module_imports_nothing_of_the_working_directory(run):
    output = output_of("-m", "penstock", "ls", ".", cwd=run, PYTHONPATH="")
    assert "code of the run" not in output
    assert "no checkpoints" in output or "no checkpoint" in output


@pytest.mark.parametrize("entry", ["", ".", "{run}"])
def test_imports_for_a_checkpoint_ignore_the_working_directory(entry, tmp_path, monkeypatch):
    run, packages = tmp_path / "run", tmp_path / "packages"
    for folder in (run, packages):
        folder.mkdir()
        (folder / "penstock_both.py").touch()
    (run / "penstock_planted.py").touch()
    monkeypatch.chdir(run)
    monkeypatch.setattr(sys, "path", [entry.format(run=run), *sys.path, str(packages)])
    look = lambda name: importlib.util.find_spec(f"penstock_{name}")  # noqa: E731
    with installed_only():
        assert look("planted") is None
        assert look("both").origin == str(packages / "penstock_both.py")
        others = []
        thread = threading.Thread(target=lambda: others.append(look("planted")))
        thread.start()
        thread.join()
        assert others != [None], "imports of other threads are the user's own"
    assert look("both").origin == str(run / "penstock_both.py")


def test_verifying_a_run_imports_nothing_of_the_run(tmp_path):
    run = tmp_path / "run"
    rules = [{"match": "a", "codecs": ["lz4"]}, {"match": "b", "codecs": ["floatsplit"]}]
    with penstock.Checkpointer(f"posix://{run}", rules=rules) as ckpt:
        value = bytes(range(256)) * 64
        ckpt.save({"a": value, "b": value}, 1, mode="blocking")
    for module in ("pydantic", "xxhash", "zstandard", "lz4", "numba", "tomllib", "secrets"):
        (run / f"{module}.py").write_text("raise SystemExit('code of the run was executed')")
    code = f"import os, penstock; os.chdir({str(run)!r})\n"
    code += "print(penstock.Checkpointer('posix://.').verify().ok)"
    assert output_of("-c", code, cwd=tmp_path, PYTHONPATH="") == "True"

"""What lies in the working directory is not installed, unless somebody says that it is."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.process

LOADS = """
    import penstock.core.distributions as d
    print([entry.name for entry in d.installed("penstock.providers") if entry.name == "evil"])
"""
EVIL, NONE = "['evil']", "[]"


@pytest.fixture
def run(tmp_path):
    """A folder that brings a distribution along, and modules that shadow installed ones."""
    folder = tmp_path / "run"
    info = folder / "evil-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[penstock.providers]\nevil = evil:Provider\n")
    (folder / "typer.py").write_text("raise SystemExit('code of the run was executed')")
    return folder


def said(*arguments, cwd, **environment):
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
    assert said("-c", code, cwd=run, PYTHONPATH="") == NONE
    (run / "looks.py").write_text(code)
    assert said("-m", "looks", cwd=run, PYTHONPATH="") == NONE
    # A session that has changed its folder since it began.
    assert said("-c", f"import os\nos.chdir({str(run)!r})\n{code}", cwd=tmp_path) == NONE


def test_a_folder_that_is_meant_is_searched_though_it_is_the_working_directory(run, tmp_path):
    code = textwrap.dedent(LOADS)
    assert said("-c", code, cwd=run, PYTHONPATH=str(run)) == EVIL
    assert said("-c", code, cwd=run, PYTHONPATH=".") == EVIL
    (run / "train.py").write_text(code)
    assert said("train.py", cwd=run, PYTHONPATH="") == EVIL


def test_a_folder_that_a_file_of_site_packages_names_is_searched(run, tmp_path, monkeypatch):
    """As it is where a project is installed in place, and tested from its own root."""
    from penstock.core import distributions

    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.setattr(sys, "path", [str(run), str(packages), *sys.path])
    monkeypatch.setattr(distributions, "_began_in", str(run))
    monkeypatch.setattr(distributions.site, "getsitepackages", lambda: [str(packages)])
    names = lambda: {e.name for e in distributions.installed("penstock.providers")}  # noqa: E731
    assert "evil" not in names()
    (packages / "project.pth").write_text(f"import nothing\n{run}\n")
    assert "evil" in names()


def test_the_module_that_is_the_command_imports_nothing_of_the_working_directory(run):
    told = said("-m", "penstock", "ls", ".", cwd=run, PYTHONPATH="")
    assert "code of the run" not in told
    assert "no checkpoints" in told or "no checkpoint" in told

"""Fresh environments, in which third-party distributions are installed and used."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

VARIABLES = {"PYTHONDONTWRITEBYTECODE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


class Environment:
    """A virtual environment that sees the packages of the one that runs the tests."""

    def __init__(self, folder):
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        command = [sys.executable, "-m", "venv", "--without-pip", folder / "venv"]
        subprocess.run(command, check=True)
        paths = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        self.site = Path(paths.stdout.strip())
        # addsitedir, not the bare path: editable installs are .pth files of their own.
        parents = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        lines = [f"import site; site.addsitedir({parent!r})" for parent in sorted(parents)]
        (self.site / "parent.pth").write_text("\n".join(lines) + "\n")

    def run(self, *arguments, check=True):
        """`python arguments`, away from the sources, with nothing but the environment's path."""
        variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        done = subprocess.run(
            [self.python, *arguments],
            cwd=self.folder,
            env=variables | VARIABLES,
            text=True,
            capture_output=True,
            check=False,
        )
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    def code(self, source, *arguments, check=True):
        return self.run("-c", textwrap.dedent(source), *arguments, check=check)

    def install(self, project, *options):
        """With the build backend that is here, by default offline; the sources stay as they are."""
        copy = self.folder / "build" / project.name
        ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".pytest_cache")
        shutil.copytree(project, copy, ignore=ignored)
        options = options or ("--no-deps", "--no-index", "--no-cache-dir")
        done = self.run(
            "-m", "pip", "install", "--no-build-isolation", "--quiet", *options, copy, check=False
        )
        shutil.rmtree(copy)
        assert done.returncode == 0, done.stdout + done.stderr

    def plugins(self, *options, check=True):
        done = self.run("-m", "penstock", "plugins", "--json", *options, check=check)
        return json.loads(done.stdout)["plugins"]


def missing_to_install():
    """What this environment lacks for `Environment.install`; empty: nothing."""
    needed = ("pip", "setuptools")
    return ", ".join(name for name in needed if importlib.util.find_spec(name) is None)

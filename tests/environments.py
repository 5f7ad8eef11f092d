"""Fresh environments in which third-party distributions are installed and used."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

from tests.interpreters import Server

VARIABLES = {"PYTHONDONTWRITEBYTECODE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


class Environment:
    """A virtual environment that sees the packages of the tests' one."""

    def __init__(self, folder):
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        self._server = None
        command = [sys.executable, "-m", "venv", "--without-pip", folder / "venv"]
        subprocess.run(command, check=True)
        paths = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        self.site = Path(paths.stdout.strip())
        # addsitedir, not the bare path: editable installs are separate .pth files.
        parents = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        lines = [f"import site; site.addsitedir({parent!r})" for parent in sorted(parents)]
        (self.site / "parent.pth").write_text("\n".join(lines) + "\n")

    def run(self, *arguments, check=True):
        """`python arguments`, outside the sources, with only the environment's path."""
        done = subprocess.run(
            [self.python, *arguments],
            cwd=self.folder,
            env=_variables(),
            text=True,
            capture_output=True,
            check=False,
        )
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    def code(self, source, *arguments):
        return self.program("-c", textwrap.dedent(source), *arguments)

    def program(self, *arguments):
        """As `run`, for programs that need torch anyway."""
        done = self._with_torch(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def _with_torch(self, *arguments):
        """As `run`, by a process that has imported torch and Penstock."""
        self._server = self._server or Server(self.python)
        return self._server.run(
            *arguments, timeout=800, cwd=self.folder, env=_variables()
        )  # a whole suite may run inside

    def install(self, project, *options):
        """With the installed build backend, by default offline; the sources do not change."""
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
        done = self._with_torch("-m", "penstock", "plugins", "--json", *options)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)["plugins"]


def _variables():
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | VARIABLES


def missing_to_install():
    """The missing requirement of `Environment.install`; empty: none."""
    needed = ("pip", "setuptools")
    return ", ".join(name for name in needed if importlib.util.find_spec(name) is None)

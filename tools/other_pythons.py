"""Test the source distribution on other Pythons, each in an environment with its wheel.

    .venv/bin/python tools/other_pythons.py          # all of them
    .venv/bin/python tools/other_pythons.py 3.13     # one of them

The environments have Penstock's own dependencies and those of the extra `test`. The quick tests run
in the unpacked source distribution (with the oldest torch, only the tests of code that uses torch),
and mypy checks a user's program against the installed wheel.
A Python is left out, with a message, if this machine lacks it or cannot get its packages.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "pythons"
# `make test` covers the oldest Python. `None`: the pinned torch.
TORCH = {"3.12": "2.12.0", "3.13": None}  # 2.12.0 is the oldest supported one
# All tests pass on Python 3.11 and 3.13, so 3.12 runs those where the oldest torch can differ.
CORE = ("copy", "log", "pipeline", "plan", "ranks", "restore", "save", "tree")
TESTS = {"3.12": ["tests/codecs", "tests/providers", *(f"tests/core/{name}" for name in CORE)]}


def interpreter(version: str) -> str | None:
    """Return the path of a working Python of `version`, from the PATH or from pyenv."""
    installed = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for python in (shutil.which(f"python{version}"), *sorted(installed)):
        # The PATH may have a pyenv shim for a Python that is not selected.
        if (
            python
            and subprocess.run([python, "-c", ""], check=False, capture_output=True).returncode == 0
        ):
            return python
    return None


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run `command`; exit if it fails."""
    done = subprocess.run(command, cwd=cwd, check=False)
    if done.returncode != 0:
        sys.exit(f"other_pythons: failed: {' '.join(map(str, command))}")


def build() -> tuple[Path, Path]:
    """Return a new wheel and its unpacked source distribution."""
    shutil.rmtree(BUILD / "dist", ignore_errors=True)
    # `check_wheel.py` proves that an isolated environment suffices.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", BUILD / "dist", ROOT)
    (sdist,) = (BUILD / "dist").glob("*.tar.gz")
    (wheel,) = (BUILD / "dist").glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(BUILD / "dist", filter="data")
    return wheel, sdist.with_suffix("").with_suffix("")


def environment(version: str, python: str, wheel: Path) -> Path | None:
    """Return the interpreter of an environment with `wheel`; None if pip cannot install it.

    Updates an existing one.
    """
    folder = BUILD / version
    mine = folder / "bin" / "python"
    if not mine.exists():
        run(python, "-m", "venv", folder)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if TORCH[version]:  # an older torch needs an older setuptools
        pins = [line for line in pins if not line.startswith(("torch==", "setuptools=="))]
        pins.append(f"torch=={TORCH[version]}")
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins), encoding="utf-8")
    pip = (mine, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    install = (*pip, "--constraint", constraints, f"{wheel}[test]")
    if subprocess.run(install, check=False).returncode != 0:
        return None
    run(*pip, "--no-deps", "--force-reinstall", wheel)
    return mine


def main() -> None:
    """Build once, then test on each Python."""
    wheel, sources = build()
    for version in sys.argv[1:] or TORCH:
        python = interpreter(version)
        if python is None:
            print(f"Python {version} is not installed: left out")
            continue
        mine = environment(version, python, wheel)
        if mine is None:
            print(f"Python {version}: the packages cannot be installed here: left out")
            continue
        print(f"Python {version}, torch {TORCH[version] or 'as pinned'}:", flush=True)
        mypy = (sys.executable, "-m", "mypy", "--strict", "--python-executable", mine)
        run(*mypy, "tests/typed_program.py", cwd=sources)
        some = [f"FAST={' '.join(TESTS[version])}"] if version in TESTS else []
        run("make", "test-fast", f"BIN={mine.parent}", "READY=", *some, cwd=sources)


if __name__ == "__main__":
    main()

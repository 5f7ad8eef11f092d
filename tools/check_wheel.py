"""Build sdist and wheel, install the wheel elsewhere, and import everything from there.

src/penstock links to folders at the root. A clone without links, or a build backend that does not
follow them, makes an empty wheel without any complaint; this is the complaint.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("core", "providers", "backends", "codecs", "integrations", "testing")

# Runs in the other place: imports every module of the wheel and loads every entry point.
IMPORT_ALL = """
import importlib, importlib.metadata, pkgutil, sys
site = sys.argv[1]
sys.path.insert(0, site)
import penstock

modules = ["penstock"]
for found in pkgutil.walk_packages(penstock.__path__, "penstock."):
    if not found.name.endswith("__main__"):
        modules.append(found.name)
for name in modules:
    try:
        file = importlib.import_module(name).__file__
    except ModuleNotFoundError as error:
        # An adapter imports its trainer, which need not be installed here.
        if not name.startswith("penstock.integrations.") or error.name.startswith("penstock"):
            raise
        continue
    assert file.startswith(site), f"{name} came from {file}, not from the wheel"
for name in penstock.__all__:
    getattr(penstock, name)
(dist,) = importlib.metadata.distributions(name="penstock", path=[site])
assert dist.version == penstock.__version__, (dist.version, penstock.__version__)
loaded = [entry.load() for entry in dist.entry_points]
assert len(loaded) > 3, dist.entry_points
print(f"wheel: {len(modules)} modules imported, {len(loaded)} entry points loaded")
"""


def run(*command: str | Path, cwd: Path) -> None:
    """Run `command`; on failure show what it said and stop."""
    done = subprocess.run(
        command, cwd=cwd, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != 0:
        shown = " ".join(map(str, command))
        sys.exit(f"{done.stdout}\ncheck_wheel: failed with {done.returncode}: {shown}")


def expected_files() -> set[str]:
    """What a wheel must hold, by the tree."""
    files = {
        f"penstock/{path.relative_to(ROOT)}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    own = (path for path in (ROOT / "src/penstock").iterdir() if path.is_file())
    return files | {f"penstock/{path.name}" for path in own}


def main() -> None:
    """Build, compare, install, import."""
    with tempfile.TemporaryDirectory(prefix="penstock-wheel-") as name:
        scratch = Path(name)
        # setuptools would pack modules that were deleted since it last ran here.
        shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
        # The sdist from the tree, and the wheel from that sdist, as a user without a wheel has it.
        run(sys.executable, "-m", "build", "--outdir", scratch, ROOT, cwd=scratch)
        (from_sdist,) = scratch.glob("*.whl")
        # And the wheel straight from the tree, as `pip install .` has it.
        straight = scratch / "straight"
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
        run(*pip, "wheel", "--no-deps", "--wheel-dir", straight, ROOT, cwd=scratch)
        for wheel in (from_sdist, *straight.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                found = {f for f in archive.namelist() if f.startswith("penstock/")}
            if found != expected_files():
                wrong = ", ".join(sorted(found ^ expected_files()))
                sys.exit(f"check_wheel: {wheel.name} and the tree differ in: {wrong}")
        site = scratch / "site"
        run(*pip, "install", "--no-deps", "--target", site, from_sdist, cwd=scratch)
        # -P: not even the working directory is on the path.
        done = subprocess.run(
            [sys.executable, "-P", "-c", IMPORT_ALL, site], cwd=scratch, check=False
        )
        if done.returncode != 0:
            sys.exit("check_wheel: the installed wheel does not import")


if __name__ == "__main__":
    main()

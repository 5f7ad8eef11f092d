"""Build sdist and wheel, install the wheel elsewhere, and import everything from there.

src/penstock links to folders at the root. A clone without links, or a build backend that does not
follow them, silently makes an empty wheel; this script fails then.
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

# Runs elsewhere: imports every module of the wheel and loads every entry point.
IMPORT_ALL = """
import importlib, importlib.metadata, pkgutil, sys
site = sys.argv[1]
sys.path.insert(0, site)
import penstock

modules = ["penstock"]
for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
    if not module.name.endswith("__main__"):
        modules.append(module.name)
for name in modules:
    try:
        file = importlib.import_module(name).__file__
    except ModuleNotFoundError as error:
        # An adapter imports its trainer, which may not be installed.
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
"""


def run(*command: str | Path, cwd: Path) -> None:
    """Run `command`; exit with its output if it fails."""
    done = subprocess.run(command, cwd=cwd, text=True, check=False, capture_output=True)
    if done.returncode != 0:
        shown = " ".join(map(str, command))
        sys.exit(f"{done.stdout}{done.stderr}\ncheck_wheel: failed: {shown}")


def main() -> None:
    """Build, compare, install, import."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    expected = {f"penstock/{path.relative_to(ROOT)}" for path in files}
    expected |= {f"penstock/{p.name}" for p in (ROOT / "src/penstock").iterdir() if p.is_file()}
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    with tempfile.TemporaryDirectory(prefix="penstock-wheel-") as name:
        scratch = Path(name)
        straight, site = scratch / "straight", scratch / "site"
        # setuptools would pack modules that were deleted since its last run.
        shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
        # A wheel from the sdist, as a user without a wheel gets, and one from the tree.
        run(sys.executable, "-m", "build", "--outdir", scratch, ROOT, cwd=scratch)
        straightly = (*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", straight)
        run(*straightly, ROOT, cwd=scratch)
        (from_sdist,) = scratch.glob("*.whl")
        for wheel in (from_sdist, *straight.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                packed = {f for f in archive.namelist() if f.startswith("penstock/")}
            if wrong := packed ^ expected:
                sys.exit(f"check_wheel: {wheel.name} and the tree differ in: {sorted(wrong)}")
        run(*pip, "install", "--no-deps", "--target", site, from_sdist, cwd=scratch)
        # -P: keeps even the working directory off the path.
        run(sys.executable, "-P", "-c", IMPORT_ALL, site, cwd=scratch)


if __name__ == "__main__":
    main()

"""`plugin_site`: real distributions in a folder on `sys.path`, the registry's outer boundary."""

import importlib
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


RAISING = """
    from penstock.backends.memory import MemoryBackend
    class Acme(MemoryBackend):
        name = "acme"
        api_version = 1
        @classmethod
        def from_url(cls, url, options, /): return cls.Config()
        {decorator}
        def {method}: raise {error}
"""


class PluginSite:
    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self._monkeypatch = monkeypatch
        folder.mkdir()
        monkeypatch.syspath_prepend(str(folder))

    def add(self, distribution, entry_points, *, version="1.0", **modules):
        """A distribution with `{group: {name: target}}` and modules given as source text."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        lines = []
        for group, targets in entry_points.items():
            lines.append(f"[{group}]")
            lines += [f"{name} = {target}" for name, target in targets.items()]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for name, source in modules.items():
            self._monkeypatch.delitem(sys.modules, name, raising=False)
            (self.folder / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()

    def add_raising(self, method, error):
        """Backend `acme` 2.5 with one method that raises: `"list(self, prefix, /)"`."""
        module = f"acme_{method.partition('(')[0]}_{len(list(self.folder.iterdir()))}"
        source = RAISING.format(
            decorator="@classmethod" if "cls" in method else "", method=method, error=error
        )
        targets = {"penstock.backends": {"acme": f"{module}:Acme"}}
        self.add("acme", targets, version="2.5", **{module: source})
        return f"backend 'acme' ({module}.Acme of acme 2.5)"

    def add_penstock(self):
        """Penstock itself, with the entry points that pyproject.toml declares."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        self.add("penstock", project["entry-points"], version="0.0")


@pytest.fixture
def plugin_site(tmp_path, monkeypatch):
    return PluginSite(tmp_path / "site", monkeypatch)

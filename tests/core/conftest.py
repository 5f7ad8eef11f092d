"""`plugin_site`: real distributions in a folder on `sys.path`, the registry's outer boundary."""

from __future__ import annotations

import importlib
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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

    def add_penstock(self):
        """Penstock itself, with the entry points that pyproject.toml declares."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        self.add("penstock", project["entry-points"], version="0.0")


@pytest.fixture
def plugin_site(tmp_path, monkeypatch):
    return PluginSite(tmp_path / "site", monkeypatch)

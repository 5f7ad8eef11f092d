"""A file system that claims to be Lustre, with an `lfs` that behaves as documented."""

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from penstock.backends.lustre import LustreBackend, LustreConfig
from penstock.backends.lustre.lfs import LUSTRE_MAGIC, LustreClient

ATTRIBUTE = "user.lov"


class StandInClient(LustreClient):
    """The kernel of a Lustre client: `f_type`, and the layout under another attribute's name."""

    def __init__(self, lfs, *, shows_layouts=True):
        super().__init__(str(lfs), 60.0)
        self._shows_layouts = shows_layouts

    def file_system(self, folder):
        super().file_system(folder)
        return LUSTRE_MAGIC

    def layout_attribute(self, file):
        if not self._shows_layouts:
            return None
        try:
            return os.getxattr(file, ATTRIBUTE)
        except OSError as error:
            if error.errno != errno.ENODATA:
                raise
            return None


class StandIn:
    """The program, its view of the file system, and the calls that it got."""

    def __init__(self, folder):
        self.path = folder / "lfs"
        source = Path(__file__).with_name("lfs_stand_in.py").read_text(encoding="utf-8")
        self.path.write_text(f"#!{sys.executable} -IS\n{source}", encoding="utf-8")
        self.path.chmod(0o755)
        self._folder = folder
        self.state = {}
        self.set(osts=[{"index": n, "free_kib": 1 << 30} for n in range(8)])

    def set(self, **state):
        self.state |= state
        (self._folder / "lfs.json").write_text(json.dumps(self.state), encoding="utf-8")

    def ost(self, index, **known):
        self.set(osts=[o | known if o["index"] == index else o for o in self.state["osts"]])

    def calls(self, command=""):
        log = self._folder / "calls.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return [call for call in map(json.loads, lines) if not command or call[0] == command]


@pytest.fixture
def lfs(tmp_path):
    """The stand-in program; skips where files have no user attributes to keep layouts in."""
    probe = tmp_path / "probe"
    probe.touch()
    try:
        os.setxattr(probe, ATTRIBUTE, b"x" * 300)
    except OSError as error:
        pytest.skip(f"needs user attributes of files: {error}")
    folder = tmp_path / "bin"
    folder.mkdir()
    yield StandIn(folder)
    shutil.rmtree(folder)


@pytest.fixture
def open_lustre(lfs, tmp_path):
    """Opens `lustre` over a folder that claims to be on Lustre; closes it."""
    opened = []

    def open_lustre(root="root", *, cls=LustreBackend, shows_layouts=True, **options):
        options = {"path": str(tmp_path / root), "engine": "posix", "writers": 1} | options
        client = StandInClient(options.get("lfs", lfs.path), shows_layouts=shows_layouts)
        opened.append(cls(LustreConfig(**options), client=client))
        return opened[-1]

    yield open_lustre
    for backend in opened:
        backend.close()

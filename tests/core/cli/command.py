"""Calls the command in this process, which is ten times faster than a new one."""

import json
import sys

from penstock.core.cli.main import main


class Done:
    def __init__(self, code, out, err):
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self):
        return json.loads(self.out)


def caller(capsys, monkeypatch):
    """A function that runs `penstock ARGUMENTS...` with its output in pipes."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        return Done(code, *capsys.readouterr())

    return call


def tree_of(folder):
    """Every path below a folder, with its size and time."""
    return {
        path: (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
        if not path.is_dir()
    } | {path: None for path in folder.rglob("*") if path.is_dir()}

"""Real files after a power cut: only synced data is certain.

Bytes of a file are durable after an fsync of the file, a name in a folder after an fsync of that
folder, even if some file systems do more. All else may be lost or kept, names one by one and bytes
by the sector.
"""

# ruff: noqa: PTH116 - descriptors are watched

from __future__ import annotations

import os
import stat
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest

SECTOR_BYTES = 512
# Calls before which the state is noted. Writes need none: their bytes are seen later.
EFFECTS = ("mkdir", "rmdir", "link", "replace", "rename", "unlink", "fsync", "ftruncate")


@dataclass(frozen=True)
class Node:
    """A file (versions are bytes) or folder (versions are dicts, name -> node number)."""

    durable: object
    since: tuple = ()  # versions seen after that, the newest last

    @property
    def latest(self):
        return self.since[-1] if self.since else self.durable


@dataclass(frozen=True)
class Moment:
    """The known state of the files at one moment, and the promises until then."""

    nodes: dict[int, Node]
    top: int
    promised: object
    before: str

    def survivors(self, choice):
        """`path -> bytes` (None for a folder) of the surviving files; `choice` is a `Loss`."""
        left, contents = {}, {}

        def walk(number, path):
            node = self.nodes[number]
            if isinstance(node.durable, bytes):
                if number not in contents:
                    contents[number] = choice.of_bytes([node.durable, *node.since])
                left[path] = contents[number]
                return
            left[path] = None
            versions = [node.durable, *node.since]
            for name in sorted(set().union(*versions)):
                inner = choice.of_name([version.get(name) for version in versions])
                if inner is not None:
                    walk(inner, f"{path}/{name}" if path else name)

        walk(self.top, "")
        return left


@dataclass(frozen=True)
class Loss:
    """The version since the last sync that survives; `chance` None: by the flags."""

    names: bool = False
    data: bool = False
    chance: object = None

    def of_name(self, versions):
        if self.chance:
            return self.chance.choice(versions)
        return versions[-1 if self.names else 0]

    def of_bytes(self, versions):
        if not self.chance:
            return versions[-1 if self.data else 0]
        size = len(self.chance.choice(versions))
        torn = bytearray()
        while len(torn) < size:
            part = slice(len(torn), min(len(torn) + SECTOR_BYTES, size))
            sector = self.chance.choice(versions)[part]
            torn += sector.ljust(part.stop - part.start, b"\0")
        return bytes(torn)


ALL_LOST = Loss()
ALL_KEPT = Loss(names=True, data=True)
NAMES_KEPT = Loss(names=True)
DATA_KEPT = Loss(data=True)


class Watched:
    """Notes a `Moment` before every effect on the files under `base`.

    Set `promised` to what the caller may rely on from now on. No file is really synced.
    """

    def __init__(self, base):
        self.moments = []
        self.promised = None
        self._base = str(base)
        self._nodes = {}
        self._pins = []  # open files, so no inode number is used twice
        self._numbers = {}
        self._lock = threading.RLock()  # effects come from several threads
        self._open = os.open
        self._top = self._number(self._base)
        self._look()
        for number, node in list(self._nodes.items()):
            self._nodes[number] = Node(node.latest)  # earlier files are durable

    @contextmanager
    def watching(self):
        with pytest.MonkeyPatch.context() as patch:
            for name in EFFECTS:
                patch.setattr(os, name, self._noted(name, getattr(os, name)))
            yield self
            self.note("the end")
        for fd in self._pins:
            os.close(fd)

    def note(self, before):
        """Note the moment."""
        with self._lock:
            self._look()
            self.moments.append(Moment(dict(self._nodes), self._top, self.promised, before))

    def promise(self, promised):
        """The promises from here on, after a call has returned."""
        self.note("a promise")
        with self._lock:
            self.promised = promised
        self.note("what comes next")

    def _noted(self, name, real):
        def call(*args, **options):
            with self._lock:
                self.note(f"{name} of {args[0]}")
                if name != "fsync":
                    return real(*args, **options)
                number = self._numbers.get(_identity(os.fstat(args[0])))
                if number is not None:
                    self._nodes[number] = Node(self._nodes[number].latest)
                return None

        return call

    def _number(self, path):
        """The node at `path`, pinned if new; None if it is gone."""
        try:
            status = os.stat(path, follow_symlinks=False)
            identity = _identity(status)
            if identity not in self._numbers:
                pin = self._open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
                self._pins.append(pin)
                identity = _identity(os.fstat(pin))
                self._numbers[identity] = len(self._numbers)
        except FileNotFoundError:
            return None
        number = self._numbers[identity]
        if number not in self._nodes:
            # All content of a new file or folder comes after its creation.
            self._nodes[number] = Node({} if stat.S_ISDIR(status.st_mode) else b"")
        return number

    def _look(self):
        pending = [self._base]
        while pending:
            path = pending.pop()
            number = self._number(path)
            if number is None:
                continue
            if isinstance(self._nodes[number].durable, bytes):
                version = self._content(path)
            else:
                inner = {name: f"{path}/{name}" for name in os.listdir(path)}  # noqa: PTH208
                numbers = {name: self._number(below) for name, below in inner.items()}
                version = {name: n for name, n in numbers.items() if n is not None}
                pending += [inner[name] for name in version]
            node = self._nodes[number]
            if version != node.latest:
                self._nodes[number] = replace(node, since=(*node.since, version))

    def _content(self, path):
        fd = self._open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, os.fstat(fd).st_size, 0)
        finally:
            os.close(fd)


def _identity(status):
    return status.st_dev, status.st_ino


def lay_out(survivors, folder):
    """Write the surviving files to disk."""
    for path, data in survivors.items():
        place = folder / path
        if data is None:
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.write_bytes(data)

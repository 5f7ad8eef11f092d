"""Runs in two tiers: in memory, to open with faults, and in folders, to damage."""

import itertools
import shutil

from tests.integration.support import TINY, checkpointer

from penstock import Checkpointer
from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.catalog.catalog import Catalog

_numbers = itertools.count()


class Places:
    """A fast and a durable store that outlive their backends."""

    def __init__(self):
        number = next(_numbers)
        self.fast = MemoryBackend(MemoryConfig(name=f"places-fast-{number}"))
        self.durable = MemoryBackend(MemoryConfig(name=f"places-durable-{number}"))

    def open(self, *, fast=None, durable=None, options=None, **more):
        backend = TieredBackend(
            TieredConfig(fast="memory://", durable="memory://", **(options or {})),
            fast=fast or self.other_fast(),
            durable=durable or self.other(),
        )
        return checkpointer(backend, **more)

    def other_fast(self):
        """Another backend of the fast store."""
        return MemoryBackend(MemoryConfig(name=self.fast._name))

    def other(self):
        """Another backend of the durable store."""
        return MemoryBackend(MemoryConfig(name=self.durable._name))

    def steps(self):
        return Catalog(self.fast).steps(), Catalog(self.durable).steps()


class Folders:
    """A run in two folders, saved to only through the public API."""

    def __init__(self, root):
        self.fast, self.durable = root / "fast", root / "durable"

    def copy_to(self, root):
        shutil.copytree(self.fast, root / "fast")
        shutil.copytree(self.durable, root / "durable")
        return Folders(root)

    def open(self, **options):
        places = {"fast": f"posix://{self.fast}", "durable": f"posix://{self.durable}"}
        return Checkpointer({"type": "tiered", **places}, **{**TINY, **options})

    def blobs(self, place, uid):
        return sorted(p for p in (place / "data" / uid).rglob("*") if p.is_file())

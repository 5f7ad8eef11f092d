"""Count the modules of core whose functions run during a lazy save and during a restore.

A reader who follows a save or a restore through the code opens each of these modules. Whatever
calls, counts: functions that wait in other threads as well, but neither imports nor the bodies of
classes. Run it before and after a change; `--functions` also names the functions of each module.

    python tools/visits.py [--functions]
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import penstock
import penstock.core

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

CORE = Path(penstock.core.__path__[0]).resolve()

Visited = dict[str, set[str]]


class Profile:
    """Notes the functions of core that run while it is on, on whichever thread, by module.

    It is set up once, before the engine starts its threads: a thread that is there already cannot
    be profiled any more.
    """

    def __init__(self) -> None:
        self._found: Visited | None = None
        self._modules: dict[str, str | None] = {}
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    @contextmanager
    def on(self) -> Iterator[Visited]:
        """Note what runs in the block."""
        found = self._found = defaultdict(set)
        try:
            yield found
        finally:
            self._found = None

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        found, code = self._found, frame.f_code
        if event != "call" or found is None:
            return
        if code.co_filename not in self._modules:
            self._modules[code.co_filename] = module_of(code.co_filename)
        module = self._modules[code.co_filename]
        if module is not None and code.co_name != "<module>" and "__module__" not in code.co_names:
            found[module].add(code.co_qualname)


def main() -> None:
    """Print both counts, and the modules."""
    profile = Profile()
    with tempfile.TemporaryDirectory(prefix="penstock-visits-") as folder:
        model = torch.nn.Linear(256, 256)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        state = {"model": model, "optimizer": optimizer, "epoch": 7}
        rules = [{"match": "optimizer/**", "codecs": ["zstd"]}]
        with penstock.Checkpointer(folder, rules=rules) as ckpt:
            ckpt.save(state, step=0).result()  # so that imports are over
            ckpt.restore(state)
            with profile.on() as by_save:
                ckpt.save(state, step=1, mode="lazy")
                ckpt.wait()  # for retention as well, so that the restore finds nothing under way
            with profile.on() as by_restore:
                ckpt.restore(state)
    show("a lazy save", by_save)
    show("a restore", by_restore)


def module_of(file: str) -> str | None:
    """The module of core that a file holds, relative to core; None: it holds none."""
    path = Path(file).resolve()
    return str(path.relative_to(CORE)) if path.is_relative_to(CORE) else None


def show(name: str, found: Visited) -> None:
    """Print how many modules there are, and which."""
    print(f"{name} visits {len(found)} modules of core")
    for module in sorted(found):
        functions = f": {', '.join(sorted(found[module]))}" if "--functions" in sys.argv else ""
        print(f"  {module}{functions}")


if __name__ == "__main__":
    main()

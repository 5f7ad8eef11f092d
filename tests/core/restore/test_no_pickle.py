"""With `allow_pickle` off no checkpoint leads to `pickle`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import interpreters

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[3]

# Everything that can write or read a pickle, replaced after Penstock and torch are imported.
_TRAP = """
import _pickle, copyreg, marshal, pickle, shelve, sys
import torch
from tests.core import fuzz_targets
from tests.core.forging import forge
from penstock.core.errors import PenstockError, UnsupportedStateError

stored = fuzz_targets.stored()  # imports all plugins, saves once
touched = []

def trap(name):
    def refuse(*args, **options):
        touched.append(name)
        raise SystemError(f"{name} was called")
    return refuse

for module in (pickle, _pickle):
    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler", "_dumps", "_loads",
                 "_Pickler", "_Unpickler"):
        if hasattr(module, name):
            setattr(module, name, trap(f"{module.__name__}.{name}"))
for name in ("dump", "dumps", "load", "loads"):
    setattr(marshal, name, trap(f"marshal.{name}"))
torch.load, torch.save, shelve.open = map(trap, ("torch.load", "torch.save", "shelve.open"))

class Bait:
    def __reduce__(self):
        touched.append("__reduce__")
        return (print, ("it ran",))
    __getstate__ = __reduce_ex__ = __copy__ = lambda self, *a: self.__reduce__()

"""

_EVERYTHING = """
stored.put(stored.files)
for name, outcome in stored.read_every_way():
    assert outcome in {"read", "SelectionError", "KeyError"}, (name, outcome)
stored.put({})
for mode in ("blocking", "async", "lazy"):
    stored.ckpt.save(fuzz_targets.make_state(), 5, mode=mode, overwrite=True).result()
    stored.read_every_way()
for bait in (Bait(), [Bait()], {"a": Bait()}, {"a": torch.ones(1), "b": Bait()}, lambda: 0, print):
    try:
        stored.ckpt.save({"bait": bait}, 6, mode="blocking")
    except UnsupportedStateError as error:
        assert "bait" in str(error)
    else:
        raise AssertionError(bait)
stored.ckpt.verify(), stored.ckpt.prune(), stored.ckpt.rewind(5), stored.ckpt.delete(5)
"""

_HOSTILE = """
def pickles(level, value):
    if level == "section":
        for row in value["types"]:
            if row[0] == "value":
                row[4] = "pickle"
    return value

stored.put(forge(stored.files, pickles))
for read in (stored.ckpt.load, lambda step: stored.ckpt.open(step)["list/1"],
             lambda step: stored.ckpt.restore(fuzz_targets.make_state(), step)):
    try:
        read(5)
    except UnsupportedStateError as error:
        assert "allow_pickle=True" in str(error), error
    else:
        raise AssertionError("a pickle was read")
assert stored.ckpt.verify(5).ok
for number in range(30):
    case = bytes((number * 7 + k * 31) % 256 for k in range(12))
    try:
        fuzz_targets.manifest(case)
    except SystemError:
        raise
    except Exception as error:  # judged by the tests of manifests
        assert not isinstance(error, PenstockError)
"""

_FALLBACK = """
from penstock import RestoreError

stored.put({})
state = {"weight": torch.arange(9.0), "other": torch.arange(5.0)}
stored.ckpt.save({"weight": state["weight"]}, 1, mode="blocking")
stored.ckpt.save(state, 2, mode="blocking")
(blob,) = [n for n in stored.now() if n.endswith(".raw") and stored.ckpt.open(2).info.uid in n]
stored.store.publish(blob, bytes(byte ^ 1 for byte in stored.now()[blob]))
template = {"weight": torch.zeros(9), "other": torch.zeros(5), "bait": [Bait()]}
try:
    stored.ckpt.restore(
        template, include=["weight", "other"], strict=False, on_damage="fallback"
    )
except RestoreError as error:
    assert "other" in str(error)
else:
    raise AssertionError("half of a damaged checkpoint was passed off")
"""


def run(program):
    done = interpreters.run(
        "-c",
        _TRAP + program + "\nassert touched == [], touched\nprint('done')",
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "done"


@pytest.mark.parametrize("program", [_EVERYTHING, _HOSTILE], ids=["everything", "hostile records"])
def test_no_path_leads_to_pickle(program):
    run(program)


def test_fallback_does_not_pickle_the_template():
    run(_FALLBACK)


def test_the_trap_works():
    with pytest.raises(AssertionError, match=r"pickle\.loads was called"):
        run("__import__('pickle').loads(b'')")


def test_importing_the_package_imports_no_pickle():
    program = "import sys, penstock; sys.exit('pickle' in sys.modules or '_pickle' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

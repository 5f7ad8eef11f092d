"""Trees of state, bitwise comparison, and damage to their stored data."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tests import interpreters

from penstock import Checkpointer
from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.backends.uring.ring import DISABLE_VARIABLE, Ring
from penstock.core.errors import CapabilityError
from penstock.core.tree.paths import parse_path
from penstock.testing.hasty import ShiftedClock

ROOT = Path(__file__).parents[2]

# So small that a few kilobytes of state have slabs, several chunks and several blocks.
TINY = {"chunk_bytes": 16384, "block_bytes": 4096, "workers": 1}
ENCODED = {"rules": [{"match": "optimizer/**", "codecs": ["zstd"]}]}


def uring_missing():
    """The reason why io_uring cannot be used here, or None."""
    if os.environ.get(DISABLE_VARIABLE):
        return f"{DISABLE_VARIABLE} is set"
    try:
        Ring(2).close()
    except CapabilityError as error:
        return str(error)
    return None


def memory():
    """A separate store; it outlives the checkpointers opened over it."""
    return MemoryBackend(MemoryConfig())


def checkpointer(backend, **options):
    return Checkpointer(backend, **{**TINY, **options})


def saved_in_memory(seed, step):
    """A store with one checkpoint, raw and encoded."""
    backend = memory()
    with checkpointer(backend, **ENCODED) as ckpt:
        ckpt.save(make_state(seed), step, mode="blocking")
    return backend


def run_program(text, *arguments, timeout):
    """Run a Python program to its end in a separate process with this one's environment."""
    return interpreters.run("-c", text, *arguments, timeout=timeout, **_around())


def run_python(*words, timeout, **variables):
    """`python WORDS...` to its end, in an interpreter that starts with `variables`."""
    around = _around(variables)
    return subprocess.run(
        _command(words), capture_output=True, check=False, timeout=timeout, text=True, **around
    )


def start_python(*words, wrap=(), **streams):
    """A running `python WORDS...`; `wrap` precedes it."""
    if not wrap:
        return interpreters.start(*words, **_around(), **streams)
    return subprocess.Popen([*wrap, *_command(words)], text=True, **_around(), **streams)


def _command(words):
    return [sys.executable, *map(str, words)]


def _around(variables=None):
    found = {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT)])}
    return {"cwd": ROOT, "env": {**os.environ, **found, **(variables or {})}}


class FlyingClock(ShiftedClock):
    """A clock that jumps at each read while `flies` is true: a hung call is late at once.

    So nothing else can be late, even on a slow machine. One jump would not suffice: later progress,
    like the seal of another blob, restarts the time.
    """

    def __init__(self, flies=lambda: False):
        super().__init__(self._jump)
        self.flies = flies
        self.jumped_s = 0.0

    def _jump(self):
        if self.flies():
            self.jumped_s += 2e3  # many of these do not make an intent too old
        return self.jumped_s


@contextmanager
def holding(faulty, operation, **which):
    """Hold calls of `faulty` as `block` does; always releases them at the end."""
    event = threading.Event()
    try:
        yield faulty.block(operation, event, **which)
    finally:
        event.set()


def make_state(seed=0):
    """Raw chunks of several blocks, a slab, an encoded chunk and slab, a value."""
    made = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=made)

    return {
        "model": {"weight": random(100, 150), "bias": random(150), "scale": random(7)},
        "optimizer": {"moment": random(100, 150), "step": random(1), "variance": random(150)},
        "table": random(6000),
        "epoch": seed,
    }


def blank(tree):
    """The same tree with other contents, for a restore to overwrite."""
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, dict):
        return {key: blank(value) for key, value in tree.items()}
    return None


def bits(tensor):
    """The bytes of a tensor's values, row-major."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype.itemsize == 1:
        plain = plain.view(torch.uint8)  # some of these dtypes cannot be copied
    flat = plain.clone(memory_format=torch.contiguous_format)
    return bytes(torch.empty(0, dtype=torch.uint8).set_(flat.untyped_storage()).numpy())


def same(one, other):
    """Whether two trees are equal in kind, type and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and bits(one) == bits(other)
    if isinstance(one, np.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        alike = [(type(k), k) for k in one] == [(type(k), k) for k in other]
        return alike and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one == other or (one != one and other != other)  # noqa: PLR0124 - nan
    return one == other


def leaves(tree, path=""):
    """`(shown path, tensor or value)`, for keys that need no escaping."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}/{key}" if path else key)
    else:
        yield path, tree


@dataclass(frozen=True)
class Place:
    """Where a frame is stored."""

    blob: str
    offset: int
    length: int


def place_of(checkpoint, path, number=0, *, link=0):
    """The place of frame `number` of the object at `path`, or of its base `link` links below."""
    contents = checkpoint.contents
    found = contents.find(parse_path(path))
    frame = [*found.frames[found.shards[0].chunks[number].frame].links()][link]
    blob = found.head.blobs[frame.blob].name
    return Place(blob, frame.offset, frame.length)


class Run:
    """A run in files that can be copied, and damaged in chosen places."""

    def __init__(self, root):
        self.root = Path(root)

    def copy_to(self, root):
        shutil.copytree(self.root, root)
        return Run(root)

    def open(self, **options):
        return checkpointer(f"posix://{self.root}?direct_io=off", **options)

    def names(self, pattern):
        found = sorted(p.relative_to(self.root).as_posix() for p in self.root.glob(pattern))
        assert found, f"nothing matches {pattern}"
        return found

    def commit(self, step, generation=0):
        return f"commits/{step:08d}-{generation}.json"

    def flip(self, name, offset, mask=0x10):
        data = bytearray(self.read(name))
        data[offset] ^= mask
        self.write(name, data)

    def zero(self, name, offset, length):
        data = bytearray(self.read(name))
        assert any(data[offset : offset + length]), "it is zero already"
        data[offset : offset + length] = bytes(length)
        self.write(name, data)

    def truncate(self, name, length):
        data = self.read(name)
        assert length < len(data)
        self.write(name, data[:length])

    def swap(self, name, one, other, length):
        data = bytearray(self.read(name))
        first, second = data[one : one + length], data[other : other + length]
        assert first != second
        data[one : one + length], data[other : other + length] = second, first
        self.write(name, data)

    def remove(self, name):
        (self.root / name).unlink()

    def read(self, name):
        return (self.root / name).read_bytes()

    def write(self, name, data):
        (self.root / name).write_bytes(data)

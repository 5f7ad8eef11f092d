"""Training jobs of every kind of state, and ways to hold a save at a chosen point."""

from __future__ import annotations

import copy
import gc
import importlib.metadata
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import torch
from tests.integration.support import same
from torch import nn

import penstock
from penstock import Checkpointer, Region
from penstock.core.abc import Placement, StateObject, StateProvider
from penstock.core.plugins.registry import GROUPS, Registry
from penstock.core.types import Kind, Role, TensorSpec
from penstock.providers.tensor.sources import TensorSource

# So small that some 100 KB of state have slabs and many chunks; `TINY_BUDGET` is smaller.
SMALL = {"chunk_bytes": 16384, "block_bytes": 4096, "workers": 2}
TINY_BUDGET = {"staging_bytes": 0}  # the minimum: two chunks


# -- state that can change everywhere --------------------------------------------------------------


class Everything:
    """One of each kind of state, small; `mutate` changes everything."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(
            nn.Linear(24, 400), nn.BatchNorm1d(400), nn.Dropout(0.1), nn.Linear(400, 24)
        )
        # A tensor as learning rate: never deferred, although an optimizer holds it.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=torch.tensor(0.01))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        self.generator = torch.Generator().manual_seed(seed)
        self.array = np.arange(5000.0) + seed
        self.rows = np.arange(6000.0).reshape(60, 100)[:, ::2] + seed
        self.loose = torch.randn(6000)
        self.strided = torch.randn(90, 70).t()
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "generator": self.generator,
            "rng": penstock.Rng(),
            "arrays": [self.array, self.rows],
            "tensors": {"loose": self.loose, "strided": self.strided},
            "values": {"epoch": seed, "losses": [0.5, seed], "note": "x" * 200},
        }
        self.step()

    def snapshot(self):
        """Independent copies of all its state, made without Penstock."""
        return {
            "model": copies(self.model.state_dict()),
            "optimizer": copies(self.optimizer.state_dict()),
            "scheduler": copies(self.scheduler.state_dict()),
            "generator": self.generator.get_state().clone(),
            "random": copies(random_state()),
            "arrays": copies([self.array, self.rows]),
            "tensors": copies({"loose": self.loose, "strided": self.strided}),
            "values": copies(self.state["values"]),
        }

    def step(self):
        """One training step: all state deferred by a lazy save changes in `optimizer.step`."""
        self.forward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def forward(self):
        self.model(torch.randn(8, 24)).square().mean().backward()

    def mutate_the_rest(self):
        """Change all that a lazy save has captured on return, BatchNorm statistics too."""
        self.forward()
        for group in self.optimizer.param_groups:
            group["lr"].mul_(0.5)
            group["weight_decay"] += 0.25
        self.scheduler.last_epoch += 3
        self.generator.manual_seed(77)
        random.random()
        np.random.rand()
        torch.rand(3)
        self.array += 1
        self.rows[...] = -1
        self.loose.mul_(-1)
        self.strided.zero_()
        self.state["values"]["losses"].append(9)
        self.state["values"]["epoch"] += 1

    def mutate_all(self):
        """Change everything, by the optimizer and behind its back."""
        self.mutate_the_rest()
        self.optimizer.step()
        with torch.no_grad():
            for tensor in self.model.state_dict().values():
                tensor.fill_(5)
            for state in self.optimizer.state.values():
                for tensor in state.values():
                    tensor.fill_(6)


def random_state():
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }


def copies(tree):
    """A deep copy that keeps nothing of the original's memory."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if isinstance(tree, dict):
        return type(tree)({key: copies(value) for key, value in tree.items()})
    if isinstance(tree, list | tuple):
        return type(tree)(copies(value) for value in tree)
    return copy.deepcopy(tree)


# -- holding a save at a chosen point --------------------------------------------------------------


class Gate(threading.Event):
    """An event; those still closed when a test fails are opened, so it ends."""

    _all: ClassVar[weakref.WeakSet[Gate]] = weakref.WeakSet()

    def __init__(self):
        super().__init__()
        self._all.add(self)

    @classmethod
    def open_all(cls):
        for gate in list(cls._all):
            gate.set()


class Held:
    """A tensor whose capture waits for `let_go`; `reached` is set when it begins to wait."""

    def __init__(self, numel=8):
        self.tensor = torch.arange(float(numel))
        self.let_go = Gate()
        self.reached = threading.Event()
        self.error: BaseException | None = None


class HeldSource(TensorSource):
    __slots__ = ("_held",)

    def __init__(self, held):
        super().__init__(held.tensor)
        self.address = None  # so the bytes are requested, not looked up
        self._held = held

    def copy_out(self, start, out, /):
        self._held.reached.set()
        self._held.let_go.wait()
        if self._held.error is not None:
            raise self._held.error
        return super().copy_out(start, out)


class HeldProvider(StateProvider):
    """Like a third party's: unknown to Penstock."""

    api_version = 1
    name = "held"
    forms = ()

    def claims(self, kind, /):
        return 50 if kind is Held else None

    def describe(self, value, path, /, *, context):
        shape = tuple(value.tensor.shape)
        spec = TensorSpec("float32", 4, shape)
        yield StateObject(
            path, Kind.TENSOR, spec, (Region.whole(shape),), Role.OTHER, "tensor", HeldSource(value)
        )

    def place(self, value, path, /, *, context):
        return Placement(finish=lambda: value)

    def rebuild(self, stored, /, *, device, context):
        raise AssertionError(stored)  # it has no forms


def registry_with_held():
    installed = [
        e for group in GROUPS.values() for e in importlib.metadata.entry_points(group=group)
    ]
    held = importlib.metadata.EntryPoint("held", f"{__name__}:HeldProvider", GROUPS["provider"])
    return Registry([*installed, held])


@contextmanager
def held_checkpointer(backend, **options) -> Iterator[Checkpointer]:
    """A checkpointer that stores `Held`, and defers the value at `hold` if lazy."""
    options = {**SMALL, "defer": "hold", **options}
    with Checkpointer(backend, registry=registry_with_held(), **options) as ckpt:
        try:
            yield ckpt
        except BaseException:
            Gate.open_all()  # or closing would wait forever
            raise


FENCE = ("penstock.core.save.job", "fence")
CAPTURE = ("penstock.core.save.job", "capture_now")


@contextmanager
def held_at(place, action) -> Iterator[None]:
    """Run `action` on a thread; the body runs while it is in the function `place`. Fails if it
    never gets there. On leaving, `action` must end unaided.
    """
    errors: list[BaseException] = []

    def run():
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - passed to the test below
            errors.append(error)

    thread = threading.Thread(target=run, name="training")
    thread.start()
    wait_until_in(place, thread)
    if not thread.is_alive():
        Gate.open_all()
        assert errors, f"it went on, past {place}"
        raise errors[0]
    try:
        yield
    except BaseException:
        Gate.open_all()
        raise
    finally:
        thread.join()
    if errors:
        raise errors[0]


def wait_until_in(place, thread):
    """Wait until `thread` is in the function `place`, or ends."""
    while thread.is_alive() and not _stands_in(thread, place):
        time.sleep(0.001)


def held_at_fence(action):
    """See `held_at`: the fence is where training waits for a pending capture."""
    return held_at(FENCE, action)


def _frame_of(thread):
    # A collection inside this call can deadlock the interpreter: it holds the lock on all threads.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread.ident)
    finally:
        if collecting:
            gc.enable()


def _stands_in(thread, place):
    frame = _frame_of(thread)
    while frame is not None:
        if (frame.f_globals["__name__"], frame.f_code.co_name) == place:
            return True
        frame = frame.f_back
    return False


def penstock_threads():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("penstock"))


def differences(one, other, path=""):
    """Paths at which two trees differ in kind, type or any bit."""
    if type(one) is type(other) and isinstance(one, dict) and list(one) == list(other):
        return [p for key in one for p in differences(one[key], other[key], f"{path}/{key}")]
    if type(one) is type(other) and isinstance(one, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [p for index, pair in pairs for p in differences(*pair, f"{path}/{index}")]
    return [] if same(one, other) else [path]

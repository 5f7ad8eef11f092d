"""The contenders: how each saves, restores, and saves in the background.

Everyone gets the same tensors. Peers get them as a flat dict, the cheapest form; Penstock gets the
module and the optimizer themselves. What a peer does not sync is synced for it before the
clock stops, and every peer is called in the fastest way that was found for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable  # noqa: TC003 - a dataclass reads its annotations
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from disk import remove

if TYPE_CHECKING:
    from pathlib import Path

    from states import TrainingState


@dataclass(frozen=True)
class Pending:
    """A background save under way."""

    wait: Callable[[], object]
    done: Callable[[], bool]
    fence: Callable[[], object] = lambda: None
    held_s: Callable[[], float] = lambda: 0.0
    """How long training was held, in `save` and at fences; 0 where nobody says. After `wait`."""


class System(ABC):
    """One way to save and restore. Imports happen in `__init__`, outside of the clock."""

    durable_by_itself = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def save(self, state: TrainingState) -> dict[str, Any] | None:
        """Save below `folder`; the caller syncs what this leaves unsynced. Returns details."""

    @abstractmethod
    def restore(self, state: TrainingState) -> dict[str, Any] | None:
        """Restore into the tensors of `state`, in place. Returns details."""

    def save_in_background(self, state: TrainingState, number: int) -> Pending:
        """Start save `number`; returns when training may go on."""
        raise NotImplementedError

    def forget(self, number: int) -> None:
        """Delete background save `number`."""
        remove(self.folder / str(number))

    def close(self) -> None:  # noqa: B027 - most keep nothing
        """Release what is kept from save to save."""


class TorchSave(System):
    """`torch.save`, and `torch.load(mmap=True)` copied into the tensors."""

    def save(self, state):
        torch.save(state.tensors, self._path)

    def restore(self, state):
        # Faster here than without mmap, which reads into new memory first.
        loaded = torch.load(self._path, weights_only=True, mmap=True)
        for name, tensor in state.tensors.items():
            tensor.copy_(loaded[name])

    @property
    def _path(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / "state.pt"


class Safetensors(System):
    """`save_file`, and every tensor of `safe_open` copied into place."""

    def __init__(self, folder):
        super().__init__(folder)
        self._open = import_module("safetensors").safe_open
        self._save = import_module("safetensors.torch").save_file

    def save(self, state):
        self.folder.mkdir(parents=True, exist_ok=True)
        self._save(state.tensors, self.folder / "state.safetensors")

    def restore(self, state):
        # Faster here than load_file, and than backend="pread".
        with self._open(self.folder / "state.safetensors", framework="pt") as stored:
            for name, tensor in state.tensors.items():
                tensor.copy_(stored.get_tensor(name))


class Dcp(System):
    """`torch.distributed.checkpoint`, one process, files synced by itself."""

    def __init__(self, folder, threads, *, keep_staging=False):
        super().__init__(folder)
        self._dcp, self._threads = import_module("torch.distributed.checkpoint"), threads
        staging = import_module("torch.distributed.checkpoint.staging")
        # Everything that wants an accelerator is off. A stager that is kept reuses its memory.
        options = staging.StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._stager = staging.DefaultStager(options) if keep_staging else None

    def _writer(self, folder):
        return self._dcp.FileSystemWriter(folder, thread_count=self._threads, sync_files=True)

    def save(self, state):
        writer = self._writer(self.folder)
        self._dcp.save(state.tensors, storage_writer=writer, no_dist=True)

    def restore(self, state):
        reader = self._dcp.FileSystemReader(self.folder)
        self._dcp.load(state.tensors, storage_reader=reader, no_dist=True)

    def save_in_background(self, state, number):
        pending = self._dcp.async_save(
            state.tensors,
            storage_writer=self._writer(self.folder / str(number)),
            async_stager=self._stager,
            no_dist=True,
        )
        return Pending(pending.result, pending.done)


class TorchSnapshot(System):
    """`torchsnapshot.Snapshot`, which syncs nothing by itself."""

    def __init__(self, folder):
        super().__init__(folder)
        self._lib = import_module("torchsnapshot")

    def _app(self, state):
        return {"state": self._lib.StateDict(**state.tensors)}

    def save(self, state):
        self._lib.Snapshot.take(str(self.folder), self._app(state))

    def restore(self, state):
        self._lib.Snapshot(str(self.folder)).restore(self._app(state))

    def save_in_background(self, state, number):
        pending = self._lib.Snapshot.async_take(str(self.folder / str(number)), self._app(state))
        return Pending(pending.wait, pending.done)


class Penstock(System):
    """This project: checksums on, durable and committed when it says so."""

    durable_by_itself = True

    def __init__(self, folder, backend="uring", mode="blocking", codecs=()):
        super().__init__(folder)
        self._lib, self._mode = import_module("penstock"), mode
        self._spec = {"type": backend, "path": str(folder)}
        self._rules = [{"match": "**", "codecs": codecs}] if codecs else []
        self._kept = None

    def _tree(self, state):
        return {"model": state.model, "optimizer": state.optimizer}

    def save(self, state):
        with self._lib.Checkpointer(self._spec, mode="blocking") as ckpt:
            report = ckpt.save(self._tree(state), step=1).result()
        return _details(report)

    def restore(self, state):
        with self._lib.Checkpointer(self._spec) as ckpt:
            report = ckpt.restore(self._tree(state))
        return _details(report)

    def save_in_background(self, state, number):
        if self._kept is None:
            self._kept = self._lib.Checkpointer(self._spec, rules=self._rules)
        handle = self._kept.save(self._tree(state), step=number, mode=self._mode)
        return Pending(
            handle.result,
            handle.done,
            self._kept.fence,
            lambda: handle.result().seconds["blocked"],
        )

    def forget(self, number):
        if number:  # the newest one stays until there is a newer one
            self._kept.delete(number - 1)

    def close(self):
        if self._kept is not None:
            self._kept.close()


def _details(report):
    return {
        "engine": report.engine,
        "direct_io": report.direct_io,
        "phases": {name: round(value, 4) for name, value in report.seconds.items()},
    }


BLOCKING = {
    "Penstock": Penstock,
    "Penstock, threads": lambda folder: Penstock(folder, "posix"),
    "safetensors": Safetensors,
    "DCP, 1 thread": lambda folder: Dcp(folder, 1),
    "DCP, 2 threads": lambda folder: Dcp(folder, 2),
    "DCP, 4 threads": lambda folder: Dcp(folder, 4),
    "TorchSnapshot": TorchSnapshot,
    "torch.save": TorchSave,
}

BACKGROUND = {
    "Penstock, lazy": lambda folder: Penstock(folder, mode="lazy"),
    "Penstock, async": lambda folder: Penstock(folder, mode="async"),
    "DCP async_save": lambda folder: Dcp(folder, 2),
    "DCP async_save, kept stager": lambda folder: Dcp(folder, 2, keep_staging=True),
    "TorchSnapshot async_take": TorchSnapshot,
}

CODECS = {
    "raw": (),
    "floatsplit": ["floatsplit"],
    "delta, floatsplit": ["delta", "floatsplit"],
    "auto": "auto",
}

ENCODED = {
    f"Penstock, {mode}: {name}": partial(Penstock, mode=mode, codecs=codecs)
    for mode in ("lazy", "async")
    for name, codecs in CODECS.items()
}

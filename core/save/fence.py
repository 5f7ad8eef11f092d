"""Holds back every optimizer step while a capture is pending."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.core.save.hooks import before_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch.optim import Optimizer

    from penstock.core.save.job import SaveJob

_pending: dict[SaveJob, float] = {}  # needs no lock: each use is one atomic operation
_waited_s = 0.0


def arm(job: SaveJob, timeout_s: float) -> None:
    """Make optimizers wait for `job`'s capture, each time at most `timeout_s` seconds."""
    _pending[job] = timeout_s
    before_steps(_before_step)


def disarm(job: SaveJob) -> None:
    """Stop making optimizers wait for `job`."""
    _pending.pop(job, None)


def waited_s() -> float:
    """Return the seconds for which steps of optimizers have waited for captures so far."""
    return _waited_s


def fence_all() -> None:
    """Wait for every pending capture of this process, whose memory is about to change."""
    for job in list(_pending):
        job.fence(None)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    global _waited_s  # noqa: PLW0603 - torch calls this function without an object of ours
    if not _pending:
        return
    began_s = time.monotonic()
    for job, timeout_s in list(_pending.items()):
        # The step of another trainer is no fence for this job's tensors: an operation on them may
        # be running, and only the check before the commit would find it.
        passes = job.is_changed_by(partial(_storages, optimizer))
        if job.fence(timeout_s, passes=passes) and passes:
            disarm(job)
    _waited_s += time.monotonic() - began_s


def _storages(optimizer: Optimizer) -> Iterator[int]:
    """Yield the storage addresses that a step changes: first of parameters, then of their state.

    Yields 0 for a parameter without its own memory. The state is needed too, since it may be
    deferred although no parameter is: parameters in shared memory, or changed by a forward pass,
    are never deferred.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield address_of(parameter)
    for tensor in _tensors(optimizer.state):
        address = address_of(tensor)
        if address:
            yield address


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if hasattr(state, "untyped_storage"):
        yield state
    elif isinstance(state, dict | list | tuple):
        for item in state.values() if isinstance(state, dict) else state:
            yield from _tensors(item)


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 for a subclass without its own memory."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor subclass that wraps others
        return 0


# A forked child has none of the threads that would finish the captures.
os.register_at_fork(after_in_child=_pending.clear)

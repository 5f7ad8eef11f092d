"""The hook that holds back every optimizer step while a capture is pending.

One global pre-step hook of torch per process: it fires through wrappers, for optimizers outside
the tree, and for those that step inside backward. It is put in once and stays: taking it out
from another thread would change the dict that torch iterates over.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.core.saving import SaveJob

_lock = threading.Lock()  # guards `_pending` and `_installed`
_pending: dict[SaveJob, float] = {}
_installed = False


def arm(job: SaveJob, timeout_s: float) -> None:
    """Make optimizers wait for `job`'s capture, each time at most `timeout_s` seconds."""
    global _installed  # noqa: PLW0603 - torch's registry is global too
    with _lock:
        _pending[job] = timeout_s
        if not _installed:
            from torch.optim.optimizer import (  # noqa: PLC0415 - torch is loaded only to save
                register_optimizer_step_pre_hook,
            )

            register_optimizer_step_pre_hook(_before_step)
            _installed = True


def disarm(job: SaveJob) -> None:
    """`job` needs no fence any more."""
    with _lock:
        _pending.pop(job, None)


def fence_all() -> None:
    """Wait for every pending capture of this process: memory of any of them is about to change."""
    with _lock:
        jobs = list(_pending)
    for job in jobs:
        job.fence(None)


def _before_step(*_: object) -> None:
    if not _pending:
        return
    with _lock:
        jobs = list(_pending.items())
    for job, timeout_s in jobs:
        if job.fence(timeout_s):
            disarm(job)


def _disarm_child() -> None:
    """A forked child has none of the threads that would finish a capture."""
    global _lock  # noqa: PLW0603 - the parent's may be held at this moment
    _lock = threading.Lock()
    _pending.clear()


os.register_at_fork(after_in_child=_disarm_child)

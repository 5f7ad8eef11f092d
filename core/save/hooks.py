"""Calls functions before and after every optimizer step of the process.

torch has one registry of global hooks per process. Its hooks fire for wrapped optimizers, for those
outside the tree, and for those that step inside backward. Our hooks stay installed: removal from
another thread would change the dict that torch iterates over.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_lock = threading.RLock()  # guards `_installed`; reentrant, since a signal handler may save
_installed: set[Callable[..., None]] = set()


def before_steps(call: Callable[..., None]) -> None:
    """Call `call` with each optimizer before it steps, from now on. A second time has no effect."""
    _install("register_optimizer_step_pre_hook", call)


def after_steps(call: Callable[..., None]) -> None:
    """Call `call` with each optimizer after it steps, from now on. A second time has no effect."""
    _install("register_optimizer_step_post_hook", call)


def _install(register: str, call: Callable[..., None]) -> None:
    with _lock:
        if call in _installed:
            return
        from torch._compile import _disable_dynamo  # noqa: PLC0415 - torch is loaded only to save

        optimizer = importlib.import_module("torch.optim.optimizer")
        # torch.compile would trace the hook into the step that it compiles. Unlike
        # `torch.compiler.disable`, which takes seconds, this imports dynamo only at the first step;
        # creating the optimizer has imported it by then.
        hook: Any = _disable_dynamo(call)
        getattr(optimizer, register)(hook)
        _installed.add(call)


def _in_child() -> None:
    global _lock  # noqa: PLW0603 - the parent may hold its lock at this moment
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_in_child)

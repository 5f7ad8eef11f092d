"""Holds that keep torch.multiprocessing from moving a tensor's memory while it is read.

Sending a tensor to another process moves its storage to shared memory, usually on a thread of the
queue, and frees the old memory. While torch moves a storage, a table lists it, so that no two
threads move it at once. A hold is an entry in that table, so a thread that wants to move the
storage waits until the hold ends.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")

_torch: Any = torch.storage
# A torch version without table and lock moves storages unseen: holds then have no effect.
_moves: dict[int, Any] = getattr(_torch, "_share_memory_map", {})
if not hasattr(_torch, "_share_memory_lock"):
    _torch._share_memory_lock = threading.Lock()  # noqa: SLF001 - torch has no other name


class _Hold:
    """A table entry for a storage that is being read; `__enter__` waits for the end of the read."""

    __slots__ = ("_storage", "_unread", "holders")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._unread = threading.Lock()  # locked while any holder reads the storage
        self._unread.acquire()
        self.holders = 1  # guarded by torch's lock of the table

    def release(self) -> None:
        self._unread.release()

    def __enter__(self) -> None:
        with self._unread:
            pass
        # After waiting for an entry, torch moves the storage without its own entry: the next hold
        # would not see the move. A move here, under an entry, leaves torch nothing to move.
        self._storage.share_memory_()

    def __exit__(self, *_: object) -> None:
        pass


def hold(storages: Iterable[torch.UntypedStorage]) -> Callable[[], None]:
    """Keep `storages` in place until the returned function is called, on any thread."""
    held: list[int] = []
    left = deque(storages)
    while (moving := _enter(left, held)) is not None:
        with moving:
            pass

    def release() -> None:
        with _torch._share_memory_lock:  # noqa: SLF001
            over = [_leave(key) for key in held]
        for entry in over:
            if entry is not None:
                entry.release()

    return release


def still(storages: Callable[[], Iterable[torch.UntypedStorage]], action: Callable[[], T]) -> T:
    """Run `action`, which may take milliseconds, while no thread moves `storages`."""
    while True:
        with _torch._share_memory_lock:  # noqa: SLF001
            moving = _first_move(storages()) if _moves else None
            if moving is None:
                return action()
        with moving:
            pass


def _enter(left: deque[torch.UntypedStorage], held: list[int]) -> Any:
    """Hold the storages in `left` up to one that torch is moving; return its entry, or None.

    Held storages are removed from `left`, and their keys are added to `held`.
    """
    with _torch._share_memory_lock:  # noqa: SLF001
        while left:
            key: int = left[0]._cdata  # noqa: SLF001 - the key of torch's table
            entry = _moves.get(key)
            if entry is None:
                _moves[key] = _Hold(left[0])
            elif isinstance(entry, _Hold):
                entry.holders += 1
            else:
                return entry
            held.append(key)
            left.popleft()
        return None


def _leave(key: int) -> _Hold | None:
    """Remove a hold; return the entry if that was the storage's last hold."""
    entry = _moves[key]
    entry.holders -= 1
    if entry.holders:
        return None
    del _moves[key]
    return entry  # type: ignore[no-any-return]  # only holds have holders


def _first_move(storages: Iterable[torch.UntypedStorage]) -> Any:
    entries = (_moves.get(storage._cdata) for storage in storages)  # noqa: SLF001
    return next((e for e in entries if e is not None and not isinstance(e, _Hold)), None)


def _forget_in_child() -> None:
    """Drop all holds and torch's lock in a forked child, which has no threads to release them."""
    _torch._share_memory_lock = threading.Lock()  # noqa: SLF001
    for key in [key for key, entry in _moves.items() if isinstance(entry, _Hold)]:
        del _moves[key]


os.register_at_fork(after_in_child=_forget_in_child)

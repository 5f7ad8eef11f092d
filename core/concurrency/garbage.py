"""Keeps Python's garbage collector from running while many objects are made that all live on."""

from __future__ import annotations

import gc
import os
import threading


class _CollectionHold:
    """A context in which no collection starts; several threads may be in it, and nest it.

    A class rather than a generator: to end one makes an object, and so starts the collection.
    """

    def __init__(self) -> None:
        # Guards both fields. Reentrant: a signal handler may save to another run.
        self._lock = threading.RLock()
        self._holders = 0
        self._enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._holders:
                self._enabled = gc.isenabled()
                gc.disable()
            self._holders += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if not self._holders:
                return  # a child that was forked inside
            self._holders -= 1
            if not self._holders and self._enabled:
                gc.enable()

    def leave_in_child(self) -> None:
        """None of those that are in it will leave it in a forked process."""
        self._lock = threading.RLock()  # the parent's may be held at this moment
        if self._holders and self._enabled:
            gc.enable()
        self._holders = 0


collections_held = _CollectionHold()
"""No collection starts before the last of those that are in it has left.

To describe and plan 3,000 tensors makes so many objects that the collector ran some 60 times in it,
and now and then looked at every object of the process, for up to 0.7 s. None of them are garbage.
A collector that the user has switched off stays off.
"""

# A loader starts its workers where it is asked for its state, as a rule by forking.
os.register_at_fork(after_in_child=collections_held.leave_in_child)

"""A hold that stops Python's garbage collector while many long-lived objects are made."""

from __future__ import annotations

import gc
import os
import threading

_MANY = 50_000
"""If more objects are made during a hold, they move to the oldest generation when it ends.

Otherwise the collector would visit each of them three times.
"""

_STARTUP = 1_000
"""With more frozen objects than this, the user froze some: Python 3.12 freezes fewer at startup."""


class _CollectionHold:
    """A context in which no collection starts; several threads may enter it, and nest it.

    It is a class, because leaving a generator makes an object, which can start a collection.
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
                return  # this process was forked inside the block, and `leave_in_child` left it
            self._holders -= 1
            if not self._holders and self._enabled:
                if gc.get_count()[0] > _MANY and gc.get_freeze_count() < _STARTUP:
                    # Both only join lists, and move young objects to the oldest generation.
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()

    def leave_in_child(self) -> None:
        """Leave all blocks in a forked child, where the threads that were in them do not exist."""
        self._lock = threading.RLock()  # a thread of the parent may hold the old one
        if self._holders and self._enabled:
            gc.enable()
        self._holders = 0


collections_held = _CollectionHold()
"""The hold of this process: no collection starts until the last thread has left it.

Describing and planning 3,000 tensors made so many objects that the collector ran some 60 times,
and sometimes visited every object of the process, for up to 0.7 s. None of them were garbage. After
the hold, many objects count as old, and wait for the next full collection. A collector that the
user has disabled stays disabled, and 1,000 objects or more that the user has frozen stay frozen.
"""

# A data loader may fork its workers when it is asked for its state, inside the block.
os.register_at_fork(after_in_child=collections_held.leave_in_child)

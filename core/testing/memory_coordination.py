"""Coordination within one process, for tests whose ranks are threads, and for simulations."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock.core.abc import (
    Coordination,
    check_coordination_key,
    check_coordination_value,
)
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.errors import CoordinationError

if TYPE_CHECKING:
    from collections.abc import Sequence


class MemoryBoard:
    """The values that instances of `MemoryCoordination` share. Thread-safe."""

    def __init__(self) -> None:
        """Create a board without values."""
        self.changed = threading.Condition()  # guards `_values`, and tells of changes
        self._values: dict[str, bytes] = {}

    def post(self, key: str, value: bytes) -> None:
        """Set a value."""
        with self.changed:
            self._values[key] = value
            self.changed.notify_all()

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return values, None where there is none."""
        with self.changed:
            return [self._values.get(key) for key in keys]

    def decide(self, key: str, value: bytes) -> bytes:
        """Set a value if there is none, and return the one that is there."""
        with self.changed:
            first = self._values.setdefault(key, value)
            self.changed.notify_all()
            return first

    def holds(self, key: str) -> bool:
        """Return whether `key` has a value; the caller holds `changed`."""
        return key in self._values


class MemoryCoordination(Coordination):
    """One rank's view of a board, as the contract says; no call ever waits for a store."""

    def __init__(self, board: MemoryBoard) -> None:
        """Attach to `board`."""
        self._board = board
        self._closed = False

    @property
    def host(self) -> str:
        """This machine, and no other one."""
        return "localhost"

    def post(self, key: str, value: bytes, /) -> None:
        """Post as the contract says."""
        check_coordination_value(key, value)
        self._check_open()
        self._board.post(key, bytes(value))

    def read(self, keys: Sequence[str], /) -> list[bytes | None]:
        """Read as the contract says; the values are of one moment."""
        for key in keys:
            check_coordination_key(key)
        self._check_open()
        return self._board.read(keys)

    def decide(self, key: str, value: bytes, /) -> bytes:
        """Decide as the contract says."""
        check_coordination_value(key, value)
        self._check_open()
        return self._board.decide(key, bytes(value))

    def wait(self, key: str, timeout_s: float, /) -> bool:
        """Wait as the contract says; wakes up at once."""
        check_coordination_key(key)
        self._check_open()
        deadline = Deadline(timeout_s)
        with self._board.changed:
            while not self._board.holds(key) and not deadline.is_over():
                self._board.changed.wait(deadline.left_s())
            return self._board.holds(key)

    def close(self) -> None:
        """Close as the contract says."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            msg = "this rank's coordination is closed"
            raise CoordinationError(msg)

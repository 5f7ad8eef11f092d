"""Waits for a value by reading again and again, for stores whose own waiting cannot be used."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.core.concurrency.watchdog import Deadline

if TYPE_CHECKING:
    from penstock.core.abc import Coordination


def wait_by_reading(
    coordination: Coordination,
    key: str,
    timeout_s: float,
    *,
    first_s: float,
    growth: float,
    most_s: float,
) -> bool:
    """Return whether `key` has a value, at the latest after `timeout_s` and one call.

    Args:
        coordination: Is read.
        key: The key.
        timeout_s: How long to wait for a value.
        first_s: The first pause.
        growth: How many times as long each pause is as the one before.
        most_s: The longest pause.

    Raises:
        CoordinationError: The store does not answer, or the key is not allowed.
    """
    deadline = Deadline(timeout_s)
    pause_s = first_s
    while True:
        if coordination.read([key])[0] is not None:
            return True
        if deadline.is_over():
            return False
        time.sleep(min(pause_s, deadline.left_s()))
        pause_s = min(growth * pause_s, most_s)

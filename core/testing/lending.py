"""Buffers that are only lent for a call: who keeps one is found out."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_AFTERWARDS = 0x5A
_T = TypeVar("_T")


class Lender:
    """Lends buffers, and puts them to another use once the call is over.

    Who keeps a view is caught by CPython's count of views. Who keeps an address finds other bytes
    there, for as long as the lender lives.
    """

    def __init__(self) -> None:
        self._memories: list[bytearray] = []

    def lend(self, data: bytes | memoryview, call: str, use: Callable[[memoryview], _T]) -> _T:
        """Lend a copy of `data` to `use`, which makes the call that `call` names.

        Raises:
            AssertionError: A view of it is still there after the call.
        """
        memory = bytearray(data)
        self._memories.append(memory)
        result = use(memoryview(memory))  # the only reference is that of the call
        memory[:] = bytes([_AFTERWARDS]) * len(memory)
        if memory and _has_views(memory):
            msg = (
                f"{call} keeps a view of the buffer that it was given: that is its own only "
                "during the call, and holds other bytes afterwards; copy what is needed later"
            )
            raise AssertionError(msg)
        return result


def _has_views(memory: bytearray) -> bool:
    for _ in range(2):
        try:
            memory.pop()  # what has views cannot change its size
        except BufferError:
            gc.collect()  # a view in a cycle is kept by nobody
        else:
            return False
    return True

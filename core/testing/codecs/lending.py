"""Buffers that are lent for one call, and checked for views that the call has kept."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_AFTERWARDS = 0x5A
_T = TypeVar("_T")


class Lender:
    """Lends buffers, and overwrites them once the call is over.

    A call that keeps a view is found by CPython's count of views. A call that keeps an address
    finds other bytes there, for as long as the lender lives.
    """

    def __init__(self) -> None:
        self._memories: list[bytearray] = []

    def lend(self, data: bytes | memoryview, call: str, use: Callable[[memoryview], _T]) -> _T:
        """Lend a copy of `data` to `use`, which makes the call that `call` names.

        Raises:
            AssertionError: A view of the buffer is still there after the call.
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
            memory.pop()  # a bytearray with views refuses to change its size
        except BufferError:
            gc.collect()  # once: a view in a dead cycle is not kept
        else:
            return False
    return True

"""Reads the memory of this process at many addresses with one numpy call.

Tested in `tests/core/save/test_capture.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_WIDTH = 8192
"""Maximum bytes at each address: numpy limits addresses times width to 63 bits."""

_FIRST = 1  # to numpy, an array at the address 0 has no memory
_MOST_ADDRESSES = 1 << 56


def gather(addresses: NDArray[np.int64], width: int) -> NDArray[np.void]:
    """Return a copy of the `width` bytes at each address.

    Args:
        addresses: Addresses of readable memory, which is not checked.
        width: Bytes at each address, at most `MOST_WIDTH`.
    """
    memory: NDArray[np.void] = np.asarray(_Memory(width))
    return memory[addresses - _FIRST]


class _Memory:
    """The memory of the process as an array with an element at each address."""

    def __init__(self, width: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": f"|V{width}",
            "shape": (min(_MOST_ADDRESSES, (1 << 62) // width),),
            "strides": (1,),
            "data": (_FIRST, True),
        }

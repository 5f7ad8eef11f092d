"""The comparison of a tensor in half precision with the rounded elements of one in float32.

torch rounds twice as fast as `convert_floats`, which reads such a tensor again. The two agree but
for the bits of a NaN, and a processor may have instructions that take the smallest numbers for
zero. So what holds a NaN counts as different, and torch is compared with `convert_floats` first.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.core.abc import convert_floats
from penstock.providers.tensor.blocks import blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}

_BLOCK = 1 << 20
_DEVICE_BLOCK = 8 << 20
"""Elements that are compared at once, on a CPU and on a device. Smaller blocks take the GIL more
often; larger ones leave the cache, or take more memory of the device."""

_ALONE = 32 << 10
"""Most elements for which torch starts no threads. Its threads would wait for those of the training
loop: beside a busy loop the comparison took ten times as long."""

_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
_SIGN = 0x8000

_memcmp = ctypes.CDLL(None).memcmp  # unlike `==` of memoryviews, it releases the GIL
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def is_rounded(tensor: torch.Tensor, master: torch.Tensor) -> bool:
    """Return whether `tensor` has the elements of `master`, rounded to nearest even, bit for bit.

    False where it has a NaN. The two are on one device.
    """
    if master.dtype is not torch.float32 or tensor.dtype not in DTYPES:
        return False
    if tensor.shape != master.shape or tensor.is_neg() or master.is_neg():
        return False
    if not _rounds_as_core(tensor.dtype, tensor.device):
        return False
    if tensor.is_cpu and tensor.is_contiguous() and master.is_contiguous():
        return _is_flat_rounded(tensor.view(-1), master.view(-1))
    size = _ALONE if tensor.is_cpu else _DEVICE_BLOCK
    scratch = torch.empty(min(size, tensor.numel()), dtype=tensor.dtype, device=tensor.device)
    return all(
        _equal(one, scratch[: one.numel()].view(one.shape).copy_(other))
        for one, other in _pieces(tensor, master, size)
    )


def _is_flat_rounded(tensor: torch.Tensor, master: torch.Tensor) -> bool:
    count = tensor.numel()
    scratch = torch.empty(min(_BLOCK, count), dtype=tensor.dtype, device="cpu")
    words: NDArray[np.int16] = scratch.view(torch.int16).numpy()
    infinity = _INFINITY[tensor.dtype]
    for start in range(0, count, _BLOCK):
        size = min(_BLOCK, count - start)
        # One call for all pieces: each call has to wait for the GIL.
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage] - torch has no other
            _split(scratch[:size]), _split(master[start : start + size])
        )
        if _memcmp(scratch.data_ptr(), tensor.data_ptr() + 2 * start, 2 * size):
            return False
        found = words[:size]
        if found.max() > infinity or found.view(np.uint16).max() > infinity | _SIGN:
            return False  # a NaN
    return True


def _split(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor, _ALONE)


def _pieces(
    tensor: torch.Tensor, master: torch.Tensor, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    shape, count = tuple(tensor.shape), tensor.numel()
    for start in range(0, count, size):
        for index, _ in blocks(shape, start, min(count, start + size)):
            yield tensor[index], master[index]


def _equal(one: torch.Tensor, rounded: torch.Tensor) -> bool:
    # As integers, so that 0.0 and -0.0 differ. The maximum of what holds a NaN is NaN.
    if not torch.equal(one.view(torch.int16), rounded.view(torch.int16)):
        return False
    return not bool(torch.isnan(rounded.max()))


@lru_cache(maxsize=64)
def _rounds_as_core(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch rounds to `dtype` on this device as `convert_floats` does."""
    # All exponents, with the last bits that are kept and the first that are dropped: ties, and the
    # values beside them. Then some that overflow, or become subnormal, by a hair.
    tops = np.arange(0, 0x7F80_0000, 0x0040_0000, dtype=np.uint32)
    low = np.array([1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000], np.uint32)
    bits = np.concatenate(
        [(tops[:, None] + low).reshape(-1), tops, 0x477F_E000 + low, [0x7F80_0000]]
    )
    bits = np.concatenate([bits, bits | 0x8000_0000]).astype(np.uint32)
    name = DTYPES[dtype]
    expected = np.empty(len(bits), np.int16)
    convert_floats(_bytes(bits), "float32", _bytes(expected), name)
    floats = torch.frombuffer(bytearray(bits.tobytes()), dtype=torch.float32).to(device)
    found = floats.to(dtype).view(torch.int16).cpu().numpy()
    return bool(np.array_equal(found, expected))


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.data.cast("B")

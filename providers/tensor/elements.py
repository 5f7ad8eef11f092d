"""Tensor elements: cut into blocks for plain indexing, gathered, and compared.

`is_rounded` compares a tensor with its master. It rounds the master with torch, which takes half as
long as core's `convert_floats`. But a restore uses `convert_floats`, so both must give the same
bits. They differ in the bits of NaNs, so a tensor with a NaN counts as different. Some processors
flush subnormal numbers to zero, so torch's rounding is first checked against `convert_floats`.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from penstock.core.abc import convert_floats

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.core.abc import Lines

Index: TypeAlias = "tuple[int | slice, ...]"

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}

_BLOCK = 1 << 20
_DEVICE_BLOCK = 8 << 20
"""Elements that are compared at once, on a CPU and on a device. Smaller blocks take the GIL more
often; larger ones leave the cache, or take more device memory."""

_ALONE = 32 << 10
"""The most elements for which torch starts no threads. Its threads would wait for the training
loop's threads: beside a busy loop the comparison took ten times as long."""

_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
_SIGN = 0x8000

_memcmp = ctypes.CDLL(None).memcmp  # unlike `==` of memoryviews, it releases the GIL
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def blocks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Index, int]]:
    """Cut the row-major elements `[start, stop)` of an array of `shape` into blocks.

    Yields `(index, position)`: the elements of `array[index]` begin at `position` in the range.
    There are at most two blocks per dimension, plus one.
    """
    if start >= stop:
        return
    if start == 0 and stop == math.prod(shape):
        yield (), 0
        return
    inner = shape[1:]
    row = math.prod(inner)
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        begin = last * row
        for index, position in blocks(inner, start - begin, stop - begin):
            yield (last, *index), position
        return
    if start % row:
        begin = (first - 1) * row
        for index, position in blocks(inner, start - begin, row):
            yield (first - 1, *index), position
    if first < last:
        yield (slice(first, last),), first * row - start
    if stop % row:
        for index, position in blocks(inner, 0, stop - last * row):
            yield (last, *index), last * row - start + position


def may_overlap(shape: Sequence[int], strides: Sequence[int], width: int) -> bool:
    """Return whether two elements of `width` may share memory; False is certain, True is not.

    `strides` and `width` are in the same unit.
    """
    # By stride, the smallest first: elements are apart if each stride exceeds the reach of all
    # smaller dimensions. An exact answer takes far longer, and a wrong True costs only scratch
    # memory.
    reach = width - 1
    dims = zip(strides, shape, strict=True)
    for stride, size in sorted((abs(st), n) for st, n in dims if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


class GatheredLines(NamedTuple):
    """The lines (see `Lines`) of several tensors, copied together on the tensors' device.

    Attributes:
        data: All bytes, one-dimensional `uint8`.
        order: The numbers of the tensors, in the order of their bytes in `data`.
        sizes: The number of bytes of each tensor, in the same order.
    """

    data: torch.Tensor
    order: list[int]
    sizes: list[int]

    def split(self, host: torch.Tensor) -> list[bytes]:
        """Return the bytes of each tensor, in number order; `host` is `data` in host memory."""
        view = host.numpy().data
        pieces = [b""] * len(self.order)
        at = 0
        for number, size in zip(self.order, self.sizes, strict=True):
            pieces[number] = bytes(view[at : at + size])
            at += size
        return pieces


def gather_lines(tensors: Sequence[torch.Tensor], lines: Sequence[Lines]) -> GatheredLines:
    """Gather lines of tensors that are on one device, on its current stream.

    Args:
        tensors: The tensors, each as its `carrier`, whose elements copy bit by bit.
        lines: The lines of each tensor.

    The lines of a contiguous tensor are one strided view, and `cat` copies many views in one
    kernel. 1,000 tensors take some 3 ms of host time. Indexing each would take three times as long.
    """
    groups: dict[tuple[torch.dtype, int], tuple[list[int], list[int], list[torch.Tensor]]] = {}
    for number, (source, of) in enumerate(zip(tensors, lines, strict=True)):
        itemsize = source.dtype.itemsize
        width, step = of.width // itemsize, of.step // itemsize
        is_plain = source.is_contiguous() and not source.is_conj() and not source.is_neg()
        # Views of one width are stacked as rows; all other pieces are concatenated.
        key = source.dtype, width if is_plain and of.steps else 0
        order, sizes, pieces = groups.setdefault(key, ([], [], []))
        order.append(number)
        sizes.append((of.steps + 1) * of.width)
        last = source.numel() - width
        if not is_plain:
            for start in of.starts(source.numel() * itemsize):
                first = start // itemsize
                for index, _ in blocks(tuple(source.shape), first, first + width):
                    pieces.append(source[index].resolve_conj().resolve_neg().reshape(-1))
        elif not of.steps:
            pieces.append(source.view(-1))
        elif last == of.steps * step:
            pieces.append(source.as_strided((of.steps + 1, width), (step, 1)))
        else:
            pieces.append(source.as_strided((of.steps, width), (step, 1)))
            end = source.storage_offset() + last
            pieces.append(source.as_strided((1, width), (width, 1), end))
    joined = [torch.cat(pieces).view(-1).view(torch.uint8) for _, _, pieces in groups.values()]
    return GatheredLines(
        joined[0] if len(joined) == 1 else torch.cat(joined),
        [number for order, _, _ in groups.values() for number in order],
        [size for _, sizes, _ in groups.values() for size in sizes],
    )


def is_rounded(tensor: torch.Tensor, master: torch.Tensor) -> bool:
    """Return whether `tensor` is `master` rounded to nearest even, bit for bit.

    Returns False also if `tensor` has a NaN, or if torch does not round to its dtype, on its
    device, as core does. Both tensors must be on the same device.
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
        bits = words[:size]
        if bits.max() > infinity or bits.view(np.uint16).max() > infinity | _SIGN:
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
    # As integers, so that 0.0 and -0.0 differ. The maximum of values with a NaN is NaN.
    if not torch.equal(one.view(torch.int16), rounded.view(torch.int16)):
        return False
    return not bool(torch.isnan(rounded.max()))


@lru_cache(maxsize=64)
def _rounds_as_core(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch rounds to `dtype` on this device as `convert_floats` does."""
    # All exponents, with the last bits that are kept and the first that are dropped: ties, and the
    # values beside them. Then values that barely overflow, or barely become subnormal.
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
    rounded = floats.to(dtype).view(torch.int16).cpu().numpy()
    return bool(np.array_equal(rounded, expected))


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.data.cast("B")

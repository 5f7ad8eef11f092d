"""Gathers a few lines of many tensors of one device by a few kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock.providers.tensor.blocks import blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.abc import Lines


class GatheredLines(NamedTuple):
    """The lines of some tensors, in memory of their own on the tensors' device.

    Attributes:
        data: All bytes; of `uint8`, with one dimension.
        order: The numbers of the tensors in the order in which their bytes stand there.
        sizes: How many bytes are of each tensor, in the same order.
    """

    data: torch.Tensor
    order: list[int]
    sizes: list[int]

    def split(self, host: torch.Tensor) -> list[bytes]:
        """Return the bytes of each tensor, in order of their numbers; `host` is `data` there."""
        view = host.numpy().data
        found = [b""] * len(self.order)
        at = 0
        for number, size in zip(self.order, self.sizes, strict=True):
            found[number] = bytes(view[at : at + size])
            at += size
        return found


def gather_lines(tensors: Sequence[torch.Tensor], lines: Sequence[Lines]) -> GatheredLines:
    """Gather lines of tensors of one device, in order of its current stream.

    Args:
        tensors: The tensors, each as its `carrier`, whose elements copy bit by bit.
        lines: The lines of each.

    A strided view has the lines of a contiguous tensor, and `cat` copies many views by one kernel:
    1,000 tensors take some 3 ms of the host, and indexing each would take three times as long.
    """
    groups: dict[tuple[torch.dtype, int], tuple[list[int], list[int], list[torch.Tensor]]] = {}
    for number, (source, of) in enumerate(zip(tensors, lines, strict=True)):
        itemsize = source.dtype.itemsize
        width, step = of.width // itemsize, of.step // itemsize
        is_plain = source.is_contiguous() and not source.is_conj() and not source.is_neg()
        # Views of one width stand below each other, all else one behind the other.
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
    found = [torch.cat(pieces).view(-1).view(torch.uint8) for _, _, pieces in groups.values()]
    return GatheredLines(
        found[0] if len(found) == 1 else torch.cat(found),
        [number for order, _, _ in groups.values() for number in order],
        [size for _, sizes, _ in groups.values() for size in sizes],
    )

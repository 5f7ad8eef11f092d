"""Cuts the logged steps of several ranks again, for ranks that hold other parts of the parameters.

Tested in `tests/integration/log/test_ranks.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core.abc import StateObject
from penstock.core.log.grads import NotLoggedError, local_of
from penstock.core.plan.regions import common_region, relative
from penstock.core.tree.describe import describe_tree
from penstock.core.types import Region

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from penstock.core.log.grads import Cut
    from penstock.core.tree.containers import Providers


def cuts_of(tensors: Sequence[torch.Tensor], providers: Providers) -> list[Cut]:
    """Return, for each tensor, its whole shape and the regions that this rank holds."""
    tree = {str(number): tensor for number, tensor in enumerate(tensors)}
    description = describe_tree(tree, providers=providers, allow_pickle=False)
    return [
        (entry.spec.shape, entry.regions)
        for entry in description.entries
        if isinstance(entry, StateObject)
    ]


def recut(
    steps: Sequence[Mapping[str, Any]],
    parameters: Sequence[Sequence[torch.Tensor]],
    providers: Providers,
) -> dict[str, Any]:
    """Return one step as this rank would have logged it.

    Args:
        steps: The same step of one optimizer as each rank logged it, in the order of the ranks.
        parameters: The parameters of each group on this rank.
        providers: The providers that describe the parameters.

    Raises:
        NotLoggedError: The ranks have logged different steps, or a part of a gradient is missing on
            all ranks.
    """
    first = steps[0]
    for step in steps:
        for key in ("captured", "options"):
            if step[key] != first[key]:
                msg = f"the ranks have logged different {key} of {first['optimizer']}"
                raise NotLoggedError(msg)
        if [len(group) for group in step["layout"]] != [len(group) for group in parameters]:
            msg = f"the parameter groups of {first['optimizer']} differ from those in the log"
            raise NotLoggedError(msg)
    pieces = [[*_pieces(step)] for step in steps]
    layout: list[list[Any]] = []
    flat: dict[str, list[torch.Tensor]] = {}
    number = 0
    for group in parameters:
        layout.append([])
        cuts = cuts_of(group, providers)
        for parameter, (shape, regions) in zip(group, cuts, strict=True):
            held = [piece for rank in pieces for piece in rank[number]]
            number += 1
            if not held:
                layout[-1].append(None)
                continue
            dtype, gradient = _assemble(held, shape, regions)
            flat.setdefault(dtype, []).append(gradient)
            layout[-1].append([dtype, list(local_of(parameter).shape), []])
    return {
        **first,
        "digest": "",  # the logged digests are of other parts
        "layout": layout,
        "grads": {dtype: _joined(tensors) for dtype, tensors in flat.items()},
    }


class _LoggedPiece(NamedTuple):
    dtype: str
    shape: tuple[int, ...]  # of the whole gradient
    region: Region
    elements: torch.Tensor


def _pieces(step: Mapping[str, Any]) -> Iterator[list[_LoggedPiece]]:
    """Yield, for each parameter, the pieces of its gradient that a rank logged."""
    left = dict(step["grads"])
    for row in (row for group in step["layout"] for row in group):
        pieces: list[_LoggedPiece] = []
        if row is not None:
            dtype, local, _, *cut = row
            shape, regions = cut or (local, [[[0] * len(local), local]])
            for offsets, sizes in regions:
                count = math.prod(sizes)
                data, left[dtype] = left[dtype][:count], left[dtype][count:]
                piece = _LoggedPiece(
                    dtype, tuple(shape), Region(offsets, sizes), data.reshape(sizes)
                )
                pieces.append(piece)
        yield pieces


def _assemble(
    held: Sequence[_LoggedPiece],
    shape: tuple[int, ...],
    regions: Sequence[Region],
) -> tuple[str, torch.Tensor]:
    """Return the dtype and the elements of this rank's regions, flat and concatenated."""
    import torch  # noqa: PLC0415 - torch is loaded only to log

    dtype, elements = held[0].dtype, held[0].elements
    parts = []
    for region in regions:
        out = torch.empty(region.sizes, dtype=elements.dtype)
        missing = torch.ones(region.sizes, dtype=torch.bool)
        for piece in held:
            if (piece.dtype, piece.shape) != (dtype, shape):
                msg = f"a gradient of the log has shape {piece.shape}, its parameter {shape}"
                raise NotLoggedError(msg)
            common = common_region(region, piece.region)
            if common is not None:
                here = _slices(relative(common, region))
                out[here] = piece.elements[_slices(relative(common, piece.region))]
                missing[here] = False
        if missing.any():
            msg = f"a part of a gradient of shape {shape} is in no rank's log"
            raise NotLoggedError(msg)
        parts.append(out.reshape(-1))
    return dtype, _joined(parts) if parts else elements.new_empty(0)


def _slices(region: Region) -> tuple[slice, ...]:
    pairs = zip(region.offsets, region.sizes, strict=True)
    return tuple(slice(offset, offset + size) for offset, size in pairs)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch  # noqa: PLC0415 - torch is loaded only to log

    return torch.cat([*tensors]) if len(tensors) > 1 else tensors[0]

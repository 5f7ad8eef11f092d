"""Copies the gradients that a step has used.

Tested in `tests/integration/log/test_ends.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    import torch

    from penstock.core.types import Region

    Cut: TypeAlias = tuple[tuple[int, ...], tuple[Region, ...]]


class NotLoggedError(PenstockError):
    """A step cannot be replayed exactly, so the log ends; the message says why."""


@dataclass(frozen=True, slots=True)
class GradCopies:
    """Copies of the gradients of one step.

    Attributes:
        layout: For each group, a row for each parameter: the key of its flat tensor, the shape and
            the strides of its gradient, and for a DTensor the whole shape and this rank's regions.
            None if the parameter had no gradient.
        flat: The gradients of each dtype, one after the other.
        copied: The CUDA event after the copies on their stream; None if the copies are complete.
    """

    layout: Sequence[Sequence[Sequence[Any] | None]]
    flat: dict[str, torch.Tensor]
    copied: torch.cuda.Event | None

    def on_host(self) -> dict[str, torch.Tensor]:
        """Return the flat tensors in host memory. Any thread may call this."""
        if self.copied is not None:
            self.copied.synchronize()
        return {name: flat.to("cpu") for name, flat in self.flat.items()}


def copy_grads(
    groups: Sequence[Sequence[Any]], cut_of: Callable[[Any], Cut], kept: dict[str, torch.Tensor]
) -> GradCopies:
    """Copy gradients, on the thread and the stream that may change them later.

    Another thread could read a gradient while it changes, and not notice: torch raises the version
    of a tensor only after the change, and never for a change through `Tensor.data`.

    Args:
        groups: The gradients of each group's parameters; None: no gradient.
        cut_of: Returns the whole shape of a DTensor and this rank's regions.
        kept: The flat tensors of an earlier copy in host memory, by dtype, to be overwritten:
            faulting in new pages takes as long as the copy.

    Raises:
        NotLoggedError: A gradient is sparse, or the gradients are on several devices.
    """
    import torch  # noqa: PLC0415 - torch is loaded only to log

    pieces: dict[str, list[torch.Tensor]] = {}
    layout: list[list[Sequence[Any] | None]] = []
    for group in groups:
        rows: list[Sequence[Any] | None] = []
        for grad in group:
            if grad is None:
                rows.append(None)
                continue
            if grad.layout is not torch.strided:
                msg = "a gradient is sparse"
                raise NotLoggedError(msg)
            local = local_of(grad)
            dtype = str(local.dtype).removeprefix("torch.")
            pieces.setdefault(dtype, []).append(local.detach().reshape(-1))
            # Stored because fused steps expect a gradient with the strides of its parameter.
            row = [dtype, [*local.shape], [] if local.is_contiguous() else [*local.stride()]]
            if local is not grad:
                shape, regions = cut_of(grad)
                row += [[*shape], [[[*region.offsets], [*region.sizes]] for region in regions]]
            rows.append(row)
        layout.append(rows)
    devices = {piece.device for tensors in pieces.values() for piece in tensors}
    if len(devices) > 1:
        msg = f"the gradients of one optimizer are on several devices: {sorted(map(str, devices))}"
        raise NotLoggedError(msg)
    if not all(device.type == "cpu" for device in devices):
        flat = {dtype: torch.cat(tensors) for dtype, tensors in pieces.items()}
        return GradCopies(layout, flat, _recorded(*devices))
    for dtype, tensors in pieces.items():
        if dtype not in kept:
            kept[dtype] = torch.empty(0, dtype=tensors[0].dtype, device="cpu")
        kept[dtype].resize_(sum(tensor.numel() for tensor in tensors))
        torch.cat(tensors, out=kept[dtype])
    return GradCopies(layout, {dtype: kept[dtype] for dtype in pieces}, None)


def local_of(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor; other tensors as they are."""
    local: torch.Tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor  # noqa: SLF001 - without the copy of `to_local`
    return local


def _recorded(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after all work so far on a device's current stream; None if not CUDA."""
    import torch  # noqa: PLC0415 - as above

    if device.type != "cuda":
        return None  # `to("cpu")` waits for the only stream
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no type for it
    event.record(torch.cuda.current_stream(device))
    return event

"""CUDA tensors as sources: asynchronous copies to pinned memory, on a side stream per device."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from penstock.core.abc import PendingCopy
from penstock.providers.tensor.memory import TensorSource, copy_range

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc import ByteSource, Lines
    from penstock.providers.tensor.lines import GatheredLines

_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
_lock = threading.Lock()  # guards `_streams`


def side_stream(device: torch.device, use: str = "copy") -> torch.cuda.Stream:
    """Return the stream on which state is copied from `device`; one for each use, for all saves."""
    with _lock:
        stream = _streams.get((device, use))
        if stream is None:
            stream = _streams[device, use] = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]  # torch has no type for it
        return stream


class CudaCopy(PendingCopy):
    """A copy in flight; keeps the memory that it reads and writes."""

    __slots__ = ("_device", "_event", "_held")

    def __init__(self, event: torch.cuda.Event, device: torch.device, held: object) -> None:
        self._event = event
        self._device = device
        self._held = held

    def wait(self) -> None:
        # A new thread uses device 0, where CUDA might make a context that takes some 500 MB.
        with torch.cuda.device(self._device):
            self._event.synchronize()
        self._held = None

    def order(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaSource(TensorSource):
    """The source of a CUDA tensor's bytes, as of an event on the describing thread's stream."""

    __slots__ = ("_moment",)

    def __init__(self, tensor: torch.Tensor, moment: torch.cuda.Event) -> None:
        super().__init__(tensor)
        self._moment = moment

    def copy_out(self, start: int, out: memoryview, /) -> PendingCopy | None:
        if not out.nbytes:
            return None
        self._check_memory()
        device = self.tensor.device
        side = side_stream(device)
        # Copies to pageable memory are not asynchronous: torch blocks until they are done.
        pinned = torch.frombuffer(out, dtype=torch.uint8).is_pinned()
        with torch.cuda.device(device), torch.cuda.stream(side):
            side.wait_event(self._moment)
            copy_range(self.tensor, start, out, non_blocking=pinned)
            # Keeps the allocator from reusing a freed tensor's memory before this stream reads it.
            self.tensor.record_stream(side)
            if not pinned:
                side.synchronize()
                return None
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # likewise
            event.record(side)
        return CudaCopy(event, device, (self.tensor, out))

    @classmethod
    def _begin(
        cls, device: torch.device, wanted: Sequence[tuple[torch.Tensor, Lines]]
    ) -> tuple[GatheredLines, Callable[[], torch.Tensor]]:
        # On the stream of the caller: what it issues later changes nothing that is gathered here,
        # and the memory stays alive until then.
        with torch.cuda.device(device):
            gathered, _ = super()._begin(device, wanted)
            data = gathered.data
            # Copies to pageable memory are not asynchronous: torch blocks until they are done.
            out = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=True)
            out.copy_(data, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # likewise
            event.record(torch.cuda.current_stream(device))

        def wait() -> torch.Tensor:
            event.synchronize()
            return out

        return gathered, wait

    def is_rounded(self, other: ByteSource, /) -> bool:
        if not isinstance(other, CudaSource):
            return False
        # On a stream of its own: the answer does not wait for copies to the host.
        side = side_stream(self.tensor.device, "compare")
        with torch.cuda.device(self.tensor.device), torch.cuda.stream(side):
            side.wait_event(self._moment)
            side.wait_event(other._moment)  # noqa: SLF001 - of the same class
            return super().is_rounded(other)

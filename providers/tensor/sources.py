"""The memory of tensors as byte sources and sinks, on the CPU and on CUDA devices."""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np
import torch

from penstock.core.abc import ByteSink, ByteSource, MemoryKey, PendingCopy, copy_bytes
from penstock.core.errors import RestoreError, TornSnapshotError
from penstock.core.types import Region, TensorSpec, show_path
from penstock.providers.tensor import elements, holds
from penstock.providers.tensor.elements import blocks, gather_lines, may_overlap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc import Lines
    from penstock.core.types import ObjectPath
    from penstock.providers.tensor.elements import GatheredLines

T = TypeVar("T")

# Elements are copied as integers of the same size. That keeps the bits of NaNs, and torch cannot
# copy some dtypes.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# A copy of at most this many bytes keeps the GIL: the wait to get it back could outlast the copy.
_FEW_BYTES = 64 << 10
_move = ctypes.PyDLL(None).memmove
_move.argtypes, _move.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None

_DTYPES: dict[torch.dtype, tuple[str, int]] = {}
_DEVICES: dict[torch.device, str] = {}

_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
_lock = threading.Lock()  # guards `_streams`


def dtype_name(dtype: torch.dtype) -> tuple[str, int]:
    """Return the dtype's name without torch's prefix, and its bytes per element."""
    # Cached: a state has thousands of tensors, and few dtypes.
    known = _DTYPES.get(dtype)
    if known is None:
        known = (str(dtype).removeprefix("torch."), dtype.itemsize)
        _DTYPES[dtype] = known
    return known


def device_name(device: torch.device) -> str:
    """Return `"cpu"`, `"cuda:0"`, and so on; cached like `dtype_name`."""
    known = _DEVICES.get(device)
    if known is None:
        known = _DEVICES[device] = str(device)
    return known


class TensorLayout(NamedTuple):
    """Facts that depend only on a tensor's dtype, device, shape, strides and view flags.

    Attributes:
        spec: Dtype and shape.
        regions: The region of the whole tensor.
        device: `"cpu"`, `"cuda:0"`, and so on.
        strides: Bytes from one element to the next along each dimension.
        reading: The dtype's name, with ` conj` or ` neg` for a conjugated or negated view.
        nbytes: Bytes of all elements.
        extent: Bytes of memory from the first element to the end of the last. 0 if the tensor has
            no elements, or is on the meta device, which has no memory.
        is_flat: Whether the tensor's values are row-major in host memory.
    """

    spec: TensorSpec
    regions: tuple[Region, ...]
    device: str
    strides: tuple[int, ...]
    reading: str
    nbytes: int
    extent: int
    is_flat: bool


def layout_of(tensor: torch.Tensor) -> TensorLayout:
    """Return the layout of a strided tensor."""
    return _layout(
        tensor.dtype,
        tensor.device,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


@lru_cache(maxsize=4096)  # thousands of tensors have few layouts
def _layout(  # noqa: PLR0917 - what a layout follows from; keywords would take longer
    dtype: torch.dtype,
    device: torch.device,
    shape: torch.Size,
    stride: tuple[int, ...],
    is_conj: bool,  # noqa: FBT001 - see above
    is_neg: bool,  # noqa: FBT001 - see above
) -> TensorLayout:
    name, itemsize = dtype_name(dtype)
    sizes = tuple(shape)
    spec = TensorSpec(name, itemsize, sizes)
    last = sum((size - 1) * step for size, step in zip(sizes, stride, strict=True))
    row = 1
    is_flat = device.type == "cpu" and not is_conj and not is_neg
    for size, step in zip(reversed(sizes), reversed(stride), strict=True):
        is_flat = is_flat and (size == 1 or step == row)
        row *= size
    return TensorLayout(
        spec,
        (Region.whole(sizes),),
        device_name(device),
        tuple([step * itemsize for step in stride]),
        name + " conj" * is_conj + " neg" * is_neg,
        spec.nbytes,
        (last + 1) * itemsize if row and device.type != "meta" else 0,
        is_flat,
    )


def memory_key(tensor: torch.Tensor, storage: torch.UntypedStorage | None = None) -> MemoryKey:
    """Return the identity of a strided tensor's memory; pass `storage` if it is known already."""
    if storage is None:
        storage = tensor.untyped_storage()
    layout = layout_of(tensor)
    spec = layout.spec
    offset = int(tensor.storage_offset()) * spec.itemsize
    return MemoryKey(
        layout.device, storage.data_ptr(), offset, spec.shape, layout.strides, layout.reading
    )


def carrier(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor as integers of the same size, so that a copy keeps every bit.

    Returns the tensor itself if there is no such integer type, or if it is a conjugated or negated
    view.
    """
    dtype = _CARRIERS.get(tensor.dtype.itemsize)
    return tensor if dtype is None or tensor.is_conj() or tensor.is_neg() else tensor.view(dtype)


def host_tensor(buffer: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return a 1-dim tensor over `buffer` without a copy; writing to it needs a writable buffer."""
    if buffer.readonly:
        # By address: `frombuffer` warns about a read-only buffer, although it is only read here.
        address = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        raw = (ctypes.c_char * buffer.nbytes).from_address(address)
        return torch.frombuffer(raw, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype)


def flat_memory(tensor: torch.Tensor, nbytes: int) -> memoryview:
    """Return the bytes of a flat tensor (see `TensorLayout`) without a copy.

    The result keeps the tensor's storage alive. This function does not call `tensor.numpy()`, after
    which torch refuses to resize the storage: code that offloads weights or enlarges a buffer would
    then fail in training.
    """
    return np.asarray(_StorageBytes(tensor, nbytes)).data


class _StorageBytes:
    """Exposes a tensor's memory to numpy, and keeps its storage alive."""

    def __init__(self, tensor: torch.Tensor, nbytes: int) -> None:
        self._storage = tensor.untyped_storage()  # the tensor itself may get another storage
        if tensor.storage_offset() * tensor.dtype.itemsize + nbytes > self._storage.nbytes():
            msg = "a tensor's storage was freed or shrunk while its memory was requested"
            raise RuntimeError(msg)
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (tensor.data_ptr(), False),
        }


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Return whether a strided tensor extends past the end of its storage.

    If so, its memory was freed or shrunk (`untyped_storage().resize_`), as FSDP and offloaders do.
    torch does not check: reading such a tensor returns foreign bytes or crashes the process.
    """
    layout = layout_of(tensor)
    end = tensor.storage_offset() * layout.spec.itemsize + layout.extent
    return layout.extent > 0 and end > tensor.untyped_storage().nbytes()


class _TensorMemory:
    __slots__ = ("_key", "_offset", "_start", "address", "device", "layout", "nbytes", "storage",
                 "tensor")  # fmt: skip

    def __init__(self, tensor: torch.Tensor) -> None:
        # An alias: it keeps this memory if training assigns `.data` later, and any thread may write
        # it, because it takes no part in autograd.
        alias = tensor.detach()
        storage = alias.untyped_storage()
        first: int = alias.storage_offset()  # type: ignore[assignment]  # no symbol
        self._set(alias, storage, layout_of(alias), storage.data_ptr(), first)

    def _set(
        self,
        alias: torch.Tensor,
        storage: torch.UntypedStorage,
        layout: TensorLayout,
        start: int,
        elements: int,
    ) -> None:
        """Set all fields; the tensor begins `elements` elements after `start`."""
        self.tensor = alias
        self.storage = storage
        self.layout = layout
        self.nbytes = layout.nbytes
        self.device = layout.device
        self._start = start
        self._offset = offset = elements * layout.spec.itemsize
        self._key: MemoryKey | None = None
        self.address: int | None = start + offset if layout.extent and layout.is_flat else None

    @classmethod
    def of_host(cls, tensors: Sequence[torch.Tensor]) -> tuple[list[Self], list[int]]:
        """Return the memory of host tensors, and the indices of those that cannot be stored.

        Calling each getter for all tensors in turn takes half as long as all getters per tensor.

        Raises:
            RuntimeError: torch does not report a tensor's offset or strides, because it is nested
                or sparse, for example.
        """
        aliases = [*map(torch.Tensor.detach, tensors)]
        storages = [*map(torch.Tensor.untyped_storage, aliases)]
        dtypes = [*map(_dtype, aliases)]
        is_complex = any(dtype.is_complex for dtype in set(dtypes))
        layouts = zip(
            dtypes,
            map(_shape, aliases),
            map(torch.Tensor.stride, aliases),
            map(torch.Tensor.is_conj, aliases) if is_complex else repeat(None),
            map(torch.Tensor.is_neg, aliases),
            strict=False,  # `repeat` never ends
        )
        columns = zip(
            aliases,
            storages,
            map(torch.UntypedStorage.data_ptr, storages),
            map(torch.UntypedStorage.nbytes, storages),
            map(torch.Tensor.storage_offset, aliases),
            layouts,
            strict=True,
        )
        memories: list[Self] = []
        refused: list[int] = []
        before: tuple[object, ...] = ()
        layout, is_quantized = None, False
        for alias, storage, start, size, first, facts in columns:
            if facts != before:  # most tensors have the layout of the previous one
                before, layout, is_quantized = facts, layout_of(alias), alias.is_quantized
            assert layout is not None
            memory = cls.__new__(cls)
            memory._set(alias, storage, layout, start, first)  # noqa: SLF001 - of this class
            if is_quantized or (layout.extent and memory._offset + layout.extent > size):  # noqa: SLF001 - see above
                refused.append(len(memories))
            memories.append(memory)
        return memories, refused

    @property
    def memory(self) -> MemoryKey | None:
        """The identity of the memory when this object was made; None if it has no bytes."""
        layout = self.layout
        # Meta tensors have no memory, and all have address 0: they are not tied.
        if self._key is None and layout.extent:  # made on demand: few are needed
            self._key = MemoryKey(
                layout.device, self._start, self._offset, layout.spec.shape, layout.strides,
                layout.reading,
            )  # fmt: skip
        return self._key

    def is_lost(self) -> bool:
        """Return whether the memory was freed or shrunk; see `lacks_memory`."""
        extent = self.layout.extent
        return extent > 0 and self._offset + extent > self.storage.nbytes()

    def view(self) -> memoryview | None:
        return None if self.address is None else flat_memory(self.tensor, self.nbytes)


class TensorSource(_TensorMemory, ByteSource):  # type: ignore[override]  # `memory` is made on demand
    """The source of a tensor's bytes; a copy from a device blocks."""

    __slots__ = ()

    def view(self) -> memoryview | None:
        self._check_memory()
        return super().view()

    def copy_out(self, start: int, out: memoryview, /) -> PendingCopy | None:
        if not out.nbytes:
            return None
        self._check_memory()
        if self.address is not None:
            flat = torch.frombuffer(flat_memory(self.tensor, self.nbytes), dtype=torch.uint8)
            host_tensor(out, torch.uint8).copy_(flat[start : start + out.nbytes])
            return None
        copy_range(self.tensor, start, out)
        return None

    @classmethod
    def sample(
        cls, sources: Sequence[ByteSource], lines: Sequence[Lines], /
    ) -> Callable[[], Sequence[bytes]]:
        by_device: dict[torch.device, list[int]] = {}
        tensors = []
        for number, source in enumerate(sources):
            assert isinstance(source, TensorSource)
            source._check_memory()  # noqa: SLF001 - of the same class
            tensors.append(source.tensor)
            by_device.setdefault(source.tensor.device, []).append(number)
        started = [
            (numbers, cls._begin(device, [(tensors[n], lines[n]) for n in numbers]))
            for device, numbers in by_device.items()
        ]

        def read() -> list[bytes]:
            samples = [b""] * len(tensors)
            for numbers, (gathered, wait) in started:
                for number, data in zip(numbers, gathered.split(wait()), strict=True):
                    samples[number] = data
            return samples

        return read

    @classmethod
    def _begin(
        cls, device: torch.device, wanted: Sequence[tuple[torch.Tensor, Lines]]
    ) -> tuple[GatheredLines, Callable[[], torch.Tensor]]:
        """Gather lines on a device; return them, and a function that brings them to the host."""
        del device
        gathered = gather_lines([carrier(tensor) for tensor, _ in wanted], [of for _, of in wanted])
        return gathered, gathered.data.cpu

    def _check_memory(self) -> None:
        """Raise if the memory was freed or shrunk since the tensor was described."""
        if self.is_lost():
            msg = (
                "the storage of a tensor was freed or shrunk between `save` and the end of its "
                "capture: call fence() before you do that, or save with mode='async'"
            )
            raise TornSnapshotError(msg)

    def steady(self) -> bool:
        return self.version() is not None and not self.storage.is_shared()

    def version(self) -> int | None:
        return None if self.tensor.is_inference() else self.tensor._version  # noqa: SLF001 - torch has no other name

    def is_rounded(self, other: ByteSource, /) -> bool:
        if not isinstance(other, TensorSource) or self.device != other.device:
            return False
        if lacks_memory(self.tensor) or lacks_memory(other.tensor):
            return False  # the tensor's capture reports that
        return elements.is_rounded(self.tensor, other.tensor)

    def locate(self) -> int | None:
        return _places([self])[0]

    @classmethod
    def version_each(cls, sources: Sequence[ByteSource], /) -> Sequence[int | None]:
        if cls.version is not TensorSource.version:
            return super().version_each(sources)
        tensors = map(_tensor, sources)
        return [None if tensor.is_inference() else tensor._version for tensor in tensors]  # noqa: SLF001 - see above

    @classmethod
    def locate_each(cls, sources: Sequence[ByteSource], /) -> Sequence[int | None]:
        if cls.locate is not TensorSource.locate:
            return super().locate_each(sources)
        return _places(sources)

    def keep(self) -> None:
        if self.device == "cpu" and self.nbytes and not lacks_memory(self.tensor):
            # torch refuses to resize a storage that numpy has seen, so an offloader cannot free
            # it during the copy.
            torch.empty(0, dtype=torch.uint8, device="cpu").set_(self.storage).numpy()

    @staticmethod
    def hold(sources: Sequence[ByteSource], /) -> Callable[[], None]:
        on_host = _on_host(sources)
        release = holds.hold([source.storage for source in on_host])
        try:
            flat = [source for source in on_host if source.address is not None]
            for source, at in zip(flat, TensorSource.locate_each(flat), strict=True):
                source.address = at
        except BaseException:
            release()
            raise
        return release

    @staticmethod
    def still(sources: Sequence[ByteSource], action: Callable[[], T], /) -> T:
        return holds.still(lambda: (s.storage for s in _on_host(sources)), action)


_dtype, _shape = attrgetter("dtype"), attrgetter("shape")  # of tensors
_storage, _tensor = attrgetter("storage"), attrgetter("tensor")  # of sources


def _places(sources: Sequence[ByteSource]) -> list[int | None]:
    """Return each source's address: 0 if its memory was freed, None if it never had any."""
    storages = [*map(_storage, sources)]
    starts = map(torch.UntypedStorage.data_ptr, storages)
    sizes = map(torch.UntypedStorage.nbytes, storages)
    addresses: list[int | None] = []
    for source, start, size in zip(sources, starts, sizes, strict=True):
        assert isinstance(source, TensorSource)
        extent, offset = source.layout.extent, source._offset  # noqa: SLF001 - of this module
        if not extent:
            addresses.append(None)
        else:
            # Shrunk memory counts as freed: the bytes after its end belong to others.
            addresses.append(start + offset if start and offset + extent <= size else 0)
    return addresses


def _on_host(sources: Sequence[ByteSource]) -> list[TensorSource]:
    return [s for s in sources if isinstance(s, TensorSource) and s.device == "cpu" and s.nbytes]


def copy_range(
    tensor: torch.Tensor, start: int, out: memoryview, *, non_blocking: bool = False
) -> None:
    """Fill `out`, in host memory, with the tensor's row-major bytes that begin at byte `start`.

    Copies no other elements, not even to make the tensor contiguous.
    """
    source = carrier(tensor)
    target = host_tensor(out, source.dtype)
    first = start // tensor.dtype.itemsize
    for index, position in blocks(tuple(tensor.shape), first, first + target.numel()):
        # Resolved on the tensor's device: otherwise torch flips the signs on the host, right after
        # it has started a copy that may not have arrived.
        block = source[index].resolve_conj().resolve_neg()
        part = target[position : position + block.numel()]
        part.view(block.shape).copy_(block, non_blocking=non_blocking)


class TensorSink(_TensorMemory, ByteSink):  # type: ignore[override]  # as `TensorSource`
    """The sink that fills a tensor's memory in place."""

    __slots__ = ()

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        if self.tensor.is_cuda:
            # Kernels that the caller has queued may still write to this memory.
            torch.cuda.current_stream(self.tensor.device).synchronize()

    def copy_in(self, start: int, data: memoryview, /) -> None:
        if not data.nbytes:
            return
        if self.address is not None:
            if data.nbytes <= _FEW_BYTES and not data.readonly:
                self._copy_few(start, _address_of(data), data.nbytes)
            else:
                copy_bytes(flat_memory(self.tensor, self.nbytes)[start : start + data.nbytes], data)
            return
        target = carrier(self.tensor)
        source = host_tensor(data, target.dtype)
        first = start // self.tensor.dtype.itemsize
        for index, position in blocks(tuple(target.shape), first, first + source.numel()):
            block = target[index]
            block.copy_(source[position : position + block.numel()].view(block.shape))

    @classmethod
    def copy_in_each(
        cls, copies: Sequence[tuple[ByteSink, int, int, int]], data: memoryview, /
    ) -> None:
        if cls.copy_in is not TensorSink.copy_in or data.readonly:
            super().copy_in_each(copies, data)
            return
        source = _address_of(data)
        for sink, start, low, high in copies:
            assert isinstance(sink, TensorSink)
            if sink.address is None or high - low > _FEW_BYTES:
                sink.copy_in(start, data[low:high])
            else:
                sink._copy_few(start, source + low, high - low)  # noqa: SLF001 - of this class

    def _copy_few(self, start: int, source: int, nbytes: int) -> None:
        """Copy by address, which takes a quarter of the time for the small tensors of a slab."""
        if self.is_lost() or not 0 <= start <= self.nbytes - nbytes:
            msg = (
                f"{nbytes} bytes at offset {start} do not fit into the {self.nbytes} bytes of a "
                "tensor, or its storage was freed or shrunk while it was restored"
            )
            raise RuntimeError(msg)
        _move(self.tensor.data_ptr() + start, source, nbytes)

    def opened(self) -> None:
        if not self.tensor.is_inference():
            torch.autograd.graph.increment_version(self.tensor)

    def written(self) -> None:
        if self.tensor.is_cuda:
            # A strided target is scattered by a kernel that runs after the copy.
            torch.cuda.synchronize(self.tensor.device)
        if not self.tensor.is_inference():
            torch.autograd.graph.increment_version(self.tensor)


def _address_of(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


class ShardSink(TensorSink):
    """The sink of this rank's part of a distributed tensor."""

    __slots__ = ("_whole",)

    def __init__(self, local: torch.Tensor, whole: torch.Tensor) -> None:
        super().__init__(local)
        self._whole = whole

    def opened(self) -> None:
        super().opened()
        self._count_change()

    def written(self) -> None:
        super().written()
        self._count_change()

    def _count_change(self) -> None:
        # The local and the distributed tensor count versions separately, and autograd saves the
        # distributed one.
        if not self._whole.is_inference():
            torch.autograd.graph.increment_version(self._whole)


class OverlapSink(TensorSink):
    """Fills a tensor whose elements share memory (`expand`) through scratch memory.

    `written` raises RestoreError if two stored values for the same memory differ.
    """

    __slots__ = ("_live", "_path")

    def __init__(self, tensor: torch.Tensor, path: ObjectPath) -> None:
        super().__init__(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device))
        self._live = tensor.detach()
        self._path = path
        self._key = memory_key(tensor)
        self.address = None  # the scratch address would hide which memory is shared

    def opened(self) -> None:
        if not self._live.is_inference():
            torch.autograd.graph.increment_version(self._live)

    def written(self) -> None:
        strides = self._live.stride()
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
        carrier(self._live)[once].copy_(_as(self.tensor, self._live)[once])
        if not torch.equal(_bits(self._live), _bits(self.tensor)):
            msg = (
                f"{show_path(self._path)} is an expanded or overlapping tensor, but the "
                "checkpoint has different values for one place in its memory: restore into a "
                "contiguous tensor"
            )
            raise RestoreError(msg)
        self.tensor = self._live  # frees the scratch memory


def _as(source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return carrier(source) if carrier(like).dtype != like.dtype else source


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg()
    if plain.dtype.itemsize not in _CARRIERS:
        plain = torch.view_as_real(plain)
    return plain.view(_CARRIERS[plain.dtype.itemsize])


def make_sink(tensor: torch.Tensor, path: ObjectPath) -> TensorSink:
    """Return the sink for the layout of `tensor`."""
    return OverlapSink(tensor, path) if overlaps_itself(tensor) else TensorSink(tensor)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether two elements may share memory; False is certain, True is not."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    return may_overlap(tensor.shape, tensor.stride(), 1)


def side_stream(device: torch.device, use: str = "copy") -> torch.cuda.Stream:
    """Return the process's CUDA stream on `device` for this `use`; all saves share it."""
    with _lock:
        stream = _streams.get((device, use))
        if stream is None:
            stream = _streams[device, use] = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]  # torch has no type for it
        return stream


class CudaCopy(PendingCopy):
    """A copy in flight; keeps its source and target memory alive."""

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
    """The source of a CUDA tensor's bytes.

    A copy waits for `moment`, an event on the stream of the thread that described the tensor.
    """

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
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no type
            event.record(side)
        return CudaCopy(event, device, (self.tensor, out))

    @classmethod
    def _begin(
        cls, device: torch.device, wanted: Sequence[tuple[torch.Tensor, Lines]]
    ) -> tuple[GatheredLines, Callable[[], torch.Tensor]]:
        # On the caller's stream: work that it queues later can neither change the gathered bytes
        # nor reuse the memory before it has been read.
        with torch.cuda.device(device):
            gathered, _ = super()._begin(device, wanted)
            data = gathered.data
            # Copies to pageable memory are not asynchronous: torch blocks until they are done.
            out = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=True)
            out.copy_(data, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no type
            event.record(torch.cuda.current_stream(device))

        def wait() -> torch.Tensor:
            event.synchronize()
            return out

        return gathered, wait

    def is_rounded(self, other: ByteSource, /) -> bool:
        if not isinstance(other, CudaSource):
            return False
        # On a separate stream: the answer does not wait for copies to the host.
        side = side_stream(self.tensor.device, "compare")
        with torch.cuda.device(self.tensor.device), torch.cuda.stream(side):
            side.wait_event(self._moment)
            side.wait_event(other._moment)  # noqa: SLF001 - of the same class
            return super().is_rounded(other)

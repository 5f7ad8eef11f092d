"""Allocates staging memory: arenas that are mapped once and reused, under a byte budget.

`touch` maps and touches an arena in the background. Copying into untouched memory is ten times
slower, since the kernel, and a hypervisor below it, must allocate it first.

Arenas use huge pages if the system has them. With pages of 4 KiB, a disk moves half as much (0.8 to
1.3 GB/s instead of 1.8 to 2.2). A forked child gets zeros in place of an arena, so a fork causes no
copy-on-write faults, which would slow copies down to a tenth.

A virtual machine that returns free memory to its host touches huge pages at only 0.7 GB/s, and
small ones at 2 to 3. Arenas use huge pages there too, since small ones slow down each later save.
Touching the beginning of an arena does not show whether a machine is of this kind: the host of such
a machine still backs the first 150 to 700 MB of huge pages, which are touched at 3 to 6 GB/s.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.concurrency.watchdog import spawn
from penstock.core.types import PAGE_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Callable

# Linux constants that the module `mmap` lacks.
_MADV_WIPEONFORK = 18
_MADV_POPULATE_WRITE = 23
_KEPT_BYTES = 64 << 20  # `shrink` frees a piece of a thread's memory that is larger than this
_TOUCH_THREADS = 2  # twice as fast as one on two cores
_TOUCH_BYTES = 4 << 20  # by one call, during which no thread of the process can map memory

_libc = ctypes.CDLL(None)  # its `madvise` releases the GIL, unlike that of the module `mmap`
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Arena:
    """One memory mapping, in which blocks are reserved.

    Attributes:
        memory: The mapping.
        view: A view of all of it.
        address: Its first address.
        size: Its size in bytes.
        free: Disjoint `(offset, length)` extents in whole pages, ascending.
        touching: Touches the arena. While it does, only touched memory may be used. None: all of
            the arena may be used.
        unpin: Ends the registration with CUDA; None: the arena is not registered.
    """

    memory: mmap.mmap
    view: memoryview
    address: int
    size: int
    free: list[tuple[int, int]] = field(default_factory=list)
    touching: _Touching | None = None
    unpin: weakref.finalize[[int, str, int], Arena] | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Block:
    """A reserved piece of an arena.

    `view` has the requested length, and starts at an address with the requested phase.
    """

    arena: Arena
    offset: int
    reserved: int
    view: memoryview
    address: int


class Staging:
    """Reserves whole pages of arenas, where they first fit. Thread-safe.

    `acquire` does not wait. A thread may call `wait` only while it holds no block, since two
    waiting threads with blocks could deadlock.
    """

    def __init__(
        self,
        budget_bytes: int,
        memory: mmap.mmap | None = None,
        *,
        populate: Callable[[int, int], bool] | None = None,
    ) -> None:
        """Create an allocator.

        Args:
            budget_bytes: The most bytes of all arenas.
            memory: The only arena, of whole pages; None: arenas are mapped on demand.
            populate: Touches a number of bytes at an address, and returns whether it succeeded;
                default: `madvise`.
        """
        self.budget_bytes = max(align_up(budget_bytes, PAGE_BYTES), PAGE_BYTES)
        self.was_short = False
        """Whether training has waited in this save for the store to free memory."""
        self._lock = threading.Lock()  # guards every field except `_waiting` and `was_short`
        # Locks that waiting threads want to acquire. `wake` takes no lock: the training thread
        # calls it, and a signal handler that saves may interrupt it there.
        self._waiting: deque[threading.Lock] = deque()
        self._arenas = [] if memory is None else [_arena_of(memory)]
        self._hint = 0
        self._copied_from: str | None = None
        self._used = 0
        self._populate = populate or _populate

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all arenas."""
        return sum(a.size for a in self._arenas)

    def expect(
        self, total_bytes: int, *, largest_bytes: int = 0, copied_from: str | None = None
    ) -> None:
        """Announce the needs of the next save, so that a single arena is mapped for it.

        Args:
            total_bytes: The bytes of all blocks that the save reserves.
            largest_bytes: The bytes of its largest block, phase included.
            copied_from: The CUDA device from which data is copied, if any. Arenas are pinned then.
        """
        self.was_short = False
        with self._lock:
            self._hint = total_bytes
            self._copied_from = self._copied_from or copied_from
            if not self._used and all(a.size < largest_bytes for a in self._arenas):
                # Arenas of earlier, smaller states would exhaust the budget, and no block of this
                # save would ever fit.
                for arena in self._arenas:
                    _give_up(arena)
                self._arenas.clear()
            if self._copied_from:
                for arena in self._arenas:
                    _pin(arena, self._copied_from)

    def close(self) -> None:
        """Return all memory to the system, unless some is reserved; idempotent."""
        with self._lock:
            if self._used:
                return
            arenas, self._arenas = self._arenas, []
        for arena in arenas:
            _give_up(arena)
            arena.view.release()
            with contextlib.suppress(BufferError):  # a view is in use: the mapping ends with it
                arena.memory.close()

    def touch(self, nbytes: int | None = None) -> None:
        """Map the memory that `expect` has announced, and touch it in the background.

        Args:
            nbytes: Touch at most this much; None: all of it.
        """
        with self._lock:
            size = min(self._hint, self.budget_bytes) - self.allocated_bytes
            if size <= 0:
                return
            try:
                arena = self._map(size)
            except (OSError, OverflowError, ValueError):
                return  # `acquire` raises it, to a caller that needs the memory
            if self._copied_from:
                return  # CUDA has touched what it registered
            nbytes = arena.size if nbytes is None else min(nbytes, arena.size)
            arena.touching = _Touching(arena, nbytes, self._populate, self.wake)

    @property
    def is_being_touched(self) -> bool:
        """Whether there will soon be more room in touched memory."""
        with self._lock:
            return any(map(_touching, self._arenas))

    def acquire(self, length: int, phase: int) -> Block | None:
        """Reserve `length` bytes whose address is congruent to `phase` modulo 4096.

        Returns None if there is no room for the block now, whether or not there will ever be.
        While memory is being touched, only touched memory counts as room.
        """
        need = align_up(phase + length, PAGE_BYTES)
        with self._lock:
            for arena in self._arenas:
                block = self._take(arena, need, length, phase)
                if block is not None:
                    return block
            left = self.budget_bytes - self.allocated_bytes
            if left < need or any(map(_touching, self._arenas)):
                return None
            arena = self._map(max(need, self._hint - self.allocated_bytes))
            return self._take(arena, need, length, phase)

    def release(self, block: Block) -> None:
        """Release a block; another thread may reserve its memory at once."""
        with self._lock:
            free = block.arena.free
            start, length = block.offset, block.reserved
            at = bisect.bisect(free, (start, 0))
            if at < len(free) and free[at][0] == start + length:
                length += free.pop(at)[1]
            if at > 0 and sum(free[at - 1]) == start:
                at -= 1
                before = free.pop(at)
                start, length = before[0], before[1] + length
            free.insert(at, (start, length))
            self._used -= block.reserved
        self.wake()

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait until something is released, `ready()` holds, or the time is up."""
        woken = threading.Lock()
        woken.acquire()
        self._waiting.append(woken)
        if not ready():
            woken.acquire(timeout=timeout_s)
        with contextlib.suppress(ValueError):  # `wake` removed it
            self._waiting.remove(woken)

    def wake(self) -> None:
        """Let waiting threads check their conditions again."""
        with contextlib.suppress(IndexError):  # no thread is waiting
            while True:
                self._waiting.popleft().release()

    def _map(self, size: int) -> Arena:
        left = self.budget_bytes - self.allocated_bytes
        arena = _arena_of(map_memory(min(align_up(size, PAGE_BYTES), left)))
        if self._copied_from:
            _pin(arena, self._copied_from)
        self._arenas.append(arena)
        return arena

    def _take(self, arena: Arena, need: int, length: int, phase: int) -> Block | None:
        touching = _touching(arena)
        end = arena.size if touching is None else touching.end
        for index, (start, size) in enumerate(arena.free):
            if start + need > end:
                return None
            if size >= need:
                if size == need:
                    del arena.free[index]
                else:
                    arena.free[index] = (start + need, size - need)
                self._used += need
                first = start + phase
                view = arena.view[first : first + length]
                return Block(arena, start, need, view, arena.address + first)
        return None


class _Touching:
    """Touches an arena in the background, piece by piece from its beginning.

    Touching allocates pages and changes no byte, so the arena may be in use.

    Attributes:
        end: Everything below this offset is touched.
    """

    def __init__(
        self,
        arena: Arena,
        size: int,
        populate: Callable[[int, int], bool],
        wake: Callable[[], None],
    ) -> None:
        self.end = 0
        self._address, self._size = arena.address, size
        self._view = memoryview(arena.memory)  # keeps the mapping while a thread needs it
        self._populate = populate
        self._wake = wake
        self._lock = threading.Lock()  # guards `end`, `_next`, `_open` and `_running`
        self._next = 0
        self._open: list[int] = []  # offsets of the pieces being touched
        self._running = _TOUCH_THREADS
        self._threads = [spawn(f"touch-{n}", self._run) for n in range(_TOUCH_THREADS)]

    @property
    def is_active(self) -> bool:
        """Whether more memory will be touched. False in a forked child, which lacks the threads."""
        return self.end < self._size and any(thread.is_alive() for thread in self._threads)

    def give_up(self) -> None:
        """Let the threads end after their current pieces."""
        with self._lock:
            self._next = self._size

    def _run(self) -> None:
        self._touch()
        with self._lock:
            self._running -= 1
            if not self._running:
                self._view.release()

    def _touch(self) -> None:
        while True:
            with self._lock:
                start, self._next = self._next, self._next + _TOUCH_BYTES
                if start >= self._size:
                    return
                self._open.append(start)
            length = min(_TOUCH_BYTES, self._size - start)
            could = self._populate(self._address + start, length)
            with self._lock:
                self._open.remove(start)
                self.end = min([*self._open, self._next, self._size])
            if not could:  # the rest of the arena is used untouched
                self.give_up()
            self._wake()


def _populate(address: int, length: int) -> bool:
    """Allocate pages; return False if memory is short or the kernel is older than 5.14."""
    return not _libc.madvise(address, length, _MADV_POPULATE_WRITE)


def map_memory(size: int) -> mmap.mmap:
    """Map zeroed memory, in huge pages if the system has them; a forked child has zeros there.

    Raises:
        OSError, OverflowError, ValueError: The process cannot get that much memory.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, _MADV_WIPEONFORK):
        with contextlib.suppress(OSError):  # a kernel without it: slower, but still correct
            memory.madvise(advice)
    return memory


class ThreadMemory(threading.local):
    """Reusable memory of each thread for work on one chunk. It grows as needed."""

    def __init__(self, count: int = 1) -> None:
        """Prepare `count` pieces of memory in each thread."""
        self._views = [memoryview(b"")] * count

    def take(self, length: int, which: int = 0) -> memoryview:
        """Return `length` bytes that this thread owns until it takes the same piece again.

        Raises:
            MemoryError: The process cannot get that much memory.
        """
        if self._views[which].nbytes < length:
            try:
                self._views[which] = memoryview(map_memory(length))
            except OSError as error:
                raise MemoryError(str(error)) from error
        return self._views[which][:length]

    def shrink(self) -> None:
        """Free pieces larger than usual chunks need; none may be in use.

        If they were kept, a few odd frames would hold gigabytes for the life of the thread.
        """
        for which, view in enumerate(self._views):
            if view.nbytes > _KEPT_BYTES:
                self._views[which] = memoryview(b"")


def has_small_pages(setting: str = "/sys/kernel/mm/transparent_hugepage/enabled") -> bool:
    """Return whether the system gives huge pages only to memory that requests them."""
    try:
        return "[madvise]" in Path(setting).read_text(encoding="ascii")
    except OSError:
        return False


def _arena_of(memory: mmap.mmap) -> Arena:
    view, size = memoryview(memory), len(memory)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    return Arena(memory, view, address, size, free=[(0, size)])


def _pin(arena: Arena, device: str) -> None:
    """Register the arena with CUDA, so that copies from `device` run asynchronously.

    The registration ends with the arena, even if no staging is closed: otherwise CUDA would still
    write to the old pages after other memory is mapped at the same address.
    """
    if arena.unpin is not None:
        return
    import torch  # noqa: PLC0415 - only where a CUDA tensor was seen

    if not torch.cuda.is_available():
        return
    # A new thread uses device 0, where CUDA would make a context that takes some 500 MB.
    with torch.cuda.device(device):
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if not int(runtime.cudaHostRegister(arena.address, arena.size, 0)):
            arena.unpin = weakref.finalize(arena, _unregister, arena.address, device, os.getpid())
            arena.unpin.atexit = False
            return
        # CUDA keeps the error of the refused call, and the next kernel of this thread raises it:
        # let that happen here, not in training.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)


def _touching(arena: Arena) -> _Touching | None:
    touching = arena.touching
    return touching if touching is not None and touching.is_active else None


def _give_up(arena: Arena) -> None:
    if arena.touching is not None:
        arena.touching.give_up()
    _unpin(arena)


def _unpin(arena: Arena) -> None:
    if arena.unpin is not None:
        arena.unpin()
        arena.unpin = None


def _unregister(address: int, device: str, pid: int) -> None:
    import torch  # noqa: PLC0415 - as in `_pin`

    if os.getpid() == pid:  # a forked child cannot use CUDA
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def default_budget(state_bytes: int, local_ranks: int = 1) -> int:
    """Return the size of this rank's state, but at most its share of half the free memory."""
    return min(state_bytes, available_memory() // 2 // max(local_ranks, 1))


def available_memory() -> int:
    """Return the bytes that are free in the machine, or in the container if that is less."""
    limit = container_memory()
    return machine_memory() if limit is None else min(machine_memory(), limit)


def machine_memory() -> int:
    """Return the bytes that can be used without swapping, as the kernel reports."""
    with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123 - a hot one-liner
        return next(int(li.split()[1]) << 10 for li in lines if li.startswith("MemAvail"))


def container_memory(root: str = "/sys/fs/cgroup") -> int | None:
    """Return the bytes free in the container (cgroup v2, else v1); None if it has no limit.

    File cache that was not used lately counts as free, as in `MemAvailable`.
    """
    for folder, limit, usage, cache in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (f"{root}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = Path(folder, limit).read_text(encoding="ascii").strip()
            used = Path(folder, usage).read_text(encoding="ascii").strip()
            lines = Path(folder, "memory.stat").read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        stats = dict(line.split(maxsplit=1) for line in lines if " " in line)
        # v1 writes "no limit" as a number beyond any memory
        if most.isdigit() and used.isdigit() and int(most) < 1 << 60:
            return max(0, int(most) - int(used) + int(stats.get(cache, 0)))
    return None

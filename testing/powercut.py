"""A store in memory that can lose power. Only durable data is certain to survive the power cut.

`seal`, `sync`, `publish` and `delete` are durable once they return. Everything else may or may not
survive a cut:

* each 512-byte sector of an unsealed blob after its synced bytes; before the first `sync`, the
  blob's name too;
* an aborted blob;
* a publish in flight: either the new record or the record that it replaces survives;
* each name of a `delete` in flight.

So an engine that publishes a name before its data is durable, or deletes data before its name,
loses a checkpoint at some cut.

```python
disk = Disk(cut_at=7)                       # the power fails during the 7th effect
with suppress(SimulatedCrashError, PenstockError), Checkpointer(PowerCut(disk)) as ckpt:
    ckpt.save(state, 1, mode="blocking")
survived = PowerCut(disk.cut(random.Random(seed)))  # one of many possible outcomes
```

Without `cut` the disk holds everything that a killed process wrote.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from penstock.core.abc import Backend, BlobWriter, check_blob_name
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    FormatError,
    StorageError,
)
from penstock.core.types import BlobInfo, Capabilities, flat_view
from penstock.testing.faults import SimulatedCrashError

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Sequence

    from penstock.core.types import ReadRequest, WriteRequest

SECTOR_BYTES = 512


@dataclass(slots=True)
class _File:
    data: bytes | bytearray
    modified_s: float
    durable: bool
    synced_bytes: int | None = None  # durable although unsealed; None: not even the name is


_Fate: TypeAlias = "_File | None"


class Disk:
    """The stored files, durable or not, shared by any number of backends. Thread-safe.

    Effects are creates, writes, syncs, seals, aborts, publishes and deletes, counted from 1.
    """

    def __init__(self, *, cut_at: int | None = None) -> None:
        """Create an empty disk that loses power during effect `cut_at`; None waits for `cut`."""
        self._cut_at = cut_at
        self._effects = 0
        self._dead = False
        self._ahead_s = 0.0
        self._files: dict[str, _File] = {}
        self._aborted: dict[str, _File] = {}  # deleted, but not durably
        self._under_way: dict[str, list[_Fate]] = {}  # other outcomes of the effect that was cut
        self._lock = threading.RLock()  # guards all of the above

    @property
    def effects(self) -> int:
        """The number of effects so far, including the one that the cut hit."""
        return self._effects

    @property
    def dead(self) -> bool:
        """Whether the power is off. If it is, every use raises `SimulatedCrashError`."""
        return self._dead

    def advance(self, seconds: float) -> None:
        """Advance the store's clock, as if the time had passed."""
        with self._lock:
            self._ahead_s += seconds

    def cut_in(self, effects: int | None) -> None:
        """Cut the power during the `effects`-th effect from now (1: the next); None cancels it."""
        with self._lock:
            self._cut_at = None if effects is None else self._effects + effects

    def copy(self, *, cut_at: int | None = None) -> Disk:
        """Return a disk with the same files, durable or not; its effects count from 1."""
        with self._lock:
            other = Disk(cut_at=cut_at)
            other._ahead_s = self._ahead_s
            other._files = {name: _copy(file) for name, file in self._files.items()}
            other._aborted = {name: _copy(file) for name, file in self._aborted.items()}
            return other

    def cut(self, choice: random.Random) -> Disk:
        """Cut the power, and return a new disk with the files that `choice` lets survive.

        Each further call draws another outcome of the same cut.
        """
        with self._lock:
            self._dead = True
            return self._survived([(n, choice.choice(f)) for n, f in self._fates()], choice)

    def cuts(self, choice: random.Random, *, most: int) -> list[Disk]:
        """Cut the power, and return a disk for each combination of outcomes.

        If there are more than `most` combinations, returns `most` random outcomes.
        """
        with self._lock:
            self._dead = True
            fates = self._fates()
            if math.prod(len(of) for _, of in fates) > most:
                return [self.cut(choice) for _ in range(most)]
            names = [name for name, _ in fates]
            return [
                self._survived(zip(names, chosen, strict=True), choice)
                for chosen in itertools.product(*(of for _, of in fates))
            ]

    # -- called by backends ---------------------------------------------------------------------

    def now_s(self) -> float:
        """Return the time of the store's clock."""
        return time.time() + self._ahead_s

    def find(self, name: str) -> _File | None:
        """Return the file under `name`, durable or not; None if there is none."""
        with self._lock:
            self._check_power()
            return self._files.get(name)

    def listed(self, prefix: str) -> list[BlobInfo]:
        """List files by name; like a file system, list unsealed blobs too."""
        with self._lock:
            self._check_power()
            return [
                BlobInfo(name, len(file.data), file.modified_s)
                for name, file in sorted(self._files.items())
                if name.startswith(prefix)
            ]

    def create(self, name: str) -> _File | None:
        """Create an empty file that is not durable; return None if the name is taken."""
        with self._lock:
            file = _File(bytearray(), self.now_s(), durable=False)
            self._effect({} if name in self._files else {name: [file]})
            if name in self._files:
                return None
            self._files[name] = file
            self._aborted.pop(name, None)
            return file

    def write(self, name: str, file: _File, requests: Sequence[WriteRequest]) -> None:
        """Write bytes, readable but not durable."""
        with self._lock:
            grown = replace(file, data=bytearray(file.data))
            for request in requests:
                at = request.offset
                assert at >= (file.synced_bytes or 0), f"{name} is written before its synced end"
                for buffer in request.buffers:
                    source = flat_view(buffer)
                    _extend(grown, at + source.nbytes)
                    memoryview(grown.data)[at : at + source.nbytes] = source
                    at += source.nbytes
            self._effect({name: [grown]} if self._files.get(name) is file else {})
            file.data = grown.data

    def sync(self, name: str, file: _File, length: int) -> None:
        """Make the name and the first `length` bytes of a file durable."""
        with self._lock:
            _extend(file, length)
            synced = replace(file, data=bytes(file.data), synced_bytes=length)
            self._effect({name: [synced]} if self._files.get(name) is file else {})
            file.synced_bytes = length

    def seal(self, name: str, file: _File, length: int) -> None:
        """Truncate a file, and make it durable."""
        with self._lock:
            _extend(file, length)
            whole = _File(bytes(file.data[:length]), self.now_s(), durable=True)
            torn = replace(whole, durable=False, synced_bytes=file.synced_bytes)
            self._effect({name: [whole, torn]} if self._files.get(name) is file else {})
            file.data, file.modified_s, file.durable = whole.data, whole.modified_s, True

    def abort(self, name: str, file: _File) -> None:
        """Delete an unsynced file, not durably: a cut may bring it back. A synced file stays."""
        with self._lock:
            self._effect({})  # an unsealed file may survive a cut or not anyway
            if self._files.get(name) is file and file.synced_bytes is None:
                self._aborted[name] = self._files.pop(name)

    def publish(self, name: str, data: bytes, *, exclusive: bool) -> bool:
        """Replace a record durably; return False if it is exclusive and the name is taken."""
        with self._lock:
            file = _File(bytes(data), self.now_s(), durable=True)
            refused = exclusive and name in self._files
            self._effect({} if refused else {name: [file]})
            if not refused:
                self._files[name] = file
                self._aborted.pop(name, None)
            return not refused

    def delete(self, names: Iterable[str]) -> None:
        """Delete all names durably, as one effect."""
        with self._lock:
            names = list(names)
            self._effect({name: [None] for name in names})
            for name in names:
                self._files.pop(name, None)
                self._aborted.pop(name, None)

    # -- internal -------------------------------------------------------------------------------

    def _effect(self, fates: dict[str, list[_Fate]]) -> None:
        """Count an effect. If the cut hits it, `fates` has the other possible outcomes per name."""
        self._check_power()
        self._effects += 1
        if self._effects == self._cut_at:
            self._under_way = fates
            self._dead = True
            self._check_power()

    def _check_power(self) -> None:
        if self._dead:
            msg = f"simulated power cut at effect {self._effects}"
            raise SimulatedCrashError(msg)

    def _fates(self) -> list[tuple[str, list[_Fate]]]:
        """Return the possible outcomes of a cut for each name."""
        outcomes = []
        for name in sorted({*self._files, *self._aborted, *self._under_way}):
            file = self._files.get(name)
            fates: list[_Fate] = [file]
            if file is None or not file.durable:
                fates = [None]
                if unsure := file or self._aborted.get(name):
                    fates.append(unsure)
                if file is not None and file.synced_bytes is not None:
                    fates.remove(None)
            fates += [fate for fate in self._under_way.get(name, []) if fate not in fates]
            outcomes.append((name, fates))
        return outcomes

    def _survived(self, chosen: Iterable[tuple[str, _Fate]], choice: random.Random) -> Disk:
        other = Disk()
        other._ahead_s = self._ahead_s
        for name, fate in chosen:
            if fate is not None:
                whole = len(fate.data) if fate.durable else fate.synced_bytes or 0
                data = bytes(fate.data[:whole]) + _torn(fate.data[whole:], choice)
                # Files on the new disk have survived the cut, so they are durable.
                other._files[name] = _File(data, fate.modified_s, durable=True)
        return other


class PowerCut(Backend):
    """Stores blobs and records on a `Disk`; closing it leaves the disk as it is."""

    name: ClassVar[str] = "powercut"

    def __init__(self, disk: Disk | None = None, /) -> None:
        """Open `disk`; None opens a new one."""
        self.disk = disk or Disk()
        self._closed = False

    @property
    def url(self) -> str:
        """The URL, which is unique to the disk."""
        return f"powercut://{id(self.disk):x}"

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities: no alignment, exclusive publish, in the memory of this process."""
        return Capabilities(preferred_parallel=1, appends=True, local=True, outlives_process=False)

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """See `Backend.create`. The blob is listed before its seal."""
        del size_hint
        self._check(name)
        file = self.disk.create(name)
        if file is None:
            msg = f"cannot create {name} on {self.url}: the name is taken"
            raise BlobExistsError(msg)
        return _Writer(self.disk, name, file)

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """See `Backend.read`."""
        for request in requests:
            data = self._find(request.name).data
            target = flat_view(request.target)
            stop = request.offset + target.nbytes
            if request.offset < 0 or stop > len(data):
                msg = (
                    f"cannot read bytes {request.offset} to {stop} of {request.name} on "
                    f"{self.url}: it ends at {len(data)}"
                )
                raise BlobTruncatedError(msg)
            target[:] = memoryview(data)[request.offset : stop]

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        """See `Backend.read_record`. Never returns a mix of two versions."""
        data = self._find(name).data
        if len(data) > limit_bytes:
            msg = f"{name} on {self.url} has {len(data)} bytes, more than {limit_bytes} allowed"
            raise FormatError(msg, [name])
        return bytes(data)

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """See `Backend.publish`."""
        self._check(name)
        if not self.disk.publish(name, data, exclusive=exclusive):
            msg = f"cannot publish {name} on {self.url}: the name is taken"
            raise BlobExistsError(msg)

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """See `Backend.list`."""
        self._check(prefix, prefix=True)
        return self.disk.listed(prefix)

    def stat(self, name: str, /) -> BlobInfo:
        """See `Backend.stat`."""
        file = self._find(name)
        return BlobInfo(name, len(file.data), file.modified_s)

    def delete(self, names: Sequence[str], /) -> None:
        """See `Backend.delete`. This is one effect: a cut during it may delete any of the names."""
        for name in names:
            self._check(name)
        self.disk.delete(names)

    def close(self) -> None:
        """See `Backend.close`."""
        self._closed = True
        super().close()

    def _check(self, name: str, *, prefix: bool = False) -> None:
        if self._closed:
            msg = f"the backend {self.url} is closed"
            raise StorageError(msg)
        check_blob_name(name, prefix=prefix)

    def _find(self, name: str) -> _File:
        self._check(name)
        file = self.disk.find(name)
        if file is None:
            msg = f"{name} does not exist on {self.url}"
            raise BlobNotFoundError(msg)
        return file


class _Writer(BlobWriter):
    def __init__(self, disk: Disk, name: str, file: _File) -> None:
        self._disk = disk
        self._name = name
        self._file = file
        self._open = True
        self._lock = threading.Lock()  # guards `_open`: no write may follow a seal

    def write(self, requests: Sequence[WriteRequest], /) -> None:
        with self._lock:
            self._check_open("write")
            self._disk.write(self._name, self._file, requests)

    def sync(self, length: int, /) -> None:
        with self._lock:
            self._check_open("sync")
            self._disk.sync(self._name, self._file, length)

    def seal(self, length: int, /) -> None:
        with self._lock:
            self._check_open("seal")
            self._disk.seal(self._name, self._file, length)
            self._open = False

    def abort(self) -> None:
        with self._lock:
            if self._open:
                self._disk.abort(self._name, self._file)
                self._open = False

    def _check_open(self, what: str) -> None:
        if not self._open:
            msg = f"cannot {what} {self._name}: it is already sealed or aborted"
            raise StorageError(msg)


def _copy(file: _File) -> _File:
    # Sealed bytes never change again, so copies share them.
    data = file.data if isinstance(file.data, bytes) else bytearray(file.data)
    return replace(file, data=data)


def _extend(file: _File, length: int) -> None:
    if len(file.data) < length:
        file.data = bytearray(file.data) + bytes(length - len(file.data))


def _torn(data: bytes | bytearray, choice: random.Random) -> bytes:
    """Return `data` torn: cut to any length, with sectors replaced by zeros or random bytes."""
    # Draws "none", "all" and "some" equally often, for the length and for the kept sectors.
    length = choice.choice([0, len(data), choice.randint(0, len(data))])
    sectors = -(-length // SECTOR_BYTES)
    kept = choice.choice([0, -1, choice.getrandbits(sectors + 1)])
    rest = choice.choice([bytes(SECTOR_BYTES), choice.randbytes(SECTOR_BYTES)])
    torn = bytearray(data[:length])
    for number in range(sectors):
        if not kept >> number & 1:
            part = slice(number * SECTOR_BYTES, min((number + 1) * SECTOR_BYTES, length))
            torn[part] = rest[: part.stop - part.start]
    return bytes(torn)

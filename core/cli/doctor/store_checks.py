"""Checks of the store, and a probe of its speed, which writes a blob as a save does."""

from __future__ import annotations

import mmap
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.survey import survey_run, unrecorded
from penstock.core.cli.doctor.host import Check, space_of, temporary_files
from penstock.core.cli.output.render import age_text
from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import Deadline, call_with_deadline
from penstock.core.errors import DamagedError, PenstockError, StorageError
from penstock.core.foreign import said
from penstock.core.format.records import CommitRecord, blob_name
from penstock.core.types import ReadRequest, WriteRequest
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.core.abc import Backend

UNRECORDED_ADVICE = (
    "if the run was copied, bring the files of its folder `commits`, too; if saves broke off right "
    "before their commit, what is left of them is known to be garbage after the next checkpoint"
)

_SKEW_S = 30.0
_PROBE_SHARE = 10  # the probe takes at most a tenth of the free space: others use the disk, too

_PIECE_BYTES = 16 << 20
_PIECES_AT_ONCE = 4
_FIRST_BYTES = 8 << 20


def check_store(backend: Backend, root: Path | None, *, probe_bytes: int) -> list[Check]:
    """Check what the store can do and what it holds.

    Writes a small record, and up to `probe_bytes` in blobs, and deletes them again. An error of
    the backend is a finding of its check; the other checks run all the same.
    """
    # First, although listed third: where no record can be written, no speed is measured.
    clock = attempted("write a record", lambda: _clock(backend))
    checks = [
        attempted("direct I/O", lambda: _direct(backend, root)),
        attempted("alignment", lambda: _alignment(backend)),
        clock,
        attempted("checkpoints", lambda: _checkpoints(backend, root)),
        attempted("leftovers", lambda: _leftovers(backend, root)),
    ]
    if probe_bytes and clock.status != "fail":
        checks.append(attempted("speed", lambda: _speed(backend, root, probe_bytes)))
    return checks


def attempted(name: str, look: Callable[[], Check]) -> Check:
    """Return the check that `look` makes; an exception becomes a failed check."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001 - a backend may fail in any way: recorded
        # Messages of our errors stand alone; those of foreign ones (`KeyError: 'x'`) need the type.
        found = str(error) if isinstance(error, PenstockError) else said(error)
        return Check(name, "fail", found, "a save would fail in the same way: mend this first")


def affordable(limit_bytes: int, free_bytes: int) -> int:
    """Return how much a probe may write without filling a disk that others use, too."""
    return min(limit_bytes, free_bytes // _PROBE_SHARE)


def _direct(backend: Backend, root: Path | None) -> Check:
    capabilities = backend.capabilities
    values = {"direct_io": capabilities.direct_io, "backend": backend.name}
    if capabilities.direct_io:
        return Check("direct I/O", "ok", f"yes, through {backend.name}", values=values)
    if root is None:
        return Check("direct I/O", "info", f"does not apply to {backend.name}", values=values)
    why = "; ".join(capabilities.notes)
    if not why or "direct_io is off" in why:  # no fault: the backend has none, or the user said so
        return Check("direct I/O", "info", why or f"{backend.name} does not use it", values=values)
    advice = (
        "saves go through the page cache, which costs memory and a copy: use a folder on a disk "
        "whose file system takes O_DIRECT (ext4, xfs, btrfs without compression)"
    )
    return Check("direct I/O", "warn", why, advice, values)


def _alignment(backend: Backend) -> Check:
    c = backend.capabilities
    values = {
        "memory": c.memory_alignment,
        "offset": c.offset_alignment,
        "io_bytes": c.preferred_io_bytes,
        "parallel": c.preferred_parallel,
    }
    found = (
        f"memory {c.memory_alignment}, offsets {c.offset_alignment} bytes; "
        f"{c.preferred_parallel} transfers of up to {size_text(c.preferred_io_bytes)} at once"
    )
    return Check("alignment", "info", found, values=values)


def _clock(backend: Backend) -> Check:
    before_s = time.time()
    try:
        store_s = backend.store_time_s()
    except StorageError as error:
        advice = "a save cannot write there: mend this first"
        return Check("write a record", "fail", str(error), advice, {"skew_s": None})
    after_s = time.time()
    # The store read its clock between both times, so an offset between these bounds is no skew.
    # A few milliseconds mean nothing either: kernels round the times of files down.
    early, late = store_s - after_s, store_s - before_s
    skew_s = 0.0 if early <= 0 <= late else min(early, late, key=abs)
    took = f"{(after_s - before_s) * 1000:.0f} ms"
    values = {"skew_s": round(skew_s, 3)}
    if abs(skew_s) <= _SKEW_S:
        found = f"durable in {took}; the store's clock agrees within {abs(skew_s):.2f} s"
        return Check("write a record", "ok", found, values=values)
    which = "ahead of" if skew_s > 0 else "behind"
    found = f"durable in {took}; the store's clock is {abs(skew_s):.0f} s {which} this machine's"
    advice = "set both clocks by NTP: ages that `penstock ls` shows are off by as much"
    return Check("write a record", "warn", found, advice, values)


def _checkpoints(backend: Backend, root: Path | None) -> Check:
    records = dict(Catalog(backend).records())
    damaged = [step for step, found in records.items() if isinstance(found, DamagedError)]
    sizes = [found.bytes_stored for found in records.values() if isinstance(found, CommitRecord)]
    size = sizes[-1] if sizes else None
    values = {"steps": len(records), "damaged": damaged, "newest_bytes": size}
    if damaged:
        listed = ", ".join(map(str, damaged))
        advice = "bring their commit records back, or `penstock delete` them: until then `prune`"
        found = f"{len(records)}, of which the records of {listed} cannot be read"
        return Check("checkpoints", "warn", found, f"{advice} takes nothing", values)
    if size is None:
        return Check("checkpoints", "info", "none yet", values=values)
    found = f"{len(records)}, the newest of {size_text(size)}"
    if root is not None and space_of(root).free_bytes < size:
        advice = "make room, or keep fewer checkpoints (`retention`): another one does not fit"
        found += f"; only {size_text(space_of(root).free_bytes)} are free"
        return Check("checkpoints", "warn", found, advice, values)
    return Check("checkpoints", "ok", found, values=values)


def _leftovers(backend: Backend, root: Path | None) -> Check:
    survey = survey_run(backend)
    unnamed = survey.data.keys() - survey.needed
    report = Catalog(backend).prune(dry_run=True)
    files = temporary_files(root) if root is not None else []
    waiting = {*report.unrecorded, *unrecorded(survey.data, survey.intents, survey.latest)}
    waiting &= unnamed
    young = len(unnamed - waiting - set(report.uids))
    values = {
        "attempts": len(unnamed),
        "prunable": len(report.uids),
        "prunable_bytes": report.size_bytes,
        "unrecorded": len(waiting),
        "temporary_files": len(files),
        "temporary_bytes": sum(status.st_size for status in files),
    }
    parts = []
    if waiting:
        lack = "only their commit record" if survey.records else "a commit record, as all do"
        parts.append(f"{len(waiting)} saves that lack {lack}")
    if report.uids:
        parts.append(f"{len(report.uids)} broken saves ({size_text(report.size_bytes)})")
    if young:
        parts.append(f"{young} saves not committed, under way or broken less than a day ago")
    if files:
        oldest = age_text(time.time() - min(status.st_mtime for status in files))
        parts.append(f"{len(files)} temporary files, the oldest of {oldest} ago")
    found = "; ".join(parts) or "none"
    if waiting:  # they may be checkpoints whose records are still to be copied: advise no deletion
        return Check("leftovers", "warn", found, UNRECORDED_ADVICE, values)
    if report.uids:
        advice = "free it: penstock prune"
        return Check("leftovers", "warn", found, advice, values)
    return Check("leftovers", "info" if parts else "ok", found, values=values)


def _speed(backend: Backend, root: Path | None, limit_bytes: int) -> Check:
    if root is not None:
        folder = next(f for f in (root, *root.parents) if f.is_dir())
        limit_bytes = affordable(limit_bytes, space_of(folder).free_bytes)
    if not limit_bytes:
        return Check("speed", "info", "not measured: no space is free")
    try:
        speed = measure(backend, limit_bytes, root=root)
    except PenstockError as error:
        return Check("speed", "fail", str(error), "a save would fail in the same way")
    if not speed.same:
        advice = "do not use this store: look at the kernel log, and test the device"
        return Check("speed", "fail", "what was read is not what was written", advice)
    write, read = (speed.bytes / max(s, 1e-6) for s in (speed.write_s, speed.read_s))
    values = {
        "bytes": speed.bytes,
        "write_bytes_per_s": round(write),
        "read_bytes_per_s": round(read),
    }
    cached = "" if backend.capabilities.direct_io else " (perhaps from memory)"
    found = (
        f"writes {size_text(round(write))}/s until durable, reads {size_text(round(read))}/s"
        f"{cached}; {size_text(speed.bytes)} of random bytes"
    )
    return Check("speed", "ok", found, values=values)


@dataclass(frozen=True, slots=True)
class Speed:
    """The result of a probe.

    Attributes:
        bytes: The bytes that were written and read.
        write_s: The seconds until the bytes were durable.
        read_s: The seconds of reading, past the page cache where the store allows that.
        same: Whether the bytes read are the bytes written.
    """

    bytes: int
    write_s: float
    read_s: float
    same: bool


def measure(backend: Backend, limit_bytes: int, *, root: Path | None) -> Speed:
    """Write and read up to `limit_bytes`, or as much as the store does in a few seconds.

    A small first blob tells how much that is. If this process is killed the blobs remain, under
    names where `prune` finds them.

    Args:
        backend: The store.
        limit_bytes: The most bytes to write.
        root: The folder of a store on this machine, to get the blob out of the page cache.

    Raises:
        StorageError: The store failed; nothing remains in it.
    """
    # In a thread, since a signal's exception is raised in the main thread: between acquiring one of
    # the store's locks and releasing it, the exception would leave that lock taken.
    stop: list[bool] = []
    task = partial(_measure, backend, limit_bytes, root, stop)
    return call_with_deadline(
        "probe", task, timing=current_timing(), cancel=lambda: stop.append(True)
    )


def _measure(backend: Backend, limit_bytes: int, root: Path | None, stop: list[bool]) -> Speed:
    memory = memoryview(mmap.mmap(-1, _PIECE_BYTES * _PIECES_AT_ONCE))  # page-aligned: direct I/O
    piece = secrets.token_bytes(_PIECE_BYTES)  # random: a file system may compress
    for at in range(0, memory.nbytes, _PIECE_BYTES):
        memory[at : at + _PIECE_BYTES] = piece
    speed = _one(backend, min(_FIRST_BYTES, limit_bytes), memory, piece, root, stop)
    per_s = speed.bytes / max(speed.write_s, 1e-6)
    size = min(limit_bytes, int(per_s * current_timing().probe_s)) >> 20 << 20
    if size <= speed.bytes:
        return speed
    for at in range(0, memory.nbytes, _PIECE_BYTES):  # the first blob was read into it
        memory[at : at + _PIECE_BYTES] = piece
    return _one(backend, size, memory, piece, root, stop)


def _one(  # noqa: PLR0917 - one call of `_measure`, cut in two
    backend: Backend,
    size: int,
    memory: memoryview,
    piece: bytes,
    root: Path | None,
    stop: list[bool],
) -> Speed:
    name = blob_name(secrets.token_hex(16), 0, 0, "raw")
    try:
        began = time.monotonic()
        size = _write(backend, name, size, memory, stop)
        write_s = time.monotonic() - began
        if root is not None:
            _drop_cache(root / name)
        read_s, same = _read(backend, name, size, memory, piece, stop)
    finally:
        backend.delete([name])
    return Speed(size, write_s, read_s, same)


def _write(backend: Backend, name: str, size: int, memory: memoryview, stop: list[bool]) -> int:
    """Write up to `size` bytes durably within `Timing.probe_s`, and return how many."""
    deadline = Deadline(current_timing().probe_s)
    writer = backend.create(name, size_hint=size)
    try:
        done = 0
        while done < size and not (done and deadline.is_over()):
            _check(stop)
            length = min(size - done, memory.nbytes)
            writer.write(
                [
                    WriteRequest(done + at, (memory[at : min(at + _PIECE_BYTES, length)],))
                    for at in range(0, length, _PIECE_BYTES)
                ]
            )
            done += length
        writer.seal(done)
    except BaseException:
        writer.abort()
        raise
    return done


def _read(  # noqa: PLR0917 - likewise
    backend: Backend,
    name: str,
    size: int,
    memory: memoryview,
    piece: bytes,
    stop: list[bool],
) -> tuple[float, bool]:
    """Read the blob back; return the seconds of reading alone, and whether all is as written."""
    seconds, same = 0.0, True
    for start in range(0, size, memory.nbytes):
        _check(stop)
        length = min(size - start, memory.nbytes)
        targets = [
            memory[at : min(at + _PIECE_BYTES, length)] for at in range(0, length, _PIECE_BYTES)
        ]
        for target in targets:  # still filled by the write: a read that does nothing would pass
            target[:] = bytes(target.nbytes)
        requests = [
            ReadRequest(name, start + n * _PIECE_BYTES, target) for n, target in enumerate(targets)
        ]
        began = time.monotonic()
        backend.read(requests)
        seconds += time.monotonic() - began
        same = same and all(bytes(t) == piece[: t.nbytes] for t in targets)
    return seconds, same


def _check(stop: list[bool]) -> None:
    if stop:
        msg = "the probe was interrupted"
        raise StorageError(msg)


def _drop_cache(path: Path) -> None:
    with suppress(OSError):  # only a hint: without it the read may be measured from memory
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

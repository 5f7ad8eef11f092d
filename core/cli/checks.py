"""What `penstock doctor` finds out from the store itself, through its contract."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from penstock.core.blame import said
from penstock.core.catalog import Catalog
from penstock.core.cli.host import space_of, temporary_files
from penstock.core.cli.probe import measure
from penstock.core.cli.render import age_text
from penstock.core.errors import PenstockError, StorageError
from penstock.core.sizes import size_text
from penstock.core.survey import survey_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.core.abc import Backend

Status = Literal["ok", "info", "warn", "fail"]

_SKEW_S = 30.0
_PROBE_SHARE = 10  # of the free space the probe takes one part in so many at most


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What.
        status: `ok`; `info`: a fact; `warn`: it works, but not as well as it could; `fail`: a
            save would fail.
        found: For people.
        advice: What to change, if anything.
        values: For programs; which keys depends on `name`.
    """

    name: str
    status: Status
    found: str
    advice: str | None = None
    values: dict[str, Any] = field(default_factory=dict)


def check_store(backend: Backend, root: Path | None, *, probe_bytes: int) -> list[Check]:
    """Ask the store what it can do and what it holds, and try it.

    Writes a small record, and up to `probe_bytes` in blobs; all are deleted again. What the
    backend raises is a finding: whatever comes after it is looked at all the same.
    """
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
    """What `look` finds; what it raises is a finding, too."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001 - a backend may fail in any way: recorded
        # Ours say whose they are; of others the type is half of what there is to know.
        found = str(error) if isinstance(error, PenstockError) else said(error)
        return Check(name, "fail", found, "a save would fail in the same way: mend this first")


def affordable(limit_bytes: int, free_bytes: int) -> int:
    """How much a probe may write, so that whoever shares the disk does not notice."""
    return min(limit_bytes, free_bytes // _PROBE_SHARE)


def _direct(backend: Backend, root: Path | None) -> Check:
    capabilities = backend.capabilities
    values = {"direct_io": capabilities.direct_io, "backend": backend.name}
    if capabilities.direct_io:
        return Check("direct I/O", "ok", f"yes, through {backend.name}", values=values)
    if root is None:
        return Check("direct I/O", "info", f"does not apply to {backend.name}", values=values)
    why = "; ".join(capabilities.notes)
    if not why or "direct_io is off" in why:  # it never does, or was told not to
        return Check("direct I/O", "info", why or f"{backend.name} does without", values=values)
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
    # The store read its clock somewhere in between; kernels round file times down by some ms.
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
    catalog = Catalog(backend)
    steps, damaged = catalog.steps(), catalog.damaged()
    newest = catalog.newest_whole()
    size = newest.bytes_stored if newest else None
    values = {"steps": len(steps), "damaged": sorted(damaged), "newest_bytes": size}
    if damaged:
        listed = ", ".join(map(str, sorted(damaged)))
        advice = "bring their commit records back, or `penstock delete` them: until then `prune`"
        found = f"{len(steps)}, of which the records of {listed} cannot be read"
        return Check("checkpoints", "warn", found, f"{advice} takes nothing", values)
    if size is None:
        return Check("checkpoints", "info", "none yet", values=values)
    found = f"{len(steps)}, the newest of {size_text(size)}"
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
    young = len(unnamed - set(report.uids))
    values = {
        "attempts": len(unnamed),
        "prunable": len(report.uids),
        "prunable_bytes": report.size_bytes,
        "temporary_files": len(files),
        "temporary_bytes": sum(status.st_size for status in files),
    }
    parts = []
    if report.uids:
        parts.append(f"{len(report.uids)} broken saves ({size_text(report.size_bytes)})")
    if young:
        parts.append(f"{young} saves not committed, under way or broken less than a day ago")
    if files:
        oldest = age_text(time.time() - min(status.st_mtime for status in files))
        parts.append(f"{len(files)} temporary files, the oldest of {oldest} ago")
    found = "; ".join(parts) or "none"
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

"""The `penstock doctor` command: checks of this machine and of a store, and advice."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.core.abc import host_roots
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.prune import CLOCK_PREFIX
from penstock.core.catalog.survey import survey_run, unrecorded
from penstock.core.cli.app import AsGiven, Json, backend_of, command, size_of
from penstock.core.cli.bench.raw import measure
from penstock.core.cli.bench.scratch import without_traces
from penstock.core.cli.job import answers, open_run
from penstock.core.cli.output.render import age_text, print_json, print_line, steps_text
from penstock.core.cli.output.runs_on_disk import local_root, named_root, tiers_quiet
from penstock.core.cli.output.shares import hosts_seen, spreads_of
from penstock.core.config.plugin_choice import BackendConfig, scheme_of, shown_url
from penstock.core.errors import (
    ConfigError,
    DamagedError,
    PenstockError,
    StorageError,
    WrongPlaceError,
)
from penstock.core.foreign import said
from penstock.core.format.records import DATA_PREFIX, CommitRecord
from penstock.core.pipeline.staging import container_memory, machine_memory
from penstock.core.plugins.registry import default_registry
from penstock.core.units import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.abc import Backend

_STYLES = {"ok": "green", "info": "", "warn": "yellow", "fail": "bold red"}
_INDENT = 6
_OCTAL = re.compile(r"\\([0-7]{3})")
_NO_FOLDER = " is not a folder"

_FILES_WANTED = 4096
_BLOB_BYTES = 1 << 40  # blobs may be about this large: warn if a file must be smaller
_LITTLE_SPACE = 0.05
_FEW_INODES = 10_000
_SKEW_S = 30.0
_PROBE_SHARE = 10  # the probe takes at most a tenth of the free space: others use the disk too
_IN_MEMORY = "checkpoints there are lost at a reboot, and take memory: use a disk"
_ON_NETWORK = "a network file system: mount it `hard`; a local disk saves faster"
_NOT_A_DISK = {
    "tmpfs": _IN_MEMORY,
    "ramfs": _IN_MEMORY,
    "overlay": "a layer of a container, slow, and deleted with it: mount a volume for checkpoints",
    "9p": "a folder of the virtual machine's host, slow, with a weak fsync: use a virtual disk",
    "nfs": _ON_NETWORK,
    "nfs4": _ON_NETWORK,
    "cifs": "a network file system without POSIX links: exclusive publishing may not work",
    "fuse": "make sure that its fsync really makes files durable",
}
_URING = {
    "PENSTOCK_DISABLE_URING": "unset PENSTOCK_DISABLE_URING",
    "liburing cannot be imported": "pip install liburing",
    "another CPU": "run on a CPU with AVX-512, which liburing is compiled for",
    "ENOSYS": "use Linux 5.6 or later, and a container that allows io_uring",
    "ENOMEM": "raise RLIMIT_MEMLOCK (ulimit -l), which limits rings before Linux 5.12",
}
"""The advice, by a text that occurs in the reason why io_uring does not work."""

_USES_URING = {"uring", "lustre"}
_UNRECORDED = (
    "if the run was copied, copy the files of its folder `commits` too; if saves broke off right "
    "before their commit, their data can be pruned after the next checkpoint"
)

Status = Literal["ok", "info", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        name: The subject of the check.
        status: `ok`, `info` (a fact), `warn` (works, but could be better) or `fail` (a save would
            fail).
        found: The finding, for users.
        advice: The change that would help, if any.
        values: The finding for programs; the keys depend on `name`.
    """

    name: str
    status: Status
    found: str
    advice: str | None = None
    values: dict[str, Any] = field(default_factory=dict)


@command("doctor")
def doctor(
    url: AsGiven,
    *,
    probe: Annotated[
        bool,
        typer.Option("--probe/--no-probe", help="Measure how fast the store writes and reads."),
    ] = True,
    probe_size: Annotated[
        int,
        typer.Option(
            metavar="SIZE", parser=size_of, help="Write at most this.", show_default="256MiB"
        ),
    ] = 256 << 20,
    as_json: Json = False,
) -> bool:
    """Check what this machine and this store can do for a run, and advise what to change.

    The run need not exist yet. Nothing is left behind, unless the command is killed while it
    writes; `penstock prune` finds the remains. A check is `ok`, `info` (a fact), `warn` (works, but
    could be better) or `fail` (a save would fail; the exit code is 1). Under torchrun, checks each
    host.

    Examples:
      penstock doctor runs/gpt
      penstock doctor /nvme/new-run --no-probe
      penstock doctor runs/gpt --json |
        jq '.checks[] | select(.status != "ok")'
    """
    probe_bytes = probe_size if probe else 0
    checks: list[Check] = []
    given: object = backend_of(url)  # a table, if the configuration file has one
    shown = shown_url(given) if isinstance(given, str) else "the backend of the configuration"

    def at_each_host(backend: Backend) -> list[dict[str, Any]]:
        uring = _uring()
        if not _may_use_uring(given):
            why = f"not used for {backend.name}: {uring.found}"
            uring = replace(uring, status="info", found=why, advice=None)
        return [asdict(check) for check in (uring, *_check_backend(backend, probe_bytes))]

    opening = open_run(url, light=False, must_exist=False, at_each_host=at_each_host)
    try:
        with tiers_quiet(), opening as backend:
            shown = backend.url
            (_, _, here), *others = answers() or [("", 0, at_each_host(backend))]
            checks = [Check(**check) for check in here]
            checks += [*(_check_host(*one) for one in others), *_check_hosts(backend)]
    except (ConfigError, typer.Exit):
        raise
    except Exception as error:  # noqa: BLE001 - a backend may fail in any way: a finding
        found = str(error) if isinstance(error, PenstockError) else said(error)
        if not checks:
            fail = Check("open", "fail", found, "the store cannot be used: fix this first")
            checks = [_uring(), *_check_process(), fail]
        else:
            checks.append(Check("close", "fail", found, "fix the backend"))
    ok = all(check.status != "fail" for check in checks)
    if as_json:
        print_json({"url": shown, "ok": ok, "checks": [asdict(check) for check in checks]})
    else:
        _print(shown, checks)
    return ok


def _check_backend(backend: Backend, probe_bytes: int) -> list[Check]:
    if not backend.tiers:
        return [*_check_place(backend, probe_bytes), *_check_process()]
    silent = {tier.name: _check_answer(tier.backend) for tier in backend.tiers}
    checks: list[Check] = []
    for number, tier in enumerate(backend.tiers):
        why = silent[tier.name]
        found = _check_place(tier.backend, probe_bytes) if why is None else [why]
        # A failed check of one tier is a warning if saves continue without that tier. Saves skip a
        # tier that does not answer while another tier answers. They skip a tier that answers but
        # fails only if it is not the fastest.
        others = number > 0 if why is None else not all(silent.values())
        checks += [_as_of_tier(tier.name, check, number, others=others) for check in found]
    return [*checks, *_check_process()]


def _check_host(host: str, rank: int, answer: list[dict[str, Any]]) -> Check:
    """Return the findings of one host as one: its disk, and what is not well."""
    checks = [Check(**one) for one in answer]
    bad = [check for check in checks if check.status in {"warn", "fail"}]
    disk = [check for check in checks if check.name.endswith(("file system", "space"))]
    texts = [one.found for one in disk if one not in bad] + [f"{c.name}: {c.found}" for c in bad]
    advice = "; ".join(f"{check.name}: {check.advice}" for check in bad if check.advice)
    worst = max(checks, key=lambda check: list(_STYLES).index(check.status))
    values = {"host": host, "rank": rank, "checks": answer}
    return Check(f"rank {rank}, {host}", worst.status, "; ".join(texts), advice or None, values)


def _check_hosts(backend: Backend) -> Iterator[Check]:
    """Check how many copies the hosts can have, and whether the newest checkpoint has them."""
    seen, place = hosts_seen(backend), next(iter(host_roots(backend).values()), None)
    if place is None:
        return
    note = "" if seen is None else seen.note()
    if len(place.roots) == 1:
        note = note or "run the command under torchrun on all hosts to see all"
        yield Check("hosts", "info", f"copies = {place.copies}; {note}")
        return
    domains = {root.domain or root.host for root in place.roots}
    found = f"{len(place.roots)} in {counted(len(domains), 'domain')}, copies = {place.copies}"
    few = len(domains) <= place.copies
    advice = f"{place.copies} copies need {1 + place.copies} domains" if few else None
    found = f"{found}; {note}" if note else found
    yield Check("hosts", "warn" if few or note else "ok", found, advice)
    records = [one for _, one in Catalog(place).records() if isinstance(one, CommitRecord)]
    states = {uid: spread.state for uid, spread in spreads_of(backend, records).items()}
    if not states:  # there are no checkpoints, or a host does not answer, which was reported
        return
    found, advice = f"step {records[-1].step} is {states[records[-1].uid]}", None
    if lacking := [r.step for r in records if states[r.uid] in {"incomplete", "none"}]:
        found += f"; incomplete on these hosts: {steps_text(lacking)}"
        advice = "start the next job with the absent hosts"
    elif place.copies and found.endswith("whole"):
        advice = "its files have too few copies, which the next job makes"
    yield Check("copies", "warn" if advice else "ok", found, advice)


def _check_answer(backend: Backend) -> Check | None:
    """Return a finding if a tier does not answer; None if it answers.

    Also None if the tier is a folder: the checks of folders report a better reason.
    """
    advice = "check that it can be reached"
    try:
        backend.list(CLOCK_PREFIX)
    except WrongPlaceError as error:
        why, advice = str(error), "mount its file system"
    except StorageError as error:
        if named_root(backend) is not None:
            return None
        why = str(error)
    except Exception as error:  # noqa: BLE001 - a backend may fail in any way: a finding
        why = said(error)
    else:
        return None
    return Check("answer", "fail", why, advice)


def _as_of_tier(name: str, check: Check, number: int, *, others: bool) -> Check:
    status, advice = check.status, check.advice
    if others and status == "fail":
        meanwhile = "stay in faster tiers" if number else "go to the next tier"
        status, advice = "warn", f"{advice or 'fix it'}; until then saves {meanwhile}"
    return replace(check, name=f"{name}: {check.name}", status=status, advice=advice)


def _check_place(backend: Backend, probe_bytes: int) -> list[Check]:
    checks = _lifetime(backend)
    try:
        root = local_root(backend)
    except PenstockError:  # `_check_store` gets the same error, and reports it
        root = None
    if root is not None:
        checks += _check_folder(root, backend)
        if any(check.found.endswith(_NO_FOLDER) for check in checks):
            return checks  # each further check would fail for this reason
    with without_traces(root):
        checks += _check_store(backend, root, probe_bytes)
    return checks


def _may_use_uring(spec: Any) -> bool:
    """Return whether the run, or one of its tiers, would use io_uring if io_uring works."""
    if isinstance(spec, BackendConfig):
        spec = {"type": spec.type, **spec.options}
    if isinstance(spec, dict):
        tiers = [spec[name] for name in ("fast", "durable") if name in spec]
        return spec["type"] in _USES_URING or any(map(_may_use_uring, tiers))
    return scheme_of(str(spec)) in {"", "file", *_USES_URING}


def _uring() -> Check:
    try:
        backend = default_registry().backend_class("uring")
        backend(backend.from_url("/", {})).close()
    except PenstockError as error:
        return Check("io_uring", "warn", str(error), _uring_advice(str(error)), {"works": False})
    return Check("io_uring", "ok", f"works, on Linux {platform.release()}", values={"works": True})


def _uring_advice(why: str) -> str:
    advice = [advice for reason, advice in _URING.items() if reason in why]
    if "EPERM" in why:
        disabled = _content("/proc/sys/kernel/io_uring_disabled").strip()
        if disabled not in {"", "0"}:
            advice.append(f"sysctl kernel.io_uring_disabled is {disabled}: set it to 0")
        elif re.search(r"^Seccomp:\s*2$", _content("/proc/self/status"), re.MULTILINE):
            advice.append(
                "allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile "
                "of the container"
            )
    return "; ".join([*advice, "until then threads are used, which cost more CPU"])


def _content(file: str) -> str:
    """Return the content of a file in /proc; empty if it cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def _check_folder(root: Path, backend: Backend) -> list[Check]:
    """Check the folder, its file system, its space and its inodes.

    The root may also be one file, if the backend accepts that.
    """
    try:
        folder = next(f for f in (root, *root.parents) if f.exists()).resolve()
    except OSError as error:
        return [Check("folder", "fail", f"{root}: {error.strerror}", "check the path")]
    if folder.is_dir():
        checks = [_folder(folder, exists=root.exists())]
    else:
        try:
            backend.check_writable()
        except PenstockError:
            found = f"{folder}{_NO_FOLDER}"
            advice = "choose another path; `penstock import` reads files of other tools"
            return [Check("folder", "fail", found, advice)]
        checks = []  # `write a record` finds out whether a file can be written
    checks.append(_file_system(folder, memory_is_good=bool(host_roots(backend))))
    try:
        return [*checks, _space(folder), _inodes(folder)]
    except OSError as error:
        return [*checks, Check("space", "fail", str(error.strerror), "check the mount")]


def _folder(folder: Path, *, exists: bool) -> Check:
    values = {"exists": exists}
    if not os.access(folder, os.W_OK | os.X_OK):
        advice = "change its owner or its permissions"
        return Check("folder", "fail", f"{folder} cannot be written", advice, values)
    found = "exists" if exists else f"does not exist yet; would be created in {folder}"
    return Check("folder", "ok" if exists else "info", found, values=values)


def _file_system(folder: Path, *, memory_is_good: bool) -> Check:
    mount = _mount_of(folder)
    if mount is None:
        return Check("file system", "info", "unknown: /proc does not show it")
    kind, source, point, read_only = mount
    values = {"type": kind, "source": source, "mounted_on": point}
    found = f"{kind} ({source} on {point})"
    if read_only:
        return Check("file system", "fail", f"{found}, read-only", "mount it writable", values)
    advice = _NOT_A_DISK.get("fuse" if kind.startswith("fuse") else kind)
    if memory_is_good and advice == _IN_MEMORY:
        found, advice = f"{found}, memory: lost with this host", None
    return Check("file system", "warn" if advice else "ok", found, advice, values)


def _mount_of(folder: Path) -> tuple[str, str, str, bool] | None:
    """Return type, source and folder of the mount that holds `folder`, and whether it is read-only.

    None if /proc does not show it.
    """
    mount, longest = None, 0
    for line in _content("/proc/self/mountinfo").splitlines():
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 2:  # noqa: PLR2004 - proc(5)
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        # The last of several mounts on one folder hides the others, hence `>=`.
        if folder.is_relative_to(point) and len(point) >= longest:
            mount, longest = (rest[0], rest[1], point, "ro" in fields[5].split(",")), len(point)
    return mount


def _space(folder: Path) -> Check:
    disk = shutil.disk_usage(folder)
    values = {"free_bytes": disk.free, "total_bytes": disk.total}
    found = f"{size_text(disk.free)} of {size_text(disk.total)} are free"
    if not disk.free:
        return Check("space", "fail", found, "make room, or raise the quota", values)
    if disk.free < _LITTLE_SPACE * disk.total:
        advice = "make room: nearly full file systems are also slow"
        return Check("space", "warn", found, advice, values)
    return Check("space", "ok", found, values=values)


def _inodes(folder: Path) -> Check:
    disk = os.statvfs(folder)
    values = {"free": disk.f_favail if disk.f_files else None, "total": disk.f_files or None}
    if not disk.f_files:  # btrfs, for instance, creates inodes as needed
        return Check("inodes", "ok", "limited only by space", values=values)
    found = f"{disk.f_favail:,} of {disk.f_files:,} are free"
    if disk.f_favail < _FEW_INODES:
        status: Status = "warn" if disk.f_favail else "fail"
        return Check("inodes", status, found, "delete small files", values)
    return Check("inodes", "ok", found, values=values)


def _check_process() -> list[Check]:
    """Check memory, and the resource limits that a training process started here would have."""
    return [_open_files(), _file_size(), _memory()]


def _open_files() -> Check:
    soft, hard = _limits(resource.RLIMIT_NOFILE)
    values = {"soft": soft, "hard": hard}
    texts = ["unlimited" if value is None else f"{value:,}" for value in (soft, hard)]
    found = f"{texts[0]} (hard limit {texts[1]})"
    if soft is not None and soft < _FILES_WANTED:
        room = hard is None or hard >= _FILES_WANTED
        where = "ulimit -n" if room else "ulimit -n, as root or in limits.conf"
        advice = f"raise it to {_FILES_WANTED} or more ({where}): data loaders open many files too"
        return Check("open files", "warn", found, advice, values)
    return Check("open files", "ok", found, values=values)


def _file_size() -> Check:
    soft, hard = _limits(resource.RLIMIT_FSIZE)
    values = {"soft": soft, "hard": hard}
    if soft is None or soft >= _BLOB_BYTES:
        found = "unlimited" if soft is None else size_text(soft)
        return Check("file size", "ok", found, values=values)
    advice = "raise it (ulimit -f unlimited): a save with a larger blob fails"
    return Check("file size", "warn", f"at most {size_text(soft)}", advice, values)


def _limits(which: int) -> list[int | None]:
    """Return the soft and the hard limit of a resource; None means unlimited."""
    limits = resource.getrlimit(which)
    return [None if value == resource.RLIM_INFINITY else value for value in limits]


def _memory() -> Check:
    limit = container_memory()
    try:
        available = machine_memory()
    except (OSError, StopIteration):  # a system without /proc/meminfo or its field
        values = {"available_bytes": None, "container_bytes": limit}
        return Check("memory", "info", "unknown: /proc does not show it", values=values)
    values = {"available_bytes": available, "container_bytes": limit}
    found = f"{size_text(available)} available"
    if limit is None or limit >= available:
        return Check("memory", "ok", found, values=values)
    found += f"; this container may still use {size_text(limit)}"
    if limit < available // 2:
        advice = (
            "set staging_bytes to at most half of what the container may use: the default is up to "
            "half of what the machine has available"
        )
        return Check("memory", "warn", found, advice, values)
    return Check("memory", "ok", found, values=values)


def _check_store(backend: Backend, root: Path | None, probe_bytes: int) -> list[Check]:
    """Check what the store can do and what it holds.

    Writes a small record, and up to `probe_bytes` in blobs, and deletes them again. An error of
    the backend is a finding of its check; the other checks still run.
    """
    # The first check to run, though not the first listed: if it fails, no speed is measured.
    clock = _attempted("write a record", lambda: _clock(backend))
    checks = [
        _attempted("direct I/O", lambda: _direct(backend, root)),
        clock,
        _attempted("checkpoints", lambda: _checkpoints(backend, root)),
        _attempted("leftovers", lambda: _leftovers(backend, root)),
    ]
    if probe_bytes and clock.status != "fail":
        checks.append(_attempted("speed", lambda: _speed(backend, root, probe_bytes)))
    return checks


def _lifetime(backend: Backend) -> list[Check]:
    """Return a warning if checkpoints are lost when the process that saves them ends."""
    try:
        if backend.capabilities.outlives_process:
            return []
    except PenstockError:  # `_direct` reports it
        return []
    advice = "use a path, or a URL such as s3://bucket/run, for checkpoints that must outlive it"
    found = "checkpoints live in the memory of the process that saves them, and end with it"
    return [Check("lifetime", "warn", found, advice)]


def _attempted(name: str, look: Callable[[], Check]) -> Check:
    """Return the check that `look` makes; an exception becomes a failed check."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001 - a backend may fail in any way: recorded
        # Messages of our errors are complete; foreign ones (`KeyError: 'x'`) need the type.
        found = str(error) if isinstance(error, PenstockError) else said(error)
        return Check(name, "fail", found, "a save would fail in the same way: fix this first")


def _direct(backend: Backend, root: Path | None) -> Check:
    capabilities = backend.capabilities
    values = {
        "direct_io": capabilities.direct_io,
        "backend": backend.name,
        "memory": capabilities.memory_alignment,
        "offset": capabilities.offset_alignment,
        "io_bytes": capabilities.preferred_io_bytes,
        "parallel": capabilities.preferred_parallel,
    }
    if capabilities.direct_io:
        return Check("direct I/O", "ok", f"yes, through {backend.name}", values=values)
    if root is None:
        return Check("direct I/O", "info", f"does not apply to {backend.name}", values=values)
    why = "; ".join(capabilities.notes)
    # No fault: the backend has none, the user's choice, or memory, which has its own check.
    if not why or "direct_io is off" in why or "keeps files in memory" in why:
        return Check("direct I/O", "info", why or f"{backend.name} does not use it", values=values)
    advice = (
        "saves go through the page cache, which costs memory and a copy: use a folder on a disk "
        "whose file system supports O_DIRECT (ext4, xfs, btrfs without compression)"
    )
    return Check("direct I/O", "warn", why, advice, values)


def _clock(backend: Backend) -> Check:
    before_s = time.time()
    store_s = backend.store_time_s()
    after_s = time.time()
    # The store read its clock between both times, so the skew is 0 if `store_s` is between them.
    # Beyond them, a few milliseconds mean nothing: kernels round file times down.
    early, late = store_s - after_s, store_s - before_s
    skew_s = 0.0 if early <= 0 <= late else min(early, late, key=abs)
    took = f"{(after_s - before_s) * 1000:.0f} ms"
    values = {"skew_s": round(skew_s, 3)}
    if abs(skew_s) <= _SKEW_S:
        found = f"durable in {took}; the store's clock agrees within {abs(skew_s):.2f} s"
        return Check("write a record", "ok", found, values=values)
    which = "ahead of" if skew_s > 0 else "behind"
    found = f"durable in {took}; the store's clock is {abs(skew_s):.0f} s {which} this machine's"
    advice = "set both clocks by NTP: the ages in `penstock ls` are off by as much"
    return Check("write a record", "warn", found, advice, values)


def _checkpoints(backend: Backend, root: Path | None) -> Check:
    records = dict(Catalog(backend).records())
    damaged = [step for step, found in records.items() if isinstance(found, DamagedError)]
    sizes = [found.bytes_stored for found in records.values() if isinstance(found, CommitRecord)]
    size = sizes[-1] if sizes else None
    infos = backend.list(DATA_PREFIX)
    logs_bytes = sum(info.size_bytes for info in infos if info.name.endswith(".log"))
    values = {
        "steps": len(records), "damaged": damaged, "newest_bytes": size, "logs_bytes": logs_bytes
    }  # fmt: skip
    if damaged:
        listed = ", ".join(map(str, damaged))
        advice = "recover these records, or `penstock delete` these steps: until then `prune`"
        found = f"{len(records)}; the commit records of steps {listed} cannot be read"
        return Check("checkpoints", "fail", found, f"{advice} deletes nothing", values)
    if size is None:
        return Check("checkpoints", "info", "none yet", values=values)
    found = f"{len(records)}, the newest of {size_text(size)}"
    if logs_bytes:
        found += f"; logs of {size_text(logs_bytes)}"
    for place in host_roots(backend).values():
        seen = hosts_seen(backend)
        count = 1 if seen is None else len(seen.shown + seen.absent) or 1
        size = size * min(1 + place.copies, count) // count  # of its own files and its copies
    free_bytes = size if root is None else shutil.disk_usage(root).free
    if free_bytes < size:
        advice = "make room, or keep fewer checkpoints (`retention`): another one does not fit"
        found += f"; only {size_text(free_bytes)} are free"
        return Check("checkpoints", "warn", found, advice, values)
    return Check("checkpoints", "ok", found, values=values)


def _leftovers(backend: Backend, root: Path | None) -> Check:
    survey = survey_run(backend)
    unnamed = survey.data.keys() - survey.needed
    report = Catalog(backend).prune(dry_run=True)
    files = _temporary_files(root) if root is not None else []
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
        lack = " missing only a commit record" if survey.records else ", but no commit record"
        parts.append(f"{counted(len(waiting), 'save')}{lack}")
    if report.uids:
        parts.append(f"{counted(len(report.uids), 'broken save')} ({size_text(report.size_bytes)})")
    if young:
        text = counted(young, "uncommitted save")
        parts.append(f"{text}, under way or broken less than a day ago")
    if files:
        oldest = age_text(time.time() - min(status.st_mtime for status in files))
        parts.append(f"{counted(len(files), 'temporary file')}, the oldest from {oldest} ago")
    found = "; ".join(parts) or "none"
    if waiting:  # may be checkpoints whose records will be copied: advise no deletion
        return Check("leftovers", "warn", found, _UNRECORDED, values)
    if report.uids:
        return Check("leftovers", "warn", found, "free it: penstock prune", values)
    return Check("leftovers", "info" if parts else "ok", found, values=values)


def _temporary_files(root: Path) -> list[os.stat_result]:
    """Return the files of interrupted publishes below `root`: their names begin with `~`."""
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            if name.startswith("~"):
                try:
                    found.append(Path(folder, name).lstat())
                except FileNotFoundError:  # a publish in flight has just removed it
                    continue
    return found


def _speed(backend: Backend, root: Path | None, limit_bytes: int) -> Check:
    if root is not None:
        folder = next(f for f in (root, *root.parents) if f.is_dir())
        limit_bytes = min(limit_bytes, shutil.disk_usage(folder).free // _PROBE_SHARE)
    if not limit_bytes:
        return Check("speed", "info", "not measured: no space is free")
    # The backend `hosts` lets no process that is alone delete, so the probe would stay.
    place = next((roots.own for roots in host_roots(backend).values()), backend)
    speed = measure(place, limit_bytes, root=root)
    if not speed.same:
        advice = "do not use this store: look at the kernel log, and test the device"
        return Check("speed", "fail", "the bytes read are not the bytes written", advice)
    write, read = round(speed.write_bytes_per_s), round(speed.read_bytes_per_s)
    values = {"bytes": speed.bytes, "write_bytes_per_s": write, "read_bytes_per_s": read}
    cached = "" if backend.capabilities.direct_io else " (perhaps from a cache)"
    found = (
        f"writes {size_text(write)}/s including the sync to durable storage, reads "
        f"{size_text(read)}/s{cached}; measured with {size_text(speed.bytes)} of random bytes"
    )
    return Check("speed", "ok", found, values=values)


def _print(url: str, checks: list[Check]) -> None:
    print_line(url)
    width = max(len(check.name) for check in checks)
    for check in checks:
        text = f"{check.status:<{_INDENT}}{check.name:<{width}}  {check.found}"
        print_line(text, hanging=_INDENT, style=_STYLES[check.status])
    advice = [check for check in checks if check.advice]
    if advice:
        print_line("")
        print_line("What to change:")
    for check in advice:
        print_line(f"- {check.name}: {check.advice}")
    bad = [check.name for check in checks if check.status == "fail"]
    if bad:
        print_line("")
        print_line(f"A save would fail: see {', '.join(bad)}.", style="bold red")

"""The disk under a benchmark: making things durable, emptying the page cache, asking fio."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

FIO_GRID = (  # block size, depth, files, fallocate
    ("8M", 16, 1, "native"),
    ("32M", 8, 1, "native"),
    ("8M", 4, 4, "native"),
    ("8M", 16, 1, "none"),
)


def sync_tree(root: Path) -> None:
    """Make a folder durable: every file, then every folder, then the folder's own name."""
    folders = []
    for folder, _, files in os.walk(root):
        folders.append(folder)
        for name in files:
            _fsync(f"{folder}/{name}")
    for folder in reversed(folders):
        _fsync(folder)
    _fsync(str(root.parent))


def settle(pause_s: float) -> None:
    """Write out what others left behind and wait a moment, so that nobody pays for it.

    File systems that discard deleted blocks tell the device after the next journal commit.
    """
    os.sync()
    if pause_s:
        time.sleep(pause_s)
        os.sync()


def drop_cache(root: Path) -> str:
    """Empty the page cache (as root), or at least of the files below `root`; returns how."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        for path in root.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        return "posix_fadvise(DONTNEED)"
    return "drop_caches"


def file_system(folder: Path) -> str:
    """Type of the file system that holds `folder`, such as `ext4`."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, name, *_ = line.split()
        inside = f"{folder.resolve()}/".startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, name
    return kind


def fio_version() -> str | None:
    """Version of fio, None where it is not installed."""
    if shutil.which("fio") is None:
        return None
    return subprocess.run(
        ["fio", "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()


def run_fio(folder: Path, size_bytes: int, pause_s: float) -> list[dict[str, object]]:
    """Write fresh files and read them again with every point of the grid."""
    points = []
    for block, depth, files, fallocate in FIO_GRID:
        label = f"{block} x {depth}, {files} file{'s' * (files > 1)}, fallocate={fallocate}"
        common = [
            "fio",
            "--output-format=json",
            "--name=raw",
            f"--directory={folder}",
            f"--size={size_bytes // files >> 20}M",
            f"--numjobs={files}",
            f"--bs={block}",
            f"--iodepth={depth}",
            f"--fallocate={fallocate}",
            "--ioengine=io_uring",
            "--direct=1",
            "--group_reporting",
        ]
        for kind, flags in (("save", ["--rw=write", "--end_fsync=1"]), ("restore", ["--rw=read"])):
            settle(pause_s)
            drop_cache(folder)
            done = subprocess.run([*common, *flags], capture_output=True, text=True, check=False)
            if done.returncode:
                message = (done.stderr or done.stdout).strip().splitlines()[-1:]
                points.append({"kind": kind, "label": label, "error": "".join(message)})
                break
            job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
            moved = job["write" if kind == "save" else "read"]
            # Not job_runtime: that adds up over the files. End of fsync is in the runtime.
            points.append(
                {
                    "kind": kind,
                    "label": label,
                    "seconds": moved["runtime"] / 1e3,
                    "bytes": moved["io_bytes"],
                }
            )
        for path in folder.glob("raw.*"):
            path.unlink()
    return points


def _fsync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(folder: Path) -> None:
    """Delete a folder and all below, if it is there."""
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)

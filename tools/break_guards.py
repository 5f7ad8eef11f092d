"""Break each guard of data safety once, in a copy, and see that a test fails.

A guard that can be taken out without a test that fails is not tested. Run from the root:

    .venv/bin/python tools/break_guards.py            # all of them, some minutes
    .venv/bin/python tools/break_guards.py fence      # those whose name contains "fence"
    .venv/bin/python tools/break_guards.py --write    # and put the table into docs/design/guards.md
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/design/guards.md"
COPIED = ("core", "providers", "backends", "codecs", "src", "tests", "pyproject.toml")
TIMEOUT_S = 300


@dataclass(frozen=True)
class Guard:
    """One guard: where it stands, what takes its place, and the tests that should notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str


GUARDS = (
    Guard(
        "The fence holds back every optimizer step",
        "core/fence.py",
        "    if not _pending:\n        return\n",
        "    return\n",
        "tests/core/test_fence.py tests/integration/test_torn_snapshot.py",
    ),
    Guard(
        "Versions of deferred tensors are compared before the commit",
        "core/capture.py",
        "        if changed:\n            more",
        "        if False:\n            more",
        "tests/integration/test_torn_snapshot.py",
    ),
    Guard(
        "Async waits until everything is captured",
        "core/saving.py",
        "        free.wait()\n",
        "",
        "tests/integration/test_torn_snapshot.py",
    ),
    Guard(
        "Checksum of each block of a raw frame",
        "core/frames.py",
        "        if got != want:\n",
        "        if False:\n",
        "tests/integration/test_corruption.py",
    ),
    Guard(
        "Checksum of an encoded frame",
        "core/frames.py",
        "        if checksum(data) != frame.checksums[0]:\n",
        "        if False:\n",
        "tests/core/test_loading.py",
    ),
    Guard(
        "Checksum of what a frame decodes to",
        "core/frames.py",
        "        if frame.raw_checksum is not None and checksum(out) != frame.raw_checksum:\n",
        "        if False:\n",
        "tests/core/test_loading.py tests/integration/test_corruption.py",
    ),
    Guard(
        "Digests bind part, index and commit record",
        "core/compressed.py",
        "    if digest(data) != expected:\n",
        "    if False:\n",
        "tests/core/test_manifest.py tests/integration/test_corruption.py",
    ),
    Guard(
        "Digest of a record in its first line",
        "core/record.py",
        '    if digest(content) != fields.hexadecimal("sha256", 64):\n',
        "    if False:\n",
        "tests/core/test_record.py",
    ),
    Guard(
        "Exclusive publish",
        "backends/local/namespace.py",
        "                if exclusive:\n                    self._link",
        "                if False:\n                    self._link",
        "tests/backends/test_conformance.py tests/integration/test_two_savers.py",
    ),
    Guard(
        "fsync of a blob",
        "backends/local/blob.py",
        "                os.fsync(self._blob.fd)\n",
        "",
        "tests/backends/test_durability.py",
    ),
    Guard(
        "fsync of a record before it has its name",
        "backends/local/namespace.py",
        "                rest = rest[os.write(fd, rest) :]\n            os.fsync(fd)\n",
        "                rest = rest[os.write(fd, rest) :]\n",
        "tests/backends/test_durability.py",
    ),
    Guard(
        "fsync of the folders of a sealed blob",
        "backends/local/blob.py",
        "                self._folders.sync()\n",
        "",
        "tests/backends/test_durability.py",
    ),
    Guard(
        "fsync of the folders of a published record",
        "backends/local/namespace.py",
        "                visible = True\n                folders.sync()\n",
        "                visible = True\n",
        "tests/backends/test_power_cut_files.py",
    ),
    Guard(
        "fsync of a folder from which a name was deleted",
        "backends/local/namespace.py",
        "            os.fsync(folders.last)\n            folders.close()\n",
        "            folders.close()\n",
        "tests/backends/test_durability.py tests/backends/test_power_cut_files.py",
    ),
    Guard(
        "A blob is dead after a failed fsync",
        "backends/local/blob.py",
        "        ours, outcome = False, _State.DEAD\n",
        "        ours, outcome = False, _State.OPEN\n",
        "tests/backends/test_durability.py",
    ),
    Guard(
        "Blobs are sealed before anything is published",
        "core/saving.py",
        "        blobs = self._writer.finish()\n",
        "        from concurrent.futures import ThreadPoolExecutor as _Pool\n"
        "        blobs = [(self._writer._raw_name, self.request.plan.raw_blob_bytes)]\n"
        "        _Pool(1).submit(self._writer.finish)\n",
        "tests/integration/test_power_cut.py",
    ),
    Guard(
        "Records go before the data that they name",
        "core/survey.py",
        "    for name in names:  # durably one by one",
        "    for uid in uids:\n"
        "        delete_data(backend, uid, backend.list(data_prefix(uid)))\n"
        "    for name in names:  # durably one by one",
        "tests/core/test_catalog.py tests/integration/test_crash.py",
    ),
    Guard(
        "Records are deleted one by one",
        "core/survey.py",
        "        backend.delete([name])\n",
        "        pass\n    backend.delete(names)\n",
        "tests/integration/test_power_cut.py",
    ),
    Guard(
        "Prune leaves what a record or an intent needs, and our own",
        "core/prune.py",
        "survey.data.keys() - survey.needed.union(own_uids)",
        "survey.data.keys() - {r.uid for r in survey.records.values()}",
        "tests/core/test_catalog.py",
    ),
    Guard(
        "Prune leaves what is younger than the grace time",
        "core/prune.py",
        "        if not blobs or max(blob.modified_s for blob in blobs) >= limit_s:\n",
        "        if not blobs:\n",
        "tests/core/test_catalog.py",
    ),
    Guard(
        "Prune takes nothing while a record cannot be read",
        "core/prune.py",
        "    if survey.unreadable:\n",
        "    if False:\n",
        "tests/core/test_catalog.py",
    ),
    Guard(
        "A saver looks at its intent before it publishes",
        "core/publishing.py",
        "        elif not self._exists(intent_name(self._uid)):\n",
        "        elif False:\n",
        "tests/core/test_publishing.py tests/integration/test_lifecycle.py",
    ),
    Guard(
        "A saver that slept for half the grace time does not publish",
        "core/publishing.py",
        "        if slept_s > self._grace_s / 2:\n",
        "        if False:\n",
        "tests/core/test_publishing.py tests/integration/test_lifecycle.py",
    ),
    Guard(
        "A lost answer of the publish is resolved by reading the record",
        "core/publishing.py",
        "        return Event.RECORD_IS_OURS if ours else Event.RECORD_IS_OTHER\n",
        "        return Event.RECORD_IS_OURS\n",
        "tests/core/test_publishing.py tests/integration/test_two_savers.py",
    ),
    Guard(
        "Blob names stay below the root",
        "core/abc/backend.py",
        '    if all(_SEGMENT.fullmatch(part) and part not in {".", ".."} for part in segments):\n',
        "    if segments:\n",
        "tests/backends/test_conformance.py",
    ),
    Guard(
        "Links below the root are not followed",
        "backends/local/namespace.py",
        "                fds.append(os.open(part, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=fds[-1]))\n",
        "                fds.append(os.open(part, FOLDER_FLAGS, dir_fd=fds[-1]))\n",
        "tests/backends",
    ),
    Guard(
        "Records are bounded before they are read",
        "backends/local/backend.py",
        "                if size > limit_bytes:\n",
        "                if False:\n",
        "tests/backends/test_conformance.py",
    ),
    Guard(
        "No pickle unless it is allowed",
        "providers/value.py",
        "    if not allowed:\n",
        "    if False:\n",
        "tests/providers tests/integration/test_round_trips.py",
    ),
    Guard(
        "Views of one memory are compared before they are filled",
        "core/restoring.py",
        "    if problems:\n        raise _mismatch(problems, [], checkpoint.step)\n",
        "",
        "tests/integration/test_partial.py",
    ),
    Guard(
        "Memory is given back only when nothing is in flight",
        "core/loading.py",
        "            for flight in self._flights:\n                flight.outlast()\n",
        "            pass\n",
        "tests/core/test_loading.py",
    ),
)


def broken(guard: Guard) -> str | None:
    """The first test that fails without the guard; None: every test passes."""
    with tempfile.TemporaryDirectory(prefix="guards-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(
                    source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(source, copy / name)
        path = copy / guard.file
        text = path.read_text()
        if text.count(guard.old) != 1:
            sys.exit(f"{guard.file} has not exactly one: {guard.old!r}")
        path.write_text(text.replace(guard.old, guard.new))
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=60",
            f"--basetemp={copy / 'basetemp'}",
            *guard.tests.split(),
        ]  # fmt: skip
        environment = {
            **os.environ,
            "PYTHONPATH": str(copy / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            done = subprocess.run(
                command,
                cwd=copy,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{guard.tests} (it never ends)"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed is None:
        sys.exit(
            f"{guard.name}: the tests did not run:\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
        )
    return failed[1].partition("[")[0]


def main() -> None:
    """Break what is asked for, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of guards; default: all")
    parser.add_argument("--write", action="store_true", help="put the table into the docs")
    options = parser.parse_args()
    chosen = [
        g for g in GUARDS
        if not options.names or any(n.lower() in g.name.lower() for n in options.names)
    ]  # fmt: skip
    rows, survived = [], 0
    for guard in chosen:
        test = broken(guard)
        survived += test is None
        print(
            f"{'SURVIVED' if test is None else 'caught':9} {guard.name}: {test or ''}", flush=True
        )
        rows.append(f"| {guard.name} | `{guard.file}` | `{test or 'none'}` |")
    print(f"{len(chosen) - survived} of {len(chosen)} guards cannot be taken out unnoticed")
    if options.write:
        head = PAGE.read_text().partition("| guard |")[0]
        table = ["| guard | where | a test that fails without it |", "|---|---|---|", *rows]
        PAGE.write_text(head + "\n".join(table) + "\n")
    sys.exit(1 if survived else 0)


if __name__ == "__main__":
    main()

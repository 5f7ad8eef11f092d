"""Break each guard of data safety once, in a copy, and see that a test fails.

A guard that can be taken out without a test that fails is not tested. `guards.toml` says what
each one is, how it is broken, and which tests should notice. Run from the root:

    .venv/bin/python tools/break_guards.py            # all of them, some minutes
    .venv/bin/python tools/break_guards.py fence      # those whose name or chapter has "fence"
    .venv/bin/python tools/break_guards.py --why ...  # and what the failing test says
    .venv/bin/python tools/break_guards.py --write    # and put the tables into the docs

First all these tests are run with nothing broken: what fails then proves nothing.
"""

from __future__ import annotations

import argparse
import compileall
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
GUARDS = ROOT / "tools/guards.toml"
PAGE = ROOT / "docs/design/guards.md"
CODE = ("core", "providers", "backends", "codecs", "integrations", "testing")
COPIED = (*CODE, "src", "tests", "docs", "pyproject.toml")
TIMEOUT_S = 200
WHOLE_TIMEOUT_S = 1800
# Without waiting for threads that a failing test has left behind.
RUN = "import os, sys, pytest; code = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(code)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """One guard, and how it is taken out.

    Attributes:
        chapter: What it belongs to.
        name: What it sees to.
        harm: What happens without it.
        file: Where it stands.
        old: Text there, which occurs once.
        new: What takes its place.
        tests: Those that should notice, for pytest.
    """

    chapter: str
    name: str
    harm: str
    file: str
    old: str
    new: str = ""
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of the tests without a guard.

    Attributes:
        test: The one that failed first; None: all passed.
        why: What it said.
        broken: Why the tests could not be run; empty: they were.
    """

    test: str | None = None
    why: str = ""
    broken: str = ""


def read_guards() -> list[Guard]:
    """All guards, in the order of the file."""
    found = tomllib.loads(GUARDS.read_text())
    return [
        Guard(chapter=chapter, **{**entry, "tests": tuple(entry["tests"])})
        for chapter, entries in found.items()
        for entry in entries
    ]


def check_places(guards: list[Guard], root: Path) -> None:
    """End with a list of all guards that `guards.toml` does not describe rightly.

    Each has to stand where it says, and the source without it has to compile: otherwise a run
    would end after half an hour with nothing written.
    """
    wrong = []
    for guard in guards:
        source = (root / guard.file).read_text()
        count = source.count(guard.old)
        if count != 1:
            wrong.append(f"{guard.name}: {guard.file} has {count} times {guard.old!r}")
            continue
        try:
            compile(source.replace(guard.old, guard.new), guard.file, "exec")
        except SyntaxError as error:
            wrong.append(f"{guard.name}: {guard.file} is no Python without it: {error}")
    if wrong:
        sys.exit("\n".join(wrong))


def copy_tree(source: Path, target: Path) -> None:
    """What the tests need, compiled, so that an unchanged module is not compiled again."""
    for name in COPIED:
        if (source / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source / name, target / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source / name, target / name)
    for name in CODE:
        # By content: a broken file may have the time and the size of the good one.
        mode = PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(target / name, quiet=1, invalidation_mode=mode)


def run_tests(tests: list[str], copy: Path, timeout_s: float) -> Verdict:
    """Run pytest in a copy until a test fails."""
    base = copy / "basetemp"
    command = [
        sys.executable, "-c", RUN, "-x", "-q", "-p", "no:cacheprovider", "--timeout=40",
        "--tb=short", f"--basetemp={base}", *tests,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that what it leaves behind can be ended with it
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return Verdict(tests[0], "it never ends")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(base, ignore_errors=True)
        printed.seek(0)
        output = printed.read().decode(errors="replace")
    if process.returncode == 0:
        return Verdict()
    failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
    if failed is None:
        return Verdict(broken=output[-3000:])
    said = re.search(r"^E +(.*)", output, re.MULTILINE)
    return Verdict(failed[1].partition("[")[0], said[1] if said else "")


def broken(guard: Guard, copy: Path) -> Verdict:
    """What the tests say without the guard; the copy is as before then."""
    path = copy / guard.file
    whole = path.read_text()
    path.write_text(whole.replace(guard.old, guard.new))
    try:
        return run_tests(list(guard.tests), copy, TIMEOUT_S)
    finally:
        path.write_text(whole)


def break_all(guards: list[Guard], jobs: int, *, why: bool) -> dict[Guard, Verdict]:
    """Take out one after the other, and print a line each."""
    with tempfile.TemporaryDirectory(prefix="guards-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        first = Path(folder, "0")
        copy_tree(ROOT, first)
        check_places(guards, first)
        for number in range(jobs):
            copy = Path(folder, str(number))
            if number:
                copy_tree(first, copy)
            copies.put(copy)
        tests = list(dict.fromkeys(test for guard in guards for test in guard.tests))
        whole = run_tests(tests, first, WHOLE_TIMEOUT_S)
        if whole != Verdict():
            sys.exit(f"with nothing broken: {whole.test} {whole.why}{whole.broken}")
        print(f"with nothing broken all of {len(tests)} tests and files pass", flush=True)

        def one(guard: Guard) -> Verdict:
            copy = copies.get()
            try:
                verdict = broken(guard, copy)
            finally:
                copies.put(copy)
            word = "BROKEN" if verdict.broken else "caught" if verdict.test else "SURVIVED"
            print(f"{word:9} {guard.name}: {verdict.test or verdict.broken}", flush=True)
            if why and verdict.why:
                print(f"          {verdict.why}", flush=True)
            return verdict

        with ThreadPoolExecutor(jobs) as pool:
            return dict(zip(guards, pool.map(one, guards), strict=True))


def write_page(verdicts: dict[Guard, Verdict], lines: list[str]) -> None:
    """Put the tables, and what was printed last, behind the head of the page.

    A guard that was not taken out this time keeps the test that it has on the page.
    """
    page = PAGE.read_text()
    rows = {m["guard"]: m["test"] for m in _ROW.finditer(page)}
    rows |= {_title(g): f"`{v.test}`" if v.test else "none" for g, v in verdicts.items()}
    guards = [guard for guard in read_guards() if _title(guard) in rows]
    head = page.partition("\n## ")[0]
    for chapter in dict.fromkeys(guard.chapter for guard in guards):
        head += (
            f"\n## {chapter}\n\n| guard | without it | a test that fails then |\n|---|---|---|\n"
        )
        for guard in (guard for guard in guards if guard.chapter == chapter):
            head += f"| {_title(guard)} | {guard.harm} | {rows[_title(guard)]} |\n"
    if len(guards) > len(verdicts):
        lines = [*lines, f"the other {len(guards) - len(verdicts)} in earlier runs"]
    printed = "\n".join(lines)
    PAGE.write_text(f"{head}\n## Printed\n\n```\n{printed}\n```\n")


_ROW = re.compile(
    r"^\| (?P<guard>.+ \(`[^`]+`\)) \| .+ \| (?P<test>`[^`]+`|none) \|$", re.MULTILINE
)


def _title(guard: Guard) -> str:
    return f"{guard.name} (`{guard.file}`)"


def main() -> None:
    """Break what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names or chapters; default: all")
    parser.add_argument("--write", action="store_true", help="put the tables into the docs")
    parser.add_argument("--why", action="store_true", help="print what the failing test says")
    parser.add_argument("--jobs", type=int, default=1, help="guards broken at once")
    options = parser.parse_args()
    began_s = time.monotonic()
    guards = [
        g
        for g in read_guards()
        if not options.names
        or any(n.lower() in f"{g.chapter} {g.name}".lower() for n in options.names)
    ]
    verdicts = break_all(guards, options.jobs, why=options.why)
    caught = [guard for guard, verdict in verdicts.items() if verdict.test]
    lines = [
        f"{len(caught)} of {len(guards)} guards cannot be taken out unnoticed",
        f"{time.strftime('%Y-%m-%d')}, {(time.monotonic() - began_s) / 60:.1f} minutes",
    ]
    print("\n".join(lines))
    if options.write:
        write_page(verdicts, lines)
    sys.exit(0 if len(caught) == len(guards) else 1)


if __name__ == "__main__":
    main()

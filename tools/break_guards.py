"""Break each guard of `guards.toml` in a copy of the sources, and check that a test fails.

    .venv/bin/python tools/break_guards.py            # all, some minutes
    .venv/bin/python tools/break_guards.py fence      # those with "fence" in name or chapter
    .venv/bin/python tools/break_guards.py --why ...  # also print the failing test's error

All named tests first run with nothing broken: a test that fails then proves nothing. The
documentation build loads this file too, for the page of guards.
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
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CODE = ("core", "providers", "backends", "codecs", "integrations", "testing")
COPIED = (*CODE, "src", "tests", "docs", "pyproject.toml")
# Does not wait for threads that a failing test left.
RUN = "import os, sys, pytest; code = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(code)"
HEAD = """# Guards

A guard is a line that keeps a promise to the user. If no test fails without it, it is untested:
`tools/break_guards.py` removes one guard at a time, in a copy of the sources, and runs tests until
one fails. This page is built from `tools/guards.toml`.

*Limits:* guards that nobody thought of; [mutations](mutations.md) need no list.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A row of `guards.toml`: `tests` fail once `old`, which occurs once in `file`, is `new`."""

    chapter: str
    name: str
    harm: str
    file: str
    old: str
    new: str = ""
    tests: tuple[str, ...]


def read_guards() -> list[Guard]:
    """Return all guards, in the order of the file."""
    chapters = tomllib.loads((ROOT / "tools/guards.toml").read_text())
    return [
        Guard(chapter=chapter, **{**row, "tests": tuple(row["tests"])})
        for chapter, rows in chapters.items()
        for row in rows
    ]


def page() -> str:
    """Return the page of the documentation that lists all guards."""
    text, chapter = HEAD, ""
    for guard in read_guards():
        if guard.chapter != chapter:
            chapter = guard.chapter
            text += f"\n## {chapter}\n\n| guard | without it | tests that notice |\n|---|---|---|\n"
        tests = ", ".join(f"`{test}`" for test in guard.tests)
        text += f"| {guard.name} (`{guard.file}`) | {guard.harm} | {tests} |\n"
    return text


def on_files(files: Any, config: Any) -> Any:
    """Add the page to the documentation: mkdocs calls this."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - only the build has it

    files.append(File.generated(config, "design/guards.md", content=page()))
    return files


def copy_tree(target: Path) -> Path:
    """Copy and compile the files that the tests need."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, target / name)
    for name in CODE:
        # By content: a broken file may have the good one's time and size.
        mode = PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(target / name, quiet=1, invalidation_mode=mode)
    return target


def run_tests(tests: list[str], copy: Path, timeout_s: float) -> tuple[str, str]:
    """Run pytest in a copy until a test fails, and return that test and its error.

    An error without a test: pytest itself failed. Neither: all tests passed.
    """
    base = copy / "basetemp"
    options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout=40", "--tb=short"]
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, *options, f"--basetemp={base}", *tests],
            cwd=copy, env=environment, stdout=printed, stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its leftover processes can be killed with it
        )  # fmt: skip
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return tests[0], "it hangs"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(base, ignore_errors=True)
        printed.seek(0)
        output = printed.read().decode(errors="replace")
    if process.returncode == 0:
        return "", ""
    # A fixture's error counts; a file that cannot be imported is an `ERROR` without a test.
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+::[^\s\[]+)", output, re.MULTILINE)
    error = re.search(r"^E +(.*)", output, re.MULTILINE)
    return (failed[1], error[1] if error else "") if failed else ("", output[-3000:])


def is_caught(guard: Guard, copies: SimpleQueue[Path], *, why: bool) -> bool:
    """Run the tests in a copy without the guard, and print what failed."""
    copy = copies.get()
    path = copy / guard.file
    whole = path.read_text()
    path.write_text(whole.replace(guard.old, guard.new))
    try:
        test, error = run_tests(list(guard.tests), copy, timeout_s=200)
        if (count := whole.count(guard.old)) != 1:
            test, error = "", f"{guard.file} has {guard.old!r} {count} times"
    finally:
        path.write_text(whole)
        copies.put(copy)
    word = "caught" if test else "BROKEN" if error else "SURVIVED"
    print(f"{word:9} {guard.name}: {test or error}", flush=True)
    if why and test:
        print(f"          {error}", flush=True)
    return bool(test)


def main() -> None:
    """Break the requested guards."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names or chapters; default: all")
    parser.add_argument("--why", action="store_true", help="print the error of the failing test")
    parser.add_argument("--jobs", type=int, default=1, help="guards broken at once")
    options = parser.parse_args()
    names = [name.lower() for name in options.names] or [""]
    guards = [g for g in read_guards() if any(n in f"{g.chapter} {g.name}".lower() for n in names)]
    if not guards:
        sys.exit(f"no guard has {' or '.join(names)} in its name")
    with tempfile.TemporaryDirectory(prefix="guards-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            copies.put(copy := copy_tree(Path(folder, str(number))))
        tests = list(dict.fromkeys(test for guard in guards for test in guard.tests))
        test, error = run_tests(tests, copy, timeout_s=1800)
        if test or error:
            sys.exit(f"with nothing broken: {test} {error}")
        print(f"with nothing broken all {len(tests)} tests and files pass", flush=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            caught = list(pool.map(lambda guard: is_caught(guard, copies, why=options.why), guards))
    print(f"{sum(caught)} of {len(guards)} guards are caught")
    sys.exit(not all(caught))


if __name__ == "__main__":
    main()

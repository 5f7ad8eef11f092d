"""A store that breaks below the C library: each call in turn fails as a broken disk makes it fail.

A library that is preloaded into a process of its own makes single calls fail, real files take
the rest. What `uring` moves by its ring cannot be had this way; its other calls can.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.faults.failing_calls import CASES, cases
from tests.integration.support import run_python, uring_missing

HERE = Path(__file__).parent
HINTS = {
    "EIO": "look at the kernel log",
    "ESTALE": "another machine may have deleted it",
    "ENOSPC": "make room or raise the quota",
    "EDQUOT": "make room or raise the quota",
}
FULL = {"ENOSPC", "EDQUOT"}


pytestmark = pytest.mark.slow  # a process each


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler, cc")
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux: LD_PRELOAD and the names of its C library")
    built = tmp_path_factory.mktemp("library") / "failing_calls.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", built, HERE / "failing_calls.c", "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return built


@pytest.fixture(scope="module")
def outcomes(library, tmp_path_factory):
    """What came of cases: one process does all of one kind and one test."""
    known = {}

    def of(kind, what):
        if (kind, what) not in known:
            folder = tmp_path_factory.mktemp(kind)
            words = ["-m", "tests.integration.faults.failing_calls", kind, folder, *what]
            done = run_python(*words, timeout=300, LD_PRELOAD=str(library))
            assert done.returncode == 0, done.stderr
            known[kind, what] = json.loads(done.stdout)
            shutil.rmtree(folder)
        return known[kind, what]

    return of


@pytest.fixture
def outcome(request, outcomes):
    """`(case, what came of it)`."""
    kind, what, name = request.param
    missing = uring_missing() if kind == "uring" else None
    if missing:
        pytest.skip(f"needs io_uring: {missing}")
    seen = outcomes(kind, what)[name]
    assert seen["hits"] == 1, "the call never came"
    return CASES[name], seen


def every(*what):
    return pytest.mark.parametrize(
        "outcome",
        [(kind, what, name) for kind in ("posix", "uring") for name in cases(kind, what)],
        ids=lambda which: f"{which[0]}-{which[2]}",
        indirect=True,
    )


def check_nothing_is_left(seen):
    before, after = seen["files"]
    assert after == before
    assert seen["staging"] == 0
    assert seen["whole"] == seen["steps"]
    assert seen["latest"] == (seen["steps"][-1] if seen["steps"] else None)
    assert seen["at last"] == [*seen["steps"], 3]
    assert len(seen["data"]) == len(seen["at last"])  # whatever was left behind, prune took


@every("save")
def test_a_call_that_fails_costs_that_save_and_nothing_else(outcome):
    case, seen = outcome
    if case.late:  # the link was made, and that can be seen
        assert seen["error"] == []
        assert seen["steps"] == [1, 2]
        check_nothing_is_left(seen)
        return
    (kinds, message), *causes = seen["error"]
    if "commits" in case.part:
        in_folder = case.call == "fsync" and case.first == 2
        assert seen["steps"] == ([1, 2] if in_folder else [1])
        assert kinds[0] == "CommitUnknownError"
        assert "step 2" in message
    else:
        assert seen["steps"] == [1]
        assert kinds[0] == ("StorageFullError" if case.number in FULL else "StorageError")
        assert case.number in message
        assert HINTS[case.number] in message
        assert "cannot " in message
        assert "data/" in message
        assert causes[-1][0][0] == "OSError"
    check_nothing_is_left(seen)


@every("restore", "load", "verify")
def test_a_call_that_fails_while_reading_is_an_outage_and_no_damage(outcome):
    case, seen = outcome
    chain = seen["error"]
    kinds = [kind for kinds, _ in chain for kind in kinds]
    assert "PenstockError" in chain[0][0]
    assert "DamagedError" not in kinds
    assert "StorageError" in kinds
    assert chain[-1][0][0] == "OSError"
    message = chain[0][1]
    assert case.number in message
    assert HINTS[case.number] in message
    assert case.part.strip("/") in message
    assert seen["steps"] == [1]
    check_nothing_is_left(seen)


@every("delete", "prune")
def test_a_call_that_fails_while_deleting_leaves_what_is_named_whole(outcome):
    case, seen = outcome
    kinds, message = seen["error"][0]
    assert kinds[0] == "StorageError"
    assert case.number in message
    assert HINTS[case.number] in message
    assert "cannot delete" in message
    kept = case.does == "prune" or (case.call, case.part) == ("unlinkat", "/commits/")
    assert seen["steps"] == ([1] if kept else [])
    check_nothing_is_left(seen)

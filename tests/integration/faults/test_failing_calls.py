"""A store that breaks below the C library: each call in turn fails as on a broken disk.

A library preloaded into a separate process makes single calls fail, real files serve the rest. This
cannot reach transfers of `uring`'s ring, only its other calls.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.faults.failing_calls import CASES, cases
from tests.integration.support import run_python

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


@pytest.fixture
def check_each(kind, library, tmp_path):
    """Run all cases of some actions in one process, and check the outcome of each."""

    def check_each(check, *what):
        words = ["-m", "tests.integration.faults.failing_calls", kind, tmp_path, *what]
        done = run_python(*words, timeout=800, LD_PRELOAD=str(library))
        assert done.returncode == 0, done.stderr
        outcomes = json.loads(done.stdout)
        assert [*outcomes] == [*cases(kind, what)]
        for name, seen in outcomes.items():
            try:
                assert seen["hits"] == 1, "the call never came"
                check(CASES[name], seen)
                check_no_leftovers(seen)
            except AssertionError as error:
                error.add_note(name)
                raise

    return check_each


def check_no_leftovers(seen):
    before, after = seen["files"]
    assert after == before
    assert seen["staging"] == 0
    assert seen["whole"] == seen["steps"]
    assert seen["latest"] == (seen["steps"][-1] if seen["steps"] else None)
    assert seen["at last"] == [*seen["steps"], 3]
    assert len(seen["data"]) == len(seen["at last"])  # prune deleted all leftovers


def failed_save(case, seen):
    if case.late:  # the link was made, visibly
        assert seen["error"] == []
        assert seen["steps"] == [1, 2]
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


def test_a_failed_call_loses_only_that_save(check_each):
    check_each(failed_save, "save")


def failed_read(case, seen):
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


def test_a_failed_read_call_is_an_outage_not_damage(check_each):
    check_each(failed_read, "restore", "load", "verify")


def failed_deletion(case, seen):
    kinds, message = seen["error"][0]
    assert kinds[0] == "StorageError"
    assert case.number in message
    assert HINTS[case.number] in message
    assert "cannot delete" in message
    kept = case.does == "prune" or (case.call, case.part) == ("unlinkat", "/commits/")
    assert seen["steps"] == ([1] if kept else [])


def test_a_failed_delete_call_leaves_listed_steps_whole(check_each):
    check_each(failed_deletion, "delete", "prune")

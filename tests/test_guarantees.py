"""Every promise in the documentation, and every guard, names tests that exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LISTS = ["docs/guarantees.md", "tools/guards.toml"]


@functools.cache
def tree_of(path):
    return ast.parse((ROOT / path).read_text())


@functools.cache
def defined_in(path):
    """Names of functions, of classes, and of state machines: `TestRun = Run.TestCase`."""
    text = (ROOT / path).read_text()
    return set(re.findall(r"^ *(?:def |class |(?=\w+ = ))(\w+)", text, re.MULTILINE))


@functools.cache
def found_in(scope, name):
    """The first definition of `name` anywhere in `scope`, or None."""
    return next((node for node in ast.walk(scope) if getattr(node, "name", None) == name), None)


@pytest.mark.parametrize("path", LISTS)
def test_every_named_test_exists(path):
    name = r"[`\"](tests/[\w/]+\.py)(?:::(\w+))?(?:::(\w+))?(?:\[[^`\"]+\])?[`\"]"
    named = re.findall(name, (ROOT / path).read_text())
    assert len(named) > 100
    for file, *names in named:
        assert {*filter(None, names)} <= defined_in(file), f"{file}: {names}"


def rows():
    text = (ROOT / "docs/guarantees.md").read_text()
    return [line for line in text.splitlines() if line.startswith("| ") and "tests/" in line]


def test_every_promise_is_in_the_table():
    assert len(rows()) >= 15
    assert all(re.search(r"`tests/[\w/]+\.py::\w+`", row) for row in rows())


def is_slow(path, name):
    """Whether `make test` skips it entirely: by its own or its module's mark."""
    marks = getattr(found_in(tree_of(path), name), "decorator_list", [])
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks = [
                *marks,
                *(node.value.elts if isinstance(node.value, ast.List) else [node.value]),
            ]
    return any(ast.unparse(mark) == "pytest.mark.slow" for mark in marks)


def test_no_promise_has_only_slow_tests():
    for row in rows():
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)", row)
        assert not all(is_slow(path, name) for path, name in named), row


def test_slow_tests_have_their_marks():
    assert is_slow("tests/test_plugin_redis.py", "test_its_own_tests_pass")
    assert is_slow(
        "tests/integration/lifecycle/test_copy.py", "test_copy_resumes_after_its_process_is_killed"
    )
    assert not is_slow("tests/test_guarantees.py", "test_slow_tests_have_their_marks")

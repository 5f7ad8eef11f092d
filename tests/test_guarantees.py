"""Every promise in the documentation names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["docs/guarantees.md", "docs/design/guards.md"]


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_is_named_exists(page):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:::(\w+))?`", (ROOT / page).read_text())
    assert len(named) > 20
    for path, *names in named:
        scope: ast.AST = ast.parse((ROOT / path).read_text())
        for name in filter(None, names):
            found = [n for n in ast.walk(scope) if getattr(n, "name", None) == name]
            if not found:  # state machines: `TestRun = Run.TestCase`
                targets = [
                    t for n in ast.walk(scope) if isinstance(n, ast.Assign) for t in n.targets
                ]
                assert name in {getattr(t, "id", None) for t in targets}, f"{path}::{name}"
                break
            scope = found[0]


def test_every_promise_is_in_the_table():
    text = (ROOT / "docs/guarantees.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "tests/" in line]
    assert len(rows) >= 15
    assert all(re.search(r"`tests/[\w/]+\.py::\w+`", row) for row in rows)

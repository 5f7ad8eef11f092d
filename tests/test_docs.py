"""The Python blocks of the documentation are complete, and work in the order of the page."""

import re
from pathlib import Path

import pytest

import penstock

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(<!-- not run)?", re.DOTALL | re.MULTILINE)


def blocks(page):
    """Code with its place in the page, as one program per page."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        if found[2] is None:
            yield text.count("\n", 0, found.start(1)), found[1]


PAGES = sorted(page for page in DOCS.rglob("*.md") if any(blocks(page)))


def test_the_pages_that_must_run_are_found():
    assert {"quickstart", "write-a-backend", "write-a-codec", "write-a-provider"} <= {
        page.stem for page in PAGES
    }


def test_the_reference_has_every_public_name():
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    configuration = {"BackendConfig", "CheckpointerConfig"}  # their fields are on a page of theirs
    absent = [
        n for n in penstock.__all__ if n not in configuration and not re.search(rf"\b{n}\b", text)
    ]
    assert absent == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": f"docs.{page.stem}"}
    for line, code in blocks(page):
        # Leading newlines make line numbers in tracebacks those of the page.
        exec(compile("\n" * line + code, str(page), "exec"), names)

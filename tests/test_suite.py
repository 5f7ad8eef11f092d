"""What tests, tools and benchmarks may not do to the product, or to a reader.

A test that sets a constant of a module depends on the constant's place, and does not test the real
product. Timeouts are a `Timing`, which a test applies; other sizes that a test needs small or large
are arguments, or the size of its data.

A short timeout of the product makes a test a race: a busy machine delays a thread for seconds. A
test advances the time by a clock, or explains in a comment, `# short: ...`, why nothing can be
late.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONSTANT = re.compile(r"_{0,2}[A-Z][A-Z0-9_]*")
SUSPICIOUS = re.compile(r"setattr|\bpatch\b|\._{0,2}[A-Z][A-Z0-9_]* = ")  # others are not parsed
PLACES = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
PLACES += (ROOT / "benchmarks").rglob("*.py")


def constants_set(text: str) -> list[str]:
    """Constants that a program sets in modules of `penstock`; programs in it included."""
    tree = ast.parse(text)
    modules = imported_from_penstock(tree)
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and is_setter(node.func):
            found += set_by_call(node, modules)
        elif isinstance(node, ast.Assign):
            found += [
                f"{ast.unparse(target)} = ..."
                for target in node.targets
                if isinstance(target, ast.Attribute)
                and CONSTANT.fullmatch(target.attr)
                and root_of(target) in modules
            ]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += set_within(node.value)
    return found


def imported_from_penstock(tree: ast.AST) -> set[str]:
    """A program's names for modules of `penstock`, and their contents."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            ours = (alias for alias in node.names if is_ours(alias.name))
            names.update(alias.asname or alias.name.partition(".")[0] for alias in ours)
    return names


def is_ours(module: str) -> bool:
    return module.partition(".")[0] == "penstock"


def is_setter(function: ast.expr) -> bool:
    """`setattr`, `monkeypatch.setattr`, `mock.patch`, `patch.object` and the like."""
    return bool({"setattr", "patch", "object"} & {root_of(function), last_of(function)})


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def last_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else root_of(node)


def set_by_call(call: ast.Call, modules: set[str]) -> list[str]:
    texts = [
        arg.value
        for arg in call.args[:2]
        if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
    ]
    for text in texts:
        if is_ours(text) and CONSTANT.fullmatch(text.rpartition(".")[2]):
            return [text]
        if CONSTANT.fullmatch(text) and root_of(call.args[0]) in modules:
            return [f"{ast.unparse(call.args[0])}.{text}"]
    return []


def set_within(text: str) -> list[str]:
    """Constants set by a program that a test runs in a separate process."""
    if "\n" not in text or "penstock" not in text:
        return []
    try:
        return constants_set(text)
    except SyntaxError:
        return []  # prose


def test_no_test_sets_a_constant_of_a_module():
    texts = {path: path.read_text(encoding="utf-8") for path in PLACES if path != Path(__file__)}
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts.items()
        if SUSPICIOUS.search(text)
        for name in constants_set(text)
    }
    assert not found


@pytest.mark.parametrize(
    "statement",
    [
        'monkeypatch.setattr(job, "_POLL_S", 0.0)',
        'patch.setattr(core.save.job, "LIMIT", 1)',
        'patch.object(job, "_POLL_S", 0.0)',
        'setattr(job, "_POLL_S", 0.0)',
        'monkeypatch.setattr("penstock.core.save.job._POLL_S", 0.0)',
        'mock.patch("penstock.core.save.job.LIMIT", 1)',
        "job._POLL_S = 0.0",
        "job._POLL_S = job._OTHER_S = 0.0",
        'run("""\nfrom penstock.core.save import job\njob._POLL_S = 0.0\n""")',
    ],
)
def test_every_way_to_set_one_is_found(statement):
    assert constants_set(
        f"from penstock import core\nfrom penstock.core.save import job\n{statement}"
    )


@pytest.mark.parametrize(
    "statement",
    [
        'monkeypatch.setattr(job, "opened", 0.0)',
        'monkeypatch.setattr(sys, "MAXIMUM", 0.0)',
        "job.step = 3",
        "LIMIT = 3",
        "waits(poll_s=0.01)",
    ],
)
def test_foreign_constants_may_be_set(statement):
    assert not constants_set(f"import sys\nfrom penstock.core.save import job\n{statement}")


# -- timeouts that pass during a test --------------------------------------------------------------

LEAST_S = 4.0
TIMED = [ROOT / "tests" / "integration", ROOT / "tests" / "backends"]


def short_timeouts(text: str) -> list[str]:
    """Product timeouts in a program that a busy machine may miss, without a reason."""
    lines = text.splitlines()
    return [
        ast.unparse(keyword)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if (keyword.arg or "").endswith("timeout_s")
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value < LEAST_S
        and "# short: " not in lines[keyword.value.lineno - 1]
    ]


def test_no_test_depends_on_a_short_timeout():
    paths = [path for folder in TIMED for path in folder.rglob("*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts.items()
        if "timeout_s=" in text
        for name in short_timeouts(text)
    }
    assert not found


def test_a_short_timeout_needs_a_reason():
    assert short_timeouts("Checkpointer(store, io_timeout_s=0.5)") == ["io_timeout_s=0.5"]
    assert not short_timeouts("Checkpointer(store, io_timeout_s=60)")
    assert not short_timeouts("job.group(rank_timeout_s=limit_s)")
    assert not short_timeouts("server.open(timeout_s=0.2)  # short: no answer comes")

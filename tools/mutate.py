"""Change one piece at a time of the modules that decide what is kept, and run their tests.

    python tools/mutate.py --seconds 120 --seed 7    # mutants of modules, both drawn
    python tools/mutate.py --only catalog/prune      # every mutant of the modules so named

Pytest collects the tests once. Each mutant is a fork that has changed code in the live function and
runs the tests that call it, the fastest first, until one fails (docs/design/mutations.md).
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Modules of core, and tests that together call all that is in them.
MODULES = {
    "catalog/*": """core/catalog core/cli/test_delete.py integration/lifecycle/test_lifecycle.py
        integration/lifecycle/test_retention.py integration/lifecycle/test_notes.py
        integration/atomic/test_races.py integration/atomic/test_two_savers.py
        integration/faults/test_making_room.py integration/tiers/test_background_work.py""",
    "rounds/*": "core/rounds core/catalog/test_rank_protocol.py core/restore/test_together.py",
    "restore/fallback": "integration/damage/test_corruption.py core/restore/test_together.py",
    "tiers/eviction tiers/losses": "core/tiers integration/tiers",
    "copy/lease": "core/copy",
}
OPTIONS = argparse.Namespace()
PYTEST = ["-n0", "-sq", "-pno:cacheprovider", "--fast", "-mnot slow and not process"]
PAIRS = "Eq NotEq Is IsNot In NotIn Lt LtE Gt GtE And Or Add Sub BitOr BitAnd".split()  # noqa: SIM905
SWAPS = {PAIRS[n]: PAIRS[n ^ 1] for n in range(len(PAIRS))}
DROPPED = (ast.Raise, ast.AugAssign, ast.Delete, ast.Continue, ast.Break, ast.Expr)


def modules_of(names: str) -> list[Path]:
    """Return the modules of a row of the table that the user wants."""
    paths = [path for name in names.split() for path in (ROOT / "core").glob(f"{name}.py")]
    return [path for path in paths if OPTIONS.only in str(path)]


def changes(node: Any) -> Any:
    """Yield a field of a node, what takes its place, and what changes, if that is not the node."""
    if kind := SWAPS.get(type(getattr(node, "op", None)).__name__):
        yield "op", getattr(ast, kind)(), ""
    if isinstance(node, ast.Compare):
        yield "ops", [getattr(ast, SWAPS[type(op).__name__])() for op in node.ops], ""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        new = [not node.value] if isinstance(node.value, bool) else [node.value + 1, node.value - 1]
        yield from (("value", value, "") for value in new)
    if isinstance(node, (ast.If, ast.IfExp, ast.While)) and not isinstance(node.test, ast.Compare):
        yield "test", ast.UnaryOp(ast.Not(), node.test), f"not: {ast.unparse(node.test)}"
    if isinstance(node, ast.Return) and ast.unparse(node)[7:] not in {"", "None", "False"}:
        yield "value", None, ""
    for name in ("body", "orelse", "finalbody"):
        lines = getattr(node, name, None)
        for n, line in enumerate(lines if isinstance(lines, list) else ()):
            text = ast.unparse(line)
            if isinstance(line, DROPPED) and not text.startswith(("'", '"', "log.")):
                yield name, [*lines[:n], ast.Pass(), *lines[n + 1 :]], f"without: {text}"


def parts_of(node: Any) -> Any:
    """Yield a node and all below it, but for types, default values and formatted text."""
    yield node
    for name, field in ast.iter_fields(node):
        for part in field if isinstance(field, list) else [field]:
            left_out = name in {"annotation", "returns"} or not isinstance(part, ast.AST)
            if not left_out and not isinstance(part, (ast.JoinedStr, ast.arguments)):
                yield from parts_of(part)


def mutants_of(path: Path) -> Any:
    """Yield path, function, line, text and code of each mutant of a module."""
    tree = ast.parse(path.read_text())
    for holder in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for function in (node for node in holder.body if isinstance(node, ast.FunctionDef)):
            name = f"{getattr(holder, 'name', '')}.{function.name}".lstrip(".")
            for node in parts_of(function):
                for field, new, text in changes(node):
                    old, before = getattr(node, field), ast.unparse(node)
                    setattr(node, field, new)
                    code = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
                    yield path, name, node.lineno, text or f"{before} -> {ast.unparse(node)}", code
                    setattr(node, field, old)


def codes_of(code: CodeType) -> list[CodeType]:
    """Return a code object and all inside it."""
    inner = [found for found in code.co_consts if isinstance(found, CodeType)]
    return [code, *(found for one in inner for found in codes_of(one))]


def forked(session: Any, items: list[Any], limit_s: float, each: Any) -> str:
    """Run tests in a child until `each` returns true after one, and return how it ended."""
    pid = os.fork()
    if not pid:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        status = 1  # as well where a mutant ends pytest itself
        try:
            for item in items:
                began_s, failed = time.monotonic(), session.testsfailed
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                if each(item, time.monotonic() - began_s, session.testsfailed > failed):
                    break
            else:
                status = 0
        finally:
            os._exit(status)
    end_s = time.monotonic() + limit_s
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if time.monotonic() > end_s:
            break
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)  # with all that its tests have started
    return "noticed" if os.waitpid(pid, 0)[1] else "SURVIVED"


def watch(session: Any, functions: dict[Any, Any]) -> dict[Any, list[tuple[float, Any]]]:
    """Run all tests in a child, and return those that call each function, with their seconds."""
    every = [(key, function) for key, found in functions.items() for function in found]
    keys = {id(code): key for key, function in every for code in codes_of(function.__code__)}
    called: set[Any] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and id(frame.f_code) in keys:
            called.add(keys[id(frame.f_code)])

    def each(item: Any, took_s: float, failed: bool) -> None:  # noqa: FBT001
        if not failed:
            row = (took_s, session.items.index(item), sorted(called))
            print(json.dumps(row), file=report, flush=True)
        called.clear()

    tests = defaultdict(list)
    with tempfile.TemporaryFile("w+") as report:
        threading.setprofile(note)
        sys.setprofile(note)
        forked(session, session.items, 3600, each)
        sys.setprofile(None)
        threading.setprofile(None)
        report.seek(0)
        rows = sorted(map(json.loads, report))
    for took_s, number, found in rows:
        for key in found:
            tests[tuple(key)].append((took_s, session.items[number]))
    print(f"{len(rows)} of {len(session.items)} tests pass with nothing changed", flush=True)
    return tests


def pytest_runtestloop(session: Any) -> bool:
    """Find out which test calls what, then run mutants until the time is over."""
    paths = {path for names in OPTIONS.rows for path in modules_of(names)}
    functions = defaultdict(list)
    gc.unfreeze()  # tests/conftest.py freezes what was imported, which hides it here
    for function in [found for found in gc.get_objects() if type(found) is FunctionType]:
        path = Path(os.path.realpath(function.__code__.co_filename))
        if path in paths and "<locals>" not in function.__qualname__:
            functions[f"{path}", function.__code__.co_qualname].append(function)
    tests = watch(session, functions)
    mutants = [mutant for path in sorted(paths) for mutant in mutants_of(path)]
    random.Random(OPTIONS.seed).shuffle(mutants)  # noqa: S311 - no secret
    end_s, counts = time.monotonic() + OPTIONS.seconds, Counter[str]()
    for path, name, line, text, code in mutants:
        key = f"{path}", name
        if not OPTIONS.only and time.monotonic() > end_s:
            break
        saved = [(function, function.__code__) for function in functions[key]]
        for function, before in saved:
            place = name, before.co_firstlineno
            found = [c for c in codes_of(code) if (c.co_qualname, c.co_firstlineno) == place]
            with suppress(ValueError):  # without its only `super()`: never counted as noticed
                function.__code__ = found[0]
        items, limit_s = [item for _, item in tests[key]], 20 + 5 * sum(t for t, _ in tests[key])
        verdict = forked(session, items, limit_s, lambda _item, _took_s, failed: failed)
        for function, before in saved:
            function.__code__ = before
        counts[verdict] += 1
        if verdict == "SURVIVED":
            print(f"{path.relative_to(ROOT)}:{line} {name}, {len(items)} tests: {text}", flush=True)
    share = f"{1 - counts['SURVIVED'] / max(counts.total(), 1):.1%} of {counts.total()} mutants"
    print(f"seed {OPTIONS.seed}: {share} are noticed, of {len(mutants)} in these modules")
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120, help="after the tests have run once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the paths of modules, which run whole")
    parser.parse_args(namespace=OPTIONS)
    rows = [names for names in MODULES if modules_of(names)]
    OPTIONS.rows = rows if OPTIONS.only else [random.Random(OPTIONS.seed).choice(rows)]  # noqa: S311
    tests = [f"{ROOT}/tests/{path}" for names in OPTIONS.rows for path in MODULES[names].split()]
    sys.exit(pytest.main([*PYTEST, *tests], plugins=[sys.modules[__name__]]))

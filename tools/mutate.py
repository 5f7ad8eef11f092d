"""Change one piece at a time of the modules that decide which data is kept, and run their tests.

    python tools/mutate.py --seconds 120 --seed 7    # random mutants of random modules
    python tools/mutate.py --only catalog/           # every mutant of these modules

Pytest collects the tests once. Each mutant is a fork that puts changed code into the live function
and runs the tests that reach it, often and quickly failing ones first, until one fails
(docs/design/mutations.md).
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import json
import math
import mmap
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Modules of core, and tests that together reach most of their code. `tiers/process` and
# `tiers/save_drain` are left out: they work in several processes or ranks.
MODULES = {
    "catalog/*": """core/catalog core/cli/test_chains.py core/cli/test_delete.py
        core/restore/test_ranks.py core/save/test_bases.py integration/atomic/test_races.py
        integration/deltas/test_chains.py integration/faults/test_making_room.py
        integration/lifecycle/test_lifecycle.py integration/lifecycle/test_notes.py
        integration/lifecycle/test_opening.py integration/lifecycle/test_retention.py
        integration/sharing/test_many_borrowed.py integration/tiers/test_background_work.py
        integration/tiers/test_other_saves.py""",
    "rounds/*": "core/rounds core/catalog/test_rank_protocol.py core/restore/test_together.py",
    "restore/*": """core/restore integration/damage/test_corruption.py
        integration/exact_resume/test_cast.py integration/exact_resume/test_partial.py
        integration/ranks/test_restore.py""",
    "tiers/[!ps]* tiers/places": """core/tiers integration/tiers/test_background_work.py
        integration/tiers/test_borrowing.py integration/tiers/test_compaction.py
        integration/tiers/test_losses.py integration/tiers/test_other_saves.py
        integration/tiers/test_repair.py integration/tiers/test_roots.py
        integration/tiers/test_saving.py""",
    "copy/*": """core/copy integration/lifecycle/test_copy.py integration/deltas/test_compact.py
        core/cli/test_copy.py core/cli/test_compact.py""",
    "save/finish save/manifest save/merge": """core/save integration/ranks/test_save.py
        integration/exact_resume/test_exact_resume.py integration/faults/test_failures.py""",
}
OPTIONS = argparse.Namespace()
TOOK_S: dict[int, float] = {}  # by the number of a test
RUNS, FAILURES = Counter[int](), Counter[int]()
PYTEST = ["-n0", "-sq", "-pno:cacheprovider", "--fast", "-mnot slow and not process"]
PAIRS = "Eq NotEq Is IsNot In NotIn Lt LtE Gt GtE And Or Add Sub BitOr BitAnd".split()  # noqa: SIM905
SWAPS = {PAIRS[n]: PAIRS[n ^ 1] for n in range(len(PAIRS))}
DROPPED = (ast.Raise, ast.AugAssign, ast.Delete, ast.Continue, ast.Break, ast.Expr)


def modules_of(names: str) -> list[Path]:
    """Return the modules of a table row that the user selected."""
    paths = [path for name in names.split() for path in (ROOT / "core").glob(f"{name}.py")]
    return [path for path in paths if OPTIONS.only in str(path)]


def changes(node: Any, line: int) -> Any:
    """Yield a field of a node, its new value, the line, and a text if not the node changes."""
    if kind := SWAPS.get(type(getattr(node, "op", None)).__name__):
        yield "op", getattr(ast, kind)(), line, ""
    if isinstance(node, ast.Compare):
        yield "ops", [getattr(ast, SWAPS[type(op).__name__])() for op in node.ops], line, ""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        more = node.value + 1 if node.value else -1
        yield "value", not node.value if isinstance(node.value, bool) else more, line, ""
    if isinstance(node, (ast.If, ast.IfExp, ast.While)) and not isinstance(node.test, ast.Compare):
        yield "test", ast.UnaryOp(ast.Not(), node.test), line, f"not: {ast.unparse(node.test)}"
    if isinstance(node, ast.Return) and ast.unparse(node)[7:] not in {"", "None", "False"}:
        yield "value", None, line, ""
    for name, block in blocks_of(node):
        for n, part in enumerate(block):
            text = ast.unparse(part)
            if isinstance(part, DROPPED) and not text.startswith(("'", '"', "log.")):
                new = [*block[:n], ast.Pass(), *block[n + 1 :]]
                yield name, new, part.lineno, f"without: {text}"


def blocks_of(node: Any) -> list[tuple[str, list[Any]]]:
    """Return the lists of statements of a node."""
    fields = [(name, getattr(node, name, None)) for name in ("body", "orelse", "finalbody")]
    return [(name, block) for name, block in fields if isinstance(block, list)]


def parts_of(node: Any, line: int = 0) -> Any:
    """Yield a node and its descendants, each with the first line of its statement.

    Leaves out types, default values, and the texts of errors and of the log.
    """
    line = node.lineno if isinstance(node, ast.stmt) else line
    yield node, line
    for name, field in ast.iter_fields(node):
        for part in field if isinstance(field, list) else [field]:
            left_out = name in {"annotation", "returns"} or not isinstance(part, ast.AST)
            if left_out or isinstance(part, (ast.JoinedStr, ast.arguments, ast.Raise)):
                continue
            if not ast.unparse(part).startswith("log."):
                yield from parts_of(part, line)


def functions_in(path: Path) -> Any:
    """Yield qualified name, node, and a tree of its own of each function and method."""
    tree = ast.parse(path.read_text())
    for holder in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for function in (node for node in holder.body if isinstance(node, ast.FunctionDef)):
            if isinstance(holder, ast.Module):
                yield function.name, function, ast.Module([function], [])
            else:
                alone = ast.parse(f"class {holder.name}: pass")
                alone.body[0].body = [function]
                yield f"{holder.name}.{function.name}", function, alone


def compiled(tree: ast.Module, path: Path) -> CodeType:
    """Return the code of a tree; annotations are text, as in this file."""
    return compile(ast.fix_missing_locations(tree), path, "exec")


def mutants_of(path: Path) -> Any:
    """Yield path, function, line, text and code of each mutant of a module."""
    for name, function, alone in functions_in(path):
        for node, around in parts_of(function):
            for field, new, line, text in changes(node, around):
                old, before = getattr(node, field), ast.unparse(node)
                setattr(node, field, new)
                code = compiled(alone, path)
                yield path, name, line, text or f"{before} -> {ast.unparse(node)}", code
                setattr(node, field, old)


def marked(path: Path) -> Any:
    """Yield the name of each function, and code that records each statement that it reaches."""
    for name, function, alone in functions_in(path):
        for node in [*ast.walk(function)]:
            for field, block in blocks_of(node):
                marks = [f"_reached.add(({str(path)!r}, {line.lineno}))" for line in block]
                pairs = zip(marks, block, strict=True)
                new = [part for mark, line in pairs for part in (*ast.parse(mark).body, line)]
                setattr(node, field, new)
        yield name, compiled(alone, path)


def codes_of(code: CodeType) -> list[CodeType]:
    """Return a code object and all inside it."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return [code, *(nested for const in inner for nested in codes_of(const))]


def forked(session: Any, numbers: Any, limit_s: float, each: Any) -> tuple[bool, int]:
    """Run tests in a child until `each` returns true after one.

    Returns whether `each` never did, and how many tests began. A test that runs for `limit_s` plus
    ten times its earlier time ends the child.
    """
    begun = mmap.mmap(-1, 1)  # shared with the child: the number of tests begun, modulo 256
    pid = os.fork()
    if not pid:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        status = 1  # also if a mutant ends pytest itself
        try:
            for number in numbers:
                begun[0] = (begun[0] + 1) % 256
                item, began_s, failed = session.items[number], time.monotonic(), session.testsfailed
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                if each(number, time.monotonic() - began_s, session.testsfailed > failed):
                    break
            else:
                status = 0
        finally:
            os._exit(status)
    count, began_s = 0, time.monotonic()
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if more := (begun[0] - count) % 256:
            count, began_s = count + more, time.monotonic()
        if time.monotonic() > began_s + limit_s + 10 * TOOK_S.get(count and numbers[count - 1], 0):
            break
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)  # with all processes of its tests
    return not os.waitpid(pid, 0)[1], count + (begun[0] - count) % 256


def changed(functions: list[Any], name: str, code: CodeType) -> list[tuple[Any, CodeType]]:
    """Put changed code into live functions, and return their old code."""
    saved = [(function, function.__code__) for function in functions]
    for function, before in saved:
        place = name, before.co_firstlineno
        codes = [c for c in codes_of(code) if (c.co_qualname, c.co_firstlineno) == place]
        with suppress(ValueError):  # without its only `super()`: never counted as noticed
            function.__code__ = codes[0]
    return saved


def watch(session: Any, functions: dict[Any, Any]) -> dict[Any, set[int]]:
    """Run all tests in a child, and return the numbers of the tests that reach each line.

    Sets `TOOK_S`, the seconds of each passing test.
    """
    reached: set[Any] = set()
    saved = []
    for path in {path for path, _ in functions}:
        for name, code in marked(Path(path)):
            saved += changed(functions[path, name], name, code)
    for function, _ in saved:
        function.__globals__["_reached"] = reached

    def each(number: int, took_s: float, failed: bool) -> None:  # noqa: FBT001
        row = session.items[number].nodeid, not failed and took_s, sorted(reached)
        print(json.dumps(row), file=report, flush=True)
        reached.clear()

    tests = defaultdict(set)
    numbers = {item.nodeid: number for number, item in enumerate(session.items)}
    known = Path(OPTIONS.known)
    with known.open("a+") if OPTIONS.known else tempfile.TemporaryFile("a+") as report:
        report.seek(0)
        before = {json.loads(line)[0] for line in report}
        forked(session, [numbers[name] for name in numbers if name not in before], 600, each)
        report.seek(0)
        for name, took_s, lines in map(json.loads, report):
            if took_s and name in numbers:
                TOOK_S[numbers[name]] = took_s
                for key in lines:
                    tests[tuple(key)].add(numbers[name])
    for function, before in saved:
        function.__code__ = before
    print(f"{len(TOOK_S)} of {len(session.items)} tests pass with nothing changed", flush=True)
    return tests


def functions_of(paths: list[Path]) -> dict[Any, list[FunctionType]]:
    """Import modules, and return their functions, even decorated ones, by path and name."""
    for path in paths:
        name = f"penstock.{path.relative_to(ROOT).with_suffix('')}"
        importlib.import_module(name.replace("/", "."))
    functions = defaultdict(list)
    gc.unfreeze()  # tests/conftest.py freezes imported objects, which hides them here
    for function in [item for item in gc.get_objects() if type(item) is FunctionType]:
        path = Path(os.path.realpath(function.__code__.co_filename))
        if path in paths and "<locals>" not in function.__qualname__:
            functions[f"{path}", function.__code__.co_qualname].append(function)
    gc.freeze()
    return functions


def verdict_of(session: Any, numbers: set[int], functions: list[Any], name: str, code: Any) -> str:
    """Change functions in a child, and return its tests' verdict."""
    saved = changed(functions, name, code)
    # Shortest expected wait for a failure first: a test's seconds by its failure rate.
    order = sorted(numbers, key=lambda n: TOOK_S[n] * (RUNS[n] + 2) / (FAILURES[n] + 1))
    ends_s = accumulate(TOOK_S[number] for number in order)
    order = [n for n, end_s in zip(order, ends_s, strict=True) if end_s < OPTIONS.each]
    survived, count = forked(session, order, 20, lambda _number, _took_s, failed: failed)
    for function, before in saved:
        function.__code__ = before
    RUNS.update(order[:count])
    if not survived and count:
        FAILURES[order[count - 1]] += 1
    return "SURVIVED" if survived else "noticed"


def pytest_runtestloop(session: Any) -> bool:
    """Find which test reaches which line, then run mutants until the time is over."""
    paths = sorted({path for names in OPTIONS.rows for path in modules_of(names)})
    functions = functions_of(paths)
    tests = watch(session, functions)
    mutants = [mutant for path in paths for mutant in mutants_of(path)]
    random.Random(OPTIONS.seed).shuffle(mutants)  # noqa: S311 - no secret
    if OPTIONS.only:
        # Cheapest first: the time may not suffice for all.
        mutants.sort(key=lambda mutant: sum(TOOK_S[n] for n in tests[f"{mutant[0]}", mutant[2]]))
    again = OPTIONS.again and Path(OPTIONS.again).read_text()
    end_s, counts = time.monotonic() + OPTIONS.seconds, Counter[Any]()
    for path, name, line, text, code in mutants:
        if time.monotonic() > end_s:
            break
        numbers = tests[f"{path}", line]
        place = f"{path.relative_to(ROOT)}:{line} {name}"
        if OPTIONS.again and f"\n{place}: {text}, " not in again:
            continue
        verdict = verdict_of(session, numbers, functions[f"{path}", name], name, code)
        counts[path, verdict] += 1
        if verdict == "SURVIVED":
            print(f"{place}: {text}, {len(numbers)} tests", flush=True)
    for path in paths:
        noticed, survived = counts[path, "noticed"], counts[path, "SURVIVED"]
        count = sum(mutant[0] == path for mutant in mutants)
        print(f"{path.relative_to(ROOT)}: {noticed} of {noticed + survived} noticed, of {count}")
    noticed = sum(count for (_, verdict), count in counts.items() if verdict == "noticed")
    share = f"{noticed / max(counts.total(), 1):.1%} of {counts.total()} mutants"
    print(f"seed {OPTIONS.seed}: {share} are noticed, of {len(mutants)} in these modules")
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=math.inf, help="after the first run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=float, default=60, help="seconds of tests for one mutant")
    parser.add_argument(
        "--only", default="", help="part of module paths, instead of random modules"
    )
    parser.add_argument(
        "--known", default="", help="file of the lines that tests reach, for later runs"
    )
    parser.add_argument("--again", default="", help="an earlier output: try its survivors")
    parser.parse_args(namespace=OPTIONS)
    rows = [names for names in MODULES if modules_of(names)]
    OPTIONS.rows = rows if OPTIONS.only else [random.Random(OPTIONS.seed).choice(rows)]  # noqa: S311
    tests = [f"{ROOT}/tests/{path}" for names in OPTIONS.rows for path in MODULES[names].split()]
    sys.exit(pytest.main([*PYTEST, *tests], plugins=[sys.modules[__name__]]))

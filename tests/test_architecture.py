"""`docs/architecture.md` names existing files and tests, and the right ones."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("core", "providers", "backends", "codecs", "integrations", "testing")
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROWS = re.findall(
    r"^\| ([^|]+) \| `([\w/.]+\.py)` \| `(tests/[\w/]+\.py(?:::\w+)?)` \|$", PAGE, re.MULTILINE
)
# Named like the storages of DCP, and not a public name of the core.
TWINS = {"Reader"}


@cache
def guarded_files():
    """Each test that finds a broken guard, with the modules of its guards."""
    files = defaultdict(set)
    for section in tomllib.loads((ROOT / "tools" / "guards.toml").read_text()).values():
        for guard in section if isinstance(section, list) else ():
            for test in guard["tests"]:
                files[test.partition("[")[0]].add(guard["file"])
    return files


def test_a_few_dozen_rules_are_listed():
    assert len(ROWS) >= 40
    assert PAGE.count("::test_") <= len(ROWS)


def test_every_path_exists():
    folders = f"(?:{'|'.join([*FOLDERS, 'tests', 'tools', 'docs'])})"
    named = set(re.findall(rf"`({folders}/[\w/.-]*)(?:::\w+)?`", PAGE))
    assert len(named) > 80
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_a_rules_test_exists_and_guards_its_module():
    for rule, module, test in ROWS:
        path, _, name = test.partition("::")
        assert not name or f"def {name}(" in (ROOT / path).read_text(), rule
        for symbol in re.findall(r"\(`(\w+)`", rule):
            assert symbol in (ROOT / module).read_text(), f"{rule}: {module} has no {symbol}"
        if files := guarded_files()[test]:
            assert module in files, f"{rule}: that test guards {sorted(files)}"


def test_every_guard_is_once_in_its_module():
    for section in tomllib.loads((ROOT / "tools" / "guards.toml").read_text()).values():
        for guard in section if isinstance(section, list) else ():
            count = (ROOT / guard["file"]).read_text().count(guard["old"])
            assert count == 1, f"{guard['name']}: {guard['file']} has it {count} times"


def test_the_glossary_explains_a_word_once_and_in_order():
    for section in (ROOT / "docs" / "glossary.md").read_text().split("\n## ")[1:]:
        words = re.findall(r"^\*\*([^*]+)\*\*", section, re.MULTILINE)
        assert words == sorted(set(words), key=str.lower), section.splitlines()[0]


def classes_of(root):
    """Each class name of the product, with the files that define it."""
    found = defaultdict(list)
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
            found[name].append(f"{path.relative_to(root)}")
    return found


def test_no_two_classes_have_one_name():
    found = classes_of(ROOT)
    assert len(found) > 500
    twins = {name: files for name, files in found.items() if len(files) > 1}
    assert twins.keys() == TWINS, twins


def test_two_classes_of_one_name_are_found(tmp_path):
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
    (tmp_path / "core" / "one.py").write_text("class Twin: ...\nclass Single: ...\n")
    (tmp_path / "codecs" / "other.py").write_text("\nclass Twin: ...\n")
    found = classes_of(tmp_path)
    assert found["Twin"] == ["codecs/other.py", "core/one.py"]
    assert found["Single"] == ["core/one.py"]

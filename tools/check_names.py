"""Fail where one class name stands for two classes of the product.

A reader who searches for a class finds one. Private classes count as well; classes inside classes
and functions do not.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("core", "providers", "backends", "codecs", "integrations", "testing")

# Name -> why it may stand twice.
EXCUSED: dict[str, str] = {
    "Reader": "penstock.dcp.Reader is named as the storages of DCP are; core's is no public name",
}


def classes_of(root: Path) -> dict[str, list[str]]:
    """Map each name of a class to the places where one of that name is defined."""
    found: dict[str, list[str]] = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(f"{path.relative_to(root)}:{node.lineno}")
    return found


def main() -> None:
    """Print names that stand twice."""
    found = classes_of(ROOT)
    twins = {name: places for name, places in found.items() if len(places) > 1}
    wrong = [f"{name}: {', '.join(twins[name])}" for name in sorted(twins.keys() - EXCUSED)]
    wrong += [f"{name} is excused, and stands once" for name in sorted(EXCUSED.keys() - twins)]
    if wrong:
        sys.exit("\n".join(["classes of one name:", *wrong]))
    print(f"{len(found)} classes, no two of one name")


if __name__ == "__main__":
    main()

"""Draw the rooms of Penstock from its real imports, and list them, for `docs/architecture.md`.

    python tools/architecture.py            # writes the picture, and the table of the page
    python tools/architecture.py --check    # fails where either is not up to date

Each package of `core` is a box, as are `providers`, `backends`, `codecs` and `integrations`. A box
is above all that it imports. The table names what it imports, less what the rest imports anyway.
"""

from __future__ import annotations

import argparse
import ast
import html
import re
import sys
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "assets" / "architecture.svg"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: written by tools/architecture.py -->", "<!-- end of rooms -->"

FOLDERS = ("providers", "backends", "codecs", "integrations")
# By the names of the package itself, which it imports late.
FACADE = "checkpointer"
BASE = "core/*.py"

BOX_WIDTH, BOX_HEIGHT, GAP = 214, 76, 18
LINE_CHARS, LINES = 32, 3

STYLE = """
  .sheet { fill: #ffffff; }
  .box { fill: #eef3f6; stroke: #4d6a79; stroke-width: 1.2; }
  .top { fill: #dcebe6; }
  .plugin { fill: #f6efdf; }
  .base { fill: #ececec; }
  .name { font: 600 14px system-ui, sans-serif; fill: #1d2b33; }
  .text { font: 11px system-ui, sans-serif; fill: #37474f; }
"""


@dataclass(slots=True)
class Room:
    """A box of the picture.

    Attributes:
        name: What it is called there.
        folder: Where it stands in the repository.
        doc: Docstring of its `__init__`, or of its one module.
        imports: Names of the rooms that it imports.
    """

    name: str
    folder: str
    doc: str
    imports: set[str] = field(default_factory=set)

    @property
    def summary(self) -> str:
        """First sentence of the docstring."""
        return " ".join(self.doc.split("\n\n")[0].split())


# -- what imports what ----------------------------------------------------------------------------


def read_rooms() -> dict[str, Room]:
    """Build the rooms from the imports that run, those inside functions among them."""
    graph = grimp.build_graph("penstock", exclude_type_checking_imports=True, cache_dir=None)
    imports = {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
    base = _base_modules(imports)
    room_of = {module: _room_of(module, base) for module in imports}
    rooms: dict[str, Room] = {}
    for module in sorted(imports):
        name = room_of[module]
        if name is None:
            continue
        room = rooms.setdefault(name, Room(name, *_folder_and_doc(name)))
        targets = {room_of[target] for target in imports[module]}
        if "penstock" in imports[module] and name == "integrations":
            targets.add(FACADE)
        room.imports |= {target for target in targets if target not in {None, name}}
    return rooms


def _base_modules(imports: dict[str, set[str]]) -> set[str]:
    """Modules directly in core that need no package of core."""
    single = {m for m in imports if m.count(".") == 2 and _source(m).suffix == ".py"}  # noqa: PLR2004
    base = {m for m in single if m.startswith("penstock.core.")}
    while True:
        kept = {m for m in base if all(t in base or "." not in t for t in imports[m])}
        if kept == base:
            return base
        base = kept


def _room_of(module: str, base: set[str]) -> str | None:
    folder, _, rest = module.removeprefix("penstock.").partition(".")
    if folder in FOLDERS:
        return folder
    name = rest.partition(".")[0]
    if folder != "core" or not name:
        return None
    return BASE if module in base else name


def _source(module: str) -> Path:
    """The module's file, or the package's folder."""
    path = ROOT.joinpath(*module.split(".")[1:])
    return path if path.is_dir() else path.with_suffix(".py")


def _folder_and_doc(name: str) -> tuple[str, str]:
    if name == BASE:
        return BASE, "Words that everything uses: errors, value types, units, limits."
    path = _source(f"penstock.{name}" if name in FOLDERS else f"penstock.core.{name}")
    file = path / "__init__.py" if path.is_dir() else path
    folder = f"{path.relative_to(ROOT)}" + ("/" if path.is_dir() else "")
    return folder, ast.get_docstring(ast.parse(file.read_text())) or ""


def rows_of(rooms: dict[str, Room]) -> list[list[str]]:
    """Sort the rooms into rows, the lowest first: each as low as what it imports allows.

    Raises:
        SystemExit: Rooms import each other in a circle.
    """
    height: dict[str, int] = {}

    def measure(name: str, way: tuple[str, ...]) -> int:
        if name in way:
            sys.exit("rooms import each other: " + " -> ".join([*way[way.index(name) :], name]))
        if name not in height:
            lower = (measure(target, (*way, name)) for target in sorted(rooms[name].imports))
            height[name] = max(lower, default=-1) + 1
        return height[name]

    rows: dict[int, list[str]] = defaultdict(list)
    for name in sorted(rooms):
        rows[measure(name, ())].append(name)
    return [rows[number] for number in sorted(rows)]


def shown_imports(rooms: dict[str, Room], rows: list[list[str]]) -> dict[str, list[str]]:
    """List what each room imports, without what the others of these import."""
    reached: dict[str, set[str]] = {}
    shown = {}
    for name in (name for row in rows for name in row):
        targets = rooms[name].imports
        implied = set().union(*(reached[target] for target in targets))
        reached[name] = targets | implied
        shown[name] = sorted(targets - implied)
    return shown


# -- how it looks ---------------------------------------------------------------------------------


def draw(rooms: dict[str, Room]) -> str:
    """Return the picture as SVG."""
    rows = rows_of(rooms)
    step_x, step_y = BOX_WIDTH + GAP, BOX_HEIGHT + GAP
    width = max(map(len, rows)) * step_x + GAP
    height = len(rows) * step_y + GAP
    size = f'width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size}>',
        "<title>The rooms of Penstock: each imports only what is below it</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="sheet" {size} rx="8"/>',
    ]
    for number, row in enumerate(reversed(rows)):
        left = (width - len(row) * step_x + GAP) / 2
        for place, name in enumerate(row):
            lines += _box(rooms[name], left + place * step_x, GAP + number * step_y)
    return "\n".join([*lines, "</svg>", ""])


def _box(room: Room, left: float, top: float) -> list[str]:
    kind = "plugin" if room.name in FOLDERS else "base" if room.name == BASE else "box"
    if room.folder.endswith(".py") and room.name != BASE:
        kind = "top"
    lines = textwrap.wrap(_plain(room.summary), LINE_CHARS, max_lines=LINES, placeholder=" …")
    shown = [f'<text class="name" x="{left + 9:.0f}" y="{top + 20:.0f}">{room.name}</text>']
    for number, line in enumerate(lines):
        at = f'x="{left + 9:.0f}" y="{top + 38 + 14 * number:.0f}"'
        shown.append(f'<text class="text" {at}>{html.escape(line)}</text>')
    at = f'x="{left:.0f}" y="{top:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"'
    return [f'<rect class="box {kind}" {at}/>', *shown]


def _plain(text: str) -> str:
    return re.sub(r"`+", "", text)


# -- the page -------------------------------------------------------------------------------------


def table(rooms: dict[str, Room]) -> str:
    """Return the rooms, from the top down, with what their docstrings say."""
    rows = rows_of(rooms)
    imports = shown_imports(rooms, rows)
    lines = ["| room | what lives there | imports |", "|---|---|---|"]
    for name in (name for row in reversed(rows) for name in row):
        room = rooms[name]
        text = " ".join(room.doc.split()) if room.folder.endswith("/") else room.summary
        lines.append(f"| `{room.folder}` | {text} | {', '.join(imports[name])} |")
    return "\n".join(lines)


def with_table(page: str, text: str) -> str:
    """Put the table between its marks."""
    before, found, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        sys.exit(f"{PAGE} lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main() -> None:
    """Write picture and table, or compare them with what is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    rooms = read_rooms()
    page = PAGE.read_text()
    wanted = {PICTURE: draw(rooms), PAGE: with_table(page, table(rooms))}
    if parser.parse_args().check:
        stale = [f"{path.relative_to(ROOT)}" for path in wanted if not _is(path, wanted[path])]
        if stale:
            sys.exit(f"not up to date: {', '.join(stale)}. Run: python tools/architecture.py")
        print(f"{len(rooms)} rooms, as the picture and the page show them")
        return
    for path, text in wanted.items():
        path.write_text(text)


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    main()

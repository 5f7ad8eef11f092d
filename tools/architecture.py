"""Draw and list the packages of Penstock for `docs/architecture.md`, from their imports.

    python tools/architecture.py            # writes the picture, and the table of the page
    python tools/architecture.py --check    # fails if either is not up to date

A box is a package of `core` or a folder beside it, above everything that it imports. The table
names a package's imports, except those that follow from others.
"""

from __future__ import annotations

import ast
import html
import sys
import textwrap
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "assets" / "architecture.svg"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: written by tools/architecture.py -->", "<!-- end of rooms -->"

FOLDERS = ("providers", "backends", "codecs", "integrations")
BASE = "core/*.py"
BASE_DOC = "Words that everything uses: errors, value types, units, limits."

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


@dataclass
class Room:
    """A box of the picture: its folder, docstring, imports, and its row from the bottom."""

    folder: str
    doc: str
    imports: set[str] = field(default_factory=set)
    shown: list[str] = field(default_factory=list)
    row: int = 0

    @property
    def summary(self) -> str:
        """First sentence of the docstring."""
        return " ".join(self.doc.split("\n\n")[0].split())


def read_rooms() -> dict[str, Room]:
    """Build the rooms, lowest first, from all imports that run, even inside functions.

    Raises:
        graphlib.CycleError: Rooms import each other.
    """
    graph = grimp.build_graph("penstock", exclude_type_checking_imports=True, cache_dir=None)
    imports = {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
    sources = {m: ROOT.joinpath(*m.split(".")[1:]) for m in imports}
    base = {m for m in imports if m.count(".") == 2 and not sources[m].is_dir()}  # noqa: PLR2004
    base = {m for m in base if m.startswith("penstock.core.")}
    while too_high := {m for m in base if not all(t in base or "." not in t for t in imports[m])}:
        base -= too_high

    def room_of(module: str) -> str:
        folder, _, rest = module.removeprefix("penstock.").partition(".")
        if folder in FOLDERS:
            return folder
        name = rest.partition(".")[0] if folder == "core" else ""
        return BASE if module in base else name

    rooms: dict[str, Room] = {}
    for module, targets in imports.items():
        if name := room_of(module):
            room = rooms.setdefault(name, described(name))
            room.imports |= {room_of(target) for target in targets} - {"", name}
            if "penstock" in targets and name == "integrations":
                room.imports.add("checkpointer")  # through a name of the package
    reached: dict[str, set[str]] = {}
    for name in TopologicalSorter(
        {name: room.imports for name, room in rooms.items()}
    ).static_order():
        room = rooms[name]
        implied = set().union(*(reached[target] for target in room.imports))
        reached[name] = room.imports | implied
        room.shown = sorted(room.imports - implied)
        room.row = max((rooms[target].row + 1 for target in room.imports), default=0)
    return dict(sorted(rooms.items()))


def described(name: str) -> Room:
    """Return a room with its folder and docstring."""
    if name == BASE:
        return Room(BASE, BASE_DOC)
    path = ROOT / name if name in FOLDERS else ROOT / "core" / name
    file, end = (path / "__init__.py", "/") if path.is_dir() else (path.with_suffix(".py"), ".py")
    return Room(
        f"{path.relative_to(ROOT)}{end}", ast.get_docstring(ast.parse(file.read_text())) or ""
    )


def rows_of(rooms: dict[str, Room]) -> list[list[tuple[str, Room]]]:
    """Return the rows of the picture, from the top down."""
    highest = max(room.row for room in rooms.values())
    return [[item for item in rooms.items() if item[1].row == n] for n in range(highest, -1, -1)]


def draw(rooms: dict[str, Room]) -> str:
    """Return the picture as SVG."""
    rows = rows_of(rooms)
    step_x, step_y = BOX_WIDTH + GAP, BOX_HEIGHT + GAP
    width, height = max(map(len, rows)) * step_x + GAP, len(rows) * step_y + GAP
    size = f'width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size}>',
        "<title>The rooms of Penstock: each imports only what is below it</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="sheet" {size} rx="8"/>',
    ]
    for number, row in enumerate(rows):
        left, top = (width - len(row) * step_x + GAP) / 2, GAP + number * step_y
        for place, (name, room) in enumerate(row):
            lines += box(name, room, left + place * step_x, top)
    return "\n".join([*lines, "</svg>", ""])


def box(name: str, room: Room, left: float, top: float) -> list[str]:
    """Return the elements of one box."""
    kind = "top" if room.folder.endswith(".py") else "box"
    kind = "plugin" if name in FOLDERS else "base" if name == BASE else kind
    at = f'x="{left:.0f}" y="{top:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"'
    shown = [f'<rect class="box {kind}" {at}/>']
    shown.append(f'<text class="name" x="{left + 9:.0f}" y="{top + 20:.0f}">{name}</text>')
    summary = room.summary.replace("`", "")
    lines = textwrap.wrap(summary, LINE_CHARS, max_lines=LINES, placeholder=" …")
    for number, line in enumerate(lines):
        at = f'x="{left + 9:.0f}" y="{top + 38 + 14 * number:.0f}"'
        shown.append(f'<text class="text" {at}>{html.escape(line)}</text>')
    return shown


def table(rooms: dict[str, Room]) -> str:
    """Return the rooms, from the top down, with their docstrings' summaries."""
    lines = ["| room | what lives there | imports |", "|---|---|---|"]
    for _, room in (item for row in rows_of(rooms) for item in row):
        lines.append(f"| `{room.folder}` | {room.summary} | {', '.join(room.shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Write picture and table, or compare them with the files."""
    rooms, page = read_rooms(), PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    wanted = f"{before}{BEGIN}\n{table(rooms)}\n{END}{rest.partition(END)[2]}"
    if "--check" not in sys.argv:
        PICTURE.write_text(draw(rooms))
        PAGE.write_text(wanted)
    elif page != wanted or PICTURE.read_text() != draw(rooms):
        sys.exit("the picture or the table is not up to date. Run: python tools/architecture.py")


if __name__ == "__main__":
    main()

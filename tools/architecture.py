"""Draw the rooms of Penstock from its real imports, and list them, for `docs/architecture.md`.

    python tools/architecture.py            # writes the picture, and the table of the page
    python tools/architecture.py --check    # fails where either is not up to date

Each package of `core` is a box, as are `providers`, `backends`, `codecs` and `integrations`. A box
stands above all that it imports. An arrow that other arrows imply (a chain of them leads to the
same box) is left out: without that there would be over a hundred.
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
from itertools import pairwise
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
# Not in the picture: conformance suites are used by tests alone.
OMITTED = ("testing",)

BOX_WIDTH, BOX_HEIGHT = 214, 76
ROW_GAP, COLUMN_GAP, EDGE_GAP, MARGIN = 46, 18, 14, 24
LINE_CHARS, LINES = 32, 3
SWEEPS = 24

STYLE = """
  .sheet { fill: #ffffff; }
  .box { fill: #eef3f6; stroke: #4d6a79; stroke-width: 1.2; }
  .top { fill: #dcebe6; }
  .plugin { fill: #f6efdf; }
  .base { fill: #ececec; }
  .name { font: 600 14px system-ui, sans-serif; fill: #1d2b33; }
  .text { font: 11px system-ui, sans-serif; fill: #37474f; }
  .arrow { fill: none; stroke: #6f8591; stroke-width: 1.1; }
  .head { fill: #6f8591; }
"""

HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    'markerHeight="7" orient="auto"><path class="head" d="M0 0 8 4 0 8z"/></marker></defs>'
)


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


@dataclass(slots=True)
class Place:
    """Where a box, or the bend of an arrow that passes a row, stands in its row."""

    room: str | None
    centre: float = 0.0
    above: list[Place] = field(default_factory=list)
    below: list[Place] = field(default_factory=list)

    @property
    def width(self) -> float:
        """Room that it takes in the row."""
        return BOX_WIDTH if self.room else 0.0


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
    if folder != "core" or not name or name in OMITTED:
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


def shown_arrows(rooms: dict[str, Room], rows: list[list[str]]) -> list[tuple[str, str]]:
    """List the imports that no chain of others implies."""
    reached: dict[str, set[str]] = {}
    arrows = []
    for name in (name for row in rows for name in row):
        targets = rooms[name].imports
        implied = set().union(*(reached[target] for target in targets))
        reached[name] = targets | implied
        arrows += [(name, target) for target in sorted(targets - implied)]
    return arrows


# -- where it stands ------------------------------------------------------------------------------


def lay_out(rows: list[list[str]], arrows: list[tuple[str, str]]) -> list[list[Place]]:
    """Give every box, and every bend of an arrow, a place in its row (Sugiyama's method)."""
    grid: list[list[Place]] = [[Place(name) for name in row] for row in rows]
    places = {place.room: place for row in grid for place in row}
    level = {name: number for number, row in enumerate(rows) for name in row}
    for upper, lower in arrows:
        way = [places[lower]]
        for number in range(level[lower] + 1, level[upper]):
            way.append(Place(None))
            grid[number].append(way[-1])
        for below, above in pairwise([*way, places[upper]]):
            below.above.append(above)
            above.below.append(below)
    best, fewest = [list(row) for row in grid], _crossings(grid)
    for sweep in range(SWEEPS):
        down = sweep % 2
        for row in grid if down else grid[::-1]:
            _number(grid)
            row.sort(key=lambda place: _mean(place.below if down else place.above, place.centre))
        if (crossings := _crossings(grid)) < fewest:
            best, fewest = [list(row) for row in grid], crossings
    _spread(best)
    return best


def _number(grid: list[list[Place]]) -> None:
    for row in grid:
        for number, place in enumerate(row):
            place.centre = number


def _mean(places: list[Place], otherwise: float) -> float:
    return sum(p.centre for p in places) / len(places) if places else otherwise


def _crossings(grid: list[list[Place]]) -> int:
    _number(grid)
    total = 0
    for row in grid:
        ends = [(place.centre, above.centre) for place in row for above in place.above]
        total += sum((a - c) * (b - d) < 0 for a, b in ends for c, d in ends) // 2
    return total


def _spread(grid: list[list[Place]]) -> None:
    """Move places, in the order that they have, towards their neighbours in the other rows."""
    for row in grid:
        for left, place in zip([None, *row], row, strict=False):
            place.centre = left.centre + _distance(left, place) if left else 0.0
    for sweep in range(SWEEPS * 4):
        for row in grid if sweep % 2 else grid[::-1]:
            for place in row:
                near = place.below + place.above
                place.centre = (_mean(near, place.centre) + place.centre) / 2
            _part(row)
    least = min(place.centre - place.width / 2 for row in grid for place in row)
    for row in grid:
        for place in row:
            place.centre += MARGIN - least


def _part(row: list[Place]) -> None:
    """Restore the least distances in a row; half from the left, half from the right."""
    forward = [place.centre for place in row]
    backward = list(forward)
    for n in range(1, len(row)):
        forward[n] = max(forward[n], forward[n - 1] + _distance(row[n - 1], row[n]))
        m = len(row) - 1 - n
        backward[m] = min(backward[m], backward[m + 1] - _distance(row[m], row[m + 1]))
    for place, a, b in zip(row, forward, backward, strict=True):
        place.centre = (a + b) / 2


def _distance(left: Place, right: Place) -> float:
    gap = COLUMN_GAP if left.room or right.room else EDGE_GAP
    return (left.width + right.width) / 2 + gap


# -- how it looks ---------------------------------------------------------------------------------


def draw(rooms: dict[str, Room]) -> str:
    """Return the picture as SVG."""
    rows = rows_of(rooms)
    grid = lay_out(rows, shown_arrows(rooms, rows))
    width = max(p.centre + p.width / 2 for row in grid for p in row) + MARGIN
    height = len(grid) * (BOX_HEIGHT + ROW_GAP) - ROW_GAP + 2 * MARGIN
    top = {
        id(place): height - MARGIN - BOX_HEIGHT - number * (BOX_HEIGHT + ROW_GAP)
        for number, row in enumerate(grid)
        for place in row
    }
    size = f'width="{width:.0f}" height="{height:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" {size}>',
        "<title>The rooms of Penstock: each imports only what stands below it</title>",
        f"<style>{STYLE}</style>",
        HEAD,
        f'<rect class="sheet" {size} rx="8"/>',
    ]
    for place in (place for row in grid for place in row if place.room):
        lines += [_arrow(place, below, top) for below in place.below]
    for place in (place for row in grid for place in row if place.room):
        lines += _box(rooms[place.room or ""], place.centre - BOX_WIDTH / 2, top[id(place)])
    return "\n".join([*lines, "</svg>", ""])


def _arrow(upper: Place, step: Place, top: dict[int, float]) -> str:
    """One arrow, through its bends, from the lower edge of a box to the upper edge of another."""
    starts = sorted(upper.below, key=lambda place: place.centre)
    x, y = _spot(upper, starts.index(step), len(starts)), top[id(upper)] + BOX_HEIGHT
    path = f"M{x:.0f} {y:.0f}"
    previous = upper
    while True:
        ends = sorted(step.above, key=lambda place: place.centre)
        to_x = _spot(step, ends.index(previous), len(ends)) if step.room else step.centre
        to_y = top[id(step)] - (2 if step.room else 0)
        middle = (y + to_y) / 2
        path += f" C{x:.0f} {middle:.0f} {to_x:.0f} {middle:.0f} {to_x:.0f} {to_y:.0f}"
        if step.room:
            return f'<path class="arrow" marker-end="url(#head)" d="{path}"/>'
        path += f" V{to_y + BOX_HEIGHT:.0f}"
        x, y = to_x, to_y + BOX_HEIGHT
        previous, step = step, step.below[0]


def _spot(place: Place, number: int, count: int) -> float:
    """Where on the edge of a box the arrow with that number begins or ends."""
    return place.centre + (number + 1) / (count + 1) * BOX_WIDTH * 0.8 - BOX_WIDTH * 0.4


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
    lines = ["| room | what lives there |", "|---|---|"]
    for name in (name for row in reversed(rows_of(rooms)) for name in row):
        room = rooms[name]
        text = " ".join(room.doc.split()) if room.folder.endswith("/") else room.summary
        lines.append(f"| `{room.folder}` | {text} |")
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

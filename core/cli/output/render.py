"""Tables and texts for users, and JSON for programs. This module knows nothing of checkpoints.

Tested in `tests/core/cli/test_cli.py`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.core.suggest import listed
from penstock.core.units import SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rich.console import Console

T = TypeVar("T")

_FLEXIBLE_MIN_WIDTH = 12
_GAP = "  "  # between columns
_LINES = re.compile(r"\n(?=  )")  # a line break before an indented line


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """A column of a table.

    Attributes:
        title: The head of the column.
        cell: Returns the cell of an item; each item is a line of the table.
        right: Whether its cells are aligned right.
        keep: 0 for a column that is never dropped. In a narrow terminal, the others are dropped in
            ascending order of `keep`.
        flexible: Whether its cells may be cut (with an ellipsis) to fit.
        spare: Whether the column is dropped before a flexible column is cut.
        middle: Whether cells are cut in the middle; the end of a path matters most.
    """

    title: str
    cell: Callable[[T], str | Cell] = str
    right: bool = False
    keep: int = 0
    flexible: bool = False
    spare: bool = False
    middle: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell with its own color."""

    text: str
    style: str


def print_json(value: Any) -> None:
    """Print one JSON document on standard output.

    ASCII only, so that no encoding of a terminal or pipe fails, and no stored name can control a
    terminal.
    """
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_line(text: str, *, hanging: int = 2, style: str = "") -> None:
    """Print one line, escaped as by `visible`; wrap it between words in a terminal.

    Args:
        text: The line. A line break in it is escaped too, since it is part of a stored name.
        hanging: The additional indentation of wrapped lines in a terminal.
        style: The color, used only in a terminal.
    """
    text = visible(text)
    if not sys.stdout.isatty():
        sys.stdout.write(text + "\n")
        return
    from rich.text import Text  # noqa: PLC0415 - see `_console`

    console = _console()
    console.print(Text(wrapped(text, console.width, hanging), style=style), soft_wrap=True)


def warn(text: str) -> None:
    """Print one line on standard error, escaped as by `visible`."""
    sys.stderr.write(f"penstock: {visible(text)}\n")


def wrapped(line: str, width: int, hanging: int = 2) -> str:
    """Wrap a line between words; indent further lines by `hanging` more than the first.

    Never cuts a word: the terminal wraps a long path, which the user can then still copy.
    """
    import textwrap  # noqa: PLC0415

    indent = " " * (len(line) - len(line.lstrip()) + hanging)
    return textwrap.fill(
        line,
        max(width, len(indent) + 10),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_table(columns: Sequence[Column[T]], items: Iterable[T]) -> None:
    """Print a table that fits the terminal, and name the columns that had to be left out.

    Drops spare columns first, then cuts flexible ones, then drops other columns. In a pipe nothing
    is dropped, cut or colored. Cells are escaped as by `visible`.
    """
    head = [_cell(Cell(column.title, "bold")) for column in columns]
    rows = [head, *([_cell(column.cell(item)) for column in columns] for item in items)]
    wanted = {n: max(_cells(row[n].text) for row in rows) for n in range(len(columns))}
    if not sys.stdout.isatty():
        for row in rows:
            texts = (_fitted(row[n], columns[n], width).text for n, width in wanted.items())
            sys.stdout.write(_GAP.join(texts).rstrip() + "\n")
        return
    from rich.text import Text  # noqa: PLC0415 - see `_console`

    console = _console()
    widths = fitting(columns, wanted, console.width)
    for row in rows:
        cells = (_fitted(row[n], columns[n], width) for n, width in widths.items())
        line = Text(_GAP).join(Text(cell.text, cell.style) for cell in cells)
        line.rstrip()
        console.print(line, soft_wrap=True)
    left_out = [head[n].text for n in wanted if n not in widths and head[n].text]
    if left_out:
        console.print(Text(f"(too narrow for {', '.join(left_out)})", style="dim"))


def fitting(
    columns: Sequence[Column[Any]], wanted: Mapping[int, int], width: int
) -> dict[int, int]:
    """Return the widths, by column number, of the columns to show in `width` cells."""
    wanted = dict(wanted)
    spare = [n for n in wanted if columns[n].spare]
    for n in sorted(spare, key=lambda n: (columns[n].keep, -n)):
        if _total(wanted) > width:
            del wanted[n]
    shown = {
        n: min(want, _FLEXIBLE_MIN_WIDTH) if columns[n].flexible else want
        for n, want in wanted.items()
    }
    while _total(shown) > width:
        droppable = [n for n in shown if columns[n].keep]
        if not droppable:
            break
        del shown[min(droppable, key=lambda n: (columns[n].keep, -n))]
    for n, least in list(shown.items()):  # flexible columns get the remaining width, in order
        shown[n] = least + max(0, min(wanted[n] - least, width - _total(shown)))
    return shown


def shortened(text: str, width: int, *, middle: bool = False) -> str:
    """Cut the end of `text` if needed, so that it takes at most `width` cells.

    With `middle`, cut the middle instead, and keep twice as much of the end as of the beginning.
    """
    kept, cut = width, text
    while kept and _cells(cut) > width:
        kept -= 1  # for the ellipsis, and again while wide characters do not fit
        head = kept // 3 if middle else kept
        cut = f"{text[:head]}…{text[len(text) - (kept - head) :]}"
    return cut


def visible(text: str) -> str:
    """Return `text` with escapes for characters that could control or deceive a terminal."""
    if text.isprintable():  # False also for format characters that reverse the direction of text
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def visible_lines(message: str) -> list[str]:
    """Split a message before its indented lines, and return each line escaped.

    Messages quote names that another user stored. A line break in such a name is escaped: the text
    after it would look like a message of the command itself.
    """
    return [visible(line) for line in _LINES.split(message)]


def number_text(value: float | None) -> str:
    """Format a float with four digits, an integer in full, and None as `-`."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def ratio_text(raw: int, stored: int) -> str:
    """Format how many times smaller the stored bytes are; `-` if either is zero."""
    return f"{raw / stored:.2f}x" if raw and stored else "-"


def bar_text(share: float, width: int) -> str:
    """Return a bar of `width` cells for a terminal, filled to `share` (at most 1)."""
    from rich.bar import Bar  # noqa: PLC0415 - see `_console`

    console = _console()
    bar = Bar(1.0, 0.0, min(share, 1.0), width=width)
    return "".join(segment.text for segment in console.render(bar)).rstrip("\n")


def age_text(seconds: float) -> str:
    """Format `3700` as `1 h`, and a negative age (clocks differ) as `now`."""
    for unit in ("d", "h", "min", "s"):
        if seconds >= SECONDS[unit]:
            return f"{int(seconds // SECONDS[unit])} {unit}"
    return "now"


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """Format user metadata on one line: `loss=2.1 lr=0.1`."""
    return visible(" ".join(f"{key}={value_text(value)}" for key, value in metadata.items()))


def value_text(value: Any) -> str:
    """Format one value of user metadata: a float with six digits, text as it is."""
    if isinstance(value, str):
        return value
    short = float(f"{value:.6g}") if isinstance(value, float) else value
    return json.dumps(short, ensure_ascii=False)


def steps_text(steps: Sequence[int]) -> str:
    """Format steps as `step 1` or `steps 1, 2`; of many, only the first ones."""
    return f"step{'s' if steps[1:] else ''} {listed([*map(str, steps)])}"


def state_cell(state: str) -> Cell:
    """Return a cell for a state: `ok` green, `found` without color, all others red."""
    return Cell(state, {"ok": "green", "found": ""}.get(state, "bold red"))


def _console() -> Console:
    from rich.console import Console  # noqa: PLC0415 - a tenth of the time that `ls` takes

    # rich honors NO_COLOR, but keeps bold and dim, which are escapes too.
    return Console(color_system=None if os.environ.get("NO_COLOR") else "auto")


def _fitted(cell: Cell, column: Column[Any], width: int) -> Cell:
    text = shortened(cell.text, width, middle=column.middle)
    space = " " * (width - _cells(text))
    return Cell(space + text if column.right else text + space, cell.style)


def _total(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + len(_GAP) * (len(widths) - 1)


def _cell(cell: str | Cell) -> Cell:
    text, style = (cell.text, cell.style) if isinstance(cell, Cell) else (cell, "")
    return Cell(visible(text), style)


def _cells(text: str) -> int:
    if text.isascii():
        return len(text)
    # Wide characters take two cells and combining ones take none: `len` would shift the columns.
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def _escape(char: str) -> str:
    if unicodedata.category(char) == "Zs":  # spaces of other widths
        return " "
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")

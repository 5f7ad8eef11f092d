"""Tables and texts for people, JSON for programs. Knows nothing of checkpoints."""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

_FLEXIBLE_MIN_WIDTH = 12
_GAP = 2  # cells between columns
_PERIODS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its head.
        right: Whether it is aligned right.
        keep: On a narrow terminal columns with the lowest `keep` go first; 0 stays always.
        flexible: Whether it may be cut (with an ellipsis) to fit.
        spare: Whether it goes before a flexible one is cut.
        middle: Whether it is cut in the middle: of a path the end tells most.
    """

    title: str
    right: bool = False
    keep: int = 0
    flexible: bool = False
    spare: bool = False
    middle: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell with a colour of its own."""

    text: str
    style: str


def print_json(value: Any) -> None:
    """One JSON document on standard output, ASCII only."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_line(text: str, *, style: str = "") -> None:
    """One or more lines, as they are: no markup, no wrapping in a pipe."""
    if not sys.stdout.isatty():
        sys.stdout.write(text + "\n")
        return
    from rich.text import Text  # noqa: PLC0415 - see `_console`

    _console().print(Text(text, style=style))


def print_wrapped(text: str, *, indent: int = 0, hanging: int = 2, style: str = "") -> None:
    """One paragraph; in a terminal wrapped between words to its width, in a pipe one line.

    Args:
        text: Without line breaks.
        indent: Cells before the first line.
        hanging: Cells more before the others.
        style: Colour, in a terminal.
    """
    if not sys.stdout.isatty():
        sys.stdout.write(" " * indent + text + "\n")
        return
    import textwrap  # noqa: PLC0415

    wrapped = textwrap.fill(
        text,
        max(_console().width, indent + hanging + 10),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging),
        break_on_hyphens=False,
    )
    print_line(wrapped, style=style)


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]]) -> None:
    """A table that fits the terminal: leaves columns out, then cuts flexible ones.

    In a pipe nothing is left out, cut or coloured.
    """
    if not sys.stdout.isatty():
        _print_plain(columns, rows)
        return
    from rich.table import Table  # noqa: PLC0415 - see `_console`
    from rich.text import Text  # noqa: PLC0415

    console = _console()
    widths = fitting(columns, rows, console.width)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for number, width in widths.items():
        column = columns[number]
        table.add_column(
            Text(column.title),
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
            width=width,
        )
    for row in rows:
        cells = []
        for number, width in widths.items():
            text = _plain(row[number])
            cell = row[number]
            cells.append(
                Text(
                    shortened(text, width) if columns[number].middle else text,
                    style=cell.style if isinstance(cell, Cell) else "",
                )
            )
        table.add_row(*cells)
    console.print(table)
    left_out = [column.title for n, column in enumerate(columns) if n not in widths]
    if left_out:
        console.print(Text(f"(too narrow for {', '.join(left_out)})", style="dim"))


def fitting(
    columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]], width: int
) -> dict[int, int]:
    """Which columns to show in `width` cells, by number, and how wide each."""
    wanted = dict(enumerate(_widths(columns, rows)))
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
    for n, least in list(shown.items()):  # what is left: to flexible ones, the first one first
        shown[n] = least + max(0, min(wanted[n] - least, width - _total(shown)))
    return shown


def shortened(text: str, width: int) -> str:
    """`text` in `width` cells: two thirds of what stays are of its end."""
    if _cells(text) <= width:
        return text
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def visible(text: str) -> str:
    """`text` with everything that could steer or deceive a terminal written as an escape."""
    if text.isprintable():  # also refuses format characters, such as those that turn direction
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def number_text(value: float | None) -> str:
    """A figure with four digits, integers whole; `-` for none."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def ratio_text(raw: int, stored: int) -> str:
    """How many times smaller the stored bytes are."""
    return f"{raw / stored:.2f}x" if raw and stored else "-"


def age_text(seconds: float) -> str:
    """`3700` as `1 h`; clocks that differ make it `now`, never negative."""
    for unit, length in _PERIODS:
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "now"


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """Short form of user metadata: `loss=2.1 lr=0.1`."""
    parts = []
    for key, value in metadata.items():
        short = float(f"{value:.6g}") if isinstance(value, float) else value
        text = value if isinstance(value, str) else json.dumps(short, ensure_ascii=False)
        parts.append(f"{key}={text}")
    return visible(" ".join(parts))


def state_cell(state: str) -> Cell:
    """A state, coloured by whether it is a good one."""
    return Cell(state, {"ok": "green", "found": ""}.get(state, "bold red"))


def _console() -> Console:
    from rich.console import Console  # noqa: PLC0415 - a tenth of the time that `ls` takes

    # Told of NO_COLOR, rich itself leaves bold and dim.
    return Console(color_system=None if os.environ.get("NO_COLOR") else "auto")


def _print_plain(columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]]) -> None:
    widths = _widths(columns, rows)
    lines = [[column.title for column in columns], *([_plain(c) for c in row] for row in rows)]
    for line in lines:
        padded = []
        for text, width, column in zip(line, widths, columns, strict=True):
            space = " " * (width - _cells(text))
            padded.append(space + text if column.right else text + space)
        sys.stdout.write((" " * _GAP).join(padded).rstrip() + "\n")


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]]) -> list[int]:
    return [
        max([_cells(column.title), *(_cells(_plain(row[n])) for row in rows)])
        for n, column in enumerate(columns)
    ]


def _total(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _plain(cell: str | Cell) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def _cells(text: str) -> int:
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def _escape(char: str) -> str:
    if unicodedata.category(char) == "Zs":  # spaces of other widths
        return " "
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")

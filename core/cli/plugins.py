"""`penstock plugins`."""

from __future__ import annotations

from dataclasses import asdict

from penstock.core.cli.render import (
    Cell,
    Column,
    print_json,
    print_line,
    print_table,
    state_cell,
    visible,
)
from penstock.core.registry import default_registry

_COLUMNS = (
    Column("KIND"),
    Column("NAME"),
    Column("STATE"),
    Column("DISTRIBUTION", keep=2),
    Column("VERSION", keep=1),
    Column("TARGET", flexible=True, keep=3),
)


def run(*, check: bool, as_json: bool) -> bool:
    """Print what is installed.

    Args:
        check: Import and validate each plugin, which takes as long as their imports do (torch,
            for one), and make one of each that needs no options; otherwise only look whether the
            module is there.
        as_json: For programs.

    Returns:
        Whether all of them can be used, as far as was looked.
    """
    found = default_registry().listing(load=check)
    if as_json:
        print_json({"plugins": [asdict(info) for info in found]})
        return all(info.error is None for info in found)
    rows: list[list[str | Cell]] = [
        [
            info.kind,
            visible(info.name),
            state_cell(info.state),
            visible(info.distribution),
            visible(info.version),
            visible(info.target),
        ]
        for info in found
    ]
    print_table(_COLUMNS, rows)
    for error in dict.fromkeys(info.error for info in found if info.error):
        print_line("\n" + "\n".join(visible(line) for line in error.splitlines()), style="red")
    return all(info.error is None for info in found)

"""The `penstock plugins` command."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from penstock.core.cli.app import Json, command
from penstock.core.cli.output.render import (
    Cell,
    Column,
    print_json,
    print_line,
    print_table,
    state_cell,
    visible,
)
from penstock.core.plugins.registry import default_registry

_COLUMNS = (
    Column("KIND"),
    Column("NAME"),
    Column("STATE"),
    Column("DISTRIBUTION", keep=2),
    Column("VERSION", keep=1),
    Column("TARGET", flexible=True, keep=3),
)


@command("plugins")
def plugins(
    *,
    check: Annotated[
        bool,
        typer.Option("--check", help="Import and try each; exits with 1 if one is broken."),
    ] = False,
    as_json: Json = False,
) -> bool:
    """List the installed providers, codecs and backends, and why one cannot be used."""
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
    # Several plugins may share one error, such as an import that fails: each is printed once.
    for error in dict.fromkeys(info.error for info in found if info.error):
        print_line("\n" + "\n".join(visible(line) for line in error.splitlines()), style="red")
    return all(info.error is None for info in found)

"""The `penstock plugins` command."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.cli.app import Json, command
from penstock.core.cli.output.render import (
    Column,
    print_json,
    print_line,
    print_table,
    state_cell,
    visible,
)
from penstock.core.plugins.registry import default_registry

if TYPE_CHECKING:
    from penstock.core.plugins.registry import PluginInfo

_COLUMNS: tuple[Column[PluginInfo], ...] = (
    Column("KIND", lambda info: info.kind),
    Column("NAME", lambda info: info.name),
    Column("STATE", lambda info: state_cell(info.state)),
    Column("DISTRIBUTION", lambda info: info.distribution, keep=2),
    Column("VERSION", lambda info: info.version, keep=1),
    Column("TARGET", lambda info: info.target, flexible=True, keep=3),
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
    print_table(_COLUMNS, found)
    # Several plugins may share one error, such as an import that fails: each is printed once.
    for error in dict.fromkeys(info.error for info in found if info.error):
        print_line("\n" + "\n".join(visible(line) for line in error.splitlines()), style="red")
    return all(info.error is None for info in found)

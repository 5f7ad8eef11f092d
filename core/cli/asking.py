"""Asks before something is deleted."""

from __future__ import annotations

import sys

import typer


def ask(question: str, *, yes: bool) -> None:
    """Return if the answer is yes; the question goes to standard error.

    Args:
        question: Without a question mark.
        yes: Whether it was answered beforehand.

    Raises:
        typer.BadParameter: Nobody can be asked.
        typer.Abort: The answer is no.
    """
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        msg = f"nobody can be asked here, so pass --yes, or look with --dry-run: {question}?"
        raise typer.BadParameter(msg)
    typer.confirm(question + "?", abort=True, err=True)

"""The question before something is deleted."""

from __future__ import annotations

import sys

import typer


def ask(question: str, *, yes: bool) -> None:
    """Return if the user answers yes; the question goes to standard error, not into a pipe.

    Args:
        question: The question, without its question mark.
        yes: Whether `--yes` has answered it.

    Raises:
        typer.BadParameter: Standard input is no terminal, so no user can answer.
        typer.Abort: The answer is no.
    """
    if yes:
        return
    # Input from a pipe is no answer: a user decides what is deleted, or `--yes` does.
    if sys.stdin is None or not sys.stdin.isatty():
        msg = f"no user can be asked here, so pass --yes, or look with --dry-run: {question}?"
        raise typer.BadParameter(msg)
    typer.confirm(question + "?", abort=True, err=True)

"""Errors of somebody else's code: where they came from, and how they read in one of ours."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MARK = "penstock: "


@contextmanager
def blaming(whence: Callable[[], str]) -> Iterator[None]:
    """Note on any error of another tree where it came from; the nearest place comes first."""
    try:
        yield
    except PenstockError:
        raise
    except BaseException as error:
        note = _MARK + whence()
        if note not in getattr(error, "__notes__", []):  # raised again, by who keeps it
            error.add_note(note)
        raise


def said(error: BaseException) -> str:
    """Class, text and origin of an error, for the message of one of ours."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    notes: list[str] = getattr(error, "__notes__", [])
    origin = ", ".join(n.removeprefix(_MARK) for n in notes if n.startswith(_MARK))
    return f"{text} ({origin})" if origin else text

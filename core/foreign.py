"""Errors of third-party code: notes on their origin, and their text for our own messages.

Tested in `tests/integration/faults/test_foreign_errors.py`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.core.distributions import installed
from penstock.core.errors import PenstockError, RestoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MARK = "penstock: "
_OURS = __name__.split(".", maxsplit=1)[0]
_GROUPS = tuple(f"penstock.{kind}" for kind in ("providers", "codecs", "backends", "replayers"))


def is_foreign(instance: object) -> bool:
    """Return whether a third party wrote the class of a plugin."""
    return type(instance).__module__.split(".")[0] != _OURS


@contextmanager
def noting_origin(whence: Callable[[], str]) -> Iterator[None]:
    """Note the origin on each error that is not Penstock's; inner blocks add their notes first."""
    try:
        yield
    except PenstockError:
        raise
    except BaseException as error:
        note_origin(error, whence())
        raise


def note_origin(error: BaseException, whence: str) -> None:
    """Note the origin, once, on an error that is not Penstock's."""
    note = _MARK + whence
    if not isinstance(error, PenstockError) and note not in getattr(error, "__notes__", []):
        error.add_note(note)  # only once, though a kept error may be raised again


@contextmanager
def memory_permitting(name: str) -> Iterator[None]:
    """Turn a MemoryError from reading the record `name` into an error that reports no damage.

    Raises:
        RestoreError: There was too little memory.
    """
    try:
        yield
    except MemoryError as error:
        msg = (
            f"{name}: reading it takes more memory than this process can get. This does not mean "
            "damage: read it on a machine with more memory, or read a part of it with include="
        )
        raise RestoreError(msg) from error


def said(error: BaseException) -> str:
    """Return the class, text and origin of an error, for the message of a Penstock error."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    notes: list[str] = getattr(error, "__notes__", [])
    origin = ", ".join(n.removeprefix(_MARK) for n in notes if n.startswith(_MARK))
    return f"{text} ({origin})" if origin else text


def shipped_by(kind: type) -> str:
    """Return `module.Class`, with the name and version of its distribution if known.

    Searches the installed distributions, which takes a few ms, so it is for errors only.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    target = f"{kind.__module__}:{kind.__qualname__}"
    for group in _GROUPS:
        for entry in installed(group):
            if entry.value == target and entry.dist is not None:
                return f"{name} of {entry.dist.name} {entry.dist.version}"
    return name

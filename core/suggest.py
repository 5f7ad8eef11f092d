"""Names in messages: the nearest names to a wrong name, and the first names of a long list.

Tested in `tests/core/config/test_model.py`.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_KNOWN = 30


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return a hint for a message: the nearest candidates, else the first ones, if any."""
    names = sorted(candidates)
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.6)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    if not names:
        return ""
    more = f" and {len(names) - _KNOWN} more" if len(names) > _KNOWN else ""
    return f"; known names: {', '.join(names[:_KNOWN])}{more}"


LISTED = 8


_SHOWN_CHARS = 200


def cut(name: str) -> str:
    """Shorten a path for a message, since a checkpoint's paths may have any length."""
    return name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}..."


def listed(names: Sequence[str]) -> str:
    """Return the first few of `names` as text, with the number of the rest."""
    more = len(names) - LISTED
    shown = ", ".join(cut(name) for name in names[:LISTED])
    return f"{shown} and {more} more" if more > 0 else shown

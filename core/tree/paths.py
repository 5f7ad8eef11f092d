"""The shown form of object paths, its parsing, and the hashing of paths.

The shown form joins the segments by `/`, with `%` as `%25`, `/` as `%2F` and an empty segment as
`%00`. Parsing is the inverse of showing. Code compares tuples, never the shown text.
"""

from __future__ import annotations

import hashlib
import json
import re
from itertools import chain
from operator import methodcaller
from typing import TYPE_CHECKING

import xxhash

from penstock.core.errors import SelectionError
from penstock.core.types import show_path, show_segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.core.types import ObjectPath

__all__ = [
    "parse_path",
    "parse_segment",
    "path_hash",
    "path_hashes",
    "paths_above",
    "show_path",
    "show_paths",
    "show_segment",
    "shown_place",
]

_EMPTY = "%00"
_PLACE_BYTES = 80
_ESCAPE = re.compile("%(25|2F)?")


def parse_segment(text: str) -> str:
    """Return the segment for its shown form: the inverse of `show_segment`.

    Raises:
        SelectionError: `text` is not the shown form of any segment.
    """
    if text == _EMPTY:
        return ""
    if not text:
        msg = "an empty segment in a path is written %00"
        raise SelectionError(msg)
    return _ESCAPE.sub(_unescape, text) if "%" in text else text


def parse_path(text: str) -> ObjectPath:
    """Return the path for its shown form: the inverse of `show_path`.

    Raises:
        SelectionError: `text` is not the shown form of any path.
    """
    if not text:
        return ()
    try:
        return tuple(map(parse_segment, text.split("/")))
    except SelectionError as error:
        msg = f"{text!r} is not a path: {error}"
        raise SelectionError(msg) from None


def show_paths(paths: Sequence[ObjectPath]) -> list[str]:
    """Return the shown form of each path; thousands take a third of the time of single calls."""
    text = "".join(chain.from_iterable(paths))
    if "%" in text or "/" in text or not all(chain.from_iterable(paths)):
        return [*map(show_path, paths)]
    return [*map("/".join, paths)]  # no segment needs an escape


def path_hash(path: ObjectPath) -> int:
    """Return the 64-bit hash (xxh3) of the shown path, by which the index is sorted.

    Lone surrogates, which a Python string may hold, are encoded as UTF-8 would encode them.
    """
    return xxhash.xxh3_64_intdigest(show_path(path).encode("utf-8", "surrogatepass"))


def path_hashes(paths: Sequence[ObjectPath]) -> list[int]:
    """Return the `path_hash` of each path; thousands take a third of the time of single calls."""
    encoded = map(methodcaller("encode", "utf-8", "surrogatepass"), show_paths(paths))
    return [*map(xxhash.xxh3_64_intdigest, encoded)]


def paths_above(paths: Iterable[ObjectPath]) -> set[ObjectPath]:
    """Return all ancestors of `paths`, the root included."""
    above = {path[:-1] for path in paths}
    for path in list(above):
        parent = path[:-1]
        while parent and parent not in above:  # a known ancestor's ancestors are known, too
            above.add(parent)
            parent = parent[:-1]
    return above


def _unescape(match: re.Match[str]) -> str:
    code = match.group(1)
    if code is None:
        msg = "a % in a segment is written %25 (and a / is written %2F)"
        raise SelectionError(msg)
    return "%" if code == "25" else "/"


def shown_place(path: ObjectPath) -> str:
    """Return the shown path of a `PerRank`, shortened for the posts of ranks.

    The JSON of the result is so short that a post has room for all such paths.
    """
    shown = show_path(path)
    if _json_bytes(shown) <= _PLACE_BYTES:
        return shown
    digest = hashlib.blake2b(shown.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    more = f"... ({digest})"
    kept = shown[: _PLACE_BYTES - len(more)]
    while _json_bytes(kept) > _PLACE_BYTES - len(more):
        kept = kept[:-1]
    return f"{kept}{more}"


def _json_bytes(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass")) - 2

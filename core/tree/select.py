"""Selects objects by patterns (`Selection`), and renames stored paths (`Rename`).

Patterns are written over shown paths (see `paths`) and compared segment by segment:

* `*` matches any characters within a segment, `?` one character, `[ab]` or `[a-z]` one of a set,
  `[!..]` one that is not in the set;
* `**` as a whole segment matches any number of segments, including zero;
* a backslash makes the next character literal; `%25`, `%2F` and `%00` mean what they mean in shown
  paths;
* without wildcards the pattern is a *prefix*: it matches the object at that path, everything below
  it, and every path that continues after a `.` (`model/encoder` matches `model/encoder.0.weight`);
* with wildcards it must match the whole path of an object (end it with `/**` for a subtree).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.core.errors import SelectionError
from penstock.core.tree.paths import parse_path, show_path
from penstock.core.tree.patterns import Subtree, compile_all

if TYPE_CHECKING:
    from penstock.core.tree.patterns import Glob, Prefix, SegmentTest
    from penstock.core.types import ObjectPath

Patterns: TypeAlias = "str | Iterable[str] | None"
RenameSpec: TypeAlias = "Mapping[str, str] | Callable[[str], str] | None"

_NEAREST = 3


class Selection:
    """Selects objects by `include` and `exclude`, which are compiled once.

    Args:
        include: A pattern or several; None selects everything.
        exclude: A pattern or several; matched objects are left out.

    Raises:
        SelectionError: A pattern is malformed.
    """

    def __init__(self, include: Patterns = None, exclude: Patterns = None) -> None:
        self._include: Sequence[Prefix | Glob] | None
        self._exclude: Sequence[Prefix | Glob]
        self._include = None if include is None else compile_all("include", include)
        self._exclude = () if exclude is None else compile_all("exclude", exclude)
        self._needles = [[_json_of(word) for word in p.words()] for p in self.patterns()]

    @classmethod
    def subtree(cls, path: ObjectPath) -> Selection:
        """Return a selection of exactly `path` and its subtree.

        Unlike a pattern, it does not match paths that continue after a `.`.
        """
        return cls.subtrees([path])

    @classmethod
    def subtrees(cls, paths: Iterable[ObjectPath]) -> Selection:
        """Return a selection of exactly these paths and their subtrees."""
        selection = cls()
        selection._include = tuple(Subtree(show_path(path), path) for path in paths)
        selection._needles = [[_json_of(word) for word in p.path] for p in selection._include]
        return selection

    @property
    def everything(self) -> bool:
        """Whether every path is selected."""
        return self._include is None and not self._exclude

    @property
    def shown(self) -> str:
        """The patterns as text: "include=['model'], exclude=['**/bias']" or "of everything"."""
        options = (("include", self._include), ("exclude", self._exclude or None))
        patterns = [
            f"{name}={[p.text for p in some]}" for name, some in options if some is not None
        ]
        return ", ".join(patterns) or "of everything"

    def selects(self, path: ObjectPath) -> bool:
        """Return whether the object at `path` is selected."""
        if self.everything:
            return True
        if self._include is not None and not any(p.matches(path) for p in self._include):
            return False
        return not any(p.matches(path) for p in self._exclude)

    # Paths that no pattern touches need no visit. The patterns of `exclude` count, too, since each
    # has to match something.

    @property
    def narrows(self) -> bool:
        """Whether some paths are outside all patterns."""
        return self._include is not None and self.below(()) is not True

    def touches(self, path: ObjectPath) -> bool:
        """Return whether a pattern matches `path`, or something above it."""
        return any(p.touches(path) for p in self.patterns())

    def below(self, path: ObjectPath) -> SegmentTest | bool:
        """Return which segments right below `path` lead to touched paths: all, none, or a test."""
        if self._include is None:
            return True
        tests: list[SegmentTest] = []
        for pattern in self.patterns():
            test = pattern.below(path)
            if test is True:
                return True
            if test is not False:
                tests.append(test)
        if len(tests) > 1:
            return lambda segment: any(test(segment) for test in tests)
        return tests[0] if tests else False

    def occurs_in(self, text: bytes) -> bool:
        """Return whether the JSON text may hold a touched path; False is certain, True is not."""
        if b"\\" in text:  # the same string can be escaped in many ways
            return True
        return any(all(needle in text for needle in needles) for needles in self._needles)

    def unused(self, paths: Iterable[ObjectPath]) -> Sequence[Prefix | Glob]:
        """Return the patterns that match none of `paths`."""
        unused = self.patterns()
        for path in paths:
            if not unused:
                break
            unused = [p for p in unused if not p.matches(path)]
        return unused

    def check_used(self, paths: Iterable[ObjectPath]) -> None:
        """Check that every pattern matches at least one of `paths`.

        Raises:
            SelectionError: Some patterns match nothing; the message has the nearest names.
        """
        known = list(paths)
        if unused := self.unused(known):
            raise SelectionError("; ".join(nothing_for(p, known) for p in unused))

    def patterns(self) -> list[Prefix | Glob]:
        """Return all patterns, those of `include` first."""
        return [*(self._include or ()), *self._exclude]


class Rename:
    """Maps stored paths to paths of the template, for renamed keys.

    A mapping replaces a prefix of the shown path by another prefix. A prefix ends where a segment
    ends or at a `.` (`{"model/enc": "model/encoder"}` moves `model/enc.0.weight` too). A prefix
    with a `/` or `.` at its end is replaced literally, so `{"model/module.": "model/"}` strips a
    wrapper's name. The longest prefix wins. A callable gets each shown path and returns the new
    path.

    Raises:
        SelectionError: `spec` is neither a callable nor a mapping of strings to strings.
    """

    def __init__(self, spec: RenameSpec = None) -> None:
        self._function = spec if callable(spec) else None
        texts: list[tuple[str, str]] = []
        pairs: Mapping[Any, object] = spec if isinstance(spec, Mapping) else {}
        if spec is not None and not isinstance(spec, Mapping) and self._function is None:
            msg = f"rename must be a mapping or a callable, not {type(spec).__name__}"
            raise SelectionError(msg)
        for old, new in pairs.items():
            if not isinstance(old, str) or not isinstance(new, str):
                msg = f"rename must map strings to strings, not {old!r} to {new!r}"
                raise SelectionError(msg)
            texts.append((old, new))
        self._pairs = sorted(texts, key=lambda pair: -len(pair[0]))

    @property
    def identity(self) -> bool:
        """Whether no path changes."""
        return self._function is None and not self._pairs

    def __call__(self, path: ObjectPath) -> ObjectPath:
        """Return the path of the template for a stored `path`.

        Raises:
            SelectionError: The new text is not a path.
        """
        if self._function is None and not self._pairs:
            return path
        shown = show_path(path)
        if self._function is not None:
            renamed: object = self._function(shown)
            if not isinstance(renamed, str):
                msg = f"rename returned {renamed!r} for {shown!r}: it must return a string"
                raise SelectionError(msg)
            new = renamed
        else:
            new = self._replace(shown)
        return path if new == shown else parse_path(new)

    def apply(self, paths: Iterable[ObjectPath]) -> dict[ObjectPath, ObjectPath]:
        """Return the template's path for each stored path.

        Raises:
            SelectionError: Two objects would get one path, or an entry of the mapping matches
                nothing; the message has the nearest names.
        """
        known = list(paths)
        if self.identity:
            return {path: path for path in known}
        moved = {path: self(path) for path in known}
        sources: dict[ObjectPath, ObjectPath] = {}
        for old, new in moved.items():
            first = sources.setdefault(new, old)
            if first != old:
                msg = (
                    f"rename maps both {show_path(first)!r} and {show_path(old)!r} "
                    f"to {show_path(new)!r}: map them to different paths"
                )
                raise SelectionError(msg)
        shown = [show_path(path) for path in known]
        for prefix, _ in self._pairs:
            if not any(_has_prefix(text, prefix) for text in shown):
                msg = f"rename of {prefix!r} matches nothing{_hint(prefix, shown)}"
                raise SelectionError(msg)
        return moved

    def _replace(self, shown: str) -> str:
        for old, new in self._pairs:
            if _has_prefix(shown, old):
                return new + shown[len(old) :]
        return shown


def _json_of(word: str) -> bytes:
    """Return the beginning of the JSON of a segment that begins with `word`."""
    return json.dumps(word, ensure_ascii=False)[:-1].encode("utf-8", "surrogatepass")


def _has_prefix(shown: str, prefix: str) -> bool:
    if not shown.startswith(prefix):
        return False
    if not prefix or prefix[-1] in "/.":
        return True
    return len(shown) == len(prefix) or shown[len(prefix)] in "/."


def nothing_for(pattern: Prefix | Glob, known: Sequence[ObjectPath]) -> str:
    """Return the message for a pattern that matches none of `known`, with the nearest names."""
    whole = next((path for path in known if pattern.is_within(path)), None)
    if whole is not None:
        return (
            f"pattern {pattern.text!r} matches nothing: {show_path(whole)} is stored as one "
            f"object, so use {show_path(whole)!r}"
        )
    shown = [show_path(path) for path in known]
    return f"pattern {pattern.text!r} matches nothing{_hint(pattern.text, shown)}"


def _hint(text: str, shown: list[str]) -> str:
    """Return the nearest paths, or prefixes of paths, since users mistype both."""
    text = text.removesuffix("/**").removesuffix("/*") or text
    depth = text.count("/") + 1
    names: dict[str, None] = {}
    for path in shown:
        names["/".join(path.split("/")[:depth])] = None
        names[path] = None
    near = difflib.get_close_matches(text, list(names)[:20_000], _NEAREST, 0.5)
    if not near:
        near = list(dict.fromkeys(path.split("/")[0] for path in shown))[:_NEAREST]
    return f"; nearest: {', '.join(near)}" if near else "; there is nothing to select"

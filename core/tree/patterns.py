"""Compiled patterns over object paths; `select` describes their syntax.

Tested in `tests/core/tree/test_select.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from penstock.core.errors import SelectionError
from penstock.core.tree.paths import parse_segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.core.types import ObjectPath

_WILDCARDS = frozenset("*?[")

SegmentTest: TypeAlias = "Callable[[str], bool]"
"""Returns whether a segment leads to a path that the pattern matches."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A pattern without wildcards: matches a path, and its continuations after a `/` or `.`."""

    text: str
    path: ObjectPath

    def matches(self, path: ObjectPath) -> bool:
        """Return whether the pattern matches the object at `path`."""
        depth = len(self.path) - 1
        if len(path) <= depth or path[:depth] != self.path[:depth]:
            return False
        last, mine = path[depth], self.path[depth]
        return last == mine or (bool(mine) and last.startswith(mine + "."))

    def is_within(self, path: ObjectPath) -> bool:
        """Return whether the path of the pattern is below `path`."""
        return len(path) < len(self.path) and self.path[: len(path)] == path

    def touches(self, path: ObjectPath) -> bool:
        """Return whether the pattern matches `path`, or a path above it."""
        return self.matches(path)

    def below(self, path: ObjectPath) -> SegmentTest | bool:
        """Return which segments right below `path` lead to touched paths: all, none, or a test."""
        depth, last = len(path), len(self.path) - 1
        if depth > last:
            return self.matches(path)
        if path != self.path[:depth]:
            return False
        mine = self.path[depth]
        if depth < last or not mine:
            return mine.__eq__
        more = mine + "."
        return lambda segment: segment == mine or segment.startswith(more)

    def words(self) -> Sequence[str]:
        """Return the words that every matching path contains, each at the start of a segment."""
        return self.path


@dataclass(frozen=True, slots=True)
class Subtree(Prefix):
    """A prefix that ends only at a `/`: matches one path and everything below it."""

    def matches(self, path: ObjectPath) -> bool:
        """Return whether `path` is the root of the subtree, or below the root."""
        return path[: len(self.path)] == self.path

    def below(self, path: ObjectPath) -> SegmentTest | bool:
        """Return which segments lead to touched paths, as `Prefix.below` does."""
        depth = len(path)
        if depth >= len(self.path):
            return self.matches(path)
        return self.path[depth].__eq__ if path == self.path[:depth] else False


@dataclass(frozen=True, slots=True)
class Glob:
    """A pattern with wildcards; a segment of None is `**`."""

    text: str
    segments: tuple[re.Pattern[str] | None, ...]
    literals: tuple[str, ...] = ()

    def matches(self, path: ObjectPath) -> bool:
        """Return whether the pattern matches the object at `path`."""
        reached: set[int] = set()
        for reached in self._steps(path):
            if not reached:
                return False
        return len(self.segments) in reached

    def is_within(self, path: ObjectPath) -> bool:
        """Return whether `path` matches without wildcards, and the pattern continues below it."""
        above = self.segments[: len(path)]
        return len(path) < len(self.segments) and all(
            segment is not None and segment.pattern == re.escape(part)
            for segment, part in zip(above, path, strict=True)
        )

    def touches(self, path: ObjectPath) -> bool:
        """Return whether the pattern matches `path`, or a path above it."""
        return any(len(self.segments) in reached for reached in self._steps(path))

    def below(self, path: ObjectPath) -> SegmentTest | bool:
        """Return which segments right below `path` lead to touched paths: all, none, or a test."""
        reached: set[int] = set()
        for reached in self._steps(path):
            if len(self.segments) in reached:
                return True
        tests = [self.segments[at] for at in reached]
        if not tests or None in tests:
            return bool(tests)
        return lambda segment: any(t is not None and t.fullmatch(segment) for t in tests)

    def words(self) -> Sequence[str]:
        """Return the words that every matching path contains, each at the start of a segment."""
        return self.literals

    def _steps(self, path: ObjectPath) -> Iterator[set[int]]:
        """Yield the positions in `segments` that are reachable before and after each segment."""
        reached = self._through_stars({0})
        yield reached
        for part in path:
            after: set[int] = set()
            for at in reached:
                if at == len(self.segments):
                    continue
                segment = self.segments[at]
                if segment is None:
                    after.add(at)
                elif segment.fullmatch(part):
                    after.add(at + 1)
            reached = self._through_stars(after)
            yield reached

    def _through_stars(self, reached: set[int]) -> set[int]:
        # `**` also matches zero segments, so the position after it is reached, too.
        for at in sorted(reached):
            here = at
            while here < len(self.segments) and self.segments[here] is None:
                here += 1
                reached.add(here)
        return reached


_PATTERN_PIECE = re.compile(r"\\.|\[!?.[^\]]*\]|.", re.DOTALL)
_NAMES_NOTHING = frozenset("*?/._-")


def is_catch_all(text: str) -> bool:
    """Return whether a pattern has only wildcards, sets and separators, and no word."""
    # A set is not a name: `[a-z]*` matches nearly every path, and so does `*.*` in a module.
    pieces = _PATTERN_PIECE.findall(text)
    return all(piece in _NAMES_NOTHING or piece[0] == "[" for piece in pieces)


def compile_all(option: str, patterns: str | Iterable[str]) -> tuple[Prefix | Glob, ...]:
    """Compile the patterns of `option`; errors begin with the option's name, unless it is empty.

    Raises:
        SelectionError: A pattern is malformed.
    """
    texts: list[object] = [patterns] if isinstance(patterns, str) else list(patterns)
    for text in texts:
        if not isinstance(text, str):
            msg = f"{option} takes patterns as strings, not {text!r}".lstrip()
            raise SelectionError(msg)
    return tuple(_compile(option, str(text)) for text in texts)


def _compile(option: str, text: str) -> Prefix | Glob:
    try:
        segments = [_compile_segment(part) for part in _split(text)]
    except SelectionError as error:
        msg = f"{option} pattern {text!r}: {error}".lstrip()
        raise SelectionError(msg) from None
    literal = [segment for segment in segments if isinstance(segment, str)]
    if len(literal) == len(segments):
        return Prefix(text, tuple(literal))
    return Glob(
        text,
        tuple(re.compile(re.escape(s), re.DOTALL) if isinstance(s, str) else s for s in segments),
        tuple(literal),
    )


def _split(text: str) -> list[str]:
    """Cut the text at every `/` that no backslash escapes; ignore a `/` at the end."""
    segments = [""]
    for piece in re.findall(r"\\.|[^\\]|\\$", text, re.DOTALL):
        if piece == "/":
            segments.append("")
        else:
            segments[-1] += piece
    if len(segments) > 1 and not segments[-1]:
        segments.pop()
    if not all(segments):
        msg = "it has an empty segment (an empty key is written %00)"
        raise SelectionError(msg)
    return segments


def _compile_segment(part: str) -> str | re.Pattern[str] | None:
    """Return a segment as plain text or compiled glob; None for `**`."""
    if part == "**":
        return None
    if not _WILDCARDS.intersection(part) and "\\" not in part:
        return parse_segment(part)
    literal: list[str] = []
    pattern: list[str] = []
    wild = False
    at = 0
    while at < len(part):
        char = part[at]
        at += 1
        if char in _WILDCARDS:
            wild = True
            source, at = _wildcard(part, char, at)
            pattern.append(source)
            continue
        if char == "\\":
            if at == len(part):
                msg = "it ends in a lone backslash"
                raise SelectionError(msg)
            char = part[at]
            at += 1
        elif char == "%":
            char = parse_segment(part[at - 1 : at + 2])
            at += 2
            if not char:
                msg = "%00 means an empty segment, so it must be the whole segment"
                raise SelectionError(msg)
        literal.append(char)
        pattern.append(re.escape(char))
    return re.compile("".join(pattern), re.DOTALL) if wild else "".join(literal)


def _wildcard(part: str, char: str, at: int) -> tuple[str, int]:
    if char == "*":
        return ".*", at
    if char == "?":
        return ".", at
    negated = part.startswith("!", at)
    begin = at + negated
    end = part.find("]", begin + 1)  # a `]` that comes first is a member of the set
    if end < 0:
        msg = "it has a [ without its ] (write \\[ for the character itself)"
        raise SelectionError(msg)
    body = part[begin:end].replace("%2F", "/").replace("%25", "%")
    # Inside a set, these characters are operators, or may become operators in a later `re`.
    body = re.sub(r"([\\\[\]^&~|])", r"\\\1", body)
    source = f"[{'^' if negated else ''}{body}]"
    try:
        re.compile(source)
    except re.error as error:
        msg = f"its set [{part[at:end]}] is malformed: {error}"
        raise SelectionError(msg) from None
    return source, end + 1

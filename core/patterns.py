"""Patterns over object paths: `core.select` says what they mean."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.errors import SelectionError
from penstock.core.paths import parse_segment

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.types import ObjectPath

_WILDCARDS = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Prefix:
    """A pattern without wildcards."""

    text: str
    path: ObjectPath

    def matches(self, path: ObjectPath) -> bool:
        """Whether it takes the object at `path`."""
        depth = len(self.path) - 1
        if len(path) <= depth or path[:depth] != self.path[:depth]:
            return False
        last, mine = path[depth], self.path[depth]
        return last == mine or (bool(mine) and last.startswith(mine + "."))

    def is_within(self, path: ObjectPath) -> bool:
        """Whether it would take something below `path`."""
        return len(path) < len(self.path) and self.path[: len(path)] == path


@dataclass(frozen=True, slots=True)
class Glob:
    """A pattern with wildcards; a segment of None is `**`."""

    text: str
    segments: tuple[re.Pattern[str] | None, ...]

    def matches(self, path: ObjectPath) -> bool:
        """Whether it takes the object at `path`."""
        # Positions in `segments` that are reachable after each segment of the path.
        reached = self._through_stars({0})
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
            if not after:
                return False
            reached = self._through_stars(after)
        return len(self.segments) in reached

    def is_within(self, path: ObjectPath) -> bool:
        """Whether it names `path` without wildcards, and would take something below that."""
        above = self.segments[: len(path)]
        return len(path) < len(self.segments) and all(
            segment is not None and segment.pattern == re.escape(part)
            for segment, part in zip(above, path, strict=True)
        )

    def _through_stars(self, reached: set[int]) -> set[int]:
        for at in sorted(reached):
            here = at
            while here < len(self.segments) and self.segments[here] is None:
                here += 1
                reached.add(here)
        return reached


def compile_all(option: str, patterns: str | Iterable[str]) -> tuple[Prefix | Glob, ...]:
    """Compile what was passed as `option`; complaints begin with that, unless it is empty.

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
    )


def _split(text: str) -> list[str]:
    """Cut at every `/` that no backslash escapes; one at the very end is taken as decoration."""
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
    """A plain string, a compiled glob, or None for `**`."""
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
                msg = "%00 stands for an empty segment, and only alone"
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
    end = part.find("]", begin + 1)  # a `]` in first place belongs to the set
    if end < 0:
        msg = "it has a [ without its ] (write \\[ for the character itself)"
        raise SelectionError(msg)
    body = part[begin:end].replace("%2F", "/").replace("%25", "%")
    body = re.sub(r"([\\\[\]^&~|])", r"\\\1", body)
    source = f"[{'^' if negated else ''}{body}]"
    try:
        re.compile(source)
    except re.error as error:
        msg = f"its set [{part[at:end]}] is malformed: {error}"
        raise SelectionError(msg) from None
    return source, end + 1

"""Which objects to take (`Selection`), and where moved ones belong (`Rename`).

Patterns are written over shown paths (`core.paths`) and compared segment by segment:

* `*` any characters within a segment, `?` one, `[ab]` `[a-z]` one of a set, `[!..]` one not in it;
* `**` as a whole segment: any number of segments, zero included;
* a backslash takes the next character as it is; `%25`, `%2F` and `%00` as in shown paths;
* without wildcards the pattern is a *prefix*: it takes the object of that path, everything below
  it, and what goes on after a `.` (`model/encoder` takes `model/encoder.0.weight`);
* with wildcards it must match the whole path of an object (end it with `/**` for a subtree).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from penstock.core.errors import SelectionError
from penstock.core.paths import parse_path, parse_segment, show_path

if TYPE_CHECKING:
    from penstock.core.types import ObjectPath

Patterns: TypeAlias = "None | str | Iterable[str]"
RenameSpec: TypeAlias = "None | Mapping[str, str] | Callable[[str], str]"

_NEAREST = 3
_WILDCARDS = frozenset("*?[")


class Selection:
    """`include` and `exclude`, compiled once.

    Args:
        include: A pattern or several; None takes everything.
        exclude: A pattern or several, taken away from what `include` takes.

    Raises:
        SelectionError: A pattern is malformed.
    """

    def __init__(self, include: Patterns = None, exclude: Patterns = None) -> None:
        self._include = None if include is None else _compile_all("include", include)
        self._exclude = () if exclude is None else _compile_all("exclude", exclude)

    @property
    def everything(self) -> bool:
        """Whether every path is selected."""
        return self._include is None and not self._exclude

    def selects(self, path: ObjectPath) -> bool:
        """Whether the object at `path` is selected."""
        if self._include is not None and not any(p.matches(path) for p in self._include):
            return False
        return not any(p.matches(path) for p in self._exclude)

    def check_used(self, paths: Iterable[ObjectPath]) -> None:
        """Make sure that every pattern matches at least one of `paths`.

        Raises:
            SelectionError: Some match nothing; the message has the nearest names.
        """
        unused = [*(self._include or ()), *self._exclude]
        known = list(paths)
        for path in known:
            if not unused:
                return
            unused = [p for p in unused if not p.matches(path)]
        if unused:
            raise SelectionError("; ".join(_nothing(p, known) for p in unused))


class Rename:
    """Maps stored paths to the template's, for keys that moved.

    A mapping goes from prefix to prefix of the shown path. A prefix ends where a segment ends or
    at a `.` (`{"model/enc": "model/encoder"}` moves `model/enc.0.weight` too); one that is
    written with a `/` or `.` at its end is replaced as it stands, so
    `{"model/module.": "model/"}` strips a wrapper's name. The longest prefix wins. A callable
    gets each shown path and returns the new one.

    Raises:
        SelectionError: The mapping holds something other than strings.
    """

    def __init__(self, spec: RenameSpec = None) -> None:
        self._function = spec if callable(spec) else None
        pairs = dict(spec) if isinstance(spec, Mapping) else {}
        for pair in pairs.items():
            if not all(isinstance(text, str) for text in pair):
                msg = f"rename maps strings to strings, not {pair[0]!r} to {pair[1]!r}"
                raise SelectionError(msg)
        if spec is not None and not callable(spec) and not isinstance(spec, Mapping):
            msg = f"rename is a mapping or a callable, not {type(spec).__name__}"
            raise SelectionError(msg)
        self._pairs = sorted(pairs.items(), key=lambda pair: -len(pair[0]))

    @property
    def identity(self) -> bool:
        """Whether no path changes."""
        return self._function is None and not self._pairs

    def __call__(self, path: ObjectPath) -> ObjectPath:
        """Where the stored `path` belongs in the template.

        Raises:
            SelectionError: The new text is not a path.
        """
        if self._function is None and not self._pairs:
            return path
        shown = show_path(path)
        if self._function is not None:
            new = self._function(shown)
            if not isinstance(new, str):
                msg = f"rename returned {new!r} for {shown!r}: it must return a string"
                raise SelectionError(msg)
        else:
            new = self._replace(shown)
        return path if new == shown else parse_path(new)

    def apply(self, paths: Iterable[ObjectPath]) -> dict[ObjectPath, ObjectPath]:
        """New paths by stored path, for all objects of a checkpoint at once.

        Raises:
            SelectionError: Two objects would get one path, or an entry of the mapping matches
                nothing; the message has the nearest names.
        """
        known = list(paths)
        moved = {path: self(path) for path in known}
        taken: dict[ObjectPath, ObjectPath] = {}
        for old, new in moved.items():
            other = taken.setdefault(new, old)
            if other != old:
                msg = (
                    f"rename maps both {show_path(other)!r} and {show_path(old)!r} "
                    f"to {show_path(new)!r}"
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


@dataclass(frozen=True, slots=True)
class _Prefix:
    text: str
    path: ObjectPath

    def matches(self, path: ObjectPath) -> bool:
        depth = len(self.path) - 1
        if len(path) <= depth or path[:depth] != self.path[:depth]:
            return False
        last, mine = path[depth], self.path[depth]
        return last == mine or (bool(mine) and last.startswith(mine + "."))


@dataclass(frozen=True, slots=True)
class _Glob:
    text: str
    segments: tuple[re.Pattern[str] | None, ...]  # None is `**`

    def matches(self, path: ObjectPath) -> bool:
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

    def _through_stars(self, reached: set[int]) -> set[int]:
        for at in sorted(reached):
            here = at
            while here < len(self.segments) and self.segments[here] is None:
                here += 1
                reached.add(here)
        return reached


def _compile_all(option: str, patterns: str | Iterable[str]) -> tuple[_Prefix | _Glob, ...]:
    texts = [patterns] if isinstance(patterns, str) else list(patterns)
    for text in texts:
        if not isinstance(text, str):
            msg = f"{option} takes patterns as strings, not {text!r}"
            raise SelectionError(msg)
    return tuple(_compile(option, text) for text in texts)


def _compile(option: str, text: str) -> _Prefix | _Glob:
    try:
        segments = [_compile_segment(part) for part in _split(text)]
    except SelectionError as error:
        msg = f"{option} pattern {text!r}: {error}"
        raise SelectionError(msg) from None
    literal = [segment for segment in segments if isinstance(segment, str)]
    if len(literal) == len(segments):
        return _Prefix(text, tuple(literal))
    return _Glob(
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


def _has_prefix(shown: str, prefix: str) -> bool:
    if not shown.startswith(prefix):
        return False
    if not prefix or prefix[-1] in "/.":
        return True
    return len(shown) == len(prefix) or shown[len(prefix)] in "/."


def _nothing(pattern: _Prefix | _Glob, known: list[ObjectPath]) -> str:
    shown = [show_path(path) for path in known]
    return f"pattern {pattern.text!r} matches nothing{_hint(pattern.text, shown)}"


def _hint(text: str, shown: list[str]) -> str:
    """The nearest paths or prefixes of paths, which is what people mistype."""
    depth = text.count("/") + 1
    names: dict[str, None] = {}
    for path in shown:
        names["/".join(path.split("/")[:depth])] = None
        names[path] = None
    near = difflib.get_close_matches(text, list(names)[:20_000], _NEAREST, 0.5)
    if not near:
        near = list(dict.fromkeys(path.split("/")[0] for path in shown))[:_NEAREST]
    return f"; nearest: {', '.join(near)}" if near else "; there is nothing to select"

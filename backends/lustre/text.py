"""The output of `lfs`, parsed line by line: `getstripe` (YAML and plain) and `df`.

The forms are those of `lustre/utils/liblustreapi.c` and `lustre/utils/lfs.c` as of v2_17_57, and
the older ones shown in the manual pages `lfs-getstripe(1)` and `lfs-df(1)`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Final, NoReturn

from penstock.backends.lustre.layout import ALL_STRIPES, MAX_LAYOUT_BYTES, Component, Layout
from penstock.backends.lustre.policy import Ost
from penstock.core.errors import FormatError

_FIELD = re.compile(
    r"(?:\b|_)(stripe_count|stripe_size|extension_size|pattern|stripe_offset|pool"
    r"|lcme_id|lcme_mirror_id|lcme_flags|lcme_extent\.e_start|lcme_extent\.e_end"
    r"|lcm_mirror_count|foreign_size|lfm_length):[ \t]*([^\s]+)"
)
_OBJECT = re.compile(r"l_ost_idx:\s*(0x[0-9a-fA-F]{1,8}|\d{1,10})\b")
_PLAIN_OBJECT = re.compile(r"\s*(0x[0-9a-fA-F]{1,8}|\d{1,10})\s+\d+\s+(?:0x)?[0-9a-fA-F]+\s+\S+")
_NUMBER = re.compile(r"-?(0x[0-9a-fA-F]{1,16}|\d{1,20})")
_OST_ROW = re.compile(
    r"(?P<uuid>\S*OST[0-9a-fA-F]{4,}\S*)\s+(?P<total>\d{1,20})\s+\d{1,20}\s+(?P<avail>\d{1,20})\s+"
    r"\d{1,3}%\s+\S.*\[OST:(?P<index>\d{1,10})\]\s*(?P<flags>[A-Za-z]*)"
)
_MAX_LINES: Final = 1 << 17
_KIB: Final = 1024


def parse_getstripe(text: str, /) -> Layout:
    """Parse the layout that `lfs getstripe [-y]` printed of one file or (`-d`) of one folder.

    Raises:
        FormatError: The text shows no layout, or an impossible one.
    """
    if len(text) > 64 * MAX_LAYOUT_BYTES:
        _refuse(text)
    draft = _LayoutDraft()
    for line in text.splitlines()[:_MAX_LINES]:
        draft.take(line)
    return draft.layout(text)


def parse_df(text: str, /) -> tuple[Ost, ...]:
    """Parse the OSTs that `lfs df` printed, by index; inactive and unreachable ones are left out.

    Raises:
        FormatError: The text shows no OST.
    """
    found: dict[int, Ost] = {}
    for line in text.splitlines()[:_MAX_LINES]:
        row = _OST_ROW.fullmatch(line.strip())
        if row is not None:
            ost = Ost(int(row["index"]), int(row["avail"]) * _KIB, row["flags"])
            found[ost.index] = ost
    if not found:
        msg = f"lfs df shows no OST: {text.strip()[:200]!r}"
        raise FormatError(msg, ["lfs df"])
    return tuple(found[index] for index in sorted(found))


@dataclass(slots=True)
class _LayoutDraft:
    components: list[Component] = field(default_factory=list)
    mirrors: int = 1
    foreign: bool = False
    seen: bool = False
    in_table: bool = False

    def take(self, line: str) -> None:
        self.in_table = "obdidx" in line or (self.in_table and bool(line.strip()))
        for key, value in _FIELD.findall(line):
            self._set(key, value)
        for index in _OBJECT.findall(line):
            self._add(int(index, 0))
        row = _PLAIN_OBJECT.match(line) if self.in_table else None
        if row is not None:
            self._add(int(row[1], 0))

    def layout(self, text: str) -> Layout:
        if self.foreign:
            return Layout((), foreign=True)
        if not self.seen:
            _refuse(text)
        for c in self.components:
            ends_early = c.stop is not None and c.start >= c.stop
            if ends_early or (c.osts and (c.stripe_bytes <= 0 or len(c.osts) != c.stripe_count)):
                _refuse(text)
        return Layout(tuple(self.components), mirrors=self.mirrors)

    def _set(self, key: str, value: str) -> None:
        if key == "lcme_id":
            self.components.append(Component())
        elif key == "lcm_mirror_count":
            self.mirrors = max(1, _number(value))
        elif key in {"foreign_size", "lfm_length"}:
            self.foreign = True
        else:
            self._set_component(key, value)

    def _set_component(self, key: str, value: str) -> None:
        last = self._last()
        if key == "stripe_count":
            self.seen = True
            count = _number(value)
            last = replace(last, stripe_count=ALL_STRIPES if count < 0 else count)
        elif key == "stripe_size":
            last = replace(last, stripe_bytes=_number(value))
        elif key == "extension_size":
            last = replace(last, stripe_bytes=_number(value), extension=True)
        elif key == "pattern":
            last = replace(last, on_mdt="mdt" in value, released="released" in value)
            self.foreign = self.foreign or "foreign" in value
        elif key == "pool":
            last = replace(last, pool=value[:15])
        elif key == "lcme_mirror_id":
            last = replace(last, mirror=_number(value))
        elif key == "lcme_flags":
            flags = value.split(",")
            last = replace(last, stale="stale" in flags, parity="parity" in flags)
            last = replace(last, extension=last.extension or "extension" in flags)
        elif key == "lcme_extent.e_start":
            last = replace(last, start=_number(value))
        elif key == "lcme_extent.e_end":
            last = replace(last, stop=None if value.upper() == "EOF" else _number(value))
        self.components[-1] = last

    def _add(self, ost: int) -> None:
        last = self._last()
        self.components[-1] = replace(last, osts=(*last.osts, ost))

    def _last(self) -> Component:
        if not self.components:
            self.components.append(Component())
        return self.components[-1]


def _number(value: str) -> int:
    if not _NUMBER.fullmatch(value):
        _refuse(value)
    return int(value, 0) if "x" in value else int(value)


def _refuse(text: str) -> NoReturn:
    msg = f"lfs getstripe shows no layout that is understood: {text.strip()[:200]!r}"
    raise FormatError(msg, ["lfs getstripe"])

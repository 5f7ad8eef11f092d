"""Sizes, counts and durations as people read and write them, in the same form everywhere."""

from __future__ import annotations

import re

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 object`, `2 objects`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size_text(size: float) -> str:
    """Return a size as people read it: `1536` as `1.5 KiB`."""
    amount, unit = float(size), 0
    # 1023.95 would be shown as 1024.0
    while amount >= 1023.95 and unit < len(_UNITS) - 1:  # noqa: PLR2004
        amount, unit = amount / 1024, unit + 1
    return f"{round(size)} B" if unit == 0 else f"{amount:.1f} {_UNITS[unit]}"


SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}
"""The seconds of each unit of time; a number alone is seconds."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def seconds_of(text: str) -> float:
    """Parse a time such as `90s`, `30min`, `24h` or `7d`, and return it in seconds.

    Raises:
        ValueError: `text` is not such a time.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or match[2] not in SECONDS:
        msg = f"{text!r} is not a time such as 90s, 30min, 24h or 7d"
        raise ValueError(msg)
    return float(match[1]) * SECONDS[match[2]]


def duration_text(seconds: float) -> str:
    """Return a time as people read it: `0.0123` as `12 ms`, `10800` as `3 h`."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    unit = [name for name in SECONDS if name and SECONDS[name] <= seconds][-1]
    return f"{seconds / SECONDS[unit]:.3g} {unit}"

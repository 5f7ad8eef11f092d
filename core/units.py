"""Shows sizes and counts to people, in the same form in all messages."""

from __future__ import annotations

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

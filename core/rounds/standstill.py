"""How long others have stood still, in the time in which this rank has looked. Sans-IO."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# Eight beats, and sixteen looks at them, in the time after which a rank counts as standing still.
# A look is taken when that time is over, too: so a rank that died, or hangs behind a last beat, is
# known to all after 1.25 times that time.
BEATS = 8
LOOKS = 16
# Between two looks at most a quarter of that time counts; a call of a store that hangs takes less.
MOST_COUNTED = 1 / 4


class CountedLooks:
    """Counts the time in which this rank looked at the others.

    Time between two looks counts up to a limit: a rank that was stopped itself (`SIGSTOP`, a
    debugger, a machine that slept) has not seen the others, so its absence is no silence of theirs.

    Args:
        most_s: The most seconds that count between two looks.
    """

    def __init__(self, most_s: float) -> None:
        self.counted_s = 0.0
        self._most_s = most_s
        self._last_s: float | None = None

    def look(self, now_s: float) -> None:
        """Count the time since the last look."""
        if self._last_s is not None:
            self.counted_s += min(now_s - self._last_s, self._most_s)
        self._last_s = now_s


class Standstill:
    """Says which ranks have not moved for too long.

    Args:
        looks: Counts the time.
        ranks: Who is watched; all count as moved now.
        limit_s: The time after which a rank counts as standing still.
    """

    def __init__(self, looks: CountedLooks, ranks: Iterable[int], limit_s: float) -> None:
        self._looks = looks
        self._limit_s = limit_s
        self._moved_s = dict.fromkeys(ranks, looks.counted_s)

    def moved(self, rank: int) -> None:
        """Count from now on for `rank`."""
        self._moved_s[rank] = self._looks.counted_s

    def is_over(self, rank: int, share: float = 1.0) -> bool:
        """Return whether `rank` has stood still for the limit, or for a share of it."""
        return self._looks.counted_s - self._moved_s[rank] >= share * self._limit_s

    def left_s(self, ranks: Iterable[int]) -> float:
        """Return the seconds until the first of `ranks` will have stood still for the limit."""
        first = min((self._moved_s[rank] for rank in ranks), default=self._looks.counted_s)
        return first + self._limit_s - self._looks.counted_s

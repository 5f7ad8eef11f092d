"""Posts of the other ranks, and how long each rank has been stuck. Sans-IO.

Tested in `tests/core/rounds/test_posts.py`, and as part of rounds in `test_simulation.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.core.errors import FormatError
from penstock.core.rounds.posts import At, Kind, SlotPost, decode
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.core.rounds.round import RankPlace

# These two texts are short, because a cause is cut at 300 bytes.
ONE_ORDER = (
    "all ranks must make the same calls of save, restore and load, in one order over all "
    "checkpointers"
)
ONE_RANK = "inside `if rank == 0:` use a checkpointer with ranks='alone'"

# Within the timeout after which a rank counts as stuck, a rank sends 8 heartbeats and polls the
# others 16 times; it also polls when the timeout is over. So every rank knows that a rank died or
# hangs at most 1.25 timeouts after it did.
BEATS = 8
LOOKS = 16
# At most a quarter of the timeout counts between two polls. A call to a store that hangs takes less
# than that, so it counts in full.
MOST_COUNTED = 1 / 4


class CountedLooks:
    """Counts the time in which this rank polls the others.

    Time between two polls counts up to a limit. A rank that was itself stopped (`SIGSTOP`, a
    debugger, a suspended host) has not seen the others, and must not count them as silent.

    Args:
        most_s: The most seconds that count between two polls.
    """

    def __init__(self, most_s: float) -> None:
        self.counted_s = 0.0
        self._most_s = most_s
        self._last_s: float | None = None

    def look(self, now_s: float) -> None:
        """Count the time since the last poll."""
        if self._last_s is not None:
            self.counted_s += min(now_s - self._last_s, self._most_s)
        self._last_s = now_s


class Standstill:
    """Finds the ranks that have made no progress for too long.

    Args:
        looks: Counts the time.
        ranks: The watched ranks; each counts as having just made progress.
        limit_s: The time after which a rank counts as stuck.
    """

    def __init__(self, looks: CountedLooks, ranks: Iterable[int], limit_s: float) -> None:
        self._looks = looks
        self._limit_s = limit_s
        self._moved_s = dict.fromkeys(ranks, looks.counted_s)

    def moved(self, rank: int) -> None:
        """Restart the limit for `rank`."""
        self._moved_s[rank] = self._looks.counted_s

    def is_over(self, rank: int, share: float = 1.0) -> bool:
        """Return whether `rank` has made no progress for `share` of the limit."""
        return self._looks.counted_s - self._moved_s[rank] >= share * self._limit_s

    def left_s(self, ranks: Iterable[int]) -> float:
        """Return the seconds until the first of `ranks` reaches the limit."""
        first = min((self._moved_s[rank] for rank in ranks), default=self._looks.counted_s)
        return first + self._limit_s - self._looks.counted_s


class OtherRanks(Standstill):
    """The ranks that one rank watches: rank 0 watches all others, and they watch rank 0.

    Args:
        place: The rank that watches.
        kind: What the round does.
        number: The number of the round.
        looks: Counts the time in which the rank polls.
        limit_s: The time after which a rank counts as stuck.
    """

    def __init__(
        self, place: RankPlace, kind: Kind, number: int, looks: CountedLooks, limit_s: float
    ) -> None:
        self._leads = place.rank == 0
        others = range(1, place.world_size) if self._leads else range(1)
        super().__init__(looks, others, limit_s)
        self.arrived: dict[int, Mapping[str, Any]] = {}
        """On rank 0: what the others have posted with `arrive`, by rank."""
        self.parts: dict[int, Mapping[str, Any]] = {}
        """On rank 0: what the others have posted with `seal`, by rank."""
        self.pending = set(others) if self._leads else set()
        """On rank 0: the ranks that have not sealed."""
        self._kind = kind
        self._number = number
        self._slots: dict[int, SlotPost] = {}
        self._slot_bytes: dict[int, bytes] = {}

    @property
    def all_here(self) -> bool:
        """Whether every other rank has posted in this round; only on rank 0."""
        return len(self.arrived) == len(self._moved_s)

    @property
    def still(self) -> set[int]:
        """The unsealed ranks without progress for half of the timeout; only on rank 0.

        Lists all of them: the verdict names only one rank, even if several died with their host.
        """
        return {r for r in self.pending if self.is_over(r, share=1 / 2)}

    def host_of(self, rank: int) -> str:
        """Return the name of the host of a watched rank; empty if unknown."""
        post = self._slots.get(rank)
        return "" if post is None else post.host

    def hear(self, rank: int, data: bytes | None) -> str | None:
        """Read the slot of a watched rank; return why the rank is lost, or None if it is not."""
        before = self._slot_bytes.get(rank)
        if data is not None and data != before:
            self._slot_bytes[rank] = data
            try:
                post = decode(SlotPost, data)
            except FormatError as error:
                return f"posted unreadable data: {error}"
            self._slots[rank] = post
            if post.at is At.CLOSED:
                return str(post.part.get("cause", ""))
            # The first post that is read from a rank may be old. It counts as progress, unless it
            # is from an earlier round, or from a rank that waits for rank 0 and only sends
            # heartbeats.
            waits = self._leads and post.at is At.HERE
            if before is not None or not (waits or post.round < self._number):
                self.moved(rank)
            if post.round > self._number:
                return f"has moved on from this {self._kind}"
            if post.round == self._number:
                self.arrived.setdefault(rank, post.part)
                if post.at is At.SEALED and self._leads:
                    self.parts[rank] = post.part
                    self.pending.discard(rank)
                    return None
        return self._still_words(rank) if self.is_over(rank) else None

    def _still_words(self, rank: int) -> str:
        post, limit_s = self._slots.get(rank), self._limit_s
        if post is None or post.round < self._number:
            late = f"has not begun to {self._kind} for {limit_s:g} s"
            return f"{late}: {ONE_ORDER}; {ONE_RANK}. If it is only late, raise rank_timeout_s"
        still = f"stood still for {limit_s:g} s {self._doing_words(post)}"
        return f"{still}: it is dead or stuck; if it only pauses, raise rank_timeout_s"

    def _doing_words(self, post: SlotPost) -> str:
        if post.at is At.HERE:
            return f"before it began to {self._kind}"
        if post.at is At.SEALED:
            return "after its last byte"
        doing = "while it wrote" if self._kind == "save" else "while it restored"
        if not post.total:
            return doing
        return f"{doing} ({size_text(post.done)} of {size_text(post.total)})"

"""One save's path to the tier that it writes to, and from there to slower tiers.

Tested in `tests/integration/ranks/test_tiers.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.core.errors import ConfigError, NotDrainedError, RankError, StorageError
from penstock.core.plan.writers import bytes_of_rank
from penstock.core.rounds.posts import DrainedPost
from penstock.core.suggest import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from penstock.core.abc import Backend
    from penstock.core.format.records import CommitRecord
    from penstock.core.save.request import RankTurn, SaveRequest
    from penstock.core.tiers.drains import Drains
    from penstock.core.tiers.room import TierRoom

OnEnd: TypeAlias = "Callable[[BaseException | None], None]"
"""Called once: with None when a checkpoint is as durable as configured, else with the reason."""


class DrainOfSave:
    """The drain of a save that is committed in tier `number`; see `save.request.Onward`."""

    def __init__(self, drains: Drains, replaces: Collection[str] = (), number: int = 0) -> None:
        self._drains = drains
        self._number = number
        self._replaces = replaces
        self._record: CommitRecord | None = None
        self._marked = False

    def prepare(self, record: CommitRecord) -> None:
        """Mark the checkpoint if it must be copied."""
        self._record = record
        self._marked = self._drains.prepare(self._number, record.uid, record.step, self._replaces)

    def begin(self) -> None:
        """Do nothing: no other rank waits for the copies."""

    def go(self, on_end: OnEnd) -> None:
        """Queue the copy, if the checkpoint is marked."""
        assert self._record is not None
        self._drains.committed(self._number, self._record, on_end, marked=self._marked)

    def tiers(self) -> tuple[str, ...]:
        """Return the names of the tiers that have the checkpoint now."""
        assert self._record is not None
        return self._drains.having(self._record)

    def check(self) -> None:
        """Raise a NotDrainedError if a tier has failed for long."""
        if why := self._drains.failing():
            raise NotDrainedError(why)


class TierOfRanks:
    """The choice of one tier for all ranks of a save. Rank 0 chooses it; the others follow."""

    def __init__(self, room: TierRoom, request: SaveRequest, *, away: Collection[str]) -> None:
        self.number: int | None = None
        """The number of the tier, once it is chosen."""
        self._room = room
        self._step = request.step
        self._arrival = {"raw": list(bytes_of_rank(request.plan)), "away": sorted(away)}

    def arrival(self) -> Mapping[str, Any]:
        """Return the bytes that this rank must store, and the tiers that it cannot use."""
        return self._arrival

    def choose(
        self, arrivals: Mapping[int, Mapping[str, Any]], wait: Callable[[], None]
    ) -> tuple[str, Backend] | None:
        """Return the name and backend of the fastest tier with room that all ranks can use.

        Returns None if no tier has room and the save is skipped.

        Args:
            arrivals: The posts of all ranks, by rank number.
            wait: Called repeatedly while no tier has room; may raise to give up.

        Raises:
            StorageFullError: No tier has room, and the configuration says `raise`.
        """
        shared_bytes: dict[str, int] = {}
        total = 0
        lacking: dict[str, list[int]] = {}
        for rank, arrival in sorted(arrivals.items()):
            shared, own = arrival.get("raw", (0, 0))
            shared_bytes.setdefault(str(arrival.get("structure")), shared)
            total += own
            for name in arrival.get("away", ()):
                lacking.setdefault(name, []).append(rank)
        refused = {
            name: f"cannot be used by rank {listed([str(rank) for rank in ranks])}"
            for name, ranks in lacking.items()
        }
        total += sum(shared_bytes.values())
        self.number = self._room.place(self._step, total, refused=refused, wait=wait)
        if self.number is None:
            return None
        tier = self._room.tiers[self.number]
        return tier.name, tier.backend

    def follow(self, name: str) -> Backend:
        """Return the tier that rank 0 has chosen.

        Raises:
            ConfigError: This rank has no such tier.
        """
        for number, tier in enumerate(self._room.tiers):
            if tier.name == name:
                self.number = number
                return tier.backend
        msg = (
            f"rank 0 saves to tier {name}, which the backend of this rank does not have: give all "
            "ranks the same configuration"
        )
        raise ConfigError(msg)

    def failed(self, error: BaseException) -> None:
        """Avoid the tier for a while after an error of the store, or later saves would fail too."""
        if self.number is not None and isinstance(error, StorageError):
            self._room.leave_alone(self.number)


class LeadingDrain(DrainOfSave):
    """The drain of a save by several ranks, on rank 0, which reports its outcome to the others."""

    def __init__(
        self, drains: Drains, choice: TierOfRanks, turn: RankTurn, replaces: Collection[str]
    ) -> None:
        super().__init__(drains, replaces)
        self._choice = choice
        self._told = turn.group.told_drains
        self._round = turn.number
        self._found: tuple[str, ...] | None = None

    def prepare(self, record: CommitRecord) -> None:
        """Mark the checkpoint in the chosen tier if it must be copied."""
        assert self._choice.number is not None
        self._number = self._choice.number
        super().prepare(record)

    def begin(self) -> None:
        """Start to report to the other ranks that this rank is alive."""
        self._told.begin(self._round, self._drains.failing)

    def go(self, on_end: OnEnd) -> None:
        """Queue the copy, and report its outcome to the others before the user's callbacks run."""

        def report(error: BaseException | None) -> None:
            if error is None:
                post = DrainedPost(self.tiers())
            else:
                post = DrainedPost(kind=type(error).__name__, error=str(error))
            self._told.end(self._round, post)
            on_end(error)

        super().go(report)

    def tiers(self) -> tuple[str, ...]:
        """Return the names of the tiers that had the checkpoint once it was durable."""
        if self._found is None:
            self._found = super().tiers()
        return self._found


class FollowedDrain:
    """The drain of a save by several ranks, on a rank that gets its outcome from rank 0."""

    def __init__(self, turn: RankTurn) -> None:
        self._group = turn.group
        self._round = turn.number
        self._found: tuple[str, ...] = ()

    def prepare(self, record: CommitRecord) -> None:
        """Do nothing: rank 0 marks the checkpoint."""

    def begin(self) -> None:
        """Do nothing: this rank follows rank 0 from `go` on."""

    def go(self, on_end: OnEnd) -> None:
        """Follow rank 0's copies, and call `on_end` with their outcome."""

        def learned(post: DrainedPost) -> None:
            self._found = post.tiers
            on_end(_error_of(post) if post.kind else None)

        self._group.follow(self._round, learned)

    def tiers(self) -> tuple[str, ...]:
        """Return the names of the tiers that have the checkpoint, as reported by rank 0."""
        return self._found

    def check(self) -> None:
        """Raise a NotDrainedError if rank 0's copies have failed for long."""
        if why := self._group.followed_drains.failing:
            raise NotDrainedError(why)


def _error_of(post: DrainedPost) -> Exception:
    if post.kind == NotDrainedError.__name__:
        return NotDrainedError(post.error)
    cause = f"failed with {post.kind}: {post.error}"
    return RankError(f"rank 0, which copies the checkpoint to slower tiers, {cause}", 0, "", cause)

"""Defines the records of one save, and the interfaces that it calls.

Tested in `tests/core/save/test_job.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from penstock.core.plan.writers import chunks_of_rank, derivable, masters_of
from penstock.core.ranks.agreement import AgreementOfOne, SaveAgreement
from penstock.core.ranks.structure import Brought

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.core.abc import Backend, Node, StateObject
    from penstock.core.catalog.commit_table import Commit
    from penstock.core.errors import StorageFullError
    from penstock.core.format.records import CommitRecord
    from penstock.core.pipeline.auto import AutoChains
    from penstock.core.pipeline.codec_chain import CodecChain
    from penstock.core.plan.save import SavePlan
    from penstock.core.ranks.group import RankGroup
    from penstock.core.reporting.reports import SaveReport
    from penstock.core.rounds.round import RankPlace
    from penstock.core.save.merge import KnownParts
    from penstock.core.tiers.save_drain import TierOfRanks
    from penstock.core.types import ObjectPath


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """The inputs of one save, fixed before it starts.

    Attributes:
        step: The step of the checkpoint.
        generation: The generation of the checkpoint.
        mode: `"blocking"`, `"async"` or `"lazy"`.
        entries: The description of the state tree; the entries hold the state.
        plan: The chunks, and their places in blobs.
        chains: Codec chains by number; None is raw, or is chosen while the save runs.
        auto: The objects whose chains are chosen while the save runs; None: there are none.
        providers: Name and version of every provider used.
        objects: Number of objects, tied ones included.
        staging_bytes: The most memory that the capture takes.
        copied_from: A CUDA device that tensors are copied from, if any.
        promised: Whether something is deferred only because the user asked for it.
        share: Whether to reuse chunks whose bytes are stored already.
        block_bytes: The bytes per checksum in raw frames.
        grace_s: The grace time of the intent, in seconds.
        io_timeout_s: Seconds without progress of the store after which the save is given up.
        rank: The number of this rank.
        world_size: Number of ranks.
        own_paths: Paths below which each rank has its own objects.
        shared: Index and count of each `PerRank` that has them, by its shown path.
        rounded: An object that a lossy codec rounds, and the codec; empty if all is exact.
    """

    step: int
    generation: int
    mode: str
    entries: Sequence[StateObject | Node]
    plan: SavePlan
    chains: Sequence[CodecChain | None]
    auto: AutoChains | None = None
    providers: Sequence[tuple[str, int]]
    objects: int
    staging_bytes: int
    copied_from: str | None
    promised: bool
    share: bool
    block_bytes: int
    grace_s: float
    io_timeout_s: float
    rank: int = 0
    world_size: int = 1
    own_paths: tuple[ObjectPath, ...] = ()
    shared: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    rounded: str = ""


@dataclass(slots=True, kw_only=True)
class SaveTurn:
    """One rank's part in one save. Here the process saves alone; `RankTurn` is for several ranks.

    Attributes:
        brought: The description of this rank's state for the other ranks.
        skip: The chunks that other ranks write, as far as known before the capture.
        masters: The objects that this rank may store as derived, as in `SavePlan.masters`; None:
            not known before the capture.
        latest: On rank 0, the latest step when the save was called; None: there was none.
        known: On rank 0, the index of the newest save.
        begun: Whether a job runs the save, and reports its end to the other ranks.
    """

    brought: Brought = field(default_factory=Brought)
    skip: frozenset[int] = frozenset()
    masters: Mapping[int, Sequence[int]] | None = None
    latest: int | None = None
    known: KnownParts | None = None
    begun: bool = False

    @property
    def place(self) -> RankPlace | None:
        """The place of this rank among those that save together; None if it saves alone."""
        return None

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return 0

    @property
    def captures_derived(self) -> bool:
        """Whether derived objects are captured too, since another rank may not derive them."""
        return False

    def agreement(self, commit: Commit, **options: Any) -> AgreementOfOne | SaveAgreement:
        """Return this rank's agreement for the save. Options are as for `SaveAgreement`."""
        del options
        return AgreementOfOne(commit)

    def bring(self, request: SaveRequest) -> None:
        """Describe the planned save for the other ranks."""

    def give_up(self, cause: str) -> None:
        """Report that this rank cannot take part: something failed before the save began."""

    def skip_save(self, reason: str) -> None:
        """Report that this save is skipped."""


@dataclass(slots=True, kw_only=True)
class RankTurn(SaveTurn):
    """One rank's part in a save by several ranks.

    Attributes:
        group: The ranks.
        number: The number of the round, equal on all ranks.
    """

    group: RankGroup
    number: int

    @property
    def place(self) -> RankPlace:
        """See `SaveTurn`."""
        return self.group.place

    @property
    def rank(self) -> int:
        """See `SaveTurn`."""
        return self.group.place.rank

    @property
    def captures_derived(self) -> bool:
        """See `SaveTurn`."""
        return self.masters is None

    def agreement(self, commit: Commit, **options: Any) -> SaveAgreement:
        """See `SaveTurn`.

        Raises:
            CoordinationError: The store of the job cannot be reached.
        """
        return SaveAgreement(self.group, self.number, commit=commit, **options)

    def bring(self, request: SaveRequest) -> None:
        """See `SaveTurn`; also note this rank's chunks if its places are known."""
        plan, group = request.plan, self.group
        self.brought = Brought.of(
            request.entries, request.own_paths, request.shared, masters_of(plan)
        )
        places = group.places.of(self.brought.key)
        if places is not None:
            mine = chunks_of_rank(plan, places, writer_bytes=group.writer_bytes)
            self.skip = frozenset(range(len(plan.chunks))) - mine
            self.masters = derivable(plan, mine, places.plain, request.world_size)

    def give_up(self, cause: str) -> None:
        """See `SaveTurn`."""
        self.group.give_up(self.number, cause)

    def skip_save(self, reason: str) -> None:
        """See `SaveTurn`; only rank 0 decides for all."""
        if self.rank:
            self.group.ended(self.number)
        else:
            self.group.refuse(self.number, "save", reason, {"skipped": True})


class SaveSurroundings:
    """Hooks that the save thread calls. Here they do nothing; subclasses override some.

    A hook may call the user's `on_event`, so the save marks its thread as running callbacks.
    """

    def before_write(self, request: SaveRequest, url: str) -> None:
        """Make room at `url` before the save writes anything there."""

    def when_full(
        self, request: SaveRequest, uid: str, error: StorageFullError
    ) -> StorageFullError:
        """Make room after the store was full; return the error to raise, with advice."""
        del request, uid
        return error

    def when_failed(self, error: BaseException) -> None:
        """Add notes for the user to the error of a save, before anyone sees it."""

    def before_commit(self, request: SaveRequest, uid: str) -> None:
        """Raise if the save must not commit; called right before its commit record."""

    def reported(self, report: SaveReport) -> SaveReport:
        """Return the report of a committed save with facts about the run."""
        return report

    def after_commit(self, request: SaveRequest, report: SaveReport) -> None:
        """Clean up after a committed save; called again once it is durable in slower tiers."""

    def replicate(
        self, request: SaveRequest, report: SaveReport, on_end: Callable[[bool], None]
    ) -> None:
        """Copy a committed checkpoint to other hosts; call `on_end` once, as `HostCopies` does."""
        del request, report
        on_end(False)  # noqa: FBT003 - the result of a future


class Onward(Protocol):
    """Takes a committed checkpoint through slower tiers until it is durable."""

    def prepare(self, record: CommitRecord) -> None:
        """Record that the checkpoint must be copied; rank 0 calls this before the commit."""
        ...

    def begin(self) -> None:
        """Note that the checkpoint is committed; `go` follows after the user's callbacks."""
        ...

    def go(self, on_end: Callable[[BaseException | None], None]) -> None:
        """Start to copy the committed checkpoint.

        `on_end` is called once: with None when the checkpoint is durable, or with the error that
        prevents it.
        """
        ...

    def tiers(self) -> tuple[str, ...]:
        """Return the names of the tiers that have the checkpoint, for the report."""
        ...

    def check(self) -> None:
        """Raise a NotDrainedError if the copy keeps failing and a wait might never end."""
        ...


@dataclass(frozen=True, slots=True)
class Destination:
    """The backend that a save writes to, and the slower tiers after it, if any.

    Attributes:
        backend: The backend.
        onward: Copies to slower tiers.
        choice: With several ranks, chooses the tier that replaces `backend` before any write.
    """

    backend: Backend
    onward: Onward | None = None
    choice: TierOfRanks | None = None

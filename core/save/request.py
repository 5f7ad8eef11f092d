"""The records that describe one save, and the contracts that it needs from its surroundings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from penstock.core.ranks.structure import Brought

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from penstock.core.abc import Backend, CodecContext, Node, StateObject
    from penstock.core.errors import StorageFullError
    from penstock.core.format.records import CommitRecord
    from penstock.core.pipeline.chain import CodecChain
    from penstock.core.pipeline.choices import AutoChains
    from penstock.core.plan.bases import ChunkKey, StoredFrame
    from penstock.core.plan.save import SavePlan
    from penstock.core.ranks.group import RankGroup
    from penstock.core.reporting.reports import SaveReport
    from penstock.core.save.merge import KnownParts
    from penstock.core.types import ObjectPath, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Everything that one save needs to know, fixed before it starts.

    Attributes:
        step: The step of the checkpoint.
        generation: The generation of the checkpoint.
        mode: `"blocking"`, `"async"` or `"lazy"`.
        entries: The state tree as it was described. They hold the state.
        plan: The chunks, and their places in blobs.
        chains: Codec chains by number; None is raw, or is chosen while the save runs.
        auto: The objects whose chains are chosen while the save runs; None: there are none.
        providers: Name and version of every provider that took part.
        objects: Number of objects, tied ones included.
        staging_bytes: The most memory that capturing all of it takes.
        copied_from: A CUDA device that something is copied from, if there is one.
        promised: Whether something is deferred only because the user asked for it.
        share: Whether chunks whose bytes are stored already are not stored again.
        block_bytes: Distance of the checksums in raw frames.
        grace_s: The grace time of the intent, in seconds.
        io_timeout_s: The save is given up when the store makes no progress for so many seconds.
        rank: The number of this rank.
        world_size: Number of ranks.
        own_paths: Paths below which each rank has objects of its own.
        shared: Index and count of each `PerRank` that has them, by its shown path.
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


@dataclass(slots=True)
class RankTurn:
    """One save of several ranks: its number, and what this rank brings along.

    Attributes:
        group: The ranks.
        number: The number of the round, the same on all of them.
        brought: What the others need to know of the state here.
        skip: The chunks that other ranks write, as far as that is known before the capture.
        masters: The objects that this rank may store as derived, as in `SavePlan.masters`; None:
            that is not known before the capture.
        latest: On rank 0 the latest step when the save was called; None: there was none.
        known: On rank 0 the index of the newest save.
        begun: Whether a job goes on with it, and tells the others how it ends.
    """

    group: RankGroup
    number: int
    brought: Brought = field(default_factory=Brought)
    skip: frozenset[int] = frozenset()
    masters: Mapping[int, Sequence[int]] | None = None
    latest: int | None = None
    known: KnownParts | None = None
    begun: bool = False

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.group.place.rank


class EarlierCheckpoints(Protocol):
    """Reads committed checkpoints, as far as a save refers to them. Thread-safe."""

    def frames(
        self,
        backend: Backend,
        record: CommitRecord,
        within: Mapping[ObjectPath, Collection[Region]] | None = None,
    ) -> Mapping[ChunkKey, StoredFrame]:
        """Return frames of a checkpoint by the keys of their chunks.

        Args:
            backend: The place that has the checkpoint.
            record: Its commit record.
            within: The paths of objects, each with regions of it: frames without bytes of these
                may be left out. None: all frames.

        Raises:
            PenstockError: The manifest is damaged, or the store failed.
        """
        ...

    def read(
        self, backend: Backend, stored: StoredFrame, context: CodecContext, out: memoryview
    ) -> None:
        """Read, verify and decode one chunk into `out`, which has its length.

        Raises:
            PenstockError: The chunk, or a base of it, is damaged; a codec is missing; or the store
                failed. `out` is undefined.
        """
        ...


class SaveSurroundings:
    """The run around a save, as far as the save thread calls it: here one that stays as it is.

    The methods may call the user's `on_event`, so the save marks its thread as one that runs
    callbacks meanwhile.
    """

    def before_write(self, request: SaveRequest, url: str) -> None:
        """Make room at `url` before the save writes anything there."""

    def when_full(
        self, request: SaveRequest, uid: str, error: StorageFullError
    ) -> StorageFullError:
        """Make room after the save met a full store; return the error to raise, with advice."""
        del request, uid
        return error

    def when_failed(self, error: BaseException) -> None:
        """Add to the error of a save, before anybody sees it, what the user should know."""

    def before_commit(self, request: SaveRequest, uid: str) -> None:
        """Raise if the save must not commit any more; called right before its commit record."""

    def after_commit(self, request: SaveRequest, report: SaveReport) -> None:
        """Clean up behind a committed save; called again once it is durable in slower tiers."""


class Onward(Protocol):
    """The way of a checkpoint from its commit until it is durable, through slower tiers."""

    def prepare(self, record: CommitRecord) -> None:
        """Store that the checkpoint shall be copied on; called before the commit, by rank 0."""
        ...

    def begin(self) -> None:
        """Note that the checkpoint is committed; `go` follows behind the callbacks of the user."""
        ...

    def go(self, told: Callable[[BaseException | None], None]) -> None:
        """Start to copy the committed checkpoint on.

        `told` is called once: with None when the checkpoint is durable, or with the reason why it
        will not be.
        """
        ...

    def tiers(self) -> tuple[str, ...]:
        """Return the names of the tiers that have the checkpoint, for the report."""
        ...

    def check(self) -> None:
        """Raise a NotDrainedError if the copy keeps failing, so that a wait might never end."""
        ...


class TierChoice(Protocol):
    """The choice of one tier for all ranks of a save: rank 0 chooses it, the others follow."""

    def arrival(self) -> Mapping[str, Any]:
        """Return what this rank tells rank 0 before the choice."""
        ...

    def choose(
        self, arrivals: Mapping[int, Mapping[str, Any]], wait: Callable[[], None]
    ) -> tuple[str, Backend] | None:
        """Return name and backend of the fastest tier that has room, and that all ranks can use.

        None: no tier has room, and the save is to be skipped.

        Args:
            arrivals: What each rank has told.
            wait: Called again and again while no tier has room; may raise to give up.

        Raises:
            StorageFullError: No tier has room, and the configuration says `raise`.
        """
        ...

    def follow(self, name: str) -> Backend:
        """Return the tier that rank 0 has chosen.

        Raises:
            ConfigError: This rank has no such tier.
        """
        ...

    def failed(self, error: BaseException) -> None:
        """Note that the save has failed on this rank: its tier may be the reason."""
        ...


@dataclass(frozen=True, slots=True)
class Destination:
    """The backend that a save writes to, and the way from there to slower tiers, if any.

    Attributes:
        backend: The backend.
        onward: The way to slower tiers.
        choice: With several ranks: takes the place of `backend` before anything is written.
    """

    backend: Backend
    onward: Onward | None = None
    choice: TierChoice | None = None


class TiersOfSave(Protocol):
    """The tiers of a run, as far as a save needs to know them."""

    def entries(self, *, strict: bool) -> dict[int, list[str]]:
        """Return the names of commit records by step; `strict`: every tier has to answer."""
        ...

    def destination(self, request: SaveRequest) -> Destination | None:
        """Return the fastest tier that has room for a save; None: the save is to be skipped."""
        ...

    def destination_of_ranks(self, request: SaveRequest, turn: RankTurn) -> Destination:
        """Return the destination of a save of several ranks, whose tier is chosen later."""
        ...

    def is_silent(self) -> bool:
        """Whether a tier did not answer its latest call."""
        ...

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to copy; False: `timeout_s` seconds were too few."""
        ...

"""What one save is to do, fixed before it starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc import Backend, Node, StateObject
    from penstock.core.errors import StorageFullError
    from penstock.core.format.records import CommitRecord
    from penstock.core.pipeline.chain import CodecChain
    from penstock.core.plan.save import SavePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Everything that one save needs to know, fixed before it starts.

    Attributes:
        step: Of the checkpoint.
        generation: Likewise.
        mode: `"blocking"`, `"async"` or `"lazy"`.
        entries: The state tree as it was described. They hold the state.
        plan: Where the bytes of the entries go.
        chains: Codec chains by number; None is raw.
        providers: Name and version of every provider that took part.
        objects: Number of objects, tied ones included.
        staging_bytes: Memory that capturing all of it takes at most.
        pin: Whether something is copied from a CUDA device.
        promised: Whether something is deferred only because the user asked for it.
        block_bytes: Distance of the checksums in raw frames.
        grace_s: How long the intent holds.
        io_timeout_s: A store that makes no progress for so long is given up.
    """

    step: int
    generation: int
    mode: str
    entries: Sequence[StateObject | Node]
    plan: SavePlan
    chains: Sequence[CodecChain | None]
    providers: Sequence[tuple[str, int]]
    objects: int
    staging_bytes: int
    pin: bool
    promised: bool
    block_bytes: int
    grace_s: float
    io_timeout_s: float

    def without_state(self) -> SaveRequest:
        """The same, less all that holds the state: what a save that is over may keep."""
        return replace(self, entries=(), plan=replace(self.plan, objects=(), chunks=()))


@dataclass(frozen=True, slots=True)
class Room:
    """Makes room for one save, on its thread.

    Attributes:
        before_write: Called before anything is written.
        when_full: Called with the error of a full store; returns what to raise for it.
    """

    before_write: Callable[[], None] = lambda: None
    when_full: Callable[[StorageFullError], StorageFullError] = lambda error: error


class Onward(Protocol):
    """What becomes of a checkpoint behind its commit, until it is durable."""

    def prepare(self, record: CommitRecord) -> None:
        """Before it is committed."""
        ...

    def go(self, told: Callable[[BaseException | None], None]) -> None:
        """It is committed; `told` is called once, when it is durable, or with why it is not."""
        ...

    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers that have it, for the report."""
        ...

    def check(self) -> None:
        """Raise a NotDrainedError if waiting for it makes no sense."""
        ...


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a save goes, and what becomes of it there."""

    backend: Backend
    onward: Onward | None = None


class TiersOfSave(Protocol):
    """The tiers of a run, as far as saving there needs to know them."""

    def entries(self, *, strict: bool) -> dict[int, list[str]]:
        """Names of commit records by step; `strict`: an error unless every tier answers."""
        ...

    def destination(self, request: SaveRequest) -> Destination | None:
        """The fastest tier that has room for a save; None: the save is to be skipped."""
        ...

    def is_silent(self) -> bool:
        """Whether a tier did not answer when it was asked last."""
        ...

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to be copied; False: something is, after `timeout_s`."""
        ...

"""What a link between two tiers is doing, and whom it tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.core.manifest import CommitRecord
    from penstock.core.tiers import Rooms


@dataclass(eq=False, slots=True)
class DrainState:
    """What one link is doing.

    Attributes:
        source: Name of the tier that is copied from.
        target: And to.
        step: Which checkpoint is being copied; None: none.
        bytes_done: Of it.
        bytes_total: Of it.
        bytes_moved: Of all that this process has copied.
        waiting: Steps behind it, in order.
        error: Why the last try failed, while it is tried again; empty: it did not.
        lost: Why checkpoints cannot be copied at all, by step.
    """

    source: str
    target: str
    step: int | None = None
    bytes_done: int = 0
    bytes_total: int = 0
    bytes_moved: int = 0
    waiting: tuple[int, ...] = ()
    error: str = ""
    lost: Mapping[int, str] = field(default_factory=dict)

    def unfinished(self) -> list[int]:
        """Steps that have yet to be copied."""
        return sorted({*self.waiting, *([] if self.step is None else [self.step])})


class LinkReport(Protocol):
    """Whom a link asks and tells: all links of the run together."""

    rooms: Rooms

    def prepare(self, number: int, uid: str, step: int) -> bool:
        """Before a checkpoint is committed in tier `number`."""
        ...

    def arrived(self, number: int, record: CommitRecord) -> None:
        """A checkpoint is whole in tier `number`."""
        ...

    def again(self, number: int, record: CommitRecord) -> bool:
        """Tier `number` has lost it; whether a faster one has it, and brings it once more."""
        ...

    def tell(self, record: CommitRecord, error: BaseException | None) -> None:
        """It will get no further, because of `error`."""
        ...

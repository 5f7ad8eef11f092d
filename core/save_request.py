"""What one save is to do, fixed before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.core.pipeline import WriteJob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.capture import Subject
    from penstock.core.manifest import CommitRecord
    from penstock.core.sections import ChunkResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest(WriteJob):
    """Everything that one save needs to know, fixed before it starts."""

    step: int
    generation: int
    mode: str
    subjects: Sequence[Subject]
    manifest: Manifest
    grace_s: float
    io_timeout_s: float
    objects: int
    staging_bytes: int
    pin: bool


class Manifest(Protocol):
    """Encodes the manifest of a save whose blobs are all written."""

    def __call__(
        self,
        uid: str,
        results: Sequence[ChunkResult],
        blobs: Sequence[tuple[str, int]],
        *,
        engine: str,
    ) -> EncodedManifest:
        """Of chunks, and of blobs by name and length, that `engine` wrote."""
        ...


@dataclass(frozen=True, slots=True)
class EncodedManifest:
    """Bytes of part and index, and the commit record that binds them."""

    part_name: str
    part: bytes
    index_name: str
    index: bytes
    record: CommitRecord


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

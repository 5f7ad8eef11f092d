"""Which checkpoint is being replicated, and which checkpoints must stay meanwhile. Sans-IO."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    CheckpointKey = tuple[int, int]
    """Step and generation, as `parse_commit_name` returns them."""


class Replication:
    """Chooses, on rank 0, the checkpoint that a job replicates next, and what may be deleted.

    One checkpoint is replicated at a time. If saves are faster than replication, some checkpoints
    are skipped, so that replication does not fall behind. A checkpoint is safe if it is replicated,
    or if a more durable tier has it whole. The newest safe checkpoint stays until a newer one is
    safe.
    """

    def __init__(self, safe: Iterable[CheckpointKey], others: Iterable[CheckpointKey]) -> None:
        """Begin with the whole checkpoints that the job finds at its start.

        A checkpoint that is not safe now may have been safe before hosts were lost, and may be the
        only one left. So these checkpoints stay, too, until a newer one is safe.

        Args:
            safe: The checkpoints that are safe.
            others: The other whole checkpoints.
        """
        self._safe = set(safe)
        self._old = set(others)
        self._new: set[CheckpointKey] = set()
        self._last: CheckpointKey | None = None  # saved by this job
        self._last_safe: CheckpointKey | None = None
        self.target: CheckpointKey | None = None
        """The checkpoint that all hosts copy now; None if the newest is safe."""
        self._choose()

    def committed(self, key: CheckpointKey) -> None:
        """Add a checkpoint of this job, which replaces a deleted one of the same key."""
        self.deleted([key])
        self._new.add(key)
        self._last = key
        if self.target is None:
            self._choose()

    def secured(self, key: CheckpointKey) -> None:
        """Mark a checkpoint as safe. Call this only if the listings of all hosts show it."""
        if key in self._old | self._new:
            self._old.discard(key)
            self._new.discard(key)
            self._safe.add(key)
            self._last_safe = key
        if self.target is not None and self.target <= max(self._safe, default=self.target):
            self._choose()

    def failed(self, key: CheckpointKey) -> None:
        """Give up `key`, which a host cannot copy, and make the newest checkpoint the target.

        Does nothing if `key` is not the target.
        """
        if key == self.target:
            self._choose()

    def deleted(self, keys: Iterable[CheckpointKey]) -> None:
        """Forget checkpoints that retention, the user or a rewind has begun to delete."""
        for keys_of in (self._safe, self._old, self._new):
            keys_of.difference_update(keys)
        if self.target not in self._old | self._new:
            self._choose()

    def keep_only(self, keys: Iterable[CheckpointKey]) -> None:
        """Forget all checkpoints that do not exist any more."""
        self.deleted(self.known.difference(keys))

    @property
    def known(self) -> set[CheckpointKey]:
        """All checkpoints that were added and not deleted."""
        return self._safe | self._old | self._new

    def deletable(self, keys: Iterable[CheckpointKey]) -> list[CheckpointKey]:
        """Return those of `keys` that retention, eviction and overwrites may delete, ascending.

        All checkpoints older than the newest safe one may be deleted, except the one that became
        safe last. Newer ones may be deleted only if this job saved them and replication skipped
        them.
        """
        newest_safe = max(self._safe, default=None)
        kept = {newest_safe, self.target, max(self._old | self._new, default=None)} | self._old
        skipped = self._new - kept
        older = {key for key in keys if newest_safe is not None and key < newest_safe}
        return sorted((older - {self._last_safe}).union(skipped.intersection(keys)))

    def _choose(self) -> None:
        newest = max(self._old | self._new, default=None)
        newest_safe = max(self._safe, default=None)
        is_newer = newest is not None and (newest_safe is None or newest > newest_safe)
        self.target = newest if is_newer else None
        if self._last in self._new:  # even at an earlier step: training continues from there
            self.target = self._last

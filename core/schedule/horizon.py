"""The steps that a rank may pass without a save, as rank 0 has promised; sans-IO.

Ranks are at different steps when rank 0 learns that a save is durable. So rank 0 cannot decide that
a save is due at its own step, because other ranks may have passed that step. It promises in advance
that no save is due before a step. It repeats this with later steps, and finally promises that a
save is due at a step. A rank that reaches the step of a promise waits for the next promise. So no
rank passes a step at which another rank saves.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.rounds.posts import DuePost, due_key


@dataclass(slots=True)
class Horizon:
    """The promises since one save, as far as this rank knows them.

    Attributes:
        saved: The step at which the last save was due.
        number: Counts the saves that were due.
        posts: Counts the promises since the last due save.
        promise: The newest promise.
    """

    saved: int
    number: int
    posts: int
    promise: DuePost

    @classmethod
    def after(cls, saved: int, number: int) -> Horizon:
        """Return the horizon right after a save was due at `saved`.

        Every rank knows its promise without a post: no save is due before the next step.
        """
        return cls(saved, number, 0, DuePost(saved + 1, due=False))

    @property
    def key(self) -> str:
        """The key of the next promise in the store of the job. Each key is posted once."""
        return due_key(self.number, self.posts)

    def is_due(self, step: int) -> bool | None:
        """Return whether a save is due at `step`; None if only the next promise can tell."""
        if step < self.promise.step:
            return False
        return True if self.promise.due else None

    def take(self, promise: DuePost) -> None:
        """Accept `promise`, which was posted with `key`, as the newest."""
        self.promise = promise
        self.posts += 1

    def is_short(self, step: int) -> bool:
        """Return whether rank 0, at `step`, should make the next promise for the other ranks."""
        left = self.promise.step - step
        return not self.promise.due and left <= 1 + (step - self.saved) // 16

    def next_promise(self, step: int, wanted: int | None) -> DuePost:
        """Return the next promise of rank 0, which is at `step`.

        The longer the last save is ago, the further the promise reaches. Therefore few promises
        are needed. They delay a due save by at most two steps and a quarter of the interval.

        Args:
            step: The step of rank 0.
            wanted: The step at which the next save should be due; None: not known yet.
        """
        furthest = step + 2 + (step - self.saved) // 4
        if wanted is not None and wanted <= furthest:
            return DuePost(max(wanted, self.promise.step), due=True)
        return DuePost(max(furthest, self.promise.step), due=False)

"""Taking an older checkpoint instead of a damaged one, without passing off what that one left."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from penstock.core.abc import StateObject
from penstock.core.errors import (
    CheckpointNotFoundError,
    DamagedError,
    RestoreError,
    RestoreMismatchError,
    UnsupportedStateError,
)
from penstock.core.suggest import listed
from penstock.core.tree.describe import describe_tree
from penstock.core.tree.paths import show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.core.abc import Target
    from penstock.core.tree.containers import Providers

log = logging.getLogger("penstock")

T = TypeVar("T")


def with_fallback(steps: Sequence[int], use: Callable[[int], T]) -> tuple[T, tuple[int, ...]]:
    """Use the first of `steps` that is whole; also returns those that were not."""
    for number, step in enumerate(steps):
        try:
            return use(step), tuple(steps[:number])
        except DamagedError as error:
            if number == len(steps) - 1:
                raise
            log.warning("step %d is damaged, taking an older one: %s", step, str(error))
    msg = "there is no checkpoint to restore"
    raise CheckpointNotFoundError(msg)


class Overwritten:
    """What attempts at damaged checkpoints have begun to overwrite in the live objects.

    Holds their targets, so that no other memory can come to have the same identity.
    """

    def __init__(
        self, state: Mapping[str, object], providers: Providers, *, allow_pickle: bool
    ) -> None:
        self._state = state
        self._allow_pickle = allow_pickle
        self._providers = providers
        self._targets: list[Target] = []

    def begin(self, targets: Iterable[Target]) -> list[Target]:
        """Say that `targets` are about to be filled; returns those of earlier attempts."""
        earlier = list(self._targets)
        self._targets += targets
        return earlier

    def check_mismatch(self, error: RestoreMismatchError) -> None:
        """An older checkpoint does not fit.

        Raises:
            RestoreError: The live objects are half-written; `error` would say that they are not.
        """
        names = self._live(self._targets)
        if names:
            msg = f"{error}\nUndefined now, by the damaged one before: {listed(names)}"
            raise RestoreError(msg.replace("; nothing was changed", "")) from error

    def check_left(self, earlier: Iterable[Target], filled: Iterable[Target], step: int) -> None:
        """An older checkpoint is restored.

        Raises:
            RestoreError: It lacks something that a damaged one had begun to overwrite.
        """
        whole = {target.sink.memory for target in filled}
        names = self._live([t for t in earlier if t.sink.memory not in whole])
        if names:
            msg = (
                f"step {step} is restored instead of a damaged one, but it lacks objects that the "
                f"damaged one had begun to overwrite; undefined now: {listed(names)}"
            )
            raise RestoreError(msg)

    def _live(self, targets: Iterable[Target]) -> list[str]:
        """Shown paths of those that belong to the live objects, not to new ones given up."""
        suspects = {t.sink.memory: t.path for t in targets if t.sink.memory is not None}
        if not suspects:
            return []
        try:
            tree = describe_tree(
                self._state, providers=self._providers, allow_pickle=self._allow_pickle
            )
        except UnsupportedStateError:
            return [show_path(path) for path in suspects.values()]
        live = {e.source.memory for e in tree.entries if isinstance(e, StateObject)}
        return [show_path(path) for memory, path in suspects.items() if memory in live]

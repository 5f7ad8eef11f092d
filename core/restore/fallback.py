"""Falls back to an older checkpoint when one is damaged.

An attempt that meets damage may have overwritten some live objects already. The older checkpoint
must overwrite all of these, or `restore` would report success and leave parts of a newer state.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from penstock.core.abc import StateObject
from penstock.core.errors import (
    CheckpointNotFoundError,
    DamagedError,
    FormatError,
    RestoreError,
    RestoreMismatchError,
    UnsupportedStateError,
)
from penstock.core.suggest import listed
from penstock.core.tree.describe import describe_tree
from penstock.core.tree.paths import show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.core.abc import Target
    from penstock.core.restore.fill import Opened
    from penstock.core.tree.containers import Providers

log = logging.getLogger("penstock")

T = TypeVar("T")

RESTORE_OLDER = (
    "Restore an older step: `penstock verify --all` shows which are whole, and "
    "`restore(on_damage='fallback')` takes the newest of these."
)


class Candidates:
    """Tries checkpoints, newest first, until one is undamaged."""

    def __init__(self, steps: Mapping[int, Callable[[], Opened]]) -> None:
        """Offer `steps` in order, each with the function that opens it."""
        self._remaining = deque(steps.items())
        self._damage: DamagedError | None = None
        self.skipped: list[int] = []
        """The steps that were found damaged, here or by another rank."""

    @property
    def first(self) -> int | None:
        """The step to try next; None after the last one."""
        return self._remaining[0][0] if self._remaining else None

    def use(self, attempt: Callable[[int, Callable[[], Opened]], T]) -> T:
        """Return the result of `attempt` for the next step that is undamaged.

        Args:
            attempt: Gets a step, and the function that opens it.

        Raises:
            DamagedError: No step is left; this is the error of the last step.
            CheckpointNotFoundError: There was no step, or `attempt` raised it.
        """
        while self._remaining:
            step, open_step = self._remaining.popleft()
            try:
                return attempt(step, open_step)
            except DamagedError as error:
                self.skip(step, error)
                if not self._remaining:
                    if isinstance(error, FormatError):  # about a record, without the step's number
                        error.add_note(f"Step {step} is damaged. {RESTORE_OLDER}")
                    raise
        if self._damage is not None:
            raise self._damage
        msg = "there is no checkpoint to restore"
        raise CheckpointNotFoundError(msg)

    def skip(self, step: int, error: DamagedError) -> None:
        """Note that a step is damaged; warn if an older one will be tried."""
        if self._remaining:
            log.warning("step %d is damaged, so an older one is tried: %s", step, str(error))
        self.skipped.append(step)
        self._damage = error


class Overwritten:
    """Remembers the targets that attempts at damaged checkpoints began to fill.

    Compares targets by the identity of their memory. It keeps the targets alive, so that no other
    memory can get the same identity.
    """

    def __init__(
        self, state: Mapping[str, object], providers: Providers, *, allow_pickle: bool
    ) -> None:
        self._state = state
        self._allow_pickle = allow_pickle
        self._providers = providers
        self._targets: list[Target] = []

    def begin(self, targets: Iterable[Target]) -> list[Target]:
        """Note the targets that are about to be filled; return those of earlier attempts."""
        earlier = list(self._targets)
        self._targets += targets
        return earlier

    def check_mismatch(self, error: RestoreMismatchError) -> None:
        """Check that nothing was changed, as `error` says.

        Raises:
            RestoreError: An earlier attempt left live objects half-written. The error replaces
                `error`, and names these objects.
        """
        names = self._live(self._targets)
        if names:
            text = str(error).replace("; nothing was changed", "")
            msg = (
                f"{text}\nA damaged checkpoint was tried before; undefined now: {listed(names)}. "
                "Build these again before you use them"
            )
            raise RestoreError(msg) from error

    def check_left(self, earlier: Iterable[Target], filled: Iterable[Target], step: int) -> None:
        """Check that the older checkpoint has filled every target of earlier attempts.

        Raises:
            RestoreError: It lacks live objects that a damaged checkpoint had begun to overwrite.
        """
        earlier = [*earlier]
        if not earlier:
            return
        # Each attempt makes its own targets, so they are compared by their memory.
        whole = {target.sink.memory for target in filled}
        names = self._live([t for t in earlier if t.sink.memory not in whole])
        if names:
            msg = (
                f"step {step} is restored instead of a damaged one, but it lacks objects that the "
                f"damaged one had begun to overwrite; undefined now: {listed(names)}. Build these "
                "again before you use them"
            )
            raise RestoreError(msg)

    def _live(self, targets: Iterable[Target]) -> list[str]:
        """Return the shown paths of the targets in objects of the state.

        An earlier attempt may also have filled objects that it had built, and that are dropped.
        """
        suspects = {t.sink.memory: t.path for t in targets if t.sink.memory is not None}
        if not suspects:
            return []
        try:
            tree = describe_tree(
                self._state, providers=self._providers, allow_pickle=self._allow_pickle
            )
        except UnsupportedStateError:  # the state cannot be described now: any target may be in it
            return [*dict.fromkeys(map(show_path, suspects.values()))]
        objects = (entry for entry in tree.entries if isinstance(entry, StateObject))
        live = {piece.memory for entry in objects for piece in entry.source.pieces()}
        shown = [show_path(path) for memory, path in suspects.items() if memory in live]
        return [*dict.fromkeys(shown)]

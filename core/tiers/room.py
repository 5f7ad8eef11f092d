"""Chooses the tier that a save writes to, by room and outages."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from penstock.core.catalog.prune import CLOCK_PREFIX
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.errors import StorageError, StorageFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.concurrency.timing import Timing
    from penstock.core.format.records import CommitRecord
    from penstock.core.tiers.eviction import Eviction
    from penstock.core.tiers.outages import Outages
    from penstock.core.tiers.places import TierRoots

log = logging.getLogger("penstock")


class TierRoom:
    """Chooses the fastest tier that answers and has room for a save, after eviction."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        outages: Outages,
        roots: TierRoots,
        eviction: Eviction,
        timing: Timing,
        tidy: Callable[[int, int], None],
    ) -> None:
        """Prepare; contacts no tier.

        Args:
            tiers: The tiers, the fastest first.
            outages: Calls the tiers with deadlines and pauses.
            roots: Checks that slower tiers are the right places.
            eviction: Makes room in the tiers.
            timing: The lengths of waits.
            tidy: Evicts in the background, after reading later copies; called with a tier and the
                bytes that must fit.
        """
        self.tiers = tiers
        self._outages = outages
        self._roots = roots
        self._eviction = eviction
        self._timing = timing
        self._tidy = tidy
        self._rests: dict[int, Deadline] = {}  # tiers to leave alone; single operations are atomic
        self._next_log_room = Deadline(0.0)  # expires when room may be made for a log again
        self._next_warning = Deadline(0.0)  # expires when a bypassed tier may be logged again

    def away(self) -> list[str]:
        """Return the names of the fastest tiers that this rank cannot use now.

        Checks no tier after the first that answers.
        """
        left_alone = self.left_alone()
        names = []
        for number, tier in enumerate(self.tiers):
            if tier.name not in left_alone:
                try:
                    self._outages.ask(number, partial(tier.backend.list, CLOCK_PREFIX))
                except StorageError as error:
                    self._outages.warn(number, error)
                else:
                    break
            names.append(tier.name)
        return names

    def leave_alone(self, number: int) -> None:
        """Save to other tiers for a while, because a rank could not write to this tier."""
        timing = self._timing
        self._rests[number] = Deadline(timing.tier_rest_first_s, timing.clock)

    def left_alone(self) -> list[str]:
        """Return the names of the tiers that saves now avoid."""
        rests = dict(self._rests)
        return [self.tiers[number].name for number in rests if not rests[number].is_over()]

    def place(
        self,
        step: int,
        need_bytes: int,
        *,
        refused: Mapping[str, str] = MappingProxyType({}),
        wait: Callable[[], None] = lambda: None,
    ) -> int | None:
        """Return the fastest tier with room, after eviction; None if the save is skipped.

        Args:
            step: The step of the save.
            need_bytes: The most bytes that the save may store.
            refused: Tiers that cannot be used, by name, each with the reason.
            wait: Called repeatedly while no tier has room; may raise to give up.

        Raises:
            StorageFullError: No tier has room, and the configuration says `raise`.
        """
        logged = False
        while True:
            why: list[str] = []
            for number, tier in enumerate(self.tiers):
                if tier.name in refused:
                    why.append(f"tier {tier.name} {refused[tier.name]}")
                    continue
                try:
                    if self._has_room(number, need_bytes):
                        self._warn_of_bypass(step, tier, why)
                        return number
                    why.append(f"tier {tier.name} ({tier.backend.url}) is full")
                except StorageError as error:
                    why.append(f"tier {tier.name} does not answer: {error}")
            msg = (
                f"no tier has room for the {need_bytes} bytes of step {step}: {'; '.join(why)}. "
                "Checkpoints that only the fast tier has are not deleted to make room."
            )
            policy = self.tiers[0].on_full
            if policy == "raise":
                raise StorageFullError(msg)
            if policy == "skip":
                log.error("step %d is not saved: %s", step, msg)
                return None
            if not logged:
                log.error("the save of step %d waits: %s", step, msg)
                logged = True
            wait()
            time.sleep(self._timing.tier_full_poll_s)

    def make_room_for_log(self, need_bytes: int) -> None:
        """Evict from the fastest tier until `need_bytes` fit there, if that is possible."""
        if not self._next_log_room.is_over():
            return
        with suppress(StorageError):  # the append itself fails, and names the reason
            if self._has_room(0, need_bytes):
                return
        # A log appends after each step, and each failed try reads all commit records of the tier.
        self._next_log_room = Deadline(self._timing.tier_full_poll_s, self._timing.clock)

    def _warn_of_bypass(self, step: int, tier: Tier, why: Sequence[str]) -> None:
        """Warn that a save bypasses faster tiers, at most once per `repeat_log_s`."""
        if why and self._next_warning.is_over():
            self._next_warning = Deadline(self._timing.repeat_log_s, self._timing.clock)
            log.warning("step %d is saved straight to tier %s: %s", step, tier.name, "; ".join(why))

    def _has_room(self, number: int, need_bytes: int) -> bool:
        return self._outages.ask(number, partial(self._make_room, number, need_bytes))

    def _make_room(self, number: int, need_bytes: int) -> bool:
        if number:
            # A store that cannot report its room counts as having room even while it is away. The
            # listing raises then.
            self.tiers[number].backend.list(CLOCK_PREFIX)
            self._roots.check(number)
        unverified = False

        def verify(_backend: Backend, _record: CommitRecord) -> bool:
            nonlocal unverified
            unverified = True
            return False

        fits = self._eviction.make_room(number, need_bytes, verify=verify)
        if unverified:  # reading takes long, so a background thread does it
            self._tidy(number, need_bytes)
        return fits

"""Verifies the copies of a checkpoint in all tiers, and brings bad ones anew from a good one."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from penstock.core.concurrency.watchdog import Watchdog, call_with_deadline
from penstock.core.errors import (
    ConfigError,
    DamagedError,
    PenstockError,
    SaveAbortedError,
    StorageTimeoutError,
)
from penstock.core.format.records import commit_name
from penstock.core.reporting.progress import metered
from penstock.core.reporting.reports import Damage, Repair

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.concurrency.workers import Workers
    from penstock.core.format.records import CommitRecord
    from penstock.core.reporting.progress import Meter
    from penstock.core.reporting.reports import CopyFound, Progress, VerifyReport
    from penstock.core.restore.checkpoint import Checkpoint


class Bring(Protocol):
    """Replaces one tier's copy, once all of another was verified: see `TierRepairs.bring`."""

    def __call__(
        self,
        record: CommitRecord,
        good: int,
        bad: int,
        *,
        unreadable: bool,
        on_progress: Callable[[int], None],
    ) -> None:
        """Bring `record` from tier `good` to tier `bad`."""
        ...


@dataclass(frozen=True, slots=True)
class Mending:
    """What repairing takes.

    Attributes:
        bring: Replaces a copy.
        workers: Threads for what waits.
        stuck_s: A store that has not moved for so long counts as stuck.
    """

    bring: Bring
    workers: Workers
    stuck_s: float


def verify_and_repair(
    checkpoint: Checkpoint,
    mending: Mending | None,
    *,
    deep: bool,
    on_progress: Callable[[Progress], None] | None,
) -> VerifyReport:
    """As `Checkpoint.verify`; then every bad copy is brought anew from a good one, if there is one.

    A tier without the checkpoint has evicted it, and stays without. No copy is deleted before all
    of another one was read and compared, whatever `deep` says.

    Raises:
        ConfigError: The run is in one place.
        StorageTimeoutError: A store is stuck.
    """
    if mending is None or not checkpoint.backend.tiers:
        msg = (
            f"{checkpoint.backend.url} is one place: repairing takes another copy. Name the run "
            "with all its tiers, or copy a good checkpoint there"
        )
        raise ConfigError(msg)
    began = time.monotonic()
    with metered(on_progress, "the verification") as meter:
        copies = checkpoint.verify_copies(meter, deep=deep)
        repairs = _Repairs(checkpoint, mending, meter, copies, deep=deep)
        done = tuple(repairs.of(number) for number in range(len(copies)) if repairs.needs(number))
        found = checkpoint.report_of(copies, deep=deep, began=began)
        return replace(
            found,
            ok=not repairs.late and all(one.error is None for one in done),
            damaged=(*found.damaged, *repairs.late),
            repairs=done,
        )


class _Repairs:
    """The repairs of one checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        mending: Mending,
        meter: Meter,
        copies: list[CopyFound | None],
        *,
        deep: bool,
    ) -> None:
        self.late: list[Damage] = []
        """Damage of copies that had seemed good."""
        self._checkpoint = checkpoint
        self._record = checkpoint.contents.record
        self._mending = mending
        self._meter = meter
        self._copies = copies
        self._deep = deep
        self._good = [number for number, copy in enumerate(copies) if self._is_good(copy)]

    def needs(self, number: int) -> bool:
        """Whether the copy in this tier is bad."""
        copy = self._copies[number]
        return copy is not None and bool(copy.damaged)

    def of(self, bad: int) -> Repair:
        """Bring the copy in one tier anew, from the fastest good one."""
        tier = self._checkpoint.backend.tiers[bad]
        if not self._is_this_one(bad):
            return Repair(tier.name, None, "it is of another save, which no other tier has")
        error = (
            "no other tier has a good copy. If reading finds all of it between them, `penstock "
            "copy --raw` makes a whole one elsewhere"
        )
        for good in tuple(self._good):
            try:
                self._bring(good, bad)
            except DamagedError as damage:
                self._good.remove(good)
                name, error = self._checkpoint.backend.tiers[good].name, str(damage)
                self.late += [Damage(w, f"in tier {name}: {error}") for w in damage.damaged]
            except StorageTimeoutError:
                raise
            except PenstockError as failure:
                return Repair(tier.name, None, str(failure))
            else:
                return Repair(tier.name, self._checkpoint.backend.tiers[good].name, self._left(bad))
        return Repair(tier.name, None, error)

    def _is_good(self, copy: CopyFound | None) -> bool:
        return copy is not None and copy.uid == self._record.uid and not copy.damaged

    def _is_this_one(self, number: int) -> bool:
        """Whether this tier's copy is one of the same save, or was before it became unreadable."""
        copy = self._copies[number]
        assert copy is not None
        name = commit_name(self._record.step, self._record.generation)
        if copy.uid is None:
            return name in {damage.what for damage in copy.damaged}
        return copy.uid == self._record.uid

    def _bring(self, good: int, bad: int) -> None:
        timing = self._mending.workers.timing
        watch = _Watch(self._meter, Watchdog(self._mending.stuck_s, timing.clock))
        self._meter.begin("repair")
        self._meter.expect(2 * self._record.bytes_stored)  # read first, then copied
        copy = self._copies[bad]
        call_with_deadline(
            "repair",
            lambda: self._mending.bring(
                self._record,
                good,
                bad,
                unreadable=copy is not None and copy.uid is None,
                on_progress=watch.moved,
            ),
            watch.watchdog,
            watch.stuck,
            timing=timing,
            cancel=watch.cancel,
        )

    def _left(self, number: int) -> str | None:
        """What is wrong with a copy that was brought anew."""
        tier = self._checkpoint.backend.tiers[number]
        copy = self._checkpoint.verify_copy(tier, self._meter, deep=self._deep)
        if copy is None:
            return "it is not there any more: deleted meanwhile, or evicted"
        return next((damage.detail for damage in copy.damaged), None)


class _Watch:
    """Hears of the bytes of a repair: counts them, ends it, and puts its watchdog off."""

    def __init__(self, meter: Meter, watchdog: Watchdog) -> None:
        self.watchdog = watchdog
        self._meter = meter
        self._cancelled = False

    def moved(self, size_bytes: int) -> None:
        """So many bytes more.

        Raises:
            SaveAbortedError: The caller that asked for the repair was interrupted.
        """
        if self._cancelled:
            msg = "given up: the caller was interrupted"
            raise SaveAbortedError(msg)
        self.watchdog.moved()
        self._meter.advance(size_bytes)

    def cancel(self) -> None:
        """Make the repair end with its next bytes."""
        self._cancelled = True

    def stuck(self) -> StorageTimeoutError:
        """The error that says that there was no progress for too long."""
        return StorageTimeoutError(
            f"no progress for {self.watchdog.taken_s():.0f} s "
            f"(io_timeout_s={self.watchdog.limit_s:g}) while a copy was brought anew, which may "
            "still happen; the good one is left as it is"
        )

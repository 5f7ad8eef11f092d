"""Verifies the copies of a checkpoint in all tiers, and replaces bad ones by a good one."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

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

    from penstock.core.reporting.progress import Meter
    from penstock.core.reporting.reports import CopyFound, Progress, VerifyReport
    from penstock.core.restore.checkpoint import Checkpoint
    from penstock.core.tiers.repairs import TierRepairs


def verify_and_repair(
    checkpoint: Checkpoint,
    repairs: TierRepairs | None,
    *,
    deep: bool,
    on_progress: Callable[[Progress], None] | None,
) -> VerifyReport:
    """Verify as `Checkpoint.verify` does, and replace every bad copy by a good one, if one exists.

    A tier without the checkpoint has evicted it, and stays without. A bad copy is deleted only
    after all of the good one was read and compared, whatever `deep` says.

    Args:
        checkpoint: The checkpoint.
        repairs: The repairs of the run; None if the run is in one place.
        deep: As for `Checkpoint.verify`.
        on_progress: Called with the progress of the verification, then of each repair.

    Raises:
        ConfigError: The run is in one place.
        StorageTimeoutError: A store is stuck.
    """
    if repairs is None or not checkpoint.backend.tiers:
        msg = (
            f"{checkpoint.backend.url} is one place: repairing takes another copy. Name the run "
            "with all its tiers, or copy a good checkpoint there"
        )
        raise ConfigError(msg)
    began = time.monotonic()
    with metered(on_progress, "the verification") as meter:
        copies = checkpoint.verify_copies(meter, deep=deep)
        repair = _CheckpointRepair(checkpoint, repairs, meter, copies, deep=deep)
        done = tuple(repair.of(number) for number in range(len(copies)) if repair.needs(number))
        found = checkpoint.report_of(copies, deep=deep, began=began)
        return replace(
            found,
            ok=not repair.late and all(one.error is None for one in done),
            damaged=(*found.damaged, *repair.late),
            repairs=done,
        )


class _CheckpointRepair:
    """The repair of one checkpoint in all tiers."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        repairs: TierRepairs,
        meter: Meter,
        copies: list[CopyFound | None],
        *,
        deep: bool,
    ) -> None:
        self.late: list[Damage] = []
        """Damage of copies that the verification had found good, found by the repair."""
        self._checkpoint = checkpoint
        self._record = checkpoint.contents.record
        self._repairs = repairs
        self._meter = meter
        self._copies = copies
        self._deep = deep
        self._good = [number for number, copy in enumerate(copies) if self._is_good(copy)]

    def needs(self, number: int) -> bool:
        """Return whether one tier has a bad copy."""
        copy = self._copies[number]
        return copy is not None and bool(copy.damaged)

    def of(self, bad: int) -> Repair:
        """Replace the copy in one tier by the fastest good one, and return the outcome."""
        tier = self._checkpoint.backend.tiers[bad]
        if not self._is_this_one(bad):
            return Repair(tier.name, None, "it is of another save, which no other tier has")
        error = (
            "no other tier has a good copy. If reading finds all of it between them, `penstock "
            "copy --raw` makes a whole one elsewhere"
        )
        for good in tuple(self._good):
            try:
                self._replace(good, bad)
            except DamagedError as damage:
                self._good.remove(good)
                name, error = self._checkpoint.backend.tiers[good].name, str(damage)
                self.late += [Damage(w, f"in tier {name}: {error}") for w in damage.damaged]
            except StorageTimeoutError:
                raise  # the store is stuck: the next repair would hang in it as well
            except PenstockError as failure:
                return Repair(tier.name, None, str(failure))
            else:
                return Repair(
                    tier.name, self._checkpoint.backend.tiers[good].name, self._damage_left(bad)
                )
        return Repair(tier.name, None, error)

    def _is_good(self, copy: CopyFound | None) -> bool:
        return copy is not None and copy.uid == self._record.uid and not copy.damaged

    def _is_this_one(self, number: int) -> bool:
        """Return whether a tier's copy is of the same save, as far as its record can be read."""
        copy = self._copies[number]
        assert copy is not None
        name = commit_name(self._record.step, self._record.generation)
        if copy.uid is None:
            return name in {damage.what for damage in copy.damaged}
        return copy.uid == self._record.uid

    def _replace(self, good: int, bad: int) -> None:
        """Replace a copy on a thread of its own, as a store may hang.

        Raises:
            StorageTimeoutError: A store is stuck.
            PenstockError: As `TierRepairs.replace_copy`.
        """
        timing = self._repairs.workers.timing
        watchdog = Watchdog(self._repairs.stuck_s, timing.clock)
        cancelled = threading.Event()
        copy = self._copies[bad]
        self._meter.begin("repair")
        self._meter.expect(2 * self._record.bytes_needed)  # read first, then copied

        def on_progress(size_bytes: int) -> None:
            if cancelled.is_set():
                msg = "given up: the caller was interrupted"
                raise SaveAbortedError(msg)
            watchdog.moved()
            self._meter.advance(size_bytes)

        def stuck() -> StorageTimeoutError:
            return StorageTimeoutError(
                f"no progress for {watchdog.taken_s():.0f} s (io_timeout_s={watchdog.limit_s:g}) "
                "while a copy was brought anew, which may still happen; the good one is left as it "
                "is"
            )

        call_with_deadline(
            "repair",
            lambda: self._repairs.replace_copy(
                self._record,
                good,
                bad,
                unreadable=copy is not None and copy.uid is None,
                on_progress=on_progress,
            ),
            watchdog,
            stuck,
            timing=timing,
            cancel=cancelled.set,
        )

    def _damage_left(self, number: int) -> str | None:
        """Verify a copy that was replaced; return what is still wrong with it, if anything."""
        tier = self._checkpoint.backend.tiers[number]
        copy = self._checkpoint.verify_copy(tier, self._meter, deep=self._deep)
        if copy is None:
            return "it is not there any more: deleted meanwhile, or evicted"
        return next((damage.detail for damage in copy.damaged), None)

"""The root records of one run's tiers. Savers and drains write them; copies check them.

`core/abc/tiers.py` describes the record. Reading a run never writes a record.

Tested in `tests/integration/tiers/test_roots.py`.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.abc import (
    ROOT_NAME,
    RootRecord,
    encode_root,
    first_durable,
    misplaced_roots,
    read_root,
)
from penstock.core.errors import (
    BlobExistsError,
    ConfigError,
    FormatError,
    StorageError,
    WrongPlaceError,
)
from penstock.core.format.records import COMMIT_PREFIX

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.tiers.outages import Outages

log = logging.getLogger("penstock")


class TierRoots:
    """The roots of one run's tiers, as this process knows them. Thread-safe."""

    def __init__(self, tiers: Sequence[Tier], outages: Outages) -> None:
        """Prepare; contacts no tier."""
        self._tiers = tiers
        self._outages = outages
        self._lock = threading.Lock()  # one registration at a time; guards the four below
        self._known: dict[int, str] = {}  # the root of each registered tier
        self._wrong: dict[int, str] = {}  # tiers to leave alone, with the reason
        self._used_before: set[int] = set()
        self._before_older: set[int] = set()

    def register(self, *, despite_pause: bool = False) -> None:
        """Write a root record to each tier that answers.

        The record has the ID of this tier's root, and those of the other tiers' roots. A tier is
        registered once per process.

        Args:
            despite_pause: Contact even tiers whose calls are paused (see `Outages.ask`).

        Raises:
            ConfigError: Two tiers are the same place, are swapped, or belong to different runs;
                nothing was written.
        """
        with self._lock:
            if len(self._known) == len(self._tiers):
                return
            found, damaged = self._read_all(despite_pause=despite_pause)
            if not found.keys() - self._known.keys():
                return
            readable = {n: record for n, record in found.items() if n not in damaged}
            if not self._is_accepted():
                self._wrong = misplaced_roots(
                    self._tiers, readable, has_checkpoints=self._has_checkpoints
                )
            self._warn_of_older(found)
            usable = {n: record for n, record in found.items() if n not in self._wrong}
            self._used_before |= {n for n, record in usable.items() if record and _is_known(record)}
            self._before_older |= {n for n in usable if _is_before_older(n, usable)}
            self._write_all(usable, damaged)

    def was_used_before(self, number: int) -> bool:
        """Return whether earlier processes recorded in this tier which saves not to copy."""
        return number in self._used_before

    def is_before_older(self, number: int) -> bool:
        """Return whether a slower tier is new, or older than this tier's record says."""
        return number in self._before_older

    def behind(self, number: int) -> frozenset[str]:
        """Return the registered roots of the tiers slower than tier `number`."""
        return frozenset(root for known, root in self._known.items() if known > number)

    def check(self, number: int) -> None:
        """Verify that a tier still has the root that this process registered.

        Copies check it before and after, because the file system may be unmounted in between. Tiers
        faster than the durable tier are not checked: they may lose everything, and saves still use
        them.

        Raises:
            WrongPlaceError: The tier has another root, or none.
            StorageError: The tier does not answer.
        """
        if number < first_durable(self._tiers):
            return
        backend = self._tiers[number].backend
        if number not in self._known:
            # `register` does not raise for an outage. So the tier is read first: while it is away,
            # users must see the store's error, not that its root is not registered.
            with suppress(FormatError):  # `register` replaces a damaged record
                read_root(backend)
            self.register(despite_pause=True)
        if number in self._wrong:
            raise WrongPlaceError(self._wrong[number])
        try:
            record = read_root(backend)
        except FormatError as error:
            raise StorageError(str(error)) from error
        if number not in self._known:
            msg = f"the root record of {backend.url} is not written yet"
            raise StorageError(msg)
        if record is None or record.root != self._known[number]:
            msg = (
                f"{backend.url} is no longer the place that it was when this process began: "
                f"its {ROOT_NAME} is {'gone' if record is None else 'that of another place'}. Was "
                "its file system unmounted, or the folder replaced? Nothing is copied there until "
                "it is back, or the run is opened again."
            )
            raise WrongPlaceError(msg)

    # ------------------------------------------------------------------------------------------

    def _is_accepted(self) -> bool:
        return any(tier.accept_root for tier in self._tiers)

    def _has_checkpoints(self, number: int) -> bool:
        try:
            return bool(self._tiers[number].backend.list(COMMIT_PREFIX))
        except StorageError:
            return False

    def _read_all(self, *, despite_pause: bool) -> tuple[dict[int, RootRecord | None], set[int]]:
        """Return the records of the tiers that answer, and the tiers with a damaged record."""
        records: dict[int, RootRecord | None] = {}
        damaged: set[int] = set()
        for number, tier in enumerate(self._tiers):
            try:
                records[number] = self._outages.ask(
                    number, partial(read_root, tier.backend), despite_pause=despite_pause
                )
            except FormatError as error:
                log.warning("tier %s: %s; it is rewritten", tier.name, str(error))
                records[number] = None
                damaged.add(number)
            except StorageError as error:
                self._outages.warn(number, error)
        return records, damaged

    def _warn_of_older(self, found: Mapping[int, RootRecord | None]) -> None:
        """Warn about roots whose own count of uses is lower than another tier's record."""
        for number, record in found.items():
            if record is None or number in self._known:
                continue
            for other in found.values():
                recorded = dict(other.tiers).get(record.root, 0) if other is not None else 0
                if recorded > record.opened:
                    log.warning(
                        "tier %s (%s) is older than another tier's record of it: was it restored "
                        "from a backup? Checkpoints that are missing there, but are in a faster "
                        "tier, are copied again",
                        self._tiers[number].name,
                        self._tiers[number].backend.url,
                    )
                    break

    def _write_all(self, found: Mapping[int, RootRecord | None], damaged: Collection[int]) -> None:
        """Write the records, the slowest tier first.

        With this order, no crash leaves a tier that names a root without a record. Such a root
        would look like the empty mount point of an unmounted file system.
        """
        present = [found[number] for number in sorted(found, reverse=True)]
        run = next((r.run for r in present if r is not None), secrets.token_hex(16))
        mine: dict[int, RootRecord] = {}
        for number in sorted(found, reverse=True):
            record = found[number]
            if record is None or record.run != run:
                fresh = record is None and number not in damaged
                record = self._created(number, run, exclusive=fresh)
            if record is None:
                continue
            if record.run != run and not self._is_accepted():  # another process was faster
                misplaced_roots(
                    self._tiers, {**found, number: record}, has_checkpoints=self._has_checkpoints
                )
            run = record.run  # else the next tier would get another run
            self._check_distinct(number, record, mine)
            mine[number] = record
        self._warn_of_new(found, mine)
        order = [(mine[n].root, mine[n].opened + 1) for n in sorted(mine)]
        for number in sorted(mine, reverse=True):
            record = mine[number]
            # A tier that is away now keeps its place in the other tiers' records.
            whole = len(mine) == len(self._tiers)
            tiers = tuple(order) if whole else merged_order(record.tiers, order)
            updated = replace(record, opened=record.opened + 1, tiers=tiers)
            publish = partial(self._tiers[number].backend.publish, ROOT_NAME, encode_root(updated))
            try:
                self._outages.ask(number, publish, despite_pause=True)  # the tier has just answered
            except StorageError as error:
                self._outages.warn(number, error)
                continue
            self._known[number] = updated.root

    def _check_distinct(
        self, number: int, record: RootRecord, slower: Mapping[int, RootRecord]
    ) -> None:
        """Refuse a tier with the root of a slower tier, even if their URLs differ."""
        if all(record.root != other.root for other in slower.values()):
            return
        name, url = self._tiers[number].name, self._tiers[number].backend.url
        msg = (
            f"tier {name} ({url}) is the same place as a slower tier, perhaps over the network: "
            "data evicted from it would be lost. Give each tier its own place. If the tier is a "
            f"copy that a user made, delete {ROOT_NAME} in it."
        )
        raise ConfigError(msg)

    def _created(self, number: int, run: str, *, exclusive: bool) -> RootRecord | None:
        """Return a new record for a tier, or the record that another process just created there.

        None if the tier does not answer.
        """
        backend = self._tiers[number].backend
        record = RootRecord(run, secrets.token_hex(16))
        try:
            # The tier has just been read, so a pause is ignored: otherwise a tier that is back gets
            # no root record, and thus no copy, until the pause is over.
            publish = partial(_publish_root, backend, record, exclusive=exclusive)
            return self._outages.ask(number, publish, despite_pause=True)
        except (StorageError, FormatError) as error:
            log.warning(
                "tier %s: cannot create a root record: %s", self._tiers[number].name, str(error)
            )
            return None

    def _warn_of_new(
        self, found: Mapping[int, RootRecord | None], mine: Mapping[int, RootRecord]
    ) -> None:
        """Warn about tiers with a new root in a run that already has other roots."""
        for number, record in mine.items():
            before = found[number]
            if any(found.values()) and (before is None or before.root != record.root):
                log.warning(
                    "tier %s (%s) is new to this run; it lacks checkpoints that only an earlier "
                    "place of that tier had",
                    self._tiers[number].name,
                    self._tiers[number].backend.url,
                )


def _is_known(record: RootRecord) -> bool:
    """Return whether a process has used this root together with other roots.

    A root without others may hold saves of an earlier version, which did not record the saves that
    must not be copied. The last tier of a run also counts: it may become a faster tier later, and
    so far no copy from it has left out a save.
    """
    return len(record.tiers) > 1


def _is_before_older(number: int, found: Mapping[int, RootRecord | None]) -> bool:
    record = found[number]
    # Ignores roots that were faster than this one: they lack evicted checkpoints, which no process
    # has deleted.
    behind = record.slower() if record is not None else []
    recorded = dict(record.tiers) if record is not None else {}
    recorded = {root: recorded[root] for root in behind}
    slower = [other for n, other in found.items() if n > number]
    return any(
        other is None or other.opened < recorded.get(other.root, math.inf) for other in slower
    )


def merged_order(
    before: Sequence[tuple[str, int]], now: Sequence[tuple[str, int]]
) -> tuple[tuple[str, int], ...]:
    """Return the roots of both lists in one order; a new root follows its faster neighbor."""
    counts = dict(before) | dict(now)
    ids = [root for root, _ in before]
    above: str | None = None
    for root, _ in now:
        if root not in ids:
            ids.insert(0 if above is None else ids.index(above) + 1, root)
        above = root
    return tuple((root, counts[root]) for root in ids)


def _publish_root(backend: Backend, record: RootRecord, *, exclusive: bool) -> RootRecord | None:
    """Publish a new record; return the record that the tier then has."""
    exclusive = exclusive and backend.capabilities.exclusive_publish
    with suppress(BlobExistsError):  # another process was faster, or another tier is the same place
        backend.publish(ROOT_NAME, encode_root(record), exclusive=exclusive)
    return read_root(backend)

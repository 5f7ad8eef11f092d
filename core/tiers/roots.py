"""Notes which roots a run is kept in, and notices when one is not what it was.

See `abc.roots` for the record. It is written by whoever saves or drains, never by whoever reads.
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
    from penstock.core.tiers.outages import Answers

log = logging.getLogger("penstock")


class TierRoots:
    """The roots of one run's tiers, as this process has met them. Thread-safe."""

    def __init__(self, tiers: Sequence[Tier], answers: Answers) -> None:
        """Look at nothing yet; tiers are asked through `answers`."""
        self._tiers = tiers
        self._answers = answers
        self._lock = threading.Lock()  # one registration at a time; guards the three below
        self._known: dict[int, str] = {}  # the root of each tier that was registered
        self._wrong: dict[int, str] = {}  # why others are left alone
        self._used_before: set[int] = set()
        self._before_older: set[int] = set()

    def register(self, *, silent_too: bool = False) -> None:
        """Give each tier that answers an identity, unless it has one, and note the others' there.

        Once per tier and process.

        Args:
            silent_too: Ask tiers also that are left alone since they did not answer.

        Raises:
            ConfigError: The tiers are no tiers of one run in this order; nothing was written.
        """
        with self._lock:
            if len(self._known) == len(self._tiers):
                return
            found, damaged = self._read_all(silent_too=silent_too)
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
        """Whether this tier notes what is not to be copied from it, since it was first used."""
        return number in self._used_before

    def is_before_older(self, number: int) -> bool:
        """Whether a place is new behind this tier, or older than this tier has seen it."""
        return number in self._before_older

    def behind(self, number: int) -> frozenset[str]:
        """The roots behind a tier, as far as they were registered."""
        return frozenset(root for other, root in self._known.items() if other > number)

    def check(self, number: int) -> None:
        """Make sure that a tier is still the root that it was.

        Before and after something is copied there: its file system may have been unmounted.

        Tiers in front of the durable one may lose all, and go on.

        Raises:
            WrongPlaceError: It is another one, or none.
            StorageError: It does not answer.
        """
        if number < first_durable(self._tiers):
            return
        backend = self._tiers[number].backend
        if number not in self._known:
            # Read first: a tier that comes back just behind a registration that failed would be
            # told as one that could not be noted, which no user can do anything about.
            with suppress(FormatError):  # a damaged record is written anew
                read_root(backend)
            self.register(silent_too=True)
        if number in self._wrong:
            raise WrongPlaceError(self._wrong[number])
        try:
            record = read_root(backend)
        except FormatError as error:
            raise StorageError(str(error)) from error
        if number not in self._known:
            msg = f"who {backend.url} is could not be noted there yet"
            raise StorageError(msg)
        if record is None or record.root != self._known[number]:
            msg = (
                f"{backend.url} is not the place any more that it was when this process began: "
                f"its {ROOT_NAME} is {'gone' if record is None else 'that of another'}. Was its "
                "file system unmounted, or the folder replaced? Nothing is copied there until it "
                "is back, or the run was opened anew."
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

    def _read_all(self, *, silent_too: bool) -> tuple[dict[int, RootRecord | None], set[int]]:
        """The records of tiers that answer, and numbers of those whose record is damaged."""
        found: dict[int, RootRecord | None] = {}
        damaged: set[int] = set()
        for number, tier in enumerate(self._tiers):
            try:
                found[number] = self._answers.ask(
                    number, partial(read_root, tier.backend), silent_too=silent_too
                )
            except FormatError as error:
                log.warning("tier %s: %s; it is written anew", tier.name, str(error))
                found[number] = None
                damaged.add(number)
            except StorageError as error:
                self._answers.missed(number, tier.name, error)
        return found, damaged

    def _warn_of_older(self, found: Mapping[int, RootRecord | None]) -> None:
        """Say which roots were used more often by then than they say now."""
        for number, record in found.items():
            if record is None or number in self._known:
                continue
            for other in found.values():
                seen = dict(other.tiers).get(record.root, 0) if other is not None else 0
                if seen > record.opened:
                    log.warning(
                        "tier %s (%s) is older than another tier has seen it: was it restored "
                        "from a backup? What a faster tier has of what is missing there is "
                        "copied once more",
                        self._tiers[number].name,
                        self._tiers[number].backend.url,
                    )
                    break

    def _write_all(self, found: Mapping[int, RootRecord | None], damaged: Collection[int]) -> None:
        """Slower tiers first: nobody may know a root that does not know itself."""
        present = [found[number] for number in sorted(found, reverse=True)]
        run = next((r.run for r in present if r is not None), secrets.token_hex(16))
        mine: dict[int, RootRecord] = {}
        for number in sorted(found, reverse=True):
            record = found[number]
            if record is None or record.run != run:
                fresh = record is None and number not in damaged
                record = self._made(number, run, exclusive=fresh)
            if record is None:
                continue
            if record.run != run and not self._is_accepted():  # another process was faster
                misplaced_roots(
                    self._tiers, {**found, number: record}, has_checkpoints=self._has_checkpoints
                )
            run = record.run  # else the next tier would be of a run of its own
            self._check_apart(number, record, mine)
            mine[number] = record
        self._say_new(found, mine)
        order = [(mine[n].root, mine[n].opened + 1) for n in sorted(mine)]
        for number in sorted(mine, reverse=True):
            record = mine[number]
            # What is not there at the moment is not forgotten.
            whole = len(mine) == len(self._tiers)
            tiers = tuple(order) if whole else merged_order(record.tiers, order)
            noted = replace(record, opened=record.opened + 1, tiers=tiers)
            publish = partial(self._tiers[number].backend.publish, ROOT_NAME, encode_root(noted))
            try:
                self._answers.ask(number, publish)
            except StorageError as error:
                self._answers.missed(number, self._tiers[number].name, error)
                continue
            self._known[number] = noted.root

    def _check_apart(
        self, number: int, record: RootRecord, slower: Mapping[int, RootRecord]
    ) -> None:
        if all(record.root != other.root for other in slower.values()):
            return
        name, url = self._tiers[number].name, self._tiers[number].backend.url
        msg = (
            f"tier {name} ({url}) is the same place as a slower tier, perhaps by way of the "
            "network: what is evicted from it would be lost. Give each a place of its own. If it "
            f"is a copy that somebody has made, delete {ROOT_NAME} in it."
        )
        raise ConfigError(msg)

    def _made(self, number: int, run: str, *, exclusive: bool) -> RootRecord | None:
        """A new identity for a tier, or the one that another process has just given it."""
        backend = self._tiers[number].backend
        record = RootRecord(run, secrets.token_hex(16))
        try:
            return self._answers.ask(
                number, partial(_publish_root, backend, record, exclusive=exclusive)
            )
        except (StorageError, FormatError) as error:
            log.warning("tier %s gets no identity: %s", self._tiers[number].name, str(error))
            return None

    def _say_new(
        self, found: Mapping[int, RootRecord | None], mine: Mapping[int, RootRecord]
    ) -> None:
        for number, record in mine.items():
            before = found[number]
            if any(found.values()) and (before is None or before.root != record.root):
                log.warning(
                    "tier %s (%s) is new to this run; what an earlier place of that tier had "
                    "alone is not there",
                    self._tiers[number].name,
                    self._tiers[number].backend.url,
                )


def _is_known(record: RootRecord) -> bool:
    """Whether a process has used this root together with others.

    Until then an earlier version may have saved there, which did not note what it left out. The
    last tier of a run may become a faster one: it has left nothing out so far.
    """
    return len(record.tiers) > 1


def _is_before_older(number: int, found: Mapping[int, RootRecord | None]) -> bool:
    record = found[number]
    # What was in front of this one lacks what was evicted there, and that was not deleted.
    behind = record.slower() if record is not None else []
    seen = dict(record.tiers) if record is not None else {}
    seen = {root: seen[root] for root in behind}
    slower = [other for n, other in found.items() if n > number]
    return any(other is None or other.opened < seen.get(other.root, math.inf) for other in slower)


def merged_order(
    before: Sequence[tuple[str, int]], now: Sequence[tuple[str, int]]
) -> tuple[tuple[str, int], ...]:
    """Roots that were known before and those that are there now, each where it belongs."""
    counts = dict(before) | dict(now)
    ids = [root for root, _ in before]
    above: str | None = None
    for root, _ in now:
        if root not in ids:
            ids.insert(0 if above is None else ids.index(above) + 1, root)
        above = root
    return tuple((root, counts[root]) for root in ids)


def _publish_root(backend: Backend, record: RootRecord, *, exclusive: bool) -> RootRecord | None:
    exclusive = exclusive and backend.capabilities.exclusive_publish
    with suppress(BlobExistsError):  # another process was faster, or it is another tier's place
        backend.publish(ROOT_NAME, encode_root(record), exclusive=exclusive)
    return read_root(backend)

"""Evicts checkpoints from tiers, once a later tier was found to have their data.

A commit record proves that a checkpoint was whole when it was published. Its blobs may have been
lost, cut off or damaged since. So before a copy goes, the names and lengths of the later copy are
compared with its manifest; and all of it is read, unless this process has written it itself.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from penstock.core.catalog.deletion import delete_records
from penstock.core.catalog.survey import is_whole
from penstock.core.copy.verify import has_all_data
from penstock.core.errors import CheckpointGoneError, DamagedError, FormatError, StorageError
from penstock.core.format.records import commit_name
from penstock.core.tiers.whereabouts import by_age, is_marked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.format.records import CommitRecord

log = logging.getLogger("penstock")

MARGIN_BYTES = 8 << 20
"""Room that stays beside a save: part, index, records, and what a file system keeps."""


class Prove(Protocol):
    """Reads all of a copy in a later tier, for a thread that can afford to wait."""

    def __call__(self, backend: Backend, record: CommitRecord, /) -> bool:
        """Compare every checksum; False: this was not done, and nothing is known.

        Raises:
            DamagedError: The copy is not what was written.
            CheckpointGoneError: It was deleted meanwhile.
            StorageError: The store failed.
        """
        ...


def prove_nothing(_backend: Backend, _record: CommitRecord) -> bool:
    """Read nothing: only copies that are proved already count."""
    return False


class Rooms:
    """Makes room in tiers by evicting checkpoints of which a later tier has a proved copy."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        renew: Callable[[CommitRecord, int, int], None] = lambda _record, _good, _bad: None,
    ) -> None:
        """Look at `tiers`.

        Args:
            tiers: From the fastest on.
            renew: Called with a checkpoint, the number of the tier whose copy stays, and that of
                the later tier whose copy turned out to be damaged: once per process.
        """
        self._tiers = tiers
        self._renew = renew
        # Sets are changed by single operations, which the interpreter makes atomic.
        self._proved: set[tuple[int, str]] = set()  # copies that this process wrote, or has read
        self._distrusted: set[tuple[int, str]] = set()  # copies of which the log has spoken

    def note_copied(self, number: int, record: CommitRecord) -> None:
        """This process has written the copy in tier `number`, and compared every checksum."""
        self._proved.add((number, record.uid))
        self._distrusted.discard((number, record.uid))

    def make_room(self, number: int, need_bytes: int, *, prove: Prove = prove_nothing) -> bool:
        """Evict from a tier, oldest first, until `need_bytes` fit; False: they do not.

        Raises:
            StorageError: The tier itself does not answer.
        """
        backend = self._tiers[number].backend
        need_bytes += MARGIN_BYTES
        free = backend.free_bytes()
        if free is None or free >= need_bytes:
            return True
        candidates = self._evictable(number, by_age(backend), prove)
        while True:
            try:
                record = next(candidates, None)
            except StorageError as error:
                log.warning("nothing is evicted from %s: %s", backend.url, str(error))
                return False
            if record is None:
                return False
            self.evict(number, record)
            free = backend.free_bytes()
            if free is None or free >= need_bytes:
                return True

    def trim(self, number: int, *, prove: Prove = prove_nothing) -> None:
        """Evict all but the newest `keep_last` of what a later tier has.

        Raises:
            StorageError: A tier does not answer.
        """
        keep = self._tiers[number].keep_last
        if keep is None:
            return
        here = by_age(self._tiers[number].backend)
        for record in self._evictable(number, here[: max(len(here) - keep, 0)], prove):
            self.evict(number, record)

    def evict(self, number: int, record: CommitRecord, *, unreadable: bool = False) -> None:
        """Delete one tier's copy: its record first, durably, then its data.

        Unless another's record has that name by now; with `unreadable`, one that can be read.
        """
        tier = self._tiers[number]
        name = commit_name(record.step, record.generation)
        delete_records(tier.backend, [name], uids={name: None if unreadable else record.uid})
        self._proved.discard((number, record.uid))
        log.debug("evicted step %d from tier %s", record.step, tier.name)

    def _evictable(
        self, number: int, here: Sequence[CommitRecord], prove: Prove
    ) -> Iterator[CommitRecord]:
        """Those of `here` that wait for nothing in their tier, and that a later one has whole.

        Later tiers are asked for these alone: they may hold many more.
        """
        backend = self._tiers[number].backend
        for record in here:
            # The mark is looked for behind the proof, which may take long: a repair sets it
            # meanwhile on the copy that it brings elsewhere.
            if self._is_elsewhere(number, record, prove) and not is_marked(backend, record.uid):
                yield record

    def _is_elsewhere(self, number: int, record: CommitRecord, prove: Prove) -> bool:
        """Whether a tier behind `number` has a proved copy."""
        for later in range(number + 1, len(self._tiers)):
            backend = self._tiers[later].backend
            if not is_whole(backend, record):
                continue
            try:
                _check_data(backend, record)
                if (later, record.uid) not in self._proved:
                    if not prove(backend, record):
                        continue
                    self._proved.add((later, record.uid))
            except CheckpointGoneError:
                continue
            except DamagedError as error:
                self._distrust(number, later, record, error)
                return False
            return True
        return False

    def _distrust(self, number: int, later: int, record: CommitRecord, error: DamagedError) -> None:
        """Keep the copy in tier `number`, say why, and have the other one brought anew."""
        self._proved.discard((later, record.uid))
        if (later, record.uid) in self._distrusted:
            return
        self._distrusted.add((later, record.uid))
        log.warning(
            "step %d stays in tier %s: tier %s lists it, but its copy is damaged, and is brought "
            "anew: %s",
            record.step,
            self._tiers[number].name,
            self._tiers[later].name,
            str(error),
        )
        self._renew(record, number, later)


def _check_data(backend: Backend, record: CommitRecord) -> None:
    """Compare names and lengths of a copy with what its records say.

    Raises:
        FormatError: Something is missing, or cut off.
        CheckpointGoneError: It was deleted meanwhile.
    """
    if has_all_data(backend, record):
        return
    name = commit_name(record.step, record.generation)
    if not is_whole(backend, record):
        msg = f"{name} on {backend.url} was deleted meanwhile"
        raise CheckpointGoneError(msg)
    msg = f"{backend.url} has {name}, but has lost some of its data"
    raise FormatError(msg, [name])

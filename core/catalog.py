"""The run: which steps exist, which is latest, and how checkpoints go away again.

A checkpoint exists if and only if its commit record's name does. Commit records go before data,
the lowest generation of a step first: a crash in between leaves data that nobody names, for
`prune`; never a record without data, nor an overwritten generation that comes back.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING

from penstock.core.errors import (
    BlobNotFoundError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    DamagedError,
    FormatError,
)
from penstock.core.manifest import COMMIT_PREFIX, data_prefix, mark_name, parse_commit_name
from penstock.core.prune import GRACE_S, PruneReport, prune
from penstock.core.survey import (
    check_same,
    delete_records,
    is_listed,
    is_whole,
    read_commit,
    survey_records,
    unreadable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from penstock.core.abc import Backend
    from penstock.core.errors import PenstockError
    from penstock.core.manifest import CommitRecord

log = logging.getLogger("penstock")

_SHOWN_STEPS = 20
_TRIES = 5


class Catalog:
    """All checkpoints under one root. Holds no state of its own: every answer is the store's."""

    def __init__(
        self,
        backend: Backend,
        *,
        before_delete: Callable[[Collection[str]], None] = lambda _: None,
        delete_failed: Callable[[Collection[str]], None] = lambda _: None,
    ) -> None:
        """Look at the run of `backend`.

        Args:
            backend: Where it is.
            before_delete: Called with the uids of checkpoints that are about to be deleted.
            delete_failed: Called with them if that fails: some of them may stay.
        """
        self._backend = backend
        self._before = before_delete
        self._failed = delete_failed

    # -- looking --------------------------------------------------------------------------------

    def entries(self) -> dict[int, list[str]]:
        """Names of commit records by step, steps and generations ascending; the last one counts."""
        found: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for info in self._backend.list(COMMIT_PREFIX):
            name = "/".join(info.name.split("/", 2)[:2])  # a folder in its place is damage
            parsed = parse_commit_name(name)
            if parsed is not None:
                found[parsed[0]].append((parsed[1], name))
        return {step: [name for _, name in sorted(set(found[step]))] for step in sorted(found)}

    def steps(self) -> list[int]:
        """Committed steps, ascending; those with a damaged record included."""
        return list(self.entries())

    def latest(self) -> int | None:
        """The newest committed step; None if there is none.

        Raises:
            DamagedError: Its commit record cannot be read.
        """
        while steps := self.steps():
            try:
                return self.record(steps[-1]).step
            except CheckpointNotFoundError:
                continue  # deleted since it was listed: the next listing lacks it
        return None

    def require_latest(self) -> int:
        """The newest committed step.

        Raises:
            CheckpointNotFoundError: There is none.
            DamagedError: Its commit record cannot be read.
        """
        step = self.latest()
        if step is None:
            msg = f"no checkpoint under {self._backend.url}"
            raise CheckpointNotFoundError(msg)
        return step

    def record(self, step: int, rescued: list[tuple[str, str]] | None = None) -> CommitRecord:
        """The commit record of a step, of its highest generation; `rescued`: see `read_commit`.

        Raises:
            CheckpointNotFoundError: There is none; the message lists what there is.
            FormatError: It cannot be read, or is of an unknown version.
        """
        name = ""
        for _ in range(_TRIES):
            entries = self.entries()
            if step not in entries:
                raise self._not_found(step, list(entries))
            name = entries[step][-1]
            try:
                return read_commit(self._backend, name, rescued)
            except BlobNotFoundError:
                continue  # deleted, or overwritten, since it was listed
            except FormatError as error:
                raise FormatError(self._damaged(step, error), error.damaged) from error
        listed = unreadable(self._backend, name)
        raise FormatError(self._damaged(step, listed), listed.damaged)

    def damaged(self) -> dict[int, DamagedError]:
        """Steps whose commit record cannot be read, and why; reads every record."""
        problems: dict[int, DamagedError] = {}
        for step in self.steps():
            try:
                self.record(step)
            except CheckpointNotFoundError:
                continue
            except DamagedError as error:
                problems[step] = error
        return problems

    def newest_whole(self) -> CommitRecord | None:
        """The newest commit record that can be read; None if there is none."""
        for step in reversed(self.steps()):
            try:
                return self.record(step)
            except (CheckpointNotFoundError, DamagedError):
                continue
        return None

    def next_generation(self, step: int) -> int:
        """The generation with which `step` can be published, over whatever is there."""
        names = self.entries().get(step)
        if not names:
            return 0
        parsed = parse_commit_name(names[-1])
        assert parsed is not None
        return parsed[1] + 1

    def has_uid(self, uid: str) -> bool:
        """Whether a readable commit record names or references `uid`."""
        return uid in survey_records(self._backend).needed

    def gone_or_damaged(self, step: int, uid: str, error: PenstockError) -> PenstockError:
        """What a reader that missed something of a checkpoint should raise, `from error`.

        Args:
            step: Of the checkpoint being read.
            uid: Of its record when reading began.
            error: What went wrong.

        Returns:
            A `CheckpointGoneError` if the record is not there any more, or is another save's;
            else `error` itself where it is a `DamagedError`, or a `DamagedError` that says so.
        """
        try:
            gone = self.record(step).uid != uid
        except CheckpointNotFoundError:
            gone = True
        except DamagedError:
            gone = False
        if gone:
            msg = (
                f"the checkpoint of step {step} on {self._backend.url} was deleted or overwritten"
                " while it was read; read again, or read another step"
            )
            return CheckpointGoneError(msg)
        if isinstance(error, DamagedError):
            return error
        return DamagedError(self._damaged(step, error), [data_prefix(uid)])

    # -- deleting -------------------------------------------------------------------------------

    def delete(self, step: int, named: Mapping[str, str | None] | None = None) -> None:
        """Delete a checkpoint with all generations: records durably first, then data.

        With `named`, names of records and whose they were, only what is still theirs.

        Data that another checkpoint or a save under way uses stays, as does all data while any
        record of the run is unreadable; `prune` takes it later.

        Raises:
            CheckpointNotFoundError: There is none; the message lists what there is.
            ConfigError: Without `named`: two tiers have two checkpoints there; none was deleted.
        """
        entries = self.entries()
        if step not in entries:
            raise self._not_found(step, list(entries))
        if named is None:
            check_same(self._backend.tiers, [step])
        self._delete(entries[step], named)

    def delete_older_generations(self, step: int) -> None:
        """Delete what an overwrite of `step` replaced.

        Raises:
            FormatError: The newest generation cannot be read; nothing was deleted.
            CheckpointNotFoundError: There is no checkpoint at that step.
        """
        keep = self.record(step)
        tiers = [tier.backend for tier in self._backend.tiers]
        if not tiers:
            self._delete_below(keep)
        for number, one in enumerate(tiers):
            # What a slower tier has stays until that one has the newer generation, too: the faster
            # one may be lost with its machine.
            if any(is_whole(backend, keep) for backend in tiers[number:]):
                other = Catalog(one, before_delete=self._before, delete_failed=self._failed)
                other._delete_below(keep)

    def _delete_below(self, keep: CommitRecord) -> None:
        parsed = {name: parse_commit_name(name) for name in self.entries().get(keep.step, [])}
        below = [name for name, found in parsed.items() if found and found[1] < keep.generation]
        self._delete(below)

    def rewind(self, step: int) -> list[int]:
        """Forget every step after `step`, newest first, to go on from there.

        Returns:
            The forgotten steps, ascending.

        Raises:
            CheckpointNotFoundError: There is no checkpoint at `step` to go on from.
        """
        entries = self.entries()
        if step not in entries:
            raise self._not_found(step, list(entries))
        later = [s for s in entries if s > step]
        for number in reversed(later):
            self._delete(entries[number])
        return later

    def apply_retention(
        self,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        protect: Collection[int] = (),
    ) -> list[int]:
        """Delete what retention does not keep; damaged checkpoints neither count nor go.

        Args:
            keep_last: Keep so many of the newest whole ones; None: all, unless `keep_every`.
            keep_every: Keep steps that are multiples of it.
            protect: Steps to keep in any case.

        Returns:
            The deleted steps, ascending. The newest whole step and whatever a kept checkpoint
            references are never among them.
        """
        if keep_last is None and keep_every is None:
            return []
        survey = survey_records(self._backend)
        whole: dict[int, CommitRecord] = {}
        for step, names in self.entries().items():
            if names[-1] in survey.records:
                whole[step] = survey.records[names[-1]]
        steps = sorted(whole)
        kept = {*protect, *steps[-max(keep_last or 1, 1) :]}
        if keep_every is not None:
            kept |= {step for step in steps if step % keep_every == 0}
        kept |= self._kept_for_tiers(whole, max(keep_last or 1, 1))
        used = {uid for step in kept & whole.keys() for uid in whole[step].references}
        doomed = [s for s in steps if s not in kept and whole[s].uid not in used]
        log.debug("retention: of %d whole checkpoints %d go", len(steps), len(doomed))
        gone = []
        for step in doomed:
            names = self.entries().get(step, [])
            # Not one that another saver has put in its place meanwhile.
            seen = {name: survey.records[name].uid for name in names if name in survey.records}
            doomed_names = [name for name in names if name in seen]
            if self._delete(doomed_names, seen):
                gone.append(step)
        return gone

    def _kept_for_tiers(self, whole: Mapping[int, CommitRecord], keep_last: int) -> set[int]:
        """Steps that stay since a slower tier has nothing newer yet.

        The newest ones of each tier, and the oldest that is still to be copied: else retention
        would take the only durable checkpoint, and each new one before it became durable.
        """
        kept: set[int] = set()
        tiers = [tier.backend for tier in self._backend.tiers]
        for one in tiers:
            here = {record.uid for record in survey_records(one).records.values()}
            marks = {u for u in here if one is not tiers[-1] and is_listed(one, mark_name(u))}
            having = sorted(step for step, record in whole.items() if record.uid in here)
            kept |= {*having[-keep_last:]}
            kept |= {*[step for step in having if whole[step].uid in marks][:1]}
        return kept

    def prune(
        self, *, grace_s: float = GRACE_S, own_uids: Collection[str] = (), dry_run: bool = False
    ) -> PruneReport:
        """Delete data that no checkpoint and no save under way can need; see `prune.prune`."""
        return prune(self._backend, grace_s=grace_s, own_uids=own_uids, dry_run=dry_run)

    # ------------------------------------------------------------------------------------------

    def _delete(
        self, names: Iterable[str], uids: Mapping[str, str | None] | None = None
    ) -> list[str]:
        return delete_records(
            self._backend, names, uids=uids, before=self._before, failed=self._failed
        )

    def _damaged(self, step: int, error: PenstockError) -> str:
        return (
            f"the checkpoint of step {step} on {self._backend.url} is damaged: {error}; restore "
            "another step, or pass on_damage='fallback'"
        )

    def _not_found(self, step: int, steps: list[int]) -> CheckpointNotFoundError:
        there = ", ".join(map(str, steps[-_SHOWN_STEPS:])) or "none"
        more = f" (the last {_SHOWN_STEPS} of {len(steps)})" if len(steps) > _SHOWN_STEPS else ""
        msg = f"no checkpoint of step {step} under {self._backend.url}; steps there: {there}{more}"
        return CheckpointNotFoundError(msg)

"""Carries out this rank's side of a save by several ranks: its posts and its waits.

A process that saves alone is a group of one rank and agrees at once.

The save thread calls this module for the steps of the round in which ranks wait for each other.
`finish` writes and publishes. Tested in `tests/integration/ranks/test_save_failures.py`.
"""

from __future__ import annotations

import logging
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.core.catalog.commit_table import Event
from penstock.core.errors import (
    BlobNotFoundError,
    BusyError,
    CommitUnknownError,
    CoordinationError,
    FormatError,
    LostRaceError,
    PenstockError,
    RankError,
    SaveError,
    SaveSkippedError,
    StepExistsError,
)
from penstock.core.plan.writers import WRITER_BYTES, RankPlaces
from penstock.core.ranks.group import SEVERAL_CHECKPOINTERS, cause_of, failed_with
from penstock.core.ranks.session import RankSession
from penstock.core.ranks.structure import (
    Brought,
    Digests,
    classes_of,
    difference_of,
    digest_of,
    dump_values,
    indices_of,
    load_values,
    nothing_in,
    pack_numbers,
    place_in,
    shared_difference,
    unequal_replicas,
    unpack_numbers,
)
from penstock.core.rounds.posts import Result, Verdict, ended, values_key
from penstock.core.rounds.round import SaveRound, error_of
from penstock.core.rounds.table import ENDS, Phase, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.catalog.commit_table import Commit
    from penstock.core.ranks.group import RankGroup

log = logging.getLogger("penstock")

# Errors of rank 0 that all ranks raise unchanged: `except StepExistsError` must work on all.
_ALIKE: tuple[type[SaveError], ...] = (BusyError, StepExistsError)

_FINAL = frozenset({Step.DONE, Step.CLEAN_UP, Step.KEEP, Step.REPORT_UNKNOWN, Step.REPORT_STOPPED})


class SaveAgreement(RankSession[SaveRound]):
    """This rank's side of a save that several ranks make together.

    Methods that wait call `alive` repeatedly. `alive` may raise to end the wait.
    """

    alone = False

    def __init__(
        self,
        group: RankGroup,
        number: int,
        *,
        commit: Commit,
        step: int,
        called_s: float,
        alive: Callable[[], None],
        look: Callable[[int], Event],
    ) -> None:
        """Prepare; nothing is sent before `arrive`.

        Args:
            group: The ranks.
            number: The number of the round.
            commit: The table of this rank's save.
            step: The step that this rank was called to save.
            called_s: The time of that call, on the monotonic clock.
            alive: Called during each wait; raises if the save was given up.
            look: Returns whether the commit record of a generation is ours, another's or missing.

        Raises:
            CoordinationError: The job's store cannot be reached.
        """
        super().__init__(
            group,
            SaveRound(
                group.place,
                number,
                commit=commit,
                timeout_s=group.timeout_s,
                expects=self._obstacle,
                called_s=called_s,
                timing=group.timing,
            ),
        )
        self.uid = group.uid(number)
        self.rank = group.place.rank
        self.leads = self.rank == 0
        """Whether this is rank 0, which publishes."""
        self.world_size = group.place.world_size
        self.writer_bytes = group.writer_bytes
        """The fewest bytes that one of several replicas writes."""
        self._step = step
        self._alive = alive
        self._look = look
        self._arrival: Mapping[str, Any] = {}
        self._brought = Brought()
        self._digests = Digests()
        self._assumed: RankPlaces | None = None
        self._indices: Mapping[str, Sequence[int]] = {}
        self.structures: Sequence[str] = ()
        """The digests of all ranks' structures, in order, once they arrive; only on rank 0."""

    @property
    def terms(self) -> Mapping[str, Any]:
        """Rank 0's decisions for all ranks."""
        return self.round.terms

    def arrive(self, brought: Brought, more: Mapping[str, Any]) -> None:
        """Post that this rank takes part; may wait for a device, but not for another rank.

        Args:
            brought: The state of this rank.
            more: Further facts for rank 0.
        """
        self._digests = brought.digests()
        self._brought = brought.without_state()
        self._arrival = {**brought.arrival(self._digests), **more}
        # Forget the places until rank 0 reports them again. If rank 0 sends `go` after this rank
        # gives up, the others continue with places that this rank does not know.
        self._assumed = self.group.places.of(brought.key)
        self.group.places.forget()
        self.round.arrive(self._arrival)
        self.start()

    def gather(self) -> dict[int, Mapping[str, Any]]:
        """Wait until all ranks arrive; return the `arrive` post of each; only on rank 0.

        Raises:
            PenstockError: The save is given up.
        """
        while not self.wait_all_here(self.group.timing.rank_poll_s):
            self._alive()
            self.check()
        self.group.lost.clear()  # ranks that had failed have arrived again
        return {0: self._arrival, **self.tell(lambda r: dict(r.others.arrived))}

    def skip(self, reason: str) -> None:
        """Report to all ranks that this step is skipped, not failed; only on rank 0."""
        self.tell(lambda r: r.refuse(reason, {"skipped": True}))

    def go(self, arrivals: Mapping[int, Mapping[str, Any]], terms: Mapping[str, Any]) -> None:
        """Order all ranks to write; only on rank 0."""
        posts = [arrivals[rank] for rank in range(self.world_size)]
        try:
            self._indices = indices_of([post.get("shared", {}) for post in posts])
        except SaveError as error:
            msg = f"step {self._step}: {error}"
            raise SaveError(msg) from None
        self.structures = [str(post["structure"]) for post in posts]
        every = {
            **terms,
            "step": self._step,
            "uid": self.uid,
            "values": digest_of(self._digests.values),
            "classes": pack_numbers(classes_of(self.structures)),
            "shared": {path: pack_numbers(found) for path, found in self._indices.items()},
            "unequal": unequal_replicas(post.get("replicas", {}) for post in posts),
        }
        try:
            self.tell(lambda r: r.go(every))
        except FormatError:  # too large for a post: now each rank stores everything that it holds
            every |= {"classes": pack_numbers([]), "shared": {}}
            self.tell(lambda r: r.go(every))

    def wait_for_go(self) -> RankPlaces:
        """Wait for rank 0's answer; return the places of this rank among equal ranks.

        Raises:
            PenstockError: The save is given up.
        """
        self._next(Step.WORK)
        indices = {path: unpack_numbers(text) for path, text in self.terms["shared"].items()}
        mine = [path for path in self._brought.shared if path in indices]
        places = RankPlaces(
            place_in(unpack_numbers(self.terms["classes"]), self.rank),
            {path: place_in(indices[path], self.rank) for path in mine},
        )
        self.group.places.note(self._brought.key, places, assumed=self._assumed)
        if self._assumed is not None and self._assumed != places:
            msg = (
                f"step {self._step}: the state of another rank has another structure than at its "
                "last save, but this rank has already captured its share for the old structure. "
                "The next save uses the new structure"
            )
            raise SaveError(msg)
        return places

    def check_shared(self, backend: Backend, name: str, *, tier: str | None) -> None:
        """Check once per place that this rank sees a record that rank 0 published.

        Without this check, a rank would write all of its data before rank 0 fails to find it.

        Args:
            backend: The place.
            name: The record.
            tier: The name of the tier, if the place is a tier.

        Raises:
            SaveError: This rank does not see the record; the message names the remedy.
            StorageError: The place does not answer.
        """
        if backend.url in self.group.shared:
            return
        try:
            backend.stat(name)
        except BlobNotFoundError as error:
            msg = f"step {self._step}: {_not_shared(backend.url, tier)}"
            raise SaveError(msg) from error
        self.group.shared.add(backend.url)

    def check(self) -> None:
        """Raise if the round has ended because another rank failed.

        Raises:
            PenstockError: The save is given up.
        """
        phase = self.round.phase  # read without the lock: a phase that is an end is final
        if phase in ENDS and phase is not Phase.COMMITTED:
            raise self._end_error(phase)

    def seal(self, part: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        """Post that this rank's part is durable, and wait.

        Rank 0 waits until every rank's part is durable. The other ranks wait until the checkpoint
        is committed.

        Returns:
            On rank 0, the posts of the other ranks, by rank. On every other rank, an empty dict.

        Raises:
            PenstockError: The save is given up.
        """
        compared = self._digests.compared(self.terms["unequal"])
        own = digest_of(compared)
        pieces: list[bytes] = []
        if own != self.terms["values"]:
            pieces = dump_values(compared)
            for number, piece in enumerate(pieces):
                key = values_key(self.round.number, self.rank, number)
                self.group.coordination.post(key, piece)
        post = {**part, "values": own, "pieces": len(pieces)}
        if self._digests.shared:
            post["shared"] = dict(self._digests.shared)
        self.tell(lambda r: r.seal(post))
        if not self.leads:
            self._next(Step.DONE)
            return {}
        self._next(Step.MERGE)
        return self.tell(lambda r: dict(r.others.parts))

    def check_values(self, parts: Mapping[int, Mapping[str, Any]]) -> frozenset[str]:
        """Compare the values that must be equal on ranks; only on rank 0.

        Returns:
            The shown paths where a rank's value counts as nothing; see `nothing_in`.

        Raises:
            SaveError: A value differs between ranks that have it; the message names the path and
                ranks.
        """
        values = self._digests.compared(self.terms["unequal"])
        ranks: dict[str, list[int]] = {digest_of(values): [0]}
        pieces = {}
        for rank, post in sorted(parts.items()):
            ranks.setdefault(post["values"], []).append(rank)
            pieces[rank] = post["pieces"]
        maps: list[tuple[Sequence[int], Mapping[str, str]]] = []
        for alike in ranks.values():
            first = alike[0]
            if first == 0:
                compared: Mapping[str, str] = values
            elif not pieces[first]:  # the same plain values, and no unequal replicas
                compared = self._digests.values
            else:
                compared = self._values_of(first, pieces[first])
            maps.append((alike, compared))
        digests = {0: self._digests.shared}
        digests |= {rank: post.get("shared", {}) for rank, post in parts.items()}
        difference = difference_of(maps) or shared_difference(self._indices, digests)
        if difference is not None:
            msg = f"step {self._step}: {difference}"
            raise SaveError(msg)
        return frozenset().union(*(nothing_in(compared) for _, compared in maps))

    def _values_of(self, rank: int, pieces: int) -> dict[str, str]:
        keys = [values_key(self.round.number, rank, piece) for piece in range(pieces)]
        posts = self.group.coordination.read(keys)
        return load_values([piece or b"" for piece in posts], f"the values of rank {rank}")

    def merged(self) -> None:
        """Ask for the commit, and wait for the right to publish; only on rank 0.

        Raises:
            PenstockError: The save is given up.
        """
        self.tell(lambda r: r.merged())
        self._next(Step.PUBLISH)

    def published(self, result: Result, cause: str = "", totals: Sequence[int] = ()) -> None:
        """Report the result of the publish; only on rank 0."""
        self.tell(lambda r: r.published(result, cause, totals))

    @property
    def totals(self) -> tuple[int, ...]:
        """The totals of all ranks, as reported by rank 0; empty if rank 0 could not report them."""
        result = self.round.result
        return () if result is None else result.totals

    def give_up(self, error: BaseException) -> BaseException:
        """Report this rank's failure to the others; wait until the outcome of the round is known.

        Returns:
            `error`, or an error that names the first rank to fail.
        """
        cause = cause_of(error)
        if not self.has_begun:
            self.group.give_up(self.round.number, cause)
            return error
        if self.round.phase in ENDS:
            return error
        self.tell(lambda r: r.fail(cause))
        self._alive = _nothing
        try:
            self._next()
        except PenstockError as end:
            return end if isinstance(end, RankError) else error
        except BaseException as bug:  # noqa: BLE001 - or the save would never end
            log.debug("the end of round %d is not known: %s", self.round.number, repr(bug))
        return error

    def _obstacle(self, terms: Mapping[str, Any]) -> str:
        if terms.get("step") == self._step:
            return ""
        there = terms.get("step")
        return (
            f"was called to save step {self._step} while rank 0 saves step {there}: all ranks must "
            "save the same steps, and call save equally often, including in signal handlers"
        )

    def _next(self, *wanted: Step) -> None:
        """Wait for one of the steps, or for the end of the round.

        Raises:
            PenstockError: The round ended in another way, or `alive` raised.
        """
        while True:
            step = self.next_step(self.group.timing.rank_poll_s)
            if step is not None and step in wanted:
                return
            if step is Step.RESOLVE:
                record = self._look(int(self.terms["generation"]))
                self.tell(partial(SaveRound.resolved, record=record))
            elif step in _FINAL:
                raise self._end_error(self.round.phase)
            elif step is None:
                self._alive()

    def _end_error(self, phase: Phase) -> PenstockError:
        step = self._step
        latest = self.terms.get("latest")
        stays = "" if latest is None else f"Step {latest} stays the latest."
        if phase is Phase.COMMITTED:
            error: PenstockError = SaveError(
                f"step {step} is committed: this rank failed too late to prevent it"
            )
        elif phase is Phase.STOPPED:
            error = self._stopped(f"step {step} was not saved")
        elif phase is Phase.UNKNOWN:
            result = self.round.result
            why = "rank 0 probably died: it or the store of the job is silent"
            if result is not None and result.result is Result.UNKNOWN:
                why = f"rank 0 {result.cause}"
            error = CommitUnknownError(
                f"step {step}: {why}, and there is no commit record yet: the checkpoint may or may "
                "not exist. Check steps() later; none of its data is deleted"
            )
        else:
            error = self._aborted(f"step {step} was not saved", stays)
        return error

    def _aborted(self, what: str, stays: str) -> PenstockError:
        result, verdict = self.round.result, self.round.verdict
        if result is not None and result.result is not Result.COMMITTED:
            host = self.round.others.host_of(0)
            cause = Verdict(commit=False, rank=0, host=host, cause=result.cause)
            return error_of(cause, what, stays)
        if verdict is not None and verdict.commit:
            return LostRaceError(f"{what}: another process published that step first")
        if verdict is not None and verdict.rank == self.rank:
            why = f"{what}: the other ranks gave it up, since this one {verdict.cause}"
            return SaveError(f"{ended(why)} {stays}".rstrip())
        error = self.abort_error(what, stays)
        if error is not None:
            return _alike(error)
        died = "" if self.leads else "rank 0 probably died: "
        silence = f"the store of the job could not be reached for {self.group.timeout_s:g} s"
        return CoordinationError(f"{what}: {died}{silence}. {stays}".rstrip())

    def _stopped(self, what: str) -> PenstockError:
        if self.terms.get("skipped"):
            return SaveSkippedError(f"step {self._step} was skipped: {self.round.stop}")
        cause = self.round.stop
        host = self.round.others.host_of(0)
        return RankError(f"{what}: rank 0 did not begin: {cause}", 0, host, cause)


class AgreementOfOne:
    """The agreement of a process that saves alone, with the methods of `SaveAgreement`.

    No other rank can fail, and no method waits. No round feeds the save's commit table: `seal` and
    the code that publishes do.
    """

    rank = 0
    world_size = 1
    leads = True
    alone = True
    writer_bytes = WRITER_BYTES
    structures: Sequence[str] = ()
    totals: tuple[int, ...] = ()

    def __init__(self, commit: Commit) -> None:
        self.uid = secrets.token_hex(16)
        self.terms: Mapping[str, Any] = {}
        self._commit = commit

    def arrive(self, brought: Brought, more: Mapping[str, Any]) -> None:
        """Do nothing: there is no rank to join."""

    def gather(self) -> dict[int, Mapping[str, Any]]:
        """Return at once: no other rank arrives."""
        return {}

    def skip(self, reason: str) -> None:
        """Do nothing: there is no rank to notify."""

    def go(self, arrivals: Mapping[int, Mapping[str, Any]], terms: Mapping[str, Any]) -> None:
        """Set the terms of the save."""
        del arrivals
        self.terms = terms

    def wait_for_go(self) -> RankPlaces | None:
        """Return None at once: this process writes its whole state."""

    def check_shared(self, *_: object, **__: object) -> None:
        """Do nothing: this process has published the record itself."""

    def moved(self, done: int, total: int) -> None:
        """Do nothing: no rank watches this process."""

    def check(self) -> None:
        """Do nothing: no other rank can fail."""

    def seal(self, part: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        """Report to the save's commit table that all data is durable."""
        del part
        self._commit.feed(Event.SEALED)
        return {}

    def check_values(self, parts: Mapping[int, Mapping[str, Any]]) -> frozenset[str]:
        """Return nothing: there are no other values to compare with."""
        del parts
        return frozenset()

    def merged(self) -> None:
        """Return at once: this process may publish."""

    def published(self, result: Result, cause: str = "", totals: Sequence[int] = ()) -> None:
        """Do nothing: there is no rank to notify."""

    def give_up(self, error: BaseException) -> BaseException:
        """Return the error of this process."""
        return error

    def finish(self) -> None:
        """Return at once: no other rank needs the outcome."""


def _not_shared(url: str, tier: str | None) -> str:
    """Return the message for a rank that does not see what rank 0 published at `url`."""
    what = f"this rank does not see on {url} what rank 0 has published there"
    if tier is None:
        return f"{what}: is the folder shared by all hosts? {SEVERAL_CHECKPOINTERS}"
    # `what` first: the cause that other ranks get is cut short.
    return (
        f"{what}, which is tier {tier}. If each host has its own fast tier, give it type = "
        "'hosts', or put it on a file system that all hosts share. "
        f"{SEVERAL_CHECKPOINTERS}"
    )


def _alike(error: RankError) -> PenstockError:
    """Return rank 0's own error if all ranks must raise it; otherwise `error`."""
    for kind in _ALIKE:
        name = failed_with(kind.__name__)
        if error.rank == 0 and error.cause.startswith(name):
            return kind(ended(error.cause.removeprefix(name)))
    return error


def _nothing() -> None:
    """Do nothing: the save is already given up."""

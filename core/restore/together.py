"""Restores one checkpoint on all ranks of a job: either all ranks return, or all raise."""

from __future__ import annotations

import logging
import secrets
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.core.errors import (
    CheckpointGoneError,
    CheckpointNotFoundError,
    ConfigError,
    CoordinationError,
    DamagedError,
    PenstockError,
    RankError,
    SelectionError,
)
from penstock.core.hosts.reading import JobReading, Sharing
from penstock.core.ranks.group import cause_of
from penstock.core.ranks.session import RankSession
from penstock.core.ranks.templates import RoundOverError
from penstock.core.reporting.progress import Listener
from penstock.core.rounds.round import RestoreRound
from penstock.core.rounds.table import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.core.ranks.group import RankGroup
    from penstock.core.ranks.templates import TemplatesOfRanks
    from penstock.core.reporting.reports import Progress
    from penstock.core.restore.fallback import Candidates
    from penstock.core.restore.fill import Opened

log = logging.getLogger("penstock")

T = TypeVar("T")

# A rank that finds damage begins its cause with this, so that the others know that they may try
# the next older checkpoint.
_DAMAGED = "found damage: "

_MOST_SKIPPED = 64  # the most steps that rank 0 posts as skipped; the size of a post is limited

# Errors of rank 0 that all ranks raise unchanged: a job that starts from scratch when there is no
# checkpoint must do so on every rank.
_ALIKE: tuple[type[PenstockError], ...] = (
    CheckpointGoneError,
    CheckpointNotFoundError,
    ConfigError,
    DamagedError,
    SelectionError,
)


_TO_BE_EQUAL = {
    "verb": "",
    "asked": "step ",
    "fallback": "on_damage fallback ",
    "selection": "the selection ",
}

_PAST = {"restore": "restored", "load": "loaded"}

LAST_STEPS = frozenset(
    {Step.DONE, Step.CLEAN_UP, Step.KEEP, Step.REPORT_STOPPED, Step.REPORT_UNKNOWN, None}
)
"""The steps that end a round; None: it ended without any."""


@dataclass(slots=True)
class RestoreTogether(Generic[T]):
    """One rank's side of a restore, or a load, by all ranks.

    Rank 0 chooses the checkpoint, and each rank plans and reads separately. With `fallback`, damage
    makes all ranks continue together with an older checkpoint.

    Attributes:
        group: The ranks.
        verb: `restore` or `load`.
        step: The step that this rank was called for; must be equal on all ranks.
        fallback: Whether damage leads to the next older checkpoint; must be equal on all ranks.
        candidates: Returns the checkpoints to try; called on rank 0.
        follow: Opens the checkpoint that rank 0 chose, by step and uid; called on the others.
        attempt: Restores an open checkpoint on this rank.
        templates: The templates of all ranks, for `attempt`; None: there are none.
        tell: Returns what this rank reports to rank 0 about the result of `attempt`; at most a few
            KiB.
        has_log: Returns whether the checkpoint with a uid has a log; called on rank 0.
        sharing: Which reads the ranks share; rank 0's value counts.
        network: The network between hosts, as in `JobReading`.
        told: On rank 0, after `run`: the reports of the other ranks, by rank.
        logged: After `run`: the result of `has_log`.
        session: After `run`: random hexadecimal digits, the same on all ranks.
    """

    group: RankGroup
    _: KW_ONLY
    verb: str
    step: int | str
    fallback: bool
    candidates: Callable[[], Candidates]
    follow: Callable[[int, str], Opened]
    attempt: Callable[[Opened], T]
    templates: TemplatesOfRanks | None = None
    tell: Callable[[T], Mapping[str, Any]] = lambda _: {}
    has_log: Callable[[str], bool] = lambda _: False
    sharing: Sharing
    network: str | None
    told: Mapping[int, Mapping[str, Any]] = field(default_factory=dict, init=False)
    logged: bool = field(default=False, init=False)
    session: str = field(default="", init=False)
    _asked: Mapping[str, Any] = field(init=False)
    _tried: Candidates | None = field(default=None, init=False)
    _chosen: Opened | None = field(default=None, init=False)
    _session: RankSession[RestoreRound] | None = field(default=None, init=False)
    _error: BaseException | None = field(default=None, init=False)
    _refused: int | None = field(default=None, init=False)  # rank 0's step, if calls differ
    # About objects that are undefined because another rank failed.
    _notes: Sequence[str] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self._asked = {
            "verb": self.verb,
            "asked": self.step,
            "fallback": self.fallback,
            "selection": "" if self.templates is None else self.templates.selection,
        }

    def run(self, number: int, called_s: float | None = None) -> tuple[T, tuple[int, ...]]:
        """Restore on this rank, and wait until all have restored the same checkpoint.

        Args:
            number: The number of the first round; further rounds get new numbers.
            called_s: When this rank was called to restore, on the monotonic clock; None: now.

        Returns:
            The result of `attempt`, and the damaged steps that were skipped.

        Raises:
            RankError: Another rank failed, died or hung; names it, its host and the cause.
            CoordinationError: The store of the job cannot be reached, so it is not known whether
                all ranks have restored the checkpoint.
            PenstockError: This rank failed, or rank 0 has nothing to restore.
        """
        while True:
            round_ = RestoreRound(
                self.group.place,
                number,
                timeout_s=self.group.timeout_s,
                expects=self._disagreement,
                called_s=called_s,
                timing=self.group.timing,
            )
            called_s = None  # further rounds begin when this one has ended
            session = self._session = RankSession(self.group, round_)
            if self.templates is not None:
                self.templates.begin(session)
            session.start()
            try:
                result = self._run_round(session)
            except BaseException as error:
                self._fail(session, error)
                raise
            finally:
                session.finish()  # after its last post: the process may end when this returns
                self._session = None
            if result is not None:
                return result
            number = self.group.next_number()

    def listen(self, on_progress: Callable[[Progress], None] | None) -> Callable[[Progress], None]:
        """Return a callback that reports progress to the others, then calls the user's."""
        user = Listener(on_progress, f"the {self.verb}")

        def report(progress: Progress) -> None:
            if (session := self._session) is not None:
                done, total = progress.bytes_done, progress.bytes_total
                session.tell(lambda round_: round_.moved(done, total))
            user(progress)

        return report

    def _run_round(self, session: RankSession[RestoreRound]) -> tuple[T, tuple[int, ...]] | None:
        """Run the steps of one round; return None if all continue with an older checkpoint."""
        round_ = session.round
        results: list[T] = []
        if self._error is not None:  # from the last round, which ended because of other damage
            self._fail(session, self._error)
        elif self.group.place.rank == 0:
            self._lead(session)
        while (step := session.next_step()) not in LAST_STEPS:
            if step is Step.WORK:
                self._work(session, results)
        if step is Step.DONE:
            self.told = round_.others.parts
            self.logged = bool(round_.terms["logged"])
            self.session = str(round_.terms["session"])
            if self.templates is not None:
                self.templates.end()
            return results[0], tuple(round_.terms["skipped"])
        if step in {Step.CLEAN_UP, Step.KEEP} and self._falls_back(round_):
            return None
        error = self._error or self._failure(step, session, restored=bool(results))
        for note in self._notes:
            error.add_note(note)
        raise error

    def _lead(self, session: RankSession[RestoreRound]) -> None:
        try:
            if self._tried is None:
                self._tried = self.candidates()
            self._chosen = self._tried.use(lambda _, open_step: open_step())
            record = self._chosen.contents.record
            terms = {
                **self._asked,
                "sharing": self.sharing,
                "step": record.step,
                "uid": record.uid,
                "skipped": self._tried.skipped[-_MOST_SKIPPED:],
                "logged": self.has_log(record.uid),
                "session": secrets.token_hex(8),
            }
            session.tell(lambda round_: round_.go(terms))
        except Exception as error:  # noqa: BLE001 - raised once all other ranks know of it
            self._error = error
            reason = f"{type(error).__name__}: {error}"
            session.tell(lambda round_: round_.refuse(reason))

    def _disagreement(self, terms: Mapping[str, Any]) -> str:
        """Return how this rank's call differs from rank 0's; empty if it does not."""
        for key, what in _TO_BE_EQUAL.items():
            here, there = self._asked[key], terms.get(key)
            if here != there:
                self._refused = terms.get("step")
                return f"asked for {what}{here}, but rank 0 asked for {what}{there}"
        return ""

    def _work(self, session: RankSession[RestoreRound], results: list[T]) -> None:
        round_ = session.round
        self._notes = ()
        try:
            chosen = self._chosen
            if chosen is None:
                chosen = self.follow(round_.terms["step"], round_.terms["uid"])
            chosen = replace(chosen, ended=lambda: session.has_news)
            # Rank 0's value on all ranks: ranks that disagree would wait for each other forever.
            sharing = Sharing(*round_.terms["sharing"])
            if sharing.per_host or sharing.per_job:
                others = JobReading(session, sharing, network=self.network)
                others.announce()
                chosen = replace(chosen, others=others)
            results.append(self.attempt(chosen))
            part = self.tell(results[0])
            session.tell(lambda r: r.seal(part))
        except RoundOverError as error:  # the next step names the failed rank
            self._notes = getattr(error, "__notes__", [])
        except BaseException as error:  # noqa: BLE001 - Ctrl-C, too: raised once all ranks know
            self._fail(session, error)

    def _fail(self, session: RankSession[RestoreRound], error: BaseException) -> None:
        self._error = error
        session.tell(lambda round_: round_.fail(_cause(error)))

    def _falls_back(self, round_: RestoreRound) -> bool:
        """Return whether all ranks try an older checkpoint because one found damage."""
        verdict = round_.verdict
        if not self.fallback or verdict is None or not verdict.cause.startswith(_DAMAGED):
            return False
        if isinstance(self._error, DamagedError):
            self._error = None
        if self._tried is not None:
            damage = DamagedError(f"rank {verdict.rank} on {verdict.host} {verdict.cause}")
            self._tried.skip(round_.terms["step"], damage)
            self._chosen = None
        return True

    def _failure(
        self,
        step: Step | None,
        session: RankSession[RestoreRound],
        *,
        restored: bool,
    ) -> PenstockError:
        """Return this rank's error for a failure that another rank caused."""
        round_ = session.round
        verb = self.verb
        if step is Step.REPORT_STOPPED:
            return _stopped(round_.stop, verb)
        number = round_.terms.get("step", self._refused)
        if step is Step.REPORT_UNKNOWN:
            msg = (
                f"this rank has step {number}, but the store of the job cannot be reached, so it "
                "is not known whether all ranks have it: restart the job"
            )
            return CoordinationError(msg)
        past = _PAST.get(verb, verb)
        what = f"no checkpoint was {past}" if number is None else f"step {number} was not {past}"
        error = session.abort_error(what, own=True)
        if error is None:  # no verdict: the store of the job could not be reached
            msg = f"the ranks could not agree on a checkpoint to {verb}: is rank 0 alive?"
            return CoordinationError(msg)
        if restored and verb == "restore":
            error.add_note(f"This rank has the values of step {number} now.")
        return error


def _cause(error: BaseException) -> str:
    """Return the cause to post to the other ranks, in one line."""
    if isinstance(error, DamagedError):
        return _DAMAGED + " ".join(str(error).split())
    return cause_of(error)


def _stopped(reason: str, verb: str) -> PenstockError:
    """Return the error for a round that rank 0 did not begin."""
    name, _, text = reason.partition(": ")
    for kind in _ALIKE:
        if kind.__name__ == name:
            return kind(text)
    return RankError(f"rank 0 could not begin the {verb}: it failed with {reason}", 0, "", reason)

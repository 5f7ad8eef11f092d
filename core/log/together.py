"""Replays the logs of all ranks to one step: either all ranks replay, or the replay fails on all.

Tested in `tests/integration/log/test_ranks.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from penstock.core.errors import CoordinationError, PenstockError, RankError
from penstock.core.log.grads import NotLoggedError
from penstock.core.log.segments import Session, common_sessions
from penstock.core.ranks.group import cause_of
from penstock.core.ranks.session import RankSession
from penstock.core.restore.together import LAST_STEPS
from penstock.core.rounds.round import RestoreRound
from penstock.core.rounds.table import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.ranks.group import RankGroup

T = TypeVar("T")

_MOST_SESSIONS = 6  # the most sessions for which a post has room

_NOT_EXACT = "cannot replay its log: "
"""The start of a failure's cause if a rank's log is at fault, not its process or the store."""


def replay_together(
    group: RankGroup,
    base: int,
    sessions: Sequence[Session],
    replay: Callable[[int, Callable[[], None]], T],
) -> T:
    """Replay on this rank, and wait until all ranks have replayed.

    Args:
        group: The ranks.
        base: The step of the base.
        sessions: The sessions of this rank's log, with whole entries only.
        replay: Replays this rank's log. Its first argument is the last step that all ranks have;
            it calls its second argument after each entry.

    Raises:
        NotLoggedError: A rank cannot replay its log; raised on all ranks.
        PenstockError: This rank failed.
        RankError: Another rank failed.
        CoordinationError: This rank has replayed, but cannot learn whether all have.
    """
    round_ = RestoreRound(
        group.place, group.next_number(), timeout_s=group.timeout_s, timing=group.timing
    )
    own = [list(session) for session in sessions[-_MOST_SESSIONS:]]
    round_.arrive({"logged": own})
    session = RankSession(group, round_)
    session.start()
    try:
        if group.place.rank == 0:
            _lead(session, base, own)
        return _follow(session, replay)
    finally:
        session.finish()


def _lead(session: RankSession[RestoreRound], base: int, own: Sequence[Sequence[Any]]) -> None:
    """Choose the step once all ranks are here."""
    while not session.wait_all_here(session.group.timing.rank_poll_s):
        if session.has_news:
            return
    posts = session.tell(lambda round_: dict(round_.others.arrived))
    of_ranks = [own, *(post["logged"] for post in posts.values())]
    common = common_sessions([[Session(*row) for row in rows] for rows in of_ranks])
    until = max((s.last for s in common), default=base)
    session.tell(lambda round_: round_.go({"until": until}))


def _follow(
    session: RankSession[RestoreRound], replay: Callable[[int, Callable[[], None]], T]
) -> T:
    results: list[T] = []
    error: BaseException | None = None
    while (step := session.next_step()) not in LAST_STEPS:
        if step is not Step.WORK:
            continue
        try:
            results.append(replay(session.round.terms["until"], lambda: session.moved(0, 0)))
            session.tell(lambda round_: round_.seal({}))
        except BaseException as failure:  # noqa: BLE001 - Ctrl-C, too: raised when all others know
            error = failure
            cause = _cause(failure)
            session.tell(lambda round_, cause=cause: round_.fail(cause))  # type: ignore[misc]
    if step is Step.DONE:
        return results[0]
    raise error or _failure(session)


def _cause(error: BaseException) -> str:
    if isinstance(error, NotLoggedError):
        return _NOT_EXACT + " ".join(str(error).split())
    return cause_of(error)


def _failure(session: RankSession[RestoreRound]) -> PenstockError:
    verdict = session.round.verdict
    if verdict is not None and verdict.cause.startswith(_NOT_EXACT):
        return NotLoggedError(f"rank {verdict.rank} {verdict.cause}")
    error: RankError | None = session.abort_error("the log was not replayed", own=True)
    if error is not None:
        return error
    msg = (
        "it is not known whether all ranks have replayed the log, because the store of the job "
        "cannot be reached: restart the job"
    )
    return CoordinationError(msg)

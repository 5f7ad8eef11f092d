"""The round of a save on one rank, sans-IO: what `Round` does, and the table of the save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.core.catalog.commit_table import Event
from penstock.core.rounds.posts import Result, ResultPost, encode_result, result_key
from penstock.core.rounds.round import OF_RESULT, Round
from penstock.core.rounds.table import SAVE_OTHERS, SAVE_RANK_0, Happening, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.core.catalog.commit_table import Commit
    from penstock.core.rounds.round import RankPlace

_OF_RECORD = {
    Event.RECORD_IS_OURS: Happening.RECORD_IS_OURS,
    Event.RECORD_IS_OTHER: Happening.RECORD_IS_OTHER,
    Event.RECORD_ABSENT: Happening.RECORD_ABSENT,
}


class SaveRound(Round):
    """The round of a save: all ranks commit one checkpoint, or none does.

    Feeds the table of the save of this rank (`Commit`), which alone says what may be deleted. On
    rank 0 the publisher feeds that table from the publish on.
    """

    def __init__(
        self,
        place: RankPlace,
        number: int,
        *,
        commit: Commit,
        timeout_s: float,
        expects: Callable[[Mapping[str, Any]], str] = lambda _: "",
        called_s: float | None = None,
    ) -> None:
        """Prepare the round, as `Round` says.

        Args:
            place: As in `Round`.
            number: As in `Round`.
            commit: The table of this rank's save.
            timeout_s: As in `Round`.
            expects: As in `Round`.
            called_s: As in `Round`.
        """
        table = SAVE_RANK_0 if place.rank == 0 else SAVE_OTHERS
        super().__init__(
            place, number, table=table, timeout_s=timeout_s, expects=expects, called_s=called_s
        )
        self._commit = commit

    def published(self, result: Result, cause: str = "", totals: Sequence[int] = ()) -> None:
        """Tell what came of the publish; rank 0 alone."""
        post = self.result = ResultPost(result, cause, tuple(totals))
        self._outbox[result_key(self.number)] = encode_result(post)
        self._happen(OF_RESULT[result])

    def resolved(self, record: Event) -> None:
        """Tell what the commit record in the root is: ours, another's, or not to be read."""
        self._happen(_OF_RECORD[record])

    def _tell(self, happening: Happening) -> None:
        event = _FEEDS.get(happening)
        if happening is Happening.REGISTER_LOST:
            event = self._of_lost_register()
            if self._leads:  # a request for a commit may land late, and then others wait for this
                never = ResultPost(Result.NEVER, "rank 0 could not reach the register")
                self._outbox[result_key(self.number)] = encode_result(never)
        elif self._leads and happening not in _FED_ON_RANK_0:
            event = None
        if event is not None:
            self._commit.feed(event)

    def _of_lost_register(self) -> Event:
        if self.phase is Phase.PUBLISHING:
            return Event.PUBLISH_ANSWER_LOST
        if self._sealed and not self._leads:
            return Event.DECISION_UNKNOWN
        return Event.FAILED


_FEEDS = {
    Happening.STOP: Event.ABORT,
    Happening.SEALED: Event.SEALED,
    Happening.COMMIT_DECIDED: Event.COMMIT_DECIDED,
    Happening.ABORT_DECIDED: Event.ABORT_DECIDED,
    Happening.COMMITTED: Event.PUBLISH_OK,
    Happening.NEVER: Event.NEVER_PUBLISHED,
    Happening.UNSURE: Event.PUBLISH_ANSWER_LOST,
    Happening.LEADER_LOST: Event.PUBLISH_ANSWER_LOST,
    Happening.RECORD_IS_OURS: Event.RECORD_IS_OURS,
    Happening.RECORD_IS_OTHER: Event.RECORD_IS_OTHER,
    Happening.RECORD_ABSENT: Event.RECORD_ABSENT,
}
_FED_ON_RANK_0 = frozenset({Happening.STOP, Happening.SEALED, Happening.ABORT_DECIDED})

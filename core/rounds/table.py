"""The rounds of many ranks as tables, sans-IO: one for rank 0 and one for the others.

A round decides one question: whether all ranks commit, or none. It does not replace the table of a
save (`core/catalog/commit_table.py`), which alone decides what may be published and deleted. Each
rank has its own save table, and `SaveRound` in `round.py` feeds it. A row here names the progress
of the round, and never whether data may be deleted.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping


class Phase(StrEnum):
    """The progress of a round on one rank."""

    WAITING = "waiting"  # for rank 0's answer; rank 0 waits until it can answer
    WORKING = "working"
    SEALED = "sealed"
    MERGING = "merging"
    DECIDING = "deciding"
    GIVING_UP = "giving up"  # asks for an abort, and has not sealed
    ABORTING = "aborting"  # asks for an abort, and has sealed
    PUBLISHING = "publishing"
    RESOLVING = "resolving"
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"
    STOPPED = "stopped"


ENDS = frozenset({Phase.COMMITTED, Phase.ABORTED, Phase.UNKNOWN, Phase.STOPPED})
"""The phases in which a round is over on this rank."""


class Happening(StrEnum):
    """An event of a round, from its rank or from another rank's post."""

    GO = "rank 0 says go"
    STOP = "rank 0 says stop"
    SEALED = "this rank has sealed"
    ALL_SEALED = "all ranks have posted that they sealed"
    MERGED = "the parts are merged and cover everything"
    FAILED = "this rank failed, or saw a rank that is stuck or disagrees"
    COMMIT_DECIDED = "the register says commit"
    ABORT_DECIDED = "the register says abort"
    REGISTER_LOST = "the register could not be reached for the whole timeout"
    COMMITTED = "the commit record is published"
    NEVER = "the commit record was not published, and never will be"
    UNSURE = "the commit record may or may not be published"
    LEADER_LOST = "rank 0 is stuck"
    RECORD_IS_OURS = "the commit record is ours"
    RECORD_IS_OTHER = "the commit record is another's"
    RECORD_ABSENT = "there is no commit record that can be read"


class Step(StrEnum):
    """The next action of a rank."""

    WORK = "write, or restore, then report that it has sealed"
    POST_SEALED = "post what it sealed; wait for the decision"
    MERGE = "read the parts back, merge the index, check coverage"
    DECIDE_COMMIT = "ask the register to commit"
    DECIDE_ABORT = "ask the register to abort, with the cause"
    PUBLISH = "publish the commit record"
    AWAIT = "wait for the result of rank 0"
    RESOLVE = "read the commit record in the root"
    DONE = "report success"
    CLEAN_UP = "report failure; delete own data as far as the table of the save allows"
    KEEP = "report failure; leave own data to prune"
    REPORT_UNKNOWN = "report that the checkpoint may or may not exist; delete nothing"
    REPORT_STOPPED = "report that rank 0 did not begin; nothing was written"
    NONE = "nothing"


_P, _H, _S = Phase, Happening, Step

RoundTable: TypeAlias = "Mapping[tuple[Phase, Happening], tuple[Phase, Step]]"

_BOTH: RoundTable = {
    (_P.WAITING, _H.GO): (_P.WORKING, _S.WORK),
    (_P.WAITING, _H.STOP): (_P.STOPPED, _S.REPORT_STOPPED),
    (_P.WAITING, _H.FAILED): (_P.GIVING_UP, _S.DECIDE_ABORT),
    (_P.WAITING, _H.ABORT_DECIDED): (_P.ABORTED, _S.CLEAN_UP),
    # A rank that has not posted that it sealed keeps the others from committing. So it may give up
    # without knowing what they decide.
    (_P.WAITING, _H.REGISTER_LOST): (_P.ABORTED, _S.CLEAN_UP),
    (_P.WORKING, _H.SEALED): (_P.SEALED, _S.POST_SEALED),
    (_P.WORKING, _H.FAILED): (_P.GIVING_UP, _S.DECIDE_ABORT),
    (_P.WORKING, _H.ABORT_DECIDED): (_P.ABORTED, _S.CLEAN_UP),
    (_P.WORKING, _H.REGISTER_LOST): (_P.ABORTED, _S.CLEAN_UP),
    (_P.GIVING_UP, _H.ABORT_DECIDED): (_P.ABORTED, _S.CLEAN_UP),
    (_P.GIVING_UP, _H.REGISTER_LOST): (_P.ABORTED, _S.CLEAN_UP),
    (_P.SEALED, _H.FAILED): (_P.ABORTING, _S.DECIDE_ABORT),
    (_P.SEALED, _H.ABORT_DECIDED): (_P.ABORTED, _S.CLEAN_UP),
    (_P.ABORTING, _H.ABORT_DECIDED): (_P.ABORTED, _S.CLEAN_UP),
}

SAVE_OTHERS: RoundTable = {
    **_BOTH,
    (_P.SEALED, _H.COMMIT_DECIDED): (_P.PUBLISHING, _S.AWAIT),
    (_P.ABORTING, _H.COMMIT_DECIDED): (_P.PUBLISHING, _S.AWAIT),
    # Rank 0 may have committed through the register and published. The root shows whether it has.
    (_P.SEALED, _H.REGISTER_LOST): (_P.RESOLVING, _S.RESOLVE),
    (_P.ABORTING, _H.REGISTER_LOST): (_P.RESOLVING, _S.RESOLVE),
    (_P.PUBLISHING, _H.COMMITTED): (_P.COMMITTED, _S.DONE),
    (_P.PUBLISHING, _H.NEVER): (_P.ABORTED, _S.CLEAN_UP),
    (_P.PUBLISHING, _H.UNSURE): (_P.RESOLVING, _S.RESOLVE),
    (_P.PUBLISHING, _H.LEADER_LOST): (_P.RESOLVING, _S.RESOLVE),
    (_P.PUBLISHING, _H.REGISTER_LOST): (_P.RESOLVING, _S.RESOLVE),
    (_P.RESOLVING, _H.RECORD_IS_OURS): (_P.COMMITTED, _S.DONE),
    (_P.RESOLVING, _H.RECORD_IS_OTHER): (_P.ABORTED, _S.KEEP),
    (_P.RESOLVING, _H.RECORD_ABSENT): (_P.UNKNOWN, _S.REPORT_UNKNOWN),
}
"""The round of a save on every rank but rank 0."""

SAVE_RANK_0: RoundTable = {
    **_BOTH,
    (_P.SEALED, _H.ALL_SEALED): (_P.MERGING, _S.MERGE),
    (_P.MERGING, _H.MERGED): (_P.DECIDING, _S.DECIDE_COMMIT),
    (_P.MERGING, _H.FAILED): (_P.ABORTING, _S.DECIDE_ABORT),
    (_P.MERGING, _H.ABORT_DECIDED): (_P.ABORTED, _S.CLEAN_UP),
    (_P.DECIDING, _H.COMMIT_DECIDED): (_P.PUBLISHING, _S.PUBLISH),
    (_P.DECIDING, _H.ABORT_DECIDED): (_P.ABORTED, _S.CLEAN_UP),
    # Only rank 0 publishes, and now it never will. The others may not know that, and may still look
    # for the checkpoint, so rank 0 keeps its data.
    (_P.SEALED, _H.REGISTER_LOST): (_P.ABORTED, _S.KEEP),
    (_P.MERGING, _H.REGISTER_LOST): (_P.ABORTED, _S.KEEP),
    (_P.DECIDING, _H.REGISTER_LOST): (_P.ABORTED, _S.KEEP),
    (_P.ABORTING, _H.REGISTER_LOST): (_P.ABORTED, _S.KEEP),
    (_P.PUBLISHING, _H.COMMITTED): (_P.COMMITTED, _S.DONE),
    (_P.PUBLISHING, _H.NEVER): (_P.ABORTED, _S.KEEP),
    (_P.PUBLISHING, _H.UNSURE): (_P.UNKNOWN, _S.REPORT_UNKNOWN),
}
"""The round of a save on rank 0."""

RESTORE_OTHERS: RoundTable = {
    **_BOTH,
    (_P.SEALED, _H.COMMIT_DECIDED): (_P.COMMITTED, _S.DONE),
    (_P.ABORTING, _H.COMMIT_DECIDED): (_P.COMMITTED, _S.DONE),
    (_P.SEALED, _H.REGISTER_LOST): (_P.UNKNOWN, _S.REPORT_UNKNOWN),
    (_P.ABORTING, _H.REGISTER_LOST): (_P.UNKNOWN, _S.REPORT_UNKNOWN),
}
"""The round of a restore on every rank but rank 0."""

RESTORE_RANK_0: RoundTable = {
    **_BOTH,
    (_P.SEALED, _H.REGISTER_LOST): (_P.UNKNOWN, _S.REPORT_UNKNOWN),
    (_P.ABORTING, _H.REGISTER_LOST): (_P.UNKNOWN, _S.REPORT_UNKNOWN),
    (_P.SEALED, _H.ALL_SEALED): (_P.DECIDING, _S.DECIDE_COMMIT),
    (_P.DECIDING, _H.COMMIT_DECIDED): (_P.COMMITTED, _S.DONE),
    (_P.DECIDING, _H.ABORT_DECIDED): (_P.ABORTED, _S.CLEAN_UP),
    (_P.DECIDING, _H.REGISTER_LOST): (_P.UNKNOWN, _S.REPORT_UNKNOWN),
}
"""The round of a restore on rank 0."""

TOO_LATE: frozenset[tuple[Phase, Happening]] = frozenset(
    {(phase, _H.FAILED) for phase in Phase if (phase, _H.FAILED) not in _BOTH}
    | {(phase, happening) for phase in ENDS for happening in Happening}
    | {(phase, _H.LEADER_LOST) for phase in Phase}
    | {(_P.GIVING_UP, _H.SEALED), (_P.GIVING_UP, _H.GO), (_P.GIVING_UP, _H.STOP)}
    | {(_P.ABORTING, _H.MERGED), (_P.ABORTING, _H.ALL_SEALED)}
    | {(_P.RESOLVING, happening) for happening in (_H.COMMITTED, _H.NEVER, _H.UNSURE)}
    | {(_P.RESOLVING, _H.REGISTER_LOST), (_P.DECIDING, _H.MERGED)}
)
"""Events that are ignored in a phase if the table has no row for the pair.

They come after the decision is made or asked for: while a rank gives up, it still works, and the
other ranks still post."""

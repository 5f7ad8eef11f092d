"""One process as a group of one rank: it agrees with itself at once, without thread or store."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from penstock.core.catalog.commit_table import Event
from penstock.core.plan.ranks import WRITER_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.core.catalog.commit_table import Commit
    from penstock.core.plan.ranks import RankPlaces
    from penstock.core.ranks.structure import Brought
    from penstock.core.rounds.posts import Result


class AgreementOfOne:
    """The agreement of a process that saves alone, with the methods of `SaveAgreement`.

    Nobody else can fail, and nobody is waited for. The publisher feeds the table of the save.
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
        """Do nothing: there is nobody to join."""

    def gather(self) -> dict[int, Mapping[str, Any]]:
        """Return at once: nobody else arrives."""
        return {}

    def skip(self, reason: str) -> None:
        """Do nothing: there is nobody to notify."""

    def go(self, arrivals: Mapping[int, Mapping[str, Any]], terms: Mapping[str, Any]) -> None:
        """Set the terms of the save."""
        del arrivals
        self.terms = terms

    def wait_for_go(self) -> RankPlaces | None:
        """Return None at once: this process writes all that it has."""

    def check_shared(self, *_: object, **__: object) -> None:
        """Do nothing: this process has published the record itself."""

    def moved(self, done: int, total: int) -> None:
        """Do nothing: nobody watches this process."""

    def check(self) -> None:
        """Do nothing: there is nobody else who could fail."""

    def seal(self, part: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        """Feed the table of the save that all of it is durable."""
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
        """Do nothing: there is nobody to notify."""

    def give_up(self, error: BaseException) -> BaseException:
        """Return the error: it is this process's own."""
        return error

    def finish(self) -> None:
        """Return at once: nobody needs to learn the end."""

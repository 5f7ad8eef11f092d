"""Judges the templates of all ranks together: a restore fails only if no rank's template fits.

Each pipeline stage has different objects. A pattern that names the new head matches on one rank
only, and another stage restores the objects that this stage lacks. Neither is an error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from penstock.core.abc import COORDINATION_VALUE_BYTES
from penstock.core.errors import CoordinationError, RestoreError
from penstock.core.format.compressed import compress, decompress
from penstock.core.format.strict_json import Fields, dump_json, load_json
from penstock.core.rounds.posts import template_key, templates_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.core.ranks.group import RankGroup
    from penstock.core.ranks.session import RankSession
    from penstock.core.rounds.round import RestoreRound

    T = TypeVar("T")

_DIGEST_BYTES = 8
_MAX_SHOWN = 100  # characters
_FITS = ("rank", "selection", "unused", "idle", "digest", "pieces")
_WORD = ("selection", "unused", "idle")


@dataclass(frozen=True, slots=True)
class TemplateFit:
    """How the template of one rank fits a checkpoint.

    Attributes:
        patterns: The patterns of the selection, as text.
        unused: The numbers of the patterns that match nothing in the checkpoint or the template.
        idle: Whether template and checkpoint have nothing in common within the selection.
        stored: The number of selected objects of the checkpoint.
        extra: The numbers, in stored order, of selected objects that the template lacks.
    """

    patterns: Sequence[str]
    unused: Sequence[int]
    idle: bool
    stored: int
    extra: Sequence[int]

    @property
    def selection(self) -> str:
        """A digest of the patterns and the object count, to which `unused` and `extra` refer.

        Two ranks can compare these numbers only if their digests are equal. All ranks get the same
        selection, but a rank's own `rename` may change its numbers.
        """
        return _digest(dump_json([*self.patterns, self.stored]))


class RoundOverError(RestoreError):
    """Signals that another rank ended the round; the round has the error to raise."""


class TemplatesOfRanks:
    """The templates of the ranks that restore together, as one rank knows them.

    Each rank posts a few bytes that describe how its template fits. A rank whose template fits
    continues at once. A rank with an unused pattern, or with nothing to restore, waits for rank 0's
    verdict; if rank 0 is such a rank, it waits for all others. So if a pattern or the checkpoint
    fits no rank, all ranks learn this before any of them changes an object.
    """

    def __init__(self, selection: str) -> None:
        """Prepare; `begin` must be called before any other method.

        Args:
            selection: The selection of this rank's call, as text. It must be the same on all ranks,
                or replicas would restore different parts.
        """
        self.selection = _shortened(selection)
        self._session: RankSession[RestoreRound]
        self._fit: TemplateFit | None = None
        self.lacked: Sequence[int] = ()
        """The positions in `TemplateFit.extra` of the objects that no rank's template has.

        Known only on rank 0, once all ranks have restored.
        """

    def begin(self, session: RankSession[RestoreRound]) -> None:
        """Set the round; called before any other method."""
        self._session, self._fit, self.lacked = session, None, ()

    @property
    def _group(self) -> RankGroup:
        return self._session.group

    @property
    def _number(self) -> int:
        return self._session.round.number

    def judge(self, fit: TemplateFit) -> TemplateFit:
        """Return `fit` with only those of its faults that the templates of all ranks have.

        Raises:
            RoundOverError: Another rank has failed.
        """
        self._fit = fit
        doubtful = bool(fit.unused) or fit.idle
        if self._group.place.rank:
            self._post(fit)
            if not doubtful:
                return fit
            (verdict,) = self._wait([templates_key(self._number)])
            return _judged(fit, _read(verdict, "rank 0's verdict on templates", _WORD))
        unused, idle = _mask(fit.unused), fit.idle
        if doubtful:
            for post in self._posts():
                if post.text("selection") == fit.selection:
                    unused &= int(post.text("unused"), 16)
                idle &= bool(post.value("idle"))
        body = {"selection": fit.selection, "unused": f"{unused:x}", "idle": idle}
        verdict = dump_json(body)
        self._insist(partial(self._group.coordination.post, templates_key(self._number), verdict))
        return _judged(fit, _read(verdict, "rank 0's verdict on templates", _WORD))

    def end(self) -> None:
        """Find the objects that every rank's template lacks, once all have restored.

        Only on rank 0. Ranks with another selection do not count. If the job's store can no longer
        be read, the result is all objects that this rank's template lacks.
        """
        fit = self._fit
        if fit is None or not fit.extra or self._group.place.rank:
            return
        lacked = _bits(fit)
        try:
            posts = [post for post in self._posts() if post.text("selection") == fit.selection]
            for post in {post.text("digest"): post for post in posts}.values():
                lacked &= self._bits_of(post, len(lacked))
        except (CoordinationError, RoundOverError):
            lacked = _bits(fit)
        flags = np.unpackbits(lacked, count=fit.stored)
        self.lacked = np.flatnonzero(flags[list(fit.extra)]).tolist()

    def _post(self, fit: TemplateFit) -> None:
        rank, size = self._group.place.rank, COORDINATION_VALUE_BYTES
        bits = _bits(fit).tobytes() if fit.extra else b""
        data = compress(bits) if bits else b""
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        told = {
            "rank": rank,
            "selection": fit.selection,
            "unused": f"{_mask(fit.unused):x}",
            "idle": fit.idle,
            "digest": _digest(bits),
            "pieces": len(pieces),
        }
        # The first key last: a rank that finds it finds all pieces.
        for number, value in reversed([*enumerate([dump_json(told), *pieces])]):
            key = template_key(self._number, rank, number)
            self._insist(partial(self._group.coordination.post, key, value))

    def _posts(self) -> list[Fields]:
        """Return the posts of the other ranks; waits for all of them."""
        others = range(1, self._group.place.world_size)
        found = self._wait([template_key(self._number, rank, 0) for rank in others])
        return [_read(data, "a rank's post about its template", _FITS) for data in found]

    def _bits_of(self, post: Fields, size: int) -> NDArray[np.uint8]:
        rank, count = post.integer("rank"), post.integer("pieces")
        if not count:
            return np.zeros(size, np.uint8)
        keys = [template_key(self._number, rank, number + 1) for number in range(count)]
        data = b"".join(piece or b"" for piece in self._group.coordination.read(keys))
        bits = decompress(data, f"rank {rank}'s post about its template", raw_length=size)
        return np.frombuffer(bits, np.uint8)

    def _wait(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all keys have values, and return the values.

        Raises:
            RoundOverError: The round ended first.
        """
        read = self._group.coordination.read
        found = self._insist(lambda: read(keys), lambda values: None not in values)
        return [value for value in found if value is not None]

    def _insist(self, call: Callable[[], T], is_done: Callable[[T], bool] = lambda _: True) -> T:
        """Repeat `call` until it returns an accepted result or the round ends."""
        session, timing = self._session, self._group.timing
        all_ask_s = self._group.place.world_size * timing.rank_share_s  # all ranks may wait at once
        while True:
            # Before the call: rank 0 posts its verdict first, and only then gives up the round.
            ended = session.has_news
            try:
                found = call()
                if is_done(found):
                    return found
            except CoordinationError:  # the round notices a silent store
                ended = session.has_news
            if ended:
                msg = "the round of the ranks ended while this one waited for the others"
                raise RoundOverError(msg)
            session.moved(0, 0)  # waiting for others is not a standstill
            time.sleep(max(timing.rank_look_first_s, all_ask_s))


def _judged(fit: TemplateFit, word: Fields) -> TemplateFit:
    if word.text("selection") != fit.selection:
        return fit  # rank 0 restores another selection, so its verdict is not about this one
    mask = int(word.text("unused"), 16)
    unused = [number for number in fit.unused if mask >> number & 1]
    return replace(fit, unused=unused, idle=bool(word.value("idle")))


def _mask(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in numbers)


def _bits(fit: TemplateFit) -> NDArray[np.uint8]:
    flags = np.zeros(fit.stored, np.bool_)
    flags[list(fit.extra)] = True
    return np.packbits(flags)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _read(data: bytes, name: str, keys: Sequence[str]) -> Fields:
    return Fields(load_json(data, name), name, keys)


def _shortened(text: str) -> str:
    """Return text that fits in a post, and that differs whenever `text` does."""
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[:_MAX_SHOWN]}... ({_digest(text.encode('utf-8', 'surrogatepass'))})"

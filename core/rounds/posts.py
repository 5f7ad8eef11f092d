"""The posts and decisions of ranks as bytes: small, versioned, and read strictly. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from penstock.core.errors import FormatError
from penstock.core.format.strict_json import (
    Fields,
    check_ints,
    check_texts,
    dump_json,
    load_json,
    refuse,
)
from penstock.core.limits import MAX_INT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

POST_BYTES = 512
"""The size limit of short posts, such as decisions and results."""

NEW_STRUCTURE_BYTES = 16 << 10
"""The size limit of posts that may describe a structure that rank 0 does not know."""

_CAUSE_BYTES = 300
_HOST_BYTES = 100
_VERSION = 0

Kind: TypeAlias = Literal["save", "restore"]


class At(StrEnum):
    """The progress of a rank in its round, as reported to the others."""

    HERE = "here"  # waits for rank 0's answer
    WORKING = "working"
    SEALED = "sealed"  # its contribution is durable
    CLOSED = "closed"  # takes part neither in this round nor in later ones; `part` has the cause


@dataclass(frozen=True, slots=True)
class SlotPost:
    """The state of one rank: posted at each change and each heartbeat.

    Attributes:
        round: The number of the round, the same on all ranks.
        kind: What the round does.
        at: The progress of the rank.
        moves: Counts progress. A heartbeat with an unchanged count shows that the process is alive,
            not that it makes progress.
        host: The name of the machine.
        done: The bytes written or restored so far, for messages.
        total: The bytes to write or restore; 0 if unknown.
        part: With `SEALED`: facts about the part for rank 0, such as its length and digests. With
            `HERE`: facts that rank 0 needs for its answer, such as a digest of the structure.
    """

    round: int
    kind: Kind
    at: At
    moves: int = 0
    host: str = ""
    done: int = 0
    total: int = 0
    part: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GoPost:
    """Rank 0's answer for a round: go, with the common terms; or stop, with a reason.

    Attributes:
        kind: What the round does.
        terms: The decisions for all ranks: step, generation, uid, tier, and the like.
        stop: The reason to stop; empty if the ranks go.
    """

    kind: Kind
    terms: Mapping[str, Any] = field(default_factory=dict)
    stop: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The value of a round's register: commit, or abort with a cause.

    Attributes:
        commit: Whether the round was decided to commit.
        rank: The rank at fault for an abort; else -1.
        host: The host of that rank, if known.
        cause: The cause of an abort.
    """

    commit: bool
    rank: int = -1
    host: str = ""
    cause: str = ""


class Result(StrEnum):
    """Whether rank 0 published the commit record, after the decision to commit."""

    COMMITTED = "committed"
    NEVER = "never"  # it was not published, and never will be
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ResultPost:
    """Rank 0's report on its publish.

    Attributes:
        result: Whether the commit record is published.
        cause: The reason if it is not, or if that is unknown.
        totals: The totals of all ranks, in the order of `SaveTotals`; empty if not committed.
    """

    result: Result
    cause: str = ""
    totals: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainsPost:
    """Rank 0's report on copies of checkpoints, repeated while others wait for a copy.

    Attributes:
        moves: Counts the posts, so that each differs from the previous post.
        failing: Why waiting is useless; empty while the copies make progress.
    """

    moves: int
    failing: str = ""


@dataclass(frozen=True, slots=True)
class DrainedPost:
    """How the copies of one checkpoint ended.

    Attributes:
        tiers: The names of the tiers that have the checkpoint.
        kind: The name of the error's class; empty if the copies are whole.
        error: The text of the error.
    """

    tiers: tuple[str, ...] = ()
    kind: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class DuePost:
    """Rank 0's promise about the next save.

    Attributes:
        step: No save is due before this step.
        due: Whether a save is due at this step; if not, another promise follows.
    """

    step: int
    due: bool


Record: TypeAlias = SlotPost | GoPost | Verdict | ResultPost | DrainsPost | DrainedPost | DuePost
R = TypeVar("R", SlotPost, GoPost, Verdict, ResultPost, DrainsPost, DrainedPost, DuePost)


def slot_key(rank: int) -> str:
    """Return the key of a rank's slot, which each round and each heartbeat overwrite."""
    return f"slots/{rank:05d}"


def go_key(number: int) -> str:
    """Return the key of rank 0's answer for a round."""
    return f"rounds/{number}/go"


def end_key(number: int) -> str:
    """Return the key of a round's register, which holds the verdict."""
    return f"rounds/{number}/end"


def result_key(number: int) -> str:
    """Return the key of rank 0's report on its publish in a round."""
    return f"rounds/{number}/result"


def copies_key(kind: str) -> str:
    """Return the key of rank 0's report on its copies of a kind, such as `drains`."""
    return kind


def copied_key(kind: str, name: int | str) -> str:
    """Return the key of rank 0's report on how the copies of one checkpoint ended.

    Args:
        kind: The kind of the copies.
        name: The number of the checkpoint's round, or its uid.
    """
    return f"{kind}/{name}"


def due_key(number: int, post: int) -> str:
    """Return the key of one of rank 0's promises about the next save.

    Args:
        number: The number of the last due save, from 0.
        post: The number of the promise since that save, from 0.
    """
    return f"due/{number}/{post}"


def values_key(number: int, rank: int, piece: int) -> str:
    """Return the key of a piece of a rank's value digests.

    A rank posts them only if they differ from rank 0's.
    """
    return f"rounds/{number}/values/{rank:05d}-{piece}"


def template_key(number: int, rank: int, piece: int) -> str:
    """Return the key of a piece of a rank's report on its template in a restore."""
    return f"rounds/{number}/templates/{rank:05d}-{piece}"


def templates_key(number: int) -> str:
    """Return the key of rank 0's verdict on the templates of all ranks in a restore."""
    return f"rounds/{number}/templates/all"


def ended(text: str) -> str:
    """Return `text` with a final period, unless it already ends in `.`, `?` or `!`."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def cut_bytes(text: str, limit: int = _CAUSE_BYTES) -> str:
    """Return `text`; if it takes more than `limit` bytes in JSON, cut it and append `...`."""
    if len(dump_json(text)) - 2 <= limit:
        return text
    shown = text[:limit]
    while len(dump_json(f"{shown}...")) - 2 > limit:
        shown = shown[:-1]
    return f"{shown}..."


def _one_of(read: Fields, name: str, key: str, allowed: Sequence[str]) -> str:
    value = read.text(key)
    if value not in allowed:
        refuse(name, f"{key} is not one of {', '.join(allowed)}")
    return value


def _flag(read: Fields, name: str, key: str) -> bool:
    value = read.value(key)
    if type(value) is not bool:
        refuse(name, f"{key} is neither true nor false")
    return value


_READERS: Mapping[str, Callable[[Fields, str, str], Any]] = {
    "int": lambda read, _, key: read.integer(key, low=-1 if key == "rank" else 0),
    "str": lambda read, _, key: read.text(key),
    "bool": _flag,
    "Kind": lambda read, name, key: _one_of(read, name, key, ["save", "restore"]),
    "At": lambda read, name, key: At(_one_of(read, name, key, list(At))),
    "Result": lambda read, name, key: Result(_one_of(read, name, key, list(Result))),
    "Mapping[str, Any]": lambda read, _, key: read.mapping(key),
    "tuple[int, ...]": lambda read, name, key: tuple(check_ints(read.value(key), name)),
    "tuple[str, ...]": lambda read, name, key: tuple(check_texts(read.value(key), name)),
}
"""The reader of a field, by its type."""

_FORMS: Mapping[type[Record], tuple[str, int]] = {
    SlotPost: ("a rank's slot", NEW_STRUCTURE_BYTES),
    GoPost: ("rank 0's answer", NEW_STRUCTURE_BYTES),
    Verdict: ("a decision", POST_BYTES),
    ResultPost: ("a result", POST_BYTES),
    DrainsPost: ("the state of the copies", POST_BYTES),
    DrainedPost: ("the end of the copies", NEW_STRUCTURE_BYTES),
    DuePost: ("a promise about the next save", POST_BYTES),
}
"""The name of each record in messages, and its size limit in bytes."""

_TYPES = {kind: {field.name: str(field.type) for field in fields(kind)} for kind in _FORMS}
"""The types of the fields of each record, by their names, in order."""


def encode(post: Record) -> bytes:
    """Encode a post or a decision as bytes; cut long texts in it.

    Raises:
        FormatError: The post is too large.
    """
    name, limit = _FORMS[type(post)]
    values: dict[str, Any] = {"v": _VERSION}
    for key, kind in _TYPES[type(post)].items():
        value = getattr(post, key)
        if kind == "str":
            values[key] = cut_bytes(value, _HOST_BYTES if key == "host" else _CAUSE_BYTES)
        else:
            values[key] = dict(value) if kind == "Mapping[str, Any]" else value
    data = dump_json(values)
    if len(data) > limit:
        msg = f"{name} has {len(data)} bytes; a post has at most {limit}"
        raise FormatError(msg)
    return data


def decode(kind: type[R], data: bytes) -> R:
    """Read a post or a decision.

    Raises:
        FormatError: The bytes are not such a record, or are from another version of Penstock.
    """
    name, _ = _FORMS[kind]
    types: Mapping[str, str] = _TYPES[kind]
    read = Fields(load_json(data, name), name, ["v", *types])
    if read.value("v") != _VERSION:
        refuse(
            name,
            f"has version {read.value('v')!r}, from another release of Penstock: use one version "
            "everywhere",
        )
    return kind(**{key: _READERS[of](read, name, key) for key, of in types.items()})


class Outbox:
    """Keeps the posts of one rank in a round until the job's store has accepted them.

    Holds only the newest post for each key. A post that arrives while an older post with the same
    key is being sent is sent after it.
    """

    def __init__(self, rank: int, slot: SlotPost) -> None:
        """Start with nothing to post.

        Args:
            rank: The rank.
            slot: The state of the rank, which `put_slot` posts.
        """
        self.slot = slot
        """The current state of the rank."""
        self._slot_key = slot_key(rank)
        self._waiting: dict[str, bytes] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no post waits."""
        return not self._waiting

    @property
    def waiting(self) -> list[tuple[str, bytes]]:
        """The keys and bytes of the waiting posts, in order."""
        return list(self._waiting.items())

    def put(self, key: str, post: Record) -> None:
        """Queue a post; it replaces a waiting post with the same key.

        Raises:
            FormatError: The post is too large; nothing has changed.
        """
        self._waiting[key] = encode(post)

    def put_slot(self) -> None:
        """Queue the state of the rank as a post, after a change or when a heartbeat is due."""
        self.put(self._slot_key, self.slot)

    def taken(self, key: str, value: bytes) -> None:
        """Record that the store has accepted these bytes."""
        if self._waiting.get(key) is value:
            del self._waiting[key]

    def moved(self) -> None:
        """Increase the slot's count of progress."""
        self.slot = replace(self.slot, moves=self.slot.moves + 1)

    def fitting(self, at: At, part: Mapping[str, Any]) -> SlotPost:
        """Return the slot with this state and part.

        Raises:
            FormatError: The slot would be too large for a post once later heartbeats have larger
                counts.
        """
        slot = replace(self.slot, at=at, part=part)
        encode(replace(slot, moves=MAX_INT, done=MAX_INT, total=MAX_INT))
        return slot

"""What ranks post and decide, as bytes: small, versioned, and read strictly. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock.core.errors import FormatError
from penstock.core.format.strict_json import (
    Fields,
    check_ints,
    check_texts,
    dump_json,
    load_json,
    refuse,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

POST_BYTES = 512
"""The most bytes of a post of a known structure, and of a decision."""

NEW_STRUCTURE_BYTES = 16 << 10
"""The most bytes of a post of a structure that rank 0 does not know."""

_CAUSE_BYTES = 300
_HOST_BYTES = 100
_VERSION = 0

Kind: TypeAlias = Literal["save", "restore"]


class At(StrEnum):
    """How far a rank is in its round, as it tells the others."""

    HERE = "here"  # waits for the word of rank 0
    WORKING = "working"
    SEALED = "sealed"  # what it has to contribute is durable
    CLOSED = "closed"  # takes no part in this round or a later one; `part` has the cause


@dataclass(frozen=True, slots=True)
class SlotPost:
    """The state of one rank: posted when it changes, and at each beat.

    Attributes:
        round: The number of the round, the same on all ranks.
        kind: What the round does.
        at: How far the rank is.
        moves: Counts progress. A beat with the same number says that the process lives, not that
            it gets on.
        host: The name of the machine.
        done: Bytes done, for messages.
        total: Bytes to do.
        part: With `SEALED`: what rank 0 needs to know of the part, such as its length and digests.
            With `HERE`: what it needs to know before it says go, such as a digest of the structure.
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
    """The word of rank 0 on a round: go, with all that has to be alike; or stop, with a reason.

    Attributes:
        kind: What the round does.
        terms: What is decided for all: step, generation, uid, tier, and the like.
        stop: Why nothing is done; empty: go.
    """

    kind: Kind
    terms: Mapping[str, Any] = field(default_factory=dict)
    stop: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The value of a round's register: commit, or abort with its cause.

    Attributes:
        commit: Whether the round was decided to commit.
        rank: The rank that is the cause of an abort; -1 else.
        host: Its host, as far as it is known.
        cause: The cause.
    """

    commit: bool
    rank: int = -1
    host: str = ""
    cause: str = ""


class Result(StrEnum):
    """What became of the publish after the decision to commit."""

    COMMITTED = "committed"
    NEVER = "never"  # it was not published, and never will be
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ResultPost:
    """What rank 0 tells of its publish.

    Attributes:
        result: What became of it.
        cause: Why, if it is not committed.
        totals: What all ranks have written, in the order of `SaveTotals`; empty if it is not
            committed.
    """

    result: Result
    cause: str = ""
    totals: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainsPost:
    """What rank 0 tells of its copies to slower tiers, again and again while others wait for one.

    Attributes:
        moves: Counts the posts, so that each differs from the one before.
        failing: Why waiting makes no sense; empty: the copies make progress.
    """

    moves: int
    failing: str = ""


@dataclass(frozen=True, slots=True)
class DrainedPost:
    """How the copies of one checkpoint to slower tiers ended on rank 0.

    Attributes:
        tiers: The names of the tiers that have it.
        kind: The class of the error; empty: it is durable.
        error: The text of the error.
    """

    tiers: tuple[str, ...] = ()
    kind: str = ""
    error: str = ""


def slot_key(rank: int) -> str:
    """Return the key of a rank's slot, which it posts anew in each round and at each beat."""
    return f"slots/{rank:05d}"


def go_key(number: int) -> str:
    """Return the key of rank 0's word on a round."""
    return f"rounds/{number}/go"


def end_key(number: int) -> str:
    """Return the key of the register of a round."""
    return f"rounds/{number}/end"


def result_key(number: int) -> str:
    """Return the key of the result of a round."""
    return f"rounds/{number}/result"


def drains_key() -> str:
    """Return the key of what rank 0 tells of its copies to slower tiers."""
    return "drains"


def drained_key(number: int) -> str:
    """Return the key of the end of the copies of what was saved in a round."""
    return f"rounds/{number}/drained"


def values_key(number: int, rank: int, piece: int) -> str:
    """Return the key of a piece of the digests of a rank's values, where they are not rank 0's."""
    return f"rounds/{number}/values/{rank:05d}-{piece}"


def template_key(number: int, rank: int, piece: int) -> str:
    """Return the key of a piece of what a rank says of its template in a restore."""
    return f"rounds/{number}/templates/{rank:05d}-{piece}"


def templates_key(number: int) -> str:
    """Return the key of what rank 0 says of the templates of all ranks in a restore."""
    return f"rounds/{number}/templates/all"


def encode_slot(post: SlotPost) -> bytes:
    """Return the bytes of a slot.

    Raises:
        FormatError: The part is larger than a post may be.
    """
    fields = {
        "round": post.round,
        "kind": post.kind,
        "at": post.at,
        "moves": post.moves,
        "host": cut_bytes(post.host, _HOST_BYTES),
        "done": post.done,
        "total": post.total,
        "part": dict(post.part),
    }
    return _bounded("a rank's slot", fields, NEW_STRUCTURE_BYTES)


def decode_slot(data: bytes) -> SlotPost:
    """Read a slot.

    Raises:
        FormatError: The bytes are no slot, or one of another version of Penstock.
    """
    name = "a rank's slot"
    keys = ["round", "kind", "at", "moves", "host", "done", "total", "part"]
    read = _fields(data, name, keys)
    return SlotPost(
        round=read.integer("round"),
        kind=_kind(read, name),
        at=At(_one_of(read, name, "at", list(At))),
        moves=read.integer("moves"),
        host=read.text("host"),
        done=read.integer("done"),
        total=read.integer("total"),
        part=read.mapping("part"),
    )


def encode_go(post: GoPost) -> bytes:
    """Return the bytes of rank 0's word.

    Raises:
        FormatError: The terms are larger than a post may be.
    """
    fields = {"kind": post.kind, "terms": dict(post.terms), "stop": cut_bytes(post.stop)}
    return _bounded("the word of rank 0", fields, NEW_STRUCTURE_BYTES)


def decode_go(data: bytes) -> GoPost:
    """Read rank 0's word.

    Raises:
        FormatError: As with `decode_slot`.
    """
    name = "the word of rank 0"
    read = _fields(data, name, ["kind", "terms", "stop"])
    return GoPost(kind=_kind(read, name), terms=read.mapping("terms"), stop=read.text("stop"))


def encode_verdict(verdict: Verdict) -> bytes:
    """Return the bytes of a decision, at most 512."""
    fields = {
        "commit": verdict.commit,
        "rank": verdict.rank,
        "host": cut_bytes(verdict.host, _HOST_BYTES),
        "cause": cut_bytes(verdict.cause),
    }
    return _bounded("a decision", fields, POST_BYTES)


def decode_verdict(data: bytes) -> Verdict:
    """Read a decision.

    Raises:
        FormatError: As with `decode_slot`.
    """
    name = "a decision"
    read = _fields(data, name, ["commit", "rank", "host", "cause"])
    commit = read.value("commit")
    if type(commit) is not bool:
        refuse(name, "commit is neither true nor false")
    return Verdict(commit, read.integer("rank", low=-1), read.text("host"), read.text("cause"))


def encode_result(post: ResultPost) -> bytes:
    """Return the bytes of a result, at most 512."""
    totals = list(post.totals)
    fields = {"result": post.result, "cause": cut_bytes(post.cause), "totals": totals}
    return _bounded("a result", fields, POST_BYTES)


def decode_result(data: bytes) -> ResultPost:
    """Read a result.

    Raises:
        FormatError: As with `decode_slot`.
    """
    name = "a result"
    read = _fields(data, name, ["result", "cause", "totals"])
    result = Result(_one_of(read, name, "result", list(Result)))
    totals = check_ints(read.value("totals"), name)
    return ResultPost(result, read.text("cause"), tuple(totals))


def encode_drains(post: DrainsPost) -> bytes:
    """Return the bytes of a post of rank 0 about its copies, at most 512."""
    fields = {"moves": post.moves, "failing": cut_bytes(post.failing)}
    return _bounded("the state of the copies", fields, POST_BYTES)


def decode_drains(data: bytes) -> DrainsPost:
    """Read a post of rank 0 about its copies.

    Raises:
        FormatError: As with `decode_slot`.
    """
    read = _fields(data, "the state of the copies", ["moves", "failing"])
    return DrainsPost(read.integer("moves"), read.text("failing"))


def encode_drained(post: DrainedPost) -> bytes:
    """Return the bytes of the end of the copies of a checkpoint; at most 512 with a few tiers."""
    fields = {"tiers": list(post.tiers), "kind": post.kind, "error": cut_bytes(post.error)}
    return _bounded("the end of the copies", fields, NEW_STRUCTURE_BYTES)


def decode_drained(data: bytes) -> DrainedPost:
    """Read the end of the copies of a checkpoint.

    Raises:
        FormatError: As with `decode_slot`.
    """
    name = "the end of the copies"
    read = _fields(data, name, ["tiers", "kind", "error"])
    tiers = check_texts(read.value("tiers"), name)
    return DrainedPost(tuple(tiers), read.text("kind"), read.text("error"))


def ended(text: str) -> str:
    """Return `text` with a full stop at its end, unless it ends in a question or was cut."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def cut_bytes(text: str, limit: int = _CAUSE_BYTES) -> str:
    """Return the beginning of `text` that takes at most `limit` bytes within JSON."""
    if len(dump_json(text)) - 2 <= limit:
        return text
    shown = text[:limit]
    while len(dump_json(f"{shown}...")) - 2 > limit:
        shown = shown[:-1]
    return f"{shown}..."


def _bounded(name: str, fields: Mapping[str, Any], limit: int) -> bytes:
    data = dump_json({"v": _VERSION, **fields})
    if len(data) > limit:
        msg = f"{name} has {len(data)} bytes, more than the {limit} that ranks post"
        raise FormatError(msg)
    return data


def _fields(data: bytes, name: str, keys: list[str]) -> Fields:
    read = Fields(load_json(data, name), name, ["v", *keys])
    if read.value("v") != _VERSION:
        refuse(name, f"version {read.value('v')!r} of another Penstock; use one version everywhere")
    return read


def _kind(read: Fields, name: str) -> Kind:
    return "save" if _one_of(read, name, "kind", ["save", "restore"]) == "save" else "restore"


def _one_of(read: Fields, name: str, key: str, allowed: list[Any]) -> str:
    value = read.text(key)
    if value not in allowed:
        refuse(name, f"{key} is not one of {', '.join(map(str, allowed))}")
    return value

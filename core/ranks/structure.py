"""What ranks compare of their states: the structure, and the plain values. Sans-IO."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING

from penstock.core.abc import StateObject
from penstock.core.format.zstd import compress, decompress
from penstock.core.types import Kind, Replica, Role, show_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.core.abc import Node
    from penstock.core.types import ObjectPath

_DIGEST_BYTES = 16
_LINE_BYTES = 64
_LINES = 8
_PIECE_BYTES = 60 << 10  # of a post, which has at most 64 KiB


def is_below(path: ObjectPath, own_paths: Sequence[ObjectPath]) -> bool:
    """Return whether `path` is at or below one of `own_paths`, where each rank has its own."""
    return any(path[: len(own)] == own for own in own_paths)


def structure_digest(
    entries: Sequence[StateObject | Node], own_paths: Sequence[ObjectPath] = ()
) -> str:
    """Return a digest that is equal for ranks which describe the same objects.

    They hold the same plain tensors then. Which rectangles a rank holds of the others, and the
    lengths of values, do not count.
    """
    hashed = blake2b(digest_size=_DIGEST_BYTES)
    for entry in entries:
        if own_paths and is_below(entry.path, own_paths):
            continue
        told: tuple[object, ...] = entry.path, entry.form
        if isinstance(entry, StateObject):
            spec, plain = entry.spec, entry.replica is None
            shape = () if entry.kind is Kind.VALUE else spec.shape
            kind, role = entry.kind.value, entry.role.value
            told = (*told, kind, role, plain, spec.dtype, spec.itemsize, shape, entry.same_as)
        hashed.update(repr(told).encode("utf-8", "surrogatepass"))
    return hashed.hexdigest()


def value_digests(
    entries: Sequence[StateObject | Node], own_paths: Sequence[ObjectPath] = ()
) -> dict[str, str]:
    """Return a digest of what has to be equal on all ranks, by its shown path.

    That is each plain value whole, and some lines of each plain tensor in host memory, the first
    and the last among them: ranks share the bytes of these tensors, so what had drifted apart would
    be stored as a mixture. Buffers may differ: one rank stores all of them.
    """
    found: dict[str, str] = {}
    for entry in entries:
        if not isinstance(entry, StateObject) or entry.replica is not None:
            continue
        if own_paths and is_below(entry.path, own_paths):
            continue
        if entry.kind is not Kind.VALUE and (entry.same_as or entry.role is Role.BUFFER):
            continue
        view = entry.source.view()
        if view is not None:
            told = view if entry.kind is Kind.VALUE else _lines_of(view)
            found[show_path(entry.path)] = blake2b(told, digest_size=8).hexdigest()
    return found


def _lines_of(view: memoryview) -> bytes:
    """Return a few lines of some bytes, spread evenly."""
    last = view.nbytes - _LINE_BYTES
    if last < _LINES * _LINE_BYTES:
        return bytes(view)
    starts = (last * n // (_LINES - 1) for n in range(_LINES))
    return b"".join(view[at : at + _LINE_BYTES] for at in starts)


def digest_of(values: Mapping[str, str]) -> str:
    """Return one digest of the digests of values."""
    text = json.dumps(sorted(values.items()))
    return blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def dump_values(values: Mapping[str, str]) -> list[bytes]:
    """Return the digests of values in pieces that can be posted."""
    data = compress(json.dumps(dict(values)).encode())
    return [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]


def load_values(pieces: Sequence[bytes], name: str) -> dict[str, str]:
    """Return what `dump_values` wrote.

    Raises:
        FormatError: It is something else.
    """
    found: dict[str, str] = json.loads(decompress(b"".join(pieces), name))
    return found


def difference_of(maps: Sequence[tuple[Sequence[int], Mapping[str, str]]]) -> str | None:
    """Return how values differ between ranks, as a sentence; None if they do not.

    Args:
        maps: The digests of values, each with the ranks that have them.
    """
    first: dict[str, tuple[str, Sequence[int]]] = {}
    for ranks, values in maps:
        for path, digest in values.items():
            other, where = first.setdefault(path, (digest, ranks))
            if other != digest:
                return (
                    f"{path} is not equal on {shown_ranks(where)} and {shown_ranks(ranks)}: make "
                    "it equal on all ranks, or put it into penstock.PerRank"
                )
    return None


def shown_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: "rank 4", "ranks 0-3, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    shown = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"


def classes_of(digests: Sequence[str]) -> list[list[int]]:
    """Return runs `[number of ranks, class]` of the ranks with equal structures, in order."""
    numbers: dict[str, int] = {}
    runs: list[list[int]] = []
    for digest in digests:
        number = numbers.setdefault(digest, len(numbers))
        if runs and runs[-1][1] == number:
            runs[-1][0] += 1
        else:
            runs.append([1, number])
    return runs


def place_in(runs: Sequence[Sequence[int]], rank: int) -> Replica:
    """Return the place of a rank in its class. Without runs each rank is a class of its own."""
    numbers = [number for count, number in runs for _ in range(count)]
    if not numbers:
        return Replica()
    alike = [other for other, number in enumerate(numbers) if number == numbers[rank]]
    return Replica(alike.index(rank), len(alike))

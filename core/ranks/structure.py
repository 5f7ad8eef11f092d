"""Computes the facts that ranks compare: the structure, plain values, and sampled lines of tensors.

Tested in `tests/core/ranks/test_lines.py` and `tests/integration/ranks/test_save_failures.py`.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from heapq import nsmallest
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.abc import Lines, StateObject
from penstock.core.errors import FormatError, SaveError
from penstock.core.foreign import noting_origin
from penstock.core.format.compressed import compress, decompress
from penstock.core.tree.containers import NOTHING
from penstock.core.tree.paths import path_hash
from penstock.core.types import Kind, Region, Replica, Role, show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from penstock.core.abc import ByteSource, Node
    from penstock.core.types import ObjectPath

LINE_BYTES = 64
"""Bytes of a line: a sample of memory. Lines are compared instead of all bytes."""

LINES = 8
"""Ranks compare this number of lines of a tensor, and also its last line. For samples of host
memory: the number of lines of an object in a slab."""

_DIGEST_BYTES = 16
_REPLICA_CHARS = 16  # of a digest in a post
_MAX_SETS = 8  # some 30 bytes each in a post
_MAX_COPIES = 6  # about the same
_OF_TENSOR = "t"  # begins the digest of a tensor; not a hexadecimal digit
_OF_PIECE = "p"  # begins the digest of a piece of a tensor that several ranks hold
_MOST_SHOWN = 3  # of the paths that differ
_PIECE_BYTES = 60 << 10  # of a post, which has at most 64 KiB


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of values and tensors that a rank compares with the other ranks.

    Attributes:
        values: Digests of this rank's plain values and tensors, by shown path.
        shared: Digests of everything that this rank has at each `PerRank` with an index, by shown
            path.
        replicas: Digests of the pieces of tensors that other ranks also hold: by a key that these
            ranks have in common, then by piece.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    replicas: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def compared(self, unequal: Collection[str]) -> dict[str, str]:
        """Return the digests that must be equal on all ranks that have them.

        Args:
            unequal: Keys of the replicas that differ between ranks, from `unequal_replicas`. Other
                replicas are left out.
        """
        digests = dict(self.values)
        for key in unequal:
            digests |= self.replicas.get(key, {})
        return digests


@dataclass(frozen=True, slots=True)
class Brought:
    """The facts about a rank's state that other ranks need for a save.

    Attributes:
        structure: The digest of the structure of this rank's state.
        shared: Index and count of each `PerRank` that has them, by shown path.
        digests: Returns the digests of the state as it was when `save` was called; may wait for a
            device.
    """

    structure: str = ""
    shared: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    digests: Callable[[], Digests] = Digests

    @property
    def key(self) -> object:
        """The key that determines this rank's places while the other ranks' keys stay the same."""
        return self.structure, tuple(sorted(self.shared.items()))

    def without_state(self) -> Brought:
        """Return a copy without `digests`, which would keep the state from being freed."""
        return Brought(self.structure, self.shared)

    def arrival(self, digests: Digests) -> dict[str, Any]:
        """Return the post with which this rank arrives."""
        shared = {path: list(place) for path, place in self.shared.items()}
        told: dict[str, Any] = {"structure": self.structure}
        if shared:
            told["shared"] = shared
        if digests.replicas:
            told["replicas"] = {
                key: digest_of(found)[:_REPLICA_CHARS] for key, found in digests.replicas.items()
            }
        return told

    @classmethod
    def of(
        cls,
        entries: Sequence[StateObject | Node],
        own_paths: Sequence[ObjectPath],
        shared: Mapping[str, tuple[int, int]],
        masters: Iterable[tuple[ObjectPath, Sequence[ObjectPath]]] = (),
    ) -> Brought:
        """Return the facts about a rank's described state; samples lines of its tensors now.

        Raises:
            TornSnapshotError: Memory was freed after the description.
        """
        objects: list[StateObject] = []
        alone: list[StateObject] = []  # on submeshes, and perhaps on no other rank
        for entry in entries:
            if isinstance(entry, StateObject):
                if _is_compared(entry, own_paths, shared):
                    objects.append(entry)
                elif entry.replica is not None and entry.replica.submesh:
                    alone.append(entry)
        copies = copies_to_compare([*objects, *alone])
        objects += [entry for entry in alone if entry.path in copies]
        taken = TakenLines(entry for entry in objects if entry.kind is not Kind.VALUE)

        def digests() -> Digests:
            lines = taken.read()
            return Digests(
                value_digests(objects, lines),
                shared_digests(objects, shared, lines),
                replica_digests(objects, lines) | copy_digests(objects, copies, lines),
            )

        return cls(structure_digest(entries, own_paths, masters), shared, digests)


def _is_compared(
    entry: StateObject, own_paths: Sequence[ObjectPath], shared: Collection[str]
) -> bool:
    """Return whether an object must be equal on other ranks, which may write it instead.

    Buffers may differ: only one of the ranks that hold a buffer stores it.
    """
    replica, is_value = entry.replica, entry.kind is Kind.VALUE
    if replica is not None and replica.place:
        return replica.place in shared
    if entry.same_as and not is_value:
        return False
    if entry.role is Role.BUFFER:
        return False
    if replica is not None:
        return not is_value and not (replica.ranks and replica.count == 1)
    return not (own_paths and is_below(entry.path, own_paths))


def is_below(path: ObjectPath, own_paths: Sequence[ObjectPath]) -> bool:
    """Return whether `path` is at or below one of `own_paths`, where each rank has its own."""
    return any(path[: len(own)] == own for own in own_paths)


def structure_digest(
    entries: Sequence[StateObject | Node],
    own_paths: Sequence[ObjectPath] = (),
    masters: Iterable[tuple[ObjectPath, Sequence[ObjectPath]]] = (),
) -> str:
    """Return a digest that is equal for ranks that describe the same objects.

    Ranks with equal digests hold the same plain tensors. A rank's rectangles of other tensors and
    the lengths of values do not count.

    Args:
        entries: Objects and nodes of the state.
        own_paths: Paths below which each rank has its own objects, which do not count.
        masters: The objects that may be derived, each with its masters. Masters determine the
            writers: ranks that disagree could each leave an object to the other.
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
    for path, of in masters:
        hashed.update(repr((path, tuple(of))).encode("utf-8", "surrogatepass"))
    return hashed.hexdigest()


def value_digests(
    objects: Iterable[StateObject], lines: Mapping[ObjectPath, bytes]
) -> dict[str, str]:
    """Return a digest of each object that must be equal on all ranks, by shown path.

    The digest covers each plain value whole, and some lines of each plain tensor, including the
    first and the last. Each rank writes a share of these tensors, so tensors that drifted apart
    would be stored as a mixture.
    """
    found: dict[str, str] = {}
    for entry in objects:
        if entry.replica is None:
            told = _bytes_of(entry, lines)
            if told is not None:
                digest = _digest(told)
                is_value = entry.kind is Kind.VALUE
                found[show_path(entry.path)] = digest if is_value else f"{_OF_TENSOR}{digest}"
    return found


def shared_digests(
    objects: Iterable[StateObject],
    shared: Iterable[str],
    lines: Mapping[ObjectPath, bytes],
) -> dict[str, str]:
    """Return a digest of everything that this rank has at each `PerRank` with an index.

    Ranks with the same index must be equal there: in structure, in values, and in some lines of
    each tensor.
    """
    hashes = {path: blake2b(digest_size=8) for path in shared}
    for entry in objects if hashes else ():
        hashed = None if entry.replica is None else hashes.get(entry.replica.place)
        if hashed is not None:
            spec = entry.spec
            told = entry.path, entry.form, entry.kind.value, spec.dtype, spec.shape, entry.same_as
            hashed.update(repr(told).encode("utf-8", "surrogatepass"))
            hashed.update(_bytes_of(entry, lines) or b"")
    return {path: hashed.hexdigest() for path, hashed in hashes.items()}


def replica_digests(
    objects: Iterable[StateObject], lines: Mapping[ObjectPath, bytes]
) -> dict[str, dict[str, str]]:
    """Return a digest of some lines of each piece that several ranks hold.

    Each of these ranks writes a share of the pieces, as with plain tensors.

    Returns:
        The digests by set of ranks that hold the same pieces, then by piece, such as
        "model/w from [4, 0], of shape [4, 8]". The key of a set is equal on all of its ranks. If
        the provider does not name the ranks, ranks with the same pieces form a set, so pieces that
        two ranks hold by mistake are also compared. Holds no more sets than fit in a post.
    """
    sets: dict[tuple[tuple[int, ...], int], dict[str, str]] = {}
    for entry in objects:
        replica = entry.replica
        if replica is None or replica.place or entry.path not in lines:
            continue
        if replica.ranks and replica.count == 1:  # a copy, which `copy_digests` compares
            continue
        digest = _digest(lines[entry.path])
        sets.setdefault((replica.ranks, replica.count), {})[_in_words(entry)] = (
            f"{_OF_PIECE}{digest}"
        )
    found = {}
    for (ranks, count), pieces in sets.items():
        told = ranks, count, () if ranks else tuple(sorted(pieces))
        found[blake2b(repr(told).encode(), digest_size=4).hexdigest()] = pieces
    return dict(sorted(found.items())[:_MAX_SETS])


def copies_to_compare(objects: Iterable[StateObject]) -> frozenset[ObjectPath]:
    """Return the paths of a few tensors that other ranks may also hold.

    If two pipeline stages give one name to different tensors, only one tensor would be stored. No
    stage knows the other's names. So each stage chooses the names with the lowest hashes, and
    stages with mostly common names choose some of the same names. Buffers are left out because they
    may differ, and optimizer states because they have the names of their parameters.
    """
    spread = [
        entry.path
        for entry in objects
        if entry.replica is not None
        and entry.replica.submesh
        and entry.role in {Role.PARAMETER, Role.OTHER}
        and entry.same_as is None
    ]
    return frozenset(nsmallest(_MAX_COPIES, spread, key=path_hash))


def copy_digests(
    objects: Iterable[StateObject],
    copies: Collection[ObjectPath],
    lines: Mapping[ObjectPath, bytes],
) -> dict[str, dict[str, str]]:
    """Return a digest of some lines of each of these copies, like `replica_digests`.

    Each piece has its own key, which is the same on every rank that holds this piece of a copy.
    """
    found = {}
    for entry in objects:
        if entry.path in copies and entry.path in lines:
            told = _in_words(entry)
            key = blake2b(told.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
            digest = _digest(lines[entry.path])
            found[key] = {told: f"{_OF_TENSOR}{digest}"}
    return found


def _digest(data: bytes | memoryview) -> str:
    return blake2b(data, digest_size=8).hexdigest()


_OF_NOTHING = frozenset(map(_digest, NOTHING))


def _bytes_of(entry: StateObject, lines: Mapping[ObjectPath, bytes]) -> bytes | memoryview | None:
    """Return the compared bytes of an object: the whole value, or the lines of a tensor."""
    return entry.source.view() if entry.kind is Kind.VALUE else lines.get(entry.path)


def unequal_replicas(given: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the keys of replicas that are not equal on all ranks that hold them.

    Args:
        given: The replicas in the `Brought.arrival` of each rank.
    """
    digests: dict[str, set[str]] = {}
    for replicas in given:
        for key, digest in replicas.items():
            digests.setdefault(key, set()).add(digest)
    unequal = sorted(key for key, found in digests.items() if len(found) > 1)
    return unequal[: _MAX_SETS + _MAX_COPIES]


def _in_words(entry: StateObject) -> str:
    regions = entry.regions or (Region.whole(entry.spec.shape),)
    first = regions[0]
    where = f"from {list(first.offsets)}, of shape {list(first.sizes)}"
    more = f" and {len(regions) - 1} more" if len(regions) > 1 else ""
    return f"{show_path(entry.path)} {where}{more}"


def nothing_in(values: Mapping[str, str]) -> set[str]:
    """Return the shown paths of values that `is_nothing` accepts.

    Args:
        values: The result of `value_digests`.
    """
    return {path for path, digest in values.items() if digest in _OF_NOTHING}


def digest_of(values: Mapping[str, str]) -> str:
    """Return one digest for all digests of values."""
    text = json.dumps(sorted(values.items()))
    return blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def dump_values(values: Mapping[str, str]) -> list[bytes]:
    """Return the digests of values, split into pieces that fit in a post."""
    data = compress(json.dumps(dict(values)).encode())
    return [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]


def load_values(pieces: Sequence[bytes], name: str) -> dict[str, str]:
    """Return the digests that `dump_values` wrote.

    Raises:
        FormatError: The pieces are not from `dump_values`.
    """
    values: dict[str, str] = json.loads(decompress(b"".join(pieces), name))
    return values


def difference_of(maps: Sequence[tuple[Sequence[int], Mapping[str, str]]]) -> str | None:
    """Return the differences of values between ranks, as a sentence; None if there are none.

    Args:
        maps: The digests of values, each with the ranks that have them.
    """
    first: dict[str, tuple[str, Sequence[int]]] = {}
    differing: dict[str, str] = {}
    tensors = values_differ = False
    for ranks, values in maps:
        for path, digest in values.items():
            other, where = first.setdefault(path, (digest, ranks))
            if other != digest and path not in differing:
                on = f"{shown_ranks(where)} and {shown_ranks(ranks)}"
                differing[path] = f"{path} is not equal on {on}"
                kinds = {other[0], digest[0]}
                tensors |= _OF_TENSOR in kinds
                values_differ |= kinds.isdisjoint({_OF_TENSOR, _OF_PIECE})
    if not differing:
        return None
    shown = "; ".join(list(differing.values())[:_MOST_SHOWN])
    more = len(differing) - _MOST_SHOWN
    closely = ", in types and in the order of keys too" if values_differ else ""
    remedy = f"make it equal on all ranks{closely}, or put it into penstock.PerRank"
    if tensors:
        remedy += (
            "; if each rank has a piece of one tensor, use penstock.Shard; if each has a different "
            "tensor, as pipeline stages do, give each its own key"
        )
    return f"{shown}{f'; and {more} more' if more > 0 else ''}: {remedy}"


def shown_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks in words: "rank 4", "ranks 0-3, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    shown = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"


def classes_of(digests: Sequence[str | bytes]) -> list[int]:
    """Return a number for each digest, the same for equal ones."""
    numbers: dict[str | bytes, int] = {}
    return [numbers.setdefault(digest, len(numbers)) for digest in digests]


def place_in(numbers: Sequence[int], rank: int) -> Replica:
    """Return a rank's place among the ranks with the same number; without numbers it is alone."""
    if not numbers:
        return Replica()
    alike = [other for other, number in enumerate(numbers) if number == numbers[rank]]
    return Replica(alike.index(rank), len(alike))


def indices_of(given: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Return the index of each rank in each `PerRank` with an index, by shown path.

    Args:
        given: Each rank's index and count of each such `PerRank`, by shown path, in order of ranks.

    Returns:
        The indices in order of ranks; -1 for a rank without that `PerRank`.

    Raises:
        SaveError: Ranks give different counts, or no rank gives an index; the message names path
            and ranks.
    """
    found: dict[str, list[int]] = {}
    for path in sorted({path for one in given for path in one}):
        have = [rank for rank, one in enumerate(given) if path in one]
        counts = {rank: given[rank][path][1] for rank in have}
        first = counts[have[0]]
        other = next((rank for rank in have if counts[rank] != first), None)
        if other is not None:
            like = [rank for rank in have if counts[rank] == first]
            msg = (
                f"{path} is a penstock.PerRank with count={first} on {shown_ranks(like)} and "
                f"count={counts[other]} on {shown_ranks([other])}: give the same count= on all"
            )
            raise SaveError(msg)
        numbers = [one[path][0] if path in one else -1 for one in given]
        lacking = sorted(set(range(first)) - set(numbers))
        if lacking:
            msg = (
                f"{path} is a penstock.PerRank with count={first}, and no rank gives "
                f"index={lacking[0]}: each index from 0 to {first - 1} needs a rank, for example "
                "with index=dp_rank, count=dp_size"
            )
            raise SaveError(msg)
        found[path] = numbers
    return found


def shared_difference(
    indices: Mapping[str, Sequence[int]], digests: Mapping[int, Mapping[str, str]]
) -> str | None:
    """Return how ranks with the same `PerRank` index differ, as a sentence; None if they do not.

    Args:
        indices: As `indices_of` returns them.
        digests: The result of `shared_digests` on each rank.
    """
    for path, numbers in indices.items():
        first: dict[int, int] = {}
        for rank, number in enumerate(numbers):
            if number < 0:
                continue
            other = first.setdefault(number, rank)
            if digests[rank].get(path) != digests[other].get(path):
                return (
                    f"{path} is not equal on {shown_ranks([other])} and {shown_ranks([rank])}, "
                    f"which both give index={number} of penstock.PerRank: make it equal there, or "
                    "give each its own index"
                )
    return None


def pack_numbers(numbers: Sequence[int]) -> str:
    """Return integers as text, which is short for regular patterns such as those of ranks."""
    steps = np.diff(np.array(numbers, np.int64), prepend=0)
    return base64.b64encode(compress(steps.tobytes())).decode()


def unpack_numbers(text: str | bytes) -> list[int]:
    """Return the integers given to `pack_numbers`.

    Raises:
        FormatError: The text is not from `pack_numbers`.
    """
    what = "the numbers of ranks"
    try:
        steps = np.frombuffer(decompress(base64.b64decode(text), what), np.int64)
    except ValueError as error:
        msg = f"{what}: {error}"
        raise FormatError(msg) from error
    found: list[int] = np.cumsum(steps).tolist()
    return found


def lines_within(nbytes: int, itemsize: int) -> Lines:
    """Return the positions of the bytes of a tensor that ranks compare.

    The positions do not depend on the tensor's device or memory layout.

    Eight equal strides let one strided view cover all lines of a tensor whose byte count is a
    multiple of 64.
    """
    width = max(LINE_BYTES // itemsize, 1) * itemsize
    if nbytes <= (LINES + 1) * width:
        return Lines(nbytes, 0, 0)
    return Lines(width, (nbytes - width) // LINES // itemsize * itemsize, LINES)


class TakenLines:
    """A copy of sampled lines of some tensors. Their memory may change afterwards.

    The constructor copies lines in host memory, but only starts copies from a device: otherwise the
    caller of `save` would wait for all work queued on the device.
    """

    def __init__(self, entries: Iterable[StateObject]) -> None:
        """Sample the lines of these tensors.

        Raises:
            TornSnapshotError: A tensor's memory was freed after its description.
        """
        self._taken: dict[ObjectPath, bytes] = {}
        self._begun: list[tuple[list[ObjectPath], Callable[[], Sequence[bytes]]]] = []
        by_kind: dict[type[ByteSource], list[tuple[StateObject, Lines]]] = {}
        for entry in entries:
            source = entry.source
            if not source.nbytes:
                continue
            lines = lines_within(source.nbytes, entry.spec.itemsize)
            view = source.view()
            if view is None:
                by_kind.setdefault(type(source), []).append((entry, lines))
                continue
            starts = lines.starts(source.nbytes)
            self._taken[entry.path] = b"".join(view[at : at + lines.width] for at in starts)
        for kind, found in by_kind.items():
            with noting_origin(partial(_origin, kind)):
                read = kind.sample([e.source for e, _ in found], [of for _, of in found])
            self._begun.append(([entry.path for entry, _ in found], read))

    def read(self) -> Mapping[ObjectPath, bytes]:
        """Wait for the copies; return the lines of all tensors with elements, by path."""
        lines = dict(self._taken)
        for paths, read in self._begun:
            lines.update(zip(paths, read(), strict=True))
        return lines


def _origin(kind: type) -> str:
    return f"in {kind.__module__}.{kind.__qualname__}.sample"

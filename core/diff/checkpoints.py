"""Comparison of two checkpoints, by checksums if these decide, else by reading.

Tested in `tests/core/diff/test_diff.py`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.format.blocks import block_range, blocks_covering
from penstock.core.plan.reads import ObjectRequest
from penstock.core.reporting.progress import metered
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.restore.fill import BytesSink, fill
from penstock.core.restore.stored_source import StoredReader
from penstock.core.tree.select import Selection
from penstock.core.tree.stored_tree import PathTree
from penstock.core.types import PAGE_BYTES, ByteRange, Kind, show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.core.format.records import ChunkRef, Frame, NodeRecord, ObjectRecord
    from penstock.core.reporting.progress import Meter
    from penstock.core.reporting.reports import Progress
    from penstock.core.restore.contents import Contents
    from penstock.core.restore.fill import Opened
    from penstock.core.types import ObjectPath, Region

    Numbers = NDArray[Any]

_SHOWN_CHARACTERS = 60
_BEFORE = 12  # characters of a long value that are shown before the first different one

PIECE_BYTES = 16 << 20
"""The bytes to read at once on each side."""


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two checkpoints.

    Attributes:
        path: The shown path of the object or container; for metadata, the key.
        what: For an object, `only_a` or `only_b` (the other checkpoint lacks it), `type` (kind,
            dtype, shape or form), `tie` (whether it is tied, or to which object), `bytes` (of a
            tensor), or `value`. Otherwise `container` or `metadata`.
        a: A short description of the item in the first checkpoint; None if it is not there.
        b: The same for the second checkpoint.
        norms: The norms of the difference of two tensors, if requested.
    """

    path: str
    what: str
    a: str | None
    b: str | None
    norms: Norms | None = None


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """All differences between two checkpoints.

    Attributes:
        changes: The differences of objects in tree order, then of containers, then of metadata.
        compared: The number of selected objects that both checkpoints have.
        bytes_read: The bytes of objects that were read, of both checkpoints together.
    """

    changes: tuple[Change, ...]
    compared: int
    bytes_read: int

    @property
    def same(self) -> bool:
        """Whether the checkpoints have no difference."""
        return not self.changes


def diff_checkpoints(
    a: Checkpoint,
    b: Checkpoint,
    *,
    selection: Selection | None = None,
    norms: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> CheckpointDiff:
    """Compare two checkpoints, by checksums if these decide, else by reading both.

    Args:
        a: The first checkpoint.
        b: The second checkpoint.
        selection: The objects to compare; by default all objects, and the metadata.
        norms: Whether to read tensors that differ, and measure the difference.
        on_progress: As in `Checkpoint.verify`.

    Raises:
        SelectionError: A pattern matches nothing in either checkpoint.
        DamagedError: Bytes that had to be read differ from the bytes that were written.
    """
    selection = selection or Selection()
    with metered(on_progress, "the comparison") as meter:
        meter.begin("plan")
        return _Diff(a, b, selection, norms=norms).run(meter)


class _Diff:
    def __init__(self, a: Checkpoint, b: Checkpoint, selection: Selection, *, norms: bool) -> None:
        self._a = Side(a.opened, StoredReader(a.opened))
        self._b = Side(b.opened, StoredReader(b.opened))
        self._selection = selection
        self._norms = norms
        self._changes: dict[ObjectPath, Change] = {}
        self._bytes_read = 0

    def run(self, meter: Meter) -> CheckpointDiff:
        ones, others = _by_path(self._a.contents), _by_path(self._b.contents)
        paths = dict.fromkeys([*ones, *others])
        self._selection.check_used(paths)
        chosen = [path for path in paths if self._selection.selects(path)]
        both = [path for path in chosen if path in ones and path in others]
        unsure: list[tuple[ObjectPath, Pair]] = []
        for path in chosen:
            one, other = ones.get(path), others.get(path)
            if one is None or other is None:
                self._note(path, "only_b" if one is None else "only_a", one, other)
            else:
                pair = Pair(_owner(one, ones), _owner(other, others))
                if self._compare(path, one, other, pair):
                    unsure.append((path, pair))
        self._read(unsure, meter)
        changes = [self._changes[path] for path in chosen if path in self._changes]
        changes += _nodes(self._a.contents, self._b.contents, self._selection)
        if self._selection.everything:
            changes += _metadata(self._a, self._b)
        return CheckpointDiff(tuple(changes), len(both), self._bytes_read)

    def _compare(
        self, path: ObjectPath, one: ObjectRecord, other: ObjectRecord, pair: Pair
    ) -> bool:
        """Compare the records of both manifests; return whether the bytes must be read."""
        p, q = pair.a, pair.b
        if (p.kind, p.form) != (q.kind, q.form) or (p.kind is Kind.TENSOR and p.spec != q.spec):
            self._note(path, "type", one, other)
            return False
        if one.same_as != other.same_as:
            self._note(path, "tie", one, other)
            return False
        if one.same_as is not None and self._selection.selects(one.same_as):
            return False  # the object that both are tied to is compared separately
        if p.kind is Kind.VALUE and p.spec != q.spec:
            return True  # the lengths differ, so the values do; they are read to show them
        same = same_by_checksums(self._a.contents, self._b.contents, pair)
        # A tensor known to differ is read only for its norms; a value always, for its text.
        if same is False and p.kind is Kind.TENSOR and not self._norms:
            self._note(path, "bytes", one, other)
            return False
        return not same

    def _read(self, unsure: Sequence[tuple[ObjectPath, Pair]], meter: Meter) -> None:
        meter.will_enter("read")
        meter.expect(sum(p.a.spec.nbytes + p.b.spec.nbytes for _, p in unsure))
        for path, pair in unsure:
            if pair.a.kind is Kind.VALUE:
                one, other = _value(self._a, pair.a), _value(self._b, pair.b)
                self._count(len(one) + len(other), meter)
                if one != other:
                    form = pair.a.form
                    texts = _shown_values(one, other, form)
                    self._changes[path] = Change(show_path(path), "value", texts[0], texts[1])
        tensors = [(path, pair) for path, pair in unsure if pair.a.kind is Kind.TENSOR]
        self._read_tensors(tensors, meter)

    def _read_tensors(self, unsure: Sequence[tuple[ObjectPath, Pair]], meter: Meter) -> None:
        paths = {id(pair): path for path, pair in unsure}
        sums: dict[int, NormSum] = {}
        differ: dict[int, Pair] = {}
        for pair, _, one, other in read_pairs(self._a, self._b, [pair for _, pair in unsure]):
            self._count(one.nbytes + other.nbytes, meter)
            spec = pair.a.spec
            if not same_bytes(one, other):
                differ[id(pair)] = pair
            if self._norms:
                sums.setdefault(id(pair), NormSum(spec.dtype, spec.itemsize)).add(one, other)
        for key, pair in differ.items():
            norms = sums[key].result() if self._norms else None
            self._note(paths[key], "bytes", pair.a, pair.b, norms)

    def _count(self, size_bytes: int, meter: Meter) -> None:
        self._bytes_read += size_bytes
        meter.advance(size_bytes)

    def _note(
        self,
        path: ObjectPath,
        what: str,
        one: ObjectRecord | None,
        other: ObjectRecord | None,
        norms: Norms | None = None,
    ) -> None:
        texts = [None if x is None else _described(x) for x in (one, other)]
        self._changes[path] = Change(show_path(path), what, texts[0], texts[1], norms)


def _by_path(contents: Contents) -> dict[ObjectPath, ObjectRecord]:
    return {record.path: record for record in contents.objects()}


def _owner(record: ObjectRecord, by_path: Mapping[ObjectPath, ObjectRecord]) -> ObjectRecord:
    """Return the object that stores the bytes of `record`, which may be tied to another object."""
    tied = record.same_as
    return record if tied is None else by_path[tied]


def _value(side: Side, record: ObjectRecord) -> bytes:
    nbytes = record.spec.nbytes
    data = bytearray(nbytes)
    for start in range(0, nbytes, PIECE_BYTES):
        side.reader.read(record, start, memoryview(data)[start : start + PIECE_BYTES])
    return bytes(data)


def _described(record: ObjectRecord) -> str:
    if record.kind is Kind.TENSOR:
        shape = "x".join(map(str, record.spec.shape)) or "scalar"
        form = "" if record.form == "tensor" else f" ({record.form})"
        text = f"{record.spec.dtype} {shape}{form}"
    else:
        text = f"{record.form} of {record.spec.nbytes} bytes"
    return text if record.same_as is None else f"{text} = {show_path(record.same_as)}"


def _shown_values(one: bytes, other: bytes, form: str) -> tuple[str, str]:
    """Return short texts that show JSON values around their first difference.

    For values of any other form, return only the form and the length.
    """
    if form != "json":
        return f"{form} of {len(one)} bytes", f"{form} of {len(other)} bytes"
    p, q = (data.decode("utf-8", "surrogatepass") for data in (one, other))
    return _around(p, q), _around(q, p)


def _around(text: str, other: str) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    first = next((n for n, (x, y) in enumerate(zip(text, other, strict=False)) if x != y), None)
    at = max(0, (len(other) if first is None else first) - _BEFORE)
    at = min(at, len(text) - _SHOWN_CHARACTERS)
    end = at + _SHOWN_CHARACTERS
    return ("..." if at else "") + text[at:end] + ("..." if end < len(text) else "")


def _nodes(a: Contents, b: Contents, selection: Selection) -> Iterator[Change]:
    """Yield containers that differ, and empty containers that only one checkpoint has.

    Skips a non-empty container that only one checkpoint has, because its objects are listed.
    """
    ones, others = ({node.path: node for node in c.nodes()} for c in (a, b))
    filled = PathTree(o.path for contents in (a, b) for o in contents.objects())
    for path in dict.fromkeys([*ones, *others]):
        if not selection.everything and not selection.selects(path):
            continue
        one, other = ones.get(path), others.get(path)
        if one is None or other is None:
            if path in filled:
                continue
        elif (one.form, one.meta) == (other.form, other.meta):
            continue
        yield Change(show_path(path), "container", _node_text(one), _node_text(other))


def _node_text(node: NodeRecord | None) -> str | None:
    if node is None:
        return None
    return f"{node.form} {_json(node.meta)}" if node.meta else node.form


def _metadata(a: Side, b: Side) -> Iterator[Change]:
    ones, others = (Checkpoint(side.checkpoint).info.metadata for side in (a, b))
    for key in dict.fromkeys([*ones, *others]):
        texts = [_json(m[key]) if key in m else None for m in (ones, others)]
        if texts[0] != texts[1]:
            shown = [None if t is None else _around(t, u or "") for t, u in (texts, texts[::-1])]
            yield Change(key, "metadata", shown[0], shown[1])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints, and the reader of its objects."""

    checkpoint: Opened
    reader: StoredReader

    @property
    def contents(self) -> Contents:
        """The manifest of the checkpoint."""
        return self.checkpoint.contents


@dataclass(frozen=True, slots=True)
class Pair:
    """An object in both checkpoints, with the same kind, dtype and shape; ties are resolved."""

    a: ObjectRecord
    b: ObjectRecord

    @property
    def nbytes(self) -> int:
        """The raw bytes of the object on each side."""
        return self.a.spec.nbytes


def same_by_checksums(a: Contents, b: Contents, pair: Pair) -> bool | None:
    """Compare the bytes of a pair by stored checksums.

    Returns:
        True if the checksums show that the bytes are equal, False if they show a difference, and
        None if the bytes must be read.
    """
    if not pair.nbytes:
        return True
    if pair.a.derived is not None or pair.b.derived is not None:
        masters = Pair(a.master(pair.a), b.master(pair.b))
        # Equal masters round to equal elements; different masters decide nothing. If only one side
        # is derived, its master has another spec than the other object, and decides nothing either.
        same_kind = masters.a.spec == masters.b.spec
        return (same_kind and same_by_checksums(a, b, masters)) or None
    # Chunks with other bounds have checksums over other bytes, which cannot be compared.
    ones, others = _stored(a, pair.a), _stored(b, pair.b)
    if [one.place for one in ones] != [other.place for other in others]:
        return None
    answers = [_same_chunk(one, other) for one, other in zip(ones, others, strict=True)]
    if False in answers:
        return False
    return None if None in answers else True


def read_pairs(
    a: Side, b: Side, pairs: Sequence[Pair]
) -> Iterator[tuple[Pair, int, memoryview, memoryview]]:
    """Read both sides in pieces of whole elements; read many small objects at once.

    Yields:
        The pair, the offset of the piece, and its bytes on both sides, valid until the next piece.
    """
    # Reading small objects one by one would send one request to the store for each.
    batch: list[Pair] = []
    size = 0
    for pair in pairs:
        if pair.nbytes > PIECE_BYTES // 4:
            yield from _read_large(a, b, pair)
            continue
        if size + pair.nbytes > PIECE_BYTES:
            yield from _read_small(a, b, batch)
            batch, size = [], 0
        batch.append(pair)
        size += pair.nbytes
    yield from _read_small(a, b, batch)


def same_bytes(one: memoryview, other: memoryview) -> bool:
    """Compare bytes with numpy, because `==` on memoryviews compares byte by byte."""
    return np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))


@dataclass(frozen=True, slots=True)
class _Stored:
    """A chunk of an object, with its region, its frame, and the frame's block size."""

    region: Region
    ref: ChunkRef
    frame: Frame
    block_bytes: int

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
        return self.region.offsets, self.region.sizes, self.ref.start, self.ref.stop

    @property
    def alone(self) -> bool:
        """Whether the chunk fills its frame, so that the frame's checksum is also the chunk's."""
        return self.ref.at == 0 and self.ref.stop - self.ref.start == self.frame.raw_length


def _stored(contents: Contents, record: ObjectRecord) -> list[_Stored]:
    """Return the chunks of an object, in the same order for every set of saving ranks."""
    found = (
        _Stored(shard.region, ref, one.frames[ref.frame], one.head.block_bytes)
        for one in contents.descriptions(record)
        for shard in one.shards
        for ref in shard.chunks
    )
    return sorted(found, key=lambda stored: stored.place)


def _same_chunk(one: _Stored, other: _Stored) -> bool | None:
    f, g = one.frame, other.frame
    if bool(f.chain) is not bool(g.chain) or one.ref.at != other.ref.at:
        return None
    if f.chain:
        if f.raw_length != g.raw_length:
            return None
        if f.raw_checksum == g.raw_checksum:
            return True
        # In a shared frame (a slab) the difference may be another object's.
        return False if one.alone and other.alone else None
    # Blocks are cut at offsets in the file, so frames that begin at different offsets in a page
    # have blocks over different bytes, which cannot be compared.
    if one.block_bytes != other.block_bytes or f.offset % PAGE_BYTES != g.offset % PAGE_BYTES:
        return None
    return _same_blocks(one, other)


def _same_blocks(one: _Stored, other: _Stored) -> bool | None:
    """Compare the blocks of raw frames that hold the chunk.

    Blocks that differ decide only if they hold bytes of this object alone. In a shared block the
    difference may be in another object.
    """
    inside = ByteRange(one.ref.at, one.ref.at + one.ref.stop - one.ref.start)
    answer: bool | None = True
    for run in blocks_covering(one.frame.offset, one.frame.length, one.block_bytes, [inside]):
        for number in run:
            spans = [
                block_range(s.frame.offset, s.frame.length, s.block_bytes, number)
                for s in (one, other)
            ]
            if spans[0] != spans[1]:
                answer = None
            elif one.frame.checksums[number] != other.frame.checksums[number]:
                if inside.start <= spans[0].start and spans[0].stop <= inside.stop:
                    return False
                answer = None
    return answer


def _read_large(a: Side, b: Side, pair: Pair) -> Iterator[tuple[Pair, int, memoryview, memoryview]]:
    itemsize = pair.a.spec.itemsize
    step = max(itemsize, PIECE_BYTES - PIECE_BYTES % itemsize)
    one, other = memoryview(bytearray(step)), memoryview(bytearray(step))
    for start in range(0, pair.nbytes, step):
        length = min(step, pair.nbytes - start)
        a.reader.read(pair.a, start, one[:length])
        b.reader.read(pair.b, start, other[:length])
        yield pair, start, one[:length], other[:length]


def _read_small(
    a: Side, b: Side, pairs: Sequence[Pair]
) -> Iterator[tuple[Pair, int, memoryview, memoryview]]:
    ones = [BytesSink(pair.nbytes) for pair in pairs]
    others = [BytesSink(pair.nbytes) for pair in pairs]
    requests = [ObjectRequest(p.a, s) for p, s in zip(pairs, ones, strict=True)]
    fill(a.checkpoint, requests)
    requests = [ObjectRequest(p.b, s) for p, s in zip(pairs, others, strict=True)]
    fill(b.checkpoint, requests)
    for pair, one, other in zip(pairs, ones, others, strict=True):
        yield pair, 0, memoryview(one.data), memoryview(other.data)


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of `a - b`, element by element, over the finite differences.

    Attributes:
        elements: The number of elements.
        differing: The number of elements that differ in value. NaN differs from a number, but NaN
            equals NaN and -0 equals 0. None if the elements are not numbers.
        max_abs: The greatest absolute difference; None if no difference is finite.
        l2: The root of the sum of squared differences; None if no difference is finite, or the sum
            overflows.
        relative_l2: `l2` divided by the root of the sum of squares of `a`'s finite values; None if
            that root is 0, or `l2` is None.
        nan: The number of elements that are NaN in either tensor.
        inf: The number of elements that differ by infinity.
    """

    elements: int
    differing: int | None
    max_abs: float | None = None
    l2: float | None = None
    relative_l2: float | None = None
    nan: int = 0
    inf: int = 0


class NormSum:
    """Sums the differences of two tensors of one dtype, piece by piece."""

    def __init__(self, dtype: str, itemsize: int) -> None:
        self._dtype = dtype
        self._itemsize = itemsize
        self._elements = 0
        self._differing = 0
        self._finite = 0
        self._max: float = 0
        self._squares = 0.0
        self._reference = 0.0
        self._nan = 0
        self._inf = 0
        self._opaque = False

    def add(self, a: memoryview, b: memoryview) -> None:
        """Add a range of both tensors, the same on both sides and in whole elements."""
        self._elements += a.nbytes // self._itemsize
        x, y = numbers_of(a, self._dtype), numbers_of(b, self._dtype)
        if x is None or y is None:
            self._opaque = True
            return
        with np.errstate(all="ignore"):
            if x.dtype.kind in "iub":
                self._add_integers(x, y)
            else:
                self._add_floats(x, y)

    def result(self) -> Norms:
        """Return the norms of all pieces so far."""
        if self._opaque:
            return Norms(self._elements, None)
        if not self._finite:
            return Norms(self._elements, self._differing, nan=self._nan, inf=self._inf)
        l2, reference = math.sqrt(self._squares), math.sqrt(self._reference)
        relative = l2 / reference if reference else None
        return Norms(
            self._elements,
            self._differing,
            self._max if math.isfinite(self._max) else None,
            l2 if math.isfinite(l2) else None,  # squares of the largest doubles overflow
            relative if relative is not None and math.isfinite(relative) else None,
            self._nan,
            self._inf,
        )

    def _add_integers(self, x: Numbers, y: Numbers) -> None:
        # As unsigned numbers, greater minus smaller: a difference of two int64 may overflow int64.
        wide = np.uint64 if x.dtype.kind == "u" else np.int64
        p, q = x.astype(wide), y.astype(wide)
        u, v = p.view(np.uint64), q.view(np.uint64)
        difference = np.where(p > q, u - v, v - u)
        self._differing += int(np.count_nonzero(difference))
        self._take(difference.astype(np.float64), p.astype(np.float64))
        if difference.size:  # from the integers, since float64 would round those above 2^53
            self._max = max(self._max, int(difference.max()))

    def _add_floats(self, x: Numbers, y: Numbers) -> None:
        wide = np.complex128 if x.dtype.kind == "c" else np.float64
        p, q = x.astype(wide), y.astype(wide)
        nan = np.isnan(p) | np.isnan(q)
        equal = (p == q) | (np.isnan(p) & np.isnan(q))
        difference = np.where(equal, 0.0, np.abs(p - q))  # inf - inf would be NaN
        infinite = ~nan & ~np.isfinite(difference)
        self._nan += int(np.count_nonzero(nan))
        self._inf += int(np.count_nonzero(infinite))
        self._differing += equal.size - int(np.count_nonzero(equal))
        size = np.abs(p)
        finite = difference[~nan & ~infinite]
        self._take(finite, size[np.isfinite(size)])
        if finite.size:
            self._max = max(self._max, float(finite.max()))

    def _take(self, differences: NDArray[np.float64], reference: NDArray[np.float64]) -> None:
        self._finite += differences.size
        self._squares += float(np.square(differences).sum())
        self._reference += float(np.square(reference).sum())


def numbers_of(data: memoryview, dtype: str) -> Numbers | None:
    """Return the elements as a numpy array; None if they are not numbers, such as dates or text."""
    if dtype == "bfloat16":  # numpy lacks it, but its bits are the upper half of a float32
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    try:
        kind = np.dtype(dtype)
    except TypeError:
        return _exotic(data, dtype)
    if kind.kind == "b":
        kind = np.dtype(np.uint8)
    return np.frombuffer(data, kind) if kind.kind in "iufc" else None


def _exotic(data: memoryview, dtype: str) -> Numbers | None:
    import torch  # noqa: PLC0415 - numpy has no 8-bit floats

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not (kind.is_floating_point or kind.is_complex):
        return None
    if not data.nbytes:
        return np.empty(0, np.float32)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind)
    wide = flat.to(torch.complex64 if kind.is_complex else torch.float32)
    result: Numbers = wide.numpy()
    return result

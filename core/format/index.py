"""Path hashes, and the index over them: it finds one of millions by one range read. Sans-IO."""

from __future__ import annotations

import base64
import binascii
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.format.records import FORMAT_VERSION, IndexEntry, index_name
from penstock.core.format.strict_json import Fields, dump_json, load_json, refuse
from penstock.core.format.zstd import check_digest, digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

MAGIC = b"PSIX"
HEADER = struct.Struct(">4sIQ")  # magic, version, number of entries
ENTRY = np.dtype([("hash", ">u8"), ("part", ">u4"), ("section", ">u4")])
WHOLE_BYTES = 4 << 20
"""An index up to this size is read and verified at once; a larger one is searched."""

_SPAN = 1 << 64
_U64 = np.dtype(">u8")
_U32 = np.dtype(">u4")


@dataclass(frozen=True, slots=True)
class PathHashes:
    """Hashes of all paths of a part, ascending, and the numbers of the sections that hold them."""

    hashes: NDArray[np.uint64]
    sections: NDArray[np.uint32]


def sort_hashes(per_section: Iterable[Sequence[int]]) -> PathHashes:
    """Merge the path hashes of all sections into one ascending table."""
    groups = [np.array(hashes, dtype=np.uint64) for hashes in per_section]
    hashes = np.concatenate(groups) if groups else np.empty(0, dtype=np.uint64)
    numbers = np.repeat(np.arange(len(groups), dtype=np.uint32), [len(g) for g in groups])
    order = np.argsort(hashes, kind="stable")
    return PathHashes(hashes[order], numbers[order])


def dump_hashes(table: PathHashes) -> bytes:
    """Return the JSON of a part's path hashes."""
    return dump_json(
        {
            "hashes": base64.b64encode(table.hashes.astype(_U64).tobytes()).decode(),
            "sections": base64.b64encode(table.sections.astype(_U32).tobytes()).decode(),
        }
    )


def load_hashes(data: bytes, name: str, *, count: int, sections: int) -> PathHashes:
    """Read and validate the JSON that `dump_hashes` makes.

    Raises:
        FormatError: `data` does not hold `count` ascending hashes, or names other sections.
    """
    fields = Fields(load_json(data, name), name, ("hashes", "sections"))
    try:
        hashes = base64.b64decode(fields.text("hashes", limit=1 << 30), validate=True)
        numbers = base64.b64decode(fields.text("sections", limit=1 << 30), validate=True)
    except (binascii.Error, ValueError) as error:
        refuse(name, f"not base64: {error}")
    if len(hashes) != count * _U64.itemsize or len(numbers) != count * _U32.itemsize:
        refuse(name, f"does not hold the hashes of {count} paths")
    table = PathHashes(
        np.frombuffer(hashes, _U64).astype(np.uint64),
        np.frombuffer(numbers, _U32).astype(np.uint32),
    )
    if (table.hashes[1:] < table.hashes[:-1]).any() or (table.sections >= sections).any():
        refuse(name, "hashes are not ascending, or name sections that are not there")
    return table


@dataclass(frozen=True, slots=True)
class EncodedIndex:
    """The bytes of an index, and its entry for the commit record."""

    data: bytes
    entry: IndexEntry


def encode_index(uid: str, parts: Sequence[PathHashes]) -> EncodedIndex:
    """Encode the index over the parts of all ranks, in order of ranks."""
    total = sum(len(table.hashes) for table in parts)
    entries = np.empty(total, ENTRY)
    entries["hash"] = np.concatenate([np.empty(0, np.uint64), *(t.hashes for t in parts)])
    entries["section"] = np.concatenate([np.empty(0, np.uint32), *(t.sections for t in parts)])
    entries["part"] = np.repeat(np.arange(len(parts)), [len(t.hashes) for t in parts])
    order = np.lexsort((entries["section"], entries["part"], entries["hash"]))
    data = HEADER.pack(MAGIC, FORMAT_VERSION, total) + entries[order].tobytes()
    return EncodedIndex(data, IndexEntry(index_name(uid), len(data), digest(data)))


class IndexReader:
    """Searches an index, with as few and as small range reads as its size allows.

    The answer of `find` from a large index is not verified. So a reader that does not find its path
    in any of the sections named calls `verify` before it reports the path as missing.

    Args:
        read: `read(offset, length)` returns exactly those bytes of the index.
        size: Bytes of the index, as the commit record says.
        sha256: Its digest, as the commit record says.
        name: Its name, for error messages.
        whole_bytes: An index up to this size is read at once.
    """

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        *,
        size: int,
        sha256: str,
        name: str,
        whole_bytes: int = WHOLE_BYTES,
    ) -> None:
        self._read = read
        self._entry = IndexEntry(name, size, sha256)
        self._whole: NDArray[np.void] | None = None
        self._count, rest = divmod(size - HEADER.size, ENTRY.itemsize)
        if self._count < 0 or rest:
            refuse(name, f"{size} bytes are no index")
        if size <= whole_bytes:
            self.verify()

    def find(self, wanted: int) -> list[tuple[int, int]]:
        """Return `(part, section)` of every path with that hash; empty only if that is verified.

        Raises:
            FormatError: The index is damaged.
        """
        if self._whole is None:
            found = self._search(wanted)
            if found:
                return found
            self.verify()
        assert self._whole is not None
        return _matches(self._whole, wanted)

    def verify(self) -> None:
        """Read the whole index and compare its digest; later searches read nothing more.

        Raises:
                FormatError: The index is damaged.
        """
        if self._whole is not None:
            return
        entry = self._entry
        data = self._read(0, entry.length)
        check_digest(data, entry.name, length=entry.length, expected=entry.sha256)
        magic, version, count = HEADER.unpack_from(data)
        if (magic, version, count) != (MAGIC, FORMAT_VERSION, self._count):
            refuse(entry.name, f"is not an index of version {FORMAT_VERSION}")
        whole = np.frombuffer(data, ENTRY, offset=HEADER.size)
        if (whole["hash"][1:] < whole["hash"][:-1]).any():
            refuse(entry.name, "is not ascending")
        self._whole = whole

    def _search(self, wanted: int) -> list[tuple[int, int]]:
        # Hashes are uniform, so the position of a hash can be guessed. The standard deviation is at
        # most sqrt(n) / 2 entries; one read of eight of these to either side nearly always hits.
        low, high = 0, self._count  # the first entry that is not below `wanted` is within
        reach = 4 * math.isqrt(self._count) + 64
        guess = wanted * self._count // _SPAN
        while True:
            start, stop = max(low, guess - reach), min(high, guess + reach)
            if high - low <= 2 * reach:
                start, stop = low, high
            window = self._entries(start, stop)
            if start > low and int(window["hash"][0]) >= wanted:
                high = start
            elif stop < high and int(window["hash"][-1]) < wanted:
                low = stop
            else:
                return self._run(window, stop, wanted)
            guess = (low + high) // 2

    def _run(self, window: NDArray[np.void], stop: int, wanted: int) -> list[tuple[int, int]]:
        # A path that many ranks hold has as many entries, which may go on beyond the window.
        found = _matches(window, wanted)
        while stop < self._count and (not len(window) or int(window["hash"][-1]) <= wanted):
            start, stop = stop, min(self._count, stop + max(64, len(window)))
            window = self._entries(start, stop)
            found += _matches(window, wanted)
        return found

    def _entries(self, start: int, stop: int) -> NDArray[np.void]:
        length = (stop - start) * ENTRY.itemsize
        data = self._read(HEADER.size + start * ENTRY.itemsize, length)
        if len(data) != length:
            refuse(self._entry.name, "a range of it could not be read whole")
        return np.frombuffer(data, ENTRY)


def _matches(entries: NDArray[np.void], wanted: int) -> list[tuple[int, int]]:
    hashes = entries["hash"].astype(np.uint64)
    first, stop = (
        np.searchsorted(hashes, np.uint64(wanted), "left"),
        np.searchsorted(hashes, np.uint64(wanted), "right"),
    )
    return [(int(e["part"]), int(e["section"])) for e in entries[first:stop]]

"""What a checkpoint is made of, for whoever copies it: its records and the checksums of its blobs.

Only checksums are kept, 24 bytes for each block; objects are looked at again where one is damaged.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.blocks import frame_blocks
from penstock.core.catalog import Catalog
from penstock.core.compressed import digest
from penstock.core.copy_checks import CheckedBlob, Checks
from penstock.core.errors import BlobNotFoundError, DamagedError, FormatError
from penstock.core.index import IndexReader
from penstock.core.part import decode_hashes, decode_head, decode_section
from penstock.core.reading import listed
from penstock.core.types import ByteRange, show_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.core.abc import Backend
    from penstock.core.errors import PenstockError
    from penstock.core.manifest import (
        BlobRecord,
        CommitRecord,
        Frame,
        IndexEntry,
        PartEntry,
        PartHead,
        SectionInfo,
    )

_SHOWN = 4


class CopySource:
    """A committed checkpoint, read as bytes. `read` first, which looks at the whole manifest."""

    def __init__(self, backend: Backend, record: CommitRecord) -> None:
        self.record = record
        self._backend = backend
        self._digests: dict[str, str] = {}

    def read(self) -> list[CheckedBlob]:
        """Read and verify part and index, and look at the sizes of the blobs.

        Raises:
            DamagedError: One of them is not what was written; names it.
            CheckpointGoneError: The checkpoint was deleted meanwhile.
        """
        drafts: dict[str, _Draft] = {}
        for entry in self.record.parts:
            data = self._fetch(entry.name, entry.length)
            head = decode_head(data[: entry.head_length], entry, self.record)
            decode_hashes(_cut(data, head.hashes), head)
            self._digests[entry.name] = digest(data)
            for blob in head.blobs:
                drafts.setdefault(blob.name, _Draft(blob)).agree(blob)
            for info in head.sections:
                for frame in decode_section(_cut(data, info), info, head).frames:
                    drafts[head.blobs[frame.blob].name].add(frame, head.block_bytes)
        index = self.record.index
        data = self._fetch(index.name, index.length)
        IndexReader(
            lambda offset, length: data[offset : offset + length],
            size=index.length,
            sha256=index.sha256,
            name=index.name,
        ).verify()
        self._digests[index.name] = digest(data)
        for draft in drafts.values():
            self._check_size(draft.blob)
        return [draft.checked() for draft in drafts.values()]

    def records(self) -> Iterator[tuple[str, bytes]]:
        """Name and bytes of the parts, then of the index; one of them is held at a time.

        Raises:
            DamagedError: One is not what `read` saw any more.
            CheckpointGoneError: The checkpoint was deleted meanwhile.
        """
        named: list[PartEntry | IndexEntry] = [*self.record.parts, self.record.index]
        for entry in named:
            data = self._fetch(entry.name, entry.length)
            if digest(data) != self._digests[entry.name]:
                msg = f"{entry.name} on {self._backend.url} changed while it was copied"
                raise FormatError(msg, [entry.name])
            yield entry.name, data

    def damage(self, blob: str, ranges: Sequence[ByteRange]) -> DamagedError:
        """The error for ranges of a blob that do not match; names the objects they are of."""
        objects = self._objects_in(blob, ranges)
        at = ", ".join(f"{r.start}-{r.stop}" for r in ranges[:_SHOWN])
        msg = (
            f"step {self.record.step} on {self._backend.url} is damaged, and was not copied: bytes "
            f"{at} of {blob} do not match their checksum; they are of {listed(objects)}. `verify` "
            "lists all damage; copy another step."
        )
        return DamagedError(msg, objects or [blob])

    def missing(self, error: PenstockError) -> PenstockError:
        """What it means that something is not there: the checkpoint is gone by now, or damaged."""
        return Catalog(self._backend).gone_or_damaged(self.record.step, self.record.uid, error)

    # ------------------------------------------------------------------------------------------

    def _objects_in(self, blob: str, ranges: Sequence[ByteRange]) -> list[str]:
        found: dict[str, None] = {}
        for entry in self.record.parts:
            data = self._fetch(entry.name, entry.length)
            head = decode_head(data[: entry.head_length], entry, self.record)
            if all(b.name != blob for b in head.blobs):
                continue
            for info in head.sections:
                found |= dict.fromkeys(_touched(data, info, head, blob, ranges))
        return list(found)

    def _fetch(self, name: str, length: int) -> bytes:
        try:
            data = self._backend.read_record(name, limit_bytes=length)
        except BlobNotFoundError as error:
            gone = FormatError(f"{name} on {self._backend.url} is missing", [name])
            raise self.missing(gone) from error
        if len(data) != length:
            msg = f"{name} on {self._backend.url} has {len(data)} bytes, {length} were written"
            raise FormatError(msg, [name])
        return data

    def _check_size(self, blob: BlobRecord) -> None:
        url = self._backend.url
        try:
            size = self._backend.stat(blob.name).size_bytes
        except BlobNotFoundError as error:
            gone = FormatError(f"{blob.name} on {url} is missing", [blob.name])
            raise self.missing(gone) from error
        if size != blob.length:
            msg = f"{blob.name} on {url} has {size} bytes, {blob.length} were written"
            raise FormatError(msg, [blob.name])


class _Draft:
    """The ranges of one blob as they come."""

    def __init__(self, blob: BlobRecord) -> None:
        self.blob = blob
        self._starts, self._lengths, self._sums = array("q"), array("q"), array("Q")

    def agree(self, blob: BlobRecord) -> None:
        """Refuse another part's word on it that differs."""
        if blob.length != self.blob.length:
            msg = f"two parts say that {blob.name} has {self.blob.length} and {blob.length} bytes"
            raise FormatError(msg, [blob.name])

    def add(self, frame: Frame, block_bytes: int) -> None:
        whole = [ByteRange(0, frame.length)]
        blocks = whole if frame.chain else frame_blocks(frame.offset, frame.length, block_bytes)
        self._starts.extend(frame.offset + block.start for block in blocks)
        self._lengths.extend(block.length for block in blocks)
        self._sums.extend(frame.checksums)

    def checked(self) -> CheckedBlob:
        """The blob with its ranges in order; a frame that two sections list counts once."""
        starts = np.frombuffer(self._starts, np.int64)
        lengths = np.frombuffer(self._lengths, np.int64)
        sums = np.frombuffer(self._sums, np.uint64)
        order = np.lexsort((sums, lengths, starts))
        starts, lengths, sums = starts[order], lengths[order], sums[order]
        fresh = np.ones(len(starts), np.bool_)
        fresh[1:] = (
            (starts[1:] != starts[:-1]) | (lengths[1:] != lengths[:-1]) | (sums[1:] != sums[:-1])
        )
        starts, lengths, sums = starts[fresh], lengths[fresh], sums[fresh]
        if (starts[1:] < starts[:-1] + lengths[:-1]).any():
            msg = f"{self.blob.name}: two frames are recorded at one place"
            raise FormatError(msg, [self.blob.name])
        return CheckedBlob(self.blob.name, self.blob.length, Checks(starts, lengths, sums))


def _cut(data: bytes, info: SectionInfo) -> bytes:
    return data[info.offset : info.offset + info.length]


def _touched(
    data: bytes, info: SectionInfo, head: PartHead, blob: str, ranges: Sequence[ByteRange]
) -> Iterable[str]:
    section = decode_section(_cut(data, info), info, head)
    for record in section.objects:
        for ref in (ref for shard in record.shards for ref in shard.chunks):
            frame = section.frames[ref.frame]
            if head.blobs[frame.blob].name != blob:
                continue
            start, stop = frame.offset, frame.offset + frame.length
            if not frame.chain:  # of an encoded frame every byte may matter
                start, stop = start + ref.at, start + ref.at + ref.stop - ref.start
            if any(r.start < stop and start < r.stop for r in ranges):
                yield show_path(record.path)

"""The source of a copy: the records of a checkpoint, and the checksums of its blobs.

Keeps only the checksums, 24 bytes for each block: drains run beside training, and the records of
a million objects take a gigabyte. If a blob is damaged, the records are read again to name its
objects.

Tested in `tests/core/copy/test_checkpoint_copy.py`.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.abc import host_roots
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.lender_report import find_lenders, records_newest_first
from penstock.core.copy.mover import CheckedBlob
from penstock.core.errors import BlobNotFoundError, DamagedError, FormatError, StorageError
from penstock.core.format.blocks import frame_blocks
from penstock.core.format.compressed import digest
from penstock.core.format.records import blob_uid
from penstock.core.restore.manifest_reader import ManifestReader
from penstock.core.restore.sweep import check_cover
from penstock.core.storage.failover import from_any_tier
from penstock.core.suggest import listed
from penstock.core.types import ByteRange, show_path

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from penstock.core.abc import Backend
    from penstock.core.errors import PenstockError
    from penstock.core.format.records import (
        BlobRecord,
        CommitRecord,
        Frame,
        IndexEntry,
        PartEntry,
        PartHead,
        Section,
    )

_SHOWN_RANGES = 4


class CopySource:
    """A committed checkpoint, read as bytes."""

    def __init__(self, backend: Backend, record: CommitRecord) -> None:
        self.record = record
        self._backend = backend
        self._manifest = ManifestReader(backend, record)

    @property
    def parts(self) -> Sequence[PartEntry]:
        """The parts of the checkpoint."""
        return self._manifest.parts

    def read(self, only: Collection[str] | None = None) -> list[CheckedBlob]:
        """Read and verify parts and index, compare the sizes of the blobs, and return the blobs.

        Args:
            only: The blobs to return; None: all blobs. Other parts than theirs are not verified.

        Raises:
            DamagedError: A record or a size differs from what was written; names the file.
            CheckpointGoneError: The checkpoint was deleted meanwhile.
        """
        manifest = self._manifest
        drafts: dict[str, _BlobRanges] = {}
        for part, entry in enumerate(self._manifest.parts):
            manifest.check_size(entry.name, entry.length)
            head = manifest.head(part)
            if only is not None and not any(blob.name in only for blob in head.blobs):
                continue
            manifest.shards(part)
            for blob in head.blobs:
                drafts.setdefault(blob.name, _BlobRanges(blob)).agree(blob)
            for frame in (frame for section in manifest.sections(part) for frame in section.frames):
                drafts[head.blobs[frame.blob].name].add(frame, head.block_bytes)
        manifest.check_index()
        manifest.check_borrowed()
        for draft in drafts.values():
            manifest.check_size(draft.blob.name, draft.blob.length)
        return [d.checked() for name, d in drafts.items() if only is None or name in only]

    def check_cover(self) -> None:
        """Read the parts again, and check that together they have all elements of each object.

        Raises:
            DamagedError: An element is missing, or a part is damaged; names the objects.
            CheckpointGoneError: The checkpoint was deleted meanwhile.
        """
        check_cover(self._manifest)

    def records(self, only: Collection[str] | None = None) -> Iterator[tuple[str, bytes]]:
        """Yield the name and bytes of each part, then of the index, one at a time.

        Args:
            only: The names of the records to yield; None: all.

        Raises:
            DamagedError: A record differs from the one that `read` verified.
            CheckpointGoneError: The checkpoint was deleted meanwhile.
        """
        for part, entry in enumerate(self._manifest.parts):
            if only is not None and entry.name not in only:
                continue
            head = self._manifest.head(part)
            bound = [(i.offset, i.length, i.sha256) for i in (head.shards, *head.sections)]
            yield (
                entry.name,
                self._whole(entry, [(0, entry.head_length, entry.head_sha256), *bound]),
            )
        index = self.record.index
        if only is None or index.name in only:
            yield index.name, self._whole(index, self._manifest.from_index(lambda i: i.bound()))

    def _whole(self, entry: PartEntry | IndexEntry, bound: Iterable[tuple[int, int, str]]) -> bytes:
        """Read a record, and verify its pieces; `bound` has their offset, length and sha256."""
        name, pieces = entry.name, [*bound]

        def read(backend: Backend) -> bytes:
            try:
                data = backend.read_record(name, limit_bytes=entry.length)
            except BlobNotFoundError as error:
                gone = FormatError(f"{name} on {backend.url} is missing", [name])
                raise self.missing(gone) from error
            wrong = (digest(data[start : start + n]) != sha256 for start, n, sha256 in pieces)
            if len(data) != entry.length or any(wrong):
                msg = f"{name} on {backend.url} changed while it was copied"
                raise FormatError(msg, [name])
            return data

        return from_any_tier(self._backend, name, read)

    def damage(self, blob: str, ranges: Sequence[ByteRange]) -> DamagedError:
        """Return the error for ranges of a blob that do not match; names their objects."""
        objects = self._objects_in(blob, ranges)
        at = ", ".join(f"{r.start}-{r.stop}" for r in ranges[:_SHOWN_RANGES])
        msg = (
            f"step {self.record.step} on {self._backend.url} is damaged, and was not copied: bytes "
            f"{at} of {blob}{self._lender(blob)} do not match their checksum; they belong to "
            f"{listed(objects)}. `penstock verify` lists all damage; copy another step."
        )
        if host_roots(self._backend):
            msg += " If another host has a good copy, `penstock verify --repair` replaces this one."
        return DamagedError(msg, objects or [blob])

    def wrong(self, blob: str, why: Sequence[ByteRange] | StorageError) -> PenstockError:
        """Return the error for a blob with ranges that do not match, or that is missing."""
        if isinstance(why, StorageError):
            return self.missing(FormatError(str(why), [blob]))
        return self.damage(blob, why)

    def missing(self, error: PenstockError) -> PenstockError:
        """Return the error for a missing file: the checkpoint was deleted, or is damaged."""
        return Catalog(self._backend).gone_or_damaged(self.record.step, self.record.uid, error)

    # ------------------------------------------------------------------------------------------

    def _lender(self, blob: str) -> str:
        """Return text that names the save of a borrowed blob; empty for an own blob."""
        uid = blob_uid(blob)
        if uid is None or uid == self.record.uid:
            return ""
        older = records_newest_first(Catalog(self._backend), self.record.step)
        return f" (borrowed from {find_lenders(older, {uid})[uid]})"

    def _objects_in(self, blob: str, ranges: Sequence[ByteRange]) -> list[str]:
        found: dict[str, None] = {}
        for part in range(self.record.part_count):
            head = self._manifest.head(part)
            if all(b.name != blob for b in head.blobs):
                continue
            for section in self._manifest.sections(part):
                found |= dict.fromkeys(_touched(section, head, blob, ranges))
        return list(found)


class _BlobRanges:
    """Collects the ranges of one blob, section by section."""

    def __init__(self, blob: BlobRecord) -> None:
        self.blob = blob
        self._starts, self._lengths, self._sums = array("q"), array("q"), array("Q")

    def agree(self, blob: BlobRecord) -> None:
        """Raise if another part records a different length for this blob."""
        if blob.length != self.blob.length:
            msg = (
                f"two parts record different lengths of {blob.name}: {self.blob.length} and "
                f"{blob.length} bytes"
            )
            raise FormatError(msg, [blob.name])

    def add(self, frame: Frame, block_bytes: int) -> None:
        whole = [ByteRange(0, frame.length)]
        blocks = whole if frame.chain else frame_blocks(frame.offset, frame.length, block_bytes)
        self._starts.extend(frame.offset + block.start for block in blocks)
        self._lengths.extend(block.length for block in blocks)
        self._sums.extend(frame.checksums)

    def checked(self) -> CheckedBlob:
        """Return the blob with its ranges in order; a frame that two sections list counts once."""
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
            msg = f"{self.blob.name}: two recorded frames overlap"
            raise FormatError(msg, [self.blob.name])
        return CheckedBlob(self.blob.name, self.blob.length, starts, lengths, sums)


def _touched(
    section: Section, head: PartHead, blob: str, ranges: Sequence[ByteRange]
) -> Iterator[str]:
    for record in section.objects:
        for ref in (ref for shard in record.shards for ref in shard.chunks):
            for frame in section.frames[ref.frame].links():
                if head.blobs[frame.blob].name != blob:
                    continue
                start, stop = frame.offset, frame.offset + frame.length
                if not frame.chain:  # else each byte of the frame may change the whole chunk
                    start, stop = start + ref.at, start + ref.at + ref.stop - ref.start
                if any(r.start < stop and start < r.stop for r in ranges):
                    yield show_path(record.path)

"""Verifies the log of a checkpoint: every entry that a restore may replay.

Tested in `tests/core/cli/test_logs.py`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.core.errors import BlobNotFoundError, CheckpointNotFoundError, DamagedError
from penstock.core.format.segment import HEADER_BYTES, decode_header, log_prefix
from penstock.core.log.archive import EntryBackend, EntryLoader
from penstock.core.log.segments import PIECE_BYTES, StoredLog, logs_of
from penstock.core.pipeline.staging import ThreadMemory
from penstock.core.reporting.reports import Damage
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.types import PAGE_BYTES, ReadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.abc import Backend
    from penstock.core.format.segment import EntryHeader
    from penstock.core.log.segments import Segment, StoredEntry
    from penstock.core.reporting.reports import VerifyReport


def with_log(checkpoint: Checkpoint, report: VerifyReport) -> VerifyReport:
    """Verify the log of a checkpoint, and return the checkpoint's report with the result added.

    Reads and decodes every entry if `report.deep`; otherwise checks only headers, sizes and the
    order of the entries. Entries that later entries have replaced do not count.

    Raises:
        CheckpointGoneError: The checkpoint was deleted meanwhile.
    """
    began = time.monotonic()
    found = _Verification(checkpoint, deep=report.deep)
    found.run()
    return replace(
        report,
        ok=report.ok and not found.damaged,
        damaged=(*report.damaged, *found.damaged),
        bytes_read=report.bytes_read + found.bytes_read,
        seconds=report.seconds + time.monotonic() - began,
        not_decoded=tuple(sorted({*report.not_decoded, *found.not_decoded})),
        logged_entries=found.entries,
        torn_logs=tuple(found.torn),
    )


@dataclass(slots=True)
class _Verification:
    checkpoint: Checkpoint
    deep: bool
    entries: int = 0
    bytes_read: int = 0
    damaged: list[Damage] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    not_decoded: set[str] = field(default_factory=set)

    def run(self) -> None:
        backend, base = self.checkpoint.backend, self.checkpoint.contents.record.uid
        try:
            for log in logs_of(backend, base) or [StoredLog(backend, base, 0)]:
                self._verify(log)
        except BlobNotFoundError as error:
            self.checkpoint.opened.check_there()
            self.damaged.append(Damage(log_prefix(base), str(error)))
        except DamagedError as error:
            names = error.damaged or (log_prefix(base),)
            self.damaged += [Damage(name, str(error)) for name in names]

    def _verify(self, log: StoredLog) -> None:
        self.entries += len(log.entries)
        memory = ThreadMemory()
        for entry in log.entries if self.deep else ():
            self.bytes_read += HEADER_BYTES + entry.header.payload_bytes
            payload = memory.take(entry.header.payload_bytes)
            if entry.is_whole(self.checkpoint.backend, payload):
                self._decode(entry, payload)
            elif entry is log.entries[-1]:  # as a power cut during its write leaves it
                self._note_torn(entry.segment, entry.offset)
            else:
                self._note_damage(entry, "its bytes do not match their checksum")
        for stray in log.strays:
            detail = "continues an entry that is missing: a restore uses none of its steps"
            self.damaged.append(Damage(stray.info.name, detail))
        for segment in log.segments:
            if segment is log.segments[-1] or segment.entries[-1:] == log.entries[-1:]:
                self._verify_end(log, segment)

    def _decode(self, entry: StoredEntry, payload: memoryview) -> None:
        opened = self.checkpoint.opened
        try:
            backend = EntryBackend(self.checkpoint.backend, entry, payload)
            loader = EntryLoader(backend, opened.loader.workers)
            report = Checkpoint.open(
                backend, entry.header.step, registry=opened.registry, loader=loader
            ).verify()
        except (DamagedError, CheckpointNotFoundError) as error:
            self._note_damage(entry, str(error))
            return
        self.not_decoded.update(report.not_decoded)
        for damage in report.damaged:
            self._note_damage(entry, f"{damage.what}: {damage.detail}")

    def _verify_end(self, log: StoredLog, segment: Segment) -> None:
        """Report bytes after the entries: as damage if later entries follow, else as torn."""
        if not segment.is_cut:
            return
        for at, header in _headers(self.checkpoint.backend, segment):
            is_torn = at == segment.end and at + header.stored_bytes > segment.info.size_bytes
            if not is_torn and segment not in log.strays:
                reach = log.steps[-1] if log.entries else self.checkpoint.step
                detail = (
                    f"the entry at byte {segment.end} is damaged: a restore ends at step {reach}"
                )
                self.damaged.append(Damage(segment.info.name, detail))
                return
        self._note_torn(segment.info.name, segment.end)

    def _note_damage(self, entry: StoredEntry, why: str) -> None:
        step = entry.header.step
        detail = f"the entry of step {step} at byte {entry.offset} is damaged: {why}; a restore"
        self.damaged.append(Damage(entry.segment, f"{detail} ends before that step"))

    def _note_torn(self, segment: str, at: int) -> None:
        self.torn.append(f"{segment} at byte {at}")


def _headers(backend: Backend, segment: Segment) -> Iterator[tuple[int, EntryHeader]]:
    """Yield each valid header after the end of a segment's entries, with its offset."""
    size = segment.info.size_bytes
    for start in range(segment.end, size, PIECE_BYTES):
        data = bytearray(min(PIECE_BYTES, size - start))
        backend.read([ReadRequest(segment.info.name, start, memoryview(data))])
        for at in range(0, len(data), PAGE_BYTES):
            header = decode_header(bytes(data[at : at + HEADER_BYTES]), segment.info.name)
            if header is not None:
                yield start + at, header

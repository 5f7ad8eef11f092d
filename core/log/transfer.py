"""Copies the log of a checkpoint to a copy of that checkpoint, which may have a different uid.

Tested in `tests/core/cli/test_logs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from penstock.core.catalog.survey import places_of
from penstock.core.format.segment import FIRST
from penstock.core.log.segments import SegmentWriter, StoredLog, logs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.abc import Backend
    from penstock.core.log.segments import StoredEntry


@dataclass(frozen=True, slots=True)
class CopiedLog:
    """The result of copying a log.

    Attributes:
        entries: The number of copied entries, of all ranks.
        bytes_copied: The size of these entries.
        left_out: Why entries were not copied; empty if all whole entries are at the target.
    """

    entries: int = 0
    bytes_copied: int = 0
    left_out: str = ""


def copy_log(
    source: Backend, base: str, target: Backend, copy: str, *, overwrite: bool = False
) -> CopiedLog:
    """Copy the log of a checkpoint; on return, the copied entries are durable at the target.

    Copies only entries that the target lacks. Verifies each entry while it is copied; a damaged
    entry and all entries after it are left out, as is a torn end. Changes nothing at the source.

    Args:
        source: The place to copy from.
        base: The uid of the checkpoint.
        target: The place to copy to. If it has tiers, the fastest tier gets the log.
        copy: The uid of the checkpoint's copy at the target. It must restore to the same bits.
        overwrite: Whether to replace different entries that a run has logged at the target.

    Raises:
        DamagedError: A log cannot be read.
        StorageError: A store failed. Entries copied before that are harmless: they either continue
            the target's log or are not used.
    """
    done = CopiedLog()
    fastest = places_of(target)[0]  # where a run in tiers logs
    for log in logs_of(source, base):
        done = _copy_rank(done, source, log.entries_to_latest(), fastest, copy, overwrite=overwrite)
    return done


def _copy_rank(
    done: CopiedLog,
    source: Backend,
    entries: Sequence[StoredEntry],
    target: Backend,
    copy: str,
    *,
    overwrite: bool,
) -> CopiedLog:
    if not entries:
        return done
    first = entries[0].header
    there = StoredLog(target, copy, first.rank).entries_to_latest()
    pairs = zip(entries, there, strict=False)
    same = len([*takewhile(lambda pair: _payload(pair[0]) == _payload(pair[1]), pairs)])
    if same == len(entries):
        return done
    if same < len(there) and not overwrite:
        step = there[same].header.step
        reason = f"{target.url} has a different log from step {step} on (--overwrite replaces it)"
        return CopiedLog(done.entries, done.bytes_copied, reason)
    previous = there[same - 1].header.digest if same else FIRST
    writer = SegmentWriter(target, copy, first.rank, first.world_size, previous=previous)
    number, size_bytes, left_out = done.entries, done.bytes_copied, done.left_out
    try:
        for entry in entries[same:]:
            copied = writer.copy(entry, source)
            if not copied:
                left_out = (
                    f"the entry of step {entry.header.step} at byte {entry.offset} of "
                    f"{entry.segment} on {source.url} is damaged; the log ends before it"
                )
                break
            number, size_bytes = number + 1, size_bytes + copied
        writer.close()
    except BaseException:
        writer.abort()
        raise
    return CopiedLog(number, size_bytes, left_out)


def _payload(entry: StoredEntry) -> tuple[int, int, bytes]:
    return entry.header.step, entry.header.payload_bytes, entry.header.payload_digest

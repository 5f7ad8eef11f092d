"""The stored log: whole entries without a gap, whatever happened to the rest."""

import random
from dataclasses import replace
from itertools import takewhile

import pytest
from tests.integration.support import memory

from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.abc import DelegatingBackend
from penstock.core.errors import StorageError
from penstock.core.format.segment import HEADER_BYTES, segment_name
from penstock.core.log.archive import EntryBackend
from penstock.core.log.segments import SegmentWriter, StoredLog
from penstock.testing.faults import Fault, FaultyBackend

UID = "0123456789abcdef" * 2
OTHER = "fedcba9876543210" * 2


def files(step):
    return {"commits/a.json": b"%d" % step, "data/blob": random.Random(step).randbytes(5000)}


def append(writer, *steps, sync_every=1):
    for step in steps:
        buffers = {name: [data] for name, data in files(step).items()}
        writer.append(step, buffers, sync_every=sync_every)


def writer(backend, **options):
    return SegmentWriter(backend, UID, 0, 1, **options)


def steps(backend, base=UID):
    return [entry.header.step for entry in StoredLog(backend, base, 0).whole()]


def rewrite(backend, name, change):
    size = backend.stat(name).size_bytes
    data = bytearray(backend.read_record(name, limit_bytes=size))
    backend.delete([name])
    backend.publish(name, bytes(change(data)))


class WithoutAppends(DelegatingBackend):
    """An object store: blobs exist once they are sealed."""

    @property
    def capabilities(self):
        return replace(super().capabilities, appends=False)


def test_entries_read_back_before_and_after_the_end():
    backend = memory()
    log = writer(backend)
    append(log, 4, 5)
    assert steps(backend) == [4, 5]
    append(log, 6)
    log.close()
    assert steps(backend) == [4, 5, 6]
    stored = StoredLog(backend, UID, 0)
    assert (stored.latest(), len(stored.segments)) == (6, 1)
    opened = EntryBackend(backend, stored.entries[1])
    assert opened.read_record("data/blob", limit_bytes=9999) == files(5)["data/blob"]
    with pytest.raises(StorageError, match="read-only"):
        opened.publish("a", b"")


def test_store_without_appends_gets_a_segment_for_each_batch():
    backend = WithoutAppends(memory())
    log = writer(backend)
    append(log, 1, 2, 3, 4, 5, sync_every=2)
    assert steps(backend) == [1, 2, 3, 4]
    log.close()
    assert steps(backend) == [1, 2, 3, 4, 5]
    assert len(StoredLog(backend, UID, 0).segments) == 3


@pytest.mark.parametrize("seed", range(60))
def test_torn_or_flipped_log_has_exactly_the_entries_before_the_damage(seed):
    choice = random.Random(seed)
    backend = memory()
    log = writer(backend)
    append(log, *range(1, 9))
    log.close()
    stored = StoredLog(backend, UID, 0)
    at = choice.randrange(backend.stat(segment_name(UID, 0, 0)).size_bytes)
    cut = choice.random() < 0.5
    bit = 1 << choice.randrange(8)

    def change(data):
        if cut:
            return data[:at]
        data[at] ^= bit
        return data

    def survives(entry):
        start, payload = entry.offset, entry.offset + HEADER_BYTES
        end = payload + entry.header.payload_bytes
        # Zeros fill the header, and the space up to the next entry.
        used = start <= at < start + 104 or payload <= at < end
        return end <= at if cut else not used

    rewrite(backend, segment_name(UID, 0, 0), change)
    expected = [e.header.step for e in takewhile(survives, stored.entries)]
    assert steps(backend) == expected


def test_lost_segment_ends_the_log_before_it():
    backend = WithoutAppends(memory())
    log = writer(backend)
    append(log, 1, 2, 3)
    log.close()
    backend.delete([segment_name(UID, 0, 1)])
    assert steps(backend) == [1]


def test_later_process_continues_after_the_entry_that_it_replayed():
    backend = memory()
    first = writer(backend)
    append(first, 1, 2, 3, 4)
    entries = StoredLog(backend, UID, 0).entries
    second = writer(backend, previous=entries[1].header.digest)
    append(second, 3, 4, 5)
    assert steps(backend) == [1, 2, 3, 4, 5]
    assert [e.segment for e in StoredLog(backend, UID, 0).entries][2:] == [
        segment_name(UID, 0, 1)
    ] * 3
    append(first, 5)  # it was not killed after all: its segment no longer counts
    assert StoredLog(backend, UID, 0).entries[2].segment == segment_name(UID, 0, 1)


def test_segment_of_a_killed_process_takes_no_more_space_than_its_entries(tmp_path):
    log = writer(PosixBackend(PosixConfig(path=str(tmp_path))))
    append(log, 1, 2, 3)
    (segment,) = tmp_path.rglob("*.log")
    assert segment.stat().st_blocks * 512 < 100_000
    log.close()


def test_segment_of_another_log_is_ignored_by_name(caplog):
    backend = memory()
    log = writer(backend)
    append(log, 1)
    log.close()
    data = backend.read_record(segment_name(UID, 0, 0), limit_bytes=1 << 20)
    backend.publish(segment_name(OTHER, 0, 0), data)
    backend.publish(segment_name(UID, 1, 0), data)
    assert steps(backend, OTHER) == []
    assert StoredLog(backend, UID, 1).entries == []
    assert caplog.text.count("belongs to another log: it is ignored from step 1 on") == 2


def test_any_flipped_byte_of_headers_and_directories_ends_the_log_there():
    backend = memory()
    log = writer(backend)
    append(log, 1, 2, 3)
    log.close()
    name = segment_name(UID, 0, 0)
    whole = backend.read_record(name, limit_bytes=1 << 20)
    for entry in StoredLog(backend, UID, 0).entries:
        kept = [*range(1, entry.header.step)]
        end = entry.offset + HEADER_BYTES + entry.header.payload_bytes
        used = [*range(104), *range(HEADER_BYTES, HEADER_BYTES + entry.header.directory_bytes)]
        for at in used:
            rewrite(backend, name, flipped(whole, entry.offset + at, 1 << at % 8))
            assert steps(backend) == kept
        for length in (0, 1, 103, 127, 128, 129):
            rewrite(backend, name, lambda _, stop=entry.offset + length: whole[:stop])
            assert steps(backend) == kept
        rewrite(backend, name, lambda _, stop=end - 1: whole[:stop])
        assert steps(backend) == kept
        rewrite(backend, name, lambda _, stop=end: whole[:stop])
        assert steps(backend) == [*kept, entry.header.step]


def flipped(whole, at, mask):
    def change(_):
        data = bytearray(whole)
        data[at] ^= mask
        return data

    return change


def test_segment_after_lost_ones_comes_last():
    backend = WithoutAppends(memory())
    append(writer(backend), 1, 2, 3, 4)
    entries = StoredLog(backend, UID, 0).entries
    backend.delete([segment_name(UID, 0, number) for number in range(3)])
    append(writer(backend, previous=entries[-1].header.digest), 5)
    assert backend.list("")[-1].name == segment_name(UID, 0, 4)


def test_long_entry_is_written_in_pieces():
    backend = FaultyBackend(memory())
    writer(backend).append(1, {"data/blob": [bytes(50 << 20)]}, sync_every=1)
    assert steps(backend) == [1]
    assert len([name for name, _ in backend.calls if name == "write"]) >= 4


@pytest.mark.parametrize("operation", ["create", "write", "sync"])
def test_failed_append_leaves_the_entries_before_it(operation):
    inner = memory()
    append(writer(inner), 1)
    backend = FaultyBackend(inner, Fault(operation, match=".log", error=StorageError("full")))
    entries = StoredLog(inner, UID, 0).entries
    with pytest.raises(StorageError, match="full"):
        append(writer(backend, previous=entries[-1].header.digest), 2)
    assert steps(inner)[:1] == [1]


@pytest.mark.slow
def test_copy_into_an_opened_segment_stays_in_one_segment(tmp_path):
    backend = PosixBackend(PosixConfig(path=str(tmp_path)))
    log = writer(backend)
    for step in (1, 2):  # the first is longer than a segment; both are durable at once
        log.append(step, {"data/blob": [bytes(1 << 30 if step == 1 else 1)]}, sync_every=2)
    log.close()
    found = StoredLog(backend, UID, 0).entries
    assert len({entry.segment for entry in found}) == 1
    name = segment_name(OTHER, 0, 7)
    copied = SegmentWriter(backend, OTHER, 0, 1, opened=(name, backend.create(name)))
    for entry in found:
        assert copied.copy(entry, backend)
    copied.close()
    assert {entry.segment for entry in StoredLog(backend, OTHER, 0).entries} == {name}

"""Entries of a log: what is whole reads back, and anything else ends the log."""

import random

import pytest

from penstock.core.errors import FormatError
from penstock.core.format.segment import (
    FIRST,
    HEADER_BYTES,
    decode_directory,
    decode_header,
    encode_entry,
    is_whole,
)

UID = "0123456789abcdef" * 2
FILES = {"commits/00000007-0.json": b"record", "data/a/empty": b"", "data/a/blob": b"x" * 5000}


def entry(**changes):
    options = {"base": UID, "rank": 3, "world_size": 8, "step": 7, "previous": FIRST, **changes}
    header, buffers = encode_entry({name: [data] for name, data in FILES.items()}, **options)
    return header, b"".join(buffers)


def test_entry_reads_back():
    written, data = entry()
    header = decode_header(data[:HEADER_BYTES], "a.log")
    assert header == written
    assert (header.base, header.rank, header.world_size, header.step) == (UID, 3, 8, 7)
    payload = data[HEADER_BYTES:]
    assert len(payload) == header.payload_bytes
    assert is_whole([payload[:10], payload[10:]], header)
    places = decode_directory(payload[: header.directory_bytes], header, "a.log")
    assert {name: payload[at : at + n] for name, (at, n) in places.items()} == FILES
    assert header.stored_bytes % 4096 == 0
    assert 0 <= header.stored_bytes - len(data) < 4096


def test_any_flipped_bit_ends_the_log():
    written, data = entry()
    choice = random.Random(1)
    used = 104  # fields and digest; zeros follow
    for at in (*range(used), *(choice.randrange(HEADER_BYTES, len(data)) for _ in range(300))):
        damaged = bytearray(data)
        damaged[at] ^= 1 << choice.randrange(8)
        header = decode_header(bytes(damaged[:HEADER_BYTES]), "a.log")
        if at < HEADER_BYTES:
            assert header is None
        else:
            assert header == written
            assert not is_whole([damaged[HEADER_BYTES:]], header)


@pytest.mark.parametrize("data", [b"", b"\0" * HEADER_BYTES, entry()[1][: HEADER_BYTES - 1]])
def test_log_ends_where_no_header_is(data):
    assert decode_header(data, "a.log") is None


def test_previous_header_is_bound():
    first, _ = entry()
    second, _ = entry(step=8, previous=first.digest)
    assert second.previous == first.digest
    assert second.digest != entry(step=8)[0].digest


@pytest.mark.parametrize(
    ("directory", "match"),
    [
        (b"{}", "not a list"),
        (b"[1]", "not a list of names"),
        (b'[["a"]]', "not a list of names"),
        (b'[["a",-1]]', "wrong length"),
        (b'[["a",1],["a",1]]', "twice"),
        (b'[["a",1]]', "directory and files have"),
        (b"[[", "not JSON"),
    ],
)
def test_wrong_directory_is_refused(directory, match):
    header, _ = entry()
    with pytest.raises(FormatError, match=match):
        decode_directory(directory, header, "a.log")

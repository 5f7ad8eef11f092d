"""The bytes of a note: strict, bound to its name, always the same."""

import json
from dataclasses import replace

import pytest

from penstock import FormatError
from penstock.core.format.commit_record import decode_note, encode_note, seal
from penstock.core.format.records import NoteRecord, note_number, notes_origin
from penstock.core.limits import NOTE_LIMIT_BYTES

UID = "0123456789abcdef" * 2
NOTE = NoteRecord(UID, 7, "00ff" * 4, {"loss": 2.5, "of": ["é", None]}, {"best": True, "v1": False})
BODY = {"uid": UID, "number": 7, "id": "00ff" * 4, "metadata": {}, "tags": {}}


def test_note_round_trips():
    assert decode_note(encode_note(NOTE), NOTE.name) == NOTE
    assert NOTE.name == f"notes/{UID}/00000007-{'00ff' * 4}.json"
    assert (notes_origin(NOTE.name), note_number(NOTE.name)) == (UID, 7)


def test_note_with_a_wrong_field_is_refused():
    for change in [
        {"uid": UID[::-1]},
        {"number": 8},
        {"id": "1" * 16},
        {"number": 10**8},
        {"number": True},
        {"metadata": []},
        {"tags": {"best": 1}},
        {"tags": {"a tag": True}},
        {"tags": {"": True}},
        {"more": 1},
    ]:
        decode_note(seal(BODY), NOTE.name)
        with pytest.raises(FormatError) as refused:
            decode_note(seal(BODY | change), NOTE.name)
        assert refused.value.damaged == [NOTE.name] or NOTE.name in str(refused.value)


def test_each_flipped_byte_of_a_note_is_found():
    data = encode_note(NOTE)
    for at in range(len(data)):
        with pytest.raises(FormatError):
            decode_note(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], NOTE.name)


@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 10_000, seal([]), seal(BODY)[:-1]])
def test_invalid_notes_are_refused(data):
    with pytest.raises(FormatError):
        decode_note(data, NOTE.name)


def test_too_long_note_is_neither_written_nor_read():
    long = {"text": "x" * NOTE_LIMIT_BYTES}
    with pytest.raises(FormatError, match="a reader accepts at most 65536"):
        encode_note(replace(NOTE, metadata=long))
    with pytest.raises(FormatError, match="a reader accepts at most 65536"):
        decode_note(seal(BODY | {"metadata": long}), NOTE.name)


def test_the_bytes_of_a_note_stay_the_same():
    body = (
        json.dumps(
            {"uid": UID, "number": 7, "id": "00ff" * 4, "metadata": {"loss": 2.5}}
            | {"tags": {"best": True}},
            indent=1,
        ).encode()
        + b"\n"
    )
    note = replace(NOTE, metadata={"loss": 2.5}, tags={"best": True})
    header, _, rest = encode_note(note).partition(b"\n")
    assert rest == body
    assert json.loads(header)["penstock"] == 1

"""Bytes of the commit record and the intent."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core import manifests

from penstock.core.errors import FormatError
from penstock.core.format.commit_record import (
    decode_borrowed,
    decode_commit,
    decode_intent,
    encode_borrowed,
    encode_commit,
    encode_intent,
)
from penstock.core.format.compressed import digest
from penstock.core.format.features import FORMAT_VERSION
from penstock.core.format.records import (
    BlobRecord,
    IndexEntry,
    IntentRecord,
    PartEntry,
    blob_name,
    commit_name,
    index_name,
    intent_name,
    part_name,
)

UID, OTHER = manifests.UID, manifests.OTHER
NAME = commit_name(100, 0)
BORROWED = tuple(BlobRecord(blob_name(OTHER, rank, 0, "enc"), 7) for rank in range(2))
metadata = st.dictionaries(
    st.text(st.characters()),
    st.integers() | st.floats(allow_nan=False) | st.text(st.characters()) | st.none(),
    max_size=4,
)


def record(**changes):
    return manifests.commit_record(
        index=IndexEntry(index_name(UID), 160, 160, "ab" * 32),
        parts=tuple(PartEntry(part_name(UID, r), 999, 99, "cd" * 32) for r in range(2)),
        **changes,
    )


INTENT = IntentRecord(
    UID, 100, (OTHER,), "host", 4321, "2026-11-21T03:36:10Z", "2026-11-21T03:37:10Z"
)


def resigned(data, change):
    """The record with its body changed and signed again."""
    _, _, content = data.partition(b"\n")
    body = json.loads(content)
    change(body)
    content = json.dumps(body).encode()
    header = {"penstock": FORMAT_VERSION, "length": len(content), "sha256": digest(content)}
    return json.dumps(header).encode() + b"\n" + content


@given(metadata, st.integers(0, 10**10), st.integers(0, 50))
def test_commit_record_round_trips(user, step, generation):
    made = record(metadata=user, step=step, generation=generation, borrowed=BORROWED)
    assert decode_commit(encode_commit(made), commit_name(step, generation)) == made


@pytest.mark.parametrize("data", [encode_commit(record()), encode_intent(INTENT)])
def test_every_flipped_bit_is_found(data):
    decode = decode_commit if b"generation" in data else decode_intent
    name = NAME if b"generation" in data else intent_name(UID)
    good = decode(data, name)
    for at in range(len(data) * 8):
        bad = bytearray(data)
        bad[at // 8] ^= 1 << at % 8
        try:
            assert decode(bytes(bad), name) == good
        except FormatError as error:
            assert error.damaged == (name,)  # noqa: PT017


@given(data=st.data())
def test_truncated_or_extended_is_refused(data):
    good = encode_commit(record())
    cut = data.draw(st.integers(0, len(good) - 1))
    for bad in (good[:cut], good + b" ", b"", b"\n", good[cut:] + good[:cut] if cut else b"x"):
        with pytest.raises(FormatError, match=NAME):
            decode_commit(bad, NAME)


def test_an_unknown_version_is_refused_before_other_checks():
    good = encode_commit(record())
    newer = good.replace(b'"penstock": 1', b'"penstock": 7, "new": 1', 1)[:-20]
    with pytest.raises(FormatError, match="version 7"):
        decode_commit(newer, NAME)


def test_an_unknown_required_feature_is_named_and_an_optional_one_ignored():
    good = encode_commit(record())
    newer = resigned(good, lambda body: body.update(requires=["logs", "tape"]))
    with pytest.raises(FormatError, match=r"requires 'logs', 'tape'.* use a newer release"):
        decode_commit(newer, NAME)
    newer = resigned(good, lambda body: body.update(requires=[], optional={"hints": {"a": [1]}}))
    assert decode_commit(newer, NAME) == record()
    for odd in ({"requires": "logs"}, {"requires": [1]}, {"optional": []}):
        with pytest.raises(FormatError, match=NAME):
            decode_commit(resigned(good, lambda body, odd=odd: body.update(odd)), NAME)


@pytest.mark.parametrize("name", [commit_name(100, 1), commit_name(10, 0), "commits/x.json"])
def test_the_record_of_another_name_is_refused(name):
    with pytest.raises(FormatError, match="is the record of step 100, generation 0"):
        decode_commit(encode_commit(record()), name)


def test_a_signed_lie_is_named():
    for change, complaint in [
        (lambda b: b.update(uid="A" * 32), "uid"),
        (lambda b: b.update(step=-1), "step"),
        (lambda b: b.update(step=True), "step"),
        (lambda b: b.update(created="yesterday"), "created"),
        (lambda b: b.update(created="2026-11-21T03:36:10Z\n"), "created"),
        (lambda b: b.update(created="9999-99-99T99:99:99Z"), "created"),
        (lambda b: b.update(world_size=1), "2 parts of 1 ranks"),
        (lambda b: b.update(parts=[]), "0 parts"),
        (lambda b: b.update(parts=b["parts"] * 9, world_size=18), "18 parts"),
        (lambda b: b.update(parts={"count": 16, "length": 9}, world_size=99), "count"),
        (lambda b: b.update(parts={"count": 17, "length": 9}, world_size=16), "count"),
        (lambda b: b.update(parts={"count": 17, "length": -1}, world_size=17), "length"),
        (lambda b: b["parts"][1].update(name=part_name(UID, 2)), "below the world size 2"),
        (lambda b: b.update(world_size=0), "world_size"),
        (lambda b: b["parts"].reverse(), "below the world size 2"),
        (lambda b: b["parts"][0].update(name="../../etc/passwd"), "a part has the wrong name"),
        (lambda b: b["parts"][0].update(head_length=1000), "head_length"),
        (lambda b: b["parts"][0].update(head_sha256="x"), "head_sha256"),
        (lambda b: b["index"].update(name=index_name(OTHER)), "is not data"),
        (lambda b: b["index"].update(head_sha256="AB" * 32), "sha256"),
        (lambda b: b["borrowed"].reverse(), "borrowed is not ascending"),
        (lambda b: b["borrowed"].append(b["borrowed"][1]), "listed twice"),
        (lambda b: b["borrowed"][0].__setitem__(0, blob_name(UID, 0, 0, "raw")), "save itself"),
        (
            lambda b: b["borrowed"][0].__setitem__(0, f"data/{OTHER}/index"),
            "not the name of a blob",
        ),
        (lambda b: b["borrowed"][0].__setitem__(0, "../../etc/passwd"), "not the name of a blob"),
        (lambda b: b["borrowed"][0].__setitem__(1, -1), "length"),
        (lambda b: b["borrowed"][0].pop(), "borrowed"),
        (lambda b: b.update(references=[]), "unknown fields: 'references'"),
        (lambda b: b.update(references=[b.pop("borrowed")[0][0]]), "unknown fields"),
        (lambda b: b.update(codecs={"zstd": "1"}), "codecs"),
        (lambda b: b.update(metadata=[]), "metadata"),
        (lambda b: b.update(more=1), "unknown fields: 'more'"),
        (lambda b: b.pop("engine"), "unknown fields: 'engine'"),
    ]:
        with pytest.raises(FormatError, match=complaint):
            decode_commit(resigned(encode_commit(record(borrowed=BORROWED)), change), NAME)


def of_many(ranks, links):
    """A record of many ranks at the end of a chain, and its table of borrowed blobs."""
    uids = [f"{n + 1:032x}" for n in range(links)]
    names = [
        blob_name(uid, rank, 0, kind)
        for uid in uids
        for rank in range(ranks)
        for kind in ("enc", "raw")
    ]
    blobs = tuple(BlobRecord(name, 1_000_000 + 37 * n) for n, name in enumerate(names))
    data, table = encode_borrowed(blobs)
    index = IndexEntry(index_name(UID), 160 + len(data), 160, "ab" * 32)
    made = replace(record(many_borrowed=table), index=index)
    return made, data, blobs


def test_a_record_with_a_malformed_table_is_refused():
    data = encode_commit(of_many(33, 2)[0])
    for change, message in [
        (lambda b: b.update(count=64), "count"),
        (lambda b: b.update(length=1 << 40), "length"),
        (lambda b: b.update(sha256="x"), "sha256"),
        (lambda b: b.update(saves={}), "saves"),
        (lambda b: b["saves"].update({UID: 1}), "not the uid of another save"),
        (lambda b: b["saves"].update({"../x": 1}), "not the uid of another save"),
        (lambda b: b["saves"].update({"0" * 32: 1}), "not ascending"),
        (lambda b: b["saves"].update({f"{1:032x}": -1}), "integer|bytes|0000"),
        (lambda b: b.pop("sha256"), "sha256"),
    ]:

        def change_table(body, change=change):
            change(body["borrowed"])

        with pytest.raises(FormatError, match=message):
            decode_commit(resigned(data, change_table), NAME)


@pytest.mark.parametrize("what", ["cut", "flipped", "counted", "other"])
def test_a_table_not_bound_by_the_record_is_damage(what):
    made, data, blobs = of_many(33, 2)
    table = made.many_borrowed
    if what == "cut":
        data = data[:-1]
    if what == "flipped":
        data = data[:-1] + bytes([data[-1] ^ 1])
    if what == "counted":
        made = replace(made, many_borrowed=replace(table, count=table.count + 1))
    if what == "other":
        data, other = encode_borrowed(blobs[:66])
        made = replace(made, many_borrowed=replace(other, count=66, saves=table.saves))
    with pytest.raises(FormatError, match=index_name(UID)):
        decode_borrowed(data, made)


def test_a_record_lists_each_lending_save_once():
    third = "ff" * 16
    borrowed = (*BORROWED, BlobRecord(blob_name(third, 0, 0, "raw"), 1))
    assert record(borrowed=borrowed).references == (OTHER, third)


def test_an_unreadable_record_is_never_written():
    with pytest.raises(FormatError, match="created"):
        encode_commit(record(created=""))
    with pytest.raises(FormatError, match="host"):
        encode_intent(replace(INTENT, host="h" * 100_000))


def test_the_intent_of_another_save_is_refused():
    with pytest.raises(FormatError, match="is the intent of"):
        decode_intent(encode_intent(INTENT), intent_name(OTHER))

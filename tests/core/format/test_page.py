"""The worked examples of docs/format.md are checkpoints that read as the page says."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

import penstock
from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.core.format.commit_record import decode_commit, decode_note, encode_note
from penstock.core.format.compressed import decompress
from penstock.core.format.features import FORMAT_VERSION
from penstock.core.format.index import IndexReader
from penstock.core.format.part import decode_head, decode_section, decode_shards
from penstock.core.format.records import NoteRecord, commit_name
from penstock.core.tree.paths import path_hash

BLOCK = re.compile(r'^```\w+ title="(\w+)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)
PAGE = Path(__file__).resolve().parents[3] / "docs" / "format.md"


def undump(text):
    """The bytes of a hexdump in which `*` means repeated lines."""
    data = bytearray()
    for line in text.splitlines():
        if line == "*":
            continue
        at, _, rest = line.partition(": ")
        data += bytes(int(at, 16) - len(data))  # only zeros are left out
        data += bytes.fromhex(rest[:39])
    return bytes(data)


@pytest.fixture(scope="module")
def found():
    blocks = BLOCK.findall(PAGE.read_text())
    found = dict(blocks)
    assert len(found) == len(blocks) == 21
    return found


@pytest.fixture(scope="module")
def example(found):
    return {
        "commit": found["commit"].encode(),
        "part": base64.b64decode(found["part"]),
        **{name: undump(found[name]) for name in ("index", "raw", "enc")},
        **{name: found[name].encode() for name in ("head", "shards", "section", "note")},
    }


@pytest.fixture(scope="module")
def record(example):
    return decode_commit(example["commit"], commit_name(100, 0))


def test_the_page_describes_the_written_version():
    assert f"**version {FORMAT_VERSION}**" in PAGE.read_text()


def test_the_example_records_match_the_page(example, record):
    entry = record.parts[0]
    head = decode_head(example["part"][: entry.head_length], entry, record)
    assert decompress(example["part"][: entry.head_length], "head") == example["head"]
    for info, name in ((head.shards, "shards"), (head.sections[0], "section")):
        data = example["part"][info.offset : info.offset + info.length]
        assert decompress(data, name) == example[name]
        json.loads(example[name])
    decode_shards(data=example["part"][325 : 325 + 67], head=head)
    section = decode_section(data, head.sections[0], head)
    for n, frame in enumerate(section.frames):
        blob = example["enc" if frame.chain else "raw"]
        assert len(blob) == head.blobs[frame.blob].length, n
        stored = blob[frame.offset : frame.offset + frame.length]
        assert frame.checksums == (xxhash.xxh3_64_intdigest(stored),)


def test_example_note_matches_the_writer(example):
    origin = "0123456789abcdef" * 2
    note = NoteRecord(origin, 1, "00112233445566ff", {"val_loss": 2.31})
    assert decode_note(example["note"], note.name) == note
    assert encode_note(note) == example["note"]


def test_the_index_of_the_example_finds_every_path(example, record):
    index = example["index"]
    reader = IndexReader(
        lambda offset, length: index[offset : offset + length],
        record.index,
    )
    for path in (("model", "w"), ("epoch",), ("history",)):
        assert reader.find_all(np.array([path_hash(path)], np.uint64)).places() == [(0, 0)]


def test_the_example_loads(example, record):
    backend = MemoryBackend(MemoryConfig())
    backend.publish(commit_name(100, 0), example["commit"])
    backend.publish(record.parts[0].name, example["part"])
    backend.publish(record.index.name, example["index"])
    for kind in ("raw", "enc"):
        backend.publish(f"data/{record.uid}/blobs/00000-0.{kind}", example[kind])
    with penstock.Checkpointer(backend) as checkpointer:
        assert checkpointer.verify().ok
        tree = checkpointer.load()
    assert tree["epoch"] == 7
    assert torch.equal(tree["model"]["w"], torch.arange(6, dtype=torch.float32).reshape(2, 3))
    assert torch.equal(tree["history"], torch.zeros(64))


@pytest.fixture(scope="module")
def two_ranks(found):
    """Returns a store with the checkpoint that two ranks saved as a delta, and its record."""
    record = decode_commit(found["commit_101"].encode(), commit_name(101, 0))
    backend = MemoryBackend(MemoryConfig())
    backend.publish(commit_name(101, 0), found["commit_101"].encode())
    backend.publish(record.index.name, undump(found["index_101"]))
    for rank, entry in enumerate(record.parts):
        backend.publish(entry.name, base64.b64decode(found[f"part_{rank}"]))
        base = record.borrowed[rank].name
        backend.publish(base, undump(found[f"base_{rank}"]))
        delta = f"data/{record.uid}/blobs/0000{rank}-0.enc"
        backend.publish(delta, undump(found[f"delta_{rank}"]))
    backend.publish(f"data/{record.uid}/blobs/00000-0.raw", undump(found["raw_101"]))
    return backend, record


def test_the_records_of_two_ranks_match_the_page(found, two_ranks):
    record = two_ranks[1]
    entry, data = record.parts[1], base64.b64decode(found["part_1"])
    head = decode_head(data[: entry.head_length], entry, record)
    assert decompress(data[: entry.head_length], "head") == found["head_1"].encode()
    for info, name in ((head.shards, "shards_1"), (head.sections[0], "section_1")):
        stored = data[info.offset : info.offset + info.length]
        assert decompress(stored, name) == found[name].encode()


def test_the_checkpoint_of_two_ranks_loads(two_ranks):
    with penstock.Checkpointer(two_ranks[0]) as checkpointer:
        assert checkpointer.verify().ok
        tree = checkpointer.load()
    assert tree["epoch"] == 101
    assert torch.equal(tree["w"], 2 * torch.arange(1.0, 65.0).sqrt().reshape(8, 8))

"""The targets of the fuzzers: each turns bytes into one case, and checks the outcome."""

import datetime as dt
import json
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import replace
from functools import cache
from pathlib import PurePosixPath

import numpy as np
import torch
from tests.codecs import fuzz_frames
from tests.core.forging import (
    INTEGERS,
    Choices,
    dump,
    flipped,
    forge,
    mutated,
    near,
    rebound,
    sealed,
    unpack,
)  # fmt: skip
from torch import nn

from penstock import Checkpointer
from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.codecs.lz4 import Lz4Codec
from penstock.codecs.zstd import ZstdCodec
from penstock.core.abc import CodecContext
from penstock.core.errors import CodecError, FormatError, PenstockError, UnsupportedStateError
from penstock.core.format.commit_record import decode_commit, decode_intent
from penstock.core.format.compressed import compress, decompress, digest
from penstock.core.format.index import IndexReader
from penstock.core.format.part import decode_section, decode_shards, read_head
from penstock.core.format.records import (
    IndexEntry,
    PartEntry,
    commit_name,
    intent_name,
    part_name,
)
from penstock.core.pipeline.codec_chain import CodecChain, checksum
from penstock.providers.values.decode import decode_value
from penstock.providers.values.encode import encode_value

STEP = 5
_LEVELS = ("section", "section", "section", "section", "head", "body", "index", "shards")


def make_state():
    """A small value of every stored form."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(9, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    model.add_module("tied", model[2])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {
        "model": model,
        "opt": optimizer,
        "generator": torch.Generator().manual_seed(3),
        "big": torch.arange(3000.0),
        "array": np.arange(5),
        "encoded": {"a": torch.arange(5000), "b": torch.ones(10)},
        "chained": torch.arange(5000),
        "list": [torch.ones(2), 3, (torch.zeros(0, 3),)],
        "values": {"pair": (1, 2), "when": dt.datetime(2020, 1, 1), "set": {1, 2}},
        "keys": {1: torch.ones(1), "x": torch.ones(2)},
    }


class Stored:
    """One checkpoint in memory with replaceable files."""

    def __init__(self):
        self.store = MemoryBackend(MemoryConfig())
        rules = [
            {"match": "encoded/**", "codecs": ["zstd"]},
            {"match": "chained", "codecs": ["lz4", "zstd"]},
            {"match": "array", "codecs": "auto"},
        ]
        self.ckpt = Checkpointer(
            self.store, chunk_bytes=16384, block_bytes=4096, workers=1, rules=rules
        )
        self.ckpt.save(make_state(), STEP, mode="blocking")
        self.files = self.now()

    def now(self):
        return {n: bytes(blob.data) for n, blob in self.store._store.blobs.items()}

    def put(self, files):
        self.store.delete(list(self.store._store.blobs))
        for name, data in files.items():
            self.store.publish(name, data)

    def read_every_way(self):
        """The outcome of each way of reading; errors other than ours propagate."""
        outcomes = []

        def attempt(way, read):
            try:
                read()
                outcomes.append((way, "read"))
            except PenstockError as error:
                outcomes.append((way, type(error).__name__))
            except KeyError as error:
                if "has no" not in str(error):  # the documented one, of `open`
                    raise
                outcomes.append((way, "KeyError"))

        ckpt = self.ckpt
        attempt("load", lambda: ckpt.load(STEP))
        attempt("restore", lambda: ckpt.restore(make_state(), STEP, strict=False))
        attempt("verify", lambda: ckpt.verify(STEP))
        attempt("quick", lambda: ckpt.verify(STEP, deep=False))
        attempt("info", lambda: (ckpt.info(), ckpt.steps()))
        attempt("prune", lambda: ckpt.prune(dry_run=True))
        try:
            checkpoint = ckpt.open(STEP)
            keys = checkpoint.keys()
        except PenstockError as error:
            return (*sorted(Counter(outcomes)), ("open", type(error).__name__))
        for key in [*keys, "model", "opt/state", "list", "values"]:
            attempt("open", lambda key=key: checkpoint[key])
        for key in keys:
            attempt("region", lambda key=key: checkpoint.read(key, (slice(0, 2),)))
        return tuple(sorted(Counter(outcomes)))


@cache
def stored():
    """Created once per process."""
    return Stored()


def manifest(data):
    """Records with right digests and any content; every way of reading."""
    choices = Choices(data)
    levels = [choices.of(_LEVELS) for _ in range(1 + choices.below(2))]

    def change(level, value):
        for _ in range(levels.count(level)):
            value = flipped(value, choices) if level == "index" else mutated(value, choices)
        return value

    stored().put(forge(stored().files, change))
    return stored().read_every_way()


def records(data):
    """The bytes of one record with right digests: each decoder alone."""
    choices = Choices(data)
    files = stored().files
    (commit,) = [n for n in files if n.startswith("commits/")]
    record = decode_commit(files[commit], commit)
    entry = record.parts[0]
    part = files[entry.name]
    head = read_head(part[: entry.head_length], entry, uid=record.uid, rank=0, world_size=1)
    what = choices.of(("commit", "intent", "head", "section", "shards", "index", "line", "frame"))
    try:
        _decode(what, choices, files=files, commit=commit, record=record, part=part, head=head)
    except FormatError as error:
        assert str(error)  # noqa: PT017 - it may be read
        return what, "refused"
    return what, "read"


def _decode(what, choices, *, files, commit, record, part, head):
    uid = record.uid
    if what in {"commit", "intent"}:
        name = commit if what == "commit" else intent_name(uid)
        content = _changed(files[name].partition(b"\n")[2], choices)
        decode = decode_commit if what == "commit" else decode_intent
        decode(sealed(content), name)
    elif what == "line":
        decode_commit(flipped(files[commit], choices), choices.of((commit, commit_name(6, 0))))
    elif what == "head":
        frame = compress(_changed(_raw(part[: head.shards.offset]), choices))
        entry = PartEntry(part_name(uid, 0), len(part), len(frame), digest(frame))
        read_head(frame, entry, uid=uid, rank=0, world_size=1)
    elif what == "section":
        info = head.sections[0]
        raw = _changed(_raw(part[info.offset : info.offset + info.length]), choices)
        frame = compress(raw)
        fitting = replace(info, length=len(frame), raw_length=len(raw), sha256=digest(frame))
        decode_section(frame, fitting, head)
    elif what == "shards":
        info = head.shards
        raw = _changed(_raw(part[info.offset : info.offset + info.length]), choices)
        frame = compress(raw)
        fitting = replace(info, length=len(frame), raw_length=len(raw), sha256=digest(frame))
        decode_shards(frame, replace(head, shards=fitting))
    elif what == "frame":
        decompress(flipped(part[: head.shards.offset], choices), "frame")
    else:
        whole = files[record.index.name]
        index = rebound(whole, record.index.head_length, lambda raw: flipped(raw, choices))
        if choices.below(4) == 0:
            index = flipped(index, choices)
        head_length = min(record.index.head_length, len(index))
        entry = IndexEntry("index", len(index), head_length, digest(index[:head_length]))
        reader = IndexReader(
            lambda offset, length: index[offset : offset + length],
            entry,
            whole_bytes=choices.of((0, 1 << 20)),
        )
        reader.find_all(np.array([choices.of(INTEGERS[1:18])], np.uint64))
        for table in reader.blocks():
            reader.find_all(table.hashes[:1])


def _changed(content, choices):
    if choices.below(3) == 0:
        return flipped(content, choices)
    return dump(mutated(json.loads(content.decode("utf-8", "surrogatepass")), choices))


def _raw(frame):
    return dump(unpack(frame))


_CHAINS = (("zstd",), ("lz4",), ("lz4", "zstd"), ("zstd", "lz4"), ("zstd", "zstd", "lz4"))
_CODECS = {"zstd": ZstdCodec, "lz4": Lz4Codec}


@cache
def _encoded(names, kind):
    chain = CodecChain([_CODECS[n](_CODECS[n].Config()) for n in names])
    size = (0, 1, 5000, 70000)[kind % 4]
    raw = (bytes(size) if kind >= 4 else bytes(range(251)) * (size // 251 + 1))[:size]
    context = CodecContext("uint8", 1, (size,), 0, size)
    out = memoryview(bytearray(chain.max_encoded_size(size)))
    frame = chain.encode(memoryview(raw), out, context=context)
    return chain, raw, bytes(out[: frame.length]), frame.lengths


def frames(data):
    """Encoded frames changed under a valid checksum: refused, or decoded correctly."""
    choices = Choices(data)
    names = choices.of(_CHAINS)
    chain, raw, frame, lengths = _encoded(names, choices.below(8))
    lengths = [near(n, choices) if choices.below(4) == 0 else n for n in lengths]
    size = near(len(raw), choices) if choices.below(8) == 0 else len(raw)
    size = min(max(size, 0), 1 << 20)
    guard = 64
    memory = bytearray(b"\xa5" * (size + 2 * guard))
    out = memoryview(memory)[guard : guard + size]
    context = CodecContext("uint8", 1, (size,), 0, size)
    changed = flipped(frame, choices)
    try:
        chain.decode(
            memoryview(changed), out, context=context, lengths=lengths, raw_checksum=checksum(raw)
        )
        outcome = "read"
        assert bytes(out) == raw
    except CodecError as error:
        assert str(error)  # noqa: PT017 - it may be read
        outcome = "refused"
    assert memory[:guard] == memory[guard + size :] == b"\xa5" * guard
    return names, outcome


_VALUES = {
    "numbers": [1, 1 << 80, 1.5, float("nan"), float("-inf"), 1 + 2j, True, None],
    "texts": ["ä", "\ud800", b"bytes", bytearray(b"more")],
    "containers": [(1, (2,)), {1, 2}, frozenset({3}), deque([1], 5), {"$": 1}, {2: 3, (4,): 5}],
    "kinds": [OrderedDict(a=1), Counter("aab"), defaultdict(list, a=[1])],
    "times": [
        dt.date(2020, 1, 2), dt.time(3, 4), dt.timedelta(5, 6, 7),
        dt.datetime(2020, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=1), "here")),
    ],
    "others": [PurePosixPath("a/b"), np.float32(1.5), np.datetime64("2020")],
    "torch": [torch.Size([1, 2]), torch.float16, torch.device("cpu")],
}  # fmt: skip


@cache
def _encoded_values():
    return encode_value(_VALUES, ("v",))


def values(data):
    """The JSON of values: decoded to any value, or refused."""
    choices = Choices(data)
    content = _changed(_encoded_values(), choices)
    try:
        decode_value(content, ("v",))
    except (FormatError, UnsupportedStateError) as error:
        assert "v" in str(error)  # noqa: PT017 - it may be read
        return type(error).__name__, str(error)[:50]
    return "read", ""


TARGETS = {f.__name__: f for f in (manifest, records, frames, values)} | fuzz_frames.TARGETS

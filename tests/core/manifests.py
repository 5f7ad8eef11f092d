"""Builds small manifests for the tests of their bytes."""

from tests.core.planned import NoBytes, raw_places

from penstock.core.abc import Node, StateObject
from penstock.core.format.blocks import block_count
from penstock.core.format.index import encode_index
from penstock.core.format.part import decode_head, decode_section, encode_part
from penstock.core.format.records import (
    BlobRecord,
    ChoiceRecord,
    CodecRecord,
    CommitRecord,
    blob_name,
)
from penstock.core.format.section_writer import SectionWriter
from penstock.core.pipeline.chunks import ChunkResult
from penstock.core.plan.save import Capture, PlannedObject, plan_save
from penstock.core.save.manifest import build_sections, frames_of
from penstock.core.types import PAGE_BYTES, Kind, Region, Role, TensorSpec

UID = "0123456789abcdef" * 2
OTHER = "fedcba9876543210" * 2
CHAINS = [
    (),
    (CodecRecord("zstd", 1, {"level": 3}),),
    (CodecRecord("floatsplit", 1, {}), CodecRecord("zstd", 2, {})),
]
CHOICES = [
    ChoiceRecord("optimizer float32", "floatsplit", "floatsplit: 1.20x"),
    ChoiceRecord("other uint8", None, "raw: no codec makes it smaller"),
]


def tensor(path, shape=(3, 5), *, dtype="float32", role=Role.PARAMETER):
    spec = TensorSpec(dtype, 4, tuple(shape))
    region = Region.whole(spec.shape)
    return StateObject(path, Kind.TENSOR, spec, (region,), role, "tensor", NoBytes(spec.nbytes))


def value(path, nbytes):
    spec = TensorSpec("uint8", 1, (nbytes,))
    region = Region.whole(spec.shape)
    return StateObject(path, Kind.VALUE, spec, (region,), Role.OTHER, "json", NoBytes(nbytes))


def tied(path, target):
    return target._replace(path=path, same_as=target.path)


def plan_of(entries, *, chains=None, chunk_bytes=2 * PAGE_BYTES):
    stored = [e for e in entries if isinstance(e, StateObject) and e.same_as is None]
    objects = [
        PlannedObject(entry, Capture.NOW, (chains or {}).get(item, 0))
        for item, entry in enumerate(stored)
    ]
    return plan_save(objects, chunk_bytes=chunk_bytes, slab_limit_bytes=600, encoded_slab_bytes=800)


def results_of(plan, block_bytes):
    results, end = [], 0
    for number, (chunk, offset) in enumerate(zip(plan.chunks, raw_places(plan)[0], strict=True)):
        if chunk.chain:
            length = chunk.length // 2 + 1
            lengths = (chunk.length + 7,) * (len(CHAINS[chunk.chain]) - 1)
            results.append(ChunkResult(end, length, (2**64 - 1 - number,), number, lengths))
            end += length
        else:
            count = block_count(offset, chunk.length, block_bytes)
            sums = tuple((number * 7919 + n) * 0x9E3779B97F4A7C15 % 2**64 for n in range(count))
            results.append(ChunkResult(offset, chunk.length, sums))
    return results, end


def frames_for(plan, results):
    return frames_of(
        plan,
        dict(enumerate(results)),
        blobs={"raw": 0, "enc": 1},
        chains=dict(enumerate(chunk.chain for chunk in plan.chunks)),
        place=None,
    )


class Manifest:
    """Entries in described order, encoded to bytes."""

    def __init__(self, entries, *, chains=None, block_bytes=PAGE_BYTES, section_objects=4):
        self.entries = entries
        self.plan = plan_of(entries, chains=chains)
        self.results, encoded_bytes = results_of(self.plan, block_bytes)
        self.writers = build_sections(
            entries,
            self.plan,
            frames_for(self.plan, self.results),
            section_objects=section_objects,
        )
        self.part = encode_part(
            self.writers,
            uid=UID,
            rank=0,
            step=100,
            block_bytes=block_bytes,
            blobs=[
                BlobRecord(blob_name(UID, 0, 0, "raw"), raw_places(self.plan)[1]),
                BlobRecord(blob_name(UID, 0, 0, "enc"), encoded_bytes),
            ],
            chains=CHAINS,
            choices=CHOICES,
        )
        self.index = encode_index(UID, [self.part.shards])
        self.record = commit_record(index=self.index.entry, parts=(self.part.entry,))

    def head(self):
        entry = self.part.entry
        return decode_head(self.part.data[: entry.head_length], entry, self.record)

    def sections(self):
        head = self.head()
        return [
            decode_section(self.part.data[i.offset : i.offset + i.length], i, head)
            for i in head.sections
        ]


def commit_record(*, index, parts, **changes):
    fields = {
        "uid": UID,
        "step": 100,
        "generation": 0,
        "created": "2026-11-21T03:36:10Z",
        "world_size": len(parts),
        "index": index,
        "parts": parts,
        "objects": 7,
        "bytes_raw": 12345,
        "bytes_stored": 2345,
        "codecs": {"zstd": 1},
        "providers": {"module": 1, "value": 1},
        "borrowed": (),
        "metadata": {"loss": 2.1, "tags": ["a", "ü"]},
        "penstock": "0.1",
        "engine": "uring",
    }
    return CommitRecord(**{**fields, **changes})


def example():
    """A bit of everything: slab, several chunks, both chains, value, tie, empty, nodes."""
    weight = tensor(("model", "wte.weight"), (60, 70))
    entries = [
        Node((), "dict"),
        weight,
        tensor(("model", "ln.weight"), (16,)),
        tensor(("model", "ln.bias"), (16,)),
        tied(("model", "head.weight"), weight),
        Node(("opt", "param_groups"), "list", {"keys": [1, None]}),
        tensor(("opt", "state", "a/b", "exp_avg"), (5000,), role=Role.OPTIMIZER),
        tensor(("opt", "state", "", "exp_avg_sq"), (5000,), role=Role.OPTIMIZER),
        tensor(("opt", "empty"), (0, 3)),
        value(("epoch",), 17),
    ]
    return Manifest(entries, chains={3: 1, 4: 2})


def section_of(records):
    """The writer of a section given as records."""
    writer = SectionWriter()
    for frame in records.frames:
        writer.frame_number(frame)
    for record in records.objects:
        rows = [_shard_row(shard, record.spec) for shard in record.shards]
        writer.add_object(record.ordinal, record, rows)
    for node in records.nodes:
        writer.add_node(node.ordinal, node)
    return writer


def _shard_row(shard, spec):
    refs = [n for ref in shard.chunks for n in (ref.frame, ref.at, ref.stop - ref.start)]
    if shard.region == Region.whole(spec.shape):
        return [refs]
    return [refs, shard.region.offsets, shard.region.sizes]

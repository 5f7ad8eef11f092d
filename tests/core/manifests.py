"""Builds small manifests for the tests of their bytes."""

from penstock.core.blocks import block_count
from penstock.core.index import encode_index
from penstock.core.manifest import (
    BlobRecord,
    CodecRecord,
    CommitRecord,
    NodeRecord,
    blob_name,
)
from penstock.core.part import decode_head, decode_section, encode_part
from penstock.core.plan import Capture, PlanItem, plan_save
from penstock.core.sections import ChunkResult, ObjectEntry, build_sections
from penstock.core.types import PAGE_BYTES, Kind, Region, Role, TensorSpec

UID = "0123456789abcdef" * 2
OTHER = "fedcba9876543210" * 2
CHAINS = [
    (),
    (CodecRecord("zstd", 1, {"level": 3}),),
    (CodecRecord("floatsplit", 1, {}), CodecRecord("zstd", 2, {})),
]


def tensor(ordinal, path, shape=(3, 5), *, dtype="float32", item=None, role=Role.PARAMETER):
    spec = TensorSpec(dtype, 4, tuple(shape))
    region = Region.whole(spec.shape)
    return ObjectEntry(ordinal, path, Kind.TENSOR, spec, region, role, "tensor", None, item)


def value(ordinal, path, nbytes, *, item=None):
    spec = TensorSpec("uint8", 1, (nbytes,))
    region = Region.whole(spec.shape)
    return ObjectEntry(ordinal, path, Kind.VALUE, spec, region, Role.OTHER, "json", None, item)


def tied(ordinal, path, target):
    entry = target
    return ObjectEntry(
        ordinal,
        path,
        entry.kind,
        entry.spec,
        entry.region,
        entry.role,
        entry.form,
        entry.path,
        None,
    )


def plan_of(entries, *, chains=None, chunk_bytes=2 * PAGE_BYTES):
    items = [
        PlanItem(
            e.spec.nbytes, e.spec.itemsize, 64, e.path[0] if e.path else "", e.role,
            (chains or {}).get(e.item, 0), "cpu", Capture.NOW,
        )
        for e in entries
        if isinstance(e, ObjectEntry) and e.item is not None
    ]  # fmt: skip
    return plan_save(items, chunk_bytes=chunk_bytes, slab_limit_bytes=600, encoded_slab_bytes=800)


def results_of(plan, block_bytes):
    results, end = [], 0
    for number, chunk in enumerate(plan.chunks):
        if chunk.chain:
            length = chunk.length // 2 + 1
            lengths = (chunk.length + 7,) * (len(CHAINS[chunk.chain]) - 1)
            results.append(ChunkResult(end, length, (2**64 - 1 - number,), number, lengths))
            end += length
        else:
            count = block_count(chunk.offset, chunk.length, block_bytes)
            sums = tuple((number * 7919 + n) * 0x9E3779B97F4A7C15 % 2**64 for n in range(count))
            results.append(ChunkResult(chunk.offset, chunk.length, sums))
    return results, end


class Manifest:
    """Entries in described order, taken all the way to bytes."""

    def __init__(self, entries, *, chains=None, block_bytes=PAGE_BYTES, section_objects=4):
        self.entries = entries
        self.plan = plan_of(entries, chains=chains)
        self.results, encoded_bytes = results_of(self.plan, block_bytes)
        self.drafts = build_sections(
            entries,
            self.plan,
            self.results,
            blobs={"raw": 0, "enc": 1},
            section_objects=section_objects,
        )
        self.part = encode_part(
            self.drafts,
            uid=UID,
            rank=0,
            step=100,
            block_bytes=block_bytes,
            blobs=[
                BlobRecord(blob_name(UID, 0, 0, "raw"), self.plan.raw_blob_bytes),
                BlobRecord(blob_name(UID, 0, 0, "enc"), encoded_bytes),
            ],
            chains=CHAINS,
        )
        self.index = encode_index(UID, [self.part.hashes])
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
        "references": (),
        "metadata": {"loss": 2.1, "tags": ["a", "ü"]},
        "penstock": "0.1",
        "engine": "uring",
    }
    return CommitRecord(**{**fields, **changes})


def example():
    """A bit of everything: slab, several chunks, both chains, value, tie, empty, nodes."""
    weight = tensor(1, ("model", "wte.weight"), (60, 70), item=0)
    entries = [
        NodeRecord(0, (), "dict"),
        weight,
        tensor(2, ("model", "ln.weight"), (16,), item=1),
        tensor(3, ("model", "ln.bias"), (16,), item=2),
        tied(4, ("model", "head.weight"), weight),
        NodeRecord(5, ("opt", "param_groups"), "list", {"keys": [1, None]}),
        tensor(6, ("opt", "state", "a/b", "exp_avg"), (5000,), item=3, role=Role.OPTIMIZER),
        tensor(7, ("opt", "state", "", "exp_avg_sq"), (5000,), item=4, role=Role.OPTIMIZER),
        tensor(8, ("opt", "empty"), (0, 3), item=5),
        value(9, ("epoch",), 17, item=6),
    ]
    return Manifest(entries, chains={3: 1, 4: 2})

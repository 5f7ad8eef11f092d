"""Stores checkpoints as several ranks would, each with the shards that it is given."""

import numpy as np
from tests.core.manifests import UID, commit_record, draft_section

from penstock.core.format.blocks import frame_blocks
from penstock.core.format.commit_record import encode_commit, encode_intent
from penstock.core.format.index import encode_index
from penstock.core.format.part import encode_part
from penstock.core.format.records import (
    BlobRecord,
    ChunkRef,
    Frame,
    IntentRecord,
    ManyParts,
    NodeRecord,
    ObjectRecord,
    Section,
    ShardRecord,
    blob_name,
    commit_name,
    intent_name,
)
from penstock.core.pipeline.chain import checksum_blocks
from penstock.core.types import PAGE_BYTES, Kind, Role, TensorSpec, WriteRequest

STEP = 5
BLOCK_BYTES = PAGE_BYTES


def cut(array, region):
    index = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))
    return np.ascontiguousarray(array[index])


def store_ranks(backend, ranks, *, per_section=3):
    """Store a checkpoint of step 5.

    Args:
        backend: Where to.
        ranks: For each rank the path of every object that it describes, in order, with the whole
            array and the regions that the rank holds; regions of None: it only describes it.
        per_section: Objects of a section.
    """
    parts, tables, stored, names = [], [], 0, set()
    world_size = len(ranks)
    for rank, held in enumerate(ranks):
        if not held and rank:
            continue  # a rank without a share writes no part
        part, blob = _part(rank, world_size, held, per_section)
        name = blob_name(UID, rank, 0, "raw")
        writer = backend.create(name)
        writer.write([WriteRequest(0, (memoryview(blob),))])
        writer.seal(len(blob))
        stored += len(blob)
        backend.publish(part.entry.name, part.data)
        parts.append(part.entry)
        tables.append(part.shards)
        names |= {path for path, _, _ in held}
    many = ManyParts(len(parts), sum(p.length for p in parts)) if len(parts) > 16 else None
    index = encode_index(UID, tables, parts if many else ())
    backend.publish(index.entry.name, index.data)
    whole = {path: array.nbytes for held in ranks for path, array, _ in held}
    record = commit_record(
        index=index.entry,
        parts=() if many else tuple(parts),
        many_parts=many,
        world_size=world_size,
        step=STEP,
        objects=len(names),
        bytes_raw=sum(whole.values()),
        bytes_stored=stored,
        codecs={},
        providers={"ndarray": 1},
    )
    intent = IntentRecord(UID, STEP, started=record.created, refreshed=record.created)
    backend.publish(intent_name(UID), encode_intent(intent))
    backend.publish(commit_name(STEP, 0), encode_commit(record))
    return record


def _part(rank, world_size, held, per_section):
    blob = bytearray()
    sections, nodes = [], {}
    for path, _, _ in held:
        nodes |= {path[:n]: None for n in range(len(path))}
    node_records = tuple(NodeRecord(n, path, "dict") for n, path in enumerate(nodes))
    for at in range(0, len(held), per_section):
        frames, objects = [], []
        for ordinal, (path, array, regions) in enumerate(held[at : at + per_section], at):
            shards = []
            for region in regions or ():
                blob += bytes(-len(blob) % PAGE_BYTES)
                data = cut(array, region).tobytes()
                refs = ()
                if data:
                    blocks = frame_blocks(len(blob), len(data), BLOCK_BYTES)
                    sums = tuple(checksum_blocks(memoryview(data), blocks))
                    refs = (ChunkRef(len(frames), 0, 0, len(data)),)
                    frames.append(Frame(0, len(blob), len(data), len(data), 0, sums))
                blob += data
                shards.append(ShardRecord(region, refs))
            spec = TensorSpec(array.dtype.name, array.itemsize, array.shape)
            objects.append(
                ObjectRecord(
                    len(node_records) + ordinal, path, Kind.TENSOR, spec, Role.PARAMETER, "ndarray",
                    tuple(shards),
                )
            )  # fmt: skip
        sections.append(Section(tuple(frames), tuple(objects), () if at else node_records))
    part = encode_part(
        [draft_section(section) for section in sections],
        uid=UID,
        rank=rank,
        world_size=world_size,
        step=STEP,
        block_bytes=BLOCK_BYTES,
        blobs=[BlobRecord(blob_name(UID, rank, 0, "raw"), len(blob))],
        chains=[()],
    )
    return part, bytes(blob)

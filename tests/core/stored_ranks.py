"""Stores checkpoints as several ranks would, each with its given shards."""

import numpy as np
from tests.core.manifests import UID, commit_record, section_of

from penstock.backends.memory import MemoryBackend, MemoryConfig
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
from penstock.core.pipeline.codec_chain import checksum_blocks
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.restore.fill import read_region
from penstock.core.types import PAGE_BYTES, Kind, Region, Role, TensorSpec, WriteRequest

STEP = 5
BLOCK_BYTES = PAGE_BYTES
DICTS = ({}, [], {"ndarray": 1})


def cut(array, region):
    index = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))
    return np.ascontiguousarray(array[index])


def reshard(store, cuts, *, step=STEP):
    """Return a store with the checkpoint of `store`, saved by one process, as ranks would store it.

    Args:
        store: Where the checkpoint is.
        cuts: Returns each rank's share of a tensor: `cuts(path, shape)` is a list of regions for
            each rank. Values are on rank 0, and all ranks describe them.
        step: The step of the checkpoint.
    """
    view = Checkpoint.open(store, step)
    records, arrays = {}, {}
    for record in view.contents.objects():
        records[record.path] = record
        if record.same_as is None:
            data = read_region(view.opened, record, Region.whole(record.spec.shape))
            array = np.frombuffer(data, f"V{record.spec.itemsize}").reshape(record.spec.shape)
            arrays[record.path] = array
    count = len(cuts((), ()))
    ranks = [[] for _ in range(count)]
    for path, record in records.items():
        whole = [Region.whole(record.spec.shape)]
        held = [whole, *[None] * (count - 1)]
        if record.same_as is not None:
            held = [None] * count
        elif record.kind is Kind.TENSOR and record.spec.shape:
            held = cuts(path, record.spec.shape)
        for rank, regions in enumerate(held):
            ranks[rank].append((path, arrays.get(path), regions))
    found = MemoryBackend(MemoryConfig())
    store_ranks(found, ranks, like=(records, view.contents.nodes(), view.contents.record.providers))
    return found


def store_ranks(backend, ranks, *, per_section=3, like=None):
    """Store a checkpoint of step 5.

    Args:
        backend: Where to.
        ranks: For each rank the path of every object that it describes, in order, with the whole
            array and the rank's regions; regions of None: it only describes it.
        per_section: Objects of a section.
        like: The records of the objects by path, all nodes, and the versions of providers; absent
            objects, and all without it, get those of arrays in dicts.
    """
    like = like or DICTS
    parts, tables, stored, names = [], [], 0, set()
    world_size = len(ranks)
    for rank, held in enumerate(ranks):
        if not held and rank:
            continue  # a rank without a share writes no part
        part, blob = part_of_rank(rank, world_size, held, per_section=per_section, like=like)
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
    whole = {path: getattr(array, "nbytes", 0) for held in ranks for path, array, _ in held}
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
        providers=like[2],
    )
    intent = IntentRecord(UID, STEP, started=record.created, refreshed=record.created)
    backend.publish(intent_name(UID), encode_intent(intent))
    backend.publish(commit_name(STEP, 0), encode_commit(record))
    return record


def part_of_rank(rank, world_size, held, *, per_section=256, like=DICTS):
    """Return the encoded part of one rank, and the bytes of its blob."""
    blob = bytearray()
    known, stored_nodes, _ = like
    sections, nodes = [], {}
    for path, _, _ in held:
        nodes |= {path[:n]: ("dict", {}) for n in range(len(path))}
    nodes |= {node.path: (node.form, node.meta) for node in stored_nodes}
    node_records = tuple(NodeRecord(n, path, *rest) for n, (path, rest) in enumerate(nodes.items()))
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
            record = known.get(path)
            if record is None:
                spec = TensorSpec(array.dtype.name, array.itemsize, array.shape)
                record = ObjectRecord(
                    0, path, Kind.TENSOR, spec, Role.PARAMETER, "ndarray", (), None
                )
            number = len(node_records) + ordinal
            objects.append(record._replace(ordinal=number, shards=tuple(shards)))
        sections.append(Section(tuple(frames), tuple(objects), () if at else node_records))
    part = encode_part(
        [section_of(section) for section in sections],
        uid=UID,
        rank=rank,
        world_size=world_size,
        step=STEP,
        block_bytes=BLOCK_BYTES,
        blobs=[BlobRecord(blob_name(UID, rank, 0, "raw"), len(blob))],
        chains=[()],
    )
    return part, bytes(blob)

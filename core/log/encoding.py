"""Encodes entries of a log as checkpoints in memory.

A save into memory would give the same files. But its threads, its records and its copies of all
bytes took four times as much CPU time from training on the same cores (`benchmarks/log.py`).

Tested in `tests/integration/log/test_replay.py`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.core.config.model import load_config
from penstock.core.format.blocks import frame_blocks
from penstock.core.format.commit_record import encode_commit
from penstock.core.format.index import encode_blocks, merged
from penstock.core.format.records import blob_name, commit_name
from penstock.core.format.strict_json import dump_json
from penstock.core.log.replayed import stored_step
from penstock.core.pipeline.chunks import ChunkResult
from penstock.core.pipeline.codec_chain import checksum_blocks
from penstock.core.pipeline.links import load_link
from penstock.core.pipeline.staging import map_memory
from penstock.core.plan.save import RawLayout, context_of
from penstock.core.save.manifest import ManifestWriter
from penstock.core.save.prepare import plan_state
from penstock.core.save.rules import ChainTable
from penstock.core.tree.describe import describe_tree
from penstock.core.tree.known import Known

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.core.abc import Node, StateObject
    from penstock.core.concurrency.workers import Workers
    from penstock.core.config.model import CheckpointerConfig
    from penstock.core.log.steps import LoggedStep
    from penstock.core.pipeline.codec_chain import EncodedFrame
    from penstock.core.plan.save import Chunk, SavePlan
    from penstock.core.plugins.registry import Registry
    from penstock.core.save.request import SaveRequest
    from penstock.core.types import Buffer

STATE, STEPS, OPTIONS = "state", "steps", "options"
"""The keys of an entry: the state that no optimizer changes, the steps, and the options of all
groups when `log` was called."""

LAYOUT = "layout"
"""The key of a step's gradient layout. An entry stores the layout as JSON text."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The contents of one entry.

    Attributes:
        step: The number of the step.
        rest: The description, with its bytes, of the state that no optimizer changes.
        providers: The version of each provider that described `rest`, by name.
        steps: The steps of optimizers, each with the path of its optimizer.
        options: The options of all groups, by the path of the optimizer.
    """

    step: int
    rest: Sequence[StateObject | Node]
    providers: Mapping[str, int]
    steps: Sequence[tuple[str, LoggedStep]]
    options: Mapping[str, Any]


class EntryEncoder:
    """Encodes entries of a log. Only one thread may use it."""

    def __init__(self, workers: Workers, config: CheckpointerConfig, registry: Registry) -> None:
        self._workers = workers
        self._registry = registry
        self._config = load_config(
            {
                "backend": "memory://",
                "allow_pickle": config.allow_pickle,
                "chunk_bytes": config.chunk_bytes,
                "rules": [{"match": f"{STEPS}/*/grads/**", "codecs": ["factor", "floatsplit"]}],
            }
        )
        self._table = ChainTable(self._config, registry)
        self._known = Known()
        # Encoded frames, by chunk number. The next entry reuses their memory: faulting in new pages
        # takes as long as the codecs.
        self._frames: dict[int, memoryview] = {}

    def encode(self, entry: Entry) -> dict[str, Sequence[Buffer]]:
        """Encode an entry as the files of a checkpoint.

        Returns:
            The buffers of each file, by name; valid until the next call.

        Raises:
            RefutedError: A replay gives other bits than training.
            PenstockError: The entry cannot be encoded as a valid checkpoint.
        """
        steps = [stored_step(step, path) for path, step in entry.steps]
        for (_, step), stored in zip(entry.steps, steps, strict=True):
            if step.proof is not None:
                step.proof.check(step.replayer, stored)
        return self._files(self._request(entry, steps))

    def _request(self, entry: Entry, steps: Sequence[Mapping[str, Any]]) -> SaveRequest:
        known = Known(self._known)
        # Layouts are stored as text: describing nested lists would take longer than all the rest.
        rows = [{**step, LAYOUT: dump_json(step[LAYOUT]).decode()} for step in steps]
        description = describe_tree(
            {STEPS: rows, OPTIONS: entry.options},
            providers=self._registry.providers,
            allow_pickle=self._config.allow_pickle,
            known=known,
        )
        providers = {**entry.providers, **dict(description.providers_used)}
        both = replace(
            description,
            entries=(*entry.rest, *description.entries),
            providers_used=tuple(sorted(providers.items())),
        )
        request = plan_state(
            both, config=self._config, table=self._table, step=entry.step, generation=0,
            mode="blocking", share=False, derive=False, known=known,
        )  # fmt: skip
        self._known = known
        return request

    def _files(self, request: SaveRequest) -> dict[str, Sequence[Buffer]]:
        plan, uid = request.plan, secrets.token_hex(16)
        tasks = [partial(self._stored, request, number) for number in range(len(plan.chunks))]
        results: dict[int, ChunkResult] = {}
        kinds: dict[str, list[memoryview]] = {"raw": [], "enc": []}
        layout, end = RawLayout(), 0
        for number, outcome in enumerate(self._workers.side_by_side(tasks)):
            if isinstance(outcome, BaseException):
                raise outcome
            data, frame, declined = outcome
            if plan.chunks[number].chain:
                offset, end = end, end + data.nbytes
                kinds["enc"].append(data)
            else:
                written = layout.end
                offset = layout.place(plan.chunks[number])
                kinds["raw"] += memoryview(bytes(offset - written)), data
            if frame is None:
                blocks = frame_blocks(offset, data.nbytes, request.block_bytes)
                sums = tuple(checksum_blocks(data, blocks))
                results[number] = ChunkResult(offset, data.nbytes, sums, declined=declined)
            else:
                results[number] = ChunkResult(
                    offset, frame.length, (frame.checksum,), frame.raw_checksum, frame.lengths,
                    declined,
                )  # fmt: skip
        blobs = {blob_name(uid, 0, 0, kind): data for kind, data in kinds.items() if data}
        sizes = [(name, sum(map(len, buffers))) for name, buffers in blobs.items()]
        manifest = ManifestWriter(request, {}, shipper=self._registry.shipper)
        part = manifest.encode_part(uid, results, sizes, derived={})
        index, record = manifest.encode(
            uid, [part.summary], encode_blocks(merged([part.shards])),
            engine="memory", created=self._workers.timing.clock.now_iso(),
        )  # fmt: skip
        return {
            commit_name(record.step, record.generation): [encode_commit(record)],
            record.index.name: [index],
            part.summary.entry.name: [part.data],
            **blobs,
        }

    def _stored(
        self, request: SaveRequest, number: int
    ) -> tuple[memoryview, EncodedFrame | None, tuple[int, ...]]:
        """Return a chunk's stored bytes, its frame (None if raw), and the codecs that declined."""
        chunk = request.plan.chunks[number]
        data, chain = _bytes_of(request.plan, chunk), request.chains[chunk.chain]
        if chain is None:
            return data, None, ()
        for codec in chain.codecs:
            load_link(codec)
        bound = chain.max_encoded_size(chunk.length)
        if len(self._frames.get(number, b"")) < bound:
            self._frames[number] = memoryview(map_memory(bound))
        out = self._frames[number]
        frame = chain.encode(data, out, context=context_of(request.plan, chunk))
        if len(frame.declined) == len(chain.codecs):
            return data, None, frame.declined
        return out[: frame.length], frame, frame.declined


def _bytes_of(plan: SavePlan, chunk: Chunk) -> memoryview:
    """Return the bytes of a chunk, without a copy if they are one object in host memory."""
    piece = chunk.pieces[0]
    view = None if chunk.slab else plan.objects[piece.item].entry.source.view()
    if view is not None:
        return view[piece.start : piece.stop]
    data = memoryview(bytearray(chunk.length))
    for piece in chunk.pieces:
        out = data[piece.at : piece.at + piece.stop - piece.start]
        pending = plan.objects[piece.item].entry.source.copy_out(piece.start, out)
        if pending is not None:
            pending.wait()
    return data

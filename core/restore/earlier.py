"""Reads frames and single chunks of an earlier checkpoint for a save that refers to it.

Tested in `tests/core/save/test_bases.py`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock.core.pipeline.loader import FrameReader
from penstock.core.plan.earlier_frames import stored_frames
from penstock.core.plan.reads import FrameJob
from penstock.core.restore.contents import Contents, check_length, decoding_chain
from penstock.core.types import ByteRange, ReadRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from penstock.core.abc import Backend, CodecContext
    from penstock.core.format.records import Chain, CommitRecord
    from penstock.core.pipeline.codec_chain import CodecChain
    from penstock.core.plan.earlier_frames import ChunkKey, StoredFrame
    from penstock.core.plugins.registry import Registry
    from penstock.core.types import ObjectPath, Region


_TOGETHER_BYTES = 64 << 20  # of a chain's frames in one batch; each worker holds one batch


class EarlierReader:
    """Reads the frames of committed checkpoints that a save refers to. Thread-safe."""

    def __init__(self, registry: Registry) -> None:
        """Create a reader that finds codecs in `registry`."""
        self._registry = registry
        self._frames = FrameReader()
        self._chains: dict[str, CodecChain] = {}
        self._lock = threading.Lock()  # guards `_chains`

    def frames(
        self,
        backend: Backend,
        record: CommitRecord,
        within: Mapping[ObjectPath, Collection[Region]] | None = None,
    ) -> dict[ChunkKey, StoredFrame]:
        """Return where the frames of a checkpoint are stored, by chunk key.

        Args:
            backend: The store of the checkpoint.
            record: The commit record.
            within: The objects whose frames are needed, each with the needed regions. The result
                may also have frames of their other regions. None: all frames.

        Raises:
            DamagedError: The manifest is damaged.
            StorageError: The store failed.
        """
        contents = Contents(backend, record, self._registry)
        return stored_frames(contents.everywhere(within))

    def read(
        self, backend: Backend, stored: StoredFrame, context: CodecContext, out: memoryview
    ) -> None:
        """Read, verify and decode one chunk into `out`, whose length is that of the chunk.

        Raises:
            DamagedError: The chunk, or one of its bases, differs from what was written.
            PluginError: A codec is missing.
            StorageError: The store failed.
        """
        job, *bases = (self._job(link, context) for link in stored.links())
        job.bases = tuple(bases)
        self._frames.decode_chunk(job, _stored_bytes(backend, job.links), out)

    def _job(self, stored: StoredFrame, context: CodecContext) -> FrameJob[CodecChain]:
        frame, blob = stored.frame, stored.blob.name
        chain = self._chain(stored.chain) if stored.chain else None
        if chain is not None:
            check_length(frame, chain, blob)
        whole = (ByteRange(0, frame.length),)
        return FrameJob(frame, blob, stored.block_bytes, chain, context, whole)

    def _chain(self, records: Chain) -> CodecChain:
        key = repr(records)
        with self._lock:
            if key not in self._chains:
                self._chains[key] = decoding_chain(records, self._registry)
            return self._chains[key]


def _stored_bytes(backend: Backend, links: Sequence[FrameJob[CodecChain]]) -> Iterator[memoryview]:
    """Yield the stored bytes of frames, last first.

    Reads in batches of at most 64 MiB; a longer frame is read alone.
    """
    unread = list(links)
    while unread:
        batch = [unread.pop()]
        while unread and sum(j.frame.length for j in (*batch, unread[-1])) <= _TOGETHER_BYTES:
            batch.append(unread.pop())
        memory = [memoryview(bytearray(job.frame.length)) for job in batch]
        backend.read(
            [
                ReadRequest(job.blob, job.frame.offset, view)
                for job, view in zip(batch, memory, strict=True)
            ]
        )
        while memory:
            yield memory.pop(0)

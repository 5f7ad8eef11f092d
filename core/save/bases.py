"""Finds the base of a save: the earlier checkpoint against which codecs encode its chunks.

The base is the newest checkpoint on the save's backend whose step is not above the save's. Its
chunks come from host memory if this process kept them after its last save, else from the store. A
chain of deltas has at most `max_chain` links.
"""

from __future__ import annotations

import logging
import mmap
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.survey import has_files, is_whole, read_commit, sizes_of
from penstock.core.concurrency.copy_bytes import copy_bytes
from penstock.core.concurrency.workers import local_ranks
from penstock.core.errors import BlobNotFoundError, DamagedError, PenstockError
from penstock.core.format.blocks import frame_blocks
from penstock.core.format.records import BaseEntry, commit_name
from penstock.core.pipeline.codec_chain import checksum, mismatches
from penstock.core.pipeline.staging import ThreadMemory, available_memory
from penstock.core.plan.earlier_frames import EarlierFrames, planned_keys, with_contexts
from penstock.core.plan.save import context_of, elements_of
from penstock.core.save.manifest import chain_record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from penstock.core.abc import Backend, CodecContext
    from penstock.core.config.model import Deltas
    from penstock.core.format.records import CommitRecord
    from penstock.core.pipeline.chunks import ChunkResult
    from penstock.core.pipeline.codec_chain import CodecChain
    from penstock.core.plan.earlier_frames import ChunkKey, StoredFrame
    from penstock.core.plan.save import SavePlan
    from penstock.core.restore.earlier import EarlierReader
    from penstock.core.types import ObjectPath, Region

log = logging.getLogger("penstock")

_MEMORY_SHARE = 4  # by default, a state above a quarter of the memory is not kept


class KeptChunks:
    """Keeps the frames and chunks of this process's newest checkpoint, for one save at a time.

    While a save runs, its chunks replace those of the previous checkpoint one by one, so memory for
    one state is enough. A failed save leaves chunks of both, so a chunk serves as a base only if
    its checksum equals its frame's.
    """

    def __init__(self) -> None:
        self._uid = ""
        self._frames = EarlierFrames()
        self._views: dict[ChunkKey, memoryview] = {}
        self._lock = threading.Lock()  # guards `_views`

    @property
    def size_bytes(self) -> int:
        """The bytes of memory that the chunks take."""
        with self._lock:
            return sum(view.nbytes for view in self._views.values())

    def frames_of(self, uid: str) -> EarlierFrames | None:
        """Return the frames of the checkpoint `uid`; None if another is kept."""
        return self._frames if uid and uid == self._uid else None

    def view(self, key: ChunkKey) -> memoryview | None:
        """Return the kept bytes of a chunk."""
        with self._lock:
            return self._views.get(key)

    def keep(self, key: ChunkKey, data: memoryview) -> None:
        """Replace the bytes of a chunk."""
        view = self.view(key)
        if view is None or view.nbytes != data.nbytes:
            view = memoryview(mmap.mmap(-1, data.nbytes))
            with self._lock:
                self._views[key] = view
        copy_bytes(view, data)

    def committed(self, uid: str, frames: EarlierFrames) -> None:
        """Note that the kept chunks belong to the checkpoint `uid`, which has these frames."""
        with self._lock:
            self._views = {key: view for key, view in self._views.items() if key in frames.by_key}
        self._uid, self._frames = uid, frames

    def drop(self) -> None:
        """Drop the bytes of all chunks; the frames stay known."""
        with self._lock:
            self._views = {}


class ChosenBase(NamedTuple):
    """The base of a save, which one rank chooses for all.

    Attributes:
        uid: The uid of the checkpoint.
        step: Its step.
        generation: Its generation.
        encodes: Whether chunks are encoded against it; if not, they only share its frames.
    """

    uid: str
    step: int
    generation: int
    encodes: bool


class SaveBases:
    """Gives the bases of one save. The save thread chooses; the workers ask for single chunks.

    A damaged earlier checkpoint never fails a save: errors are logged, and chunks are stored whole.
    With several ranks, rank 0 chooses, and its intent protects the base. Each rank finds the frames
    of its own chunks, even if other ranks stored them.
    """

    def __init__(
        self,
        plan: SavePlan,
        chains: Sequence[CodecChain | None],
        *,
        step: int,
        kept: KeptChunks,
        earlier: EarlierReader,
        deltas: Deltas,
        share: bool,
        block_bytes: int,
    ) -> None:
        """Prepare for a save.

        Args:
            plan: The chunks of the save.
            chains: Codec chains by number; None is raw.
            step: The step of the save; no later checkpoint can be its base.
            kept: The chunks in memory.
            earlier: Reads earlier checkpoints.
            deltas: The limits on chain length and on memory for the base.
            share: Whether to reuse chunks of the base instead of storing them again.
            block_bytes: The bytes per checksum in raw frames of the save.
        """
        self._plan = plan
        self._step = step
        self._kept = kept
        self._earlier = earlier
        self._deltas = deltas
        self._block_bytes = block_bytes
        self._shares = share
        self._chains = [chain_record(chain) for chain in chains]
        self._needs_base = [chain is not None and chain.needs_base for chain in chains]
        limit = deltas.memory_bytes
        if limit is None:
            limit = (available_memory() + kept.size_bytes) // _MEMORY_SHARE // local_ranks()
        self._memory_limit = limit
        self._keys: Mapping[int, ChunkKey] = {}
        self._keeps = False
        self._backend: Backend | None = None
        self._record: CommitRecord | None = None
        self._own = EarlierFrames()  # the base's frames that this process stored itself
        self._listed = EarlierFrames()  # those that it read in the base's manifest
        self._sizes: Mapping[str, int] | None = None
        self._encodes = False
        self._memory = ThreadMemory()

    @property
    def references(self) -> Collection[str]:
        """The uids that the intent of the save references."""
        record = self._record
        return () if record is None else {record.uid, *record.references}

    def choose(self, backend: Backend) -> Collection[str]:
        """Choose the base; return `references`."""
        if not self._shares and not any(self._needs_base):
            return ()
        try:
            # After a return to an older step, the later steps belong to an abandoned course of
            # training, and may be damaged.
            record = Catalog(backend).newest(up_to=self._step)
        except PenstockError as error:
            log.warning("this save refers to no earlier checkpoint: %s", str(error))
            return ()
        encodes = record is not None and self._age_above(record) < self._deltas.every
        if record is None or not (encodes or self._shares):
            return ()
        self._encodes = encodes
        self._backend, self._record = backend, record
        return self.references

    def confirm(self) -> None:
        """Drop the base if its commit record is gone. Call this after the intent is published.

        A deletion that starts later sees the intent and keeps the base's data. A save never refers
        to files that the base has lost for other reasons, since no reader could read them.
        """
        record, backend = self._record, self._backend
        if record is None or backend is None:
            return
        try:
            if is_whole(backend, record):
                self._sizes = sizes_of(backend, record)
                if not has_files(backend, record, self._sizes):
                    self._warn_of_lost_files(record)
                return
            log.info("step %d was just deleted: this save has no base", record.step)
        except PenstockError as error:
            log.warning("this save refers to no earlier checkpoint: %s", str(error))
        self._record = None

    @property
    def chosen(self) -> ChosenBase | None:
        """The base that rank 0 sends to the other ranks; None if there is none."""
        record = self._record
        if record is None:
            return None
        return ChosenBase(record.uid, record.step, record.generation, self._encodes)

    def adopt(self, backend: Backend, chosen: ChosenBase) -> None:
        """Use the base that rank 0 has chosen and confirmed.

        A rank that does not find the base stores its chunks whole.
        """
        try:
            record = read_commit(backend, commit_name(chosen.step, chosen.generation))
        except PenstockError as error:
            log.warning("this rank refers to no earlier checkpoint: %s", str(error))
            return
        if record.uid == chosen.uid:
            self._encodes = chosen.encodes
            self._backend, self._record = backend, record
        else:
            log.info("step %d was just overwritten: this rank has no base", record.step)

    def find(self, chunks: Collection[int] | None = None) -> None:
        """Find the frames that chunks of the save may refer to.

        Args:
            chunks: The numbers of the chunks that this rank writes; the plan has their spans. None:
                this process saves alone.
        """
        mine = range(len(self._plan.chunks)) if chunks is None else sorted(chunks)
        needing = [n for n in mine if self._needs_base[self._plan.chunks[n].chain]]
        need_bytes = sum(self._plan.chunks[number].length for number in needing)
        self._keeps = bool(needing) and need_bytes <= self._memory_limit
        if not self._keeps:
            self._kept.drop()
        # A process that saves alone searches the whole base for shared chunks. One of many ranks
        # looks only for its own chunks: if each read all parts, they would read the manifest a
        # thousand times.
        by_key = mine if self._shares and chunks is not None else needing
        self._keys = planned_keys(self._plan, by_key)
        record, backend = self._record, self._backend
        if record is None or backend is None or not (self._keys or self._shares):
            return
        try:
            self._find(backend, record, everywhere=chunks is None)
        except PenstockError as error:
            log.warning("this save refers to no earlier checkpoint: %s", str(error))
            self._give_up()

    def _find(self, backend: Backend, record: CommitRecord, *, everywhere: bool) -> None:
        own = self._kept.frames_of(record.uid)
        frames: Mapping[ChunkKey, StoredFrame] = {}
        if own is not None:
            self._own = own
        if everywhere and own is None:
            frames = self._earlier.frames(backend, record)
        elif not everywhere:
            # Another rank may have written chunks that this rank did not write last time.
            chunks, masters = self._plan.chunks, self._plan.masters
            missing = [
                key
                for number, key in self._keys.items()
                if own is None
                or (key not in own.by_key and chunks[number].pieces[0].item not in masters)
            ]
            if missing:
                frames = self._earlier.frames(backend, record, _regions_of(missing))
        self._listed = EarlierFrames(frames, with_contexts(frames) if self._shares else ())
        if self._sizes is None:
            every = [*frames.values(), *self._own.by_key.values()]
            self._sizes = self._sizes_of_blobs(backend, every)

    def _sizes_of_blobs(self, backend: Backend, frames: Iterable[StoredFrame]) -> dict[str, int]:
        """Return the sizes of the frames' blobs, with one `stat` each, since they are few."""
        sizes: dict[str, int] = {}
        names = {link.blob.name: link.blob.length for stored in frames for link in stored.links()}
        for name in names:
            with suppress(BlobNotFoundError):
                sizes[name] = backend.stat(name).size_bytes
        if sizes != names and self._record is not None:
            self._warn_of_lost_files(self._record)
        return sizes

    def refer(self, results: Iterable[ChunkResult]) -> bool:
        """Return whether some of these chunks are encoded against the base."""
        return any(
            result.base is not None
            or (result.shared is not None and result.shared.base is not None)
            for result in results
        )

    def entry(self) -> BaseEntry | None:
        """Return the commit record's entry for the base, if there is a base."""
        record = self._record
        if record is None:
            return None
        return BaseEntry(record.uid, record.step, self._age_above(record))

    def shared(self, index: int, content: int, chain: int) -> StoredFrame | None:
        """Return a stored frame that has a chunk's content, or None. Thread-safe.

        Args:
            index: The number of the chunk.
            content: The `content_hash` of its bytes.
            chain: The number of the chain that would encode it.
        """
        chunk = self._plan.chunks[index]
        context, elements = context_of(self._plan, chunk), elements_of(self._plan, chunk)
        wanted = content, context, elements, self._chains[chain]
        own = self._own.equal(*wanted)
        stored = own or self._listed.equal(*wanted)
        if stored is None or not self._may_list(stored):
            return None
        # A checkpoint without a base refers to whole frames only.
        if stored.base is not None and not self._encodes:
            return None
        if stored.depth > self._deltas.max_chain:
            return None
        # Read the frame before referring to it. Otherwise one damaged frame would spread to every
        # later checkpoint, although each save has the bytes to write it again.
        return stored if own is not None or self._read(stored, context) is not None else None

    def base_of(self, index: int) -> tuple[StoredFrame, memoryview] | None:
        """Return the frame and the bytes of a chunk's base; None if it must be encoded whole.

        Thread-safe. The bytes stay unchanged until this thread calls `keep` for the chunk, or
        `base_of` for another one.
        """
        key = self._keys[index]
        if not self._encodes:
            return None
        own = self._own.by_key.get(key)
        newest = stored = own or self._listed.by_key.get(key)
        chunk = self._plan.chunks[index]
        while stored is not None and stored.depth >= self._deltas.max_chain:
            stored = stored.base
        if stored is None or stored.frame.raw_length != chunk.length or not self._may_list(stored):
            return None
        view = self._kept.view(key) if own is not None and stored is newest else None
        # A chunk encoded against bytes that the store does not have would never decode. The memory
        # may belong to a save that failed later, a lossy codec may have stored other bytes, and
        # faulty memory may flip bits.
        if view is not None and _is_chunk_of(stored, view):
            return stored, view
        out = self._read(stored, context_of(self._plan, chunk))
        return None if out is None else (stored, out)

    def keep(self, index: int, view: memoryview) -> None:
        """Keep the bytes of an encoded chunk as the base for the next save. Thread-safe."""
        if self._keeps:
            self._kept.keep(self._keys[index], view)

    def committed(self, uid: str, frames: Mapping[int, StoredFrame]) -> None:
        """Note that the save has committed; `frames` has its chunks' frames by number."""
        if not self._keys and not self._shares:
            return
        known = {key: frames[n] for n, key in self._keys.items() if n in frames}
        chunks = self._plan.chunks
        contexts = ((context_of(self._plan, chunks[n]), stored) for n, stored in frames.items())
        self._kept.committed(uid, EarlierFrames(known, contexts if self._shares else ()))

    # ------------------------------------------------------------------------------------------

    def _read(self, stored: StoredFrame, context: CodecContext) -> memoryview | None:
        """Return a frame's chunk from the store. On failure, drop the base and return None."""
        backend = self._backend
        assert backend is not None
        out = self._memory.take(context.raw_length)
        try:
            self._earlier.read(backend, stored, context, out)
        except PenstockError as error:
            self._warn(error)
            return None
        return out

    @staticmethod
    def _age_above(record: CommitRecord) -> int:
        return 1 + (record.base.age if record.base is not None else 0)

    def _may_list(self, stored: StoredFrame) -> bool:
        """Return whether the part can list a frame: its blobs exist, and raw block sizes match."""
        sizes = self._sizes or {}
        return all(
            (link.chain or link.block_bytes == self._block_bytes)
            and sizes.get(link.blob.name) == link.blob.length
            for link in stored.links()
        )

    def _warn(self, error: PenstockError) -> None:
        record = self._record
        if record is not None:
            problem = "is damaged" if isinstance(error, DamagedError) else "cannot be read"
            log.warning(
                "step %d %s, so this save stops referring to it: %s",
                record.step,
                problem,
                str(error),
            )
        self._give_up()

    @staticmethod
    def _warn_of_lost_files(record: CommitRecord) -> None:
        log.warning(
            "step %d has lost some of its files, or their lengths are wrong: this save does not "
            "refer to them, and `penstock verify` names them",
            record.step,
        )

    def _give_up(self) -> None:
        self._own = self._listed = EarlierFrames()


def _regions_of(keys: Iterable[ChunkKey]) -> dict[ObjectPath, set[Region]]:
    """Return the regions that contain the pieces of chunks, by object path."""
    regions: dict[ObjectPath, set[Region]] = {}
    for key in keys:
        for piece in key:
            regions.setdefault(piece.path, set()).add(piece.region)
    return regions


def _is_chunk_of(stored: StoredFrame, view: memoryview) -> bool:
    """Return whether `view` has the bytes that the frame decodes to."""
    frame = stored.frame
    if stored.chain:
        return checksum(view) == frame.raw_checksum
    blocks = frame_blocks(frame.offset, frame.length, stored.block_bytes)
    return view.nbytes == frame.length and not mismatches(view, blocks, frame.checksums)

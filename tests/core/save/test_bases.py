"""The base of a save: which checkpoint, and which of its frames serve a chunk."""

from dataclasses import replace

import numpy as np
import pytest
from tests.core.manifests import UID
from tests.core.planned import NoBytes, planned
from tests.core.stored_ranks import BLOCK_BYTES, STEP, store_ranks

from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.core.catalog.catalog import Catalog
from penstock.core.config.model import Deltas
from penstock.core.errors import StorageError
from penstock.core.format.records import BaseEntry, blob_name, commit_name
from penstock.core.pipeline.codec_chain import CodecChain, content_hash
from penstock.core.plan.earlier_frames import EarlierFrames, planned_keys, with_contexts
from penstock.core.plan.save import plan_save
from penstock.core.plugins.registry import Registry
from penstock.core.restore.earlier import EarlierReader
from penstock.core.save.bases import ChosenBase, KeptChunks, SaveBases
from penstock.core.types import Region, WriteRequest
from penstock.testing.faults import Fault, FaultyBackend

DATA = np.arange(3000, dtype=np.float32)
OTHER = DATA[::-1].copy()
BLOB = blob_name(UID, 0, 0, "raw")
BASE = ChosenBase(UID, STEP, 0, encodes=True)
EARLIER = EarlierReader(Registry())


@pytest.fixture
def store():
    """A store with one checkpoint, of one array."""
    backend = FaultyBackend(MemoryBackend(MemoryConfig()))
    store_ranks(backend, [[(("w",), DATA, [Region.whole(DATA.shape)])]])
    return backend


def plan_of(chain):
    source = NoBytes(DATA.nbytes)
    one = planned(source, itemsize=4, path=("w",), dtype="float32", chain=chain)
    return plan_save([one], chunk_bytes=1 << 20)


def bases_of(
    *, step=STEP + 1, kept=None, share=False, block_bytes=BLOCK_BYTES, delta=True, **deltas
):
    """The bases of a save of the same array."""
    return SaveBases(
        plan_of(int(delta)),
        [None, CodecChain([Registry().codec("delta", {})]) if delta else None],
        step=step,
        kept=kept or KeptChunks(),
        earlier=EARLIER,
        deltas=Deltas(**deltas),
        share=share,
        block_bytes=block_bytes,
    )


def found(store, **options):
    """Chosen, confirmed and looked-up bases."""
    bases = bases_of(**options)
    bases.choose(store)
    bases.confirm()
    bases.find()
    return bases


def kept_of(store, data):
    """The chunks of the process that saved the checkpoint, with `data` in memory."""
    (stored,) = EARLIER.frames(store, Catalog(store).record(STEP)).values()
    frame = replace(stored.frame, content=content_hash(memoryview(DATA).cast("B")))
    frames = {planned_keys(plan_of(1), [0])[0]: replace(stored, frame=frame)}
    kept = KeptChunks()
    kept.keep(*frames, memoryview(data).cast("B"))
    kept.committed(UID, EarlierFrames(frames, with_contexts(frames)))
    return kept


def put(store, data):
    """Replace the blob of the checkpoint."""
    store.delete([BLOB])
    writer = store.create(BLOB)
    writer.write([WriteRequest(0, (memoryview(data),))])
    writer.seal(len(data))


def test_base_is_the_newest_checkpoint_and_its_chunk_comes_from_the_store(store):
    bases = bases_of()
    assert bases.choose(store) == {UID}
    bases.confirm()
    bases.find()
    assert bases.chosen == BASE
    assert bases.entry() == BaseEntry(UID, STEP, 1)
    stored, view = bases.base_of(0)
    assert stored.blob.name == BLOB
    assert bytes(view) == DATA.tobytes()


@pytest.mark.parametrize(
    "options", [{"delta": False}, {"step": STEP - 1}, {"every": 1}], ids=["raw", "older", "due"]
)
def test_save_has_no_base(store, options):
    bases = bases_of(**options)
    assert bases.choose(store) == ()
    bases.confirm()
    bases.find()
    assert bases.chosen is None
    assert bases.entry() is None


def test_due_whole_checkpoint_still_shares(store):
    bases = found(store, kept=kept_of(store, DATA), share=True, every=1)
    assert bases.chosen == BASE._replace(encodes=False)
    assert bases.base_of(0) is None
    content = content_hash(memoryview(DATA).cast("B"))
    assert bases.shared(0, content, 0).blob.name == BLOB
    assert bases.shared(0, content + 1, 0) is None


def test_store_without_listing_costs_only_the_base(store, caplog):
    store.add(Fault("list", times=None, error=StorageError("away")))
    assert bases_of().choose(store) == ()
    assert "refers to no earlier checkpoint: away" in caplog.text


def test_base_deleted_before_the_intent_is_dropped(store):
    bases = bases_of()
    bases.choose(store)
    store.delete([commit_name(STEP, 0)])
    bases.confirm()
    bases.find()
    assert bases.chosen is None


def test_frames_in_a_lost_or_truncated_blob_are_no_bases(store, caplog):
    for damage in (lambda: store.delete([BLOB]), lambda: put(store, DATA.tobytes()[:-1])):
        damage()
        caplog.clear()
        assert found(store).base_of(0) is None
        assert f"step {STEP} has lost some of its files" in caplog.text


def test_damaged_base_is_dropped_by_the_whole_save(store, caplog):
    bases = found(store)
    put(store, OTHER.tobytes())
    assert bases.base_of(0) is None
    assert f"step {STEP} is damaged" in caplog.text
    put(store, DATA.tobytes())
    assert bases.base_of(0) is None


def test_raw_frame_with_other_blocks_is_no_base(store):
    assert found(store, block_bytes=2 * BLOCK_BYTES).base_of(0) is None


def test_chunk_in_memory_is_a_base_only_if_the_store_matches(store):
    same = found(store, kept=kept_of(store, DATA))
    changed = found(store, kept=kept_of(store, OTHER))
    assert bytes(changed.base_of(0)[1]) == DATA.tobytes()
    store.add(Fault("read", times=None, error=StorageError("away")))
    assert bytes(same.base_of(0)[1]) == DATA.tobytes()
    assert changed.base_of(0) is None


def test_rank_adopts_only_the_base_named_by_rank_0(store):
    for other in (BASE._replace(uid="f" * 32), BASE._replace(step=STEP + 1)):
        bases = bases_of()
        bases.adopt(store, other)
        assert bases.chosen is None
    bases.adopt(store, BASE)
    bases.find({0})
    assert bases.chosen == BASE
    assert bytes(bases.base_of(0)[1]) == DATA.tobytes()


def test_rank_shares_no_chunk_of_a_truncated_or_lost_blob(store, caplog):
    """It stored the chunk, so it would reference it without reading it."""
    kept, content = kept_of(store, DATA), content_hash(memoryview(DATA).cast("B"))

    def shared():
        bases = bases_of(kept=kept, share=True)
        bases.adopt(store, BASE)
        bases.find({0})
        return bases.shared(0, content, 0)

    assert shared().blob.name == BLOB
    for damage in (lambda: put(store, DATA.tobytes()[:-1]), lambda: store.delete([BLOB])):
        damage()
        caplog.clear()
        assert shared() is None
        assert f"step {STEP} has lost some of its files" in caplog.text


def test_chunks_of_a_save_are_the_base_of_the_next_once_it_has_committed(store):
    kept = KeptChunks()
    bases = found(store, kept=kept)
    stored, _ = bases.base_of(0)
    bases.keep(0, memoryview(OTHER).cast("B"))
    assert kept.frames_of(UID) is None
    bases.committed("e" * 32, {0: stored})
    ((key, frame),) = kept.frames_of("e" * 32).by_key.items()
    assert frame is stored
    assert bytes(kept.view(key)) == OTHER.tobytes()
    assert kept.size_bytes == OTHER.nbytes


def test_state_larger_than_the_limit_is_not_kept(store):
    kept = kept_of(store, DATA)
    bases = found(store, kept=kept, memory_bytes=DATA.nbytes - 1)
    bases.keep(0, memoryview(OTHER).cast("B"))
    assert kept.size_bytes == 0
    assert bytes(bases.base_of(0)[1]) == DATA.tobytes()

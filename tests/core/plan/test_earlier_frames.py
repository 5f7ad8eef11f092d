"""Frames of an earlier checkpoint by content: only those that a reader decodes to the same."""

import pytest
from tests.core.planned import NoBytes, planned

from penstock.core.abc.codec import CodecContext
from penstock.core.format.records import BlobRecord, CodecRecord, Frame, blob_name
from penstock.core.plan.earlier_frames import EarlierFrames, StoredFrame, planned_keys
from penstock.core.plan.save import ShardSpan, plan_save
from penstock.core.types import Region

ZSTD, LZ4 = CodecRecord("zstd", 1, {"level": 3}), CodecRecord("lz4", 1, {})
LENGTH = 400
PLAIN = CodecContext("float32", 4, (100,), 0, LENGTH)
OLD, NEW = "0" * 32, "1" * 32


def blob(uid=OLD, kind="enc", length=1000):
    return BlobRecord(blob_name(uid, 0, 0, kind), length)


def stored(content=7, *, chain=(ZSTD,), where=None, elements=None, offset=0, length=900, base=None):
    frame = Frame(0, offset, length, LENGTH, len(chain), (1,), 2, (), elements, None, content)
    return StoredFrame(frame, where or blob(), chain, 4096, base)


def find(frames, content=7, context=PLAIN, *, elements=None, chain=(ZSTD,)):
    return EarlierFrames(shared=frames).equal(content, context, elements, chain)


def test_chunk_key_locates_its_bytes_in_the_whole_tensor():
    """Two ranks hold the halves of a tensor; neither half may be the base of the other."""
    keys = []
    for offset in (0, 50):
        plan = plan_save([planned(NoBytes(LENGTH), itemsize=4, dtype="float32")], chunk_bytes=4096)
        plan.spans[0] = (ShardSpan(0, Region((offset,), (50,))),)
        keys += planned_keys(plan, [0]).values()
    (first,), (second,) = keys
    assert (first.region.offsets, second.region.offsets) == ((0,), (50,))
    assert first._replace(region=second.region) == second


def test_a_frame_is_found_by_content_context_and_chain():
    frame = stored()
    assert find([(PLAIN, frame)]) is frame
    assert find([(PLAIN, frame)], content=8) is None
    assert find([(PLAIN, stored(None))]) is None


@pytest.mark.parametrize(
    "context",
    [
        CodecContext("float16", 4, (100,), 0, LENGTH),
        CodecContext("float32", 8, (100,), 0, LENGTH),
        CodecContext("float32", 4, (10, 10), 0, LENGTH),
        CodecContext("float32", 4, (100,), 4, LENGTH),
        CodecContext("float32", 4, (100,), 0, LENGTH + 1),
    ],
)
def test_a_chunk_that_codecs_would_see_differently_is_not_equal(context):
    assert find([(PLAIN, stored())], context=context) is None


def test_a_slab_that_readers_know_by_element_is_no_single_tensor():
    elements = ("float32", 4)
    assert find([(PLAIN, stored(elements=elements))]) is None
    assert find([(PLAIN, stored())], elements=elements) is None
    assert find([(PLAIN, stored(elements=elements))], elements=elements) is not None


@pytest.mark.parametrize(
    ("has", "wanted", "fits"),
    [
        ((ZSTD,), (LZ4,), False),
        ((ZSTD,), (ZSTD, LZ4), True),  # lz4 declined
        ((LZ4, ZSTD), (ZSTD, LZ4), False),
        ((ZSTD, LZ4), (ZSTD,), False),
        ((ZSTD,), (), False),
        ((CodecRecord("zstd", 1, {"level": 9}),), (ZSTD,), False),
    ],
)
def test_the_codecs_are_those_of_the_current_rules(has, wanted, fits):
    assert (find([(PLAIN, stored(chain=has))], chain=wanted) is not None) is fits


@pytest.mark.parametrize(("length", "worth"), [(500, True), (499, False)])
def test_a_save_less_than_half_used_is_not_kept_alive(length, worth):
    old = stored(length=length)
    own = stored(8, where=blob(NEW), length=1000)
    assert (find([(PLAIN, old), (PLAIN, own)]) is not None) is worth
    assert find([(PLAIN, old), (PLAIN, own)], content=8) is own

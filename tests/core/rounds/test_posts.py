"""Posts of ranks: round trips, bounds, and malformed bytes."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import FormatError, RankError, RestoreError, SaveError
from penstock.core.rounds import posts
from penstock.core.rounds.posts import (
    At,
    DrainedPost,
    DrainsPost,
    DuePost,
    GoPost,
    Outbox,
    Result,
    ResultPost,
    SlotPost,
    Verdict,
)
from penstock.core.rounds.standstill import CountedLooks, Standstill

COUNTS = st.integers(0, 1 << 40)
KINDS = st.sampled_from(["save", "restore"])
DIGEST = "a" * 64
PART = {"length": 1 << 40, "head": DIGEST, "hashes": DIGEST, "bytes": 1 << 40, "blobs": 99}


@given(st.builds(SlotPost, COUNTS, KINDS, st.sampled_from(At), COUNTS, st.text(max_size=30)))
def test_slots_decode(post):
    if len(post.host.encode("utf-8", "surrogatepass")) < 50:
        assert posts.decode(SlotPost, posts.encode(post)) == post


@given(st.text())
def test_a_decision_has_at_most_512_bytes(text):
    data = posts.encode(Verdict(commit=False, rank=9999, host=text, cause=text))
    assert len(data) <= posts.POST_BYTES
    read = posts.decode(Verdict, data)
    assert text.startswith(read.cause.removesuffix("..."))
    assert read.rank == 9999


@given(st.text())
def test_a_result_has_at_most_512_bytes(text):
    data = posts.encode(ResultPost(Result.UNKNOWN, text))
    assert len(data) <= posts.POST_BYTES
    assert posts.decode(ResultPost, data).result is Result.UNKNOWN


def test_a_slot_of_a_sealed_rank_has_at_most_512_bytes():
    post = SlotPost(10**9, "restore", At.SEALED, 10**12, "n" * 64, 1 << 45, 1 << 45, PART)
    assert len(posts.encode(post)) <= posts.POST_BYTES


def test_terms_round_trip_and_too_large_ones_are_refused():
    post = GoPost("save", {"step": 100, "uid": "0" * 32, "retention": {"keep_last": 3}})
    assert posts.decode(GoPost, posts.encode(post)) == post
    with pytest.raises(FormatError, match="a post has at most 16384"):
        posts.encode(GoPost("save", {"names": "x" * 20_000}))


@pytest.mark.parametrize("due", [False, True])
def test_a_promise_on_the_next_save_round_trips(due):
    post = DuePost((1 << 53) - 1, due=due)
    assert posts.decode(DuePost, posts.encode(post)) == post


@pytest.mark.parametrize(
    "kind", [SlotPost, GoPost, Verdict, ResultPost, DrainsPost, DrainedPost, DuePost]
)
def test_malformed_bytes_are_refused(kind):
    for data in (b"", b"{}", b"[1]", b"\xff", b'{"v":1}', b'{"v":0,"commit":1}'):
        with pytest.raises(FormatError):
            posts.decode(kind, data)


def test_another_version_is_refused_with_the_remedy():
    data = posts.encode(Verdict(commit=True)).replace(b'"v":0', b'"v":7')
    with pytest.raises(FormatError, match="use one version everywhere"):
        posts.decode(Verdict, data)


def test_a_rank_error_is_a_save_and_restore_error_and_pickles():
    error = RankError("step 3 was not saved: rank 17", 17, "node3", "No space left")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, SaveError)
    assert isinstance(copy, RestoreError)
    assert (str(copy), copy.rank, copy.host, copy.cause) == (
        str(error),
        17,
        "node3",
        "No space left",
    )


def test_time_between_two_polls_counts_up_to_a_limit():
    looks = CountedLooks(2.0)
    watched = Standstill(looks, [1], 5.0)
    for now_s in (100.0, 101.0, 900.0, 901.5):
        looks.look(now_s)
    assert looks.counted_s == 1.0 + 2.0 + 1.5
    assert not watched.is_over(1)
    looks.look(902.0)
    assert watched.is_over(1)
    watched.moved(1)
    assert not watched.is_over(1)


def test_posts_wait_until_the_store_takes_them():
    outbox = Outbox(7, SlotPost(0, "save", At.HERE, done=1, total=2))
    assert outbox.is_empty
    outbox.put_slot()
    outbox.moved()
    ((key, stale),) = outbox.waiting
    outbox.put_slot()
    outbox.taken(key, stale)  # was replaced while it was sent
    ((again, value),) = outbox.waiting
    assert again == key == posts.slot_key(7)
    assert posts.decode(SlotPost, value) == SlotPost(0, "save", At.HERE, 1, done=1, total=2)
    outbox.taken(key, value)
    assert outbox.is_empty


def test_a_part_that_will_not_fit_at_later_beats_is_refused():
    outbox = Outbox(0, SlotPost(0, "save", At.WORKING))
    room = posts.NEW_STRUCTURE_BYTES - len(posts.encode(outbox.fitting(At.SEALED, {"x": ""})))
    with pytest.raises(FormatError, match="16384"):
        outbox.fitting(At.SEALED, {"x": "x" * room})
    assert outbox.slot.at is At.WORKING
    outbox.put("key", GoPost("save"))
    with pytest.raises(FormatError):
        outbox.put("key", GoPost("save", {"x": "x" * 20_000}))
    assert [key for key, _ in outbox.waiting] == ["key"]

"""Reads become requests that cover every byte, merge near ranges, and read few gaps."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.fsspec.store import plan_spans
from penstock.core.types import ReadRequest

RANGES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 5000), st.integers(0, 900)), max_size=40
)


def planned(ranges, piece, gap):
    requests = [ReadRequest(n, o, memoryview(bytearray(size))) for n, o, size in ranges]
    return requests, plan_spans(requests, piece_bytes=piece, gap_bytes=gap)


@given(RANGES, st.integers(1, 700), st.integers(0, 100))
def test_every_target_is_filled_and_every_span_is_bounded(ranges, piece, gap):
    requests, spans = planned(ranges, piece, gap)
    content = {name: bytes((i * 7 + ord(name)) % 251 for i in range(6000)) for name in "ab"}
    for span in spans:
        assert span.stop - span.start <= piece
        at, waste, wanted = span.start, 0, 0
        for part in span.pieces:
            assert 0 <= part.offset - at <= gap
            waste += part.offset - at
            wanted += part.target.nbytes
            part.target[:] = content[span.name][part.offset : part.stop]
            at = part.stop
        assert waste <= gap + wanted // 20
    for request in requests:
        stop = request.offset + request.target.nbytes
        assert bytes(request.target) == content[request.name][request.offset : stop]


def test_many_distant_small_ranges_do_not_read_their_gaps():
    _, spans = planned([("a", n * 1000, 1) for n in range(20)], 1 << 20, 999)
    assert sum(s.stop - s.start for s in spans) <= 20 + 10 * 999
    assert len(spans) == 10

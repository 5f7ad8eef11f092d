"""Decoders that get changed frames without a checksum check."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tests.codecs.fuzz_frames import CODECS, decode

CORPUS = Path(__file__).parents[1] / "corpus"


@given(st.sampled_from(CODECS), st.binary(max_size=48))
def test_a_changed_frame_is_refused_or_decoded_within_bounds(name, case):
    decode(name, case)


def test_frames_of_the_corpus_are_refused_or_decoded_within_bounds():
    for name in CODECS:
        cases = (CORPUS / f"{name}.txt").read_text().split()
        outcomes = {decode(name, bytes.fromhex(case))[1] for case in cases}
        assert "read" in outcomes
        assert len(outcomes) >= 3  # several checks were reached

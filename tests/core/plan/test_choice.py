"""Codecs are chosen by figures: of the store, of the cores, and of each codec for each class."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.plan.choice import CANDIDATES, CodecChooser, Encoding, cores_left
from penstock.core.plugins.registry import default_registry

MIB = 1 << 20
NAME = "optimizer float32"
STORE = "s3://bucket/run"
FLOATSPLIT = Encoding(1.5, 1.7e9, is_sample=True)
LZ4 = Encoding(1.3, 4e9, is_sample=True)


def chooser(store_bytes_per_s=None, **encodings):
    """A chooser that knows the store and the codecs."""
    made = CodecChooser(tuple(encodings) or ("floatsplit",))
    made.begin_save()
    if store_bytes_per_s is not None:
        made.note_raw(STORE, 256 * MIB, 256 * MIB / store_bytes_per_s)
    for codec, encoding in encodings.items():
        made.note_sample(NAME, codec, encoding)
    return made


def test_a_slow_store_gets_the_smallest_frames():
    choice = chooser(0.21e9, floatsplit=FLOATSPLIT, lz4=LZ4).choose(NAME, STORE, 2)
    assert choice.codec == "floatsplit"
    assert choice.why == "floatsplit: 1.50x at 1.70 GB/s x 2 cores; the store takes 0.21 GB/s"
    assert (choice.encoding, choice.cores, choice.store_bytes_per_s) == (
        FLOATSPLIT,
        2,
        pytest.approx(0.21e9),
    )


def test_a_store_that_is_faster_than_the_cores_gets_raw_bytes():
    choice = chooser(5e9, floatsplit=FLOATSPLIT).choose(NAME, STORE, 2)
    assert choice.codec is None
    assert choice.why == (
        "raw: the store takes 5.00 GB/s; floatsplit: 1.50x at 1.70 GB/s x 2 cores"
    )


def test_a_faster_codec_is_chosen_where_a_smaller_one_cannot_keep_up():
    made = chooser(3e9, floatsplit=FLOATSPLIT, lz4=LZ4)
    assert made.choose(NAME, STORE, 1).codec == "lz4"
    assert made.choose(NAME, STORE, 4).codec == "floatsplit"


def test_of_two_that_gain_as_much_the_one_that_takes_less_of_the_cores_is_chosen():
    made = chooser(0.1e9, floatsplit=Encoding(1.31, 1e9), lz4=LZ4)
    assert made.choose(NAME, STORE, 2).codec == "lz4"


@pytest.mark.parametrize(("ratio", "codec"), [(1.04, None), (1.06, "floatsplit")])
def test_a_gain_of_a_few_percent_is_not_worth_decoding(ratio, codec):
    made = chooser(0.1e9, floatsplit=Encoding(ratio, 1e9))
    assert made.choose(NAME, STORE, 2).codec == codec


def test_what_gets_no_smaller_stays_raw():
    choice = chooser(0.1e9, floatsplit=Encoding(1.0, 1e9)).choose(NAME, STORE, 2)
    assert choice.codec is None
    assert choice.why == "raw: no codec makes it smaller; the store takes 0.10 GB/s"
    assert CodecChooser(()).needs_samples(NAME) is False


def test_an_unknown_store_gets_raw_bytes():
    made = chooser(floatsplit=FLOATSPLIT)
    assert made.needs_bandwidth(STORE)
    assert made.choose(NAME, STORE, 2).codec is None


def test_stores_and_classes_are_apart():
    made = chooser(0.1e9, floatsplit=FLOATSPLIT)
    assert made.needs_bandwidth("file:///disk")
    assert not made.needs_bandwidth(STORE)
    assert made.needs_samples("parameter bfloat16")
    assert not made.needs_samples(NAME)


def test_encoding_that_achieved_less_than_its_speed_counts_by_what_it_achieved():
    made = chooser(0.5e9, floatsplit=FLOATSPLIT)
    made.note_encoding(NAME, "floatsplit", Encoding(1.5, 1.7e9, 0.4e9))
    choice = made.choose(NAME, STORE, 2)
    assert choice.codec is None
    assert "0.40 GB/s achieved" in choice.why


def bandwidth(made):
    return made.choose(NAME, STORE, 1).store_bytes_per_s


def test_the_bandwidth_follows_the_store_by_the_bytes_that_tell_it():
    made = chooser(1e9, floatsplit=FLOATSPLIT)
    made.begin_save()
    made.note_raw(STORE, MIB, 1.0)  # too few to say anything
    assert bandwidth(made) == pytest.approx(1e9)
    made.note_raw(STORE, 64 * MIB, 64 * MIB / 2e9)
    assert bandwidth(made) == pytest.approx(1.5e9)
    made.begin_save()
    made.note_raw(STORE, 32 * MIB, 32 * MIB / 2.5e9)
    assert bandwidth(made) == pytest.approx(1.75e9)


def test_a_later_figure_of_one_save_replaces_the_earlier_one():
    made = chooser(1e9, floatsplit=FLOATSPLIT)
    made.note_raw(STORE, 256 * MIB, 256 * MIB / 2e9)
    assert bandwidth(made) == pytest.approx(2e9)


def test_figures_are_measured_again_after_eight_saves():
    made = chooser(1e9, floatsplit=FLOATSPLIT)
    for _ in range(7):
        made.begin_save()
        assert not made.needs_bandwidth(STORE)
        assert not made.needs_samples(NAME)
    made.begin_save()
    assert made.needs_bandwidth(STORE)
    assert made.needs_samples(NAME)


def test_a_class_that_changed_is_sampled_again():
    made = chooser(0.1e9, floatsplit=FLOATSPLIT, lz4=LZ4)
    made.note_encoding(NAME, "floatsplit", Encoding(1.4, 1.7e9, 2e9))
    assert not made.needs_samples(NAME)
    assert made.choose(NAME, STORE, 4).encoding == Encoding(1.45, 1.7e9, 2e9)
    made.note_encoding(NAME, "floatsplit", Encoding(1.45, 1.7e9, 1e9))
    assert made.choose(NAME, STORE, 4).encoding.achieved_bytes_per_s == 1.5e9
    made.note_encoding(NAME, "floatsplit", Encoding(1.1, 1.7e9, 2e9))
    assert made.needs_samples(NAME)


def test_a_few_bytes_go_into_the_blob_that_all_others_are_in():
    made = chooser(0.1e9, floatsplit=FLOATSPLIT)
    raw = made.choose_for_few()
    assert raw.codec is None
    chosen = made.choose(NAME, STORE, 2)
    assert made.note_choices({NAME: chosen}) == [NAME]
    assert made.choose_for_few().codec == "floatsplit"
    assert made.note_choices({NAME: chosen, "other int64": raw}) == ["other int64"]
    assert made.choose_for_few().codec is None
    assert made.note_choices({NAME: raw, "other int64": raw}) == [NAME]


def test_cores_are_those_that_training_leaves():
    assert cores_left(16, 3.5, 4) == 4
    assert cores_left(4, 1.5, 4) == 2.5
    assert cores_left(2, 2, 2) == 0.25
    assert cores_left(2, 0, 1) == 1


@given(
    store=st.floats(1e6, 1e11),
    cores=st.floats(0.25, 64),
    encodings=st.lists(
        st.tuples(st.floats(0.9, 100), st.floats(1e6, 1e11), st.floats(1e6, 1e11)), max_size=3
    ),
)
def test_what_is_chosen_is_expected_to_be_faster_than_raw_and_as_fast_as_any(
    store, cores, encodings
):
    found = {f"c{n}": Encoding(*figures) for n, figures in enumerate(encodings)}
    made = chooser(store, **found)
    choice = made.choose(NAME, STORE, cores)
    worth = {
        codec: min(
            cores * e.core_bytes_per_s,
            e.achieved_bytes_per_s,
            store * e.ratio,
        )
        for codec, e in found.items()
        if e.ratio > 1
    }
    best = max(worth.values(), default=0)
    if choice.codec is None:
        assert best < store * 1.09
    else:
        assert worth[choice.codec] >= store * 1.049
        assert worth[choice.codec] >= 0.969 * best


def test_all_candidates_are_installed_here_and_lossless():
    for name, options in CANDIDATES:
        codec = default_registry().codec(name, options)
        assert codec.lossless
        assert not codec.needs_base


def test_speed_is_that_of_the_cores_until_something_was_achieved():
    assert Encoding(1.5, 1e9).speed(3) == 3e9
    assert Encoding(1.5, 1e9, 2e9).speed(3) == 2e9
    assert Encoding(1.5, 1e9).achieved_bytes_per_s == math.inf

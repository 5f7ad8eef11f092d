"""`auto` chooses by one sample of each class and the rate of the store, and keeps its choice."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.pipeline.auto import CANDIDATES, Sample, StoreChoices, choose
from penstock.core.plugins.registry import default_registry

MIB = 1 << 20
NAME = "optimizer float32"
FLOATSPLIT = Sample(1.5, 1.7e9)
LZ4 = Sample(1.3, 4e9)


def chosen(store_bytes_per_s, cores=2, *, spare=False, **samples):
    return choose(NAME, samples, store_bytes_per_s=store_bytes_per_s, cores=cores, spare=spare)


def test_a_slow_store_gets_the_smallest_frames():
    choice = chosen(0.21e9, floatsplit=FLOATSPLIT, lz4=LZ4)
    assert choice.codec == "floatsplit"
    assert choice.why == "floatsplit: 1.50x at 1.70 GB/s x 2 cores; the store takes 0.21 GB/s"
    assert (choice.ratio, choice.encode_bytes_per_s, choice.cores) == (1.5, 3.4e9, 2)
    assert choice.store_bytes_per_s == 0.21e9


def test_a_store_that_is_faster_than_the_cores_gets_raw_bytes():
    choice = chosen(5e9, floatsplit=FLOATSPLIT)
    assert choice.codec is None
    assert choice.why == (
        "raw: the store takes 5.00 GB/s; floatsplit: 1.50x at 1.70 GB/s x 2 cores"
    )


def test_encoding_and_writing_alternate_without_a_spare_core():
    assert chosen(1.25e9, floatsplit=Sample(1.24, 1.7e9)).codec is None
    assert chosen(1.25e9, floatsplit=Sample(1.24, 1.7e9), spare=True).codec == "floatsplit"


def test_a_faster_codec_is_chosen_if_a_smaller_one_is_too_slow():
    samples = {"floatsplit": FLOATSPLIT, "lz4": LZ4}
    assert chosen(3e9, 1, spare=True, **samples).codec == "lz4"
    assert chosen(3e9, 4, spare=True, **samples).codec == "floatsplit"


@pytest.mark.parametrize(("ratio", "codec"), [(1.04, None), (1.06, "floatsplit")])
def test_a_gain_of_a_few_percent_is_not_worth_decoding(ratio, codec):
    assert chosen(0.001e9, floatsplit=Sample(ratio, 1e9)).codec == codec


def test_incompressible_data_stays_raw():
    choice = chosen(0.1e9, floatsplit=Sample(1.0, 1e9))
    assert choice.codec is None
    assert choice.why == "raw: no codec makes it smaller; the store takes 0.10 GB/s"


@given(
    store=st.floats(1e6, 1e11),
    cores=st.floats(0.25, 64),
    spare=st.booleans(),
    figures=st.lists(st.tuples(st.floats(0.9, 100), st.floats(1e6, 1e11)), max_size=3),
)
def test_the_choice_is_expected_to_be_faster_than_raw_and_any_other(store, cores, spare, figures):
    samples = {f"c{n}": Sample(*pair) for n, pair in enumerate(figures)}
    choice = chosen(store, cores, spare=spare, **samples)
    whole = max if spare else lambda *parts: sum(parts)
    took = {
        codec: whole(1 / (cores * sample.bytes_per_s), 1 / (store * sample.ratio))
        for codec, sample in samples.items()
    }
    if choice.codec is None:
        assert min(took.values(), default=1) > 0.95 / store
    else:
        assert took[choice.codec] == min(took.values()) < 0.953 / store


@pytest.mark.parametrize("factor", [0.4, 0.6, 1.9, 2.1])
def test_choices_are_made_again_when_the_rate_changes_by_a_factor_of_two(factor):
    choice = replace(chosen(1e8, floatsplit=FLOATSPLIT), bytes_raw=64 * MIB)
    store = StoreChoices(1e8, {NAME: choice})
    store.note_save(int(4e6), 0.09)  # too short to measure
    store.note_save(int(1e8 * factor), 1.0)
    has_changed = not 0.5 < factor < 2
    assert store.by_class[NAME].bytes_raw == (0 if has_changed else 64 * MIB)
    assert store.bytes_per_s == pytest.approx(1e8 * factor if has_changed else 1e8)


def test_an_all_raw_save_measures_the_store():
    store = StoreChoices()
    store.note_save(64 * MIB, 0.5)
    assert store.bytes_per_s == 128 * MIB


def test_all_candidates_are_installed_here_and_lossless():
    for name, options in CANDIDATES:
        codec = default_registry().codec(name, options)
        assert codec.lossless
        assert not codec.needs_base

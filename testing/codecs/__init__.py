"""The conformance suite of codecs, as plain functions for any test.

A codec's tests call `check_codec` with instances of every configuration worth checking. Each check
also works alone, and `CODEC_CHECKS` can parametrize a pytest test. A check that finds a breach
raises `AssertionError` with a sentence that names it. Lossy codecs need not return equal bytes, but
must not change values that they have rounded once. A codec may decline chunks, which are skipped,
but must take some.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock.core.abc import Codec, PluginConfig
from penstock.testing.codecs.calls import (
    SIZES,
    bound_of,
    compressible,
    elements_of,
    encode,
    expect_decodes,
    in_words,
    whole,
)
from penstock.testing.codecs.frames import (
    check_elements_come_back,
    check_exact_output_suffices,
    check_extended_frames_are_refused,
    check_flipped_bits_never_overrun,
    check_frames_stand_alone,
    check_garbage_is_refused,
    check_large_chunk,
    check_output,
    check_round_trips,
    check_rounding_is_stable,
    check_short_output_is_refused,
    check_truncated_frames_are_refused,
    check_wrong_length_is_refused,
)
from penstock.testing.codecs.use import (
    check_base,
    check_buffers_are_given_back,
    check_chains,
    check_gil_is_released,
    check_other_processes,
    check_saved_and_loaded,
    check_small_frames_take_little_memory,
    check_threads,
)
from penstock.testing.expectations import expect_own_api_version, expect_signatures, finding

if TYPE_CHECKING:
    from penstock.testing.codecs.calls import CodecCheck

__all__ = [
    "CODEC_CHECKS",
    "check_base",
    "check_buffers_are_given_back",
    "check_chains",
    "check_codec",
    "check_config_round_trip",
    "check_declarations",
    "check_elements_come_back",
    "check_exact_output_suffices",
    "check_extended_frames_are_refused",
    "check_flipped_bits_never_overrun",
    "check_frames_stand_alone",
    "check_garbage_is_refused",
    "check_gil_is_released",
    "check_large_chunk",
    "check_other_processes",
    "check_output",
    "check_round_trips",
    "check_rounding_is_stable",
    "check_saved_and_loaded",
    "check_short_output_is_refused",
    "check_small_frames_take_little_memory",
    "check_threads",
    "check_truncated_frames_are_refused",
    "check_wrong_length_is_refused",
]


@in_words
def check_declarations(codec: Codec) -> None:
    """Check that the name, versions and facts that core plans with are declared and valid."""
    assert codec.name, "a codec needs a name"
    expect_own_api_version(codec)
    expect_signatures(codec, Codec)
    version: object = codec.version
    assert type(version) is int, f"version is {version!r}, not an int"
    assert version >= 1, "versions count from 1"
    oldest: object = codec.oldest_readable
    assert type(oldest) is int, f"oldest_readable is {oldest!r}, not an int"
    assert 1 <= oldest <= version, f"oldest_readable is {oldest}, but must be from 1 to {version}"
    assert isinstance(codec.lossless, bool), "lossless must be a bool"
    assert isinstance(codec.needs_base, bool), "needs_base must be a bool"
    assert isinstance(codec.config, codec.Config), "config must be an instance of Config"
    bounds = [bound_of(codec, size) for size in SIZES]
    assert bounds == sorted(bounds), "max_encoded_size must not fall as chunks grow"
    elements_of(codec)


@in_words
def check_config_round_trip(codec: Codec) -> None:
    """Check that the config survives JSON, and a codec made from it decodes the same frames."""
    with finding("its config as JSON"):
        stored = json.loads(json.dumps(codec.config.model_dump(mode="json"), allow_nan=False))
        config = codec.Config.model_validate(stored)
    assert isinstance(config, PluginConfig), "Config is not a PluginConfig"
    assert config == codec.config, "the config does not survive JSON"
    with finding("a codec made from its stored config"):
        again = type(codec)(config)
    chunk = compressible(whole(codec, 5000))
    expect_decodes(again, encode(codec, chunk), chunk)


CODEC_CHECKS: tuple[CodecCheck, ...] = (
    check_declarations,
    check_config_round_trip,
    check_round_trips,
    check_elements_come_back,
    check_output,
    check_rounding_is_stable,
    check_large_chunk,
    check_exact_output_suffices,
    check_frames_stand_alone,
    check_short_output_is_refused,
    check_truncated_frames_are_refused,
    check_extended_frames_are_refused,
    check_wrong_length_is_refused,
    check_garbage_is_refused,
    check_flipped_bits_never_overrun,
    check_small_frames_take_little_memory,
    check_buffers_are_given_back,
    check_threads,
    check_gil_is_released,
    check_base,
    check_other_processes,
    check_saved_and_loaded,
    check_chains,
)
"""All checks, in order; each takes a codec, and raises AssertionError."""


def check_codec(codec: Codec) -> None:
    """Run all checks, in order.

    Raises:
        AssertionError: The codec breaks the contract; the message says how.
    """
    for check in CODEC_CHECKS:
        check(codec)

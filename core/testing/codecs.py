"""Conformance checks for codecs, as plain functions.

A codec's tests call `check_codec` with instances of every configuration worth checking; each
check can be called alone too. A check that finds a breach raises `AssertionError`, with a sentence
that says what. Lossy codecs are checked for all but equality of the decoded bytes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock.core.abc import PluginConfig
from penstock.core.testing.codecs_calls import (
    SIZES,
    bound_of,
    compressible,
    encode,
    expect_decodes,
    in_words,
)
from penstock.core.testing.codecs_frames import (
    check_elements_come_back,
    check_exact_output_suffices,
    check_extended_frames_are_refused,
    check_flipped_bits_never_overrun,
    check_frames_stand_alone,
    check_garbage_is_refused,
    check_large_chunk,
    check_round_trips,
    check_short_output_is_refused,
    check_truncated_frames_are_refused,
    check_wrong_length_is_refused,
)
from penstock.core.testing.codecs_surroundings import (
    check_base,
    check_buffers_are_given_back,
    check_gil_is_released,
    check_small_frames_take_little_memory,
    check_threads,
)
from penstock.core.testing.expectations import expect_own_api_version, finding

if TYPE_CHECKING:
    from penstock.core.abc import Codec

__all__ = [
    "check_base",
    "check_buffers_are_given_back",
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
    "check_round_trips",
    "check_short_output_is_refused",
    "check_small_frames_take_little_memory",
    "check_threads",
    "check_truncated_frames_are_refused",
    "check_wrong_length_is_refused",
]


def check_codec(codec: Codec) -> None:
    """All checks, in order.

    Raises:
        AssertionError: The codec breaks the contract, and how.
    """
    check_declarations(codec)
    check_config_round_trip(codec)
    check_round_trips(codec)
    check_elements_come_back(codec)
    check_large_chunk(codec)
    check_exact_output_suffices(codec)
    check_frames_stand_alone(codec)
    check_short_output_is_refused(codec)
    check_truncated_frames_are_refused(codec)
    check_extended_frames_are_refused(codec)
    check_wrong_length_is_refused(codec)
    check_garbage_is_refused(codec)
    check_flipped_bits_never_overrun(codec)
    check_small_frames_take_little_memory(codec)
    check_buffers_are_given_back(codec)
    check_threads(codec)
    check_gil_is_released(codec)
    check_base(codec)


@in_words
def check_declarations(codec: Codec) -> None:
    """Name, versions, and the three facts that core plans with are declared, and make sense."""
    assert codec.name, "a codec needs a name"
    expect_own_api_version(codec)
    version: object = codec.version
    assert type(version) is int, f"version is {version!r}, no integer"
    assert version >= 1, "versions count from 1"
    assert isinstance(codec.lossless, bool), "lossless is True or False"
    assert isinstance(codec.needs_base, bool), "needs_base is True or False"
    assert isinstance(codec.config, codec.Config), "config is an instance of Config"
    bounds = [bound_of(codec, size) for size in SIZES]
    assert bounds == sorted(bounds), "max_encoded_size never falls as chunks grow"


@in_words
def check_config_round_trip(codec: Codec) -> None:
    """The config survives JSON, and a codec made from what survived decodes the same frames."""
    with finding("its config as JSON"):
        stored = json.loads(json.dumps(codec.config.model_dump(mode="json"), allow_nan=False))
        config = codec.Config.model_validate(stored)
    assert isinstance(config, PluginConfig), "Config is a PluginConfig"
    assert config == codec.config, "the config does not survive JSON"
    with finding("a codec made from its stored config"):
        again = type(codec)(config)
    chunk = compressible(5000)
    expect_decodes(again, encode(codec, chunk), chunk)

from __future__ import annotations

import contextlib
import time
from itertools import product

import pytest
from pydantic import model_serializer
from tests.codecs.zstd_frames import first_frame_bytes

from penstock.codecs.cast import CastCodec, CastConfig
from penstock.codecs.delta import DeltaCodec, DeltaConfig
from penstock.codecs.floatsplit import FloatsplitCodec, FloatsplitConfig
from penstock.codecs.log8 import Log8Codec
from penstock.codecs.lz4 import Lz4Codec, Lz4Config
from penstock.codecs.zstd import ZstdCodec, ZstdConfig
from penstock.core.abc import PluginConfig
from penstock.core.errors import CodecError
from penstock.core.testing import codecs as checks

CODECS = {
    "cast": lambda: CastCodec(CastConfig()),
    "cast-float8": lambda: CastCodec(CastConfig(to="float8_e4m3fn", saturate=True)),
    "log8": lambda: Log8Codec(PluginConfig()),
    "zstd": lambda: ZstdCodec(ZstdConfig()),
    "zstd-fast": lambda: ZstdCodec(ZstdConfig(level=-50)),
    "zstd-small": lambda: ZstdCodec(ZstdConfig(level=13)),
    "delta": lambda: DeltaCodec(DeltaConfig()),
    "floatsplit": lambda: FloatsplitCodec(FloatsplitConfig()),
    "lz4": lambda: Lz4Codec(Lz4Config()),
    "lz4-accelerated": lambda: Lz4Codec(Lz4Config(acceleration=32)),
    "lz4-small": lambda: Lz4Codec(Lz4Config(level=9)),
}

# Other options of a codec that is checked anyway.
VARIANTS = {"cast-float8", "zstd-fast", "zstd-small", "lz4-accelerated", "lz4-small"}
QUICK = [name for name in CODECS if name not in VARIANTS]
CHECKS = [name for name in vars(checks) if name.startswith("check_") and name != "check_codec"]


def _cases():
    for codec, check in product(QUICK, CHECKS):
        # A process costs a second, and golden frames were written by other processes as well.
        slow = check == "check_other_processes" and codec != "floatsplit"
        yield pytest.param(codec, check, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("codec", "check"), [*_cases()])
def test_codec_conforms(codec, check):
    getattr(checks, check)(CODECS[codec]())


@pytest.mark.slow
@pytest.mark.parametrize("codec", sorted(VARIANTS))
def test_codec_conforms_with_other_options(codec):
    checks.check_codec(CODECS[codec]())


def test_check_codec_calls_every_check():
    assert {check.__name__ for check in checks.CODEC_CHECKS} == set(CHECKS)


class _Broken(ZstdCodec):
    """Right in all but one thing."""


class _ChangesInput(_Broken):
    def encode(self, chunk, out, /, *, context):
        length = super().encode(chunk, out, context=context)
        if chunk.nbytes:
            chunk[0] ^= 1
        return length


class _Overruns(_Broken):
    def encode(self, chunk, out, /, *, context):
        length = super().encode(chunk, out, context=context)
        if out.nbytes > length:
            memoryview(out.obj)[-1] = 0  # behind `out`, where the memory is larger than that
        return length


class _BoundTooLow(_Broken):
    def max_encoded_size(self, raw_length, /):
        return raw_length // 2


class _AcceptsTruncated(_Broken):
    def decode(self, frame, out, /, *, context):
        with contextlib.suppress(CodecError):
            super().decode(frame, out, context=context)


class _RaisesForeignErrors(_Broken):
    def decode(self, frame, out, /, *, context):
        try:
            super().decode(frame, out, context=context)
        except CodecError as error:
            raise ValueError from error


class _IgnoresTail(_Broken):
    def decode(self, frame, out, /, *, context):
        super().decode(frame[: first_frame_bytes(frame)], out, context=context)


class _WrongByte(_Broken):
    def decode(self, frame, out, /, *, context):
        super().decode(frame, out, context=context)
        if out.nbytes > 1:
            out[-1] ^= 1


class _SharedState(_Broken):
    def encode(self, chunk, out, /, *, context):
        self._chunk = chunk
        time.sleep(0.001)
        return super().encode(self._chunk, out, context=context)


class _ForgetsItsLevel(_Broken):
    class Config(ZstdConfig):
        @model_serializer
        def _nothing(self):
            return {}


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (_ChangesInput, "check_round_trips"),
        (_Overruns, "check_exact_output_suffices"),
        (_BoundTooLow, "check_round_trips"),
        (_AcceptsTruncated, "check_truncated_frames_are_refused"),
        (_AcceptsTruncated, "check_wrong_length_is_refused"),
        (_AcceptsTruncated, "check_garbage_is_refused"),
        (_RaisesForeignErrors, "check_garbage_is_refused"),
        (_IgnoresTail, "check_extended_frames_are_refused"),
        (_WrongByte, "check_large_chunk"),
        (_SharedState, "check_threads"),
    ],
)
def test_suite_finds_a_codec_that(broken, check):
    with pytest.raises(AssertionError):
        getattr(checks, check)(broken(ZstdConfig()))


def test_suite_finds_a_config_that_does_not_survive_json():
    codec = _ForgetsItsLevel(_ForgetsItsLevel.Config(level=7))
    with pytest.raises(AssertionError, match="does not survive JSON"):
        checks.check_config_round_trip(codec)

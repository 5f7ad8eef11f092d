from __future__ import annotations

import pytest

from penstock.codecs.cast import CastCodec, CastConfig
from penstock.codecs.delta import DeltaCodec, DeltaConfig
from penstock.codecs.factor import FactorCodec
from penstock.codecs.floatsplit import FloatsplitCodec, FloatsplitConfig
from penstock.codecs.log8 import Log8Codec
from penstock.codecs.lz4 import Lz4Codec, Lz4Config
from penstock.codecs.zstd import ZstdCodec, ZstdConfig
from penstock.core.abc import PluginConfig
from penstock.testing import codecs as checks

CODECS = {
    "cast": lambda: CastCodec(CastConfig()),
    "cast-float8": lambda: CastCodec(CastConfig(to="float8_e4m3fn", saturate=True)),
    "log8": lambda: Log8Codec(PluginConfig()),
    "zstd": lambda: ZstdCodec(ZstdConfig()),
    "zstd-fast": lambda: ZstdCodec(ZstdConfig(level=-50)),
    "zstd-small": lambda: ZstdCodec(ZstdConfig(level=13)),
    "delta": lambda: DeltaCodec(DeltaConfig()),
    "factor": lambda: FactorCodec(PluginConfig()),
    "floatsplit": lambda: FloatsplitCodec(FloatsplitConfig()),
    "lz4": lambda: Lz4Codec(Lz4Config()),
    "lz4-accelerated": lambda: Lz4Codec(Lz4Config(acceleration=32)),
    "lz4-small": lambda: Lz4Codec(Lz4Config(level=9)),
}

# Other options of an already checked codec.
VARIANTS = {"cast-float8", "zstd-fast", "zstd-small", "lz4-accelerated", "lz4-small"}
QUICK = [name for name in CODECS if name not in VARIANTS]
CHECKS = {name for name in vars(checks) if name.startswith("check_") and name != "check_codec"}


@pytest.mark.parametrize("codec", QUICK)
def test_codec_conforms(codec):
    for check in checks.CODEC_CHECKS:
        # A process costs seconds, and golden frames were written by other processes as well.
        if check is not checks.check_other_processes:
            check(CODECS[codec]())


@pytest.mark.slow
@pytest.mark.parametrize("codec", QUICK)
def test_another_process_decodes_its_frames(codec):
    checks.check_other_processes(CODECS[codec]())


@pytest.mark.slow
@pytest.mark.parametrize("codec", sorted(VARIANTS))
def test_codec_conforms_with_other_options(codec):
    checks.check_codec(CODECS[codec]())


def test_check_codec_calls_every_check():
    assert {check.__name__ for check in checks.CODEC_CHECKS} == CHECKS

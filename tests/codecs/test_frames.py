"""Stored frames: bytes that stay readable, and whose claims are not trusted."""

from __future__ import annotations

import contextlib
import random
import struct

import lz4.block
import pytest
import zstandard
from pydantic import ValidationError
from tests.codecs.zstd_frames import first_frame_bytes

from penstock.codecs import lz4 as lz4_codec
from penstock.codecs.lz4 import Lz4Codec, Lz4Config
from penstock.codecs.zstd import ZstdCodec, ZstdConfig
from penstock.core.abc import CodecContext
from penstock.core.errors import CodecError

# Written by version 1 of each codec: readable forever.
GOLDEN = [
    (ZstdCodec(ZstdConfig()), "28b52ffd2000010000", b""),
    (ZstdCodec(ZstdConfig()), "28b52ffd20487500004070656e73746f636b01009d54b8", b"penstock" * 9),
    (Lz4Codec(Lz4Config()), "", b""),
    (Lz4Codec(Lz4Config()), "120000008f70656e73746f636b0800285073746f636b", b"penstock" * 9),
]


def _decode(codec, frame, length):
    out = bytearray(length)
    context = CodecContext("uint8", 1, (length,), 0, length)
    codec.decode(memoryview(frame), memoryview(out), context=context)
    return bytes(out)


def _encode(codec, chunk):
    out = bytearray(codec.max_encoded_size(len(chunk)))
    context = CodecContext("uint8", 1, (len(chunk),), 0, len(chunk))
    return bytes(out[: codec.encode(memoryview(chunk), memoryview(out), context=context)])


def test_golden_frames_stay_readable():
    for codec, frame, chunk in GOLDEN:
        assert _decode(codec, bytes.fromhex(frame), len(chunk)) == chunk


def test_zstd_frame_is_one_standard_frame_with_its_content_size():
    for size in [0, 1, 100_000, (4 << 20) + 1, 12 << 20]:
        chunk = bytes(range(256)) * (size // 256) + bytes(size % 256)
        frame = _encode(ZstdCodec(ZstdConfig()), chunk)
        parameters = zstandard.get_frame_parameters(frame)
        assert parameters.content_size == size
        assert parameters.dict_id == 0
        assert first_frame_bytes(frame) == len(frame)
        assert zstandard.decompress(frame) == chunk


def test_chunks_near_a_multiple_of_the_piece_round_trip():
    for size in [4 << 20, 8 << 20, (8 << 20) + 1]:
        chunk = bytes(range(251)) * (size // 251) + bytes(size % 251)
        for codec in (ZstdCodec(ZstdConfig()), Lz4Codec(Lz4Config())):
            assert _decode(codec, _encode(codec, chunk), size) == chunk


def test_failure_in_mid_chunk_leaves_no_state():
    for codec in [ZstdCodec(ZstdConfig()), Lz4Codec(Lz4Config())]:
        size = 9 << 20
        chunk = random.Random(5).randbytes(size)
        context = CodecContext("uint8", 1, (size,), 0, size)
        _encode(codec, b"makes what the codec keeps for later")
        with pytest.raises(CodecError, match="do not fit"):
            codec.encode(memoryview(chunk), memoryview(bytearray(5 << 20)), context=context)
        assert _decode(codec, _encode(codec, b"penstock"), 8) == b"penstock"


def test_zstd_level_changes_the_size():
    chunk = " ".join(str(n * n) for n in range(20_000)).encode()
    sizes = [len(_encode(ZstdCodec(ZstdConfig(level=level)), chunk)) for level in (-100, 1, 19)]
    assert sizes[0] > sizes[1] > sizes[2]


def test_lz4_level_and_acceleration_change_the_size():
    chunk = " ".join(str(n * n) for n in range(20_000)).encode()
    configs = [Lz4Config(acceleration=500), Lz4Config(), Lz4Config(level=9)]
    sizes = [len(_encode(Lz4Codec(config), chunk)) for config in configs]
    assert sizes[0] > sizes[1] > sizes[2]


def test_lz4_takes_level_or_acceleration_not_both():
    with pytest.raises(ValidationError, match="not both"):
        Lz4Config(level=3, acceleration=2)


def test_options_out_of_range_are_refused():
    for config, options in [
        (ZstdConfig, {"level": 23}),
        (ZstdConfig, {"level": -131073}),
        (ZstdConfig, {"levle": 3}),
        (Lz4Config, {"level": 13}),
        (Lz4Config, {"level": 0}),
        (Lz4Config, {"acceleration": 0}),
    ]:
        with pytest.raises(ValidationError):
            config(**options)


def test_zstd_frame_without_content_size_is_refused():
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 100)
    with pytest.raises(CodecError, match="says it holds None bytes"):
        _decode(ZstdCodec(ZstdConfig()), frame, 100)


def test_zstd_frame_with_a_large_window_is_refused():
    # A header with window log 27 and content size 5 MiB, then 40 blocks that repeat one byte.
    size = 5 << 20
    header = b"\x28\xb5\x2f\xfd" + bytes([0b10000000, (27 - 10) << 3]) + struct.pack("<I", size)
    block = struct.pack("<I", (128 << 10) << 3 | 0b010)[:3] + b"y"
    last = struct.pack("<I", (128 << 10) << 3 | 0b011)[:3] + b"y"
    frame = header + block * 39 + last
    assert zstandard.decompress(frame) == b"y" * size  # valid elsewhere
    with pytest.raises(CodecError, match="too much memory"):
        _decode(ZstdCodec(ZstdConfig()), frame, size)


def test_zstd_frame_above_its_content_size_is_refused():
    # The header says 5 bytes; the one block holds 100.
    header = b"\x28\xb5\x2f\xfd" + bytes([0b00100000, 5])
    frame = header + struct.pack("<I", (100 << 3) | 1)[:3] + b"y" * 100
    with pytest.raises(CodecError):
        _decode(ZstdCodec(ZstdConfig()), frame, 5)


def test_zstd_frame_truncated_or_with_a_tail_is_refused():
    for size in [0, 9, 300_000]:
        for checksum in [False, True]:
            codec = ZstdCodec(ZstdConfig())
            chunk = random.Random(7).randbytes(size)
            frame = zstandard.ZstdCompressor(write_checksum=checksum).compress(chunk)
            assert _decode(codec, frame, size) == chunk
            for cut in range(1, 12):
                with pytest.raises(CodecError):
                    _decode(codec, frame[:-cut], size)
            skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 3) + b"any"
            for tail in (b"\0", b"tail", skippable, zstandard.compress(b""), frame):
                with pytest.raises(CodecError, match="further bytes"):
                    _decode(codec, frame + tail, size)


def test_zstd_frame_without_its_last_block_is_refused_even_with_all_bytes():
    header = b"\x28\xb5\x2f\xfd" + bytes([0b00100000, 5])
    block = struct.pack("<I", 5 << 3)[:3] + b"whole"
    last = struct.pack("<I", 0b001)[:3]  # holds nothing
    codec = ZstdCodec(ZstdConfig())
    assert _decode(codec, header + block + last, 5) == b"whole"
    with pytest.raises(CodecError, match="truncated"):
        _decode(codec, header + block, 5)


def test_zstd_frame_with_a_dictionary_is_refused():
    trained = zstandard.train_dictionary(1 << 10, [b"penstock %d" % n * 9 for n in range(99)])
    frame = zstandard.ZstdCompressor(dict_data=trained).compress(b"penstock")
    with pytest.raises(CodecError, match=r"dictionary [1-9]"):
        _decode(ZstdCodec(ZstdConfig()), frame, 8)


def test_a_zstd_decoder_that_failed_is_not_used_again():
    codec = ZstdCodec(ZstdConfig())
    chunk = random.Random(8).randbytes(200_000) + bytes(200_000)
    frame = bytearray(_encode(codec, chunk))
    whole = bytes(frame)
    for at in range(12, len(frame), len(frame) // 60):
        frame[at] ^= 0x55
        with contextlib.suppress(CodecError):  # changed literals decode to other bytes
            _decode(codec, bytes(frame), len(chunk))
        frame[at] ^= 0x55
        assert _decode(codec, whole, len(chunk)) == chunk


def test_lz4_block_length_beyond_the_frame_is_refused():
    frame = bytearray(_encode(Lz4Codec(Lz4Config()), b"penstock" * 9))
    struct.pack_into("<I", frame, 0, 0xFFFFFFFF)
    with pytest.raises(CodecError, match="truncated"):
        _decode(Lz4Codec(Lz4Config()), frame, 72)


def test_lz4_block_of_another_length_is_refused():
    short = lz4.block.compress(b"z" * 71, store_size=False)
    frame = struct.pack("<I", len(short)) + short
    with pytest.raises(CodecError, match="holds 71 bytes instead of 72"):
        _decode(Lz4Codec(Lz4Config()), frame, 72)


def test_lz4_layout_is_a_length_and_a_block_for_each_4_mib():
    chunk = bytes(lz4_codec.PIECE_BYTES) + b"tail"
    frame = _encode(Lz4Codec(Lz4Config()), chunk)
    (first,) = struct.unpack_from("<I", frame)
    (second,) = struct.unpack_from("<I", frame, 4 + first)
    assert len(frame) == 8 + first + second
    tail = lz4.block.decompress(frame[8 + first :], uncompressed_size=4)
    assert tail == b"tail"

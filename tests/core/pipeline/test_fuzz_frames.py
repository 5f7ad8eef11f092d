"""Frames and values changed under valid checksums."""

import json
import struct
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests import interpreters
from tests.core import fuzz_targets

from penstock.codecs.lz4 import Lz4Codec
from penstock.codecs.zstd import ZstdCodec
from penstock.core.abc import CodecContext
from penstock.core.errors import CodecError, FormatError, PenstockError
from penstock.core.format.compressed import compress, decompress
from penstock.core.limits import MAX_FRAME_BYTES
from penstock.core.pipeline.codec_chain import CodecChain
from penstock.providers.values.decode import decode_value

CORPUS = Path(__file__).parents[2] / "corpus"
cases = st.binary(max_size=48)


def corpus(target):
    return [bytes.fromhex(line) for line in (CORPUS / f"{target}.txt").read_text().split()]


@given(cases)
def test_a_changed_frame_is_refused_or_decodes_correctly(case):
    fuzz_targets.frames(case)


def test_frames_of_the_corpus_are_refused_or_decode_correctly():
    outcomes = {fuzz_targets.frames(case)[1] for case in corpus("frames")}
    assert outcomes == {"read", "refused"}


@given(st.binary(max_size=400), st.integers(0, 5000), st.sampled_from(fuzz_targets._CHAINS))
def test_a_frame_of_any_bytes_is_refused(frame, size, names):
    chain, *_ = fuzz_targets._encoded(names, 2)
    context = CodecContext("uint8", 1, (size,), 0, size)
    with pytest.raises(CodecError):
        # No drawn frame has ever decoded; the checksum would refuse that as well.
        chain.decode(
            memoryview(frame),
            memoryview(bytearray(size)),
            context=context,
            lengths=(size,) * (len(names) - 1),
            raw_checksum=0x0123456789ABCDEF,
        )


# -- bombs -----------------------------------------------------------------------------------------


def chain_of(codec):
    return CodecChain([codec(codec.Config())])


def decode(codec, frame, size):
    context = CodecContext("uint8", 1, (size,), 0, size)
    chain_of(codec).decode(memoryview(frame), memoryview(bytearray(size)), context=context)


@pytest.mark.parametrize("declared", [True, False])
def test_a_zstd_frame_longer_than_the_chunk_is_refused(declared):
    bomb = zstandard.ZstdCompressor(write_content_size=declared).compress(bytes(1 << 26))
    assert len(bomb) < 1 << 14
    with pytest.raises(CodecError, match="67108864|None" if declared else "None"):
        decode(ZstdCodec, bomb, 4096)


def test_several_zstd_frames_in_one_are_refused():
    piece = zstandard.compress(bytes(100))
    with pytest.raises(CodecError, match="100"):
        decode(ZstdCodec, piece + piece, 100)
    with pytest.raises(CodecError):
        decode(ZstdCodec, piece + piece, 200)


def test_a_zstd_frame_with_a_huge_window_is_refused():
    parameters = zstandard.ZstdCompressionParameters(
        window_log=30, enable_ldm=True, write_content_size=False
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    with pytest.raises(CodecError):
        decode(ZstdCodec, compressor.compress(bytes(5000)), 5000)


def test_an_lz4_block_shorter_than_declared_is_refused():
    for length in (0, 1, 5, 1 << 20, (1 << 32) - 1):
        with pytest.raises(CodecError):
            decode(Lz4Codec, struct.pack("<I", length) + b"\x00", 4096)


def test_a_record_declared_above_the_limit_is_refused_unread():
    header = bytes.fromhex("28b52ffd") + b"\xe0" + struct.pack("<Q", MAX_FRAME_BYTES + 1)
    with pytest.raises(FormatError, match=str(MAX_FRAME_BYTES + 1)):
        decompress(header + bytes(20), "record")


@pytest.mark.parametrize("change", [-1, 1, 1 << 20])
def test_a_record_of_another_size_than_declared_is_refused(change):
    with pytest.raises(FormatError):
        decompress(compress(bytes(5000)), "record", raw_length=5000 + change)


# -- values ----------------------------------------------------------------------------------------


def test_values_of_the_corpus_are_decoded_or_refused():
    outcomes = {fuzz_targets.values(case)[0] for case in corpus("values")}
    assert outcomes >= {"read", "FormatError"}


@given(cases)
def test_a_changed_value_is_decoded_or_refused(case):
    fuzz_targets.values(case)


def at(**fields):
    return {"$": "datetime", "v": "2020-01-01", "fold": 0, **fields}


def test_a_malformed_value_is_refused():
    for value in [
        at(tz="../../../etc/passwd"),
        at(tz="/etc/passwd"),
        at(tz="\0"),
        at(tz=""),
        at(tz=[]),
        {"$": "numpy", "dtype": "O", "v": "00" * 8},
        {"$": "numpy", "dtype": "U9999999", "v": ""},
        {"$": "torch.dtype", "v": "nn"},
        {"$": "torch.dtype", "v": "load"},
        {"$": "enum", "class": "os:system", "v": "x"},
        {"$": "namedtuple", "class": "x:y", "v": []},
        {"$": "defaultdict", "factory": "eval", "v": []},
        {"$": [], "v": 1},
        {"$": "tuple"},
        {"$": "deque", "v": [], "maxlen": -1},
        {"$": "complex", "v": [1, 2, 3]},
        at(tz="A" * 300),
        {"$": "numpy", "dtype": "08i4", "v": ""},
        {"$": "numpy", "dtype": ",i4", "v": ""},
    ]:
        with pytest.raises(PenstockError, match="somewhere"):
            decode_value(json.dumps(value).encode(), ("somewhere",))


_IMPORTS = """
import sys, json, zoneinfo, numpy, torch
from penstock.core.errors import PenstockError
from penstock.core.abc import StoredObject
from penstock.core.types import Kind, Role, TensorSpec
from penstock.providers.values.decode import decode_value
from penstock.providers.tensor import empty_tensor

def attempt(call):
    try:
        call()
    except PenstockError:
        pass

names = ["_dynamo", "_inductor", "onnx", "xml.dom.minidom:Node", "tkinter:Event", "ftplib"]
before = set(sys.modules)
for name in names:
    for tag in ("torch.dtype", "enum", "namedtuple", "flag"):
        key = "v" if tag == "torch.dtype" else "class"
        data = json.dumps({"$": tag, "v": [], key: name}).encode()
        attempt(lambda: decode_value(data, ("x",)))
    spec = TensorSpec(name, 4, (2,))
    stored = StoredObject(("x",), Kind.TENSOR, spec, Role.OTHER, "tensor")
    attempt(lambda: empty_tensor(stored, None))
print(json.dumps(sorted(set(sys.modules) - before)[:5]))
"""


@pytest.mark.process
def test_no_module_is_imported_because_a_checkpoint_names_it():
    done = interpreters.run("-c", _IMPORTS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []

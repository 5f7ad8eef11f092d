import math
import random
import threading

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from penstock.codecs.cast import CastCodec, CastConfig
from penstock.codecs.lz4 import Lz4Codec, Lz4Config
from penstock.codecs.zstd import ZstdCodec, ZstdConfig
from penstock.core.abc import DECLINED, Codec, CodecContext, CodecOutput, PluginConfig
from penstock.core.errors import CodecError
from penstock.core.pipeline.codec_chain import (
    CodecChain,
    checksum,
    checksum_blocks,
    worst_errors,
)
from penstock.core.types import ByteRange, WorstErrors


class _Recording(Codec):
    """Stores the chunk reversed after one byte; keeps the contexts it gets."""

    name = "recording"
    lossless = True

    def __init__(self, config=None, /):
        super().__init__(config or PluginConfig())
        self.contexts = []

    def max_encoded_size(self, raw_length, /):
        return raw_length + 1

    def encode(self, chunk, out, /, *, context):
        self.contexts.append(context)
        out[0] = 7
        out[1 : 1 + chunk.nbytes] = bytes(chunk)[::-1]
        return chunk.nbytes + 1

    def decode(self, frame, out, /, *, context):
        self.contexts.append(context)
        if frame.nbytes != out.nbytes + 1 or frame[0] != 7:
            raise CodecError("not mine")
        out[:] = bytes(frame[1:])[::-1]


class _Rounding(_Recording):
    """Lossy: clears the lowest bit."""

    lossless = False

    def encode(self, chunk, out, /, *, context):
        return super().encode(memoryview(bytes(b & 0xFE for b in chunk)), out, context=context)


class _Declining(_Recording):
    """Takes no chunk, and leaves the output like a codec that declines late."""

    def encode(self, chunk, out, /, *, context):
        self.contexts.append(context)
        out[: chunk.nbytes] = b"\xee" * chunk.nbytes
        return DECLINED


class _Uniform(_Recording):
    """Takes only chunks of one repeated byte, so it needs one byte."""

    def max_encoded_size(self, raw_length, /):
        return min(raw_length, 1)

    def encode(self, chunk, out, /, *, context):
        if len(set(bytes(chunk))) > 1:
            return DECLINED
        out[: chunk.nbytes and 1] = bytes(chunk[:1])
        return min(chunk.nbytes, 1)

    def decode(self, frame, out, /, *, context):
        out[:] = bytes(frame) * out.nbytes


class _Halving(_Recording):
    """Keeps every other two bytes, as a cast to bfloat16 would; takes whole float32 only."""

    lossless = False

    def max_encoded_size(self, raw_length, /):
        return raw_length

    def output(self, context, /):
        return CodecOutput("bfloat16", 2, elementwise=True)

    def encode(self, chunk, out, /, *, context):
        self.contexts.append(context)
        if context.dtype != "float32":
            return DECLINED
        words = np.frombuffer(chunk, "<u4") >> 16
        out[: chunk.nbytes // 2] = words.astype("<u2").tobytes()
        return chunk.nbytes // 2

    def decode(self, frame, out, /, *, context):
        self.contexts.append(context)
        words = np.frombuffer(frame, "<u2").astype("<u4") << 16
        out[:] = words.tobytes()


class _Against(_Recording):
    """Needs a base; declines without one, or on demand."""

    needs_base = True

    def __init__(self, *, declines=False):
        super().__init__()
        self._declines = declines

    def encode(self, chunk, out, /, *, context):
        if self._declines or context.base is None:
            self.contexts.append(context)
            return DECLINED
        return super().encode(chunk, out, context=context)


class _Faulty(_Recording):
    def __init__(self, fault):
        super().__init__()
        self._fault = fault

    def encode(self, chunk, out, /, *, context):
        return self._fault(chunk, out)

    def decode(self, frame, out, /, *, context):
        self._fault(frame, out)


def _zstd():
    return ZstdCodec(ZstdConfig())


def _lz4():
    return Lz4Codec(Lz4Config())


def _context(length, **changes):
    values = {"dtype": "float32", "itemsize": 4, "shape": (length // 4,), "start": 0}
    return CodecContext(**{**values, **changes}, raw_length=length)


def _encode(chain, chunk):
    out = bytearray(chain.max_encoded_size(len(chunk)))
    frame = chain.encode(memoryview(chunk), memoryview(out), context=_context(len(chunk)))
    return frame, bytes(out[: frame.length])


def _decode(chain, stored, length, **given):
    out = bytearray(length)
    chain.decode(memoryview(stored), memoryview(out), context=_context(length), **given)
    return bytes(out)


CHAINS = [
    [_zstd],
    [_lz4],
    [_lz4, _zstd],
    [_Recording, _zstd],
    [_Recording, _lz4, _zstd],
    [_Recording, _Recording, _Recording, _Recording],
]


def test_chain_round_trips():
    for makers in CHAINS:
        for size in [0, 1, 5, 4096, 200_000]:
            chain = CodecChain([make() for make in makers])
            chunk = random.Random(3).randbytes(size // 2) + bytes(size - size // 2)
            frame, stored = _encode(chain, chunk)
            assert len(frame.lengths) == len(makers) - 1
            decoded = _decode(
                chain, stored, size, lengths=frame.lengths, raw_checksum=frame.raw_checksum
            )
            assert decoded == chunk


@given(st.binary(max_size=3000), st.lists(st.sampled_from([_zstd, _lz4, _Recording]), min_size=1))
def test_any_chain_round_trips(chunk, makers):
    chain = CodecChain([make() for make in makers])
    frame, stored = _encode(chain, chunk)
    assert _decode(chain, stored, len(chunk), lengths=frame.lengths) == chunk


def test_the_raw_checksum_of_a_lossy_chain_covers_decoded_bytes():
    chain = CodecChain([_Rounding(), _zstd()])
    frame, stored = _encode(chain, b"\x01\x02\x03")
    assert not chain.lossless
    decoded = _decode(chain, stored, 3, lengths=frame.lengths, raw_checksum=frame.raw_checksum)
    assert decoded == b"\x00\x02\x02"
    assert frame.raw_checksum == xxhash.xxh3_64_intdigest(decoded)


@given(
    st.binary(min_size=1, max_size=3000),
    st.lists(st.sampled_from([_zstd, _lz4, _Recording, _Rounding, _Declining]), min_size=1),
)
def test_a_frame_is_decoded_by_the_codecs_that_did_not_decline(chunk, makers):
    codecs = sorted((make() for make in makers), key=lambda codec: codec.lossless)
    frame, stored = _encode(CodecChain(codecs), chunk)
    declined, lossy = [], 0
    for number, codec in enumerate(codecs):
        if isinstance(codec, _Declining) or (lossy and not codec.lossless):
            declined.append(number)
        lossy += not codec.lossless
    assert list(frame.declined) == declined
    left = [codec for n, codec in enumerate(codecs) if n not in declined]
    if not left:
        assert frame.length == len(chunk)
        return
    decoded = _decode(
        CodecChain(left),
        stored,
        len(chunk),
        lengths=frame.lengths,
        raw_checksum=frame.raw_checksum,
    )
    assert decoded == chunk or not CodecChain(left).lossless


def test_there_is_room_for_a_chunk_that_a_shrinking_codec_declines():
    for chunk in [bytes(3000), random.Random(5).randbytes(3000)]:
        for makers in [[_Uniform, _zstd], [_lz4, _Uniform], [_Uniform, _Uniform]]:
            codecs = [make() for make in makers]
            frame, stored = _encode(CodecChain(codecs), chunk)
            left = [codec for number, codec in enumerate(codecs) if number not in frame.declined]
            if left:
                assert _decode(CodecChain(left), stored, len(chunk), lengths=frame.lengths) == chunk


def test_first_codec_sees_the_chunk_and_later_ones_flat_bytes():
    first, second = _Recording(), _Recording()
    chain = CodecChain([first, second])
    frame, stored = _encode(chain, bytes(40))
    _decode(chain, stored, 40, lengths=frame.lengths)
    assert first.contexts == [_context(40)] * 2
    assert second.contexts == [CodecContext("uint8", 1, (41,), 0, 41)] * 2


@pytest.mark.parametrize("start", [0, 240])
def test_the_codec_after_an_elementwise_one_sees_its_elements(start):
    halving, behind = _Halving(), _Recording()
    chunk = random.Random(1).randbytes(400)
    context = _context(400, shape=(10, 24), start=start)
    out = bytearray(1000)
    chain = CodecChain([halving, behind])
    frame = chain.encode(memoryview(chunk), memoryview(out), context=context)
    decoded = bytearray(400)
    stored = memoryview(out)[: frame.length]
    chain.decode(stored, memoryview(decoded), context=context, lengths=frame.lengths)
    # Three times: a lossy chain decodes its output at once, for the checksum.
    assert halving.contexts == [context] * 3
    assert behind.contexts == [CodecContext("bfloat16", 2, (10, 24), start // 2, 200)] * 3


class _Says(_Recording):
    """Declares the given output."""

    def __init__(self, says):
        super().__init__()
        self._says = says

    def output(self, context, /):
        return self._says(context)


def test_an_impossible_output_breaches_the_contract():
    for output in [
        None,
        "float32",
        CodecOutput(""),
        CodecOutput("uint16", 0),
        CodecOutput("uint16", -2),
        CodecOutput("uint16", 2.0),
        CodecOutput("uint16", True),
        CodecOutput(np.dtype("f4"), 4),
        CodecOutput("uint16", 2, elementwise=1),
        CodecOutput("uint16", 2, tail=1),
    ]:
        for place in [0, 1]:
            codecs = [_Says(lambda context, output=output: output), _Recording()]
            with pytest.raises(CodecError, match="codec recording broke its contract: output is"):
                _encode(CodecChain(codecs if place == 0 else codecs[::-1]), bytes(40))


@pytest.mark.parametrize(
    "output", [CodecOutput("uint16", 2), CodecOutput("float32", 4, elementwise=True)]
)
def test_output_of_partial_elements_breaches_the_contract(output):
    with pytest.raises(CodecError, match=r"recording claims to make .* wrote 41 bytes"):
        _encode(CodecChain([_Says(lambda context: output), _zstd()]), bytes(40))


@pytest.mark.parametrize(
    ("shape", "start", "seen"),
    [((5, 4), 0, (11, 4)), ((5, 4), 40, (13, 4)), ((10,), 0, (41,)), ((), 0, (41,)),
     ((50, 2, 2), 0, (50, 2, 2))],
)  # fmt: skip
def test_elements_after_those_of_the_chunk_are_further_rows(shape, start, seen):
    one, after = _Says(lambda _: CodecOutput("uint8", 1, elementwise=True, tail=True)), _Recording()
    context = CodecContext("float32", 4, shape, start, 40)
    frame = CodecChain([one, after]).encode(
        memoryview(bytes(40)), memoryview(bytearray(100)), context=context
    )
    assert frame.lengths == (41,)
    assert after.contexts == [CodecContext("uint8", 1, seen, start // 4, 41)]


def test_fewer_elements_than_the_chunk_has_breach_the_contract_with_a_tail_too():
    says = _Says(lambda _: CodecOutput("uint64", 8, elementwise=True, tail=True))
    with pytest.raises(CodecError, match=r"claims to make 10 elements .* wrote 41 bytes"):
        _encode(CodecChain([says, _zstd()]), bytes(40))


@pytest.mark.parametrize("length", [0, 198, 202, 400])
def test_a_length_that_contradicts_the_elements_is_refused_early(length):
    chain = CodecChain([_Halving(), _Recording()])
    with pytest.raises(CodecError, match=rf"100 elements of bfloat16.*wrote {length} bytes"):
        _decode(chain, bytes(201), 400, lengths=[length])
    assert chain.codecs[1].contexts == []


def test_a_codec_that_needs_a_base_is_first():
    assert CodecChain([_Against(), _zstd()]).needs_base
    for before in (_Recording(), _Against()):
        with pytest.raises(CodecError, match="cannot come after recording: put recording first"):
            CodecChain([before, _Against()])


@pytest.mark.parametrize("declines", [False, True])
def test_only_a_codec_that_needs_a_base_gets_it(declines):
    against, behind = _Against(declines=declines), _Recording()
    context = _context(40, base=memoryview(bytes(40)))
    out = memoryview(bytearray(200))
    CodecChain([against, behind]).encode(memoryview(bytes(40)), out, context=context)
    assert against.contexts == [context]
    assert [seen.base for seen in behind.contexts] == [None]


def test_codec_cannot_change_the_chunk():
    def scribble(chunk, out):
        chunk[0] = 1
        return 1

    chunk = bytearray(10)
    with pytest.raises(CodecError, match="recording failed"):
        _encode(CodecChain([_Faulty(scribble)]), chunk)
    assert chunk == bytes(10)


def test_foreign_error_of_a_codec_becomes_a_codec_error():
    def fail(chunk, out):
        raise KeyError("boom")

    chain = CodecChain([_Faulty(fail)])
    with pytest.raises(CodecError, match=r"recording failed on 10 bytes of float32.*boom"):
        _encode(chain, bytes(10))
    with pytest.raises(CodecError, match=r"recording failed on a frame of 10 bytes.*boom"):
        _decode(chain, bytes(10), 10)


@pytest.mark.parametrize("length", [-1, 12])
def test_length_beyond_the_bound_breaches_the_contract(length):
    chain = CodecChain([_Faulty(lambda chunk, out: length)])
    with pytest.raises(CodecError, match="broke its contract"):
        _encode(chain, bytes(10))


@pytest.mark.parametrize("lengths", [(), (1, 2), (-1,), (1 << 40,)])
def test_lengths_between_codecs_are_checked_before_allocation(lengths):
    with pytest.raises(CodecError, match="recorded lengths"):
        _decode(CodecChain([_lz4(), _zstd()]), b"", 100, lengths=lengths)


def test_frame_that_decodes_to_other_bytes_is_refused():
    chain = CodecChain([_zstd()])
    frame, _ = _encode(chain, b"right" * 10)
    _, wrong = _encode(chain, b"wrong" * 10)
    with pytest.raises(CodecError, match="do not match their checksum"):
        _decode(chain, wrong, 50, raw_checksum=frame.raw_checksum)


def test_one_chain_serves_several_threads():
    chain = CodecChain([_Recording(), _lz4(), _zstd()])
    chunks = [random.Random(n).randbytes(50_000 + n) for n in range(4)]
    failures = []

    def work(chunk):
        for _ in range(20):
            frame, stored = _encode(chain, chunk)
            if _decode(chain, stored, len(chunk), lengths=frame.lengths) != chunk:
                failures.append(len(chunk))

    threads = [threading.Thread(target=work, args=(chunk,)) for chunk in chunks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@given(st.binary(min_size=1, max_size=300), st.integers(1, 50))
def test_checksum_blocks_are_those_of_the_slices(data, block):
    ranges = [ByteRange(n, min(n + block, len(data))) for n in range(0, len(data), block)]
    expected = [checksum(data[r.start : r.stop]) for r in ranges]
    assert checksum_blocks(memoryview(data), ranges) == expected


# -- worst errors ----------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
ENDLESS = WorstErrors(INF, INF)


def compared(saved, given, dtype=torch.float32):
    def view(values):
        tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values)
        return memoryview(tensor.to(dtype).view(torch.uint8).numpy()).cast("B")

    return worst_errors(view(saved), view(given), str(dtype).removeprefix("torch."))


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2],
    ids=str,
)
def test_the_worst_of_each_kind_is_found(dtype):
    saved, given = [1.0, 128.0, 0.5, 4.0], [1.5, 112.0, 0.5, 4.0]
    assert compared(saved, given, dtype) == WorstErrors(16.0, 0.5)


@pytest.mark.parametrize("at", [0, 65_535, 65_536, 199_999])
def test_an_error_is_found_at_any_index(at):
    saved = torch.ones(200_000)
    given = saved.clone()
    given[at] = 0.75
    assert compared(saved, given) == WorstErrors(0.25, 0.25)


def test_special_floats_count_correctly():
    for saved, restored, errors in [
        ([1.0, NAN, INF, -INF, 0.0, -0.0], [1.0, NAN, INF, -INF, -0.0, 0.0], WorstErrors(0, 0)),
        ([NAN, NAN], [NAN, NAN], WorstErrors(0, 0)),
        ([2.0, NAN], [1.0, NAN], WorstErrors(1.0, 0.5)),
        ([2.0, INF], [1.0, INF], WorstErrors(1.0, 0.5)),
        ([1.0, NAN], [1.0, 5.0], ENDLESS),
        ([1.0, 5.0], [1.0, NAN], ENDLESS),
        ([NAN, 5.0], [5.0, NAN], ENDLESS),
        ([INF, NAN], [NAN, NAN], ENDLESS),
        ([1e30], [INF], ENDLESS),
        ([INF], [1e30], ENDLESS),
        ([INF], [-INF], ENDLESS),
        ([0.0, 1.0], [2.0, 1.0], WorstErrors(2.0, INF)),
        ([2.0, 1.0], [0.0, 1.0], WorstErrors(2.0, 1.0)),
        ([], [], WorstErrors(0, 0)),
    ]:
        assert compared(saved, restored) == errors


def test_a_lossy_codec_after_a_lossless_one_is_refused():
    with pytest.raises(CodecError, match="put recording first"):
        CodecChain([_zstd(), _Rounding()])


def test_a_lossy_codec_with_one_that_needs_a_base_is_refused_in_any_order():
    cast, against = CastCodec(CastConfig()), _Against()
    for codecs in ([cast, against], [against, cast], [cast, _zstd(), against]):
        with pytest.raises(CodecError, match="no rule can have both: leave out cast or recording"):
            CodecChain(codecs)


def test_output_smaller_than_the_bound_is_refused_before_encoding():
    codec = _Recording()
    chain = CodecChain([codec])
    with pytest.raises(CodecError, match="may need 11 bytes of output, but has 10"):
        chain.encode(memoryview(bytes(10)), memoryview(bytearray(10)), context=_context(10))
    assert codec.contexts == []


def test_target_of_another_size_than_the_chunk_is_refused():
    chain = CodecChain([_zstd()])
    _, stored = _encode(chain, bytes(100))
    with pytest.raises(CodecError, match="decode a chunk of 100 bytes into 99"):
        chain.decode(memoryview(stored), memoryview(bytearray(99)), context=_context(100))


def test_empty_chain_is_refused():
    with pytest.raises(CodecError, match="at least one codec"):
        CodecChain([])


def test_an_error_in_a_codecs_output_method_is_a_codec_error():
    def fail(context):
        raise KeyError("boom")

    with pytest.raises(
        CodecError, match=r"recording failed to describe its output for float32.*boom"
    ):
        _encode(CodecChain([_Says(fail), _zstd()]), bytes(40))

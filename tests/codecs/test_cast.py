"""`cast` rounds as torch does, and a too large number never becomes infinite unseen."""

from __future__ import annotations

import logging

import pytest
import torch

from penstock.codecs.cast import CastCodec, CastConfig
from penstock.core.abc import DECLINED, CodecContext, CodecOutput
from penstock.core.errors import CodecError

TARGETS = [
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
]


def context_of(tensor):
    name = str(tensor.dtype).removeprefix("torch.")
    return CodecContext(name, tensor.itemsize, tuple(tensor.shape), 0, tensor.nbytes)


def encoded(codec, tensor):
    raw = memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")
    out = memoryview(bytearray(codec.max_encoded_size(raw.nbytes)))
    length = codec.encode(raw.toreadonly(), out, context=context_of(tensor))
    return DECLINED if length is DECLINED else out[:length]


def given_back(codec, tensor):
    frame = encoded(codec, tensor)
    assert frame is not DECLINED
    back = torch.empty_like(tensor)
    codec.decode(
        frame, memoryview(back.view(torch.uint8).numpy()).cast("B"), context=context_of(tensor)
    )
    return back


def bits(tensor):
    return tensor.view(torch.uint8)


def test_elements_are_those_of_the_narrow_format():
    for dtype in [torch.float64, torch.float32, torch.bfloat16, torch.float16]:
        for to in TARGETS:
            tensor = torch.randn(3001).to(dtype)
            tensor[:3] = torch.tensor([0.0, -0.0, 1e-30])
            codec = CastCodec(CastConfig(to=to))
            if dtype.itemsize <= getattr(torch, to).itemsize:
                assert encoded(codec, tensor) is DECLINED
                continue

            back = given_back(codec, tensor)

            assert torch.equal(bits(back), bits(tensor.to(getattr(torch, to)).to(dtype)))


@pytest.mark.parametrize("to", ["float16", "float32"])
def test_a_chunk_with_a_too_large_number_is_unchanged(to, caplog):
    tensor = torch.randn(300_000, dtype=torch.float64)
    tensor[299_999] = -1e300
    codec = CastCodec(CastConfig(to=to))

    with caplog.at_level(logging.WARNING, "penstock"):
        assert encoded(codec, tensor) is DECLINED
        assert encoded(codec, tensor) is DECLINED

    (record,) = caplog.records
    assert f"1 of 300000 numbers of a chunk are too large for {to}" in record.message


def test_saturated_numbers_become_the_largest():
    for to in [*TARGETS, "float32"]:
        tensor = torch.tensor([1e300, -1e300, 1.0], dtype=torch.float64)
        largest = torch.finfo(getattr(torch, to)).max

        back = given_back(CastCodec(CastConfig(to=to, saturate=True)), tensor)

        assert back.tolist() == [largest, -largest, 1.0]


def test_numbers_that_round_beyond_the_format_are_too_large():
    for to, kept, beyond in [
        ("float16", 65519.0, 65520.0),
        ("bfloat16", 3.3895e38, 3.3962e38),
        ("float8_e4m3fn", 464.0, 464.01),
        ("float8_e5m2", 61439.0, 61440.0),
        ("float8_e4m3fnuz", 247.9, 248.0),
        ("float8_e5m2fnuz", 61439.0, 61440.0),
    ]:
        codec = CastCodec(CastConfig(to=to))

        assert given_back(codec, torch.tensor([kept])).item() == torch.finfo(getattr(torch, to)).max
        assert encoded(codec, torch.tensor([beyond])) is DECLINED


def test_nan_stays_nan_and_infinities_stay_or_keep_the_chunk():
    for to in TARGETS:
        codec = CastCodec(CastConfig(to=to))
        odd = torch.tensor([torch.nan, torch.inf, -torch.inf])

        assert given_back(codec, odd[:1]).isnan().all()
        if to in {"bfloat16", "float16", "float8_e5m2"}:
            assert given_back(codec, odd)[1:].tolist() == [torch.inf, -torch.inf]
        else:
            assert encoded(codec, odd) is DECLINED


def test_all_but_wider_floats_are_declined():
    for dtype in [torch.int32, torch.complex64, torch.bfloat16, torch.bool]:
        assert encoded(CastCodec(CastConfig()), torch.ones(8).to(dtype)) is DECLINED


def test_later_codecs_get_narrow_elements():
    codec = CastCodec(CastConfig(to="float16"))
    assert codec.output(context_of(torch.ones(4))) == CodecOutput("float16", 2, elementwise=True)


def test_a_frame_of_another_length_or_for_another_dtype_is_refused():
    codec = CastCodec(CastConfig())
    frame, out = memoryview(bytes(8)), memoryview(bytearray(16))
    for context, given in (
        (CodecContext("float32", 4, (4,), 0, 16), frame[:6]),
        (CodecContext("int32", 4, (4,), 0, 16), frame),
        (CodecContext("bfloat16", 2, (8,), 0, 16), frame),
    ):
        with pytest.raises(CodecError):
            codec.decode(given, out, context=context)

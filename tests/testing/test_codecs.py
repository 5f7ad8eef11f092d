"""The codec suite catches every known way to break the contract."""

from __future__ import annotations

import ctypes
import inspect
import os
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from pydantic import model_serializer

from penstock.core.abc import DECLINED, Codec, CodecOutput, PluginConfig
from penstock.core.errors import CodecError
from penstock.testing import codecs as checks


class GoodConfig(PluginConfig):
    level: int = 1


class Silent(Codec):
    """Deflate, as a third party would write it, except for the contract version."""

    name = "good"
    lossless = True
    Config = GoodConfig

    def max_encoded_size(self, raw_length, /):
        return raw_length + (raw_length >> 8) + 64

    def encode(self, chunk, out, /, *, context):
        encoded = zlib.compress(chunk, self.config.level)
        if len(encoded) > len(out):
            raise CodecError("it does not fit")
        out[: len(encoded)] = encoded
        return len(encoded)

    def decode(self, frame, out, /, *, context):
        decoder = zlib.decompressobj()
        try:
            raw = decoder.decompress(frame, len(out) + 1)
        except zlib.error as error:
            raise CodecError("not a frame") from error
        if len(raw) != len(out) or not decoder.eof or decoder.unused_data:
            raise CodecError("another length")
        out[:] = raw


class Good(Silent):
    api_version = 1


class GoodWithBase(Good):
    """Stores the difference from the base."""

    needs_base = True

    def encode(self, chunk, out, /, *, context):
        if context.base is None:
            return DECLINED
        return super().encode(_xor(chunk, context.base), out, context=context)

    def decode(self, frame, out, /, *, context):
        if context.base is None:
            raise CodecError("no base")
        super().decode(frame, out, context=context)
        out[:] = _xor(out, context.base)


def _xor(one, other):
    size = len(one)
    return (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).to_bytes(size, "big")


@pytest.mark.slow  # `test_docs` makes all checks of such a codec, but for those in a process
@pytest.mark.parametrize("good", [Good, GoodWithBase])
def test_the_good_ones_pass(good):
    checks.check_codec(good(GoodConfig()))


def test_a_good_one_passes_in_another_process():
    checks.check_other_processes(Good(GoodConfig()))


class Coarse(Good):
    """Drops the low bits."""

    lossless = False

    def encode(self, chunk, out, /, *, context):
        coarse = np.frombuffer(chunk, np.uint8) & 0xF0
        return super().encode(coarse.tobytes(), out, context=context)


class OnlyFloat32(Good):
    """Takes one dtype, in words of four bytes, and declines chunks that do not shrink."""

    def encode(self, chunk, out, /, *, context):
        if context.dtype != "float32":
            return DECLINED
        assert len(chunk) % 4 == 0
        length = super().encode(chunk, out, context=context)
        return length if length < len(chunk) else DECLINED


class Plain(Good):
    """Stores the chunk unchanged, and declares that the output has its elements."""

    def output(self, context, /):
        return CodecOutput(context.dtype, context.itemsize, elementwise=True)

    def encode(self, chunk, out, /, *, context):
        if len(out) < len(chunk):
            raise CodecError("it does not fit")
        out[: len(chunk)] = chunk
        return len(chunk)

    def decode(self, frame, out, /, *, context):
        if len(frame) != len(out):
            raise CodecError("another length")
        out[:] = frame


# -- parts of the mutants ------------------------------------------------------------------------

MUTANTS = {}


def broken(check, name, base=Good, /, **members):
    """Adds a mutant that `check` must catch: `base` with other members."""
    MUTANTS[name] = check, type(name, (base,), members) if members else base


def encodes(change, base=Good):
    """Encodes other bytes than the chunk."""
    return lambda self, chunk, out, *, context: base.encode(
        self, change(chunk, context), out, context=context
    )


def after(method, effect):
    """Calls the method, then `effect` with the same arguments."""

    def call(self, *arguments, context):
        result = method(self, *arguments, context=context)
        effect(self, *arguments, context)
        return result

    return call


def flip(buffer, at=0):
    if len(buffer) > 1:
        buffer[at] ^= 1


def inflated(frame):
    try:
        return zlib.decompress(frame)
    except zlib.error as error:
        raise CodecError("not a frame") from error


def transposed(context, data, shape):
    elements = np.frombuffer(data, f"V{context.itemsize}").reshape(shape)
    return elements.T.tobytes()


def decode_transposed(self, frame, out, *, context):
    Good.decode(self, frame, out, context=context)
    out[:] = transposed(context, out, context.shape[::-1])


def places(context, start):
    return (np.arange(context.raw_length) + start).astype("uint8").tobytes()


def decode_from_the_start(self, frame, out, *, context):
    Good.decode(self, frame, out, context=context)
    out[:] = _xor(out, places(context, 0))


def decode_padded(self, frame, out, *, context):
    if len(frame) != self.max_encoded_size(len(out)):
        raise CodecError("another length")
    out[:] = zlib.decompressobj().decompress(frame, len(out))


def plus_zero(chunk, context):
    if context.dtype != "float32":
        return chunk
    with np.errstate(all="ignore"):
        return memoryview((np.frombuffer(chunk, np.float32) + 0).tobytes())


def one_nan(chunk, context):
    if context.dtype != "float64":
        return chunk
    values = np.frombuffer(chunk, np.float64).copy()
    values[np.isnan(values)] = np.nan
    return memoryview(values.tobytes())


def set_first_byte(_, chunk, _out, context):
    """Like in-place C code: it does not check whether the memory is writable."""
    if context.dtype == "float16":
        ctypes.memset(np.frombuffer(chunk, np.uint8).ctypes.data, 1 ^ chunk[0], 1)


def write_past_the_end(_, _chunk, out, _context):
    if len(out.obj) > len(out):
        memoryview(out.obj)[-1] = 0


def encode_in_the_output(self, chunk, out, *, context):
    if len(out) < Good.max_encoded_size(self, len(chunk)):
        raise IndexError("no room")
    return Good.encode(self, chunk, out, context=context)


class CountsItsFrames(Good):
    """Like one that keeps a dictionary across chunks."""

    encoded = decoded = 0

    def encode(self, chunk, out, /, *, context):
        out[0] = self.encoded % 251
        self.encoded += 1
        return 1 + super().encode(chunk, out[1:], context=context)

    def decode(self, frame, out, /, *, context):
        if not len(frame) or frame[0] != self.decoded % 251:
            raise CodecError("out of order")
        self.decoded += 1
        super().decode(frame[1:], out, context=context)


def encode_cut(self, chunk, out, *, context):
    encoded = zlib.compress(chunk, 1)[: len(out)]
    out[: len(encoded)] = encoded
    return len(encoded)


def encode_unchecked(self, chunk, out, *, context):
    encoded = zlib.compress(chunk, 1)
    out[: len(encoded)] = encoded
    return len(encoded)


def decode_what_is_there(self, frame, out, *, context):
    decoder = zlib.decompressobj()
    try:
        raw = decoder.decompress(frame, len(out) + 1)
    except zlib.error as error:
        raise CodecError("not a frame") from error
    if len(raw) > len(out) or decoder.unused_data:
        raise CodecError("too long")
    out[: len(raw)] = raw


def decode_first(self, frame, out, *, context):
    decoder = zlib.decompressobj()
    with suppress(zlib.error):
        decoder.decompress(frame)
    Good.decode(self, frame[: len(frame) - len(decoder.unused_data)], out, context=context)


def decode_the_beginning(self, frame, out, *, context):
    out[:] = inflated(frame)[: len(out)].ljust(len(out))


def decode_anything(self, frame, out, *, context):
    with suppress(CodecError):
        Good.decode(self, frame, out, context=context)


def decode_unchecked(self, frame, out, *, context):
    out[:] = zlib.decompress(frame)


def decode_believing(self, frame, out, *, context):
    """Raises an error that only damaged frames cause."""
    try:
        Good.decode(self, frame, out, context=context)
    except CodecError as error:
        if isinstance(error.__cause__, zlib.error) and len(out) == 2000:
            raise OverflowError from error
        raise


def decode_all(self, frame, out, *, context):
    raw = inflated(frame)
    if len(raw) != len(out):
        raise CodecError("another length")
    out[:] = raw


def decode_by_chance(self, frame, out, *, context):
    Good.decode(self, frame, out, context=context)
    turns.append(1)
    out[0] = len(turns) % 256


turns = []


def encode_later(self, chunk, out, *, context):
    self.chunk = chunk
    time.sleep(0.001)
    return Good.encode(self, self.chunk, out, context=context)


def encode_holding_the_gil(self, chunk, out, *, context):
    # In pieces too small for zlib to release the GIL.
    checksum = 1
    for start in range(0, len(chunk), 4096):
        checksum = zlib.adler32(chunk[start : start + 4096], checksum)
    out[:4] = checksum.to_bytes(4, "big")
    out[4 : 4 + len(chunk)] = chunk
    return 4 + len(chunk)


def decode_checked(self, frame, out, *, context):
    if len(frame) != len(out) + 4 or zlib.adler32(frame[4:]) != int.from_bytes(frame[:4], "big"):
        raise CodecError("not a frame")
    out[:] = frame[4:]


def encode_without_the_gil(self, chunk, out, *, context):
    zlib.adler32(bytes(1 << 20))
    return encode_holding_the_gil(self, chunk, out, context=context)


def decode_holding_the_gil(self, frame, out, *, context):
    out[:] = frame[4:]


def encode_in_the_main_thread(self, chunk, out, *, context):
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("no compressor in this thread")
    return Good.encode(self, chunk, out, context=context)


class KeepsItsInput(Good):
    """Checks whether the next chunk is equal."""

    def __init__(self, config, /):
        super().__init__(config)
        self.local = threading.local()

    def encode(self, chunk, out, /, *, context):
        self.local.last = np.frombuffer(chunk, np.uint8)
        return super().encode(chunk, out, context=context)


def decode_stumbling(self, frame, out, *, context):
    len(context.base)
    GoodWithBase.decode(self, frame, out, context=context)


def encode_from_zeros(self, chunk, out, *, context):
    base = context.base or bytes(len(chunk))
    return GoodWithBase.encode(self, chunk, out, context=replace(context, base=base))


def encode_even(self, chunk, out, *, context):
    if len(chunk) % 2:
        raise CodecError("an odd number of bytes")
    return Plain.encode(self, chunk, out, context=context)


def decode_but_the_last(self, frame, out, *, context):
    Plain.decode(self, frame, memoryview(bytearray(len(out))), context=context)
    out[:-1] = frame[:-1]


class KeyedByItsProcess(Plain):
    """Frames of another process differ, as if made from the order of a set."""

    def encode(self, chunk, out, /, *, context):
        out[: len(chunk)] = self._keyed(chunk)
        return len(chunk)

    def decode(self, frame, out, /, *, context):
        super().decode(frame, out, context=context)
        out[:] = self._keyed(frame)

    def _keyed(self, data):
        key = os.getpid().to_bytes(4, "little") * (len(data) // 4 + 1)
        return bytes(np.frombuffer(data, np.uint8) ^ np.frombuffer(key, np.uint8)[: len(data)])


class KnowsOnlyWhatItEncoded(Plain):
    """Keeps data per frame that the frame should hold."""

    seen: ClassVar = set()

    def encode(self, chunk, out, /, *, context):
        self.seen.add(len(chunk))
        return super().encode(chunk, out, context=context)

    def decode(self, frame, out, /, *, context):
        if len(out) not in self.seen:
            raise CodecError("nothing is known of this frame")
        super().decode(frame, out, context=context)


class NoJson(GoodConfig):
    @model_serializer
    def levels(self):
        return {"level": {1, 2}}


class NoOptions(GoodConfig):
    @model_serializer
    def nothing(self):
        return {}


# -- the mutants ---------------------------------------------------------------------------------

# fmt: off
check = checks.check_declarations
broken(check, "Nameless", name="")
broken(check, "VersionZero", version=0)
broken(check, "ReadsNoVersion", oldest_readable=2)
broken(check, "LosslessIsAWord", lossless="yes")
broken(check, "OtherVersionOfTheContract", api_version=2)
broken(check, "InheritsItsVersion", Silent)
broken(check, "KeepsAnotherConfig",
       __init__=lambda self, config, /: Good.__init__(self, config.model_dump()))
broken(check, "BoundFalls", max_encoded_size=lambda self, raw_length, /: max(
    Good.max_encoded_size(self, raw_length), 5000 - raw_length))
broken(check, "VersionIsAWord", version="1")
broken(check, "HasNoConfig", __init__=lambda self, config, /: None)
broken(check, "BoundIsAFraction",
       max_encoded_size=lambda self, raw_length, /: raw_length * 1.1 + 64)
broken(check, "DeclinesEverything", encode=lambda self, chunk, out, /, *, context: DECLINED)

check = checks.check_config_round_trip
broken(check, "ConfigIsNoJson", Config=NoJson)
broken(check, "ConfigLosesAnOption", Config=NoOptions,
       __init__=lambda self, config, /: Good.__init__(self, NoOptions(level=7)))

check = checks.check_round_trips
broken(check, "ChangesInput", encode=after(Good.encode, lambda _, chunk, *rest: flip(chunk)))
broken(check, "BoundTooLow", max_encoded_size=lambda self, raw_length, /: raw_length + 3)
broken(check, "SaysTooMuch", encode=lambda self, chunk, out, /, *, context: (
    Good.encode(self, chunk, out, context=context), len(out) + 1)[1])
broken(check, "ForgetsToReturn", encode=lambda self, chunk, out, /, *, context: (
    Good.encode(self, chunk, out, context=context), None)[1])
broken(check, "LastByteIsWrong", decode=after(Good.decode, lambda _, frame, out, __: flip(out, -1)))
broken(check, "ChangesTheFrame", decode=after(Good.decode, lambda _, frame, *rest: flip(frame)))
broken(check, "SaysItIsLossless", Coarse, lossless=True)

check = checks.check_elements_come_back
broken(check, "AsksNumpyForTheDtype",
       encode=encodes(lambda chunk, context: (np.dtype(context.dtype), chunk)[1]))
broken(check, "TakesTheChunkForTheRegion", decode=decode_transposed,
       encode=encodes(lambda chunk, context: transposed(context, chunk, context.shape)))
broken(check, "ForgetsWhereItStarts", decode=decode_from_the_start,
       encode=encodes(lambda chunk, context: _xor(chunk, places(context, context.start))))
broken(check, "WantsToWriteItsInput", encode=encodes(
    lambda chunk, _: ((ctypes.c_char * len(chunk)).from_buffer(chunk), chunk)[1]))
broken(check, "FillsTheWholeOutput", decode=decode_padded,
       encode=lambda self, chunk, out, /, *, context: (
           Good.encode(self, chunk, out, context=context), len(out))[1])
broken(check, "ForgetsTheSignOfZero", encode=encodes(plus_zero))
broken(check, "MakesOneNanOfAll", encode=encodes(one_nan))
broken(check, "ChangesTypedInput", encode=after(Good.encode, set_first_byte))

broken(checks.check_large_chunk, "LengthOf23Bits",
       encode=encodes(lambda chunk, _: chunk[:1 << 23]))
broken(checks.check_exact_output_suffices, "WritesPastTheOutput",
       encode=after(Good.encode, write_past_the_end))
broken(checks.check_exact_output_suffices, "NeedsMoreThanItSays", encode=encode_in_the_output,
       max_encoded_size=lambda self, raw_length, /:
           Good.max_encoded_size(self, raw_length) - (100 if raw_length > 5000 else 0))
broken(checks.check_frames_stand_alone, "CountsItsFrames", CountsItsFrames)
broken(checks.check_short_output_is_refused, "CutsToFit", encode=encode_cut)
broken(checks.check_short_output_is_refused, "RaisesForeignErrorsWhereItIsTooSmall",
       encode=encode_unchecked)
broken(checks.check_truncated_frames_are_refused, "FillsUpWhatIsMissing",
       decode=decode_what_is_there)
broken(checks.check_extended_frames_are_refused, "IgnoresWhatFollows", decode=decode_first)
broken(checks.check_wrong_length_is_refused, "TakesTheBeginning", decode=decode_the_beginning)
broken(checks.check_garbage_is_refused, "TakesAnything", decode=decode_anything)
broken(checks.check_garbage_is_refused, "RaisesForeignErrors", decode=decode_unchecked)
broken(checks.check_flipped_bits_never_overrun, "BelievesTheFrame", decode=decode_believing)
broken(checks.check_small_frames_take_little_memory, "DecodesAllOfIt", decode=decode_all)
broken(checks.check_saved_and_loaded, "RoundsByChance", Coarse, decode=decode_by_chance)
broken(checks.check_threads, "KeepsTheChunk", encode=encode_later)

check = checks.check_gil_is_released
broken(check, "HoldsTheGilWhileEncoding", encode=encode_holding_the_gil, decode=decode_checked)
broken(check, "HoldsTheGilWhileDecoding", encode=encode_without_the_gil,
       decode=decode_holding_the_gil)
broken(check, "FailsInOtherThreads", encode=encode_in_the_main_thread)  # set up for one thread

check = checks.check_buffers_are_given_back
broken(check, "KeepsItsInput", KeepsItsInput)
broken(check, "KeepsTheFrame", decode=after(
    Good.decode, lambda self, frame, out, _: setattr(self, "last", frame)))
broken(check, "KeepsItsOutput", decode=after(
    Good.decode, lambda self, frame, out, _: setattr(self, "last", out)))
broken(check, "KeepsTheBase", GoodWithBase, encode=after(
    GoodWithBase.encode, lambda self, chunk, out, context: setattr(self, "last", context)))

check = checks.check_base
broken(check, "WantsABaseForNothing", needs_base=True)
broken(check, "StumblesWithoutABase", GoodWithBase, decode=decode_stumbling)
broken(check, "EncodesWithoutABase", GoodWithBase, encode=encode_from_zeros)

check = checks.check_output
broken(check, "SaysItsOutputInAWord", output=lambda self, context, /: "uint8")
broken(check, "PutsOutAnUnknownDtype", Plain, output=lambda self, context, /: CodecOutput(
    "no dtype", context.itemsize, elementwise=True))
broken(check, "PutsOutElementsOfAnotherSize", Plain,
       output=lambda self, context, /: CodecOutput("bfloat16", 4))
broken(check, "PutsOutHalfWords", output=lambda self, context, /: CodecOutput("uint16", 2))
broken(check, "PutsOutFewerElementsThanItSays",
       output=lambda self, context, /: CodecOutput("uint8", 1, elementwise=True))
broken(check, "RemembersWhatItEncoded", Plain, seen=False,
       output=lambda self, context, /: CodecOutput(
           context.dtype, context.itemsize, elementwise=self.seen),
       encode=after(Plain.encode, lambda self, *_: setattr(self, "seen", True)))
broken(check, "AsksForItsBase", GoodWithBase,
       output=lambda self, context, /: CodecOutput("uint8", len(context.base) and 1))

broken(checks.check_chains, "TakesEvenLengthsOnly", Plain, encode=encode_even)
broken(checks.check_rounding_is_stable, "RoundsOnAndOn", lossless=False,
       encode=encodes(lambda chunk, _: (np.frombuffer(chunk, np.uint8) >> 1).tobytes()))
broken(checks.check_rounding_is_stable, "LeavesBytesOut", Plain, lossless=False,
       decode=decode_but_the_last)
broken(checks.check_other_processes, "KeyedByItsProcess", KeyedByItsProcess)
broken(checks.check_other_processes, "KnowsOnlyWhatItEncoded", KnowsOnlyWhatItEncoded)
# fmt: on


def test_a_module_checking_its_codec_on_import_starts_no_nested_process(monkeypatch):
    monkeypatch.setenv("PENSTOCK_TESTING_CODEC_PROCESS", "1")
    checks.check_other_processes(KeyedByItsProcess(GoodConfig()))


def test_a_class_in_a_function_is_not_tried_in_another_process():
    class Local(KeyedByItsProcess):
        pass

    checks.check_other_processes(Local(GoodConfig()))


# -- the proofs ---------------------------------------------------------------------------------


def test_suite_catches():
    for name in MUTANTS:
        if name != "KnowsOnlyWhatItEncoded":
            catch(name)


@pytest.mark.slow
def test_suite_catches_a_codec_that_knows_only_what_it_encoded():  # a process costs a second
    catch("KnowsOnlyWhatItEncoded")


def catch(name, sentence=r"\w+ \w+"):
    check, mutant = MUTANTS[name]
    # For any error: the finding is a sentence.
    with pytest.raises(AssertionError, match=sentence):
        check(mutant(mutant.Config()))


def test_every_check_has_a_defect_only_it_finds():
    written = {
        check
        for name, check in inspect.getmembers(checks, inspect.isfunction)
        if name.startswith("check_") and name != "check_codec"
    }
    assert {check for check, _ in MUTANTS.values()} == written


def test_a_codec_without_a_version_learns_what_to_write():
    catch("InheritsItsVersion", "write `api_version = 1` into Silent")


@pytest.mark.slow
def test_declared_lossy_codec_passes():
    checks.check_codec(Coarse(GoodConfig()))


@pytest.mark.slow
def test_codec_that_takes_one_dtype_and_declines_the_rest_passes():
    checks.check_codec(OnlyFloat32(GoodConfig()))


class Picky(Good):
    """Takes only 32-bit floats, and declares it."""

    def encode(self, chunk, out, /, *, context):
        if context.dtype not in {"float32", "uint8"}:
            raise CodecError(f"{context.dtype} does not suit it")
        return super().encode(chunk, out, context=context)


def test_codec_refusing_a_dtype_clearly_passes():
    checks.check_elements_come_back(Picky(GoodConfig()))


class NoEmptyChunks(Good):
    """Like one whose library refuses blocks of 0 bytes; core never has one."""

    def encode(self, chunk, out, /, *, context):
        if not len(chunk):
            raise CodecError("The dst length must be greater than 0")
        return super().encode(chunk, out, context=context)

    def decode(self, frame, out, /, *, context):
        if not len(out):
            raise ZeroDivisionError
        super().decode(frame, out, context=context)


def test_codecs_need_no_empty_chunks():
    codec = NoEmptyChunks(GoodConfig())
    checks.check_declarations(codec)
    checks.check_round_trips(codec)
    checks.check_wrong_length_is_refused(codec)
    checks.check_extended_frames_are_refused(codec)


class RefusesItsOwn(Good):
    def decode(self, frame, out, /, *, context):
        raise CodecError("the window is too large")


def test_a_refused_frame_names_its_input_and_reason():
    sentence = (
        r"decode refused the frame of \d+ bytes that encode made of a chunk of 1 bytes: "
        "CodecError: the window is too large"
    )
    with pytest.raises(AssertionError, match=sentence):
        checks.check_round_trips(RefusesItsOwn(GoodConfig()))


class RaisesForOddSizes(Good):
    def encode(self, chunk, out, /, *, context):
        if len(chunk) % 2:
            raise CodecError("odd")
        return super().encode(chunk, out, context=context)


FINDINGS = {
    "ForgetsTheSignOfZero": (
        "of float32, .* came back changed, from byte 0 on: 00 00 00 80 .* became 00 00 00 00"
    ),
    "AsksNumpyForTheDtype": "encode of 9600 bytes of bfloat16, from byte 0 of a region of shape",
    "KeepsItsInput": r"`encode` \(its input\) keeps a view of the buffer",
    "NeedsMoreThanItSays": "of max_encoded_size: IndexError: no room",
    "RaisesForeignErrorsWhereItIsTooSmall": "encode into 0 bytes, where it needs .*ValueError",
    "FailsInOtherThreads": "encode in another thread: RuntimeError: no compressor",
    "StumblesWithoutABase": "without the base it was encoded with: TypeError",
    "ForgetsToReturn": "encode returned None of type NoneType",
    "BoundIsAFraction": r"max_encoded_size\(1\) returned",
    "HasNoConfig": "check_declarations: AttributeError",
}


def test_finding_names_the_attempt_and_its_result():
    for name, sentence in FINDINGS.items():
        catch(name, sentence)


def test_a_codec_that_raises_for_unsuitable_data_learns_to_decline():
    sentence = r"encode of 1 bytes of uint8: CodecError: odd \(.*return penstock.core.abc.DECLINED"
    with pytest.raises(AssertionError, match=sentence):
        checks.check_round_trips(RaisesForOddSizes(GoodConfig()))

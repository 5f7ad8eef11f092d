"""The suite for codecs catches every way that we know of to break the contract."""

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
    """Deflate, as a third party would write it, but for the version of the contract."""

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


MUTANTS = {}


def caught_by(check):
    def add(mutant):
        MUTANTS[mutant] = check
        return mutant

    return add


# -- what it says of itself ---------------------------------------------------------------------


@caught_by(checks.check_declarations)
class Nameless(Good):
    name = ""


@caught_by(checks.check_declarations)
class VersionZero(Good):
    version = 0


@caught_by(checks.check_declarations)
class ReadsNoVersion(Good):
    oldest_readable = 2


@caught_by(checks.check_declarations)
class LosslessIsAWord(Good):
    lossless = "yes"


@caught_by(checks.check_declarations)
class OtherVersionOfTheContract(Good):
    api_version = 2


@caught_by(checks.check_declarations)
class InheritsItsVersion(Silent):
    """What it says is whatever Penstock says."""


@caught_by(checks.check_declarations)
class KeepsAnotherConfig(Good):
    def __init__(self, config, /):
        super().__init__(config.model_dump())


@caught_by(checks.check_declarations)
class BoundFalls(Good):
    def max_encoded_size(self, raw_length, /):
        return max(super().max_encoded_size(raw_length), 5000 - raw_length)


@caught_by(checks.check_declarations)
class VersionIsAWord(Good):
    version = "1"


@caught_by(checks.check_declarations)
class HasNoConfig(Good):
    def __init__(self, config, /):
        pass


@caught_by(checks.check_declarations)
class BoundIsAFraction(Good):
    def max_encoded_size(self, raw_length, /):
        return raw_length * 1.1 + 64


@caught_by(checks.check_config_round_trip)
class ConfigIsNoJson(Good):
    class Config(GoodConfig):
        @model_serializer
        def levels(self):
            return {"level": {1, 2}}


@caught_by(checks.check_config_round_trip)
class ConfigLosesAnOption(Good):
    class Config(GoodConfig):
        @model_serializer
        def nothing(self):
            return {}

    def __init__(self, config, /):
        super().__init__(self.Config(level=7))


# -- encoding -----------------------------------------------------------------------------------


@caught_by(checks.check_round_trips)
class ChangesInput(Good):
    def encode(self, chunk, out, /, *, context):
        length = super().encode(chunk, out, context=context)
        if len(chunk):
            chunk[0] ^= 1
        return length


@caught_by(checks.check_round_trips)
class BoundTooLow(Good):
    def max_encoded_size(self, raw_length, /):
        return raw_length + 3


@caught_by(checks.check_round_trips)
class SaysTooMuch(Good):
    def encode(self, chunk, out, /, *, context):
        super().encode(chunk, out, context=context)
        return len(out) + 1


@caught_by(checks.check_round_trips)
class ForgetsToReturn(Good):
    def encode(self, chunk, out, /, *, context):
        super().encode(chunk, out, context=context)


@caught_by(checks.check_elements_come_back)
class AsksNumpyForTheDtype(Good):
    def encode(self, chunk, out, /, *, context):
        np.dtype(context.dtype)
        return super().encode(chunk, out, context=context)


@caught_by(checks.check_elements_come_back)
class TakesTheChunkForTheRegion(Good):
    """Transposes, to bring equal columns together."""

    def encode(self, chunk, out, /, *, context):
        rows = np.frombuffer(chunk, f"V{context.itemsize}").reshape(context.shape)
        return super().encode(rows.T.tobytes(), out, context=context)

    def decode(self, frame, out, /, *, context):
        super().decode(frame, out, context=context)
        columns = np.frombuffer(out, f"V{context.itemsize}").reshape(context.shape[::-1])
        out[:] = columns.T.tobytes()


@caught_by(checks.check_elements_come_back)
class ForgetsWhereItStarts(Good):
    """Encodes the difference from the place in the region, but decodes as if it were its start."""

    def encode(self, chunk, out, /, *, context):
        return super().encode(
            _xor(chunk, self._places(context, context.start)), out, context=context
        )

    def decode(self, frame, out, /, *, context):
        super().decode(frame, out, context=context)
        out[:] = _xor(out, self._places(context, 0))

    def _places(self, context, start):
        return (np.arange(context.raw_length) + start).astype("uint8").tobytes()


@caught_by(checks.check_elements_come_back)
class WantsToWriteItsInput(Good):
    def encode(self, chunk, out, /, *, context):
        (ctypes.c_char * len(chunk)).from_buffer(chunk)
        return super().encode(chunk, out, context=context)


@caught_by(checks.check_elements_come_back)
class FillsTheWholeOutput(Good):
    """Believes that an output is never larger than it said."""

    def encode(self, chunk, out, /, *, context):
        super().encode(chunk, out, context=context)
        return len(out)

    def decode(self, frame, out, /, *, context):
        if len(frame) != self.max_encoded_size(len(out)):
            raise CodecError("another length")
        raw = zlib.decompressobj().decompress(frame, len(out))
        out[:] = raw


@caught_by(checks.check_elements_come_back)
class ForgetsTheSignOfZero(Good):
    """Adds zero, as who sums up a difference and a base does."""

    def encode(self, chunk, out, /, *, context):
        if context.dtype == "float32":
            with np.errstate(all="ignore"):
                chunk = memoryview((np.frombuffer(chunk, np.float32) + 0).tobytes())
        return super().encode(chunk, out, context=context)


@caught_by(checks.check_elements_come_back)
class MakesOneNanOfAll(Good):
    def encode(self, chunk, out, /, *, context):
        if context.dtype == "float64":
            values = np.frombuffer(chunk, np.float64).copy()
            values[np.isnan(values)] = np.nan
            chunk = memoryview(values.tobytes())
        return super().encode(chunk, out, context=context)


@caught_by(checks.check_elements_come_back)
class ChangesTypedInput(Good):
    """As C code does that works in place: it asks nobody whether the memory may be written."""

    def encode(self, chunk, out, /, *, context):
        length = super().encode(chunk, out, context=context)
        if context.dtype == "float16":
            address = np.frombuffer(chunk, np.uint8).ctypes.data
            ctypes.memset(address, 1 ^ chunk[0], 1)
        return length


@caught_by(checks.check_large_chunk)
class LengthOf23Bits(Good):
    def encode(self, chunk, out, /, *, context):
        return super().encode(chunk[: 1 << 23], out, context=context)


@caught_by(checks.check_exact_output_suffices)
class WritesBehindTheOutput(Good):
    def encode(self, chunk, out, /, *, context):
        length = super().encode(chunk, out, context=context)
        if len(out.obj) > len(out):
            memoryview(out.obj)[-1] = 0
        return length


@caught_by(checks.check_exact_output_suffices)
class NeedsMoreThanItSays(Good):
    """Works in the output, with a foreign error where that is too small."""

    def max_encoded_size(self, raw_length, /):
        return super().max_encoded_size(raw_length) - (100 if raw_length > 5000 else 0)

    def encode(self, chunk, out, /, *, context):
        if len(out) < super().max_encoded_size(len(chunk)):
            raise IndexError("no room")
        return super().encode(chunk, out, context=context)


@caught_by(checks.check_frames_stand_alone)
class CountsItsFrames(Good):
    """As one that keeps a dictionary from chunk to chunk."""

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


@caught_by(checks.check_short_output_is_refused)
class CutsToFit(Good):
    def encode(self, chunk, out, /, *, context):
        encoded = zlib.compress(chunk, 1)[: len(out)]
        out[: len(encoded)] = encoded
        return len(encoded)


@caught_by(checks.check_short_output_is_refused)
class RaisesForeignErrorsWhereItIsTooSmall(Good):
    def encode(self, chunk, out, /, *, context):
        encoded = zlib.compress(chunk, 1)
        out[: len(encoded)] = encoded
        return len(encoded)


# -- decoding -----------------------------------------------------------------------------------


@caught_by(checks.check_round_trips)
class LastByteIsWrong(Good):
    def decode(self, frame, out, /, *, context):
        super().decode(frame, out, context=context)
        if len(out) > 1:
            out[-1] ^= 1


@caught_by(checks.check_round_trips)
class ChangesTheFrame(Good):
    def decode(self, frame, out, /, *, context):
        super().decode(frame, out, context=context)
        frame[0] ^= 1


@caught_by(checks.check_truncated_frames_are_refused)
class FillsUpWhatIsMissing(Good):
    def decode(self, frame, out, /, *, context):
        decoder = zlib.decompressobj()
        try:
            raw = decoder.decompress(frame, len(out) + 1)
        except zlib.error as error:
            raise CodecError("not a frame") from error
        if len(raw) > len(out) or decoder.unused_data:
            raise CodecError("too long")
        out[: len(raw)] = raw


@caught_by(checks.check_extended_frames_are_refused)
class IgnoresWhatFollows(Good):
    def decode(self, frame, out, /, *, context):
        decoder = zlib.decompressobj()
        with suppress(zlib.error):
            decoder.decompress(frame)
        super().decode(frame[: len(frame) - len(decoder.unused_data)], out, context=context)


@caught_by(checks.check_wrong_length_is_refused)
class TakesTheBeginning(Good):
    def decode(self, frame, out, /, *, context):
        try:
            raw = zlib.decompress(frame)
        except zlib.error as error:
            raise CodecError("not a frame") from error
        out[:] = raw[: len(out)].ljust(len(out))


@caught_by(checks.check_garbage_is_refused)
class TakesAnything(Good):
    def decode(self, frame, out, /, *, context):
        with suppress(CodecError):
            super().decode(frame, out, context=context)


@caught_by(checks.check_garbage_is_refused)
class RaisesForeignErrors(Good):
    def decode(self, frame, out, /, *, context):
        out[:] = zlib.decompress(frame)


@caught_by(checks.check_flipped_bits_never_overrun)
class BelievesTheFrame(Good):
    """Raises what only damaged frames make it raise."""

    def decode(self, frame, out, /, *, context):
        try:
            super().decode(frame, out, context=context)
        except CodecError as error:
            if isinstance(error.__cause__, zlib.error) and len(out) == 2000:
                raise OverflowError from error
            raise


@caught_by(checks.check_small_frames_take_little_memory)
class DecodesAllOfIt(Good):
    def decode(self, frame, out, /, *, context):
        try:
            raw = zlib.decompress(frame)
        except zlib.error as error:
            raise CodecError("not a frame") from error
        if len(raw) != len(out):
            raise CodecError("another length")
        out[:] = raw


class Coarse(Good):
    """Drops the low bits."""

    lossless = False

    def encode(self, chunk, out, /, *, context):
        coarse = np.frombuffer(chunk, np.uint8) & 0xF0
        return super().encode(coarse.tobytes(), out, context=context)


@caught_by(checks.check_round_trips)
class SaysItIsLossless(Coarse):
    lossless = True


@caught_by(checks.check_declarations)
class DeclinesEverything(Good):
    def encode(self, chunk, out, /, *, context):
        return DECLINED


@caught_by(checks.check_saved_and_loaded)
class RoundsByChance(Coarse):
    """Lossy, and another thing each time that it decodes."""

    turn = 0

    def decode(self, frame, out, /, *, context):
        super().decode(frame, out, context=context)
        RoundsByChance.turn += 1
        out[0] = RoundsByChance.turn % 256


class OnlyFloat32(Good):
    """Takes one dtype, in words of four bytes, and leaves what does not get smaller."""

    def encode(self, chunk, out, /, *, context):
        if context.dtype != "float32":
            return DECLINED
        assert len(chunk) % 4 == 0
        length = super().encode(chunk, out, context=context)
        return length if length < len(chunk) else DECLINED


# -- threads ------------------------------------------------------------------------------------


@caught_by(checks.check_threads)
class KeepsTheChunk(Good):
    def encode(self, chunk, out, /, *, context):
        self.chunk = chunk
        time.sleep(0.001)
        return super().encode(self.chunk, out, context=context)


class Plain(Good):
    """Stores as it is, with a checksum in front."""

    def max_encoded_size(self, raw_length, /):
        return raw_length + 4

    def encode(self, chunk, out, /, *, context):
        # In pieces too small for zlib to let the GIL go.
        checksum = 1
        for start in range(0, len(chunk), 4096):
            checksum = zlib.adler32(chunk[start : start + 4096], checksum)
        out[:4] = checksum.to_bytes(4, "big")
        out[4 : 4 + len(chunk)] = chunk
        return 4 + len(chunk)


@caught_by(checks.check_gil_is_released)
class HoldsTheGilWhileEncoding(Plain):
    def decode(self, frame, out, /, *, context):
        if len(frame) != len(out) + 4 or zlib.adler32(frame[4:]) != int.from_bytes(
            frame[:4], "big"
        ):
            raise CodecError("not a frame")
        out[:] = frame[4:]


@caught_by(checks.check_gil_is_released)
class HoldsTheGilWhileDecoding(Good):
    def encode(self, chunk, out, /, *, context):
        zlib.adler32(bytes(1 << 20))
        return Plain.encode(self, chunk, out, context=context)

    def decode(self, frame, out, /, *, context):
        out[:] = frame[4:]


@caught_by(checks.check_gil_is_released)
class FailsInOtherThreads(Good):
    """As one whose library was set up for the thread that imported it."""

    def encode(self, chunk, out, /, *, context):
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("no compressor in this thread")
        return super().encode(chunk, out, context=context)


# -- buffers ------------------------------------------------------------------------------------


@caught_by(checks.check_buffers_are_given_back)
class KeepsItsInput(Good):
    """To see whether the next chunk is the same again."""

    def __init__(self, config, /):
        super().__init__(config)
        self.local = threading.local()

    def encode(self, chunk, out, /, *, context):
        self.local.last = np.frombuffer(chunk, np.uint8)
        return super().encode(chunk, out, context=context)


@caught_by(checks.check_buffers_are_given_back)
class KeepsTheFrame(Good):
    def decode(self, frame, out, /, *, context):
        self.last = frame
        super().decode(frame, out, context=context)


@caught_by(checks.check_buffers_are_given_back)
class KeepsItsOutput(Good):
    def decode(self, frame, out, /, *, context):
        super().decode(frame, out, context=context)
        self.last = out


@caught_by(checks.check_buffers_are_given_back)
class KeepsTheBase(GoodWithBase):
    def encode(self, chunk, out, /, *, context):
        self.last = context
        return super().encode(chunk, out, context=context)


# -- bases --------------------------------------------------------------------------------------


@caught_by(checks.check_base)
class WantsABaseForNothing(Good):
    needs_base = True


@caught_by(checks.check_base)
class StumblesWithoutABase(GoodWithBase):
    def decode(self, frame, out, /, *, context):
        if context.base is None:
            len(context.base)
        super().decode(frame, out, context=context)


@caught_by(checks.check_base)
class EncodesWithoutABase(GoodWithBase):
    """Takes zeros for the base that is not there, and so never leaves a chunk to the others."""

    def encode(self, chunk, out, /, *, context):
        base = context.base or bytes(len(chunk))
        return super().encode(chunk, out, context=replace(context, base=base))


# -- what comes out -----------------------------------------------------------------------------


class Plain(Good):
    """Stores the chunk as it is, and says that the output has its elements."""

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


@caught_by(checks.check_output)
class SaysItsOutputInAWord(Good):
    def output(self, context, /):
        return "uint8"


@caught_by(checks.check_output)
class PutsOutAnUnknownDtype(Plain):
    def output(self, context, /):
        return CodecOutput("no dtype", context.itemsize, elementwise=True)


@caught_by(checks.check_output)
class PutsOutElementsOfAnotherSize(Plain):
    def output(self, context, /):
        return CodecOutput("bfloat16", 4)


@caught_by(checks.check_output)
class PutsOutHalfWords(Good):
    """The length of a deflate stream is any number."""

    def output(self, context, /):
        return CodecOutput("uint16", 2)


@caught_by(checks.check_output)
class PutsOutFewerElementsThanItSays(Good):
    def output(self, context, /):
        return CodecOutput("uint8", 1, elementwise=True)


@caught_by(checks.check_output)
class RemembersWhatItEncoded(Plain):
    seen = False

    def output(self, context, /):
        return CodecOutput(context.dtype, context.itemsize, elementwise=self.seen)

    def encode(self, chunk, out, /, *, context):
        self.seen = True
        return super().encode(chunk, out, context=context)


@caught_by(checks.check_output)
class AsksForItsBase(GoodWithBase):
    def output(self, context, /):
        return CodecOutput("uint8", len(context.base) and 1)


@caught_by(checks.check_chains)
class TakesEvenLengthsOnly(Plain):
    """Fails behind a codec whose frames have any length."""

    def encode(self, chunk, out, /, *, context):
        if len(chunk) % 2:
            raise CodecError("an odd number of bytes")
        return super().encode(chunk, out, context=context)


# -- lossy codecs -------------------------------------------------------------------------------


@caught_by(checks.check_rounding_is_stable)
class RoundsOnAndOn(Good):
    """Halves every byte, each time."""

    lossless = False

    def encode(self, chunk, out, /, *, context):
        half = np.frombuffer(chunk, np.uint8) >> 1
        return super().encode(half.tobytes(), out, context=context)


@caught_by(checks.check_rounding_is_stable)
class LeavesBytesOut(Plain):
    """Never writes the last byte of a chunk."""

    lossless = False

    def decode(self, frame, out, /, *, context):
        super().decode(frame, memoryview(bytearray(len(out))), context=context)
        out[:-1] = frame[:-1]


# -- processes ----------------------------------------------------------------------------------


@caught_by(checks.check_other_processes)
class KeyedByItsProcess(Plain):
    """Frames of another process are other bytes, as those made from the order of a set."""

    def encode(self, chunk, out, /, *, context):
        out[: len(chunk)] = self._keyed(chunk)
        return len(chunk)

    def decode(self, frame, out, /, *, context):
        super().decode(frame, out, context=context)
        out[:] = self._keyed(frame)

    def _keyed(self, data):
        key = os.getpid().to_bytes(4, "little") * (len(data) // 4 + 1)
        return bytes(np.frombuffer(data, np.uint8) ^ np.frombuffer(key, np.uint8)[: len(data)])


@caught_by(checks.check_other_processes)
class KnowsOnlyWhatItEncoded(Plain):
    """Keeps for each frame what the frame itself should hold."""

    seen: ClassVar = set()

    def encode(self, chunk, out, /, *, context):
        self.seen.add(len(chunk))
        return super().encode(chunk, out, context=context)

    def decode(self, frame, out, /, *, context):
        if len(out) not in self.seen:
            raise CodecError("nothing is known of this frame")
        super().decode(frame, out, context=context)


def test_a_module_that_checks_its_codec_when_imported_starts_no_process_in_another(monkeypatch):
    monkeypatch.setenv("PENSTOCK_TESTING_CODEC_PROCESS", "1")
    checks.check_other_processes(KeyedByItsProcess(GoodConfig()))


def test_a_class_in_a_function_is_not_tried_in_another_process():
    class Local(KeyedByItsProcess):
        pass

    checks.check_other_processes(Local(GoodConfig()))


# -- the proofs ---------------------------------------------------------------------------------


def test_suite_catches():
    for mutant, check in MUTANTS.items():
        if mutant is not KnowsOnlyWhatItEncoded:
            catch(mutant, check)


@pytest.mark.slow
def test_suite_catches_a_codec_that_knows_only_what_it_encoded():  # a process costs a second
    catch(KnowsOnlyWhatItEncoded, MUTANTS[KnowsOnlyWhatItEncoded])


def catch(mutant, check):
    codec = mutant(mutant.Config())
    # Whatever it raises: what is found is said in a sentence.
    with pytest.raises(AssertionError, match=r"\w+ \w+"):
        check(codec)


def test_no_check_is_without_a_defect_that_only_it_is_for():
    written = {
        check
        for name, check in inspect.getmembers(checks, inspect.isfunction)
        if name.startswith("check_") and name != "check_codec"
    }
    assert set(MUTANTS.values()) == written


def test_a_codec_that_says_nothing_of_its_version_is_told_what_to_write():
    with pytest.raises(AssertionError, match="write `api_version = 1` into InheritsItsVersion"):
        checks.check_declarations(InheritsItsVersion(GoodConfig()))


@pytest.mark.slow
def test_lossy_codec_that_says_so_passes():
    checks.check_codec(Coarse(GoodConfig()))


@pytest.mark.slow
def test_codec_that_takes_one_dtype_and_declines_the_rest_passes():
    checks.check_codec(OnlyFloat32(GoodConfig()))


class Picky(Good):
    """Takes 32-bit floats only, and says so."""

    def encode(self, chunk, out, /, *, context):
        if context.dtype not in {"float32", "uint8"}:
            raise CodecError(f"{context.dtype} does not suit it")
        return super().encode(chunk, out, context=context)


def test_codec_that_refuses_a_dtype_in_words_passes():
    checks.check_elements_come_back(Picky(GoodConfig()))


class NoEmptyChunks(Good):
    """As one whose library knows no block of 0 bytes; core never has one."""

    def encode(self, chunk, out, /, *, context):
        if not len(chunk):
            raise CodecError("The dst length must be greater than 0")
        return super().encode(chunk, out, context=context)

    def decode(self, frame, out, /, *, context):
        if not len(out):
            raise ZeroDivisionError
        super().decode(frame, out, context=context)


def test_no_codec_has_to_know_empty_chunks():
    codec = NoEmptyChunks(GoodConfig())
    checks.check_declarations(codec)
    checks.check_round_trips(codec)
    checks.check_wrong_length_is_refused(codec)
    checks.check_extended_frames_are_refused(codec)


class RefusesItsOwn(Good):
    def decode(self, frame, out, /, *, context):
        raise CodecError("the window is too large")


def test_a_refused_frame_is_told_by_what_went_in_and_why():
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


FINDINGS = [
    (
        ForgetsTheSignOfZero,
        "of float32, .* came back changed, from byte 0 on: 00 00 00 80 .* became 00 00 00 00",
    ),
    (
        AsksNumpyForTheDtype,
        "encode of 9600 bytes of bfloat16, from byte 0 of a region of shape",
    ),
    (KeepsItsInput, r"`encode` \(its input\) keeps a view of the buffer"),
    (NeedsMoreThanItSays, "of max_encoded_size: IndexError: no room"),
    (RaisesForeignErrorsWhereItIsTooSmall, "encode into 0 bytes, where it needs .*ValueError"),
    (FailsInOtherThreads, "encode in another thread: RuntimeError: no compressor"),
    (StumblesWithoutABase, "without the base it was encoded with: TypeError"),
    (ForgetsToReturn, "encode returned None of type NoneType"),
    (BoundIsAFraction, r"max_encoded_size\(1\) returned"),
    (HasNoConfig, "check_declarations: AttributeError"),
]


def test_finding_says_what_was_tried_and_what_came_of_it():
    for mutant, sentence in FINDINGS:
        with pytest.raises(AssertionError, match=sentence):
            MUTANTS[mutant](mutant(mutant.Config()))


def test_a_codec_that_raises_for_what_does_not_suit_it_is_told_to_decline():
    sentence = r"encode of 1 bytes of uint8: CodecError: odd \(.*return penstock.core.abc.DECLINED"
    with pytest.raises(AssertionError, match=sentence):
        checks.check_round_trips(RaisesForOddSizes(GoodConfig()))

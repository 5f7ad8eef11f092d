"""Conformance checks for codecs, as plain functions.

A codec's tests call `check_codec` with instances of every configuration worth checking; each
check can be called alone too. A check that finds a breach raises `AssertionError`. Lossy codecs
are checked for all but equality of the decoded bytes.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.core.abc import CodecContext, PluginConfig
from penstock.core.errors import CodecError
from penstock.core.testing.expectations import expect_own_api_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.abc import Codec

# Empty, one byte, odd ones, around a page, and around the 128 KiB blocks that codecs work in.
SIZES = (0, 1, 2, 3, 7, 255, 4095, 4096, 4097, 65_537, 131_072, 300_001)
LARGE_BYTES = (9 << 20) + 3
BOMB_BYTES = 32 << 20

_GUARD = 0xA5
_GUARD_BYTES = 64


def check_codec(codec: Codec) -> None:
    """All checks that follow, in order."""
    check_declarations(codec)
    check_config_round_trip(codec)
    check_round_trips(codec)
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
    check_threads(codec)
    check_gil_is_released(codec)
    check_base(codec)


def check_declarations(codec: Codec) -> None:
    """Name, versions, and the three facts that core plans with are declared, and make sense."""
    assert codec.name, "a codec needs a name"
    expect_own_api_version(codec)
    assert codec.version >= 1, "versions count from 1"
    assert isinstance(codec.lossless, bool), "lossless is True or False"
    assert isinstance(codec.needs_base, bool), "needs_base is True or False"
    assert isinstance(codec.config, codec.Config), "config is an instance of Config"
    bounds = [codec.max_encoded_size(size) for size in SIZES]
    assert bounds == sorted(bounds), "max_encoded_size never falls as chunks grow"


def check_config_round_trip(codec: Codec) -> None:
    """The config survives JSON, and a codec made from what survived decodes the same frames."""
    stored = json.loads(json.dumps(codec.config.model_dump(mode="json"), allow_nan=False))
    config = codec.Config.model_validate(stored)
    assert isinstance(config, PluginConfig), "Config is a PluginConfig"
    assert config == codec.config, "the config does not survive JSON"
    again = type(codec)(config)
    chunk = _compressible(5000)
    _assert_decodes(again, _encode(codec, chunk), chunk)


def check_round_trips(codec: Codec) -> None:
    """Every size and kind of data comes back; the input stays as it was; nothing overruns."""
    for chunk in _chunks():
        _assert_decodes(codec, _encode(codec, chunk), chunk)


def check_large_chunk(codec: Codec) -> None:
    """A chunk of an odd number of megabytes comes back, random or compressible."""
    for chunk in (_random(LARGE_BYTES), _compressible(LARGE_BYTES)):
        _assert_decodes(codec, _encode(codec, chunk), chunk)


def check_exact_output_suffices(codec: Codec) -> None:
    """An output of exactly `max_encoded_size` is enough, and its surroundings stay untouched."""
    for chunk in _chunks():
        bound = codec.max_encoded_size(len(chunk))
        memory = bytearray([_GUARD]) * (bound + 2 * _GUARD_BYTES)
        out = memoryview(memory)[_GUARD_BYTES : _GUARD_BYTES + bound]
        length = codec.encode(memoryview(chunk), out, context=_context(codec, len(chunk)))
        assert 0 <= length <= bound, f"encode returned {length}, its bound is {bound}"
        _assert_guarded(memory, _GUARD_BYTES, bound)


def check_frames_stand_alone(codec: Codec) -> None:
    """Frames decode in any order, each without the others."""
    chunks = list(_chunks())
    frames = [_encode(codec, chunk) for chunk in chunks]
    for chunk, frame in reversed(list(zip(chunks, frames, strict=True))):
        _assert_decodes(codec, frame, chunk)


def check_short_output_is_refused(codec: Codec) -> None:
    """An output too small for the frame raises `CodecError`; what lies behind it is untouched."""
    chunk = _random(10_000)
    needed = len(_encode(codec, chunk))
    for size in (0, 1, needed // 2, needed - 1):
        memory = bytearray([_GUARD]) * (size + 2 * _GUARD_BYTES)
        out = memoryview(memory)[_GUARD_BYTES : _GUARD_BYTES + size]
        try:
            length = codec.encode(memoryview(chunk), out, context=_context(codec, len(chunk)))
        except CodecError:
            _assert_guarded(memory, _GUARD_BYTES, size)
        else:
            msg = f"encode returned {length} for an output of {size} bytes; it needs {needed}"
            raise AssertionError(msg)
    # The failure left nothing behind in the codec.
    _assert_decodes(codec, _encode(codec, chunk), chunk)


def check_truncated_frames_are_refused(codec: Codec) -> None:
    """A frame that is cut anywhere raises `CodecError`."""
    for chunk in (_compressible(3000), _random(500), b"x"):
        frame = _encode(codec, chunk)
        for cut in {*range(min(len(frame), 40)), *range(0, len(frame), 97), len(frame) - 1}:
            _assert_refused(codec, frame[:cut], len(chunk), f"a frame cut to {cut} bytes")


def check_extended_frames_are_refused(codec: Codec) -> None:
    """Bytes behind a frame raise `CodecError`: they are not what `encode` makes."""
    for chunk in (_compressible(3000), _random(500), b""):
        frame = _encode(codec, chunk)
        for more in (b"\0", frame or b"\0\0\0\0", b"\xff" * 9):
            _assert_refused(codec, frame + more, len(chunk), f"{len(more)} bytes too many")


def check_wrong_length_is_refused(codec: Codec) -> None:
    """A frame of a longer or shorter chunk than is asked for raises `CodecError`."""
    for chunk in (_compressible(3000), _random(500)):
        frame = _encode(codec, chunk)
        for length in (0, 1, len(chunk) - 1, len(chunk) + 1, 2 * len(chunk)):
            _assert_refused(codec, frame, length, f"a frame of {len(chunk)} bytes as {length}")


def check_garbage_is_refused(codec: Codec) -> None:
    """Random bytes raise `CodecError`; a codec that must accept any bytes is not for storage."""
    for size in (0, 1, 4, 16, 100, 5000):
        _assert_refused(codec, _random(size), 4099, f"{size} random bytes")


def check_flipped_bits_never_overrun(codec: Codec) -> None:
    """A frame with flipped bits decodes to something or raises `CodecError`, and stays in bounds.

    That the result is wrong is found by the checksums around every frame, not by the codec.
    """
    chunk = _compressible(2000)
    frame = bytearray(_encode(codec, chunk))
    for bit in random.Random(7).sample(range(8 * len(frame)), min(400, 8 * len(frame))):  # noqa: S311
        frame[bit // 8] ^= 1 << bit % 8
        _try_decode(codec, bytes(frame), len(chunk))
        frame[bit // 8] ^= 1 << bit % 8


def check_threads(codec: Codec, *, threads: int = 4) -> None:
    """One instance serves several threads at once."""

    def work(seed: int) -> None:
        for turn in range(6):
            chunk = _random(150_000 + turn, seed=seed) + _compressible(150_000 + seed)
            _assert_decodes(codec, _encode(codec, chunk), chunk)

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, seed) for seed in range(threads)]:
            done.result()


def check_small_frames_take_little_memory(codec: Codec) -> None:
    """A small frame that holds a huge chunk is refused before much memory is taken for it.

    Only what Python's allocators know of is counted, as results of C libraries usually are.
    """
    frame = _encode(codec, bytes(BOMB_BYTES))
    already = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        _assert_refused(codec, frame, 1000, f"a frame of {BOMB_BYTES} bytes as 1000")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not already:
            tracemalloc.stop()
    taken = peak - before - 2 * len(frame)  # `_assert_refused` holds copies of the frame
    assert taken < BOMB_BYTES // 2, f"decoding at most 1000 bytes took {taken} bytes of memory"


def check_gil_is_released(codec: Codec) -> None:
    """Other threads run while a large chunk is encoded or decoded: training is one of them."""
    chunk = _compressible(LARGE_BYTES)
    frame = _encode(codec, chunk)
    out = bytearray(codec.max_encoded_size(len(chunk)))
    context = _context(codec, len(chunk))
    for what, work in (
        ("encode", lambda: codec.encode(memoryview(chunk), memoryview(out), context=context)),
        ("decode", lambda: _try_decode(codec, frame, len(chunk))),
    ):
        # Now and then the other thread is too late: the machine has other things to do.
        released = any(_lets_others_run(work) for _ in range(20))
        assert released, f"{what} held the GIL from beginning to end of {len(chunk)} bytes"


def _lets_others_run(work: Callable[[], object]) -> bool:
    """Whether this thread got to run while `work` was under way in another one."""
    state = "before"

    def run() -> None:
        nonlocal state
        state = "inside"
        try:
            work()
        finally:
            state = "over"

    thread = threading.Thread(target=run)
    interval_s = sys.getswitchinterval()
    # Nobody is made to give the GIL up: who runs meanwhile was let.
    sys.setswitchinterval(60)
    ran = False
    try:
        thread.start()
        while state != "over":
            ran = ran or state == "inside"
            time.sleep(0)
        thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    return ran


def check_base(codec: Codec) -> None:
    """A codec that declares `needs_base` uses it: without it, its frames are refused.

    All other checks give such a codec a base.
    """
    if not codec.needs_base:
        return  # it never sees one
    chunk = _compressible(5000)
    frame = _encode(codec, chunk)
    out = memoryview(bytearray(len(chunk)))
    context = replace(_context(codec, len(chunk)), base=None)
    try:
        codec.decode(memoryview(frame), out, context=context)
    except CodecError:
        return
    msg = "it declares needs_base, but decoded a frame without: core would read bases for nothing"
    raise AssertionError(msg)


# -- material -----------------------------------------------------------------------------------


def _random(size: int, *, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)  # noqa: S311


def _compressible(size: int) -> bytes:
    pattern = b"".join(n.to_bytes(4, "little") for n in range(1000))
    return (pattern * (size // len(pattern) + 1))[:size]


def _chunks() -> Iterator[bytes]:
    for size in SIZES:
        yield _random(size)
        yield _compressible(size)
        yield bytes(size)


def _context(codec: Codec, length: int) -> CodecContext:
    base = memoryview(_random(length, seed=3)) if codec.needs_base else None
    return CodecContext("uint8", 1, (length,), 0, length, base)


def _encode(codec: Codec, chunk: bytes) -> bytes:
    source = bytearray(chunk)
    out = bytearray(codec.max_encoded_size(len(chunk)))
    length = codec.encode(memoryview(source), memoryview(out), context=_context(codec, len(chunk)))
    assert source == chunk, "encode changed its input"
    assert 0 <= length <= len(out), f"encode returned {length}, its bound is {len(out)}"
    return bytes(out[:length])


def _try_decode(codec: Codec, frame: bytes, length: int) -> bytes | None:
    memory = bytearray([_GUARD]) * (length + 2 * _GUARD_BYTES)
    out = memoryview(memory)[_GUARD_BYTES : _GUARD_BYTES + length]
    source = bytearray(frame)
    try:
        codec.decode(memoryview(source), out, context=_context(codec, length))
    except CodecError:
        return None
    finally:
        _assert_guarded(memory, _GUARD_BYTES, length)
        assert source == frame, "decode changed its input"
    return bytes(out)


def _assert_decodes(codec: Codec, frame: bytes, chunk: bytes) -> None:
    decoded = _try_decode(codec, frame, len(chunk))
    assert decoded is not None, f"decode refused a frame of {len(chunk)} bytes that encode made"
    if codec.lossless:
        assert decoded == chunk, f"a chunk of {len(chunk)} bytes came back changed"


def _assert_refused(codec: Codec, frame: bytes, length: int, what: str) -> None:
    decoded = _try_decode(codec, frame, length)
    assert decoded is None, f"decode accepted {what}"


def _assert_guarded(memory: bytearray, start: int, size: int) -> None:
    guard = bytes([_GUARD])
    assert memory[:start] == guard * start, "something was written before the output"
    behind = memory[start + size :]
    assert behind == guard * len(behind), "something was written behind the output"

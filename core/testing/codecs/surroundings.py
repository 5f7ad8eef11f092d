"""Checks of a codec's resources: memory, buffers, threads, the GIL, a base."""

from __future__ import annotations

import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.core.abc import Declined
from penstock.core.errors import CodecError
from penstock.core.testing.codecs.calls import (
    DeclinedChunkError,
    bound_of,
    compressible,
    context_of,
    encode,
    expect_decodes,
    expect_length,
    expect_refused,
    in_words,
    random_bytes,
    whole,
)
from penstock.core.testing.codecs.frames import LARGE_BYTES
from penstock.core.testing.codecs.lending import Lender
from penstock.core.testing.expectations import finding

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import Codec

BOMB_BYTES = 32 << 20
_THREADS = 4


@in_words
def check_small_frames_take_little_memory(codec: Codec) -> None:
    """Check that a small frame of a huge chunk is refused before much memory is allocated.

    Only memory of Python's allocators is counted, which includes most results of C libraries.
    """
    frame = encode(codec, bytes(BOMB_BYTES))
    already = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        expect_refused(codec, frame, 1024, f"a frame of {BOMB_BYTES} bytes as 1024")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not already:
            tracemalloc.stop()
    taken = peak - before - 2 * len(frame)  # `expect_refused` holds copies of the frame
    assert taken < BOMB_BYTES // 2, f"decoding at most 1024 bytes took {taken} bytes of memory"


@in_words
def check_threads(codec: Codec) -> None:
    """Check that one instance serves several threads at once."""

    def work(seed: int) -> None:
        for turn in range(6):
            chunk = random_bytes(15_000 + turn, seed=seed) + compressible(285_000 + seed)
            chunk = chunk[: whole(codec, len(chunk))]
            expect_decodes(codec, encode(codec, chunk), chunk)

    with ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(work, seed) for seed in range(_THREADS)]:
            done.result()


@in_words
def check_buffers_are_given_back(codec: Codec) -> None:
    """Check that no view of input, output or base is kept after a call."""
    for size in (whole(codec, 1000), whole(codec, 200_000)):
        chunk = compressible(size)
        frame = _lent(codec, chunk, bound_of(codec, size), size, "encode")
        decoded = _lent(codec, frame, size, size, "decode")
        assert decoded == chunk or not codec.lossless, (
            f"a chunk of {size} bytes came back changed, from buffers that hold other bytes "
            "once the call is over"
        )


def _lent(codec: Codec, given: bytes, room: int, raw_length: int, name: str) -> bytes:
    """Return the result of `encode` or `decode` (by `name`) of `given` in lent buffers."""
    lender = Lender()
    context = context_of(codec, raw_length)

    def call(source: memoryview, out: memoryview, base: memoryview | None) -> bytes:
        lent = replace(context, base=base)
        with finding(f"{name} of {len(given)} bytes"):
            if name == "decode":
                codec.decode(source, out, context=lent)
                return bytes(out)
            length = codec.encode(source, out, context=lent)
            if isinstance(length, Declined):
                raise DeclinedChunkError
            return bytes(out[: expect_length(length, room)])

    def with_output(source: memoryview, base: memoryview | None) -> bytes:
        return lender.lend(
            bytes(room), f"`{name}` (its output)", lambda out: call(source, out, base)
        )

    def with_input(base: memoryview | None) -> bytes:
        return lender.lend(given, f"`{name}` (its input)", lambda source: with_output(source, base))

    if context.base is None:
        return with_input(None)
    return lender.lend(context.base, f"`{name}` (its base)", with_input)


@in_words
def check_gil_is_released(codec: Codec) -> None:
    """Check that other threads, such as training, run while a large chunk is encoded or decoded."""
    chunk = compressible(whole(codec, LARGE_BYTES))
    frame = encode(codec, chunk)
    out = bytearray(bound_of(codec, len(chunk)))
    context = context_of(codec, len(chunk))
    for what, work in (
        ("encode", lambda: codec.encode(memoryview(chunk), memoryview(out), context=context)),
        ("decode", lambda: expect_decodes(codec, frame, chunk, context)),
    ):
        # Several tries: on a busy machine this thread may be scheduled only after the work.
        with finding(f"{what} in another thread"):
            released = any(lets_others_run(work) for _ in range(20))
        assert released, f"{what} held the GIL from beginning to end of {len(chunk)} bytes"


def lets_others_run(work: Callable[[], object]) -> bool:
    """Return whether this thread ran while `work` ran in another one."""
    state = "before"
    failure: BaseException | None = None

    def run() -> None:
        nonlocal state, failure
        state = "inside"
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that asked
            failure = error
        finally:
            state = "over"

    thread = threading.Thread(target=run)
    interval_s = sys.getswitchinterval()
    # With a switch interval this long no thread is forced to release the GIL: if this thread runs,
    # `work` has released it.
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
    if failure is not None:
        raise failure
    return ran


@in_words
def check_base(codec: Codec) -> None:
    """Check that a codec that declares `needs_base` does without where there is none.

    It declines chunks then, as of the first checkpoint of a run, and refuses its frames. All other
    checks give such a codec a base.
    """
    if not codec.needs_base:
        return  # core never gives such a codec a base
    chunk = compressible(whole(codec, 5000))
    frame = encode(codec, chunk)
    out = memoryview(bytearray(len(chunk)))
    context = replace(context_of(codec, len(chunk)), base=None)
    room = memoryview(bytearray(bound_of(codec, len(chunk))))
    with finding("encode of a chunk that has no base"):
        length = codec.encode(memoryview(chunk), room, context=context)
    assert isinstance(length, Declined), (
        "it declares needs_base, but encoded a chunk without: return DECLINED where context.base "
        "is None"
    )
    with finding("decode of a frame without the base it was encoded with"):
        try:
            codec.decode(memoryview(frame), out, context=context)
        except CodecError:
            return
    msg = "it declares needs_base, but decoded a frame without: core would read bases for nothing"
    raise AssertionError(msg)

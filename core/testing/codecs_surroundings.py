"""Checks of codecs: what they need and hold besides: memory, threads, the GIL, a base."""

from __future__ import annotations

import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.core.errors import CodecError
from penstock.core.testing.codecs_calls import (
    bound_of,
    compressible,
    context_of,
    encode,
    expect_decodes,
    expect_length,
    expect_refused,
    in_words,
    random_bytes,
)
from penstock.core.testing.codecs_frames import LARGE_BYTES
from penstock.core.testing.expectations import finding
from penstock.core.testing.lending import Lender

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import Codec

BOMB_BYTES = 32 << 20
_THREADS = 4


@in_words
def check_small_frames_take_little_memory(codec: Codec) -> None:
    """A small frame that holds a huge chunk is refused before much memory is taken for it.

    Only what Python's allocators know of is counted, as results of C libraries usually are.
    """
    frame = encode(codec, bytes(BOMB_BYTES))
    already = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        expect_refused(codec, frame, 1000, f"a frame of {BOMB_BYTES} bytes as 1000")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not already:
            tracemalloc.stop()
    taken = peak - before - 2 * len(frame)  # `expect_refused` holds copies of the frame
    assert taken < BOMB_BYTES // 2, f"decoding at most 1000 bytes took {taken} bytes of memory"


@in_words
def check_threads(codec: Codec) -> None:
    """One instance serves several threads at once."""

    def work(seed: int) -> None:
        for turn in range(6):
            chunk = random_bytes(150_000 + turn, seed=seed) + compressible(150_000 + seed)
            expect_decodes(codec, encode(codec, chunk), chunk)

    with ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(work, seed) for seed in range(_THREADS)]:
            done.result()


@in_words
def check_buffers_are_given_back(codec: Codec) -> None:
    """Input, output and base are the codec's own only during the call: no view of one is kept."""
    for size in (1000, 200_000):
        chunk = compressible(size)
        frame = _lent(codec, chunk, bound_of(codec, size), size, "encode")
        decoded = _lent(codec, frame, size, size, "decode")
        assert decoded == chunk or not codec.lossless, (
            f"a chunk of {size} bytes came back changed, from buffers that hold other bytes "
            "once the call is over"
        )


def _lent(codec: Codec, given: bytes, room: int, raw_length: int, name: str) -> bytes:
    """What `encode` or `decode`, whichever `name` says, makes of `given` in lent buffers."""
    lender = Lender()
    context = context_of(codec, raw_length)

    def call(source: memoryview, out: memoryview, base: memoryview | None) -> bytes:
        lent = replace(context, base=base)
        with finding(f"{name} of {len(given)} bytes"):
            if name == "decode":
                codec.decode(source, out, context=lent)
                return bytes(out)
            return bytes(out[: expect_length(codec.encode(source, out, context=lent), room)])

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
    """Other threads run while a large chunk is encoded or decoded: training is one of them."""
    chunk = compressible(LARGE_BYTES)
    frame = encode(codec, chunk)
    out = bytearray(bound_of(codec, len(chunk)))
    context = context_of(codec, len(chunk))
    for what, work in (
        ("encode", lambda: codec.encode(memoryview(chunk), memoryview(out), context=context)),
        ("decode", lambda: expect_decodes(codec, frame, chunk)),
    ):
        # Now and then the other thread is too late: the machine has other things to do.
        with finding(f"{what} in another thread"):
            released = any(_lets_others_run(work) for _ in range(20))
        assert released, f"{what} held the GIL from beginning to end of {len(chunk)} bytes"


def _lets_others_run(work: Callable[[], object]) -> bool:
    """Whether this thread got to run while `work` was under way in another one."""
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
    if failure is not None:
        raise failure
    return ran


@in_words
def check_base(codec: Codec) -> None:
    """A codec that declares `needs_base` uses it: without it, its frames are refused.

    All other checks give such a codec a base.
    """
    if not codec.needs_base:
        return  # it never sees one
    chunk = compressible(5000)
    frame = encode(codec, chunk)
    out = memoryview(bytearray(len(chunk)))
    context = replace(context_of(codec, len(chunk)), base=None)
    with finding("decode of a frame without the base it was encoded with"):
        try:
            codec.decode(memoryview(frame), out, context=context)
        except CodecError:
            return
    msg = "it declares needs_base, but decoded a frame without: core would read bases for nothing"
    raise AssertionError(msg)

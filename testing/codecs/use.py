"""Checks of a codec in use: its resources, other processes, and checkpoints saved through it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.core.abc import Codec, CodecContext, CodecOutput, Declined, PluginConfig
from penstock.core.checkpointer import Checkpointer
from penstock.core.errors import CodecError
from penstock.core.plugins.registry import Registry
from penstock.core.types import flat_view
from penstock.testing.codecs.calls import (
    ELEMENTS,
    DeclinedChunkError,
    as_given,
    bound_of,
    compressible,
    context_of,
    encode,
    expect_decodes,
    expect_length,
    expect_refused,
    expect_unchanged,
    in_words,
    random_bytes,
    rare_floats,
    try_decode,
    whole,
)
from penstock.testing.codecs.frames import LARGE_BYTES
from penstock.testing.expectations import Lender, finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Arrays = Mapping[str, np.ndarray[Any, Any]]

BOMB_BYTES = 32 << 20
_THREADS = 4

_CHILD = "import sys; from penstock.testing.codecs.use import answer; answer(*sys.argv[1:])"
_TIMEOUT_S = 300
_INSIDE = "PENSTOCK_TESTING_CODEC_PROCESS"

_LARGE_BYTES = 5 << 18  # two chunks
_SMALL_BYTES = 4096


@in_words
def check_small_frames_take_little_memory(codec: Codec) -> None:
    """Check that a small frame that decodes to far too much is refused before much is allocated.

    Counts only memory of Python's allocators, which includes most results of C libraries.
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
    used = peak - before - 2 * len(frame)  # `expect_refused` holds copies of the frame
    assert used < BOMB_BYTES // 2, f"decoding at most 1024 bytes took {used} bytes of memory"


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
    """Check that the codec keeps no view of input, output or base after a call."""
    for size in (whole(codec, 1000), whole(codec, 200_000)):
        chunk = compressible(size)
        frame = _lent(codec, chunk, bound_of(codec, size), size, "encode")
        decoded = _lent(codec, frame, size, size, "decode")
        assert decoded == chunk or not codec.lossless, (
            f"a chunk of {size} bytes came back changed, from buffers that hold other bytes "
            "after the call"
        )


def _lent(codec: Codec, given: bytes, room: int, raw_length: int, name: str) -> bytes:
    """Call `encode` or `decode` (`name`) on `given` in lent buffers, and return the result."""
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
    """Check that other threads, such as training, run while it encodes or decodes a large chunk."""
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
        assert released, f"{what} of {len(chunk)} bytes held the GIL from beginning to end"


def lets_others_run(work: Callable[[], object]) -> bool:
    """Return whether this thread ran while `work` ran in another thread."""
    state = "before"
    failure: BaseException | None = None

    def run() -> None:
        nonlocal state, failure
        state = "inside"
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below, in the calling thread
            failure = error
        finally:
            state = "over"

    thread = threading.Thread(target=run)
    interval_s = sys.getswitchinterval()
    # With so long a switch interval no thread has to release the GIL: if this thread runs, `work`
    # has released it.
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
    """Check that a codec that declares `needs_base` handles a missing base.

    Without a base, as for the first checkpoint of a run, it must decline chunks and refuse its
    frames. All other checks give such a codec a base.
    """
    if not codec.needs_base:
        return  # core never gives such a codec a base
    chunk = compressible(whole(codec, 5000))
    frame = encode(codec, chunk)
    out = memoryview(bytearray(len(chunk)))
    context = replace(context_of(codec, len(chunk)), base=None)
    room = memoryview(bytearray(bound_of(codec, len(chunk))))
    with finding("encode of a chunk without a base"):
        length = codec.encode(memoryview(chunk), room, context=context)
    assert isinstance(length, Declined), (
        "it declares needs_base, but encoded a chunk without a base: return DECLINED if "
        "context.base is None"
    )
    with finding("decode of a frame without the base it was encoded with"):
        try:
            codec.decode(memoryview(frame), out, context=context)
        except CodecError:
            return
    msg = (
        "it declares needs_base, but decoded a frame without its base: core would read bases "
        "needlessly"
    )
    raise AssertionError(msg)


@in_words
def check_other_processes(codec: Codec) -> None:
    """Check that a frame decodes to the same bytes in its own and in another process.

    Skips a class that no other process can import: one in a function or a script.
    """
    cls = type(codec)
    if _INSIDE in os.environ:
        return  # the codec's module runs this check on import: the processes would never end
    if _found(cls.__module__, cls.__qualname__) is not cls or cls.__module__ == "__main__":
        return
    cases = list(_cases(codec))
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        asked = {
            "config": codec.config.model_dump(mode="json"),
            "cases": [[*_facts(context), chunk.hex(), own.hex()] for chunk, own, context in cases],
        }
        Path(folder, "asked").write_text(json.dumps(asked), encoding="utf-8")
        # Another hash seed, so that no result depends on the order of a set.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), _INSIDE: "1"}
        environment["PYTHONHASHSEED"] = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
        done = subprocess.run(  # noqa: S603 - Python itself
            [sys.executable, "-c", _CHILD, cls.__module__, cls.__qualname__, folder],
            env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"another process could not use the codec: {done.stderr}"
        answers = json.loads(Path(folder, "answers").read_text(encoding="utf-8"))
    for (chunk, own, context), (decoded, frame) in zip(cases, answers, strict=True):
        here = try_decode(codec, own, len(chunk), context)
        assert isinstance(here, bytes), f"decode refused its own frame: {here}"
        what = f"a frame of {len(chunk)} bytes of {context.dtype}"
        expect_unchanged(bytes.fromhex(decoded), here, f"{what}, decoded in another process,")
        if frame is not None:
            there = try_decode(codec, bytes.fromhex(frame), len(chunk), context)
            assert isinstance(there, bytes), f"decode refused {what} from another process: {there}"
            expect_unchanged(there, here, f"{what}, encoded in another process,")


def _cases(codec: Codec) -> Iterator[tuple[bytes, bytes, CodecContext]]:
    """Yield chunks that the codec takes, each with its frame."""
    for dtype, itemsize in (("uint8", 1), *ELEMENTS):
        length = 40 * 50 * itemsize
        context = as_given(codec, CodecContext(dtype, itemsize, (40, 50), 0, length))
        for chunk in (rare_floats(dtype, length), random_bytes(length), compressible(length)):
            with contextlib.suppress(DeclinedChunkError):
                frame = encode(codec, chunk, context)
                expect_decodes(codec, frame, chunk, context)
                yield chunk, frame, context


def _facts(context: CodecContext) -> list[Any]:
    return [context.dtype, context.itemsize, list(context.shape), context.start, context.raw_length]


def answer(module: str, name: str, folder: str) -> None:
    """Decode and encode the cases of `check_other_processes`, in the other process."""
    asked = json.loads(Path(folder, "asked").read_text(encoding="utf-8"))
    cls = _found(module, name)
    codec = cls(cls.Config.model_validate(asked["config"]))
    answers = []
    for dtype, itemsize, shape, start, length, chunk, frame in asked["cases"]:
        context = as_given(codec, CodecContext(dtype, itemsize, tuple(shape), start, length))
        decoded = bytearray(length)
        codec.decode(memoryview(bytes.fromhex(frame)), memoryview(decoded), context=context)
        out = memoryview(bytearray(codec.max_encoded_size(length)))
        stored = codec.encode(memoryview(bytes.fromhex(chunk)), out, context=context)
        again = None if isinstance(stored, Declined) else bytes(out[:stored]).hex()
        answers.append([decoded.hex(), again])
    Path(folder, "answers").write_text(json.dumps(answers), encoding="utf-8")


def _found(module: str, name: str) -> Any:
    try:
        return reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError):
        return None


@in_words
def check_saved_and_loaded(codec: Codec) -> None:
    """Check that large and small arrays of many dtypes load after a save through the codec.

    A lossy codec must decode to the same bytes each time, and objects outside its rule must stay
    unchanged. A codec that needs a base gets none, as for the first checkpoint of a run.
    """
    _loaded(codec, [codec.name])


@in_words
def check_chains(codec: Codec) -> None:
    """Check that arrays saved through codec chains load again, with the codec at any position.

    One neighbor outputs whole elements, the other an odd number of bytes. A codec that is lossy or
    needs a base is put only at the start of a chain.
    """
    alone = _loaded(codec, [codec.name])
    for chain in (
        [codec.name, _Marked.name],
        [_Turned.name, codec.name],
        [_Marked.name, codec.name],
        [_Turned.name, codec.name, _Marked.name],
    ):
        if chain[0] != codec.name and (codec.needs_base or not codec.lossless):
            continue  # such a chain is refused
        for name, array in _loaded(codec, chain).items():
            assert array.tobytes() == alone[name].tobytes(), (
                f"an array ({name}) that was saved through {' -> '.join(chain)} differs from "
                f"one saved through {codec.name} alone"
            )


def _loaded(codec: Codec, chain: Sequence[str]) -> Arrays:
    """Save arrays through a chain, check the loaded arrays, and return those of the chain."""
    encoded = _arrays()
    beside = encoded["f4-small"].copy()
    state = {"encoded": encoded, "beside": beside, "value": "kept as it is"}
    rules = [{"match": "encoded/**", "codecs": list(chain)}]
    with (
        finding(f"a checkpoint written through {' -> '.join(chain)}"),
        Checkpointer(
            "memory://", registry=_WithCodec(codec), rules=rules, chunk_bytes=1 << 20
        ) as ckpt,
    ):
        ckpt.save(state, 1, mode="blocking")
        loaded, again = ckpt.load(1), ckpt.load(1)
        report = ckpt.verify(1)
    assert report.ok, f"a checkpoint written through it is damaged: {report.damaged[:3]}"
    assert loaded["value"] == state["value"], "a value that it does not encode came back changed"
    assert loaded["beside"].tobytes() == beside.tobytes(), (
        "an array outside its rule came back changed"
    )
    arrays: Arrays = loaded["encoded"]
    for name, array in encoded.items():
        assert arrays[name].tobytes() == again["encoded"][name].tobytes(), (
            f"an array ({name}) decodes to other bytes each time"
        )
        assert not codec.lossless or arrays[name].tobytes() == array.tobytes(), (
            f"an array ({name}) was saved through {' -> '.join(chain)}, and loaded with other bytes"
        )
    return arrays


def _arrays() -> dict[str, np.ndarray[Any, Any]]:
    arrays = {}
    for dtype in ("f2", "f4", "u1", "i8"):
        for size, name in ((_SMALL_BYTES, "small"), (_LARGE_BYTES, "large")):
            data = compressible(size // 2) + random_bytes(size // 2)
            arrays[f"{dtype}-{name}"] = np.frombuffer(data, dtype)
    return arrays


class _Turned(Codec):
    """Flips every bit, so elements keep their places."""

    name: ClassVar[str] = "penstock-testing-turned"
    lossless: ClassVar[bool] = True

    def max_encoded_size(self, raw_length: int, /) -> int:
        return raw_length

    def output(self, context: CodecContext, /) -> CodecOutput:
        return CodecOutput(context.dtype, context.itemsize, elementwise=True)

    def encode(self, chunk: memoryview, out: memoryview, /, *, context: CodecContext) -> int:
        source = np.frombuffer(flat_view(chunk), np.uint8)
        np.invert(source, out=np.frombuffer(flat_view(out), np.uint8)[: context.raw_length])
        return context.raw_length

    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        if frame.nbytes != context.raw_length:
            msg = f"{frame.nbytes} bytes are not {context.raw_length}"
            raise CodecError(msg)
        np.invert(
            np.frombuffer(flat_view(frame), np.uint8), out=np.frombuffer(flat_view(out), np.uint8)
        )


class _Marked(_Turned):
    """Puts one byte before the chunk, which shifts all elements."""

    name: ClassVar[str] = "penstock-testing-marked"

    def max_encoded_size(self, raw_length: int, /) -> int:
        return raw_length + 1

    def output(self, context: CodecContext, /) -> CodecOutput:
        del context
        return CodecOutput()

    def encode(self, chunk: memoryview, out: memoryview, /, *, context: CodecContext) -> int:
        out[0] = 1
        return 1 + super().encode(chunk, out[1:], context=context)

    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        super().decode(frame[1:], out, context=context)


class _WithCodec(Registry):
    """The installed plugins, plus a codec and its neighbors, which need not be installed."""

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        own = (codec, _Turned(PluginConfig()), _Marked(PluginConfig()))
        self._tried = {given.name: given for given in own}

    def codec(self, name: str, config: Mapping[str, Any], /) -> Codec:
        return self._tried[name] if name in self._tried else super().codec(name, config)

    def codec_from_record(self, name: str, version: int, config: Mapping[str, Any], /) -> Codec:
        if name in self._tried:
            return self._tried[name]
        return super().codec_from_record(name, version, config)

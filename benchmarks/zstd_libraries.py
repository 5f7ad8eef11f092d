"""The `zstd` codec against the same work done with `backports.zstd`, turn by turn, in GB/s of CPU.

`backports.zstd` is the standard library's `compression.zstd`. It returns new bytes only, so a chunk
goes through it in pieces of 4 MiB, which are copied into the caller's buffer.

    .venv/bin/python -m pip install backports.zstd
    .venv/bin/python benchmarks/zstd_libraries.py
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import numpy as np
import typer
from backports import zstd

from penstock.codecs.zstd import PIECE_BYTES, ZstdCodec, ZstdConfig
from penstock.core.abc import CodecContext


def main(
    *,
    rounds: Annotated[int, typer.Option(help="Rounds for 16 MiB; more for less.", min=3)] = 9,
    level: Annotated[int, typer.Option(help="Level of zstd.")] = 3,
) -> None:
    """Print encoding and decoding rates of both libraries."""
    print(f"{'GB/s of CPU':<26}{'stored':>8}{'encode':>9}{'backports':>11}", end="")
    print(f"{'decode':>9}{'backports':>11}")
    for size in (16 << 20, 1 << 20, 64 << 10):
        for kind in ("float32", "bfloat16", "text", "sparse float32"):
            measure(kind, size, level, rounds * max(1, min(40, (4 << 20) // size)))


def measure(kind: str, size: int, level: int, rounds: int) -> None:
    """Time one kind of data and size; each round times every way once."""
    chunk = memoryview(content(kind, size)).cast("B")
    codec = ZstdCodec(ZstdConfig(level=level))
    context = CodecContext("uint8", 1, (size,), 0, size)
    out = memoryview(bytearray(codec.max_encoded_size(size)))
    frame = out[: codec.encode(chunk, out, context=context)].toreadonly()
    other, back = memoryview(bytearray(out.nbytes)), memoryview(bytearray(size))
    compressor = zstd.ZstdCompressor(level)
    ways = {
        "encode": lambda: codec.encode(chunk, out, context=context),
        "encode, backports": lambda: encode(compressor, chunk, other),
        "decode": lambda: codec.decode(frame, back, context=context),
        "decode, backports": lambda: decode(frame, back),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, call in ways.items():
            begun = time.thread_time()
            call()
            seconds[way].append(time.thread_time() - begun)
            if way.startswith("decode"):
                assert back == chunk
                back[:] = bytes(size)
    rates = [size / statistics.median(taken) / 1e9 for taken in seconds.values()]
    name = f"{kind}, {size >> 10} KiB"
    print(f"{name:<26}{frame.nbytes / size:8.3f}{rates[0]:9.2f}{rates[1]:11.2f}", end="")
    print(f"{rates[2]:9.2f}{rates[3]:11.2f}", flush=True)


def content(kind: str, size: int) -> np.ndarray:
    """Return `size` bytes of that kind."""
    rng = np.random.default_rng(0)
    if kind == "text":
        return np.frombuffer(" ".join(map(str, range(size // 4))).encode()[:size], np.uint8)
    if kind == "bfloat16":
        words = rng.standard_normal(size // 2, dtype=np.float32).view(np.uint32) >> 16
        return words.astype(np.uint16)
    values = rng.standard_normal(size // 4, dtype=np.float32)
    if kind == "sparse float32":
        values[np.arange(values.size) % 37 > 0] = 0
    return values


def encode(compressor: zstd.ZstdCompressor, chunk: memoryview, out: memoryview) -> int:
    """Compress piece by piece into the caller's buffer."""
    compressor.set_pledged_input_size(chunk.nbytes)
    length = 0
    for start in range(0, chunk.nbytes, PIECE_BYTES):
        last = start + PIECE_BYTES >= chunk.nbytes
        mode = zstd.ZstdCompressor.FLUSH_FRAME if last else zstd.ZstdCompressor.CONTINUE
        piece = compressor.compress(chunk[start : start + PIECE_BYTES], mode)
        out[length : length + len(piece)] = piece
        length += len(piece)
    return length


def decode(frame: memoryview, out: memoryview) -> None:
    """Decompress piece by piece into the caller's buffer."""
    assert zstd.get_frame_info(frame).decompressed_size == out.nbytes
    decompressor = zstd.ZstdDecompressor()
    read = written = 0
    while not decompressor.eof:
        feed = frame[read : read + PIECE_BYTES] if decompressor.needs_input else b""
        read += len(feed)
        piece = decompressor.decompress(feed, min(PIECE_BYTES, out.nbytes - written))
        out[written : written + len(piece)] = piece
        written += len(piece)


if __name__ == "__main__":
    typer.run(main)

"""Codecs on the state of a small GPT in training: sizes, rates, and errors of lossy codecs.

    python benchmarks/make_state.py /tmp/snapshots              # once; some 20 minutes
    python -m pip install -c constraints.txt blosc2 zipnn numba
    python benchmarks/codecs.py --snapshots /tmp/snapshots

`codecs`: floatsplit, zipnn, blosc2 and zstd, in one thread: GB of raw bytes per second of CPU time,
chunk by chunk as a checkpoint cuts them; decoded bytes are compared. Kinds are weights (w) and
first and second moments (m, v). Codecs that are not installed fail, and are left out. `gradients`:
the same for clipped gradients (g) of bfloat16 autocast. `lossy`: the update of a weight is
m / (sqrt(v) + 1e-8); the error is the root of all squared errors, relative.
"""

# ruff: noqa: PLC0415 - a contender's package may be missing

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from bench import Benchmark, check

from penstock.core.abc import DECLINED, CodecContext
from penstock.core.pipeline.codec_chain import CodecChain
from penstock.core.plugins.registry import Registry

CHUNK, SLAB, PIECE = 16 << 20, 1 << 20, 1 << 20
KINDS = ("w bf16", "w fp32", "m fp32", "v fp32", "m bf16", "v bf16")
# 14 bytes for each parameter: the state of mixed-precision training with Adam.
STATE = ("w bf16", "w fp32", "m fp32", "v fp32")
BF16, FP16, LOG8 = ("cast", {"to": "bfloat16"}), ("cast", {"to": "float16"}), ("log8", {})
GRADIENTS = {
    "Penstock, floatsplit": ("floatsplit",),
    "Penstock, factor and floatsplit": ("factor", "floatsplit"),
}
LOSSY = {
    "Penstock, m and v cast to bfloat16": (BF16, BF16),
    "Penstock, v in log8": (None, LOG8),
    "Penstock, m cast to bfloat16, v in log8": (BF16, LOG8),
    "Penstock, m cast to float16": (FP16, None),
}


@dataclass(frozen=True)
class Chunk:
    """Bytes that are encoded in one call, and what the codec knows of them."""

    data: np.ndarray
    context: CodecContext


class Ours:
    """A codec of Penstock, with reused memory."""

    def __init__(self, name, *, fused=True, **options):
        self.codec = Registry().codec(name, options)
        self.out = np.zeros(self.codec.max_encoded_size(CHUNK), np.uint8)
        self.back = np.zeros(CHUNK, np.uint8)
        if not fused:
            from penstock.codecs import floatsplit
            from penstock.codecs.floatsplit import entropy
            from penstock.codecs.kernels import PLAIN

            floatsplit.kernels = entropy.kernels = lambda: PLAIN

    def prepare(self, chunk):
        return [chunk.data]

    def encode(self, pieces, chunk):
        length = self.codec.encode(pieces[0].data, self.out.data, context=chunk.context)
        return pieces if length is DECLINED else [self.out[:length]]

    def decode(self, frames, chunk):
        if frames[0] is chunk.data:
            return [chunk.data]
        back = self.back[: chunk.data.size]
        self.codec.decode(frames[0].data, back.data, context=chunk.context)
        return [back]


class Chain:
    """Codecs of Penstock one after the other, with checksums, and reused memory."""

    def __init__(self, names):
        chain = CodecChain([Registry().codec(name, {}) for name in names])
        self.chain, self.back = chain, np.zeros(CHUNK, np.uint8)
        self.out = np.zeros(chain.max_encoded_size(CHUNK), np.uint8)

    def prepare(self, chunk):
        return [chunk.data]

    def encode(self, pieces, chunk):
        encoded = self.chain.encode(pieces[0].data, self.out.data, context=chunk.context)
        self.left = [c for n, c in enumerate(self.chain.codecs) if n not in encoded.declined]
        self.lengths = encoded.lengths
        return [self.out[: encoded.length]] if self.left else pieces

    def decode(self, frames, chunk):
        if not self.left:
            return frames
        back = self.back[: chunk.data.size].data
        chain, lengths = CodecChain(self.left), self.lengths
        chain.decode(frames[0].data, back, context=chunk.context, lengths=lengths)
        return [back]


class Zipnn:
    """It overwrites its input, so it gets copies; pieces of 1 MiB are fastest."""

    def __init__(self):
        import zipnn

        kinds = ("bfloat16", "float32")
        self.of = {dtype: zipnn.ZipNN(bytearray_dtype=dtype, threads=1) for dtype in kinds}

    def prepare(self, chunk):
        return [bytearray(chunk.data[s : s + PIECE]) for s in range(0, chunk.data.size, PIECE)]

    def encode(self, pieces, chunk):
        return [self.of[chunk.context.dtype].compress(piece) for piece in pieces]

    def decode(self, frames, chunk):
        return [self.of[chunk.context.dtype].decompress(frame) for frame in frames]


class Blosc:
    """blosc2 at its first level, with reused memory where it can."""

    def __init__(self, codec, filter_):
        import blosc2

        self.lib, self.back = blosc2, np.zeros(CHUNK, np.uint8)
        filters = {"filters": [blosc2.Filter[filter_]], "filters_meta": [0]}
        self.how = {"codec": blosc2.Codec[codec], **filters, "clevel": 1, "nthreads": 1}

    def prepare(self, chunk):
        return [chunk.data]

    def encode(self, pieces, chunk):
        return [self.lib.compress2(pieces[0], typesize=chunk.context.itemsize, **self.how)]

    def decode(self, frames, chunk):
        back = self.back[: chunk.data.size]
        self.lib.decompress2(frames[0], dst=back, nthreads=1)
        return [back]


def load(path, kind):
    """Return the chunks of a kind, cut as a checkpoint cuts them."""
    which, dtype = kind.split()
    tensors = [values[which] for values in torch.load(path).values()]
    tensors = [t.bfloat16() if dtype == "bf16" else t for t in tensors]
    name, size = str(tensors[0].dtype).removeprefix("torch."), tensors[0].element_size()
    chunks, small = [], []
    for tensor in tensors:
        raw = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
        if raw.size < SLAB:
            small.append(np.pad(raw, (0, -raw.size % 64)))
            continue
        for start in range(0, raw.size, CHUNK):
            part = raw[start : start + CHUNK].copy()
            context = CodecContext(name, size, tuple(tensor.shape), start, part.size)
            chunks.append(Chunk(part, context))
    while small:  # tensors below 1 MiB share chunks of 1 MiB
        slab = [small.pop(0)]
        while small and sum(part.size for part in slab) + small[0].size <= SLAB:
            slab.append(small.pop(0))
        raw = np.concatenate(slab)
        chunks.append(Chunk(raw, CodecContext(name, size, (raw.size // size,), 0, raw.size)))
    return chunks


def codec(make, _, options):
    """Encode and decode all chunks; the first chunk of each kind compiles, and touches memory."""
    torch.set_num_threads(1)
    contender, row, totals = make(), {}, np.zeros(4)
    for kind in KINDS:
        chunks = load(options.snapshots / f"step{options.step}.pt", kind)
        once(contender, chunks[0])
        sums = sum(once(contender, chunk) for chunk in chunks)
        row |= figures(kind, sums)
        totals += sums if kind in STATE else 0
    return row | figures("14 bytes per parameter", totals)


def gradients(names, _, options):
    """Encode and decode the gradients; the first chunk compiles, and touches memory."""
    torch.set_num_threads(1)
    chain, chunks = Chain(names), load(options.snapshots / f"step{options.step}.pt", "g fp32")
    once(chain, chunks[0])
    sums = sum(once(chain, chunk) for chunk in chunks)
    return {"bytes per value": float(4 * sums[1] / sums[0])} | figures("g fp32", sums)


def once(contender, chunk):
    """Return raw bytes, stored bytes, and CPU seconds to encode and to decode."""
    pieces = contender.prepare(chunk)
    began = time.process_time()
    frames = contender.encode(pieces, chunk)
    encoded = time.process_time()
    stored = sum(memoryview(frame).nbytes for frame in frames)
    decoding = time.process_time()
    decoded = contender.decode(frames, chunk)
    over = time.process_time()
    back = np.concatenate([np.frombuffer(piece, np.uint8) for piece in decoded])
    check(np.array_equal(back, chunk.data), chunk.context)
    return np.array([chunk.data.size, stored, encoded - began, over - decoding])


def figures(kind, sums):
    raw, stored, encode_s, decode_s = sums
    rates = {"encoded, GB/s": raw / encode_s / 1e9, "decoded, GB/s": raw / decode_s / 1e9}
    return {
        f"{kind}: {name}": float(v) for name, v in ({"smaller by": raw / stored} | rates).items()
    }


def lossy(for_m, for_v, _, options):
    """Send moments through codecs and back, and compare the updates."""
    state = torch.load(options.snapshots / f"step{options.step}.pt")
    through, error, whole = np.zeros(2), 0.0, 0.0
    for tensors in state.values():
        m, v = tensors["m"], tensors["v"]
        m2, v2 = there_and_back(for_m, m, through), there_and_back(for_v, v, through)
        update, update2 = m / (v.sqrt() + 1e-8), m2 / (v2.sqrt() + 1e-8)
        error += float((update.double() - update2.double()).square().sum())
        whole += float(update.double().square().sum())
    return {"bytes per value": 4 * through[1] / through[0], "error": (error / whole) ** 0.5}


def there_and_back(chosen, tensor, sums):
    if chosen is None:
        return tensor
    codec = Registry().codec(*chosen)
    raw = memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")
    back = torch.empty_like(tensor)
    context = CodecContext("float32", 4, tuple(tensor.shape), 0, raw.nbytes)
    out = memoryview(bytearray(codec.max_encoded_size(raw.nbytes)))
    length = codec.encode(raw, out, context=context)
    into = memoryview(back.view(torch.uint8).numpy()).cast("B")
    codec.decode(out[:length], into, context=context)
    sums += raw.nbytes, length
    return back


CONTENDERS = {
    "Penstock, floatsplit": partial(Ours, "floatsplit"),
    "Penstock, floatsplit without numba": partial(Ours, "floatsplit", fused=False),
    "Penstock, zstd 1": partial(Ours, "zstd", level=1),
    "zipnn": Zipnn,
    "blosc2 zstd": partial(Blosc, "ZSTD", "SHUFFLE"),
    "blosc2 lz4": partial(Blosc, "LZ4", "BITSHUFFLE"),
}
GROUPS = {
    "codecs": {name: partial(codec, make) for name, make in CONTENDERS.items()},
    "gradients": {name: partial(gradients, names) for name, names in GRADIENTS.items()},
    "lossy": {name: partial(lossy, *chosen) for name, chosen in LOSSY.items()},
}

OPTIONS = {
    "snapshots": (Path("/tmp/snapshots"), "output of make_state.py"),
    "step": (200, "the snapshot to encode"),
}
BENCHMARK = Benchmark(__file__, __doc__, GROUPS, OPTIONS)

if __name__ == "__main__":
    BENCHMARK.run()

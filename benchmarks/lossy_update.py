"""Measures what lossy codecs change in the updates of AdamW, and how fast they are.

The update of a weight is m / (sqrt(v) + 1e-8); the error of all updates is the relative distance in
the sense of least squares. Rates are bytes of float32 by the CPU time of one thread.

    .venv/bin/python benchmarks/make_state.py /tmp/snapshots
    .venv/bin/python benchmarks/lossy_update.py /tmp/snapshots/step200.pt
"""

from __future__ import annotations

import time
from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import Annotated

import torch
import typer

from penstock.core.abc import CodecContext
from penstock.core.pipeline.chain import CodecChain
from penstock.core.plugins.registry import Registry

CASES = {
    "cast m and v to bfloat16": ([{"to": "bfloat16"}], [{"to": "bfloat16"}]),
    "log8 v": (None, "log8"),
    "cast m to bfloat16, log8 v": ([{"to": "bfloat16"}], "log8"),
    "cast m to float16": ([{"to": "float16"}], None),
}


def chain_of(registry, chosen):
    if chosen is None:
        return None
    if isinstance(chosen, str):
        return CodecChain([registry.codec(chosen, {})])
    return CodecChain([registry.codec("cast", options) for options in chosen])


class Through:
    """Sends tensors through a chain and back."""

    def __init__(self):
        self.raw = self.stored = 0
        self.encoding = self.decoding = 0.0

    def __call__(self, chain, tensor):
        if chain is None:
            return tensor
        raw = memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")
        back = torch.empty_like(tensor)
        into = memoryview(back.view(torch.uint8).numpy()).cast("B")
        context = CodecContext("float32", 4, tuple(tensor.shape), 0, raw.nbytes)
        out = memoryview(bytearray(chain.max_encoded_size(raw.nbytes)))
        began = time.thread_time()
        length = chain.codecs[0].encode(raw, out, context=context)
        encoded = time.thread_time()
        chain.codecs[0].decode(out[:length], into, context=context)
        self.decoding += time.thread_time() - encoded
        self.encoding += encoded - began
        self.raw += raw.nbytes
        self.stored += length
        return back


def distance(pairs):
    error = sum(float((one.double() - two.double()).square().sum()) for one, two in pairs)
    whole = sum(float(one.double().square().sum()) for one, _ in pairs)
    return (error / whole) ** 0.5


def main(snapshot: Annotated[Path, typer.Argument(help="A file of make_state.py.")]) -> None:
    registry = Registry()
    state = {k: d for k, d in torch.load(snapshot).items() if isinstance(d, dict) and "m" in d}
    print("case | bytes per value | update error | sqrt(v) error | encode GB/s | decode GB/s")
    for name, (for_m, for_v) in CASES.items():
        chain_m, chain_v, through = chain_of(registry, for_m), chain_of(registry, for_v), Through()
        updates, roots = [], []
        for tensors in state.values():
            m, v = tensors["m"], tensors["v"]
            m2, v2 = through(chain_m, m), through(chain_v, v)
            updates.append((m / (v.sqrt() + 1e-8), m2 / (v2.sqrt() + 1e-8)))
            roots.append((v.sqrt(), v2.sqrt()))
        print(
            f"{name} | {4 * through.stored / through.raw:.3f} | {distance(updates):.2e} | "
            f"{distance(roots):.2e} | {through.raw / through.encoding / 1e9:.2f} | "
            f"{through.raw / through.decoding / 1e9:.2f}"
        )


if __name__ == "__main__":
    typer.run(main)

"""Trains a small GPT on the standard library's sources, and keeps snapshots of its training state.

Codecs are judged by these: random numbers have neither the exponents nor the redundancy of a
training state.

    .venv/bin/python benchmarks/make_state.py /tmp/snapshots     # some 20 minutes on two cores

Each snapshot is `step<N>.pt`: a dict of the parameters' names, each with `w` (the fp32 master
weight), `m` and `v` (AdamW's moments) and `g` (the clipped gradient), all fp32. The bf16 weights
that training multiplied with are exactly `w.bfloat16()`. The learning rate is at its peak up to
step 150 and falls to a fiftieth until 195, so 100 -> 101 shows early steps, and 200 -> 201 late
ones.
"""

from __future__ import annotations

import argparse
import collections
import math
import re
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

SNAPSHOTS = (100, 101, 110, 150, 200, 201)
LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT, BATCH = 6, 448, 7, 8192, 256, 8
PEAK, LAST, WARM_UP, DECAY_FROM, DECAY_TO = 1e-3, 2e-5, 20, 150, 195

_WORD = re.compile(r"[A-Za-z_]\w*|\d|\s+|[^\w\s]")


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and with a residual."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A decoder of 18 M parameters whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                narrow = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS if narrow else 1))

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


def main():
    """Train for 201 steps, and write the snapshots."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the snapshots go: 1.3 GB")
    parser.add_argument("--shorten", type=int, default=1, help="divides the steps, for a trial")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    snapshots = {number // options.shorten: number for number in SNAPSHOTS}
    for step, model, optimizer in training(max(snapshots)):
        if step in snapshots:
            torch.save(snapshot(model, optimizer), options.folder / f"step{snapshots[step]}.pt")


def training(last):
    """Train; after each step, yield its number, from 1 to `last`."""
    torch.manual_seed(0)
    data = tokens_of_the_standard_library()
    model = Gpt()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95))
    began = time.monotonic()
    for step in range(1, last + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,))
        batch = torch.stack([data[s : s + CONTEXT + 1] for s in starts.tolist()])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            took_s = time.monotonic() - began
            print(f"step {step}: loss {loss.item():.3f}, {took_s:.0f} s", flush=True)
        yield step, model, optimizer


def learning_rate(step):
    """Warm up, stay at the peak, fall linearly."""
    if step <= DECAY_FROM:
        return PEAK * min(1, step / WARM_UP)
    share = min(1, (step - DECAY_FROM) / (DECAY_TO - DECAY_FROM))
    return PEAK + share * (LAST - PEAK)


def snapshot(model, optimizer):
    """Return weights, moments and gradients by parameter name."""
    of = {name: (p, optimizer.state[p]) for name, p in model.named_parameters()}
    return {
        n: {"w": p.detach(), "m": s["exp_avg"], "v": s["exp_avg_sq"], "g": p.grad}
        for n, (p, s) in of.items()
    }


def tokens_of_the_standard_library():
    """Tokenize all sources: the most frequent words have a number, others are spelled in bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "__pycache__", "test", "idlelib"}
    files = sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))
    words = [word for path in files for word in _WORD.findall(path.read_text(errors="replace"))]
    counts = collections.Counter(words)
    known = {word: 256 + n for n, (word, _) in enumerate(counts.most_common(VOCABULARY - 256))}
    spelled = ([known[word]] if word in known else word.encode() for word in words)
    return torch.tensor([number for numbers in spelled for number in numbers])


if __name__ == "__main__":
    main()

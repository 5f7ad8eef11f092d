"""Trains a small GPT on the standard library's own sources, and saves with Penstock.

    python examples/train_gpt.py runs/gpt --steps 60 --save-every 10 --log

Run it again with the same folder and it resumes from the latest checkpoint, or with `--log` from
the latest step. Every step prints one JSON line, so that a parent process can follow;
`examples/demo.py` is such a parent.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention

import penstock

CONTEXT = 64
BATCH = 8


class Block(nn.Module):
    """One transformer block: causal attention and a feed-forward net, both pre-normed."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and the result have shape (batch, time, width)."""
        batch, time, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, time, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A byte-level GPT with a tied embedding."""

    def __init__(self, width: int = 192, depth: int = 6, heads: int = 6) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout=0.1) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (batch, time, 256) for bytes of shape (batch, time)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SourceLoader:
    """Random windows of the standard library's sources; its state is that of its generator."""

    def __init__(self, seed: int) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.generator = torch.Generator().manual_seed(seed)
        self.batches = 0

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self.data) - CONTEXT - 1, (BATCH,), generator=self.generator)
        rows = torch.stack([self.data[s : s + CONTEXT + 1] for s in starts.tolist()]).long()
        self.batches += 1
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, object]:
        """Return everything that the next batch depends on."""
        return {"generator": self.generator.get_state(), "batches": self.batches}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from `state`."""
        self.generator.set_state(state["generator"])
        self.batches = state["batches"]


def build(steps: int, seed: int = 1) -> dict[str, object]:
    """Return the whole training state: a save stores exactly this dict."""
    torch.manual_seed(seed)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))
    )
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "loader": SourceLoader(seed),
        "rng": penstock.Rng(),
    }


def train(run: str, steps: int, save_every: int, *, log: bool = False) -> None:
    """Train to `steps`, from the latest saved or logged step of `run` if it has one."""
    state = build(steps)
    model, optimizer = state["model"], state["optimizer"]
    with penstock.Checkpointer(run, mode="lazy") as ckpt:
        began = time.monotonic()
        first = ckpt.resume(state) or 1  # steps count from 1 here
        if first > 1:
            tell(event="resumed", step=first - 1, seconds=time.monotonic() - began)
        tell(event="ready", parameters=sum(p.numel() for p in model.parameters()))
        for step in range(first, steps + 1):
            tokens, targets = next(state["loader"])
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # Penstock's fence: waits here until a pending capture ends
            state["schedule"].step()
            tell(event="step", step=step, loss=loss.item().hex())
            if step % save_every == 0 or (log and step == 1):  # a log continues a checkpoint
                tell(event="save", step=step)
                ckpt.save(state, step, metadata={"loss": loss.item()})
            elif log and ckpt.log(state, step):
                tell(event="log", step=step)
        ckpt.wait()
    tell(event="done", step=steps)


def tell(**fact: object) -> None:
    """Print one JSON line for a program that follows the training."""
    print(json.dumps(fact), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="folder or URL of the run")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--log", action="store_true", help="log the steps that are not saved")
    arguments = parser.parse_args()
    train(arguments.run, arguments.steps, arguments.save_every, log=arguments.log)

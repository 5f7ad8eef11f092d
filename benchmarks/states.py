"""The state that every system saves: the shapes of a GPT and its AdamW state, in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import xxhash
from torch import nn

_POOL_FLOATS = 1 << 24


@dataclass(frozen=True)
class TrainingState:
    """One state, seen twice: as live objects, and as a flat dict over the same memory."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    tensors: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def checksums(self) -> dict[str, int]:
        """Of every tensor's bytes."""
        return {
            name: xxhash.xxh3_64_intdigest(t.reshape(-1).view(torch.uint8).numpy())
            for name, t in self.tensors.items()
        }

    def wipe(self) -> None:
        """Overwrite every tensor, so that a restore that does nothing is noticed."""
        for tensor in self.tensors.values():
            tensor.fill_(-1.0)


def build_state(size_gb: float, *, seed: int = 0) -> TrainingState:
    """A state of about `size_gb` GB (10^9 bytes): parameters, two moments each, and step counts.

    Many matrices of 4 to 16 MB (at 1 GB and more), a large embedding, and about as many small
    vectors and single numbers as matrices. Values are random, so that nothing can be compressed.
    """
    width = 1024 if size_gb >= 1 else 512
    per_layer = 12 * (12 * width * width + 13 * width)
    layers = max(1, round((size_gb * 1e9 - 12 * 16 * width * width) / per_layer))
    model = nn.Module()
    for name, shape in _shapes(width, layers):
        model.register_parameter(name, nn.Parameter(torch.empty(shape)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1000.0),
            "exp_avg": torch.empty_like(parameter.data),
            "exp_avg_sq": torch.empty_like(parameter.data),
        }
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model/{name}"] = parameter.data
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer/{name}/{key}"] = value
    _fill(tensors, seed)
    return TrainingState(model, optimizer, tensors)


def _shapes(width: int, layers: int) -> list[tuple[str, tuple[int, ...]]]:
    shapes: list[tuple[str, tuple[int, ...]]] = [("embedding", (16 * width, width))]
    for layer in range(layers):
        for name, rows, columns in (
            ("qkv", 3 * width, width),
            ("out", width, width),
            ("up", 4 * width, width),
            ("down", width, 4 * width),
        ):
            shapes.append((f"layer{layer}_{name}_weight", (rows, columns)))
            shapes.append((f"layer{layer}_{name}_bias", (rows,)))
        for name in ("norm1", "norm2"):
            shapes.append((f"layer{layer}_{name}_weight", (width,)))
            shapes.append((f"layer{layer}_{name}_bias", (width,)))
    return shapes


def _fill(tensors: dict[str, torch.Tensor], seed: int) -> None:
    # Drawing every number anew would take longer than all that is measured.
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(_POOL_FLOATS, generator=generator)
    start = 0
    for tensor in tensors.values():
        flat = tensor.view(-1)
        at = 0
        while at < flat.numel():
            count = min(flat.numel() - at, _POOL_FLOATS - start)
            flat[at : at + count] = pool[start : start + count]
            at += count
            start = (start + count + 7919) % _POOL_FLOATS

"""Small runs, one for each way of storing a checkpoint, and their states.

States are computed without random numbers and rounding, so every machine computes the same bits.
"""

from __future__ import annotations

import datetime as dt
import random
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tests.integration.ranks.saving import Job
from tests.integration.support import TINY

from penstock import Checkpointer, PerRank, Shard
from penstock.core.storage.open import open_backend

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, step: int = 0) -> torch.Tensor:
    """Different numbers that change a little with each step."""
    count = int(np.prod(shape))
    at = torch.arange(count)
    found = (at * 37 % 31 - 15).double() + step * 2.0**-12 * (at % 7).double()
    return found.to(dtype).reshape(shape)


# -- one process -----------------------------------------------------------------------------------


def one(step: int) -> dict[str, Any]:
    """Every kind of object."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(numbers(*parameter.shape, step=step))
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": numbers(*parameter.shape, step=step + 1),
                "exp_avg_sq": numbers(*parameter.shape, step=step + 2).square(),
            }
    tensors = {name: numbers(5, 7, dtype=getattr(torch, name)) for name in DTYPES}
    return {
        "model": model,
        "optimizer": optimizer,
        "tensors": tensors
        | {"tied": tensors["float32"], "scalar": torch.tensor(3), "empty": torch.zeros(0, 4)},
        "large": numbers(120, 100, step=step),
        "arrays": {"c": np.arange(12).reshape(3, 4), "text": np.array(["a", "bc"])},
        "random": {"python": random.Random(5), "numpy": np.random.default_rng(5)},
        "values": {
            "epoch": step, "text": "ä/%~", "none": None, "flag": True, "big": 1 << 80,
            "bytes": b"\0\xff",
            "list": [1, (2.5, float("inf")), {"a": []}], "set": {1, 2}, "complex": 1 - 2j,
            "day": dt.date(2026, 1, 2), "path": PurePosixPath("a/b"), 7: "an integer key",
        },
    }  # fmt: skip


def moving(step: int) -> dict[str, Any]:
    """Tensors that change a little."""
    return {
        "model": {
            "w": numbers(40, 100, step=step),
            "half": numbers(20, 20, dtype=torch.bfloat16, step=step),
        },
        "epoch": step,
    }


def still(step: int) -> dict[str, Any]:
    """The same, and unchanging ones."""
    return moving(step) | {"frozen": {f"f{n}": numbers(80, 60) * (n + 1) for n in range(4)}}


def mixed(step: int) -> dict[str, Any]:
    """Weights in half precision, and their masters."""
    masters = {name: numbers(130, 300, step=step) for name in ("a.weight", "b.weight")}
    return {"model": {n: m.bfloat16() for n, m in masters.items()}, "master": masters}


def each_codec(step: int) -> dict[str, Any]:
    """For each codec large and small tensors with elements of every width."""
    dtypes = ("int8", "bfloat16", "float32", "float64", "complex64")
    large = {d: numbers(70, 90, dtype=getattr(torch, d), step=step) for d in dtypes}
    small = {f"s{n}": numbers(3, 5, step=n) for n in range(4)}
    tensors = large | small | {"zeros": torch.zeros(5000), "noise": noise(70, 90)}
    return {codec: {n: t.clone() for n, t in tensors.items()} for codec in CODECS}


def noise(*shape: int) -> torch.Tensor:
    """Numbers from 1 to 2 whose mantissas no codec shrinks."""
    state = np.arange(int(np.prod(shape)), dtype=np.uint64)
    for _ in range(4):
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        state ^= state >> np.uint64(29)
    bits = (state >> np.uint64(41)).astype(np.uint32) | np.uint32(127 << 23)
    return torch.from_numpy(bits.view(np.float32)).reshape(shape)


def predictable(step: int) -> dict[str, Any]:
    """Moments whose sizes depend on row and column: `floatsplit` predicts their exponents."""
    del step
    rows, columns = torch.arange(120) * 5 % 23, torch.arange(160) * 7 % 19
    found = torch.ldexp(noise(120, 160), rows[:, None] - columns)
    return {"m": found, "v": found.square(), "half": found.bfloat16(), "double": found.double()}


def positive(step: int) -> dict[str, Any]:
    """Moments, which `log8` accepts."""
    return {"m": numbers(64, 64, step=step), "v": numbers(64, 64, step=step).square()}


def clipped(step: int) -> dict[str, Any]:
    """Gradients times a coefficient, which `factor` finds, and others, which it declines."""
    gradients = noise(60, 700).bfloat16().float() * 0.3
    gradients[::7, 13] = noise(9)
    gradients[5, :4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")])
    tensors = {
        "g": gradients,
        "plain": numbers(60, 70, step=step),
        "half": noise(60, 70).bfloat16(),
    }
    return {name: {n: t.clone() for n, t in tensors.items()} for name in ("alone", "two")}


def many(step: int) -> dict[str, Any]:
    """More objects than fit in a section of a manifest."""
    return {"model": {f"p{n}": numbers(3, step=n) for n in range(2100)}, "epoch": step}


# -- four ranks ------------------------------------------------------------------------------------

ROWS = [0, 4, 7, 7, 10]  # of 10: the third rank has none


def of_rank(rank: int) -> dict[str, Any]:
    """A rank's state: rows of a tensor, a range of another, and common objects."""
    whole, flat = numbers(10, 70), numbers(3, 11)
    low, high = ROWS[rank], ROWS[rank + 1]
    start, stop = 8 * rank, min(8 * rank + 8, 33) if rank < 3 else 33
    return {
        "cut": Shard(whole[low:high], whole.shape, offsets=(low, 0)),
        "flat": Shard(flat.reshape(-1)[start:stop], flat.shape, flat_range=(start, stop)),
        "alike": {"w": numbers(50, 60), "name": "all"},
        "loader": PerRank({"position": 100 + rank}),
    }


def blank_of_rank(rank: int) -> dict[str, Any]:
    """The restore targets of a rank."""
    pieces = {
        name: replace(piece, tensor=torch.zeros_like(piece.tensor))
        for name, piece in of_rank(rank).items()
        if isinstance(piece, Shard)
    }
    return pieces | {
        "alike": {"w": torch.zeros(50, 60), "name": ""},
        "loader": PerRank({"position": 0}),
    }


def of_all(step: int) -> dict[str, Any]:
    """The load of one process."""
    del step
    return {
        "cut": numbers(10, 70),
        "flat": numbers(3, 11),
        "alike": {"w": numbers(50, 60), "name": "all"},
        "loader": {str(rank): {"position": 100 + rank} for rank in range(4)},
    }


MANY = 66  # ranks, for more parts and borrowed blobs than a commit record lists


def of_one_of_many(rank: int) -> dict[str, Any]:
    """The state of one of many ranks; it never changes."""
    return {"own": PerRank(numbers(5, 40 + rank))}


def of_many(step: int) -> dict[str, Any]:
    """The load of one process."""
    del step
    return {"own": {str(rank): numbers(5, 40 + rank) for rank in range(MANY)}}


# -- the runs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A stored run.

    Attributes:
        state: Returns the state of a step.
        steps: The saved steps, in this order.
        left: The steps that exist at the end.
        options: Those of the checkpointer that saves, and of one that continues.
        lossy: Whether the loaded state differs from the saved one; then digests are stored beside
            it.
        ranks: How many ranks save it; 0: one process without ranks.
        then: Called after the saves, with the checkpointer.
        tiers: Whether it has a fast tier, which keeps one checkpoint, and a durable one.
    """

    state: Callable[[int], dict[str, Any]]
    steps: tuple[int, ...] = (1,)
    left: tuple[int, ...] = (1,)
    options: dict[str, Any] = field(default_factory=dict)
    lossy: bool = False
    ranks: int = 0
    tiers: bool = False
    then: Callable[[Checkpointer], object] = lambda _: None

    def opened(self, root: Path) -> Checkpointer:
        """Open it, to continue."""
        place: Any = str(root)
        if self.tiers:
            place = {"type": "tiered", "fast": f"{root}/fast", "durable": f"{root}/durable"}
            place["keep_fast"] = 1
        return Checkpointer.from_config({"backend": place, **TINY, **self.options})

    def write(self, root: Path) -> None:
        """Store it."""
        if self.ranks:
            store = open_backend(f"file://{root}")
            of_one = of_rank if self.ranks == 4 else of_one_of_many
            for step in self.steps:
                job = Job(self.ranks, store, writer_bytes=1, **self.options)
                for result in job.save(of_one, step):
                    assert not isinstance(result, Exception), result
            store.close()
            return
        with self.opened(root) as ckpt:
            for step in self.steps:
                ckpt.save(self.state(step), step, mode="blocking")
                if step == 3 and "retention" in self.options:
                    ckpt.pin(3, "kept")
                    ckpt.annotate(3, {"loss": 0.5})
            self.then(ckpt)


CODECS = {
    "lz4": ["lz4"],
    "zstd": ["zstd"],
    "floatsplit": ["floatsplit"],
    "alone": [{"type": "floatsplit", "predict": False}],
    "two": ["floatsplit", "zstd"],
    "raw": [],
}
DELTA = [{"match": "model/**", "codecs": ["delta", "floatsplit"]}]
ZSTD = [{"match": "**", "codecs": ["zstd"]}]
EACH = [{"match": f"{name}/**", "codecs": chain} for name, chain in CODECS.items()]
LOSSY = [
    {"match": "m", "codecs": [{"type": "cast", "to": "bfloat16"}]},
    {"match": "v", "codecs": ["log8", "zstd"]},
]
FACTOR = [
    {"match": "alone/**", "codecs": ["factor"]},
    {"match": "two/**", "codecs": ["factor", "floatsplit"]},
]
RUNS = {
    "one": Run(one, options={"rules": [{"match": "large", "codecs": ["zstd"]}]}),
    "ranks": Run(of_all, ranks=4),
    "many_ranks": Run(of_many, (1, 2), (1, 2), {"share": True}, ranks=MANY),
    "chain": Run(moving, (1, 2, 3, 4), (1, 2, 3, 4), {"rules": DELTA}),
    "codecs": Run(each_codec, options={"rules": EACH}),
    "predicted": Run(predictable, options={"rules": [{"match": "**", "codecs": ["floatsplit"]}]}),
    "compacted": Run(
        still,
        (1, 2, 3),
        (1, 2, 3),
        {"share": True},
        then=lambda ckpt: (
            ckpt.compact([2]),
            ckpt.save(still(3), 3, overwrite=True, mode="blocking"),
        ),
    ),
    "share": Run(still, (1, 2, 3), (1, 2, 3), {"share": True}),
    "factor": Run(clipped, options={"rules": FACTOR}),
    "derived": Run(mixed, (1, 2), (1, 2), {"share": True, "rules": ZSTD}),
    "lossy": Run(positive, options={"rules": LOSSY}, lossy=True),
    "tiers": Run(moving, (1, 2), (1, 2), tiers=True),
    "sections": Run(many),
    "retention": Run(
        moving, tuple(range(1, 10)), (3, 4, 8, 9), {"retention": {"keep_last": 2, "keep_every": 4}}
    ),
}

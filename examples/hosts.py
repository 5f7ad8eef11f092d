"""Trains on several hosts, keeps checkpoints in their memory, and survives the loss of a host.

Start this on each of two hosts; `node1` is one of them:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=2 --max-restarts=3 --rdzv-id=run --rdzv-backend=c10d \
        --rdzv-endpoint=node1:29500 examples/hosts.py /dev/shm/$USER-run /lustre/run

After the loss of a host, start the same command on a new host. If `node1` is lost, start all again.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import penstock

if TYPE_CHECKING:
    from concurrent.futures import Future


def announce(step: int, replicated: Future[bool]) -> None:
    if replicated.exception() is None and replicated.result():
        print(f"step {step} survives the loss of a host", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", help="a folder of this host, in memory or on NVMe")
    parser.add_argument("durable", nargs="?", help="a place that all hosts share")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    dist.init_process_group("gloo")  # "nccl" on GPUs
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same initial weights on all ranks
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    state = {"model": model, "optimizer": optimizer, "data": data}

    backend = {"type": "hosts", "path": options.root, "copies": 1}
    if options.durable:  # leave it out to start while the durable place is away
        backend = {"type": "tiered", "fast": backend, "durable": options.durable, "drain_every": 50}
    with penstock.Checkpointer(backend, retention={"keep_last": 2}) as ckpt:
        first = ckpt.resume(state)
        for step in range(first, options.steps):
            batch = torch.randn(32, 64, generator=data)
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            handle = ckpt.save(state, step)
            if rank == 0:
                print(f"step {step} of {first} on: loss {loss.item().hex()}", flush=True)
                handle.replicated.add_done_callback(partial(announce, step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

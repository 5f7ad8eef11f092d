"""One rank of a training with sharded parameters, which is killed or resumes; for `test_ranks`."""

import os
import signal
import sys

import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import penstock

ROOT, TASK, KIND = sys.argv[1:4]
LAST, KILLED_AT = 12, 9


def main():
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 33), nn.Dropout(0.1), nn.ReLU(), nn.Linear(33, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    make = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
    if KIND == "adafactor":
        optimizer = optim.Adafactor(model.parameters(), 1e-2)
    else:
        optimizer = optim.AdamW(model.parameters(), 1e-2, **make[KIND])
    state = {"model": model, "optimizer": optimizer, "rng": penstock.Rng()}
    torch.manual_seed(100 + rank)
    with penstock.Checkpointer(ROOT) as ckpt:
        start = ckpt.resume(state)
        print(f"rank {rank} begins {start}", flush=True)
        for step in range(start, LAST):
            optimizer.zero_grad()
            model(torch.randn(4, 12)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if step % 5 == 0:
                ckpt.save(state, step)
            elif not ckpt.log(state, step):
                print(f"rank {rank} ends its log at {step}", flush=True)
            if TASK == "kill" and step == KILLED_AT and rank == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            torch.distributed.barrier()
        local = [p._local_tensor.detach() for p in model.parameters()]
        digest = hash(tuple(t for tensor in local for t in tensor.flatten().tolist()))
        print(f"rank {rank} ends with {digest}", flush=True)
    torch.distributed.destroy_process_group()


main()

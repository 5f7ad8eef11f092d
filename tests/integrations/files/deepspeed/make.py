"""Writes the folders beside this file by DeepSpeed: `python make.py`, with deepspeed installed.

Each has DeepSpeed's files, and `expected.pt`, which DeepSpeed assembles from them.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from functools import reduce
from pathlib import Path

HERE = Path(__file__).parent
STAGES = {
    "zero1": (2, {"stage": 1}, {"bf16": {"enabled": True}}),
    "zero2": (2, {"stage": 2}, {}),
    # Small groups within a group of parameters.
    "zero3": (
        3,
        {"stage": 3, "sub_group_size": 20, "stage3_param_persistence_threshold": 0},
        {"bf16": {"enabled": True}},
    ),
}


def main():
    for name, (world, _, _) in STAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                subprocess.Popen([sys.executable, __file__, name, folder, str(rank)])
                for rank in range(world)
            ]
            codes = [rank.wait(600) for rank in ranks]
            assert not any(codes)
            shutil.rmtree(HERE / name, ignore_errors=True)
            ignored = shutil.ignore_patterns("*.py")
            shutil.copytree(folder, HERE / name, ignore=ignored)


def train(name, folder, rank):
    world, zero, dtype = STAGES[name]
    os.environ |= {
        "DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29611", "RANK": str(rank), "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(world),
    }  # fmt: skip
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_optimizer_state
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    torch.set_num_threads(1)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # compiles for minutes
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({
        "emb": torch.nn.Embedding(7, 5), "a": torch.nn.Linear(5, 9),
        "b": torch.nn.Linear(9, 5, bias=False), "frozen": torch.nn.Linear(5, 5),
        "head": torch.nn.Linear(5, 7, bias=False),
    })  # fmt: skip
    model["frozen"].requires_grad_(False)
    model["head"].weight = model["emb"].weight
    model.register_buffer("scale", torch.full((3,), 2.0))
    model.forward = lambda x: reduce(lambda x, layer: layer(x), model.values(), x)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups,
        config={
            "train_batch_size": 4 * world,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {}},
            "zero_optimization": zero,
            **dtype,
        },
    )
    for step in range(2):
        loss = engine(torch.arange(4) + rank + step).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder, tag="t1", client_state={"epoch": 3})
    if zero["stage"] < 3:
        engine.optimizer._hp_optimizer_states_linked = False  # the moments came after it was set
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    names = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
    moments = {
        name: {
            key: safe_get_full_optimizer_state(parameter, key).clone()
            for key in ("exp_avg", "exp_avg_sq")
        }
        for name, parameter in names.items()
    }
    if rank == 0:
        weights = get_fp32_state_dict_from_zero_checkpoint(folder, "t1")
        weights = {name: torch.as_tensor(tensor).clone() for name, tensor in weights.items()}
        torch.save({"model": weights, "state": moments}, Path(folder) / "expected.pt")


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else train(sys.argv[1], sys.argv[2], int(sys.argv[3]))

"""State dicts of torch.distributed.checkpoint with `DTensor`s, and live optimizers of FSDP2."""

import pytest
from tests import interpreters

PROGRAM = """
import sys
import torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
import penstock

dist.init_process_group("gloo")
FORMS = [None, StateDictOptions(flatten_optimizer_state_dict=True)]

def make(seed, steps):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    fully_shard(net[0]), fully_shard(net[2]), fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 * (seed + 1))
    for _ in range(steps):
        net(torch.ones(4, 5)).square().sum().backward()
        optimizer.step()
    return net, optimizer

def content(optimizer):
    (group,) = optimizer.param_groups
    found = {key: item for key, item in group.items() if key != "params"}
    for number, parameter in enumerate(group["params"]):
        for key, item in optimizer.state[parameter].items():
            full = item.full_tensor() if isinstance(item, DTensor) else item
            found[number, key] = full.tolist()
    return found

def check(optimizer, report, by="name"):
    assert content(optimizer) == expected
    assert (report.matched_by, report.unexpected, report.missing) == (by, (), ())
    assert isinstance(optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"], DTensor)

with penstock.Checkpointer(sys.argv[1]) as ckpt:
    net, optimizer = make(0, 2)
    expected = content(optimizer)
    ckpt.save({"model": net, "optimizer": optimizer}, 1, mode="blocking")
    for step, options in enumerate(FORMS, 2):
        stored = get_optimizer_state_dict(net, optimizer, options=options)
        ckpt.save({"model": net, "optimizer": stored}, step, mode="blocking")
        for steps in (0, 1):
            other, target = make(1, steps)
            check(target, ckpt.restore({"model": other, "optimizer": target}, step))
        other, target = make(1, 1)
        template = get_optimizer_state_dict(other, target, options=options)
        report = ckpt.restore({"model": other, "optimizer": template}, 1)
        last, fresh = make(2, 0)
        set_optimizer_state_dict(last, fresh, template, options=options)
        check(fresh, report)
    ckpt.save({"model": net, "optimizer": optimizer.state_dict()}, 9, mode="blocking")
    other, target = make(1, 0)
    check(target, ckpt.restore({"model": other, "optimizer": target}, 9), by="order")
dist.destroy_process_group()
print("all forms")
"""


@pytest.mark.process
@pytest.mark.multirank
def test_sharded_state_dicts_and_live_optimizers_interchange(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(PROGRAM)
    outputs = interpreters.run_as_torchrun(2, script, tmp_path / "run")
    assert [text.splitlines()[-1] for text in outputs] == ["all forms"] * 2

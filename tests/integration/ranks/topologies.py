"""A small model, placed over ranks in the ways in which models are trained."""

import threading

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

_drawing = threading.Lock()  # threads share torch's generator, and would draw different weights


class Net(nn.Module):
    """Sizes that no number of ranks divides, a scalar, and a buffer that is never sharded."""

    def __init__(self, seed=0):
        super().__init__()
        with _drawing:
            torch.manual_seed(seed)
            self.embed = nn.Embedding(13, 6)
            self.up = nn.Linear(6, 7)
            self.down = nn.Linear(7, 6)
            self.norm = nn.LayerNorm(6)
            self.head = nn.Linear(6, 13, bias=False)
        self.register_buffer("seen", torch.zeros(3) + seed)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        return self.head(self.norm(hidden))


TP_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def alone(net):
    return net


def fsdp2(*mesh):
    """`fully_shard` over a mesh: replicated over its first dimension if it has two."""

    def place(net):
        devices = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
        for part in (net.embed, net.up, net.down):
            fully_shard(part, mesh=devices)
        return fully_shard(net, mesh=devices)

    return place


def tp(count):
    def place(net):
        return parallelize_module(net, init_device_mesh("cpu", (count,)), dict(TP_PLAN))

    return place


def fsdp2_tp(dp, tp):
    def place(net):
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], dict(TP_PLAN))
        for part in (net.up, net.down):
            fully_shard(part, mesh=mesh["dp"])
        return fully_shard(net, mesh=mesh["dp"])

    return place


def pipeline(net):
    """The half of the net that this rank's stage has, sharded over the ranks of the stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stages = (("embed", "up"), ("down", "norm", "head"))
    for name in stages[1 - mesh.get_coordinate()[0]]:
        delattr(net, name)
    return fully_shard(net, mesh=mesh["dp"])


PLACES = {
    "one process": (1, alone),
    "DDP 2": (2, alone),
    "FSDP2 2": (2, fsdp2(2)),
    "FSDP2 3": (3, fsdp2(3)),
    "FSDP2 8": (8, fsdp2(8)),
    "HSDP 2 x 2": (4, fsdp2(2, 2)),
    "TP 4": (4, tp(4)),
    "FSDP2 x TP 2 x 2": (4, fsdp2_tp(2, 2)),
    "FSDP2 x TP 3 x 2": (6, fsdp2_tp(3, 2)),
    "pipeline 2 x FSDP2 2": (4, pipeline),
}


def adam(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def trained(place, *, seed=0):
    """A state after two steps; without a forward, which torch refuses under uneven TP."""
    net = place(Net(seed))
    optimizer = adam(net)
    for _ in range(2):
        for parameter in net.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    return {"model": net, "optimizer": optimizer, "epoch": 7 + seed}


def train(net, optimizer, steps, *, start=0):
    """Return the losses of some steps on batches that are the same everywhere."""
    losses = []
    for step in range(start, start + steps):
        made = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 13, (20,), generator=made)
        loss = nn.functional.cross_entropy(net(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values_of(state):
    """The whole tensors of a plain state, by path: of the model and of the optimizer's state."""
    net, optimizer = state["model"], state["optimizer"]
    found = {("model", name): tensor for name, tensor in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        for key, tensor in optimizer.state[parameter].items():
            found["optimizer", name, key] = tensor
    return {path: tensor.detach().clone() for path, tensor in found.items()}


def local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def held_of(state):
    """The local tensors of a state on this rank, by path, as in `values_of`."""
    net, optimizer = state["model"], state["optimizer"]
    found = {("model", name): tensor for name, tensor in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        for key, tensor in optimizer.state[parameter].items():
            found["optimizer", name, key] = tensor
    return {path: local(tensor).detach().clone() for path, tensor in found.items()}


def expected_of(values, place):
    """What this rank has to hold: torch itself distributes modules that are made of `values`."""
    expected, here = {}, place(Net()).state_dict().keys()
    for key in {path[2] for path in values if path[0] == "optimizer"} | {None}:
        net = Net()
        of_key = {p[1]: t for p, t in values.items() if (p[2:] or (None,))[0] == key}
        like = dict(net.state_dict())
        if any(of_key[name].shape != like[name].shape for name in of_key):  # numbers, as `step`
            numbers = {name: of_key[name] for name in here & of_key.keys()}
            expected |= {("optimizer", name, key): tensor for name, tensor in numbers.items()}
            continue
        net.load_state_dict(of_key, strict=False)
        for name, tensor in place(net).state_dict().items():
            if name in of_key:
                path = ("model", name) if key is None else ("optimizer", name, key)
                expected[path] = local(tensor).detach().clone()
    return expected

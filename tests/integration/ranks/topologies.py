"""A small model, placed over ranks in the usual ways of training."""

import threading
import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

with warnings.catch_warnings():  # torch warns of its own use of TorchScript
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

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


class ExpertNet(Net):
    """With two experts; expert parallelism gives each rank one."""

    def __init__(self, seed=0):
        super().__init__(seed)
        with _drawing:
            torch.manual_seed(seed + 100)
            self.experts = nn.ModuleDict({str(n): nn.Linear(6, 6) for n in range(2)})

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        for expert in self.experts.values():
            hidden = hidden + expert(hidden)
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
    """This rank's stage of the net, half of it, sharded over the ranks of the stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stages = (("embed", "up"), ("down", "norm", "head", "experts"))
    for name in stages[1 - mesh.get_coordinate()[0]]:
        if hasattr(net, name):
            delattr(net, name)
    return fully_shard(net, mesh=mesh["dp"])


def experts(net):
    """One expert on every second rank, sharded over its ranks; all else over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    mine = str(mesh.get_coordinate()[1])
    for name in {*net.experts} - {mine}:
        del net.experts[name]
    fully_shard(net.experts[mine], mesh=mesh["dp"])
    return fully_shard(net, mesh=init_device_mesh("cpu", (4,)))


def fsdp1(net):
    """Flat ranges of two flat parameters."""
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    net.up = FullyShardedDataParallel(net.up, **options)
    return FullyShardedDataParallel(net, **options)


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
PLACES_OF_EXPERTS = {
    **PLACES,
    "ZeRO-1 4": (4, alone),
    "FSDP1 3": (3, fsdp1),
    "experts 2 x FSDP2 2": (4, experts),
}
"""The places of a net with experts, whose optimizer has two groups."""


def adam(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def adam_of_experts(net, kind=torch.optim.AdamW):
    """Experts have their own group, which is empty on ranks without any."""
    groups = [{"params": []}, {"params": [], "weight_decay": 0.5}]
    for name, parameter in net.named_parameters():
        groups["experts" in name]["params"].append(parameter)
    return kind(groups, lr=0.01)


def zero(net):
    def kind(groups, **options):
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **options)

    return adam_of_experts(net, kind)


OPTIMIZERS = {"ZeRO-1 4": zero}
"""The optimizers of places that have one of their own, for a net with experts."""


def trained(place, *, seed=0, make=Net, optimize=adam):
    """A state after two steps; without a forward, which torch refuses under uneven TP."""
    net = place(make(seed))
    optimizer = optimize(net)
    for _ in range(2):
        for parameter in net.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    return {"model": net, "optimizer": optimizer, "epoch": 7 + seed}


def train(net, optimizer, steps, *, start=0):
    """Return the losses of some steps on batches equal everywhere."""
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


def tensors_of(net):
    """The parameters and buffers unchanged, by the names of the bare module."""
    if not isinstance(net, FullyShardedDataParallel):  # whose `state_dict` gathers
        return dict(net.state_dict())
    found = [*net.named_parameters(), *net.named_buffers()]
    return {name.replace("_fsdp_wrapped_module.", ""): tensor for name, tensor in found}


def owned_by(optimizer):
    """The optimizer with the state of this rank."""
    return getattr(optimizer, "optim", optimizer)


def memory_of(state):
    """The tensors of a state on this rank, by path: of the model and of the optimizer's state."""
    net = state["model"]
    found = {("model", name): tensor for name, tensor in tensors_of(net).items()}
    states = owned_by(state["optimizer"]).state
    for name, parameter in net.named_parameters():
        name = name.replace("_fsdp_wrapped_module.", "")  # noqa: PLW2901 - the bare one's
        for key, tensor in states.get(parameter, {}).items():
            found["optimizer", name, key] = tensor
    return {path: local(tensor).detach() for path, tensor in found.items()}


def values_of(state):
    """Copies of the tensors of a state on this rank, by path."""
    return {path: tensor.clone() for path, tensor in memory_of(state).items()}


held_of = values_of


def local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def expected_of(values, place, *, make=Net, owned=None):
    """The expected state of this rank: torch distributes modules made of `values`.

    `owned` has the names whose optimizer state this rank holds, if not all.
    """
    expected, here = {}, tensors_of(place(make())).keys()
    for key in {path[2] for path in values if path[0] == "optimizer"} | {None}:
        net = make()
        of_key = {p[1]: t for p, t in values.items() if (p[2:] or (None,))[0] == key}
        like = dict(net.state_dict())
        if any(of_key[name].shape != like[name].shape for name in of_key):  # numbers, as `step`
            numbers = {name: of_key[name] for name in here & of_key.keys()}
            expected |= {("optimizer", name, key): tensor for name, tensor in numbers.items()}
            continue
        net.load_state_dict(of_key, strict=False)
        for name, tensor in tensors_of(place(net)).items():
            if name in of_key:
                path = ("model", name) if key is None else ("optimizer", name, key)
                expected[path] = local(tensor).detach().clone()
    if owned is None:
        return expected
    return {path: t for path, t in expected.items() if path[0] == "model" or path[1] in owned}

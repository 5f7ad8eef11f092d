import copy
import operator
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.core.errors import RestoreError
from penstock.core.types import Role
from penstock.testing.providers import check_provider

CASES = {
    "Adam": {},
    "Adam amsgrad": {"amsgrad": True},
    "Adam fused": {"fused": True},
    "Adam capturable": {"capturable": True},
    "Adam tensor lr": {"lr": torch.tensor(0.01), "foreach": False},
    "AdamW": {"weight_decay": 0.1},
    "SGD": {"lr": 0.1},
    "SGD momentum": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adamax": {},
    "ASGD": {"t0": 2},
    "LBFGS": {"max_iter": 3, "history_size": 3},
    "Muon": {},
    "NAdam": {"decoupled_weight_decay": True},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
    "SparseAdam": {},
}


class Job:
    """A model, its optimizer, and deterministic training."""

    def __init__(self, case, steps=0, seed=0, dtype=torch.float32):
        kind, options = case.split()[0], dict(CASES[case])
        if not hasattr(torch.optim, kind):
            pytest.skip(f"torch {torch.__version__} has no {kind}")
        options = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        torch.manual_seed(seed)
        self.sparse = kind == "SparseAdam"
        if self.sparse:
            self.model = nn.Sequential(nn.Embedding(9, 4, sparse=True))
        elif kind == "Muon":
            self.model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False))
        else:
            self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.model.to(dtype)
        self.dtype = dtype
        self.capturable = options.pop("capturable", False)
        self.optimizer = getattr(torch.optim, kind)(self.model.parameters(), **options)
        if self.capturable:
            self.optimizer.param_groups[0]["capturable"] = True
        self.done = 0
        self.train(steps)

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, steps):
        for _ in range(steps):
            self.done += 1
            maker = torch.Generator().manual_seed(self.done)
            if self.sparse:
                x = torch.randint(0, 9, (5,), generator=maker)
            else:
                x = torch.randn(5, 4, generator=maker).to(self.dtype)

            def closure(x=x):
                self.optimizer.zero_grad()
                loss = (self.model(x).float() ** 2).mean()
                loss.backward()
                return loss

            if self.capturable:
                closure()
                # torch steps capturable optimizers on accelerators only.
                self.optimizer.param_groups[0]["capturable"] = False
                self.optimizer.step()
                self.optimizer.param_groups[0]["capturable"] = True
            else:
                self.optimizer.step(closure)

    def snapshot(self):
        return flat([list(self.model.state_dict().items()), self.optimizer.state_dict()])


def flat(value):
    """Everything in a state, tensors with dtype, device and bits."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), str(value.device), tuple(value.shape), value.tolist())
    if isinstance(value, dict):
        return {k: flat(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(flat, value)]
    return (type(value).__name__, value)


@pytest.mark.parametrize("case", CASES)
def test_training_resumes_bit_by_bit(save, case):
    job = Job(case, steps=3)
    stored = save(job.state)
    fresh, stepped = Job(case, seed=7), Job(case, steps=2, seed=7)
    for other in (fresh, stepped):
        assert stored.restore(other.state).notes["matched_by"] == "name"
        assert other.snapshot() == job.snapshot()
        other.done = job.done
        other.train(2)
    job.train(2)
    assert fresh.snapshot() == stepped.snapshot() == job.snapshot()


@pytest.mark.parametrize("case", ["SGD momentum", "LBFGS"])
def test_optimizers_keep_the_contract(providers, case):
    def make():
        return Job(case, steps=2).optimizer

    def change(optimizer):
        return Job(case, steps=3, seed=1).optimizer

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*matched by order.*")
        check_provider(
            make, change, lambda a, b: flat(a.state_dict()) == flat(b.state_dict()),
            providers=providers,
            optional=("part/param_groups", "part/state/*/momentum_buffer"),
        )  # fmt: skip


def test_paths_roles_and_in_place(save):
    job = Job("AdamW", steps=2)
    stored = save(job.state)
    paths = {o.path[1:]: o for o in stored.tree.objects if o.path[0] == "optimizer"}
    assert paths["state", "0.weight", "exp_avg"].role is Role.OPTIMIZER
    assert ("param_groups", "0", "lr") in paths
    assert {o.role for o in paths.values()} == {Role.OPTIMIZER}
    assert stored.load()["optimizer"]["param_groups"][0]["params"] == [0, 1, 2, 3]

    other = Job("AdamW", steps=1, seed=3)
    weight = other.model[0].weight
    live, moment = other.optimizer.state[weight], other.optimizer.state[weight]["exp_avg"]
    stored.restore(other.state)
    assert other.optimizer.state[weight] is live
    assert live["exp_avg"] is moment
    assert other.optimizer.param_groups[0]["params"][0] is weight


def test_state_keeps_its_dtype_under_low_precision_parameters(save):
    job = Job("SGD momentum", dtype=torch.bfloat16)
    for parameter in job.model.parameters():
        job.optimizer.state[parameter]["master"] = parameter.detach().float() + 1e-4
        job.optimizer.state[parameter]["count"] = 3
    stored = save(job.state)
    other = Job("SGD momentum", steps=1, seed=2, dtype=torch.bfloat16)
    stored.restore(other.state)
    for one, two in zip(job.model.parameters(), other.model.parameters(), strict=True):
        state = other.optimizer.state[two]
        assert state["master"].dtype is torch.float32
        assert torch.equal(state["master"], job.optimizer.state[one]["master"])
        assert state["count"] == 3
        assert "momentum_buffer" not in state


def groups(model, swapped=False):
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    both = [
        {"params": decay, "weight_decay": 0.1, "lr": 0.5},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(both[::-1] if swapped else both)


def step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    optimizer.step()


def test_groups_are_restored_by_index_and_may_be_left_out(save):
    model = nn.Linear(3, 3)
    optimizer = groups(model)
    step(model, optimizer)
    optimizer.param_groups[1]["initial_lr"] = 0.25
    stored = save({"model": model, "optimizer": optimizer})

    target = nn.Linear(3, 3)
    other = groups(target)
    for group in other.param_groups:
        group["lr"] = 9.0
    stored.restore({"model": target, "optimizer": other}, exclude="optimizer/param_groups/**")
    assert [g["lr"] for g in other.param_groups] == [9.0, 9.0]
    assert torch.equal(
        other.state[target.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
    )

    stored.restore({"model": target, "optimizer": other}, include="optimizer/param_groups")
    assert [g["lr"] for g in other.param_groups] == [0.5, 1e-3]
    assert other.param_groups[1]["initial_lr"] == 0.25


def test_groups_in_another_order_are_a_problem_not_mixed_up(save):
    model = nn.Linear(3, 3)
    optimizer = groups(model)
    step(model, optimizer)
    stored = save({"model": model, "optimizer": optimizer})
    target = nn.Linear(3, 3)
    state = {"model": target, "optimizer": groups(target, swapped=True)}
    problems = stored.plan(state).problems
    assert len(problems) == 2
    assert "is in group 0 in the checkpoint, but in group 1 in the template" in problems[1]
    assert not stored.plan(state, exclude="optimizer/param_groups").problems
    one = {"model": target, "optimizer": torch.optim.AdamW(target.parameters())}
    (problem,) = stored.plan(one).problems
    assert problem == "optimizer/param_groups has 2 groups in the checkpoint, 1 in the template"


@pytest.mark.parametrize(
    ("kind", "option", "key"),
    [
        (torch.optim.Adam, {"amsgrad": True}, "max_exp_avg_sq"),
        (torch.optim.AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
        (torch.optim.RMSprop, {"centered": True}, "grad_avg"),
        (torch.optim.RMSprop, {"momentum": 0.5}, "momentum_buffer"),
    ],
)
def test_state_that_the_next_step_would_miss_is_a_problem(save, kind, option, key):
    model = nn.Linear(3, 3)
    optimizer = kind(model.parameters())
    step(model, optimizer)
    stored = save({"model": model, "optimizer": optimizer})
    target = nn.Linear(3, 3)
    state = {"model": target, "optimizer": kind(target.parameters(), **option)}
    problems = stored.plan(state, exclude="optimizer/param_groups/**").problems
    assert len(problems) == 2
    assert f"optimizer/state/weight has no {key!r}, which the template needs" in problems[0]

    stored.restore(state)  # takes the checkpoint's options, which fit its state
    step(**state)
    stored = save(state)
    stored.restore({"model": model, "optimizer": optimizer}, exclude="optimizer/param_groups/**")
    step(model, optimizer)


def two_modules(seed=0):
    torch.manual_seed(seed)
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.Adam([*one.parameters(), *two.parameters()])
    for parameter in (*one.parameters(), *two.parameters()):
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return one, two, optimizer


def test_clashing_names_get_the_tree_key_as_prefix(save):
    one, two, optimizer = two_modules()
    stored = save({"gen": one, "disc": two, "opt": optimizer})
    names = {o.path[2] for o in stored.tree.objects if o.path[:2] == ("opt", "state")}
    assert names == {"gen.weight", "gen.bias", "disc.weight", "disc.bias"}
    a, b, other = two_modules(1)
    # The order of parameters differs, too.
    shuffled = torch.optim.Adam([*b.parameters(), *a.parameters()])
    for parameter in (*a.parameters(), *b.parameters()):
        shuffled.state[parameter] = other.state[parameter]
    stored.restore({"disc": b, "gen": a, "opt": shuffled})
    assert torch.equal(shuffled.state[a.weight]["exp_avg"], optimizer.state[one.weight]["exp_avg"])
    assert torch.equal(shuffled.state[b.bias]["exp_avg"], optimizer.state[two.bias]["exp_avg"])


def test_names_match_with_and_without_the_tree_key(save):
    one, two, optimizer = two_modules()
    stored = save({"gen": one, "disc": two, "opt": optimizer})
    a = nn.Linear(2, 2)
    alone = torch.optim.Adam(a.parameters())
    placement = stored.plan({"gen": a, "opt": alone}, include=["gen", "opt/state/gen"])
    assert not placement.problems
    assert not placement.missing
    stored.fill(placement)
    placement.finish()
    assert torch.equal(alone.state[a.weight]["exp_avg"], optimizer.state[one.weight]["exp_avg"])

    bare = torch.optim.Adam(one.parameters())
    step(one, bare)
    stored = save({"gen": one, "opt": bare})
    assert ("opt", "state", "weight", "exp_avg") in stored.data
    c, d, wide = two_modules(3)
    placement = stored.plan({"gen": c, "disc": d, "opt": wide}, include="opt/state")
    assert placement.missing  # `weight` could be either module's
    assert not placement.targets


def test_names_from_the_optimizer_itself(save):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.named_parameters())
    step(model, optimizer)
    stored = save({"opt": optimizer})
    assert ("opt", "state", "weight", "exp_avg") in stored.data
    target = nn.Linear(2, 2)
    other = torch.optim.Adam(target.named_parameters())
    assert stored.restore({"opt": other}).notes["matched_by"] == "name"
    assert flat(other.state_dict()) == flat(optimizer.state_dict())
    with_module = torch.optim.Adam(target.parameters())
    stored.restore({"model": target, "opt": with_module}, include="opt/state")
    assert torch.equal(
        with_module.state[target.bias]["exp_avg"], optimizer.state[model.bias]["exp_avg"]
    )


def nameless(seed=0, sizes=(2, 2), steps=1):
    torch.manual_seed(seed)
    model = nn.Linear(*sizes)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def test_without_names_parameters_are_matched_by_order_with_a_warning(save):
    _, optimizer = nameless()
    stored = save({"opt": optimizer})
    _, other = nameless(1, steps=0)
    with pytest.warns(
        UserWarning, match="opt: the parameters .* by order; put the module that has them"
    ):
        placement = stored.restore({"opt": other})
    assert placement.notes["matched_by"] == "order"
    assert flat(other.state_dict()) == flat(optimizer.state_dict())


@pytest.mark.filterwarnings("ignore:.*by order.*")
def test_the_optimizer_matched_by_order_is_named(save):
    model, named = trained()
    stored = save({"m": model, "a": named, "b": nameless()[1], "c": named})
    other, target = trained(seed=1)
    state = {"m": other, "a": target, "b": nameless(1)[1], "c": target}
    assert stored.restore(state).notes["matched_by"] == "order"
    assert stored.restore(state, exclude="b").notes["matched_by"] == "name"


def test_parameters_unknown_to_the_checkpoint_are_missing(save):
    model, optimizer = nameless()
    stored = save({"model": model, "opt": optimizer})
    target = nn.Linear(2, 2)
    target.extra = nn.Parameter(torch.zeros(1))
    other = torch.optim.Adam(target.parameters())
    placement = stored.plan({"model": target, "opt": other}, include="opt")
    assert placement.missing == [("opt", "state", "extra")]
    step(target, other)
    placement = stored.plan({"model": target, "opt": other}, include="opt/state")
    assert placement.missing == [("opt", "state", "extra")]
    stored.fill(placement)
    placement.finish()
    assert set(other.state) == {target.weight, target.bias}


def test_renamed_parameters_keep_their_state(save):
    old = nn.ModuleDict({"old": nn.Linear(2, 2)})
    optimizer = torch.optim.Adam(old.parameters())
    step(old, optimizer)
    stored = save({"model": old, "opt": optimizer})
    new = nn.ModuleDict({"new": nn.Linear(2, 2)})
    other = torch.optim.Adam(new.parameters())
    renamed = stored.renamed({"model/old": "model/new", "opt/state/old": "opt/state/new"})
    renamed.restore({"model": new, "opt": other})
    assert flat(other.state_dict()) == flat(optimizer.state_dict())


class OwnStateDict(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "more": 1}

    def load_state_dict(self, state):
        self.more = state.pop("more")
        super().load_state_dict(state)


def test_optimizers_with_their_own_state_dict_use_it(save):
    model = nn.Linear(2, 2)
    optimizer = OwnStateDict(model.parameters(), momentum=0.9)
    step(model, optimizer)
    stored = save({"model": model, "opt": optimizer})
    target = OwnStateDict(nn.Linear(2, 2).parameters(), momentum=0.9)
    stored.restore({"opt": target})
    assert target.more == 1
    assert flat(target.state_dict()) == flat(optimizer.state_dict())
    assert not stored.description.deferrable


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_step_counts_go_where_torch_expects(save, options):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(3, 3, device="cuda")
        return model, torch.optim.Adam(model.parameters(), **options)

    model, optimizer = make()
    step(model, optimizer)
    target, other = make()
    save({"m": model, "o": optimizer}).restore({"m": target, "o": other})
    assert flat(other.state_dict()) == flat(optimizer.state_dict())
    step(model, optimizer)
    step(target, other)
    assert torch.equal(model.weight, target.weight)


def test_another_algorithm_does_not_reuse_the_state(save):
    """SGD would keep AdamW's moments, never use them, and step with AdamW's learning rate."""
    model = nn.Linear(3, 2)
    saved = save({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    (problem,) = saved.plan({"model": model, "optimizer": sgd}).problems
    assert "holds the state of a torch.optim.adamw.AdamW with amsgrad, betas" in problem
    assert "torch.optim.sgd.SGD with dampening" in problem


def trained(kind=torch.optim.Adam, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(2, 2).to(dtype)
    optimizer = kind(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return model, optimizer


def test_load_hooks_of_an_optimizer_see_restored_state(save):
    model, optimizer = trained()
    stored = save({"m": model, "o": optimizer})
    target, other = trained(seed=1)
    seen = []

    def before(optimizer, state):
        seen.append(("before", state["state"][0]["exp_avg"].clone()))

    def after(optimizer):
        seen.append(("after", optimizer.state[target.weight]["exp_avg"].clone()))
        optimizer.state[target.weight]["step"].zero_()

    other.register_load_state_dict_post_hook(after)
    stored.restore({"m": target, "o": other}, include="m")
    assert not seen
    stored.restore({"m": target, "o": other})
    other.register_load_state_dict_pre_hook(before)
    stored.restore({"m": target, "o": other})
    assert [name for name, _ in seen] == ["after", "before", "after"]
    assert all(torch.equal(t, optimizer.state[model.weight]["exp_avg"]) for _, t in seen)
    assert other.state[target.weight]["step"] == 0
    assert other.state[target.bias]["step"] == 1


class Deriving(torch.optim.Adam):
    """Derives a value from its state at each load, when the state is a copy."""

    total = None

    def load_state_dict(self, state):
        super().load_state_dict(copy.deepcopy(state))
        self.total = sum(s["exp_avg"].double().sum().item() for s in self.state.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_overridden_load_state_dict_is_called_and_state_keeps_its_dtype(save, dtype):
    model, optimizer = trained(Deriving, dtype)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-3  # fp32 moments of bf16 parameters
        state["nested"] = [state["exp_avg"] + 1]
    stored = save({"m": model, "o": optimizer})
    target, other = trained(Deriving, dtype, seed=1)
    moments = [state["exp_avg_sq"] for state in other.state.values()]
    stored.restore({"m": target, "o": other})
    assert all(map(operator.is_, moments, [s["exp_avg_sq"] for s in other.state.values()]))
    for one, two in zip(model.parameters(), target.parameters(), strict=True):
        assert other.state[two]["exp_avg"].dtype is torch.float32
        assert torch.equal(other.state[two]["exp_avg"], optimizer.state[one]["exp_avg"])
        assert torch.equal(other.state[two]["nested"][0], optimizer.state[one]["nested"][0])
    expected = sum(s["exp_avg"].sum().item() for s in optimizer.state.values())
    assert other.total == pytest.approx(expected, rel=1e-2)


class Stage(torch.nn.Module):
    """A stage of a pipeline: layers of the whole model, under their names there."""

    def __init__(self, *numbers):
        super().__init__()
        self.layers = torch.nn.ModuleDict({str(n): torch.nn.Linear(2, n + 2) for n in numbers})

    def stepped(self):
        biases = [layer.bias for layer in self.layers.values()]
        weights = [layer.weight for layer in self.layers.values()]
        optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "lr": 0.5}])
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return {"model": self, "optimizer": optimizer}


def merged(one, other):
    """A reader's view of the save of ranks with different objects."""
    by_path = {o.path: o for o in one.tree.objects}
    for stored in other.tree.objects:
        if stored.path in by_path:  # equal on all ranks: or they could not save together
            assert stored == by_path[stored.path]
            assert one.tree.values.get(stored.path) == other.tree.values.get(stored.path)
    known = by_path.keys() | {n.path for n in one.tree.nodes}
    tree = replace(
        one.tree,
        objects=[*one.tree.objects, *(o for o in other.tree.objects if o.path not in known)],
        nodes=[*one.tree.nodes, *(n for n in other.tree.nodes if n.path not in known)],
    )
    return replace(one, tree=tree, data={**other.data, **one.data})


def test_groups_of_ranks_with_other_parameters_are_one_group_each(save):
    stages = [Stage(0, 1).stepped(), Stage(2).stepped()]
    stored = merged(*map(save, stages))

    whole = Stage(0, 1, 2)
    parameters = [*whole.parameters()]
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2]}]
    optimizer = torch.optim.AdamW(groups)
    stored.restore({"model": whole, "optimizer": optimizer})
    moments = {n: optimizer.state[p]["exp_avg"] for n, p in whole.named_parameters()}
    for stage in stages:
        for name, parameter in stage["model"].named_parameters():
            expected = stage["optimizer"].state[parameter]["exp_avg"]
            assert torch.equal(moments[name], expected), name
    assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.5]

    # By number, as `load` gives it, it fits an optimizer with the parameters in that order.
    loaded = stored.load()["optimizer"]
    assert [group["params"] for group in loaded["param_groups"]] == [[0, 1, 2], [3, 4, 5]]
    fresh = torch.optim.AdamW(groups)
    fresh.load_state_dict(loaded)
    for parameter in parameters:
        expected = optimizer.state[parameter]["exp_avg"]
        assert torch.equal(fresh.state[parameter]["exp_avg"], expected)

    # And it fits one of the stages.
    again = Stage(2)
    its = again.layers["2"]
    optimizer = torch.optim.AdamW([{"params": [its.weight]}, {"params": [its.bias]}])
    stored.restore({"model": again, "optimizer": optimizer})
    assert torch.equal(optimizer.state[its.bias]["exp_avg"], moments["layers.2.bias"])


def test_state_of_a_parameter_is_restored_whole_or_not_at_all(save):
    job = Job("Adam", steps=1)
    stored = save(job.state)
    problems = stored.plan(job.state, include="optimizer/state/*/exp_avg").problems
    assert len(problems) == 4
    assert "is restored whole or not at all, but only 1 of its 3 objects" in problems[0]
    other = Job("Adam", steps=2, seed=1)
    before = flat(other.optimizer.state[other.model[0].weight])
    stored.restore(other.state, include="optimizer/state/2.bias")
    assert flat(other.optimizer.state[other.model[0].weight]) == before
    assert flat(other.optimizer.state[other.model[2].bias]) == flat(
        job.optimizer.state[job.model[2].bias]
    )


def test_an_optimizer_not_in_the_checkpoint_is_missing(save):
    model, optimizer = nameless()
    stored = save({"model": model})
    assert stored.plan({"model": model, "opt": optimizer}).missing == [("opt",)]
    assert not stored.plan({"model": model, "opt": optimizer}, include="model").missing
    placement = save({"opt": 3}).plan({"opt": optimizer})
    assert placement.problems == ["opt is stored as one value, but is an optimizer in the template"]


def test_state_without_a_parameter_is_kept(save):
    model, optimizer = nameless()
    optimizer.state["global"] = {"count": 3, "t": torch.ones(2)}
    target, other = nameless(1)
    save({"m": model, "o": optimizer}).restore({"m": target, "o": other})
    assert flat(other.state["global"]) == flat(optimizer.state["global"])


def storages(stored):
    deferrable = stored.description.deferrable
    entries = [entry for entry in stored.description.entries if entry.path in deferrable]
    return {entry.source.memory.storage for entry in entries}


def test_optimizer_claims_only_its_parameters_and_state(save):
    job = Job("Adam tensor lr", steps=1)
    job.model.register_buffer("other", torch.ones(3))
    stored = save({**job.state, "loose": torch.ones(4)})
    expected = {p.data_ptr() for p in job.model.parameters()}
    expected |= {t.data_ptr() for s in job.optimizer.state.values() for t in s.values()}
    assert storages(stored) == expected
    assert job.optimizer.param_groups[0]["lr"].data_ptr() not in storages(stored)


def test_capturable_optimizer_claims_nothing(save):
    assert not storages(save(Job("Adam capturable", steps=1).state))


def test_optimizer_class_with_more_options_takes_the_state(save):
    class Mine(torch.optim.AdamW):
        def __init__(self, parameters):
            super().__init__(parameters)
            self.defaults["mine"] = 1
            for group in self.param_groups:
                group["mine"] = 1

    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    saved = save({"model": model, "optimizer": optimizer})
    mine = Mine(model.parameters())
    saved.restore({"model": model, "optimizer": mine})
    assert (mine.param_groups[0]["lr"], mine.param_groups[0]["mine"]) == (0.25, 1)


def test_failing_load_hook_of_an_optimizer_names_its_path(save):
    model, optimizer = trained()
    stored = save({"m": model, "a": {"o": optimizer}})
    optimizer.register_load_state_dict_post_hook(lambda optimizer: 1 / 0)
    with pytest.raises(RestoreError, match=r"^a/o: .*load hooks then failed.*ZeroDivisionError"):
        stored.restore({"m": model, "a": {"o": optimizer}})


@pytest.mark.filterwarnings("ignore:.*by order.*")
def test_parameters_that_cannot_be_matched_are_problems(save):
    model, optimizer = nameless()
    named, unnamed = save({"model": model, "opt": optimizer}), save({"opt": optimizer})
    target, other = nameless(1)
    assert any("the template has none" in p for p in named.plan({"opt": other}).problems)
    state = {"model": target, "opt": other}
    assert any("the template has names" in p for p in unnamed.plan(state, include="opt").problems)
    other.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    assert any("has no parameter names" in p for p in unnamed.plan({"opt": other}).problems)

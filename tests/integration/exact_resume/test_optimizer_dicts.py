"""A live optimizer and its state dicts, of torch and of DCP, are interchangeable."""

import copy
from itertools import cycle

import pytest
import torch
from tests.integration.support import checkpointer, memory, same
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from penstock import RestoreMismatchError

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

by_order = pytest.mark.filterwarnings("ignore:.*matched by order")


def named(model, optimizer):
    return get_optimizer_state_dict(model, optimizer)


def flattened(model, optimizer):
    return get_optimizer_state_dict(model, optimizer, options=FLAT)


def numbered(model, optimizer):
    del model
    return optimizer.state_dict()


BY_NAME = [named, flattened]
FORMS = [*BY_NAME, numbered]

CASES = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.3), "foreach": False}),
    "SGD": (torch.optim.SGD, {}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "ASGD": (torch.optim.ASGD, {}),
}


# An optimizer's options and state do not depend on the form, the number of steps, or the groups:
# one optimizer goes through all of these, the others through one each.
OTHERS = [case for case in CASES if case != "AdamW"]


def settings(*columns):
    """`(form, case, groups, ...)`: all of them for AdamW, one for each of the other optimizers."""
    rows = [(form, "AdamW", *row) for form in FORMS for row in columns]
    return rows + [(form, case, *columns[-1]) for form, case in zip(cycle(FORMS), OTHERS)]


class Net(nn.Module):
    """Parameters of several shapes, a tied one, and one that never gets a gradient."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.up = nn.Linear(4, 6)
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, tokens):
        return self.up(self.norm(self.embed(tokens))).sum() + self.head.weight.square().sum()


def make(seed, *, steps=2, case="AdamW", groups=1, lr=0.3):
    torch.manual_seed(seed)
    model = Net()
    kind, options = CASES[case]
    parameters = [*model.parameters()]
    if isinstance(options.get("lr"), torch.Tensor):
        lr = torch.tensor(lr)
    optimizer = kind(parameters[: 3 if groups > 1 else None], **options | {"lr": lr})
    if groups > 1:
        optimizer.add_param_group({"params": parameters[3:5], "lr": lr / 2})
        optimizer.add_param_group({"params": parameters[5:], "weight_decay": 0.25})
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(5, (3,))).backward()
        optimizer.step()
    return model, optimizer


def state_of(optimizer):
    """The state by numbers; a parameter without any has no entry."""
    state = copy.deepcopy(optimizer.state_dict())
    state["state"] = {number: items for number, items in state["state"].items() if items}
    return state


def dicts(value):
    """All tensors of a state dict, by their keys."""
    if not isinstance(value, dict):
        return {}
    found = {}
    for key, item in value.items():
        if isinstance(item, torch.Tensor):
            found[key,] = item
        found |= {(key, *rest): tensor for rest, tensor in dicts(item).items()}
    return found


@pytest.fixture
def ckpt():
    with checkpointer(memory()) as opened:
        yield opened


@by_order
@pytest.mark.parametrize(("form", "case", "groups", "steps"), settings((1, 1), (3, 0)))
def test_a_stored_state_dict_restores_into_a_live_optimizer(ckpt, form, case, groups, steps):
    model, optimizer = make(0, case=case, groups=groups)
    ckpt.save({"model": model, "optimizer": form(model, optimizer)}, 1).result()
    expected = state_of(optimizer)
    other, target = make(1, case=case, groups=groups, steps=steps, lr=7.0)
    report = ckpt.restore({"model": other, "optimizer": target})
    assert same(state_of(target), expected)
    assert report.matched_by == ("order" if form is numbered else "name")
    assert report.unexpected == report.missing == ()
    for one in (model, other):
        one.zero_grad()
        one(torch.tensor([1, 2])).backward()
    optimizer.step(), target.step()
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(state_of(target), state_of(optimizer))


@by_order
@pytest.mark.parametrize("form", FORMS)
def test_state_of_live_optimizers_is_filled_in_place_and_keeps_its_stored_dtype(ckpt, form):
    model, optimizer = make(0)
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].double()
    ckpt.save({"optimizer": form(model, optimizer)}, 1).result()
    other, target = make(1)
    live = {name: target.state[p] for name, p in other.named_parameters() if p in target.state}
    before = {name: (state, state["exp_avg"]) for name, state in live.items()}
    ckpt.restore({"model": other, "optimizer": target}, include="optimizer")
    assert len(before) == 5
    for name, parameter in other.named_parameters():
        if name in before:
            state, moment = before[name]
            assert target.state[parameter] is state
            assert state["exp_avg"] is moment
            assert state["exp_avg_sq"].dtype is torch.float64


@by_order
@pytest.mark.parametrize(("form", "case", "groups"), settings((1,), (3,)))
def test_a_live_optimizer_restores_into_a_state_dict(ckpt, form, case, groups):
    model, optimizer = make(0, case=case, groups=groups)
    ckpt.save({"model": model, "optimizer": optimizer}, 1).result()
    other, target = make(1, case=case, groups=groups, lr=7.0)
    template = form(other, target)
    # DCP creates state for the parameter that never gets a gradient.
    before = {keys: t for keys, t in dicts(template).items() if "idle" not in str(keys)}
    report = ckpt.restore({"model": other, "optimizer": template})
    after = dicts(template)
    assert all(after[keys] is tensor for keys, tensor in before.items())
    assert report.matched_by == ("order" if form is numbered else "name")
    assert report.unexpected == report.missing == ()
    last, fresh = make(2, case=case, groups=groups, steps=0)
    if form is numbered:
        fresh.load_state_dict(template)
    else:
        # DCP refuses its own dict of a parameter that never got a gradient, unless it needs none.
        last.idle.requires_grad_(requires_grad=False)
        options = FLAT if form is flattened else None
        set_optimizer_state_dict(last, fresh, template, options=options)
    assert same(state_of(fresh), state_of(optimizer))


@pytest.mark.parametrize(
    ("case", "groups", "steps"), [("AdamW", 1, 0), ("AdamW tensor lr", 3, 2), ("Adafactor", 3, 2)]
)
def test_load_gives_names_accepted_by_torch_distributed(ckpt, case, groups, steps):
    model, optimizer = make(0, case=case, groups=groups, steps=steps)
    ckpt.save({"model": model, "optimizer": optimizer}, 1).result()
    loaded = ckpt.load(include="optimizer", named_optimizers=True)["optimizer"]
    names = [name for group in loaded["param_groups"] for name in group["params"]]
    assert names == [name for name, _ in model.named_parameters()]
    other, target = make(1, case=case, groups=groups, lr=7.0)
    set_optimizer_state_dict(other, target, loaded)
    assert same(state_of(target), state_of(optimizer))
    default = ckpt.load(include="optimizer")["optimizer"]
    assert [n for g in default["param_groups"] for n in g["params"]] == list(range(6))


def test_a_state_dict_without_groups_takes_the_state(ckpt):
    model, optimizer = make(0)
    ckpt.save({"model": model, "optimizer": optimizer}, 1).result()
    template = {"state": named(*make(1))["state"]}
    report = ckpt.restore({"optimizer": template}, include="optimizer/state")
    assert same(template["state"]["up.weight"], optimizer.state[model.up.weight])
    assert report.unexpected == ()
    report = ckpt.restore({"optimizer": template}, include="optimizer")
    assert "optimizer/param_groups/0/lr" in report.unexpected


def by_own_names(steps=2, seed=0):
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.3)
    for _ in range(steps):
        model(torch.tensor([1, 2])).backward()
        optimizer.step()
    return model, optimizer


def test_names_beside_the_numbers_match_by_name(ckpt):
    model, optimizer = by_own_names()
    ckpt.save({"optimizer": optimizer.state_dict()}, 1).result()
    other = Net()
    target = torch.optim.AdamW([*other.parameters()][::-1])
    report = ckpt.restore({"model": other, "optimizer": target}, include="optimizer")
    assert report.matched_by == "name"
    assert report.unexpected == ()
    for name, parameter in model.named_parameters():
        found = target.state.get(other.get_parameter(name), {})
        assert same(found, optimizer.state.get(parameter, {})), name
    template = by_own_names(seed=1)[1].state_dict()
    ckpt.save({"model": model, "optimizer": optimizer}, 2).result()
    assert ckpt.restore({"optimizer": template}, include="optimizer").matched_by == "name"
    assert same(template, optimizer.state_dict())


class Wider(Net):
    """Other shapes in the middle, and one more parameter."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 9)
        self.more = nn.ParameterList([torch.ones(2)])


@by_order
@pytest.mark.parametrize(("form", "steps"), [(named, 0), (flattened, 1), (numbered, 0)])
def test_all_shapes_and_counts_that_differ_are_one_error_and_nothing_changes(ckpt, form, steps):
    ckpt.save({"optimizer": form(*make(0))}, 1).result()
    torch.manual_seed(1)
    other = Wider()
    target = torch.optim.AdamW(other.parameters(), lr=7.0)
    for _ in range(steps):
        other(torch.tensor([1])).backward()
        target.step()
    before = state_of(target)
    with pytest.raises(RestoreMismatchError) as caught:
        ckpt.restore({"model": other, "optimizer": target}, include="optimizer")
    assert same(state_of(target), before)
    text = "\n".join(caught.value.problems)
    here = "optimizer/state/4" if form is numbered else "optimizer/state/up.weight"
    assert f"{here} is the state of a parameter of shape [6, 4], which has [9, 4]" in text
    if form is numbered:
        assert "the groups have [6] parameters in the checkpoint but [7] in the template" in text
    else:
        assert "optimizer/state/more.0: not in the checkpoint" in text


@by_order
@pytest.mark.parametrize("form", FORMS)
def test_an_unfitting_template_is_one_error_and_nothing_changes(ckpt, form):
    model, optimizer = make(0)
    ckpt.save({"model": model, "optimizer": optimizer}, 1).result()
    torch.manual_seed(1)
    other = Wider()
    target = torch.optim.AdamW(other.parameters(), lr=7.0)
    other(torch.tensor([1])).backward()
    target.step()
    template = form(other, target)
    before = copy.deepcopy(template)
    with pytest.raises(RestoreMismatchError) as caught:
        ckpt.restore({"optimizer": template}, include="optimizer")
    assert same(template, before)
    text = "\n".join(caught.value.problems)
    assert "of a parameter of shape [6, 4], which has [9, 4] in the template" in text
    if form is numbered:
        assert "[6] parameters in the checkpoint but [7] in the template" in text
    else:
        assert "optimizer/state/more.0: not in the checkpoint" in text


def test_numbers_do_not_match_a_template_without_state(ckpt):
    model, optimizer = make(0)
    ckpt.save({"model": model, "optimizer": optimizer}, 1).result()
    template = make(1, steps=0)[1].state_dict()
    with (
        pytest.warns(
            UserWarning, match="is a state dict with numbers instead of names in the template"
        ),
        pytest.raises(RestoreMismatchError, match="has no state in the template whose shape"),
    ):
        ckpt.restore({"optimizer": template}, include="optimizer")  # fmt: skip
    assert template["state"] == {}


def test_flattened_options_that_differ_within_a_group_are_an_error(ckpt):
    ckpt.save({"optimizer": flattened(*make(0, groups=3))}, 1).result()
    other, target = make(1)
    before = state_of(target)
    with pytest.raises(RestoreMismatchError) as caught:
        ckpt.restore({"model": other, "optimizer": target}, include="optimizer")
    problems = caught.value.problems
    assert len(problems) == 2
    assert problems[0].startswith(
        "optimizer/param_groups/0/lr is one option of a group, but is stored with different values "
        "for "
    )
    assert same(state_of(target), before)
    ckpt.restore({"model": other, "optimizer": target}, include="optimizer",
                 exclude="optimizer/param_groups/**")  # fmt: skip


def test_flattened_options_that_are_tensors_have_to_agree(ckpt):
    stored = flattened(*make(0, case="AdamW tensor lr"))
    rates = [key for key in stored if key.endswith(".lr")]
    for key in rates:
        stored[key] = stored[key].clone()
    ckpt.save({"optimizer": stored}, 1).result()
    for rate in (torch.tensor(7.0), 7.0):
        other, target = make(1, case="AdamW tensor lr")
        target.param_groups[0]["lr"] = rate
        ckpt.restore({"model": other, "optimizer": target}, 1, include="optimizer")
        assert same(target.param_groups[0]["lr"], torch.tensor(0.3))
    stored[rates[-1]] += 1
    ckpt.save({"optimizer": stored}, 2).result()
    with pytest.raises(RestoreMismatchError, match="share memory in the template, but different"):
        ckpt.restore({"model": other, "optimizer": target}, 2, include="optimizer")
    assert same(target.param_groups[0]["lr"], torch.tensor(0.3))


def test_nested_state_round_trips_flattened(ckpt):
    model, optimizer = make(0)
    for state in optimizer.state.values():
        state["factors"] = {"left": state.pop("exp_avg"), "right": {"0": state.pop("exp_avg_sq")}}
    ckpt.save({"optimizer": flattened(model, optimizer)}, 1).result()
    ckpt.save({"model": model, "optimizer": optimizer}, 2).result()
    other, target = make(1)
    ckpt.restore({"model": other, "optimizer": target}, 1, include="optimizer")
    assert same(target.state[other.up.weight], optimizer.state[model.up.weight])
    template = flattened(*make(1))
    ckpt.restore({"optimizer": template}, 2, include="optimizer")
    assert same(dict(sorted(dicts(template).items())),
                dict(sorted(dicts(flattened(model, optimizer)).items())))  # fmt: skip


@by_order
def test_numbers_do_not_match_state_of_unknown_shapes(ckpt):
    _, optimizer = make(0)
    for state in optimizer.state.values():
        state.update(exp_avg=torch.zeros(5), exp_avg_sq=torch.zeros(7))
    ckpt.save({"optimizer": optimizer.state_dict()}, 1).result()
    other, target = make(1, steps=0)
    with pytest.raises(RestoreMismatchError, match="state of a parameter of shape unknown"):
        ckpt.restore({"model": other, "optimizer": target}, include="optimizer")
    assert not target.state


@by_order
@pytest.mark.parametrize("form", [named, numbered])
def test_state_in_one_value_may_be_left_out(ckpt, form):
    model, optimizer = make(0, case="SGD")
    optimizer.param_groups[0]["lr"] = torch.tensor(0.3)  # so the dict as a whole is no value
    for parameter in model.parameters():
        optimizer.state[parameter] = {"count": 3}
    ckpt.save({"optimizer": form(model, optimizer)}, 1).result()
    assert "optimizer/state" in ckpt.open(1).keys()  # noqa: SIM118 - our method
    other, target = make(1, case="SGD")
    target.state[other.up.weight] = {"count": 5}
    state = {"model": other, "optimizer": target}
    ckpt.restore(state, include="optimizer", exclude="optimizer/stat?")
    assert target.state[other.up.weight] == {"count": 5}
    assert target.param_groups[0]["lr"] == torch.tensor(0.3)
    ckpt.restore(state, include="optimizer")
    assert target.state[other.up.weight] == {"count": 3}


@by_order
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (torch.optim.LBFGS, [(4, 3), (4,)]),
        (torch.optim.LBFGS, [(5,)]),
        (torch.optim.LBFGS, [()]),
        (torch.optim.AdamW, [()]),
    ],
)
def test_vectors_of_all_parameters_and_small_ones_are_matched_by_order(ckpt, kind, sizes):
    def make(seed, steps):
        torch.manual_seed(seed)
        parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
        optimizer = kind(parameters, lr=0.1)

        def loss():
            optimizer.zero_grad()
            value = sum(p.square().sum() for p in parameters)
            value.backward()
            return value

        for _ in range(steps):
            optimizer.step(loss)
        return optimizer

    optimizer = make(0, 2)
    ckpt.save({"optimizer": optimizer.state_dict()}, 1).result()
    for steps in (0, 1):
        target = make(1, steps)
        assert ckpt.restore({"optimizer": target}, 1).matched_by == "order"
        assert same(target.state_dict(), optimizer.state_dict())
    ckpt.save({"optimizer": optimizer}, 2).result()
    template = make(1, 1).state_dict()
    ckpt.restore({"optimizer": template}, 2)
    assert same(template, optimizer.state_dict())


def test_numbers_warn_that_they_match_by_order(ckpt):
    ckpt.save({"optimizer": numbered(*make(0))}, 1).result()
    other, target = make(1)
    with pytest.warns(UserWarning, match="optimizer is stored as a state dict with numbers"):
        report = ckpt.restore({"model": other, "optimizer": target}, include="optimizer")
    assert report.matched_by == "order"


@by_order
def test_load_gives_no_names_if_none_are_stored(ckpt):
    _, optimizer = make(0)
    ckpt.save({"a": optimizer, "b": 1}, 1).result()
    with pytest.raises(RestoreMismatchError, match="a is stored without parameter names: load it"):
        ckpt.load(named_optimizers=True)
    assert ckpt.load(exclude="a", named_optimizers=True) == {"b": 1}

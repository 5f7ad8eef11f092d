"""The conformance suite of replayers, as plain functions for any test.

`check_replayer` trains with generated gradients, logs the steps, replays them in other objects, and
compares every bit. Each check also works alone.
"""

from __future__ import annotations

import functools
import json
import logging
import pickle
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.core.abc import Replayer, Unit
from penstock.core.checkpointer import Checkpointer
from penstock.core.plugins.registry import Registry
from penstock.testing.expectations import expect_own_api_version, expect_signatures, finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer

    Make: TypeAlias = Callable[[], tuple[nn.Module, Optimizer]]
    Prepare: TypeAlias = Callable[[Optimizer], None]

__all__ = [
    "REPLAYER_CHECKS",
    "Subject",
    "check_capture",
    "check_changed_options",
    "check_declarations",
    "check_engine",
    "check_foreign_objects",
    "check_gradients_changed_by_a_hook",
    "check_missing_gradients",
    "check_not_finite_gradients",
    "check_plain_steps",
    "check_replayer",
    "check_several_groups",
    "check_unit",
]

_SAVED = 0, 3
_LAST = 5
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Subject:
    """A replayer with an optimizer that it handles.

    Attributes:
        make: Returns a new model, and an optimizer of its parameters.
        registry: The registry that contains the replayer.
    """

    make: Make
    registry: Registry

    @property
    def replayer(self) -> Replayer:
        """The replayer of the optimizer.

        Raises:
            AssertionError: No replayer handles it.
        """
        optimizer = self.make()[1]
        replayer = self.registry.replayer(optimizer)
        assert replayer is not None, f"no replayer handles {type(optimizer).__name__}"
        return replayer


ReplayerCheck: TypeAlias = "Callable[[Subject], None]"


def check_replayer(make: Make, *, replayer: type[Replayer] | None = None) -> None:
    """Run all checks, in order.

    Args:
        make: Returns a new model, and an optimizer of its parameters. There must be at least two
            parameters, one of them with several elements. The optimizer must have the same options
            each time.
        replayer: The class under test, if it is not installed; None: the installed one that handles
            the optimizer.

    Raises:
        AssertionError: The replayer breaks the contract; the message says how.
    """
    registry = Registry()
    if replayer is not None:
        registry.register(replayer, replace=True)
    subject = Subject(make, registry)
    if replayer is not None:
        used = type(subject.replayer)
        assert used is replayer, (
            f"{used.__qualname__} handles the optimizer, not the class under test"
        )
    for check in REPLAYER_CHECKS:
        check(subject)


def _in_words(check: ReplayerCheck) -> ReplayerCheck:
    @functools.wraps(check)
    def named(subject: Subject) -> None:
        with finding(check.__name__.replace("_", " ")):
            check(subject)

    return named


# -- calls ------------------------------------------------------------------------------------


@_in_words
def check_declarations(subject: Subject) -> None:
    """Check the name, the versions and the signatures."""
    replayer = subject.replayer
    assert replayer.name, "a replayer needs a name"
    expect_own_api_version(replayer)
    expect_signatures(replayer, Replayer)
    version: object = replayer.version
    assert type(version) is int, f"version is {version!r}, not an int"
    assert version >= 1, "versions count from 1"


class _Stranger(torch.optim.Optimizer):
    """An optimizer that no replayer knows."""


@_in_words
def check_foreign_objects(subject: Subject) -> None:
    """Check that `handles` returns a bool, and False for everything but its own optimizers."""
    replayer, optimizer = subject.replayer, subject.make()[1]
    stranger = _Stranger([torch.zeros(1)], {"lr": 1.0})
    mine = [(optimizer, True)]
    for value, expected in [*mine, *((v, False) for v in (stranger, object(), None, {}))]:
        answer: object = replayer.handles(value)
        assert type(answer) is bool, f"handles returned {answer!r}: it must be True or False"
        assert answer is expected, (
            f"handles returned {answer} for {type(value).__name__}: it must be {expected}"
        )


@_in_words
def check_engine(subject: Subject) -> None:
    """Check that `engine` is JSON and stays equal after steps, and that `obstacle` is empty."""
    replayer = subject.replayer
    new, used = subject.make()[1], subject.make()[1]
    _train(used, 1, 2)
    facts = [dict(replayer.engine(optimizer)) for optimizer in (new, used)]
    for fact in facts:
        stored = json.loads(json.dumps(fact, allow_nan=False))
        assert stored == fact, f"engine returned {fact}, which JSON changes to {stored}"
    assert facts[0] == facts[1], f"engine is {facts[0]} at first, but {facts[1]} after a step"
    obstacle: object = replayer.obstacle(used)
    assert type(obstacle) is str, f"obstacle returned {obstacle!r}: it must be a str"
    assert not obstacle, f"these steps cannot be replayed: {obstacle}"


@_in_words
def check_capture(subject: Subject) -> None:
    """Check that later steps do not change captured values, and that the replayer has no state."""
    replayer, optimizer = subject.replayer, subject.make()[1]
    before = dict(vars(replayer))
    _train(optimizer, 1, 2)
    for capture in (replayer.capture_before, replayer.capture):
        captured = capture(optimizer)
        was = pickle.dumps(_bits(dict(captured)))
        held = {t.data_ptr() for t in _tensors(vars(optimizer)) if t.numel()}
        shared = [t for t in _tensors(dict(captured)) if t.data_ptr() in held]
        assert not shared, f"{capture.__name__} returned a tensor of the optimizer: return a copy"
        _train(optimizer, 2, 3)
        assert pickle.dumps(_bits(dict(captured))) == was, (
            f"what {capture.__name__} returned changed with the next step: return copies"
        )
    assert dict(vars(replayer)) == before, "the replayer has a state: keep none between calls"


# -- what `unit` claims -----------------------------------------------------------------------


@_in_words
def check_unit(subject: Subject) -> None:
    """Check that parameters can step alone, or cut into pieces, if `unit` claims so."""
    _, optimizer = subject.make()
    claimed: object = subject.replayer.unit(optimizer)
    assert isinstance(claimed, Unit), f"unit returned {claimed!r}: it must be a Unit"
    if claimed is not Unit.OPTIMIZER:
        for number in range(len(_parameters(optimizer))):
            _steps_alone(subject, number)
    if claimed is Unit.ELEMENT:
        _steps_in_pieces(subject)


def _steps_alone(subject: Subject, number: int) -> None:
    """Compare a parameter that steps together with all others to the same parameter alone."""
    (model, together), (other, alone) = subject.make(), subject.make()
    _copy_parameters(other, model)
    for step in (1, 2, 3):
        for optimizer in (together, alone):
            _set_gradients(optimizer, step)
        for parameter in _parameters(alone)[:number] + _parameters(alone)[number + 1 :]:
            parameter.grad = None
        together.step()
        alone.step()
    expected, got = (
        (p, dict(optimizer.state.get(p, {})))
        for optimizer in (together, alone)
        for p in [_parameters(optimizer)[number]]
    )
    what = f"parameter {number} gets other bits if it steps alone: unit must return Unit.OPTIMIZER"
    _expect_same(expected, got, what)


def _steps_in_pieces(subject: Subject) -> None:
    """Compare whole parameters to the same parameters cut into pieces that step separately."""
    (model, whole), (other, cut) = subject.make(), subject.make()
    _copy_parameters(other, model)
    for optimizer in (whole, cut):
        _train(optimizer, 1, 2)  # some make their state in the first step
    groups, numbers = [], iter(range(len(_parameters(cut))))
    for group in cut.param_groups:
        groups.append([(next(numbers), p, _pieces(cut, p)) for p in group["params"]])
        group["params"] = [piece for _, _, pieces in groups[-1] for piece in pieces]
    for step in (2, 3):
        _set_gradients(whole, step)
        for number, parameter, pieces in (row for rows in groups for row in rows):
            flat = _gradient(parameter, number, step).flatten()
            cut_grads = torch.split(flat, [p.numel() for p in pieces])
            for piece, grad in zip(pieces, cut_grads, strict=True):
                piece.grad = grad.clone()
        whole.step()
        cut.step()
    for number, _, pieces in (row for rows in groups for row in rows):
        expected = _parameters(whole)[number].detach().flatten()
        got = torch.cat([piece.detach() for piece in pieces])
        what = f"parameter {number} gets other bits in pieces than whole: unit must not be ELEMENT"
        _expect_same(expected, got, what)


def _pieces(optimizer: Optimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
    """Cut a parameter and its state into uneven pieces; return the parameter's pieces."""
    count = parameter.numel()
    cuts = sorted({0, min(1, count), min(4, count), count // 2, count})
    state = optimizer.state.pop(parameter, {})
    pieces: list[torch.Tensor] = []
    for start, end in pairwise(cuts):
        piece = parameter.detach().flatten()[start:end].clone().requires_grad_()
        optimizer.state[piece] = {key: _cut(v, parameter, start, end) for key, v in state.items()}
        pieces.append(piece)
    return pieces


def _cut(value: object, parameter: torch.Tensor, start: int, end: int) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    like = value.shape == parameter.shape and value.dim() > 0
    return value.flatten()[start:end].clone() if like else value.clone()


# -- replays of logged steps ------------------------------------------------------------------


@_in_words
def check_plain_steps(subject: Subject) -> None:
    """Check that steps are replayed to the same bits."""
    _check_replay(subject)


@_in_words
def check_gradients_changed_by_a_hook(subject: Subject) -> None:
    """Check that a replay does not run step hooks again: they may change the gradients."""

    def halve(optimizer: Optimizer, *_: object) -> None:
        for parameter in _parameters(optimizer):
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    _check_replay(subject, lambda optimizer: _register(optimizer, halve))


@_in_words
def check_missing_gradients(subject: Subject) -> None:
    """Check steps in which some parameters have no gradient, unless the optimizer refuses them."""

    def leave_out(optimizer: Optimizer, step: int) -> None:
        parameters = _parameters(optimizer)
        parameters[step % len(parameters)].grad = None

    optimizer = subject.make()[1]
    try:
        for step in range(1, _LAST + 1):
            _set_gradients(optimizer, step)
            leave_out(optimizer, step)
            optimizer.step()
    except Exception:  # noqa: BLE001 - fused SGD of torch, which needs all or none at first
        return
    _check_replay(subject, change=leave_out)


@_in_words
def check_changed_options(subject: Subject) -> None:
    """Check options that change after each step, as under a scheduler, even options in tensors."""

    def schedule(optimizer: Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"].mul_(0.5)
            elif isinstance(group.get("lr"), float):
                group["lr"] /= 1 + step

    _check_replay(subject, after=schedule)


@_in_words
def check_several_groups(subject: Subject) -> None:
    """Check an optimizer with two groups that have different options."""

    def divide(optimizer: Optimizer) -> None:
        group = optimizer.param_groups[0]
        half = len(group["params"]) // 2
        second = {**group, "params": group["params"][half:]}
        if isinstance(group.get("lr"), float):
            second["lr"] = group["lr"] / 2
        group["params"] = group["params"][:half]
        optimizer.add_param_group(second)

    _check_replay(subject, divide)


@_in_words
def check_not_finite_gradients(subject: Subject) -> None:
    """Check steps with NaNs and infinities."""

    def spoil(optimizer: Optimizer, step: int) -> None:
        grad = _parameters(optimizer)[0].grad
        assert grad is not None
        if step in {2, _LAST}:
            grad.view(-1)[0] = float("nan") if step == 2 else float("inf")  # noqa: PLR2004

    _check_replay(subject, change=spoil)


def _check_replay(
    subject: Subject,
    prepare: Prepare = lambda _: None,
    *,
    change: Callable[[Optimizer, int], None] = lambda *_: None,
    after: Callable[[Optimizer, int], None] = lambda *_: None,
) -> None:
    """Log steps; replay them onto two checkpoints, one without and one with optimizer state."""
    store = MemoryBackend(MemoryConfig())
    model, optimizer = subject.make()
    prepare(optimizer)
    state = {"model": model, "optimizer": optimizer}
    bits: dict[int, object] = {}
    with _reasons() as reasons:
        with Checkpointer(store, registry=subject.registry) as ckpt:
            for step in range(_LAST + 1):
                if step:
                    _set_gradients(optimizer, step)
                    change(optimizer, step)
                    optimizer.step()
                if step in _SAVED:
                    ckpt.save(state, step, mode="blocking")
                else:
                    assert ckpt.log(state, step), f"step {step} was not logged: {reasons}"
                bits[step] = _all_bits(model, optimizer)
                after(optimizer, step)
        assert not reasons, f"the log ended: {reasons}"
        for step in (2, _LAST):
            model, optimizer = subject.make()
            prepare(optimizer)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            with Checkpointer(store, registry=subject.registry) as ckpt:
                report = ckpt.restore({"model": model, "optimizer": optimizer}, step)
            assert report.replayed_steps == 2, f"step {step} was not replayed: {reasons}"  # noqa: PLR2004
            got = _all_bits(model, optimizer)
            _expect_same(bits[step], got, f"a replay to step {step} gives other bits")


@contextmanager
def _reasons() -> Iterator[list[str]]:
    """Collect the warnings that report why a log ends."""
    reasons: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reasons.append(record.getMessage())

    logger, handler = logging.getLogger("penstock"), Collector(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield reasons
    finally:
        logger.removeHandler(handler)


REPLAYER_CHECKS: tuple[ReplayerCheck, ...] = (
    check_declarations,
    check_foreign_objects,
    check_engine,
    check_capture,
    check_unit,
    check_plain_steps,
    check_gradients_changed_by_a_hook,
    check_missing_gradients,
    check_changed_options,
    check_several_groups,
    check_not_finite_gradients,
)
"""All checks, in order; each takes a `Subject`, and raises AssertionError."""


# -- steps and bits ---------------------------------------------------------------------------


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _register(optimizer: Optimizer, hook: Any) -> None:
    optimizer.register_step_pre_hook(hook)


def _copy_parameters(target: nn.Module, source: nn.Module) -> None:
    with torch.no_grad():
        for one, other in zip(target.parameters(), source.parameters(), strict=True):
            one.copy_(other)


def _gradient(parameter: torch.Tensor, number: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + number)
    grad = torch.randn(parameter.shape, generator=generator)
    return grad.to(dtype=parameter.dtype, device=parameter.device)


def _set_gradients(optimizer: Optimizer, step: int) -> None:
    for number, parameter in enumerate(_parameters(optimizer)):
        parameter.grad = _gradient(parameter, number, step)


def _train(optimizer: Optimizer, first: int, end: int) -> None:
    for step in range(first, end):
        _set_gradients(optimizer, step)
        optimizer.step()


def _all_bits(model: nn.Module, optimizer: Optimizer) -> object:
    return _bits({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def _bits(value: Any) -> Any:
    """Return a copy of nested values, with the dtype, shape and bytes of each tensor."""
    if hasattr(value, "__tensor_flatten__") and not hasattr(value, "_local_tensor"):
        parts, facts = value.__tensor_flatten__()  # a quantized tensor
        return [str(facts), *(_bits(getattr(value, name)) for name in parts)]
    if isinstance(value, torch.Tensor):
        flat = value.detach().to("cpu").contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: _bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_bits(item) for item in value]
    return value


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers, even keys of dicts, and the gradients of each."""
    if isinstance(value, torch.Tensor):
        yield value
        if value.grad is not None:
            yield value.grad
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _tensors(pair)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _expect_same(expected: object, got: object, what: str) -> None:
    """Compare bits; the message names the first difference."""
    place = _difference(_bits(expected), _bits(got), "")
    assert place is None, f"{what}{place and f' ({place})'}"


def _difference(one: Any, other: Any, path: str) -> str | None:
    """Return the path of the first difference between nested values; None if they are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys: Sequence[Any] = [*one, *(key for key in other if key not in one)]
        pairs = [(key, one.get(key, _MISSING), other.get(key, _MISSING)) for key in keys]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(n, a, b) for n, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return None if type(one) is type(other) and one == other else path.strip("/") or "value"
    found = (_difference(a, b, f"{path}/{key}") for key, a, b in pairs)
    return next((place for place in found if place is not None), None)

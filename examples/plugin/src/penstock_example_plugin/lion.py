"""Lion, an optimizer that torch lacks, and the replayer of its logged steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from penstock.core.abc import Replayer, Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a momentum (Chen et al. 2023, algorithm 2), rounded at random.

    Of a parameter in bfloat16, a small step is often lost. `stochastic=True` rounds the new value
    up or down with the probability that keeps its mean.

    Args:
        params: The parameters.
        lr: The size of a step.
        betas: How much of the momentum a step and the next momentum keep.
        weight_decay: How much of a parameter decays, as in AdamW.
        stochastic: Whether to round bfloat16 at random.
        seed: Of the random numbers.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        stochastic: bool = False,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        # `draw` is the seed of the next random numbers: a checkpoint has it with the options.
        super().__init__(params, {**defaults, "stochastic": stochastic, "draw": seed})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[parameter], parameter.grad.float()
        if not state:
            state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
        momentum, (beta1, beta2) = state["momentum"], group["betas"]
        new = parameter.float() * (1 - group["lr"] * group["weight_decay"])
        new -= group["lr"] * torch.lerp(grad, momentum, beta1).sign()
        momentum.lerp_(grad, 1 - beta2)
        if group["stochastic"] and parameter.dtype is torch.bfloat16:
            generator = torch.Generator(parameter.device).manual_seed(group["draw"])
            new = rounded(new, generator)
            group["draw"] += 1
        parameter.copy_(new)


def rounded(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return float32 rounded to bfloat16 at random: noise in the bits that bfloat16 lacks."""
    noise = torch.randint(
        1 << 16, value.shape, generator=generator, device=value.device, dtype=torch.int32
    )
    bits = (value.contiguous().view(torch.int32) + noise) & -(1 << 16)
    return torch.where(value.isfinite(), bits.view(torch.float32), value)


class LionReplayer(Replayer):
    """Replays `Lion`, whose groups count the random numbers that a step has used."""

    api_version: ClassVar[int] = 1
    name: ClassVar[str] = "lion"
    version: ClassVar[int] = 1

    def handles(self, optimizer: Any, /) -> bool:
        # A subclass may do anything.
        return type(optimizer) is Lion

    def unit(self, optimizer: Any, /) -> Unit:
        # With random numbers the parameters share a count.
        stochastic = any(group["stochastic"] for group in optimizer.param_groups)
        return Unit.OPTIMIZER if stochastic else Unit.ELEMENT

    def capture_before(self, optimizer: Any, /) -> Mapping[str, Any]:
        return {"draws": [group["draw"] for group in optimizer.param_groups]}

    def step(self, optimizer: Any, captured: Mapping[str, Any], /) -> None:
        # The groups have the counts after the step, as the log has them.
        for group, draw in zip(optimizer.param_groups, captured["draws"], strict=True):
            group["draw"] = draw
        optimizer.step()

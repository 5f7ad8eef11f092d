"""The replayer of `torch.optim`.

Tested in `tests/integration/log/test_replay.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from penstock.core.abc import Replayer, Unit

if TYPE_CHECKING:
    from collections.abc import Mapping

_EXACT = 4  # bytes: fused kernels do not compute with more bits than gradients of this size have
# Unless fused, these compute each element from its own gradient and state.
_ELEMENTWISE = frozenset(
    {
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    }
)  # fmt: skip


class TorchReplayer(Replayer):
    """Replays the optimizers of `torch.optim`, except `LBFGS`, whose step computes gradients."""

    name: ClassVar[str] = "torch"

    def handles(self, optimizer: Any, /) -> bool:
        """Return True for torch's own classes except `LBFGS`; a subclass may step differently."""
        kind = type(optimizer)
        return kind.__module__.split(".")[:2] == ["torch", "optim"] and kind.__name__ != "LBFGS"

    def obstacle(self, optimizer: Any, /) -> str:
        """Return why a step cannot be replayed; empty if it can."""
        name = type(optimizer).__name__
        if any(group.get("capturable") for group in optimizer.param_groups):
            return f"{name} is capturable: no hook runs when a CUDA graph replays its step"
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if name not in _ELEMENTWISE and any(hasattr(p, "_local_tensor") for p in parameters):
            # These are DTensors, recognized without their class, which takes long to import. If the
            # replay failed on one rank, the others would wait for it in a collective.
            return f"steps of {name} on sharded parameters use collectives, and a replay must not"
        for group in optimizer.param_groups:
            if group.get("nesterov") and not group.get("fused"):
                foreach = group.get("foreach", False)
                if any(p.is_cuda for p in group["params"]) if foreach is None else foreach:
                    return f"{name} with nesterov and foreach changes its gradients: use fused=True"
        if getattr(optimizer, "grad_scale", None) is not None:
            narrow = [p.grad for p in parameters if p.grad is not None and p.grad.itemsize < _EXACT]
            if narrow:
                dtype = str(narrow[0].dtype).removeprefix("torch.")
                return (
                    f"{name} unscales gradients of {dtype} in its fused step, which computes with "
                    "more bits than it writes back to them: call scaler.unscale_ before the step, "
                    "or use fused=False"
                )
        return ""

    def unit(self, optimizer: Any, /) -> Unit:
        """Return `ELEMENT` if each element is computed alone, else `PARAMETER`.

        Fused kernels need whole parameters: their bits depend on where their vectors begin.
        """
        fused = any(group.get("fused") for group in optimizer.param_groups)
        elementwise = type(optimizer).__name__ in _ELEMENTWISE and not fused
        return Unit.ELEMENT if elementwise else Unit.PARAMETER

    def capture(self, optimizer: Any, /) -> Mapping[str, Any]:
        """Return `skipped`: whether a fused step found infinities, and so changed no parameter."""
        found_inf = getattr(optimizer, "found_inf", None)
        return {"skipped": found_inf is not None and bool(found_inf)}

    def step(self, optimizer: Any, captured: Mapping[str, Any], /) -> None:
        """Repeat a step, even a skipped one, since it may have created state."""
        if not captured["skipped"]:
            optimizer.step()
            return
        (device,) = {p.device for group in optimizer.param_groups for p in group["params"]}
        optimizer.found_inf = torch.ones((), device=device)
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf

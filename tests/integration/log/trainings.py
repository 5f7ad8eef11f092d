"""Small trainings in all the ways that change what a step is made from."""

import torch
from torch import nn, optim

import penstock

KINDS = {
    "AdamW": lambda p: optim.AdamW(p, 1e-3),
    "AdamW loop": lambda p: optim.AdamW(p, 1e-3, foreach=False),
    "AdamW foreach": lambda p: optim.AdamW(p, 1e-3, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, 1e-3, fused=True),
    "AdamW amsgrad": lambda p: optim.AdamW(p, 1e-3, amsgrad=True),
    "Adam": lambda p: optim.Adam(p, 1e-3),
    "SGD": lambda p: optim.SGD(p, 0.01),
    "SGD nesterov": lambda p: optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
    "SGD fused": lambda p: optim.SGD(p, 0.01, momentum=0.9, fused=True),
    "Adafactor": lambda p: optim.Adafactor(p, 1e-3),
    "RAdam": lambda p: optim.RAdam(p, 1e-3),
    "NAdam": lambda p: optim.NAdam(p, 1e-3),
    "Adamax": lambda p: optim.Adamax(p, 1e-3),
    "Adadelta": optim.Adadelta,
    "Adagrad": lambda p: optim.Adagrad(p, 1e-2),
    "Adagrad fused": lambda p: optim.Adagrad(p, 1e-2, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, 1e-3, momentum=0.9, centered=True),
    "Rprop": lambda p: optim.Rprop(p, 1e-3),
    "ASGD": lambda p: optim.ASGD(p, 1e-2),
}
WAYS = ["plain", "clip", "clip in its own hook", "bf16", "scaler", "accumulation", "closure"]
INFINITE = 7  # the step whose gradients the scaler finds infinite


class Training:
    """A model with batch norm and dropout, whose data comes from the global generator."""

    def __init__(self, kind="AdamW", way="plain", seed=0):
        torch.manual_seed(seed)
        self.way = way
        self.model = nn.Sequential(
            nn.Linear(16, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Dropout(0.1), nn.Linear(33, 1)
        )
        self.optimizer = KINDS[kind](self.model.parameters())
        self.scheduler = optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        if way == "clip in its own hook":
            self.optimizer.register_step_pre_hook(lambda *_: self._clip())

    @property
    def state(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "rng": penstock.Rng(),
        }

    def step(self, number=0):
        """Train one step; return the loss."""
        self.optimizer.zero_grad()
        losses = [
            self._backward(number).item() for _ in range(3 if self.way == "accumulation" else 1)
        ]
        if self.way == "clip":
            self._clip()
        if self.way == "scaler":
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.way != "closure":
            self.optimizer.step()
        self.scheduler.step()
        return losses

    def bits(self):
        """Return copies of everything that a step changes."""
        held = [*self.model.state_dict().values(), torch.get_rng_state()]
        for parameter in self.model.parameters():
            state = self.optimizer.state[parameter]
            held += [v for _, v in sorted(state.items()) if isinstance(v, torch.Tensor)]
        rates = [torch.tensor(group["lr"]) for group in self.optimizer.param_groups]
        scale = torch.tensor([*self.scaler.state_dict().values()], dtype=torch.float64)
        return [tensor.clone() for tensor in (*held, *rates, scale)]

    def _backward(self, number):
        inputs = torch.randn(8, 16)
        if self.way == "closure":
            return self.optimizer.step(lambda: self._closure(inputs))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.way in {"bf16", "scaler"}):
            loss = self.model(inputs).float().square().mean()
        if self.way != "scaler":
            loss.backward()
        else:
            self.scaler.scale(loss * (float("inf") if number == INFINITE else 1)).backward()
        return loss

    def _closure(self, inputs):
        self.optimizer.zero_grad()
        loss = self.model(inputs).square().mean()
        loss.backward()
        return loss

    def _clip(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

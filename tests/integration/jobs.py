"""Small training jobs, deterministic from a seed, each with state that is easy to lose.

`step` trains one step and returns its loss, `state` is the tree that a user would save, and
`snapshot` a copy of all relevant state, made without Penstock.
"""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import torch
from tests.integration.training import copies, random_state
from torch import nn

import penstock

WIDTH = 40


class Loader:
    """A typical shuffled, endless loader; its position is part of the state."""

    def __init__(self, seed, rows=10, batch=4):
        self.data = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1234))
        self.batch = batch
        self.generator = torch.Generator().manual_seed(seed)
        self.order = []

    def next(self):
        if len(self.order) < self.batch:
            self.order = torch.randperm(len(self.data), generator=self.generator).tolist()
        chosen, self.order = self.order[: self.batch], self.order[self.batch :]
        return self.data[chosen]

    def state_dict(self):
        return {"generator": self.generator.get_state(), "order": list(self.order)}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.order = list(state["order"])


class Job:
    """Dropout, BatchNorm, a schedule, a stateful loader, all three random generators."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = self.make_model()
        self.optimizer = self.make_optimizer()
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.first_optimizer(), 20)
        self.loader = Loader(seed)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "rng": penstock.Rng(),
            "epoch": seed,
        }

    def make_model(self):
        return nn.Sequential(
            nn.Linear(WIDTH, 30),
            nn.BatchNorm1d(30),
            nn.GELU(),
            nn.Dropout(0.3),
            nn.Linear(30, WIDTH),
        )

    def make_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def first_optimizer(self):
        return self.optimizer

    def loss(self, batch):
        # Noise from each generator, so losing the state of any of them shows.
        noise = random.random() + float(np.random.rand())
        return (self.model(batch) - batch).square().mean() * (1 + 0.1 * noise)

    def step(self):
        loss = self.loss(self.loader.next())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.item()

    def restored(self):
        """What a training script does after a restore."""

    def snapshot(self):
        return {
            "model": copies(dict(self.model.state_dict())),
            "optimizer": copies(self.first_optimizer().state_dict()),
            "scheduler": copies(self.scheduler.state_dict()),
            "loader": copies(self.loader.state_dict()),
            "random": copies(random_state()),
        }


class _WithOptimizer(Job):
    def __init__(self, kind, options, seed):
        self.make_optimizer = lambda: kind(self.model.parameters(), **options)
        super().__init__(seed)


def with_optimizer(kind, **options):
    return partial(_WithOptimizer, kind, options)


class _WithClosure(_WithOptimizer):
    def step(self):
        batch = self.loader.next()
        losses = []

        def closure():
            self.optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            losses.append(loss.item())
            return loss

        self.optimizer.step(closure)
        self.scheduler.step()
        return losses[0]


def with_closure(kind, **options):
    return partial(_WithClosure, kind, options)


class SparseJob(Job):
    """Sparse gradients: only used rows have changed."""

    def make_model(self):
        return nn.Embedding(50, WIDTH, sparse=True)

    def make_optimizer(self):
        return torch.optim.SparseAdam(self.model.parameters(), lr=0.05)

    def loss(self, batch):
        rows = torch.randint(0, 50, (len(batch),))
        return (self.model(rows) - batch).square().mean()


class MasterAdam(torch.optim.Optimizer):
    """Adam with fp32 state, master weights included, for parameters of any dtype."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.float()
                    state["exp_avg"] = torch.zeros_like(state["master"])
                    state["exp_avg_sq"] = torch.zeros_like(state["master"])
                    state["count"] = 0
                grad = parameter.grad.float()
                state["count"] += 1
                state["exp_avg"].lerp_(grad, 0.1)
                state["exp_avg_sq"].lerp_(grad * grad, 0.01)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
                state["master"].add_(update, alpha=-group["lr"] / state["count"])
                parameter.copy_(state["master"])


class MixedOptimizer(Job):
    """State dtype other than the parameter's: torch's `load_state_dict` would cast it."""

    def make_model(self):
        return nn.Sequential(
            nn.Linear(WIDTH, 30), nn.LayerNorm(30), nn.Dropout(0.2), nn.Linear(30, WIDTH)
        ).to(torch.bfloat16)

    def make_optimizer(self):
        return MasterAdam(self.model.parameters())

    def loss(self, batch):
        return (self.model(batch.bfloat16()).float() - batch).square().mean()

    def snapshot(self):
        state = [dict(self.optimizer.state[p]) for p in self.model.parameters()]
        return {**super().snapshot(), "optimizer": copies(state)}


class Compiled(Job):
    """Trained through `torch.compile`, saved unchanged."""

    def __init__(self, seed, compiled=True):
        torch._dynamo.reset()
        super().__init__(seed)
        self.plain = self.model
        if compiled:
            self.model = torch.compile(self.model, backend="eager")
            self.state["model"] = self.model

    def snapshot(self):
        return {**super().snapshot(), "model": copies(dict(self.plain.state_dict()))}


class Scaled(Job):
    """A gradient scaler whose scale changes, and that skips steps at first."""

    def __init__(self, seed, enabled=True):
        super().__init__(seed)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**126, growth_interval=2, enabled=enabled
        )
        self.state["scaler"] = self.scaler

    def step(self):
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(self.loader.next())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.item()

    def snapshot(self):
        return {**super().snapshot(), "scaler": copies(self.scaler.state_dict())}


class Accumulation(Job):
    """The optimizer steps every second time."""

    def __init__(self, seed):
        super().__init__(seed)
        self.state["grads"] = penstock.Grads(self.model)
        self.state["taken"] = 0

    def step(self):
        loss = self.loss(self.loader.next())
        loss.backward()
        self.state["taken"] += 1
        if self.state["taken"] % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return loss.item()

    def snapshot(self):
        grads = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return {**super().snapshot(), "grads": grads}


class Averaged(Job):
    """Evaluated by its moving average, which must resume as well."""

    def __init__(self, seed):
        super().__init__(seed)
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.ema = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=average, use_buffers=True
        )
        self.state["ema"] = self.ema

    def step(self):
        super().step()
        self.ema.update_parameters(self.model)
        self.ema.eval()
        with torch.no_grad():
            return self.ema(self.loader.data).square().mean().item()

    def snapshot(self):
        return {**super().snapshot(), "ema": copies(dict(self.ema.state_dict()))}


class TwoOptimizers(Job):
    """One for matrices, one for the rest."""

    def make_optimizer(self):
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        rest = [p for p in self.model.parameters() if p.ndim != 2]
        return {
            "matrices": torch.optim.SGD(matrices, lr=0.1, momentum=0.9),
            "rest": torch.optim.Adam(
                [{"params": rest[:2]}, {"params": rest[2:], "lr": 0.5}], amsgrad=True
            ),
        }

    def first_optimizer(self):
        return self.optimizer["matrices"]

    def step(self):
        loss = self.loss(self.loader.next())
        loss.backward()
        for optimizer in self.optimizer.values():
            optimizer.step()
            optimizer.zero_grad()
        self.scheduler.step()
        return loss.item()

    def snapshot(self):
        rest = copies(self.optimizer["rest"].state_dict())
        return {**super().snapshot(), "rest": rest}


class Clashing(Job):
    """One optimizer over two modules whose parameters have the same names."""

    def __init__(self, seed):
        super().__init__(seed)
        del self.state["model"]
        self.state["coder"] = {"encode": self.model["encode"], "decode": self.model["decode"]}

    def make_model(self):
        return nn.ModuleDict({"encode": nn.Linear(WIDTH, 20), "decode": nn.Linear(20, WIDTH)})

    def loss(self, batch):
        hidden = nn.functional.dropout(self.model["encode"](batch), 0.2)
        return (self.model["decode"](hidden) - batch).square().mean()


class StatefulLoader(Job):
    """torchdata's loader, in the middle of an epoch."""

    def __init__(self, seed):
        super().__init__(seed)
        from torchdata.stateful_dataloader import StatefulDataLoader

        self.own = StatefulDataLoader(self.loader.data, batch_size=4, shuffle=True)
        self.batches = None
        self.loader.next = self.next_batch
        self.state["loader"] = self.own

    def next_batch(self):
        for _ in range(2):
            if self.batches is None:
                self.batches = iter(self.own)
            batch = next(self.batches, None)
            if batch is not None:
                return batch
            self.batches = None
        raise AssertionError("an empty epoch")

    def restored(self):
        self.batches = None

    def snapshot(self):
        return {**super().snapshot(), "loader": None}

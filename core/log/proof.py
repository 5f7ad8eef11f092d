"""Proves in the background that the steps of a run can be replayed to the same bits.

Tested in `tests/integration/log/test_proof.py`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from penstock.core.abc import Unit
from penstock.core.log.grads import NotLoggedError, local_of
from penstock.core.log.replayed import digest_of, step_again
from penstock.core.log.steps import (
    detached,
    parameters_of,
    with_groups,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch.optim import Optimizer

    from penstock.core.abc import Replayer

_PARAMETER_BYTES = 16 << 20  # the size of the parameters in a proof, without their state


class RefutedError(NotLoggedError):
    """A replayed step gave other bits than the original step in training."""


@dataclass(eq=False, slots=True)
class Proof:
    """Copies of some parameters from before a step, on which the stored step is taken again.

    Attributes:
        chosen: The numbers of the parameters, counted over all groups.
        copied: An optimizer of the same class with copies of these parameters and their state.
        digest: The digest of the original parameters and their state after the step.
    """

    chosen: Collection[int]
    copied: Optimizer
    digest: str = ""

    def finish(self, optimizer: Optimizer) -> None:
        """Store the digest of the original values after the step."""
        self.digest = digest_of(_part_of(optimizer, self.chosen))

    def still_holds(self, optimizer: Optimizer) -> bool:
        """Return whether the original values are unchanged since `finish`."""
        return self.digest == digest_of(_part_of(optimizer, self.chosen))

    def check(self, replayer: Replayer, stored: Mapping[str, Any]) -> None:
        """Take the stored step with the copies, and compare digests. Any thread may call this.

        Raises:
            RefutedError: The bits differ.
        """
        numbers = count()
        copies = parameters_of(self.copied)
        placed = [
            [(next(copies) if next(numbers) in self.chosen else None, row) for row in group]
            for group in stored["layout"]
        ]
        step_again(self.copied, replayer, stored, placed)
        if digest_of(self.copied) != self.digest:
            msg = (
                f"a replay of the step of {stored['optimizer']} gives other bits than training: "
                f"{stored['engine']}"
            )
            raise RefutedError(msg)


def begin_proof(
    optimizer: Optimizer, replayer: Replayer, attributes: Mapping[str, Any]
) -> Proof | None:
    """Copy some parameters before a step.

    Args:
        optimizer: The optimizer.
        replayer: The replayer of the optimizer.
        attributes: The optimizer's attributes at the start of the run. A replay begins with the
            same: an optimizer that counts its steps in an attribute counts from the start again
            after a restart.

    Returns:
        The proof; None if all parameters step only together and are too large to copy.
    """
    chosen: list[int] = []
    nbytes = 0
    together = replayer.unit(optimizer) is Unit.OPTIMIZER
    for number, parameter in enumerate(parameters_of(optimizer)):
        nbytes += local_of(parameter).nbytes
        if chosen and nbytes > _PARAMETER_BYTES:
            if together:
                return None
            break
        chosen.append(number)
    part = _part_of(optimizer, chosen)
    memo: dict[int, Any] = {}
    groups = [
        {**group, "params": [_copied(p, memo) for p in group["params"]]}
        for group in part.param_groups
    ]
    copied = with_groups(optimizer, groups, detached(attributes, memo))
    copied.state = defaultdict(dict)
    for parameter in parameters_of(part):
        if parameter in optimizer.state:
            own = optimizer.state[parameter]
            # Copied here, because `deepcopy` calls `clone`, which quantized tensors lack.
            tensors = {id(v): detached(v, {}) for v in own.values() if hasattr(v, "dtype")}
            copied.state[memo[id(parameter)]] = copy.deepcopy(own, tensors)
    state: dict[Any, Any] = optimizer.state
    shared: dict[Any, Any] = {key: v for key, v in state.items() if isinstance(key, str)}
    copied.state.update(copy.deepcopy(shared))
    return Proof(frozenset(chosen), copied)


def _copied(parameter: Any, memo: dict[int, Any]) -> Any:
    memo[id(parameter)] = parameter.detach().clone().requires_grad_(parameter.requires_grad)
    return memo[id(parameter)]


def _part_of(optimizer: Optimizer, chosen: Collection[int]) -> Optimizer:
    """Return a view of an optimizer that has only some parameters."""
    numbers = count()
    groups = [
        {**group, "params": [p for p in group["params"] if next(numbers) in chosen]}
        for group in optimizer.param_groups
    ]
    return with_groups(optimizer, groups, vars(optimizer))

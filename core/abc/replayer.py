"""The contract of replayers, which take the logged steps of optimizers again.

Tested in `tests/integration/log/test_replayers.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.core.abc.plugin import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping


class Unit(Enum):
    """The smallest part of an optimizer's parameters that steps alone, to the same bits."""

    OPTIMIZER = "optimizer"
    """A step computes something over all parameters, such as a norm."""

    PARAMETER = "parameter"
    """Each parameter steps alone, whole."""

    ELEMENT = "element"
    """Each element steps alone, however a parameter is cut."""


class Replayer(ABC):
    """Takes the steps of one kind of optimizer again.

    The log holds the gradients that a step has used, and the options that the groups have after it.
    The default methods suit an optimizer that depends on nothing else. A replayer has no state:
    `step` and `engine` are also called on the log thread.

    Attributes:
        name: The name of the entry point.
        version: Rises when the same inputs give other bits than before. Logs of another version are
            not replayed.
        api_version: The version of this contract that the class was written for.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    api_version: ClassVar[int] = API_VERSION

    @abstractmethod
    def handles(self, optimizer: Any, /) -> bool:
        """Return whether this replayer is for an optimizer, a `torch.optim.Optimizer`."""

    def obstacle(self, optimizer: Any, /) -> str:
        """Return why the step that was just taken cannot be replayed; empty if it can.

        The text follows "the log of gradients ends after step 7: ".
        """
        del optimizer
        return ""

    def unit(self, optimizer: Any, /) -> Unit:
        """Return which part of the parameters steps alone."""
        del optimizer
        return Unit.OPTIMIZER

    def engine(self, optimizer: Any, /) -> Mapping[str, Any]:
        """Return facts, as plain JSON, that change the bits of a step, such as a package's version.

        Class, torch version, devices and CPU instructions are known already.
        """
        del optimizer
        return {}

    def capture_before(self, optimizer: Any, /) -> Mapping[str, Any]:
        """Return what else a step depends on that it changes: a count, a state of random numbers.

        Called before each step, and before the optimizer's own hooks; else as `capture`.
        """
        del optimizer
        return {}

    def capture(self, optimizer: Any, /) -> Mapping[str, Any]:
        """Return what else the step that was just taken depends on: plain values, small tensors.

        Tensors must be copies: the log reads them later, on another thread.
        """
        del optimizer
        return {}

    def step(self, optimizer: Any, captured: Mapping[str, Any], /) -> None:
        """Repeat a step. Gradients, state and the options of the groups are set already.

        Args:
            optimizer: The optimizer, whose hooks are off. It may be a copy with fewer parameters.
            captured: What `capture_before` and `capture` returned; after a restore, tensors are on
                the CPU.
        """
        del captured
        optimizer.step()

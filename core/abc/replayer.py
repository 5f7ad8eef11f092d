"""The contract of replayers, which repeat the logged steps of optimizers.

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
    """The smallest part of the parameters that can be stepped alone, with the same bits."""

    OPTIMIZER = "optimizer"
    """A step computes something over all parameters, such as a norm."""

    PARAMETER = "parameter"
    """A step of one parameter depends on no other, but must have the whole parameter."""

    ELEMENT = "element"
    """A step of one element depends on no other, so a parameter may be cut anywhere."""


class Replayer(ABC):
    """Repeats the steps of one kind of optimizer.

    For each step, the log holds the gradients that the step used, and the groups' options after the
    step. The default methods suit an optimizer whose step depends only on these, its parameters and
    its state. A replayer has no state itself: `step` and `engine` are also called on the log
    thread.

    Attributes:
        name: The name of the entry point.
        version: Must rise when the same inputs give different bits than before. Logs of another
            version are not replayed.
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
        """Return the smallest part of the parameters whose step does not depend on the rest."""
        del optimizer
        return Unit.OPTIMIZER

    def engine(self, optimizer: Any, /) -> Mapping[str, Any]:
        """Return facts that affect the bits of a step, such as a package's version, as plain JSON.

        Core adds the optimizer's class, the torch version, the devices and the CPU instructions.
        """
        del optimizer
        return {}

    def capture_before(self, optimizer: Any, /) -> Mapping[str, Any]:
        """Return further inputs of a step that the step itself changes, such as a random state.

        Called before each step, and before the optimizer's own hooks. The rules of `capture` apply.
        """
        del optimizer
        return {}

    def capture(self, optimizer: Any, /) -> Mapping[str, Any]:
        """Return further inputs of the step that was just taken, as plain values and small tensors.

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

"""The names of an optimizer's parameters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.providers.tensor.flat import flat_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from penstock.providers.tensor.flat import Flat


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter of an optimizer.

    Attributes:
        parameter: The tensor.
        group: The index of its group.
        position: Its index in that group.
        name: The name that its state is stored under; `<group>.<position>` if it has no name.
        named: Whether `name` is a real name.
        candidates: All its names, the best first.
    """

    parameter: torch.Tensor
    group: int
    position: int
    name: str
    named: bool
    candidates: tuple[str, ...]

    @property
    def flat(self) -> Flat | None:
        """Which elements of the whole parameter this rank has, if it is cut by flat ranges."""
        return flat_of(self.parameter)

    @property
    def shape(self) -> list[int] | None:
        """Shape of the whole parameter; None if it is not known."""
        return list(self.parameter.shape if self.flat is None else self.flat.shape)


def members(
    groups: Sequence[Mapping[str, Any]], names_of: Callable[[object], Sequence[str]]
) -> list[Member]:
    """Return the parameters of the param groups of an optimizer, in order, each once.

    A parameter takes the first of its names that no other parameter of this optimizer has: the
    bare one, or, where two modules clash, the one with the tree key in front.
    """
    found: list[tuple[torch.Tensor, int, int, tuple[str, ...]]] = []
    seen: set[int] = set()
    for index, group in enumerate(groups):
        own: Any = group.get("param_names") or ()
        for position, parameter in enumerate(group["params"]):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            names = [*names_of(parameter), *own[position : position + 1]]
            found.append((parameter, index, position, tuple(dict.fromkeys(names))))
    uses = Counter(name for _, _, _, names in found for name in names)
    return [_member(*each, uses) for each in found]


def shape_of_state(shapes: Sequence[tuple[int, ...]]) -> list[int] | None:
    """Return the shape of the parameter whose state has tensors of `shapes`; None: it is not known.

    Most optimizers keep state of the parameter's shape. Adafactor keeps rows and columns.
    """
    most = max(map(len, shapes), default=0)
    try:
        shape = np.broadcast_shapes(*(one for one in shapes if len(one) == most))
    except ValueError:
        return None
    return list(shape) if most else None


def _member(
    parameter: torch.Tensor, group: int, position: int, names: tuple[str, ...], uses: Counter[str]
) -> Member:
    unique = next((name for name in names if uses[name] == 1), None)
    name = f"{group}.{position}" if unique is None else unique
    return Member(parameter, group, position, name, unique is not None, names)

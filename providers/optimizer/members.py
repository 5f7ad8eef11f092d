"""The parameters of an optimizer on this rank, their names, and their stored counterparts.

Parameters match by name, or by order if neither side has names.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from penstock.core.errors import FormatError, UnsupportedStateError
from penstock.core.types import show_path
from penstock.providers.tensor.flat_ranges import flat_of, refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from penstock.core.abc import Node, PlaceContext, Placement
    from penstock.core.types import ObjectPath
    from penstock.providers.tensor.flat_ranges import Flat

FORM = "optimizer"
PARAMETER_FORM = "optimizer.parameter"

MEMBERSHIP = frozenset({"params", "param_names"})
"""Keys of a group that list its parameters; they are not options."""

MAX_PARAMETERS = 1 << 20
"""The most parameters of one optimizer.

Without a limit, a damaged count of a few bytes would become a huge list of numbers.
"""


@dataclass(frozen=True, slots=True)
class Held:
    """An optimizer with the param groups of all ranks and the state of this rank.

    Attributes:
        value: The optimizer in the state tree, or its state dict.
        local: The optimizer that holds this rank's state: `value` itself, or the inner optimizer
            of `value`. For a state dict, an object with `state` and `defaults`.
        groups: The param groups, with the parameters of all ranks.
        owned: The ids of the parameters with state on this rank; None if each rank has the state of
            all its parameters.
    """

    value: Any
    local: Any
    groups: list[dict[str, Any]]
    owned: frozenset[int] | None = None

    @property
    def kind(self) -> str:
        """The name of the class of the optimizer that has the state."""
        kind = type(self.local)
        return f"{kind.__module__}.{kind.__qualname__}"

    def owns(self, parameter: torch.Tensor) -> bool:
        """Return whether the state of `parameter` is on this rank."""
        return self.owned is None or id(parameter) in self.owned

    def publish_groups(self) -> None:
        """Copy the options in `groups` to this rank's local optimizer."""
        if self.local is self.value:
            return
        for group, local in zip(self.groups, self.local.param_groups, strict=True):
            local.update({key: option for key, option in group.items() if key != "params"})

    def hooks(self) -> list[Callable[..., Any]]:
        """Return the load hooks of `value` if it wraps `local`; each hook takes `value`."""
        if self.local is self.value:
            return []
        return list(self.value._optimizer_load_state_dict_post_hooks.values())  # noqa: SLF001 - no other way


def is_zero(kind: type) -> bool:
    """Return whether `kind` is a ZeroRedundancyOptimizer that keeps torch's own `state_dict`."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    zero: Any = getattr(module, "ZeroRedundancyOptimizer", None)
    return zero is not None and issubclass(kind, zero) and kind.state_dict is zero.state_dict  # type: ignore[attr-defined]  # it is


def held_of(value: torch.optim.Optimizer, path: ObjectPath) -> Held:
    """Return this rank's part of an optimizer.

    With a `ZeroRedundancyOptimizer`, each rank's inner optimizer holds the state of its partition.
    This function does not call `consolidate_state_dict`, which gathers all state on one rank.

    Raises:
        UnsupportedStateError: A `ZeroRedundancyOptimizer` has `overlap_with_ddp=True`, or the
            elements of an FSDP1 parameter are not known.
    """
    refuse_unknown((p for group in value.param_groups for p in group["params"]), path)
    if not is_zero(type(value)):
        return Held(value, value, value.param_groups, _with_elements(value))
    zero: Any = value
    if zero._overlap_with_ddp:  # noqa: SLF001 - torch has no other name for it
        msg = (
            f"{show_path(path)} is a ZeroRedundancyOptimizer with overlap_with_ddp=True, which "
            "keeps its state in functional optimizers: turn that off, or use fully_shard"
        )
        raise UnsupportedStateError(msg)
    owned = frozenset(id(p) for group in zero.optim.param_groups for p in group["params"])
    return Held(value, zero.optim, value.param_groups, owned)


def _with_elements(optimizer: torch.optim.Optimizer) -> frozenset[int] | None:
    """Return the ids of the parameters with elements on this rank; None if no parameter is cut."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    flats = [flat_of(p) for p in parameters]
    if not any(flats):
        return None
    pairs = zip(parameters, flats, strict=True)
    return frozenset(id(p) for p, flat in pairs if flat is None or flat.start < flat.stop)


_Names: TypeAlias = "list[tuple[str, bool, tuple[str, ...]]]"


@dataclass(slots=True)  # frozen would take three times as long, for each parameter
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
        """This rank's elements of the parameter; None if it is not cut by flat ranges."""
        return flat_of(self.parameter)

    @property
    def shape(self) -> list[int] | None:
        """Shape of the whole parameter; None if unknown."""
        return list(self.parameter.shape if self.flat is None else self.flat.shape)


def members(
    groups: Sequence[Mapping[str, Any]],
    names_of: Callable[[object], Sequence[str]],
    recall: Callable[[object, Callable[[], _Names]], _Names] = lambda _, make: make(),
) -> list[Member]:
    """Return the parameters of an optimizer's param groups, in order, each once.

    A parameter takes the first of its names that no other parameter of this optimizer has. That is
    its bare name, or the name with the tree key in front if two modules clash.

    Args:
        groups: The param groups.
        names_of: Returns the names that modules of the tree give to a tensor.
        recall: Takes what the names depend on, and a function that makes them. Returns the names
            of the last save if those inputs are the same, otherwise calls the function.
    """
    parameters: dict[int, torch.Tensor] = {}
    places: list[tuple[int, int, tuple[str, ...]]] = []
    for index, group in enumerate(groups):
        own: Any = group.get("param_names") or ()
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in parameters:
                parameters[id(parameter)] = parameter
                names = (*names_of(parameter), *own[position : position + 1])
                places.append((index, position, names))
    named = recall(places, lambda: _named(places))
    pairs = zip(parameters.values(), places, named, strict=True)
    return [Member(each, index, position, *names) for each, (index, position, _), names in pairs]


def _named(places: Sequence[tuple[int, int, tuple[str, ...]]]) -> _Names:
    """Return `(name, named, candidates)` of each member, from its position and all its names."""
    candidates = [tuple(dict.fromkeys(names)) for _, _, names in places]
    uses = Counter(name for names in candidates for name in names)
    entries: _Names = []
    for (group, position, _), names in zip(places, candidates, strict=True):
        unique = next((name for name in names if uses[name] == 1), None)
        name = f"{group}.{position}" if unique is None else unique
        entries.append((name, unique is not None, names))
    return entries


def shape_of_state(shapes: Sequence[tuple[int, ...]]) -> list[int] | None:
    """Infer a parameter's shape from the `shapes` of its state tensors; None if unknown.

    Most optimizers keep state of the parameter's shape. Adafactor keeps rows and columns.
    """
    most = max(map(len, shapes), default=0)
    try:
        shape = np.broadcast_shapes(*(each for each in shapes if len(each) == most))
    except ValueError:
        return None
    return list(shape) if most else None


class Matcher:
    """Matches the members of one optimizer to stored parameters, and reports problems."""

    def __init__(
        self,
        held: Held,
        path: ObjectPath,
        context: PlaceContext,
        result: Placement,
    ) -> None:
        self._held = held
        self._path = path
        self._state = (*path, "state")
        self._context = context
        self._result = result
        self.hopeless = False
        """Whether only one side has names, so that no member can be matched or compared."""

    def match(self, members: list[Member]) -> dict[str, Node]:
        """Return the stored node of each matched member, by the member's name."""
        matches: dict[str, Node] = {}
        used: set[ObjectPath] = set()
        unmatched: list[Member] = []
        for member in members:
            node = self._node(member.name)
            # A place such as `0.1` must not match a parameter that is really named `0.1`.
            if node is not None and node.meta.get("named") is member.named:
                matches[member.name] = node
                used.add(node.path)
            else:
                unmatched.append(member)
        # Second, by names that only one parameter has: a module may have been stored alone and
        # restored beside another module with the same names, or vice versa.
        uses = Counter(name for member in unmatched for name in member.candidates)
        for member in unmatched:
            if not member.named:
                continue
            nodes = [self._node(name) for name in member.candidates if uses[name] == 1]
            # Third, by names that the checkpoint ties to the parameter: a pipeline stage has its
            # own copy of a tied parameter.
            nodes += map(self._node, self._context.tied_names(member.parameter))
            for node in nodes:
                if node is not None and node.path not in used and node.meta.get("named"):
                    matches[member.name] = node
                    used.add(node.path)
                    break
        self._check_names(members, matches)
        return matches

    def _node(self, name: str) -> Node | None:
        node = self._context.node((*self._state, name))
        return node if node is not None and node.form == PARAMETER_FORM else None

    def _problem(self, path: ObjectPath, text: str) -> None:
        self._result.problems.append(f"{show_path(path)} {text}")

    def _check_names(self, members: list[Member], matches: dict[str, Node]) -> None:
        chosen = [self._node(name) for name in self._context.children(self._state)]
        stored = [node for node in chosen if node is not None]
        nameless = [member for member in members if not member.named]
        if not stored:
            return
        if any(member.named and member.name in matches for member in members):
            self._result.notes["matched_by"] = "name"
        if any(member.name in matches for member in nameless):
            self._by_order()
        named_there = [bool(node.meta.get("named")) for node in stored]
        if nameless and all(named_there):
            self.hopeless = len(nameless) == len(members)
            self._problem(
                self._path,
                "is stored with parameter names, but the template has none: put the module into "
                "the tree, or build the optimizer from named_parameters()",
            )
        elif len(nameless) < len(members) and not any(named_there):
            self.hopeless = not nameless
            self._problem(
                self._path,
                "is stored without parameter names, but the template has names: restore it "
                "without its module in the tree, to match by order",
            )

    def _by_order(self) -> None:
        here = [len(group["params"]) for group in self._held.groups]
        node = self._context.node(self._path)
        there = None if node is None else node.meta.get("groups")
        numbered = node is not None and bool(node.meta.get("numbered"))
        if here != there:
            remedy = "" if numbered else ": put the modules into the tree"
            self._problem(
                self._path,
                f"has no parameter names, and the groups have {there} parameters in the "
                f"checkpoint but {here} in the template{remedy}",
            )
        self._result.notes["matched_by"] = "order"
        shown = show_path(self._path)
        warnings.warn(
            f"{shown} is stored as a state dict with numbers instead of names, so parameters are "
            "matched by order"
            if numbered
            else f"{shown}: the parameters of this optimizer have no names, so they are matched "
            "by order; put the module that has them into the state tree, or the tensors "
            "themselves if they are in no module",
            stacklevel=2,
        )


def index_of(text: str, path: ObjectPath) -> int:
    """Parse a path segment that is an index.

    Raises:
        FormatError: The segment is not a number.
    """
    if not text.isascii() or not text.isdigit():
        raise malformed(path)
    return int(text)


def malformed(path: ObjectPath) -> FormatError:
    """Return the error for nodes and objects that do not form an optimizer."""
    shown = show_path(path)
    return FormatError(f"{shown} is not a valid stored optimizer", [shown])

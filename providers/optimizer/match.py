"""The matching of stored parameters with live ones: by name, or by order if no side has names."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import TYPE_CHECKING

from penstock.core.errors import FormatError
from penstock.core.types import show_path

if TYPE_CHECKING:
    from penstock.core.abc import Node, PlaceContext, Placement
    from penstock.core.types import ObjectPath
    from penstock.providers.optimizer.held import Held
    from penstock.providers.optimizer.names import Member

FORM = "optimizer"
PARAMETER_FORM = "optimizer.parameter"

MEMBERSHIP = frozenset({"params", "param_names"})
"""Keys of a group that say which parameters it has; they are no options."""

MAX_PARAMETERS = 1 << 20
"""Most parameters of one optimizer: a stored count of a few bytes becomes a list of numbers."""


class Matcher:
    """Matches the members of one optimizer, and adds problems to the placement."""

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
        """Return the nodes of stored parameters by the names of the live ones."""
        matches: dict[str, Node] = {}
        taken: set[ObjectPath] = set()
        waiting: list[Member] = []
        for member in members:
            node = self._node(member.name)
            # A place such as `0.1` must not match a parameter that is really named `0.1`.
            if node is not None and node.meta.get("named") is member.named:
                matches[member.name] = node
                taken.add(node.path)
            else:
                waiting.append(member)
        # In a second turn, by names that only one parameter goes by: a module may have been stored
        # alone and restored beside another one with the same names, or the other way round.
        uses = Counter(name for member in waiting for name in member.candidates)
        for member in waiting:
            if not member.named:
                continue
            nodes = [self._node(name) for name in member.candidates if uses[name] == 1]
            # At last by what the checkpoint has tied to it: a stage of a pipeline has its own copy.
            nodes += map(self._node, self._context.tied_names(member.parameter))
            for node in nodes:
                if node is not None and node.path not in taken and node.meta.get("named"):
                    matches[member.name] = node
                    taken.add(node.path)
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
            f"{shown} is stored as a state dict by numbers, so parameters are matched by order"
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
    """Return the error for nodes and objects that do not make an optimizer."""
    shown = show_path(path)
    return FormatError(f"{shown} is not stored as an optimizer is", [shown])

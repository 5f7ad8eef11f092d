"""Putting stored optimizer state back: matched by name, whole per parameter, dtype as stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.core.abc import Placement
from penstock.core.types import show_path
from penstock.providers.memory import device_name
from penstock.providers.optimizer_match import FORM, Matcher, index_of, leaves
from penstock.providers.optimizer_names import members
from penstock.providers.tensor import same_kind, tensor_target

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import Node, PlaceContext
    from penstock.core.types import ObjectPath
    from penstock.providers.optimizer_names import Member


# In `param_groups`, but no options of an optimizer: names, and what schedulers put there.
_SCHEDULED = {
    "params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum",
    "swa_lr",
}  # fmt: skip


class Placer:
    """Plans one optimizer's restore."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, path: ObjectPath, context: PlaceContext
    ) -> None:
        self._optimizer = optimizer
        self._path = path
        self._context = context
        self._state = (*path, "state")
        self._groups = (*path, "param_groups")
        self._members = members(optimizer, context.parameter_names)
        self._result = Placement(finish=self._finish)
        self._finishes: list[Callable[[], object]] = []

    def place(self) -> Placement:
        """The plan; `finish` sets state and groups directly, never by `load_state_dict`."""
        if not self._is_there() or self._is_of_another_kind():
            return self._result
        matcher = Matcher(self._optimizer, self._path, self._context, self._result)
        matches = matcher.match(self._members)
        if matcher.hopeless:
            return self._result
        for member in self._members:
            node = matches.get(member.name)
            if node is None:
                self._place_unknown(member)
            else:
                self._place_known(member, node)
        self._place_groups(matches)
        shared: dict[Any, Any] = self._optimizer.state
        for key in self._context.children((*self._path, "shared")):
            self._assign(self._context.rebuild((*self._path, "shared", key)), shared, key)
        return self._result

    def _finish(self) -> object:
        for call in self._finishes:
            call()
        return self._optimizer

    def _assign(self, placed: Placement, owner: dict[Any, Any], key: str) -> None:
        """Have `finish` put what `placed` gives into `owner`."""
        self._result.absorb(placed)
        make = placed.finish
        if make is not None:
            self._finishes.append(lambda: owner.__setitem__(key, make()))

    def _problem(self, path: ObjectPath, text: str) -> None:
        self._result.problems.append(f"{show_path(path)} {text}")

    def _is_there(self) -> bool:
        """Whether the checkpoint has an optimizer here at all."""
        context = self._context
        node = context.node(self._path)
        below = context.children(self._path)
        if context.stored(self._path) is not None or (node is not None and node.form != FORM):
            if below or context.selected(self._path):
                form = "one value" if node is None else f"a {node.form}"
                self._problem(
                    self._path, f"is stored as {form}, but is an optimizer in the template"
                )
            return False
        if node is None and not below:
            if self._wanted():
                self._result.missing.append(self._path)
            return False
        return True

    def _is_of_another_kind(self) -> bool:
        """Whether the state is another algorithm's, which would be kept and never be used.

        A class of another name may do the same, with more options or fewer: only where each has
        options that the other lacks they are taken for two algorithms.
        """
        node, kind = self._context.node(self._path), type(self._optimizer)
        mine = f"{kind.__module__}.{kind.__qualname__}"
        theirs = mine if node is None else node.meta.get("class", mine)
        keys = {*self._context.children((*self._groups, "0"))} - _SCHEDULED
        options = {*self._optimizer.defaults}
        if theirs == mine or not keys or not (keys - options and options - keys):
            return False
        self._problem(
            self._path,
            f"holds the state of a {theirs} with {', '.join(sorted(keys - options))}, but is a "
            f"{mine} with {', '.join(sorted(options - keys))} in the template",
        )
        return True

    def _wanted(self) -> bool:
        paths = [self._path]
        paths += [(*self._state, m.name, key) for m in self._members for key in self._keys(m)]
        for index, group in enumerate(self._optimizer.param_groups):
            paths += [(*self._groups, str(index), str(key)) for key in group]
        return any(map(self._context.selected, paths))

    def _keys(self, member: Member) -> list[str]:
        return [str(key) for key in self._optimizer.state.get(member.parameter, {})]

    # State --------------------------------------------------------------------------------------

    def _place_unknown(self, member: Member) -> None:
        """The checkpoint does not know this parameter: what is selected of it is missing."""
        here = (*self._state, member.name)
        chosen = [self._context.selected((*here, key)) for key in self._keys(member)]
        if any(chosen) or (not chosen and self._context.selected(here)):
            self._result.missing.append(here)
            if all(chosen):
                self._finishes.append(lambda: self._optimizer.state.pop(member.parameter, None))

    def _place_known(self, member: Member, node: Node) -> None:
        found, whole = leaves(self._context, node.path), node.meta.get("objects")
        if found != whole:
            if found:
                self._problem(
                    node.path,
                    f"comes whole or not at all, but only {found} of its {whole} objects are "
                    "selected",
                )
            return
        # Without stored objects, what the target has is selected or not by its own paths.
        wanted = [self._context.selected((*node.path, key)) for key in self._keys(member)]
        if found or self._context.selected(node.path) or (wanted and all(wanted)):
            self._place_state(member, node)

    def _place_state(self, member: Member, node: Node) -> None:
        live: dict[Any, Any] = self._optimizer.state.get(member.parameter, {})
        makers: dict[str, Callable[[], object]] = {}
        for key in self._context.children(node.path):
            device = self._device(member, node, key, live.get(key))
            placed = self._place_item(live.get(key), (*node.path, key), device)
            self._result.absorb(placed)
            if placed.finish is not None:
                makers[key] = placed.finish

        def assign() -> None:
            new = {key: make() for key, make in makers.items()}
            if not new:
                self._optimizer.state.pop(member.parameter, None)
                return
            # The same dict: compiled steps may hold on to it.
            state = self._optimizer.state.setdefault(member.parameter, {})
            state.clear()
            state.update(new)

        self._finishes.append(assign)

    def _place_item(self, live: Any, path: ObjectPath, device: torch.device) -> Placement:
        stored = self._context.stored(path)
        if same_kind(live, stored, device):
            return Placement([tensor_target(live, path)], finish=lambda: live)
        return self._context.rebuild(path, device=device_name(device))

    def _device(self, member: Member, node: Node, key: str, live: object) -> torch.device:
        """Where torch itself would have made this piece of state."""
        if isinstance(live, torch.Tensor):
            return live.device
        group = self._optimizer.param_groups[member.group]
        on_device = group.get("capturable") or group.get("fused")
        counts_on_host = key == "step" and not isinstance(self._optimizer, torch.optim.ASGD)
        if not on_device and (counts_on_host or key in node.meta.get("host", ())):
            return torch.device("cpu")
        return member.parameter.device

    # Groups -------------------------------------------------------------------------------------

    def _place_groups(self, matches: dict[str, Node]) -> None:
        chosen = self._context.children(self._groups)
        if not chosen:
            return
        groups = self._optimizer.param_groups
        node = self._context.node(self._path)
        count = len(groups) if node is None else len(node.meta.get("groups", ()))
        if count != len(groups):
            self._problem(
                self._groups, f"has {count} groups in the checkpoint, {len(groups)} in the template"
            )
            return
        for member in self._members:
            match = matches.get(member.name)
            if match is not None and match.meta.get("group") != member.group:
                self._problem(
                    match.path,
                    f"is in group {match.meta.get('group')} in the checkpoint, but in group "
                    f"{member.group} in the template",
                )
        for index in chosen:
            at = index_of(index, (*self._groups, index))
            if at < len(groups):
                self._place_group(groups[at], (*self._groups, index))

    def _place_group(self, group: dict[str, Any], path: ObjectPath) -> None:
        for key in self._context.children(path):
            here = (*path, key)
            if key == "params":
                self._result.values.append(here)
                continue
            live = group.get(key)
            device = torch.device("cpu")
            if isinstance(live, torch.Tensor):
                device = live.device
            elif group["params"] and group.get("capturable"):
                device = group["params"][0].device
            self._assign(self._place_item(live, here, device), group, key)

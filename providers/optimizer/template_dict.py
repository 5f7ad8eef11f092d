"""A state dict in the template, into which a stored optimizer is restored.

torch.distributed.checkpoint keys such dicts by parameter name, nested or flattened.
`Optimizer.state_dict` keys them by number.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import chain
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from penstock.core.types import show_path
from penstock.providers.optimizer.members import PARAMETER_FORM, Held, Member, shape_of_state
from penstock.providers.optimizer.placer import Placer
from penstock.providers.optimizer.stored_dict import (
    GROUPS,
    STATE,
    flattened,
    is_flattened,
    split_keys,
)
from penstock.providers.tensor import is_sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.core.abc import Node, PlaceContext, Placement


class _Group(dict[str, Any]):
    """A group that remembers which options were restored."""

    def __init__(self, options: dict[str, Any], params: list[torch.Tensor]) -> None:
        super().__init__(options, params=params)
        self.restored: set[str] = set()

    def __setitem__(self, key: str, value: Any, /) -> None:
        super().__setitem__(key, value)
        self.restored.add(key)


@dataclass(frozen=True, slots=True)
class _HeldDict(Held):
    """A state dict presented as an optimizer, with a stand-in tensor for each parameter."""

    write: Callable[[], None] = lambda: None

    @property
    def kind(self) -> str:
        return "state dict"

    def publish_groups(self) -> None:
        self.write()


@dataclass(slots=True)
class _DictMember(Member):
    """A parameter of a state dict; its shape is known only if its state shows it."""

    state_shape: list[int] | None = None

    @property
    def shape(self) -> list[int] | None:
        return self.state_shape


class TemplateDict:
    """An optimizer's state dict in the template.

    Args:
        value: The dict.
        names: The name or number of each parameter, by group.
        groups: The options of each group.
        state: The state of each parameter: the dict's own objects, unless it is flattened.
        is_flat: Whether the dict is flattened.
    """

    def __init__(
        self,
        value: dict[Any, Any],
        names: list[list[Any]],
        groups: list[dict[str, Any]],
        state: dict[Any, dict[Any, Any]],
        *,
        is_flat: bool = False,
    ) -> None:
        self._value = value
        self._names = names
        self._is_flat = is_flat
        self._state = state
        self._places = {
            name: (group, position)
            for group, members in enumerate(names)
            for position, name in enumerate(members)
        }
        self._comparable: set[str] = set()
        used: set[int] = set()
        self._stand_ins = {name: _stand_in(state.get(name, {}), used) for name in self._places}
        self._groups = [
            _Group(options, [self._stand_ins[name] for name in members])
            for options, members in zip(groups, names, strict=True)
        ]

    def place(self, node: Node, context: PlaceContext) -> Placement:
        """Plan the restore of the optimizer that is stored at `node`."""
        stored = [n for n in context.nodes((*node.path, STATE)) if n.form == PARAMETER_FORM]
        elements = sum(prod(n.meta.get("shape") or ()) for n in stored)
        numbered = any(type(name) is int for name in self._stand_ins)
        by_order = numbered and not all("param_names" in group for group in self._groups)
        texts = self._named_by_order(stored) if by_order else self._named()
        is_named = not by_order or all(n.meta.get("named") for n in stored)
        members = [
            self._member(name, text, elements, named=is_named) for name, text in texts.items()
        ]
        placement = Placer(self._held(), members, node.path, context).place()
        if by_order:
            placement.problems += self._unproved(node, stored)
            placement.notes["matched_by"] = "order"
            warnings.warn(
                f"{show_path(node.path)} is a state dict with numbers instead of names in the "
                "template, so parameters are matched by order",
                stacklevel=2,
            )
        return placement

    def _named(self) -> dict[Any, str]:
        """Return the names of the parameters, from the dict or its groups."""
        texts = dict.fromkeys(self._places, "")
        for group, names in zip(self._groups, self._names, strict=True):
            own = group.get("param_names", names)
            texts |= {name: str(text) for name, text in zip(names, own, strict=False)}
        return texts

    def _named_by_order(self, stored: Sequence[Node]) -> dict[Any, str]:
        """Return the stored name at each parameter's position, or `<group>.<position>`."""
        there = {(n.meta.get("group"), n.meta.get("position")): n.path[-1] for n in stored}
        return {
            name: there.get(place, f"{place[0]}.{place[1]}") for name, place in self._places.items()
        }

    def _unproved(self, node: Node, stored: Sequence[Node]) -> Iterable[str]:
        """Yield problem texts for the reasons why the parameter order may differ."""
        there, here = node.meta.get("groups"), [len(names) for names in self._names]
        places = {(n.meta.get("group"), n.meta.get("position")) for n in stored}
        if there != here or len(places) < len(stored):
            yield (
                f"{show_path(node.path)} has no parameter names in the template, and the groups "
                f"have {there} parameters in the checkpoint but {here} in the template: restore "
                "into the optimizer itself, beside its module"
            )
        for match in stored:
            if match.meta.get("objects") and match.path[-1] not in self._comparable:
                yield (
                    f"{show_path(match.path)} has no state in the template whose shape could be "
                    "compared: restore into the optimizer itself"
                )

    def _member(self, name: Any, text: str, elements: int, *, named: bool) -> Member:
        group, position = self._places[name]
        items = self._state.get(name, {}).values()
        shapes = [tuple(item.shape) for item in items if isinstance(item, torch.Tensor)]
        shape = shape_of_state(shapes)
        if shape is not None or (shapes and not any(shapes)):
            self._comparable.add(text)
        if shape == [elements]:  # LBFGS keeps vectors of all parameters with the first one
            shape = None
        return _DictMember(
            self._stand_ins[name], group, position, text, named, (text,), state_shape=shape
        )

    def _held(self) -> Held:
        state: dict[Any, Any] = {
            stand_in: self._state[name]
            for name, stand_in in self._stand_ins.items()
            if name in self._state
        }
        if self._is_flat:  # copied: old and new keys are compared at the end
            state = {stand_in: dict(items) for stand_in, items in state.items()}
        options = [key for group in self._groups[:1] for key in group if key != "params"]
        local: Any = SimpleNamespace(state=state, defaults=dict.fromkeys(options))
        return _HeldDict(self._value, local, [*self._groups], write=lambda: self._write(state))

    def _write(self, state: dict[Any, Any]) -> None:
        loose = {key: s for key, s in state.items() if not isinstance(key, torch.Tensor)}
        if self._is_flat:
            self._value |= flattened(STATE, loose)
        else:
            self._value[STATE] |= loose
        for name, stand_in in self._stand_ins.items():
            self._write_state(name, state.get(stand_in, {}))
        for index, (group, names) in enumerate(zip(self._groups, self._names, strict=True)):
            restored = {key: group[key] for key in group.restored}
            if self._is_flat:
                self._value |= {
                    f"{GROUPS}.{name}.{key}": item
                    for name in names
                    for key, item in restored.items()
                }
            elif restored:
                self._value[GROUPS][index].update(restored)

    def _write_state(self, name: Any, items: dict[Any, Any]) -> None:
        if self._is_flat:
            new = flattened(f"{STATE}.{name}", items)
            for key in self._state.get(name, {}):
                if f"{STATE}.{name}.{key}" not in new:
                    del self._value[f"{STATE}.{name}.{key}"]
            self._value |= new
        elif items or (isinstance(name, str) and name in self._state):
            # With names the entry stays: torch.distributed.checkpoint needs it.
            self._value[STATE][name] = items
        else:
            self._value[STATE].pop(name, None)


def template_dict(value: dict[Any, Any], node: Node, context: PlaceContext) -> TemplateDict | None:
    """Return `value` as the state dict of an optimizer; None if it is not one.

    Args:
        value: A dict of the template.
        node: The optimizer that is stored at its path.
        context: The context of the restore.
    """
    if STATE in value and value.keys() <= {STATE, GROUPS}:
        return _nested(value)
    return _flattened(value, node, context) if is_flattened(value) else None


def _nested(value: dict[Any, Any]) -> TemplateDict | None:
    state, groups = value[STATE], value.get(GROUPS)
    if not isinstance(state, dict) or not all(isinstance(items, dict) for items in state.values()):
        return None
    if groups is None:
        return TemplateDict(value, [list(state)], [{}], state)
    if not isinstance(groups, list | tuple):
        return None
    if not all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups):
        return None
    names = [group["params"] for group in groups]
    every = [*chain.from_iterable(names)]
    kinds = {*map(type, every)}
    if len(kinds) > 1 or not kinds <= {str, int} or len({*every}) < len(every):
        return None
    options = [{key: item for key, item in g.items() if key != "params"} for g in groups]
    return TemplateDict(value, names, options, state)


def _flattened(value: dict[str, Any], node: Node, context: PlaceContext) -> TemplateDict | None:
    state, options = split_keys(value)
    stored = {n.path[-1]: n.meta.get("group") for n in context.nodes((*node.path, STATE))}
    count = len(node.meta.get("groups") or ())
    names: list[list[str]] = [[] for _ in range(count)]
    for name in dict.fromkeys([*options, *state]):
        group = stored.get(name, 0)
        if not isinstance(group, int) or not 0 <= group < count:
            return None
        names[group].append(name)
    groups = [
        {key: value[text] for name in members for key, text in options.get(name, {}).items()}
        for members in names
    ]
    kept = {name: {k: value[text] for k, text in items.items()} for name, items in state.items()}
    return TemplateDict(value, names, groups, kept, is_flat=True)


def _stand_in(items: dict[Any, Any], used: set[int]) -> torch.Tensor:
    """Return a stand-in for a parameter: its largest state tensor, with DTensors preferred."""
    tensors = [t for t in items.values() if isinstance(t, torch.Tensor) and id(t) not in used]
    best = max(tensors, key=lambda t: (is_sharded(t), t.numel()), default=None)
    if best is None:
        best = torch.empty(0, device="cpu")
    used.add(id(best))
    return best

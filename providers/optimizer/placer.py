"""The restore of optimizer state: by name, and all or nothing per parameter.

State is set directly, because torch's `load_state_dict` would cast it to the dtype of its
parameter. It has the stored dtype, or with `restore(cast=True)` that of the live state. The
optimizer's load hooks run afterwards, as `load_state_dict` would run them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from penstock.core.abc import Difference, Placement, Target
from penstock.core.errors import RestoreError
from penstock.core.types import Kind, TensorSpec, show_path, with_article
from penstock.providers.children import leaves
from penstock.providers.optimizer.members import FORM, MEMBERSHIP, Matcher, index_of
from penstock.providers.tensor import (
    empty_tensor,
    is_sharded,
    local_of,
    new_like,
    same_kind,
    tensor_target,
)
from penstock.providers.tensor.flat_ranges import flat_of
from penstock.providers.tensor.parts import fits
from penstock.providers.tensor.sources import device_name, dtype_name, make_sink
from penstock.providers.wrappers import is_override

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc import Node, PlaceContext, StoredObject
    from penstock.core.types import ObjectPath
    from penstock.providers.optimizer.members import Held, Member
    from penstock.providers.tensor.flat_ranges import Flat


# Keys of `param_groups` that are not optimizer options: names, and keys that schedulers add.
_SCHEDULED = {
    "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", *MEMBERSHIP,
}  # fmt: skip


# State that a step of torch's own optimizers requires when an option is set.
_NEEDED = (
    ((torch.optim.Adam, torch.optim.AdamW), "amsgrad", "max_exp_avg_sq"),
    ((torch.optim.RMSprop,), "centered", "grad_avg"),
    ((torch.optim.RMSprop,), "momentum", "momentum_buffer"),
)


class Placer:
    """Plans the restore of one optimizer."""

    def __init__(
        self,
        held: Held,
        named: list[Member],
        path: ObjectPath,
        context: PlaceContext,
        twins: Callable[[ObjectPath], Sequence[ObjectPath]] = lambda _: (),
    ) -> None:
        self._twins = twins
        self._held = held
        self._optimizer = held.local
        self._path = path
        self._context = context
        self._state = (*path, "state")
        self._groups = (*path, "param_groups")
        self._members = named
        self._result = Placement(finish=self._finish)
        self._finishes: list[Callable[[], object]] = []

    def place(self) -> Placement:
        """Return the plan; its `finish` sets state and groups, then runs the load hooks."""
        if not self._is_there() or self._is_of_another_kind():
            return self._result
        matcher = Matcher(self._held, self._path, self._context, self._result)
        matches = matcher.match(self._members)
        if matcher.hopeless:
            return self._result
        for member in self._members:
            node = matches.get(member.name)
            if not self._held.owns(member.parameter):
                if node is not None:
                    self._pass_over(node.path)
            elif node is None:
                self._place_unknown(member)
            elif not _agree(node.meta.get("shape"), member.shape):
                self._leave_misfit(member, node)
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
        if self._finishes:
            self._held.publish_groups()
            self._run_load_hooks()
        return self._held.value

    def _run_load_hooks(self) -> None:
        if not isinstance(self._optimizer, torch.optim.Optimizer):  # a state dict
            return
        try:
            _run_own_hooks(self._optimizer)
            for hook in self._held.hooks():
                hook(self._held.value)
        except Exception as error:
            msg = (
                f"{show_path(self._path)}: the stored state was set, but the optimizer's "
                "`load_state_dict` or one of its load hooks then failed: "
                f"{type(error).__name__}: {error}. The optimizer's state is now undefined."
            )
            raise RestoreError(msg) from error

    def _assign(self, placed: Placement, owner: dict[Any, Any], key: str) -> None:
        """Plan to set `owner[key]` to the result of `placed` when the restore finishes."""
        self._result.absorb(placed)
        make = placed.finish
        if make is not None:
            self._finishes.append(lambda: owner.__setitem__(key, make()))

    def _problem(self, path: ObjectPath, text: str) -> None:
        self._result.problems.append(f"{show_path(path)} {text}")

    def _is_there(self) -> bool:
        context = self._context
        node = context.node(self._path)
        below = context.children(self._path)
        if context.stored(self._path) is not None or (node is not None and node.form != FORM):
            if below or context.selected(self._path):
                form = "one value"
                if node is not None and context.stored(self._path) is None:
                    form = with_article(node.form)
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
        """Return whether the stored state belongs to another algorithm, and report that.

        A class with another name may be the same algorithm with more or fewer options. Two classes
        count as different algorithms only if each has options that the other lacks.
        """
        node, mine = self._context.node(self._path), self._held.kind
        theirs = mine if node is None else node.meta.get("class", "state dict")
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
        for index, group in enumerate(self._held.groups):
            paths += [(*self._groups, str(index), str(key)) for key in group]
        # A list, so that `any` does not stop early: `selected` notes which patterns matched.
        return any([self._context.selected(path) for path in paths])  # noqa: C419

    def _keys(self, member: Member) -> list[str]:
        return [str(key) for key in self._optimizer.state.get(member.parameter, {})]

    # State --------------------------------------------------------------------------------------

    def _place_unknown(self, member: Member) -> None:
        """Report a parameter that the checkpoint does not have, if any of its state is selected.

        If all of its live state is selected and the restore goes ahead, that state is dropped.
        """
        here = (*self._state, member.name)
        chosen = [self._context.selected((*here, key)) for key in self._keys(member)]
        if any(chosen) or (not chosen and self._context.selected(here)):
            self._result.missing.append(here)
            if all(chosen):
                self._finishes.append(lambda: self._optimizer.state.pop(member.parameter, None))

    def _leave_misfit(self, member: Member, node: Node) -> None:
        """Report a parameter that is stored with another shape; its state is not restored."""
        live = [self._context.selected((*node.path, key)) for key in self._keys(member)]
        if not leaves(self._context, node.path) and not any(live):
            return
        stored, here = node.meta.get("shape"), member.shape
        sentence = (
            f"{show_path(node.path)} is the state of a parameter of shape {stored}, which has "
            f"{here} in the template"
        )
        # Not skippable if matched by order: another shape may mean that the order has changed, and
        # then the state of every other parameter may be wrong as well.
        self._result.differ(
            Difference(
                node.path,
                f"the state of a parameter of shape {stored}",
                f"a parameter of shape {here}",
                (sentence,),
                skippable=member.named,
            )
        )

    def _pass_over(self, path: ObjectPath) -> None:
        """Mark the objects at and below `path` as handled, because another rank restores them."""
        stored = self._context.stored(path)
        if stored is not None and stored.kind is Kind.TENSOR:
            sink = make_sink(torch.empty(0, device="cpu"), path)
            self._result.targets.append(Target(path, stored.spec, (), sink))
        elif stored is not None:
            self._result.values.append(path)
        for key in self._context.children(path):
            self._pass_over((*path, key))

    def _place_known(self, member: Member, node: Node) -> None:
        count, whole = leaves(self._context, node.path), node.meta.get("objects")
        if count != whole:
            if count:
                self._problem(
                    node.path,
                    f"is restored whole or not at all, but only {count} of its {whole} objects are "
                    "selected: select or exclude all of them",
                )
            return
        # If no state is stored, the live state is dropped: if the parameter's path or all paths of
        # the live state are selected.
        wanted = [self._context.selected((*node.path, key)) for key in self._keys(member)]
        if count or self._context.selected(node.path) or (wanted and all(wanted)):
            self._place_state(member, node)

    def _place_state(self, member: Member, node: Node) -> None:
        live: dict[Any, Any] = self._optimizer.state.get(member.parameter, {})
        makers: dict[str, Callable[[], object]] = {}
        keys = self._context.children(node.path)
        self._check_needed(member, node, keys)
        for key in keys:
            device = self._device(member, node, key, live.get(key))
            placed = self._place_item(live.get(key), (*node.path, key), device, member.parameter)
            self._result.absorb(placed)
            if placed.finish is not None:
                makers[key] = placed.finish

        def assign() -> None:
            new = {key: make() for key, make in makers.items()}
            if not new:
                self._optimizer.state.pop(member.parameter, None)
                return
            # Into the same dict: a compiled step may hold a reference to it.
            state = self._optimizer.state.setdefault(member.parameter, {})
            state.clear()
            state.update(new)

        self._finishes.append(assign)

    def _check_needed(self, member: Member, node: Node, keys: Sequence[str]) -> None:
        """Report state that the checkpoint lacks, if an option that is not restored needs it."""
        restored = self._context.children((*self._groups, str(member.group)))
        options = self._held.groups[member.group]
        for classes, option, key in _NEEDED:
            if not isinstance(self._optimizer, classes) or not keys or key in keys:
                continue
            if options.get(option) and option not in restored:
                self._problem(
                    node.path,
                    f"has no {key!r}, which the template needs with {option}={options[option]}; "
                    f"restore {show_path(self._groups)!r} too, or make the template without "
                    f"{option!r}",
                )

    def _place_item(
        self,
        live: Any,
        path: ObjectPath,
        device: torch.device,
        parameter: torch.Tensor | None = None,
    ) -> Placement:
        stored = self._context.stored(path)
        flat = None if parameter is None else flat_of(parameter)
        if flat is not None and stored is not None and stored.spec.shape == flat.shape:
            return self._place_piece(live, path, stored, flat, parameter)
        if same_kind(live, stored, device, self._context):
            target = tensor_target(live, path, like=parameter)
            return Placement([target], finish=lambda: live)
        if fits(live, self._context.node(path), path, device):
            return self._context.place(live, path)
        if stored is not None and stored.kind is Kind.TENSOR and is_sharded(parameter):
            # State as torch would have made it in a step: placed like the parameter, or a number.
            made = new_like(parameter, stored)
            if made is not None:
                target = tensor_target(made, path, like=parameter)
                return Placement([target], finish=lambda: made)
            if stored.spec.shape:
                self._problem(
                    path,
                    f"has shape {list(stored.spec.shape)}, unlike its parameter, and it is not "
                    "known how this optimizer would shard it: run one step of the optimizer "
                    "before the restore",
                )
                return Placement()
        return self._context.rebuild(path, device=device_name(device))

    def _place_piece(
        self, live: Any, path: ObjectPath, stored: StoredObject, flat: Flat, parameter: Any
    ) -> Placement:
        """Plan the restore of this rank's elements of the state."""
        spec = replace(stored.spec, shape=(flat.stop - flat.start,))
        local = live
        if not isinstance(live, torch.Tensor) or live.shape != spec.shape:
            local = empty_tensor(stored._replace(spec=spec), device_name(parameter.device))
        elif not self._context.takes(TensorSpec(*dtype_name(live.dtype), spec.shape), spec):
            local = empty_tensor(stored._replace(spec=spec), device_name(live.device))
        placed = self._context.place(flat.shard(local), path)
        placed.finish = lambda: local
        return placed

    def _device(self, member: Member, node: Node, key: str, live: object) -> torch.device:
        """Return the device on which torch itself would have created this piece of state."""
        if isinstance(live, torch.Tensor):
            return live.device
        group = self._held.groups[member.group]
        on_device = group.get("capturable") or group.get("fused")
        counts_on_host = key == "step" and not isinstance(self._optimizer, torch.optim.ASGD)
        if not on_device and (counts_on_host or key in node.meta.get("host", ())):
            return torch.device("cpu")
        return member.parameter.device

    # Groups -------------------------------------------------------------------------------------

    def _place_groups(self, matches: dict[str, Node]) -> None:
        chosen, groups = self._context.children(self._groups), self._held.groups
        if not chosen or not any(group.keys() - MEMBERSHIP for group in groups):
            return
        difference = self._difference_of_groups(matches)
        if difference is not None:
            self._result.differ(difference)
            return
        for index in chosen:
            at = index_of(index, (*self._groups, index))
            if at < len(groups):
                self._place_group(groups[at], (*self._groups, index))

    def _difference_of_groups(self, matches: dict[str, Node]) -> Difference | None:
        """Return how the groups differ; None if each option would reach the right parameters."""
        shown, groups = show_path(self._groups), self._held.groups
        node = self._context.node(self._path)
        count = len(groups) if node is None else len(node.meta.get("groups", ()))
        stored, here = _groups(count), _groups(len(groups))
        sentences = [f"{shown} has {stored} in the checkpoint, {len(groups)} in the template"]
        if count == len(groups):
            moved = [
                (match, match.meta.get("group"), member.group)
                for member in self._members
                if (match := matches.get(member.name)) is not None
                and match.meta.get("group") != member.group
            ]
            if not moved:
                return None
            sentences = [
                f"{show_path(match.path)} is in group {there} in the checkpoint, but in group "
                f"{group} in the template"
                for match, there, group in moved
            ]
            match, there, group = moved[0]
            more = f" and {len(moved) - 1} more elsewhere" if len(moved) > 1 else ""
            stored = f"{match.path[-1]} in group {there}{more}"
            here = f"{match.path[-1]} in group {group}"
        advice = f"exclude={shown + '/**'!r} keeps the options of the template"
        return Difference(self._groups, stored, here, tuple(sentences), advice=advice)

    def _place_group(self, group: dict[str, Any], path: ObjectPath) -> None:
        for key in self._context.children(path):
            here = (*path, key)
            if key in MEMBERSHIP:  # stored by version 1
                self._result.values.append(here)
                continue
            live = group.get(key)
            device = torch.device("cpu")
            if isinstance(live, torch.Tensor):
                device = live.device
            elif group["params"] and group.get("capturable"):
                device = group["params"][0].device
            twins, stored = self._twins(here), self._context.stored(here)
            if stored is not None and twins:
                fits_live = same_kind(live, stored, device, self._context)
                filled: Any = live if fits_live else empty_tensor(stored, device_name(device))
                # Core checks that all copies have the same bytes: their targets share memory.
                self._result.targets += [tensor_target(filled, twin) for twin in twins]
                live = filled
            self._assign(self._place_item(live, here, device), group, key)


def _agree(stored: object, here: list[int] | None) -> bool:
    """Return whether two shapes agree; None, an unknown shape, agrees with any shape."""
    return stored is None or here is None or stored == here


def _groups(count: int) -> str:
    return f"{count} group{'' if count == 1 else 's'}"


def _run_own_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Run the rest of `load_state_dict` after the state was set.

    If pre-hooks or an override may change the state, the optimizer loads its own state dict. Then
    each restored tensor that this did not change, apart from torch's cast to the parameter's dtype,
    is put back, so that it keeps its dtype and the memory that it was restored into.
    """
    before: dict[int, Any] = optimizer._optimizer_load_state_dict_pre_hooks  # type: ignore[attr-defined, unused-ignore]  # noqa: SLF001 - no other way
    base = torch.optim.Optimizer.load_state_dict
    if not before and not is_override(optimizer.load_state_dict, base):
        for hook in list(optimizer._optimizer_load_state_dict_post_hooks.values()):  # noqa: SLF001 - see above
            hook(optimizer)
        return
    restored = {key: dict(state) for key, state in optimizer.state.items() if type(state) is dict}
    optimizer.load_state_dict(optimizer.state_dict())
    for parameter, old in restored.items():
        state = optimizer.state.get(parameter)
        if state is not None:
            state.update(_uncast(old, dict(state)))


def _uncast(old: Any, new: Any) -> Any:
    """Return `new`, but keep each tensor of `old` that differs from the new one only by a cast."""
    if isinstance(new, torch.Tensor):
        return old if isinstance(old, torch.Tensor) and _is_cast(old, new) else new
    kinds: set[type] = {type(old), type(new)}
    if kinds == {dict}:
        return {key: _uncast(old.get(key), item) for key, item in new.items()}
    if kinds in ({list}, {tuple}) and len(old) == len(new):
        return type(new)(_uncast(*pair) for pair in zip(old, new, strict=True))
    return new


def _is_cast(old: torch.Tensor, new: torch.Tensor) -> bool:
    if is_sharded(old) and is_sharded(new):  # comparing DTensors would communicate
        return old.placements == new.placements and _is_cast(local_of(old), local_of(new))
    if old is new or old.shape != new.shape:
        return old is new
    return torch.equal(_bits(old.to(device=new.device, dtype=new.dtype)), _bits(new))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, which are equal for equal NaNs, unlike the values."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

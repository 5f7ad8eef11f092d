"""The provider of `torch.optim.Optimizer`: state by parameter *name*, param groups by index.

Objects are `state/<parameter name>/<key>` and `param_groups/<i>/<key>`. A rank describes only the
state that it holds: with `ZeroRedundancyOptimizer`, that of some parameters. Each parameter has a
node with its shape and position, so that optimizers without names can be matched by order. Only
these nodes record which parameters a group has, because ranks that train different parameters have
different groups. Together the nodes of all ranks describe all parameters.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from penstock.core.abc import Node, Placement, StateObject, StateProvider
from penstock.core.errors import UnsupportedStateError
from penstock.core.types import Replica, Role, collide, show_path
from penstock.providers.children import rebuild_dict
from penstock.providers.optimizer.members import (
    FORM,
    MAX_PARAMETERS,
    MEMBERSHIP,
    PARAMETER_FORM,
    held_of,
    index_of,
    is_zero,
    malformed,
    members,
)
from penstock.providers.optimizer.placer import Placer
from penstock.providers.optimizer.stored_dict import stored_dict
from penstock.providers.optimizer.template_dict import template_dict
from penstock.providers.tensor import is_plain, is_sharded, plain_tensors
from penstock.providers.tensor.sharding import cut_like
from penstock.providers.tensor.sources import memory_key
from penstock.providers.wrappers import OPTIMIZERS, is_wrapper, place_wrapped, wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.distributed.tensor import DTensor

    from penstock.core.abc import (
        DescribeContext,
        MemoryKey,
        PlaceContext,
        StoredObject,
    )
    from penstock.core.types import ObjectPath
    from penstock.providers.optimizer.members import Held, Member
    from penstock.providers.tensor.flat_ranges import Flat

PRIORITY = 40
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_NUMBERS = frozenset({type(None), bool, int, float, str})
Maker: TypeAlias = "Callable[[], object]"


class OptimizerProvider(StateProvider):
    """Stores optimizers that keep torch's own `state_dict`.

    Optimizers that override it are left to the provider of stateful values, since only their own
    code knows their state. The wrappers of accelerate and Lightning Fabric override it too, but
    this provider claims and unwraps them; otherwise their state would be stored by number.
    """

    name = "optimizer"
    version = 2  # 1 stored the names of a group's parameters as a value
    forms = (FORM, PARAMETER_FORM)

    def claims(self, kind: type, /) -> int | None:
        base = torch.optim.Optimizer
        plain = issubclass(kind, base) and kind.state_dict is base.state_dict
        return PRIORITY if plain or is_zero(kind) or is_wrapper(kind, OPTIMIZERS) else None

    def describe(
        self, value: torch.optim.Optimizer, path: ObjectPath, /, *, context: DescribeContext
    ) -> Iterable[StateObject | Node]:
        kind = type(value)
        if is_wrapper(kind, OPTIMIZERS):
            return context.describe(wrapped(value, OPTIMIZERS), path)
        recall = partial(context.recall, (FORM, path))
        # First: when modules report the names, they also record how their parameters are sharded.
        named = members(value.param_groups, context.parameter_names, recall)
        held = held_of(value, path)
        meta = {
            "class": held.kind,
            "groups": _group_sizes(held, path),
        }
        if held.owned is not None:
            context.of_this_rank((*path, "state"))
        nodes = [Node(path, FORM, meta), *_describe_members(held, named, path, context)]
        for index, group in enumerate(held.groups):
            for key, item in group.items():
                if key in MEMBERSHIP:  # the parameter nodes record it
                    continue
                here = (*path, "param_groups", str(index), _text(key, path))
                nodes += context.describe(item, here, role=Role.OPTIMIZER)
        state: dict[Any, Any] = held.local.state  # some may belong to no parameter
        for key, item in state.items():
            if not isinstance(key, torch.Tensor):
                here = (*path, "shared", _text(key, path))
                nodes += context.describe(item, here, role=Role.OPTIMIZER)
        return nodes

    def place(
        self, value: torch.optim.Optimizer, path: ObjectPath, /, *, context: PlaceContext
    ) -> Placement:
        if is_wrapper(type(value), OPTIMIZERS):
            return place_wrapped(value, path, OPTIMIZERS, context=context)
        named = members(value.param_groups, context.parameter_names)  # first, as in `describe`
        held = held_of(value, path)
        stored = stored_dict(context, path, named, len(held.groups))
        if stored is None:
            return Placer(held, named, path, context).place()
        return stored.settled(
            Placer(held, stored.members, path, stored, twins=stored.twins).place()
        )

    def place_dict(
        self, value: dict[Any, Any], node: Node, /, *, context: PlaceContext
    ) -> Placement | None:
        """Plan the restore into a state dict with parameter names or numbers."""
        template = template_dict(value, node, context) if node.form == FORM else None
        return None if template is None else template.place(node, context)

    def rebuild(
        self, stored: StoredObject | Node, /, *, device: str | None, context: PlaceContext
    ) -> Placement:
        """Plan the optimizer's state dict, as `Rebuilder` describes it."""
        assert isinstance(stored, Node)
        if stored.form == PARAMETER_FORM:
            return rebuild_dict(stored.path, device=device, context=context)
        return Rebuilder(stored, device=device, context=context).rebuild()

    def claimed_memory(self, value: torch.optim.Optimizer, /) -> Iterable[MemoryKey]:
        if is_wrapper(type(value), OPTIMIZERS):
            return ()  # the wrapped optimizer is described too, and claims its own memory
        claimed = {memory_key(t, storage) for t, storage in _own_tensors(_tensors(_claimed(value)))}
        # Options that are tensors change outside of the step: a scheduler sets the learning rate.
        return claimed.difference(map(memory_key, _settings(value)))

    def claimed_values(self, value: torch.optim.Optimizer, /) -> Sequence[object] | None:
        if is_wrapper(type(value), OPTIMIZERS):
            return ()  # see `claimed_memory`
        values = _claimed(value)
        if _settings(value) or not _PLAIN.issuperset(map(type, values)):
            return None
        try:
            return [tensor for tensor, _ in _own_tensors(values)]
        except RuntimeError:  # a tensor is sparse, for example, and has no storage
            return None

    def left_out(self, value: torch.optim.Optimizer, /) -> Iterable[tuple[str, object]]:
        """Return the parameters, which their modules store."""
        if is_wrapper(type(value), OPTIMIZERS):
            return ()  # see `claimed_memory`
        return [("", p) for g in value.param_groups for p in _tensors(g["params"])]


def _describe_members(
    held: Held, named: Iterable[Member], path: ObjectPath, context: DescribeContext
) -> list[StateObject | Node]:
    owned = [member for member in named if held.owns(member.parameter)]
    states: list[Mapping[str, object]] = [
        held.local.state.get(member.parameter, {}) for member in owned
    ]
    values: list[object] = []
    like: list[tuple[Any, Any]] = []
    for member, state in zip(owned, states, strict=True):
        parameter = member.parameter
        if is_sharded(parameter):
            if not member.named:
                _refuse_others(parameter, path, context)
            like += [(item, parameter) for item in state.values() if is_sharded(item)]
        flat = member.flat
        values += state.values() if flat is None else [_piece(t, flat) for t in state.values()]
    basis = [member.name for member in owned], [*map(tuple, states)]
    heres, paths = context.recall(("state", path), basis, lambda: _state_paths(path, *basis))
    with cut_like(like):
        described = iter(context.describe_each(values, paths, [Role.OPTIMIZER] * len(values)))
    entries: list[list[StateObject | Node]] = []
    facts: list[tuple[Any, ...]] = []
    for member, state in zip(owned, states, strict=True):
        here = [*chain.from_iterable(islice(described, len(state)))]
        if held.owned is not None:
            here = [_of_this_rank(entry) for entry in here]
        # Most optimizers keep `step`, for example, on the host. A restore before the first step
        # has no live state that shows the device.
        host = None
        if not member.parameter.is_cpu:
            host = [k for k, t in state.items() if isinstance(t, torch.Tensor) and t.is_cpu]
        objects = sum([type(entry) is StateObject for entry in here])
        facts.append((member.shape, member.group, member.position, member.named, objects, host))
        entries.append(here)
    nodes: list[StateObject | Node] = []
    for node, here in zip(map(_node, heres, facts), entries, strict=True):
        nodes.append(node)
        nodes += here
    return nodes


def _node(path: ObjectPath, facts: tuple[Any, ...]) -> Node:
    """Return the node of a parameter; `facts` are its `meta` values in the order of `names`."""
    names = ("shape", "group", "position", "named", "objects", "host")
    meta: dict[str, Any] = dict(zip(names, facts, strict=True))
    if meta["host"] is None:  # the parameter is on the host, and so is its state
        del meta["host"]
    return Node(path, PARAMETER_FORM, meta)


def _state_paths(
    path: ObjectPath, names: Sequence[str], keys: Sequence[tuple[object, ...]]
) -> tuple[list[ObjectPath], list[ObjectPath]]:
    heres = [(*path, "state", name) for name in names]
    pairs = zip(heres, keys, strict=True)
    return heres, [(*here, _text(key, here)) for here, some in pairs for key in some]


def _group_sizes(held: Held, path: ObjectPath) -> list[int]:
    sizes = [len(group["params"]) for group in held.groups]
    if sum(sizes) > MAX_PARAMETERS:
        msg = f"{show_path(path)} has more than {MAX_PARAMETERS} parameters: use several optimizers"
        raise UnsupportedStateError(msg)
    return sizes


def _refuse_others(parameter: DTensor, path: ObjectPath, context: DescribeContext) -> None:
    """Refuse an unnamed parameter that only some ranks hold.

    Ranks outside its mesh, such as other pipeline stages, may have another parameter at the same
    position, and one of the two would be lost.

    Raises:
        UnsupportedStateError: Only some ranks hold the parameter.
    """
    here, count = parameter.device_mesh.size(), context.world_size
    if here < count:
        msg = (
            f"{show_path(path)} is an optimizer whose parameters have no names, and only {here} of "
            f"the {count} ranks hold them: other ranks may have other parameters at the same "
            "positions. Put the modules themselves into the state tree, or build the optimizer "
            "from named_parameters()"
        )
        raise UnsupportedStateError(msg)


def _piece(item: object, flat: Flat) -> object:
    """Return `item` as a `Shard` of the whole state if it has one value per local element."""
    if not isinstance(item, torch.Tensor) or item.shape != (flat.stop - flat.start,):
        return item
    return flat.shard(item)


def _of_this_rank(entry: StateObject | Node) -> StateObject | Node:
    if isinstance(entry, Node) or entry.replica is not None:
        return entry
    return entry._replace(replica=Replica())


def _tensors(value: Any) -> list[torch.Tensor]:
    if is_plain(value):
        return [value] if value.numel() else []
    if isinstance(value, torch.Tensor):
        return [part for part in plain_tensors(value) if part.numel()]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


def _claimed(value: torch.optim.Optimizer) -> list[object]:
    """Return the parameters and state values that only an optimizer step changes."""
    state: Any = value.optim.state if is_zero(type(value)) else value.state  # type: ignore[attr-defined]  # ZeRO's
    values: list[object] = []
    for group in value.param_groups:
        # The step of a captured graph runs without Python, so no hook can fence it: deferred
        # state would change while it is copied.
        if group.get("capturable") or group.get("differentiable"):
            continue
        parameters = group["params"]
        values += [parameter for parameter in parameters if parameter.is_leaf]
        for items in map(state.get, parameters):
            values += items.values() if type(items) is dict else [items]
    return [item for item in values if type(item) not in _NUMBERS]


def _settings(value: torch.optim.Optimizer) -> list[torch.Tensor]:
    options = [v for group in value.param_groups for k, v in group.items() if k not in MEMBERSHIP]
    return [tensor for option in options for tensor in _tensors(option)]


def _own_tensors(tensors: Iterable[Any]) -> Iterator[tuple[torch.Tensor, torch.UntypedStorage]]:
    """Yield each tensor that no other process shares, with its storage.

    A fence in this process cannot hold back another process's writes.
    """
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # For memory on a device `is_shared` is always true.
        if not tensor.is_cpu or not storage.is_shared():
            yield tensor, storage


def _text(key: object, path: ObjectPath) -> str:
    if isinstance(key, str):
        return key
    msg = f"{show_path(path)} has the state key {key!r}: only strings can be stored there"
    raise UnsupportedStateError(msg)


class Rebuilder:
    """Plans the state dict of one optimizer, with parameters in group order.

    The dict has parameter numbers, for torch's `load_state_dict`. With `named_optimizers` it has
    names, for torch.distributed.checkpoint.
    """

    def __init__(self, stored: Node, *, device: str | None, context: PlaceContext) -> None:
        counts = stored.meta.get("groups")
        if not isinstance(counts, list) or not all(isinstance(n, int) and n >= 0 for n in counts):
            raise malformed(stored.path)
        if sum(counts) > MAX_PARAMETERS:
            raise malformed(stored.path)
        self._path = stored.path
        self._device = device
        self._context = context
        self._result = Placement()
        self._counts: list[int] = counts
        self._numbers = self._numbered()
        self._named = context.named_optimizers
        if self._named:
            self._check_names()

    def rebuild(self) -> Placement:
        """Return the plan; its `finish` returns the dict.

        Raises:
            FormatError: The stored objects do not form an optimizer.
        """
        state = self._state()
        groups = self._groups()

        def finish() -> object:
            made: dict[str, Any] = {"state": {number: make() for number, make in state}}
            if groups:
                made["param_groups"] = [{k: make() for k, make in g.items()} for g in groups]
            return made

        self._result.finish = finish
        return self._result

    def _numbered(self) -> dict[ObjectPath, int]:
        """Map the state path of each parameter to its number, and correct the group sizes.

        Ranks that train different parameters report positions within their own groups. Then the
        parameters of a group are numbered in stored order, those of the first rank first.
        """
        places: list[tuple[ObjectPath, int, int]] = []
        for node in self._context.nodes((*self._path, "state")):
            if node.form == PARAMETER_FORM:
                group, position = node.meta.get("group"), node.meta.get("position")
                if not isinstance(group, int) or not isinstance(position, int):
                    raise malformed(node.path)
                if not 0 <= group < len(self._counts):
                    raise malformed(node.path)
                places.append((node.path, group, position))
        if collide([(group, position) for _, group, position in places]):
            raise malformed(self._path)
        uses = Counter((group, position) for _, group, position in places)
        of_one_rank = all(
            count == 1 and position < self._counts[group]
            for (group, position), count in uses.items()
        )
        if not of_one_rank:
            seen: Counter[int] = Counter()
            for at, (path, group, _) in enumerate(places):
                places[at] = path, group, seen[group]
                seen[group] += 1
            self._counts = [seen[group] for group in range(len(self._counts))]
        numbers = {path: self._start(group) + position for path, group, position in places}
        if collide(list(numbers.values())):
            raise malformed(self._path)
        return numbers

    def _check_names(self) -> None:
        nodes = self._context.nodes((*self._path, "state"))
        if len(self._numbers) < sum(self._counts) or not all(n.meta.get("named") for n in nodes):
            self._result.problems.append(
                f"{show_path(self._path)} is stored without parameter names: load it without "
                "named_optimizers=True, or exclude it"
            )

    def _start(self, group: int) -> int:
        return sum(self._counts[:group])

    def _state(self) -> list[tuple[int | str, Maker]]:
        makers: list[tuple[int | str, Maker]] = []
        for name in self._context.children((*self._path, "state")):
            here = (*self._path, "state", name)
            number = self._numbers.get(here)
            if number is None:
                raise malformed(here)
            make = self._maker(here)
            # With names, an empty state has an entry too: torch.distributed.checkpoint refuses to
            # load a dict without it.
            if make is not None and (self._named or self._context.children(here)):
                makers.append((name if self._named else number, make))
        for key in self._context.children((*self._path, "shared")):
            make = self._maker((*self._path, "shared", key))
            if make is not None:
                makers.append((key, make))
        return makers

    def _groups(self) -> list[dict[str, Maker]]:
        groups = []
        for index in self._context.children((*self._path, "param_groups")):
            here = (*self._path, "param_groups", index)
            at = index_of(index, here)
            if at >= len(self._counts):
                raise malformed(here)
            makers = {key: self._maker((*here, key)) for key in self._context.children(here)}
            options = {k: m for k, m in makers.items() if m is not None and k not in MEMBERSHIP}
            groups.append(options | {"params": _constant(self._params(at))})
        return groups

    def _params(self, group: int) -> list[int] | list[str]:
        start = self._start(group)
        numbers = range(start, start + self._counts[group])
        if not self._named:
            return list(numbers)
        names = {number: path[-1] for path, number in self._numbers.items()}
        return [names[number] for number in numbers if number in names]

    def _maker(self, path: ObjectPath) -> Maker | None:
        placed = self._context.rebuild(path, device=self._device)
        self._result.absorb(placed)
        return placed.finish


def _constant(value: object) -> Maker:
    return lambda: value

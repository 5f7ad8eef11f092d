"""A stored state dict of an optimizer, read as if the optimizer itself had been stored.

torch.distributed.checkpoint keys such dicts by parameter name, nested or flattened.
`Optimizer.state_dict` keys them by number.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.core.abc import Node, PlaceContext, Placement
from penstock.core.types import Kind, TensorSpec, show_key, show_path
from penstock.providers.children import leaves, rebuild_dict
from penstock.providers.optimizer.members import (
    FORM,
    MAX_PARAMETERS,
    MEMBERSHIP,
    PARAMETER_FORM,
    shape_of_state,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.core.abc import StoredObject
    from penstock.core.types import ObjectPath
    from penstock.providers.optimizer.members import Member

SHARED = "shared"

STATE, GROUPS = "state", "param_groups"


@dataclass(frozen=True, slots=True)
class _Part:
    root: ObjectPath
    value: Any


_Entry: TypeAlias = "_Part | ObjectPath"
_Items: TypeAlias = "dict[tuple[str, ...], _Entry]"


@dataclass(slots=True)
class _Layout:
    """The content of a stored dict, by the parameter names or numbers that it uses.

    Attributes:
        params: The names of the parameters of each group.
        state: The state of each parameter.
        options: The options of each group.
        numbered: Whether the names are numbers.
        own_names: Real names by number, if the dict has them too.
        shared: State that belongs to no parameter.
        twins: The other copies of each tensor option, by the path of the first copy.
        known: Paths of stored objects that are not restored separately.
        conflicts: Options that differ within a group: the group, the key, and two parameters.
    """

    params: list[list[str]]
    state: dict[str, _Items]
    options: list[_Items]
    numbered: bool = False
    own_names: dict[str, str] = field(default_factory=dict)
    shared: _Items = field(default_factory=dict)
    twins: dict[ObjectPath, list[ObjectPath]] = field(default_factory=dict)
    known: list[ObjectPath] = field(default_factory=list)
    conflicts: list[tuple[int, str, tuple[str, str]]] = field(default_factory=list)


class StoredDict(PlaceContext):
    """Presents a stored state dict under the paths of a stored optimizer.

    In a flattened dict, the stored path of an object differs from its path in an optimizer. An
    object is restored only if the patterns select both paths.

    Attributes:
        members: The parameters of the live optimizer, under the names to match them by.
    """

    def __init__(
        self, context: PlaceContext, path: ObjectPath, members: list[Member], layout: _Layout
    ) -> None:
        self.allow_pickle = context.allow_pickle
        self.rank, self.world_size = context.rank, context.world_size
        self.members = members
        self._context = context
        self._whole = context.whole(path)
        self._path = path
        self._twins = layout.twins
        self._elements = sum(prod(member.shape or ()) for member in members)
        self._known = layout.known
        self._conflicts = layout.conflicts
        self._entries: dict[ObjectPath, _Entry] = {}
        self._below: dict[ObjectPath, dict[str, None]] = {path: {}}
        counts = [len(names) for names in layout.params]
        meta = {"groups": counts, "numbered": layout.numbered and not layout.own_names}
        self._nodes = {path: Node(path, FORM, meta)}
        places = {
            name: (group, position)
            for group, names in enumerate(layout.params)
            for position, name in enumerate(names)
        }
        for name in dict.fromkeys([*places, *layout.state]):
            self._add_parameter(name, layout.state.get(name, {}), places.get(name, (None, None)))
        for index, options in enumerate(layout.options):
            self._add((*path, GROUPS, str(index)), options)
        self._add((*path, SHARED), layout.shared)

    def twins(self, path: ObjectPath) -> Sequence[ObjectPath]:
        """Return the paths of the other stored copies of a tensor option."""
        return self._twins.get(self._stored_path(path), ())

    def settled(self, placement: Placement) -> Placement:
        """Return a plan made in this context with its paths replaced by stored paths, for core."""
        placement.targets = [t._replace(path=self._stored_path(t.path)) for t in placement.targets]
        placement.values = list(map(self._stored_path, placement.values))
        placement.passed_over += self._known
        different = [difference.path for difference in placement.differences]
        for path, entry in self._entries.items():
            if not self._context.selected(path) or any(p == path[: len(p)] for p in different):
                placement.passed_over.append(entry.root if isinstance(entry, _Part) else entry)
        for index, key, names in self._conflicts:
            path = (*self._path, GROUPS, str(index), key)
            if self._is_chosen(path):
                placement.problems.append(
                    f"{show_path(path)} is one option of a group, but is stored with different "
                    f"values for {names[0]} and {names[1]} (exclude="
                    f"{show_path(path[:-2]) + '/**'!r} keeps the options of the template)"
                )
        return placement

    # The contract of `PlaceContext`.

    def takes(self, spec: TensorSpec, stored: TensorSpec, /) -> bool:
        return self._context.takes(spec, stored)

    def place(self, value: object, path: ObjectPath, /) -> Placement:
        return self._context.place(value, self._stored_path(path))

    def rebuild(self, path: ObjectPath, /, *, device: str | None = None) -> Placement:
        entry = self._entries.get(path)
        if isinstance(entry, _Part):
            value = entry.value
            return Placement(values=[entry.root], finish=lambda: value)
        if path in self._below:
            return rebuild_dict(path, device=device, context=self)
        return self._context.rebuild(self._stored_path(path), device=device)

    def stored(self, path: ObjectPath, /) -> StoredObject | None:
        if path in self._below or not self._is_chosen(path):
            return None
        stored = self._context.stored(self._stored_path(path))
        return None if stored is None else stored._replace(path=path)

    def node(self, path: ObjectPath, /) -> Node | None:
        return self._nodes.get(path) or self._context.node(self._stored_path(path))

    def nodes(self, path: ObjectPath, /) -> Sequence[Node]:
        return self._context.nodes(self._stored_path(path))

    def children(self, path: ObjectPath, /) -> Sequence[str]:
        if path in self._below:
            return [key for key in self._below[path] if self._is_chosen((*path, key))]
        return self._context.children(self._stored_path(path))

    def value(self, path: ObjectPath, /) -> object:
        return self._context.value(self._stored_path(path))

    def value_bytes(self, path: ObjectPath, /) -> bytes:
        return self._context.value_bytes(self._stored_path(path))

    def selected(self, path: ObjectPath, /) -> bool:
        return self._context.selected(path)

    def whole(self, path: ObjectPath, /) -> PlaceContext:
        return self._context.whole(path)

    def provider_version(self, name: str, /) -> int | None:
        return self._context.provider_version(name)

    def parameter_names(self, tensor: object, /) -> Sequence[str]:
        return self._context.parameter_names(tensor)

    def tied_names(self, tensor: object, /) -> Sequence[str]:
        return self._context.tied_names(tensor)

    def _add(self, path: ObjectPath, items: _Items) -> None:
        """Add the entries below `path`; the path exists even if `items` is empty."""
        for here in [path, *((*path, *keys) for keys in items)]:
            for depth in range(len(self._path), len(here)):
                self._below.setdefault(here[:depth], {})[here[depth]] = None
        self._below.setdefault(path, {})
        self._entries |= {(*path, *keys): entry for keys, entry in items.items()}

    def _add_parameter(
        self, name: str, items: _Items, place: tuple[int | None, int | None]
    ) -> None:
        path = (*self._path, STATE, name)
        self._add(path, items)
        named = not self._nodes[self._path].meta["numbered"]
        counts = [1 if isinstance(e, _Part) else leaves(self._whole, e) for e in items.values()]
        objects = [self._whole.stored(e) for e in items.values() if not isinstance(e, _Part)]
        shapes = [
            each.spec.shape for each in objects if each is not None and each.kind is Kind.TENSOR
        ]
        shape: Any = shape_of_state(shapes)
        if shape is None and any(shapes) and not named:
            shape = "unknown"  # nothing shows that the order is the same: not `None`, which agrees
        if shape == [self._elements]:  # LBFGS keeps vectors of all parameters with the first one
            shape = None
        group, position = place
        meta = {"shape": shape, "group": group, "position": position, "named": named}
        self._nodes[path] = Node(path, PARAMETER_FORM, meta | {"objects": sum(counts)})

    def _is_chosen(self, path: ObjectPath) -> bool:
        below = self._below.get(path)
        if below:
            return any(self._is_chosen((*path, key)) for key in below)
        entry = self._entries.get(path)
        if entry is None:  # a parameter without state, or a path within an entry
            return self._context.selected(path) if below is not None else True
        at = entry.root if isinstance(entry, _Part) else entry
        is_there = self._context.stored(at) is not None or bool(self._context.children(at))
        return is_there and (at == path or self._context.selected(path))

    def _stored_path(self, path: ObjectPath) -> ObjectPath:
        for depth in range(len(path), len(self._path), -1):
            entry = self._entries.get(path[:depth])
            if isinstance(entry, _Part):
                return entry.root
            if entry is not None:
                return (*entry, *path[depth:])
        return path


def stored_dict(
    context: PlaceContext, path: ObjectPath, members: list[Member], group_count: int
) -> StoredDict | None:
    """Return the state dict of an optimizer that is stored at `path`; None if there is none.

    Args:
        context: The context of the restore.
        path: The path of the optimizer.
        members: The parameters of the live optimizer.
        group_count: The number of its param groups.
    """
    node = context.node(path)
    if node is not None and node.form != "dict":
        return None
    if not context.children(path) and context.stored(path) is None:
        return None
    whole = context.whole(path)
    top = _children(whole, path)
    if STATE in top and top.keys() <= {STATE, GROUPS}:
        layout = _nested(whole, top)
    elif is_flattened(top):
        layout = _flattened(whole, top, members, group_count)
    else:
        return None
    if layout is None:
        return None
    if layout.numbered:
        uses = Counter(layout.own_names.values())
        numbers = {name: n for n, name in layout.own_names.items() if uses[name] == 1}
        if any(name in numbers for member in members for name in member.candidates):
            members = [_renumbered(member, numbers) for member in members]
        else:
            layout.own_names = {}
            members = [_in_order(member, layout.params) for member in members]
    return StoredDict(context, path, members, layout)


def _renumbered(member: Member, numbers: Mapping[str, str]) -> Member:
    names = [numbers[name] for name in member.candidates if name in numbers]
    return replace(member, name=names[0], named=True, candidates=()) if names else member


def _in_order(member: Member, params: Sequence[Sequence[str]]) -> Member:
    try:
        name = params[member.group][member.position]
    except IndexError:
        name = f"{member.group}.{member.position}"
    return replace(member, name=name, named=False, candidates=())


def _children(whole: PlaceContext, at: _Entry) -> dict[str, _Entry]:
    """Return the entries below a container or a value."""
    if isinstance(at, _Part):
        value: Any = at.value
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {show_key(key): _Part(at.root, item) for key, item in pairs}
    stored = whole.stored(at)
    if stored is None:
        return {segment: (*at, segment) for segment in whole.children(at)}
    value = whole.value(at) if stored.kind is Kind.VALUE else None
    return _children(whole, _Part(at, value)) if isinstance(value, dict | list | tuple) else {}


def _value(whole: PlaceContext, at: _Entry | None) -> Any:
    if at is None or isinstance(at, _Part):
        return None if at is None else at.value
    stored = whole.stored(at)
    return whole.value(at) if stored is not None and stored.kind is Kind.VALUE else None


def _nested(whole: PlaceContext, top: Mapping[str, _Entry]) -> _Layout | None:
    entries = _children(whole, top[STATE])
    state: dict[str, _Items] = {
        name: {(key,): item for key, item in _children(whole, entry).items()}
        for name, entry in entries.items()
    }
    layout = _Layout([], state, [], numbered=_has_numbers(whole, top[STATE]))
    for entry in _children(whole, top[GROUPS]).values() if GROUPS in top else ():
        options = _children(whole, entry)
        params = _value(whole, options.get("params"))
        if not isinstance(params, list) or not all(map(_is_name, params)):
            return None
        layout.numbered |= any(type(name) is int for name in params)
        own = _value(whole, options.get("param_names"))
        if isinstance(own, list) and all(type(name) is str for name in own):
            layout.own_names |= {str(n): name for n, name in zip(params, own, strict=False)}
        layout.params.append([str(name) for name in params])
        membership = [options[key] for key in MEMBERSHIP if key in options]
        layout.known += [entry for entry in membership if isinstance(entry, tuple)]
        layout.options.append({(k,): e for k, e in options.items() if k not in MEMBERSHIP})
    if layout.numbered:
        # A name among the numbers belongs to no parameter.
        layout.shared = {(name,): e for name, e in entries.items() if not name.isdigit()}
        layout.state = {name: items for name, items in state.items() if name.isdigit()}
    return layout


def _is_name(name: object) -> bool:
    return type(name) is str or (type(name) is int and 0 <= name < MAX_PARAMETERS)


def _has_numbers(whole: PlaceContext, at: _Entry) -> bool:
    if not isinstance(at, _Part) and whole.stored(at) is None:
        node = whole.node(at)
        kinds: Any = None if node is None else node.meta.get("keys")
        return kinds == "int" or (isinstance(kinds, dict) and "int" in kinds.values())
    value = _value(whole, at)
    return isinstance(value, dict) and any(type(key) is int for key in value)


def _flattened(
    whole: PlaceContext,
    top: Mapping[str, _Entry],
    members: Sequence[Member],
    group_count: int,
) -> _Layout:
    """Return the layout of a dict with keys such as `state.<name>.exp_avg`.

    The dict repeats a group's options for each parameter. It does not list the groups, so the
    layout has those of the live optimizer.
    """
    keys, own = split_keys(top)
    options = {name: {key: top[full] for key, full in each.items()} for name, each in own.items()}
    state: dict[str, _Items] = {
        name: {tuple(rest.split(".")): top[full] for rest, full in keys.get(name, {}).items()}
        for name in dict.fromkeys([*options, *keys])
    }
    layout = _Layout([[] for _ in range(group_count)], state, [{} for _ in range(group_count)])
    for member in members:
        known_names = [name for name in (member.name, *member.candidates) if name in state]
        layout.params[member.group] += known_names[:1]
    for index, names in enumerate(layout.params):
        for key in dict.fromkeys(key for name in names for key in options.get(name, ())):
            copies = {name: options.get(name, {}).get(key) for name in names}
            first, *others = [entry for entry in copies.values() if entry is not None]
            layout.options[index][key,] = first
            contents = {name: _content(whole, entry) for name, entry in copies.items()}
            if len({*contents.values()}) > 1:
                first_name, second_name = [
                    *dict(zip(contents.values(), contents, strict=True)).values()
                ][:2]
                layout.conflicts.append((index, key, (first_name, second_name)))
            elif isinstance(first, tuple):
                paths = [entry for entry in others if isinstance(entry, tuple)]
                if isinstance(contents[names[0]], TensorSpec):
                    layout.twins[first] = paths
                else:
                    layout.known += paths
    return layout


def _content(whole: PlaceContext, at: _Entry | None) -> object:
    """Return what must be equal in all copies of an option.

    For a tensor, that is only its spec: core compares the bytes.
    """
    if at is None or isinstance(at, _Part):
        return None if at is None else repr(at.value)
    stored = whole.stored(at)
    if stored is None:
        return object()  # a container of tensors
    return stored.spec if stored.kind is Kind.TENSOR else whole.value_bytes(at)


def is_flattened(keys: Iterable[object]) -> bool:
    """Return whether `keys` is not empty and all are keys of a flattened state dict."""
    matches = [type(key) is str and key.startswith((f"{STATE}.", f"{GROUPS}.")) for key in keys]
    return bool(matches) and all(matches)


def split_keys(keys: Iterable[str]) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    """Split the keys of a flattened state dict.

    Returns the full keys of the state and those of the options, each by the parameter's name and
    then the rest of the key. Names may contain dots. The parameter of a state key is its longest
    prefix that has options, or else all but the last part of the key.
    """
    state: dict[str, dict[str, str]] = {}
    options: dict[str, dict[str, str]] = {}
    of_state: dict[str, str] = {}
    for full in keys:
        kind, _, text = full.partition(".")
        if kind == STATE:
            of_state[text] = full
        else:
            name, _, key = text.rpartition(".")
            options.setdefault(name, {})[key] = full
    for text, full in of_state.items():
        parts = text.split(".")
        names = [".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1)] or [""]
        name = next((name for name in names if name in options), names[0])
        state.setdefault(name, {})[text[len(name) + 1 :]] = full
    return state, options


def flattened(prefix: str, items: Mapping[Any, Any]) -> dict[str, Any]:
    """Return `items` with flattened keys, including the keys of inner dicts."""
    result: dict[str, Any] = {}
    for key, item in items.items():
        full = f"{prefix}.{key}"
        result |= flattened(full, item) if isinstance(item, dict) else {full: item}
    return result

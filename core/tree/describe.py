"""The description of a state tree: its objects and nodes, and the memory that may be deferred.

Tested in `tests/providers/test_tensor.py`.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from penstock.core.abc import (
    DescribeContext,
    Node,
    StateObject,
    StateProvider,
    places_of,
    ranks_node,
)
from penstock.core.abc.provider import claims_by_values, describes_together
from penstock.core.errors import (
    PenstockError,
    PluginError,
    TornSnapshotError,
    UnsupportedStateError,
)
from penstock.core.foreign import is_foreign, said
from penstock.core.limits import MAX_PATH_CHARS, MAX_SAVED_SEGMENTS
from penstock.core.markers import Leaves, PerRank
from penstock.core.tree.checks import (
    asked,
    check_path,
    check_spec,
    checked_entries,
    naming,
    plugin_error,
)
from penstock.core.tree.containers import (
    CONTAINERS,
    Found,
    Scan,
    dict_meta,
    key_segment,
    key_types,
    tuple_class,
)
from penstock.core.tree.known import Known
from penstock.core.tree.paths import paths_above, show_path, shown_place
from penstock.core.types import Kind, Replica, collide

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from penstock.core.abc import ByteSource, MemoryKey
    from penstock.core.tree.containers import Providers
    from penstock.core.types import ObjectPath, Role

T = TypeVar("T")

# A thread that sends tensors to another process moves each storage only once, and moves all
# storages of one message within a few attempts.
_MOST_MOVES = 100

# The most `PerRank` with an index. All ranks post each of these, and the size of a post is limited.
_MOST_SHARED = 64

log = logging.getLogger("penstock")

_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class Description:
    """A state tree as objects.

    Attributes:
        entries: Objects and nodes, in order; a node comes before the entries below it.
        deferrable: The paths of the objects that only steps of optimizers in this tree change.
        providers_used: Name and version of every provider used, sorted.
        own_paths: The paths at or below which each rank has its own objects.
        shared: Index and count of each `PerRank` with an index, by its shown path. Ranks with the
            same index store the same objects.
        seen: The objects of providers that implement more than `describe`: those that may claim
            memory, call memory unsteady, or name state that is left out.
        scan: The providers' objects in the tree.
    """

    entries: tuple[StateObject | Node, ...]
    deferrable: frozenset[ObjectPath]
    providers_used: tuple[tuple[str, int], ...]
    own_paths: tuple[ObjectPath, ...] = ()
    shared: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    seen: Sequence[Found] = ()
    scan: Scan | None = None


def describe_tree(
    state: object,
    *,
    providers: Providers,
    allow_pickle: bool,
    rank: int = 0,
    world_size: int = 1,
    known: Known | None = None,
) -> Description:
    """Describe `state` without copying tensors; plain values are frozen to bytes here.

    Args:
        state: The state tree.
        providers: The providers.
        allow_pickle: Whether values may be pickled.
        rank: The number of this rank.
        world_size: Number of ranks that save together.
        known: Results of the last save.

    Raises:
        UnsupportedStateError: Something in the tree cannot be saved; the error names its path.
        PluginError: Two providers claim one type, or one breaks its contract; the error names them.
        TornSnapshotError: Other threads keep moving tensors of the tree to other memory.
    """
    root = check_root(state)
    moved: list[str] = []
    for _ in range(_MOST_MOVES):
        scan = Scan(providers)
        context = _Describing(scan, providers, known or Known(), allow_pickle=allow_pickle)
        context.rank, context.world_size = rank, world_size
        description = _describe(root, scan, context)
        moved = [show_path(entry.path) for entry in _moved(description.entries)]
        if not moved:
            return description
    msg = (
        f"{moved[0]} moved to other memory (as torch.multiprocessing moves tensors that it sends) "
        f"each of the {_MOST_MOVES} times that save() described the state: save when no other "
        "thread sends its tensors"
    )
    raise TornSnapshotError(msg)


def _moved(entries: Iterable[StateObject | Node]) -> list[StateObject]:
    """Return the objects that have moved since they were described.

    Freed memory is reused. So two tensors that had the same address one after the other would look
    like one tensor.
    """
    objects = [entry for entry in entries if type(entry) is StateObject]
    places = places_of([entry.source for entry in objects])
    return [
        entry
        for entry, at in zip(objects, places, strict=True)
        if (at is None or at != entry.source.address) and _has_moved(entry.source, at)
    ]


def _has_moved(source: ByteSource, at: int | None) -> bool:
    if at is not None:
        return _is_elsewhere(source)
    pieces = source.pieces()
    return len(pieces) > 1 and any(map(_is_elsewhere, pieces))


def _is_elsewhere(source: ByteSource) -> bool:
    at, key = source.locate(), source.memory
    return at is not None and key is not None and at != key.storage + key.offset


def _describe(root: dict[Any, Any], scan: Scan, context: _Describing) -> Description:
    try:
        scan.is_container(root, ())
        entries = _checked(context.describe_root(root), context.known)
    except RecursionError as error:
        msg = "the state tree is nested too deeply to be saved: flatten the state"
        raise UnsupportedStateError(msg) from error
    used = sorted({(p.name, p.version) for p in context.used})
    own_paths, shared = tuple(context.own_paths), context.shared
    deferrable = _deferrable(context, entries)
    return Description(
        entries, deferrable, tuple(used), own_paths, shared, tuple(context.seen), scan
    )


def warn_of_forms(description: Description, providers: Providers) -> None:
    """Warn once about each form that `load` could not rebuild.

    A restore into a template needs no form, so the save is not refused.
    """
    for form in sorted({entry.form for entry in description.entries} - CONTAINERS):
        try:
            providers.for_form(form)
        except PluginError as error:
            if str(error) not in _warned:
                _warned.add(str(error))
                log.warning("this save can be restored, but load() would fail: %s", error)


def check_root(state: object) -> dict[Any, Any]:
    """Return the root of a state tree as a dict; the root itself if `load` can rebuild its class.

    Raises:
        UnsupportedStateError: The root is not a mapping, or cannot be read.
    """
    if type(state) in _DICTS:
        return cast("dict[Any, Any]", state)
    if not isinstance(state, Mapping):
        msg = (
            f"the state is a {type(state).__name__}: pass a dict of named parts, such as "
            '{"model": model, "optimizer": optimizer}'
        )
        raise UnsupportedStateError(msg)
    try:
        return dict(state)
    except Exception as error:
        msg = f"the state is a {type(state).__name__} that cannot be read: {said(error)}"
        raise UnsupportedStateError(msg) from error


_DICTS = (dict, OrderedDict, defaultdict)


@dataclass(slots=True)
class _Named:
    """A tensor's names in its modules, the same with the module's path in front, and its paths."""

    bare: list[str] = field(default_factory=list)
    prefixed: list[str] = field(default_factory=list)
    paths: list[ObjectPath] = field(default_factory=list)


class NameTable:
    """The names that the modules of a tree give to tensors.

    Args:
        scan: The scan of the tree.
        known: Results of the last save.
    """

    def __init__(self, scan: Scan, known: Known | None = None) -> None:
        self._scan = scan
        self._known = known or Known()
        self._named: dict[int, tuple[tuple[str, ...], tuple[ObjectPath, ...]]] | None = None
        self._held: list[object] = []  # the tensors, so that no other object gets their ids

    def names(self, tensor: object) -> Sequence[str]:
        """Return a tensor's names in its modules, then the same with the module's path in front."""
        return self._entry(tensor)[0]

    def paths(self, tensor: object) -> Sequence[ObjectPath]:
        """Return the paths of a tensor in the tree, below those of its modules."""
        return self._entry(tensor)[1]

    def _entry(self, tensor: object) -> tuple[tuple[str, ...], tuple[ObjectPath, ...]]:
        if self._named is None:
            parts = []
            for item in self._scan.found:
                with naming(item, "naming its parameters"):
                    parameters = list(item.provider.parameters(item.value))
                if parameters:
                    names, tensors = zip(*parameters, strict=True)
                    self._held += tensors
                    parts.append((item.path, names, [*map(id, tensors)]))
            self._named = self._known.recall("names", parts, lambda: _named(parts))
        return self._named.get(id(tensor), _NAMELESS)


_NAMELESS: tuple[tuple[str, ...], tuple[ObjectPath, ...]] = ((), ())


def _named(
    parts: Iterable[tuple[ObjectPath, Sequence[str], Sequence[int]]],
) -> dict[int, tuple[tuple[str, ...], tuple[ObjectPath, ...]]]:
    """Return the names and the paths of tensors by their ids."""
    table: dict[int, _Named] = {}
    for path, names, ids in parts:
        front = ".".join(path)
        for name, key in zip(names, ids, strict=True):
            entry = table.setdefault(key, _Named())
            full = f"{front}.{name}" if name else front
            entry.paths.append((*path, name))
            if (name or front) not in entry.bare:
                entry.bare.append(name or front)
            if full not in entry.prefixed and full not in entry.bare:
                entry.prefixed.append(full)
    return {
        key: ((*entry.bare, *entry.prefixed), tuple(entry.paths)) for key, entry in table.items()
    }


_DESCRIBING = "describing it"
_BY_PROVIDERS = "by providers"  # separates the places of providers from those of core
_LATE = ""  # form of a placeholder node for a value that is described last


class _Describing(DescribeContext):
    def __init__(
        self, scan: Scan, providers: Providers, known: Known, *, allow_pickle: bool
    ) -> None:
        self.allow_pickle = allow_pickle
        # The providers used, and whether each implements more than `describe`.
        self.used: dict[StateProvider, bool] = {}
        self.seen: list[Found] = []  # the objects of providers that do
        self.own_paths: list[ObjectPath] = []
        self.shared: dict[str, tuple[int, int]] = {}
        # Values that one call described together, and the object of each. Keeps the values alive,
        # so that their ids are not reused.
        self._together: list[tuple[Sequence[object], Sequence[StateObject]]] = []
        self._sources: dict[int, ByteSource] | None = None  # of `_together`, by the values' ids
        self._natures: dict[type, Literal["error", "keep"] | None] = {}
        self._scan = scan
        self.known = known
        self._names = NameTable(scan, known)
        self._late: dict[ObjectPath, object] = {}
        self._forms = CONTAINERS.union(*(p.forms for p in providers.all()))

    def describe_root(self, root: dict[Any, Any]) -> list[StateObject | Node]:
        entries = list(self._container(root, (), late=True))
        if not self._late:
            return entries
        every: list[StateObject | Node] = []
        for entry in entries:
            if entry.form == _LATE:
                every += self._entries(self._late[entry.path], entry.path)
            else:
                every.append(entry)
        return every

    def describe(
        self, value: object, path: ObjectPath, /, *, role: Role | None = None
    ) -> Iterator[StateObject | Node]:
        entries = self._entries(value, path)
        return iter(entries) if role is None else (_of_role(entry, role) for entry in entries)

    def describe_each(
        self, values: Sequence[object], paths: Sequence[ObjectPath], roles: Sequence[Role | None], /
    ) -> Sequence[Sequence[StateObject | Node]]:
        described: list[Sequence[StateObject | Node]] = [()] * len(values)
        alike: dict[type, list[int]] = {}
        for number, kind in enumerate(map(type, values)):
            alike.setdefault(kind, []).append(number)
        for kind, numbers in alike.items():
            provider = self._provider_of_all(kind)
            objects = None
            if provider is not None:
                some = [values[n] for n in numbers], [paths[n] for n in numbers]
                wanted = {roles[n] for n in numbers}
                self.role = wanted.pop() if len(wanted) == 1 else None
                try:
                    objects = self._all_at_once(provider, *some)[1]
                except PluginError:  # it cannot name the value's path; a call for one value can
                    objects = None
                finally:
                    self.role = None
            if objects is None:
                for n in numbers:
                    described[n] = tuple(self.describe(values[n], paths[n], role=roles[n]))
                continue
            for n, entry in zip(numbers, objects, strict=True):
                role = roles[n]
                described[n] = (entry if role is None else _of_role(entry, role),)
        return described

    def recall(self, place: Hashable, basis: object, make: Callable[[], T], /) -> T:
        return self.known.recall((_BY_PROVIDERS, place), basis, make)

    def parameter_names(self, tensor: object, /) -> Sequence[str]:
        return self._names.names(tensor)

    def sources_of(self, values: Sequence[object]) -> list[ByteSource] | None:
        """Return the sources of these values; None if `describe_all` did not describe them all."""
        if self._sources is None:
            self._sources = {}
            for some, objects in self._together:
                self._sources.update(zip(map(id, some), map(_source, objects), strict=True))
        sources = [*map(self._sources.get, map(id, values))]
        return None if None in sources else cast("list[ByteSource]", sources)

    def of_this_rank(self, path: ObjectPath, /) -> None:
        if self.world_size > 1:
            self.own_paths.append(path)

    def _is_own(self, path: ObjectPath) -> bool:
        return any(path[: len(own)] == own for own in self.own_paths)

    def _child(self, value: Any, path: ObjectPath, *, late: bool) -> Iterable[StateObject | Node]:
        """Describe a child of a container; `late` means that no provider owns the container."""
        provider = self._scan.provider_for(type(value))
        if late and provider is None and self._scan.is_container(value, path):
            return self._container(value, path, late=True)
        if late and provider is not None and provider.describes_last:
            self._late[path] = value
            return (Node(path, _LATE),)
        return self._entries(value, path)

    def _entries(self, value: Any, path: ObjectPath) -> Iterable[StateObject | Node]:
        if type(value) is PerRank:
            return self._per_rank(value, path)
        if type(value) is Leaves:
            return self._leaves(value, path)
        provider = self._scan.provider_for(type(value))
        if provider is None:
            if self._scan.is_container(value, path):
                return self._container(value, path, late=False)
            provider = self._scan.value_provider
        if self.world_size > 1:
            on_change = self._nature(provider, type(value))
            if on_change is not None and not self._is_own(path):
                return self._per_rank(PerRank(value, on_change=on_change), path)
        if self._implements_more(provider):
            self.seen.append(Found(path, provider, value))
        return self._described(provider, value, path)

    def _nature(self, provider: StateProvider, kind: type) -> Literal["error", "keep"] | None:
        """Return the provider's `on_other_ranks` for a type, cached; None if there is one rank."""
        if self.world_size == 1:
            return None
        if kind not in self._natures:
            self._natures[kind] = provider.on_other_ranks(kind)
        return self._natures[kind]

    def _implements_more(self, provider: StateProvider) -> bool:
        """Record that a provider is used; return whether it implements more than `describe`."""
        more = self.used.get(provider)
        if more is None:
            more = self.used[provider] = _implements_more(type(provider))
        return more

    def _per_rank(self, value: PerRank, path: ObjectPath) -> Iterator[StateObject | Node]:
        index, count = value.place(self.rank, self.world_size)
        yield ranks_node(path, count)
        replica = Replica()
        if self.world_size > 1 and not self._is_own(path):
            self.own_paths.append(path)
            if value.index is not None:
                shown = shown_place(path)
                self.shared[shown] = index, count
                if len(self.shared) > _MOST_SHARED:
                    msg = (
                        f"{show_path(path)} is one of more than {_MOST_SHARED} penstock.PerRank "
                        "with index=: put the values with the same index into one, as a dict"
                    )
                    raise UnsupportedStateError(msg)
                replica = Replica(place=shown)
        described = self._entries(value.value, (*path, str(index)))
        yield from described if self.world_size == 1 else _with_owner(described, replica)

    def _leaves(self, value: Leaves, path: ObjectPath) -> Iterator[StateObject | Node]:
        lists: set[tuple[str | int, ...]] = set()
        for keys, leaf in value.items.items():
            # Next to a leaf of this rank, so that a reader of the leaf reads the node, too.
            for depth, key in enumerate(keys):
                above = keys[:depth]
                if type(key) is int and above not in lists:
                    lists.add(above)
                    meta = {"length": value.lengths[above]}
                    yield Node((*path, *map(str, above)), "list", meta)
            yield from self._entries(leaf, (*path, *map(str, keys)))

    def _described(
        self, provider: StateProvider, value: Any, path: ObjectPath
    ) -> Iterable[StateObject | Node]:
        entries = asked(provider, path, _DESCRIBING, provider.describe, value, path, context=self)
        # Nearly every value is one object, and a generator would take longer than its provider.
        if type(entries) is tuple and len(entries) == 1:
            entry = entries[0]
            if type(entry) is StateObject and entry.path is path and entry.form in self._forms:
                return entries
        # One check for all: a module may have ten thousand tensors. Not if the provider is a third
        # party's: it may keep a node, and change its meta later.
        if (
            not is_foreign(provider)
            and type(entries) is list
            and set(map(type, entries)) <= _ENTRIES
        ):
            paths, forms = [*map(_path, entries)], [*map(_form, entries)]
            nodes = [entry for entry in entries if type(entry) is Node]
            basis = (provider.name, paths, forms, nodes)
            self.known.recall(
                (_DESCRIBING, path), basis, lambda: len([*self._each(provider, entries, path)])
            )
            return entries
        return self._each(provider, entries, path)

    def _each(
        self, provider: StateProvider, entries: Iterable[StateObject | Node], path: ObjectPath
    ) -> Iterator[StateObject | Node]:
        try:
            yield from checked_entries(provider, entries, path, self._forms)
        except (PenstockError, RecursionError):
            raise
        except Exception as error:
            raise plugin_error(provider, path, _DESCRIBING, error) from error

    def _container(
        self, value: Any, path: ObjectPath, *, late: bool
    ) -> Iterable[StateObject | Node]:
        if isinstance(value, dict):
            nodes, segments = self._dict(value, path)
            values = list(value.values())
        else:
            nodes = [_sequence_node(value, path)]
            values = list(value)
            segments = list(map(str, range(len(values))))
        paths = [(*path, segment) for segment in segments]
        kinds = set(map(type, values))
        provider = self._provider_of_all(*kinds) if len(kinds) == 1 else None
        if provider is None:
            return self._children(nodes, values, paths, late=late)
        entries, objects = self._all_at_once(provider, values, paths)
        return [*nodes, *(objects or self._each(provider, entries, path))]

    def _children(
        self, nodes: list[Node], values: list[Any], paths: list[ObjectPath], *, late: bool
    ) -> Iterator[StateObject | Node]:
        # A generator: nested lists would nest too many calls.
        yield from nodes
        for child, path in zip(values, paths, strict=True):
            yield from self._child(child, path, late=late)

    def _dict(self, value: dict[Any, Any], path: ObjectPath) -> tuple[list[Node], list[str]]:
        """Return the node of a dict, if it needs one, and the segments of its keys."""
        is_named = set(map(type, value)) <= {str}
        segments = [*value] if is_named else [key_segment(key, path) for key in value]
        if collide(value):
            msg = (
                f"{show_path(path)} has keys whose hashes collide too often to be built again: use "
                "other keys"
            )
            raise UnsupportedStateError(msg)
        meta = dict_meta(value, path)
        kinds = key_types(list(value))
        if kinds is not None:
            meta["keys"] = kinds
        if len(set(segments)) < len(segments):
            twice = next(s for s in segments if segments.count(s) > 1)
            msg = (
                f"{show_path(path) or 'the state'} has two keys that are both written {twice!r}: "
                "rename one of them"
            )
            raise UnsupportedStateError(msg)
        return [Node(path, "dict", meta)] if meta or not value else [], segments

    def _provider_of_all(self, kind: type) -> StateProvider | None:
        """Return the provider that describes all values of a type at once; None if none does."""
        provider = self._scan.provider_for(kind)
        if provider is None or provider.describes_last:
            return None
        if not describes_together(type(provider)) or self._implements_more(provider):
            return None
        return None if self._nature(provider, kind) is not None else provider

    def _all_at_once(
        self, provider: StateProvider, values: Sequence[Any], paths: Sequence[ObjectPath]
    ) -> tuple[Iterable[StateObject | Node], Sequence[StateObject] | None]:
        """Return a provider's entries, and again as objects if each value is one object."""
        above, ask = paths[0][:-1], provider.describe_all
        entries = asked(provider, above, _DESCRIBING, ask, values, paths, context=self)
        if (
            type(entries) is not list
            or len(entries) != len(paths)
            or set(map(type, entries)) != {StateObject}
            or not all(map(is_, map(_path, entries), paths))
            or not self._forms.issuperset(map(_form, entries))
        ):
            return entries, None
        if not is_foreign(provider):  # our providers' sources are the memory of the values
            self._together.append((values, entries))
        return entries, cast("list[StateObject]", entries)


def _sequence_node(value: Any, path: ObjectPath) -> Node:
    if isinstance(value, tuple):
        name = tuple_class(value, path)
        return Node(path, "tuple", {"length": len(value)} | ({"class": name} if name else {}))
    if type(value) is list:
        return Node(path, "list", {"length": len(value)})
    msg = (
        f"{show_path(path)} is a {type(value).__module__}.{type(value).__qualname__} "
        "that holds tensors or other objects: pass a plain list"
    )
    raise UnsupportedStateError(msg)


_ENTRIES = frozenset({StateObject, Node})
_path, _form, _source = map(attrgetter, ("path", "form", "source"))


def _of_role(entry: StateObject | Node, role: Role) -> StateObject | Node:
    if isinstance(entry, Node) or entry.role is role:
        return entry
    # Not `_replace`, which takes four times as long, for each tensor of an optimizer.
    return tuple.__new__(StateObject, (*entry[:4], role, *entry[5:]))


def _with_owner(
    entries: Iterable[StateObject | Node], replica: Replica
) -> Iterator[StateObject | Node]:
    """Yield entries with `replica` set on the objects that have none."""
    for entry in entries:
        if isinstance(entry, StateObject) and entry.replica is None:
            yield entry._replace(replica=replica)
        else:
            yield entry


def _checked(entries: Sequence[StateObject | Node], known: Known) -> tuple[StateObject | Node, ...]:
    """Tie objects of equal memory, and refuse two entries at one path."""
    paths = [entry.path for entry in entries]
    kinds = [*map(type, entries)]
    known.recall("paths", (paths, kinds), lambda: _check_paths(entries, paths))
    return tuple(_tied(entries))


def _check_paths(entries: Sequence[StateObject | Node], paths: Sequence[ObjectPath]) -> None:
    # Two calls for all paths: there may be a hundred thousand.
    lengths = max(map(len, map("".join, paths)), default=0)
    if max(map(len, paths), default=0) > MAX_SAVED_SEGMENTS or lengths > MAX_PATH_CHARS:
        for path in paths:
            check_path(path)
    unique = set(paths)
    if len(unique) < len(paths):
        twice = next(path for path, count in Counter(paths).items() if count > 1)
        msg = f"two parts of the state have the path {show_path(twice)}: rename one of them"
        raise UnsupportedStateError(msg)
    above = paths_above(unique) & unique
    for entry in entries if above else ():
        if entry.path in above and entry.path and isinstance(entry, StateObject):
            msg = (
                f"{show_path(entry.path)} is an object, but other parts of the state are below "
                "it: rename one of them"
            )
            raise UnsupportedStateError(msg)


def _tied(entries: Sequence[StateObject | Node]) -> list[StateObject | Node]:
    """Check the specs of objects, and tie those of equal memory."""
    objects = [entry for entry in entries if type(entry) is StateObject]
    # Most tensors share their spec with others, and nearly all are alone at their address: these
    # need no key of their memory.
    for spec, path in {id(o.spec): (o.spec, o.path) for o in reversed(objects)}.values():
        check_spec(spec, path)
    tensor = Kind.TENSOR
    addresses = [o.source.address if o.kind is tensor else None for o in objects]
    uses = Counter(addresses)
    uses[None] = uses[0] = 2
    owners: dict[tuple[object, ...], ObjectPath] = {}
    tied: dict[int, StateObject] = {}
    for entry, address in zip(objects, addresses, strict=True):
        if uses[address] > 1:
            first = _owner(entry, owners)
            if first is not entry.path:
                tied[id(entry)] = entry._replace(same_as=first)
    return [tied.get(id(entry), entry) for entry in entries] if tied else [*entries]


def _owner(entry: StateObject, owners: dict[tuple[object, ...], ObjectPath]) -> ObjectPath:
    """Return the path of the first object with the same memory."""
    memory: object = entry.source.memory
    if memory is None:
        memory = tuple(piece.memory for piece in entry.source.pieces())
        if None in memory:
            return entry.path
    key: tuple[object, ...] = (memory, entry.form)
    if entry.replica is not None:  # equal memory may be regions of two tensors
        key = (*key, entry.spec.shape, entry.regions)
    return owners.setdefault(key, entry.path)


def _implements_more(kind: type[StateProvider]) -> bool:
    """Return whether a provider class implements more than `describe`, such as `left_out`."""
    return (
        kind.claimed_memory is not StateProvider.claimed_memory
        or kind.unsteady_memory is not StateProvider.unsteady_memory
        or kind.left_out is not StateProvider.left_out
    )


def _deferrable(
    context: _Describing, entries: Iterable[StateObject | Node]
) -> frozenset[ObjectPath]:
    """Return the paths of the tensors whose memory is claimed and steady."""
    claimed: set[MemoryKey] = set()
    sources: list[ByteSource] = []  # claimed too, but without a key of their memory, for speed
    for item in context.seen:
        with naming(item, "claiming its memory"):
            by_values = claims_by_values(type(item.provider))
            values = item.provider.claimed_values(item.value) if by_values else None
            described = None if values is None else context.sources_of(values)
            if described is None:
                claimed.update(item.provider.claimed_memory(item.value))
            else:
                sources += described
    unsteady: set[tuple[str, int]] = set()
    for item in context.seen if claimed or sources else ():
        with naming(item, "naming its unsteady memory"):
            unsteady.update(item.provider.unsteady_memory(item.value))
    if unsteady:
        keys = claimed.union(source.memory for source in sources if source.memory is not None)
        claimed, sources = {key for key in keys if (key.device, key.storage) not in unsteady}, []
    steady = {id(source) for source in sources if source.nbytes}
    tensors = [e for e in entries if type(e) is StateObject and e.kind is Kind.TENSOR]
    others = [e for e in tensors if id(e.source) not in steady]
    # Another tensor may have the same memory: another name of the tensor, or a view of it.
    near = {e.source.address for e in others}
    claimed.update(s.memory for s in sources if s.address in near and s.memory is not None)
    paths = [e.path for e in tensors if id(e.source) in steady]
    paths += [e.path for e in others if claimed and e.source.memory in claimed]
    return frozenset(paths)

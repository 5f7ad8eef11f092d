"""Plans the restore of a stored tree into a template, and finds targets that share memory.

Two views of one tensor, such as `w` and `w[5]`, are stored as two objects. If both were read
directly into place, the later read would silently win, or intact bytes would look damaged. So such
targets are filled only if the stored bytes agree about the shared memory.

Tested in `tests/core/tree/test_place.py`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import MutableMapping
from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from penstock.core.abc import Placement, StateObject, Target, ranks_of
from penstock.core.abc.provider import places_together
from penstock.core.errors import PluginError, RestoreError, UnsupportedStateError
from penstock.core.markers import PerRank
from penstock.core.tree.checks import asked, broken_contract, checked_placement
from penstock.core.tree.containers import CONTAINERS, Scan, is_nothing, key_segment
from penstock.core.tree.describe import NameTable, check_root, describe_tree
from penstock.core.tree.rebuild import Rebuilding, are_disjoint, settled
from penstock.core.types import show_path, with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.core.abc import MemoryKey, Node, StateProvider
    from penstock.core.tree.containers import Providers
    from penstock.core.tree.patterns import SegmentTest
    from penstock.core.tree.stored_tree import StoredTree
    from penstock.core.types import ObjectPath

log = logging.getLogger("penstock")

_PLANNING = "planning its restore"
_TUPLE = "a tuple"
_READ_ONLY = "a read-only mapping"
_ADVICE = {_TUPLE: "make it a list", _READ_ONLY: "pass a dict"}
"""Advice for containers that accept no new values."""

_Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_NAMED = 50


_REMEDY = (
    "put it into penstock.PerRank(..., on_change=), where 'keep' keeps the live value, and a "
    "function gets all stored values and returns the new one; or leave it out by exclude="
)


_APART = "give each such object its own PerRank"


def _is_stateful(value: object) -> bool:
    return callable(getattr(type(value), "load_state_dict", None))


def _holds_stateful(value: object) -> bool:
    """Return whether a container holds an object with `load_state_dict`, at any depth."""
    if isinstance(value, dict | list | tuple):
        children = value.values() if isinstance(value, dict) else value
        return any(_is_stateful(child) or _holds_stateful(child) for child in children)
    return False


def _with_value(marker: PerRank, value: object) -> PerRank:
    return marker if value is marker.value else replace(marker, value=value)


class Placing(Rebuilding):
    """Plans one restore into a template.

    Args:
        providers: The providers, each of which plans the objects that it claims.
        stored: The stored tree.
        selected: Returns whether the object at a path of the template is selected.
        allow_pickle: Whether stored pickles may be loaded.
        cast: Whether stored floats may be converted to the template's dtypes.
        below: Returns which segments directly below a path lead to a selected path, like
            `Selection.below`. The rest of the template is not visited.
    """

    def __init__(
        self,
        providers: Providers,
        stored: StoredTree,
        selected: Callable[[ObjectPath], bool],
        *,
        allow_pickle: bool,
        cast: bool = False,
        below: Callable[[ObjectPath], SegmentTest | bool] = lambda _: True,
    ) -> None:
        super().__init__(providers, stored, selected, allow_pickle=allow_pickle, cast=cast)
        self._everything = below(()) is True
        self.scan = Scan(providers, thorough=self._everything)
        self._names: NameTable | None = None
        self._below = cache(below)
        self.of_ranks = False
        """Whether several ranks saved or restore, so that others may have what this rank lacks."""
        self._own: list[ObjectPath] = []  # paths below which each rank has its own objects
        self._root: dict[Any, Any] = {}

    def place_tree(self, state: object) -> Placement:
        """Plan the restore of the selected objects into the template `state`.

        The result is already compared: `targets` fit the stored objects, `missing` lists objects
        that only the template has, and `problems` lists every other difference. Targets of tied
        objects share one sink. `finish()` assigns the values, sets random state last, and returns
        `state`. Before that, only the memory of targets changes.

        Raises:
            UnsupportedStateError: The template, or a stored value, cannot be handled.
            FormatError: A stored value cannot be decoded.
        """
        root = self._root = check_root(state)
        try:
            if self._everything:
                self.scan.is_container(root, ())
                self._names = NameTable(self.scan)
            placement = self._place_root(state, root)
        except RecursionError as error:
            msg = "the state tree is nested too deeply to be restored: flatten the template"
            raise UnsupportedStateError(msg) from error
        return settled(self._compared(placement))

    # The contract of `PlaceContext`, which providers call while they plan.

    def place(self, value: object, path: ObjectPath, /) -> Placement:
        """Plan the restore of a child into `value`, if anything at or below `path` is selected."""
        if not self._leads_on(path):
            return Placement()
        if type(value) is PerRank:
            return self._place_per_rank(value, path)
        provider = self.scan.provider_for(type(value))
        if provider is None:
            return self._place_plain(value, path)
        is_own = self._own and self._is_own(path)
        on_change = None if is_own else provider.on_other_ranks(type(value))
        if on_change is not None:
            return self._place_by_nature(PerRank(value, on_change=on_change), path)
        return self._place_by_provider(provider, value, path)

    def parameter_names(self, tensor: object, /) -> Sequence[str]:
        """Return the names that modules of the template give to `tensor`, best first."""
        return self._name_table().names(tensor)

    def tied_names(self, tensor: object, /) -> Sequence[str]:
        """Return the names of the objects that the checkpoint ties to `tensor`."""
        paths = self._name_table().paths(tensor) if self._aliases else ()
        names: dict[str, None] = {}
        for path in paths:
            first = self._aliases.get(path, path)
            alike = [first, *(tied for tied, owner in self._aliases.items() if owner == first)]
            others = [tied for tied in alike if tied != path] if len(alike) > 1 else []
            names |= dict.fromkeys(tied[-1] for tied in others)
            names |= dict.fromkeys(".".join(tied) for tied in others)
        return [*names]

    def _name_table(self) -> NameTable:
        if self._names is None:
            # An optimizer may name any module of the template, selected or not.
            scan = Scan(self._providers)
            scan.is_container(self._root, ())
            self._names = NameTable(scan)
        return self._names

    def _leads_on(self, path: ObjectPath) -> bool:
        """Return whether something at or below a path of the template may be selected."""
        if self._everything or not path:
            return True
        test = self._below(path[:-1])
        return test if isinstance(test, bool) else test(path[-1])

    def _place_root(self, state: object, root: dict[Any, Any]) -> Placement:
        """Plan the restore into the root; also assign values to a mapping that is not a dict."""
        if root is state:
            return self._place_container(root, ())
        if not isinstance(state, MutableMapping):
            return self._place_container(root, (), fixed=_READ_ONLY)
        before = dict(root)
        placement = self._place_container(root, ())
        finish = placement.finish

        def assign() -> object:
            if finish is not None:
                finish()
            for key, value in root.items():
                if value is not before[key]:
                    state[key] = value
            return state

        placement.finish = assign
        return placement

    def _place_plain(self, value: object, path: ObjectPath) -> Placement:
        """Plan the restore into a container or value that no provider claims as an object."""
        node = self.node(path)
        if isinstance(value, dict) and node is not None and node.form not in CONTAINERS:
            placed = self._place_dict(value, node)
            if placed is not None:
                return placed
        if self.scan.is_container(value, path):
            return self._place_container(value, path)
        return self._place_by_provider(self.scan.value_provider, value, path)

    def _place_container(
        self, value: Any, path: ObjectPath, *, fixed: str | None = None
    ) -> Placement:
        """Plan the restore into a dict, list or tuple; `fixed` names a kind with fixed items."""
        result = Placement()
        if self._is_other_kind(value, path, result):
            return result
        children = self._children_of(value, path)
        targets = self._targets_of_all(children)
        if targets is not None:
            return Placement(targets, finish=lambda: value)
        owner: Any = value
        fixed = _TUPLE if isinstance(value, tuple) else fixed
        finishes: list[tuple[Any, object, Callable[[], object]]] = []
        for key, here, child in children:
            placed = self.place(child, here)
            result.absorb(placed)
            if placed.finish is None:
                continue
            if fixed and (placed.replaces or here in placed.values):
                result.problems += self._fixed(child, here, placed, fixed)
            else:
                finishes.append((key, child, placed.finish))

        def finish() -> object:
            for key, child, call in finishes:
                new = call()
                if new is child:
                    continue
                if fixed:
                    msg = f"{show_path((*path, str(key)))} is in {fixed} and cannot be replaced"
                    raise RestoreError(msg)
                owner[key] = new
            return owner

        result.finish = finish
        return result

    def _targets_of_all(
        self, children: Sequence[tuple[Any, ObjectPath, Any]]
    ) -> list[Target] | None:
        """Return the targets of children of one type, or None if its provider plans them singly."""
        kinds = {type(child) for *_, child in children}
        if len(kinds) != 1 or PerRank in kinds:
            return None
        (kind,) = kinds
        provider = self.scan.provider_for(kind)
        if (
            provider is None
            or not places_together(type(provider))
            or provider.on_other_ranks(kind) is not None
        ):
            return None
        values, paths = [child for *_, child in children], [path for _, path, _ in children]
        self._check_version(provider, paths[0])
        above = paths[0][:-1]
        targets = asked(provider, above, _PLANNING, provider.place_all, values, paths, context=self)
        if targets is None:
            return None
        if type(targets) is not list or {*map(type, targets)} - {Target}:
            msg = f"place_all returned {type(targets).__name__}, not a list that holds only Targets"
            raise broken_contract(provider, above, msg)
        chosen = list(filter(self.selected, paths))
        if [target.path for target in targets] != chosen:
            msg = (
                f"place_all returned {len(targets)} targets, but must return one for each of the "
                f"{len(chosen)} selected paths, in their order"
            )
            raise broken_contract(provider, above, msg)
        return targets

    def _is_above(self, path: ObjectPath) -> bool:
        """Return whether a container or node, but no object, is stored at a path."""
        if path in self._all:
            return False
        return path in self._children or self.node(path) is not None

    def _children_of(self, value: Any, path: ObjectPath) -> list[tuple[Any, ObjectPath, Any]]:
        """Return keys, paths and values of a container's items that may be selected."""
        pairs: Iterable[tuple[Any, Any]]
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        test = self._below(path)
        if test is False:
            return []
        if test is not True:
            # Filtered first: a container may have a million items and only one selected.
            pairs = [(k, child) for k, child in pairs if type(k) is not str or test(k)]
        children = [(key, (*path, key_segment(key, path)), child) for key, child in pairs]
        if test is not True:
            children = [item for item in children if test(item[1][-1])]
        if not self.of_ranks:
            return children
        # If this rank has nothing at a path, the objects stored below it belong to other ranks.
        return [item for item in children if not (is_nothing(item[2]) and self._is_above(item[1]))]

    def _fixed(self, child: object, path: ObjectPath, placed: Placement, fixed: str) -> list[str]:
        """Return the problems of a value that cannot be replaced; none if it is already equal."""
        shown = show_path(path)
        if placed.replaces:
            problem = (
                f"{shown} is a {type(child).__name__} that cannot be written in place, and is in "
                f"{fixed}, where it cannot be replaced: make it writable, or exclude it"
            )
            return [problem]
        if self._is_stored(child, path):
            return []
        return [f"{shown} is in {fixed} and differs from the stored value: {_ADVICE[fixed]}"]

    def _is_stored(self, value: object, path: ObjectPath) -> bool:
        """Return whether `value` has the stored value's bytes (`nan == nan`, `1 != True`)."""
        stored = self._chosen[path]
        try:
            tree = {"": value}
            described = describe_tree(
                tree, providers=self._providers, allow_pickle=self.allow_pickle
            )
        except UnsupportedStateError:
            return False
        (entry,) = described.entries
        assert isinstance(entry, StateObject)
        frozen = bytes(entry.source.view() or b"")
        return entry.form == stored.form and frozen == self.value_bytes(path)

    def _is_own(self, path: ObjectPath) -> bool:
        return any(path[: len(own)] == own for own in self._own)

    def _place_by_nature(self, value: PerRank, path: ObjectPath) -> Placement:
        """Plan the restore of a value that differs between ranks, although the user did not say so.

        Its type says so, such as the type of a random generator.
        """
        result = self._place_per_rank(value, path)
        finish: Any = result.finish
        if finish is not None:
            result.finish = lambda: finish().value
        return result

    def _place_per_rank(self, value: PerRank, path: ObjectPath) -> Placement:
        """Plan the restore of a value that each rank stored separately."""
        index, count = value.place(self.rank, self.world_size)
        stored = ranks_of(self.node(path))
        if stored == count or (stored is None and count == 1):
            at = path if stored is None else (*path, str(index))
            self._own.append(at)
            result = self.place(value.value, at)
            self._own.pop()
            inner = result.finish
            result.finish = lambda: value if inner is None else _with_value(value, inner())
            others = [] if stored is None else [n for n in range(stored) if n != index]
            result.passed_over += [(*path, str(number)) for number in others]
            return result
        if not self.children(path) and self.stored(path) is None:
            return Placement(missing=[path] if self.selected(path) else [])
        paths = [path] if stored is None else [(*path, str(number)) for number in range(stored)]
        return self._place_of_other_ranks(value, path, paths, count)

    def _place_of_other_ranks(
        self, value: PerRank, path: ObjectPath, stored: Sequence[ObjectPath], count: int
    ) -> Placement:
        """Plan the restore, by `on_change`, of a value stored for another number of ranks.

        If the value's `PerRank` has an index, this is the number of indices instead.
        """
        singular, plural = ("rank", "ranks") if value.index is None else ("index", "indices")
        number = f"{len(stored)} {plural if len(stored) > 1 else singular}"
        shown = f"{show_path(path)} is stored for {number}, but this job has {count}"
        if value.on_change == "keep":
            level = logging.INFO if self.rank else logging.WARNING  # one warning is enough
            log.log(level, "%s: it is left unchanged", shown)
            return Placement(finish=lambda: value, passed_over=[path])
        if not callable(value.on_change):
            return Placement(problems=[f"{shown}: {_REMEDY}"])
        if _holds_stateful(value.value):
            held = "an object with load_state_dict inside of a container"
            return Placement(problems=[f"{shown}, and on_change cannot load {held}: {_APART}"])
        result, choose = Placement(), value.on_change
        built = [self.rebuild(at) for at in stored]
        for each in built:
            result.absorb(each)

        def finish() -> object:
            chosen = choose([None if each.finish is None else each.finish() for each in built])
            live = value.value
            if chosen is live or not _is_stateful(live):
                return replace(value, value=chosen)
            # Replacing it in the state would leave the object that training uses unchanged.
            try:
                live.load_state_dict(chosen)
            except Exception as error:
                msg = (
                    f"{show_path(path)}: load_state_dict failed on the result of on_change: "
                    f"{type(error).__name__}: {error}. The object's state is undefined."
                )
                raise RestoreError(msg) from error
            return value

        result.finish = finish
        return result

    def _is_other_kind(self, value: object, path: ObjectPath, result: Placement) -> bool:
        """Return whether the checkpoint has another kind of object here, and report it."""
        shown = show_path(path)
        here = type(value).__name__
        node = self._nodes.get(path)
        if path in self._chosen:
            kind = self._chosen[path].kind
            result.problems.append(
                f"{shown} is stored as one {kind}, but is {with_article(here)} of objects in the "
                "template"
            )
            return True
        if node is None or not path:
            return False
        form = (
            "dict" if isinstance(value, dict) else "tuple" if isinstance(value, tuple) else "list"
        )
        if node.form in CONTAINERS and node.form != form and path in self._children:
            result.problems.append(
                f"{shown} is stored as a {node.form}, but is {with_article(here)} in the template"
            )
            return True
        return False

    def _place_dict(self, value: dict[Any, Any], node: Node) -> Placement | None:
        """Plan the restore of a stored object into a dict, if its provider can."""
        try:
            provider = self._provider_for_form(node)
        except PluginError:  # the items of the dict can be restored without it
            return None
        path = node.path
        placed = asked(provider, path, _PLANNING, provider.place_dict, value, node, context=self)
        return None if placed is None else checked_placement(placed, provider, path, _PLANNING)

    def _place_by_provider(
        self, provider: StateProvider, value: object, path: ObjectPath
    ) -> Placement:
        self._check_version(provider, path)
        placed = asked(provider, path, _PLANNING, provider.place, value, path, context=self)
        return checked_placement(placed, provider, path, _PLANNING)


def overlapping(targets: Iterable[Target]) -> list[list[Target]]:
    """Group the targets whose memory may overlap; other targets are in no group.

    Compares only first and last addresses, so the columns of one matrix are also a group.
    """
    targets = list(targets)
    if are_disjoint(targets):
        return []
    spans: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for number, target in enumerate(targets):
        memory = target.sink.memory
        if memory is not None:
            spans[memory.device].append((*_span(memory, target.spec.itemsize), number))
    groups: list[list[Target]] = []
    for sorted_spans in spans.values():
        sorted_spans.sort()
        if all(stop <= start for (_, stop, _), (start, _, _) in pairwise(sorted_spans)):
            continue  # as in nearly every state
        group: list[Target] = []
        reach = -1
        for start, stop, number in sorted_spans:
            if start >= reach:
                groups.append(group)
                group = []
            group.append(targets[number])
            reach = max(reach, stop)
        groups.append(group)
    return [group for group in groups if len(group) > 1]


def disagreements(group: Sequence[Target], stored: Mapping[int, memoryview]) -> list[str]:
    """Return why `group` cannot be filled with the bytes in `stored`, as sentences.

    `stored` has the bytes of each target by the id of its sink.

    All bytes are written into a scratch copy of the memory that they span. A target whose bytes are
    not there afterwards was overwritten by another. Time and memory are linear in the group.
    """
    contents = {id(t.sink): _as_memory(t, stored[id(t.sink)]) for t in group}
    losers = _overwritten(group, contents)
    problems = []
    for loser in losers:
        other = next(
            (t for t in group if t is not loser and _overwritten([loser, t], contents)), None
        )
        if other is None or other.path == loser.path:
            problems.append(
                f"{show_path(loser.path)} overlaps itself in the template, but different values "
                "are stored for one place in its memory: restore into a contiguous tensor"
            )
        else:
            problems.append(
                f"{show_path(loser.path)} and {show_path(other.path)} share memory in the "
                "template, but different values are stored for it: select one of them, or separate "
                "them"
            )
        if len(problems) == _NAMED:  # enough: finding each pair takes a pass over the group
            break
    return problems


def _overwritten(group: Sequence[Target], contents: Mapping[int, _Bytes]) -> list[Target]:
    spans = [_span(t.sink.memory, t.spec.itemsize) for t in group if t.sink.memory is not None]
    low, high = min(start for start, _ in spans), max(stop for _, stop in spans)
    scratch = np.empty(high - low, np.uint8)
    views = [_view(scratch, t, low) for t in group]
    for target, view in zip(group, views, strict=True):
        view[...] = contents[id(target.sink)]
    return [
        target
        for target, view in zip(group, views, strict=True)
        if not np.array_equal(view, contents[id(target.sink)])
    ]


def _view(scratch: _Bytes, target: Target, low: int) -> _Bytes:
    memory, size = target.sink.memory, target.spec.itemsize
    assert memory is not None
    shape, strides = (*memory.shape, size), (*memory.strides, 1)
    return np.ndarray(shape, np.uint8, scratch, _start(memory) - low, strides)


def _as_memory(target: Target, data: memoryview) -> _Bytes:
    """Return the bytes that the memory must hold: some torch views flip signs when read."""
    memory, size = target.sink.memory, target.spec.itemsize
    assert memory is not None
    parts = 2 if memory.dtype.startswith("complex") else 1
    raw = np.frombuffer(data, np.uint8).reshape(-1, parts, size // parts)
    flags = memory.dtype.removeprefix("numpy ").split()[1:]
    if flags:
        raw = raw.copy()
    if "neg" in flags:
        raw[:, :, -1] ^= 0x80
    if "conj" in flags:
        raw[:, 1, -1] ^= 0x80
    return raw.reshape(*memory.shape, size)


def _start(memory: MemoryKey) -> int:
    return memory.storage + memory.offset


def _span(memory: MemoryKey, itemsize: int) -> tuple[int, int]:
    """Return the first address of the memory, and the address after its last byte."""
    first, last = _reach(memory.shape, memory.strides)
    start = _start(memory)
    return start + first, start + last + itemsize


@lru_cache(maxsize=4096)  # thousands of tensors have few layouts
def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """Return the lowest and the highest address of an element, relative to the first."""
    steps = [stride * (size - 1) for size, stride in zip(shape, strides, strict=True)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
